"""Typical acceptance: the threshold by hand, the longest path, and that nothing takes it for a lossless law."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import sampling, testing
from specjax.errors import InputError
from specjax.laws import Greedy, Path, Rejection, Typical
from specjax.requests import LAWS
from specjax.sampling import Sampling
from specjax.testing import TableTree, law_test
from specjax.trees import Draft, chain

run = jax.jit(lambda law, target, draft, keys, depth: law(target, draft, keys, depth), static_argnums=(0, 4))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Table:
    """A target whose law depends on the last token; the pending one is 0."""

    scores: Any  # [V, V]
    rules: sampling.Rules

    def probs(self, node: jax.Array, path: jax.Array, depth: jax.Array) -> jax.Array:
        last = jnp.zeros_like(node)
        if path.shape[1]:
            last = jnp.where(depth > 0, jnp.take_along_axis(path, jnp.maximum(depth - 1, 0)[:, None], axis=1)[:, 0], 0)
        return sampling.distribution(self.scores[last], self.rules)

    def logits(self, node: jax.Array, path: jax.Array, depth: jax.Array) -> jax.Array:
        raise AssertionError("it asks for probabilities")


def tree(tokens: list[int], parents: list[int], rows: int = 1) -> Draft:
    def repeat(values: list[int]) -> jax.Array:
        return jnp.broadcast_to(jnp.array(values), (rows, len(values)))

    return Draft(repeat(tokens), repeat(parents), repeat([1] * len(tokens)).astype(bool))


def accept(
    law: Typical, chances: Any, tokens: list[int], parents: list[int], depth: int = 3, temperature: float = 1.0
) -> Path:
    """One row; `chances` [V, V] is the law after each token, or [V], the same after all."""
    p = jnp.broadcast_to(jnp.array(chances), (len(chances),) * 2)
    target = Table(jnp.log(p), Sampling(temperature=temperature).rules(1))
    return run(law, target, tree(tokens, parents), jax.random.split(jax.random.key(0), 1), depth)


@pytest.mark.parametrize(
    ("law", "chances", "accepted"),
    [
        # H = 0.8018 nats, 0.3 exp(-H) = 0.1346: epsilon decides
        (Typical(), [0.7, 0.2, 0.1], [True, True, True]),
        (Typical(), [0.75, 0.2, 0.05], [True, True, False]),
        (Typical(epsilon=0.5), [0.7, 0.2, 0.1], [True, True, False]),  # and here the entropy: 0.1 < 0.1346 < 0.2
        (Typical(epsilon=0.5, alpha=0.5), [0.7, 0.2, 0.1], [True, False, False]),  # 0.2243
        # twenty tokens alike: H = ln 20, the threshold 0.3 / 20 = 0.015 is below all of them, 1.5 / 20 is not
        (Typical(), [0.05] * 20, [True] * 20),
        (Typical(alpha=1.5), [0.05] * 20, [False] * 20),
        # a filtered token is never plausible
        (Typical(epsilon=0.0), [0.6, 0.4, 0.0], [True, True, False]),
    ],
)
def test_the_threshold(law: Typical, chances: list[float], accepted: list[bool]) -> None:
    found = [bool(accept(law, chances, [token], [-1]).accepted[0]) for token in range(len(chances))]
    assert found == accepted


def test_the_processed_law_is_judged() -> None:
    """At temperature 1/2 the squares: 0.7, 0.2, 0.1 become 0.907, 0.074, 0.019."""
    at = [bool(accept(Typical(), [0.7, 0.2, 0.1], [1], [-1], temperature=t).accepted[0]) for t in (1.0, 0.5)]
    assert at == [True, False]


# after 0 and after 1 anything goes; after 2 nothing but 3 does
CHANCES = [[0.1, 0.4, 0.3, 0.2], [0.25, 0.15, 0.2, 0.4], [0.01, 0.01, 0.01, 0.97], [0.25, 0.25, 0.25, 0.25]]


@pytest.mark.parametrize(
    ("tokens", "parents", "nodes"),
    [
        ([1, 2], [-1, 0], [1, 2]),
        ([2, 1, 3], [-1, 0, 1], [1]),  # 1 after 2 is not plausible, and what is below it does not count
        ([1, 2, 3], [-1, -1, 1], [2, 3]),  # the deepest path, not the likeliest sibling
        ([1, 2, 3, 3], [-1, -1, 0, 1], [2, 4]),  # of two as deep, the likelier: 0.3 * 0.97 over 0.4 * 0.4
        ([2, 1, 1, 3], [-1, 0, -1, 2], [3, 4]),  # the first child's path ends early, so the second's is taken
        ([1, 1, 3, 3], [-1, -1, 0, 1], [1, 3]),  # the same twice: the first
        ([3, 3, 3, 3], [-1, 0, 1, 2], [1, 2, 3]),  # no deeper than asked for
        ([2, 0], [-1, 0], [1]),
    ],
)
def test_the_longest_path(tokens: list[int], parents: list[int], nodes: list[int]) -> None:
    path = accept(Typical(), CHANCES, tokens, parents)
    assert path.accepted.tolist() == [len(nodes)]
    assert path.nodes.tolist() == [[0, *nodes, *[0] * (3 - len(nodes))]]
    assert path.tokens[0, : len(nodes)].tolist() == [tokens[node - 1] for node in nodes]
    assert path.tokens[0, len(nodes)] == path.bonus[0]
    children = [n for n, parent in enumerate(parents) if parent == nodes[-1] - 1]
    assert path.rejected.tolist() == [bool(children) and len(nodes) < 3]


def test_the_bonus_token_is_drawn_from_the_target() -> None:
    """At the end of the path, and where nothing is accepted too."""
    rows = 50_000
    keys = jax.random.split(jax.random.key(1), rows)
    target = Table(jnp.log(jnp.array(CHANCES)), Sampling(temperature=1.0).rules(rows))
    for tokens, parents, accepted, last in (([1, 2], [-1, 0], 2, 2), ([2, 1], [-1, 0], 1, 2)):
        path = run(Typical(), target, tree(tokens, parents, rows), keys, 3)
        assert set(path.accepted.tolist()) == {accepted}
        found = np.bincount(np.asarray(path.bonus), minlength=4) / rows
        assert 0.5 * np.abs(found - CHANCES[last]).sum() < 0.01
    impatient = run(Typical(epsilon=0.9, alpha=10.0), target, tree([1], [-1], rows), keys, 3)
    assert set(impatient.accepted.tolist()) == {0}
    found = np.bincount(np.asarray(impatient.bonus), minlength=4) / rows
    assert 0.5 * np.abs(found - CHANCES[0]).sum() < 0.01


@pytest.mark.parametrize("law", [Typical(), Typical(0.0, 0.0), Typical(0.99, 100.0)])
def test_temperature_zero_takes_the_argmax_alone(law: Typical) -> None:
    """Whatever the settings."""
    for token in range(4):
        path = accept(law, CHANCES, [token, 3], [-1, 0], temperature=0.0)
        assert path.tokens[0, 0] == 1
        assert path.accepted.tolist() == [2 if token == 1 else 0]


def test_temperature_zero_is_greedy(decode: Any, table: specjax.Target, table_text: Any) -> None:
    """Token for token; only that a lossy law still says that it is one."""
    found = decode(table, specjax.PromptLookup(3), law="typical")
    assert found.token_ids == table_text
    assert found.stats.accepted > 0
    assert not found.lossless


def test_it_is_no_lossless_law() -> None:
    """The law test, which accepts `Rejection` on the same drafts, rejects it: texts lean towards the drafter's."""
    target = testing.tiny_target(testing.TableModel.random(4))
    drafter = TableTree.random(4, 2, "s")
    options: dict[str, Any] = {
        "sampling": Sampling(temperature=0.8),
        "prompts": [[3, 1, 3], [1, 0, 2]],
        "samples": 60_000,
    }
    right, wrong = (law_test(target, drafter, law=law, **options) for law in ("rejection", "typical"))
    assert right.passed, right
    assert not wrong.passed, wrong
    assert wrong.distance > 5 * wrong.noise


def test_plain_decoding_is_as_under_rejection() -> None:
    """Draw by draw."""
    rows = 1000
    target = Table(jnp.log(jnp.array(CHANCES)), Sampling(temperature=1.0).rules(rows))
    nothing = chain(jnp.zeros((rows, 0), int), jnp.zeros(rows, int))
    keys = jax.random.split(jax.random.key(1), rows)
    bonus = [run(law, target, nothing, keys, 0).bonus.tolist() for law in (Typical(), Rejection())]
    assert bonus[0] == bonus[1]
    assert set(bonus[0]) == {0, 1, 2, 3}


def test_it_takes_more_than_rejection(table: specjax.Target) -> None:
    """What it is for; and rows do not depend on their batch."""
    prompts = [[5, 6, 5], [1, 2, 3, 4, 1, 2, 3, 4, 1], [7, 8, 7, 8, 9, 10, 11, 12]]
    drafter = TableTree.random(64, 1, "ddd")
    options: dict[str, Any] = {"max_new_tokens": 60, "sampling": Sampling(temperature=1.0)}

    def text(law: Any, prompts: Any, seed: Any) -> specjax.Generation:
        return specjax.generate(table, prompts, drafter, law, seed=seed, **options)

    typical, rejection = (text(law, prompts, [1, 2, 3]) for law in (Typical(0.01), "rejection"))
    assert typical.stats.accepted > 1.5 * rejection.stats.accepted > 0
    assert (typical.law, typical.lossless) == (Typical(0.01), False)
    assert (rejection.law, rejection.lossless) == (Rejection(), True)
    again = text(Typical(0.01), [prompts[2], prompts[0], prompts[2]], [3, 1, 7])
    assert again.token_ids[:2] == [typical.token_ids[2], typical.token_ids[0]]
    assert again.token_ids[2] != again.token_ids[0]


def test_pieces_say_it(table: specjax.Target) -> None:
    pieces = list(specjax.stream(table, [[5, 6, 5]], law="typical", max_new_tokens=3))
    assert {piece.lossless for piece in pieces} == {False}


def test_by_name() -> None:
    assert LAWS["typical"] == Typical()
    assert [law.lossless for law in LAWS.values()] == [True, True, True, False]
    assert specjax.Typical is Typical
    assert Typical() not in (Greedy(), Rejection())


@pytest.mark.parametrize(
    "settings", [{"epsilon": 1.0}, {"epsilon": -0.1}, {"epsilon": "a"}, {"alpha": -1}, {"alpha": float("inf")}]
)
def test_settings_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(settings))}: expected a number"):
        Typical(**settings)


def test_a_chain_of_likely_tokens_is_taken_whole() -> None:
    p = np.full((4, 4), 0.1)
    np.fill_diagonal(p, 0.7)
    target = Table(jnp.log(jnp.array(p, jnp.float32)), Sampling(temperature=1.0).rules(2))
    draft = chain(jnp.zeros((2, 5), int), jnp.array([5, 2]))
    path = run(Typical(), target, draft, jax.random.split(jax.random.key(0), 2), 5)
    assert path.accepted.tolist() == [5, 2]
    assert path.rejected.tolist() == [False, False]
