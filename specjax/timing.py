"""What a round costs on this device, measured: a target pass over each block size of a drafter, and its proposals."""

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax import decode
from specjax.costs import Costs
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
        InputError: a size below 1, or a context that the target does not have.
    """
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
    shapes = [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(drafter) if hasattr(x, "shape")]
    return {
        "device": f"{device.platform} {device.device_kind} × {jax.device_count()}, {os.cpu_count()} cores",
        "jax": jax.__version__,
        "target": target.weights_hash,
        "dtype": target.dtype,
        "drafter": [drafter.name, *shapes],
        "nodes": list(ladder(drafter)),
        "depth": drafter.max_depth,
        "batch_size": batch_size,
        "context": context,
    }


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
    passes, proposals = jax.jit(_passes, static_argnums=2), jax.jit(_proposals)
    timers = [_Timer(partial(passes, model, state, nodes)) for nodes in ladder(drafter)]
    timers.append(_Timer(partial(proposals, model, drafter, state)))
    with jax.default_matmul_precision("highest" if target.dtype == "float32" else "default"):
        turns = [[timer() for timer in timers] for _ in range(repetitions)]
    *verify, draft = (statistics.median(values) for values in zip(*turns, strict=True))
    return [max(x, 1e-9) for x in verify], max(draft, 0.0)


class _Timer:
    """Seconds of a step of `loop(n)`, n steps in one program."""

    def __init__(self, loop: Callable[[int], Array]):
        self.loop, self.steps = loop, 0

    def __call__(self) -> float:
        if not self.steps:
            self.loop(1).block_until_ready()
            self.steps = 1
            while self.steps < 1024 and self() * self.steps < LEAST_SECONDS:
                self.steps *= 2
        begin = time.perf_counter()
        self.loop(0).block_until_ready()
        middle = time.perf_counter()
        self.loop(self.steps).block_until_ready()
        return (time.perf_counter() - middle - (middle - begin)) / self.steps


def _passes(model: TargetModel, state: DecodeState, nodes: int, n: Int[Array, ""]) -> Array:
    """`n` passes, each over tokens that come out of the one before it, so that none can be left out."""

    def body(_: Any, tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
        draft = chain(tokens[:, 1:], jnp.full(tokens.shape[0], nodes))
        # the barrier keeps all logits in being; reading a few of them costs nothing
        seen = verify(model, state.cache, tokens[:, 0], state.length, draft)
        logits = jax.lax.optimization_barrier(seen.logits)
        return (jnp.abs(logits[:, :, 0]) * 1e4).astype(jnp.int32) % model.vocab_size

    start = jnp.ones((state.length.shape[0], nodes + 1), jnp.int32)
    return jax.lax.fori_loop(0, n, body, start)


def _proposals(model: TargetModel, drafter: Drafter, state: DecodeState, n: Int[Array, ""]) -> Array:
    """`n` proposals, none of which can be left out: each sees a pending token that the one before it named, and a
    memory that, for all the compiler knows, depends on that too (Medusa and EAGLE draft from their memory alone).
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
