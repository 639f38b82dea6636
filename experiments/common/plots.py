"""How the experiments draw: panels of lines, measured ones with points, predicted ones without."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from common.results import write_bytes

# Okabe and Ito's colours, which colour-blind readers tell apart
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def panels(rows: int, columns: int, title: str, width: float = 3.2, height: float = 2.6) -> tuple[Figure, Any]:
    """A figure and its axes, `[rows][columns]`; width and height are a panel's, in inches."""
    figure = Figure(figsize=(width * columns + 0.4, height * rows + 0.8), layout="constrained")
    figure.suptitle(title, fontsize=10, wrap=True)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def label(axis: Any, title: str = "", x: str = "", y: str = "") -> None:
    axis.set_title(title, fontsize=8)
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)


def measured(
    axis: Any,
    x: Sequence[float],
    y: Sequence[float],
    index: int,
    intervals: Sequence[Sequence[float] | None] | None = None,
) -> None:
    """Points, joined by a line; a bar where there is an interval."""
    axis.plot(x, y, color=colour(index), marker="o", markersize=3.5, linewidth=1.3)
    for place, interval in zip(x, intervals or [], strict=intervals is not None):
        if interval is not None:
            axis.plot([place, place], interval, color=colour(index), linewidth=0.8)


def predicted(axis: Any, x: Sequence[float], y: Sequence[float | None], index: int, dashed: bool = False) -> None:
    """A line without points; one value alone is a cross. Where there is no value (None) the line has a gap."""
    known = [(a, b) for a, b in zip(x, y, strict=True) if b is not None]
    style = (0, (4, 2)) if dashed else (0, (1, 1))
    if len(known) == 1:
        axis.plot(*known[0], color=colour(index), marker="+" if dashed else "x", markersize=6, linestyle="none")
    elif known:
        axis.plot(*zip(*known, strict=True), color=colour(index), linewidth=1.1, linestyle=style)


def level(axis: Any, y: float) -> None:
    """A thin grey line at a height that means something, such as a speedup of 1."""
    axis.axhline(y, color="0.4", linewidth=0.7, zorder=0)


def doubling(axis: Any, ticks: Sequence[int]) -> None:
    """An x axis on which doubling is a step, with these numbers below it."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(ticks), [str(tick) for tick in ticks])
    axis.set_xticks([], minor=True)


def legend(figure: Figure, names: Sequence[str], styles: Sequence[tuple[str, str]] = ()) -> None:
    """Below the panels: a colour each name, and what the styles mean ("points", "dotted", "dashed", "crosses")."""
    lines: dict[str, Any] = {
        "points": {"marker": "o", "markersize": 3.5, "linewidth": 1.3},
        "dotted": {"linestyle": (0, (1, 1)), "linewidth": 1.1},
        "dashed": {"linestyle": (0, (4, 2)), "linewidth": 1.1},
        "crosses": {"marker": "x", "markersize": 4, "linestyle": "none"},
    }
    handles = [Line2D([], [], color=colour(i), linewidth=2) for i in range(len(names))]
    handles += [Line2D([], [], color="0.3", **lines[style]) for style, _ in styles]
    texts = [*names, *(text for _, text in styles)]
    columns = min(len(texts), 4)
    figure.legend(handles, texts, loc="outside lower center", ncols=columns, fontsize=7, frameon=False)


def save(figure: Figure, path: Path) -> None:
    """As a PNG."""
    write_bytes(path, png(figure))


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def data_uri(figure: Figure) -> str:
    """The PNG as an address that holds it, for pages that load nothing."""
    return "data:image/png;base64," + base64.b64encode(png(figure)).decode()
