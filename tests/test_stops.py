"""What ends a row: EOS ids, stop strings, the cap and the end of the context, wherever they fall in a block."""

from typing import Any

import numpy as np
import pytest

import specjax
from specjax import testing
from specjax.errors import InputError
from specjax.stops import byte_automaton, make_stops
from specjax.testing import Oracle, Replay

K = 16  # blocks of 17 tokens: the replayed text is accepted whole


def test_eos_at_every_offset_of_a_block(table: Any, table_text: Any, decode: Any) -> None:
    """Name tokens that plain decoding produced as EOS: the text ends there, the EOS included, as if decoded plainly."""
    offsets = set()
    for place in range(2 * K):
        eos = [table_text[place % 4][place]]
        target = testing.tiny_target(table.model, eos=eos, tokenizer=table.tokenizer)
        out = decode(target, Replay.of(table_text, K))
        for ids, why, text in zip(out.token_ids, out.finish_reasons, table_text, strict=True):
            assert ids == until(text, eos)
            assert why == ("stop" if set(eos) & set(text) else "length")
            offsets |= {(len(ids) - 1) % (K + 1)} if why == "stop" else set()
    assert offsets == set(range(K + 1))


def test_the_first_of_several_eos_ids_ends_a_row(table: Any, table_text: Any, decode: Any) -> None:
    eos = [table_text[i][12 - 3 * i] for i in range(4)]  # four fit without another compilation
    target = testing.tiny_target(table.model, eos=eos)
    for drafter in (None, Replay.of(table_text, K)):
        out = decode(target, drafter)
        assert out.token_ids == [until(text, eos) for text in table_text]


def test_stop_strings_that_span_tokens_and_blocks(table: Any, table_text: Any, decode: Any) -> None:
    """Windows of one to three tokens of a greedy text, and pieces of it that begin and end inside tokens.

    Ids end with the token that completes the string, text ends before it.
    """
    tokenizer, replay = table.tokenizer, Replay.of(table_text, K)
    strings = []
    for start in range(0, 22, 2):
        strings.append(tokenizer.decode(table_text[3][start : start + 1 + start // 2 % 3]))
    whole = tokenizer.decode(table_text[3])
    strings += [whole[i : i + 1 + i % 5] for i in range(1, 40, 4)]
    strings = [s for s in dict.fromkeys(strings) if s and "\ufffd" not in s]
    assert len(strings) > 10
    ends = set()
    for string in strings:
        out = decode(table, replay, stop=string)
        for text, ids, shown, why, logprobs in zip(
            table_text, out.token_ids, out.texts, out.finish_reasons, out.logprobs, strict=True
        ):
            number = completes(tokenizer, text, [string])
            assert ids == text[:number]
            assert len(logprobs) == len(ids)
            assert shown == tokenizer.decode(ids).split(string)[0]
            assert why == ("stop_string" if string.encode() in raw(tokenizer, ids) else "length")
        ends.add((len(out.token_ids[3]) - 1) % (K + 1))
    assert len(ends) > 5


def test_the_first_of_several_stop_strings_ends_a_row(table: Any, table_text: Any, decode: Any) -> None:
    tokenizer = table.tokenizer
    whole = [tokenizer.decode(text) for text in table_text]
    strings = [whole[0][10:12], whole[1][20:23], whole[2][5:6], "zzz"]
    out = decode(table, Replay.of(table_text, K), stop=strings)
    assert out.token_ids == [text[: completes(tokenizer, text, strings)] for text in table_text]


def test_a_stop_before_the_cap_wins_and_the_cap_before_a_stop(scripted: Any) -> None:
    """A block commits 10, 11, STOP, 20, 21, 22."""
    stop, text = 12, [10, 11, 12, 20, 21, 22, 23, 24]
    follows = dict(zip([9, *text], text, strict=False))
    for eos, cap, ids, why in (
        (stop, 5, [10, 11, stop], "stop"),
        (23, 5, [10, 11, stop, 20, 21], "length"),
        (21, 5, [10, 11, stop, 20, 21], "stop"),
        (22, 5, [10, 11, stop, 20, 21], "length"),
    ):
        target = scripted(follows, eos=[eos])
        for drafter in (None, Oracle(5)):
            out = specjax.generate(target, [[9]], drafter=drafter, max_new_tokens=cap)
            assert (out.token_ids, out.finish_reasons) == ([ids], [why])
        assert out.stats.target_calls == 1


def test_a_cap_anywhere_in_a_block(table: Any, table_text: Any, prompts: Any) -> None:
    replay = Replay.of(table_text, K)
    for cap in (1, 2, 3, 16, 17, 18, 34, 35):
        out = specjax.generate(table, prompts, drafter=replay, max_new_tokens=cap)
        assert out.token_ids == [text[:cap] for text in table_text]
        assert out.finish_reasons == ["length"] * 4
        assert out.stats.target_calls == 4 * -(-cap // (K + 1))
        assert out.stats.proposed == out.stats.accepted == 4 * (cap - -(-cap // (K + 1)))


def test_drafts_are_never_longer_than_what_is_left(scripted: Any) -> None:
    """A history that repeats, with two slots left: one proposal at most, none beyond the cap."""
    target = scripted({1: 2, 2: 3, 3: 1})
    out = specjax.generate(target, [[1, 2, 3] * 4], drafter=specjax.PromptLookup(4, min_ngram=1), max_new_tokens=2)
    assert out.token_ids == [[1, 2]]
    assert (out.stats.target_calls, out.stats.proposed, out.stats.accepted) == (1, 1, 1)


def test_the_end_of_the_context(table: Any) -> None:
    """The same text as with more room, ending where the context does; a prompt that leaves no room is refused."""
    prompt = [1, 2, 3, 4] * 3
    small = testing.tiny_target(testing.TableModel(table.model.table, max_positions=16))
    wide = specjax.generate(table, [prompt], max_new_tokens=20)
    for asked, given, why in ((20, 4, "context"), (4, 4, "length"), (3, 3, "length")):
        out = specjax.generate(small, [prompt], drafter=Oracle(4), max_new_tokens=asked)
        assert out.token_ids == [wide.token_ids[0][:given]]
        assert out.finish_reasons == [why]
    for length in (16, 20):
        with pytest.raises(InputError, match=rf"prompt 0 has {length} tokens, but the context of 16"):
            specjax.generate(small, [[1] * length])


def test_stop_strings_need_a_tokenizer(tiny: Any) -> None:
    with pytest.raises(InputError, match="tokenizer"):
        specjax.generate(testing.tiny_target(tiny.model), [[1]], stop="x")
    with pytest.raises(InputError, match="non-empty"):
        specjax.generate(tiny, [[1]], stop=["x", ""])


def test_byte_automaton_finds_what_a_search_finds() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        strings = ["".join(random.choice(list("ab"), random.integers(1, 5))).encode() for _ in range(3)]
        text = "".join(random.choice(list("ab"), 20)).encode()
        table, state, end = byte_automaton(strings), 0, None
        for i, byte in enumerate(text):
            state = int(table[state, byte])
            if state < 0:
                end = i + 1
                break
        expected = min((text.find(s) + len(s) for s in strings if s in text), default=None)
        assert end == expected


def test_another_stop_string_has_the_same_shapes() -> None:
    tokenizer = testing.TinyTokenizer()
    tables = [make_stops([2], strings, tokenizer.token_bytes(), 64).table for strings in (["a"], ["the end", "bcd"])]
    assert tables[0].shape == tables[1].shape


def until(text: list[int], eos: list[int]) -> list[int]:
    """A text up to its first EOS, included."""
    return text[: min((text.index(e) + 1 for e in eos if e in text), default=len(text))]


def raw(tokenizer: Any, ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes()[i] for i in ids)


def completes(tokenizer: Any, text: list[int], strings: list[str]) -> int:
    """How many tokens it takes until one of the strings is complete."""
    for number in range(1, len(text) + 1):
        if any(s.encode() in raw(tokenizer, text[:number]) for s in strings):
            return number
    return len(text)
