"""Our prompts, and JSONL files in the form of MT-bench and Spec-Bench."""

import json
from collections import Counter
from pathlib import Path

import pytest
from common.prompts import messages, read_prompts

from specjax import InputError


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def row(number: int, category: str = "code", turns: object = ("Hello.",)) -> dict[str, object]:
    return {"question_id": number, "category": category, "turns": turns}


def test_our_own_prompts_are_five_tasks_of_four():
    ours = read_prompts()
    assert Counter(c.task for c in ours) == dict.fromkeys(["code", "explain", "story", "rewrite", "structured"], 4)
    assert all(len(c.turns) == 1 for c in ours)
    assert any("refrigerator" in c.turns[0] for c in ours if c.task == "explain")


def test_limit_and_tasks_choose_prompts_of_each_task(tmp_path: Path):
    file = write(tmp_path / "p.jsonl", row(1, "a"), row(2, "b"), "", row(3, "a"), row(4, "a"))
    assert [c.question_id for c in read_prompts(file)] == [1, 3, 4, 2]
    assert [c.question_id for c in read_prompts(file, limit=2)] == [1, 3, 2]
    assert [c.question_id for c in read_prompts(file, tasks=["b"])] == [2]
    with pytest.raises(InputError, match=r"unknown task 'c': p\.jsonl has a, b"):
        read_prompts(file, tasks=["c"])


def test_extra_fields_are_fine_and_an_empty_category_is_the_files_name(tmp_path: Path):
    file = write(tmp_path / "mine.jsonl", row(1, "", ["a", "b"]) | {"reference": ["x"]})
    (conversation,) = read_prompts(file)
    assert (conversation.task, conversation.turns) == ("mine", ("a", "b"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "expected an object"),
        ({"category": "a", "turns": ["x"]}, "question_id is missing"),
        ({"question_id": 1, "category": 5, "turns": ["x"]}, "category is 5"),
        ({"question_id": 1, "category": "a"}, "turns is missing"),
        ({"question_id": 1, "category": "a", "turns": "x"}, "turns is 'x'"),
        ({"question_id": 1, "category": "a", "turns": []}, "turns must be"),
        ({"question_id": 1, "category": "a", "turns": ["x", ""]}, "turns must be"),
    ],
)
def test_a_row_that_does_not_parse_names_file_and_line(tmp_path: Path, line: object, message: str):
    file = write(tmp_path / "p.jsonl", row(1), "", line)
    with pytest.raises(InputError, match=message) as error:
        read_prompts(file)
    assert str(error.value).startswith(f"{file}, line 3: ")
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_or_is_empty(tmp_path: Path):
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="no prompts"):
        read_prompts(write(tmp_path / "empty.jsonl", "", ""))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read as text"):
        read_prompts(tmp_path / "binary.jsonl")


def test_messages_hold_the_answers_so_far(tmp_path: Path):
    (conversation,) = read_prompts(write(tmp_path / "p.jsonl", row(1, turns=["one", "two"])))
    assert messages(conversation) == [{"role": "user", "content": "one"}]
    assert messages(conversation, ["first"]) == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "two"},
    ]
