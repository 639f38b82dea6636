"""Time without compilation, and quantities measured in turns, because a machine's speed drifts."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")
_compiled = [0.0]


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    if event.endswith("backend_compile_duration"):
        _compiled[0] += duration_secs


jax.monitoring.register_event_duration_secs_listener(_listen)


def without_compiling(call: Callable[[], Result]) -> tuple[Result, float]:
    """Call until nothing was compiled meanwhile: what it then returns, and the seconds that went into warming up.

    So every new shape warms itself up, whenever it comes, and no compile time ever enters a measurement.
    """
    begin = time.perf_counter()
    warmed = 0.0
    for _ in range(3):
        before = _compiled[0]
        result = call()
        if _compiled[0] == before:
            break
        warmed = time.perf_counter() - begin
    return result, warmed


def excess(measure: Callable[[], float], base: Callable[[], float]) -> float:
    """What `measure` says above `base`, which is asked right before and right after it."""
    before, value, after = base(), measure(), base()
    return value - (before + after) / 2


def in_turns(
    measures: Mapping[str, Callable[[], float]], repetitions: int, done: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """What each of `measures` says, all asked in turn `repetitions` times, after once each to warm up."""
    for measure in measures.values():
        measure()
        done()
    values: dict[str, list[float]] = {name: [] for name in measures}
    for i in range(repetitions):
        for name in values if i % 2 == 0 else reversed(values):
            values[name].append(measures[name]())
            done()
    return values


def median_of(combine: Callable[..., float], *values: Sequence[float]) -> float:
    """Median over the turns of what `combine` makes of values that were measured side by side."""
    return statistics.median(combine(*turn) for turn in zip(*values, strict=True))
