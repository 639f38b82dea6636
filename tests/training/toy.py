"""A run that takes seconds: Medusa heads on a tiny decoder. Imported by tests, and run where they need a process.

python toy.py '[{"directory": "a", "step": 7, "how": "kill"}, {"directory": "a"}]'
"""

import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax import testing
from specjax.drafters.medusa import MedusaConfig, MedusaHeads
from specjax.errors import SpecjaxError
from specjax.training.batches import Batch, Rows, lay_out
from specjax.training.loop import Outcome, Run, train
from specjax.training.objective import Losses
from specjax.training.optimizers import Optimization
from specjax.training.rendering import Rendered

LENGTH = 16


@dataclass(frozen=True)
class Toy:
    """Cross-entropy of Medusa heads. `noise` adds a loss that draws."""

    noise: float = 0.0
    name: ClassVar[str] = "toy"
    features: ClassVar[tuple[str, ...]] = ("hidden",)
    rates: ClassVar[dict[str, float]] = {}
    rates: ClassVar[Mapping[str, float]] = MappingProxyType({})

    def losses(self, network: Any, target: Any, batch: Batch, features: Any, key: Any) -> Losses:
        logits = network.logits(features["hidden"], target)
        total, count, figures = jnp.zeros(()), jnp.zeros(()), {}
        for head in range(network.config.num_heads):
            shift = head + 2
            labels, mask = (jnp.pad(x[:, shift:], ((0, 0), (0, shift))) for x in (batch.tokens, batch.mask))
            segments = jnp.pad(batch.segments[:, shift:], ((0, 0), (0, shift)))
            valid = mask & (segments == batch.segments)
            logprobs = jax.nn.log_softmax(logits[:, :, head].astype(jnp.float32))
            chosen = jnp.take_along_axis(logprobs, labels[..., None], axis=-1)[..., 0]
            right = valid & (logits[:, :, head].argmax(-1) == labels)
            total, count = total - jnp.where(valid, chosen, 0).sum(), count + valid.sum()
            figures[f"accuracy.{head + 1}"] = (right.sum().astype(jnp.float32), valid.sum().astype(jnp.float32))
        if self.noise:
            drawn = jax.random.normal(key, network.bias[...].shape)
            total = total + self.noise * (drawn * network.bias[...]).sum() * (count > 0)
        return Losses(total, count, figures)

    def decoding(self, network: Any, target: Any) -> Any:
        raise NotImplementedError


def toy_rows(count: int = 40, seed: int = 0, prompt: int = 2, **layout: Any) -> Rows:
    """Conversations of different lengths, so that rows and devices have different numbers of supervised tokens."""
    random = np.random.default_rng(seed)
    made = []
    for n, size in enumerate(random.integers(4, LENGTH + 1, count).tolist(), 1):
        ids = ((7 * np.arange(size) + random.integers(8)) % 64).astype(np.int32)
        made.append(Rendered(ids, np.arange(size) >= prompt, f"toy, line {n}"))
    return lay_out(made, LENGTH, **layout)


def toy_network(seed: int = 0) -> MedusaHeads:
    return MedusaHeads.random(MedusaConfig(32, 64, num_heads=2), seed)


def toy_run(directory: Any, **changes: Any) -> Outcome:
    """Train; `changes` are those of `Run`, of `Optimization` and arguments of `train`."""
    run = {"steps": 20, "batch_size": 8, "save_every": 5} | {
        k: v for k, v in changes.items() if k in Run.__annotations__
    }
    how: dict[str, Any] = {"learning_rate": 1e-2, "schedule": "constant"}
    how |= {k: v for k, v in changes.items() if k in Optimization.__annotations__}
    rest = {k: v for k, v in changes.items() if k not in {**Run.__annotations__, **Optimization.__annotations__}}
    rows, network = rest.pop("rows", None) or toy_rows(), rest.pop("network", None) or toy_network()
    target, objective = rest.pop("target", None) or testing.tiny_target(), rest.pop("objective", None) or Toy()
    optimization = Optimization(**how)
    return train(objective, network, target, rows, Run(Path(directory), **run), optimization, progress=False, **rest)


class Sabotage:
    """A sink that ends its own process when a step has been written down, or later, while the next save is going on."""

    def __init__(self, directory: Path, step: int, how: str):
        self.directory, self.step, self.how = directory, step, how

    def write(self, step: int, values: Any) -> None:
        if step != self.step:
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "kill in a save":
            threading.Thread(target=self._when_saving, daemon=True).start()
        elif self.how == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.how == "full":  # once the checkpoint before is there, no file can grow beyond the metrics
            while not (self.directory / "checkpoints" / "5").exists():
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))

    def _when_saving(self) -> None:
        while not list(self.directory.glob("checkpoints/*tmp*")):
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        pass


def attempt(directory: Path, step: int, how: str, changes: dict[str, Any]) -> int:
    """A run in a process of its own, which has begun nothing yet; returns its exit code, or minus its signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sinks = (Sabotage(directory, step, how),) if how else ()
            outcome = toy_run(directory, sinks=lambda resumed, configuration: sinks, objective=Toy(0.1), **changes)
            code = 10 if outcome.stopped else 0
        except SpecjaxError as error:
            (directory / "error.txt").write_text(str(error))
            code = 2
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(plan: list[dict[str, Any]]) -> None:
    """Runs one after the other, as `[{"directory": …, "step": 7, "how": "kill", "changes": {…}}, …]` says."""
    for run in plan:
        directory = Path(run["directory"])
        code = attempt(directory, run.get("step", 0), run.get("how", ""), run.get("changes", {}))
        left = sorted(path.name for path in directory.glob("checkpoints/*"))
        print(json.dumps({"code": code, "left": left}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
