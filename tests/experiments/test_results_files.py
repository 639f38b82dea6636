"""Results are written whole or not at all, where they can be written at all, and say where they come from."""

import json
from pathlib import Path
from typing import Any

import pytest
from common.results import check_output, provenance, write_json

import specjax
from specjax import InputError


def test_a_file_is_written_beside_and_renamed(tmp_path: Path):
    file = tmp_path / "new" / "folder" / "results.json"
    write_json(file, {"a": [1, None]})
    assert json.loads(file.read_text()) == {"a": [1, None]}
    write_json(file, {"b": 2})
    assert json.loads(file.read_text()) == {"b": 2}
    assert [f.name for f in file.parent.iterdir()] == ["results.json"]


@pytest.mark.parametrize("bad", [{"a": float("nan")}, {"a": object()}])
def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_beside_it(tmp_path: Path, bad: Any):
    file = tmp_path / "results.json"
    write_json(file, {"old": True})
    with pytest.raises((ValueError, TypeError)):
        write_json(file, bad)
    assert json.loads(file.read_text()) == {"old": True}
    assert [f.name for f in tmp_path.iterdir()] == ["results.json"]


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(InputError, match=r"results.json: cannot be written \(No space left on device\)"):
        write_json(tmp_path / "results.json", {})
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_found_beforehand(tmp_path: Path):
    check_output(None)
    check_output(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="is a file; expected a directory"):
            check_output(place)
    with pytest.raises(InputError, match="cannot write in /proc"):
        check_output(Path("/proc/nothing"))


def test_provenance_names_command_versions_and_machine(tiny: specjax.Target, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["experiments/eval.py", "--stop", "a b"])
    where = provenance(tiny, total_seconds=1.0)
    assert where["command"] == "python experiments/eval.py --stop 'a b'"
    assert {"commit", "device", "cpu_count", "dtype", "target", "target_sha256", "total_seconds"} <= set(where)
    assert {"python", "jax", "flax", "transformers", "specjax"} <= set(where["versions"])
    json.dumps(where, allow_nan=False)
