"""A batch ready to be decoded: everything checked, nothing computed. `generate` and `stream` run one; so can you.

job = specjax.prepare(target, ["Once upon a time"], drafter=specjax.PromptLookup())
state = job.prefill()
while state.running.any():
    state, info = job.step(state)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax.drafters.check import check_drafter
from specjax.drafters.plain import Plain
from specjax.laws import Law
from specjax.models.prefill import padded_length
from specjax.models.sharding import over_mesh
from specjax.models.target import Target
from specjax.models.tokenizer import Tokenizer
from specjax.requests import Prompt, choose_law, encode, row_keys, stop_strings, token_limit
from specjax.sampling import Sampling
from specjax.state import DecodeState, Drafter, StepInfo
from specjax.stops import Stops, make_stops

BUCKET = 128  # text and cache capacities are rounded up to it: masked attention still reads all of them


@dataclass(frozen=True)
class Job:
    """One batch. The programs behind its methods are compiled once for each shape and kept between jobs.

    Attributes:
        target, drafter, law: what decodes.
        prompt_ids: the prompts as the target sees them.
        stop: the stop strings.
        arguments: of `decode.prefill`, besides target and drafter.
    """

    target: Target
    drafter: Drafter
    law: Law
    prompt_ids: list[list[int]]
    stop: tuple[str, ...]
    arguments: dict[str, Any]

    def __repr__(self) -> str:
        what = f"{self.target.name!r}, {self.drafter.name}, {self.law.name}"
        return f"Job({what}, {len(self.prompt_ids)} prompts)"

    def prefill(self) -> DecodeState:
        """The state before the first round."""
        return self._call(_prefill, self.target.model, self.drafter, **self.arguments)

    def step(self, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        """One round. The given state's memory is reused: it cannot be used again."""
        return self._call(_step, self.target.model, self.drafter, self.law, state)

    def run(self, state: DecodeState, leave: int = 0) -> DecodeState:
        """Rounds until at most `leave` rows run, in one call; by default until every row has ended.

        The given state cannot be used again.
        """
        return self._call(_run, self.target.model, self.drafter, self.law, state, leave)

    def _call(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.target.dtype != "float32":
            return program(*args, **kwargs)
        with jax.default_matmul_precision("highest"):  # by default TF32 on recent GPUs, bfloat16 passes on TPU
            return program(*args, **kwargs)


def prepare(
    target: Target,
    prompts: Sequence[Prompt],
    drafter: Drafter | None = None,
    law: Law | str | None = None,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    stop: str | Sequence[str] = (),
    seed: int | Sequence[int] = 0,
    logprobs: bool = False,
    trace: bool = False,
) -> Job:
    """Check a request and lay it out; the arguments are those of `generate`."""
    drafter = Plain() if drafter is None else drafter
    ids = encode(target, prompts)
    check_drafter(drafter, target)
    limits, context_ends = token_limit(target, ids, max_new_tokens)
    rules = Sampling.rules(Sampling() if sampling is None else sampling, len(ids))
    strings = stop_strings(stop)
    rows = lay_out(ids, limits, drafter, BUCKET) | {
        "context_ends": jnp.array(context_ends),
        "rules": rules,
        "key": row_keys(seed, len(ids)),
    }
    arguments = over_mesh(target.model, rows) | {
        "stops": _stops(target.tokenizer, strings, target.eos_token_ids, target.model.vocab_size),
        "logprobs": logprobs,
        "trace_rounds": max(limit - len(p) for limit, p in zip(limits, ids, strict=True)) if trace else 0,
    }
    return Job(target, drafter, choose_law(law, rules), ids, strings, arguments)


def lay_out(ids: Sequence[Sequence[int]], limits: Sequence[int], drafter: Drafter, bucket: int = 1) -> dict[str, Any]:
    """The prompts as `decode.prefill` takes them: left-aligned, in a capacity rounded up to whole buckets."""
    longest = max(len(p) for p in ids) - 1
    longest = padded_length(longest) if longest else 0
    size = max(decode.capacity(max(limits), drafter), longest)
    tokens = np.zeros((len(ids), -(-size // bucket) * bucket), np.int32)
    for row, prompt in zip(tokens, ids, strict=True):
        row[: len(prompt)] = prompt
    return {
        "tokens": jnp.asarray(tokens),
        "prompt_length": jnp.array([len(p) for p in ids], jnp.int32),
        "limit": jnp.array(limits, jnp.int32),
        "longest": longest,
    }


@lru_cache(maxsize=8)
def _stops(tokenizer: Tokenizer | None, strings: tuple[str, ...], eos: tuple[int, ...], vocab_size: int) -> Stops:
    """`make_stops`, kept: its table takes a while, and is the same for every batch of a run."""
    token_bytes = tokenizer.token_bytes() if strings and tokenizer is not None else None
    return make_stops(eos, strings, token_bytes, vocab_size)


_prefill = jax.jit(decode.prefill, static_argnames=("longest", "logprobs", "trace_rounds"))
_step = jax.jit(decode.step, static_argnums=2, donate_argnums=3)
_run = jax.jit(decode.run, static_argnums=2, donate_argnums=3)
