"""Prompts: JSON lines in the form of MT-bench and Spec-Bench, with `question_id`, `category` and `turns`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax import InputError, Target

OUR_PROMPTS = Path(__file__).resolve().parent.parent / "prompts.jsonl"
FORM = '{"question_id": 1, "category": "code", "turns": ["first user message", …]}'


@dataclass(frozen=True)
class Conversation:
    """What a user says, turn by turn.

    Attributes:
        index: place in the file, from 0; a prompt's random numbers come from it.
        task: the row's category; the file's name where that is empty.
        question_id: as in the file.
        turns: the user's messages.
        history: earlier messages and answers, which come before the first turn.
    """

    index: int
    task: str
    question_id: int | str
    turns: tuple[str, ...]
    history: tuple[tuple[str, str], ...] = ()


def read_prompts(path: Path | None = None, tasks: Sequence[str] = (), limit: int | None = None) -> list[Conversation]:
    """The conversations of a JSONL file, in its order.

    Args:
        path: None for our own tasks.
        tasks: only these; none given: all of them.
        limit: at most so many of each task.

    Raises:
        InputError: naming file and line.
    """
    path = OUR_PROMPTS if path is None else path
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text ({getattr(error, 'strerror', None) or error})") from None
    rows = [_read_row(f"{path}, line {n + 1}", line) for n, line in enumerate(lines) if line.strip()]
    if not rows:
        raise InputError(f"{path}: no prompts in it; expected lines like {FORM}")
    everything = [
        Conversation(i, row["category"] or path.stem, row["question_id"], tuple(row["turns"]))
        for i, row in enumerate(rows)
    ]
    names = list(dict.fromkeys(c.task for c in everything))
    for task in tasks:
        if task not in names:
            raise InputError(f"unknown task {task!r}: {path.name} has {', '.join(names)}")
    kept = []
    for task in names:
        if not tasks or task in tasks:
            kept += [c for c in everything if c.task == task][:limit]
    return kept


def messages(conversation: Conversation, answers: Sequence[str] = ()) -> list[dict[str, str]]:
    """The chat up to the turn after the last answer."""
    chat = []
    for user, answer in (*conversation.history, *zip(conversation.turns, answers, strict=False)):
        chat += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return [*chat, {"role": "user", "content": conversation.turns[len(answers)]}]


def prompt_ids(target: Target, conversation: Conversation, answers: Sequence[str] = ()) -> list[int]:
    """The chat as token ids, through the target's template. Raises InputError for a target without a tokenizer."""
    if target.tokenizer is None:
        raise InputError(f"{target.name}: this target has no tokenizer, and prompts are text")
    return target.tokenizer.encode_chat(messages(conversation, answers))


def _read_row(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error}); expected {FORM}") from None
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected an object like {FORM}, got {type(row).__name__}")
    for field, kinds in (("question_id", (int, str)), ("category", (str,)), ("turns", (list,))):
        if not isinstance(row.get(field), kinds):
            given = repr(row[field]) if field in row else "missing"
            raise InputError(f"{where}: {field} is {given}; expected {FORM}")
    if not row["turns"] or not all(isinstance(turn, str) and turn for turn in row["turns"]):
        raise InputError(f"{where}: turns must be a list of one or more non-empty strings")
    return row
