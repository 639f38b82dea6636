"""Decoding states to measure from, as `specjax.generate` makes them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from specjax import DecodeState, Drafter, Sampling, decode
from specjax.job import BUCKET, lay_out
from specjax.stops import make_stops


def prefill_program(
    model: Any,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: Sampling | None = None,
    like: Drafter | None = None,
) -> Any:
    """A function without arguments that returns the state before the first round; no EOS ends a row.

    Args:
        like: give it the cache size that this drafter needs.
    """
    fill = jax.jit(decode.prefill, static_argnames=("longest",))
    return partial(
        fill,
        model,
        drafter,
        **lay_out(prompts, [len(p) + new_tokens for p in prompts], like or drafter, BUCKET),
        rules=(sampling or Sampling()).rules(len(prompts)),
        stops=make_stops((), (), None, model.vocab_size),
        key=jax.random.split(jax.random.key(0), len(prompts)),
    )


def start_state(
    model: Any, drafter: Drafter, prompts: Sequence[Sequence[int]], new_tokens: int, **more: Any
) -> DecodeState:
    """The state before the first round; see `prefill_program`."""
    return prefill_program(model, drafter, prompts, new_tokens, **more)()
