"""What drafters propose, and that their state stays right whatever is accepted."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import testing
from specjax.errors import InputError
from specjax.state import Context
from specjax.testing import Idle, Oracle, Replaced


def lookup(text: list[int], **options: Any) -> list[int]:
    """What prompt lookup proposes after a text."""
    rows = np.zeros((2, 32), np.int32)
    rows[0, : len(text)], rows[1, 0] = text, 99
    seen = Context(
        model=None,
        cache=None,
        tokens=jnp.asarray(rows),
        length=jnp.array([len(text), 1]),
        prompt_length=jnp.array([len(text), 1]),
        room=jnp.array([9, 9]),
        running=jnp.array([True, True]),
        rules=specjax.Sampling().rules(2),
        key=jax.random.split(jax.random.key(0), 2),
    )
    drafter = specjax.PromptLookup(**options)
    draft, _ = jax.jit(drafter.propose)(None, seen)
    assert not draft.valid[1].any()  # a one-token prompt: nothing to go on
    return np.asarray(draft.tokens)[0, np.asarray(draft.valid)[0]].tolist()


def test_lookup_continues_the_longest_match() -> None:
    text = [1, 2, 3, 50, 51, 52, 9, 3, 60, 61, 62, 1, 2, 3]
    assert lookup(text, num_draft_tokens=3, max_ngram=3, min_ngram=1) == [50, 51, 52]
    assert lookup(text, num_draft_tokens=3, max_ngram=1, min_ngram=1) == [60, 61, 62]


def test_lookup_takes_the_latest_place_that_fills_a_draft() -> None:
    text = [1, 2, 40, 41, 1, 2, 42, 43, 1, 2]
    assert lookup(text, num_draft_tokens=2, max_ngram=2, min_ngram=2) == [42, 43]
    # only the first one is followed by as many as five tokens
    assert lookup(text, num_draft_tokens=5, max_ngram=2, min_ngram=2) == [40, 41, 1, 2, 42]


def test_lookup_ends_with_the_text() -> None:
    assert lookup([7, 1, 2, 7], num_draft_tokens=8, max_ngram=1, min_ngram=1) == [1, 2, 7]
    assert lookup([5, 5, 5], num_draft_tokens=4, max_ngram=1, min_ngram=1) == [5, 5]


def test_lookup_proposes_nothing_where_nothing_matches() -> None:
    assert lookup([1, 2, 3, 4, 5]) == []
    assert lookup([1, 2, 3, 9, 3], max_ngram=3, min_ngram=2) == []
    assert lookup([1, 2, 3, 1, 2, 3], window=2, min_ngram=1) == []
    assert lookup([1, 2, 3, 1, 2, 3], window=3, min_ngram=1) == [1, 2, 3]


def test_no_match_is_a_plain_step(scripted: Any) -> None:
    """A rising text never repeats: one token a round."""
    target = scripted({i: i + 1 for i in range(60)})
    out = specjax.generate(target, [[1, 2, 3]], drafter=specjax.PromptLookup(4, min_ngram=1), max_new_tokens=40)
    assert out.token_ids == [list(range(4, 44))]
    assert (out.stats.target_calls, out.stats.proposed) == (40, 0)


def test_a_filler_is_no_proposal(scripted: Any) -> None:
    """The next token is id 0, which fillers hold too; nothing is proposed, so nothing is accepted."""
    target = scripted({3: 0, 0: 5})
    out = specjax.generate(target, [[1, 2, 3]], drafter=specjax.PromptLookup(4, min_ngram=1), max_new_tokens=2)
    assert out.token_ids == [[0, 5]]
    assert (out.stats.proposed, out.stats.accepted, out.stats.rejected) == (0, 0, 0)


def test_the_first_draft_token_is_checked_too(scripted: Any) -> None:
    target = scripted({1: 7})
    out = specjax.generate(target, [[1, 1, 1]], drafter=specjax.PromptLookup(4, min_ngram=1), max_new_tokens=1)
    assert out.token_ids == [[7]]


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda d: d, marks=pytest.mark.slow),
        pytest.param(lambda d: Idle(d, every=3), marks=pytest.mark.slow),
        lambda d: Replaced(d, Oracle(4)),
    ],
    ids=["alone", "idle", "replaced"],
)
def test_draft_model_proposes_as_a_fresh_one(
    wrap: Any, tiny: Any, cousin: Any, tiny_text: Any, decode: Any, scores: Any
) -> None:
    """In every round its proposals are the draft model's own greedy continuation of the committed text, so its cache
    holds exactly that text: whatever was accepted before, whoever proposed it, however long it had nothing to do.
    """
    out = decode(tiny, wrap(specjax.DraftModel(cousin, 4)))
    assert out.token_ids == tiny_text
    cases, counts = [], set()
    for prompt, rounds in zip(out.prompt_ids, out.trace, strict=True):
        text = list(prompt)
        for number, r in enumerate(rounds):
            if len(r.proposed) == 4 and (not isinstance(wrap(None), Replaced) or number % 4 >= 2):
                cases.append((list(text), r.proposed))
            counts.add(len(r.accepted))
            text += r.committed
    assert counts >= {0, 1, 4}
    assert len(cases) > 20
    cases = cases[:: -(-len(cases) // 250)]
    texts = [text for text, _ in cases]
    for i in range(4):
        best = scores(cousin.model, texts)[np.arange(len(texts)), [len(t) - 1 for t in texts]].argmax(-1)
        assert [proposed[i] for _, proposed in cases] == best.tolist()
        texts = [[*t, int(b)] for t, b in zip(texts, best, strict=True)]


def test_padded_vocabularies(table: Any, table_text: Any, decode: Any) -> None:
    """A draft model with more or fewer ids than the target: ids that one of them lacks are never proposed."""
    for size in (60, 70):
        draft = testing.TableModel.random(size, seed=8)
        shared = min(size, 64)
        part = (slice(shared),) * 3
        draft = testing.TableModel(draft.table.at[part].set(table.model.table[part]))
        draft = testing.tiny_target(draft, tokenizer=table.tokenizer)
        out = decode(table, specjax.DraftModel(draft, 3))
        assert out.token_ids == table_text
        assert all(t < shared for row in out.trace for r in row for t in r.proposed)
        assert out.stats.accepted > 0


def test_another_tokenizer_is_refused(table: Any) -> None:
    other = testing.TinyTokenizer()
    other._bytes[5], other._bytes[6] = other._bytes[6], other._bytes[5]
    draft = testing.tiny_target(table.model, tokenizer=other)
    with pytest.raises(InputError, match="token id 5 "):
        specjax.generate(table, [[1]], drafter=specjax.DraftModel(draft))


@pytest.mark.parametrize(
    "make",
    [
        lambda: specjax.PromptLookup(-1),
        lambda: specjax.PromptLookup(min_ngram=0),
        lambda: specjax.PromptLookup(min_ngram=3, max_ngram=2),
        lambda: specjax.PromptLookup(window=0),
        lambda: specjax.DraftModel(testing.TableModel.random(4), -1),
    ],
)
def test_bad_settings(make: Any) -> None:
    with pytest.raises(InputError):
        make()


def test_not_a_drafter(table: Any) -> None:
    with pytest.raises(InputError, match="init, propose and update"):
        specjax.generate(table, [[1]], drafter="prompt-lookup")


def test_no_draft_tokens_is_plain(table: Any, table_text: Any, decode: Any) -> None:
    out = decode(table, specjax.DraftModel(table, 0))
    assert out.token_ids == table_text
    assert out.stats.tokens_per_call == 1.0
