"""A tokenizer for tests: 64 ids whose texts overlap, so that stop strings and characters span tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

_LETTERS = "abcdefghijklmnopqrstuvwxyz .,\n"
_PAIRS = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ab", "bc", "cd", "abc", "bcd", "the ", " a")
_BYTES = (b"\xc3", b"\xa9", b"\xa8", b"\xe2\x82", b"\xac", "é".encode(), "€".encode())
_WORDS = ("and", "ing", " to ", "  ", "ca", "zzz")


class TinyTokenizer:
    """Has what specjax asks of a tokenizer. Ids 0 to 3 are special: `<pad>`, `<bos>`, `<eos>`, `<turn>`.

    Greedy longest match on bytes; unknown bytes are left out. The methods are those of `models.tokenizer.Tokenizer`.
    """

    specials = ("<pad>", "<bos>", "<eos>", "<turn>")

    def __init__(self) -> None:
        texts = [*(c.encode() for c in _LETTERS), *(p.encode() for p in _PAIRS), *_BYTES, *(w.encode() for w in _WORDS)]
        self._bytes = [b""] * len(self.specials) + texts
        self._ids = {text: i for i, text in reversed(list(enumerate(self._bytes))) if text}
        self._longest = max(map(len, texts))

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            sizes = range(min(self._longest, len(data)), 0, -1)
            size = next((n for n in sizes if data[:n] in self._ids), 0)
            if size:
                ids.append(self._ids[data[:size]])
            data = data[max(size, 1) :]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        ids = [1]
        for message in messages:
            ids += [3, *self.encode(message["content"]), 2]
        return [*ids, 3] if add_generation_prompt else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = [self._bytes[i] if i >= len(self.specials) else self.specials[i].encode() for i in ids]
        kept = [b for i, b in zip(ids, shown, strict=True) if i >= len(self.specials) or not skip_special_tokens]
        return b"".join(kept).decode(errors="replace")

    def tokens(self) -> list[str]:
        return [*self.specials, *(b.decode("latin-1") for b in self._bytes[len(self.specials) :])]

    def token_bytes(self) -> list[bytes]:
        return list(self._bytes)

    @property
    def template_hash(self) -> str:
        return "tiny"
