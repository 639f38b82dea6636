"""From token ids to the text a user sees: cut before stop strings, and in a stream, only what is certain.

Text is put together from the bytes of the tokens, the alphabet in which stop strings are found, so that both agree on
where a string begins.
"""

import codecs
from collections.abc import Sequence

from specjax.models.tokenizer import Tokenizer


def final_text(tokenizer: Tokenizer | None, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """The text of `ids`, up to the first of the strings `stop`; "" without a tokenizer."""
    raw = _spell(tokenizer, ids)
    found = [at for at in (raw.find(s.encode()) for s in stop) if at >= 0]
    return _show(tokenizer, ids, raw[: min(found)] if found else raw).decode("utf-8", "replace")


def certain_text(tokenizer: Tokenizer | None, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """The text so far, without what later tokens may change: the part of a character, the start of a stop string."""
    raw = _show(tokenizer, ids, _spell(tokenizer, ids))
    strings = [s.encode() for s in stop]
    held = max((n for s in strings for n in range(1, len(s)) if raw.endswith(s[:n])), default=0)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw[: len(raw) - held])


def _spell(tokenizer: Tokenizer | None, ids: Sequence[int]) -> bytes:
    if tokenizer is None:
        return b""
    table = tokenizer.token_bytes()
    return b"".join(table[i] for i in ids if i < len(table))


def _show(tokenizer: Tokenizer | None, ids: Sequence[int], raw: bytes) -> bytes:
    """Without the one space that a SentencePiece decoder takes from the very beginning of a text."""
    if tokenizer is None or not raw.startswith(b" "):
        return raw
    first = next(i for i in ids if tokenizer.token_bytes()[i])
    return raw if tokenizer.decode([first]).startswith(" ") else raw[1:]
