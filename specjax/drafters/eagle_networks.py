"""The networks of EAGLE-1 and EAGLE-3, and the one convention that training and decoding share.

*The pair at position t* is the target's feature at position t with the token at position t + 1. The network's output
there stands for the feature at position t + 1, and its logits are scores of the token at position t + 2. A text of n
tokens has n - 1 pairs; the pair at t has rotary position t and, in the drafter's cache, slot t. `pair` makes the pairs
of a text out of true features, whether a whole sequence or what one round committed; `feed` runs the network over them.
When drafting further, the output at t takes the place of the feature at t + 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import KVCache
from specjax.drafters.eagle_config import Eagle3Config, EagleConfig, plain_layer
from specjax.drafters.vocabulary import Buffer as Buffer
from specjax.drafters.vocabulary import DraftVocabulary, offsets
from specjax.errors import InputError
from specjax.models import layers as F
from specjax.models.config import ModelConfig
from specjax.models.decoder import Decoder, Layer, Make, View, project
from specjax.models.interface import TargetModel
from specjax.models.sharding import place


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pairs:
    """Features with the token after each; see the module's text.

    Attributes:
        features: at `positions`, fused.
        tokens: at `positions + 1`.
        positions: rotary position and cache slot of each pair.
    """

    features: Float[Array, "B T M"]
    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]


def pair(features: Float[Array, "B T M"], tokens: Int[Array, "B U"], start: int | Int[Array, "B"] = 0) -> Pairs:
    """The pairs of a text: the token at t + 1 joins the feature at t.

    Args:
        features: fused features of the positions `start`, `start + 1`, …
        tokens: the text from the same position on. What has no partner (the first token, the last feature) is left out.
    """
    count = min(features.shape[1], tokens.shape[1] - 1)
    positions = jnp.reshape(jnp.asarray(start, jnp.int32), (-1, 1)) + jnp.arange(count, dtype=jnp.int32)
    positions = jnp.broadcast_to(positions, (features.shape[0], count))
    return Pairs(features[:, :count], tokens[:, 1 : count + 1], positions)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fed:
    """What the network makes of a block of pairs.

    Attributes:
        features: its output at t, which stands for the target's (fused) feature at t + 1.
        block: the block's keys and values.
    """

    features: Float[Array, "B T M"]
    block: KVCache


def feed(
    network: "EagleNetwork | Eagle3Network",
    target: TargetModel,
    pairs: Pairs,
    cache: KVCache | None = None,
    length: Int[Array, "B"] | None = None,
) -> Fed:
    """Run the network over pairs that follow each other, each seeing those before it.

    Without `cache` that is a whole text, else what comes after the first `length` pairs in it.
    """
    tokens = pairs.tokens.shape[1]
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((tokens, tokens), bool)), (pairs.tokens.shape[0], tokens, tokens))
    return network(network.embeddings(pairs.tokens, target), pairs.features, pairs.positions, mask, cache, length)


class _Network(nnx.Module):
    """What both networks share: embeddings, cache, one layer."""

    logits: Callable[..., Array]

    def __init__(self, config: Any, make: Make, **layer: Any):
        self.config = config
        c = config
        if c.layer.num_layers != 1 or c.layer.windows != (None,):
            raise InputError("an EAGLE network has one decoder layer without a window; see `plain_layer`")
        if c.own_embedding:
            self.embed = nnx.Param(make("embed", (c.layer.vocab_size, c.layer.hidden_size), ("vocab", "model")))
        self.layers = nnx.List([Layer(c.layer, 0, make, **layer)])

    def embeddings(self, tokens: Int[Array, "B T"], target: TargetModel) -> Float[Array, "B T M"]:
        """Embeddings of tokens: the network's own, or the target's."""
        if self.config.own_embedding:
            return self.embed[...][tokens]
        if not hasattr(target, "embeddings"):
            raise InputError(f"EAGLE needs the token embeddings of its target, and a {type(target).__name__} has none")
        return target.embeddings(tokens)

    def child_logits(self, features: Float[Array, "B W M"], target: TargetModel, depth: int) -> Float[Array, "B W Vd"]:
        """Scores of the children of nodes; their depth makes no difference."""
        return self.logits(features, target)

    def follow(
        self,
        depth: int,
        embedded: Float[Array, "B W M"],
        features: Float[Array, "B W M"],
        positions: Int[Array, "B W"],
        mask: Bool[Array, "B W E+W"],
        cache: KVCache,
        length: Int[Array, "B"],
        earlier: KVCache | None,
    ) -> "Fed":
        """The network over drafted nodes; their depth makes no difference."""
        return self(embedded, features, positions, mask, cache, length, earlier)

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache of the drafter's one layer."""
        c = self.config.layer
        return KVCache.zeros(batch, capacity, [(c.num_kv_heads, c.head_dim)], self.dtype)

    @property
    def dtype(self) -> Any:
        return self.layers[0].qkv[...].dtype

    def rms_norm(self, x: Array, weight: nnx.Param | Array) -> Array:
        return F.rms_norm(x, weight[...], self.config.layer.norm_eps, self.config.layer.norm_offset)

    def _run(
        self,
        x: Float[Array, "B T M"],
        reads: Float[Array, "B T I"] | None,
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T E+T"],
        cache: KVCache | None,
        length: Int[Array, "B"] | None,
        earlier: KVCache | F.Steps | None,
    ) -> tuple[Float[Array, "B T M"], KVCache]:
        view = View.make(self.config.layer, positions, mask, cache, length)
        past = None if cache is None else (cache.keys[0], cache.values[0])
        before = (earlier.keys[0], earlier.values[0]) if isinstance(earlier, KVCache) else earlier
        x, key, value = self.layers[0](x, view, past, before, reads)
        return x, KVCache((key,), (value,))

    @classmethod
    def from_arrays(cls, config: Any, arrays: dict[str, np.ndarray], dtype: Any = jnp.float32, mesh: Any = None) -> Any:
        """Build from arrays by parameter path, cast to `dtype` and placed on `mesh`."""
        return cls(config, lambda name, shape, axes: place(arrays[name], dtype, axes, mesh))

    @classmethod
    def random(cls, config: Any, seed: int = 0, dtype: Any = jnp.float32, scale: float = 0.02) -> Any:
        """Random weights, norms included (1 ± 0.1), so that a forgotten norm weight shows."""
        return cls(config, random_make(seed, dtype, scale))


def random_make(seed: int, dtype: Any = jnp.float32, scale: float = 0.02) -> Make:
    """Normal parameters with standard deviation `scale`; norms 1 ± 0.1."""
    rng = np.random.default_rng(seed)

    def make(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Array:
        value = rng.standard_normal(shape, dtype=np.float32)
        return jnp.asarray(1 + 0.1 * value if name.endswith("norm") else scale * value, dtype)

    return make


class EagleNetwork(_Network):
    """EAGLE-1 (Li et al. 2024), section 3.1: `layer(fc([embedding(t + 1); feature(t)]))`, the layer without an input
    norm. Features are the target's hidden states after its final norm, so its own head reads tokens out of the output.
    """

    name: ClassVar[str] = "eagle1"

    def __init__(self, config: EagleConfig, make: Make):
        """Build with parameters from `make(path, shape, logical axes)`: `fc [2M, M]`, `embed`, `layers.0.…`."""
        super().__init__(config, make, input_norm=False)
        width = config.layer.hidden_size
        self.fc = nnx.Param(make("fc", (2 * width, width), (None, "model")))
        if config.fc_bias:
            self.fc_bias = nnx.Param(make("fc_bias", (width,), ("model",)))

    def __call__(
        self,
        embedded: Float[Array, "B T M"],
        features: Float[Array, "B T M"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T E+T"],
        cache: KVCache | None = None,
        length: Int[Array, "B"] | None = None,
        earlier: KVCache | F.Steps | None = None,
    ) -> Fed:
        """The layer over a block of pairs.

        Args:
            embedded: embeddings of the tokens at t + 1.
            features: at t, the target's or this network's own; the output has their dtype.
            positions: t.
            mask: what each pair sees of `earlier` and of its own block.
            cache: keys and values of the true pairs, its first `length` slots; read only.
            earlier: keys and values of E further pairs that are in no cache (those drafted before), or of the earlier
                steps of `unroll`.
        """
        x = project(jnp.concatenate([embedded, features], axis=-1).astype(self.dtype), self.fc[...])
        if self.config.fc_bias:
            x = x + self.fc_bias[...]
        x, block = self._run(x, None, positions, mask, cache, length, earlier)
        return Fed(x.astype(features.dtype), block)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the target's features it is fed with."""
        return ("hidden",)

    def fuse(self, features: dict[str, Float[Array, "B T M"]]) -> Float[Array, "B T M"]:
        """The target's features as the network takes them."""
        hidden = features["hidden"]
        _fits("hidden_size", self.config.layer.hidden_size, hidden.shape[-1])
        return hidden

    def logits(self, features: Float[Array, "B T M"], target: TargetModel) -> Float[Array, "B T V"]:
        """Scores of the token after next for outputs of the network, float32: the target's head."""
        return target.logits(features)

    @property
    def target_ids(self) -> None:
        """Every token of the target's vocabulary can be drafted."""
        return None

    @classmethod
    def start(cls, config: EagleConfig, target: Decoder, seed: int = 0, scale: float = 0.02) -> "EagleNetwork":
        """Where training starts, float32: the layer is the target's last one and `fc` passes the feature on; the rest
        is random, and all of it where the layer has another shape than the target's.
        """
        fresh, known = random_make(seed, jnp.float32, scale), _of_target(config.layer, target)

        def make(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Array:
            value = jnp.ones(shape) if name.endswith("norm") else fresh(name, shape, axes)
            if name == "fc" and known:
                return value.at[shape[1] :].set(jnp.eye(shape[1]))
            return jnp.zeros(shape) if name == "fc_bias" else known.get(name, value)

        return cls(config, make)


class Eagle3Network(DraftVocabulary, _Network):
    """EAGLE-3 (Li et al. 2025), section 3.1: features of three layers fused by `fc`, attention reads
    `[norm(embedding(t + 1)); norm(feature(t))]`, the residual is the feature. Its output feeds it further as it is; its
    own norm and head read tokens of the draft vocabulary out of it. The norms that others have added since are options
    of `Eagle3Config`.
    """

    name: ClassVar[str] = "eagle3"

    def __init__(self, config: Eagle3Config, make: Make, d2t: np.ndarray | None = None):
        """Build with parameters from `make(path, shape, logical axes)`: `fc [3Mt, M]`, `embed_norm`, `feature_norm`,
        `norm`, `head [Vd, M]`, `embed`, `layers.0.*`, `input_norm [3Mt]`, `fc_norm [3, Mt]`.

        Args:
            d2t: offsets: draft id i stands for the target's id `i + d2t[i]`. May only be left out where the draft
                vocabulary is the target's.
        """
        c, width = config, config.layer.hidden_size
        super().__init__(config, make, input_width=2 * width, input_norm=False)
        inputs = len(c.feature_layers) * c.target_hidden_size
        self.fc = nnx.Param(make("fc", (inputs, width), (None, "model")))
        if c.norm_before_fc:
            self.input_norm = nnx.Param(make("input_norm", (inputs,), (None,)))
        if c.fc_norm:
            self.fc_norm = nnx.Param(make("fc_norm", (len(c.feature_layers), c.target_hidden_size), (None, None)))
        self.embed_norm = nnx.Param(make("embed_norm", (width,), ("model",)))
        self.feature_norm = nnx.Param(make("feature_norm", (width,), ("model",)))
        self.norm = nnx.Param(make("norm", (width,), ("model",)))
        self.head = nnx.Param(make("head", (c.draft_vocab_size, width), ("vocab", "model")))
        self.set_vocabulary(d2t, c.draft_vocab_size, c.layer.vocab_size)

    def __call__(
        self,
        embedded: Float[Array, "B T M"],
        features: Float[Array, "B T M"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T E+T"],
        cache: KVCache | None = None,
        length: Int[Array, "B"] | None = None,
        earlier: KVCache | F.Steps | None = None,
    ) -> Fed:
        """The layer over a block of pairs; arguments as `EagleNetwork`'s."""
        features = features.astype(self.dtype)
        normed = self.rms_norm(features, self.feature_norm)
        reads = jnp.concatenate([self.rms_norm(embedded.astype(self.dtype), self.embed_norm), normed], axis=-1)
        residual = normed if self.config.norm_before_residual else features
        x, block = self._run(residual, reads, positions, mask, cache, length, earlier)
        return Fed(self.rms_norm(x, self.norm) if self.config.norm_output else x, block)

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(f"layer.{i}" for i in self.config.feature_layers)

    def fuse(self, features: dict[str, Float[Array, "B T M"]]) -> Float[Array, "B T M"]:
        parts = [features[name].astype(self.dtype) for name in self.features]
        _fits("target_hidden_size", self.config.target_hidden_size, parts[0].shape[-1])
        if self.config.fc_norm:
            parts = [self.rms_norm(part, weight) for part, weight in zip(parts, self.fc_norm[...], strict=True)]
        joined = jnp.concatenate(parts, axis=-1)
        if self.config.norm_before_fc:
            joined = self.rms_norm(joined, self.input_norm)
        return project(joined, self.fc[...])

    def logits(self, features: Float[Array, "B T M"], target: TargetModel) -> Float[Array, "B T Vd"]:
        """Scores of the draft vocabulary's tokens for outputs of the network, float32."""
        return jnp.einsum("btm,vm->btv", self.read(features), self.head[...], preferred_element_type=jnp.float32)

    def read(self, features: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """Outputs of the network as its head takes them."""
        return features if self.config.norm_output else self.rms_norm(features, self.norm)

    @classmethod
    def from_arrays(
        cls, config: Eagle3Config, arrays: dict[str, np.ndarray], dtype: Any = jnp.float32, mesh: Any = None
    ) -> "Eagle3Network":
        """Build from arrays by parameter path, `d2t` among them, cast to `dtype` and placed on `mesh`."""
        return cls(config, lambda name, shape, axes: place(arrays[name], dtype, axes, mesh), arrays.get("d2t"))

    @classmethod
    def start(
        cls, config: Eagle3Config, target: Decoder, tokens: Any = None, seed: int = 0, scale: float = 0.02
    ) -> "Eagle3Network":
        """Where training starts, float32: what the target knows where shapes allow, small random numbers elsewhere.

        The layer is the target's last one (the half of its attention that reads embeddings is random), `fc` passes the
        deepest feature on, norm and head are the target's. Where the network has another width, all of it is random.

        Args:
            tokens: the draft vocabulary, `config.draft_vocab_size` ids of the target; None for all.
        """
        fresh, known = random_make(seed, jnp.float32, scale), _of_target(config.layer, target)
        d2t = None if tokens is None else offsets(tokens)
        ids = jnp.arange(config.draft_vocab_size) + (0 if d2t is None else jnp.asarray(d2t))

        def make(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Array:
            value = jnp.ones(shape) if name.endswith("norm") else fresh(name, shape, axes)
            if not known:
                return value
            if name == "head":
                return known[name][ids]
            if name == "layers.0.qkv":
                return jnp.concatenate([value[: shape[0] // 2], known[name]])
            if name == "fc":
                return value.at[-shape[1] :].set(jnp.eye(shape[1]))
            return known.get({"feature_norm": "layers.0.attn_norm"}.get(name, name), value)

        return cls(config, make, d2t)

    @classmethod
    def random(
        cls, config: Eagle3Config, seed: int = 0, dtype: Any = jnp.float32, scale: float = 0.02, d2t: Any = None
    ) -> "Eagle3Network":
        return cls(config, random_make(seed, dtype, scale), d2t)


def _of_target(layer: ModelConfig, target: Decoder) -> dict[str, Float[Array, "..."]]:
    """The target's last layer, final norm, embeddings and head, float32, by a network's names; empty where the layer
    has other shapes.
    """
    wanted = replace(plain_layer(target.config), max_positions=layer.max_positions)
    if layer != wanted:
        return {}
    last = target.layers[-1]
    names = ("attn_norm", "qkv", "out", "mlp_norm", "gate_up", "down")
    if not all(hasattr(last, name) for name in names):
        return {}
    values = {f"layers.0.{name}": getattr(last, name)[...] for name in names}
    head = target.embed if target.config.tie_embeddings else target.head
    values |= {"norm": target.norm[...], "head": head[...], "embed": target.embed[...]}
    offset = target.config.norm_offset
    values = {name: v + offset if name.endswith("norm") and offset else v for name, v in values.items()}
    return {name: value.astype(jnp.float32) for name, value in values.items()}


def _fits(name: str, expected: int, found: int) -> None:
    if expected != found:
        raise InputError(f"this drafter is for a target with {name} {expected}, and the target has {found}")
