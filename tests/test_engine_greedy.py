"""Greedy decoding gives the text of plain decoding, token for token, whatever is drafted."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import testing
from specjax.testing import Adversarial, Oracle, Replay

LOOKUP = specjax.PromptLookup(8, max_ngram=3, min_ngram=1, block_sizes=(5, 9))
NEW = 200
TABLE_DRAFTERS = {
    "lookup": LOOKUP,
    "oracle": Oracle(4),
    "adversarial": Adversarial(8),
    "second sibling": Oracle(3, decoys=1),
}


@pytest.mark.parametrize("name", TABLE_DRAFTERS)
def test_table_model(name: str, table: Any, table_text: Any, decode: Any) -> None:
    """The table model turns NaN on a wrong mask, position or cache, so this checks those too."""
    out = decode(table, TABLE_DRAFTERS[name])
    assert out.token_ids == table_text
    check_trace(out)
    if name == "oracle":  # k accepted and the bonus token make k + 1, in every round
        assert out.stats.target_calls == 4 * NEW / 5
        assert out.stats.acceptance_rate == 1.0
    if name == "adversarial":
        assert (out.stats.accepted, out.stats.alpha, out.stats.tokens_per_call) == (0, 0.0, 1.0)


def test_one_draft_token(table: Any, table_text: Any, decode: Any) -> None:
    out = decode(table, specjax.PromptLookup(1, min_ngram=1))
    assert out.token_ids == table_text
    check_trace(out)


def test_replay_of_every_length_and_accept_count(table: Any, table_text: Any, decode: Any) -> None:
    """Drafts of 0 to 16 tokens that go wrong anywhere, in a batch whose rows differ."""
    random, seen = np.random.default_rng(0), set()
    for _ in range(25):
        script = np.array(table_text)
        wrong = random.random(script.shape) < random.choice([0.0, 0.05, 0.2])
        ends = random.random(script.shape) < random.choice([0.0, 0.1, 0.3])
        script = np.where(ends, -1, np.where(wrong, (script + 1) % 64, script))
        out = decode(table, Replay.of(script.tolist(), 16))
        assert out.token_ids == table_text
        check_trace(out)
        seen |= {(len(r.proposed), len(r.accepted)) for row in out.trace for r in row}
    assert {proposed for proposed, _ in seen} == set(range(17))
    assert {accepted for _, accepted in seen} == set(range(17))


@pytest.mark.parametrize("drafter", [Replay.of([[0] * NEW], 16), LOOKUP], ids=["replay", "lookup"])
def test_batch_of_one(drafter: Any, table: Any, table_text: Any, prompts: Any, decode: Any) -> None:
    """Rows in a ragged batch, where the others accept other counts and end at other times, are as when alone."""
    for i, prompt in enumerate(prompts):
        if isinstance(drafter, Replay):
            drafter = Replay.of([[-1 if i % 10 < 3 else t for i, t in enumerate(table_text[i])]], 16)
        out = decode(table, drafter, [prompt])
        assert out.token_ids == [table_text[i]]
        check_trace(out)
        # a round that proposes nothing costs what a plain step costs
        assert all((r.block_tokens == 1) == (r.proposed == []) for r in out.trace[0])


def test_rows_that_end_early_leave_the_others_alone(table: Any, table_text: Any, decode: Any, prompts: Any) -> None:
    first = table_text[1][4]  # ends one row after five tokens, and others wherever it occurs
    target = testing.tiny_target(table.model, eos=[first])
    for drafter in (None, TABLE_DRAFTERS["lookup"], Replay.of(table_text, 16)):
        out = decode(target, drafter)
        for ids, text in zip(out.token_ids, table_text, strict=True):
            assert ids == (text[: text.index(first) + 1] if first in text else text)
        assert len(out.token_ids[1]) == 5 < max(map(len, out.token_ids))
        check_trace(out)


def transformer_drafters(tiny: specjax.Target, cousin: specjax.Target, text: list[list[int]]) -> dict[str, Any]:
    wrong = [[t if i % 7 else (t + 1) % 64 for i, t in enumerate(row)] for row in text]
    return {
        "lookup": LOOKUP,
        "replay": Replay.of(wrong, 16),
        "self": specjax.DraftModel(tiny, 3),
        "cousin": specjax.DraftModel(cousin, 4),
        "second sibling": Oracle(3, decoys=1),
    }


@pytest.mark.parametrize("name", ["lookup", "replay", "self", "cousin", "second sibling"])
def test_transformer(name: str, tiny: Any, cousin: Any, tiny_text: Any, decode: Any, scores: Any) -> None:
    out = decode(tiny, transformer_drafters(tiny, cousin, tiny_text)[name])
    assert out.token_ids == tiny_text
    check_trace(out)
    check_logprobs(out, tiny, scores)
    for row in out.trace:
        for round in row[:-1]:  # the last draft is cut short by the cap
            if name == "self":  # all accepted in every round: the drafter's cache has no gap
                assert len(round.accepted) == 3
            if name == "second sibling":  # the accepted path lies scattered in the block
                assert round.accepted == [1, 3, 5]
    if name == "cousin":  # otherwise this tests little
        assert {len(r.accepted) for row in out.trace for r in row} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    "family", ["gemma3", *(pytest.param(f, marks=pytest.mark.slow) for f in testing.FAMILIES if f != "gemma3")]
)
def test_families(family: str, decode: Any) -> None:
    """Trees under sliding windows, norms on both sides, experts."""
    target = testing.tiny_target(testing.tiny_model(family))
    plain = decode(target)
    tree = decode(target, Oracle(3, decoys=1))
    assert tree.token_ids == plain.token_ids
    assert tree.stats.target_calls == 4 * NEW // 4
    assert len({t for row in plain.token_ids for t in row}) > 15  # a text, not a loop


def test_bfloat16_forks_only_at_near_ties(prompts: Any, decode: Any, scores: Any) -> None:
    """Blocks of different size round differently; every token is still within rounding of the best one."""
    target = testing.tiny_target(testing.tiny_model(dtype="bfloat16"))
    assert target.dtype == "bfloat16"
    out = decode(target, LOOKUP)
    logits = scores(target.model, [p + t for p, t in zip(prompts, out.token_ids, strict=True)])
    for row, prompt, ids in zip(logits, prompts, out.token_ids, strict=True):
        at = np.arange(len(prompt) - 1, len(prompt) + len(ids) - 1)
        gap = row[at].max(-1) - row[at, ids]
        assert gap.max() < 0.02 * np.abs(row).max()
    assert out.stats.accepted > 0


def test_the_stated_capacity_is_enough(table: Any, table_text: Any, prompts: Any) -> None:
    """By the public functions, without `generate`'s rounding up: nothing is clamped at the end of text and cache."""
    drafter = Replay.of(table_text, 16)
    lengths = jnp.array([len(p) for p in prompts], jnp.int32)
    limits = jnp.array([30, 33, 31, 29], jnp.int32)
    size = specjax.decode.capacity(33, drafter)
    tokens = jnp.array([p + [0] * (size - len(p)) for p in prompts], jnp.int32)
    rules, stops = specjax.Sampling().rules(4), specjax.stops.make_stops((), (), None, 64)
    key = jax.random.split(jax.random.key(0), 4)
    state = specjax.prefill(table.model, drafter, tokens, lengths, limits, rules, stops, key, longest=16)
    state = jax.jit(specjax.run, static_argnums=2)(table.model, drafter, specjax.Greedy(), state)
    assert state.length.tolist() == limits.tolist()
    for row, prompt, text, limit in zip(state.tokens.tolist(), prompts, table_text, limits.tolist(), strict=True):
        assert row[:limit] == (prompt + text)[:limit]
    assert (state.counters.proposed == state.counters.accepted).all()


def check_trace(out: specjax.Generation) -> None:
    """The rounds add up to the text and to the counters."""
    for ids, rounds, stats in zip(out.token_ids, out.trace, out.row_stats, strict=True):
        assert [t for r in rounds for t in r.committed] == ids
        assert stats.target_calls == len(rounds)
        assert stats.new_tokens == len(ids)
        assert stats.accepted == sum(len(r.accepted) for r in rounds)
        for r in rounds:
            assert [r.proposed[i] for i in r.accepted] == r.committed[: len(r.accepted)]
            assert len(r.committed) - len(r.accepted) in (0, 1)
            assert r.accepted == sorted(r.accepted)
            assert [r.parents[i] for i in r.accepted] == [-1, *r.accepted][: len(r.accepted)]
            assert len(r.proposed) < r.block_tokens or r.block_tokens == 1


def check_logprobs(out: specjax.Generation, target: specjax.Target, scores: Any) -> None:
    """Each committed token's log-probability is the one a plain forward pass over the text gives it."""
    logits = scores(target.model, [p + t for p, t in zip(out.prompt_ids, out.token_ids, strict=True)])
    for row, prompt, ids, found in zip(logits, out.prompt_ids, out.token_ids, out.logprobs, strict=True):
        at = np.arange(len(prompt) - 1, len(prompt) + len(ids) - 1)
        law = row[at] - np.log(np.exp(row[at] - row[at].max(-1, keepdims=True)).sum(-1, keepdims=True))
        law -= row[at].max(-1, keepdims=True)
        np.testing.assert_allclose(found, law[np.arange(len(ids)), ids], atol=1e-4)
