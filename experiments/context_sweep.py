"""Acceptance and speedup by the length of the context.

    python experiments/context_sweep.py --output results/context_sweep
    python experiments/context_sweep.py --tasks explain --drafters draft-model:PATH eagle:PATH --lengths 256 4096 ...

The same questions are asked at the end of ever longer conversations: earlier turns are other prompts of the file with
the answers that the target itself gives to them, the oldest one shortened so that the prompt has just the length asked
for. The questions do not depend on what came before, so what changes is the context alone; the answers do change a
little, and with them the acceptance, from length to length.

Expect plain steps to become slower as there is more cache to read, and a block's cost relative to a step to fall a
little, since all of its tokens share that reading. Drafters that search the text find more as it grows, most of it by
chance: more is proposed, a smaller share of it is accepted, and searching costs more (c). Trained drafters lose
acceptance beyond the lengths that they were trained on, draft models with a window or few layers first; a drafter with
a cache of its own pays for reading that too. Speedups leave out the prefill, which has a column of its own.

The first command takes minutes on two CPU cores.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import jax
import tyro
from common import plots
from common.console import exit_status, make_table, number, percent, show, small
from common.drafters import PLAIN, parse_drafters
from common.evaluation import Plan, check_prompts
from common.options import check_least, check_seed, check_some, settings_of
from common.prompts import Conversation, messages, prompt_ids, read_prompts
from common.results import check_output, provenance, write_json
from common.summary import DEFINITIONS
from measure.comparison import Measured, compare
from measure.shapes import load_target
from rich.table import Table

import specjax
from specjax import InputError, Sampling, Target
from specjax.cli import run_command_line

FILLERS = 24  # conversations are filled with so many prompts at most, again and again
OWN_DEFINITIONS = {
    "length": "tokens that the prompts were filled up to",
    "prompt_tokens": "tokens of the prompts, on average",
    "prefill_seconds": "of the prefill of one prompt, on average",
}
DEFINED = [
    *("tokens_per_call", "acceptance_rate", "alpha", "draft_cost", "tokens_per_second", "speedup"),
    "speedup_interval",
]


@dataclass(frozen=True)
class Options:
    """Measure acceptance and speedup at several lengths of the context.

    Attributes:
        target: "smollm2-135m-instruct", a Hugging Face directory, a .gguf file, or a Hub id.
        drafters: what to compare with plain decoding, as for eval.py.
        lengths: tokens that prompts are filled up to.
        prompts: JSONL file with question_id, category, turns; our own five tasks without it. First turns are used.
        tasks: only questions of these categories; a task is left out at lengths that one of its questions exceeds.
        limit: at most so many questions of each task.
        max_new_tokens: for each question.
        answer_tokens: of each answer in the earlier turns, at most.
        temperature: 0 is greedy.
        top_p: keep the most likely tokens that together hold this mass; 1 is off.
        dtype: of weights and computation.
        seed: of the sampled tokens.
        repetitions: how often each prompt is timed.
        output: directory for context_sweep.json and context_sweep.png.
    """

    target: str = "smollm2-135m-instruct"
    drafters: tuple[str, ...] = ("prompt-lookup:k=8", "suffix:k=8")
    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    prompts: Path | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = 1
    max_new_tokens: int = 64
    answer_tokens: int = 96
    temperature: float = 0.0
    top_p: float = 1.0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int = 0
    repetitions: int = 1
    output: Path | None = None

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p)

    def check(self) -> None:
        check_some(self, "lengths")
        check_least(self, lengths=1, limit=1, max_new_tokens=1, answer_tokens=1, repetitions=1)
        check_seed(self.seed)
        self.sampling.rules(1)


@dataclass(frozen=True)
class Point:
    """One drafter on one task at one length; see the definitions in the results."""

    length: int
    prompt_tokens: float
    task: str
    drafter: str
    tokens_per_call: float
    acceptance_rate: float | None
    alpha: float | None
    draft_cost: float | None
    prefill_seconds: float
    tokens_per_second: float
    speedup: float
    speedup_interval: list[float] | None


def main() -> int:
    options = tyro.cli(Options)
    begin = time.perf_counter()
    options.check()
    check_output(options.output)
    everything = [replace(c, turns=c.turns[:1]) for c in read_prompts(options.prompts)]
    chosen = {c.index for c in read_prompts(options.prompts, options.tasks, options.limit)}
    questions = [c for c in everything if c.index in chosen]
    asked = parse_drafters(options.drafters)
    target = load_target(options.target, options.dtype)
    drafters = [a.make(target, options.dtype) for a in asked]
    lengths = sorted(options.lengths)
    if lengths[-1] >= target.model.max_positions:
        context = target.model.max_positions
        raise InputError(f"--lengths: {lengths[-1]}, but {target.name} has a context of {context}, answers included")
    check_prompts(target, [*everything[:FILLERS], *questions])
    fitting = {length: that_fit(target, questions, length) for length in lengths}
    if not fitting[lengths[-1]]:
        raise InputError(f"--lengths: no task's questions fit into {lengths[-1]} tokens; expected a larger length")
    fillers = answered(target, everything[:FILLERS], options.answer_tokens)
    runs: dict[int, Measured] = {}
    for length, some in fitting.items():
        if not some:
            continue
        filled = [fill(target, question, fillers, length) for question in some]
        plan = Plan(
            batch_size=1,
            max_new_tokens=options.max_new_tokens,
            sampling=options.sampling,
            law=None,
            seed=options.seed,
            repetitions=options.repetitions,
            repeated_units=len(filled),
        )
        runs[length] = compare(target, drafters, filled, plan, f"length {length}: ")
    points = points_of(runs)
    seconds = time.perf_counter() - begin
    show(*report(target, options, points))
    show(f"{seconds:.0f} s in all.")
    if options.output is not None:
        content = {
            "provenance": provenance(target, total_seconds=seconds),
            "settings": settings_of(options),
            "definitions": {name: DEFINITIONS[name] for name in DEFINED} | OWN_DEFINITIONS,
            "points": [asdict(p) for p in points],
        }
        write_json(options.output / "context_sweep.json", content)
        plots.save(draw(target, points), options.output / "context_sweep.png")
        show(f"Written to {options.output}.")
    return exit_status(sum(run.faults for run in runs.values()))


def that_fit(target: Target, questions: Sequence[Conversation], length: int) -> list[Conversation]:
    """The questions of those tasks of which all fit, so that a task means the same at every length."""
    sizes = {c.index: len(prompt_ids(target, c)) for c in questions}
    too_long = {c.task for c in questions if sizes[c.index] > length}
    return [c for c in questions if c.task not in too_long]


def answered(target: Target, conversations: Sequence[Conversation], tokens: int) -> dict[int, tuple[str, str]]:
    """Each prompt with the target's own greedy answer, by the prompt's index."""
    chats = [messages(c) for c in conversations]
    texts = specjax.generate(target, chats, max_new_tokens=tokens).texts
    return {c.index: (c.turns[0], text) for c, text in zip(conversations, texts, strict=True)}


def fill(target: Target, question: Conversation, fillers: Mapping[int, tuple[str, str]], length: int) -> Conversation:
    """The question after as many earlier turns as fit into so many tokens, the oldest one shortened.

    The turns are other prompts than the question, starting behind its place in the file, and come again and again.
    """
    others = sorted((i for i in fillers if i != question.index), key=lambda i: (i < question.index, i))
    if not others:
        raise InputError("--prompts: expected two prompts or more; a question's earlier turns are the other ones")

    def after(*history: tuple[str, str]) -> Conversation:
        return replace(question, history=history)

    def fits(conversation: Conversation) -> bool:
        return len(prompt_ids(target, conversation)) <= length

    history: tuple[tuple[str, str], ...] = ()
    for oldest in (fillers[i] for i in cycle(others)):
        if not fits(after(oldest, *history)):
            break
        history = (oldest, *history)
    short, long = 0, max(len(text.split()) for text in oldest)  # words of both texts: so many fit, so many do not
    while long - short > 1:
        middle = (short + long) // 2
        short, long = (middle, long) if fits(after(first_words(oldest, middle), *history)) else (short, middle)
    return after(first_words(oldest, short), *history) if short else after(*history)


def first_words(turn: tuple[str, str], count: int) -> tuple[str, str]:
    """A message and its answer, each cut to so many words."""
    user, answer = (" ".join(text.split()[:count]) for text in turn)
    return user, answer


def points_of(runs: Mapping[int, Measured]) -> list[Point]:
    points = []
    for length, run in runs.items():
        for row in run.runs:
            prompts = [len(ids) for c in run.calls_of(PLAIN, row["task"]) for ids in c.generation.prompt_ids]
            points.append(
                Point(
                    length=length,
                    prompt_tokens=sum(prompts) / len(prompts),
                    task=row["task"],
                    drafter=row["drafter"],
                    tokens_per_call=row["tokens_per_call"],
                    acceptance_rate=row["acceptance_rate"],
                    alpha=row["alpha"],
                    draft_cost=row["draft_cost"],
                    prefill_seconds=row["prefill_seconds"] / len(prompts),
                    tokens_per_second=row["tokens_per_second"],
                    speedup=row["speedup"],
                    speedup_interval=row["speedup_interval"],
                )
            )
    return points


def report(target: Target, options: Options, points: Sequence[Point]) -> list[Table | str]:
    """The table, task by task, and what its columns mean."""
    rows: list[list[str] | None] = []
    for task in dict.fromkeys(p.task for p in points):
        for p in (p for p in points if p.task == task):
            if p.drafter == PLAIN and rows:
                rows.append(None)
            low, high = p.speedup_interval or (None, None)
            rows.append(
                [
                    p.task,
                    f"{p.length}",
                    number(p.prompt_tokens, 0),
                    p.drafter,
                    number(p.tokens_per_call),
                    percent(p.acceptance_rate),
                    number(p.alpha),
                    small(p.draft_cost),
                    number(p.prefill_seconds),
                    number(p.tokens_per_second, 1),
                    number(p.speedup),
                    "" if low is None else f"{number(low)} … {number(high)}",
                ]
            )
    what = f"temperature {options.temperature:g}" if options.temperature else "greedy"
    title = (
        f"{target.name}, {target.dtype}, {jax.devices()[0].device_kind}; batch 1, "
        f"{options.max_new_tokens} new tokens at most, {what}"
    )
    columns = ["task", "length", "prompt", "drafter", "tokens/call", "accepted", "α", "c"]
    columns += ["prefill s", "tokens/s", "speedup", "95%"]
    parts: list[Table | str] = [make_table(title, columns, rows, text=(0, 3))]
    missing = [
        f"{task} at {', '.join(map(str, lengths))}"
        for task in dict.fromkeys(p.task for p in points)
        if (lengths := sorted(set(options.lengths) - {p.length for p in points if p.task == task}))
    ]
    if missing:
        parts.append(f"Left out, because a question is longer than that: {'; '.join(missing)}.")
    return [
        *parts,
        f"length: {OWN_DEFINITIONS['length']}. prompt: {OWN_DEFINITIONS['prompt_tokens']}.",
        f"tokens/call: {DEFINITIONS['tokens_per_call']}. accepted: {DEFINITIONS['acceptance_rate']}. "
        f"α: {DEFINITIONS['alpha']}. c: {DEFINITIONS['draft_cost'].removeprefix('c: ')}.",
        f"prefill s: {OWN_DEFINITIONS['prefill_seconds']}. speedup: {DEFINITIONS['speedup']}, without the prefill.",
    ]


def draw(target: Target, points: Sequence[Point]) -> Any:
    """Acceptance, tokens per call and speedup, a column a task."""
    tasks = list(dict.fromkeys(p.task for p in points))
    drafters = [d for d in dict.fromkeys(p.drafter for p in points) if d != PLAIN]
    rows = {"acceptance rate": "acceptance_rate", "tokens per call": "tokens_per_call", "speedup": "speedup"}
    figure, axes = plots.panels(3, len(tasks), f"{target.name}, {target.dtype}: by context length", height=2.0)
    for column, task in enumerate(tasks):
        for row, (name, field) in enumerate(rows.items()):
            axis = axes[row][column]
            for i, drafter in enumerate(drafters):
                some = [p for p in points if (p.task, p.drafter) == (task, drafter)]
                known = [p for p in some if getattr(p, field) is not None]
                intervals = [p.speedup_interval for p in known] if field == "speedup" else None
                plots.measured(axis, [p.length for p in known], [getattr(p, field) for p in known], i, intervals)
            if field != "acceptance_rate":
                plots.level(axis, 1)
            plots.doubling(axis, sorted({p.length for p in points}))
            last = row == len(rows) - 1
            plots.label(axis, "" if row else task, "tokens of the prompt" if last else "", "" if column else name)
    plots.legend(figure, drafters, [("points", "measured")])
    return figure


if __name__ == "__main__":
    run_command_line(main)
