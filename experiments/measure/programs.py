"""What a compiled decoding loop is: how long it took to compile, what it holds, what it copies."""

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from measure.states import prefill_program
from specjax import DecodeState, Drafter, Greedy, decode
from specjax.models.interface import TargetModel


@dataclass(frozen=True)
class Program:
    """A compiled loop.

    Attributes:
        compile_seconds: tracing, lowering and compiling.
        temporary_bytes: what it holds beside its arguments; None where the backend does not say.
        cache_bytes: the target's cache.
        cache_copies: copies in the loop of a layer's keys or values, or of more.
    """

    compile_seconds: float
    temporary_bytes: int | None
    cache_bytes: int
    cache_copies: int


def compile_loop(model: TargetModel, drafter: Drafter, prompts: Sequence[Sequence[int]], new_tokens: int) -> Program:
    """Compile the greedy loop for these prompts, as the first `specjax.generate` of such a shape does."""
    state: DecodeState = jax.eval_shape(prefill_program(model, drafter, prompts, new_tokens))
    begin = time.perf_counter()
    # a new function object, or an earlier compilation of the same one could be taken
    program = jax.jit(lambda *args: decode.run(*args), static_argnums=2, donate_argnums=3)
    compiled = program.lower(model, drafter, Greedy(), state).compile()
    seconds = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    leaves = jax.tree.leaves(state.cache)
    return Program(
        compile_seconds=seconds,
        temporary_bytes=None if memory is None else int(memory.temp_size_in_bytes),
        cache_bytes=sum(x.size * x.dtype.itemsize for x in leaves),
        cache_copies=count_copies(compiled.as_text() or "", min(x.size for x in leaves)),
    )


def count_copies(hlo: str, elements: int) -> int:
    """Instructions of an optimised program that copy or transpose an array of at least so many elements inside a loop.

    The entry computation is left out (what it copies, it copies once), and so are the insides of fusions: a fusion
    counts where it is called, if its root copies.
    """
    computations = dict(_computations(hlo))
    copying = {
        name
        for name, (_, lines) in computations.items()
        if (root := next((line for line in lines if line.lstrip().startswith("ROOT")), None))
        and _opcode(root) in ("copy", "transpose")
    }
    fused = set(re.findall(r"fusion\(.*?calls=%?([\w.\-]+)", hlo))
    count = 0
    for name, (entry, lines) in computations.items():
        if entry or name in fused:
            continue
        for line in lines:
            opcode = _opcode(line)
            called = re.search(r"calls=%?([\w.\-]+)", line)
            copies = opcode in ("copy", "copy-start", "transpose") or (
                opcode == "fusion" and called is not None and called.group(1) in copying
            )
            count += copies and _elements(line) >= elements
    return count


def _computations(hlo: str) -> Iterator[tuple[str, tuple[bool, list[str]]]]:
    """Name, whether it is the entry, and lines of each computation of an HLO text."""
    name: str | None = None
    entry = False
    lines: list[str] = []
    for line in hlo.splitlines():
        # a computation begins at the left margin: "%name (parameters) -> result {"
        if (head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)) and not line.startswith("HloModule"):
            name, entry, lines = head.group(2), head.group(1) is not None, []
        elif line.startswith("}") and name is not None:
            yield name, (entry, lines)
            name = None
        elif name is not None:
            lines.append(line)


def _opcode(line: str) -> str:
    found = re.search(r"= (?:\([^=]*?\)|\S+) ([a-z][\w\-]*)\(", line)
    return found.group(1) if found else ""


def _elements(line: str) -> int:
    """Elements of an instruction's (first) result."""
    shape = re.search(r"= \(?[a-z]\w*\[([\d,]*)\]", line)
    return math.prod(int(d) for d in shape.group(1).split(",") if d) if shape else 0


def bytes_of(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
