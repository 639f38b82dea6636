"""A loss over many places, taken part by part, with its gradient: what a large vocabulary needs.

The scores of all supervised tokens of a batch over a vocabulary are by far the largest arrays of a training step, and
reading and writing them, for probabilities, their logarithms and their gradient, costs about as much as the products
that make them. So a few hundred places are scored at a time, and their gradient is taken at once, while the scores are
at hand; none of them is kept for a backward pass, nor computed again.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

T = TypeVar("T")

# scores of a part, as many as fit into the caches of a CPU; on a GPU the products are still large enough
SCORES = 1 << 22


def sum_in_parts(
    loss: Callable[[Any, Any, Any, Any], tuple[Array, T]],
    trained: Any,
    shared: Any,
    moving: Any,
    fixed: Any,
    places: int,
) -> tuple[Float[Array, ""], T]:
    """The sum of `loss(trained, shared, moving, fixed)` over parts of places, and what else it finds at each place.

    Its gradient is that of the sum, except that gradients of the parts are added in float32.

    Args:
        loss: gives a sum over the places of a part, and a tree of arrays `[B, c, ...]` that no gradient goes through.
            Places past the end are zeros (False); they have to add nothing. All arrays it reads are given to it.
        trained: floating-point arrays that all places share; differentiable.
        shared: arrays that all places share; no gradient goes through them.
        moving: floating-point arrays `[B, C, ...]`; differentiable.
        fixed: arrays `[B, C, ...]`; no gradient goes through them.
        places: c, how many of the C of each row make a part, see `places_of_part`.
    """
    count = jax.tree.leaves((moving, fixed))[0].shape[1]

    differentiated = jax.value_and_grad(loss, argnums=(0, 2), has_aux=True)

    @jax.custom_vjp
    def run(trained: Any, shared: Any, moving: Any, fixed: Any) -> tuple[Array, T]:
        def part(total: Array, values: Any) -> tuple[Array, T]:
            more, found = loss(trained, shared, *values)
            return total + more, found

        total, found = jax.lax.scan(part, jnp.float32(0), _split((moving, fixed), places))
        return total, _join(found, count)

    def forward(trained: Any, shared: Any, moving: Any, fixed: Any) -> tuple[tuple[Array, T], tuple[Any, Any]]:
        def part(sums: Any, values: Any) -> tuple[Any, Any]:
            total, gradient = sums
            (more, found), (by_trained, by_moving) = differentiated(trained, shared, *values)
            return (total + more, jax.tree.map(jnp.add, gradient, by_trained)), (found, by_moving)

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained)
        sums, (found, by_moving) = jax.lax.scan(part, (jnp.float32(0), zeros), _split((moving, fixed), places))
        total, by_trained = sums
        by_trained = jax.tree.map(lambda g, x: g.astype(x.dtype), by_trained, trained)
        return (total, _join(found, count)), (by_trained, _join(by_moving, count))

    def backward(gradients: tuple[Any, Any], wanted: tuple[Array, T]) -> tuple[Any, None, Any, None]:
        by_trained, by_moving = jax.tree.map(lambda g: (wanted[0] * g).astype(g.dtype), gradients)
        return by_trained, None, by_moving, None

    run.defvjp(forward, backward)
    return run(trained, shared, moving, fixed)


def places_of_part(shape: tuple[int, ...], vocabulary: int) -> int:
    """How many of the C places of each row to score at a time.

    Args:
        shape: `[B, C]`.
    """
    batch, count = shape
    parts = -(-batch * count * vocabulary // SCORES)
    return -(-count // parts)


def scores(rows: Float[Array, "*B M"], head: Float[Array, "V M"]) -> Float[Array, "*B V"]:
    """`rows · headᵀ` in float32. Gradients are computed in the precision of the rows and the head, not in that of the
    scores, which would make all products of the backward pass float32's.
    """
    return _scores(rows.astype(head.dtype), head)


@jax.custom_vjp
def _scores(rows: Array, head: Array) -> Array:
    return jnp.einsum("...m,vm->...v", rows, head, preferred_element_type=jnp.float32)


def _scores_forward(rows: Array, head: Array) -> tuple[Array, tuple[Array, Array]]:
    return _scores(rows, head), (rows, head)


def _scores_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    rows, head = saved
    gradient = gradient.astype(rows.dtype)
    by_rows = jnp.einsum("...v,vm->...m", gradient, head, preferred_element_type=jnp.float32)
    by_head = jnp.einsum("...v,...m->vm", gradient, rows, preferred_element_type=jnp.float32)
    return by_rows.astype(rows.dtype), by_head.astype(head.dtype)


_scores.defvjp(_scores_forward, _scores_backward)


def _split(values: Any, places: int) -> Any:
    """`[B, C, ...]` as `[parts, B, c, ...]`, with zeros at the end."""

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % places), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, places, *x.shape[2:]), 1, 0)

    return jax.tree.map(split, values)


def _join(values: Any, count: int) -> Any:
    """The reverse."""

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :count]

    return jax.tree.map(join, values)
