"""The training loop: one compiled step, and a driver that feeds it, reports, evaluates, saves and resumes.

run = Run(Path("runs/medusa"), steps=2000, batch_size=16, accumulation=2, mesh="data=4")
outcome = train(objective, network, target, rows, run, Optimization(learning_rate=1e-3), evaluate=evaluate)
"""

import dataclasses
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jaxtyping import Array, Int

from specjax.errors import InputError, TrainingError, check_whole
from specjax.models.target import Target
from specjax.training import mesh as over
from specjax.training.batches import Batch, Rows, batches
from specjax.training.checkpoints import BEST_BY, Checkpoints, check_configuration
from specjax.training.journal import Journal, Sink
from specjax.training.objective import Objective
from specjax.training.optimizers import Optimization, make_optimizer, make_schedule
from specjax.training.progress import Progress
from specjax.training.state import make_state, take_apart
from specjax.training.step import make_step, micro_batches

COMPUTE_DTYPES = ("float32", "bfloat16")
FeaturesOf = Callable[[Int[np.ndarray, "B"]], dict[str, np.ndarray]]
MOST_TOLD = 20  # conversations that an error names; the line of metrics has all of them


@dataclass(frozen=True)
class Run:
    """A training run. All intervals count optimizer steps, whatever the accumulation.

    Attributes:
        directory: of its checkpoints and metrics. One that holds checkpoints is continued from the last of them.
        steps: optimizer steps in all.
        batch_size: rows of a step, of all its micro-batches, devices and processes together.
        accumulation: micro-batches that a step is computed in, one after the other: less memory, the same gradient.
        evaluate_every: steps; 0 for at the end only. An evaluated state is saved.
        save_every: steps; 0 for at the end only (and where evaluated).
        log_every: steps between lines of metrics.
        seed: of the order of the data and of what an objective draws.
        mesh: "data=4,fsdp=2" to train on all devices; None for the default device.
        compute_dtype: of the loss and its gradients, "float32" or "bfloat16". Parameters, their updates and the sums
            over micro-batches are float32.
    """

    directory: Path
    steps: int
    batch_size: int
    accumulation: int = 1
    evaluate_every: int = 0
    save_every: int = 0
    log_every: int = 1
    seed: int = 0
    mesh: str | None = None
    compute_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulation", "log_every"):
            check_whole(name, getattr(self, name), 1)
        for name in ("evaluate_every", "save_every", "seed"):
            check_whole(name, getattr(self, name), 0)
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise InputError(f"compute_dtype is {self.compute_dtype!r}; expected one of {', '.join(COMPUTE_DTYPES)}")


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        network: with the last parameters, float32.
        step: optimizer steps done.
        last, best: steps of the checkpoints kept; best is None where nothing was evaluated.
        stopped: by SIGTERM, before its end, with everything saved.
        empty_steps: steps without a supervised token, which changed nothing (in this process).
    """

    network: nnx.Module
    step: int
    last: int | None
    best: int | None
    stopped: bool
    empty_steps: int

    @property
    def finished(self) -> bool:
        return not self.stopped


def train(
    objective: Objective,
    network: nnx.Module,
    target: Target,
    rows: Rows,
    run: Run,
    optimization: Optimization,
    *,
    features_of: FeaturesOf | None = None,
    evaluate: Callable[[nnx.Module], Mapping[str, float]] | None = None,
    sinks: Callable[[int, Mapping[str, Any]], tuple[Sink, ...]] = lambda resumed, configuration: (),
    described: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Outcome:
    """Train, or continue a run of the same settings: as if it had never stopped, bit for bit where the device computes
    the same twice (GPUs with XLA_FLAGS=--xla_gpu_deterministic_ops=true).

    SIGTERM saves and returns. So that nothing good is overwritten, a loss or gradient that is not finite ends the run
    before anything more is saved.

    Args:
        network: where training starts (its values do not matter where a run is continued); it is not changed.
        target: frozen. With a mesh it is placed there, unless it lies there already.
        rows: the data; the same in every process.
        features_of: features of rows by their numbers (-1: a row of padding), read from where they were stored; None
            computes them inside the step.
        evaluate: figures of a network, valid during the call; "tokens_per_call" decides which checkpoint is the best.
        sinks: `sinks(resumed step, configuration)`: further places for metrics.
        described: what else belongs to the configuration that a continued run must have again.
        progress: show a progress bar.

    Raises:
        InputError: settings that do not fit together.
        CheckpointError: a directory with another run, a damaged checkpoint, one that cannot be written.
        TrainingError: a loss or gradient that is not finite.
    """
    mesh = over.parse_mesh(run.mesh) if run.mesh else None
    over.check_mesh(mesh, run.batch_size, run.accumulation)
    configuration = configure(objective, network, target, rows, run, optimization, described or {})
    skeleton, params, buffers = take_apart(network)
    optimizer = make_optimizer(optimization)
    schedule = make_schedule(optimization, run.steps)
    axes = over.declared_axes(network) if mesh else {}
    params, buffers = (over.place_arrays(mesh, x, axes) for x in (params, buffers))
    state = over.place_state(mesh, make_state(params, buffers, optimizer, run.seed), axes)
    model = over.place_model(mesh, target.model)
    step = make_step(objective, skeleton, model, optimizer, schedule, run.compute_dtype, state)
    process, processes = jax.process_index(), jax.process_count()
    data = iter(batches(rows, run.batch_size, run.seed, process=process, num_processes=processes))
    with ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(run.directory))
        if (last := checkpoints.last) is not None:
            check_configuration(run.directory, checkpoints.configuration(last), configuration)
            state, position = checkpoints.restore(state, last)
            data.set_state(position)
        resumed = last or 0
        journal = None
        if process == 0:
            journal = stack.enter_context(closing(Journal(run.directory, resumed, sinks(resumed, configuration))))
        bar = stack.enter_context(Progress(run.steps, resumed, show=progress and process == 0))
        told = stack.enter_context(_sigterm())
        if resumed:
            bar.say(f"continuing {run.directory} after step {resumed}")
        teller = _Teller(rows, journal, bar, run.log_every)

        at, saved, pending = resumed, last, None
        while at < run.steps and not told(at):
            batch = next(data)
            features = _features(features_of, objective.features, batch)
            given = over.place_batch(mesh, micro_batches((batch, features), run.accumulation))
            state, figures = step(state, *given)
            at += 1
            # the figures of a step are fetched when the next one is under way, so that no device waits for the host
            if pending is not None:
                teller.tell(*pending)
                checkpoints.check()
            pending = at, figures, batch
            last_step = at == run.steps
            evaluating = evaluate is not None and (last_step or _due(at, run.evaluate_every))
            if evaluating or last_step or _due(at, run.save_every):
                teller.tell(*pending)
                pending = None
                metrics = None
                if evaluate is not None and evaluating:  # in the parameters' own precision, as drafters decode
                    metrics = teller.measure(at, evaluate(skeleton.network(state.params, state.buffers)))
                checkpoints.save(state, data.get_state(), configuration, metrics)
                saved = at
                bar.pause()
        if pending is not None:
            teller.tell(*pending)
        if saved != at:
            checkpoints.save(state, data.get_state(), configuration)
        checkpoints.wait()
        if at < run.steps:
            bar.say(f"stopped by SIGTERM; step {at} is saved, the same command goes on from there")
        if teller.empty_steps:
            bar.say(f"{teller.empty_steps} steps had no supervised token and changed nothing")
        return Outcome(
            skeleton.network(state.params, state.buffers),
            at,
            checkpoints.last,
            checkpoints.best,
            stopped=at < run.steps,
            empty_steps=teller.empty_steps,
        )


def configure(
    objective: Objective,
    network: nnx.Module,
    target: Target,
    rows: Rows,
    run: Run,
    optimization: Optimization,
    described: Mapping[str, Any],
) -> dict[str, Any]:
    """What decides the parameters that a run ends with; a continued run must have the same.

    Where it is computed (mesh, accumulation) and how often it is saved may change.
    """
    settings = _plain(optimization)
    if optimization.schedule != "constant":
        settings["steps"] = run.steps  # a schedule ends with the run
    return {
        "objective": {"name": objective.name, **_plain(objective)},
        "network": {"kind": type(network).__name__, "config": _plain(getattr(network, "config", None))},
        "target": {"name": target.name, "weights": target.weights_hash, "dtype": target.dtype},
        "rows": rows.fingerprint,
        "optimization": settings,
        "batch_size": run.batch_size,
        "seed": run.seed,
        "compute_dtype": run.compute_dtype,
        **described,
    }


def _plain(settings: Any) -> Any:
    """Settings as JSON has them; what it does not have as text."""
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return {f.name: _plain(getattr(settings, f.name)) for f in dataclasses.fields(settings)}
    if isinstance(settings, Mapping):
        return {str(key): _plain(value) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [_plain(value) for value in settings]
    return settings if settings is None or isinstance(settings, str | int | float | bool) else str(settings)


def _due(at: int, every: int) -> bool:
    return every > 0 and at % every == 0


def _features(features_of: FeaturesOf | None, names: tuple[str, ...], batch: Batch) -> dict[str, np.ndarray] | None:
    if features_of is None:
        return None
    found = features_of(batch.rows)
    if missing := [name for name in names if name not in found]:
        raise InputError(f"the stored features have no {missing[0]!r}, which the objective reads: {', '.join(found)}")
    wrong = [name for name in names if found[name].shape[:2] != batch.tokens.shape]
    if wrong:
        raise InputError(
            f"stored feature {wrong[0]!r} is {found[wrong[0]].shape[:2]} for rows of {batch.tokens.shape}: "
            "they were stored for other rows"
        )
    return {name: found[name] for name in names}


@contextmanager
def _sigterm() -> Iterator[Callable[[int], bool]]:
    """Whether SIGTERM has come, asked at each step; with several processes, at a step that all of them agree on.

    A second one ends the process at once. Only the main thread can be told.
    """
    if jax.process_count() > 1:  # jax's distributed runtime listens for it
        yield multihost_utils.reached_preemption_sync_point
        return
    if threading.current_thread() is not threading.main_thread():
        yield lambda at: False
        return
    came = []
    before = signal.getsignal(signal.SIGTERM)

    def note(number: int, frame: Any) -> None:
        came.append(number)
        signal.signal(signal.SIGTERM, before)

    signal.signal(signal.SIGTERM, note)
    try:
        yield lambda at: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before)


class _Teller:
    """Tells what a step came to, and stops the run where that is no number."""

    def __init__(self, rows: Rows, journal: Journal | None, bar: Progress, log_every: int):
        self.rows, self.journal, self.bar, self.log_every = rows, journal, bar, log_every
        self.empty_steps = 0

    def tell(self, at: int, figures: Mapping[str, Array], batch: Batch) -> None:
        values = {name: float(value) for name, value in jax.device_get(figures).items()}
        rate = self.bar.show(at, values)
        broken = [name for name in ("loss", "gradient_norm") if not math.isfinite(values[name])]
        if broken:
            self._stop(at, broken[0].replace("_", " "), values, batch)
        self.empty_steps += values["supervised"] == 0
        if self.journal is not None and _due(at, self.log_every):
            self.journal.write(at, values | {"tokens_per_second": rate})

    def measure(self, at: int, found: Mapping[str, float]) -> dict[str, float]:
        """Write down an evaluation."""
        metrics = {name: float(value) for name, value in found.items()}
        if not math.isfinite(metrics.get(BEST_BY, math.nan)):
            raise TrainingError(f"step {at}: the evaluation gave {BEST_BY} {found.get(BEST_BY)!r}; expected a number")
        if self.journal is not None:
            self.journal.write(at, {f"evaluation.{name}": value for name, value in metrics.items()})
        self.bar.say(f"step {at}: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
        return metrics

    def _stop(self, at: int, what: str, values: dict[str, float], batch: Batch) -> None:
        where = self.rows.describe(batch)
        if self.journal is not None:
            self.journal.write(at, values | {"stopped": f"{what} is not finite", "conversations": where})
        told = "; ".join(where[:MOST_TOLD]) + (f"; and {len(where) - MOST_TOLD} more" if len(where) > MOST_TOLD else "")
        value = values[what.replace(" ", "_")]
        raise TrainingError(
            f"step {at}: the {what} is {value}; nothing was saved since the last checkpoint, which is good; "
            f"the conversations of the batch: {told}"
        )
