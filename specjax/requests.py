"""From what a user passes to what the engine takes: prompts, limits, the law, keys. All checked before any compute."""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from specjax.block_verification import BlockVerification
from specjax.errors import InputError
from specjax.laws import Greedy, Law, Rejection, Typical
from specjax.models.target import Target
from specjax.sampling import Rules

LAWS: dict[str, Law] = {law.name: law for law in (Greedy(), Rejection(), BlockVerification(), Typical())}

Prompt = str | Sequence[dict[str, Any]] | Sequence[int]


def encode(target: Target, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of every prompt: raw text, chat messages (through the template), or ids as they are."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        raise InputError(f"prompts: expected a list of prompts, got {type(prompts).__name__}; write [prompt] for one")
    if not isinstance(target, Target):
        raise InputError(f"target: expected what specjax.load returns, got {type(target).__name__}")
    if not prompts:
        raise InputError("prompts: expected at least one, got an empty list")
    return [_encode_one(target, i, prompt) for i, prompt in enumerate(prompts)]


def _encode_one(target: Target, index: int, prompt: Prompt) -> list[int]:
    if hasattr(prompt, "__array__"):
        prompt = np.atleast_1d(np.asarray(prompt)).tolist()
    if not isinstance(prompt, str | Sequence) or len(prompt) == 0:
        raise InputError(f"prompt {index}: expected text, chat messages or token ids, got {prompt!r}")
    if isinstance(prompt, str) or isinstance(prompt[0], dict):
        if target.tokenizer is None:
            raise InputError(f"prompt {index}: this target has no tokenizer; give token ids")
        tokenizer, chat = target.tokenizer, cast(Any, prompt)
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(list(chat))
        if not ids:
            raise InputError(f"prompt {index}: {prompt!r} encodes to no token; give at least one")
        return list(ids)
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise InputError(f"prompt {index}: expected token ids, got {token!r}")
        if not 0 <= token < target.model.vocab_size:
            raise InputError(f"prompt {index}: token id {token} is outside the vocabulary of {target.model.vocab_size}")
    return [int(cast(int, token)) for token in prompt]


def token_limit(target: Target, ids: list[list[int]], max_new_tokens: int) -> tuple[list[int], list[bool]]:
    """Length at which each row ends, and whether that is the end of the context."""
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 1:
        raise InputError(f"max_new_tokens: expected a whole number of at least 1, got {max_new_tokens!r}")
    context = target.model.max_positions
    for i, prompt in enumerate(ids):
        if len(prompt) >= context:
            raise InputError(
                f"prompt {i} has {len(prompt)} tokens, but the context of {context} must hold the prompt and at least "
                "one new token; shorten it"
            )
    limits = [min(len(prompt) + int(max_new_tokens), context) for prompt in ids]
    return limits, [len(prompt) + max_new_tokens > context for prompt in ids]


def choose_law(law: Law | str | None, rules: Rules) -> Law:
    """The law by name; None is greedy where every temperature is 0, else rejection sampling."""
    if law is None:
        law = "rejection" if rules.drawn else "greedy"
    if isinstance(law, str) and law in LAWS:
        law = LAWS[law]
    if isinstance(law, str | type) or not callable(law) or not (hasattr(law, "name") and hasattr(law, "lossless")):
        raise InputError(f"unknown law {law!r}: expected one of {', '.join(map(repr, LAWS))}, or a law object")
    if law.name == "greedy" and rules.drawn:
        raise InputError("the greedy law needs temperature 0 in every row; use law='rejection', or leave it out")
    return law


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """One stop string, several or none."""
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or any(not isinstance(s, str) or not s for s in strings):
        raise InputError(f"stop: expected a non-empty string or several, got {stop!r}")
    return tuple(strings)


def row_keys(seed: int | Sequence[int], batch: int) -> Any:
    """One PRNG key a row. From one seed, row i takes stream i; with a seed per prompt its place does not matter."""
    one = isinstance(seed, int | np.integer)
    seeds: Any = [seed] * batch if one else seed
    if isinstance(seeds, str) or not isinstance(seeds, Sequence | np.ndarray) or len(seeds) != batch:
        raise InputError(f"seed: expected a whole number, or one for each of {batch} prompts, got {seed!r}")
    for value in seeds:
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < 2**32:
            raise InputError(f"seed: expected whole numbers from 0 to 2**32 - 1, got {value!r}")
    # with a seed per prompt, each row is as if it were the first of its own batch
    streams = jnp.arange(batch) if one else jnp.zeros(batch, jnp.int32)
    numbers = jnp.asarray(np.array([int(value) for value in seeds], np.uint32))
    return jax.vmap(lambda value, i: jax.random.fold_in(jax.random.key(value), i))(numbers, streams)
