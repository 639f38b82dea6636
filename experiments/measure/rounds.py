"""Whole rounds, against the target pass that is in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax import Context, DecodeState, Draft, Drafter, PromptLookup, decode
from specjax.cache import KVCache
from specjax.laws import Law
from specjax.models.interface import Output, TargetModel
from specjax.state import Round, static
from specjax.timing import per_step
from specjax.trees import chain
from specjax.verify import verify


class RoundTimer:
    """Times rounds in a compiled loop, from one state.

    Attributes:
        tokens_per_round: that these rounds commit, per row.
    """

    def __init__(self, model: TargetModel, drafter: Drafter, law: Law, state: DecodeState, rounds: int):
        program = jax.jit(_rounds, static_argnums=2)
        self._loop = lambda n: program(model, drafter, law, state, n)
        self._rounds = rounds
        added = (self._loop(rounds)[1] - state.length).sum()
        self.tokens_per_round = float(added) / (rounds * state.length.shape[0])

    def text(self, rounds: int) -> Int[Array, "B S"]:
        """Prompt and output after so many rounds."""
        return self._loop(rounds)[0]

    def __call__(self) -> float:
        """Seconds of one round, now."""
        return per_step(self._loop, self._rounds)


def _rounds(
    model: TargetModel, drafter: Drafter, law: Law, state: DecodeState, n: Int[Array, ""]
) -> tuple[Int[Array, "B S"], Int[Array, "B"]]:
    end = jax.lax.fori_loop(0, n, lambda _, state: decode.step(model, drafter, law, state)[0], state)
    return end.tokens, end.length


NOTHING, FOUND, EVERYTHING = 0, 1, 2
"""What a `FullBlock` lets the target accept: nothing, what prompt lookup found, the whole draft."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FullBlock:
    """Prompt lookup whose drafts always fill the block, so that all its rounds hold the same target pass.

    It searches as ever, and then proposes what `accept` says, filled up with tokens that are not the known ones.

    Attributes:
        known: the text as greedy decoding continues it.
        accept: NOTHING, FOUND or EVERYTHING; data, so that one program serves all three.
    """

    lookup: PromptLookup
    known: Int[Array, "B S"]
    accept: Int[Array, ""]
    block_sizes: tuple[int, ...] = static()

    name: ClassVar[str] = "full-block"
    features: ClassVar[tuple[str, ...]] = ()
    wants_logits: ClassVar[bool] = False

    @classmethod
    def make(cls, lookup: PromptLookup, known: Int[Array, "B S"], accept: int) -> "FullBlock":
        return cls(lookup, known, jnp.int32(accept), (lookup.num_draft_tokens + 1,))

    @property
    def num_nodes(self) -> int:
        return self.lookup.num_nodes

    @property
    def max_depth(self) -> int:
        return self.lookup.max_depth

    def init(self, context: Context, features: dict[str, Any], longest: int) -> Any:
        return self.lookup.init(context, features, longest)

    def propose(self, memory: Any, context: Context) -> tuple[Draft, Any]:
        draft, memory = self.lookup.propose(memory, context)
        batch, k = draft.tokens.shape
        coming = jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (k,)))(self.known, context.length)
        other = (coming + 1) % context.model.vocab_size
        found: Bool[Array, "B N"] = draft.valid & (self.accept == FOUND)
        tokens = jnp.where(found, draft.tokens, jnp.where(self.accept == EVERYTHING, coming, other))
        return chain(tokens, jnp.full(batch, k)), memory

    def update(self, memory: Any, round: Round, context: Context) -> Any:
        return self.lookup.update(memory, round, context)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stub:
    """A target that costs next to nothing, so that what is left of a round can be timed without the noise of the pass.

    It says a known text. Its logits and its keys and values have the shapes of the target it stands for.

    Attributes:
        scores: logits of that target somewhere; the known token's is raised above them all.
        known: the text.
        heads: key/value heads and their width, of each layer.
    """

    scores: Float[Array, "V"]
    known: Int[Array, "B S"]
    heads: tuple[tuple[int, int], ...] = static()
    max_positions: int = static()
    dtype: Any = static()

    @classmethod
    def of(cls, model: TargetModel, state: DecodeState, known: Int[Array, "B S"]) -> "Stub":
        """The stub of a model, from a state before its first round and the text that follows."""
        nothing = jnp.zeros((known.shape[0], 0), jnp.int32)
        see = jax.jit(verify)
        scores = see(model, state.cache, state.pending, state.length, chain(nothing, nothing.sum(-1))).logits[0, 0]
        heads = tuple((x.shape[1], x.shape[3]) for x in state.cache.keys)
        return cls(scores, known, heads, model.max_positions, state.cache.keys[0].dtype)

    @property
    def vocab_size(self) -> int:
        return self.scores.shape[0]

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T T"],
        cache: KVCache | None = None,
        length: Int[Array, "B"] | None = None,
        features: Sequence[str] = (),
    ) -> Output:
        batch, size = tokens.shape
        coming = jnp.take_along_axis(self.known, jnp.minimum(positions + 1, self.known.shape[1] - 1), axis=1)
        values = tokens[:, None, :, None].astype(self.dtype)
        block = tuple(jnp.broadcast_to(values, (batch, k, size, d)) for k, d in self.heads)
        return Output(coming[..., None].astype(jnp.float32), KVCache(block, block), {})

    def logits(self, hidden: Float[Array, "B T 1"]) -> Float[Array, "B T V"]:
        said = jnp.arange(self.vocab_size) == hidden.astype(jnp.int32)
        # a real target's logits lie in memory before anything reads them
        return jax.lax.optimization_barrier(jnp.where(said, self.scores.max() + 1, self.scores))

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache.zeros(batch, capacity, list(self.heads), self.dtype)
