"""A run that is killed, told to stop or out of disk, and started again, ends as one that never stopped."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from specjax.training import journal

TOY = Path(__file__).parent / "toy.py"
KILLED, STOPPED = -9, 10
CHANGES = {"accumulation": 2, "schedule": "cosine"}


Runs = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """`runs(plan)`: what became of runs, each in a process of its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "JAX_PLATFORMS": "cpu",
        # all of them run the same program
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("programs")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def run(plan: list[dict[str, Any]]) -> list[dict[str, Any]]:
        command = [sys.executable, "-W", "ignore", str(TOY), json.dumps(plan)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert 1 not in [run["code"] for run in found], done.stderr
        return found

    return run


def checkpoint(directory: Path, step: int) -> dict[str, np.ndarray]:
    """Everything in a checkpoint, read without specjax."""
    found = {}
    for item in ("weights", "rest"):
        with ocp.StandardCheckpointer() as reader:
            found[item] = reader.restore(directory / "checkpoints" / str(step) / item)
    leaves = ocp.tree.to_flat_dict(found, sep="/")
    return {name: np.asarray(value) for name, value in leaves.items()}


def same(a: Path, b: Path, step: int) -> bool:
    """Whether two runs ended with the same state and wrote the same figures on the way, bit for bit."""
    one, two = checkpoint(a, step), checkpoint(b, step)
    assert one.keys() == two.keys()
    assert [name for name in one if not np.array_equal(one[name], two[name])] == []
    lines = [[{**row, "tokens_per_second": 0} for row in journal.read(directory)] for directory in (a, b)]
    assert lines[0] == lines[1]
    return True


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty steps that nothing came in between of."""
    directory = tmp_path_factory.mktemp("whole")
    assert runs([{"directory": str(directory), "changes": CHANGES}]) == [{"code": 0, "left": ["20"]}]
    return directory


def test_killed_and_stopped_runs_end_alike(runs: Runs, whole: Path, tmp_path: Path) -> None:
    """Killed at a random step, killed in the middle of a save, stopped by SIGTERM, then left to finish."""
    broken = tmp_path / "broken"
    at = random.randrange(2, 10)
    ways = [(at, "kill"), (10, "kill in a save"), (13, "terminate"), (0, "")]
    found = runs([{"directory": str(broken), "step": step, "how": how, "changes": CHANGES} for step, how in ways])
    assert [run["code"] for run in found] == [KILLED, KILLED, STOPPED, 0], at
    assert any("tmp" in name for name in found[1]["left"])  # it was killed while it saved
    assert found[2]["left"] in (["13"], ["14"])  # saved where it was told to stop, at no interval
    assert found[3]["left"] == ["20"]
    assert same(whole, broken, 20)
    assert [row["step"] for row in journal.read(broken)] == list(range(1, 21))


def test_a_full_disk_keeps_the_checkpoint_before(runs: Runs, whole: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    ways = [(7, "full"), (0, "")]
    found = runs([{"directory": str(full), "step": step, "how": how, "changes": CHANGES} for step, how in ways])
    assert [run["code"] for run in found] == [2, 0]
    message = (full / "error.txt").read_text()
    assert "a checkpoint cannot be written, those before are kept" in message
    assert "File too large" in message
    assert "\n" not in message
    assert "5" in found[0]["left"]
    assert same(whole, full, 20)


@pytest.mark.slow
def test_many_kills(runs: Runs, tmp_path: Path) -> None:
    """At random steps, in and out of saves, with a checkpoint at almost every one."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    changes = {"steps": 60, "save_every": 2, "accumulation": 2}
    plan = [{"directory": str(tmp_path / "whole"), "changes": changes}]
    at = 0
    while (at := at + draw.randrange(2, 9)) < 60:
        how = draw.choice(["kill", "kill in a save", "terminate"])
        plan.append({"directory": str(tmp_path / "broken"), "step": at, "how": how, "changes": changes})
    plan.append({"directory": str(tmp_path / "broken"), "changes": changes})
    found = runs(plan)
    assert found[-1]["code"] == 0
    assert sum(run["code"] == KILLED for run in found) >= 2
    assert same(tmp_path / "whole", tmp_path / "broken", 60), seed
