"""Filling a cache from a text: chunks of fixed size, so that one program serves prompts of any length."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.cache import KVCache, write
from specjax.models.interface import TargetModel

CHUNK = 256  # most tokens in one pass; shorter prompts use the next smaller power of two


def chunk_size(longest: int) -> int:
    """Tokens in a prefill pass for prompts of at most `longest` tokens."""
    return min(CHUNK, max(16, 1 << max(longest - 1, 0).bit_length()))


def padded_length(longest: int) -> int:
    """Slots that prefill writes for prompts of at most `longest` tokens: whole chunks."""
    chunk = chunk_size(longest)
    return max(-(-longest // chunk), 1) * chunk


def prefill(
    model: TargetModel, tokens: Int[Array, "B S"], longest: int, capacity: int, features: Sequence[str] = ()
) -> tuple[KVCache, dict[str, Float[Array, "B P M"]]]:
    """Cache and features of the first `longest` tokens of each row (static; past a shorter row's end nothing is read).

    `capacity` must be at least `padded_length(longest)`; P is `padded_length(longest)`.
    """
    batch = tokens.shape[0]
    chunk, total = chunk_size(longest), padded_length(longest)
    tokens = jnp.pad(tokens, ((0, 0), (0, max(total - tokens.shape[1], 0))))[:, :total]
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((chunk, chunk), bool)), (batch, chunk, chunk))
    cache = model.init_cache(batch, capacity)
    if longest == 0:  # a one-token prompt: nothing precedes the pending token
        nothing = model(tokens, jnp.zeros((batch, chunk), jnp.int32), mask, features=features).features
        return cache, {name: jnp.zeros_like(value) for name, value in nothing.items()}

    def run(start: int | Array, cache: KVCache | None) -> tuple[KVCache, dict[str, Array]]:
        positions = jnp.broadcast_to(start + jnp.arange(chunk), (batch, chunk))
        part = jax.lax.dynamic_slice_in_dim(tokens, start, chunk, axis=1)
        length = None if cache is None else jnp.full(batch, start, jnp.int32)
        output = model(part, positions, mask, cache, length, features)
        return output.block, output.features

    block, seen = run(0, None)
    cache = write(cache, block, jnp.zeros(batch, jnp.int32))
    if total == chunk:
        return cache, seen

    def body(i: Array, carry: tuple[KVCache, dict[str, Array]]) -> tuple[KVCache, dict[str, Array]]:
        cache, seen = carry
        block, part = run(i * chunk, cache)
        cache = write(cache, block, jnp.full(batch, i * chunk, jnp.int32))
        seen = {n: jax.lax.dynamic_update_slice(seen[n], part[n], (0, i * chunk, 0)) for n in seen}
        return cache, seen

    seen = {n: jnp.pad(v, ((0, 0), (0, total - chunk), (0, 0))) for n, v in seen.items()}
    return jax.lax.fori_loop(1, total // chunk, body, (cache, seen))
