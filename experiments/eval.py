"""Decode the same prompts plainly and speculatively: the texts, the tokens per target call, the tokens per second.

    python experiments/eval.py
    python experiments/eval.py --drafters prompt-lookup:k=8 draft-model:PATH,k=4 --tasks rewrite --output results
    python experiments/eval.py --prompts mt_bench_question.jsonl --limit 2 --temperature 0.8 --top-p 0.95

The first command takes about 2 minutes on two CPU cores, and ends in a table of five tasks. Every greedy text is
compared with plain decoding's, token for token; the exit status is 1 where one differs by more than rounding explains.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import tyro
from common.console import exit_status, make_table, number, percent, show, small
from common.drafters import PLAIN, Named, parse_drafters
from common.evaluation import Call, Plan, check_prompts
from common.options import check_least, check_seed, settings_of
from common.prompts import read_prompts
from common.results import check_output, provenance, write_json
from common.summary import DEFINITIONS, fork_of
from common.trace import ids_of, rounds_as_data, rounds_as_text, token_texts
from measure.comparison import Measured, compare
from measure.shapes import load_target
from rich.table import Table

from specjax import Sampling, Target
from specjax.cli import run_command_line
from specjax.requests import choose_law


@dataclass(frozen=True)
class Options:
    """Decode prompts plainly and with drafters, compare texts and speed.

    Attributes:
        target: "smollm2-135m-instruct", a Hugging Face directory, a .gguf file, or a Hub id.
        drafters: what to compare with plain decoding, settings after a colon: prompt-lookup:k=8,max_ngram=3,
            suffix:k=16, recycling, eagle:PATH,k=5 (a chain), eagle:PATH,depth=6,top_k=8,total=32 (a grown tree; total
            counts the pending token), medusa:PATH, mtp:PATH, draft-model:PATH,k=4, combined:prompt-lookup:k=4;suffix
            (both), adaptive:prompt-lookup:k=16 (what pays, by costs that are measured the first time).
        prompts: JSONL file with question_id, category, turns; our own five tasks without it.
        tasks: only these categories of the file.
        limit: at most so many prompts of each task.
        max_new_tokens: for each turn.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the most likely tokens that together hold this mass; 1 is off.
        min_p: keep tokens at least this times as likely as the most likely one; 0 is off.
        repetition_penalty: 1 is off.
        frequency_penalty: 0 is off.
        presence_penalty: 0 is off.
        law: acceptance law; by default greedy at temperature 0, else rejection. typical is LOSSY.
        batch_size: prompts decoded together.
        dtype: of weights and computation.
        seed: of the sampled tokens.
        repetitions: how often the first prompts of each task are timed; the others are timed once.
        repeated: how many batches of prompts of each task that is; 0 is all of them.
        trace: print every round of every prompt: what was proposed, accepted and committed.
        output: directory for results.json.
    """

    target: str = "smollm2-135m-instruct"
    drafters: tuple[str, ...] = (PLAIN, "prompt-lookup:k=8")
    prompts: Path | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    law: Literal["greedy", "rejection", "block", "typical"] | None = None
    batch_size: int = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int = 0
    repetitions: int = 2
    repeated: int = 1
    trace: bool = False
    output: Path | None = None

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
        )

    def plan(self, prompts: int) -> Plan:
        """How to decode so many prompts."""
        return Plan(
            batch_size=self.batch_size,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            law=self.law,
            seed=self.seed,
            repetitions=self.repetitions,
            repeated_units=self.repeated or prompts,
        )

    def check(self) -> None:
        """Raise InputError for a number out of range."""
        check_least(self, limit=1, max_new_tokens=1, batch_size=1, repetitions=1, repeated=0)
        check_seed(self.seed)
        choose_law(self.law, self.sampling.rules(self.batch_size))


def main() -> int:
    options = tyro.cli(Options)
    begin = time.perf_counter()
    options.check()
    check_output(options.output)
    conversations = read_prompts(options.prompts, options.tasks, options.limit)
    asked = parse_drafters(options.drafters)
    target = load_target(options.target, options.dtype)
    drafters = [drafter.make(target, options.dtype, options.batch_size) for drafter in asked]
    check_prompts(target, conversations)
    measured = compare(target, drafters, conversations, options.plan(len(conversations)))
    seconds = time.perf_counter() - begin
    if options.trace:
        print_traces(target, measured.calls)
    show(*report(options, target, drafters, measured))
    show(f"{seconds:.0f} s in all, {measured.warm_up_seconds:.0f} s of them warming up.")
    if options.output is not None:
        where = provenance(target, warm_up_seconds=measured.warm_up_seconds, total_seconds=seconds)
        file = options.output / "results.json"
        write_json(file, as_data(options, target, measured, where))
        show(f"Written to {file}.")
    return exit_status(measured.faults)


def report(options: Options, target: Target, drafters: Sequence[Named], measured: Measured) -> list[Table | str]:
    """The tables, and what their columns mean."""
    rows: list[list[str] | None] = []
    for row in [*measured.runs, *(measured.totals if len(measured.runs) > len(measured.totals) else [])]:
        if row["drafter"] == PLAIN and rows:
            rows.append(None)
        low, high = row["speedup_interval"] or (None, None)
        rows.append(
            [
                row["task"],
                row["drafter"],
                number(row["tokens_per_call"]),
                percent(row["acceptance_rate"]),
                number(row["alpha"]),
                small(row["draft_cost"]),
                number(row["tokens_per_second"], 1),
                number(row["speedup"]),
                "" if low is None else f"{number(low)} … {number(high)}",
                _match(row),
            ]
        )
    title = (
        f"{target.name}, {options.dtype}, {jax.devices()[0].device_kind}; batch {options.batch_size}, "
        f"{options.max_new_tokens} new tokens at most, {_describe(options.sampling)}"
    )
    lossy = next((row for row in measured.totals if not row["lossless"]), None)
    if lossy:
        title += f"; law {_law(lossy)}"
    columns = ("task", "drafter", "tokens/call", "accepted", "α", "c", "tokens/s", "speedup", "95%", "text")
    tables: list[Table | str] = [make_table(title, columns, rows, text=(0, 1))]
    longest = max(d.drafter.max_depth for d in drafters)
    if longest:
        rows = []
        for row in measured.totals:
            for kind, values in row["acceptance_by_position"].items():
                if values:
                    rows.append([row["drafter"], kind, *(percent(v) for v in values), *[""] * (longest - len(values))])
        places = [str(i + 1) for i in range(longest)]
        title = "Acceptance by draft position, all tasks"
        tables.append(make_table(title, ("drafter", "", *places), rows, text=(0, 1)))
    tables += [
        f"tokens/call: {DEFINITIONS['tokens_per_call']}.",
        f"accepted: {DEFINITIONS['acceptance_rate']}. α: {DEFINITIONS['alpha']}.",
        f"c: {DEFINITIONS['draft_cost'].removeprefix('c: ')}.",
        f"tokens/s: new tokens / seconds of decoding, without prefill. speedup: {DEFINITIONS['speedup']}; "
        f"{DEFINITIONS['speedup_interval']}.",
        f"{DEFINITIONS['acceptance_by_position']}.",
        "text: = every token is plain decoding's; ~n near-ties: n texts leave it where two logits are as good as "
        "equal; n FAULTS: n texts leave it elsewhere.",
    ]
    if lossy:
        tables.append(
            f"LOSSY: the law {_law(lossy)} does not keep the target's own; n others: n greedy texts leave plain "
            "decoding's. Speed gained so is not comparable with that of lossless laws."
        )
    for call in measured.calls:
        for place, c in enumerate(call.rows):
            if (fork := fork_of(measured.forks, call, place)) is not None:
                said = fork.describe("FAULT" if call.generation.lossless else "another text")
                tables.append(f"{call.drafter.label}, {call.task} {c.question_id}, turn {call.turn + 1}: {said}")
    return tables


def as_data(options: Options, target: Target, measured: Measured, where: dict[str, Any]) -> dict[str, Any]:
    """The content of results.json."""
    prompts: dict[tuple[int, int, int], dict[str, Any]] = {}
    for call in measured.calls:
        for row, c in enumerate(call.rows):
            g = call.generation
            entry = prompts.setdefault(
                (call.unit, call.turn, row),
                {
                    "task": call.task,
                    "question_id": c.question_id,
                    "turn": call.turn,
                    "prompt_ids": g.prompt_ids[row],
                    "outputs": [],
                },
            )
            fork = fork_of(measured.forks, call, row)
            entry["outputs"].append(
                {
                    "drafter": call.drafter.label,
                    "lossless": g.lossless,
                    "token_ids": g.token_ids[row],
                    "text": g.texts[row],
                    "finish_reason": g.finish_reasons[row],
                    "batch": call.unit,
                    "batch_seconds": list(call.seconds),
                    "batch_prefill_seconds": list(call.prefill_seconds),
                    "fork": None if fork is None else asdict(fork) | {"near_tie": fork.near_tie},
                    "rounds": rounds_as_data((g.trace or [])[row]),
                }
            )
    return {
        "provenance": where,
        "settings": settings_of(options),
        "definitions": DEFINITIONS,
        "runs": measured.runs,
        "totals": measured.totals,
        "prompts": list(prompts.values()),
        "tokens": {str(i): text for i, text in token_texts(target.tokenizer, ids_of(prompts.values())).items()},
    }


def print_traces(target: Target, calls: Sequence[Call]) -> None:
    """Every round as a line of text."""
    tokenizer = target.tokenizer
    assert tokenizer is not None  # `check_prompts`

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    for call in calls:
        for row, c in enumerate(call.rows):
            print(f"\n{call.task} {c.question_id}, turn {call.turn + 1}, {call.drafter.label}")
            rounds = (call.generation.trace or [])[row]
            for line in rounds_as_text(rounds, decode):
                print(line)
    print()


def _match(row: dict[str, Any]) -> str:
    if not row["lossless"]:
        others = "=" if row["matches_plain"] else f"{row['other_texts']} others, ~{row['near_ties']} near-ties"
        return "LOSSY" if row["matches_plain"] is None else f"LOSSY, {others}"
    if row["drafter"] == PLAIN or row["matches_plain"] is None:
        return ""
    if row["faults"]:
        return f"{row['faults']} FAULTS"
    return f"~{row['near_ties']} near-ties" if row["near_ties"] else "="


def _law(row: dict[str, Any]) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in row["law_settings"].items())
    return f"{row['law']} ({settings or 'no settings'}; {'lossless' if row['lossless'] else 'LOSSY'})"


def _describe(sampling: Sampling) -> str:
    off = Sampling()
    on = [f"{k} {v}" for k, v in asdict(sampling).items() if k != "temperature" and v != getattr(off, k)]
    return ", ".join([f"temperature {sampling.temperature}" if sampling.temperature else "greedy", *on])


if __name__ == "__main__":
    run_command_line(main)
