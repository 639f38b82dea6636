"""The formulas against values known from the literature, against each other, and against simulated texts."""

import doctest
from typing import Any

import numpy as np
import pytest

from specjax import laws, simulate, theory, trees
from specjax.errors import InputError

P, Q = np.array([0.6, 0.3, 0.1]), np.array([0.3, 0.6, 0.1])
# a draft that is sure of what the target finds least likely
TARGET = np.array([0.25, 0.2, 0.15, 0.12, 0.1, 0.08, 0.06, 0.04])
MISCALIBRATED = np.array([0.02, 0.03, 0.05, 0.1, 0.1, 0.1, 0.2, 0.4])


@pytest.mark.parametrize("module", [theory, simulate])
def test_usage_in_the_docstring(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 2 and result.failed == 0


def test_tokens_per_call() -> None:
    k = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10])
    np.testing.assert_allclose(
        theory.expected_tokens(0.8, k), [1.80, 2.44, 2.95, 3.36, 3.69, 3.95, 4.16, 4.33, 4.57], atol=5e-3
    )
    assert theory.expected_tokens(0.6, 3) == pytest.approx(2.176)
    assert [theory.expected_tokens(a, 5) for a in (0, 1)] == [1, 6]
    np.testing.assert_allclose(
        theory.expected_tokens(np.array([[0.0], [0.5], [1.0]]), [0, 2]), [[1, 1], [1, 1.75], [1, 3]]
    )


def test_tokens_per_call_close_to_certain_acceptance() -> None:
    """The sum of powers, where 1 - α has hardly any digits left."""
    for alpha in (1 - 1e-3, 1 - 1e-9, 1 - 1e-15, 1 - 1e-16):
        assert theory.expected_tokens(alpha, 20) == pytest.approx(sum(alpha**i for i in range(21)), rel=1e-13)


def test_chains_and_trees_agree_with_the_formula() -> None:
    for alpha in (0.0, 0.3, 1.0):
        expected = theory.expected_tokens(alpha, 4)
        assert theory.chain_tokens([alpha] * 4) == pytest.approx(expected)
        assert theory.tree_tokens(trees.chain_tree(4), [alpha] * 4) == pytest.approx(expected)
    assert theory.chain_tokens([0.9, 0.5, 0.2]) == pytest.approx(1 + 0.9 + 0.45 + 0.09)
    np.testing.assert_allclose(theory.chain_tokens([[0.9, 0.5], [0.0, 1.0]]), [2.35, 1])
    assert theory.chain_tokens([]) == 1


def test_tokens_of_a_tree() -> None:
    """By hand, and drawn: a walk that picks at most one child at every node."""
    tree = trees.static_tree([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    chances = np.array([0.6, 0.3, 0.5, 0.2, 0.4, 0.9])
    by_hand = 1 + 0.6 + 0.3 + 0.6 * 0.5 + 0.6 * 0.2 + 0.3 * 0.4 + 0.6 * 0.5 * 0.9
    assert theory.tree_tokens(tree, chances) == pytest.approx(by_hand)
    assert theory.tree_tokens(tree.parents, chances) == pytest.approx(by_hand)
    assert theory.tree_tokens([], []) == 1
    rng = np.random.default_rng(0)
    node, tokens = np.full(200_000, -1), np.ones(200_000)
    going = np.ones(200_000, bool)
    while going.any():
        uniform, before = rng.random(len(node)), node.copy()
        for child, parent in enumerate(tree.parents):
            here = going & (before == parent)
            node = np.where(here & (uniform >= 0) & (uniform < chances[child]), child, node)
            uniform = np.where(here, uniform - chances[child], uniform)
        going = node != before
        tokens += going
    assert tokens.mean() == pytest.approx(by_hand, abs=5 * tokens.std() / len(tokens) ** 0.5)


def test_speedup() -> None:
    k = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10])
    found = theory.speedup(0.8, k, draft_cost=0.05)
    np.testing.assert_allclose(found, [1.71, 2.22, 2.57, 2.80, 2.95, 3.04, 3.08, 3.09, 3.05], atol=5e-3)
    assert theory.speedup(0.8, 0, 0.05) == 1
    best = theory.best_draft_length(0.8, 0.05)
    assert best.k == 8 and best.speedup == pytest.approx(3.09, abs=5e-3)
    assert theory.best_draft_length(0.8, 0.05, max_k=3) == theory.Best(3, theory.speedup(0.8, 3, 0.05))
    assert theory.best_draft_length([0.8] * 4, 0.05).k == 4
    assert theory.best_draft_length([0.8, 0.0, 1.0], 0.05).k == 1


def test_drafts_pay_exactly_if_they_are_right_more_often_than_they_cost() -> None:
    for alpha in (0.04, 0.3, 0.9):
        for cost in (0.0, 0.04, 0.2, 0.31, 1.0):
            best = theory.best_draft_length(alpha, cost)
            assert (best.k > 0) == (alpha > cost)
            least = (1 + alpha) / (1 + cost) if alpha > cost else 1
            assert best.speedup > least - 1e-12 and (alpha > cost or best.speedup == pytest.approx(1))


def test_cost_of_verifying() -> None:
    """As a number, a function, and a table in milliseconds, of which 5 tokens are in between two measured sizes."""
    expected = theory.expected_tokens(0.8, 4) / (4 * 0.05 + 1.2)
    table = {1: 20.0, 4: 23.0, 8: 27.0}
    for cost in (1.2, lambda n: 19.0 + n, table):
        assert theory.speedup(0.8, 4, 0.05, cost) == pytest.approx(expected)
        assert theory.speedup(0.8, 0, 0.05, cost) == 1
    np.testing.assert_allclose(
        theory.speedup(0.8, [[0], [4]], [0.0, 0.05], table), [[1, 1], [expected * 1.4 / 1.2, expected]]
    )
    assert theory.best_draft_length(1.0, 0.0, table) == theory.Best(7, pytest.approx(8 / 1.35))
    assert theory.round_speedup(2.5, 3, 21, 0.1, {1: 1, 21: 1.2}) == pytest.approx(2.5 / 1.5)


def test_laws_of_one_token() -> None:
    assert theory.acceptance(P, Q) == pytest.approx(0.7)
    assert theory.total_variation(P, Q) == pytest.approx(0.3)
    np.testing.assert_allclose(theory.residual(P, Q), [1, 0, 0])
    np.testing.assert_allclose(theory.residual(P, P), P)
    np.testing.assert_allclose(theory.residual([P, Q], [Q, P]), [[1, 0, 0], [0, 1, 0]])
    np.testing.assert_allclose(simulate.tempered([0.5, 0.3, 0.2, 0.0], 0.5), np.array([25, 9, 4, 0]) / 38)
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.full(9, 0.3), 50), rng.dirichlet(np.full(9, 0.3), 50)
    np.testing.assert_allclose(theory.acceptance(p, q), 1 - theory.total_variation(p, q))
    np.testing.assert_allclose(theory.output_law(p, q), p, atol=1e-12)
    wrong = theory.output_law(p, q, claimed=q[::-1])
    np.testing.assert_allclose(wrong.sum(-1), 1)
    assert (theory.total_variation(wrong, p) > 0.01).all()
    # the values of an argmax draft that is said to be drawn from a softmax
    np.testing.assert_allclose(theory.output_law([0.4, 0.6], [1, 0], claimed=[0.9, 0.1]), [4 / 9, 5 / 9])


def test_batches() -> None:
    """A device that turns compute-bound at 128 tokens: at batch 128 verifying five tokens a row costs five steps."""
    roofline = theory.Roofline(critical_tokens=128)
    assert roofline.cost(5 * 128) == 5 and roofline.cost(128) == 1
    assert theory.batch_speedup(0.8, 4, 0.05, 128, roofline) == pytest.approx(0.65, abs=5e-3)
    assert theory.batch_speedup(0.8, 4, 0.05, 1, roofline) == theory.speedup(0.8, 4, 0.05, roofline)
    assert theory.batch_speedup(0.8, 4, 0.05, [1, 10**6], {1: 1, 5: 1, 10**6: 10, 5 * 10**6: 50})[1] == pytest.approx(
        0.646, abs=1e-3
    )
    device = theory.Roofline.of_device(weight_bytes=16e9, bandwidth=4e12, flops=1e15)
    assert device.critical_tokens == pytest.approx(250) and device(1) == pytest.approx(4e-3)
    assert device(1000) == pytest.approx(2 * 8e9 * 1000 / 1e15)


@pytest.mark.parametrize("critical", [0.5, 1, 7.5, 128, 300])
@pytest.mark.parametrize(
    ("alpha", "k", "cost"), [(0.8, 4, 0.05), (0.3, 6, 0.02), (0.05, 2, 0.1), (1.0, 3, 0.0), (0.9, 1, 0)]
)
def test_crossover(critical: float, alpha: float, k: int, cost: float) -> None:
    roofline = theory.Roofline(critical)
    batch = np.arange(1, 1000)
    slower = theory.batch_speedup(alpha, k, cost, batch, roofline) < 1 - 1e-9
    found = theory.crossover_batch(alpha, k, cost, roofline)
    assert found == (int(batch[slower.argmax()]) if slower.any() else None)
    assert found is None or slower[found - 1 :].all()


def test_crossover_is_where_the_formula_says() -> None:
    tokens = theory.expected_tokens(0.8, 4)
    assert theory.crossover_batch(0.8, 4, 0.05, theory.Roofline(128)) == int(128 * (tokens - 0.2) / 5) + 1 == 81
    assert theory.crossover_batch(0.0, 4, 0.05, theory.Roofline(128)) == 1
    assert theory.crossover_batch(1.0, 4, 0.0, theory.Roofline(128)) is None


def test_a_million_tokens_of_a_badly_calibrated_draft() -> None:
    drawn = simulate.texts(TARGET, MISCALIBRATED)
    assert drawn.runs == 1_000_000 and drawn.law.shape == (8,)
    assert drawn.passed and drawn.worst < 1e-3
    kept = theory.acceptance(TARGET, MISCALIBRATED)
    assert drawn.alpha == pytest.approx(kept, abs=5 * (kept * (1 - kept) / 1e6) ** 0.5)


def test_texts_of_a_markov_chain() -> None:
    rng = np.random.default_rng(0)
    chain, drafter = rng.dirichlet(np.ones(6), 6), rng.dirichlet(np.ones(6), 6)
    drawn = simulate.texts(chain, drafter, num_draft_tokens=3, num_tokens=3, runs=40_000, start=2)
    assert drawn.exact[4, 1, 5] == pytest.approx(chain[2, 4] * chain[4, 1] * chain[1, 5])
    assert drawn.law.sum() == pytest.approx(1) and drawn.law.shape == (6, 6, 6)
    assert drawn.passed and 0.2 < drawn.alpha < 0.9
    other = simulate.texts(
        chain, drafter, num_draft_tokens=3, num_tokens=3, runs=40_000, start=2, exact=np.roll(chain, 1, axis=0)
    )
    assert not other.passed


def test_tokens_per_call_of_simulated_rounds() -> None:
    """With the same laws after every token the chances are equal and independent, as the formula has it."""
    drawn = simulate.texts(P, Q, num_draft_tokens=4, runs=200_000)
    assert drawn.tokens_per_call == pytest.approx(theory.expected_tokens(0.7, 4), abs=0.02)
    plain = simulate.texts(P, Q, num_draft_tokens=0, runs=200_000)
    assert plain.passed and plain.tokens_per_call == 1 and plain.alpha is None


def test_a_lossy_law_is_seen() -> None:
    assert not simulate.texts(P, Q, law="typical", runs=100_000).passed
    assert simulate.texts(P, Q, law=laws.Rejection(), runs=100_000).passed
    assert simulate.texts(P, Q, law="block", num_draft_tokens=2, num_tokens=2, runs=100_000).passed


def test_p_and_q_that_were_not_processed_alike() -> None:
    found = simulate.mismatch(TARGET, MISCALIBRATED, temperature=0.5)
    cold, cold_q = simulate.tempered(TARGET, 0.5), simulate.tempered(MISCALIBRATED, 0.5)
    assert found["alike"].passed and found["q untempered"].passed
    assert found["alike"].alpha == pytest.approx(theory.acceptance(cold, cold_q), abs=0.01)
    assert found["q untempered"].alpha == pytest.approx(theory.acceptance(cold, MISCALIBRATED), abs=0.01)
    for name, law in (
        ("q claimed untempered", theory.output_law(cold, cold_q, claimed=MISCALIBRATED)),
        ("p untempered", TARGET),
    ):
        wrong = found[name]
        np.testing.assert_allclose(wrong.exact, cold)
        np.testing.assert_allclose(wrong.law, law, atol=0.006)
        assert wrong.distance > 20 * wrong.noise


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.expected_tokens(1.2, 3), "alpha: expected numbers, 0 to 1, got 1.2"),
        (lambda: theory.expected_tokens("many", 3), "alpha: .* no number"),
        (lambda: theory.expected_tokens(0.5, 2.5), "k: expected whole numbers, 0 or more, got 2.5"),
        (lambda: theory.expected_tokens([0.5, 0.6], [1, 2, 3]), "do not broadcast: alpha"),
        (lambda: theory.chain_tokens([0.5, None]), "conditional: .* no number"),
        (lambda: theory.chain_tokens(0.5), "use expected_tokens"),
        (lambda: theory.tree_tokens([-1, -1, 0], [0.7, 0.4, 0.1]), "children of the pending token add up to 1.1"),
        (lambda: theory.tree_tokens([-1, 0, 0], [0.7, 0.4, 0.7]), "children of node 0 add up to 1.1"),
        (lambda: theory.tree_tokens([-1, 2, 0], [0.7, 0.4, 0.1]), "the parent of node 1 is 2"),
        (lambda: theory.tree_tokens([-1, 0], [0.7]), "one for each of the tree's 2 nodes"),
        (lambda: theory.tree_tokens([[-1, 0]], [0.7, 0.1]), "list of parents"),
        (lambda: theory.tree_tokens([-2], [0.7]), "tree: expected whole numbers, -1 or more, got -2"),
        (lambda: theory.speedup(0.5, 2, -0.1), "draft_cost: .* got -0.1"),
        (lambda: theory.speedup(0.5, 2, 0.1, 0), "one number above 0"),
        (lambda: theory.speedup(0.5, 2, 0.1, {2: 1.0}), "with 1 among them"),
        (lambda: theory.speedup(0.5, 4, 0.1, {1: 1.0, 4: 2.0}), "ends at 4 tokens, but 5"),
        (lambda: theory.speedup(0.5, 4, 0.1, lambda n: 5 - n), "cost of 5 tokens"),
        (lambda: theory.speedup(0.5, [1, 2], [0.1, 0.2, 0.3]), "do not broadcast"),
        (lambda: theory.best_draft_length([0.5, 0.4], 0.1, max_k=3), "only 2 draft positions"),
        (lambda: theory.best_draft_length([0.5, 0.4], 0.1, max_k=1.5), "max_k"),
        (lambda: theory.best_draft_length(0.5, [0.1, 0.2]), "draft_cost: expected one number"),
        (lambda: theory.acceptance([0.5, 0.4], [0.5, 0.5]), "p: .* sum of 0.9"),
        (lambda: theory.acceptance([0.5, 0.5], [0.5, 0.25, 0.25]), "q: 3 tokens, but p has 2"),
        (lambda: theory.residual(np.full((2, 4), 0.25), np.full((3, 4), 0.25)), "do not broadcast"),
        (lambda: simulate.tempered([0.5, 0.5], 0), "temperature: .* above 0"),
        (lambda: theory.Roofline(0), "critical_tokens"),
        (lambda: theory.Roofline.of_device(1e9, 1e12, -1), "flops"),
        (lambda: theory.batch_speedup(0.5, 2, 0.1, 0, theory.Roofline(9)), "batch: .* 1 or more, got 0"),
        (lambda: theory.batch_speedup(0.5, 2, 0.1, 8, 5.0), "pass_cost: expected a Roofline"),
        (lambda: theory.crossover_batch(0.5, 2, 0.1, 128), "roofline: expected"),
        (lambda: theory.crossover_batch([0.5, 0.6], 2, 0.1, theory.Roofline(9)), "one number for alpha"),
        (lambda: simulate.texts([0.5, 0.5], [0.2, 0.3, 0.5]), "q: 3 tokens, but p has 2"),
        (lambda: simulate.texts([[0.5, 0.5]], [0.5, 0.5]), "p: expected probabilities"),
        (lambda: simulate.texts([0.5, 0.5], [0.5, 0.4]), "q: .* sum of 0.9"),
        (lambda: simulate.texts(0.5, 0.5), "p: expected a law"),
        (lambda: simulate.texts([0.5, 0.5], [0.5, 0.5], runs=0), "runs: expected a whole number"),
        (lambda: simulate.texts([0.5, 0.5], [0.5, 0.5], start=2), "start: "),
        (lambda: simulate.texts([0.5, 0.5], [0.5, 0.5], num_tokens=20), "100,000"),
        (lambda: simulate.texts([0.5, 0.5], [0.5, 0.5], law="lenient"), "unknown law 'lenient'"),
        (lambda: simulate.mismatch([[0.5, 0.5]], [0.5, 0.5]), "laws of one token"),
        (lambda: simulate.mismatch([0.5, 0.5], [0.5, 0.5], temperature=1), "changes nothing"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
