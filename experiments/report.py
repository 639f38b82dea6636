"""A page from what eval.py wrote: tables, plots, and every text with its tokens coloured by where they came from.

    python experiments/eval.py --output results
    python experiments/report.py results/results.json

The page is one file, report.html, that loads nothing and needs no network. Every output is shown as the rounds that
made it: a line before each round, green tokens that were drafted and accepted, blue ones that the target added after a
whole path of the draft, orange ones that it said instead of a rejected guess, and none for plain steps; hover over a
round with a red line (or reach it with the tab key) to see what was guessed and not accepted. Expect long green
stretches where text is copied, orange at every surprise, and an orange or blue token at the end of each round but those
that a stop cut short.

It takes seconds. The target is not needed, unless the results are of a version that did not write the texts of tokens.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from common import page, plots
from common.console import number, percent, show, small
from common.drafters import PLAIN
from common.options import check_least
from common.results import check_output, write_text
from common.trace import ids_of, token_texts

import specjax
from specjax import InputError
from specjax.cli import run_command_line

KEYS = {
    "": ("provenance", "settings", "definitions", "runs", "totals", "prompts"),
    "prompts": ("task", "question_id", "turn", "prompt_ids", "outputs"),
    "outputs": ("drafter", "lossless", "token_ids", "finish_reason", "fork", "rounds"),
}


@dataclass(frozen=True)
class Options:
    """Write report.html from a results.json of eval.py.

    Attributes:
        results: the file.
        limit: show the texts of at most so many prompts of each task; tables and plots are of all.
        target: whose tokenizer reads the tokens, where the results have no texts of them; by default the one that
            they are of.
        output: directory for report.html; by default the one of the results.
    """

    results: Annotated[Path, tyro.conf.Positional]
    limit: int | None = None
    target: str | None = None
    output: Path | None = None


def main() -> None:
    options = tyro.cli(Options)
    begin = time.perf_counter()
    check_least(options, limit=1)
    directory = options.output or options.results.parent
    check_output(directory)
    results = read_results(options.results)
    texts = read_texts(results, options.target)
    file = directory / "report.html"
    write_text(file, make_page(results, texts, options.limit))
    show(f"Written to {file} ({file.stat().st_size / 1e6:.1f} MB), {time.perf_counter() - begin:.0f} s.")


def read_results(path: Path) -> dict[str, Any]:
    """The content of a results.json. Raises InputError for any other file."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read as JSON ({reason}); expected the results.json of eval.py") from None
    check_keys(path, results, "")
    for prompt in results["prompts"]:
        check_keys(path, prompt, "prompts")
        for output in prompt["outputs"]:
            check_keys(path, output, "outputs")
    return results


def check_keys(path: Path, found: Any, where: str) -> None:
    missing = [key for key in KEYS[where] if not isinstance(found, dict) or key not in found]
    if missing:
        place = f" in {where}" if where else ""
        raise InputError(f"{path}: no {missing[0]!r}{place}; expected the results.json of eval.py")


def read_texts(results: Mapping[str, Any], target: str | None) -> dict[int, str]:
    """The text of every token id: as the results have it, or as the target's tokenizer reads it."""
    ids = set(ids_of(results["prompts"]))
    if "tokens" in results:
        texts = {int(i): text for i, text in results["tokens"].items()}
        if not ids - set(texts):
            return texts
    name = target or results["settings"].get("target")
    if name is None:
        raise InputError("the results do not say which target they are of; name it with --target")
    tokenizer = specjax.load(name).tokenizer
    if tokenizer is None:
        raise InputError(f"--target {name}: this target has no tokenizer")
    return token_texts(tokenizer, ids)


def make_page(results: Mapping[str, Any], texts: Mapping[int, str], limit: int | None) -> str:
    """The whole page."""
    where, settings = results["provenance"], results["settings"]
    title = f"{where.get('target', 'target')}: {', '.join(row['drafter'] for row in results['totals'])}"
    used = [page.definitions({k: v for k, v in part.items() if v is not None}) for part in (settings, where)]
    parts = [
        f"<h1>{page.shown(title)}</h1>",
        numbers(results),
        f"<details><summary>What the numbers mean</summary>{page.definitions(results['definitions'])}</details>",
        f"<details><summary>Settings and provenance</summary>{used[0]}<hr>{used[1]}</details>",
        *(f'<p><img alt="{page.shown(alt)}" src="{plots.data_uri(figure)}"></p>' for alt, figure in figures(results)),
        "<h2>Texts</h2>",
        page.legend(),
    ]
    seen: dict[str, set[Any]] = {}
    for prompt in results["prompts"]:
        of_task = seen.setdefault(prompt["task"], set())
        if limit is None or prompt["question_id"] in of_task or len(of_task) < limit:
            of_task.add(prompt["question_id"])
            parts.append(one_prompt(prompt, texts))
    return page.page(title, *parts)


def numbers(results: Mapping[str, Any]) -> str:
    """A row for each task and drafter."""
    rows = []
    for row in [*results["runs"], *(results["totals"] if len(results["runs"]) > len(results["totals"]) else [])]:
        low, high = row["speedup_interval"] or (None, None)
        rows.append(
            [
                row["task"],
                row["drafter"] if row["lossless"] else f"{row['drafter']} (LOSSY: {row['law']})",
                number(row["tokens_per_call"]),
                percent(row["acceptance_rate"]),
                number(row["alpha"]),
                small(row["draft_cost"]),
                number(row["tokens_per_second"], 1),
                number(row["speedup"]),
                "" if low is None else f"{number(low)} … {number(high)}",
                {True: "yes", False: "no", None: ""}[row["matches_plain"]],
            ]
        )
    columns = ("task", "drafter", "tokens/call", "accepted", "α", "c", "tokens/s", "speedup", "95%", "same text")
    return page.table(columns, rows, names=2)


def figures(results: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Speedups and tokens per call by task, and acceptance by position; none where nothing was drafted."""
    drafters = [row["drafter"] for row in results["totals"] if row["drafter"] != PLAIN]
    if not drafters:
        return []
    tasks = list(dict.fromkeys(row["task"] for row in results["runs"]))
    rows = {(row["task"], row["drafter"]): row for row in (*results["runs"], *results["totals"])}
    tasks += ["all"] if len(tasks) > 1 else []
    figure, [[left, right]] = plots.panels(1, 2, "By task", 4.4, 2.8)
    for axis, field, name in ((left, "tokens_per_call", "tokens per call"), (right, "speedup", "speedup")):
        width = 0.8 / len(drafters)
        for i, drafter in enumerate(drafters):
            some = [rows[task, drafter] for task in tasks]
            places = [at + width * (i - (len(drafters) - 1) / 2) for at in range(len(tasks))]
            axis.bar(places, [row[field] for row in some], 0.9 * width, color=plots.colour(i))
            for place, row in zip(places, some, strict=True):
                if field == "speedup" and row["speedup_interval"] is not None:
                    axis.plot([place, place], row["speedup_interval"], color="0.2", linewidth=0.8)
        axis.set_xticks(range(len(tasks)), tasks)
        plots.level(axis, 1)
        plots.label(axis, y=name)
    plots.legend(figure, drafters)
    found = [("tokens per call and speedup by task", figure)]
    figure, [[axis]] = plots.panels(1, 1, "Acceptance by draft position, given that all before were accepted", 6, 2.6)
    for i, drafter in enumerate(drafters):
        shares = rows["all", drafter]["acceptance_by_position"]["conditional"]
        known = [(at, share) for at, share in enumerate(shares, 1) if share is not None]
        plots.measured(axis, [at for at, _ in known], [share for _, share in known], i)
    axis.set_ylim(0, 1.03)
    plots.label(axis, x="draft position", y="accepted / tested")
    plots.legend(figure, drafters)
    return [*found, ("acceptance by draft position", figure)]


def one_prompt(prompt: Mapping[str, Any], texts: Mapping[int, str]) -> str:
    """The prompt, folded, and what each drafter made of it."""
    name = f"{prompt['task']} {prompt['question_id']}, turn {prompt['turn'] + 1}"
    asked = f"<details><summary>Prompt, {len(prompt['prompt_ids'])} tokens</summary>"
    outputs = "\n".join(one_output(output, texts) for output in prompt["outputs"])
    return (
        f'<section class="prompt">\n<h2>{page.shown(name)}</h2>\n{asked}{page.plain(prompt["prompt_ids"], texts)}'
        f"</details>\n{outputs}\n</section>"
    )


def one_output(output: Mapping[str, Any], texts: Mapping[int, str]) -> str:
    """One text with its colours; plain decoding's folded, since all of it are plain steps."""
    rounds, ids = output["rounds"], output["token_ids"]
    found = page.counts(rounds)
    said = [
        f"{len(ids)} tokens in {len(rounds)} rounds, {number(len(ids) / len(rounds) if rounds else None)} per call",
        *(f"{page.SOURCES[source].partition(':')[0]}: {found[source]}" for source in page.SOURCES if found[source]),
        f"ended by {output['finish_reason']}",
    ]
    note = f'<p class="note">{page.shown("; ".join(said))}</p>'
    if (fork := output["fork"]) is not None:
        kind = "near-tie" if fork["near_tie"] else "FAULT" if output["lossless"] else "another text"
        line = f"Leaves plain decoding's text at token {fork['position'] + 1}: {kind}"
        note += f'<p class="{"fault" if kind == "FAULT" else "note"}">{page.shown(line)}</p>'
    text = page.coloured(rounds, texts)
    if output["drafter"] == PLAIN:
        text = f"<details><summary>Text</summary>{text}</details>"
    lossy = "" if output["lossless"] else " (LOSSY)"
    heading = f"<h3>{page.shown(output['drafter'] + lossy)}</h3>"
    return f'<article class="output">{heading}{note}{text}</article>'


if __name__ == "__main__":
    run_command_line(main)
