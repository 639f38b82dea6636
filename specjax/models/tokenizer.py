"""Text to token ids and back, from a Hugging Face directory or from the metadata of a GGUF file."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from specjax.errors import CheckpointError, InputError
from specjax.models.gguf_file import GgufFile
from specjax.models.gguf_tokenizer import byte_alphabet, import_transformers, tokenizer_from_gguf

Message = Mapping[str, Any]


class Tokenizer:
    """A fast tokenizer and its chat template.

    Attributes:
        backend: the `transformers` tokenizer underneath.
        source: where it came from, for error messages.
    """

    def __init__(self, backend: Any, source: str):
        self.backend = backend
        self.source = source

    def __repr__(self) -> str:
        return f"Tokenizer({self.source!r}, vocab_size={self.vocab_size})"

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer | None":
        """The tokenizer of a Hugging Face directory; None where the directory has none."""
        path = Path(path)
        transformers = import_transformers()
        try:
            if (path / "tokenizer.json").exists():
                # The file says everything; the class that tokenizer_config.json names may rebuild parts of it.
                backend = transformers.PreTrainedTokenizerFast.from_pretrained(str(path))
            elif any((path / name).exists() for name in ("tokenizer.model", "vocab.json", "tokenizer_config.json")):
                backend = transformers.AutoTokenizer.from_pretrained(str(path))
            else:
                return None
        except Exception as e:  # the libraries raise many types, down to a bare Exception for a damaged file
            raise CheckpointError(f"{path}: its tokenizer cannot be read ({_first_line(e)})") from None
        return cls(backend, str(path))

    @classmethod
    def from_gguf(cls, file: GgufFile) -> "Tokenizer":
        """The tokenizer that a GGUF file's metadata describe."""
        return cls(tokenizer_from_gguf(file), file.path)

    def encode(self, text: str) -> list[int]:
        """Raw text, with the special tokens that the tokenizer adds by itself (a BOS, for some models)."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **options: Any) -> list[int]:
        """Chat messages through the model's template, rendered once.

        The text is encoded without adding special tokens: the template writes those it wants, and a second BOS would
        be read as part of the text.
        """
        text = self.render_chat(messages, add_generation_prompt, **options)
        return self._encode(text, add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **options: Any) -> str:
        """The text that the chat template makes of messages."""
        bad = [m for m in messages if not (isinstance(m, Mapping) and "role" in m and "content" in m)]
        if bad or not messages:
            given = repr(bad[0]) if bad else "no messages"
            raise InputError(f"chat prompt: {given}; expected messages such as {{'role': 'user', 'content': 'Hello'}}")
        if not self.backend.chat_template:
            raise InputError(
                f"{self.source} has no chat template; give the prompt as a string or as token ids, not as messages"
            )
        options["add_generation_prompt"] = add_generation_prompt
        try:
            return str(self.backend.apply_chat_template([dict(m) for m in messages], tokenize=False, **options))
        except ImportError:
            raise InputError("chat templates need jinja2: python -m pip install jinja2") from None
        except Exception as e:  # whatever the template raises, e.g. about roles that do not alternate
            raise InputError(f"{self.source}: its chat template refused the messages: {_first_line(e)}") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Token ids to text, exactly: no clean-up of spaces."""
        return str(
            self.backend.decode(
                [int(i) for i in ids], skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. The model's vocabulary may be padded to a larger size."""
        return len(self._table)

    def tokens(self) -> list[str]:
        """How the tokenizer spells each id; "" where there is none."""
        return list(self._table)

    def token_bytes(self) -> list[bytes]:
        """The bytes that each id adds to the decoded text; b"" for special tokens and ids that have no token.

        A token may end inside a character. A space that a SentencePiece decoder strips from the very beginning of a
        text is included.
        """
        return self._bytes

    @cached_property
    def _bytes(self) -> list[bytes]:
        spell = _speller(json.loads(self.backend.backend_tokenizer.to_str())["decoder"], self.source)
        special = {i for i, added in self.backend.added_tokens_decoder.items() if added.special}
        return [b"" if i in special else spell(token) for i, token in enumerate(self._table)]

    @property
    def template_hash(self) -> str | None:
        """Sixteen hexadecimal digits that change with the chat template; None without one."""
        template = self.backend.chat_template
        if not template:
            return None
        return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Writes `tokenizer.json`, `tokenizer_config.json` and the chat template into a directory."""
        self.backend.save_pretrained(str(path))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except AttributeError:
            raise InputError(f"text is {type(text).__name__}; expected a string") from None
        except UnicodeEncodeError as error:
            raise InputError(f"text is not valid Unicode: a lone surrogate at character {error.start}") from None
        return [int(i) for i in self.backend.encode(text, add_special_tokens=add_special_tokens)]

    @cached_property
    def _table(self) -> list[str]:
        vocab = self.backend.get_vocab()
        table = [""] * (max(vocab.values(), default=-1) + 1)
        for token, i in vocab.items():
            table[i] = token
        return table


@lru_cache(maxsize=8)
def compare(a: Tokenizer, b: Tokenizer) -> int | None:
    """The first id at which two tokenizers differ; None when they agree.

    Ids that only pad the longer vocabulary are ignored: none at all, or placeholders such as `[PAD12]`.
    """
    first, second = _without_padding(a.tokens()), _without_padding(b.tokens())
    for i, (x, y) in enumerate(zip(first, second, strict=False)):
        if x != y:
            return i
    return None if len(first) == len(second) else min(len(first), len(second))


def vocabulary_hash(tokenizer: Tokenizer) -> str:
    """Sixteen hexadecimal digits that are the same for two tokenizers exactly where `compare` finds no difference."""
    tokens = _without_padding(tokenizer.tokens())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


_PADDING = re.compile(r"(\[PAD\d*\]|<pad\d+>|<unused\d+>)?")


def _without_padding(tokens: list[str]) -> list[str]:
    end = len(tokens)
    while end and _PADDING.fullmatch(tokens[end - 1]):
        end -= 1
    return tokens[:end]


def _speller(decoder: dict[str, Any] | None, source: str) -> Any:
    """Token spelling -> bytes, the way the decoder of a `tokenizers` file joins them."""
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder] if decoder else []
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        bytes_of = {char: byte for byte, char in byte_alphabet().items()}

        def byte_level(token: str) -> bytes:
            if all(c in bytes_of for c in token):
                return bytes(bytes_of[c] for c in token)
            return token.encode("utf-8")

        return byte_level
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:

        def sentencepiece(token: str) -> bytes:
            byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode("utf-8")

        return sentencepiece
    raise CheckpointError(f"{source}: decoder {' + '.join(sorted(kinds))} of the tokenizer is not supported")


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]
