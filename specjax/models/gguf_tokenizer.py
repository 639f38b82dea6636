"""The tokenizer in a GGUF file's metadata, built again as a fast tokenizer."""

import os
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specjax.errors import CheckpointError
from specjax.models.gguf_file import GgufFile


def tokenizer_from_gguf(file: GgufFile) -> Any:
    """A `transformers` fast tokenizer, chat template included.

    Raises:
        CheckpointError: no tokenizer in the file, or a kind of tokenizer or pre-tokenizer that is not known.
    """
    key = _Keys(file)
    kind, tokens = key.need("ggml.model"), key.need("ggml.tokens")
    if kind == "gpt2":
        tokenizer = _byte_level(key, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(key, tokens)
    else:
        raise CheckpointError(f"{file.path}: unknown tokenizer model {kind!r}; expected gpt2 or llama")
    _add_tokens(tokenizer, key, tokens)

    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for name, short in names.items():
        index = key.get(f"ggml.{short}_token_id")
        if index is not None:
            if not 0 <= index < len(tokens):
                raise CheckpointError(
                    f"{file.path}: {short}_token_id is {index}; the vocabulary has {len(tokens)} tokens"
                )
            special[name] = tokens[index]
    # llama.cpp's defaults, for files that do not say
    add_bos = key.get("ggml.add_bos_token", kind == "llama" or key.get("ggml.pre") in _LLAMA3)
    add_eos = key.get("ggml.add_eos_token", False)
    front = [special["bos_token"]] if add_bos and "bos_token" in special else []
    back = [special["eos_token"]] if add_eos and "eos_token" in special else []
    if front or back:
        around = [(t, tokens.index(t)) for t in front + back]
        single, second = [*front, "$A", *back], [f"{t}:1" for t in [*front, "$B", *back]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(single), pair=" ".join([*single, *second]), special_tokens=around
        )
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=key.get("chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def import_transformers() -> Any:
    """The `transformers` package, imported late (it takes a second) and without its advice to install PyTorch, of
    which its tokenizers have no need.
    """
    quiet = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(quiet)
    os.environ[quiet] = "1"
    try:
        import transformers
    finally:
        if before is None:
            del os.environ[quiet]
        else:
            os.environ[quiet] = before
    return transformers


def byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of bytes as printable characters: byte -> character."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {b: chr(b) for b in printable}
    for b in range(256):
        if b not in alphabet:
            alphabet[b] = chr(256 + len(alphabet) - len(printable))
    return alphabet


def _byte_level(key: "_Keys", tokens: list[str]) -> Tokenizer:
    """Byte-level BPE (GPT-2, SmolLM, Llama 3, Qwen)."""
    pre = key.need("ggml.pre")
    merges = [tuple(m.split(" ", 1)) for m in key.need("ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = [m for m in merges if len(m) != 2 or m[0] not in vocab or m[1] not in vocab or m[0] + m[1] not in vocab]
    if unknown:
        raise CheckpointError(f"{key.path}: merge {' '.join(unknown[0])!r} is not made of tokens of the vocabulary")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _GPT2:
        tokenizer.pre_tokenizer = plain
    elif pre in _SMOLLM:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    elif pre in _SPLITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        known = ", ".join(sorted({*_GPT2, *_SMOLLM, *_SPLITS}))
        raise CheckpointError(
            f"{key.path}: unknown pre-tokenizer {pre!r} (tokenizer.ggml.pre); expected one of {known}"
        )
    if pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(key: "_Keys", tokens: list[str]) -> Tokenizer:
    """SentencePiece BPE (Llama 2, Mistral, Gemma): merges come back from the order of the pieces."""
    gemma = str(key.file.metadata.get("general.architecture")).startswith("gemma")
    # Gemma's files spell tokens of several spaces with real ones, and its scores do not follow the order of merging.
    pieces = ["▁" * len(t) if t and not t.strip(" ") and len(t) > 1 else t for t in tokens]
    scores = [-float(i) for i in range(len(tokens))] if gemma else key.need("ggml.scores")
    if len(scores) != len(tokens):
        raise CheckpointError(f"{key.path}: {len(scores)} token scores for {len(tokens)} tokens")
    vocab = {piece: i for i, piece in enumerate(pieces)}
    types = key.types(tokens)
    # Control tokens, bytes and the like are never the result of a merge.
    merged = [(-scores[i], piece) for i, piece in enumerate(pieces) if types[i] in (_NORMAL, _USER_DEFINED)]
    merged.sort(key=lambda pair: pair[0])
    merges = []
    for _, piece in merged:
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        pairs = [(a, b) for a, b in halves if a in vocab and b in vocab]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    unknown = key.get("ggml.unknown_token_id")
    byte_tokens = sum(t == _BYTE for t in types)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=byte_tokens == 256,
        )
    )
    prefix = key.get("ggml.add_space_prefix", not gemma)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


# llama.cpp's token types
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


def _add_tokens(tokenizer: Tokenizer, key: "_Keys", tokens: list[str]) -> None:
    """Tokens that are matched whole in the text: control tokens, which are special, and user-defined ones."""
    kinds = key.types(tokens)
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _UNKNOWN)]
    plain = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    # Gemma's runs of spaces have another spelling in the vocabulary by now; merges make those
    known = [t for t in plain if tokenizer.token_to_id(t) is not None]
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in known])


class _Keys:
    """The `tokenizer.` part of the metadata."""

    def __init__(self, file: GgufFile):
        self.file, self.path = file, file.path

    def get(self, name: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"tokenizer.{name}", default)

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise CheckpointError(f"{self.path}: missing metadata tokenizer.{name}; convert the model again")
        return value

    def types(self, tokens: list[str]) -> list[int]:
        types = self.get("ggml.token_type") or [_NORMAL] * len(tokens)
        if len(types) != len(tokens):
            raise CheckpointError(f"{self.path}: {len(types)} token types for {len(tokens)} tokens")
        return list(types)


_GPT2 = {"gpt-2", "default"}
_SMOLLM = {"smollm", "starcoder", "refact", "command-r"}
_LLAMA3 = {"llama-bpe", "llama3", "llama-v3"}
_QWEN2 = {"qwen2", "deepseek-r1-qwen"}

_SPLITS = {
    **dict.fromkeys(
        _LLAMA3,
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    **dict.fromkeys(
        _QWEN2,
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
