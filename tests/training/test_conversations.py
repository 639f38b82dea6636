"""Files of conversations: the forms a row can have, and files that are not what they should be."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from specjax.errors import InputError
from specjax.training.conversations import parse_row, read_conversations

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
CHAT = {"messages": MESSAGES}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_the_forms_of_a_row() -> None:
    for row in (CHAT, SHAREGPT, {"conversations": MESSAGES}, CHAT | {"text": "rendered before"}):
        assert list(parse_row(row, "here").messages or ()) == MESSAGES
    assert parse_row({"text": "a text"}, "here").text == "a text"
    given = parse_row({"prompt_ids": [1, 2], "token_ids": [3], **CHAT}, "here")
    assert (given.prompt_ids, given.token_ids, given.messages) == ((1, 2), (3,), None)
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, MESSAGES[1]]
    assert list(parse_row({"messages": parts}, "here").messages or ()) == MESSAGES
    assert parse_row({**CHAT, "tools": [{"name": "f"}]}, "here").tools == [{"name": "f"}]


def test_what_the_template_may_read_is_kept() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    told = {"role": "assistant", "content": "x", "reasoning_content": "because"}
    assert parse_row({"messages": [*MESSAGES[:1], call, told]}, "here").messages == (MESSAGES[0], call, told)


def test_cut_answers() -> None:
    for finish, finished in [("stop", True), ("length", False), ("context", False), ("stop_string", False)]:
        assert parse_row(CHAT | {"finish": finish}, "here").finished is finished
        assert parse_row(CHAT | {"finish_reason": finish}, "here").finished is finished
    assert parse_row(CHAT, "here").finished


def test_files(tmp_path: Path) -> None:
    text = lines(CHAT, SHAREGPT) + "\n" + lines({"text": "line\u2028separator"})
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "c.json").write_text("\ufeff \n" + json.dumps([CHAT, SHAREGPT], indent=1), encoding="utf-8")
    (tmp_path / "manifest.json").write_text("{}")
    plain, zipped, array = (read_conversations(tmp_path / name) for name in ("a.jsonl", "b.jsonl.gz", "c.json"))
    assert [c.where.rpartition(", ")[2] for c in plain] == ["line 1", "line 2", "line 4"]
    assert [c.messages for c in zipped] == [c.messages for c in plain]
    assert [c.messages for c in array] == [c.messages for c in plain[:2]]
    assert read_conversations(tmp_path) == plain + zipped
    assert read_conversations(tmp_path / "c.json", tmp_path / "a.jsonl") == array + plain


def refused(where: str, part: str, *paths: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_conversations(*paths)
    message = str(caught.value)
    assert message.startswith(where), message
    assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ("{", "not JSON"),
        ('"text"', "expected an object, got str"),
        ("{}", "no conversation in it (its keys: none)"),
        ('{"prompt": "a", "completion": "b"}', "its keys: completion, prompt"),
        ('{"text": ""}', "text is ''"),
        ('{"text": 5}', "text is 5"),
        ('{"messages": []}', "messages is []"),
        ('{"messages": "hi"}', "messages is 'hi'"),
        ('{"messages": ["hi"]}', "message 1 is 'hi'"),
        ('{"messages": [{"role": "user"}]}', "message 1 has the keys role"),
        ('{"messages": [{"role": "user", "content": null}]}', "message 1 has the content None"),
        ('{"messages": [{"role": 1, "content": "a"}]}', "message 1 has role 1"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "message 1 has the content"),
        ('{"conversations": [{"from": "narrator", "value": "a"}]}', "message 1 is from 'narrator'"),
        ('{"messages": [{"role": "user", "content": "a"}], "finish": 1}', "finish is 1"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": "f"}', "tools is str"),
        ('{"token_ids": [1]}', "token_ids without prompt_ids"),
        ('{"token_ids": [1], "prompt_ids": [true]}', "prompt_ids is [True]"),
        ('{"token_ids": ["a"], "prompt_ids": []}', "token_ids is ['a']"),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_rows_that_do_not_parse(row: str, part: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(lines(CHAT) + "\n" + row + "\n")
    refused(f"{file}, line 3: ", part, file)


def test_arrays_that_do_not_parse(tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text('[\n{"text": "a"},\n{"text" "b"}]')
    refused(f"{file}, line 3: ", "not JSON", file)
    file.write_text('[\n{"text": "a"},\n{"txt": "b"}]')
    refused(f"{file}, row 2: ", "its keys: txt", file)
    file.write_bytes(b'[{"text": "a"},\n{"text": "\xff"}]')
    refused(f"{file}, line 2: ", "UTF-8", file)


def test_files_that_are_not_there_or_damaged(tmp_path: Path) -> None:
    refused(str(tmp_path / "none"), "No such file", tmp_path / "none")
    refused(str(tmp_path), "no .jsonl", tmp_path)
    empty, zipped, text = tmp_path / "empty.jsonl", tmp_path / "cut.jsonl.gz", tmp_path / "latin.jsonl"
    empty.write_text("\n\n")
    refused(str(empty), "no conversations", empty)
    zipped.write_bytes(gzip.compress(lines(*[CHAT] * 100).encode())[:-20])
    refused(str(zipped), "cannot be read", zipped)
    text.write_bytes(lines(CHAT).encode() + b'{"text": "\xe9"}')
    refused(f"{text}, line 2: ", "UTF-8", text)
