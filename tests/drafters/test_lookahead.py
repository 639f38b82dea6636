"""Lookahead decoding: the window and the pool after every round, against the algorithm written with lists."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.drafters.lookahead import LookaheadDecoding, fold, remember
from specjax.errors import InputError
from specjax.testing import Idle, Oracle, Replaced, TableModel, law_test, tiny_model, tiny_target

SMALL = LookaheadDecoding(3, 4, 2, block_sizes=(7,))
NO_WINDOW = LookaheadDecoding(0, 4, 2, block_sizes=(7,))
Grams = dict[int, list[tuple[int, ...]]]
Say = Callable[[list[list[int]]], list[int]]


def test_greedy(prompts: Any, check_greedy: Any) -> None:
    """A ragged batch of five. Rows end by EOS, by the cap and at the end of the context."""
    out = check_greedy(SMALL, [*prompts, [2, 9, 2, 9, 2]])
    assert {len(r.proposed) for row in out.trace for r in row} >= {0, 3, 5, 6}
    assert {len(r.accepted) for row in out.trace for r in row} >= {0, 1, 3}
    assert {r.block_tokens for row in out.trace for r in row} == {7 + 8}  # never without the window


def test_greedy_alone(prompts: Any, check_greedy: Any) -> None:
    assert check_greedy(SMALL, [prompts[3]]).stats.tokens_per_call > 1


def test_greedy_without_a_window(prompts: Any, check_greedy: Any) -> None:
    out = check_greedy(NO_WINDOW, [*prompts, [2, 9, 2, 9, 2]])
    assert {r.block_tokens for row in out.trace for r in row} == {1, 7}
    assert out.trace[0][0].proposed == []  # a one-token prompt


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter", [Idle(SMALL, every=2), Idle(NO_WINDOW, every=3), Replaced(NO_WINDOW, Oracle(3, decoys=1))]
)
def test_greedy_wrapped(drafter: Any, check_greedy: Any) -> None:
    check_greedy(drafter)


def test_an_end_inside_a_block(scripted: Any) -> None:
    """The prompt shows the whole answer, and what stands behind its EOS."""
    target = scripted({1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 7}, eos=[3])
    prompts = [[1, 2, 3, 4, 5, 6, 9, 1], [9, 8, 1]]
    out = specjax.generate(target, prompts, drafter=SMALL, max_new_tokens=8, trace=True)
    assert out.token_ids == [[2, 3], [2, 3]]
    assert out.finish_reasons == ["stop", "stop"]
    assert [len(row) for row in out.trace] == [1, 2]
    assert out.trace[0][0].proposed == [2, 3, 4]
    assert [stats.accepted for stats in out.row_stats] == [2, 0]


@pytest.mark.slow
def test_law_on_a_table() -> None:
    result = law_test(TableModel.random(4), LookaheadDecoding(2, 3, 2, block_sizes=(5,)), samples=30_000, rows=6000)
    assert result.passed, result
    assert result.crossed > 0.1
    assert result.acceptance_rate > 0.05


def test_law() -> None:
    """Three siblings and what follows them, out of a prompt that has them, then of a window."""
    sampling = specjax.Sampling(temperature=[0.8, 1.3], top_k=4, repetition_penalty=[1.2, 1.0])
    result = law_test(
        tiny_target(tiny_model(vocab_size=5, seed=1)),
        LookaheadDecoding(2, 3, 3, block_sizes=(7,)),
        sampling=sampling,
        prompts=[[1, 1, 2, 2, 3, 4, 0, 4, 2, 1, 3, 2, 1, 1], [3, 0, 3]],
        num_tokens=2,
        samples=16_000,
        rows=4000,
    )
    assert result.passed, result
    assert result.crossed > 0.1
    assert result.acceptance_rate > 0.05


@pytest.mark.slow
def test_law_without_a_window() -> None:
    drafter = LookaheadDecoding(0, 3, 3, block_sizes=(7,))
    result = law_test(TableModel.random(4), drafter, num_tokens=5, samples=60_000, rows=6000)
    assert result.passed, result
    assert result.acceptance_rate > 0.05


def put(pool: Grams, gram: list[int], most: int) -> None:
    """The latest n-gram of its first token, of which there are `most`."""
    rest = [guess for guess in pool.get(gram[0], []) if guess != tuple(gram[1:])]
    pool[gram[0]] = [tuple(gram[1:]), *rest][:most]


class Algorithm:
    """Lookahead decoding of one row, from the paper's algorithm 2 and figure 2."""

    def __init__(self, drafter: LookaheadDecoding, prompt: list[int], window: list[list[int]]) -> None:
        self.n, self.most = drafter.ngram, drafter.guesses
        self.text, self.levels, self.rounds = list(prompt), window, 0
        self.pool: Grams = {}
        if drafter.seed_prompt:
            for end in range(self.n, len(prompt) + 1):
                put(self.pool, prompt[end - self.n : end], self.most)

    def drafted(self, room: int) -> set[tuple[int, ...]]:
        """The paths of the tree, of those that may still be committed."""
        guesses = self.pool.get(self.text[-1], [])
        return {guess[:d] for guess in guesses for d in range(1, self.n) if d < room}

    def columns(self) -> list[list[int]]:
        if self.levels[0]:
            self.levels[0][0] = self.text[-1]
        return [list(column) for column in zip(*self.levels, strict=True)]

    def contexts(self) -> list[list[int]]:
        """What each column goes on from: the text, level 0 before the column, the column."""
        columns = self.columns()
        return [self.text[:-1] + self.levels[0][:i] + column for i, column in enumerate(columns)]

    def round(self, said: list[int], committed: list[int]) -> None:
        grams = [[*column, token] for column, token in zip(self.columns(), said, strict=True)]
        for gram in grams if self.rounds >= self.n - 2 else []:
            put(self.pool, gram, self.most)
        self.levels = [*self.levels[1:], list(said)]
        self.rounds += 1
        for token in committed:
            self.text.append(token)
            if len(self.text) >= self.n:
                put(self.pool, self.text[-self.n :], self.most)


def follow(target: specjax.Target, drafter: LookaheadDecoding, prompts: list[list[int]], say: Say, rounds: int) -> int:
    """Run the engine and the algorithm side by side; the tokens that were accepted."""
    job = specjax.prepare(target, prompts, drafter=drafter, max_new_tokens=18)
    state, accepted = job.prefill(), 0
    window = np.asarray(state.memory.window).tolist()
    rows = [Algorithm(drafter, prompt, levels) for prompt, levels in zip(prompts, window, strict=True)]
    for row in rows:
        assert {token for level in row.levels for token in level} <= set(row.text)
    for _ in range(rounds):
        running, room = np.asarray(state.running), np.asarray(state.limit - state.length)
        said = say([context for row in rows for context in row.contexts()])
        state, info = job.step(state)
        pool, window = np.asarray(state.memory.pool), np.asarray(state.memory.window)
        tokens, parents, valid = (np.asarray(x) for x in (info.draft.tokens, info.draft.parents, info.draft.valid))
        for i in np.flatnonzero(running):
            row, length = rows[i], int(state.length[i])
            paths: list[tuple[int, ...]] = [()]
            for token, parent in zip(tokens[i], parents[i], strict=True):
                paths.append((*paths[parent + 1], int(token)))
            drafted = [path for path, node in zip(paths[1:], valid[i], strict=True) if node]
            assert sorted(drafted) == sorted(row.drafted(int(room[i])))
            new = np.asarray(state.tokens)[i, len(row.text) : length].tolist()
            row.round(said[i * drafter.window : (i + 1) * drafter.window], new)
            accepted += len(new) - 1
            assert window[i].tolist() == row.levels
            for token, rest in enumerate(pool[i].tolist()):
                kept = row.pool.get(token, [])
                assert rest == [list(g) for g in kept] + [[-1] * (row.n - 1)] * (row.most - len(kept))
    return accepted


@pytest.mark.parametrize(("window", "seed_prompt"), [(0, True), (3, False)])
def test_against_the_algorithm_on_a_table(window: int, seed_prompt: bool) -> None:
    model = TableModel.random(10, seed=7)
    table = np.asarray(model.table)
    prompts = [[9], [5, 6, 5], [1, 2, 5, 1, 2, 7, 3, 1, 2, 5, 1]]

    def say(texts: list[list[int]]) -> list[int]:
        return [int(table[text[-2], text[-1]].argmax()) for text in texts]

    drafter = LookaheadDecoding(window, 4, 2, seed_prompt, block_sizes=(7,))
    assert follow(tiny_target(model), drafter, prompts, say, rounds=14) > 8


def test_against_the_algorithm_on_a_transformer(few: Any, forward: Any) -> None:
    """Every place of the window sees what it should, where it should stand."""

    def say(texts: list[list[int]]) -> list[int]:
        hidden = forward(few.model, texts, ("hidden",))["hidden"]
        last = jnp.stack([hidden[i, len(text) - 1] for i, text in enumerate(texts)])
        return np.asarray(few.model.logits(last[None]))[0].argmax(-1).tolist()

    prompts = [[9], [5, 6, 5], [1, 2, 5, 1, 2, 7, 3, 1, 2, 5, 1]]
    assert follow(few, LookaheadDecoding(4, 3, 3, block_sizes=(7,)), prompts, say, rounds=12) > 8


def test_the_window_sees_ahead_of_the_text(scripted: Any) -> None:
    """A text that never repeats itself: what is drafted was written by the window."""
    target = scripted({i: (i + 1) % 60 for i in range(60)})
    prompt = [[40, 20, 30, 50, 10, 0]]
    runs = {}
    for window in (0, 6):
        drafter = LookaheadDecoding(window, 4, 4, block_sizes=(13,))
        out = specjax.generate(target, prompt, drafter=drafter, max_new_tokens=50)
        assert out.token_ids == [list(range(1, 51))]
        runs[window] = out.stats.tokens_per_call
    assert runs[0] == 1
    assert runs[6] > 1.3


def test_seeds_start_other_windows_and_compile_nothing(table: Any, prompts: Any) -> None:
    """Other prompts, seeds and temperatures: one program, and greedily one text."""
    drafter = LookaheadDecoding(2, 3, 2, block_sizes=(5,))
    texts, windows, compiled = [], [], []
    for seed in range(4):
        sampling = specjax.Sampling(temperature=[0, 0, 0.7 + seed / 10, 1.1])
        some = prompts if seed else prompts[::-1]
        job = specjax.prepare(table, some, drafter=drafter, sampling=sampling, max_new_tokens=20, seed=seed)
        state = job.prefill()
        windows.append(np.asarray(state.memory.window).tolist())
        texts.append(np.asarray(job.run(state).tokens).tolist())
        compiled.append(specjax.job._run._cache_size())
    assert texts[1][:2] == texts[2][:2] == texts[3][:2]
    assert windows[1] != windows[2] != windows[3]
    assert len(set(compiled)) == 1


def test_fold_puts_common_beginnings_together() -> None:
    guesses = jnp.array([[[1, 2, 3], [4, 2, 3], [1, 2, 5], [1, 3, 3], [-1, -1, -1]], [[7, 7, 7]] * 5])
    draft = jax.jit(fold)(guesses, jnp.array([[True, True, True, True, False], [False, True, True, False, False]]))
    first, second = (np.asarray(draft.valid)[i] for i in range(2))
    assert (first.sum(), second.sum()) == (9, 3)
    assert np.asarray(draft.tokens)[0, first].tolist() == [1, 2, 3, 4, 2, 3, 5, 3, 3]
    assert np.asarray(draft.parents)[0, first].tolist() == [-1, 0, 1, -1, 3, 4, 1, 0, 7]
    assert np.asarray(draft.parents)[1, second].tolist() == [-1, 0, 1]


def test_many_at_once_are_remembered_as_one_after_the_other() -> None:
    """Random n-grams of few tokens, so that most keys and many n-grams occur several times, some not meant to count."""
    random = np.random.default_rng(0)
    pool = jnp.full((2, 4, 3, 2), -1, jnp.int32)
    expected: list[Grams] = [{}, {}]
    put_all = jax.jit(remember)
    for _ in range(12):
        grams, real = random.integers(0, 3, (2, 9, 3)).astype(np.int32), random.random((2, 9)) < 0.7
        pool = put_all(pool, grams, real)
        for row in range(2):
            for gram in grams[row, real[row]].tolist():
                put(expected[row], gram, 3)
            for token in range(4):
                kept = expected[row].get(token, [])
                assert pool[row, token].tolist() == [list(g) for g in kept] + [[-1, -1]] * (3 - len(kept))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LookaheadDecoding(-1), "window: expected a whole number of at least 0, got -1"),
        (lambda: LookaheadDecoding(0, 1), "ngram: expected a whole number of at least 2, got 1"),
        (lambda: LookaheadDecoding(4, 2), "ngram: expected at least 3 with a window, got 2"),
        (lambda: LookaheadDecoding(guesses=0), "guesses: expected a whole number of at least 1, got 0"),
        (lambda: LookaheadDecoding(block_sizes=(0,)), "block_sizes: expected a tuple of positive whole numbers"),
    ],
)
def test_bad_settings(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
