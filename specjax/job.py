"""A batch ready to be decoded: everything checked, nothing computed. `generate` and `stream` run one; so can you.

job = specjax.prepare(target, ["Once upon a time"], drafter=specjax.PromptLookup())
state = job.prefill()
while state.running.any():
    state, info = job.step(state)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax.drafters.check import check_drafter
from specjax.drafters.plain import Plain
from specjax.laws import Law
from specjax.models.prefill import padded_length
from specjax.models.target import Target
from specjax.requests import Prompt, choose_law, encode, row_keys, stop_strings, token_limit
from specjax.sampling import Sampling
from specjax.state import DecodeState, Drafter, StepInfo
from specjax.stops import make_stops

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
    stop: list[str]
    arguments: dict[str, Any]

    def prefill(self) -> DecodeState:
        """The state before the first round."""
        return self._call(_prefill, self.target.model, self.drafter, **self.arguments)

    def step(self, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        """One round. The given state's memory is reused: it cannot be used again."""
        return self._call(_step, self.target.model, self.drafter, self.law, state)

    def run(self, state: DecodeState) -> DecodeState:
        """Rounds until every row has ended, in one call. The given state cannot be used again."""
        return self._call(_run, self.target.model, self.drafter, self.law, state)

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
    drafter = drafter or Plain()
    check_drafter(drafter, target)
    ids = encode(target, prompts)
    limits, context_ends = token_limit(target, ids, max_new_tokens)
    rules = (Sampling() if sampling is None else sampling).rules(len(ids))
    strings = stop_strings(stop)
    token_bytes = target.tokenizer.token_bytes() if strings and target.tokenizer is not None else None

    longest = max(len(p) for p in ids) - 1
    longest = padded_length(longest) if longest else 0
    size = max(decode.capacity(max(limits), drafter), longest)
    size = -(-size // BUCKET) * BUCKET
    tokens = np.zeros((len(ids), size), np.int32)
    for i, p in enumerate(ids):
        tokens[i, : len(p)] = p
    arguments = {
        "tokens": jnp.asarray(tokens),
        "prompt_length": jnp.array([len(p) for p in ids], jnp.int32),
        "limit": jnp.array(limits, jnp.int32),
        "context_ends": jnp.array(context_ends),
        "rules": rules,
        "stops": make_stops(target.eos_token_ids, strings, token_bytes, target.model.vocab_size),
        "key": row_keys(seed, len(ids)),
        "longest": longest,
        "logprobs": logprobs,
        "trace_rounds": max_new_tokens if trace else 0,
    }
    return Job(target, drafter, choose_law(law, rules), ids, strings, arguments)


_prefill = jax.jit(decode.prefill, static_argnames=("longest", "logprobs", "trace_rounds"))
_step = jax.jit(decode.step, static_argnums=2, donate_argnums=3)
_run = jax.jit(decode.run, static_argnums=2, donate_argnums=3)
