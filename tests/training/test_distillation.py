"""The draft model's objective: what is minimised, over which tokens, and that it is what decoding sees."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from specjax import testing
from specjax.drafters.small_decoder import SmallDecoder, SmallDecoderConfig
from specjax.errors import InputError
from specjax.training.acceptance import HeldOut
from specjax.training.batches import Batch, lay_out
from specjax.training.distillation import DIVERGENCES, Distillation
from specjax.training.features import online, segment_mask
from specjax.training.objective import Losses
from specjax.training.rendering import Rendered
from specjax.training.supervised import room

V, SIZE = 41, 24
TARGET = testing.tiny_model(vocab_size=V)
WORDS = list(range(1, V, 2))
RANDOM = np.random.default_rng(0)
CONVERSATIONS = [
    Rendered(RANDOM.integers(1, V, n).astype(np.int32), (np.arange(n) >= n // 2) & (np.arange(n) != n - 2), f"{n}")
    for n in (5, 9, 11, 3, 14, 8, 7)
]


def network(words: list[int] | None, seed: int = 3) -> SmallDecoder:
    config = SmallDecoderConfig.of(TARGET.config, (0,), words and len(words))
    d2t = None if words is None else np.array(words) - np.arange(len(words))
    return SmallDecoder.random(config, seed, scale=0.3, d2t=d2t)


@partial(jax.jit, static_argnums=0)
def differentiate(objective: Distillation, network: SmallDecoder, batch: Batch, features: Any = None) -> Any:
    """Losses, and the gradient of the total by the network's parameters."""
    graph, params, rest = nnx.split(network, nnx.Param, ...)
    features = online(TARGET, batch, objective.features) if features is None else features

    def total(params: Any) -> tuple[Any, Losses]:
        losses = objective.losses(nnx.merge(graph, params, rest), TARGET, batch, features, jax.random.key(0))
        return losses.total, losses

    gradients, losses = jax.grad(total, has_aux=True)(params)
    return losses, jax.tree.leaves(gradients)


def packed() -> Batch:
    """All conversations in rows of `SIZE`, several of them in a row, and a row of padding."""
    rows = lay_out(CONVERSATIONS, SIZE)
    assert 1 < len(rows) < len(CONVERSATIONS)
    return rows.batch([*range(len(rows)), -1])


def alone(size: int = SIZE) -> Batch:
    """Each conversation in a row of its own."""
    rows = lay_out(CONVERSATIONS, size, buckets=[])
    return rows.batch(range(len(rows)))


def close(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, expected)


@pytest.mark.parametrize(
    ("words", "exact"), [(None, False), (WORDS, False), (WORDS, True)], ids=["all", "some", "exact"]
)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_loss(divergence: str, words: Any, exact: bool) -> None:
    """Token by token, in numpy, every conversation for itself."""
    student, batch = network(words), alone()
    block = (batch.tokens, batch.positions, segment_mask(jnp.asarray(batch.segments)))
    hidden = TARGET(*block).hidden
    target = np.asarray(TARGET.logits(hidden), np.float64)
    draft = np.asarray(student.over(TARGET).logits(student.over(TARGET)(*block).hidden), np.float64)
    inside = np.arange(V) if words is None else np.array(words)
    total, count, figures = 0.0, 0, dict.fromkeys(("kl", "overlap", "agreement", "accuracy.1"), 0.0)
    for row, t in zip(*np.nonzero(batch.mask), strict=True):
        token = batch.tokens[row, t]
        p, q = (np.exp(x[row, t - 1]) / np.exp(x[row, t - 1]).sum() for x in (target, draft))
        best, m = p.argmax(), p[inside].sum()
        if not exact:
            best, m = (inside[p[inside].argmax()], 1.0) if token in inside else (-1, 0.0)
        p, q = p[inside] / p[inside].sum(), q[inside]
        kl, rejected = m * (p * np.log(p / q)).sum(), 1 - np.minimum(m * p, q).sum()
        label = -np.log(q[inside == token]).sum()
        reverse = m * (q * np.log(q / p)).sum()
        total += {"forward-kl": kl, "reverse-kl": reverse, "tvd": rejected, "labels": label}[divergence]
        count += 1
        guess = inside[q.argmax()]
        for name, value in zip(figures, (kl, 1 - rejected, guess == best, guess == token), strict=True):
            figures[name] += value
    capacity = None if exact else room(lay_out(CONVERSATIONS, SIZE), 1)
    losses, gradients = differentiate(Distillation(divergence, exact, capacity), student, batch)
    close(losses.total, total)
    assert losses.count == count == batch.num_supervised
    close({name: losses.figures[name] for name in figures}, {name: (x, count) for name, x in figures.items()})
    assert losses.figures["missed"][0] == 0
    assert all(np.abs(g).max() > 0 for g in gradients)


def test_packed_rows_are_separate_ones() -> None:
    """Whatever shares a row, however long it is, and whether every position or the supervised ones go through the head:
    the same sums, the same gradients.
    """
    student = network(WORDS)
    expected = differentiate(Distillation(), student, alone())
    capacity = room(lay_out(CONVERSATIONS, SIZE))
    assert capacity < SIZE
    for objective, batch in (
        (Distillation(), packed()),
        (Distillation(capacity=capacity), packed()),
        (Distillation(), alone(SIZE + 9)),
    ):
        close(differentiate(objective, student, batch), expected)


def test_only_supervised_tokens_count() -> None:
    """What the target says elsewhere is not read, nor is what follows the last supervised token."""
    student, objective, batch = network(WORDS), Distillation(), alone()
    features = online(TARGET, batch, objective.features)
    expected = differentiate(objective, student, batch, features)
    before = np.pad(batch.mask[:, 1:], ((0, 0), (0, 1)))
    noise = np.where(before[..., None], 0, RANDOM.standard_normal(features["hidden"].shape))
    close(differentiate(objective, student, batch, {"hidden": features["hidden"] + noise}), expected)
    last = SIZE - 1 - batch.mask[:, ::-1].argmax(1)
    tokens = np.where(np.arange(SIZE) > last[:, None], (batch.tokens + 5) % V, batch.tokens)
    close(differentiate(objective, student, replace(batch, tokens=tokens), features), expected)
    tokens = np.where(np.arange(SIZE) < last[:, None] - 1, (batch.tokens + 5) % V, batch.tokens)
    assert differentiate(objective, student, replace(batch, tokens=tokens), features)[0].total != expected[0].total


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_nothing_supervised(divergence: str) -> None:
    batch = alone()
    nothing = replace(batch, mask=np.zeros_like(batch.mask))
    losses, gradients = differentiate(Distillation(divergence, exact=True), network(WORDS), nothing)
    assert (losses.total, losses.count) == (0, 0)
    assert all((g == 0).all() for g in gradients)
    assert all((total, count) == (0, 0) for name, (total, count) in losses.figures.items() if name != "missed")


def test_the_target_itself_has_nothing_to_learn() -> None:
    batch = packed()
    losses, gradients = differentiate(Distillation(), SmallDecoder.start(TARGET, (0, 1), WORDS), batch)
    assert abs(losses.total) < 1e-3
    assert all(np.abs(g).max() < 1e-3 for g in gradients)
    for name in ("overlap", "agreement"):
        total, count = losses.figures[name]
        close(total / count, np.isin(batch.tokens[batch.mask], WORDS).mean())


def test_heads_see_supervised_positions_alone() -> None:
    """Neither the draft model's head nor the target's is run over whole rows, or over other tokens than wanted."""
    batch, student = packed(), network(WORDS)
    capacity = room(lay_out(CONVERSATIONS, SIZE), 1)
    shapes = {}
    for objective in (Distillation(), Distillation(capacity=capacity), Distillation(exact=True, capacity=capacity)):
        program = str(jax.make_jaxpr(partial(differentiate, objective))(student, batch))
        rows = len(batch.tokens)
        shapes[objective] = [f"f32[{rows},{size},{width}]" in program for size in (SIZE, capacity) for width in (20, V)]
    assert list(shapes.values()) == [
        [True, False, False, False],
        [False, False, True, False],
        [False, False, True, True],
    ]


@pytest.mark.parametrize("divergence", ["forward-kl", "tvd"])
def test_it_learns(divergence: str) -> None:
    """A layer of the target, and steps on one batch: the draft agrees with the target more and more."""
    batch, objective = packed(), Distillation(divergence, capacity=16)
    graph, params, rest = nnx.split(SmallDecoder.start(TARGET, (1,), WORDS), nnx.Param, ...)
    optimizer = optax.adam(3e-3)
    state, overlap = optimizer.init(params), []
    for _ in range(30):
        losses, gradients = differentiate(objective, nnx.merge(graph, params, rest), batch)
        total, count = losses.figures["overlap"]
        overlap.append(float(total / count))
        gradients = jax.tree.unflatten(jax.tree.structure(params), [g / losses.count for g in gradients])
        updates, state = optimizer.update(gradients, state)
        params = optax.apply_updates(params, updates)
    assert overlap[-1] > overlap[0] + 0.1


@pytest.mark.parametrize("words", [None, WORDS], ids=["all", "some"])
def test_the_estimate_is_what_decoding_gives(words: Any) -> None:
    """Guesses over the target's own greedy text, taken as decoding takes them: the same tokens per call."""
    target = testing.tiny_target(TARGET)
    objective = Distillation(num_draft_tokens=3)
    student = noisy(SmallDecoder.start(TARGET, (0, 1), words))
    held = HeldOut.of(target, [[1, 2, 3], [4, 5], [7, 8, 9, 7, 8]], max_new_tokens=60)
    stats = held.decode(objective, student)
    assert 1.2 < stats.tokens_per_call < 3.9
    assert held.teacher_forced(objective, student, 3) == pytest.approx(stats.tokens_per_call, rel=1e-6)


def noisy(student: SmallDecoder) -> SmallDecoder:
    """Weights a little off, so that it is right now and then."""
    graph, params, rest = nnx.split(student, nnx.Param, ...)
    params = jax.tree.map(lambda x: x + 0.05 * RANDOM.standard_normal(x.shape).astype(x.dtype), params)
    return nnx.merge(graph, params, rest)


def test_any_decoder_can_be_the_draft_model() -> None:
    """One that was published, say, with embeddings of its own, which are trained too."""
    batch, student = packed(), testing.tiny_model(vocab_size=V, seed=5)
    losses, gradients = differentiate(Distillation(), student, batch)
    assert losses.total > 0
    assert all(np.abs(g).max() > 0 for g in gradients)


def test_bad_input() -> None:
    with pytest.raises(InputError, match="expected one of forward-kl"):
        Distillation("kl")
    with pytest.raises(InputError, match="num_draft_tokens"):
        Distillation(num_draft_tokens=0)
