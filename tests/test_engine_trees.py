"""Trees and probes: what a node sees, where it stands, and what remains of it after a round."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import testing
from specjax.models.prefill import prefill
from specjax.testing import Oracle, Prober, Replay
from specjax.trees import Draft, order
from specjax.verify import verify


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_each_node_sees_its_own_path(family: str, scores: Any) -> None:
    """The tree [0] [1] [0,0] [0,1] [1,0] in shuffled order: each node's logits are a forward pass over its path."""
    model = testing.tiny_model(family, seed=3)
    text = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1]]
    tokens = np.array([[10, 20, 11, 12, 21]] * 2)
    parents, shuffled = [-1, -1, 0, 0, 1], [[4, 2, 0, 3, 1], [3, 0, 4, 1, 2]]
    rows = []
    for old in shuffled:
        new = {node: place for place, node in enumerate(old)}
        rows.append([new[parents[node]] if parents[node] >= 0 else -1 for node in old])
    mixed = np.take_along_axis(tokens, np.array(shuffled), axis=1)
    draft = order(jnp.asarray(mixed), jnp.asarray(rows), jnp.ones((2, 5), bool))
    length = jnp.array([len(t) for t in text])
    padded = jnp.array([row + [0] * (12 - len(row)) for row in text])
    cache, _ = fill(model, padded, 11, 32)
    pending = jnp.take_along_axis(padded, length[:, None] - 1, axis=1)[:, 0]
    seen = np.asarray(jax.jit(verify)(model, cache, pending, length, draft).logits)
    paths = {10: [10], 20: [20], 11: [10, 11], 12: [10, 12], 21: [20, 21]}
    for row in range(2):
        for node, token in enumerate(np.asarray(draft.tokens)[row]):
            path = text[row] + paths[int(token)]
            np.testing.assert_allclose(seen[row, node + 1], scores(model, [path])[0, len(path) - 1], atol=1e-5)
        np.testing.assert_allclose(seen[row, 0], scores(model, [text[row]])[0, len(text[row]) - 1], atol=1e-5)


def test_fillers_change_nothing(tiny: Any) -> None:
    """Neither their tokens nor their number: a node's logits are those of a draft without them."""
    text = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    cache, _ = fill(tiny.model, text, 7, 32)
    call = jax.jit(lambda draft: verify(tiny.model, cache, text[:, -1], jnp.array([8]), draft).logits)
    draft = Draft(jnp.array([[10, 11, 50, 60]]), jnp.array([[-1, 0, 1, 0]]), jnp.array([[True, True, False, False]]))
    bare = call(Draft(draft.tokens[:, :2], draft.parents[:, :2], draft.valid[:, :2]))
    np.testing.assert_allclose(call(draft)[:, :3], bare, atol=1e-5)


def check_cache(target: Any, state: specjax.DecodeState) -> None:
    """The cache is what a fresh prefill of the committed text gives."""
    fresh, _ = fill(target.model, state.tokens, 64, state.tokens.shape[1])
    for row, length in enumerate(np.asarray(state.length)):
        for found, expected in zip(jax.tree.leaves(state.cache), jax.tree.leaves(fresh), strict=True):
            np.testing.assert_allclose(found[row, :, : length - 1], expected[row, :, : length - 1], atol=1e-5)


fill = jax.jit(prefill, static_argnums=(2, 3))


def test_the_cache_holds_the_accepted_path(tiny: Any, prompts: Any) -> None:
    """Nodes accepted from all over the block lie in the cache as if they had been read one after the other."""
    job = specjax.prepare(tiny, prompts, drafter=Oracle(3, decoys=1), max_new_tokens=60)
    state = job.prefill()
    for _ in range(6):
        state, info = job.step(state)
        assert info.path.nodes.tolist() == [[0, 2, 4, 6]] * 4
        check_cache(tiny, state)


def test_prefill_in_chunks() -> None:
    """A prompt longer than one chunk, under a window: cache and features are those of one forward pass."""
    model = testing.tiny_model("mistral")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 300)))
    cache, features = jax.jit(prefill, static_argnums=(2, 3, 4))(model, tokens, 299, 520, ("hidden",))
    positions = jnp.broadcast_to(jnp.arange(300), (2, 300))
    whole = jax.jit(model.__class__.__call__)(model, tokens, positions, jnp.tril(jnp.ones((2, 300, 300), bool)))
    np.testing.assert_allclose(features["hidden"][:, :299], whole.hidden[:, :299], atol=1e-4)
    for found, expected in zip(jax.tree.leaves(cache), jax.tree.leaves(whole.block), strict=True):
        np.testing.assert_allclose(found[:, :, :299], expected[:, :, :299], atol=1e-4)


def test_positions_have_no_gap_over_many_rounds(table: Any, table_text: Any, prompts: Any) -> None:
    """Over many rounds with mixed accept counts the cache's slots hold positions 0, 1, 2, … and the text's tokens."""
    random = np.random.default_rng(1)
    script = np.where(random.random((4, 200)) < 0.5, table_text, -1)
    job = specjax.prepare(
        table, prompts, drafter=Replay.of(script.tolist(), 16), max_new_tokens=200, logprobs=True, trace=True
    )
    state = job.run(job.prefill())
    assert int(state.round) >= 40
    for row, length in enumerate(np.asarray(state.length)):
        assert length == len(prompts[row]) + 200
        keys = np.asarray(state.cache.keys[0])[row, 0, : length - 1]
        np.testing.assert_array_equal(keys[:, 1], np.arange(length - 1))
        np.testing.assert_array_equal(keys[:, 0], np.asarray(state.tokens)[row, : length - 1])


def test_probes_see_what_their_mask_says(tiny: Any, tiny_text: Any, prompts: Any, scores: Any) -> None:
    """The logits that come back at probes are those of a forward pass over what they see.

    Nothing of them is committed or counted, and the text does not change. The drafts go wrong anywhere, and the cache
    stays right.
    """
    wrong = [[t if i % 3 else (t + 1) % 64 for i, t in enumerate(row)] for row in tiny_text]
    script = [[-1 if i % 5 == 2 else t for i, t in enumerate(row)] for row in wrong]
    drafter = Prober(Replay.of(script, 3))
    job = specjax.prepare(tiny, prompts, drafter=drafter, max_new_tokens=60)
    state, checked = job.prefill(), 0
    a, b, c = drafter.tokens
    for _ in range(12):
        before = [np.asarray(state.tokens)[i, :n].tolist() for i, n in enumerate(np.asarray(state.length))]
        state, info = job.step(state)
        valid, first = np.asarray(state.memory["valid"]), np.asarray(info.draft.tokens)[:, 0]
        for probe, path in enumerate(([a], [a, b], None)):
            texts = [t + (path or [int(n), c]) for t, n in zip(before, first, strict=True)]
            logits = scores(tiny.model, texts)
            for row in np.flatnonzero(valid[:, probe]):
                expected = logits[row, len(texts[row]) - 1]
                np.testing.assert_allclose(np.asarray(state.memory["logits"])[row, probe], expected, atol=1e-4)
                checked += probe == 2
        check_cache(tiny, state)
    assert checked > 10
    assert not valid.all()
    for row, length in enumerate(np.asarray(state.length)):
        new = np.asarray(state.tokens)[row, len(prompts[row]) : length].tolist()
        assert new == tiny_text[row][: len(new)]
    assert (np.asarray(state.counters.proposed) <= 12 * 3).all()


def test_probes_survive_a_smaller_block(table: Any, table_text: Any, decode: Any) -> None:
    """Blocks are cut to what the batch proposes; probes stay behind the nodes."""
    drafter = Prober(replace(Replay.of([[-1, -1, *row[2:]] for row in table_text], 4), block_sizes=(2,)))
    out = decode(table, drafter)
    assert out.token_ids == table_text
    assert {r.block_tokens for row in out.trace for r in row} >= {2 + 3, 5 + 3}
