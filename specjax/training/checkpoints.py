"""Checkpoints of a run, by Orbax: written beside the training, whole or not at all, the best and the last of them kept.

    run/checkpoints/400/{weights,rest,run,metrics}

A checkpoint holds the `TrainState` (parameters, buffers, optimizer, key, step), the position in the data, and the run's
configuration, which a resumed run must have again.
"""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from orbax.checkpoint import checkpoint_managers as policies

from specjax.errors import CheckpointError
from specjax.training.state import TrainState, take_apart

BEST_BY = "tokens_per_call"
FOLDER = "checkpoints"
_TRASH = "deleted"


class Checkpoints:
    """The checkpoints of a run directory. A context manager: leaving it waits for what is being written."""

    def __init__(self, directory: str | os.PathLike[str], read_only: bool = False):
        """Open, or begin.

        Raises:
            CheckpointError: a directory that cannot be made or read, or that another process trains in.
        """
        self.directory = Path(directory).absolute()
        self.folder = self.directory / FOLDER
        if read_only and not self.folder.is_dir():
            raise CheckpointError(f"{directory}: no checkpoints there")
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells everything it does
        options = ocp.CheckpointManagerOptions(
            best_fn=_score,
            preservation_policy=policies.AnyPreservationPolicy(
                [policies.LatestN(1), policies.BestN(get_metric_fn=_score, n=1, keep_checkpoints_without_metrics=False)]
            ),
            # moved away first: a process that is killed while it deletes does not leave half a checkpoint in its place
            todelete_subdir=_TRASH,
            cleanup_tmp_directories=not read_only,
            create=not read_only,
            read_only=read_only,
        )
        self._lock: Any = None
        try:
            if not read_only:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._claim()
                self._empty_trash()
            handlers = {
                "weights": ocp.StandardCheckpointHandler(),
                "rest": ocp.StandardCheckpointHandler(),
                "run": ocp.JsonCheckpointHandler(),
            }
            self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)
        except OSError as error:
            raise CheckpointError(f"{self.folder}: {error.strerror or error}") from error

    @staticmethod
    def begun(directory: str | os.PathLike[str]) -> bool:
        """Whether a run in that directory has saved anything."""
        return any((Path(directory) / FOLDER).glob("*/weights"))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        try:
            with self._writing():
                self._manager.close()  # waits
            self._empty_trash()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(str(failed))  # the first fault is the one to tell
        finally:
            if self._lock is not None:
                self._lock.close()

    @property
    def steps(self) -> list[int]:
        """The steps that there are checkpoints of."""
        return sorted(self._manager.all_steps())

    @property
    def last(self) -> int | None:
        """The step of the newest checkpoint."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """The step of the checkpoint with the most tokens per call, the later of equals; None: none was measured."""
        scores = {step: self.metrics(step) for step in self.steps}
        rated = [(_score(metrics), step) for step, metrics in scores.items() if metrics]
        return max(rated)[1] if rated else None

    def metrics(self, step: int) -> dict[str, float]:
        """What was measured at a checkpoint; empty where nothing was."""
        return dict(self._manager.metrics(step) or {})

    def configuration(self, step: int) -> dict[str, Any]:
        """The configuration of the run that wrote a checkpoint."""
        return self._run(step)["configuration"]

    def save(
        self,
        state: TrainState,
        position: Mapping[str, Any],
        configuration: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Begin to write a checkpoint of the state as it is now; its arrays may be given away afterwards.

        Waits for the one before. One that cannot be written leaves those before it as they are.

        Args:
            position: in the data, as its iterator's `get_state` has it.
            metrics: what was measured of it, `BEST_BY` among it.

        Raises:
            CheckpointError: this one, or the one before, cannot be written (the disk is full, say).
        """
        step = int(state.step)
        if step in self.steps:
            return
        args = ocp.args.Composite(
            weights=ocp.args.StandardSave(_weights(state)),
            rest=ocp.args.StandardSave(_rest(state)),
            run=ocp.args.JsonSave({"configuration": dict(configuration), "position": dict(position)}),
        )
        self.wait()
        with self._writing():
            self._manager.save(step, args=args, metrics=dict(metrics) if metrics else None, force=True)

    def check(self) -> None:
        """Raise CheckpointError where the checkpoint that is being written has failed by now."""
        with self._writing():
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is there."""
        with self._writing():
            self._manager.wait_until_finished()
            self._empty_trash()

    def restore(self, like: TrainState, step: int) -> tuple[TrainState, dict[str, Any]]:
        """The state of a checkpoint, placed as `like` is, and the position in the data.

        Raises:
            CheckpointError: a damaged checkpoint, or one of another network or optimizer.
        """
        weights, rest = self._read(step, _weights(like), "weights"), self._read(step, _rest(like), "rest")
        leaves = [rest["optimizer"][name] for name in _optimizer(like)]
        state = TrainState(
            rest["step"],
            weights["params"],
            weights.get("buffers", {}),
            jax.tree.unflatten(jax.tree.structure(like.optimizer), leaves),
            jax.random.wrap_key_data(rest["key"], impl=jax.random.key_impl(like.key)),
        )
        return state, self._run(step)["position"]

    def weights(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters and buffers alone: `{"params": {name: array}, "buffers": {…}}`, placed as those given."""
        return self._read(step, like, "weights")

    def _read(self, step: int, like: Mapping[str, Any], item: str) -> Any:
        """An item of a checkpoint, of the structure, shapes, dtypes and placement given."""
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        with self._reading(step):
            there = _shapes(self._manager.item_metadata(step)[item].tree)
        here = _shapes(abstract)
        for name in sorted({*there, *here}):
            if there.get(name) != here.get(name):
                raise CheckpointError(
                    f"{self.folder / str(step)}: {name} is {there.get(name, 'absent')} in the checkpoint "
                    f"and {here.get(name, 'absent')} in this run"
                )
        with self._reading(step):
            args = ocp.args.Composite(**{item: ocp.args.StandardRestore(abstract)})
            return self._manager.restore(step, args=args)[item]

    def _run(self, step: int) -> dict[str, Any]:
        with self._reading(step):
            return self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax, tensorstore and the system raise their own each
            text = f"{self.folder}: a checkpoint cannot be written, those before are kept ({_reason(error)})"
            raise CheckpointError(text) from error

    @contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            text = f"{self.folder / str(step)}: this checkpoint cannot be read ({_reason(error)})"
            raise CheckpointError(text) from error

    def _claim(self) -> None:
        """Keep others from training here: they would take what is being written for what a killed run left."""
        if jax.process_index() != 0:
            return
        self._lock = (self.directory / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however that ends
        except BlockingIOError:
            self._lock.close()
            raise CheckpointError(f"{self.directory}: another process is training there") from None

    def _empty_trash(self) -> None:
        if jax.process_index() == 0:
            shutil.rmtree(self.folder / _TRASH, ignore_errors=True)


def load_weights(directory: str | os.PathLike[str], network: nnx.Module, which: str = "best") -> nnx.Module:
    """The network of a run's checkpoint.

    Args:
        directory: of the run.
        network: one of the same shapes; its values do not matter, buffers included.
        which: "best" (by tokens per call; the last where none was measured), "last", or the number of a step.

    Raises:
        CheckpointError: no such checkpoint, or one of another network.
    """
    with Checkpoints(directory, read_only=True) as checkpoints:
        best, last = checkpoints.best, checkpoints.last
        known = {"best": last if best is None else best, "last": last}
        step = known[which] if which in known else int(which) if which.isdecimal() else None
        if step is None or step not in checkpoints.steps:
            raise CheckpointError(f"{directory}: no checkpoint {which!r} there; there are {checkpoints.steps}")
        skeleton, params, buffers = take_apart(network)
        found = checkpoints.weights(step, _tree(params, buffers))
        return skeleton.network(found["params"], found.get("buffers", {}))


def check_configuration(directory: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError, naming the first entry in which a run's configuration is not the one asked for."""
    old, new = _entries(before), _entries(json.loads(json.dumps(now)))
    for name in [*new, *(n for n in old if n not in new)]:
        if old.get(name) != new.get(name) or (name in old) != (name in new):
            raise CheckpointError(
                f"{directory} holds another run: its {name} is {old.get(name)!r}, and {new.get(name)!r} is asked for; "
                "give another directory, or the same settings to continue it"
            )


def _entries(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested objects by dotted name."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    return {
        k: v for key, value in tree.items() for k, v in _entries(value, f"{prefix}.{key}" if prefix else key).items()
    }


def _score(metrics: Any) -> float:
    return float(metrics[BEST_BY])


def _weights(state: TrainState) -> dict[str, Any]:
    return _tree(state.params, state.buffers)


def _tree(params: Mapping[str, Any], buffers: Mapping[str, Any]) -> dict[str, Any]:
    return {"params": dict(params)} | ({"buffers": dict(buffers)} if buffers else {})


def _rest(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "key": jax.random.key_data(state.key), "optimizer": _optimizer(state)}


def _optimizer(state: TrainState) -> dict[str, Any]:
    """The optimizer's arrays by their paths, so that a checkpoint does not depend on optax's classes."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.optimizer)}


def _reason(error: Exception) -> str:
    """The first line of an error; of tensorstore's long ones the end, where the system's own words are."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return first if len(first) < 200 else first.rpartition(": ")[2].partition(" [")[0]


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {_name(path): tuple(x.shape) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
