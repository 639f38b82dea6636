"""A loss taken part by part is the loss taken at once, and so is its gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training import parts
from specjax.training.parts import places_of_part, scores, sum_in_parts

BATCH, PLACES, WIDTH, VOCABULARY = 3, 11, 6, 17
KEYS = jax.random.split(jax.random.key(0), 4)
HEAD = jax.random.normal(KEYS[0], (VOCABULARY, WIDTH))
ROWS = [jax.random.normal(key, (BATCH, PLACES, WIDTH)) for key in KEYS[1:3]]
LABELS = jax.random.randint(KEYS[3], (BATCH, PLACES), 0, VOCABULARY)
VALID = LABELS % 3 > 0


def loss(head: Any, bias: Any, rows: Any, fixed: Any) -> tuple[Any, Any]:
    labels, valid = fixed
    total, best = jnp.float32(0), []
    for step, x in enumerate(rows):
        logits = scores(x, head) + bias
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
        total -= 0.8**step * jnp.where(valid, chosen, 0).sum()
        best.append(logits.argmax(-1))
    return total, best


@pytest.mark.parametrize("places", [1, 4, PLACES, 50])
def test_same_as_at_once(places: int) -> None:
    def whole(head: Any, bias: Any, rows: Any) -> Any:
        total, best = loss(head, bias, rows, (LABELS, VALID))
        return 3 * total, best

    def by_parts(head: Any, bias: Any, rows: Any) -> Any:
        total, best = sum_in_parts(loss, head, bias, rows, (LABELS, VALID), places)
        return 3 * total, best

    bias = jnp.linspace(-1, 1, VOCABULARY)
    expected, found = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))(HEAD, bias, ROWS) for f in (whole, by_parts)
    )
    (value, best), (by_head, by_bias, by_rows) = found
    (true_value, true_best), (true_by_head, true_by_bias, true_by_rows) = expected
    np.testing.assert_allclose(value, true_value, rtol=1e-6)
    np.testing.assert_array_equal(best, true_best)
    np.testing.assert_allclose(by_head, true_by_head, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_rows, true_by_rows, rtol=1e-5, atol=1e-5)
    assert np.abs(true_by_bias).max() > 0
    assert not by_bias.any()  # what is shared is taken as given
    np.testing.assert_allclose(by_parts(HEAD, bias, ROWS)[0], true_value, rtol=1e-6)


def test_no_scores_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest array of forward and backward pass has the scores of one part."""
    monkeypatch.setattr(parts, "SCORES", 4 * BATCH * VOCABULARY)
    places = places_of_part((BATCH, PLACES), VOCABULARY)
    assert places == 4

    def total(head: Any, rows: Any) -> Any:
        return sum_in_parts(loss, head, 0.0, rows, (LABELS, VALID), places)[0]

    text = str(jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(HEAD, ROWS))
    assert f"f32[{BATCH},{places},{VOCABULARY}]" in text
    assert f"{BATCH},{PLACES},{VOCABULARY}]" not in text
    assert f",{BATCH},{places},{VOCABULARY}]" not in text


def test_gradients_in_the_precision_of_the_rows() -> None:
    rows, head = ROWS[0].astype(jnp.bfloat16), HEAD.astype(jnp.bfloat16)
    found = scores(rows, head)
    assert found.dtype == jnp.float32
    true = np.asarray(rows, np.float64) @ np.asarray(head, np.float64).T
    np.testing.assert_allclose(found, true, rtol=1e-5, atol=1e-5)
    by_rows, by_head = jax.grad(lambda r, h: (scores(r, h) ** 2).sum(), argnums=(0, 1))(rows, head)
    assert (by_rows.dtype, by_head.dtype) == (jnp.bfloat16, jnp.bfloat16)
    true_gradients = jax.grad(lambda r, h: (jnp.einsum("btm,vm->btv", r, h) ** 2).sum(), argnums=(0, 1))(
        rows.astype(jnp.float32), head.astype(jnp.float32)
    )
    for a, b in zip((by_rows, by_head), true_gradients, strict=True):
        assert np.abs(a - b).max() < 0.02 * np.abs(b).max()
