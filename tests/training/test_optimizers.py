"""What optimizers do to which parameters, and learning rates by step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import testing
from specjax.drafters.medusa import MedusaConfig, MedusaHeads
from specjax.errors import InputError
from specjax.training.optimizers import Optimization, decayed, descend, make_optimizer, make_schedule, matrices
from specjax.training.state import take_apart


def arrays(seed: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    random = np.random.default_rng(seed)
    return {name: jnp.asarray(random.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def direction(settings: Optimization, params: Any, *gradients: Any) -> Any:
    """The direction after these gradients, one after the other, at the same parameters."""
    optimizer = make_optimizer(settings)
    state = optimizer.init(params)
    for gradient in gradients:
        found, state = optimizer.update(gradient, state, params)
    return found


def close(a: Any, b: Any) -> bool:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-6)
    return True


def test_adamw_by_hand() -> None:
    """Loshchilov and Hutter 2019, algorithm 2, with the decay on matrices only."""
    shapes = {"w": (3, 4), "norm": (4,), "bias": (2, 3), "fc_norm": (3, 2)}
    params, g1, g2 = (arrays(seed, shapes) for seed in range(3))
    settings = Optimization(weight_decay=0.1, clip=0, beta1=0.8, beta2=0.9, epsilon=1e-6)
    found = direction(settings, params, g1, g2)
    for name in shapes:
        m = (0.8 * 0.2 * g1[name] + 0.2 * g2[name]) / (1 - 0.8**2)
        v = (0.9 * 0.1 * g1[name] ** 2 + 0.1 * g2[name] ** 2) / (1 - 0.9**2)
        decay = 0.1 * params[name] if name == "w" else 0
        assert close(found[name], m / (jnp.sqrt(v) + 1e-6) + decay)
    moved = descend(params, found, jnp.float32(0.5))
    assert close(moved["w"], params["w"] - 0.5 * found["w"])


def test_clipping() -> None:
    params = arrays(0, {"a": (3, 4), "b": (5,)})
    gradients = jax.tree.map(lambda x: 100 * x, arrays(1, {"a": (3, 4), "b": (5,)}))
    norm = optax.tree.norm(gradients)
    small = jax.tree.map(lambda x: 2 * x / norm, gradients)
    assert jax.tree.all(
        jax.tree.map(
            close,
            direction(Optimization(clip=2.0), params, gradients, small),
            direction(Optimization(clip=0), params, small, small),
        )
    )


# fused weight -> the matrices [in, out] that it is made of
FUSED = {
    "layers.0.qkv": ((6, 2, 4, 3), lambda w: [w[:, :, j].reshape(6, 6) for j in range(4)]),
    "layers.0.out": ((2, 6, 5), lambda w: [w.reshape(12, 5)]),
    "layers.0.gate_up": ((6, 2, 7), lambda w: [w[:, 0], w[:, 1]]),
    "layers.0.down": ((7, 6), lambda w: [w]),
    "layers.0.experts_gate_up": ((3, 6, 2, 4), lambda w: [w[e, :, j] for e in range(3) for j in range(2)]),
    "layers.0.experts_down": ((3, 4, 6), list),
    "linear": ((2, 2, 5, 5), lambda w: [w[h, j] for h in range(2) for j in range(2)]),
    "fc": ((12, 6), lambda w: [w]),
}


def test_muon_takes_fused_weights_apart() -> None:
    """Each matrix gets the update that Muon gives it alone, and that is about orthogonal."""

    def apart(whole: Any) -> Any:
        return {f"{name} {i}": w for name, (_, parts) in FUSED.items() for i, w in enumerate(parts(whole[name]))}

    inputs = [arrays(seed, {name: shape for name, (shape, _) in FUSED.items()}) for seed in range(3)]
    run = jax.jit(lambda *args: direction(Optimization("muon", clip=0), *args))
    fused, alone = apart(run(*inputs)), run(*map(apart, inputs))
    for name, update in alone.items():
        assert close(fused[name], update)
        # Liu et al. 2025, equation 4: scaled by 0.2 √max(in, out); five iterations leave singular values near 1
        values = np.linalg.svd(np.asarray(update), compute_uv=False) / (0.2 * np.sqrt(max(update.shape)))
        assert values.min() > 0.3
        assert values.max() < 1.3


def test_what_is_whose() -> None:
    """Of real networks: nothing but matrices is Muon's; norms and biases are not decayed, embeddings and heads are."""
    decoder = testing.tiny_model("qwen2")
    heads = MedusaHeads.random(MedusaConfig(32, 64, num_heads=2))
    params = take_apart(decoder)[1] | take_apart(heads)[1]
    layer = {"qkv", "out", "gate_up", "down"}
    muons = {name for name, numbers in matrices(params).items() if numbers is not None}
    assert muons == {f"layers.{i}.{name}" for i in range(2) for name in layer} | {"linear"}
    assert {name for name, yes in decayed(params).items() if yes} == muons | {"embed", "head"}
    zeros = jax.tree.map(jnp.zeros_like, params)
    for optimizer in ("adamw", "muon"):
        run = jax.jit(functools.partial(direction, Optimization(optimizer, weight_decay=0.5)))
        left = run(params, zeros)
        for name, value in params.items():
            assert close(left[name], 0.5 * value if decayed(params)[name] else 0 * value)


def test_schedules() -> None:
    def rates(**settings: Any) -> list[float]:
        schedule = make_schedule(Optimization(learning_rate=1.0, **settings), 10)
        return [round(float(schedule(step)), 4) for step in range(11)]

    assert rates(schedule="constant") == [1.0] * 11
    assert rates(schedule="constant", warmup=0.3)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(schedule="linear", final_rate=0.5) == [round(1 - 0.05 * step, 4) for step in range(11)]
    cosine = [round(0.5 + 0.5 * np.cos(np.pi * step / 8), 4) for step in range(9)]
    assert rates(schedule="cosine", warmup=0.2) == [0.3333, 0.6667, *cosine]


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"optimizer": "sgd"}, "optimizer is 'sgd'; expected one of adamw, muon"),
        ({"schedule": "step"}, "schedule is 'step'"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"warmup": -1}, "warmup"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"clip": float("inf")}, "clip is inf"),
        ({"beta2": 1.0}, "beta2 is 1.0"),
        ({"final_rate": 2.0}, "final_rate is 2.0"),
        ({"warmup": 1}, "warmup is 1; expected a share of the steps"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError, match=part):
        make_schedule(Optimization(**settings), 10)
