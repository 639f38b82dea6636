"""Medusa: what its heads read, the trees they fill, and the tree that fits their accuracies."""

from itertools import combinations, product
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.drafters.medusa import Medusa, MedusaConfig, MedusaHeads, best_tree
from specjax.errors import InputError
from specjax.trees import static_tree

TREE = static_tree([(0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 2, 1)])


def heads(vocab_size: int = 12, **changes: Any) -> MedusaHeads:
    return MedusaHeads.random(MedusaConfig(32, vocab_size, 3, **changes), scale=0.3)


@pytest.mark.parametrize("shared", [False, True])
def test_greedy(shared: bool, check_greedy: Any) -> None:
    out = check_greedy(Medusa(heads(shared_head=shared, num_layers=1 + shared), TREE, block_sizes=(8,)))
    assert {len(r.proposed) for row in out.trace for r in row} >= {0, 7}
    assert {len(r.accepted) for row in out.trace for r in row} >= {0, 1, 2}


@pytest.mark.slow
def test_greedy_alone(check_greedy: Any) -> None:
    check_greedy(Medusa(heads(), TREE, block_sizes=(8,)), [[5, 6, 5]])


@pytest.mark.slow  # deterministic trees under this law are tested with EAGLE too
def test_law(check_law: Any) -> None:
    check_law(Medusa(heads(5), TREE, block_sizes=(8,)))


def test_heads_read_the_last_committed_hidden_state(few: Any, forward: Any) -> None:
    """In every round head i guesses token i + 1 after the pending one from the target's hidden state before that."""
    network = heads()
    job = specjax.prepare(few, [[9], [5, 6, 5], [1, 2, 3, 4, 1, 2]], drafter=Medusa(network, TREE), max_new_tokens=20)
    state = job.prefill()
    for _ in range(6):
        running, lengths = np.asarray(state.running), np.asarray(state.length)
        texts = [np.asarray(state.tokens)[i, : lengths[i]].tolist() for i in range(3)]
        memory = np.asarray(state.memory)
        features = np.asarray(forward(few.model, texts, ("hidden",))["hidden"])
        state, info = job.step(state)
        for i in np.flatnonzero(running & (lengths > 1)):
            hidden = features[i, lengths[i] - 2]
            np.testing.assert_allclose(memory[i], hidden, atol=1e-5)
            ranked = np.argsort(-np.asarray(network.logits(hidden, few.model)), axis=-1)
            expected = [ranked[len(c) - 1, c[-1]] for c in TREE.choices]
            valid = np.asarray(info.draft.valid)[i]
            np.testing.assert_array_equal(np.asarray(info.draft.tokens)[i][valid], np.array(expected)[valid])


def test_a_head_is_a_residual_block(few: Any) -> None:
    network, x = heads(num_layers=2), np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    linear, bias = np.asarray(network.linear[...]), np.asarray(network.bias[...])
    for i in range(3):
        y = x
        for j in range(2):
            z = y @ linear[i, j] + bias[i, j]
            y = y + z / (1 + np.exp(-z))
        np.testing.assert_allclose(network(x)[:, i], y, atol=1e-5)
        scores = y @ np.asarray(network.head[...])[i].T
        np.testing.assert_allclose(network.logits(x, few.model)[:, i], scores, atol=1e-4)


def test_training_starts_from_the_target(few: Any) -> None:
    """With W = 0 every head says what the target's own does."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 32)), jnp.float32)
    own = few.model.logits(x)
    for shared in (False, True):
        network = MedusaHeads.start(MedusaConfig(32, 12, 2, shared_head=shared), few.model)
        for i in range(2):
            np.testing.assert_allclose(network.logits(x, few.model)[:, :, i], own, atol=1e-5)


def test_arrays_come_back(few: Any) -> None:
    network = heads()
    arrays = {name: np.asarray(getattr(network, name)[...]) for name in ("linear", "bias", "head")}
    again = MedusaHeads.from_arrays(network.config, arrays)
    x = jnp.ones((1, 32))
    np.testing.assert_array_equal(network.logits(x, few.model), again.logits(x, few.model))


def test_best_tree_against_brute_force() -> None:
    """All trees of up to four nodes over two heads of three ranks; accuracies need not fall with rank."""
    random = np.random.default_rng(0)
    nodes = [(a,) for a in range(3)] + list(product(range(3), range(3)))
    for _ in range(5):
        accuracies = random.random((2, 3))
        for size in range(5):

            def worth(tree: Any, accuracies: Any = accuracies) -> float:
                return sum(np.prod([accuracies[i][rank] for i, rank in enumerate(choice)]) for choice in tree)

            trees = [t for t in combinations(nodes, size) if all(len(c) == 1 or c[:1] in t for c in t)]
            found = best_tree(accuracies, size)
            assert found.num_nodes == size
            assert worth(found.choices) == pytest.approx(max(map(worth, trees)))


def test_bad_input(few: Any) -> None:
    with pytest.raises(InputError, match="3 deep, but there are 2 heads"):
        Medusa(MedusaHeads.random(MedusaConfig(32, 12, 2)), TREE)
    with pytest.raises(InputError, match="allow 0 to 12"):
        best_tree(np.ones((2, 3)), 13)
    with pytest.raises(InputError, match="chances"):
        best_tree([[1.5]], 1)
    wrong = Medusa(MedusaHeads.random(MedusaConfig(16, 12, 3)), TREE)
    with pytest.raises(InputError, match="width 16 and 12 tokens"):
        specjax.generate(few, [[1, 2]], drafter=wrong)
    for choices, message in (
        ([(0,), (1, 0)], r"\(1, 0\) has no parent"),
        ([(0,), (0,)], "twice"),
        ([(-1,)], "ranks of 0 or more"),
        ([()], "ranks of 0 or more"),
    ):
        with pytest.raises(InputError, match=message):
            static_tree(choices)


def test_nothing_is_compiled_again(few: Any, prompts: Any) -> None:
    """Other heads of the same shape, other prompts, other acceptances: the same programs."""
    sizes = []
    for seed in (0, 1):
        network = MedusaHeads.random(MedusaConfig(32, 12, 3), seed, scale=0.3)
        drafter = Medusa(network, TREE, block_sizes=(8,))
        specjax.generate(few, prompts[seed:] + prompts[:seed], drafter=drafter, max_new_tokens=45, trace=True)
        sizes.append(specjax.job._run._cache_size())
    assert sizes[0] == sizes[1]
