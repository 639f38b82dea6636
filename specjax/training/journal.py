"""What a run says about itself: metrics as lines of JSON, always; in TensorBoard and Weights & Biases where asked for.

A line is an object with "step" and what was measured there. A run that is resumed drops the lines after the step that
it resumes from, since it will write them again.
"""

import importlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from specjax.errors import CheckpointError, InputError

FILE = "metrics.jsonl"


class Sink(Protocol):
    """Another place for metrics."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Journal:
    """Metrics of a run, in `metrics.jsonl` of its directory and in further places."""

    def __init__(self, directory: str | os.PathLike[str], resumed: int = 0, sinks: tuple[Sink, ...] = ()):
        """Begin, or continue after a step.

        Raises:
            CheckpointError: a directory that cannot be written.
        """
        self.path = Path(directory) / FILE
        self.sinks = sinks
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            keep_until(self.path, resumed)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One line, in the file when this returns. Values that are not finite are written as text: JSON has none."""
        row = {"step": step, **{name: _jsonable(value) for name, value in values.items()}}
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}; the checkpoints before are kept") from error
        numbers = {
            name: float(value) for name, value in row.items() if name != "step" and not isinstance(value, str | list)
        }
        for sink in self.sinks:
            sink.write(step, numbers)

    def close(self) -> None:
        self._file.close()
        for sink in self.sinks:
            sink.close()


def keep_until(path: Path, step: int) -> None:
    """Drop the lines after a step, and a last line that was cut short when its process was killed."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if line.endswith("\n") and isinstance(row, dict) and row.get("step", 0) <= step:
            kept.append(line)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


def read(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run."""
    with (Path(directory) / FILE).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class TensorBoard:
    """Scalars as TensorBoard shows them; needs the package `tensorboard` and no TensorFlow."""

    def __init__(self, directory: str | os.PathLike[str], resumed: int = 0):
        writer = _needed("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = _needed("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = _needed("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._writer = writer.EventFileWriter(os.fspath(Path(directory) / "tensorboard"))
        if resumed:  # what the earlier process wrote after this step is not shown
            log = self._event.SessionLog(status=self._event.SessionLog.START)
            self._add(resumed + 1, session_log=log)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        value = self._summary.Summary.Value
        scalars = [value(tag=name, simple_value=x) for name, x in values.items()]
        self._add(step, summary=self._summary.Summary(value=scalars))

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._event.Event(step=step, wall_time=time.time(), **what))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run in a Weights & Biases project; continued under the same id when the run is resumed."""

    def __init__(self, directory: str | os.PathLike[str], project: str, configuration: Mapping[str, Any] | None = None):
        wandb = _needed("wandb", "wandb")
        file = Path(directory) / "wandb_id.txt"
        given = file.read_text().strip() if file.exists() else None
        self._run = wandb.init(
            project=project, dir=os.fspath(directory), id=given, resume="allow", config=dict(configuration or {})
        )
        file.write_text(self._run.id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _needed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(f"{package} was asked for and is not installed: pip install {package}") from None


def _jsonable(value: Any) -> Any:
    if isinstance(value, str | list | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)
