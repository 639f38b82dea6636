"""What scripts share: progress where there is no terminal."""

import io

import pytest
from rich.console import Console

from specjax.cli import Bar


@pytest.mark.parametrize(("every", "lines"), [(0.0, 3), (1e6, 0)])
def test_lines_now_and_then_where_there_is_no_terminal(every: float, lines: int) -> None:
    screen = io.StringIO()
    with Bar(every=every, console=Console(file=screen)) as bar:
        work = bar.add_task("texts", total=1200, figures="")
        bar.advance(work, 1100)
        bar.update(work, completed=1101, figures="5 tokens/s")
        bar.update(work, description="more")
    told = screen.getvalue().splitlines()
    assert (
        told == ["texts · 1,100/1,200", "texts · 1,101/1,200 · 5 tokens/s", "more · 1,101/1,200 · 5 tokens/s"][:lines]
    )


def test_a_bar_on_a_terminal() -> None:
    screen = io.StringIO()
    with Bar("{task.description}", every=0.0, console=Console(file=screen, force_terminal=True)) as bar:
        bar.advance(bar.add_task("texts", total=2))
    assert "texts" in screen.getvalue() and "1/2" not in screen.getvalue()
