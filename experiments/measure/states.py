"""Prompts and decoding states to measure from, as `specjax.generate` makes them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from common.prompts import prompt_ids, read_prompts

from specjax import DecodeState, Drafter, Sampling, Target, decode
from specjax.job import BUCKET, lay_out
from specjax.stops import make_stops


def prompts_for(target: Target, batch_size: int) -> list[list[int]]:
    """The *rewrite* prompts, again and again for a larger batch; arbitrary tokens for a target without a tokenizer."""
    if target.tokenizer is None:
        return [[(7 * i * i + 13 * row) % target.model.vocab_size for i in range(150)] for row in range(batch_size)]
    ids = [prompt_ids(target, conversation) for conversation in read_prompts(tasks=["rewrite"])]
    return [ids[row % len(ids)] for row in range(batch_size)]


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
