"""Tokenizers out of GGUF metadata and Hugging Face directories, their bytes, chat templates, and comparing two."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast
from transformers import AutoTokenizer

from specjax.errors import CheckpointError, InputError
from specjax.models.gguf_file import GgufFile
from specjax.models.tokenizer import Tokenizer, compare

Vocabulary = Callable[..., dict[str, Any]]

TEXT = """The refrigerator keeps the food cold: 12 degrees, 12345 times a day, 12 12 12, isn't it? They'll say it's so.
def f(x):
    return x ** 2 + 1024  # the square, then more
Grüße aus Köln! 日本語のテキスト 🎉🎉   and    spaces\n\n\n\tand tabs. I'M HERE, WE'RE NOT. "quoted" <tag> 3.14159
"""
SPECIAL = ["<|end|>", "<|start|>"]
SPLITS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
BYTE_LEVEL = ["gpt-2", "smollm", "llama-bpe", "qwen2"]


def byte_level(pre: str, vocab_size: int = 420) -> Fast:
    """A trained byte-level tokenizer, with the pre-tokenizer that the family's tokenizer.json has."""
    tokenizer = Fast(models.BPE(ignore_merges=pre == "llama-bpe"))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    elif pre in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    else:
        tokenizer.pre_tokenizer = plain
    tokenizer.decoder = decoders.ByteLevel()
    # the merges are learned with digits and words together, so that only the pre-tokenizer keeps them apart
    learn = Fast(models.BPE())
    learn.pre_tokenizer = plain
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learn.train_from_iterator(
        [TEXT] * 3,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    parsed = json.loads(learn.to_str())["model"]
    merges = [tuple(pair) for pair in parsed["merges"]]
    tokenizer.model = models.BPE(vocab=parsed["vocab"], merges=merges, ignore_merges=pre == "llama-bpe")
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def from_metadata(metadata: dict[str, Any], arch: str = "llama") -> Tokenizer:
    return Tokenizer.from_gguf(GgufFile("model.gguf", metadata | {"general.architecture": arch}, {}, memoryview(b"")))


@pytest.fixture(params=BYTE_LEVEL)
def pair(request: pytest.FixtureRequest, vocabulary: Vocabulary) -> tuple[Tokenizer, Fast]:
    reference = byte_level(request.param)
    ids = {"eos_token_id": 0, "bos_token_id": 1, "add_bos_token": False}
    return from_metadata(vocabulary(reference, "gpt2", request.param, len(SPECIAL), **ids)), reference


def test_byte_level_as_the_original(pair: tuple[Tokenizer, Fast]) -> None:
    ours, reference = pair
    for text in [TEXT, "<|start|>a 1234<|end|>", " 007", "", "don't", *TEXT.split("\n")]:
        assert ours.encode(text) == reference.encode(text).ids
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert ours.vocab_size == reference.get_vocab_size()
    assert ours.decode(ours.encode("<|start|>a<|end|>")) == "a"


def test_digits_of_smollm_stay_apart(vocabulary: Vocabulary) -> None:
    together, apart = (from_metadata(vocabulary(byte_level(pre), "gpt2", pre, 2)) for pre in ("gpt-2", "smollm"))
    assert len(together.encode(" 12")) == 1
    assert len(apart.encode(" 12")) == 3


def test_bytes_join_to_the_text(pair: tuple[Tokenizer, Fast]) -> None:
    """Any ids at all, so also characters cut in half."""
    tokenizer, _ = pair
    table = tokenizer.token_bytes()
    assert len(table) == tokenizer.vocab_size
    assert table[0] == table[1] == b""
    rng = np.random.default_rng(0)
    for _ in range(200):
        ids = rng.integers(0, tokenizer.vocab_size, 12).tolist()
        assert b"".join(table[i] for i in ids).decode("utf-8", "replace") == tokenizer.decode(ids)


def test_saved_as_a_hugging_face_directory(pair: tuple[Tokenizer, Fast], tmp_path: Path) -> None:
    tokenizer, _ = pair
    tokenizer.save(tmp_path)
    again = Tokenizer.from_directory(tmp_path)
    assert again is not None
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode(TEXT) == again.encode(TEXT) == theirs.encode(TEXT)
    assert compare(tokenizer, again) is None
    assert again.template_hash is None
    assert again.token_bytes() == tokenizer.token_bytes()


def test_no_tokenizer_in_the_directory(tmp_path: Path) -> None:
    assert Tokenizer.from_directory(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.from_directory(tmp_path)


def test_decoding_keeps_spaces(pair: tuple[Tokenizer, Fast]) -> None:
    tokenizer, _ = pair
    text = "a , b . do n't  !"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_beginning_and_end_tokens(vocabulary: Vocabulary) -> None:
    reference, ids = byte_level("llama-bpe"), {"eos_token_id": 0, "bos_token_id": 1}
    plain = reference.encode("a b").ids
    for flags, expected in [
        ({}, [1, *plain]),  # llama.cpp's default for this pre-tokenizer
        ({"add_bos_token": False}, plain),
        ({"add_bos_token": True, "add_eos_token": True}, [1, *plain, 0]),
    ]:
        tokenizer = from_metadata(vocabulary(reference, "gpt2", "llama-bpe", 2, **ids, **flags))
        assert tokenizer.encode("a b") == expected


def test_user_defined_tokens_stay_whole(vocabulary: Vocabulary) -> None:
    metadata = vocabulary(byte_level("qwen2"), "gpt2", "qwen2", 2)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<think>", "[PAD421]"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4, 5]
    tokenizer = from_metadata(metadata)
    last = tokenizer.vocab_size - 2
    assert tokenizer.encode("a<think>b")[1] == last
    assert tokenizer.decode([last]) == "<think>"  # not special: it is text
    assert tokenizer.token_bytes()[last] == b"<think>"


SPM_SPECIAL = ["<unk>", "<s>", "</s>"]


def sentencepiece(prefix: bool = True) -> Fast:
    """A trained tokenizer of Llama 2's shape: byte fallback, spaces as ▁."""
    tokenizer = Fast(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    pieces = [f"<0x{b:02X}>" for b in range(256)]
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    text = TEXT.encode("ascii", "ignore").decode()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=[*SPM_SPECIAL, *pieces], show_progress=False)
    tokenizer.train_from_iterator([text] * 3, trainer)
    return tokenizer


def merge_by_score(pieces: dict[str, float], text: str) -> list[str]:
    """SentencePiece's own rule: join the two neighbours that make the piece of the best score, the first such two."""
    parts = list(text)
    while True:
        joined = [(pieces.get(a + b, -np.inf), -i) for i, (a, b) in enumerate(pairwise(parts))]
        best, at = max(joined, default=(-np.inf, 0))
        if best == -np.inf:
            return parts
        parts[-at : -at + 2] = [parts[-at] + parts[-at + 1]]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_by_its_own_rule(prefix: bool, vocabulary: Vocabulary) -> None:
    reference = sentencepiece(prefix)
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "add_space_prefix": prefix}
    tokenizer = from_metadata(vocabulary(reference, "llama", "default", len(SPM_SPECIAL), **ids))
    tokens = tokenizer.tokens()
    pieces = {t: -float(i) for i, t in enumerate(tokens) if i >= len(SPM_SPECIAL) + 256}
    for text in ["The refrigerator keeps it cold, 12 degrees", "  the food  so", "f(x) ** 2"]:
        expected = merge_by_score(pieces, ("▁" if prefix else "") + text.replace(" ", "▁"))
        assert [tokens[i] for i in tokenizer.encode(text)] == ["<s>", *expected]  # llama.cpp's default: with BOS
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("Köln 日本 🎉")) == "Köln 日本 🎉"  # through bytes
    assert "<0xE6>" in [tokens[i] for i in tokenizer.encode("日")]


def test_sentencepiece_bytes_join_to_the_text(vocabulary: Vocabulary) -> None:
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    tokenizer = from_metadata(vocabulary(sentencepiece(), "llama", "default", len(SPM_SPECIAL), **ids))
    table = tokenizer.token_bytes()
    text = "Köln is 12 degrees cold 日本語 🎉, the refrigerator isn't"
    joined = b"".join(table[i] for i in tokenizer.encode(text))
    assert joined == b" " + text.encode()
    assert table[:3] == [b"", b"", b""]
    rng = np.random.default_rng(0)
    for _ in range(100):  # without lone bytes, each of which the decoder shows as its own replacement character
        drawn = rng.integers(len(SPM_SPECIAL) + 256, tokenizer.vocab_size, 12).tolist()
        assert b"".join(table[i] for i in drawn).decode().removeprefix(" ") == tokenizer.decode(drawn)


def test_gemma_takes_the_order_of_its_pieces(vocabulary: Vocabulary) -> None:
    """Its scores do not follow the order of merging, its runs of spaces are spelled with spaces, it adds no prefix."""
    reference = sentencepiece(prefix=False)
    metadata = vocabulary(reference, "llama", "default", 3, unknown_token_id=0, bos_token_id=1, eos_token_id=2)
    scores = np.random.default_rng(0).normal(size=len(metadata["tokenizer.ggml.tokens"]))
    metadata["tokenizer.ggml.scores"] = scores.tolist()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "  "]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4]
    tokenizer = from_metadata(metadata, "gemma3")
    tokens = tokenizer.tokens()
    assert tokens[-1] == "▁▁"
    pieces = {t: -float(i) for i, t in enumerate(tokens) if i >= len(SPM_SPECIAL) + 256}
    text = "The refrigerator keeps it cold   "
    expected = merge_by_score(pieces, text.replace(" ", "▁"))
    assert "▁▁" in expected
    assert [tokens[i] for i in tokenizer.encode(text)][1:] == expected
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model": "wordpiece"}, "wordpiece"),
        ({"pre": "never-heard-of"}, "never-heard-of"),
        ({"pre": None}, "tokenizer.ggml.pre"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"merges": ["zzz qqq"]}, "zzz qqq"),
        ({"token_type": [1, 1]}, "2 token types"),
        ({"eos_token_id": 5000}, "5000"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
    ],
)
def test_unusable_metadata(changes: dict[str, Any], part: str, vocabulary: Vocabulary) -> None:
    metadata = vocabulary(byte_level("gpt-2"), "gpt2", "gpt-2", 2)
    metadata |= {f"tokenizer.ggml.{k}": v for k, v in changes.items()}
    with pytest.raises(CheckpointError, match=r"model\.gguf") as caught:
        from_metadata({k: v for k, v in metadata.items() if v is not None})
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


CHAT = [{"role": "user", "content": "the day"}]
WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
WITHOUT_BOS = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
PROMPTED = "{{ messages[0].content }}{% if add_generation_prompt %}!{% endif %}{% if thinking %}?{% endif %}"


@pytest.fixture
def chat(vocabulary: Vocabulary) -> Callable[[str | None], Tokenizer]:
    """A tokenizer that adds a BOS to raw text, with a chat template."""
    ids = {"eos_token_id": 0, "bos_token_id": 1, "add_bos_token": True}

    def make(template: str | None) -> Tokenizer:
        metadata = vocabulary(byte_level("gpt-2"), "gpt2", "gpt-2", 2, **ids)
        return from_metadata(metadata | ({"tokenizer.chat_template": template} if template else {}))

    return make


def test_chat_template_is_rendered_once(chat: Callable[[str | None], Tokenizer]) -> None:
    with_bos, without = chat(WITH_BOS), chat(WITHOUT_BOS)
    ids = with_bos.encode_chat(CHAT)
    assert ids.count(1) == 1
    assert ids[0] == 1
    assert with_bos.decode(ids) == "user: the day\n"
    # the template decides: one that writes no BOS gets none
    assert without.encode_chat(CHAT) == [*without.encode("user: the day")[1:], 0]
    assert with_bos.template_hash != without.template_hash


def test_chat_options(chat: Callable[[str | None], Tokenizer]) -> None:
    tokenizer = chat(PROMPTED)
    assert tokenizer.decode(tokenizer.encode_chat(CHAT)) == "the day!"
    assert tokenizer.decode(tokenizer.encode_chat(CHAT, add_generation_prompt=False)) == "the day"
    assert tokenizer.decode(tokenizer.encode_chat(CHAT, thinking=True)) == "the day!?"


def test_chat_errors(chat: Callable[[str | None], Tokenizer]) -> None:
    def refused(tokenizer: Tokenizer, messages: Any, part: str) -> None:
        with pytest.raises(InputError) as caught:
            tokenizer.encode_chat(messages)
        assert part in str(caught.value)
        assert "\n" not in str(caught.value)

    refused(chat(None), CHAT, "no chat template")
    refused(chat(STRICT), [{"role": "system", "content": "x"}], "roles must alternate")
    refused(chat(WITH_BOS), [], "no messages")
    refused(chat(WITH_BOS), [{"role": "user"}], "'content'")
    refused(chat(WITH_BOS), ["hello"], "hello")
    refused(chat("{% if %}"), CHAT, "chat template")


def test_text_errors(chat: Callable[[str | None], Tokenizer]) -> None:
    with pytest.raises(InputError, match="surrogate at character 1"):
        chat(None).encode("a\ud83d")
    with pytest.raises(InputError, match="int"):
        chat(None).encode(5)  # type: ignore[arg-type]


def test_compare(vocabulary: Vocabulary) -> None:
    metadata = vocabulary(byte_level("qwen2"), "gpt2", "qwen2", 2)
    tokens = metadata["tokenizer.ggml.tokens"]

    def variant(changed: list[str]) -> Tokenizer:
        types = (metadata["tokenizer.ggml.token_type"] + [1] * 10)[: len(changed)]
        return from_metadata(metadata | {"tokenizer.ggml.tokens": changed, "tokenizer.ggml.token_type": types})

    original = variant(tokens)
    swapped = [*tokens[:5], tokens[6], tokens[5], *tokens[7:]]
    assert compare(original, variant(tokens)) is None
    assert compare(original, variant(swapped)) == compare(variant(swapped), original) == 5
    padded = variant([*tokens, "[PAD420]", "[PAD421]"])
    assert padded.vocab_size == len(tokens) + 2
    assert compare(original, padded) is None
    assert compare(padded, original) is None
    more = variant([*tokens, "[PAD420]", "word"])
    assert compare(original, more) == len(tokens)
