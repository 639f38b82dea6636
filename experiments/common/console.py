"""What a script shows: progress while it runs, tables at the end."""

import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from specjax.cli import Bar


def progress_bar() -> Bar:
    return Bar(TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str] | None], text: Sequence[int]) -> Table:
    """A table of numbers, but for the columns of text; a row that is None draws a line.

    Args:
        text: places of the columns of text.
    """
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for i, name in enumerate(columns):
        if i in text:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*row)
    return table


def show(*parts: object) -> None:
    """Print tables and text to stdout; wide enough for all columns where stdout is a file or a pipe."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(console.width, 160))
    for part in parts:
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)


def exit_status(faults: int) -> int:
    """1, and a line on stderr, where greedy texts are wrong; else 0."""
    if faults:
        what = "greedy texts are not plain decoding's, by more than rounding explains"
        print(f"FAULT: {faults} {what}", file=sys.stderr)
    return 1 if faults else 0


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def small(value: float | None) -> str:
    return "<0.001" if value is not None and value < 1e-3 else number(value, 3)


def percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}%"
