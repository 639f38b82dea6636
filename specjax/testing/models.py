"""Models for tests: a table whose law can be written down, and tiny random decoders of every family."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import KVCache
from specjax.errors import InputError
from specjax.models.config import ModelConfig
from specjax.models.decoder import Decoder
from specjax.models.interface import Output
from specjax.models.target import Target
from specjax.sampling import Sampling
from specjax.state import static

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TableModel:
    """A target whose logits are a table keyed by the last one or two tokens.

    It finds the previous token as a transformer would, by position, in what the cache and the block's mask show it: its
    keys and values are (token, position). A token that does not see exactly one token at each position up to its own,
    or a cache slot that holds another position than its own, makes the logits NaN, which the engine reports. So a wrong
    mask, position, commit or rollback never goes unnoticed.

    Attributes:
        table: `[V, V]`, logits after a token, or `[V, V, V]`, after two (the earlier one first; a text's first token
            counts as its own predecessor).
        max_positions: the context.
    """

    table: Float[Array, "*V V"]
    max_positions: int = static(default=4096)

    @classmethod
    def random(cls, vocab_size: int = 4, order: int = 2, seed: int = 0, scale: float = 1.5) -> "TableModel":
        """Normal logits with standard deviation `scale`, keyed by the last `order` tokens (1 or 2)."""
        shape = (vocab_size,) * (order + 1)
        return cls(jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32))

    @property
    def vocab_size(self) -> int:
        return self.table.shape[-1]

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T T"],
        cache: KVCache | None = None,
        length: Int[Array, "B"] | None = None,
        features: Sequence[str] = (),
    ) -> Output:
        """Forward over a block. The hidden state, and every feature, is (previous token, token, all is well)."""
        before = mask & (positions[:, None, :] == positions[:, :, None] - 1)
        previous = jnp.where(before, tokens[:, None, :], 0).sum(-1)
        number = before.sum(-1)
        places = jnp.where(mask, positions[:, None, :], 0)
        seen = jnp.stack([mask.sum(-1), places.sum(-1), (places**2).sum(-1)])
        sound = jnp.ones(tokens.shape, bool)
        if cache is not None:
            assert length is not None
            slots = jnp.arange(cache.capacity)
            real = slots < length[:, None]
            cached_token, cached_position = cache.keys[0][:, 0, :, 0], cache.keys[0][:, 0, :, 1]
            same = (cached_position == slots) & (cache.keys[0] == cache.values[0]).all((1, 3))
            sound = sound & (same | ~real).all(-1, keepdims=True)
            before = real[:, None, :] & (slots == positions[:, :, None] - 1)
            previous = previous + jnp.where(before, cached_token[:, None, :], 0).sum(-1).astype(previous.dtype)
            number = number + before.sum(-1)
            places = jnp.where(real, slots, 0)[:, None, :]
            seen = seen + jnp.stack([real.sum(-1, keepdims=True), places.sum(-1), (places**2).sum(-1)])
        p = positions
        half, odd = p * (p + 1) // 2, 2 * p + 1  # one of the two is divisible by 3: divide before the product wraps
        squares = jnp.where(half % 3 == 0, half // 3 * odd, half * (odd // 3))
        expected = jnp.stack([p + 1, half, squares])
        sound = sound & (seen == expected).all(0) & (number == (p > 0))
        previous = jnp.where(p > 0, previous, tokens)
        hidden = jnp.stack([previous, tokens, sound], axis=-1).astype(jnp.float32)
        key = jnp.stack([tokens, positions], axis=-1).astype(jnp.float32)[:, None]
        return Output(hidden, KVCache((key,), (key,)), dict.fromkeys(features, hidden))

    def logits(self, hidden: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        index = hidden.astype(jnp.int32)
        row = self.table[index[..., 1]] if self.table.ndim == 2 else self.table[index[..., 0], index[..., 1]]
        return jnp.where(index[..., 2:] == 1, row, jnp.nan)

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache.zeros(batch, capacity, [(1, 2)], jnp.float32)

    def exact_law(self, prompt: Sequence[int], n: int, sampling: Sampling | None = None) -> Float[np.ndarray, "..."]:
        """The exact law of the first `n` tokens after a prompt, `[V] * n`; see `testing.exact_law`."""
        from specjax.testing.exact import exact_law

        return exact_law(self, prompt, n, sampling)


def tiny_config(family: str = "llama", vocab_size: int = 64, max_positions: int = 512, **changes: Any) -> ModelConfig:
    """The configuration of a tiny model of a family, with what real ones have: grouped queries, head_dim unequal to
    hidden_size / heads, a window of 8 tokens where the family has one, experts for "qwen3_moe".

    Args:
        changes: fields of `ModelConfig` to replace.
    """
    if family not in FAMILIES:
        raise InputError(f"unknown family {family!r}: expected one of {', '.join(FAMILIES)}")
    raw: dict[str, Any] = {
        "model_type": "gemma3_text" if family == "gemma3" else family,
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": family == "llama",  # tied and scaled, a random Gemma 3 only repeats its last token
    }
    more: dict[str, dict[str, Any]] = {
        "mistral": {"sliding_window": 8},
        "gemma3": {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 12,
        },
        "qwen3_moe": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    }
    return replace(ModelConfig.from_hf(raw | more.get(family, {}), "tiny config"), **changes)


def tiny_model(
    family: str = "llama", seed: int = 0, dtype: Any = jnp.float32, scale: float = 0.3, **config: Any
) -> Decoder:
    """A random decoder of `tiny_config(family, **config)`, norm weights included.

    At the default scale its greedy text is varied, and its two best logits are rarely close.
    """
    return Decoder.random(tiny_config(family, **config), seed, dtype, scale)


def tiny_target(model: Any = None, eos: Sequence[int] = (), tokenizer: Any = None, name: str = "tiny") -> Target:
    """A model (default: `tiny_model()`) as a `Target`, as `specjax.load` returns it.

    Args:
        tokenizer: for prompts and stops as text; for example `TinyTokenizer()`.
    """
    model = tiny_model() if model is None else model
    cache = jax.eval_shape(lambda: model.init_cache(1, 1))
    return Target(model, tokenizer, name, dtype=str(cache.keys[0].dtype), eos_token_ids=tuple(eos))
