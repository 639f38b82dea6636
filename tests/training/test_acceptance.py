"""The teacher-forced estimate is what decoding gives, round by round."""

from typing import Any

import numpy as np
import pytest
from small_networks import LAYERS, MODEL, NETWORKS

import specjax
from specjax import testing
from specjax.errors import InputError
from specjax.training.acceptance import HeldOut, walk
from specjax.training.eagle import Eagle3Objective, EagleObjective
from specjax.training.medusa import MedusaObjective
from specjax.training.mtp import MtpObjective
from specjax.trees import chain_tree, static_tree

CHAIN = chain_tree(3)
OBJECTIVES: dict[str, Any] = {
    "eagle1": EagleObjective(tree=CHAIN),
    "eagle3": Eagle3Objective(feature_layers=LAYERS, tree=CHAIN),
    "mtp": MtpObjective(feature="layer.2", tree=CHAIN),
    "medusa": MedusaObjective(tree=CHAIN),
}
PROMPTS = [[9], [5, 6, 5], [1, 2, 3, 4, 1, 2, 3, 4, 1], [7, 8, 7, 8, 9, 10, 11, 7, 8], [4, 4], [10, 2, 10]]


@pytest.fixture(scope="module")
def held_out() -> HeldOut:
    """Answers that end by EOS and by the cap, in batches of ragged rows."""
    target = testing.tiny_target(MODEL, eos=[3, 4])
    held = HeldOut.of(target, PROMPTS, max_new_tokens=40, batch_size=4)
    assert {len(a) == 40 for a in held.answer_ids} == {True, False}
    return held


@pytest.mark.parametrize(
    "name", ["eagle3", "medusa", *(pytest.param(n, marks=pytest.mark.slow) for n in ("eagle1", "mtp"))]
)
def test_estimate_is_real(name: str, held_out: HeldOut) -> None:
    objective, network = OBJECTIVES[name], NETWORKS[name]
    stats = held_out.decode(objective, network)
    assert stats.new_tokens == sum(map(len, held_out.answer_ids))
    assert stats.accepted > 5  # not because nothing is ever right
    assert objective.chain_length == 3
    assert held_out.teacher_forced(objective, network, 3) == stats.tokens_per_call


def test_only_chains_have_an_estimate() -> None:
    assert MedusaObjective(tree=static_tree([(0,), (1,)])).chain_length is None


def test_walk_by_hand() -> None:
    """Ten tokens after a prompt of three: accepted 2, 0, 3, then a draft that the limit cuts to nothing."""
    text = np.arange(100, 113)
    guesses = np.zeros((13, 3), int)
    guesses[1] = [103, 104, 0]  # with three tokens committed: 103 and 104 are right; 105 comes with them
    guesses[4] = [0, 107, 108]  # six committed: the first guess is wrong, what follows does not count
    guesses[5] = [107, 108, 109]  # seven: all right, and 110
    guesses[9] = [111, 112, 113]  # eleven, one or two short of the limit
    assert walk(text, 3, 14, guesses) == 4
    assert walk(text, 3, 13, guesses) == 4  # a draft of one token still fits, and the bonus token ends the row
    guesses[9] = 0
    assert walk(text, 3, 13, guesses) == 5
    assert walk(text[:1], 1, 5, guesses) == 0
    assert walk(np.array([7, 8]), 1, 9, np.full((2, 3), 8)) == 1  # no pair before the second token: plain


def test_no_prompts() -> None:
    with pytest.raises(InputError, match="no held-out prompts"):
        HeldOut.of(testing.tiny_target(MODEL, eos=[3]), [])


def test_networks_are_measured_without_compiling_again(held_out: HeldOut) -> None:
    """Every evaluation of a run has other weights in the same shapes."""
    from specjax.drafters.medusa import MedusaHeads
    from specjax.job import _run

    objective, network = OBJECTIVES["medusa"], NETWORKS["medusa"]
    held_out.decode(objective, network)
    before = _run._cache_size()
    other = MedusaHeads.random(network.config, seed=5, scale=0.3, d2t=network.d2t[...])
    assert held_out.decode(objective, other).new_tokens > 0
    assert _run._cache_size() == before
    assert isinstance(held_out.target, specjax.Target)
