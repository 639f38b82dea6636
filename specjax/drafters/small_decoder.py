"""A small decoder made of some of the target's layers: the draft model to distil where nobody published one.

    network = SmallDecoder.start(target.model, layers=(0, 14, 29), draft_tokens=frequent)
    drafter = specjax.DraftModel(network, num_draft_tokens=4)

It reads the target's own token embeddings, as EAGLE's networks do: they are handed to it with every call, so that they
are neither copied nor trained nor saved. What is left to read for a drafted token is a few layers and a head over the
tokens worth drafting.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import KVCache
from specjax.drafters.eagle_networks import random_make
from specjax.drafters.vocabulary import DraftVocabulary, Scores, offsets
from specjax.errors import InputError
from specjax.models import layers as F
from specjax.models.config import ModelConfig
from specjax.models.decoder import Decoder, Layer, Make, View, product
from specjax.models.interface import Output, TargetModel
from specjax.models.sharding import place


@dataclass(frozen=True)
class SmallDecoderConfig:
    """What a small decoder is.

    Attributes:
        layers: its layers, norm and rope. Width and vocabulary are the target's.
        draft_vocab_size: tokens that can be drafted, read by a head of its own; None for all, by the target's head.
    """

    layers: ModelConfig
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.layers.vocab_size:
            given, most = self.draft_vocab_size, self.layers.vocab_size
            raise InputError(f"a draft vocabulary of {given} tokens: expected 1 to {most}, as many as the target has")

    @classmethod
    def of(
        cls, target: ModelConfig, layers: Sequence[int], draft_vocab_size: int | None = None
    ) -> "SmallDecoderConfig":
        """Layers such as those of the target, by their numbers there.

        Raises:
            InputError: no layers, or one that the target does not have.
        """
        if not layers or any(not 0 <= i < target.num_layers for i in layers):
            raise InputError(
                f"layers: expected some of the target's, 0 to {target.num_layers - 1}, such as "
                f"(0, {target.num_layers - 1}); got {tuple(layers)}"
            )
        moe = target.moe and replace(target.moe, layers=tuple(target.moe.layers[i] for i in layers))
        windows = tuple(target.windows[i] for i in layers)
        return cls(replace(target, num_layers=len(layers), windows=windows, moe=moe), draft_vocab_size)


class SmallDecoder(DraftVocabulary, nnx.Module):
    """Decoder layers and a final norm of its own, between the target's embeddings and a head."""

    def __init__(self, config: SmallDecoderConfig, make: Make, d2t: np.ndarray | None = None):
        """Build with parameters from `make(path, shape, logical axes)`: `layers.i.…`, `norm`, and `head [Vd, M]` where
        there is a draft vocabulary.

        Args:
            d2t: offsets: draft id i stands for the target's id `i + d2t[i]`. May only be left out where the draft
                vocabulary is the target's.
        """
        self.config = config
        c = config.layers
        self.layers = nnx.List([Layer(c, i, make) for i in range(c.num_layers)])
        self.norm = nnx.Param(make("norm", (c.hidden_size,), ("model",)))
        if config.draft_vocab_size is not None:
            self.head = nnx.Param(make("head", (config.draft_vocab_size, c.hidden_size), ("vocab", "model")))
        size = c.vocab_size if config.draft_vocab_size is None else config.draft_vocab_size
        self.set_vocabulary(d2t, size, c.vocab_size)

    def __call__(
        self,
        embedded: Float[Array, "B T M"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T T"],
        cache: KVCache | None = None,
        length: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B T M"], KVCache]:
        """Hidden states after the final norm, and the block's keys and values; arguments as `TargetModel`'s, but for
        the tokens, which come as the target's embeddings of them.
        """
        x = embedded.astype(self.dtype)
        view = View.make(self.config.layers, positions, mask, cache, length)
        keys, values = [], []
        for i, layer in enumerate(self.layers):
            x, key, value = layer(x, view, None if cache is None else (cache.keys[i], cache.values[i]))
            keys.append(key)
            values.append(value)
        hidden = F.rms_norm(x, self.norm[...], self.config.layers.norm_eps, self.config.layers.norm_offset)
        return hidden, KVCache(tuple(keys), tuple(values))

    def over(self, target: TargetModel) -> "OverTarget":
        """The model that it is together with its target.

        Raises:
            InputError: a target of another width or vocabulary, or without embeddings.
        """
        self.check(target)
        return OverTarget(self, target)

    def check(self, target: TargetModel) -> None:
        """Raise InputError, saying what differs, if it is not for this target."""
        if not isinstance(target, Decoder):
            raise InputError(f"a small decoder reads its target's embeddings, and a {type(target).__name__} has none")
        for name in ("hidden_size", "vocab_size"):
            expected, found = getattr(self.config.layers, name), getattr(target.config, name)
            if expected != found:
                raise InputError(
                    f"this small decoder is for a target with {name} {expected}, and the target has {found}"
                )

    @property
    def dtype(self) -> Any:
        return self.norm[...].dtype

    @classmethod
    def start(
        cls,
        target: Decoder,
        layers: Sequence[int],
        draft_tokens: Sequence[int] | Int[np.ndarray, "Vd"] | None = None,
        dtype: Any = jnp.float32,
    ) -> "SmallDecoder":
        """Where training starts: copies of these layers of the target, its norm, its head's rows of these tokens.

        Raises:
            InputError: layers or tokens that the target does not have.
        """
        d2t = None if draft_tokens is None else offsets(draft_tokens)
        config = SmallDecoderConfig.of(target.config, layers, None if d2t is None else len(d2t))

        def make(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Array:
            if name == "head":
                assert d2t is not None
                return target.head_rows(jnp.asarray(d2t + np.arange(len(d2t)))).astype(dtype)
            if name == "norm":
                value = target.norm[...]
            else:
                _, layer, parameter = name.split(".")
                value = getattr(target.layers[layers[int(layer)]], parameter)[...]
            return jnp.array(value, dtype, copy=True)  # the training step will reuse its memory

        return cls(config, make, d2t)

    @classmethod
    def from_arrays(
        cls, config: SmallDecoderConfig, arrays: dict[str, np.ndarray], dtype: Any = jnp.float32, mesh: Any = None
    ) -> "SmallDecoder":
        """Build from arrays by parameter path, `d2t` among them, cast to `dtype` and placed on `mesh`."""
        return cls(config, lambda name, shape, axes: place(arrays[name], dtype, axes, mesh), arrays.get("d2t"))

    @classmethod
    def random(
        cls, config: SmallDecoderConfig, seed: int = 0, dtype: Any = jnp.float32, scale: float = 0.02, d2t: Any = None
    ) -> "SmallDecoder":
        """Random weights, norms included (1 ± 0.1), so that a forgotten norm weight shows."""
        return cls(config, random_make(seed, dtype, scale), d2t)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OverTarget:
    """A small decoder with the target whose embeddings it reads: a `TargetModel`, but for features, which it has not.

    Attributes:
        network: the decoder.
        target: its target.
    """

    network: SmallDecoder
    target: Any

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T T"],
        cache: KVCache | None = None,
        length: Int[Array, "B"] | None = None,
        features: Sequence[str] = (),
    ) -> Output:
        """Forward over a block; see `TargetModel`."""
        if features:
            raise InputError(f"a small decoder has no features, and {features[0]!r} was asked for")
        hidden, block = self.network(self.target.embeddings(tokens), positions, mask, cache, length)
        return Output(hidden, block, {})

    def logits(self, hidden: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        """Scores of every token, float32; -inf outside the draft vocabulary."""
        scores = self.scores(hidden)
        return scores.spread(scores.values, -jnp.inf)

    def scores(self, hidden: Float[Array, "B T M"]) -> Scores:
        """Scores of the tokens that can be drafted, float32."""
        if self.network.config.draft_vocab_size is None:
            dtype = jax.eval_shape(self.target.embeddings, jnp.zeros((1, 1), jnp.int32)).dtype
            return Scores(self.target.logits(hidden.astype(dtype)), None, self.vocab_size)
        rows, head = hidden.reshape(-1, hidden.shape[-1]), self.network.head[...]
        values = product(rows, head, 1)
        return Scores(values.reshape(*hidden.shape[:-1], -1), self.network.target_ids, self.vocab_size)

    @property
    def vocab_size(self) -> int:
        return self.network.config.layers.vocab_size

    @property
    def max_positions(self) -> int:
        return self.network.config.layers.max_positions

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        c = self.network.config.layers
        return KVCache.zeros(batch, capacity, [(c.num_kv_heads, c.head_dim)] * c.num_layers, self.network.dtype)
