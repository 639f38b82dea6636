"""What networks learn from: the loss is its formula, positions are those of decoding, rows do not matter."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_networks import LAYERS, MODEL, NETWORKS, WORDS, V

from specjax import testing
from specjax.drafters.eagle_unroll import unroll
from specjax.errors import InputError
from specjax.training.batches import Batch
from specjax.training.eagle import Eagle3Objective, EagleObjective
from specjax.training.features import online, segment_mask
from specjax.training.medusa import MedusaObjective
from specjax.training.medusa_joint import HeadsAndTarget, JointMedusaObjective
from specjax.training.mtp import MtpObjective

OBJECTIVES: dict[str, Any] = {
    "eagle1": EagleObjective(noise=0.0, vocabulary=tuple(WORDS)),
    "eagle3": Eagle3Objective(steps=3, feature_layers=LAYERS),
    "mtp": MtpObjective(steps=3, feature="layer.2"),
    "medusa": MedusaObjective(),
}


def batch_of(*rows: list[tuple[list[int], int]], length: int = 24) -> Batch:
    """Rows of conversations, each its tokens and how many of the last are supervised."""
    tokens, segments, positions = np.zeros((3, len(rows), length), np.int32)
    mask = np.zeros((len(rows), length), bool)
    for b, row in enumerate(rows):
        at = 0
        for segment, (ids, supervised) in enumerate(row, 1):
            place = slice(at, at + len(ids))
            tokens[b, place], segments[b, place], positions[b, place] = ids, segment, np.arange(len(ids))
            mask[b, place.stop - supervised : place.stop] = True
            at = place.stop
    return Batch(tokens, mask, segments, positions, np.arange(len(rows), dtype=np.int32))


@jax.jit(static_argnums=0)
def losses(objective: Any, network: Any, batch: Batch) -> Any:
    batch = jax.tree.map(jnp.asarray, batch)
    found = objective.losses(network, MODEL, batch, online(MODEL, batch, objective.features), jax.random.key(0))
    return found


TEXTS = [([5, 6, 1, 2, 4, 6, 9, 11, 2], 5), ([7, 1, 9, 9, 3, 2, 1, 6], 6), ([8, 2, 4], 1)]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("capacity", [None, 13])
def test_rows_do_not_matter(name: str, capacity: int | None) -> None:
    """Packed, alone, behind more padding, or with its head run on supervised positions only: the same sums."""
    objective = replace(OBJECTIVES[name], capacity=capacity)
    together = losses(objective, NETWORKS[name], batch_of(TEXTS[:2], TEXTS[2:]))
    alone = [losses(objective, NETWORKS[name], batch_of([text], [])) for text in TEXTS]
    assert together.count == sum(text[1] for text in TEXTS)
    np.testing.assert_allclose(together.total, sum(x.total for x in alone), rtol=1e-5)
    np.testing.assert_allclose(losses(objective, NETWORKS[name], batch_of(TEXTS, [])).total, together.total, rtol=1e-5)
    for figure, (total, count) in together.figures.items():
        if not figure.startswith("missed"):
            expected = [x.figures[figure] for x in alone]
            np.testing.assert_allclose(total, sum(x[0] for x in expected), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(count, sum(x[1] for x in expected), rtol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_supervised(name: str) -> None:
    batch = batch_of([(TEXTS[0][0], 0)], [])
    objective, network = OBJECTIVES[name], NETWORKS[name]

    def total(network: Any) -> Any:
        return losses(objective, network, batch).total

    value, gradient = jax.value_and_grad(total, allow_int=True)(network)
    assert value == 0
    for leaf in jax.tree.leaves(gradient):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            assert np.all(np.asarray(leaf) == 0)


@pytest.mark.parametrize("name", NETWORKS)
def test_mask_moves_with_the_targets(name: str) -> None:
    """With tokens 5 … 8 supervised, the first guess of each comes from two places before: those get gradient, the
    last two places and whatever is not followed by a supervised token get none.
    """
    objective, network = replace(OBJECTIVES[name], **({"steps": 1} if name != "medusa" else {})), NETWORKS[name]
    batch = jax.tree.map(jnp.asarray, batch_of([([5, 6, 1, 2, 4, 6, 9, 11, 2], 4)], []))
    features = online(MODEL, batch, objective.features)

    @jax.jit
    def total(hidden: Any) -> Any:
        given = {n: hidden if n == objective.features[0] else x for n, x in features.items()}
        return objective.losses(network, MODEL, batch, given, jax.random.key(0)).total

    gradient = np.abs(np.asarray(jax.grad(total)(features[objective.features[0]]))[0]).sum(-1)
    assert np.all(gradient[3:7] > 0)
    assert np.all(gradient[9:] == 0)
    if name != "eagle1":  # whose loss also holds the true feature before each token
        assert np.all(gradient[7:] == 0)


def law(logits: Any) -> np.ndarray:
    return np.asarray(jax.nn.softmax(jnp.asarray(logits, jnp.float32)))


def test_eagle3_is_its_formula() -> None:
    text, supervised = TEXTS[0]
    batch = jax.tree.map(jnp.asarray, batch_of([TEXTS[0]]))
    objective, network = OBJECTIVES["eagle3"], NETWORKS["eagle3"]
    features = online(MODEL, batch, objective.features)
    outputs = unroll(
        network, MODEL, network.fuse(features), batch.tokens, batch.positions, segment_mask(batch.segments), 3
    )
    p = law(MODEL.logits(features["hidden"])[..., np.array(WORDS)])[0]
    expected, right = 0.0, np.zeros((3, len(text)), bool)
    for u in range(len(text) - supervised, len(text)):
        for s, output in enumerate(outputs):
            t = u - 2 - s
            if t >= len(text) - supervised - 2:
                q = law(network.logits(output, MODEL))[0, t]
                right[s, t] = text[u] == WORDS[q.argmax()]
                if text[u] in WORDS:
                    expected += 0.8**s * -(p[u - 1] * np.log(q)).sum()
    found = losses(objective, network, batch)
    np.testing.assert_allclose(found.total, expected, rtol=1e-5)
    for s in range(3):
        assert found.figures[f"accuracy.{s + 1}"][0] == right[s].sum()
        assert found.figures[f"acceptance.{s + 1}"][0] == right[: s + 1].all(0).sum()


def test_eagle1_is_its_formula() -> None:
    text, supervised = TEXTS[1]
    batch = jax.tree.map(jnp.asarray, batch_of([TEXTS[1]]))
    objective, network = OBJECTIVES["eagle1"], NETWORKS["eagle1"]
    features = online(MODEL, batch, ("hidden",))
    (output,) = unroll(
        network, MODEL, features["hidden"], batch.tokens, batch.positions, segment_mask(batch.segments), 1
    )
    expected = 0.0
    for u in range(len(text) - supervised, len(text)):
        true, guess = features["hidden"][0, u - 1], output[0, u - 2]
        d = np.abs(np.asarray(guess - true))
        expected += np.where(d < 1, 0.5 * d * d, d - 0.5).mean()
        if text[u] in WORDS:
            p, q = (law(MODEL.logits(x[None, None]))[0, 0, np.array(WORDS)] for x in (true, guess))
            expected += 0.1 * -(p / p.sum() * np.log(q / q.sum())).sum()
    found = losses(objective, network, batch)
    np.testing.assert_allclose(found.total, expected, rtol=1e-5)


@pytest.mark.parametrize("soft", [False, True])
def test_medusa_is_its_formula(soft: bool) -> None:
    text, supervised = TEXTS[0]
    batch = jax.tree.map(jnp.asarray, batch_of([TEXTS[0]]))
    network = NETWORKS["medusa"]
    hidden = online(MODEL, batch, ("hidden",))["hidden"]
    q = law(network.logits(hidden, MODEL))[0]
    p = law(MODEL.logits(hidden)[..., np.array(WORDS)])[0]
    expected = 0.0
    for u in range(len(text) - supervised, len(text)):
        for i in range(3):
            if u - 2 - i >= len(text) - supervised - 2 and text[u] in WORDS:
                wanted = p[u - 1] if soft else np.array(WORDS) == text[u]
                expected += 0.8 ** (i + 1) * -(wanted * np.log(q[u - 2 - i, i])).sum()
    np.testing.assert_allclose(losses(MedusaObjective(soft=soft), network, batch).total, expected, rtol=1e-5)


def test_without_the_shifted_token() -> None:
    """The pair at t then has the token at t itself, and the guess of t + 2 knows nothing of t + 1."""
    objective = EagleObjective(noise=0.0, shifted=False)
    a, b = (jax.tree.map(jnp.asarray, batch_of([([5, 6, x, 2, 4], 2)])) for x in (1, 9))
    features = online(MODEL, a, ("hidden",))
    guesses = jax.jit(lambda o, batch: o.ranked(NETWORKS["eagle1"], MODEL, batch, features, 1, V), static_argnums=0)
    assert np.array_equal(guesses(objective, a)[0, 1], guesses(objective, b)[0, 1])
    shifted = replace(objective, shifted=True)
    assert not np.array_equal(guesses(shifted, a)[0, 1], guesses(shifted, b)[0, 1])
    assert not objective.decodes
    with pytest.raises(InputError, match="for comparison only"):
        objective.decoding(NETWORKS["eagle1"], testing.tiny_target(MODEL))


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_unroll_on_a_text_shorter_than_its_steps(name: str) -> None:
    objective = replace(OBJECTIVES[name], steps=4)
    found = losses(objective, NETWORKS[name], batch_of([([5, 6], 1)], [([5, 6, 2], 1)], length=3))
    assert np.isfinite(found.total)
    assert found.count == 2
    made = [found.figures[f"accuracy.{s + 1}"][1] for s in range(4)]
    assert made == [1, 0, 0, 0]  # only the text of three tokens has a pair with a token to guess


def test_unrolled_attention_is_attention_with_diagonals() -> None:
    """The steps' own keys and values beside the first step's: as one block with a mask of diagonals, to rounding."""
    batch = jax.tree.map(jnp.asarray, batch_of(TEXTS[:2], TEXTS[2:]))
    network, mask = NETWORKS["eagle3"], segment_mask(batch.segments)
    fused = network.fuse(online(MODEL, batch, network.features))
    outputs = unroll(network, MODEL, fused, batch.tokens, batch.positions, mask, 3)
    own = jnp.broadcast_to(jnp.eye(mask.shape[1], dtype=bool), mask.shape)
    feature, earlier, seen = fused, None, mask
    for step in range(3):
        ids = jnp.pad(batch.tokens[:, step + 1 :], ((0, 0), (0, step + 1)))
        fed = network(network.embeddings(ids, MODEL), feature, batch.positions + step, seen, earlier=earlier)
        np.testing.assert_allclose(outputs[step], fed.features, atol=2e-5)
        joined = (earlier, fed.block) if earlier is not None else (fed.block,)
        earlier = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=2), *joined)
        feature, seen = fed.features, jnp.concatenate([seen, own], axis=2)


def test_medusa_2_is_its_formula() -> None:
    """With the target's own weights, its heads' loss is Medusa-1's; and both parts move the target."""
    text, supervised = TEXTS[0]
    batch = jax.tree.map(jnp.asarray, batch_of([TEXTS[0]]))
    network = HeadsAndTarget(NETWORKS["medusa"], MODEL)
    hidden = online(MODEL, batch, ("hidden",))["hidden"]
    q = law(MODEL.logits(hidden))[0]
    language = -sum(np.log(q[u - 1, text[u]]) for u in range(len(text) - supervised, len(text)))
    alone = losses(OBJECTIVES["medusa"], NETWORKS["medusa"], batch)
    objective = JointMedusaObjective(coefficient=0.3)

    @jax.jit
    def total(network: Any) -> Any:
        return objective.losses(network, MODEL, batch, {}, jax.random.key(0)).total

    np.testing.assert_allclose(total(network), language + 0.3 * alone.total, rtol=1e-5)
    gradient = jax.grad(total, allow_int=True)(network)
    assert np.abs(gradient.target.embed[...]).max() > 0
    assert np.abs(gradient.heads.linear[...]).max() > 0
