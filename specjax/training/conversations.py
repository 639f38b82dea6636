"""Reading conversations: JSON lines or JSON arrays, plain or gzipped, in the forms that data sets commonly have."""

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specjax.errors import InputError

FORMS = (
    '{"messages": [{"role": "user", "content": "…"}, …]}, {"conversations": [{"from": "human", "value": "…"}, …]}, '
    '{"text": "…"} or {"prompt_ids": […], "token_ids": […]}'
)
# who speaks in ShareGPT files
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
# `finish` or `finish_reason` of answers that were cut before the model ended its turn
UNFINISHED = ("length", "context", "stop_string")


@dataclass(frozen=True)
class Conversation:
    """One row of a file. Exactly one of `messages`, `text` and `token_ids` says what it is.

    Attributes:
        where: file and line, for error messages.
        messages: role and content, turn by turn; whatever else a message of the `messages` form has is kept, because
            the template may read it.
        text: plain text, all of it to be learned.
        prompt_ids, token_ids: ids as a target saw and wrote them; they are never rendered again.
        finished: False where the last answer was cut before the model ended its turn.
        tools: what the template is told about tools.
    """

    where: str
    messages: tuple[Mapping[str, Any], ...] | None = None
    text: str | None = None
    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] | None = None
    finished: bool = True
    tools: Sequence[Any] | None = field(default=None, repr=False)


def read_conversations(*paths: str | Path) -> list[Conversation]:
    """The conversations of files, in their order.

    A path is a file of JSON lines or one JSON array of rows, gzipped or not, or a directory, which stands for the
    `.jsonl` and `.jsonl.gz` files in it, by name. A row has one of these forms; where several fit, the first counts:

    - `token_ids`, with `prompt_ids`: ids of a generation, taken as they are;
    - `messages` with `role` and `content`;
    - `conversations` with `from` and `value` (ShareGPT), or with `role` and `content`;
    - `text`.

    `"finish": "length"` (or `finish_reason`) in a row says that its last answer was cut; `tools` go to the template.

    Raises:
        InputError: a file that cannot be read or has no rows; a row that has no such form, naming file and line.
    """
    conversations = []
    for path in paths:
        files = files_of(Path(path))
        found = [conversation for file in files for conversation in _read_file(file)]
        if not found:
            raise InputError(f"{path}: no conversations in it; expected rows like {FORMS}")
        conversations += found
    return conversations


def parse_row(row: Any, where: str) -> Conversation:
    """One row, already decoded from JSON.

    Raises:
        InputError: beginning with `where`.
    """
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected an object, got {type(row).__name__}; rows look like {FORMS}")
    finish = row.get("finish", row.get("finish_reason"))
    if finish is not None and not isinstance(finish, str):
        raise InputError(f"{where}: finish is {finish!r}; expected a string such as 'stop' or 'length'")
    finished = finish not in UNFINISHED
    if "token_ids" in row:
        if "prompt_ids" not in row:
            raise InputError(
                f"{where}: token_ids without prompt_ids; what the model wrote must be told from its prompt"
            )
        prompt, tokens = (_ids(row[name], name, where) for name in ("prompt_ids", "token_ids"))
        return Conversation(where, prompt_ids=prompt, token_ids=tokens, finished=finished)
    for name in ("messages", "conversations"):
        if name in row:
            tools = row.get("tools")
            if tools is not None and not isinstance(tools, list):
                raise InputError(f"{where}: tools is {type(tools).__name__}; expected a list")
            return Conversation(where, _messages(row[name], name, where), finished=finished, tools=tools or None)
    if "text" in row:
        if not isinstance(row["text"], str) or not row["text"]:
            raise InputError(f"{where}: text is {row['text']!r}; expected a string that is not empty")
        return Conversation(where, text=row["text"])
    keys = ", ".join(sorted(row)[:8]) or "none"
    raise InputError(f"{where}: no conversation in it (its keys: {keys}); expected {FORMS}")


def _messages(value: Any, name: str, where: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: {name} is {_short(value)}; expected a list of one or more messages")
    return tuple(_message(message, f"{where}: message {n + 1}") for n, message in enumerate(value))


def _message(message: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(message, dict):
        raise InputError(f"{where} is {_short(message)}; expected an object such as {{'role': 'user', 'content': '…'}}")
    if "role" in message and "content" in message:
        if not isinstance(message["role"], str):
            raise InputError(f"{where} has role {message['role']!r}; expected a string")
        called = message["content"] is None and message.get("tool_calls")
        return message if called else message | {"content": _content(message["content"], where)}
    if "from" in message and "value" in message:
        if message["from"] not in ROLES:
            raise InputError(f"{where} is from {message['from']!r}; expected one of {', '.join(ROLES)}")
        return {"role": ROLES[message["from"]], "content": _content(message["value"], where)}
    keys = ", ".join(message) or "none"
    raise InputError(f"{where} has the keys {keys}; expected role and content, or from and value")


def _content(value: Any, where: str) -> str:
    """Text, or a list of text parts as in OpenAI's form."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "".join(part["text"] for part in value)
    raise InputError(f"{where} has the content {_short(value)}; expected text")


def _ids(value: Any, name: str, where: str) -> tuple[int, ...]:
    if isinstance(value, list) and all(type(i) is int and i >= 0 for i in value):
        return tuple(value)
    raise InputError(f"{where}: {name} is {_short(value)}; expected a list of token ids")


def files_of(path: Path) -> list[Path]:
    """A file, or the `.jsonl` and `.jsonl.gz` files of a directory, by name."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith((".jsonl", ".jsonl.gz")))
    if not files:
        raise InputError(f"{path}: no .jsonl or .jsonl.gz files in this directory")
    return files


def _read_file(path: Path) -> list[Conversation]:
    return [parse_row(row, where) for where, row in read_rows(path, FORMS)]


def read_rows(path: Path, forms: str) -> list[tuple[str, Any]]:
    """The rows of one file, decoded from JSON, each with where it stands.

    Args:
        forms: what rows look like, for error messages.

    Raises:
        InputError: a file that cannot be read or decoded.
    """
    try:
        data = path.read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    data = data.removeprefix(b"\xef\xbb\xbf")
    if data.lstrip()[:1] == b"[":
        rows = _json(data, str(path), forms, many_lines=True)
        return [(f"{path}, row {n + 1}", row) for n, row in enumerate(rows)]
    found = []
    for n, line in enumerate(data.split(b"\n")):
        if line.strip():
            where = f"{path}, line {n + 1}"
            found.append((where, _json(line, where, forms)))
    return found


def _json(data: bytes, where: str, forms: str, many_lines: bool = False) -> Any:
    """Decoded JSON; of a text of many lines, an error names the line."""
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line, problem = data.count(b"\n", 0, error.start) + 1, f"not valid UTF-8 (at byte {error.start})"
    except json.JSONDecodeError as error:
        line, problem = error.lineno, f"not JSON ({error.msg} at column {error.colno}); expected {forms}"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or nesting as deep
        raise InputError(f"{where}: cannot be read as JSON ({error})") from None
    raise InputError(f"{where}{f', line {line}' if many_lines else ''}: {problem}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
