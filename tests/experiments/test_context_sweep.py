"""context_sweep.py on a tiny target: conversations filled up to a length, and what is written about them."""

import json
from pathlib import Path
from typing import Any

import context_sweep as script
import pytest
from common.prompts import Conversation, messages, prompt_ids

import specjax
from specjax import InputError, testing

TARGET = testing.tiny_target(testing.TableModel.random(64, seed=3), tokenizer=testing.TinyTokenizer())
QUESTIONS = [Conversation(i, "ab"[i // 2], i, (text,)) for i, text in enumerate(["on", "abc", "the cat", "in the end"])]
FILLERS = {c.index: (c.turns[0], f"answer {c.index} the cat and the other cat") for c in QUESTIONS}


@pytest.mark.parametrize("length", [5, 40, 41, 42, 43, 44, 45, 60, 200, 350])
def test_a_conversation_is_filled_up(length: int):
    filled = script.fill(TARGET, QUESTIONS[1], FILLERS, length)
    size = len(prompt_ids(TARGET, filled))
    assert filled.turns == QUESTIONS[1].turns
    assert size <= length
    # one more word in the oldest turn's message and in its answer would be too much; so would any turn, where none is
    smallest = len(TARGET.tokenizer.encode_chat(turn_messages(("in", "answer")))) - 2
    longest_word = max(len(TARGET.tokenizer.encode(word)) for word in ["the", "other", "answer"])
    assert length - size <= max(smallest, 2 * (longest_word + 1))
    users = [user for user, _ in filled.history]
    assert not any(user == "abc" for user in users)  # its own answer is not to be found in front of it
    assert all(turn in FILLERS.values() for turn in filled.history[1:])


def turn_messages(turn: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turn, strict=True)]


def test_turns_come_again_where_there_are_too_few():
    filled = script.fill(TARGET, QUESTIONS[1], FILLERS, 350)
    users = [user for user, _ in filled.history]
    assert users[:-4:-1] == ["the cat", "in the end", "on"]
    assert users[-4] == "the cat"
    chat = messages(filled)
    assert [m["role"] for m in chat] == ["user", "assistant"] * len(users) + ["user"]
    assert chat[-1]["content"] == "abc"


def test_a_question_alone_cannot_be_filled_up():
    with pytest.raises(InputError, match="expected two prompts or more"):
        script.fill(TARGET, QUESTIONS[1], {1: FILLERS[1]}, 40)


def test_a_task_is_left_out_where_one_of_its_questions_is_too_long():
    sizes = [len(prompt_ids(TARGET, c)) for c in QUESTIONS]
    assert sizes == sorted(sizes)
    assert [c.index for c in script.that_fit(TARGET, QUESTIONS, sizes[3])] == [0, 1, 2, 3]
    assert [c.index for c in script.that_fit(TARGET, QUESTIONS, sizes[2])] == [0, 1]
    assert script.that_fit(TARGET, QUESTIONS, sizes[0] - 1) == []


def test_the_whole_command(loaded: specjax.Target, command: Any, tmp_path: Path):
    long = "the cat and the other cat and the end"
    texts = ["abcabc", long, "the cat"]
    rows = [{"question_id": i, "category": "abc"[i], "turns": [text, "more"]} for i, text in enumerate(texts)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    drafter = "prompt-lookup:k=2,min_ngram=1"
    code, out, err = command(
        script.main,
        *("--prompts", tmp_path / "prompts.jsonl", "--tasks", "a", "b", "--lengths", 60, 12, "--drafters", drafter),
        *("--max-new-tokens", 16, "--answer-tokens", 8, "--output", tmp_path / "out"),
    )
    assert code == 0, err
    found = json.loads((tmp_path / "out" / "context_sweep.json").read_text())
    points = {(p["length"], p["task"], p["drafter"]): p for p in found["points"]}
    kinds = ("plain", drafter)
    assert list(points) == [(n, t, d) for n, t in ((12, "a"), (60, "a"), (60, "b")) for d in kinds]
    assert all(p["length"] - 12 < p["prompt_tokens"] <= p["length"] for p in points.values())
    assert points[60, "a", drafter]["draft_cost"] >= 0
    assert points[60, "a", "plain"]["tokens_per_call"] == 1
    assert "Left out, because a question is longer than that: b at 12." in " ".join(out.split())
    assert (tmp_path / "out" / "context_sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_length_that_the_context_does_not_have(loaded: specjax.Target, command: Any):
    code, _, err = command(script.main, "--lengths", 128, 512)
    assert (code, err.count("\n")) == (2, 1)
    assert "--lengths: 512, but tiny has a context of 512" in err
    code, _, err = command(script.main, "--lengths", 2)
    assert (code, err.count("\n")) == (2, 1)
    assert "no task's questions fit into 2 tokens" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "0"], "--lengths: expected at least 1, got 0"),
        (["--lengths", "128", "128"], "--lengths: 128 is given twice"),
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
