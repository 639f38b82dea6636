"""Early exit: the target's own layers draft from the target's own cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decode, testing
from specjax.drafters.small_decoder import SmallDecoder
from specjax.errors import InputError
from specjax.models import layers as F
from specjax.models.decoder import View
from specjax.models.prefill import prefill


def drafter(layers: Any, k: int = 3, **options: Any) -> specjax.EarlyExit:
    """Compiled for no block size but the whole draft's: compiling is what costs here."""
    return specjax.EarlyExit(layers, k, block_sizes=(k + 1,), **options)


def test_all_of_the_target_is_always_right(check_greedy: Any, prompts: Any) -> None:
    """Every draft of five ragged rows is accepted whole until the text ends, if need be in the middle of one."""
    out = check_greedy(drafter(2), [*prompts, [2, 6]])
    ends = set()
    for row, reason in zip(out.trace, out.finish_reasons, strict=True):
        assert all(len(r.accepted) == 3 for r in row[:-1])
        ends.add((reason, len(row[-1].committed)))
    assert any(reason == "stop" and count < 4 for reason, count in ends)
    assert out.stats.alpha == 1.0


def test_the_first_layers_draft_as_a_model_of_their_own(check_greedy: Any, few: Any) -> None:
    """A small decoder made of the same layers, with a cache of its own, proposes the same in every round."""
    out = check_greedy(drafter(1))
    other = check_greedy(specjax.DraftModel(SmallDecoder.start(few.model, (0,)), 3, block_sizes=(4,)))
    assert out.trace == other.trace
    assert {len(r.accepted) for row in out.trace for r in row} >= {0, 1, 2}


def test_greedy_alone(check_greedy: Any) -> None:
    check_greedy(drafter((1,)), [[5, 6, 5]])


SLOW = pytest.mark.slow
FAMILIES = [
    pytest.param("gemma3", (1, 3), marks=SLOW),
    pytest.param("mistral", (0, 2), marks=SLOW),
    pytest.param("qwen3_moe", (0, 1, 3), marks=SLOW),
]


@pytest.mark.parametrize(("family", "layers"), FAMILIES)
def test_families_and_skipped_layers(family: str, layers: tuple[int, ...]) -> None:
    """Windows of 8 tokens, experts, scaled embeddings: drafts of 9 tokens are those that the layers give when they are
    run over each path as one block behind the target's keys and values, whatever was accepted before.
    """
    windows = {"gemma3": (8, None, 8, None), "mistral": (8, 8, 8, 8)}.get(family, (None,) * 4)
    config = testing.tiny_config(family)
    experts = config.moe and {"moe": type(config.moe)(**{**vars(config.moe), "layers": config.moe.layers * 2})}
    model = testing.tiny_model(family, num_layers=4, windows=windows, tie_embeddings=False, **(experts or {}))
    target = testing.tiny_target(model)
    job = specjax.prepare(
        target, [[1, 2, 3], [4], [7, 8, 9, 7, 8, 9, 1, 1, 5, 6]], drafter(layers, 9), max_new_tokens=40
    )
    propose = jax.jit(lambda chosen, model, state: chosen.propose(None, decode.context(model, state))[0])
    expected = jax.jit(lambda model, state: one_block(model, layers, state, 9))
    state = job.prefill()
    for _ in range(4):
        draft = propose(job.drafter, model, state)
        assert draft.valid.all()
        np.testing.assert_array_equal(draft.tokens, expected(model, state))
        state, _ = job.step(state)


def one_block(model: Any, layers: tuple[int, ...], state: Any, k: int) -> jax.Array:
    """Greedy drafts: the pending token and the path so far are run again for every token."""
    cache, _ = prefill(model, state.tokens, 63, state.tokens.shape[1])
    start, batch = state.length - 1, state.length.shape[0]
    path = jnp.zeros((batch, k), jnp.int32)
    positions = start[:, None] + jnp.arange(k + 1)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((k + 1, k + 1), bool)), (batch, k + 1, k + 1))
    view = View.make(model.config, positions, mask, cache, start)
    for i in range(k):
        x = model.embeddings(jnp.concatenate([state.pending[:, None], path], axis=1))
        for n in layers:
            x, _, _ = model.layers[n](x, view, (cache.keys[n], cache.values[n]))
        hidden = F.rms_norm(x, model.norm[...], model.config.norm_eps, model.config.norm_offset)
        path = path.at[:, i].set(model.logits(hidden[:, i : i + 1])[:, 0].argmax(-1))
    return path


def test_law(check_law: Any) -> None:
    """With penalties and filters of each row's own; the first layer alone would be right too often to cross rounds."""
    check_law(drafter((1,), 2))


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("options", [{"sample": False}, {"layers": (1,), "k": 1}, {"layers": (1,), "k": 4}])
def test_every_law(options: dict[str, Any], plain: bool, check_law: Any) -> None:
    check_law(drafter(**{"layers": 1, **options}), plain)


@pytest.mark.slow
def test_law_of_block_verification(few: Any) -> None:
    target = testing.tiny_target(testing.tiny_model(vocab_size=5, seed=1))
    result = testing.law_test(target, drafter(1), "block", num_tokens=2, samples=40_000, rows=4000)
    assert result.passed, result


def test_the_loop_holds_no_second_cache(cache_copies: Any) -> None:
    """Neither a copy of the target's, which drafting only reads, nor one of its own."""
    copies, temporaries = cache_copies(drafter(2))
    assert copies == 0
    assert temporaries < 0.3


def test_nothing_is_compiled_again(few: Any, prompts: Any) -> None:
    """Another target of the same shapes, other texts, other acceptances."""
    sizes = []
    for seed in (1, 2):
        target = testing.tiny_target(testing.tiny_model(vocab_size=12, max_positions=56, seed=seed), eos=[3, 4])
        specjax.generate(target, prompts[:: 1 if seed == 1 else -1], drafter(1), max_new_tokens=45, trace=True)
        sizes.append(specjax.job._run._cache_size())
    assert sizes[0] == sizes[1]


def test_no_draft_tokens_is_plain(few: Any) -> None:
    out = specjax.generate(few, [[5, 6, 5]], specjax.EarlyExit(1, 0), max_new_tokens=5)
    assert out.stats.proposed == 0


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (0, "layers: expected a whole number of at least 1, got 0"),
        (None, "layers: expected a whole number of at least 1, got None"),
        ((), r"rising numbers of layers, such as \(0, 1, 5\); got \(\)"),
        ((0, 2, 1), "rising numbers"),
        ((-1, 0), "rising numbers"),
        ((0.0, 1.0), "rising numbers"),
        ((0, 0), "rising numbers"),
    ],
)
def test_bad_layers(layers: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        specjax.EarlyExit(layers)


def test_targets_without_such_layers(few: Any, table: Any) -> None:
    with pytest.raises(InputError, match="a TableModel has none"):
        specjax.prepare(table, [[1]], specjax.EarlyExit(1))
    for layers in (3, (0, 2)):
        with pytest.raises(InputError, match="the target has 2 layers, got layers="):
            specjax.prepare(few, [[1]], specjax.EarlyExit(layers))
