"""One optimizer step as one compiled program: micro-batches one after the other, one division, one update."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from specjax.training.batches import Batch
from specjax.training.features import online
from specjax.training.mesh import gathering
from specjax.training.objective import Losses, Objective
from specjax.training.optimizers import descend
from specjax.training.state import Skeleton, TrainState, cast

Step = Callable[[TrainState, Batch, Any], tuple[TrainState, dict[str, Array]]]


def make_step(
    objective: Objective,
    skeleton: Skeleton,
    model: Any,
    optimizer: optax.GradientTransformation,
    schedule: Callable[[Any], Any],
    compute_dtype: str,
    state: TrainState,
) -> Step:
    """The compiled step: `state, figures = step(state, batch, features)`. The state given is used up.

    It is compiled for the devices that `state` and `model` lie on.

    The batch is `[A, B, …]`, A micro-batches; features are `[A, B, T, M]` by name, or None to compute them. With L the
    sum of the loss and n the number of supervised tokens over all micro-batches and devices, the gradient is that of
    L / n. A step without such tokens, and one whose loss or gradient is not finite, leaves everything but the number of
    the step as it was.

    Figures: "loss" L / n, "supervised" n, "gradient_norm" before clipping, "learning_rate", and the objective's own.
    """
    leaves, tree = jax.tree.flatten(model)  # an nnx module costs milliseconds a call, a list does not

    gather_model, gather = gathering(leaves), gathering(state.params)
    factors = {name: _factor(name, objective.rates) for name in state.params}

    def step(state: TrainState, leaves: Any, batch: Batch, given: Any) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(state.key, state.step)

        def micro_batch(gradients: Any, inputs: Any) -> tuple[Any, Losses]:
            number, batch, given = inputs
            model = jax.tree.unflatten(tree, gather_model(leaves))
            features = online(model, batch, objective.features) if given is None else given

            def total(params: Any) -> tuple[Array, Losses]:
                network = skeleton.network(gather(cast(params, compute_dtype)), state.buffers)
                losses = objective.losses(network, model, batch, features, jax.random.fold_in(key, number))
                return losses.total, losses

            more, losses = jax.grad(total, has_aux=True)(state.params)
            return jax.tree.map(jnp.add, gradients, more), losses

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        numbers = jnp.arange(batch.tokens.shape[0])
        gradients, losses = jax.lax.scan(micro_batch, zeros, (numbers, batch, given))
        losses = jax.tree.map(lambda x: x.sum(0), losses)
        count = jnp.maximum(losses.count, 1).astype(jnp.float32)
        gradients = jax.tree.map(lambda g: g / count, gradients)
        norm = optax.tree.norm(gradients)
        applied = (losses.count > 0) & jnp.isfinite(losses.total) & jnp.isfinite(norm)
        rate = jnp.asarray(schedule(state.step), jnp.float32)
        direction, moments = optimizer.update(gradients, state.optimizer, state.params)
        direction = {name: value * factors[name] for name, value in direction.items()}
        params, moments = jax.tree.map(
            lambda new, old: jnp.where(applied, new, old),
            (descend(state.params, direction, rate), moments),
            (state.params, state.optimizer),
        )
        figures = {
            "loss": losses.total / count,
            "supervised": losses.count,
            "gradient_norm": norm,
            "learning_rate": rate,
        }
        figures |= {name: total / jnp.maximum(number, 1) for name, (total, number) in losses.figures.items()}
        return TrainState(state.step + 1, params, state.buffers, moments, state.key), figures

    # left to itself, the compiler may place the new state otherwise, and the next step would compile again
    places = jax.tree.map(lambda x: x.sharding, state)
    compiled = jax.jit(step, donate_argnums=0, out_shardings=(places, places.step))

    def run(state: TrainState, batch: Batch, features: Any) -> tuple[TrainState, dict[str, Array]]:
        # a first state that was not put anywhere would compile a program of its own
        return compiled(jax.device_put(state, places), leaves, batch, features)

    return run


def _factor(name: str, rates: Mapping[str, float]) -> float:
    return next((rate for beginning, rate in rates.items() if name.startswith(beginning)), 1.0)


def micro_batches(arrays: Any, accumulation: int) -> Any:
    """Numpy arrays `[A*B, …]` as `[A, B, …]`: row r goes to micro-batch r % A, wherever it is computed.

    So the micro-batches of several processes, side by side, are those of a single process.
    """

    def deal(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(deal, arrays)
