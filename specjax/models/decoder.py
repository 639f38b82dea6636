"""One decoder for every family: a forward pass over a block of tokens that reads a cache and never writes it.

Axes: B rows, T block tokens, S cache slots, K key/value heads, G query heads a key/value head, D head width, M width,
F feed-forward, V vocabulary, E experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import KVCache
from specjax.errors import InputError
from specjax.models import layers as F
from specjax.models.config import ModelConfig
from specjax.models.interface import Output
from specjax.models.sharding import place

Make = Callable[[str, tuple[int, ...], tuple[str | None, ...]], Array]


class Decoder(nnx.Module):
    """A decoder-only transformer configured from `ModelConfig`."""

    def __init__(self, config: ModelConfig, make: Make):
        """Build with parameters from `make(path, shape, logical axes)`; see `from_arrays` and `random`."""
        self.config = config
        c = config
        self.embed = nnx.Param(make("embed", (c.vocab_size, c.hidden_size), ("vocab", "model")))
        self.layers = nnx.List([Layer(c, i, make) for i in range(c.num_layers)])
        self.norm = nnx.Param(make("norm", (c.hidden_size,), ("model",)))
        if not c.tie_embeddings:
            self.head = nnx.Param(make("head", (c.vocab_size, c.hidden_size), ("vocab", "model")))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T T"],
        cache: KVCache | None = None,
        length: Int[Array, "B"] | None = None,
        features: Sequence[str] = (),
    ) -> Output:
        """Forward over a block; see `TargetModel`. Features: "layer.0" … "layer.L" and "hidden"."""
        x = self.embeddings(tokens)
        seen = {"layer.0": x}
        view = View.make(self.config, positions, mask, cache, length)
        keys, values = [], []
        for i, layer in enumerate(self.layers):
            x, key, value = layer(x, view, None if cache is None else (cache.keys[i], cache.values[i]))
            seen[f"layer.{i + 1}"] = x
            keys.append(key)
            values.append(value)
        hidden = F.rms_norm(x, self.norm[...], self.config.norm_eps, self.config.norm_offset)
        seen["hidden"] = hidden
        unknown = [name for name in features if name not in seen]
        if unknown:
            raise InputError(f"unknown feature {unknown[0]!r}: expected 'hidden' or 'layer.0' … 'layer.{len(keys)}'")
        return Output(hidden, KVCache(tuple(keys), tuple(values)), {name: seen[name] for name in features})

    def embeddings(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        x = self.embed[...][tokens]
        if self.config.embed_scale != 1.0:
            x = x * jnp.asarray(self.config.embed_scale, x.dtype)
        return x

    def logits(self, hidden: Float[Array, "B T M"], ids: Int[Array, "C"] | None = None) -> Float[Array, "B T V"]:
        """Scores of every token, or of those in `ids` alone; float32."""
        head = self.head_rows(ids)
        rows = hidden.reshape(-1, hidden.shape[-1]).astype(head.dtype)  # stored features may be shorter
        scores = product(rows, head, 1)
        return scores.reshape(*hidden.shape[:-1], -1)

    def head_rows(self, ids: Int[Array, "C"] | None = None) -> Float[Array, "V M"]:
        """What hidden states are multiplied with for the scores of every token, or of those in `ids` alone."""
        head = self.embed[...] if self.config.tie_embeddings else self.head[...]
        return head if ids is None else head[ids]

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        heads = [(self.config.num_kv_heads, self.config.head_dim)] * self.config.num_layers
        return KVCache.zeros(batch, capacity, heads, self.embed[...].dtype)

    @classmethod
    def from_arrays(
        cls, config: ModelConfig, arrays: dict[str, np.ndarray], dtype: Any = jnp.float32, mesh: Any = None
    ) -> "Decoder":
        """Build from the loader's arrays, cast to `dtype` and placed on `mesh` (None: the default device)."""
        return cls(config, lambda name, shape, axes: place(arrays[name], dtype, axes, mesh))

    @classmethod
    def random(cls, config: ModelConfig, seed: int = 0, dtype: Any = jnp.float32, scale: float = 0.02) -> "Decoder":
        """Random weights, norms included (1 ± 0.1), so that a forgotten norm weight shows."""
        rng = np.random.default_rng(seed)

        def make(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Array:
            value = rng.standard_normal(shape, dtype=np.float32)
            value = 1 - config.norm_offset + 0.1 * value if name.endswith("norm") else scale * value
            return jnp.asarray(value, dtype)

        return cls(config, make)


class Layer(nnx.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(
        self, config: ModelConfig, index: int, make: Make, input_width: int | None = None, input_norm: bool = True
    ):
        """Build with parameters from `make`.

        Args:
            input_width: width of what attention reads, where it is not the residual stream's.
            input_norm: whether attention reads the residual stream behind a norm of the layer's own.
        """
        c = self.config = config
        self.index = index
        self.input_norm = input_norm
        group = c.num_heads // c.num_kv_heads
        moe = c.moe if c.moe is not None and c.moe.layers[index] else None
        self.moe = moe

        def param(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
            return nnx.Param(make(f"layers.{index}.{name}", shape, axes))

        if input_norm:
            self.attn_norm = param("attn_norm", (c.hidden_size,), ("model",))
        # fused per key/value head, so that a mesh axis can split it
        heads = (c.num_kv_heads, group + 2, c.head_dim)
        self.qkv = param("qkv", (input_width or c.hidden_size, *heads), ("model", "kv_heads", None, None))
        if c.qkv_bias:
            self.qkv_bias = param("qkv_bias", heads, ("kv_heads", None, None))
        if c.qk_norm:
            self.q_norm = param("q_norm", (c.head_dim,), (None,))
            self.k_norm = param("k_norm", (c.head_dim,), (None,))
        self.out = param("out", (c.num_kv_heads, group * c.head_dim, c.hidden_size), ("kv_heads", None, "model"))
        if c.out_bias:
            self.out_bias = param("out_bias", (c.hidden_size,), ("model",))
        self.mlp_norm = param("mlp_norm", (c.hidden_size,), ("model",))
        if c.sandwich_norms:
            self.post_attn_norm = param("post_attn_norm", (c.hidden_size,), ("model",))
            self.post_mlp_norm = param("post_mlp_norm", (c.hidden_size,), ("model",))
        if moe is not None:
            size, width = moe.num_experts, moe.intermediate_size
            self.router = param("router", (c.hidden_size, size), ("model", None))
            self.experts_gate_up = param(
                "experts_gate_up", (size, c.hidden_size, 2, width), ("experts", "model", None, "ffw")
            )
            self.experts_down = param("experts_down", (size, width, c.hidden_size), ("experts", "ffw", "model"))
        else:
            self.gate_up = param("gate_up", (c.hidden_size, 2, c.intermediate_size), ("model", None, "ffw"))
            self.down = param("down", (c.intermediate_size, c.hidden_size), ("ffw", "model"))

    def __call__(
        self,
        x: Float[Array, "B T M"],
        view: "View",
        cache: tuple[Array, Array] | None,
        earlier: "tuple[Array, Array] | F.Steps | None" = None,
        reads: Float[Array, "B T I"] | None = None,
    ) -> tuple[Float[Array, "B T M"], Float[Array, "B K T D"], Float[Array, "B K T D"]]:
        """Return the residual stream after the layer, and the block's keys and values.

        Args:
            x: the residual stream.
            earlier: keys and values `[B, K, E, D]` that are not in the cache; the block mask is then `[B, T, E + T]`,
                these first. `View.make` masks by the positions of the block alone, so a layer with a window needs a
                view with masks of its own. Or the earlier steps of an unrolled text.
            reads: what attention reads instead of the residual stream.
        """
        c = self.config
        if reads is None:
            reads = self.norm(x, self.attn_norm) if self.input_norm else x
        attended, key, value = self.attend(reads, view, cache, earlier)
        x = x + (self.norm(attended, self.post_attn_norm) if c.sandwich_norms else attended)
        fed = self.feed(self.norm(x, self.mlp_norm))
        x = x + (self.norm(fed, self.post_mlp_norm) if c.sandwich_norms else fed)
        return x, key, value

    def norm(self, x: Array, weight: nnx.Param) -> Array:
        return F.rms_norm(x, weight[...], self.config.norm_eps, self.config.norm_offset)

    def attend(
        self,
        x: Float[Array, "B T I"],
        view: "View",
        cache: tuple[Array, Array] | None,
        earlier: "tuple[Array, Array] | F.Steps | None" = None,
    ) -> tuple[Float[Array, "B T M"], Float[Array, "B K T D"], Float[Array, "B K T D"]]:
        c = self.config
        qkv = project(x, self.qkv[...])
        if c.qkv_bias:
            qkv = qkv + self.qkv_bias[...]
        tables, block_mask, cache_mask = view.of(c.windows[self.index])
        if c.qk_norm:
            q, k = self.norm(qkv[:, :, :, :-2], self.q_norm), self.norm(qkv[:, :, :, -2:-1], self.k_norm)
            turned = F.rotate(jnp.concatenate([q, k], axis=3), tables)
        else:
            turned = F.rotate(qkv[:, :, :, :-1], tables)
        turned = turned.transpose(0, 2, 3, 1, 4)  # [B, K, G+1, T, D]
        q, k, v = turned[:, :, :-1], turned[:, :, -1], qkv[:, :, :, -1].transpose(0, 2, 1, 3)
        if isinstance(earlier, F.Steps):
            mixed = F.unrolled_attention(q, (k, v), earlier, block_mask, c.attention_scale)
        else:
            block = (k, v)
            if earlier is not None:
                block = (jnp.concatenate([earlier[0], k], axis=2), jnp.concatenate([earlier[1], v], axis=2))
            mixed = F.attention(q, block, block_mask, cache, cache_mask, c.attention_scale)
        mixed = mixed.transpose(0, 3, 1, 2, 4).reshape(*x.shape[:2], -1)
        out = project(mixed, self.out[...].reshape(-1, c.hidden_size))
        return out + self.out_bias[...] if c.out_bias else out, k, v

    def feed(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        c = self.config
        if self.moe is not None:
            flat = x.reshape(-1, x.shape[-1])
            weights = (self.router[...], self.experts_gate_up[...], self.experts_down[...])
            return F.experts(flat, *weights, self.moe, c.activation).reshape(x.shape)
        mid = project(x, self.gate_up[...])
        return project(F.activate(c.activation, mid[:, :, 0]) * mid[:, :, 1], self.down[...])


def project(x: Float[Array, "B T I"], weight: Float[Array, "I ..."]) -> Float[Array, "B T ..."]:
    """One plain matrix product `[B*T, I] @ [I, O]`: written with more axes, XLA may copy the weight each time."""
    rows, flat = x.reshape(-1, x.shape[-1]), weight.reshape(weight.shape[0], -1)
    few = len(rows) < FEW_ROWS and x.dtype.itemsize == 2
    out = product(rows, flat, 0).astype(x.dtype) if few else rows @ flat
    return out.reshape(*x.shape[:-1], *weight.shape[1:])


FEW_ROWS = 32


def product(rows: Float[Array, "N I"], weight: Array, axis: int) -> Float[Array, "N O"]:
    """Rows times a weight whose axis `axis` is summed over, in float32.

    Few rows of 16-bit numbers want care on CPU, where XLA may convert the whole weight to float32 in every product, ten
    times as long: it does so where the result is to have 16 bits (jax 0.10), and for a lone row, which goes twice here.
    """
    lone = len(rows) == 1 and rows.dtype.itemsize == 2
    rows = jnp.repeat(rows, 2, axis=0) if lone else rows
    dimensions = (((1,), (axis,)), ((), ()))
    out = jax.lax.dot_general(rows, weight, dimensions, preferred_element_type=jnp.float32)
    return out[:1] if lone else out


@dataclass(frozen=True)
class View:
    """What a block sees: rotary tables and additive masks, made once and shared by the layers.

    Attributes:
        tables: per window (None = no window), rotary cosines and sines.
        block: per window, `[B, T, T]`.
        cache: per window, `[B, T, S]`; None without a cache.
    """

    tables: dict[int | None, tuple[Array, Array]]
    block: dict[int | None, Float[Array, "B T T"]]
    cache: dict[int | None, Float[Array, "B T S"] | None]

    @classmethod
    def make(
        cls,
        config: ModelConfig,
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T T"],
        cache: KVCache | None,
        length: Int[Array, "B"] | None,
    ) -> "View":
        tables, block = {}, {}
        past: dict[int | None, Array | None] = {}
        for window in dict.fromkeys(config.windows):
            rope = config.rope if window is None else config.local_rope
            tables[window] = F.rope_tables(rope, config.head_dim, positions)
            block[window] = F.block_bias(positions, mask, window)
            past[window] = None
            if cache is not None and length is not None:
                past[window] = F.cache_bias(positions, length, cache.capacity, window)
        return cls(tables, block, past)

    def of(self, window: int | None) -> tuple[tuple[Array, Array], Array, Array | None]:
        return self.tables[window], self.block[window], self.cache[window]
