"""What decoding costs on this machine: a step against its memory floor, blocks against steps, rounds against blocks.

    python experiments/bench.py
    python experiments/bench.py --random-config qwen2.5-3b --dtype bfloat16

The first command takes about 5 minutes on two idle CPU cores (4 without PyTorch). Everything that is compared is
measured in turns, because a machine's speed drifts; numbers are medians.
"""

import resource
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import tyro
from common.console import make_table, progress_bar, show
from common.options import check_least, settings_of
from common.prompts import prompt_ids, read_prompts
from common.results import check_output, provenance, write_json
from common.timing import excess, in_turns, median_of
from measure import hugging_face
from measure.passes import Bandwidth, TargetPass, bytes_read, time_passes, timed_steps
from measure.peers import Method, ours, run_methods
from measure.programs import bytes_of, compile_loop
from measure.rounds import EVERYTHING, FOUND, NOTHING, FullBlock, RoundTimer, Stub
from measure.shapes import load_target
from measure.states import prompts_for, start_state

from specjax import Greedy, Plain, PromptLookup, Rejection, Sampling, Target
from specjax.cli import run_command_line
from specjax.laws import Law
from specjax.models.interface import TargetModel

BLOCKS = (2, 4, 5, 8, 9, 16, 17)
LOOKUP = PromptLookup(num_draft_tokens=8)
SAMPLED, SAMPLED_NAME = Sampling(temperature=0.8, top_p=0.95), "temperature .8, top-p .95"
ROUNDS = 8
STUB_ROUNDS = 12  # they are short
NEW_TOKENS = 128  # room for so many rounds that accept everything, and for the steps of a timed loop


@dataclass(frozen=True)
class Options:
    """Measure steps, blocks, rounds, programs and, where PyTorch is installed, Hugging Face.

    Attributes:
        target: "smollm2-135m-instruct", a Hugging Face directory, a .gguf file, or a Hub id.
        random_config: random weights of this shape instead, e.g. qwen2.5-3b or llama-3.1-8b.
        dtype: of weights and computation.
        batch_size: rows, in all but the comparison.
        turns: how often each quantity is measured.
        compare: with Hugging Face, where it can be.
        output: directory for bench.json.
    """

    target: str = "smollm2-135m-instruct"
    random_config: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    batch_size: int = 1
    turns: int = 15
    compare: bool = True
    output: Path | None = None

    def check(self) -> None:
        check_least(self, batch_size=1, turns=1)


@dataclass(frozen=True)
class Line:
    """One measured number.

    Attributes:
        name: what was measured.
        value: in `unit`; None where it could not be.
        note: how, or why not.
    """

    name: str
    value: float | None
    unit: str
    note: str = ""


def main() -> None:
    options = tyro.cli(Options)
    options.check()
    check_output(options.output)
    target = load_target(options.target, options.dtype, options.random_config)
    prompts = prompts_for(target, options.batch_size)
    lines: list[Line] = []
    with progress_bar() as bar:
        work = bar.add_task("steps and blocks", total=None)

        def part(name: str, measure: Callable[[Callable[[], None]], list[Line]]) -> None:
            bar.reset(work, description=name, total=None)
            lines.extend(measure(lambda: bar.advance(work)))

        part("steps and blocks", lambda done: steps_and_blocks(target, prompts, options, done))
        part("rounds", lambda done: rounds(target, prompts, options, done))
        part("programs", lambda done: programs(target, prompts, done))
        lines.append(peak_memory())
        reason = hugging_face.why_not(target) if options.compare else "--no-compare"
        if reason is None:
            part("Hugging Face", lambda done: comparison(target, done))
        else:
            lines.append(Line("Hugging Face generate", None, "tokens/s", f"skipped: {reason}"))
    title = f"{target.name}, {target.dtype}, {jax.devices()[0].device_kind}; batch {options.batch_size}"
    show(make_table(title, ("", "value", "unit", "note"), [_cells(line) for line in lines], text=(0, 2, 3)))
    if options.output is not None:
        found = [asdict(line) for line in lines]
        content = {"provenance": provenance(target), "settings": settings_of(options), "lines": found}
        write_json(options.output / "bench.json", content)
        show(f"Written to {options.output / 'bench.json'}.")


def steps_and_blocks(
    target: Target, prompts: list[list[int]], options: Options, done: Callable[[], None]
) -> list[Line]:
    """Bandwidth, a decode step against its memory floor, and passes over blocks against a pass over one token."""
    model = target.model
    state = start_state(model, Plain(), prompts, NEW_TOKENS)
    length = max(len(p) for p in prompts)
    beside: dict[str, Callable[[], float]] = {
        "byte": Bandwidth(),
        "step": RoundTimer(model, Plain(), Greedy(), state, timed_steps()),
    }
    times = time_passes(model, state.cache, length, BLOCKS, options.turns, done, beside)
    seconds = times.beside
    cache = bytes_of(state.cache)
    read = bytes_read(model, getattr(model, "config", None), state.cache)
    step = statistics.median(seconds["step"])
    floor = read * statistics.median(seconds["byte"])
    over = median_of(lambda step, byte: step / (read * byte), seconds["step"], seconds["byte"])
    megabytes = f"{(read - cache) / 1e6:.0f} MB of weights, {cache / 1e6:.0f} MB of cache"
    lines = [
        Line("memory bandwidth", 1e-9 / statistics.median(seconds["byte"]), "GB/s", "sum over 512 MB, all cores"),
        Line("memory floor of a step", 1e3 * floor, "ms", megabytes),
        Line("decode step", 1e3 * step, "ms", "a round of plain decoding, in a compiled loop"),
        Line("decode step / floor", over, "×"),
        Line("decode(1)", 1e3 * times.median(1), "ms", "target pass over one token, nothing else"),
    ]
    for size in BLOCKS:
        note = f"{1e3 * times.median(size):.2f} ms"
        lines.append(Line(f"verify({size}) / decode(1)", times.relative(size), "×", note))
    return lines


def rounds(target: Target, prompts: list[list[int]], options: Options, done: Callable[[], None]) -> list[Line]:
    """What a round of prompt lookup costs outside the target pass.

    Full rounds against passes over the same block: with a stub for a target, which makes the difference exact, and with
    the target itself, whose passes take far longer than what is looked for.
    """
    model, block, length = target.model, LOOKUP.num_nodes + 1, max(len(p) for p in prompts)
    start = start_state(model, Plain(), prompts, NEW_TOKENS, like=LOOKUP)
    plain = RoundTimer(model, Plain(), Greedy(), start, ROUNDS)
    known = plain.text(NEW_TOKENS)
    models: dict[str, TargetModel] = {"stub": Stub.of(model, start, known), "target": model}
    laws: dict[str, tuple[Law, Sampling | None]] = {"greedy": (Greedy(), None), SAMPLED_NAME: (Rejection(), SAMPLED)}
    accepts = {"nothing": NOTHING, "what it finds": FOUND, "everything": EVERYTHING}
    timers: dict[str, Callable[[], float]] = {"step": plain}
    tokens = {}
    for who, how, what in (
        *(("stub", how, what) for how in laws for what in accepts),
        *(("target", how, "what it finds") for how in laws),
    ):
        law, sampling = laws[how]
        drafter = FullBlock.make(LOOKUP, known, accepts[what])
        state = start_state(models[who], drafter, prompts, NEW_TOKENS, sampling=sampling)
        steps = ROUNDS if who == "target" else STUB_ROUNDS
        timer = RoundTimer(models[who], drafter, law, state, steps)
        name = f"round outside the pass: {how}, {what} accepted ({who})"
        timers[name] = partial(excess, timer, TargetPass(models[who], state.cache, block, length, steps))
        tokens[name] = timer.tokens_per_round
        done()
    seconds = in_turns(timers, options.turns, done)
    lines = []
    for name, committed in tokens.items():
        extra = statistics.median(seconds[name])
        share = 100 * extra / statistics.median(seconds["step"])
        note = f"of a decode step: {1e3 * extra:.2f} ms; {committed:.1f} tokens a round"
        lines.append(Line(name, share, "%", note))
    return lines


def programs(target: Target, prompts: list[list[int]], done: Callable[[], None]) -> list[Line]:
    """Compile time, temporaries and copies of the decoding loop."""
    lines = []
    for name, drafter, batch in (("plain", Plain(), 1), ("prompt lookup", LOOKUP, 1), ("prompt lookup", LOOKUP, 4)):
        program = compile_loop(target.model, drafter, [prompts[row % len(prompts)] for row in range(batch)], NEW_TOKENS)
        what = f"{name}, batch {batch}"
        lines.append(Line(f"compile time, {what}", program.compile_seconds, "s"))
        share = None if program.temporary_bytes is None else 100 * program.temporary_bytes / program.cache_bytes
        note = f"of the cache of {program.cache_bytes / 1e6:.0f} MB"
        lines.append(Line(f"temporaries of the loop, {what}", share, "%", note))
        lines.append(Line(f"cache-sized copies in the loop, {what}", program.cache_copies, ""))
        done()
    return lines


def peak_memory() -> Line:
    """Of the process on a CPU, of the device on an accelerator."""
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        peak, whose = stats["peak_bytes_in_use"], "device"
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak, whose = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"
    return Line("peak memory", peak / 1e6, "MB", f"of the {whose}; 537 MB are the bandwidth test's")


def comparison(target: Target, done: Callable[[], None]) -> list[Line]:
    """Tokens per second against Hugging Face's, on the first prompt of each task, in turns; prefill included."""
    other = hugging_face.HuggingFace(target)
    ids = [prompt_ids(target, conversation) for conversation in read_prompts(limit=1)]
    other.generate(ids[0], 8)
    methods = [
        Method("specjax, plain", ours(target, Plain())),
        Method("Hugging Face generate", other.generate),
        Method("specjax, prompt lookup", ours(target, LOOKUP)),
        Method("Hugging Face prompt lookup", partial(other.generate, prompt_lookup=LOOKUP.num_draft_tokens)),
    ]
    found = {ran.method.name: ran for ran in run_methods(methods, ids, NEW_TOKENS, warm=False, done=done)}
    first = next(iter(found.values()))
    lines = []
    for name, ran in found.items():
        same = f"same text on {ran.same_texts(first)} of {len(ids)} prompts"
        note = "prefill included" if ran is first else f"prefill included; {same}"
        lines.append(Line(name, statistics.median(ran.rates), "tokens/s", note))
    for above, below in (
        ("specjax, plain", "Hugging Face generate"),
        ("specjax, prompt lookup", "Hugging Face prompt lookup"),
    ):
        ratio = median_of(lambda a, b: a / b, found[above].rates, found[below].rates)
        lines.append(Line(f"{above} / {below}", ratio, "×", "median over the prompts"))
    return lines


def _cells(line: Line) -> list[str]:
    value = "–" if line.value is None else f"{line.value:.4g}" if abs(line.value) < 1000 else f"{line.value:.0f}"
    return [line.name, value, line.unit, line.note]


if __name__ == "__main__":
    run_command_line(main)
