"""A greedy text against plain decoding's: the same, a near-tie, or a fault."""

import jax.numpy as jnp
import numpy as np
import pytest
from common.exact import FLOAT32_LIMIT, examine, gaps, near_tie_limit

import specjax
from specjax import Sampling, testing

GREEDY = Sampling()


def table_target(second: float, dtype: str = "float32") -> specjax.Target:
    """After every token, 1 is best (logit 8) and 2 comes second; then 3, far below."""
    table = np.zeros((8, 8), np.float32)
    table[:, 1], table[:, 2], table[:, 3] = 8.0, second, 4.0
    target = testing.tiny_target(testing.TableModel(jnp.asarray(table)))
    return specjax.Target(target.model, dtype=dtype)


def test_the_same_text_needs_no_look():
    assert examine(table_target(0.0), GREEDY, [5], [1, 1, 1], [1, 1, 1]) is None


def test_two_logits_within_the_limit_are_a_near_tie():
    fork = examine(table_target(8 - FLOAT32_LIMIT / 2), GREEDY, [5, 6], [1, 1, 1], [1, 2, 1])
    assert fork is not None
    assert (fork.position, fork.plain_token, fork.token) == (1, 1, 2)
    assert fork.gap == pytest.approx(FLOAT32_LIMIT / 2, rel=0.02)
    assert fork.near_tie
    assert "near-tie at new token 2: 2 instead of 1" in str(fork)


def test_two_logits_apart_are_a_fault():
    fork = examine(table_target(8 - 2 * FLOAT32_LIMIT), GREEDY, [5, 6], [1, 1, 1], [1, 2, 1])
    assert fork is not None
    assert not fork.near_tie
    assert str(fork).startswith("FAULT at new token 2")


def test_a_wrong_token_after_a_near_tie_is_a_fault():
    fork = examine(table_target(8 - FLOAT32_LIMIT / 2), GREEDY, [5], [1, 1, 1], [2, 1, 3])
    assert fork is not None
    assert (fork.position, fork.near_tie) == (0, False)
    assert fork.worst_gap == pytest.approx(4)


@pytest.mark.parametrize(("plain", "other"), [([1, 1], [1, 1, 1]), ([1, 1, 1], [1, 1])])
def test_a_text_that_ends_elsewhere_is_a_fault(plain: list[int], other: list[int]):
    fork = examine(table_target(0.0), GREEDY, [5], plain, other)
    assert fork is not None
    assert (fork.position, fork.gap, fork.near_tie) == (2, None, False)


def test_penalties_are_part_of_the_comparison():
    """With a repetition penalty of 2, token 1 (8 / 2) loses to 2 (6) once it has been said."""
    below, largest = gaps(table_target(6.0), Sampling(repetition_penalty=2.0), [5], [1, 2, 1])
    assert below == pytest.approx([0, 0, 0])  # after 1 and 2, 1 is at 4, 2 at 3, 3 at 4
    assert largest == 8
    assert gaps(table_target(6.0), Sampling(repetition_penalty=2.0), [5], [1, 1])[0] == pytest.approx([0, 2])


def test_short_formats_have_a_limit_that_grows_with_the_logits():
    assert near_tie_limit("float32", 100.0) == FLOAT32_LIMIT
    assert near_tie_limit("bfloat16", 20.0) == pytest.approx(2 * near_tie_limit("bfloat16", 10.0))
    fork = examine(table_target(8 - 1e-2, "bfloat16"), GREEDY, [5], [1], [2])
    assert fork is not None
    assert fork.near_tie


def test_a_decoders_own_greedy_text_has_no_gaps(tiny: specjax.Target):
    text = specjax.generate(tiny, [[5, 6, 7]], max_new_tokens=40).token_ids[0]
    below, _ = gaps(tiny, GREEDY, [5, 6, 7], text)
    assert below.shape == (40,)
    assert below.max() < 1e-4
