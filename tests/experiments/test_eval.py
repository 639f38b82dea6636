"""eval.py from its command line to its files, on a tiny target."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eval as script
import pytest

import specjax

Command = Callable[..., tuple[int, str, str]]
ONE_TURN = [{"question_id": i, "category": "ab"[i % 2], "turns": [text]} for i, text in enumerate(
    ["abcd abcd abcd", "the cat and the other cat", "bcd bcd abc", "in the end", "on and on and on"]
)]  # fmt: skip
LOOKUP = ("--drafters", "prompt-lookup:k=2,min_ngram=1")
TWO_TURNS = [
    {"question_id": "x", "category": "chat", "turns": ["abcabcabc", "again"]},
    {"question_id": "y", "category": "chat", "turns": ["the end"]},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture
def evaluated(loaded: specjax.Target, command: Command, tmp_path: Path) -> Callable[..., tuple[dict[str, Any], str]]:
    """Run eval.py on rows and read what it wrote: results and stdout."""

    def run(rows: list[dict[str, Any]], *arguments: object) -> tuple[dict[str, Any], str]:
        file = write(tmp_path / "prompts.jsonl", rows)
        options = ["--prompts", file, "--max-new-tokens", 24, "--output", tmp_path / "out", *LOOKUP, *arguments]
        code, out, err = command(script.main, *options)
        assert code == 0, err
        assert [f.name for f in (tmp_path / "out").iterdir()] == ["results.json"]
        return json.loads((tmp_path / "out" / "results.json").read_text()), out

    return run


def test_greedy_run(evaluated: Any):
    results, out = evaluated(ONE_TURN)
    runs = {(row["task"], row["drafter"]): row for row in results["runs"]}
    assert list(runs) == [(t, d) for t in "ab" for d in ("plain", LOOKUP[1])]
    for row in runs.values():
        assert row["matches_plain"] is True
        assert row["tokens_per_second"] == pytest.approx(row["new_tokens"] / row["seconds"])
    assert runs["a", "plain"]["new_tokens"] == runs["a", LOOKUP[1]]["new_tokens"]
    assert runs["a", "plain"]["draft_cost"] is None
    assert runs["a", LOOKUP[1]]["draft_cost"] >= 0
    assert [row["task"] for row in results["totals"]] == ["all", "all"]
    assert results["provenance"]["command"].startswith("python script.py --prompts")
    assert results["settings"]["max_new_tokens"] == 24
    assert "speedup" in results["definitions"]
    for prompt in results["prompts"]:
        plain, lookup = prompt["outputs"]
        assert plain["token_ids"] == lookup["token_ids"]
        assert [t for r in lookup["rounds"] for t in r["committed"]] == lookup["token_ids"]
        assert all(r["proposed"] == [] for r in plain["rounds"])
    assert LOOKUP[1] in out
    assert "accepted / proposed" in out


def test_first_prompts_of_each_task_are_repeated(evaluated: Any):
    results, _ = evaluated(ONE_TURN, "--repetitions", 3, "--repeated", 1)
    times = [len(p["outputs"][0]["batch_seconds"]) for p in results["prompts"]]
    assert times == [3, 1, 1, 3, 1]


def test_a_short_last_batch_is_filled_up(evaluated: Any):
    results, _ = evaluated(ONE_TURN, "--batch-size", 2)
    assert {row["batch_size"] for row in results["runs"]} == {2}
    assert [p["question_id"] for p in results["prompts"]] == [0, 2, 4, 1, 3]
    plain = next(row for row in results["runs"] if row["task"] == "a")
    single, _ = evaluated(ONE_TURN)
    by_id = {p["question_id"]: p["outputs"][0]["token_ids"] for p in single["prompts"]}
    assert plain["new_tokens"] == sum(len(by_id[i]) for i in (0, 2, 4, 4))
    for p in results["prompts"]:
        assert p["outputs"][1]["token_ids"] == by_id[p["question_id"]]


def test_plain_decodings_answers_are_the_history(evaluated: Any, loaded: specjax.Target):
    results, _ = evaluated(TWO_TURNS)
    first, second = (p for p in results["prompts"] if p["question_id"] == "x")
    assert [p["turn"] for p in (first, second)] == [0, 1]
    answer = first["outputs"][0]["text"]
    chat = [
        {"role": "user", "content": "abcabcabc"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "again"},
    ]
    assert second["prompt_ids"] == loaded.tokenizer.encode_chat(chat)


def test_a_sampled_run_is_not_compared_and_does_not_depend_on_the_batch(evaluated: Any):
    sampled = ("--temperature", 0.9, "--seed", 3)
    results, _ = evaluated(ONE_TURN, *sampled)
    assert {row["law"] for row in results["runs"]} == {"rejection"}
    assert {row["matches_plain"] for row in results["runs"]} == {None}
    batched, _ = evaluated(ONE_TURN, *sampled, "--batch-size", 3)

    def texts(found: dict[str, Any]) -> dict[int, list[list[int]]]:
        return {p["question_id"]: [o["token_ids"] for o in p["outputs"]] for p in found["prompts"]}

    assert texts(batched) == texts(results)


def test_a_draft_model_of_the_same_weights_is_always_accepted(evaluated: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(specjax, "load_drafter", lambda path, target, dtype, **k: specjax.DraftModel(target, **k))
    results, _ = evaluated(ONE_TURN[:2], "--drafters", "draft-model:anything,k=3")
    drafted = [row for row in results["runs"] if row["drafter"] != "plain"]
    assert {row["acceptance_rate"] for row in drafted} == {1.0}
    assert {row["num_draft_tokens"] for row in drafted} == {3}


def test_trace_prints_every_round(evaluated: Any):
    results, out = evaluated(ONE_TURN[:1], "--trace")
    assert f"a 0, turn 1, {LOOKUP[1]}" in out
    rounds = sum(len(o["rounds"]) for o in results["prompts"][0]["outputs"])
    assert sum("  block " in line for line in out.splitlines()) == rounds


def test_another_text_than_plain_decodings_is_a_fault(
    loaded: specjax.Target, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(specjax, "generate", wrong_where_drafted(specjax.generate))
    file = write(tmp_path / "p.jsonl", ONE_TURN[:1])
    code, out, err = command(
        script.main, "--prompts", file, "--max-new-tokens", 24, "--output", tmp_path / "o", *LOOKUP
    )
    assert code == 1
    assert "1 FAULTS" in out
    assert "FAULT at new token 3" in out
    assert "FAULT: 1 greedy text" in err
    row = json.loads((tmp_path / "o" / "results.json").read_text())["runs"][1]
    assert (row["matches_plain"], row["faults"]) == (False, 1)


def test_a_lossy_law_says_so_everywhere(evaluated: Any, monkeypatch: pytest.MonkeyPatch):
    results, out = evaluated(ONE_TURN[:2], "--law", "typical", "--temperature", 0.9)
    plain, lookup = results["totals"]
    assert (plain["law"], plain["lossless"]) == ("rejection", True)
    assert (lookup["law"], lookup["lossless"]) == ("typical", False)
    assert [o["lossless"] for p in results["prompts"] for o in p["outputs"]] == [True, False] * 2
    assert "law typical (epsilon 0.09, alpha 0.3; LOSSY)" in " ".join(out.split())
    assert [line.rstrip().endswith("LOSSY") for line in out.splitlines() if f" {LOOKUP[1]} " in line][:3] == [True] * 3

    # a greedy text that is another one is reported, and no fault
    results, out = evaluated(ONE_TURN[:1], "--law", "typical")
    assert results["totals"][1]["matches_plain"] is True
    assert "LOSSY, =" in out
    monkeypatch.setattr(specjax, "generate", wrong_where_drafted(specjax.generate))
    results, out = evaluated(ONE_TURN[:1], "--law", "typical")
    row = results["totals"][1]
    assert (row["matches_plain"], row["faults"], row["other_texts"]) == (False, 0, 1)
    assert "LOSSY, 1 others, ~0 near-ties" in out
    assert "another text at new token 3" in out
    assert "FAULT at" not in out


def wrong_where_drafted(right: Callable[..., specjax.Generation]) -> Callable[..., specjax.Generation]:
    """`generate`, but the third token of a drafted text is another one."""

    def wrong(*args: Any, drafter: Any, **kwargs: Any) -> specjax.Generation:
        g = right(*args, drafter=drafter, **kwargs)
        if drafter.name == "plain":
            return g
        ids = g.token_ids[0]
        return dataclasses.replace(g, token_ids=[[*ids[:2], (ids[2] + 1) % 64, *ids[3:]]])

    return wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--law", "greedy", "--temperature", "0.5"], "the greedy law needs temperature 0"),
        (["--drafters", "unknown"], "unknown drafter 'unknown': expected one of plain"),
        (["--drafters", "prompt-lookup:k=-1"], "k is '-1'; expected a whole number of at least 1"),
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "1.5"], "top_p"),
        (["--top-p", "0"], "top_p"),
        (["--max-new-tokens", "0"], "--max-new-tokens: expected at least 1, got 0"),
        (["--batch-size", "0"], "--batch-size: expected at least 1, got 0"),
        (["--limit", "0"], "--limit: expected at least 1, got 0"),
        (["--tasks", "poetry"], "unknown task 'poetry': prompts.jsonl has code, explain"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["--output", "/proc/nothing"], "--output /proc/nothing: cannot write"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_loaded(
    command: Command, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
):
    monkeypatch.setattr(specjax, "load", lambda *args, **kwargs: pytest.fail("loaded a target"))
    code, out, err = command(script.main, *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_prompt_longer_than_the_context_is_named_before_decoding(
    loaded: specjax.Target, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(specjax, "generate", lambda *args, **kwargs: pytest.fail("decoded"))
    rows = [*ONE_TURN, {"question_id": 99, "category": "long", "turns": ["b " * 600]}]
    code, _, err = command(script.main, "--prompts", write(tmp_path / "p.jsonl", rows))
    assert code == 2
    assert "prompt 99 of long has" in err
    assert err.count("\n") == 1


def test_a_conversation_ends_where_its_history_fills_the_context(evaluated: Any):
    rows = [{"question_id": 1, "category": "long", "turns": ["b " * 200, "c " * 40, "d " * 40]}]
    results, _ = evaluated(rows)
    assert [p["turn"] for p in results["prompts"]] == [0, 1]
