"""verify_cost.py and its roofline, on a tiny target."""

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import verify_cost as script
from measure import passes
from measure.passes import PassTimes, bytes_read, operations

import specjax
from specjax import testing


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tiny: specjax.Target) -> None:
    """A tiny target, and rates measured with little."""
    monkeypatch.setattr(passes, "BANDWIDTH_BYTES", 2**20)
    monkeypatch.setattr(passes, "MATRIX", {"cpu": 32})
    monkeypatch.setattr(specjax, "load", lambda *args, **kwargs: tiny)
    monkeypatch.setattr(script, "prompts_for", lambda target, batch: [[9, 5, 6, 7, 9, 5, 6]] * batch)


def test_times_are_compared_turn_by_turn():
    times = PassTimes({1: [1.0, 2.0, 4.0], 8: [2.0, 6.0, 4.0]}, {})
    assert times.median(8) == 4.0
    assert times.relative(8) == 2.0  # of 2, 3 and 1
    assert times.costs() == {1: 1.0, 8: 2.0}


def test_operations_of_a_dense_decoder_by_hand():
    model = testing.tiny_model()  # tied: embedding and head are one
    cache = model.init_cache(3, 16)
    width, heads, kv, dim, ffw, layers, vocab = 32, 4, 2, 12, 48, 2, 64
    layer = width * (heads + 2 * kv) * dim + heads * dim * width + 3 * width * ffw + 2 * width
    weights = vocab * width + layers * layer + width
    for tokens in (1, 5):
        attention = layers * heads * dim * 2 * 2 * (16 + tokens)
        assert operations(model, model.config, cache, tokens) == 3 * tokens * (2 * weights + attention)
    assert bytes_read(model, model.config, cache, 15) == bytes_read(model, model.config, cache)


def test_an_untied_embedding_is_looked_up_and_not_multiplied():
    model = testing.tiny_model("qwen2")
    cache = model.init_cache(1, 16)
    without = operations(model, model.config, cache, 1)
    assert operations(model, None, cache, 1) - without == 2 * 64 * 32 - 4 * 2 * 4 * 12 * 17


def test_more_tokens_wake_more_experts():
    model = testing.tiny_model("qwen3_moe")
    cache = model.init_cache(1, 16)
    experts = 2 * 4 * 32 * 3 * 24  # layers, experts, width, matrices, expert width
    one, two, many = (bytes_read(model, model.config, cache, n) for n in (1, 2, 9))
    assert two - one == many - one == 4 * experts // 2
    each = [operations(model, model.config, cache, n) / n for n in (1, 2)]
    assert each[1] - each[0] == pytest.approx(4 * 2 * 4 * 12)  # attention alone


def test_the_whole_command(small: None, command: Any, tmp_path: Path):
    arguments = ("--tokens", 2, 4, "--batch-sizes", 1, 2, "--turns", 1, "--output", tmp_path / "out")
    code, out, err = command(script.main, *arguments)
    assert code == 0, err
    found = json.loads((tmp_path / "out" / "verify_cost.json").read_text())
    assert [(p["batch_size"], p["tokens"]) for p in found["passes"]] == [(b, n) for b in (1, 2) for n in (1, 2, 4)]
    assert found["passes"][0]["relative"] == 1.0
    for p in found["passes"]:
        assert p["over_floor"] == pytest.approx(p["seconds"] / max(p["memory_floor"], p["compute_floor"]))
    assert set(found["critical_tokens"]) == {"1", "2"}
    assert set(script.DEFINITIONS) <= set(found["definitions"])
    assert (tmp_path / "out" / "verify_cost.png").read_bytes().startswith(b"\x89PNG")
    assert "memory floor" in out


def test_the_floors_meet_where_arithmetic_takes_as_long_as_reading():
    some = [script.Pass(1, n, 1.0, 1.0, 0.016, 0.002 * n) for n in (1, 8, 16)]
    assert script.critical_tokens(some, 1) == pytest.approx(8)
    assert [p.floor for p in some] == [0.016, 0.016, 0.032]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens: expected at least 1, got 0"),
        (["--tokens", "2", "2"], "--tokens: 2 is given twice"),
        (["--batch-sizes", "-1"], "--batch-sizes: expected at least 1, got -1"),
        (["--turns", "0"], "--turns: expected at least 1"),
        (["--random-config", "gpt-9"], "unknown shape"),
        (["--output", "/proc/nothing"], "cannot write"),
    ],
)
def test_bad_input_is_one_line(command: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str):
    monkeypatch.setattr(specjax, "load", lambda *args, **kwargs: pytest.fail("loaded a target"))
    code, _, err = command(script.main, *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


def test_a_product_of_matrices_is_timed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(passes, "MATRIX", {"cpu": 64})
    assert math.isfinite(passes.Throughput(jnp.float32)())
