"""What training EAGLE-3 costs on this machine: tokens per second of a step, beside PyTorch where it is installed.

    python experiments/bench_training.py
    python experiments/bench_training.py --rows 2 --turns 3

Both take the same features and tokens, with random weights of the target's shape: forward through `--unroll` steps,
loss, backward, AdamW. The peer is `speculators` (pip install -e ".[compare]" speculators==0.9.0), with the better of
its attention implementations that run here. Measured in turns; medians. Tokens are all of the rows, supervised or not.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from common.console import make_table, number, show
from common.results import check_output, provenance, write_json
from measure import speculators

import specjax
from specjax.cli import run_command_line
from specjax.drafters.eagle_config import Eagle3Config, default_layers
from specjax.drafters.eagle_networks import Eagle3Network
from specjax.errors import check_whole
from specjax.training.batches import Batch
from specjax.training.eagle import Eagle3Objective
from specjax.training.optimizers import Optimization, make_optimizer
from specjax.training.state import make_state, take_apart
from specjax.training.step import make_step, micro_batches

ATTENTION = ("eager", "sdpa")


@dataclass(frozen=True)
class Options:
    """Measure training steps of EAGLE-3."""

    target: str = "smollm2-135m-instruct"
    """Whose shapes: a name, a directory, a .gguf file, or a Hub id."""
    rows: int = 4
    """Rows of a step."""
    length: int = 768
    """Tokens of a row; each holds three conversations, of which the last 70% is supervised."""
    draft_vocab_size: int = 8192
    """Tokens that can be drafted."""
    unroll: int = 3
    """Steps of the training-time test."""
    turns: int = 5
    """How often each is measured."""
    output: Path | None = None
    """Directory for bench_training.json."""


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    for name in ("rows", "length", "draft_vocab_size", "unroll", "turns"):
        check_whole(name, getattr(options, name), 1)
    check_output(options.output)
    target = specjax.load(options.target)
    batch, features = make_inputs(options, target.model.config)
    network = Eagle3Network.random(
        Eagle3Config.of(target.model.config, options.draft_vocab_size), d2t=np.zeros(options.draft_vocab_size, int)
    )
    steps: dict[str, Any] = {"specjax": our_step(options, target.model, network, batch, features)}
    missing = speculators.why_not()
    if missing is None:
        head = np.asarray(target.model.logits(jnp.eye(network.config.layer.hidden_size)[None])[0]).T
        for attention in ATTENTION:
            steps[f"speculators, {attention}"] = speculators.TrainingStep(
                target.model.config,
                network,
                head[: options.draft_vocab_size],
                batch,
                features,
                options.unroll,
                attention,
            )
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.turns + 1):
        for name, step in steps.items():
            took = step()
            if turn:  # the first compiles
                seconds[name].append(took)
    tokens = batch.tokens.size
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    lines = [[name, number(tokens / took, 0), number(1000 * took, 0)] for name, took in medians.items()]
    show(make_table("A training step of EAGLE-3", ["", "tokens/s", "ms"], lines, text=[0]))
    if missing is not None:
        show(f"Nothing to compare with: {missing}")
    else:
        best = min(took for name, took in medians.items() if name != "specjax")
        show(f"specjax / speculators: {best / medians['specjax']:.2f} ×")
    if options.output is not None:
        found = {"options": asdict(options) | {"output": str(options.output)}, "seconds": seconds, "tokens": tokens}
        write_json(options.output / "bench_training.json", found | {"provenance": provenance(target)})


def make_inputs(options: Options, config: Any) -> tuple[Batch, dict[str, np.ndarray]]:
    """Random tokens that can be drafted, and random features."""
    random = np.random.default_rng(0)
    shape = (options.rows, options.length)
    place = np.arange(options.length)
    segments = np.broadcast_to(1 + 3 * place // options.length, shape).astype(np.int32)
    share = 3 * place / options.length % 1
    starts = np.searchsorted(segments[0], segments[0])
    batch = Batch(
        random.integers(0, options.draft_vocab_size, shape, dtype=np.int32),
        np.broadcast_to(share > 0.3, shape),
        segments,
        np.broadcast_to(place - starts, shape).astype(np.int32),
        np.arange(options.rows, dtype=np.int32),
    )
    names = (*(f"layer.{i}" for i in default_layers(config.num_layers)), "hidden")
    return batch, {n: random.standard_normal((*shape, config.hidden_size), dtype=np.float32) for n in names}


def our_step(options: Options, model: Any, network: Any, batch: Batch, features: dict[str, np.ndarray]) -> Any:
    """The compiled step of the training loop, with stored features; returns the seconds of one."""
    capacity = int(batch.mask.sum(-1).max())
    objective: Any = Eagle3Objective(options.unroll, capacity=capacity, feature_layers=network.config.feature_layers)
    optimizer = make_optimizer(Optimization())
    skeleton, params, buffers = take_apart(network)
    state = make_state(params, buffers, optimizer, 0)
    step = make_step(objective, skeleton, model, optimizer, lambda at: 1e-4, "float32", state)
    given = jax.tree.map(jnp.asarray, micro_batches((batch, features), 1))

    def run() -> float:
        nonlocal state
        begin = time.perf_counter()
        state, figures = step(state, *given)
        jax.block_until_ready((state, figures))
        return time.perf_counter() - begin

    return run


if __name__ == "__main__":
    run_command_line(main)
