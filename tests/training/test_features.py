"""Features on disk are the target's own, are estimated before they are computed, and survive interruptions."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax import testing
from specjax.errors import InputError, SpecjaxError
from specjax.training import features
from specjax.training.batches import Rows, lay_out
from specjax.training.features import Stored, online, store
from specjax.training.rendering import Rendered

MODEL = testing.tiny_model(vocab_size=12, seed=1)
NAMES = ("layer.1", "hidden")


@pytest.fixture(scope="module")
def rows() -> Rows:
    random = np.random.default_rng(0)
    texts = [random.integers(1, 12, size) for size in random.integers(3, 16, 20)]
    return lay_out([Rendered(t.astype(np.int32), np.arange(len(t)) > 1, f"text {i}") for i, t in enumerate(texts)], 16)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "SHARD_ROWS", 4)


def save(rows: Rows, path: Path, **options: Any) -> Stored:
    return store(MODEL, rows, NAMES, path, "target", **{"dtype": "float32", "batch_size": 3} | options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_are_those_of_the_target(rows: Rows, tmp_path: Path, dtype: str) -> None:
    stored = save(rows, tmp_path, dtype=dtype)
    chosen = [len(rows) - 1, 0, -1, 5]
    batch = rows.batch(chosen)
    expected = jax.jit(lambda batch: online(MODEL, batch, NAMES))(batch)
    found = stored(batch.rows)
    real = batch.segments > 0
    for name in NAMES:
        assert found[name].dtype == dtype
        values = found[name].astype(np.float32)
        np.testing.assert_allclose(
            values[real], np.asarray(expected[name])[real], rtol=1e-2, atol=1e-5 if dtype == "float32" else 1e-2
        )
        assert not values[2].any()  # a row of padding
    assert sum(f.stat().st_size for f in tmp_path.glob("*.npy")) - stored.num_bytes < 200 * stored.num_shards


def test_conversations_of_a_row_do_not_meet(rows: Rows) -> None:
    row = max(range(len(rows)), key=lambda r: len(rows.members[r]))
    member = rows.members[row][1]
    start, end = rows.starts[member : member + 2]
    alone = lay_out([Rendered(rows.tokens[start:end], np.arange(end - start) > 1, "alone")], 16)
    packed, single = rows.batch([row]), alone.batch([0])
    ours = np.asarray(online(MODEL, packed, NAMES)["hidden"])[packed.segments == 2]
    np.testing.assert_allclose(
        ours, np.asarray(online(MODEL, single, NAMES)["hidden"])[single.segments == 1], atol=1e-5
    )


def test_a_killed_run_goes_on(rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = save(rows, tmp_path / "whole")
    written = []

    def fail(path: Path, values: np.ndarray) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        original(path, values)

    original = features._write
    monkeypatch.setattr(features, "_write", fail)
    with pytest.raises(KeyboardInterrupt):
        save(rows, tmp_path / "parts")
    monkeypatch.setattr(features, "_write", original)
    before = [path.stat().st_mtime_ns for path in written]
    parts = save(rows, tmp_path / "parts")
    assert [path.stat().st_mtime_ns for path in written] == before  # not computed again
    for shard in range(whole.num_shards):
        assert whole.path(shard).read_bytes() == parts.path(shard).read_bytes()


def test_budget_comes_first(rows: Rows, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"features would take .* MiB .* more than the budget of 0\.0 MiB"):
        save(rows, tmp_path / "none", budget_bytes=1000)
    assert not (tmp_path / "none").exists()


def test_full_disk(rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored before is whole, and a later run goes on."""
    calls = []

    def write(file: Any, values: Any) -> None:
        calls.append(file)
        if len(calls) == 2:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        original(file, values)

    original = np.save
    monkeypatch.setattr(np, "save", write)
    with pytest.raises(SpecjaxError, match=r"cannot write features to .*00001\.npy: No space left on device"):
        save(rows, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000.npy", "features.json"]
    monkeypatch.setattr(np, "save", original)
    assert np.isfinite(save(rows, tmp_path)(np.array([0, len(rows) - 1]))["hidden"]).all()


def test_features_of_something_else(rows: Rows, tmp_path: Path) -> None:
    save(rows, tmp_path)
    with pytest.raises(InputError, match="holds other features: dtype is 'float32' there and 'bfloat16' here"):
        save(rows, tmp_path, dtype="bfloat16")
    manifest = json.loads((tmp_path / "features.json").read_text())
    (tmp_path / "features.json").write_text(json.dumps(manifest | {"fingerprint": "another"}))
    with pytest.raises(InputError, match="fingerprint is 'another' there"):
        save(rows, tmp_path)
    with pytest.raises(InputError, match="expected one of bfloat16, float32"):
        save(rows, tmp_path, dtype="int8")
