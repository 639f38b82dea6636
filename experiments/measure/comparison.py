"""Drafters against plain decoding on the same prompts: the timed calls, and the numbers made of them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.console import progress_bar
from common.drafters import PLAIN, Named
from common.evaluation import Call, Plan, evaluate, make_units
from common.exact import examine
from common.prompts import Conversation
from common.summary import Forks, find_forks, summarize

from measure.proposals import ProposalTimer
from measure.states import start_state
from specjax import Target


@dataclass(frozen=True)
class Measured:
    """What a run gives.

    Attributes:
        runs: a row of numbers for each task and drafter.
        totals: for each drafter, over all tasks.
        calls: every timed call.
        forks: the greedy texts that are not plain decoding's.
        warm_up_seconds: compiling, and the runs thrown away for it.
    """

    runs: list[dict[str, Any]]
    totals: list[dict[str, Any]]
    calls: list[Call]
    forks: Forks
    warm_up_seconds: float

    @property
    def faults(self) -> int:
        """Greedy texts of lossless laws that are not plain decoding's, by more than rounding explains."""
        return sum(row["faults"] for row in self.totals)

    def calls_of(self, label: str, task: str | None = None) -> list[Call]:
        """Those of one drafter, of all tasks or of one."""
        return [call for call in self.calls if call.drafter.label == label and task in (None, call.task)]


def compare(
    target: Target, drafters: Sequence[Named], conversations: Sequence[Conversation], plan: Plan, what: str = ""
) -> Measured:
    """Decode everything plainly and with drafters in turns, with a progress bar.

    Args:
        drafters: plain decoding first.
        what: said beside the bar, before the task.
    """
    units = make_units(conversations, plan.batch_size)
    timers: dict[str, ProposalTimer] = {}
    proposals: dict[str, list[float]] = {d.label: [] for d in drafters}

    with progress_bar() as bar:
        work = bar.add_task(f"{what}compiling", total=len(units))

        def done(calls: list[Call]) -> None:
            for d in drafters:
                if d.num_draft_tokens:
                    if d.label not in timers:
                        ids = calls[0].generation.prompt_ids
                        state = start_state(target.model, d.drafter, ids, plan.max_new_tokens, sampling=plan.sampling)
                        timers[d.label] = ProposalTimer(target.model, d.drafter, state)
                    proposals[d.label].append(timers[d.label]())
            bar.update(work, advance=1, description=what + calls[0].task)

        calls, warm_up = evaluate(target, drafters, units, plan, done)
    temperature = plan.sampling.temperature
    assert isinstance(temperature, int | float)  # one for all rows
    greedy = temperature == 0
    forks = find_forks(calls, lambda *texts: examine(target, plan.sampling, *texts)) if greedy else {}
    costs = draft_costs(drafters, calls, proposals)

    def rows(task: str, some: list[Call]) -> list[dict[str, Any]]:
        return summarize(some, task, forks, costs, temperature)

    tasks = dict.fromkeys(call.task for call in calls)
    runs = [row for task in tasks for row in rows(task, [call for call in calls if call.task == task])]
    return Measured(runs, rows("all", calls), calls, forks, warm_up)


def draft_costs(
    drafters: Sequence[Named], calls: Sequence[Call], proposals: dict[str, list[float]]
) -> dict[str, float | None]:
    """Draft cost c of each drafter; None for plain decoding, which has no drafter step."""
    plain = [call for call in calls if call.drafter.kind == PLAIN]
    # a batch runs until its last row ends: its rounds are those of its longest row
    rounds = sum(max(stats.target_calls for stats in call.generation.row_stats) for call in plain)
    step = sum(statistics.median(call.seconds) for call in plain) / rounds
    return {
        d.label: statistics.median(proposals[d.label]) / d.drafter.max_depth / step if proposals[d.label] else None
        for d in drafters
    }
