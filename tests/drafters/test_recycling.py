"""Token recycling: what the matrix holds after every round, what is drafted from it, and starts that know something."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.drafters.recycling import TokenRecycling, best_tokens
from specjax.errors import InputError
from specjax.testing import Idle, Oracle, Replaced, TableModel, TinyTokenizer, tiny_target
from specjax.trees import chain_tree, static_tree

TREE = static_tree([(0,), (1,), (2,), (0, 0), (0, 2), (1, 0), (0, 2, 1)])
SMALL = TokenRecycling(3, TREE, block_sizes=(8,))


def test_greedy(check_greedy: Any) -> None:
    out = check_greedy(SMALL)
    assert {len(r.proposed) for row in out.trace for r in row} >= {0, 7}
    assert {len(r.accepted) for row in out.trace for r in row} >= {0, 1, 2}
    assert out.trace[0][0].proposed == []  # a one-token prompt: nothing to go on


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda d: Idle(d, every=2), lambda d: Replaced(d, Oracle(7))])
def test_greedy_wrapped(wrap: Any, check_greedy: Any) -> None:
    check_greedy(wrap(SMALL))


def test_law(check_law: Any) -> None:
    check_law(TokenRecycling(3, static_tree([(0,), (1,), (0, 0)]), block_sizes=(4,)))


@pytest.mark.parametrize(
    ("wrap", "fresh"), [(lambda d: d, 1), (lambda d: Replaced(d, Oracle(7)), 3)], ids=["alone", "replaced"]
)
def test_the_matrix_is_what_the_target_said_last(wrap: Any, fresh: int, few: Any, forward: Any) -> None:
    """In every round, against a target pass over the text and each path: the freshest continuations of every token in
    the block, whoever drafted it, in front of what was known, and the others behind it; where a token stands in the
    block more than once, those at its last place on the path, or else its last place. Nodes are the entries that they
    should be.
    """
    prompts = [[9], [5, 6, 5], [1, 2, 5, 1, 2]]
    drafter = wrap(inner := TokenRecycling(3, TREE, fresh, block_sizes=(8,)))
    job = specjax.prepare(few, prompts, drafter=drafter, max_new_tokens=18)
    state = job.prefill()

    def matrix(state: Any) -> np.ndarray:
        return np.array(state.memory if drafter is inner else state.memory[0])

    expected = matrix(state)
    assert (expected[0] == -1).all()
    assert expected[2, [1, 2, 5]].tolist() == [[2, -1, -1], [5, -1, -1], [1, -1, -1]]
    changed = 0
    for number in range(12):
        length, running = np.asarray(state.length), np.asarray(state.running)
        room = np.asarray(state.limit) - length
        texts = [np.asarray(state.tokens)[i, : length[i]].tolist() for i in range(3)]
        state, info = job.step(state)
        draft, count = info.draft, np.asarray(info.count)
        for i in np.flatnonzero(running):
            paths: list[list[int]] = [[]]
            for token, parent, valid in zip(draft.tokens[i], draft.parents[i], draft.valid[i], strict=True):
                if valid:
                    paths.append([*paths[int(parent) + 1], int(token)])
            if drafter is inner or number % 4 >= 2:
                assert sorted(paths) == sorted(p for p in drafted(expected[i], texts[i][-1]) if len(p) < room[i])
            logits = said(few, forward, [texts[i] + path for path in paths])
            kept = np.asarray(info.path.nodes)[i, : count[i]].tolist()
            order = [*(n for n in range(len(paths)) if n not in kept), *kept]
            for token, node in {(texts[i] + paths[n])[-1]: n for n in order}.items():
                new = np.argsort(-logits[node], kind="stable")[:3].tolist()
                known = [*new[:fresh], *expected[i, token].tolist(), *new[fresh:]]
                expected[i, token] = [t for t in dict.fromkeys(known) if t >= 0][:3]
                changed += 1
        np.testing.assert_array_equal(matrix(state), expected)
    assert changed > 40


def drafted(matrix: np.ndarray, pending: int) -> list[list[int]]:
    """The tree's paths as the matrix gives them."""
    found: dict[tuple[int, ...], list[int]] = {(): []}
    for choice in TREE.choices:
        if choice[:-1] in found:
            above = found[choice[:-1]]
            token = matrix[above[-1] if above else pending, choice[-1]]
            if token >= 0:
                found[choice] = [*above, int(token)]
    return list(found.values())


def said(target: Any, forward: Any, texts: list[list[int]]) -> np.ndarray:
    """The target's logits after each text."""
    rows = texts + [[0]] * (8 - len(texts))  # one shape, one program
    hidden = forward(target.model, rows, ("hidden",))["hidden"]
    last = jnp.stack([hidden[i, len(text) - 1] for i, text in enumerate(rows)])
    return np.asarray(target.model.logits(last[None]))[0]


def test_the_prompt_is_seeded_latest_first(few: Any) -> None:
    drafter = TokenRecycling(3, TREE)
    prompts = [[1, 2, 1, 3, 1, 4, 1, 2, 1], [1, 5, 1, 6, 1, 7, 1, 8, 8], [11]]
    memory = np.asarray(specjax.prepare(few, prompts, drafter=drafter, max_new_tokens=4).prefill().memory)
    assert memory[0, 1].tolist() == [2, 4, 3]
    assert memory[0, 2].tolist() == [1, -1, -1]
    assert memory[1, 1].tolist() == [8, 7, 6]
    assert memory[1, 8].tolist() == [8, -1, -1]
    assert (memory[2] == -1).all()
    cold = TokenRecycling(3, TREE, seed_prompt=False)
    assert (np.asarray(specjax.prepare(few, prompts, drafter=cold, max_new_tokens=4).prefill().memory) == -1).all()


@pytest.mark.parametrize("size", [2, 129, 700])
def test_best_tokens(size: int) -> None:
    """Against a stable sort, with ties, infinities and fewer tokens than asked for."""
    random = np.random.default_rng(size)
    logits = random.integers(-6, 6, (2, 7, size)).astype(np.float32)
    logits[0, :, 1:] = np.where(random.random((7, size - 1)) < 0.8, -np.inf, logits[0, :, 1:])
    found = np.asarray(jax.jit(best_tokens, static_argnums=1)(logits, 5))
    for row, got in zip(logits.reshape(-1, size), found.reshape(-1, 5), strict=True):
        order = [i for i in np.argsort(-row, kind="stable")[:5] if np.isfinite(row[i])]
        assert got.tolist() == order + [-1] * (5 - len(order))


def test_a_start_that_knows_something(prompts: Any) -> None:
    """Where the last token alone decides, a matrix that has seen a text drafts it whole from the first round on,
    whichever way it was filled. Another matrix compiles nothing.
    """
    target = tiny_target(TableModel.random(64, order=1, seed=3), tokenizer=TinyTokenizer())
    size = target.model.vocab_size
    cold = TokenRecycling(2, chain_tree(3), matrix=jnp.full((size, 2), -1, jnp.int32), seed_prompt=False)
    job = specjax.prepare(target, prompts, drafter=cold, max_new_tokens=24)
    state = job.run(job.prefill())
    texts = [row[:n].tolist() for row, n in zip(np.asarray(state.tokens), np.asarray(state.length), strict=True)]
    new = [text[len(p) - 1 :] for text, p in zip(texts, prompts, strict=True)]
    compiled = specjax.job._run._cache_size()
    for drafter in (cold.after(state.memory), cold.counted(new, size)):
        out = specjax.generate(target, prompts, drafter=drafter, max_new_tokens=24)
        assert [p + t for p, t in zip(prompts, out.token_ids, strict=True)] == texts
        assert out.stats.target_calls == 4 * 24 // 4 < int(state.counters.rounds.sum())
    assert specjax.job._run._cache_size() == compiled
    table = np.argsort(-np.asarray(target.model.table), axis=-1)[:, :2]
    after = np.asarray(cold.after(state.memory).matrix)
    for token in {t for text in new for t in text[:-1]}:
        assert after[token].tolist() == table[token].tolist()


def test_counts_rank_what_follows() -> None:
    drafter = TokenRecycling(2, chain_tree(1)).counted([[1, 2, 1, 3, 1, 3, 1, 4, 1, 4, 1, 4], [2, 5]], 6)
    assert drafter.matrix.tolist() == [[-1, -1], [4, 3], [1, 5], [1, -1], [1, -1], [-1, -1]]
    assert drafter.counted([[1, 0]], 6).matrix.tolist()[:3] == [[-1, -1], [0, -1], [1, 5]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenRecycling(0), "k: expected a whole number"),
        (lambda: TokenRecycling(2, TREE), "rank 2, but k is 2"),
        (lambda: TokenRecycling(3, TREE, 4), "fresh: expected at most k, which is 3"),
        (lambda: TokenRecycling(3, [(0,)]), "expected a StaticTree"),
    ],
)
def test_bad_settings(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_a_matrix_for_another_target(few: Any) -> None:
    with pytest.raises(InputError, match=r"shape \(5, 3\); expected \(12, 3\)"):
        specjax.generate(few, [[1]], drafter=TokenRecycling(3, TREE, matrix=jnp.zeros((5, 3), jnp.int32)))
    with pytest.raises(InputError, match="ids from 0 to 11"):
        SMALL.counted([[12]], 12)
