"""Block verification: every random outcome counted in exact arithmetic, the law test, and what it accepts."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import block_verification, sampling, testing
from specjax.block_verification import BlockVerification
from specjax.laws import Greedy, Path, Rejection
from specjax.requests import LAWS
from specjax.sampling import Sampling, categorical
from specjax.state import Context, static
from specjax.testing import TableTree, law_test
from specjax.trees import Draft, best, chain, order

BLOCK = BlockVerification()
run = jax.jit(lambda law, target, draft, keys, depth: law(target, draft, keys, depth), static_argnums=(0, 4))

V = 4
TARGET = testing.tiny_target(testing.TableModel.random(V))
PROMPTS = [[1, 0, 2, 1, 0, 2, 1, 0], [3, 1, 3]]  # ragged
SIMPLE = Sampling(temperature=0.8)
EVERYTHING = Sampling(
    temperature=[0.8, 1.2],
    top_k=3,
    top_p=[0.95, 0.9],
    min_p=0.05,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.2,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Table:
    """A target whose law depends on the last token; the pending one is 0."""

    scores: Any  # [V, V]
    rules: sampling.Rules

    def _raw(self, path: jax.Array, depth: jax.Array) -> jax.Array:
        last = jnp.zeros_like(depth)
        if path.shape[1]:
            last = jnp.where(depth > 0, jnp.take_along_axis(path, jnp.maximum(depth - 1, 0)[:, None], axis=1)[:, 0], 0)
        return self.scores[last]

    def probs(self, node: jax.Array, path: jax.Array, depth: jax.Array) -> jax.Array:
        return sampling.distribution(self._raw(path, depth), self.rules)

    def logits(self, node: jax.Array, path: jax.Array, depth: jax.Array) -> jax.Array:
        return sampling.process(self._raw(path, depth), self.rules)


def keys(rows: int, seed: int = 0) -> Any:
    return jax.random.split(jax.random.key(seed), rows)


def table_of(law: Any, rows: int) -> Table:
    return Table(jnp.log(jnp.array(law, jnp.float32)), Sampling(temperature=1.0).rules(rows))


# Exact: laws whose thresholds are all multiples of 1/12, so that a grid of random numbers meets every outcome as often
# as it should.

GRID = 12


def law_of(*rows: tuple[int, ...]) -> list[list[Fraction]]:
    return [[Fraction(n, sum(row)) for n in row] for row in rows]


@dataclass(frozen=True)
class Case:
    """Laws of the target and of the drafter after each token, and how many tokens a draft of two has, by its first.

    Attributes:
        deterministic: the second token is (its law is one-hot), and is said to be.
    """

    p: list[list[Fraction]]
    q: list[list[Fraction]]
    length: tuple[int, ...]
    deterministic: bool = False

    def second(self, first: int) -> list[Fraction]:
        """The law of the second token."""
        return (
            [Fraction(y == (first + 1) % len(self.p)) for y in range(len(self.p))]
            if self.deterministic
            else self.q[first]
        )


P3, Q3 = law_of((4, 1, 1), (4, 1, 1), (1, 4, 1)), law_of((2, 2, 2), (1, 2, 3), (3, 1, 2))
CASES = {
    "the authors' example": Case(law_of((1, 2), (1, 2)), law_of((2, 1), (2, 1)), (2, 2)),
    "three tokens": Case(P3, Q3, (2, 2, 2)),
    "ends by its first token": Case(P3, Q3, (2, 1, 2)),
    "deterministic end": Case(law_of((1, 2), (1, 2)), law_of((2, 1), (2, 1)), (2, 2), deterministic=True),
}


def by_hand(case: Case, draft: tuple[int, int]) -> Counter[tuple[int, int]]:
    """The chances of (accepted, bonus) for a draft, by algorithm 2 of the paper."""
    size, laws, chances = len(case.p), (case.q[0], case.second(draft[0])), [Fraction(1)]
    length = case.length[draft[0]]
    last = (0, *draft)
    for i in range(length):
        chances.append(min(Fraction(1), chances[-1] * case.p[last[i]][draft[i]] / laws[i][draft[i]]))
    found: Counter[tuple[int, int]] = Counter()
    left = Fraction(1)
    for i in reversed(range(length + 1)):
        p, weights = chances[i], case.p[last[i]]
        passes = p
        if i < length:
            weights = [max(p * weights[y] - laws[i][y], Fraction(0)) for y in range(size)]
            passes = sum(weights) / (sum(weights) + 1 - p) if sum(weights) + 1 - p else Fraction(1)
        for y in range(size):
            if weights[y]:
                found[i, y] += left * passes * weights[y] / sum(weights)
        left *= 1 - passes
    assert sum(found.values()) == 1
    return found


def drafts(case: Case) -> list[tuple[int, int]]:
    return [(x, y) for x, y in product(range(len(case.p)), repeat=2) if case.second(x)[y]]


@pytest.mark.parametrize("name", CASES)
def test_the_algorithm_is_lossless(name: str) -> None:
    """In exact arithmetic: the committed tokens, and what the target goes on with, follow the target."""
    case, size = CASES[name], len(CASES[name].p)
    texts: Counter[tuple[int, ...]] = Counter()
    for draft in drafts(case):
        drawn = case.q[0][draft[0]] * case.second(draft[0])[draft[1]]
        for (accepted, bonus), chance in by_hand(case, draft).items():
            committed = (*draft[:accepted], bonus)
            for rest in product(range(size), repeat=3 - len(committed)):
                text = (*committed, *rest)
                mass = drawn * chance
                for i in range(len(committed), 3):
                    mass *= case.p[text[i - 1]][text[i]]
                texts[text] += mass
    for text in product(range(size), repeat=3):
        assert texts[text] == case.p[0][text[0]] * case.p[text[0]][text[1]] * case.p[text[1]][text[2]]


@pytest.mark.parametrize("name", CASES)
def test_every_outcome(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The law itself, on a grid of random numbers: as often as by hand, outcome by outcome."""
    case = CASES[name]
    grid = [(n + 0.5) / GRID for n in range(GRID)]
    numbers = np.array(list(product(grid, repeat=3)), np.float32)
    rows = [(draft, *number) for draft in drafts(case) for number in numbers]
    tokens = np.array([row[0] for row in rows])
    uniform = np.full((len(rows), 3, 2), 0.5, np.float32)
    uniform[:, 1:, 0] = np.tile(numbers[:, :2], (len(drafts(case)), 1))
    uniform[:, :, 1] = np.tile(numbers[:, 2:], (len(drafts(case)), 1))
    monkeypatch.setattr(block_verification, "uniforms", lambda keys, nodes: jnp.asarray(uniform))
    laws = np.array(case.q, np.float32)
    q = np.stack([np.broadcast_to(laws[0], (len(rows), len(laws))), laws[tokens[:, 0]]], axis=1)
    length = np.array(case.length)[tokens[:, 0]]
    drawn = np.broadcast_to([True, not case.deterministic], tokens.shape)
    draft = chain(jnp.asarray(tokens), jnp.asarray(length), jnp.asarray(q), jnp.asarray(drawn))
    path = jax.jit(lambda: BLOCK(table_of(case.p, len(rows)), draft, keys(len(rows)), 2))()
    found = Counter(
        zip(
            map(tuple, tokens.tolist()),
            np.asarray(path.accepted).tolist(),
            np.asarray(path.bonus).tolist(),
            strict=True,
        )
    )
    wanted = {(d, *end): n * GRID**3 for d in drafts(case) for end, n in by_hand(case, d).items()}
    assert found == {end: count for end, count in wanted.items() if count}
    np.testing.assert_array_equal(path.rejected, path.accepted < length)


def test_the_authors_example() -> None:
    """Tokens 1/3, 2/3 drafted by 2/3, 1/3: 11/9 of two drafted tokens are accepted; by `Rejection` it is 10/9."""
    case = CASES["the authors' example"]
    accepted = sum(
        (
            case.q[0][d[0]] * case.q[d[0]][d[1]] * chance * end[0]
            for d in drafts(case)
            for end, chance in by_hand(case, d).items()
        ),
        start=Fraction(0),
    )
    assert accepted == Fraction(11, 9)


def _chain_round(law: Any, p: np.ndarray, q: np.ndarray, rows: int, k: int, seed: int = 0) -> Path:
    """One round of `rows` chains of k tokens, each drawn from q [V, V] after the one before, the first after 0."""
    random, last, tokens, laws = np.random.default_rng(seed), np.zeros(rows, int), [], []
    for _ in range(k):
        laws.append(q[last].astype(np.float32))
        last = np.minimum((random.random((rows, 1)) > np.cumsum(q[last], axis=1)).sum(1), len(q) - 1)
        tokens.append(last)
    draft = chain(jnp.asarray(np.stack(tokens, 1)), jnp.full(rows, k), jnp.asarray(np.stack(laws, 1)))
    return run(law, table_of(p, rows), draft, keys(rows, seed), k)


def test_it_accepts_more_than_rejection() -> None:
    """Same drafts, same random numbers; k = 8, and both sigmas are below 0.02."""
    random = np.random.default_rng(1)
    p, q = random.dirichlet(np.ones(8), 8), random.dirichlet(np.ones(8), 8)
    q = 0.5 * p + 0.5 * q
    block, rejection = (np.asarray(_chain_round(law, p, q, 30_000, 8).accepted) for law in (BLOCK, Rejection()))
    print(f"\naccepted of 8: block {block.mean():.3f}, rejection {rejection.mean():.3f}")
    assert block.mean() > rejection.mean() + 0.1
    at_least = [((block >= n).mean(), (rejection >= n).mean()) for n in range(1, 9)]
    assert all(one > other - 0.012 for one, other in at_least)  # at every place


def test_a_draft_of_one_token_is_judged_as_by_rejection() -> None:
    """Draw by draw, but for rounding."""
    random = np.random.default_rng(2)
    p, q = random.dirichlet(np.ones(5), 5), random.dirichlet(np.ones(5), 5)
    block, rejection = (_chain_round(law, p, q, 5000, 1) for law in (BLOCK, Rejection()))
    assert 0.2 < np.asarray(block.accepted).mean() < 0.9
    for one, other in zip(jax.tree.leaves(block), jax.tree.leaves(rejection), strict=True):
        assert (np.asarray(one) == np.asarray(other)).mean() > 0.999


@pytest.mark.slow
def test_deterministic_chains_are_accepted_as_often_as_by_rejection() -> None:
    rows, p = 50_000, np.random.default_rng(3).dirichlet(2 * np.ones(3), 3)
    draft = chain(jnp.broadcast_to(jnp.array([1, 2, 0]), (rows, 3)), jnp.full(rows, 3))
    path = run(BLOCK, table_of(p, rows), draft, keys(rows), 3)
    exact = np.cumprod([p[0, 1], p[1, 2], p[2, 0]])
    found = [(np.asarray(path.accepted) > i).mean() for i in range(3)]
    np.testing.assert_allclose(found, exact, atol=0.011)  # five sigmas


# Trees.


def random_trees(rows: int, size: int, nodes: int = 10, least: int = -1) -> Draft:
    """Random shapes; with `least` -1 some rows begin with a fork and some with a chain."""
    random = np.random.default_rng(4)
    parents = np.stack(
        [random.integers(np.maximum(np.arange(nodes) - 3, least), np.arange(nodes)) for _ in range(rows)]
    )
    return order(
        jnp.array(random.integers(0, size, (rows, nodes))),
        jnp.array(parents),
        jnp.array(random.random((rows, nodes)) < 0.9),
        jnp.array(random.random((rows, nodes)) < 0.5),
        jnp.array(random.dirichlet(np.ones(size), (rows, nodes)), jnp.float32),
    )


def test_a_tree_that_forks_at_once_is_judged_by_rejection() -> None:
    """Draw by draw. Other trees end as they may, but always on a path of the draft."""
    rows, size = 1000, 3
    draft, p = random_trees(rows, size), np.random.default_rng(5).dirichlet(np.ones(size), size)
    block, rejection = (run(law, table_of(p, rows), draft, keys(rows), 5) for law in (BLOCK, Rejection()))
    forks = np.asarray((draft.valid & (draft.parents < 0)).sum(1)) > 1
    assert 100 < forks.sum() < rows - 100
    for one, other in zip(jax.tree.leaves(block), jax.tree.leaves(rejection), strict=True):
        assert (np.asarray(one)[forks] == np.asarray(other)[forks]).all()
    assert (np.asarray(block.accepted) != np.asarray(rejection.accepted)).any()


def test_temperature_zero_is_greedy_row_by_row() -> None:
    """On any tree, whatever the draft says it was drawn from."""
    rows, size = 1000, 3
    draft = random_trees(rows, size)
    scores = jnp.array(np.random.default_rng(6).normal(size=(size, size)), jnp.float32)
    temperature = np.random.default_rng(7).choice([0.0, 0.9], rows)
    target = Table(scores, Sampling(temperature=temperature, min_p=0.05).rules(rows))
    block, greedy = (run(law, target, draft, keys(rows), 5) for law in (BLOCK, Greedy()))
    cold = temperature == 0
    assert (np.asarray(greedy.accepted)[cold] > 1).sum() > 20
    for one, other in zip(jax.tree.leaves(block), jax.tree.leaves(greedy), strict=True):
        assert (np.asarray(one)[cold] == np.asarray(other)[cold]).all()
    assert (np.asarray(block.tokens) != np.asarray(greedy.tokens)).any()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shaped(TableTree):
    """Drafts whose shape follows from what was drawn *before*: after an even first token the second is deterministic,
    after 0 it has a drawn sibling, after 3 there is none; there is a third token unless the second is 3. With `fault` a
    second token that is not likely enough is left out, by itself.
    """

    fault: Any = False

    name: ClassVar[str] = "shaped"
    num_nodes: ClassVar[int] = 4  # type: ignore[misc, assignment]
    max_depth: ClassVar[int] = 3  # type: ignore[misc, assignment]

    def propose(self, memory: None, context: Context) -> tuple[Draft, None]:
        batch, size = context.length.shape[0], self.table.shape[0]

        def child(kind: str, last: Any, path: list[Any], number: int, without: Any = None) -> Any:
            padded = jnp.stack([*path, *[jnp.zeros(batch, jnp.int32)] * (3 - len(path))], axis=1)
            scores = context.process(self.table[last], padded, jnp.full(batch, len(path), jnp.int32))
            if without is not None:
                scores = jnp.where(jnp.arange(size) == without[:, None], -jnp.inf, scores)
            return self._child(kind, scores, context, number)

        one = child("s", context.pending, [], 0)
        likely, drawn = (child(kind, one.token, [one.token], 1) for kind in "ds")
        even = one.token % 2 == 0
        two = replace(drawn, token=jnp.where(even, likely.token, drawn.token))
        other = child("s", one.token, [one.token], 2, without=two.token)
        three = child("s", two.token, [one.token, two.token], 3)
        weak = jnp.take_along_axis(two.q, two.token[:, None], axis=1)[:, 0] < 0.4
        has_two = one.exists & two.exists & (one.token != 3) & ~(weak & self.fault)
        valid = [
            one.exists,
            has_two,
            has_two & (one.token == 0) & other.exists,
            has_two & (two.token != 3) & three.exists,
        ]
        nodes = (one, two, other, three)
        draft = order(
            jnp.stack([node.token for node in nodes], axis=1),
            jnp.broadcast_to(jnp.array([-1, 0, 0, 1]), (batch, 4)),
            jnp.stack(valid, axis=1),
            jnp.stack([jnp.ones(batch, bool), ~even, *[jnp.ones(batch, bool)] * 2], axis=1),
            jnp.stack([node.q for node in nodes], axis=1),
        )
        return draft, None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Grown(TableTree):
    """The five likeliest nodes of a tree of three children a node, as EAGLE-2 picks them: deterministic."""

    total: int = static(default=5)

    name: ClassVar[str] = "grown"
    num_nodes: ClassVar[int] = 5  # type: ignore[misc, assignment]

    def propose(self, memory: None, context: Context) -> tuple[Draft, None]:
        whole, _ = TableTree(self.table, self.depth, "ddd").propose(None, context)
        assert whole.q is not None
        chance = jnp.log(jnp.take_along_axis(whole.q, whole.tokens[..., None], axis=2)[..., 0])
        rank = jnp.log(1 / (1 + jnp.arange(whole.tokens.shape[1]) % 3))  # q forgets earlier siblings: put them back
        own = jnp.where(whole.valid, jnp.minimum(chance + rank, -1e-3), -jnp.inf)
        above = jnp.where(whole.parents >= 0, jnp.take_along_axis(own, jnp.maximum(whole.parents, 0), axis=1), 0.0)
        return best(whole.tokens, whole.parents, own + above, self.total), None


# The law test.

KINDS: dict[str, Any] = {
    "drawn chain": TableTree.random(V, 3, "s", seed=9),
    "deterministic chain": TableTree.random(V, 3, "d", seed=9),
    "drawn tree": TableTree.random(V, 2, "ss"),
    "deterministic tree": TableTree.random(V, 2, "dd"),
    "grown tree": Grown(TableTree.random(V).table, 2),
    "shaped": Shaped(TableTree.random(V).table),
    "draft model": specjax.DraftModel(testing.TableModel.random(V, seed=1), 3),
}


def check(result: testing.LawResult, name: str) -> None:
    print(f"\n{name}: distance {result.distance:.5f}, expected {result.expected:.5f}, noise {result.noise:.5f}")
    assert result.passed, result
    assert result.crossed > 0.1
    assert result.acceptance_rate is not None
    assert result.acceptance_rate > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("drawn chain", EVERYTHING),
        ("draft model", Sampling(temperature=[0.0, 1.0], top_p=0.9)),
    ],
)
def test_right_drafters(kind: str, settings: Sampling) -> None:
    check(law_test(TARGET, KINDS[kind], BLOCK, settings, PROMPTS, samples=50_000), kind)


@pytest.mark.slow
def test_shapes_by_what_was_drawn_before_and_not_by_the_token_itself() -> None:
    right, wrong = (replace(KINDS["shaped"], fault=jnp.bool_(fault)) for fault in (False, True))
    check(law_test(TARGET, right, BLOCK, SIMPLE, PROMPTS, samples=50_000), "shaped")
    assert not law_test(TARGET, wrong, BLOCK, SIMPLE, PROMPTS, samples=50_000).passed


# docs/design.md, "Accept": which law is exact for which drafts. Every one at temperature 0, these above it too.
EXACT_ABOVE_ZERO = {"rejection": True, "block": True, "typical": False}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS)[:5])
@pytest.mark.parametrize("law", LAWS)
def test_which_law_is_exact_for_which_drafts(law: str, kind: str) -> None:
    cold = law_test(TARGET, KINDS[kind], law, Sampling(), PROMPTS, samples=10_000, rows=1000)
    check(cold, f"{law}, {kind}, temperature 0")
    if law != "greedy":
        warm = law_test(TARGET, KINDS[kind], law, SIMPLE, PROMPTS)
        assert warm.passed == EXACT_ABOVE_ZERO[law], warm


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [SIMPLE, EVERYTHING])
def test_every_drafter_and_setting(kind: str, settings: Sampling) -> None:
    check(law_test(TARGET, KINDS[kind], BLOCK, settings, PROMPTS), kind)


@pytest.mark.slow
def test_transformer() -> None:
    target = testing.tiny_target(testing.tiny_model(vocab_size=5))
    drafter = specjax.DraftModel(testing.tiny_model(vocab_size=5, seed=1), 3)
    check(law_test(target, drafter, BLOCK, samples=30_000, rows=4096), "transformer")


FAULTS = (
    "none",
    "the bonus token from P",
    "the bonus token from the residual of one token",
    "the first that fails ends the run",
    "p forgets what is above it",
    "p is not capped",
    "tested by p everywhere",
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Marked(testing.TableModel):
    """Carries the fault of the law, as data, so that one program serves them all."""

    fault: Any = None


@dataclass(frozen=True)
class Wrong:
    """Block verification of whole drawn chains written out plainly, with the fault that the target carries."""

    name: ClassVar[str] = "wrong"
    lossless: ClassVar[bool] = True

    def __call__(self, target_law: Any, draft: Draft, keys: jax.Array, max_depth: int) -> Path:
        batch, k = draft.tokens.shape
        pick: Callable[..., Any] = jax.vmap(lambda values, i: values[i])

        def has(fault: str) -> jax.Array:
            return target_law.context.model.fault == FAULTS.index(fault)

        uniform = jax.vmap(lambda key: jax.random.uniform(key, (2, k + 1)))(keys)
        p, run_on = jnp.ones(batch), jnp.ones(batch, bool)
        accepted, bonus = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32)
        for i in range(k + 1):
            here = jnp.full(batch, i)
            law = target_law.probs(here, draft.tokens[:, :max_depth], here)
            weights, passes = law, p
            if i < k:
                q, token = draft.q[:, i], draft.tokens[:, i]
                weights = jnp.maximum(p[:, None] * law - q, 0)
                total = weights.sum(-1)
                passes = jnp.where(has("tested by p everywhere"), p, total / jnp.maximum(total + 1 - p, 1e-30))
                single = jnp.maximum(law - q, 0)
                weights = jnp.where(has("the bonus token from the residual of one token"), single, weights)
                weights = jnp.where(has("the bonus token from P"), law, weights)
                weights = jnp.where(weights.sum(-1, keepdims=True) > 0, weights, law)
            ok = draft.valid[:, i - 1] & (uniform[:, 0, i] < passes) if i else jnp.ones(batch, bool)
            run_on &= ok
            ok = jnp.where(has("the first that fails ends the run"), run_on, ok)
            accepted = jnp.where(ok, i, accepted)
            bonus = jnp.where(ok, categorical(weights, uniform[:, 1, i]), bonus)
            if i < k:
                above = jnp.where(has("p forgets what is above it"), 1.0, p)
                ratio = above * pick(law, token) / pick(q, token)
                p = jnp.where(has("p is not capped"), ratio, jnp.minimum(ratio, 1.0))
        place = jnp.arange(max_depth + 1)
        nodes = jnp.where(place <= accepted[:, None], place, 0)
        path = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
        tokens = jnp.where(place < accepted[:, None], path, jnp.where(place == accepted[:, None], bonus[:, None], 0))
        return Path(nodes, accepted, tokens, bonus, accepted < k)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_in_the_law(fault: str) -> None:
    """The drafts are those, of some, that the residual of one token bends most: by 0.03."""
    target = testing.tiny_target(Marked(TARGET.model.table, fault=jnp.int32(FAULTS.index(fault))))
    result = law_test(target, TableTree.random(V, 3, "s", seed=9), Wrong(), SIMPLE, PROMPTS)
    print(f"\n{fault}: distance {result.distance:.4f}, noise {result.noise:.4f}")
    assert result.passed == (fault == "none"), result


# The engine.


def test_by_name() -> None:
    assert LAWS["block"] == BlockVerification() != Rejection()
    assert hash(BlockVerification()) == hash(BLOCK)
    assert (BLOCK.name, BLOCK.lossless) == ("block", True)
    assert specjax.BlockVerification is BlockVerification


def test_temperature_zero_is_greedy(decode: Any, table: specjax.Target, table_text: Any) -> None:
    found = decode(table, specjax.PromptLookup(3), law="block")
    assert found.token_ids == table_text
    assert found.stats.accepted > 0
    assert (found.law, found.lossless) == (BLOCK, True)


@pytest.mark.slow
def test_tokens_per_call_and_rows_that_do_not_know_their_batch(tiny: specjax.Target, cousin: specjax.Target) -> None:
    drafter = specjax.DraftModel(cousin, 8, block_sizes=(9,))
    options: dict[str, Any] = {"max_new_tokens": 40, "sampling": Sampling(temperature=1.0)}
    prompts = [[5, 6, 5], [9], [1, 2, 3, 4, 1, 2, 3, 4, 1], [7, 8, 7, 8, 9, 10, 11, 12]]

    def text(law: str, prompts: Any, seeds: Any) -> specjax.Generation:
        return specjax.generate(tiny, prompts, drafter, law, seed=seeds, **options)

    block, rejection = (text(law, prompts * 8, list(range(32))) for law in ("block", "rejection"))
    print(
        f"\ntokens per call: block {block.stats.tokens_per_call:.3f}, rejection {rejection.stats.tokens_per_call:.3f}"
    )
    assert block.stats.tokens_per_call > rejection.stats.tokens_per_call > 1.5
    again = text("block", [prompts[2], prompts[0]] * 16, [2, 0] * 16)
    assert again.token_ids[:2] == [block.token_ids[2], block.token_ids[0]]


def test_texts_end_at_eos_inside_a_chain() -> None:
    """As often as the target ends them, and nothing is committed behind it; the last drafts are cut by the limit."""
    copies, length, eos = 4000, 4, 2
    target = testing.tiny_target(TARGET.model, eos=[eos])
    found = specjax.generate(
        target, [[1, 0]] * copies, TableTree.random(V, 3, "s"), "block", max_new_tokens=length, sampling=SIMPLE
    )
    assert any(len(ids) < length for ids in found.token_ids)
    law = testing.exact_law(target, [1, 0], length, SIMPLE)
    wanted: Counter[tuple[int, ...]] = Counter()
    for text in product(range(V), repeat=length):
        wanted[text[: text.index(eos) + 1] if eos in text else text] += law[text]
    counts = Counter(map(tuple, found.token_ids))
    assert set(counts) <= set(wanted)
    chances = np.array([wanted[text] for text in sorted(wanted)])
    shares = np.array([counts[text] for text in sorted(wanted)]) / copies
    mean = 0.5 * np.sqrt(2 / np.pi * chances * (1 - chances) / copies).sum()
    assert 0.5 * np.abs(shares - chances).sum() < mean + np.sqrt(np.log(1e6) / (2 * copies))
