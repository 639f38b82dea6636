"""Targets, prompts and runs that the engine's tests share. Compiling is what costs: same shapes, same programs."""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# before jax is imported: tests compile hundreds of small programs and run most of them once
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true " + os.environ.get("XLA_FLAGS", "")
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import testing

NEW_TOKENS = 200
# ragged, with repeats for prompt lookup, and a one-token prompt that leaves nothing to prefill
PROMPTS = [[9], [5, 6, 5], [1, 2, 3, 4, 1, 2, 3, 4, 1], [7, 8, 7, 8, 9, 10, 11, 12, 7, 8, 7, 8, 9, 10, 11, 12, 7]]


MAPPINGS = 25_000  # a process may have 65,530 on most systems, and a compiled program takes hundreds


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """Drop compiled programs before their memory mappings run out: compiling would end in a segmentation fault."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return PROMPTS


@pytest.fixture(scope="session")
def table() -> specjax.Target:
    """A table model of 64 tokens with a tokenizer; checks positions, masks and the cache by itself."""
    return testing.tiny_target(testing.TableModel.random(64, seed=3), tokenizer=testing.TinyTokenizer())


@pytest.fixture(scope="session")
def tiny() -> specjax.Target:
    """A random transformer of 64 tokens."""
    return testing.tiny_target(testing.tiny_model(), tokenizer=testing.TinyTokenizer())


@pytest.fixture(scope="session")
def cousin(tiny: specjax.Target) -> specjax.Target:
    """`tiny` with noise on its weights: a draft model that is right now and then."""
    return testing.tiny_target(noisy(tiny.model, 0.02))


def noisy(model: Any, scale: float, seed: int = 5) -> Any:
    leaves, tree = jax.tree.flatten(model)
    random = np.random.default_rng(seed)
    return jax.tree.unflatten(tree, [x + scale * random.standard_normal(x.shape).astype(x.dtype) for x in leaves])


@pytest.fixture(scope="session")
def decode() -> Callable[..., specjax.Generation]:
    """`generate` with everything recorded, always with the same shapes."""

    def run(target: specjax.Target, drafter: Any = None, prompts: Sequence[Any] = PROMPTS, **options: Any) -> Any:
        options = {"max_new_tokens": NEW_TOKENS, "logprobs": True, "trace": True} | options
        return specjax.generate(target, prompts, drafter=drafter, **options)

    return run


@pytest.fixture(scope="session")
def table_text(table: specjax.Target, decode: Any) -> list[list[int]]:
    """What plain greedy decoding gives on `table`."""
    return decode(table).token_ids


@pytest.fixture(scope="session")
def tiny_text(tiny: specjax.Target, decode: Any) -> list[list[int]]:
    return decode(tiny).token_ids


@pytest.fixture(scope="session")
def scores() -> Callable[..., np.ndarray]:
    """`scores(model, texts)`: logits `[R, 256, V]` of texts from one forward pass without a cache."""
    forward = jax.jit(lambda model, *args: model.logits(model(*args).hidden))

    def run(model: Any, texts: Sequence[Sequence[int]]) -> np.ndarray:
        rows = next(n for n in (1, 4, 32, 256) if n >= len(texts))  # few shapes, few compilations
        tokens = np.zeros((rows, 256), np.int32)
        for row, text in zip(tokens, texts, strict=False):
            row[: len(text)] = text
        positions = np.broadcast_to(np.arange(256, dtype=np.int32), tokens.shape)
        mask = np.broadcast_to(np.tril(np.ones((256, 256), bool)), (rows, 256, 256))
        return np.asarray(forward(model, tokens, positions, mask))[: len(texts)]

    return run


@pytest.fixture(scope="session")
def scripted() -> Callable[..., specjax.Target]:
    """`scripted({a: b, …})`: a table model of 64 tokens that says b after a, and 63 after anything else."""

    def make(follows: dict[int, int], eos: Sequence[int] = (), max_positions: int = 4096) -> specjax.Target:
        table = np.zeros((64, 64, 64), np.float32)
        table[:, :, 63] = 5.0
        for before, after in follows.items():
            table[:, before, after] = 10.0
        return testing.tiny_target(testing.TableModel(jnp.asarray(table), max_positions), eos=eos)

    return make
