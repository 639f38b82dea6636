"""Other implementations beside this one: same model, same prompts, same run; first the texts, then tokens per second.

    python experiments/compare.py --output results/compare
    python experiments/compare.py --drafters suffix:k=8 eagle:PATH,k=3 --assistant PATH --output results/compare

Hugging Face's `generate` decodes plainly, by prompt lookup and, where --assistant names a smaller model of the same
tokenizer, assisted; llama.cpp plainly and by prompt lookup. Both are optional: `specjax[compare]` has PyTorch,
llama-cpp-python is installed by itself. What cannot be run is left out, and the reason printed.

Everyone decodes with the settings that are fastest on this machine: threads and, for Hugging Face's plain decoding, the
kind of cache, with and without PyTorch's compiler, are tried on one prompt first. Everything is float32, but llama.cpp
computes with the quantised weights of its file, from which the default target's float32 weights were made: it reads a
fifth of the bytes, rounds differently, and its texts may differ. All others must write the greedy text of this
library's plain decoding, token for token but for near-ties; the exit status is 1 where one does not.

Every prompt is decoded once by everyone before anything is timed, so that all that is compiled is there; then in turns.
Seconds include prefill, which the others do not tell apart. Expect this library's plain decoding
ahead of Hugging Face's (2.3 times in `bench.py` on two CPU cores, with default settings there), and prompt lookup to
gain on both where a text repeats. One text at a time is decoded, which is all that Hugging Face's assisted generation
can.

The first command takes minutes on two CPU cores, some of them PyTorch's compiler.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro
from common import plots
from common.console import exit_status, make_table, number, progress_bar, show
from common.drafters import PLAIN, parse_drafters
from common.evaluation import check_prompts
from common.exact import Fork, examine
from common.options import check_least, settings_of
from common.prompts import prompt_ids, read_prompts
from common.results import check_output, provenance, write_json
from measure import hugging_face, llama_cpp
from measure.peers import Method, Ran, ours, rate_interval, run_methods
from measure.shapes import load_target
from rich.table import Table

from specjax import InputError, Sampling, Target
from specjax.cli import run_command_line
from specjax.models import default_target

OURS, THEIRS, CPP = "specjax", "Hugging Face", "llama.cpp"
LONGEST_DRAFT = 64  # room that llama.cpp's context leaves for drafts at the end of a text

DEFINITIONS = {
    "tokens_per_second": "new tokens / seconds, prefill included, over all prompts; of a prompt that is timed several "
    "times the median",
    "relative": "tokens_per_second over that of specjax's plain decoding, all timed in turns, prompt by prompt",
    "relative_interval": "95%, bootstrap over the prompts",
    "same_texts": "prompts whose greedy text is that of specjax's plain decoding, token for token",
    "near_ties": "texts that leave it where two logits are as good as equal",
    "faults": "texts that leave it elsewhere, of those that compute with the same weights in float32",
    "tried": "tokens per second of 16 tokens behind one prompt, by settings; or why there are none",
}


@dataclass(frozen=True)
class Options:
    """Compare with Hugging Face and llama.cpp.

    Attributes:
        target: "smollm2-135m-instruct", a Hugging Face directory, a .gguf file, or a Hub id; in float32.
        drafters: of this library, as for eval.py, besides plain decoding.
        assistant: Hugging Face directory of a smaller model with the same tokenizer, for assisted generation there and
            a draft model here.
        gguf: the same model for llama.cpp; the default target has its own.
        k: tokens that prompt lookup and the draft model here draft; the assistant has settings of its own.
        compiled: try PyTorch's compiler.
        prompts: JSONL file with question_id, category, turns; our own five tasks without it. First turns are used.
        tasks: only these categories of the file.
        limit: at most so many prompts of each task.
        max_new_tokens: for each prompt.
        repetitions: how often each prompt is timed.
        output: directory for compare.json and compare.png.
    """

    target: str = default_target.NAME
    drafters: tuple[str, ...] = ()
    assistant: Path | None = None
    gguf: Path | None = None
    k: int = 8
    compiled: bool = True
    prompts: Path | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = 1
    max_new_tokens: int = 128
    repetitions: int = 2
    output: Path | None = None

    def check(self) -> None:
        check_least(self, k=1, limit=1, max_new_tokens=1, repetitions=1)
        if self.gguf is not None and not self.gguf.is_file():
            raise InputError(f"--gguf {self.gguf}: no such file")
        if self.assistant is not None and not self.assistant.is_dir():
            raise InputError(f"--assistant {self.assistant}: no such directory; expected a Hugging Face one")


@dataclass
class Peers:
    """Who decodes, and who cannot.

    Attributes:
        left_out: why, by name.
        tried: settings of each, with their tokens per second.
        versions: of their packages.
    """

    methods: list[Method]
    left_out: dict[str, str]
    tried: dict[str, dict[str, float | str]]
    versions: dict[str, str]


def main() -> int:
    options = tyro.cli(Options)
    begin = time.perf_counter()
    options.check()
    check_output(options.output)
    conversations = read_prompts(options.prompts, options.tasks, options.limit)
    mine = [f"prompt-lookup:k={options.k}", *options.drafters]
    if options.assistant is not None:
        mine.append(f"draft-model:{options.assistant},k={options.k}")
    asked = parse_drafters(list(dict.fromkeys(mine)))
    target = load_target(options.target, "float32")
    check_prompts(target, conversations)
    ids = [prompt_ids(target, conversation) for conversation in conversations]
    drafters = [a.make(target) for a in asked]
    with contextlib.ExitStack() as stack, progress_bar() as bar:
        work = bar.add_task("settings", total=None)
        peers = Peers([Method(f"{OURS}, {d.label}", ours(target, d.drafter)) for d in drafters], {}, {}, {})
        prompt = max(ids, key=len)  # the longest first: what is kept for it serves the others
        add_hugging_face(peers, target, options, prompt, lambda: bar.advance(work))
        add_llama_cpp(peers, target, options, prompt, lambda: bar.advance(work), stack)
        steps = len(peers.methods) * len(ids) * (1 + options.repetitions)
        bar.reset(work, description="texts, then in turns", total=steps)
        found = run_methods(
            peers.methods, ids, options.max_new_tokens, options.repetitions, done=lambda: bar.advance(work)
        )
    forks = {ran.method.name: forks_of(target, ids, found[0], ran) for ran in found if ran.method.same_weights}
    rows = [row_of(ran, found[0], forks.get(ran.method.name, []), peers) for ran in found]
    seconds = time.perf_counter() - begin
    show(*report(target, options, rows, peers, forks))
    show(f"{seconds:.0f} s in all.")
    if options.output is not None:
        content = {
            "provenance": provenance(target, total_seconds=seconds, peers=peers.versions),
            "settings": settings_of(options),
            "definitions": DEFINITIONS,
            "methods": rows,
            "left_out": peers.left_out,
            "prompts": [
                {"task": c.task, "question_id": c.question_id, "outputs": outputs(found, i)}
                for i, c in enumerate(conversations)
            ],
        }
        write_json(options.output / "compare.json", content)
        plots.save(draw(target, rows), options.output / "compare.png")
        show(f"Written to {options.output}.")
    return exit_status(sum(row["faults"] for row in rows))


def add_hugging_face(
    peers: Peers, target: Target, options: Options, prompt: Sequence[int], done: Callable[[], None]
) -> None:
    """Hugging Face's ways to decode, each with its fastest settings."""
    reason = hugging_face.why_not(target)
    if reason is not None:
        peers.left_out[THEIRS] = reason
        return
    assistant = options.assistant
    assisted = f"{THEIRS}, assisted"
    if assistant is None:
        peers.left_out[assisted] = "no --assistant, a smaller model of the same tokenizer"
    elif (reason := hugging_face.why_not_assistant(target, assistant)) is not None:
        peers.left_out[assisted], assistant = reason, None
    other = hugging_face.HuggingFace(target, assistant)
    peers.versions |= other.versions
    ways: dict[str, dict[str, Any]] = {f"{THEIRS}, plain": {}, f"{THEIRS}, prompt lookup": {"prompt_lookup": options.k}}
    if assistant is not None:
        ways[assisted] = {"assisted": True}
    for name, how in ways.items():
        decode, settings, peers.tried[name] = other.best(prompt, options.compiled, **how)
        peers.methods.append(Method(name, decode, settings))
        done()


def add_llama_cpp(
    peers: Peers,
    target: Target,
    options: Options,
    prompt: Sequence[int],
    done: Callable[[], None],
    stack: contextlib.ExitStack,
) -> None:
    """llama.cpp's ways to decode, each with its fastest settings; a file that is unpacked for it stays until `stack`
    ends.
    """
    reason, gguf = llama_cpp.why_not(), options.gguf or next((f for f in target.files if f.suffix == ".gguf"), None)
    if reason is None and gguf is None:
        if options.target.lower() == default_target.NAME:
            gguf = default_target.default_target_gguf(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        else:
            reason = "it reads GGUF files: name one of the same model with --gguf"
    if reason is not None or gguf is None:
        peers.left_out[CPP] = reason or ""
        return
    peers.versions["llama-cpp-python"] = llama_cpp.version()
    weights = llama_cpp.describe(gguf)
    room = len(prompt) + options.max_new_tokens + LONGEST_DRAFT
    for name, k in (("plain", None), ("prompt lookup", min(options.k, LONGEST_DRAFT))):
        name = f"{CPP}, {name}"
        decode, settings, peers.tried[name] = llama_cpp.best(gguf, room, target.eos_token_ids, prompt, k)
        peers.methods.append(Method(name, decode, f"{settings}; {weights}", same_weights=False))
        done()


def forks_of(target: Target, prompts: Sequence[Sequence[int]], plain: Ran, ran: Ran) -> list[tuple[int, Fork]]:
    """Texts that are not those of this library's plain decoding, by the number of their prompt."""
    found = []
    for i, texts in enumerate(zip(prompts, plain.texts, ran.texts, strict=True)):
        if (fork := examine(target, Sampling(), *texts)) is not None:
            found.append((i, fork))
    return found


def row_of(ran: Ran, plain: Ran, forks: Sequence[tuple[int, Fork]], peers: Peers) -> dict[str, Any]:
    """The numbers of a method; see the definitions."""
    method = ran.method
    return {
        "name": method.name,
        "tokens_per_second": ran.rate,
        "relative": ran.rate / plain.rate,
        "relative_interval": None if ran is plain else rate_interval(ran, plain),
        "prompts": len(ran.texts),
        "same_texts": ran.same_texts(plain),
        "same_weights": method.same_weights,
        "near_ties": sum(fork.near_tie for _, fork in forks),
        "faults": sum(not fork.near_tie for _, fork in forks),
        "settings": method.note,
        "tried": peers.tried.get(method.name, {}),
    }


def outputs(found: Sequence[Ran], prompt: int) -> list[dict[str, Any]]:
    return [{"name": r.method.name, "token_ids": r.texts[prompt], "seconds": r.seconds[prompt]} for r in found]


def report(
    target: Target,
    options: Options,
    rows: Sequence[dict[str, Any]],
    peers: Peers,
    forks: dict[str, list[tuple[int, Fork]]],
) -> list[Table | str]:
    """The table, who is left out and why, and what the columns mean."""
    lines: list[list[str] | None] = []
    before = None
    for row in rows:
        family = row["name"].partition(",")[0]
        if before not in (None, family):
            lines.append(None)
        before = family
        low, high = row["relative_interval"] or (None, None)
        lines.append(
            [
                row["name"],
                number(row["tokens_per_second"], 1),
                number(row["relative"]),
                "" if low is None else f"{number(low)} … {number(high)}",
                _text(row),
                row["settings"],
            ]
        )
    title = (
        f"{target.name}, float32, {jax.devices()[0].device_kind}; one prompt at a time, {options.max_new_tokens} new "
        "tokens at most, greedy"
    )
    columns = ("", "tokens/s", "relative", "95%", "text", "settings")
    parts: list[Table | str] = [make_table(title, columns, lines, text=(0, 4, 5))]
    parts += [f"Left out: {name}: {reason}." for name, reason in peers.left_out.items()]
    for name, some in forks.items():
        parts += [f"{name}, prompt {i + 1}: {fork}" for i, fork in some]
    return [
        *parts,
        f"tokens/s: {DEFINITIONS['tokens_per_second']}.",
        f"relative: {DEFINITIONS['relative']}; {DEFINITIONS['relative_interval']}.",
        "text: = every token is that of specjax's plain decoding; ~n near-ties: n texts leave it where two logits are "
        "as good as equal; n FAULTS: n texts leave it elsewhere. Who computes with other weights may write another "
        "text.",
    ]


def _text(row: dict[str, Any]) -> str:
    if row["same_texts"] == row["prompts"]:
        return "" if row["name"] == f"{OURS}, {PLAIN}" else "="
    if not row["same_weights"]:
        return f"other weights; same on {row['same_texts']} of {row['prompts']}"
    return f"{row['faults']} FAULTS" if row["faults"] else f"~{row['near_ties']} near-ties"


def draw(target: Target, rows: Sequence[dict[str, Any]]) -> Any:
    """Tokens per second, a bar each; an empty bar computes with other weights."""
    figure, [[axis]] = plots.panels(1, 1, f"{target.name}, float32: others beside specjax", 5.5, 0.3 * len(rows) + 0.6)
    families = list(dict.fromkeys(row["name"].partition(",")[0] for row in rows))
    for place, row in enumerate(rows):
        shade = plots.colour(families.index(row["name"].partition(",")[0]))
        axis.barh(place, row["tokens_per_second"], 0.7, color=shade if row["same_weights"] else "none", edgecolor=shade)
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axis.invert_yaxis()
    plots.label(axis, x="tokens per second, prefill included")
    return figure


if __name__ == "__main__":
    run_command_line(main)
