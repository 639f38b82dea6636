"""Suffix decoding: what is drafted against a search written with loops, and what a corpus of earlier answers brings."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.drafters.suffix import SuffixDecoding
from specjax.errors import InputError
from specjax.state import Context
from specjax.testing import Idle, Oracle, Replaced, TableModel, tiny_target

_propose = jax.jit(lambda drafter, context: drafter.propose(None, context)[0])


def drafts(drafter: SuffixDecoding, texts: list[list[int]]) -> list[list[int]]:
    """What is drafted after each text, in one batch with a one-token text."""
    rows = np.full((len(texts) + 1, 48), 7, np.int32)  # past a text's end anything may stand
    length = np.array([*map(len, texts), 1])
    for row, text in zip(rows, texts, strict=False):
        row[: len(text)] = text
    rows[-1, 0] = 99
    seen = Context(
        model=None,
        cache=None,
        tokens=jnp.asarray(rows),
        length=jnp.asarray(length),
        prompt_length=jnp.asarray(length),
        room=jnp.full(len(rows), 9),
        running=jnp.ones(len(rows), bool),
        rules=specjax.Sampling().rules(len(rows)),
        key=jax.random.split(jax.random.key(0), len(rows)),
    )
    draft = _propose(drafter, seen)
    valid = np.asarray(draft.valid)
    assert not valid[-1].any()
    return [np.asarray(draft.tokens)[i, valid[i]].tolist() for i in range(len(texts))]


def by_loops(drafter: SuffixDecoding, text: list[int], earlier: list[list[int]]) -> list[int]:
    """The same draft, from the definition: all places that match m tokens vote, for every m."""

    def matched(t: list[int], p: int) -> int:
        most = min(p, len(text), drafter.max_match)
        return next((m for m in range(most, 0, -1) if t[p - m : p] == text[-m:]), 0)

    places = [(t, p, matched(t, p)) for t in [text, *earlier[::-1]] for p in range(len(t) - 1, 0, -1)]
    places.sort(key=lambda place: -place[2])  # of equally frequent tokens the one of the longest match, then the latest
    best: tuple[float, list[int]] = (0.0, [])
    for m in range(drafter.max_match, drafter.min_match - 1, -1):
        voting = [(t, p) for t, p, found in places if found >= m]
        draft: list[int] = []
        chance, expected = 1.0, 0.0
        while len(draft) < min(drafter.num_draft_tokens, int(drafter.factor * m + 1e-6)):
            voting = [(t, p) for t, p in voting if p < len(t)]
            votes = Counter(t[p] for t, p in voting)
            most = max(votes.values(), default=0)
            chance *= most / max(len(voting), 1)
            if not most or chance < drafter.min_probability:
                break
            draft.append(next(t[p] for t, p in voting if votes[t[p]] == most))
            expected += chance
            voting = [(t, p + 1) for t, p in voting if t[p] == draft[-1]]
        if expected > best[0] + 1e-6:
            best = expected, draft
    return best[1]


def test_the_longest_match_goes_on_longest() -> None:
    text = [1, 2, 3, 50, 51, 52, 53, 54, 9, 3, 60, 61, 1, 2, 3]
    assert drafts(SuffixDecoding(factor=1.0), [text]) == [[50, 51, 52]]
    assert drafts(SuffixDecoding(factor=1.5), [text]) == [[50, 51, 52, 53]]
    assert drafts(SuffixDecoding(num_draft_tokens=2), [text]) == [[50, 51]]
    assert drafts(SuffixDecoding(factor=1.0, min_match=1, max_match=1), [text]) == [[60]]
    assert drafts(SuffixDecoding(min_match=4), [text, [1, 2, 3, 4]]) == [[], []]


def test_the_most_frequent_continuation_is_drafted_while_it_is_likely() -> None:
    """After 1, 2 come 5 three times and 6 once; after 5 come 7, 8 and 8: shares 3/4 and 1/2."""
    text = [1, 2, 5, 7, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2, 5, 8, 3, 1, 2]
    options: dict[str, Any] = {"max_match": 2, "factor": 2.0}
    assert drafts(SuffixDecoding(min_probability=0.8, **options), [text]) == [[]]
    assert drafts(SuffixDecoding(min_probability=0.6, **options), [text]) == [[5]]
    # 8 then goes on with 1 and with 3, as often: the later one
    assert drafts(SuffixDecoding(min_probability=0.3, **options), [text]) == [[5, 8]]
    assert drafts(SuffixDecoding(min_probability=0.2, **options), [text]) == [[5, 8, 3, 1]]


def test_a_draft_ends_with_the_text_it_comes_from() -> None:
    drafter = SuffixDecoding().remember([[1, 2, 3, 4], [1, 2, 9]], capacity=16)
    assert drafts(drafter, [[8, 2, 3], [8, 9, 1]]) == [[4], []]  # 9 | 1 is no match across two texts
    # three tokens match before the last 5, and two before the two last ones: they are more
    assert drafts(SuffixDecoding(), [[5, 5, 5, 5], [8, 8]]) == [[5, 5], []]


def test_against_loops() -> None:
    """Random texts of three tokens and a random corpus, all matches and ties included."""
    random = np.random.default_rng(0)
    some = [random.integers(0, 3, random.integers(1, 40)).tolist() for _ in range(30)]
    for drafter in (
        SuffixDecoding(num_draft_tokens=6, max_match=5, places=200, factor=1.3, min_probability=0.31),
        SuffixDecoding(num_draft_tokens=4, max_match=4, min_match=1, places=200, min_probability=0.0),
    ):
        earlier = [random.integers(0, 3, 20).tolist() for _ in range(3)]
        found = drafts(drafter.remember(earlier, capacity=64), some)
        lengths = [len(d) for d in found]
        assert max(lengths) == drafter.num_draft_tokens and len(set(lengths)) > 2
        for text, draft in zip(some, found, strict=True):
            wanted = by_loops(drafter, text, earlier)
            assert draft == wanted, (text, earlier)


def test_few_places_are_the_longest_and_latest() -> None:
    text = [1, 2, 3, 40, 2, 3, 41, 2, 3, 42, 1, 2, 3]
    assert drafts(SuffixDecoding(places=1, max_match=2), [text]) == [[42, 1, 2, 3]]
    assert drafts(SuffixDecoding(places=1, max_match=3), [text])[0][0] == 40


def test_the_corpus_keeps_its_size_and_forgets_the_oldest() -> None:
    drafter = SuffixDecoding().remember([[1, 2, 3], [4, 5]], capacity=8)
    assert drafter.corpus.tolist() == [-1, 1, 2, 3, -1, 4, 5, -1]
    drafter = drafter.remember([[6, 7]])
    assert drafter.corpus.tolist() == [2, 3, -1, 4, 5, -1, 6, 7, -1][-8:]
    assert drafter.remember([list(range(20))]).corpus.tolist() == [*range(13, 20), -1]


def test_repeated_requests(prompts: Any) -> None:
    """Requests answered before, whole or with another beginning, take fewer calls than prompt lookup needs; and the
    texts stay the same. A target of 64 tokens that hardly repeats itself within one text.
    """
    target = tiny_target(TableModel.random(64, seed=3))
    plain = specjax.generate(target, prompts, max_new_tokens=60)
    drafter = SuffixDecoding().remember(plain, capacity=512)
    runs = {}
    for name, requests in (("same", prompts), ("similar", [[30, *p] for p in prompts])):
        expected = specjax.generate(target, requests, max_new_tokens=60)
        for d in (drafter, specjax.PromptLookup(16)):
            out = specjax.generate(target, requests, drafter=d, max_new_tokens=60)
            assert out.token_ids == expected.token_ids
            runs[name, d.name] = out.stats.tokens_per_call
    assert runs["same", "suffix"] > 5 > 2 * runs["same", "prompt-lookup"]
    assert runs["similar", "suffix"] > 2 * runs["similar", "prompt-lookup"]


def test_greedy(check_greedy: Any) -> None:
    out = check_greedy(SuffixDecoding(4, min_match=1, block_sizes=(5,)))
    assert {len(r.proposed) for row in out.trace for r in row} >= {0, 1, 2, 4}
    assert {len(r.accepted) for row in out.trace for r in row} >= {0, 1, 2, 4}
    assert out.trace[0][0].proposed == []  # a one-token prompt


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda d: Idle(d, every=2), lambda d: Replaced(d, Oracle(4))])
def test_greedy_wrapped(wrap: Any, check_greedy: Any) -> None:
    check_greedy(wrap(SuffixDecoding(4, min_match=1, block_sizes=(5,))))


@pytest.mark.slow
def test_law(check_law: Any) -> None:
    corpus = SuffixDecoding(3, min_match=1, min_probability=0.0, block_sizes=(4,)).remember(
        [[1, 0, 2, 3, 1, 4, 0, 2, 2, 3, 4, 1]], capacity=16
    )
    check_law(corpus)


def test_nothing_is_compiled_again() -> None:
    target = tiny_target(TableModel.random(64, seed=3))
    drafter = SuffixDecoding(4).remember([[1, 2]], capacity=32)
    sizes = []
    for texts in ([[1, 2]], [[5, 6, 7, 8], [9]]):
        drafter = drafter.remember(texts)
        specjax.generate(target, [[1, 2, 1]], drafter=drafter, max_new_tokens=5)
        sizes.append(specjax.job._run._cache_size())
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SuffixDecoding(-1), "num_draft_tokens"),
        (lambda: SuffixDecoding(min_match=3, max_match=2), "min_match: expected at most max_match"),
        (lambda: SuffixDecoding(factor=0), "factor"),
        (lambda: SuffixDecoding(min_probability=1.5), "from 0 to 1"),
        (lambda: SuffixDecoding(places=0), "places"),
        (lambda: SuffixDecoding().remember([[1, -1]]), "lists of token ids"),
        (lambda: SuffixDecoding().remember([[1]], capacity=1), "capacity"),
    ],
)
def test_bad_settings(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_a_corpus_of_another_vocabulary() -> None:
    target = tiny_target(TableModel.random(4))
    with pytest.raises(InputError, match="ids below 4"):
        specjax.generate(target, [[1]], drafter=SuffixDecoding().remember([[1, 4]], capacity=8))
