"""Speedup by batch size, and the batch at which speculation starts to lose, beside what the formulas predict.

    python experiments/batch_sweep.py --output results/batch_sweep
    python experiments/batch_sweep.py --tasks rewrite --drafters draft-model:PATH,k=3 eagle:PATH,k=3 --output DIR

The same prompts are decoded one by one, in twos, in fours …, plainly and with each drafter in turns. Tokens per call
do not depend on the batch; what they cost does: a batch brings its own tokens to every pass, so that there is less to
gain from reading the weights once, and a block of k + 1 tokens comes to cost up to k + 1 plain steps. Moreover every
row waits for the longest draft of all rows, and the batch for its slowest row. Expect the speedup to fall with every
doubling, below 1 soon where drafts are seldom accepted and never where the text is copied; on two CPU cores, where a
pass is bound by arithmetic from about 10 tokens on, already at 2 to 4 rows of mixed text; on a GPU much later.

The dotted prediction knows only what was seen one by one (rounds and draft lengths of each prompt) and the measured
costs of blocks and drafting at each batch size; the dashed one is the textbook formula of one α, for rows that never
wait. The first follows the points up to what rounds cost outside of drafting and checking; the second shows by its
distance what waiting costs.

A drafter that adapts (`adaptive:`) is given the costs of each batch size, which are measured the first time and kept.
Below the table stands what it does there: the share of its rounds by block size. Expect whole drafts one by one, ever
smaller blocks in larger batches, at last plain steps but for a try now and then; and a speedup that follows the best of
the fixed drafts and does not fall far below 1. Its prediction is that of what it does one by one.

The first command takes minutes on two CPU cores, some less where costs are known.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from common import plots
from common.console import exit_status, make_table, number, percent, progress_bar, show, small
from common.drafters import ADAPTIVE, PLAIN, Named, parse_drafters
from common.evaluation import Call, Plan, check_prompts
from common.options import check_least, check_seed, check_some, settings_of
from common.prediction import DEFINITIONS as PREDICTED
from common.prediction import Drafted, formula, predict_speedup
from common.prompts import Conversation, prompt_ids, read_prompts
from common.results import check_output, provenance, write_json
from common.summary import DEFINITIONS
from measure.comparison import Measured, compare
from measure.passes import time_passes
from measure.shapes import load_target
from measure.states import start_state
from rich.table import Table

from specjax import Drafter, Plain, Sampling, Target
from specjax.cli import run_command_line
from specjax.ladder import ladder

OWN_DEFINITIONS = {
    "block_tokens": "mean size of the blocks that were run, of each row",
    "block_shares": "share of the rounds by the size of their block, 1 being a plain step; of a batch's longest row",
    "verify_cost": "time of a target pass by the tokens in each row's block, relative to one over a single token a row "
    "at the same batch size",
    "predicted_speedup": "rounds of plain decoding / rounds of the drafter × 1 / (draft steps × c + v): rounds of a "
    "batch are those of its slowest row when decoded one by one, v is the mean cost of its blocks, each as large as "
    "the row needs that drafts most, rows drafting independently as they do one by one",
    "formula_speedup": PREDICTED["formula_speedup"],
    "loses_from": "batch size at which the speedup falls below 1, interpolated over its logarithm; null where it does "
    "not; the smallest batch where it never reaches 1",
}
DEFINED = ("tokens_per_call", "alpha", "draft_cost", "tokens_per_second", "speedup", "speedup_interval")


@dataclass(frozen=True)
class Options:
    """Measure speedups at several batch sizes, and predict them.

    Attributes:
        target: "smollm2-135m-instruct", a Hugging Face directory, a .gguf file, or a Hub id.
        drafters: what to compare with plain decoding, as for eval.py.
        batch_sizes: prompts decoded together; one by one is always measured.
        prompts: JSONL file with question_id, category, turns; our own five tasks without it. First turns are used.
        tasks: only these categories of the file; of several, every batch has some of each.
        limit: at most so many prompts in all; as many as the largest batch holds without it.
        max_new_tokens: for each prompt.
        temperature: 0 is greedy.
        top_p: keep the most likely tokens that together hold this mass; 1 is off.
        dtype: of weights and computation.
        seed: of the sampled tokens.
        repetitions: how often each batch is timed.
        turns: how often the cost of each block is measured.
        output: directory for batch_sweep.json and batch_sweep.png.
    """

    target: str = "smollm2-135m-instruct"
    drafters: tuple[str, ...] = ("prompt-lookup:k=3", "prompt-lookup:k=8", "adaptive:prompt-lookup:k=8")
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    prompts: Path | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int = 0
    repetitions: int = 1
    turns: int = 3
    output: Path | None = None

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p)

    @property
    def sizes(self) -> list[int]:
        return sorted({1, *self.batch_sizes})

    def check(self) -> None:
        check_some(self, "batch_sizes")
        check_least(self, batch_sizes=1, limit=1, max_new_tokens=1, repetitions=1, turns=1)
        check_seed(self.seed)
        self.sampling.rules(1)


@dataclass(frozen=True)
class Point:
    """One drafter at one batch size; see the definitions in the results."""

    batch_size: int
    drafter: str
    tokens_per_call: float
    alpha: float | None
    draft_cost: float | None
    block_tokens: float
    block_shares: dict[int, float]
    tokens_per_second: float
    speedup: float
    speedup_interval: list[float] | None
    predicted_speedup: float | None
    formula_speedup: float | None


def main() -> int:
    options = tyro.cli(Options)
    begin = time.perf_counter()
    options.check()
    check_output(options.output)
    everything = read_prompts(options.prompts, options.tasks)
    conversations = mixed(everything, options.limit or max(options.sizes))
    asked = parse_drafters(options.drafters)
    target = load_target(options.target, options.dtype)
    check_prompts(target, conversations)
    runs: dict[int, Measured] = {}
    costs: dict[int, dict[int, float]] = {}
    for size in options.sizes:
        drafters = [a.make(target, options.dtype, size) for a in asked]  # those that adapt need the costs there
        plan = Plan(
            batch_size=size,
            max_new_tokens=options.max_new_tokens,
            sampling=options.sampling,
            law=None,
            seed=options.seed,
            repetitions=options.repetitions,
            repeated_units=len(conversations),
        )
        runs[size] = compare(target, drafters, conversations, plan, f"batch {size}: ")
        costs[size] = block_costs(target, drafters, conversations, runs[1], size, options)
    points = points_of(drafters, runs, costs)
    seconds = time.perf_counter() - begin
    losing = {d.label: loses_from(points, d.label) for d in drafters if d.kind != PLAIN}
    show(*report(target, options, points, costs, losing))
    show(f"{seconds:.0f} s in all.")
    if options.output is not None:
        content = {
            "provenance": provenance(target, total_seconds=seconds),
            "settings": settings_of(options),
            "definitions": {name: DEFINITIONS[name] for name in DEFINED} | OWN_DEFINITIONS,
            "verify_cost": {str(size): {str(n): v for n, v in table.items()} for size, table in costs.items()},
            "points": [asdict(p) for p in points],
            "loses_from": losing,
        }
        write_json(options.output / "batch_sweep.json", content)
        plots.save(draw(target, points), options.output / "batch_sweep.png")
        show(f"Written to {options.output}.")
    return exit_status(sum(run.faults for run in runs.values()))


def mixed(conversations: Sequence[Conversation], count: int) -> list[Conversation]:
    """The first turns of at most `count` prompts, one of each task after the other, as one task."""
    tasks = list(dict.fromkeys(c.task for c in conversations))
    queues = [[c for c in conversations if c.task == task] for task in tasks]
    longest = max(map(len, queues))
    turns = [queue[i] for i in range(longest) for queue in queues if i < len(queue)]
    name = tasks[0] if len(tasks) == 1 else "mixed"
    return [replace(c, task=name, turns=c.turns[:1]) for c in turns[:count]]


def block_costs(
    target: Target,
    drafters: Sequence[Named],
    conversations: Sequence[Conversation],
    single: Measured,
    batch_size: int,
    options: Options,
) -> dict[int, float]:
    """What passes cost over the blocks that these drafters have, at this batch size.

    Args:
        single: the run one by one; blocks with probes are larger than a drafter says, and were seen there.
    """
    sizes = {1 + nodes for d in drafters for nodes in ladder(d.drafter)}
    sizes |= {r.block_tokens for call in single.calls for row in call.generation.trace or [] for r in row}
    prompts = [prompt_ids(target, conversations[i % len(conversations)]) for i in range(batch_size)]
    deepest: Drafter = max((d.drafter for d in drafters), key=lambda drafter: drafter.max_depth)
    cache = start_state(target.model, Plain(), prompts, options.max_new_tokens, like=deepest).cache
    with progress_bar() as bar:
        work = bar.add_task(f"batch {batch_size}: blocks", total=len({1, *sizes}) * (options.turns + 2))
        length = max(len(p) for p in prompts)
        times = time_passes(target.model, cache, length, sorted(sizes), options.turns, lambda: bar.advance(work))
    return times.costs()


def points_of(
    drafters: Sequence[Named], runs: Mapping[int, Measured], costs: Mapping[int, Mapping[int, float]]
) -> list[Point]:
    """Every drafter at every batch size, plain decoding first."""
    points = []
    for size, run in runs.items():
        rows = {row["drafter"]: row for row in run.totals}
        for d in drafters:
            row = rows[d.label]
            predicted = by_alpha = None
            blocks = blocks_run(run.calls_of(d.label))
            if d.kind != PLAIN:
                drafted = Drafted.of(runs[1].calls_of(d.label))
                tokens = slowest_rows(run.calls_of(PLAIN), runs[1].calls_of(PLAIN), runs[1].calls_of(d.label))
                c = row["draft_cost"]
                predicted = predict_speedup(tokens, d.drafter.max_depth, drafted.blocks, c, costs[size], rows=size)
                _, by_alpha = formula(d, drafted.alpha, c, costs[size])
            points.append(
                Point(
                    batch_size=size,
                    drafter=d.label,
                    tokens_per_call=row["tokens_per_call"],
                    alpha=row["alpha"],
                    draft_cost=row["draft_cost"],
                    block_tokens=float(np.mean(blocks)),
                    block_shares={size: blocks.count(size) / len(blocks) for size in sorted(set(blocks))},
                    tokens_per_second=row["tokens_per_second"],
                    speedup=row["speedup"],
                    speedup_interval=row["speedup_interval"],
                    predicted_speedup=predicted,
                    formula_speedup=by_alpha,
                )
            )
    return points


def slowest_rows(batches: Sequence[Call], plain: Sequence[Call], drafted: Sequence[Call]) -> float:
    """Rounds of plain decoding over rounds of a drafter, where each batch has as many as its slowest row.

    Args:
        batches: who is decoded together.
        plain, drafted: the prompts one by one.
    """

    def rounds(calls: Sequence[Call]) -> int:
        each = {call.rows[0].index: call.generation.row_stats[0].target_calls for call in calls}
        return sum(max(each[c.index] for c in batch.rows) for batch in batches)

    return rounds(plain) / rounds(drafted)


def blocks_run(calls: Sequence[Call]) -> list[int]:
    """Block sizes of the rounds of every batch, which are those of the row that had most."""
    return [r.block_tokens for call in calls for r in max(call.generation.trace or [[]], key=len)]


def adapted(points: Sequence[Point], drafter: str) -> list[str]:
    """What a drafter that adapts did at each batch size."""
    lines = []
    for p in points:
        if p.drafter == drafter:
            shares = ", ".join(f"{size}: {percent(share)}" for size, share in p.block_shares.items())
            lines.append(f"{drafter}, batch {p.batch_size}: rounds by block size {shares}; speedup {p.speedup:.2f}.")
    return lines


def loses_from(points: Sequence[Point], drafter: str) -> dict[str, float | None]:
    """Where each of a drafter's curves falls below 1; without those that it does not have."""
    some = [p for p in points if p.drafter == drafter]
    sizes = [p.batch_size for p in some]
    names = {"measured": "speedup", "predicted": "predicted_speedup", "formula": "formula_speedup"}
    curves = {name: [getattr(p, field) for p in some] for name, field in names.items()}
    return {name: crossing(sizes, curve) for name, curve in curves.items() if any(s is not None for s in curve)}


def crossing(sizes: Sequence[int], speedups: Sequence[float | None]) -> float | None:
    """The batch size from which on the speedup stays below 1, interpolated over the logarithm of the size.

    Returns:
        None where it does not stay below 1 up to the largest size, or is not known; the smallest size where it never
        reaches 1.
    """
    known = [(size, s) for size, s in zip(sizes, speedups, strict=True) if s is not None]
    if not known or known[-1][1] >= 1:
        return None
    above = [i for i, (_, s) in enumerate(known) if s >= 1]
    if not above:
        return float(known[0][0])
    (left, high), (right, low) = known[above[-1]], known[above[-1] + 1]
    share = (high - 1) / (high - low)
    return float(left * (right / left) ** share)


def report(
    target: Target,
    options: Options,
    points: Sequence[Point],
    costs: Mapping[int, Mapping[int, float]],
    losing: Mapping[str, Mapping[str, float | None]],
) -> list[Table | str]:
    """The table, where each drafter loses, and what the columns mean."""
    rows: list[list[str] | None] = []
    for p in points:
        if p.drafter == PLAIN and rows:
            rows.append(None)
        low, high = p.speedup_interval or (None, None)
        rows.append(
            [
                f"{p.batch_size}",
                p.drafter,
                number(p.tokens_per_call),
                number(p.alpha),
                small(p.draft_cost),
                number(p.block_tokens, 1),
                number(p.tokens_per_second, 1),
                number(p.speedup),
                "" if low is None else f"{number(low)} … {number(high)}",
                number(p.predicted_speedup),
                number(p.formula_speedup),
            ]
        )
    what = f"temperature {options.temperature:g}" if options.temperature else "greedy"
    title = (
        f"{target.name}, {target.dtype}, {jax.devices()[0].device_kind}; {options.max_new_tokens} new tokens at most, "
        f"{what}"
    )
    columns = ("batch", "drafter", "tokens/call", "α", "c", "block", "tokens/s", "speedup", "95%", "predicted", "by α")
    parts: list[Table | str] = [make_table(title, columns, rows, text=(1,))]
    for drafter, found in losing.items():
        never = f"not up to {max(p.batch_size for p in points)}"
        places = ", ".join(f"{name} {never if place is None else number(place, 1)}" for name, place in found.items())
        parts.append(f"{drafter} is slower than plain decoding from batch: {places}.")
    for drafter in losing:
        if drafter.startswith(f"{ADAPTIVE}:"):
            parts += adapted(points, drafter)
    for size, table in costs.items():
        blocks = ", ".join(f"{tokens}: {cost:.2f}" for tokens, cost in table.items())
        parts.append(f"Batch {size}: a pass over so many tokens a row relative to one: {blocks}.")
    return [
        *parts,
        f"speedup: {DEFINITIONS['speedup']}; {DEFINITIONS['speedup_interval']}.",
        f"predicted: {OWN_DEFINITIONS['predicted_speedup']}. by α: {OWN_DEFINITIONS['formula_speedup']}.",
        f"block: {OWN_DEFINITIONS['block_tokens']}. c: {DEFINITIONS['draft_cost'].removeprefix('c: ')}.",
    ]


def draw(target: Target, points: Sequence[Point]) -> Any:
    """Speedups, measured and predicted, tokens per second, and the blocks that were run."""
    figure, [[left, middle, right]] = plots.panels(1, 3, f"{target.name}, {target.dtype}: by batch size", 3.6, 3.2)
    drafters = list(dict.fromkeys(p.drafter for p in points))
    for i, drafter in enumerate(drafters):
        some = [p for p in points if p.drafter == drafter]
        sizes = [p.batch_size for p in some]
        plots.measured(middle, sizes, [p.tokens_per_second for p in some], i)
        plots.measured(right, sizes, [p.block_tokens for p in some], i)
        if drafter != PLAIN:
            plots.measured(left, sizes, [p.speedup for p in some], i, [p.speedup_interval for p in some])
            plots.predicted(left, sizes, [p.predicted_speedup for p in some], i)
            plots.predicted(left, sizes, [p.formula_speedup for p in some], i, dashed=True)
    plots.level(left, 1)
    for axis in (left, middle, right):
        plots.doubling(axis, sorted({p.batch_size for p in points}))
    plots.label(left, x="batch size", y="speedup over plain decoding")
    plots.label(middle, x="batch size", y="tokens per second")
    plots.label(right, x="batch size", y="tokens in a block, mean")
    meaning = [("points", "measured"), ("dotted", "predicted"), ("dashed", "formula, one α")]
    plots.legend(figure, drafters, meaning)
    return figure


if __name__ == "__main__":
    run_command_line(main)
