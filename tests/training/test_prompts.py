"""Files of prompts: the forms a row can have, which turns are answered, duplicates."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from specjax.errors import InputError
from specjax.training.prompts import Request, parse_prompt, read_prompts

SYSTEM = {"role": "system", "content": "be brief"}
ASKED = [{"role": "user", "content": text} for text in ("one?", "two?")]
ANSWERED = [{"role": "assistant", "content": text} for text in ("1", "2")]
CHAT = [SYSTEM, ASKED[0], ANSWERED[0], ASKED[1], ANSWERED[1]]


def parse(row: Any, turns: str = "last") -> Request:
    return parse_prompt(row, "here", 3, turns)


def said(*texts: str) -> tuple[tuple[dict[str, str], ...], ...]:
    return tuple(({"role": "user", "content": text},) for text in texts)


def test_the_forms_of_a_row() -> None:
    for row in ("one?", {"prompt": "one?"}, {"question": "one?"}, {"turns": ["one?"]}, {"instruction": "one?"}):
        assert parse(row) == Request(3, "here", said("one?"))
    assert parse({"instruction": "sort:", "input": "3 1"}).turns == said("sort:\n\n3 1")
    assert parse({"instruction": "sort:", "input": ""}).turns == said("sort:")
    assert parse({"turns": ["one?", "two?"], "question_id": 8}).turns == said("one?", "two?")
    sharegpt = {"conversations": [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "1"}]}
    assert parse(sharegpt).turns == said("one?")
    assert parse({"prompt_ids": [4, 5]}).prompt_ids == (4, 5)
    # rows as synthesis itself writes them are asked again as text: the ids are another target's
    assert parse({"messages": CHAT[1:3], "prompt_ids": [4], "token_ids": [5]}).turns == said("one?")
    assert parse({"messages": ASKED[:1], "tools": [{"name": "f"}]}).tools == [{"name": "f"}]


def test_which_turns_are_answered() -> None:
    """The last one after the answers that the file has, or all of them in place of those."""
    assert parse({"messages": CHAT}).turns == ((SYSTEM, ASKED[0], ANSWERED[0], ASKED[1]),)
    assert parse({"messages": CHAT}, "all").turns == ((SYSTEM, ASKED[0]), (ASKED[1],))
    assert parse({"messages": CHAT[:2]}, "all").turns == ((SYSTEM, ASKED[0]),)
    greeting = {"role": "assistant", "content": "hello"}
    assert parse({"messages": [greeting, *ASKED[:1]]}, "all").turns == ((greeting, ASKED[0]),)
    twice = [ASKED[0], *ANSWERED, ASKED[1]]
    assert parse({"messages": twice}, "all").turns == ((ASKED[0],), (ASKED[1],))
    call, result = {"role": "assistant", "content": None, "tool_calls": [{}]}, {"role": "tool", "content": "7"}
    assert parse({"messages": [ASKED[0], call, result]}, "all").turns == ((ASKED[0], call, result),)


def test_files(tmp_path: Path) -> None:
    rows = [{"turns": ["a"]}, "b", {"prompt": "a"}, {"messages": ASKED}, "b", "c"]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    (tmp_path / "y.jsonl.gz").write_bytes(gzip.compress("\n\n".join(map(json.dumps, rows[3:])).encode()))
    (tmp_path / "z.json").write_text(json.dumps(rows))
    folder, array = read_prompts([tmp_path]), read_prompts([tmp_path / "z.json"])
    assert [request.turns for request in folder.requests] == [request.turns for request in array.requests]
    assert [request.index for request in folder.requests] == [0, 1, 3, 5]
    assert [request.source for request in folder.requests] == [
        "x.jsonl, line 1",
        "x.jsonl, line 2",
        "y.jsonl.gz, line 1",
        "y.jsonl.gz, line 5",
    ]
    assert (folder.read, folder.duplicates) == (6, 2)
    assert [name for name, _ in folder.files] == ["x.jsonl", "y.jsonl.gz"]
    assert len({digest for _, digest in folder.files + array.files}) == 3
    assert read_prompts([tmp_path], limit=3).requests == folder.requests[:3]


@pytest.mark.parametrize(
    ("row", "part"),
    [
        (5, "expected text or an object, got int"),
        ("", "prompt is ''"),
        ({"prompt": " "}, "prompt is ' '"),
        ({"turns": []}, "turns is []"),
        ({"turns": ["a", 5]}, "a turn is 5"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": ["a"]}, "prompt_ids is ['a']"),
        ({"messages": ANSWERED}, "no message of a user"),
        ({"messages": []}, "messages is []"),
        ({"instruction": "a", "input": 5}, "input is 5"),
        ({"text": "once"}, "a plain text says nothing to answer"),
        ({"a": 1}, "no prompt in it (its keys: a)"),
    ],
)
def test_rows_that_ask_nothing(row: Any, part: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('"a"\n\n' + json.dumps(row) + "\n")
    with pytest.raises(InputError) as caught:
        read_prompts([file])
    assert str(caught.value).startswith(f"{file}, line 3: ")
    assert part in str(caught.value)


def test_no_prompts(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match=r"empty\.jsonl: no prompts"):
        read_prompts([tmp_path / "empty.jsonl"])
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts([tmp_path / "none.jsonl"])
    with pytest.raises(InputError, match="turns is 'first'"):
        read_prompts([tmp_path / "empty.jsonl"], turns="first")
