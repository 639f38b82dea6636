"""Prompts to be answered, from files of many forms: what the user says, turn by turn."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.errors import InputError
from specjax.training.conversations import files_of, parse_row, read_rows

Messages = tuple[Mapping[str, Any], ...]
TURNS = ("last", "all")
FORMS = (
    'text in quotes, {"turns": ["…", …]}, {"messages": […]}, {"conversations": […]}, {"prompt": "…"}, '
    '{"question": "…"}, {"instruction": "…", "input": "…"} or {"prompt_ids": […]}'
)


@dataclass(frozen=True)
class Request:
    """What is to be answered.

    Attributes:
        index: its place in all the files, from 0; its random numbers come from it.
        where: file and line, for error messages.
        turns: for each answer, the messages that lie between it and the answer before.
        prompt_ids: a prompt given as ids; then there are no turns.
        tools: what the template is told about tools.
    """

    index: int
    where: str
    turns: tuple[Messages, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    tools: Sequence[Any] | None = None

    @property
    def num_answers(self) -> int:
        return max(len(self.turns), 1)

    @property
    def source(self) -> str:
        """File and line, without the directory."""
        path, comma, place = self.where.rpartition(", ")
        return Path(path).name + comma + place


@dataclass(frozen=True)
class PromptFiles:
    """The requests of some files.

    Attributes:
        requests: each one once, in the files' order.
        read: rows in the files.
        duplicates: rows left out because an earlier one says the same.
        files: name and sha256 of each file.
    """

    requests: tuple[Request, ...]
    read: int
    duplicates: int
    files: tuple[tuple[str, str], ...]


def read_prompts(paths: Sequence[str | Path], turns: str = "last", limit: int | None = None) -> PromptFiles:
    """The prompts of files: JSON lines or one JSON array, gzipped or not, or directories of `.jsonl` files.

    A row has one of these forms; where several fit, the first counts:

    - text in quotes: what a user says;
    - `messages` or `conversations`, as `read_conversations` reads them;
    - `turns`: what a user says, turn by turn (Spec-Bench, MT-bench). All turns are answered, each after the answers to
      those before it;
    - `prompt_ids`: token ids, taken as they are;
    - `prompt`, `question`, or `instruction` with or without `input`: what a user says.

    Args:
        turns: of `messages`: "last" answers the last turn, after the answers that the file has; "all" answers every
            turn and puts the target's own answers in place of the file's.
        limit: the first so many, duplicates not counted.

    Raises:
        InputError: a file that cannot be read; a row that asks nothing, naming file and line.
    """
    if turns not in TURNS:
        raise InputError(f"turns is {turns!r}; expected one of {', '.join(TURNS)}")
    files = [file for path in paths for file in files_of(Path(path))]
    rows = [row for file in files for row in read_rows(file, FORMS)]
    if not rows:
        raise InputError(f"{', '.join(map(str, paths)) or 'no files'}: no prompts; expected rows like {FORMS}")
    kept: dict[str, Request] = {}
    for index, (where, row) in enumerate(rows):
        request = parse_prompt(row, where, index, turns)
        said = json.dumps([request.turns, request.prompt_ids, request.tools], ensure_ascii=False, sort_keys=True)
        kept.setdefault(said, request)
    hashes = tuple((file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files)
    return PromptFiles(tuple(kept.values())[:limit], len(rows), len(rows) - len(kept), hashes)


def parse_prompt(row: Any, where: str, index: int = 0, turns: str = "last") -> Request:
    """One row, already decoded from JSON.

    Raises:
        InputError: beginning with `where`.
    """
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected text or an object, got {type(row).__name__}; rows look like {FORMS}")
    if "messages" in row or "conversations" in row:
        chat = parse_row({k: row[k] for k in ("messages", "conversations", "tools") if k in row}, where)
        return Request(index, where, _split(chat.messages or (), where, turns), tools=chat.tools)
    if "turns" in row:
        said = row["turns"]
        if not isinstance(said, list) or not said:
            raise InputError(f"{where}: turns is {_short(said)}; expected a list of one or more texts")
        return Request(index, where, tuple(_user(text, "a turn", where) for text in said))
    if "prompt_ids" in row:
        ids = parse_row({"prompt_ids": row["prompt_ids"], "token_ids": []}, where).prompt_ids
        if not ids:
            raise InputError(f"{where}: prompt_ids is empty; expected at least one token id")
        return Request(index, where, prompt_ids=ids)
    for name in ("prompt", "question"):
        if name in row:
            return Request(index, where, (_user(row[name], name, where),))
    if "instruction" in row:
        (instruction,) = _user(row["instruction"], "instruction", where)
        more = row.get("input") or ""
        if not isinstance(more, str):
            raise InputError(f"{where}: input is {_short(more)}; expected text")
        text = f"{instruction['content']}\n\n{more}" if more.strip() else instruction["content"]
        return Request(index, where, (_user(text, "instruction", where),))
    if "text" in row:
        raise InputError(f"{where}: a plain text says nothing to answer; expected {FORMS}")
    keys = ", ".join(sorted(row)[:8]) or "none"
    raise InputError(f"{where}: no prompt in it (its keys: {keys}); expected {FORMS}")


def _split(messages: Messages, where: str, turns: str) -> tuple[Messages, ...]:
    """The messages before each answer that is to be written; what follows the last one that asks is left out."""
    asking = [n for n, message in enumerate(messages) if _asks(message)]
    if not asking:
        raise InputError(f"{where}: no message of a user in it, so there is nothing to answer")
    messages = messages[: asking[-1] + 1]
    if turns == "last":
        return (messages,)
    groups: list[list[Mapping[str, Any]]] = [[]]
    for message in messages:
        if message["role"] != "assistant" or message.get("tool_calls"):  # a call belongs to the result that follows
            groups[-1].append(message)
        elif any(map(_asks, groups[-1])):
            groups.append([])
        elif len(groups) == 1:  # a greeting before anybody asked
            groups[-1].append(message)
    return tuple(map(tuple, groups))


def _asks(message: Mapping[str, Any]) -> bool:
    return message["role"] not in ("assistant", "system", "developer")


def _user(text: Any, name: str, where: str) -> Messages:
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where}: {name} is {_short(text)}; expected text that is not empty")
    return ({"role": "user", "content": text},)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
