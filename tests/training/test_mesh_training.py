"""Many devices and several processes compute what one device computes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from toy import Toy, toy_network, toy_run

from specjax.training import journal
from specjax.training.checkpoints import load_weights

HERE = Path(__file__).parent

DEVICES = """
import sys
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax import testing
from specjax.training import mesh as over
from specjax.training.checkpoints import load_weights
from specjax.training.features import online, segment_mask
from specjax.training.objective import Losses
from specjax.training.optimizers import Optimization, make_optimizer
from specjax.training.state import make_state, take_apart
from specjax.training.step import make_step, micro_batches
from toy import toy_network, toy_rows, toy_run


@dataclass(frozen=True)
class Next:
    "Cross-entropy of a decoder's next token, to which the target's features are added."

    name: ClassVar[str] = "next"
    features: ClassVar[tuple] = ("hidden",)
    rates: ClassVar[dict] = {}

    def losses(self, network, target, batch, features, key):
        hidden = network(batch.tokens, batch.positions, segment_mask(batch.segments)).hidden
        logprobs = jax.nn.log_softmax(network.logits(hidden + features["hidden"]))[:, :-1]
        chosen = jnp.take_along_axis(logprobs, batch.tokens[:, 1:, None], axis=-1)[..., 0]
        mask = batch.mask[:, 1:]
        return Losses(jnp.where(mask, -chosen, 0).sum(), mask.sum().astype(jnp.float32), {})


small = {"num_layers": 1, "windows": (None,)}
network, target = testing.tiny_model("qwen2", seed=1, **small), testing.tiny_target(testing.tiny_model(**small))
batch = toy_rows(16, buckets=[]).batch(range(16))
assert len({int(part.sum()) for part in np.split(batch.mask, 8)}) > 3  # devices have unequal numbers


def one_step(text, accumulation):
    mesh = over.parse_mesh(text) if text else None
    skeleton, params, buffers = take_apart(network)
    axes = over.declared_axes(network)
    assert axes.keys() == params.keys()
    state = over.place_state(mesh, make_state(params, buffers, optax.identity(), 0), axes)
    model = over.place_model(mesh, target.model)
    if mesh:
        qkv = {x.addressable_shards[0].data.shape for x in (state.params["layers.0.qkv"], model.layers[0].qkv[...])}
        assert qkv == {(32 // mesh.shape["fsdp"], 2 // mesh.shape["tensor"], 4, 12)}, qkv
    step = make_step(Next(), skeleton, model, optax.identity(), lambda _: 1.0, "float32", state)
    after, figures = step(state, *over.place_batch(mesh, micro_batches((batch, None), accumulation)))
    gradient = {name: np.asarray(params[name]) - np.asarray(x) for name, x in after.params.items()}
    return jax.device_get(figures), gradient


alone, gradient = one_step(None, 1)
for text, accumulation in [("fsdp=2,data=4", 1), ("data=2,fsdp=2,tensor=2", 2)]:
    figures, found = one_step(text, accumulation)
    assert figures["supervised"] == batch.mask[:, 1:].sum()
    np.testing.assert_allclose(figures["loss"], alone["loss"], rtol=1e-5)
    for name, value in gradient.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name)

# the optimizer's arrays lie where their parameters do
mesh, axes = over.parse_mesh("data=2,fsdp=4"), over.declared_axes(network)
state = make_state(*take_apart(network)[1:], make_optimizer(Optimization("muon")), 0)
state = over.place_state(mesh, state, axes)
for path, leaf in jax.tree_util.tree_leaves_with_path(state.optimizer):
    name = getattr(path[-1], "key", None)
    assert leaf.sharding.is_fully_replicated == (name not in axes or "model" not in axes[name]), path

# a run that begins on many devices and goes on on one
how = {"objective": Next(), "network": network, "target": target, "epsilon": 1e-2}
whole = toy_run(sys.argv[1] + "/whole", steps=4, **how)
toy_run(sys.argv[1] + "/moved", steps=2, mesh="data=4,fsdp=2", **how)
moved = toy_run(sys.argv[1] + "/moved", steps=4, **how)
for a, b in zip(jax.tree.leaves(whole.network), jax.tree.leaves(moved.network), strict=True):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-4)
print("devices agree")
"""

PROCESS = """
import os
import signal
import sys

import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[3]))
from toy import Toy, toy_run


class Stop:
    "Only the first process has sinks, and only it is told to stop; the other must stop with it."

    def write(self, step, values):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self):
        pass


how = {"accumulation": 2, "mesh": "data=2", "objective": Toy(0.1), "save_every": 0}
outcome = toy_run(sys.argv[1], steps=100_000, sinks=lambda *_: (Stop(),), **how)
print("stopped", outcome.stopped, outcome.step, outcome.last)
"""


def environment(devices: int, programs: Path) -> dict[str, str]:
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    cache = {"JAX_COMPILATION_CACHE_DIR": str(programs), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {**os.environ, **cache, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def test_devices_agree(tmp_path: Path) -> None:
    """Loss and gradients over data, fsdp and tensor axes, with and without accumulation; a run that changes mesh."""
    command = [sys.executable, "-c", DEVICES, str(tmp_path)]
    done = subprocess.run(
        command, env=environment(8, tmp_path / "programs"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "devices agree\n"
    assert "rematerialization" not in done.stderr  # the compiler's word for activations that went the wrong way


def test_processes_agree(tmp_path: Path) -> None:
    """Two processes, each with its own part of every batch, and a SIGTERM that reaches only one of them."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "two"), address]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [
        subprocess.Popen([*command, str(number)], env=environment(1, tmp_path / "programs"), **pipes)
        for number in range(2)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    stops = [text.splitlines()[-1].split() for text in said]
    assert stops[0] == stops[1]
    assert stops[0][:2] == ["stopped", "True"]
    assert stops[0][2] == stops[0][3]  # the step, and that of the last checkpoint

    alone = toy_run(tmp_path / "one", steps=int(stops[0][2]), accumulation=2, objective=Toy(0.1))
    for one, two in zip(*(journal.read(tmp_path / name) for name in ("one", "two")), strict=True):
        assert (one["step"], one["supervised"]) == (two["step"], two["supervised"])
        np.testing.assert_allclose(two["loss"], one["loss"], rtol=1e-5)
    both = load_weights(tmp_path / "two", toy_network())
    for a, b in zip(jax.tree.leaves(alone.network), jax.tree.leaves(both), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
