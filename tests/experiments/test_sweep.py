"""sweep.py and the predictions that experiments share, on a tiny target."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sweep as script
from common.drafters import parse_drafter
from common.evaluation import Call
from common.prediction import Drafted, formula, predict_speedup
from measure.comparison import Measured
from measure.passes import PassTimes

import specjax
from specjax import Generation, Round, Stats, testing, theory
from specjax.requests import LAWS

TARGET = testing.tiny_target(testing.TableModel.random())
COSTS = {1: 1.0, 2: 1.1, 3: 1.2, 5: 1.5, 9: 2.0}


def named(text: str) -> Any:
    return parse_drafter(text).make(TARGET)


def call(text: str, stats: Stats, rounds: list[Round]) -> Call:
    generation = Generation(
        law=LAWS["greedy"],
        prompt_ids=[[1]],
        token_ids=[[0] * stats.new_tokens],
        texts=[""],
        finish_reasons=["length"],
        stats=stats,
        row_stats=[stats],
        logprobs=None,
        trace=[rounds],
        prefill_seconds=0.5,
        seconds=1.0,
    )
    return Call("a", 0, 0, named(text), (), generation, (1.0,), (0.5,))


def round_of(proposed: int, accepted: int, block: int) -> Round:
    return Round(
        list(range(proposed)), list(range(-1, proposed - 1)), list(range(accepted)), [0] * (accepted + 1), block
    )


# four rounds, k = 2: both accepted; the first rejected; the second rejected; nothing proposed
ROUNDS = [round_of(2, 2, 3), round_of(2, 0, 3), round_of(2, 1, 3), round_of(0, 0, 1)]
STATS = Stats(
    new_tokens=7,
    target_calls=4,
    proposed=6,
    accepted=3,
    rejected=2,
    proposed_at=(3, 3),
    reached_at=(3, 2),
    accepted_at=(2, 1),
)
DRAFTED = Drafted.of([call("prompt-lookup:k=2", STATS, ROUNDS)])


def test_rounds_of_a_run_by_hand():
    assert DRAFTED.chances == pytest.approx((3 / 4 * 2 / 3, 2 / 2 * 1 / 2))
    assert DRAFTED.alpha == pytest.approx(3 / 5)
    assert DRAFTED.lengths == {2: 3, 0: 1}
    assert DRAFTED.blocks == {3: 3, 1: 1}
    assert DRAFTED.tokens_per_call(2) == pytest.approx(7 / 4)  # what was measured
    assert DRAFTED.tokens_per_call(1) == pytest.approx(1.5)
    assert DRAFTED.chain_blocks(named("prompt-lookup:k=1")) == {2: 3, 1: 1}
    assert DRAFTED.chain_blocks(named("prompt-lookup:k=8")) == {4: 3, 1: 1}  # the ladder has no block of 3


def test_nothing_is_predicted_from_positions_that_nobody_came_to():
    stats = Stats(4, 4, proposed_at=(0, 0), reached_at=(0, 0), accepted_at=(0, 0))
    nothing = Drafted.of([call("prompt-lookup:k=2", stats, ROUNDS[3:])])
    assert nothing.chances == (0.0, 0.0)
    assert nothing.tokens_per_call(2) == 1.0
    assert formula(named("prompt-lookup:k=2"), nothing.alpha, 0.0, COSTS) == (None, None)


def test_a_predicted_speedup_by_hand():
    """Three rounds of four need a block of 3, all four a proposal of two steps."""
    assert predict_speedup(1.75, 2, DRAFTED.blocks, 0.1, COSTS) == pytest.approx(1.75 / (0.2 + (3 * 1.2 + 1) / 4))
    assert predict_speedup(1.0, 0, {1: 5}, 0.0, COSTS) == 1.0


def test_full_drafts_of_constant_acceptance_are_the_formula():
    expected = theory.speedup(0.8, 4, 0.05, COSTS)
    assert predict_speedup(theory.chain_tokens([0.8] * 4), 4, {5: 10}, 0.05, COSTS) == pytest.approx(expected)
    assert formula(named("prompt-lookup:k=4"), 0.8, 0.05, COSTS) == pytest.approx((3.3616, expected))
    assert formula(named("recycling"), 0.8, 0.05, COSTS) == (None, None)  # a tree


def test_in_a_batch_the_largest_block_is_everyones():
    blocks = {1: 6, 3: 3, 9: 1}
    random = np.random.default_rng(0)
    drawn = random.choice([1, 3, 9], p=[0.6, 0.3, 0.1], size=(200_000, 4)).max(-1)
    mean = np.mean([COSTS[int(size)] for size in drawn])
    assert predict_speedup(2.0, 1, blocks, 0.1, COSTS, rows=4) == pytest.approx(2 / (0.1 + mean), rel=2e-3)


def test_lengths_are_set_where_the_drafter_leaves_them_open():
    def labels(text: str) -> list[str]:
        return [asked.label for asked in script.lengths(text, (4, 1))]

    assert labels("suffix") == ["suffix:k=1", "suffix:k=4"]
    assert labels("eagle:some/path") == ["eagle:some/path,k=1", "eagle:some/path,k=4"]
    assert labels("prompt-lookup:max_ngram=3") == ["prompt-lookup:max_ngram=3,k=1", "prompt-lookup:max_ngram=3,k=4"]
    for text in ("prompt-lookup:k=8", "recycling", "eagle:some/path,depth=6,top_k=8,total=32"):
        assert labels(text) == [text]


def fake_passes(*args: Any, **kwargs: Any) -> PassTimes:
    """Costs that no busy machine can turn negative."""
    sizes = sorted({1, *args[3]})
    return PassTimes({size: [1 + 0.1 * size] for size in sizes}, {})


@pytest.fixture
def swept(loaded: specjax.Target, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(script, "time_passes", fake_passes)
    rows = [{"question_id": i, "category": "ab"[i], "turns": [text]} for i, text in enumerate(["abcabc", "the cat"])]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    def run(*arguments: object) -> tuple[dict[str, Any], str]:
        options = ["--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 24, "--output", tmp_path / "out"]
        code, out, err = command(script.main, *options, "--repetitions", 1, "--turns", 1, *arguments)
        assert code == 0, err
        return json.loads((tmp_path / "out" / "sweep.json").read_text()), out

    return run


def test_the_whole_command(swept: Any, tmp_path: Path):
    found, out = swept("--drafters", "prompt-lookup:min_ngram=1", "--k", 1, 3, "--temperatures", 0.8)
    points = found["points"]
    short, long = "prompt-lookup:min_ngram=1,k=1", "prompt-lookup:min_ngram=1,k=3"
    keys = [(p["temperature"], p["task"], p["drafter"]) for p in points]
    assert keys == [(0.8, task, label) for task in ("a", "b", "all") for label in (short, long)]
    assert {p["source"] for p in points} == {long}
    for p in points:
        if p["drafter"] == long:  # predicted from itself
            assert p["predicted_tokens_per_call"] == pytest.approx(p["tokens_per_call"])
        assert p["formula_speedup"] is None or p["formula_speedup"] > 0
    assert found["verify_cost"] == {"1": 1.0, "2": pytest.approx(1.2 / 1.1), "4": pytest.approx(1.4 / 1.1)}
    assert {f.name for f in (tmp_path / "out").iterdir()} == {"sweep.json", "sweep_temperature_0.8.png"}
    assert "fastest at k = " in out


def test_a_tree_is_predicted_from_its_own_rounds():
    tree, chain, longer = (named(text) for text in ("recycling", "prompt-lookup:k=1", "prompt-lookup:k=2"))
    stats = replace(STATS, new_tokens=8, accepted=4, rejected=1, reached_at=(3, 2), accepted_at=(2, 2))
    calls = [replace(call("prompt-lookup:k=2", stats, [round_of(5, 2, 9)] * 4), drafter=tree)]
    calls += [call("prompt-lookup:k=1", STATS, ROUNDS), call("prompt-lookup:k=2", STATS, ROUNDS)]
    row = {"tokens_per_call": 2.0, "acceptance_rate": 0.5, "alpha": 0.5, "draft_cost": 0.1, "speedup": 1.5}
    row |= {"acceptance_by_position": {"conditional": []}, "speedup_interval": None, "task": "a"}
    run = Measured([row | {"drafter": d.label} for d in (tree, chain, longer)], [], calls, {}, 0.0)
    families = {"recycling": (tree,), "prompt-lookup": (longer, chain)}
    found, two, one = script.points_of(families, run, 0.0, COSTS)
    assert (found.source, two.source, one.source) == ("recycling", "prompt-lookup:k=2", "prompt-lookup:k=2")
    assert found.predicted_tokens_per_call == pytest.approx(2.0)
    assert found.predicted_speedup == pytest.approx(2.0 / (0.1 * tree.drafter.max_depth + COSTS[9]))
    assert (found.formula_tokens_per_call, found.formula_speedup) == (None, None)
    assert one.predicted_speedup == pytest.approx(1.5 / (0.1 + (3 * 1.1 + 1) / 4))
    assert one.formula_tokens_per_call == pytest.approx(1.6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "0"], "--k: expected at least 1, got 0"),
        (["--k", "2", "2"], "--k: 2 is given twice"),
        (["--temperatures", "-1"], "temperature"),
        (["--drafters", "plain"], "--drafters: expected one besides plain"),
        (["--drafters", "suffix", "suffix:k=4"], "drafter 'suffix:k=4' is given twice"),
        (["--drafters", "unknown"], "unknown drafter"),
        (["--tasks", "poetry"], "unknown task"),
        (["--seed", "-1"], "--seed"),
        (["--output", "/proc/nothing"], "cannot write"),
    ],
)
def test_bad_input_is_one_line(command: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str):
    monkeypatch.setattr(specjax, "load", lambda *args, **kwargs: pytest.fail("loaded a target"))
    code, _, err = command(script.main, *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
