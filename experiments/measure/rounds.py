"""Whole rounds, against the target pass that is in them."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from common.timing import per_step
from jaxtyping import Array, Bool, Int

from specjax import Context, DecodeState, Draft, Drafter, PromptLookup, decode
from specjax.laws import Law
from specjax.models.interface import TargetModel
from specjax.state import Round, static
from specjax.trees import chain


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
