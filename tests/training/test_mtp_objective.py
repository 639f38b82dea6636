"""What MTP modules learn from: the loss is its formula, computed with one module after the other over the text."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_networks import MODEL, NETWORKS, WORDS
from test_objectives import TEXTS, batch_of, law, losses

from specjax.drafters.mtp import MtpConfig, MtpNetwork
from specjax.models.decoder import View
from specjax.training.features import online, segment_mask
from specjax.training.mtp import MtpObjective


@pytest.mark.parametrize("soft", [True, False])
def test_the_loss_is_its_formula(soft: bool) -> None:
    """Two modules with a step each; every pair sees those of its own module up to its own place."""
    text, supervised = TEXTS[0]
    batch = jax.tree.map(jnp.asarray, batch_of([TEXTS[0]]))
    network = NETWORKS["mtp"]
    features = online(MODEL, batch, ("layer.2", "hidden"))
    mask = segment_mask(batch.segments)

    @jax.jit
    def scores(hidden: Any) -> list[Any]:
        found = []
        for k in range(2):
            view = View.make(network.config.layers, batch.positions, mask, None, None)
            embedded = MODEL.embeddings(jnp.roll(batch.tokens, -k - 1, axis=1))
            hidden, *_ = network.module(k, embedded, hidden, view)
            found.append(network.child_logits(hidden, MODEL, k))
        return found

    q = [law(x)[0] for x in scores(features["layer.2"])]
    p = law(MODEL.logits(features["hidden"])[..., np.array(WORDS)])[0]
    expected, right = 0.0, np.zeros((2, len(text)), bool)
    for u in range(len(text) - supervised, len(text)):
        for s in range(2):
            t = u - 2 - s
            if t >= len(text) - supervised - 2:
                right[s, t] = text[u] == WORDS[q[s][t].argmax()]
                if text[u] in WORDS:
                    wanted = p[u - 1] if soft else np.array(WORDS) == text[u]
                    expected += 0.6**s * -(wanted * np.log(q[s][t])).sum()
    found = losses(MtpObjective(2, decay=0.6, soft=soft, feature="layer.2"), network, batch)
    np.testing.assert_allclose(found.total, expected, rtol=1e-5)
    assert found.count == supervised
    for s in range(2):
        assert found.figures[f"accuracy.{s + 1}"][0] == right[s].sum()


def test_one_feature_is_asked_for_once() -> None:
    assert MtpObjective().features == ("hidden",)
    assert MtpObjective(feature="layer.2").features == ("layer.2", "hidden")


@pytest.mark.slow
def test_a_few_steps_lower_the_loss() -> None:
    """From the target's own layer and head, with the objective's own gradient."""
    config = MtpConfig.of(MODEL.config, 2, draft_vocab_size=len(WORDS))
    network, objective = MtpNetwork.start(config, MODEL, WORDS), MtpObjective(3)
    batch = jax.tree.map(jnp.asarray, batch_of(TEXTS[:2], TEXTS[2:]))
    features = online(MODEL, batch, objective.features)

    @jax.jit
    def step(network: Any) -> Any:
        def mean(network: Any) -> Any:
            found = objective.losses(network, MODEL, batch, features, jax.random.key(0))
            return found.total / found.count

        loss, gradient = jax.value_and_grad(mean, allow_int=True)(network)
        move = lambda x, g: x - 0.3 * g if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
        return loss, jax.tree.map(move, network, gradient)

    found = []
    for _ in range(12):
        loss, network = step(network)
        found.append(float(loss))
    assert found[-1] < 0.8 * found[0]
