"""What a target pass costs by the number of tokens in it, beside what memory and arithmetic allow.

    python experiments/verify_cost.py --output results/verify_cost
    python experiments/verify_cost.py --batch-sizes 1 4 16 --tokens 1 2 4 8 16 --output results/verify_cost
    python experiments/verify_cost.py --random-config qwen2.5-3b --dtype bfloat16 --output results/verify_cost

Speculation gains where checking several tokens costs about as much as making one: as long as a pass has to wait for the
weights to arrive from memory, more tokens are free (the flat part of the roofline); from some number of tokens on,
arithmetic takes longer than reading, and each token costs as much as the one before it. Expect that bend at about 10
tokens on two CPU cores, so that 8 tokens cost about 1.6 and 16 tokens about 2 times as much as one, well above the
roofline where matrices with few rows are multiplied badly; and at some hundred tokens on a GPU in bfloat16, where all
of the curve is flat. A batch of b rows has b times the tokens: the bend comes b times sooner.

The floors are measured: memory bandwidth by a sum over a large array, arithmetic by products of large matrices, in the
same turns as the passes. The first command takes minutes on two cores.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import tyro
from common import plots
from common.console import make_table, number, progress_bar, show
from common.options import check_least, check_some, settings_of
from common.results import check_output, provenance, write_json
from measure.passes import Bandwidth, Throughput, bytes_read, operations, time_passes
from measure.shapes import load_target
from measure.states import prompts_for, start_state
from rich.table import Table

from specjax import Plain, Target
from specjax.cli import run_command_line

DEFINITIONS = {
    "seconds": "of one target pass over so many tokens in each row, nothing else; median over the turns",
    "relative": "against a pass over one token a row at the same batch size, median over the turns: v of the formulas",
    "memory_floor": "seconds to read the weights that the pass uses and all of the cache, at the measured bandwidth",
    "compute_floor": "seconds for its multiplications and additions, at the measured throughput",
    "over_floor": "seconds / the larger of the two floors",
    "critical_tokens": "tokens a row at which the two floors meet",
}


@dataclass(frozen=True)
class Options:
    """Time target passes over blocks of tokens, beside their roofline.

    Attributes:
        target: "smollm2-135m-instruct", a Hugging Face directory, a .gguf file, or a Hub id.
        random_config: random weights of this shape instead, e.g. qwen2.5-3b or llama-3.1-8b.
        tokens: in the block of each row; one is always measured.
        batch_sizes: rows.
        dtype: of weights and computation.
        turns: how often each pass is measured.
        output: directory for verify_cost.json and verify_cost.png.
    """

    target: str = "smollm2-135m-instruct"
    random_config: str | None = None
    tokens: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 48, 64)
    batch_sizes: tuple[int, ...] = (1,)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    turns: int = 7
    output: Path | None = None

    def check(self) -> None:
        check_some(self, "tokens", "batch_sizes")
        check_least(self, tokens=1, batch_sizes=1, turns=1)


@dataclass(frozen=True)
class Pass:
    """One kind of pass; see `DEFINITIONS`. Tokens are a row's."""

    batch_size: int
    tokens: int
    seconds: float
    relative: float
    memory_floor: float
    compute_floor: float

    @property
    def floor(self) -> float:
        return max(self.memory_floor, self.compute_floor)

    @property
    def over_floor(self) -> float:
        return self.seconds / self.floor


@dataclass(frozen=True)
class Rates:
    """What the machine reached meanwhile: bytes a second, and floating-point operations a second."""

    bandwidth: float
    throughput: float


def main() -> None:
    options = tyro.cli(Options)
    options.check()
    check_output(options.output)
    target = load_target(options.target, options.dtype, options.random_config)
    with progress_bar() as bar:
        kinds = len(options.batch_sizes) * (len({1, *options.tokens}) * (options.turns + 2) + 2 * options.turns + 2)
        work = bar.add_task("passes", total=kinds)
        passes, rates = measure(target, options, lambda: bar.advance(work))
    show(*report(target, passes, rates))
    if options.output is None:
        return
    content = {
        "provenance": provenance(target),
        "settings": settings_of(options),
        "definitions": DEFINITIONS,
        "bandwidth": rates.bandwidth,
        "throughput": rates.throughput,
        "critical_tokens": {str(batch): critical_tokens(passes, batch) for batch in options.batch_sizes},
        "passes": [asdict(p) | {"over_floor": p.over_floor} for p in passes],
    }
    write_json(options.output / "verify_cost.json", content)
    plots.save(draw(target, passes), options.output / "verify_cost.png")
    show(f"Written to {options.output}.")


def measure(target: Target, options: Options, done: Callable[[], None]) -> tuple[list[Pass], Rates]:
    """Every batch size by itself; its passes and the machine's two rates in turns."""
    model, config = target.model, getattr(target.model, "config", None)
    passes: list[Pass] = []
    per_byte: list[float] = []
    per_operation: list[float] = []
    for batch in options.batch_sizes:
        prompts = prompts_for(target, batch)
        cache = start_state(model, Plain(), prompts, max(options.tokens)).cache
        length = max(len(p) for p in prompts)
        beside: dict[str, Callable[[], float]] = {"byte": Bandwidth(), "operation": Throughput(cache.keys[0].dtype)}
        times = time_passes(model, cache, length, options.tokens, options.turns, done, beside)
        byte, operation = (statistics.median(times.beside[name]) for name in ("byte", "operation"))
        per_byte += times.beside["byte"]
        per_operation += times.beside["operation"]
        passes += [
            Pass(
                batch_size=batch,
                tokens=size,
                seconds=times.median(size),
                relative=times.relative(size),
                memory_floor=byte * bytes_read(model, config, cache, batch * size),
                compute_floor=operation * operations(model, config, cache, size),
            )
            for size in sorted(times.seconds)
        ]
    return passes, Rates(1 / statistics.median(per_byte), 1 / statistics.median(per_operation))


def critical_tokens(passes: list[Pass], batch: int) -> float:
    """Tokens a row at which arithmetic takes as long as reading; for a mixture of experts, by its single-token pass."""
    one = next(p for p in passes if (p.batch_size, p.tokens) == (batch, 1))
    return one.memory_floor / one.compute_floor


def report(target: Target, passes: list[Pass], rates: Rates) -> list[Table | str]:
    """The table, and what its columns mean."""
    rows: list[list[str] | None] = []
    for p in passes:
        if p.tokens == 1 and rows:
            rows.append(None)
        times = [number(1e3 * seconds) for seconds in (p.seconds, p.memory_floor, p.compute_floor)]
        shares = [number(p.relative), number(p.relative / p.tokens), number(p.over_floor)]
        rows.append([f"{p.batch_size}", f"{p.tokens}", *times, *shares])
    title = (
        f"{target.name}, {target.dtype}, {jax.devices()[0].device_kind}; {1e-9 * rates.bandwidth:.1f} GB/s, "
        f"{1e-9 * rates.throughput:.0f} GFLOP/s"
    )
    columns = ("batch", "tokens", "ms", "memory floor", "compute floor", "× one token", "a token", "× floor")
    bends = ", ".join(
        f"{critical_tokens(passes, batch):.1f} at batch {batch}"
        for batch in dict.fromkeys(p.batch_size for p in passes)
    )
    return [
        make_table(title, columns, rows, text=()),
        f"× one token: {DEFINITIONS['relative']}. a token: the same divided by the tokens; plain decoding is 1.",
        f"memory floor: {DEFINITIONS['memory_floor']}. compute floor: {DEFINITIONS['compute_floor']}.",
        f"The two meet at {bends} (tokens a row).",
    ]


def draw(target: Target, passes: list[Pass]) -> Any:
    """Times beside their floors, and passes relative to one over a single token."""
    figure, [[left, right]] = plots.panels(1, 2, f"{target.name}, {target.dtype}: a target pass", 4.2, 3.4)
    batches = list(dict.fromkeys(p.batch_size for p in passes))
    for i, batch in enumerate(batches):
        some = [p for p in passes if p.batch_size == batch]
        tokens = [p.tokens for p in some]
        plots.measured(left, tokens, [1e3 * p.seconds for p in some], i)
        plots.predicted(left, tokens, [1e3 * p.memory_floor for p in some], i)
        plots.predicted(left, tokens, [1e3 * p.compute_floor for p in some], i, dashed=True)
        plots.measured(right, tokens, [p.relative for p in some], i)
        plots.predicted(right, tokens, [p.floor / some[0].floor for p in some], i, dashed=True)
    ticks = [2**i for i in range(max(p.tokens for p in passes).bit_length())]
    for axis in (left, right):
        plots.doubling(axis, ticks)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
    every = sorted({p.tokens for p in passes})
    right.plot(every, every, color="0.6", linewidth=0.7, zorder=0)
    plots.label(left, "time", "tokens in each row's block", "ms")
    plots.label(right, "against one token (grey: as dear as plain steps)", "tokens in each row's block", "×")
    meaning = [("points", "measured"), ("dotted", "memory floor"), ("dashed", "compute floor; right: roofline")]
    plots.legend(figure, [f"batch {batch}" for batch in batches], meaning)
    return figure


if __name__ == "__main__":
    run_command_line(main)
