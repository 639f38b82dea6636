"""Targets with few tokens, so that random drafters are right now and then, and runs that meet every end of a text."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import specjax
from specjax import decode, testing
from specjax.state import Drafter

CONTEXT = 56  # the longest rows end there
PROMPTS = [[9], [5, 6, 5], [1, 2, 3, 4, 1, 2, 3, 4, 1], [7, 8, 7, 8, 9, 10, 11, 7, 8, 7, 8, 9, 10, 11, 2, 7, 8]]


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return PROMPTS


@pytest.fixture(scope="session")
def few() -> specjax.Target:
    """A random transformer of 12 tokens. Two of the prompts end by EOS, one by the cap, one by the short context."""
    return testing.tiny_target(testing.tiny_model(vocab_size=12, max_positions=CONTEXT, seed=1), eos=[3, 4])


@pytest.fixture(scope="session")
def check_greedy(few: specjax.Target) -> Callable[[Drafter, list[list[int]]], specjax.Generation]:
    """Decode greedily with a drafter: the text must be the plain one, token for token, however rows end."""
    plain = {}

    def run(drafter: Drafter, prompts: list[list[int]] = PROMPTS) -> specjax.Generation:
        key = repr(prompts)
        if key not in plain:
            plain[key] = specjax.generate(few, prompts, max_new_tokens=45)
        expected = plain[key]
        out = specjax.generate(few, prompts, drafter=drafter, max_new_tokens=45, trace=True)
        assert out.token_ids == expected.token_ids
        assert out.finish_reasons == expected.finish_reasons
        if len(prompts) > 1:
            assert set(out.finish_reasons) == {"stop", "length", "context"}
        for row in out.trace:
            for r in row:
                assert all(parent < i for i, parent in enumerate(r.parents))
        return out

    return run


@pytest.fixture(scope="session")
def check_law() -> Callable[..., None]:
    """The law of sampled texts is the target's own, for settings that differ from row to row and read the text."""
    target = testing.tiny_target(testing.tiny_model(vocab_size=5, seed=1))
    sampling = specjax.Sampling(temperature=[0.8, 1.3], top_k=4, repetition_penalty=[1.2, 1.0])
    prompts = [[1, 0, 2, 1, 0, 2], [3]]
    exact = [
        testing.exact_law(target, p, 2, specjax.Sampling(temperature=t, top_k=4, repetition_penalty=r))
        for p, t, r in zip(prompts, [0.8, 1.3], [1.2, 1.0], strict=True)
    ]

    def run(drafter: Drafter, plain: bool = False) -> None:
        settings = specjax.Sampling(temperature=1.0) if plain else sampling
        result = testing.law_test(
            target,
            drafter,
            sampling=settings,
            prompts=prompts,
            num_tokens=2,
            samples=24_000,
            rows=4000,
            exact=None if plain else exact,
        )
        assert result.passed, result
        assert result.crossed > 0.1
        assert result.acceptance_rate > 0.05

    return run


@pytest.fixture(scope="session")
def forward() -> Callable[..., Any]:
    """`forward(model, texts, names)`: features `[R, 64, M]` of whole texts from one pass without a cache."""

    @partial(jax.jit, static_argnums=4)
    def compiled(model: Any, tokens: Any, positions: Any, mask: Any, names: tuple[str, ...]) -> dict[str, Any]:
        return model(tokens, positions, mask, features=names).features

    def run(model: Any, texts: list[list[int]], names: tuple[str, ...]) -> dict[str, Any]:
        tokens = np.array([text + [0] * (64 - len(text)) for text in texts], np.int32)
        positions = np.broadcast_to(np.arange(64, dtype=np.int32), tokens.shape)
        mask = np.broadcast_to(np.tril(np.ones((64, 64), bool)), (len(texts), 64, 64))
        return compiled(model, tokens, positions, mask, names)

    return run


@pytest.fixture(scope="session")
def cache_copies() -> Callable[..., Any]:
    """How often the compiled loop of a drafter copies an array as long as a cache, and its temporaries' share of the
    target's cache.
    """

    def run(drafter: Drafter, batch: int = 1) -> tuple[int, float]:
        target = testing.tiny_target(testing.tiny_model(vocab_size=12, num_layers=4, windows=(None,) * 4, head_dim=64))
        made = specjax.prepare(target, [[1, 2]] * batch, drafter, max_new_tokens=9)
        arguments = made.arguments | {"tokens": jax.ShapeDtypeStruct((batch, 1111), "int32")}
        arrays = {n: value for n, value in arguments.items() if n not in ("longest", "logprobs", "trace_rounds")}
        state = jax.eval_shape(lambda arrays: decode.prefill(target.model, drafter, longest=16, **arrays), arrays)
        loop = jax.jit(decode.run, static_argnums=2, donate_argnums=3)
        compiled = loop.lower(target.model, drafter, made.law, state).compile()
        program = compiled.as_text()
        assert f"f32[{batch},2,1111,64]" in program
        copies = re.findall(rf"f32\[{batch},\d+,1111,\d+\]\S* (?:copy|copy-start|transpose)\(", program)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))
        return len(copies), compiled.memory_analysis().temp_size_in_bytes / size

    return run
