"""From timed calls to the numbers of a results file: one row a task and drafter."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, cast

import numpy as np

from common.drafters import PLAIN
from common.evaluation import Call
from common.exact import FLOAT32_LIMIT, SHORT_LIMIT_ULP, Fork
from specjax import Stats
from specjax.metrics import DEFINITIONS as COUNTED
from specjax.metrics import ratio

DEFINITIONS = {
    **{name: COUNTED[name] for name in ("tokens_per_call", "acceptance_rate", "alpha")},
    "acceptance_by_position": f"marginal: {COUNTED['marginal']}; conditional: {COUNTED['conditional']}",
    "draft_cost": "c: the time of one propose, alone in a compiled loop, divided by the draft's depth, over the "
    "time of one plain decoding step of this run",
    "new_tokens, target_calls": "of all rows; a task's last, smaller batch is filled up by repeating its prompts",
    "prefill_seconds, seconds": "of the prefill, and of the decoding loop without it; over all prompts, the median of "
    "each one's repetitions",
    "tokens_per_second": "new_tokens / seconds",
    "speedup": "tokens_per_second over plain decoding's, the two decoded in turns, prompt by prompt",
    "speedup_interval": "95%, bootstrap over batches of prompts and over their repetitions",
    "matches_plain": "every token is plain decoding's; null where tokens are sampled",
    "near_ties": f"texts that leave plain decoding's where two logits are within {FLOAT32_LIMIT} (float32), or within "
    f"{SHORT_LIMIT_ULP} units in the last place of the largest logit (bfloat16, float16)",
    "faults": "texts that leave it elsewhere, where the law is lossless",
    "other_texts": "texts that leave it elsewhere, where the law is lossy",
    "lossless": "whether the acceptance law keeps the target's own law; of a lossy one's texts nothing follows for it",
}
RESAMPLES = 2000

Forks = dict[tuple[str, int, int, int], Fork]
"""By drafter's label, unit, turn and row."""


def summarize(
    calls: Sequence[Call], task: str, forks: Forks, draft_costs: dict[str, float | None], temperature: float
) -> list[dict[str, Any]]:
    """A row for each drafter of these calls."""
    groups: dict[str, list[Call]] = {}
    for call in calls:
        groups.setdefault(call.drafter.label, []).append(call)
    plain = next(group for group in groups.values() if group[0].drafter.kind == PLAIN)
    return [_row(group, plain, task, forks, draft_costs[label], temperature) for label, group in groups.items()]


def _row(
    calls: Sequence[Call],
    plain: Sequence[Call],
    task: str,
    forks: Forks,
    draft_cost: float | None,
    temperature: float,
) -> dict[str, Any]:
    drafter, law = calls[0].drafter, calls[0].generation.law
    stats = Stats.total(call.generation.stats for call in calls)
    seconds = sum(statistics.median(call.seconds) for call in calls)
    is_plain = drafter.kind == PLAIN
    mine = {key: fork for key, fork in forks.items() if key[0] == drafter.label}
    here = [mine[key] for call in calls for row in range(len(call.rows)) if (key := _key(call, row)) in mine]
    return {
        "task": task,
        "drafter": drafter.label,
        "law": law.name,
        "lossless": law.lossless,
        "law_settings": asdict(cast(Any, law)) if is_dataclass(law) else {},
        "num_draft_tokens": drafter.num_draft_tokens,
        "batch_size": len(calls[0].generation.token_ids),
        "temperature": temperature,
        "new_tokens": stats.new_tokens,
        "target_calls": stats.target_calls,
        "tokens_per_call": stats.tokens_per_call,
        "acceptance_rate": stats.acceptance_rate,
        "alpha": stats.alpha,
        "acceptance_by_position": stats.acceptance_by_position(),
        "draft_cost": draft_cost,
        "prefill_seconds": sum(statistics.median(call.prefill_seconds) for call in calls),
        "seconds": seconds,
        "tokens_per_second": ratio(stats.new_tokens, seconds),
        "speedup": 1.0 if is_plain else speedup(calls, plain),
        "speedup_interval": None if is_plain else speedup_interval(calls, plain),
        "matches_plain": None if temperature > 0 else not here,
        "near_ties": sum(fork.near_tie for fork in here),
        "faults": sum(not fork.near_tie for fork in here) if law.lossless else 0,
        "other_texts": 0 if law.lossless else sum(not fork.near_tie for fork in here),
    }


def find_forks(calls: Sequence[Call], examine: Callable[[list[int], list[int], list[int]], Fork | None]) -> Forks:
    """Compare every greedy text with plain decoding's by `examine(prompt, plain, other)`."""
    plain = {(call.unit, call.turn): call.generation for call in calls if call.drafter.kind == PLAIN}
    forks = {}
    for call in calls:
        reference = plain[call.unit, call.turn]
        for row in range(len(call.rows)):
            texts = (reference.prompt_ids[row], reference.token_ids[row], call.generation.token_ids[row])
            if (fork := examine(*texts)) is not None:
                forks[_key(call, row)] = fork
    return forks


def fork_of(forks: Forks, call: Call, row: int) -> Fork | None:
    return forks.get(_key(call, row))


def speedup(calls: Sequence[Call], plain: Sequence[Call]) -> float:
    return _rate(calls, [statistics.median(c.seconds) for c in calls]) / _rate(
        plain, [statistics.median(c.seconds) for c in plain]
    )


def speedup_interval(calls: Sequence[Call], plain: Sequence[Call], seed: int = 0) -> list[float] | None:
    """95% interval of the ratio of two rates, by bootstrap; None where there is nothing to draw from.

    Units are drawn again with all their turns, and in each turn its repetitions, the same ones for both drafters.
    """
    units: dict[int, list[tuple[Call, Call]]] = {}
    for a, b in zip(calls, plain, strict=True):
        units.setdefault(a.unit, []).append((a, b))
    pairs = list(units.values())
    if len(pairs) == 1 and len(pairs[0][0][0].seconds) == 1:
        return None
    rng = np.random.default_rng(seed)
    ratios = []
    for _ in range(RESAMPLES):
        tokens, seconds = np.zeros(2), np.zeros(2)
        for unit in rng.integers(len(pairs), size=len(pairs)):
            for a, b in pairs[unit]:
                times = rng.integers(len(a.seconds), size=len(a.seconds))
                tokens += (a.generation.stats.new_tokens, b.generation.stats.new_tokens)
                seconds += [statistics.median(c.seconds[t] for t in times) for c in (a, b)]
        ratios.append(tokens[0] / seconds[0] * seconds[1] / tokens[1])
    return [float(x) for x in np.percentile(ratios, [2.5, 97.5])]


def _rate(calls: Sequence[Call], seconds: Sequence[float]) -> float:
    return sum(c.generation.stats.new_tokens for c in calls) / sum(seconds)


def _key(call: Call, row: int) -> tuple[str, int, int, int]:
    return call.drafter.label, call.unit, call.turn, row
