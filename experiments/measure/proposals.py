"""What drafting costs by itself."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from common.timing import per_step
from jaxtyping import Array, Int

from specjax import DecodeState, Drafter, decode
from specjax.models.interface import TargetModel

LEAST_SECONDS = 0.05  # a timed loop should take so long, so that what a call costs does not matter


class ProposalTimer:
    """Times `propose` of one drafter in a compiled loop of nothing else, from one state over and over."""

    def __init__(self, model: TargetModel, drafter: Drafter, state: DecodeState):
        program = jax.jit(_proposals)

        def loop(n: int) -> Array:
            return program(model, drafter, state, n)

        self._loop, self._steps = loop, 1
        loop(1).block_until_ready()
        while self._steps < 1024 and self() * self._steps < LEAST_SECONDS:
            self._steps *= 4

    def __call__(self) -> float:
        """Seconds of one `propose`, now."""
        return max(per_step(self._loop, self._steps), 0.0)


def _proposals(model: TargetModel, drafter: Drafter, state: DecodeState, n: Int[Array, ""]) -> Array:
    """`n` proposals, none of which can be left out: each sees a pending token that the one before it named, and a
    memory that, for all the compiler knows, depends on that too (Medusa and EAGLE draft from their memory alone).
    """
    rows = jnp.arange(state.length.shape[0])

    def body(_: Any, state: DecodeState) -> DecodeState:
        draft, memory = drafter.propose(state.memory, decode.context(model, state))
        named = (draft.tokens * draft.valid).sum(-1) + draft.valid.sum(-1) + 1
        tokens = state.tokens.at[rows, state.length - 1].set(named % model.vocab_size)
        never = named.sum() < 0
        memory = jax.tree.map(lambda x: jnp.where(never, x + 1, x) if _is_small(x) else x, memory)
        return replace(state, tokens=tokens, memory=memory, round=state.round + 1)

    return jax.lax.fori_loop(0, n, body, state).tokens.sum()


def _is_small(x: Any) -> bool:
    """A cache is not touched, which would cost more than the draft; what is drafted from it depends on the rest too."""
    return x.size <= 2**16 and jnp.issubdtype(x.dtype, jnp.number)
