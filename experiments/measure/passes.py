"""Passes of the target by themselves, and what memory and arithmetic allow: their roofline."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from common.timing import in_turns, median_of
from flax import nnx

from measure.programs import bytes_of
from specjax.cache import KVCache
from specjax.models.config import ModelConfig
from specjax.models.interface import TargetModel
from specjax.timing import passes, per_step, seconds_of

BANDWIDTH_BYTES = 512 * 2**20
MATRIX = {"cpu": 1024}  # rows of the matrices that are multiplied; OTHER_MATRIX on accelerators
OTHER_MATRIX = 8192
STEPS = {"cpu": 5}  # in a timed loop; OTHER_STEPS on accelerators, which are much faster
OTHER_STEPS = 50


def timed_steps() -> int:
    """Steps of the target in a timed loop."""
    return STEPS.get(jax.default_backend(), OTHER_STEPS)


@dataclass(frozen=True)
class PassTimes:
    """Target passes over blocks, and what was measured beside them, turn by turn.

    Attributes:
        seconds: of a pass, by the tokens in each row's block.
        beside: what else was measured.
    """

    seconds: dict[int, list[float]]
    beside: dict[str, list[float]]

    def median(self, tokens: int) -> float:
        return statistics.median(self.seconds[tokens])

    def relative(self, tokens: int) -> float:
        """Against a pass over one token, turn by turn."""
        return median_of(lambda block, one: block / one, self.seconds[tokens], self.seconds[1])

    def costs(self) -> dict[int, float]:
        """V of `specjax.theory`: passes relative to one over a single token."""
        return {tokens: self.relative(tokens) for tokens in sorted(self.seconds)}


def time_passes(
    model: TargetModel,
    cache: KVCache,
    length: int,
    sizes: Sequence[int],
    turns: int,
    done: Callable[[], None] = lambda: None,
    beside: Mapping[str, Callable[[], float]] | None = None,
) -> PassTimes:
    """Time passes over blocks of one token and of `sizes`, all in turns.

    Args:
        length: committed tokens of every row.
        done: called once a program is compiled, and after every measurement.
        beside: measured in the same turns.
    """
    sizes = sorted({1, *sizes})
    beside = beside or {}
    timers = dict(beside)
    for size in sizes:
        timers[f"{size}"] = TargetPass(model, cache, size, length, timed_steps())
        done()
    seconds = in_turns(timers, turns, done)
    return PassTimes({size: seconds[f"{size}"] for size in sizes}, {name: seconds[name] for name in beside})


class TargetPass:
    """Times a pass over a block of T tokens that reads a cache (`specjax.timing.passes`).

    Args:
        length: committed tokens; the block starts at `length - 1`.
        steps: passes in a timed loop.
    """

    def __init__(self, model: TargetModel, cache: KVCache, block_tokens: int, length: int, steps: int):
        batch = cache.keys[0].shape[0]
        self._loop = partial(passes, model, cache, jnp.full(batch, length, jnp.int32), block_tokens)
        self._steps = steps
        self._loop(1).block_until_ready()

    def __call__(self) -> float:
        """Seconds of one pass, now."""
        return per_step(self._loop, self._steps)


class Bandwidth:
    """Times a sum over a large array: the memory bandwidth that all cores together reach when they only read."""

    def __init__(self) -> None:
        self._data = jnp.ones(BANDWIDTH_BYTES // 4, jnp.float32)
        self._sum = jax.jit(jnp.sum)
        self()

    def __call__(self) -> float:
        """Seconds to read one byte, now."""
        return seconds_of(lambda: self._sum(self._data)) / self._data.nbytes


class Throughput:
    """Times products of two large matrices: the arithmetic that all cores together reach."""

    def __init__(self, dtype: Any) -> None:
        n = MATRIX.get(jax.default_backend(), OTHER_MATRIX)
        matrix = jnp.full((n, n), 1 / n, dtype)
        program = jax.jit(lambda matrix, n: jax.lax.fori_loop(0, n, lambda _, x: matrix @ x, matrix))
        self._loop = lambda steps: program(matrix, steps)
        self._operations = 2 * n**3
        self._loop(1).block_until_ready()

    def __call__(self) -> float:
        """Seconds of one floating-point operation, now."""
        return per_step(self._loop, timed_steps()) / self._operations


def bytes_read(model: Any, config: ModelConfig | None, cache: KVCache, tokens: int | None = None) -> int:
    """Bytes that a pass has to read.

    Every weight, but for the embedding rows of other tokens and the experts that were not chosen; and all of the cache
    (masked attention reads all its slots).

    Args:
        tokens: in the pass, all rows together; None: one a row, which is a decode step.
    """
    tokens = tokens or cache.keys[0].shape[0]
    used = 1.0
    if config is not None and config.moe is not None:
        used = min(1.0, tokens * config.moe.experts_per_token / config.moe.num_experts)
    return round(_weights(model, config, lambda x: x.nbytes, used)) + bytes_of(cache)


def operations(model: Any, config: ModelConfig | None, cache: KVCache, block_tokens: int) -> int:
    """Floating-point operations of a pass over so many tokens a row.

    A multiplication and an addition for each token and weight, but for embeddings and the experts that were not chosen;
    and as many for every query and key, and again for every value, cached or in the block.
    """
    batch, _, slots, _ = cache.keys[0].shape
    used = 1.0
    if config is not None and config.moe is not None:
        used = config.moe.experts_per_token / config.moe.num_experts
    each = 2 * round(_weights(model, config, lambda x: x.size, used))
    if config is not None:
        each += 4 * config.num_layers * config.num_heads * config.head_dim * (slots + block_tokens)
    return batch * block_tokens * each


def _weights(model: Any, config: ModelConfig | None, size: Callable[[Any], int], used: float) -> float:
    """Size of the weights, but for an embedding that is no head, and with a share of the experts."""
    total = float(sum(size(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))))
    if config is None:
        return total
    if not config.tie_embeddings:
        total -= size(model.embed[...])
    if config.moe is not None:
        experts = [layer for layer, moe in zip(model.layers, config.moe.layers, strict=True) if moe]
        total -= (1 - used) * sum(size(e.experts_gate_up[...]) + size(e.experts_down[...]) for e in experts)
    return total
