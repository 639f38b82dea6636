"""MTP modules (DeepSeek-V3 technical report, 2024, section 2.2): each predicts one token further ahead than the one
before it, with one decoder layer; embeddings and head are the target's.

    h^k_t = layer_k(proj_k([norm(h^(k-1)_t); norm(embedding(t + k))])),    k = 1 … N

h^0_t is the target's own feature at position t, and the head reads the token at t + k + 1 out of h^k_t behind the
module's final norm. *Module k pairs position t with the token at t + k*, and sees its own pairs at positions up to t:
its keys and values end k - 1 positions before those of module 1. A pair lies in the cache slot of the token before
its own, t + k - 1: all modules' caches end at the same slot, and the first k - 1 slots of module k hold no pair and are
never read. The slot is the rotary position too: the pairs of one module are all turned alike, which attention does not
see.

Token by token, a module's output over one token goes into the next module over the next token. *The outputs at a token*
are those of all modules when it is read, on one axis of N·M numbers. `follow` goes on from them over a drafted token:
the target's feature is not there yet, and the first modules fall silent one by one. Past the last module, that one goes
on from its own output, so that the i-th token after the pending one comes from module min(i, N). N = 1 is a single
module applied again and again, as engines do with checkpoints that have one (FastMTP, Cai et al. 2025, trains it so).

What the report leaves open belongs to the weights, and is part of the configuration: what the projection reads first,
whether h^0 is the target's hidden state before or after its final norm, and whether h^k goes on before or behind the
module's. DeepSeek's own checkpoints read the embedding first (`eh_proj`), MiMo-7B's the hidden state (`input_proj`). In
MiMo-7B that is taken before the norm (`mimo.py` of Xiaomi's own vLLM) and goes on behind it (`final_layernorm` in
`modeling_mimo.py`). Engines blank the embedding of the pair at position 0; here no pair is an exception.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import KVCache
from specjax.drafters.eagle_networks import Pairs, random_make
from specjax.drafters.vocabulary import DraftVocabulary, logits_of, offsets
from specjax.errors import InputError, check_whole
from specjax.models import layers as F
from specjax.models.config import ModelConfig
from specjax.models.decoder import Decoder, Layer, Make, View, project
from specjax.models.interface import TargetModel
from specjax.models.sharding import place


@dataclass(frozen=True)
class MtpConfig:
    """What MTP modules are.

    Attributes:
        layers: their decoder layers, one a module, norms and rope; no windows and no experts. Width and vocabulary are
            the target's.
        hidden_first: the projection reads `[hidden; embedding]`, else `[embedding; hidden]`.
        feature: h^0, the target's "hidden" (after its final norm) or "layer.L" (before it).
        norm_output: whether a module's output goes on to the next behind its final norm, or before it.
        draft_vocab_size: tokens that can be drafted, whose rows of the target's head are read; None for all.
    """

    layers: ModelConfig
    hidden_first: bool = True
    feature: str = "hidden"
    norm_output: bool = True
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        c = self.layers
        if any(c.windows) or c.moe is not None:
            raise InputError("MTP modules here have no windows and no experts; see MtpConfig.of")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= c.vocab_size:
            raise InputError(
                f"a draft vocabulary of {self.draft_vocab_size} tokens: expected 1 to {c.vocab_size}, as many as the "
                "target has"
            )

    @property
    def num_modules(self) -> int:
        return self.layers.num_layers

    @classmethod
    def of(cls, target: ModelConfig, num_modules: int = 1, **changes: Any) -> "MtpConfig":
        """Modules whose layers are such as the target's own; dense ones where it has experts."""
        check_whole("num_modules", num_modules, 1)
        windows = (None,) * num_modules
        layers = replace(target, num_layers=num_modules, windows=windows, tie_embeddings=False, moe=None)
        return cls(layers, **changes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Entries:
    """Keys and values of pairs that are in no cache, one array a module, and the slots they would have."""

    keys: tuple[Float[Array, "B K T D"], ...]
    values: tuple[Float[Array, "B K T D"], ...]
    slots: Int[Array, "B 1 T"]

    @property
    def cache(self) -> KVCache:
        return KVCache(self.keys, self.values)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outputs:
    """What the modules make of a block of tokens.

    Attributes:
        features: the modules' outputs at each token; see the module's text.
        block: their keys and values.
    """

    features: Float[Array, "B T NM"]
    block: Entries


class Around(nnx.Module):
    """What stands around a module's layer: the norms and the projection of what goes in, the norm of what comes out."""

    def __init__(self, config: ModelConfig, index: int, make: Make):
        width = config.hidden_size

        def param(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
            return nnx.Param(make(f"around.{index}.{name}", shape, axes))

        self.hidden_norm = param("hidden_norm", (width,), ("model",))
        self.embed_norm = param("embed_norm", (width,), ("model",))
        self.proj = param("proj", (2 * width, width), (None, "model"))
        self.norm = param("norm", (width,), ("model",))


class MtpNetwork(DraftVocabulary, nnx.Module):
    """MTP modules in a chain."""

    name: ClassVar[str] = "mtp"

    def __init__(self, config: MtpConfig, make: Make, d2t: np.ndarray | None = None):
        """Build with parameters from `make(path, shape, logical axes)`: for module k, counted from 0,
        `around.k.{hidden_norm, embed_norm, proj [2M, M], norm}` and `layers.k.…`.

        Args:
            d2t: offsets: draft id i stands for the target's id `i + d2t[i]`. May only be left out where the draft
                vocabulary is the target's.
        """
        self.config = config
        c = config.layers
        self.around = nnx.List([Around(c, i, make) for i in range(c.num_layers)])
        self.layers = nnx.List([Layer(c, i, make) for i in range(c.num_layers)])
        self.set_vocabulary(d2t, config.draft_vocab_size or c.vocab_size, c.vocab_size)

    def read_text(
        self,
        target: TargetModel,
        pairs: Pairs,
        before: Float[Array, "B NM"],
        cache: KVCache | None = None,
        length: Int[Array, "B"] | None = None,
    ) -> Outputs:
        """Run all modules over tokens that follow each other, each with the target's true features.

        Args:
            pairs: the target's features, each with the token after it (`eagle_networks.pair`).
            before: the modules' outputs at the token before the first; anything where there is none.
            cache: keys and values of what came before, its first `length` slots; None at the beginning of a text.
        """
        batch, size = pairs.tokens.shape
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))
        embedded = self.embeddings(pairs.tokens, target)
        seen = self._seen(pairs.positions, mask, cache, length)
        widths = np.arange(1, self.num_modules) * self.config.layers.hidden_size
        hidden, outputs, keys, values = pairs.features.astype(self.dtype), [], [], []
        for i, last in enumerate(jnp.split(before, widths, axis=-1)):
            hidden, key, value = self.module(i, embedded, hidden, seen.view(i), cache)
            outputs.append(hidden)
            keys.append(key)
            values.append(value)
            hidden = jnp.concatenate([last[:, None].astype(hidden.dtype), hidden[:, :-1]], axis=1)
        block = Entries(tuple(keys), tuple(values), pairs.positions[:, None])
        return Outputs(jnp.concatenate(outputs, axis=-1), block)

    def follow(
        self,
        depth: int,
        embedded: Float[Array, "B W M"],
        features: Float[Array, "B W nM"],
        positions: Int[Array, "B W"],
        mask: Bool[Array, "B W E+W"],
        cache: KVCache,
        length: Int[Array, "B"],
        earlier: Entries | None,
    ) -> Outputs:
        """Run the modules over drafted tokens of one depth; see `eagle_step.feed_nodes`.

        Args:
            depth: 1 is a child of the pending token; only modules that later ones go on from, or children are read out
                of, are run.
            features: the modules' outputs at the parents, as this (or `read_text`) made them.
            positions: the nodes' slots.
        """
        first, width = min(depth, self.num_modules - 1), self.config.layers.hidden_size
        seen = self._seen(positions, mask, cache, length, earlier)
        outputs, keys, values = [], [], []
        for i in range(self.num_modules):
            if i < first:  # nothing will ask for its pair here
                silent = jnp.zeros((*positions.shape, *cache.keys[i].shape[1::2]), self.dtype).transpose(0, 2, 1, 3)
                keys.append(silent)
                values.append(silent)
                continue
            at = (i - first) * width
            before = None if earlier is None else (earlier.keys[i], earlier.values[i])
            hidden, key, value = self.module(i, embedded, features[..., at : at + width], seen.view(i), cache, before)
            outputs.append(hidden)
            keys.append(key)
            values.append(value)
        return Outputs(jnp.concatenate(outputs, axis=-1), Entries(tuple(keys), tuple(values), positions[:, None]))

    def module(
        self,
        index: int,
        embedded: Float[Array, "B T M"],
        hidden: Float[Array, "B T M"],
        view: View,
        cache: KVCache | None = None,
        earlier: tuple[Array, Array] | F.Steps | None = None,
    ) -> tuple[Float[Array, "B T M"], Float[Array, "B K T D"], Float[Array, "B K T D"]]:
        """One module over a block: its output as the next one takes it, and the block's keys and values."""
        around = self.around[index]
        parts = [self.rms_norm(hidden.astype(self.dtype), around.hidden_norm)]
        parts.append(self.rms_norm(embedded.astype(self.dtype), around.embed_norm))
        joined = jnp.concatenate(parts if self.config.hidden_first else parts[::-1], axis=-1)
        past = None if cache is None else (cache.keys[index], cache.values[index])
        x, key, value = self.layers[index](project(joined, around.proj[...]), view, past, earlier)
        return self.rms_norm(x, around.norm) if self.config.norm_output else x, key, value

    def child_logits(self, features: Float[Array, "B T nM"], target: TargetModel, depth: int) -> Float[Array, "B T Vd"]:
        """Scores of the draftable tokens, float32, for the children of nodes of that depth (0: the pending token), by
        the outputs there.
        """
        return logits_of(target, self.read(features[..., : self.config.layers.hidden_size], depth), self.target_ids)

    def read(self, output: Float[Array, "B T M"], depth: int) -> Float[Array, "B T M"]:
        """The output that children of nodes of that depth are read out of, as the head takes it."""
        if self.config.norm_output:
            return output
        return self.rms_norm(output, self.around[min(depth, self.num_modules - 1)].norm)

    def embeddings(self, tokens: Int[Array, "B T"], target: TargetModel) -> Float[Array, "B T M"]:
        """The target's embeddings of tokens."""
        if not hasattr(target, "embeddings"):
            raise InputError(
                f"MTP modules need the token embeddings of their target, and a {type(target).__name__} has none"
            )
        return target.embeddings(tokens)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the target's features they are fed with."""
        return (self.config.feature,)

    def feature(self, features: dict[str, Float[Array, "B T M"]]) -> Float[Array, "B T M"]:
        """h^0, out of the target's features."""
        found, expected = features[self.config.feature], self.config.layers.hidden_size
        if found.shape[-1] != expected:
            raise InputError(
                f"this drafter is for a target with hidden_size {expected}, and the target has {found.shape[-1]}"
            )
        return found

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        """Empty caches of the modules."""
        c = self.config.layers
        return KVCache.zeros(batch, capacity, [(c.num_kv_heads, c.head_dim)] * c.num_layers, self.dtype)

    @property
    def num_modules(self) -> int:
        return self.config.num_modules

    @property
    def dtype(self) -> Any:
        return self.around[0].proj[...].dtype

    def rms_norm(self, x: Array, weight: nnx.Param) -> Array:
        return F.rms_norm(x, weight[...], self.config.layers.norm_eps, self.config.layers.norm_offset)

    def _seen(
        self,
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T E+T"],
        cache: KVCache | None,
        length: Int[Array, "B"] | None,
        earlier: Entries | None = None,
    ) -> "_Seen":
        tables = F.rope_tables(self.config.layers.rope, self.config.layers.head_dim, positions)
        slots = positions if earlier is None else jnp.concatenate([earlier.slots[:, 0], positions], axis=1)
        filled = None
        if cache is not None and length is not None:
            filled = jnp.arange(cache.capacity) < length[:, None]
        return _Seen(tables, slots, mask, filled)

    @classmethod
    def from_arrays(
        cls, config: MtpConfig, arrays: dict[str, np.ndarray], dtype: Any = jnp.float32, mesh: Any = None
    ) -> "MtpNetwork":
        """Build from arrays by parameter path, `d2t` among them, cast to `dtype` and placed on `mesh`."""
        return cls(config, lambda name, shape, axes: place(arrays[name], dtype, axes, mesh), arrays.get("d2t"))

    @classmethod
    def random(
        cls, config: MtpConfig, seed: int = 0, dtype: Any = jnp.float32, scale: float = 0.02, d2t: Any = None
    ) -> "MtpNetwork":
        """Random weights, norms included (1 ± 0.1), so that a forgotten norm weight shows."""
        return cls(config, random_make(seed, dtype, scale), d2t)

    @classmethod
    def start(
        cls, config: MtpConfig, target: Decoder, tokens: Any = None, seed: int = 0, scale: float = 0.02
    ) -> "MtpNetwork":
        """Where training starts, float32: every layer is the target's last one, the projection passes the hidden state
        on, the final norms are the target's. Layers of other shapes than the target's last are random.

        Args:
            tokens: the draft vocabulary, `config.draft_vocab_size` ids of the target; None for all.
        """
        c, last = config.layers, target.layers[-1]
        fresh = random_make(seed, jnp.float32, scale)
        same = MtpConfig.of(target.config, c.num_layers).layers == replace(c, max_positions=target.config.max_positions)
        if c.hidden_size != target.config.hidden_size:
            raise InputError(
                f"MTP modules of width {c.hidden_size} cannot read the embeddings of a target of width "
                f"{target.config.hidden_size}"
            )

        def make(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Array:
            where, _, part = name.split(".")
            if where == "layers":
                copied = same and last.moe is None
                value = getattr(last, part)[...] if copied else _neutral(fresh, name, shape, axes, c)
            elif part == "norm":
                value = target.norm[...]
            elif part == "proj":
                half = slice(shape[1]) if config.hidden_first else slice(shape[1], None)
                value = fresh(name, shape, axes).at[half].set(jnp.eye(shape[1]))
            else:
                value = _neutral(fresh, name, shape, axes, c)
            return jnp.array(value, jnp.float32, copy=True)  # the training step will reuse its memory

        return cls(config, make, None if tokens is None else offsets(tokens))


@dataclass(frozen=True)
class _Seen:
    """What a block sees, module by module: module k (from 0) has no pairs in slots below k."""

    tables: tuple[Array, Array]
    slots: Int[Array, "B E+T"]
    mask: Bool[Array, "B T E+T"]
    filled: Bool[Array, "B S"] | None

    def view(self, module: int) -> View:
        # a place without a pair still sees itself: a softmax over nothing would be NaN, and stay in the cache as such
        size, columns = self.mask.shape[1:]
        itself = jnp.eye(size, columns, k=columns - size, dtype=bool)
        block = self.mask & ((self.slots >= module)[:, None] | itself)
        cache = None
        if self.filled is not None:
            seen = self.filled & (jnp.arange(self.filled.shape[1]) >= module)
            cache = jnp.where(seen, 0.0, F.MASKED)[:, None]
        return View({None: self.tables}, {None: jnp.where(block, 0.0, F.MASKED)}, {None: cache})


def _neutral(
    fresh: Make, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], config: ModelConfig
) -> Array:
    """A norm that changes nothing; other parameters random."""
    return jnp.full(shape, 1.0 - config.norm_offset) if name.endswith("norm") else fresh(name, shape, axes)
