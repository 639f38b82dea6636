"""Steps of the target by themselves, and the memory they have to read."""

from typing import Any

import jax
import jax.numpy as jnp
from common.timing import per_step, seconds_of
from flax import nnx
from jaxtyping import Array, Int

from measure.programs import bytes_of
from specjax.cache import KVCache
from specjax.models.config import ModelConfig
from specjax.models.interface import TargetModel
from specjax.trees import chain
from specjax.verify import verify

BANDWIDTH_BYTES = 512 * 2**20


class TargetPass:
    """Times a pass over a block of T tokens that reads a cache: no search, no acceptance, no commit.

    Args:
        length: committed tokens; the block starts at `length - 1`.
        steps: passes in a timed loop.
    """

    def __init__(self, model: TargetModel, cache: KVCache, block_tokens: int, length: int, steps: int):
        batch = cache.keys[0].shape[0]
        program = jax.jit(_passes, static_argnums=2)
        lengths = jnp.full(batch, length, jnp.int32)
        self._loop = lambda n: program(model, cache, block_tokens, lengths, n)
        self._steps = steps
        self._loop(1).block_until_ready()

    def __call__(self) -> float:
        """Seconds of one pass, now."""
        return per_step(self._loop, self._steps)


def _passes(model: TargetModel, cache: KVCache, block_tokens: int, length: Int[Array, "B"], n: Int[Array, ""]) -> Array:
    """`n` passes, each over tokens that come out of the one before it, so that none can be left out."""

    def body(_: Any, tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
        draft = chain(tokens[:, 1:], jnp.full(tokens.shape[0], block_tokens - 1))
        # the barrier keeps all logits in being; reading a few of them costs nothing
        logits = jax.lax.optimization_barrier(verify(model, cache, tokens[:, 0], length, draft).logits)
        return (jnp.abs(logits[:, :, 0]) * 1e4).astype(jnp.int32) % model.vocab_size

    start = jnp.ones((length.shape[0], block_tokens), jnp.int32)
    return jax.lax.fori_loop(0, n, body, start)


class Bandwidth:
    """Times a sum over a large array: the memory bandwidth that all cores together reach when they only read."""

    def __init__(self) -> None:
        self._data = jnp.ones(BANDWIDTH_BYTES // 4, jnp.float32)
        self._sum = jax.jit(jnp.sum)
        self()

    def __call__(self) -> float:
        """Seconds to read one byte, now."""
        return seconds_of(lambda: self._sum(self._data)) / self._data.nbytes


def bytes_read(model: Any, config: ModelConfig | None, cache: KVCache) -> int:
    """Bytes a decode step has to read.

    Every weight, but for the embedding rows of other tokens and the experts that were not chosen; and all of the cache
    (masked attention reads all its slots).
    """
    total = bytes_of(nnx.state(model, nnx.Param)) + bytes_of(cache)
    if config is None:
        return total
    if not config.tie_embeddings:
        total -= model.embed[...].nbytes
    if config.moe is not None:
        batch = cache.keys[0].shape[0]
        idle = 1 - min(1.0, batch * config.moe.experts_per_token / config.moe.num_experts)
        experts = [layer for layer, moe in zip(model.layers, config.moe.layers, strict=True) if moe]
        total -= int(idle * sum(e.experts_gate_up[...].nbytes + e.experts_down[...].nbytes for e in experts))
    return total
