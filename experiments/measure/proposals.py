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
    """`n` proposals, each of which sees a pending token that the one before it named, so that none can be left out."""
    rows = jnp.arange(state.length.shape[0])

    def body(_: Any, state: DecodeState) -> DecodeState:
        draft, memory = drafter.propose(state.memory, decode.context(model, state))
        named = (draft.tokens * draft.valid).sum(-1) + draft.valid.sum(-1) + 1
        tokens = state.tokens.at[rows, state.length - 1].set(named % model.vocab_size)
        return replace(state, tokens=tokens, memory=memory, round=state.round + 1)

    return jax.lax.fori_loop(0, n, body, state).tokens.sum()
