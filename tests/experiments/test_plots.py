"""What the experiments draw with: gaps, single values, and pictures that pages hold."""

import base64
from pathlib import Path

import pytest
from common import plots


def test_a_line_has_a_gap_where_nothing_is_known():
    _, [[axis]] = plots.panels(1, 1, "")
    plots.predicted(axis, [1, 2, 4], [1.0, None, 3.0], 0)
    assert [list(line.get_xdata()) for line in axis.lines] == [[1, 4]]
    plots.predicted(axis, [1, 2], [None, 3.0], 0, dashed=True)
    assert axis.lines[-1].get_marker() == "+"
    plots.predicted(axis, [1, 2], [None, None], 0)
    assert len(axis.lines) == 2


def test_points_have_bars_where_there_is_an_interval():
    _, [[axis]] = plots.panels(1, 1, "")
    plots.measured(axis, [1, 2], [1.0, 2.0], 0, [None, [1.5, 2.5]])
    assert [list(line.get_ydata()) for line in axis.lines] == [[1.0, 2.0], [1.5, 2.5]]
    plots.measured(axis, [1, 2], [1.0, 2.0], 0)
    assert len(axis.lines) == 3
    with pytest.raises(ValueError, match="zip"):
        plots.measured(axis, [1, 2], [1.0, 2.0], 0, [None])


def test_pictures_are_png_files_or_part_of_a_page(tmp_path: Path):
    figure, [[axis]] = plots.panels(1, 1, "a title")
    plots.measured(axis, [1, 2, 4], [1.0, 1.5, 1.7], 0)
    plots.doubling(axis, [1, 2, 4])
    plots.legend(figure, ["a drafter"], [("dotted", "predicted")])
    plots.save(figure, tmp_path / "new" / "a.png")
    head, _, data = plots.data_uri(figure).partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data)[:4] == (tmp_path / "new" / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert [text.get_text() for text in axis.get_xticklabels()] == ["1", "2", "4"]
