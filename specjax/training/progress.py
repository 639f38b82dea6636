"""The progress bar of a training run."""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich import progress as rich_progress
from rich.console import Console

WINDOW = 20  # steps that the speed is an average of


class Progress:
    """Loss, accuracy by position, supervised tokens per second and the time left; a context manager.

    On a terminal a bar; elsewhere a line now and then, ten in a run.
    """

    def __init__(self, steps: int, done: int, show: bool = True):
        self.console = Console(stderr=True, quiet=not show)
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("step"),
            rich_progress.MofNCompleteColumn(),
            rich_progress.BarColumn(),
            rich_progress.TextColumn("{task.fields[figures]}"),
            rich_progress.TimeRemainingColumn(),
            console=self.console,
            disable=not (show and self.console.is_terminal),
        )
        self._every = max(steps // 10, 1)
        self._task = self._bar.add_task("", total=steps, completed=done, figures="")
        self._tokens, self._first = 0.0, True
        self._marks: deque[tuple[float, float]] = deque(maxlen=WINDOW + 1)  # (when, tokens by then)
        self.pause()

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def pause(self) -> None:
        """Begin to time anew: what happened since the last step was no training."""
        self._marks.clear()
        self._marks.append((time.monotonic(), self._tokens))

    def show(self, step: int, figures: Mapping[str, float]) -> float:
        """Show a step's figures; returns supervised tokens per second over the last steps."""
        now = time.monotonic()
        self._tokens += float(figures["supervised"])
        since, before = self._marks[0]
        rate = (self._tokens - before) / max(now - since, 1e-9)
        self._marks.append((now, self._tokens))
        if self._first:  # it was compiled
            self.pause()
            self._first = False
        told = line(figures) + f" · {rate:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, figures=told)
        if not self.console.is_terminal and step % self._every == 0:
            self.say(f"step {step}: {told}")
        return rate

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, markup=False)


def line(figures: Mapping[str, float]) -> str:
    """Loss, and what share of guesses is right at each position."""
    found = sorted(
        (int(n.partition(".")[2]), x) for n, x in figures.items() if n.startswith("accuracy.") and n[9:].isdecimal()
    )
    accuracy = " · accuracy " + "/".join(f"{100 * x:.0f}" for _, x in found) + "%" if found else ""
    return f"loss {figures['loss']:.4f}{accuracy}"
