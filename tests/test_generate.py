"""`generate` and `stream`: seeds, settings a row, penalties and processors, log-probabilities, counts, errors."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import testing
from specjax.errors import InputError, SpecjaxError
from specjax.sampling import Sampling
from specjax.testing import Adversarial, Oracle, Replay, TableTree

DRAWN = Sampling(temperature=0.9, top_p=0.95)
LOOKUP = specjax.PromptLookup(8, max_ngram=3, min_ngram=1, block_sizes=(5, 9))


@pytest.mark.parametrize("drafter", [None, LOOKUP], ids=["plain", "lookup"])
def test_a_seed_per_prompt_makes_rows_independent(drafter: Any, table: Any, prompts: Any, decode: Any) -> None:
    """Same seed, same output, whatever shares the batch and wherever in it the row stands."""

    def texts(prompts: Any, seed: Any) -> list[list[int]]:
        return decode(table, drafter, prompts, sampling=DRAWN, seed=seed).token_ids

    together = texts(prompts, [11, 12, 13, 14])
    assert together == texts(prompts, [11, 12, 13, 14])
    assert texts(prompts[::-1], [14, 13, 12, 11]) == together[::-1]
    assert texts([prompts[0], [1], [2, 2], prompts[3]], [11, 5, 6, 7])[0] == together[0]
    same = texts([prompts[3]] * 4, [1, 1, 2, 3])
    assert same[0] == same[1]
    assert len({tuple(t) for t in same}) == 3


def test_one_seed_gives_each_row_its_own_stream(table: Any, prompts: Any, decode: Any) -> None:
    def texts(seed: int, rows: int = 4) -> list[list[int]]:
        return decode(table, None, [prompts[3]] * rows, sampling=DRAWN, seed=seed).token_ids

    assert len({tuple(t) for t in texts(3)}) == 4
    assert texts(3) == texts(3)
    assert texts(3) != texts(4)
    # row i takes stream i, so a shorter batch gives the same
    assert texts(3, rows=1) == texts(3)[:1]


def test_settings_a_row(table: Any, table_text: Any, decode: Any) -> None:
    """Rows with temperature 0 are greedy, and each drawn row is as it would be if all rows had its settings."""

    def texts(**sampling: Any) -> list[list[int]]:
        return decode(table, LOOKUP, sampling=Sampling(**sampling), seed=[1, 2, 3, 4]).token_ids

    mixed = texts(temperature=[0, 0.7, 0, 1.3], top_p=[1, 0.9, 0.5, 0.8])
    assert [mixed[0], mixed[2]] == [table_text[0], table_text[2]]
    for row, (temperature, top_p) in {1: (0.7, 0.9), 3: (1.3, 0.8)}.items():
        alone = texts(temperature=temperature, top_p=top_p)
        assert mixed[row] == alone[row]
        assert mixed[row] != table_text[row]


def test_stream_is_generate_in_pieces(table: Any, table_text: Any, prompts: Any, decode: Any) -> None:
    """Tokens, reasons and text, with stop strings held back and characters that span tokens."""
    whole = table.tokenizer.decode(table_text[3])
    stop = (whole[40:43], whole[12:13] + "zzzz")
    out = decode(table, LOOKUP, stop=stop)
    assert set(out.finish_reasons) == {"length", "stop_string"}
    ids, shown, reasons = [[] for _ in prompts], [""] * 4, [None] * 4
    for piece in specjax.stream(table, prompts, drafter=LOOKUP, max_new_tokens=200, stop=stop):
        assert reasons[piece.row] is None
        assert piece.token_ids
        ids[piece.row] += piece.token_ids
        shown[piece.row] += piece.text
        reasons[piece.row] = piece.finish_reason
    assert (ids, shown, reasons) == (out.token_ids, out.texts, out.finish_reasons)


def test_a_state_can_be_read_at_any_time(table: Any, prompts: Any, decode: Any) -> None:
    """The beginning of the text while it runs, and in the end what `generate` returns, but for the times."""
    out = decode(table, LOOKUP, trace=True)
    job = specjax.prepare(table, prompts, LOOKUP, max_new_tokens=200, logprobs=True, trace=True)
    state, _ = job.step(job.prefill())
    early = specjax.read(job, state)
    assert set(early.finish_reasons) == {"running"}
    for tokens, all_tokens, text, all_text in zip(early.token_ids, out.token_ids, early.texts, out.texts, strict=True):
        assert tokens == all_tokens[: len(tokens)] and tokens
        assert all_text.startswith(text)
    found = specjax.read(job, job.run(state))
    same = {"prefill_seconds": 0.0, "seconds": 0.0}
    assert replace(found, **same) == replace(out, **same)
    assert len(repr(job)) < 200 and "prompt-lookup" in repr(job)


def test_characters_that_span_tokens_come_whole(scripted: Any) -> None:
    """Half a character is never shown; text that is no character at all comes out with the end."""
    tokenizer = testing.TinyTokenizer()
    euro = [tokenizer.token_bytes().index(b) for b in (b"\xe2\x82", b"\xac")]
    a, lone = tokenizer.encode("x")[0], tokenizer.token_bytes().index(b"\xa8")
    target = testing.tiny_target(
        scripted({9: a, a: euro[0], euro[0]: euro[1], euro[1]: lone}).model, tokenizer=tokenizer
    )
    pieces = [p.text for p in specjax.stream(target, [[9]], max_new_tokens=4)]
    assert pieces == ["x", "", "€", "\ufffd"]


def test_penalties_count_the_path() -> None:
    """Constant logits 2, 1.4, 0.1 under a frequency penalty of 1, greedily: 0 1 0 1 2 0 1 2, whatever is drafted."""
    target = testing.tiny_target(testing.TableModel(jnp.tile(jnp.array([2.0, 1.4, 0.1]), (3, 1))))
    sampling = Sampling(frequency_penalty=1.0)
    for drafter in (specjax.PromptLookup(4, min_ngram=1), Adversarial(8)):
        out = specjax.generate(target, [[2, 2, 2], [0]], drafter=drafter, sampling=sampling, max_new_tokens=8)
        assert out.token_ids == [[0, 1, 0, 1, 2, 0, 1, 2]] * 2
        assert out.stats.accepted > 0 or out.stats.rejected == 14


@pytest.mark.parametrize("penalty", ["presence_penalty", "repetition_penalty"])
def test_rejected_drafts_leave_no_trace_in_penalties(penalty: str, table: Any, table_text: Any, decode: Any) -> None:
    sampling = Sampling(**{penalty: 1.5})
    plain = decode(table, sampling=sampling).token_ids
    assert plain != table_text
    for drafter in (Adversarial(8), Oracle(3, decoys=1)):
        out = decode(table, drafter, sampling=sampling)
        assert out.token_ids == plain
        assert out.stats.acceptance_rate == (0.0 if isinstance(drafter, Adversarial) and drafter.shift else 0.5)


def parity(logits: jax.Array, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """A toy grammar: odd and even ids alternate."""
    same = jnp.arange(logits.shape[0]) % 2 == tokens[length - 1] % 2
    return jnp.where(same, -jnp.inf, logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_holds_against_drafts_that_break_it(
    temperature: float, table: Any, prompts: Any, decode: Any
) -> None:
    sampling = Sampling(temperature=temperature, processors=(parity,))
    drafter = Replay.of([[2 * i % 64 for i in range(200)]] * 4, 4)
    out = decode(table, drafter, sampling=sampling)
    for prompt, ids in zip(prompts, out.token_ids, strict=True):
        assert all(a % 2 != b % 2 for a, b in zip([prompt[-1], *ids], ids, strict=False))
        assert len(ids) == 200
    if temperature == 0:  # the best token that the grammar allows, at every step
        logits = np.asarray(table.model.table)
        for prompt, ids in zip(prompts, out.token_ids, strict=True):
            text = [prompt[0], *prompt]  # a text's first token counts as its own predecessor
            for token in ids:
                allowed = np.where(np.arange(64) % 2 == text[-1] % 2, -np.inf, logits[text[-2], text[-1]])
                assert token == allowed.argmax()
                text.append(token)


def test_a_grammar_may_end_with_eos(scripted: Any) -> None:
    """A grammar that allows nothing after EOS is no error where EOS is drafted and accepted: the round ends there."""

    def ends(logits: jax.Array, tokens: jax.Array, length: jax.Array) -> jax.Array:
        return jnp.where(tokens[length - 1] == 5, -jnp.inf, logits)

    target = scripted({i: i + 1 for i in range(40)}, eos=[5])
    sampling = Sampling(temperature=0.1, processors=(ends,))
    out = specjax.generate(target, [[0]], drafter=Oracle(5), sampling=sampling, max_new_tokens=20)
    assert (out.token_ids, out.finish_reasons) == ([[1, 2, 3, 4, 5]], ["stop"])


@pytest.mark.parametrize("drafter", [Adversarial(1), TableTree.random(9, 2, "ss")], ids=["one token", "tree"])
def test_the_correction_comes_from_the_row_of_the_rejection(drafter: Any) -> None:
    """Rows of disjoint supports: after a token of group g only group g + 1 may follow, whatever was rejected there."""
    group = np.arange(9) // 3
    table = np.where(group[None, :] == (group[:, None] + 1) % 3, 0.0, -1e9).astype(np.float32)
    table += np.random.default_rng(0).standard_normal(table.shape).astype(np.float32)
    target = testing.tiny_target(testing.TableModel(jnp.asarray(table)))
    out = specjax.generate(
        target, [[0], [5, 1]], drafter=drafter, sampling=Sampling(temperature=1.0), max_new_tokens=60
    )
    for prompt, ids in zip([[0], [5, 1]], out.token_ids, strict=True):
        groups = group[[prompt[-1], *ids]]
        np.testing.assert_array_equal(groups[1:], (groups[:-1] + 1) % 3)
    assert out.stats.rejected > 10


def test_logprobs_under_sampling_are_teacher_forced(tiny: Any, prompts: Any, decode: Any, scores: Any) -> None:
    """At temperature 0.7 and top-p 0.9, and with a drafter that is often wrong: the target's own law, unfiltered."""
    out = decode(tiny, LOOKUP, sampling=Sampling(temperature=0.7, top_p=0.9))
    logits = scores(tiny.model, [p + t for p, t in zip(prompts, out.token_ids, strict=True)])
    law = np.asarray(jax.nn.log_softmax(logits))
    for row, prompt, ids, found in zip(law, prompts, out.token_ids, out.logprobs, strict=True):
        at = np.arange(len(prompt) - 1, len(prompt) + len(ids) - 1)
        np.testing.assert_allclose(found, row[at, ids], atol=1e-4)
    assert out.stats.rejected > 0


def test_counts_by_hand(scripted: Any) -> None:
    """The text is 1 2 3 … 12; of each draft the tokens are right (r) or wrong (w), or there are none.

    Round 1: r r w commits 1 2 3; round 2: r r r commits 4 5 6 7; round 3 commits 8; round 4: w r commits 9; round 5: r
    commits 10 11; round 6 commits 12, with no room for a draft.
    """
    target = scripted({0: 1} | {i: i + 1 for i in range(1, 40)})
    script = [1, 2, 50, 4, 5, 6, -1, -1, 50, 10, -1, 12, 13, 14]
    out = specjax.generate(target, [[0]], drafter=Replay.of([script], 3), max_new_tokens=12, trace=True)
    assert out.token_ids == [list(range(1, 13))]
    rounds = [(r.proposed, len(r.accepted), r.committed) for r in out.trace[0]]
    assert rounds == [
        ([1, 2, 50], 2, [1, 2, 3]),
        ([4, 5, 6], 3, [4, 5, 6, 7]),
        ([], 0, [8]),
        ([50, 10], 0, [9]),
        ([10], 1, [10, 11]),
        ([], 0, [12]),
    ]
    stats = out.stats
    assert (stats.new_tokens, stats.target_calls, stats.proposed, stats.accepted, stats.rejected) == (12, 6, 9, 6, 2)
    assert stats.tokens_per_call == 2.0
    assert stats.acceptance_rate == 6 / 9
    assert stats.alpha == 6 / 8
    assert stats.proposed_at == (4, 3, 2)
    assert stats.acceptance_by_position() == {"marginal": [3 / 4, 2 / 3, 1 / 2], "conditional": [3 / 4, 1.0, 1 / 2]}


def test_counts_stop_at_a_stop(scripted: Any) -> None:
    """Five tokens proposed, the second one is EOS: two count as proposed, two as accepted, no rejection."""
    target = scripted({i: i + 1 for i in range(40)}, eos=[2])
    out = specjax.generate(target, [[0]], drafter=Oracle(5), max_new_tokens=20)
    assert out.token_ids == [[1, 2]]
    assert (out.stats.proposed, out.stats.accepted, out.stats.rejected) == (2, 2, 0)
    assert out.stats.proposed_at == (1, 1, 0, 0, 0)
    assert out.stats.acceptance_by_position()["marginal"] == [1.0, 1.0, None, None, None]


@pytest.mark.parametrize(
    ("drafter", "temperature"), [(None, 0.0), (Oracle(5), 0.0), (Oracle(5), 0.01)], ids=["plain", "greedy", "drawn"]
)
def test_logits_that_are_not_finite_are_an_error(drafter: Any, temperature: float, scripted: Any) -> None:
    """In the middle of a block: the error names prompt and position, and no token 0 comes out."""
    table = scripted({i: i + 1 for i in range(60)}).model.table
    for broken in (table.at[:, 7, 20].set(np.nan), table.at[:, 7, 20].set(np.inf), table.at[:, 7].set(-np.inf)):
        target = testing.tiny_target(testing.TableModel(broken))
        options = {"drafter": drafter, "max_new_tokens": 20, "sampling": Sampling(temperature=temperature)}
        with pytest.raises(SpecjaxError, match=r"not finite.* prompt 1, position 8"):
            specjax.generate(target, [[40], [0]], **options)
    if drafter is None and temperature == 0:
        pieces = specjax.stream(target, [[40], [0]], **options)
        first = [next(pieces) for _ in range(14)]
        assert [t for p in first if p.row == 1 for t in p.token_ids] == list(range(1, 8))
        with pytest.raises(SpecjaxError, match="prompt 1"):
            next(pieces)


def test_a_grammar_without_a_way_out_is_an_error(table: Any) -> None:
    def nothing(logits: jax.Array, tokens: jax.Array, length: jax.Array) -> jax.Array:
        return jnp.where(length >= 5, -jnp.inf, logits)

    with pytest.raises(SpecjaxError, match="allowed no token: prompt 0, position 5"):
        specjax.generate(table, [[1, 2]], sampling=Sampling(processors=(nothing,)), max_new_tokens=9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "at least one"),
        ({"prompts": "text"}, "list of prompts"),
        ({"prompts": [[]]}, "prompt 0"),
        ({"prompts": [[1], ""]}, "prompt 1"),
        ({"prompts": [[1], [64]]}, "prompt 1: token id 64 is outside the vocabulary of 64"),
        ({"prompts": [[1, -1]]}, "token id -1"),
        ({"prompts": [[1.5]]}, "1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"sampling": Sampling(temperature=-1)}, "temperature"),
        ({"sampling": Sampling(temperature=[1.0, 1.0])}, "temperature"),
        ({"sampling": Sampling(top_p=0.0)}, "top_p"),
        ({"sampling": Sampling(top_p=1.5)}, "top_p"),
        ({"law": "unlikely"}, "'greedy', 'rejection'"),
        ({"law": "greedy", "sampling": Sampling(temperature=1.0)}, "temperature 0"),
        ({"seed": [1, 2]}, "seed"),
        ({"stop": [""]}, "non-empty"),
    ],
    ids=str,
)
def test_bad_arguments(options: dict[str, Any], message: str, table: Any) -> None:
    """One line each, before anything is computed; `stream` says it at once."""
    options = {"prompts": [[1]]} | options
    for function in (specjax.generate, specjax.stream):
        with pytest.raises(InputError, match=message) as error:
            function(table, **options)
        assert "\n" not in str(error.value)


def test_prompts_of_every_kind(table: Any) -> None:
    tokenizer = table.tokenizer
    kinds = ["abc the", [{"role": "user", "content": "abc the"}], tokenizer.encode("abc the")]
    out = specjax.generate(table, kinds, max_new_tokens=5)
    assert out.prompt_ids == [kinds[2], [1, 3, *kinds[2], 2, 3], kinds[2]]
    assert out.token_ids[0] == out.token_ids[2]
    assert out.texts[0] == tokenizer.decode(out.token_ids[0])
    bare = testing.tiny_target(table.model)
    assert specjax.generate(bare, [[1]], max_new_tokens=2).texts == [""]
    with pytest.raises(InputError, match="no tokenizer"):
        specjax.generate(bare, ["text"])
