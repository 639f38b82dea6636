"""EAGLE-1, -2 and -3: what goes into the network, what its cache holds, and that the text stays the target's own."""

from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import testing
from specjax.decode import context
from specjax.drafters import eagle
from specjax.drafters.eagle import Eagle
from specjax.drafters.eagle_config import Eagle3Config, EagleConfig, default_layers
from specjax.drafters.eagle_networks import Eagle3Network, EagleNetwork, feed, pair
from specjax.drafters.eagle_step import Memory, child_scores, feed_nodes
from specjax.drafters.growing import GrownTree
from specjax.drafters.vocabulary import offsets
from specjax.errors import InputError
from specjax.testing import Idle, Oracle, Replaced
from specjax.trees import chain_tree, static_tree

TREE = static_tree([(0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 2, 1), (1, 0, 0)])
WORDS = [3, 7, 11]  # a draft vocabulary


def eagle1(vocab_size: int = 12, seed: int = 0) -> EagleNetwork:
    return EagleNetwork.random(EagleConfig.of(testing.tiny_config(vocab_size=vocab_size)), seed, scale=0.3)


def eagle3(words: list[int] | None = None, vocab_size: int = 12, seed: int = 0, **changes: Any) -> Eagle3Network:
    """With features of both layers and the embeddings, and a draft vocabulary of `words` (None: all)."""
    target = testing.tiny_config(vocab_size=vocab_size)
    config = Eagle3Config.of(target, len(words or range(vocab_size)), feature_layers=(0, 1, 2), **changes)
    return Eagle3Network.random(config, seed, scale=0.3, d2t=None if words is None else offsets(words))


def drafters(vocab_size: int, words: list[int]) -> dict[str, Eagle]:
    one, three = eagle1(vocab_size), eagle3(words, vocab_size)
    return {
        "eagle1 chain": Eagle(one, chain_tree(3)),
        "eagle1 tree": Eagle(one, TREE),
        "eagle2": Eagle(one, GrownTree(depth=3, top_k=3, total=12)),
        "eagle3 chain": Eagle(three, chain_tree(3)),
        "eagle3 grown": Eagle(three, GrownTree(depth=3, top_k=4, total=13)),
    }


NAMES = list(drafters(12, WORDS))


def whole(drafter: Any) -> Any:
    """Compile for no block size but the whole draft's (and none): compiling is what costs here."""
    return replace(drafter, block_sizes=(drafter.num_nodes + 1,))


@pytest.mark.parametrize("name", NAMES)
def test_greedy(name: str, check_greedy: Any) -> None:
    drafter = whole(drafters(12, [1, 2, 4, 6, 9, 11])[name])
    assert drafter.name == ("eagle2" if name == "eagle2" else name[:6])
    out = check_greedy(drafter)
    assert {len(r.accepted) for row in out.trace for r in row} >= {0, 1}
    assert max(len(r.proposed) for row in out.trace for r in row) == drafter.num_nodes
    assert not out.trace[0][0].proposed  # a one-token prompt has no pair yet
    assert all(rounds[0].proposed for rounds in out.trace[1:])


@pytest.mark.parametrize("name", ["eagle1 tree", pytest.param("eagle3 grown", marks=pytest.mark.slow)])
def test_the_loop_copies_no_cache(name: str, cache_copies: Any) -> None:
    copies, temporaries = cache_copies(whole(drafters(12, WORDS)[name]))
    assert copies == 0
    assert temporaries < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_greedy_alone(name: str, check_greedy: Any) -> None:
    check_greedy(whole(drafters(12, WORDS)[name]), [[5, 6, 5]])


def test_end_of_text_inside_accepted_drafts(check_greedy: Any) -> None:
    """Whole drafts of the target's own are accepted now and then, so rows end in the middle of one."""
    drafter = Replaced(Eagle(eagle1(), chain_tree(4), block_sizes=(5,)), Oracle(4))
    out = check_greedy(drafter)
    assert any(len(r.accepted) == len(r.committed) for row in out.trace for r in row)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_idle(name: str, check_greedy: Any) -> None:
    check_greedy(Idle(whole(drafters(12, WORDS)[name]), every=3))


@pytest.mark.parametrize("name", ["eagle2", "eagle3 chain"])
def test_law(name: str, check_law: Any) -> None:
    check_law(whole(drafters(5, [0, 2, 3])[name]))


@pytest.mark.slow
def test_law_of_drawn_siblings(check_law: Any) -> None:
    tree = static_tree([(0,), (1,), (2,), (0, 0), (0, 1)])
    check_law(whole(Eagle(eagle1(5), tree, sample=True)), plain=True)


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("name", ["eagle1 chain", "eagle1 tree", "eagle3 chain"])
def test_every_law(name: str, sample: bool, plain: bool, check_law: Any) -> None:
    drafter = drafters(5, [0, 2, 3])[name]
    check_law(whole(replace(drafter, sample=sample)), plain)


@pytest.mark.parametrize(
    "network", [pytest.param(eagle1(), marks=pytest.mark.slow), eagle3(WORDS)], ids=["eagle1", "eagle3"]
)
def test_inputs_and_cache_are_the_true_ones(network: Any, few: Any, forward: Any, monkeypatch: Any) -> None:
    """Ragged rows, drafts of its own and of the target's, wrong and right ones. What is fed in every round are the
    teacher-forced pairs of the text, element by element; afterwards the cache, and the output at the pending token, are
    those of one pass over the whole text with true features.
    """
    seen: list[Any] = []

    def spy(network: Any, target: Any, pairs: Any, cache: Any = None, length: Any = None) -> Any:
        jax.debug.callback(lambda *values: seen.append([np.asarray(v) for v in values]), *vars(pairs).values())
        return feed(network, target, pairs, cache, length)

    monkeypatch.setattr(eagle, "feed", spy)
    drafter = Replaced(Eagle(network, chain_tree(4), block_sizes=(2, 5)), Oracle(4), instead=3)
    prompts = [[9], [5, 6, 5], [1, 2, 3, 4, 1, 2, 3]]
    job = specjax.prepare(few, prompts, drafter=drafter, max_new_tokens=40)
    state = job.prefill()

    @jax.jit
    def teacher(network: Any, features: Any, tokens: Any) -> Any:
        pairs = pair(network.fuse(features), tokens)
        return pairs, feed(network, few.model, pairs)

    counts, checked = set(), np.zeros(3, int)
    for _ in range(9):
        jax.effects_barrier()
        memory, lengths = state.memory[0], np.asarray(state.length)
        texts = [np.asarray(state.tokens)[i, :n].tolist() for i, n in enumerate(lengths)]
        tokens = jnp.array([text + [0] * (64 - len(text)) for text in texts])
        pairs, fed = teacher(network, forward(few.model, texts, network.features), tokens)
        for features, following, positions in seen:
            for i, n in enumerate(lengths):
                real = positions[i] < n - 1
                at = positions[i][real]
                np.testing.assert_array_equal(following[i][real], np.array(texts[i])[at + 1])
                np.testing.assert_array_equal(following[i][real], np.asarray(pairs.tokens)[i, at])
                np.testing.assert_allclose(features[i][real], np.asarray(pairs.features)[i, at], rtol=1e-4, atol=1e-4)
                checked[i] += len(at)
        seen.clear()
        for i, n in enumerate(lengths):
            if n > 1:
                np.testing.assert_allclose(memory.feature[i], np.asarray(fed.features)[i, n - 2], atol=1e-4)
            for found, expected in zip(jax.tree.leaves(memory.cache), jax.tree.leaves(fed.block), strict=True):
                np.testing.assert_allclose(found[i, :, : n - 1], expected[i, :, : n - 1], atol=1e-4)
        state, info = job.step(state)
        counts |= set(np.asarray(info.count)[np.asarray(info.count) > 0].tolist())
    assert counts >= {1, 5}
    assert (checked >= lengths - 1 - 5).all()  # every pair was fed once, but those of the last round


@pytest.mark.parametrize("network", [eagle1(), eagle3()], ids=["eagle1", "eagle3"])
def test_drafting_is_the_unrolled_training_step(network: Any, few: Any, forward: Any) -> None:
    """Over a whole text, step s feeds the outputs of step s - 1 with ids and positions advanced by s; a pair sees step
    0's keys causally, and of the later steps its own only. At the last pair this is what drafting a chain does.
    """
    steps, size = 3, 64
    prompts = [[1, 2, 3, 4, 1, 2, 3, 4], [6, 5]]
    job = specjax.prepare(few, prompts, drafter=Eagle(network, chain_tree(steps)), max_new_tokens=20)
    state = job.prefill()
    draft, _ = jax.jit(lambda memory, c: job.drafter.propose(memory, c))(state.memory, context(few.model, state))
    texts = [p + np.asarray(draft.tokens)[i].tolist() for i, p in enumerate(prompts)]
    pairs = pair(network.fuse(forward(few.model, texts, network.features)), jnp.asarray(_padded(texts, size + steps)))
    tokens = jnp.asarray(_padded(texts, size + steps + 1))
    causal = np.broadcast_to(np.tril(np.ones((size, size), bool)), (2, size, size))

    @jax.jit
    def unroll(network: Any, ids: Any, features: Any, step: Any, mask: Any, earlier: Any) -> Any:
        embedded = network.embeddings(ids, few.model)
        fed = network(embedded, features, pairs.positions + step, mask, earlier=earlier)
        return fed, network.logits(fed.features, few.model)

    own, mask, earlier, features = np.broadcast_to(np.eye(size, dtype=bool), causal.shape), causal, None, pairs.features
    for step in range(steps):
        fed, logits = unroll(network, tokens[:, step + 1 : step + 1 + size], features, step, mask, earlier)
        features, best = fed.features, np.asarray(logits).argmax(-1)
        for i, prompt in enumerate(prompts):
            assert best[i, len(prompt) - 2] == np.asarray(draft.tokens)[i, step]
        joined = (earlier, fed.block) if earlier is not None else (fed.block,)
        earlier = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=2), *joined)
        mask = np.concatenate([mask, own], axis=2)


def _padded(texts: list[list[int]], size: int) -> np.ndarray:
    return np.array([(text + [0] * size)[:size] for text in texts], np.int32)


def _start(target: Any, drafter: Eagle, prompt: list[int]) -> tuple[Memory, Any]:
    state = specjax.prepare(target, [prompt], drafter=drafter, max_new_tokens=20).prefill()
    return state.memory, context(target.model, state)


def test_trees_hold_the_paths_that_chains_would(few: Any) -> None:
    """A grown tree has the likeliest paths of all it expanded, a static one the ranks it names: each scored alone."""
    network, depth = eagle3(WORDS), 3
    grown = Eagle(network, GrownTree(depth, top_k=3, total=16))
    memory, seen = _start(few, grown, [1, 2, 3, 4, 1, 2])
    score = jax.jit(
        lambda feature, path, d: child_scores(network, seen, feature, path, d, False).values, static_argnums=2
    )
    step = jax.jit(lambda *args: feed_nodes(network, memory, seen, *args), static_argnums=2)
    laws: dict[tuple[int, ...], np.ndarray] = {}

    def descend(path: tuple[int, ...], feature: Any, earlier: Any) -> None:
        tokens = jnp.array([[[*path, *[0] * (depth - len(path))]]])
        laws[path] = np.asarray(jax.nn.log_softmax(score(feature, tokens, len(path))))[0, 0]
        for word in WORDS if len(path) < depth - 1 else ():
            mask = jnp.ones((1, 1, len(path) + 1), bool)
            descend((*path, word), *step(jnp.array([[word]]), feature, len(path) + 1, earlier, mask))

    descend((), memory.feature[:, None], None)
    chances = {
        path: sum(laws[path[:i]][WORDS.index(word)] for i, word in enumerate(path))
        for n in range(1, depth + 1)
        for path in product(WORDS, repeat=n)
    }
    draft, _ = jax.jit(lambda memory, seen: grown.propose(memory, seen))(memory, seen)
    ranked = sorted(chances, key=chances.get, reverse=True)
    expanded = [path for path in ranked if len(path) == 2][:3]
    assert _paths(draft) == [path for path in ranked if len(path) < 3 or path[:2] in expanded][:15]  # best first

    static = Eagle(network, static_tree([(0,), (1,), (2,), (0, 1), (2, 0), (2, 2), (2, 0, 1), (0, 1, 2)]))
    draft, _ = jax.jit(lambda memory, seen: static.propose(memory, seen))(memory, seen)
    expected = []
    for choice in static.tree.choices:
        path: tuple[int, ...] = ()
        for rank in choice:
            path = (*path, WORDS[np.argsort(-laws[path])[rank]])
        expected.append(path)
    assert sorted(_paths(draft)) == sorted(expected)


def _paths(draft: Any) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    tokens, parents, valid = (np.asarray(x)[0] for x in (draft.tokens, draft.parents, draft.valid))
    for token, parent in zip(tokens[valid].tolist(), parents[valid].tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def test_draft_vocabulary(few: Any) -> None:
    """d2t holds offsets; proposals are of the draft vocabulary, and q is zero elsewhere."""
    network = eagle3(WORDS)
    np.testing.assert_array_equal(network.d2t[...], [3, 6, 9])
    np.testing.assert_array_equal(network.target_ids, WORDS)
    np.testing.assert_array_equal(np.flatnonzero(network.t2d), WORDS)
    drafter = Eagle(network, chain_tree(3))
    state = specjax.prepare(few, [[1, 2, 3, 7], [4, 5]], drafter=drafter, max_new_tokens=20).prefill()
    for penalty in (1.0, 1.5):  # with one, scores are processed over the target's ids
        rules = specjax.Sampling(temperature=[1.0, 0.0], repetition_penalty=penalty).rules(2)
        seen = replace(context(few.model, state), rules=rules)
        draft, _ = jax.jit(lambda memory, seen: drafter.propose(memory, seen))(state.memory, seen)
        assert set(np.asarray(draft.tokens).ravel().tolist()) <= set(WORDS)
        q = np.asarray(draft.q)
        np.testing.assert_allclose(q.sum(-1), 1, atol=1e-5)
        assert not np.delete(q, WORDS, axis=2).any()
        logits = np.asarray(network.logits(state.memory.feature[:, None], few.model))[0, 0]
        if penalty != 1:  # 3 and 7 are in the text
            logits = np.where([1, 1, 0], np.where(logits > 0, logits / penalty, logits * penalty), logits)
        np.testing.assert_allclose(q[0, 0, WORDS], np.exp(logits) / np.exp(logits).sum(), atol=1e-5)
        assert (q[1].max(-1) == 1).all()  # temperature 0
    with pytest.raises(InputError, match="d2t is missing"):
        Eagle3Network.random(network.config)
    with pytest.raises(InputError, match="different ids below 12"):
        Eagle3Network.random(network.config, d2t=[3, 7, 11])  # absolute ids


def test_the_two_halves_of_the_input(few: Any) -> None:
    """The first half of the rows belongs to the embedding, the second to the feature."""
    random = np.random.default_rng(0)
    a, b = (jnp.asarray(random.standard_normal((1, 3, 32)), jnp.float32) for _ in range(2))
    positions, mask = jnp.arange(3)[None], jnp.tril(jnp.ones((1, 3, 3), bool))
    one = eagle1()
    one.fc[...] = one.fc[...].at[:32].set(0)
    np.testing.assert_array_equal(one(a, b, positions, mask).features, one(b, b, positions, mask).features)
    assert not np.allclose(one(a, a, positions, mask).features, one(a, b, positions, mask).features)
    three = eagle3()
    layer = three.layers[0]
    layer.qkv[...] = layer.qkv[...].at[:32].set(0)
    np.testing.assert_array_equal(three(a, b, positions, mask).features, three(b, b, positions, mask).features)


def test_eagle3_residual() -> None:
    """With attention and feed-forward silenced the output is the feature, raw or normed."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 32)), jnp.float32)
    positions, mask = jnp.arange(3)[None], jnp.tril(jnp.ones((1, 3, 3), bool))
    for normed in (False, True):
        network = eagle3(norm_before_residual=normed)
        network.layers[0].out[...] = network.layers[0].out[...] * 0
        network.layers[0].down[...] = network.layers[0].down[...] * 0
        y = np.asarray(network(x, x, positions, mask).features)
        scale = np.sqrt((np.asarray(x) ** 2).mean(-1, keepdims=True) + network.config.layer.norm_eps)
        expected = np.asarray(x) / scale * np.asarray(network.feature_norm[...]) if normed else x
        np.testing.assert_allclose(y, expected, atol=1e-5)


def test_bfloat16_and_own_embeddings() -> None:
    """A bfloat16 target, and a float32 network that is narrower than it."""
    target = testing.tiny_target(testing.tiny_model(vocab_size=12, dtype="bfloat16"))
    config = Eagle3Config.of(target.model.config, 12, feature_layers=(0, 1, 2), own_embedding=True)
    config = replace(config, layer=replace(config.layer, hidden_size=24))
    for network in (Eagle3Network.random(config), eagle1()):
        drafter = Eagle(network, chain_tree(2))
        job = specjax.prepare(target, [[1, 2, 3]], drafter=drafter, max_new_tokens=8)
        state = jax.eval_shape(job.prefill)
        jax.eval_shape(job.step, state)


def test_arrays_come_back() -> None:
    network = eagle3(WORDS)
    arrays = {
        name: np.asarray(getattr(network, name)[...])
        for name in ("fc", "embed_norm", "feature_norm", "norm", "head", "d2t")
    }
    layer = network.layers[0]
    arrays |= {
        f"layers.0.{n}": np.asarray(getattr(layer, n)[...]) for n in ("qkv", "out", "mlp_norm", "gate_up", "down")
    }
    again = Eagle3Network.from_arrays(network.config, arrays)
    for a, b in zip(jax.tree.leaves(network), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_long_prompts_are_filled_in_chunks(few: Any, forward: Any, monkeypatch: Any) -> None:
    """A prompt longer than a prefill pass ends in the same state as in one pass."""
    monkeypatch.setattr("specjax.models.prefill.CHUNK", 16)
    prompts = [np.random.default_rng(i).integers(12, size=n).tolist() for i, n in enumerate((46, 33, 5))]
    network = eagle1()
    long = specjax.prepare(few, prompts, drafter=Eagle(network, chain_tree(2)), max_new_tokens=4).prefill()
    features = network.fuse(forward(few.model, prompts, network.features))
    fed = jax.jit(feed)(network, few.model, pair(features, jnp.asarray(_padded(prompts, 64))))
    for i, n in enumerate(map(len, prompts)):
        np.testing.assert_allclose(long.memory.feature[i], fed.features[i, n - 2], atol=1e-4)
        np.testing.assert_allclose(
            long.memory.cache.keys[0][i, :, : n - 1], fed.block.keys[0][i, :, : n - 1], atol=1e-4
        )


def test_nothing_is_compiled_again(few: Any, prompts: Any) -> None:
    """Other weights of the same shape, other prompts, other acceptances: the same programs."""
    sizes = []
    for seed in (0, 1):
        drafter = whole(Eagle(eagle1(seed=seed), GrownTree(depth=3, top_k=3, total=12)))
        specjax.generate(few, prompts[seed:] + prompts[:seed], drafter=drafter, max_new_tokens=45, trace=True)
        sizes.append(specjax.job._run._cache_size())
    assert sizes[0] == sizes[1]


def test_bad_input(few: Any, table: Any) -> None:
    assert default_layers(30) == (2, 15, 27)
    assert default_layers(7) == (2, 3, 4)
    for shallow in (2, 4, 6):
        with pytest.raises(InputError, match=f"of {shallow} layers: they collide"):
            default_layers(shallow)
    with pytest.raises(InputError, match="sample"):
        Eagle(eagle1(), GrownTree(), sample=True)
    with pytest.raises(InputError, match="top_k of at least 1"):
        GrownTree(top_k=0)
    with pytest.raises(InputError, match="own_embedding"):
        Eagle3Config(testing.tiny_config(num_layers=1, windows=(None,)), 12, 64, (0, 1, 2))
    wide = testing.tiny_config(hidden_size=64)
    with pytest.raises(InputError, match="hidden_size 64, and the target has 32"):
        specjax.generate(few, [[1, 2]], drafter=Eagle(EagleNetwork.random(EagleConfig.of(wide))))
    narrow = EagleNetwork.random(EagleConfig(replace(EagleConfig.of(wide).layer, hidden_size=3)))
    with pytest.raises(InputError, match="embeddings"):
        specjax.generate(table, [[1, 2]], drafter=Eagle(narrow))
