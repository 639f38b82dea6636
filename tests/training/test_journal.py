"""Metrics: lines of JSON, what a resumed run keeps of them, TensorBoard and Weights & Biases."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specjax.errors import CheckpointError, InputError
from specjax.training.journal import FILE, Journal, TensorBoard, WeightsAndBiases, read


class Seen:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.closed = False

    def write(self, step: int, values: Any) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


def test_lines(tmp_path: Path) -> None:
    seen = Seen()
    journal = Journal(tmp_path / "run", sinks=(seen,))
    journal.write(1, {"loss": 2.5, "supervised": 7})
    assert read(tmp_path / "run") == [{"step": 1, "loss": 2.5, "supervised": 7}]  # there before the journal is closed
    journal.write(2, {"loss": float("nan"), "conversations": ["a", "b"]})
    journal.close()
    assert read(tmp_path / "run")[1] == {"step": 2, "loss": "nan", "conversations": ["a", "b"]}
    assert seen.rows == [(1, {"loss": 2.5, "supervised": 7.0}), (2, {})]
    assert seen.closed


def test_resuming_drops_what_will_be_written_again(tmp_path: Path) -> None:
    file = tmp_path / FILE
    lines = [f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, 8)]
    file.write_text("".join(lines) + '{"step": 8, "lo')  # cut short when its process was killed
    journal = Journal(tmp_path, resumed=5)
    journal.write(6, {"loss": 0.5})
    journal.close()
    assert file.read_text() == "".join(lines[:5]) + '{"step": 6, "loss": 0.5}\n'
    Journal(tmp_path).close()
    assert file.read_text() == ""


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(CheckpointError, match="Is a directory"):
        Journal(tmp_path)


@pytest.mark.parametrize(("sink", "package"), [(TensorBoard, "tensorboard"), (WeightsAndBiases, "wandb")])
def test_what_is_asked_for_and_absent(sink: Any, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard", "tensorboard.summary.writer.event_file_writer", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    more = () if sink is TensorBoard else ("project",)
    with pytest.raises(InputError, match=f"^{package} was asked for and is not installed: pip install {package}$"):
        sink(tmp_path, *more)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoard(tmp_path)
    for step in range(1, 5):
        first.write(step, {"loss": 1.0 / step})
    first.close()
    resumed = TensorBoard(tmp_path, resumed=2)
    resumed.write(3, {"loss": 7.0})
    resumed.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    assert [(event.step, event.value) for event in shown.Scalars("loss")] == [(1, 1.0), (2, 0.5), (3, 7.0)]


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its client's place taken: nothing leaves the machine."""
    begun, logged, finished = [], [], []

    def init(**options: Any) -> Any:
        begun.append(options)
        run_id = options["id"] or "made-up"
        return SimpleNamespace(
            id=run_id, log=lambda values, step: logged.append((step, values)), finish=lambda: finished.append(run_id)
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for _ in range(2):
        sink = WeightsAndBiases(tmp_path, "drafters", {"seed": 0})
        sink.write(4, {"loss": 1.0})
        sink.close()
    assert [options["id"] for options in begun] == [None, "made-up"]
    assert begun[0] == begun[1] | {"id": None}
    assert (begun[0]["project"], begun[0]["resume"], begun[0]["config"]) == ("drafters", "allow", {"seed": 0})
    assert logged == [(4, {"loss": 1.0})] * 2
    assert finished == ["made-up"] * 2
