"""Tokens per call and speedup by draft length, drafter, task and temperature, and what the formulas predict of them.

    python experiments/sweep.py --output results/sweep
    python experiments/sweep.py --drafters draft-model:PATH eagle:PATH --k 1 2 3 5 8 --temperatures 0 0.8 --output DIR
    python experiments/sweep.py --drafters recycling eagle:PATH,depth=6,top_k=8,total=32 --tasks code --output DIR

A drafter is given without its length, and measured with each; one with a fixed form (a tree, or with k= already) is
measured as it is. Plain decoding and all drafters are timed in turns, prompt by prompt, one prompt at a time.

Two predictions are drawn over the points. The dotted one takes a drafter's longest chains, and asks what shorter ones
would have brought and cost: acceptances position by position, measured costs of blocks (v) and of drafting (c). The
dashed one is the textbook formula with a single α.

Tokens per call grow with k ever more slowly; the speedup has a maximum, early on text that is hard to guess, late (or
at the end of the axis) where the text repeats. Expect the dotted curve to follow the points within about a tenth for
drafters that always fill their drafts, and to lie above them by what a round costs outside of drafting and checking;
drafters that search the text find an easy stretch again after every short draft, so that short drafts do better than is
predicted from long ones. Expect the dashed curve far above the points of such drafters, since the formula takes for
granted that every round has a whole draft to test; and too low for long drafts of the others where a text has easy and
hard stretches: α is no constant, one accepted token makes the next more likely.

The first command takes minutes on two CPU cores.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import tyro
from common import plots
from common.console import exit_status, make_table, number, percent, progress_bar, show, small
from common.drafters import GROWN, KINDS, PLAIN, Asked, Named, parse_drafter, parse_drafters
from common.evaluation import Plan, check_prompts
from common.options import check_least, check_seed, check_some, settings_of
from common.prediction import DEFINITIONS as PREDICTED
from common.prediction import Drafted, formula, is_chain, predict_speedup
from common.prompts import read_prompts
from common.results import check_output, provenance, write_json
from common.summary import DEFINITIONS
from measure.comparison import Measured, compare
from measure.passes import PassTimes, time_passes
from measure.shapes import load_target
from measure.states import start_state
from rich.table import Table

from specjax import InputError, Plain, Sampling, Target
from specjax.cli import run_command_line
from specjax.ladder import ladder

EVERYTHING = "all"
LENGTH = "num_draft_tokens"
DEFINED = ("tokens_per_call", "acceptance_rate", "alpha", "draft_cost", "speedup", "speedup_interval")


@dataclass(frozen=True)
class Options:
    """Sweep the draft length of drafters, and compare with what the formulas predict.

    Attributes:
        target: "smollm2-135m-instruct", a Hugging Face directory, a .gguf file, or a Hub id.
        drafters: as for eval.py, without k, which `k` sets; those with a k or a tree of their own, or made of others,
            stay as they are.
        k: draft lengths.
        temperatures: each a run of its own; 0 is greedy.
        top_p: at temperatures above 0, keep the most likely tokens that together hold this mass; 1 is off.
        prompts: JSONL file with question_id, category, turns; our own five tasks without it.
        tasks: only these categories of the file.
        limit: at most so many prompts of each task.
        max_new_tokens: for each turn.
        dtype: of weights and computation.
        seed: of the sampled tokens.
        repetitions: how often each prompt is timed.
        turns: how often the cost of each block is measured.
        output: directory for sweep.json and a plot for each temperature.
    """

    target: str = "smollm2-135m-instruct"
    drafters: tuple[str, ...] = ("prompt-lookup", "suffix")
    k: tuple[int, ...] = (1, 2, 4, 8, 16)
    temperatures: tuple[float, ...] = (0.0,)
    top_p: float = 1.0
    prompts: Path | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = 1
    max_new_tokens: int = 64
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int = 0
    repetitions: int = 2
    turns: int = 5
    output: Path | None = None

    def sampling(self, temperature: float) -> Sampling:
        return Sampling(temperature=temperature, top_p=self.top_p if temperature else 1.0)

    def check(self) -> None:
        check_some(self, "drafters", "k", "temperatures")
        check_least(self, k=1, limit=1, max_new_tokens=1, repetitions=1, turns=1)
        check_seed(self.seed)
        for temperature in self.temperatures:
            self.sampling(temperature).rules(1)


@dataclass(frozen=True)
class Point:
    """One drafter on one task at one temperature, measured and predicted; see the definitions in the results.

    Attributes:
        family: the drafter without its length.
        k: nodes of a draft.
        source: the drafter whose rounds the prediction is made from: the longest of a family of chains, or itself.
    """

    temperature: float
    task: str
    family: str
    drafter: str
    k: int
    source: str
    tokens_per_call: float
    acceptance_rate: float | None
    alpha: float | None
    conditional: list[float | None]
    draft_cost: float
    speedup: float
    speedup_interval: list[float] | None
    predicted_tokens_per_call: float
    predicted_speedup: float
    formula_tokens_per_call: float | None
    formula_speedup: float | None


Family = tuple[Named, ...]


def main() -> int:
    options = tyro.cli(Options)
    begin = time.perf_counter()
    options.check()
    check_output(options.output)
    conversations = read_prompts(options.prompts, options.tasks, options.limit)
    asked = {text: lengths(text, options.k) for text in options.drafters if text != PLAIN}
    if not asked:
        raise InputError(f"--drafters: expected one besides {PLAIN}, with which all are compared")
    every = parse_drafters([a.label for family in asked.values() for a in family])
    target = load_target(options.target, options.dtype)
    named = {a.label: a.make(target, options.dtype) for a in every}
    families = {text: tuple(named[a.label] for a in family) for text, family in asked.items()}
    drafters = list(named.values())
    check_prompts(target, conversations)
    runs: dict[float, Measured] = {}
    for temperature in options.temperatures:
        plan = Plan(
            batch_size=1,
            max_new_tokens=options.max_new_tokens,
            sampling=options.sampling(temperature),
            law=None,
            seed=options.seed,
            repetitions=options.repetitions,
            repeated_units=len(conversations),
        )
        runs[temperature] = compare(target, drafters, conversations, plan, f"temperature {temperature:g}: ")
    costs = block_costs(target, drafters, runs.values(), options)
    points = [p for temperature, run in runs.items() for p in points_of(families, run, temperature, costs.costs())]
    seconds = time.perf_counter() - begin
    show(*report(target, options, points, costs))
    show(f"{seconds:.0f} s in all.")
    if options.output is not None:
        content = {
            "provenance": provenance(target, total_seconds=seconds),
            "settings": settings_of(options),
            "definitions": {name: DEFINITIONS[name] for name in DEFINED} | PREDICTED,
            "verify_cost": {str(size): cost for size, cost in costs.costs().items()},
            "points": [asdict(p) for p in points],
        }
        write_json(options.output / "sweep.json", content)
        for temperature in options.temperatures:
            some = [p for p in points if p.temperature == temperature]
            title = f"{target.name}, {target.dtype}, temperature {temperature:g}"
            plots.save(draw(title, some), options.output / f"sweep_temperature_{temperature:g}.png")
        show(f"Written to {options.output}.")
    return exit_status(sum(run.faults for run in runs.values()))


def lengths(text: str, ks: Sequence[int]) -> list[Asked]:
    """The drafter with each draft length; alone where it has none to set, or says what it has."""
    asked = parse_drafter(text)
    setting = KINDS[asked.kind].settings.get("k")
    if setting is None or setting.argument != LENGTH or any(name in asked.settings for name in (LENGTH, *GROWN)):
        return [asked]
    return [parse_drafter(f"{text}{',' if ':' in text else ':'}k={k}") for k in sorted(ks)]


def block_costs(target: Target, drafters: Sequence[Named], runs: Iterable[Measured], options: Options) -> PassTimes:
    """What passes cost over the blocks that these drafters have, at the longest prompt's length."""
    calls = [call for run in runs for call in run.calls]
    sizes = {1 + nodes for d in drafters for nodes in ladder(d.drafter)}
    sizes |= {r.block_tokens for call in calls for row in call.generation.trace or [] for r in row}
    prompt = max((call.generation.prompt_ids[0] for call in calls), key=len)
    deepest = max(drafters, key=lambda d: d.drafter.max_depth).drafter
    cache = start_state(target.model, Plain(), [prompt], options.max_new_tokens, like=deepest).cache
    with progress_bar() as bar:
        work = bar.add_task("blocks", total=len(sizes) * (options.turns + 2))
        return time_passes(target.model, cache, len(prompt), sorted(sizes), options.turns, lambda: bar.advance(work))


def points_of(
    families: dict[str, Family], run: Measured, temperature: float, verify_cost: dict[int, float]
) -> list[Point]:
    """Every drafter on every task, and on all of them together where there are several."""
    tasks = list(dict.fromkeys(row["task"] for row in run.runs))
    rows = run.runs + (run.totals if len(tasks) > 1 else [])
    found = {(row["task"], row["drafter"]): row for row in rows}
    points = []
    for task in dict.fromkeys(row["task"] for row in rows):
        for text, family in families.items():
            chains = [d for d in family if is_chain(d)]
            for d in family:
                longest = max(chains, key=lambda d: d.num_draft_tokens) if is_chain(d) else d
                drafted = Drafted.of(run.calls_of(longest.label, None if task == EVERYTHING else task))
                row = found[task, d.label]
                c, depth = row["draft_cost"], d.drafter.max_depth
                blocks = drafted.blocks if d is longest else drafted.chain_blocks(d)
                tokens = drafted.tokens_per_call(depth)
                by_alpha = formula(d, drafted.alpha, c, verify_cost)
                points.append(
                    Point(
                        temperature=temperature,
                        task=task,
                        family=text,
                        drafter=d.label,
                        k=d.num_draft_tokens,
                        source=longest.label,
                        tokens_per_call=row["tokens_per_call"],
                        acceptance_rate=row["acceptance_rate"],
                        alpha=row["alpha"],
                        conditional=row["acceptance_by_position"]["conditional"],
                        draft_cost=c,
                        speedup=row["speedup"],
                        speedup_interval=row["speedup_interval"],
                        predicted_tokens_per_call=tokens,
                        predicted_speedup=predict_speedup(tokens, depth, blocks, c, verify_cost),
                        formula_tokens_per_call=by_alpha[0],
                        formula_speedup=by_alpha[1],
                    )
                )
    return points


def report(target: Target, options: Options, points: Sequence[Point], costs: PassTimes) -> list[Table | str]:
    """The table, the draft lengths that are fastest, and what the columns mean."""
    rows: list[list[str] | None] = []
    before = None
    for p in points:
        group = (p.temperature, p.task, p.family)
        if before not in (None, group):
            rows.append(None)
        before = group
        low, high = p.speedup_interval or (None, None)
        rows.append(
            [
                f"{p.temperature:g}",
                p.task,
                p.drafter,
                number(p.tokens_per_call),
                number(p.predicted_tokens_per_call),
                number(p.formula_tokens_per_call),
                percent(p.acceptance_rate),
                number(p.alpha),
                small(p.draft_cost),
                number(p.speedup),
                "" if low is None else f"{number(low)} … {number(high)}",
                number(p.predicted_speedup),
                number(p.formula_speedup),
            ]
        )
    title = (
        f"{target.name}, {target.dtype}, {jax.devices()[0].device_kind}; batch 1, "
        f"{options.max_new_tokens} new tokens at most"
    )
    columns = ["T", "task", "drafter", "tokens/call", "predicted", "by α", "accepted", "α", "c"]
    columns += ["speedup", "95%", "predicted", "by α"]
    blocks = ", ".join(f"{size}: {cost:.2f}" for size, cost in costs.costs().items())
    return [
        make_table(title, columns, rows, text=(1, 2)),
        *fastest(points),
        f"A pass over so many tokens relative to one: {blocks}.",
        f"tokens/call: {DEFINITIONS['tokens_per_call']}. predicted: {PREDICTED['predicted_tokens_per_call']}. "
        f"by α: {PREDICTED['formula_tokens_per_call']}.",
        f"speedup: {DEFINITIONS['speedup']}; {DEFINITIONS['speedup_interval']}. predicted: "
        f"{PREDICTED['predicted_speedup']}. by α: {PREDICTED['formula_speedup']}.",
        "Predictions for a family of chains are made from the rounds of its longest; for trees from their own.",
        f"α: {DEFINITIONS['alpha']}. c: {DEFINITIONS['draft_cost'].removeprefix('c: ')}.",
    ]


def fastest(points: Sequence[Point]) -> list[str]:
    """The k that is fastest, measured and predicted, of each family of several."""
    lines = []
    for temperature, task, family in dict.fromkeys((p.temperature, p.task, p.family) for p in points):
        some = [p for p in points if (p.temperature, p.task, p.family) == (temperature, task, family)]
        if len(some) > 1:
            measured = max(some, key=lambda p: p.speedup)
            predicted = max(some, key=lambda p: p.predicted_speedup)
            lines.append(
                f"temperature {temperature:g}, {task}, {family}: fastest at k = {measured.k} "
                f"({measured.speedup:.2f} ×), predicted k = {predicted.k} ({predicted.predicted_speedup:.2f} ×)"
            )
    return lines


def draw(title: str, points: Sequence[Point]) -> Any:
    """Tokens per call above, speedups below, a column a task."""
    tasks = list(dict.fromkeys(p.task for p in points))
    families = list(dict.fromkeys(p.family for p in points))
    figure, axes = plots.panels(2, len(tasks), title)
    for column, task in enumerate(tasks):
        above, below = axes[0][column], axes[1][column]
        for i, family in enumerate(families):
            some = [p for p in points if (p.task, p.family) == (task, family)]
            k = [p.k for p in some]
            plots.measured(above, k, [p.tokens_per_call for p in some], i)
            plots.measured(below, k, [p.speedup for p in some], i, [p.speedup_interval for p in some])
            plots.predicted(above, k, [p.predicted_tokens_per_call for p in some], i)
            plots.predicted(below, k, [p.predicted_speedup for p in some], i)
            plots.predicted(above, k, [p.formula_tokens_per_call for p in some], i, dashed=True)
            plots.predicted(below, k, [p.formula_speedup for p in some], i, dashed=True)
        plots.level(below, 1)
        for axis in (above, below):
            plots.doubling(axis, sorted({p.k for p in points}))
        plots.label(above, task, y="" if column else "tokens per call")
        plots.label(below, x="k, draft tokens", y="" if column else "speedup")
    meaning = [("points", "measured"), ("dotted", "predicted by position"), ("dashed", "formula, one α")]
    plots.legend(figure, families, meaning)
    return figure


if __name__ == "__main__":
    run_command_line(main)
