"""The key/value cache: fixed shape, written only by `commit` and by prefill, slot index = position.

It holds keys and values of exactly the positions `[0, length - 1)` of each row: the pending token (the last committed
one) is not in it yet. Slots past that are finite and never read, so nothing is ever rolled back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values, one array a layer.

    Attributes:
        keys: per layer, `[B, K, S, D]`.
        values: per layer, `[B, K, S, D]`.
    """

    keys: tuple[Float[Array, "B K S D"], ...]
    values: tuple[Float[Array, "B K S D"], ...]

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]

    @classmethod
    def zeros(cls, batch: int, capacity: int, heads: list[tuple[int, int]], dtype: jnp.dtype) -> "KVCache":
        """Allocate; `heads` gives (K, D) for each layer."""
        keys = tuple(jnp.zeros((batch, k, capacity, d), dtype) for k, d in heads)
        return cls(keys, tuple(jnp.zeros_like(key) for key in keys))


def read_first(active: Bool[Array, "B"], read: Callable[[], T]) -> T:
    """What `read` gives, which reads a cache that its caller then writes to; zeros where no row is active.

    The conditional orders the writing after every read. Without one, XLA copies the cache each time.
    """
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(read))
    return jax.lax.cond(active.any(), read, lambda: nothing)


def write(cache: KVCache, block: KVCache, start: Int[Array, "B"]) -> KVCache:
    """Write a block's keys and values `[B, K, T, D]` into slots `start .. start + T` of each row.

    `dynamic_update_slice` clamps silently, so the capacity must include T slots past the last start: the caller's duty.
    """

    def row(old, new, at):
        return jax.lax.dynamic_update_slice(old, new, (0, at, 0))

    def each(old, new):
        new = new.astype(old.dtype)
        if old.shape[0] == 1:  # a plain update is done in place; its batched form is a scatter
            return jax.lax.dynamic_update_slice(old, new, (0, 0, start[0], 0))
        return jax.vmap(row)(old, new, start)

    return jax.tree.map(each, cache, block)


def take(block: KVCache, nodes: Int[Array, "B P"]) -> KVCache:
    """Gather the block positions `nodes` of each row: `[B, K, T, D] -> [B, K, P, D]`."""
    return jax.tree.map(lambda x: jnp.take_along_axis(x, nodes[:, None, :, None], axis=2), block)
