"""What acceptance laws do row by row: numbers for each node, children, values at an index."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from specjax.trees import Draft


def uniforms(keys: Array, num_nodes: int) -> Float[Array, "B N+1 2"]:
    """Two numbers in [0, 1) for each block index: [..., 0] decides on the node, [..., 1] draws the bonus below it.

    JAX draws them by a counter (`jax_threefry_partitionable`, its default), so the same block index has the same
    numbers however large the block is.
    """
    return jax.vmap(lambda key: jax.random.uniform(key, (num_nodes + 1, 2)))(keys)


def children_of(draft: Draft, node: Int[Array, "B"], where: Bool[Array, "B"]) -> Bool[Array, "B N"]:
    """Valid draft nodes below the block index `node`, in rows where `where`."""
    return draft.valid & (draft.parents == node[:, None] - 1) & where[:, None]


def first_true(mask: Bool[Array, "B N"]) -> Int[Array, "B"]:
    """Index of the first True of each row, -1 if there is none."""
    index = jnp.arange(mask.shape[1], dtype=jnp.int32)
    first = jnp.where(mask, index, mask.shape[1]).min(-1, initial=mask.shape[1])
    return jnp.where(first < mask.shape[1], first, -1)


def at(values: Shaped[Array, "B N *R"], index: Int[Array, "B"]) -> Shaped[Array, "B *R"]:
    """`values[b, index[b]]`."""
    return jax.vmap(lambda row, i: row[i])(values, index)


def put(values: Int[Array, "B N"], index: Int[Array, "B"], value: Int[Array, "B"], where) -> Int[Array, "B N"]:
    """`values` with `value[b]` at `index[b]`, in rows where `where`."""
    hit = (jnp.arange(values.shape[1]) == index[:, None]) & jnp.reshape(where, (-1, 1))
    return jnp.where(hit, value[:, None], values)
