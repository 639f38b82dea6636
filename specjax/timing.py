"""What a round costs on this device, measured: a target pass over each block size of a drafter, and its proposals."""

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax import decode
from specjax.cache import KVCache
from specjax.costs import Costs
from specjax.drafters.check import check_drafter
from specjax.errors import InputError, check_whole
from specjax.job import BUCKET, lay_out
from specjax.ladder import ladder
from specjax.models.default_target import cache_directory
from specjax.models.interface import TargetModel
from specjax.models.target import Target
from specjax.sampling import Sampling
from specjax.state import DecodeState, Drafter
from specjax.stops import make_stops
from specjax.trees import chain
from specjax.verify import verify

LEAST_SECONDS = 0.1  # a timed loop should take so long, so that what a call costs does not matter


def measure_costs(
    target: Target,
    drafter: Drafter,
    batch_size: int = 1,
    context: int = 256,
    repetitions: int = 5,
    fresh: bool = False,
) -> Costs:
    """Measure them, or read what was measured before for the same target, drafter, device and sizes.

    Medians of several turns, in which every block size is timed once; what is measured goes to the user's cache
    directory. The device should have nothing else to do.

    Args:
        batch_size: rows.
        context: tokens that a row has committed.
        fresh: measure again.

    Raises:
        InputError: a size below 1, a context that the target does not have, or a drafter for another target.
    """
    check_drafter(drafter, target)
    for name, value in (("batch_size", batch_size), ("context", context), ("repetitions", repetitions)):
        check_whole(name, value, 1)
    room = target.model.max_positions - decode.capacity(0, drafter)
    if context > room:
        raise InputError(f"context: expected at most {room} tokens for {target.name} and this drafter, got {context}")
    described = _described(target, drafter, batch_size, context)
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_directory() / "costs" / f"{digest}.json"
    if path.exists() and not fresh:
        found = json.loads(path.read_text())
        return Costs.of(drafter, found["verify"], found["draft"])
    verify, draft = _measure(target, drafter, batch_size, context, repetitions)
    costs = Costs.of(drafter, verify, draft)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(described | {"verify": verify, "draft": draft}, indent=1))
    os.replace(temporary, path)
    return costs


def _described(target: Target, drafter: Drafter, batch_size: int, context: int) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": f"{device.platform} {device.device_kind} × {jax.device_count()}, {os.cpu_count()} cores",
        "jax": jax.__version__,
        # a model that came from no file has no hash
        "target": target.weights_hash or [target.name, *_shapes(target.model)],
        "dtype": target.dtype,
        "drafter": [drafter.name, _settings(drafter), *_shapes(drafter)],
        "nodes": list(ladder(drafter)),
        "depth": drafter.max_depth,
        "batch_size": batch_size,
        "context": context,
    }


def _shapes(tree: Any) -> list[str]:
    return [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(tree) if hasattr(x, "shape")]


def _settings(value: Any) -> Any:
    """A drafter's settings, those of its parts among them; what drafts of the same shapes cost may depend on any."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_settings(x) for x in value]
    if is_dataclass(value):
        return [type(value).__name__, {f.name: _settings(getattr(value, f.name)) for f in fields(value)}]
    return type(value).__name__


def _measure(
    target: Target, drafter: Drafter, batch_size: int, context: int, repetitions: int
) -> tuple[list[float], float]:
    model, random = target.model, np.random.default_rng(0)
    prompts = random.integers(0, model.vocab_size, (batch_size, context)).tolist()
    size = context + decode.capacity(1, drafter)
    state = jax.jit(decode.prefill, static_argnames=("longest",))(
        model,
        drafter,
        **lay_out(prompts, [min(size, model.max_positions)] * batch_size, drafter, BUCKET),
        rules=Sampling().rules(batch_size),
        stops=make_stops((), (), None, model.vocab_size),
        key=jax.random.split(jax.random.key(0), batch_size),
    )
    timers = [Timer(partial(passes, model, state.cache, state.length, 1 + nodes)) for nodes in ladder(drafter)]
    timers.append(Timer(partial(proposals, model, drafter, state)))
    with jax.default_matmul_precision("highest" if target.dtype == "float32" else "default"):
        turns = [[timer() for timer in timers] for _ in range(repetitions)]
    *verify, draft = (statistics.median(values) for values in zip(*turns, strict=True))
    return [max(x, 1e-9) for x in verify], max(draft, 0.0)


class Timer:
    """Times a step of `loop(n)`, n steps in one program; how many are timed together is found at the first call."""

    def __init__(self, loop: Callable[[int], Any]):
        self._loop, self._steps = loop, 0

    def __call__(self) -> float:
        """Seconds of one step, now."""
        if not self._steps:
            jax.block_until_ready(self._loop(1))
            self._steps = 1
            while self._steps < 1024 and per_step(self._loop, self._steps) * self._steps < LEAST_SECONDS:
                self._steps *= 2
        return per_step(self._loop, self._steps)


def per_step(loop: Callable[[int], Any], steps: int) -> float:
    """Seconds a step of `loop(n)`, n steps in one program: what a call costs with no step in it is taken away."""
    return (seconds_of(lambda: loop(steps)) - seconds_of(lambda: loop(0))) / steps


def seconds_of(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin


@partial(jax.jit, static_argnames="block_tokens")
def passes(
    model: TargetModel, cache: KVCache, length: Int[Array, "B"], block_tokens: int, n: Int[Array, ""]
) -> Int[Array, "B T"]:
    """`n` target passes over blocks that read a cache: no search, no acceptance, no commit. Each is over tokens that
    come out of the one before it, so that none can be left out.

    Args:
        length: committed tokens; the block starts at `length - 1`.
    """

    def body(_: Any, tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
        draft = chain(tokens[:, 1:], jnp.full(tokens.shape[0], block_tokens - 1))
        # the barrier keeps all logits in being; reading a few of them costs nothing
        logits = jax.lax.optimization_barrier(verify(model, cache, tokens[:, 0], length, draft).logits)
        return (jnp.abs(logits[:, :, 0]) * 1e4).astype(jnp.int32) % model.vocab_size

    start = jnp.ones((length.shape[0], block_tokens), jnp.int32)
    return jax.lax.fori_loop(0, n, body, start)


@jax.jit
def proposals(model: TargetModel, drafter: Drafter, state: DecodeState, n: Int[Array, ""]) -> Int[Array, ""]:
    """`n` proposals from one state, none of which can be left out: each sees a pending token that the one before it
    named, and a memory that, for all the compiler knows, depends on that too (Medusa and EAGLE draft from their memory
    alone).
    """
    rows = jnp.arange(state.length.shape[0])

    def body(_: Any, state: DecodeState) -> DecodeState:
        draft, memory = drafter.propose(state.memory, decode.context(model, state))
        named = (draft.tokens * draft.valid).sum(-1) + draft.valid.sum(-1) + 1
        tokens = state.tokens.at[rows, state.length - 1].set(named % model.vocab_size)
        never = named.sum() < 0
        memory = jax.tree.map(lambda x: jnp.where(never, x + 1, x) if _is_small(x) else x, memory)
        return replace(state, tokens=tokens, memory=memory, round=state.round + 1)

    return jax.lax.fori_loop(0, n, body, state).tokens.sum()


def _is_small(x: Any) -> bool:
    """A cache is not touched, which would cost more than the draft; what is drafted from it depends on the rest too."""
    return x.size <= 2**16 and jnp.issubdtype(x.dtype, jnp.number)
