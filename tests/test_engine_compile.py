"""What is compiled: once a shape, without a second cache, and the same over a mesh of devices."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

import specjax
from specjax import decode, testing
from specjax.ladder import ladder
from specjax.sampling import Sampling
from specjax.testing import Replay

COMPILED: list[float] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: COMPILED.append(seconds) if event.endswith("backend_compile_duration") else None
)
TRACED: list[int] = []


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Counted(Replay):
    """Notes every time it is traced."""

    name: ClassVar[str] = "counted"

    def propose(self, memory: None, context: Any) -> Any:
        TRACED.append(1)
        return super().propose(memory, context)


def test_nothing_is_traced_twice(table: Any, prompts: Any) -> None:
    """Hundreds of rounds with all kinds of accept counts, other prompts, seeds, settings, stops: one program."""
    random = np.random.default_rng(0)

    def call(i: int, size: int) -> specjax.Generation:
        target = testing.tiny_target(table.model, eos=[i, i + 1], tokenizer=table.tokenizer)
        text = [prompts[3], random.integers(0, 64, 1 + i).tolist()]
        wrong = random.random((2, 60)) < 0.1 * (i % 5)
        script = np.where(wrong, random.integers(-1, 64, (2, 60)), plain[0])
        settings = Sampling(temperature=[0.1 + i / 50, 1 / (i + 1)], top_p=0.9 - i / 50)
        drafter = Counted.of(script.tolist(), 8)
        options = {"sampling": settings, "stop": ["z" * (1 + i)], "seed": i, "max_new_tokens": size}
        return specjax.generate(target, text, drafter, **options)

    plain = [[1] * 60]
    first = call(0, 60)
    assert TRACED
    TRACED.clear()
    COMPILED.clear()
    plain, accepted, rounds = [first.token_ids[0] + [0] * (60 - len(first.token_ids[0]))], set(), 0
    for i in range(1, 12):
        out = call(i, 60 - i)
        rounds += out.stats.target_calls
        accepted |= {s.accepted for s in out.row_stats}
    assert rounds > 100
    assert len(accepted) > 5
    assert (TRACED, COMPILED) == ([], [])


def test_streaming_compiles_one_step(table: Any, prompts: Any) -> None:
    drafter = Counted.of([[i % 64 for i in range(60)]] * 4, 4)
    next(specjax.stream(table, prompts, drafter=drafter, max_new_tokens=40))
    assert TRACED
    TRACED.clear()
    COMPILED.clear()
    for seed in range(3):
        list(specjax.stream(table, prompts, drafter=drafter, max_new_tokens=40 + seed, seed=seed))
    assert (TRACED, COMPILED) == ([], [])


@pytest.mark.parametrize("batch", [1, 4])
def test_the_loop_holds_no_second_cache(batch: int) -> None:
    """With three block sizes compiled in, temporaries are small and nothing copies an array of the cache's size."""
    model = testing.tiny_model(num_layers=4, windows=(None,) * 4, head_dim=64, num_heads=2)
    drafter = specjax.PromptLookup(8, block_sizes=(4, 9))
    assert len(ladder(drafter)) == 3
    prompts = [[1, 2, 3, 4]] * batch
    job = specjax.prepare(testing.tiny_target(model), prompts, drafter=drafter, max_new_tokens=400)
    # a long text: the cache is the largest thing by far
    arguments = job.arguments | {"tokens": jax.ShapeDtypeStruct((batch, 4096), "int32")}
    arrays = {name: value for name, value in arguments.items() if name not in ("longest", "logprobs", "trace_rounds")}
    state = jax.eval_shape(lambda arrays: decode.prefill(model, drafter, longest=16, **arrays), arrays)
    run = jax.jit(decode.run, static_argnums=2, donate_argnums=3)
    compiled = run.lower(model, drafter, specjax.Greedy(), state).compile()
    cache = jax.tree.leaves(state.cache)
    size = sum(x.size * x.dtype.itemsize for x in cache)
    memory = compiled.memory_analysis()
    shape = "f32[" + ",".join(map(str, cache[0].shape)) + "]"
    copies = re.findall(re.escape(shape) + r"\S* (?:copy|copy-start|transpose)\(", compiled.as_text())
    print(f"\nbatch {batch}: temporaries {memory.temp_size_in_bytes / size:.3f} of the cache, {len(copies)} copies")
    assert shape in compiled.as_text()
    assert len(copies) == 0
    assert memory.temp_size_in_bytes < 0.15 * size
    assert memory.alias_size_in_bytes >= size  # the given state's cache is the returned one's


SHARDED = """
import jax, numpy as np
import specjax
from specjax import testing
from specjax.models.decoder import Decoder
from specjax.testing import Oracle

assert len(jax.devices()) == 8
config = testing.tiny_config("qwen3", tie_embeddings=False)
arrays, random = {}, np.random.default_rng(0)
def make(name, shape, axes):
    value = random.standard_normal(shape, dtype=np.float32)
    return arrays.setdefault(name, 1 + 0.1 * value if name.endswith("norm") else 0.3 * value)
Decoder(config, make)
prompts = [[1, 2, 3, 1, 2, 3, 1], [5]]
found = []
for axes in (None, {"data": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2}):
    mesh = None
    if axes is not None:
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:4])
    model = Decoder.from_arrays(config, arrays, mesh=mesh)
    if mesh is not None:
        assert not model.layers[0].qkv[...].sharding.is_fully_replicated
    target = testing.tiny_target(model)
    for drafter in (None,) if mesh is None else (Oracle(2, decoys=1),):
        found.append(specjax.generate(target, prompts, drafter=drafter, max_new_tokens=40).token_ids)
assert all(f == found[0] for f in found), found
assert len(set(found[0][0])) > 5
print("same text on every mesh")
"""


def test_a_mesh_of_devices_gives_the_same_text() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "same text on every mesh" in done.stdout
