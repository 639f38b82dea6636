"""bench.py and what it measures with, on a tiny target."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench as script
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import timing
from flax import nnx
from measure import passes
from measure.programs import compile_loop, count_copies
from measure.proposals import ProposalTimer
from measure.rounds import EVERYTHING, FOUND, NOTHING, FullBlock, RoundTimer, Stub
from measure.shapes import SHAPES, shape_config
from measure.states import start_state

import specjax
from specjax import Greedy, Plain, PromptLookup
from specjax.models.decoder import Decoder

PROMPT = [9, 5, 6, 7, 9, 5, 6]


def test_a_call_that_compiles_is_repeated():
    program = jax.jit(jnp.sum)
    calls: list[int] = []

    def call() -> float:
        calls.append(1)
        return float(program(np.ones(7)))

    result, warming = timing.without_compiling(call)
    assert (result, len(calls)) == (7.0, 2)
    assert warming > 0
    assert timing.without_compiling(call) == (7.0, 0.0)
    assert len(calls) == 3


def test_in_turns_alternates_the_order():
    asked: list[str] = []
    values = timing.in_turns({n: lambda n=n: float(asked.append(n) or len(asked)) for n in "ab"}, 2)  # type: ignore[misc]
    assert asked == ["a", "b", "a", "b", "b", "a"]
    assert values == {"a": [3.0, 6.0], "b": [4.0, 5.0]}
    assert timing.median_of(lambda a, b: b - a, values["a"], values["b"]) == 0


def test_copies_of_an_array_in_a_loop_are_counted():
    """An array is updated in place, unless its old value is still needed afterwards."""
    x = jnp.zeros((64, 32))

    def loop(body: Callable[[Any, Any], Any]) -> str:
        program = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, body, x), donate_argnums=0)
        return program.lower(x, 3).compile().as_text() or ""

    def copy(i: Any, x: Any) -> Any:
        new, old = jax.lax.optimization_barrier((x.at[0].set(3.0), x))
        return new.at[i].set(old[0, 0])

    assert count_copies(loop(lambda i, x: x.at[i].add(1.0)), x.size) == 0
    copying = loop(copy)
    assert count_copies(copying, x.size) > 0
    assert count_copies(copying, 100 * x.size) == 0


def test_the_engines_loop_copies_no_cache(tiny: specjax.Target):
    program = compile_loop(tiny.model, PromptLookup(8), [PROMPT, PROMPT], 20)
    assert program.cache_copies == 0
    assert program.compile_seconds > 0
    assert program.cache_bytes == 2 * 2 * 2 * 2 * 128 * 12 * 4  # keys and values, layers, rows, heads, slots, width


@pytest.fixture
def known(tiny: specjax.Target) -> jax.Array:
    timer = RoundTimer(tiny.model, Plain(), Greedy(), start_state(tiny.model, Plain(), [PROMPT], 60), 4)
    assert timer.tokens_per_round == 1.0
    return timer.text(60)


@pytest.mark.parametrize(("accept", "expected"), [(NOTHING, 1.0), (EVERYTHING, 4.0)])
def test_full_blocks_accept_what_they_are_told_to(tiny: specjax.Target, known: jax.Array, accept: int, expected: float):
    drafter = FullBlock.make(PromptLookup(3), known, accept)
    timer = RoundTimer(tiny.model, drafter, Greedy(), start_state(tiny.model, drafter, [PROMPT], 60), 5)
    assert timer.tokens_per_round == expected
    assert math.isfinite(timer())


def test_full_blocks_accept_what_prompt_lookup_finds(tiny: specjax.Target, known: jax.Array):
    lookup = PromptLookup(3)
    plain = specjax.generate(tiny, [PROMPT], drafter=lookup, max_new_tokens=60).stats
    drafter = FullBlock.make(lookup, known, FOUND)
    timer = RoundTimer(
        tiny.model, drafter, Greedy(), start_state(tiny.model, drafter, [PROMPT], 60), plain.target_calls
    )
    assert timer.tokens_per_round == pytest.approx(plain.tokens_per_call or 0)


def test_full_blocks_change_no_text(tiny: specjax.Target, known: jax.Array):
    drafter = FullBlock.make(PromptLookup(3), known, FOUND)
    timer = RoundTimer(tiny.model, drafter, Greedy(), start_state(tiny.model, drafter, [PROMPT], 60), 5)
    end = len(PROMPT) + 60
    np.testing.assert_array_equal(timer.text(60)[0, :end], known[0, :end])


def test_a_stub_says_the_known_text_in_the_targets_shapes(tiny: specjax.Target, known: jax.Array):
    start = start_state(tiny.model, Plain(), [PROMPT], 60)
    stub = Stub.of(tiny.model, start, known)
    drafter = FullBlock.make(PromptLookup(3), known, EVERYTHING)
    state = start_state(stub, drafter, [PROMPT], 60)
    assert jax.tree.map(jnp.shape, state.cache) == jax.tree.map(jnp.shape, start.cache)
    timer = RoundTimer(stub, drafter, Greedy(), state, 5)
    assert timer.tokens_per_round == 4.0
    np.testing.assert_array_equal(timer.text(5)[0, :27], known[0, :27])


@pytest.mark.parametrize("name", ["lookup", "model"])
def test_proposals_are_timed(tiny: specjax.Target, name: str):
    drafter = PromptLookup(3) if name == "lookup" else specjax.DraftModel(tiny, num_draft_tokens=3)
    seconds = ProposalTimer(tiny.model, drafter, start_state(tiny.model, drafter, [PROMPT], 60))()
    assert 0 <= seconds < 1


@pytest.mark.parametrize(
    ("name", "billions"), [("smollm2-135m", 0.1345), ("llama-3.1-8b", 8.03), ("qwen2.5-3b", 3.086), ("qwen3-8b", 8.19)]
)
def test_shapes_have_the_known_number_of_parameters(name: str, billions: float):
    model = Decoder(shape_config(name), lambda path, shape, axes: jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    sizes = [np.prod(x.shape, dtype=float) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert sum(sizes) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_every_shape_can_be_configured():
    assert [shape_config(name).num_layers for name in SHAPES] == [shape.layers for shape in SHAPES.values()]
    with pytest.raises(specjax.InputError, match="unknown shape 'gpt-9': expected one of smollm2-135m"):
        shape_config("gpt-9")


def test_bytes_read_leave_out_rows_and_experts_that_are_not_used():
    def read(family: str) -> tuple[int, int]:
        model = specjax.testing.tiny_model(family)
        cache = model.init_cache(1, 16)
        everything = sum(x.nbytes for x in jax.tree.leaves((nnx.state(model, nnx.Param), cache)))
        return everything - passes.bytes_read(model, model.config, cache), model.embed[...].nbytes

    assert read("llama") == (0, 64 * 32 * 4)  # tied: the embedding is the head
    missing, embedding = read("qwen2")
    assert missing == embedding
    missing, embedding = read("qwen3_moe")
    experts = 2 * 4 * 32 * 3 * 24 * 4  # layers, experts, width, matrices, expert width, bytes
    assert missing == embedding + experts // 2


def test_the_whole_benchmark(tiny: specjax.Target, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(passes, "BANDWIDTH_BYTES", 2**20)
    monkeypatch.setattr(specjax, "load", lambda *args, **kwargs: tiny)
    monkeypatch.setattr(script, "BLOCKS", (2,))
    monkeypatch.setattr(script, "LOOKUP", PromptLookup(2))
    monkeypatch.setattr(script, "prompts_for", lambda target, batch_size: [PROMPT] * batch_size)
    code, out, err = command(script.main, "--turns", 1, "--no-compare", "--output", tmp_path)
    assert code == 0, err
    content = json.loads((tmp_path / "bench.json").read_text())
    values = {line["name"]: line["value"] for line in content["lines"]}
    assert {"memory bandwidth", "decode step", "decode step / floor", "verify(2) / decode(1)"} <= set(values)
    assert values["cache-sized copies in the loop, prompt lookup, batch 4"] == 0
    assert "skipped: --no-compare" in " ".join(out.split())
    assert content["provenance"]["device"]


def test_bad_input_is_one_line(command: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(specjax, "load", lambda *args, **kwargs: pytest.fail("loaded a target"))
    for arguments, message in (
        (["--random-config", "gpt-9"], "unknown shape"),
        (["--turns", "0"], "--turns: expected at least 1"),
        (["--output", "/proc/nothing"], "cannot write"),
    ):
        code, _, err = command(script.main, *arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err
