"""The law test: whether sampled texts follow the target's own law."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax import decode
from specjax.drafters.check import check_drafter
from specjax.drafters.plain import Plain
from specjax.errors import InputError, SpecjaxError, check_whole
from specjax.job import lay_out
from specjax.laws import Law
from specjax.models.target import Target
from specjax.requests import choose_law
from specjax.sampling import Sampling
from specjax.state import BROKEN, Counters, DecodeState, Drafter
from specjax.stops import make_stops
from specjax.testing.exact import exact_law
from specjax.testing.models import tiny_target
from specjax.trees import Draft

SIGMAS = 5  # a right law fails about once in a million tests


@dataclass(frozen=True)
class LawResult:
    """What a law test found, for the prompt that did worst.

    Attributes:
        distance: total variation between the empirical and the exact law of the first tokens.
        noise: the distance that sampling noise explains: mean plus five standard deviations of what texts drawn from
            the exact law itself would show.
        expected: that mean.
        passed: no prompt's distance is above its noise.
        samples: texts drawn, over all prompts.
        distances: per prompt.
        crossed: share of the texts that took more than one round.
        acceptance_rate: accepted / proposed draft tokens; None where nothing was proposed.
    """

    distance: float
    noise: float
    expected: float
    passed: bool
    samples: int
    distances: tuple[float, ...]
    crossed: float
    acceptance_rate: float | None


def law_test(
    target: Target | Any,
    drafter: Drafter | None = None,
    law: Law | str | None = None,
    sampling: Sampling | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    num_tokens: int = 3,
    samples: int = 200_000,
    seed: int = 0,
    rows: int = 8192,
    exact: Sequence[Float[np.ndarray, "..."]] | None = None,
) -> LawResult:
    """Compare the law of the first `num_tokens` committed tokens with the target's own.

    The engine decodes thousands of copies of the prompts at once, each with its own key. Rounds go on until every copy
    has its tokens, so most texts cross from one round into the next, and no draft is cut short at the end of the text.
    EOS ids do not end a text here.

    Args:
        target: with a small vocabulary: `V ** num_tokens` texts are counted. A `TableModel`, or a tiny model.
        law: as in `generate`.
        sampling: None is temperature 1; per-prompt settings may be sequences.
        prompts: token ids, best of unequal length; None for two short ones.
        num_tokens: tokens whose joint law is compared.
        samples: texts to draw, over all prompts (rounded up to whole batches).
        rows: batch size.
        exact: the law to compare with, one array `[V] * num_tokens` a prompt; None: `exact_law` finds it.
    """
    check_whole("samples", samples, 1)
    check_whole("rows", rows, 1)
    target = target if isinstance(target, Target) else tiny_target(target)
    size = target.model.vocab_size
    drafter = Plain() if drafter is None else drafter
    sampling = Sampling(temperature=1.0) if sampling is None else sampling
    starts = [[1, 0, 2 % size, 1], [size - 1]] if prompts is None else [list(p) for p in prompts]
    if len(starts) < 2 or num_tokens < 1 or size**num_tokens > 1_000_000:
        raise InputError(
            f"law_test: expected two prompts or more, and at most 1,000,000 texts; got {len(starts)} prompts and "
            f"{size} ** {num_tokens} texts"
        )
    if wrong := [t for prompt in starts for t in prompt if not 0 <= t < size]:
        raise InputError(f"law_test: prompt token {wrong[0]} is outside the target's vocabulary of {size}")
    if not all(starts):
        raise InputError("law_test: a prompt is empty; expected a token or more")
    check_drafter(drafter, target)
    rules = sampling.rules(len(starts))
    # as `generate` does; the defaults of recent GPUs and TPUs round enough to bend a law
    with jax.default_matmul_precision("highest" if target.dtype == "float32" else None):
        if exact is None:
            exact = [exact_law(target, p, num_tokens, _settings(sampling, i)) for i, p in enumerate(starts)]
        copies = -(-min(rows, samples) // len(starts))
        calls = -(-samples // (copies * len(starts)))
        batch = _batch(starts, copies, num_tokens, drafter)
        rules = jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0), rules)
        start = _fill(target.model, drafter, rules=rules, stops=make_stops((), (), None, size), **batch)
        check_draft(target.model, drafter, start)
        counts = np.zeros((len(starts), size**num_tokens), np.int64)
        crossed = proposed = accepted = 0
        for key in jax.random.split(jax.random.key(seed), calls):
            keys = jax.random.split(key, copies * len(starts))
            drawn = _draw(target.model, drafter, choose_law(law, rules), start, keys, num_tokens)
            texts, first, finish, counters = jax.tree.map(np.asarray, drawn)
            if (finish == BROKEN).any():
                raise SpecjaxError("law_test: the target's law was not finite or allowed no token")
            codes = np.ravel_multi_index(tuple(texts.T), (size,) * num_tokens).reshape(len(starts), copies)
            counts += np.stack([np.bincount(row, minlength=size**num_tokens) for row in codes])
            crossed += int((first < num_tokens).sum())
            proposed += int(counters.proposed.sum())
            accepted += int(counters.accepted.sum())
    return _compare(counts, exact, crossed, accepted / proposed if proposed else None, seed)


def check_draft(model: Any, drafter: Drafter, state: DecodeState) -> None:
    """Look at a first draft. The engine trusts drafts: what breaks the contract may bend the law, or be left out.

    Raises:
        InputError: what is wrong with it.
    """
    name = type(drafter).__name__
    proposed = jax.jit(lambda drafter, state: drafter.propose(state.memory, decode.context(model, state)))(
        drafter, state
    )
    if not (isinstance(proposed, tuple) and len(proposed) == 2 and isinstance(proposed[0], Draft)):
        raise InputError(f"{name}.propose: expected a Draft and the memory, got {type(proposed).__name__}")
    draft, memory = proposed
    before, after = (str(jax.tree.structure(x)) for x in (state.memory, memory))
    if before != after:
        raise InputError(f"{name}.propose: the memory it returns has another structure than the one it was given")
    batch, size = state.tokens.shape[0], model.vocab_size
    shape = (batch, drafter.num_nodes)
    for field in ("tokens", "parents", "valid"):
        if (found := getattr(draft, field).shape) != shape:
            raise InputError(f"{name}.propose: {field} of shape {found}; expected {shape}, [B, num_nodes]")
    if not jnp.issubdtype(draft.tokens.dtype, jnp.integer):
        raise InputError(f"{name}.propose: tokens of dtype {draft.tokens.dtype}; expected token ids, whole numbers")
    tokens, parents, valid = (np.asarray(x) for x in (draft.tokens, draft.parents, draft.valid))
    if (valid & ((tokens < 0) | (tokens >= size))).any():
        raise InputError(f"{name}.propose: a valid node has a token outside 0 to {size - 1}")
    if (valid & ((parents < -1) | (parents >= np.arange(shape[1])))).any():
        raise InputError(f"{name}.propose: a node's parent stands after it, or is no node; trees.order puts them right")
    if (np.diff(valid.astype(int), axis=1) > 0).any():
        raise InputError(f"{name}.propose: valid nodes come first; trees.order puts them there")
    if draft.drawn is None:
        return
    if draft.q is None or draft.q.shape != (*shape, size):
        found = None if draft.q is None else draft.q.shape
        raise InputError(f"{name}.propose: drawn nodes and q of shape {found}; expected {(*shape, size)}, [B, N, V]")
    law, drawn = np.asarray(draft.q), valid & np.asarray(draft.drawn)
    chance = np.take_along_axis(law, np.where(valid, tokens, 0)[..., None], axis=2)[..., 0]
    if (drawn & ((np.abs(law.sum(-1) - 1) > 1e-3) | (law < 0).any(-1) | (chance <= 0))).any():
        raise InputError(f"{name}.propose: q of a drawn node is no law that its token can be drawn from (sums to 1)")


_fill = jax.jit(decode.prefill, static_argnames="longest")


@partial(jax.jit, static_argnames=("law", "num_tokens"))
def _draw(
    model: Any, drafter: Drafter, law: Law, start: DecodeState, key: Array, num_tokens: int
) -> tuple[Int[Array, "B n"], Int[Array, "B"], Int[Array, "B"], Counters]:
    """Decode with new keys: every row's first tokens, how many its first round gave, its finish and counters."""

    def short(carry: tuple[DecodeState, Array]) -> Array:
        state = carry[0]
        return (state.running & (state.length < state.prompt_length + num_tokens)).any()

    def body(carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
        state, info = decode.step(model, drafter, law, carry[0])
        return state, jnp.where(state.round == 1, info.count, carry[1])

    state, first = jax.lax.while_loop(short, body, (replace(start, key=key), jnp.zeros_like(start.length)))
    places = start.length[:, None] + jnp.arange(num_tokens)
    return jnp.take_along_axis(state.tokens, places, axis=1), first, state.finish, state.counters


def _batch(prompts: list[list[int]], copies: int, num_tokens: int, drafter: Drafter) -> dict[str, Any]:
    """The engine's arguments for `copies` of each prompt, those of one prompt next to each other.

    The limit leaves room for a whole draft and its bonus token behind the last token that is looked at.
    """
    batch = lay_out(prompts, [len(p) + num_tokens + drafter.max_depth for p in prompts], drafter)
    longest = batch.pop("longest")
    batch = {name: jnp.repeat(rows, copies, axis=0) for name, rows in batch.items()}
    return batch | {"longest": longest, "key": jax.random.split(jax.random.key(0), len(prompts) * copies)}


def _compare(
    counts: Int[np.ndarray, "P X"],
    exact: Sequence[Float[np.ndarray, "..."]],
    crossed: int,
    acceptance_rate: float | None,
    seed: int,
) -> LawResult:
    """Total variation of each prompt's counts from its exact law, beside that of counts drawn from the exact law."""
    random = np.random.default_rng(seed)
    worst, distances = (0.0, 1.0, 0.0), []
    for row, law in zip(counts, exact, strict=True):
        p = np.asarray(law, np.float64).reshape(-1)
        p = p / p.sum()
        drawn = random.multinomial(row.sum(), p, size=200) / row.sum()
        null = 0.5 * np.abs(drawn - p).sum(-1)
        distance = 0.5 * float(np.abs(row / row.sum() - p).sum())
        noise = float(null.mean() + SIGMAS * null.std()) + 1e-9
        distances.append(distance)
        if distance / noise > worst[0] / worst[1]:
            worst = (distance, noise, float(null.mean()))
    distance, noise, expected = worst
    samples = int(counts.sum())
    return LawResult(
        distance, noise, expected, distance <= noise, samples, tuple(distances), crossed / samples, acceptance_rate
    )


def _settings(sampling: Sampling, prompt: int) -> Sampling:
    """One prompt's settings."""
    values = {f.name: getattr(sampling, f.name) for f in fields(sampling) if f.name != "processors"}
    return replace(sampling, **{name: v if np.ndim(v) == 0 else v[prompt] for name, v in values.items()})
