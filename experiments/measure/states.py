"""Decoding states to measure from, as `specjax.generate` makes them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import DecodeState, Drafter, Sampling, decode
from specjax.models.prefill import padded_length
from specjax.stops import make_stops

BUCKET = 128


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
    longest = max(len(p) for p in prompts)
    slots = max(decode.capacity(longest + new_tokens, like or drafter), padded_length(longest))
    tokens = np.zeros((len(prompts), -(-slots // BUCKET) * BUCKET), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.array([len(p) for p in prompts], jnp.int32)
    fill = jax.jit(decode.prefill, static_argnames=("longest",))
    return partial(
        fill,
        model,
        drafter,
        tokens=jnp.asarray(tokens),
        prompt_length=lengths,
        limit=lengths + new_tokens,
        rules=(sampling or Sampling()).rules(len(prompts)),
        stops=make_stops((), (), None, model.vocab_size),
        key=jax.random.split(jax.random.key(0), len(prompts)),
        longest=longest - 1,
    )


def start_state(
    model: Any, drafter: Drafter, prompts: Sequence[Sequence[int]], new_tokens: int, **more: Any
) -> DecodeState:
    """The state before the first round; see `prefill_program`."""
    return prefill_program(model, drafter, prompts, new_tokens, **more)()
