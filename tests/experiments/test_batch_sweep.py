"""batch_sweep.py on a tiny target: who is decoded together, what is predicted of it, and where speculation loses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import batch_sweep as script
import pytest
from common.drafters import parse_drafter
from common.evaluation import Call
from common.prompts import Conversation
from measure.passes import PassTimes

import specjax
from specjax import Generation, Round, Stats, testing
from specjax.requests import LAWS

TARGET = testing.tiny_target(testing.TableModel.random())
PROMPTS = [Conversation(i, task, i, ("hello", "and then")) for i, task in enumerate("aaabbc")]


def call(members: list[Conversation], rounds: list[int], blocks: tuple[int, ...] = ()) -> Call:
    """A batch whose rows took so many rounds; the trace of its longest row had these blocks."""
    stats = [Stats(new_tokens=n, target_calls=n) for n in rounds]
    trace = [[Round([], [], [], [0], size) for size in blocks[:n]] for n in rounds]
    generation = Generation(
        law=LAWS["greedy"],
        prompt_ids=[[1]] * len(rounds),
        token_ids=[[0] * n for n in rounds],
        texts=[""] * len(rounds),
        finish_reasons=["length"] * len(rounds),
        stats=Stats.total(stats),
        row_stats=stats,
        logprobs=None,
        trace=trace,
        prefill_seconds=0.5,
        seconds=1.0,
    )
    return Call("mixed", 0, 0, parse_drafter("plain").make(TARGET), tuple(members), generation, (1.0,), (0.5,))


def test_every_batch_has_some_of_each_task():
    some = script.mixed(PROMPTS, 5)
    assert [c.index for c in some] == [0, 3, 5, 1, 4]
    assert {c.task for c in some} == {"mixed"}
    assert {c.turns for c in some} == {("hello",)}
    assert [c.task for c in script.mixed(PROMPTS[:2], 9)] == ["a", "a"]


def test_a_batch_waits_for_its_slowest_row():
    plain = [call([c], [n]) for c, n in zip(PROMPTS, (10, 20, 10, 10, 10, 10), strict=True)]
    drafted = [call([c], [n]) for c, n in zip(PROMPTS, (5, 5, 8, 2, 1, 1), strict=True)]
    pairs = [call(PROMPTS[i : i + 2], [0, 0]) for i in (0, 2, 4)]
    assert script.slowest_rows(plain, plain, drafted) == pytest.approx(70 / 22)
    assert script.slowest_rows(pairs, plain, drafted) == pytest.approx((20 + 10 + 10) / (5 + 8 + 1))


def test_blocks_are_those_of_the_loops_rounds():
    two = [call(PROMPTS[:2], [2, 4], (1, 1, 5, 5)), call(PROMPTS[:1], [1], (9,))]
    assert script.blocks_run(two) == [1, 1, 5, 5, 9]


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ([2.0, 1.5, 0.5], 2 * 2**0.5),
        ([0.9, 0.8, 0.7], 1.0),
        ([1.2, 1.1, 1.0], None),
        ([0.9, 1.1, 1.2], None),
        ([2.0, 0.9, 1.1], None),
        ([1.2, None, 0.8], 2.0),
        ([None, None, None], None),
    ],
)
def test_speculation_loses_where_the_curve_falls_below_one(speedups: list[float | None], expected: float | None):
    found = script.crossing([1, 2, 4], speedups)
    assert found == (None if expected is None else pytest.approx(expected))


def fake_passes(model: Any, cache: Any, length: int, sizes: Any, turns: int, done: Any) -> PassTimes:
    """Costs that no busy machine can turn negative; those of a batch grow with its rows."""
    rows = cache.keys[0].shape[0]
    return PassTimes({size: [1 + 0.1 * rows * size] for size in sizes}, {})


def test_the_whole_command(
    loaded: specjax.Target, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "time_passes", fake_passes)
    rows = [
        {"question_id": i, "category": "ab"[i % 2], "turns": [text]}
        for i, text in enumerate(["abcabc", "the cat", "in the end"])
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = ["--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 24, "--output", tmp_path / "out"]
    drafter = "prompt-lookup:k=2,min_ngram=1"
    adaptive, measured = f"adaptive:{drafter}", []

    def costs(target: Any, drafter: Any, batch_size: int, context: int) -> specjax.Costs:
        """Drafts pay one by one, and never among three."""
        measured.append((batch_size, context))
        return specjax.Costs.of(drafter, [1, 1.01] if batch_size == 1 else [1, 50])

    monkeypatch.setattr(specjax, "measure_costs", costs)
    given = ["--drafters", drafter, adaptive, "--batch-sizes", 3, "--limit", 3]
    code, out, err = command(script.main, *options, *given)
    assert code == 0, err
    assert measured == [(1, 256), (3, 256)]
    found = json.loads((tmp_path / "out" / "batch_sweep.json").read_text())
    points = {(p["batch_size"], p["drafter"]): p for p in found["points"]}
    assert list(points) == [(size, name) for size in (1, 3) for name in ("plain", drafter, adaptive)]
    single, triple = points[1, drafter], points[3, drafter]
    assert single["tokens_per_call"] == pytest.approx(triple["tokens_per_call"])
    assert single["block_tokens"] <= triple["block_tokens"] <= 3
    assert single["predicted_speedup"] > 0 and triple["formula_speedup"] > 0
    assert points[3, "plain"]["predicted_speedup"] is None
    assert points[3, "plain"]["block_shares"] == {"1": 1.0}
    assert set(points[1, adaptive]["block_shares"]) == {"1", "3"}
    # a try now and then
    assert points[3, adaptive]["block_shares"]["1"] > 0.8 > points[1, adaptive]["block_shares"]["1"]
    assert f"{adaptive}, batch 3: rounds by block size 1: " in " ".join(out.split())
    assert set(found["verify_cost"]) == {"1", "3"} and set(found["verify_cost"]["3"]) == {"1", "3"}
    assert set(found["loses_from"][drafter]) == {"measured", "predicted", "formula"}
    assert (tmp_path / "out" / "batch_sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "is slower than plain decoding from batch: measured" in " ".join(out.split())


def test_curves_that_a_drafter_does_not_have_are_left_out():
    point = script.Point(1, "tree", 1.5, 0.5, 0.1, 9.0, {9: 1.0}, 50.0, 0.9, None, 1.1, None)
    points = [point, replace(point, batch_size=2, predicted_speedup=0.9)]
    assert script.loses_from(points, "tree") == {"measured": 1.0, "predicted": pytest.approx(2**0.5)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-sizes", "0"], "--batch-sizes: expected at least 1, got 0"),
        (["--batch-sizes", "2", "2"], "--batch-sizes: 2 is given twice"),
        (["--top-p", "0", "--temperature", "1"], "top_p"),
        (["--drafters", "unknown"], "unknown drafter"),
        (["--tasks", "poetry"], "unknown task"),
        (["--output", "/proc/nothing"], "cannot write"),
    ],
)
def test_bad_input_is_one_line(command: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str):
    monkeypatch.setattr(specjax, "load", lambda *args, **kwargs: pytest.fail("loaded a target"))
    code, _, err = command(script.main, *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
