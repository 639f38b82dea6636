"""exactness.py: what it tests, what it writes, and when it fails."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import exactness as script
import numpy as np
import pytest

from specjax import simulate, testing
from specjax.testing import LawResult, TableModel

RIGHT = simulate.Simulation(np.array([0.5, 0.5]), np.array([0.5, 0.5]), 0.0, 0.1, 0.7, 1.7, 100)


def result(distance: float) -> LawResult:
    return LawResult(distance, 0.01, 0.005, distance <= 0.01, 100, (distance,), 0.5, None)


def test_the_whole_command(command: Any, tmp_path: Path):
    chosen = ("--drafters", "draft model", "--laws", "rejection", "typical", "--settings", "temperature 0.8")
    code, _, err = command(script.main, *chosen, "--samples", 8000, "--output", tmp_path / "out")
    assert code == 0, err
    found = json.loads((tmp_path / "out" / "exactness.json").read_text())
    right, lossy = found["law_tests"]
    assert (right["law"], right["lossless"], right["passed"]) == ("rejection", True, True)
    assert (lossy["law"], lossy["lossless"], lossy["passed"]) == ("typical", False, False)
    assert right["samples"] == 8000 and right["acceptance_rate"] > 0.05
    simulated = {s["name"]: s for s in found["simulations"]}
    assert [s["passed"] for s in simulated.values()] == [s["right"] for s in simulated.values()]
    for s in simulated.values():
        assert sum(s["law"]) == pytest.approx(1)
        if s["predicted"] is not None:
            assert s["law"] == pytest.approx(s["predicted"], abs=0.03)
        if s["predicted_alpha"] is not None:
            assert s["alpha"] == pytest.approx(s["predicted_alpha"], abs=0.03)
    assert {f.name for f in (tmp_path / "out").iterdir()} == {"exactness.json", "law_tests.png", "simulations.png"}
    assert set(found["definitions"]) >= set(right) - {"drafter", "law", "settings", "samples"}


@pytest.mark.parametrize(("distance", "simulation", "code"), [(0.5, RIGHT, 1), (0.001, RIGHT, 0)])
def test_a_lossless_law_that_fails_is_a_fault(
    command: Any, monkeypatch: pytest.MonkeyPatch, distance: float, simulation: Any, code: int
):
    monkeypatch.setattr(testing, "law_test", lambda *args, **kwargs: result(distance))
    monkeypatch.setattr(script, "simulations", lambda runs, seed: [script.Simulated("one", True, simulation)])
    found, out, err = command(script.main, "--drafters", "plain", "--laws", "rejection")
    assert found == code
    assert err.count("FAULT") == 3 * code
    assert ("FAULT: plain, rejection, temperature 0.8: not the target's own law" in err) == bool(code)
    assert out.count("FAULT") == 3 * code


def test_a_simulation_that_fails_is_a_fault(command: Any, monkeypatch: pytest.MonkeyPatch):
    wrong = replace(RIGHT, distance=0.2)
    monkeypatch.setattr(testing, "law_test", lambda *args, **kwargs: result(0.001))
    found = [script.Simulated("one", True, wrong), script.Simulated("other", False, wrong)]
    monkeypatch.setattr(script, "simulations", lambda runs, seed: found)
    code, _, err = command(script.main, "--drafters", "plain", "--laws", "rejection")
    assert code == 1
    assert err.count("FAULT") == 1 and "FAULT: one" in err


def test_verdicts():
    seen = {(right, passed): script.verdict(right, passed) for right in (True, False) for passed in (True, False)}
    assert seen == {
        (True, True): "exact",
        (True, False): "FAULT",
        (False, True): "other law (not seen)",
        (False, False): "other law",
    }


def test_every_drafter_fits_the_target():
    target = testing.tiny_target(TableModel.random(script.SIZE))
    for make in script.DRAFTERS.values():
        assert getattr(make(), "check", lambda target: None)(target) is None
        assert make().num_nodes <= 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "0"], "--samples: expected at least 1, got 0"),
        (["--laws", "greedy"], "--laws: unknown 'greedy'; expected some of 'rejection'"),
        (["--drafters", "eagle"], "--drafters: unknown 'eagle'; expected some of 'plain'"),
        (["--settings", "hot"], "--settings: unknown 'hot'"),
        (["--laws", "block", "block"], "--laws: block is given twice"),
        (["--output", "/proc/nothing"], "cannot write"),
    ],
)
def test_bad_input_is_one_line(command: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str):
    monkeypatch.setattr(testing, "law_test", lambda *args, **kwargs: pytest.fail("tested a law"))
    code, _, err = command(script.main, *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
