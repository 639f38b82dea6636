"""MTP modules: what goes into them, what their caches hold, and that the text stays the target's own."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import testing
from specjax.decode import context
from specjax.drafters.eagle_networks import pair
from specjax.drafters.growing import GrownTree
from specjax.drafters.mtp import Mtp, MtpConfig, MtpNetwork
from specjax.drafters.mtp_unroll import unroll
from specjax.drafters.vocabulary import offsets
from specjax.errors import InputError
from specjax.testing import Idle, Oracle, Replaced
from specjax.training.features import segment_mask
from specjax.trees import chain_tree, static_tree

TREE = static_tree([(0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 2, 1), (1, 0, 0), (1, 0, 0, 0)])
FIVE = [[9], [5, 6, 5], [1, 2, 3, 4, 1, 2, 3, 4, 1], [7, 8, 7, 8, 9, 10, 11, 7, 8, 7, 8, 9, 10, 11, 2, 7, 8], [6, 5]]


def modules(count: int, vocab_size: int = 12, seed: int = 0, words: Any = None, **changes: Any) -> MtpNetwork:
    config = MtpConfig.of(testing.tiny_config(vocab_size=vocab_size), count, **changes)
    if words is not None:
        config = replace(config, draft_vocab_size=len(words))
    return MtpNetwork.random(config, seed, scale=0.3, d2t=None if words is None else offsets(words))


def drafters(vocab_size: int = 12, words: Any = None) -> dict[str, Mtp]:
    """One module again and again; fewer of them than levels; as many; more."""
    raw = {"feature": "layer.2", "norm_output": False, "hidden_first": False}
    return {
        "one": Mtp(modules(1, vocab_size), chain_tree(3)),
        "chained": Mtp(modules(2, vocab_size, words=words), chain_tree(3)),
        "tree": Mtp(modules(3, vocab_size, words=words, **raw), TREE),
        "grown": Mtp(modules(3, vocab_size), GrownTree(depth=3, top_k=3, total=12)),
    }


def whole(drafter: Any) -> Any:
    """Compile for no block size but the whole draft's (and none): compiling is what costs here."""
    return replace(drafter, block_sizes=(drafter.num_nodes + 1,))


SLOW = pytest.mark.slow


# compiling is what costs: what is not slow shares prompts and settings
ALL = [pytest.param(name, marks=() if name == "chained" else SLOW) for name in drafters()]


@pytest.mark.parametrize("name", ALL)
def test_greedy(name: str, check_greedy: Any) -> None:
    drafter = whole(drafters()[name])
    out = check_greedy(drafter, FIVE)
    assert {len(r.accepted) for row in out.trace for r in row} >= {0, 1}
    assert max(len(r.proposed) for row in out.trace for r in row) == drafter.num_nodes
    assert not out.trace[0][0].proposed  # a one-token prompt has no pair yet
    assert all(rounds[0].proposed for rounds in out.trace[1:])


def test_nothing_is_compiled_again(few: Any) -> None:
    """Other weights of the same shape, other prompts, other acceptances: the same programs."""
    sizes = []
    for seed in (0, 1):
        drafter = whole(replace(drafters()["chained"], network=modules(2, seed=seed)))
        specjax.generate(few, FIVE[seed:] + FIVE[:seed], drafter=drafter, max_new_tokens=45, trace=True)
        sizes.append(specjax.job._run._cache_size())
    assert sizes[0] == sizes[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", drafters())
def test_greedy_alone(name: str, check_greedy: Any) -> None:
    check_greedy(whole(drafters(words=[1, 2, 4, 6, 9, 11])[name]), [[5, 6, 5]])


def test_end_of_text_inside_accepted_drafts(check_greedy: Any) -> None:
    """Whole drafts of the target's own are accepted now and then, so rows end in the middle of one."""
    drafter = Replaced(whole(drafters()["chained"]), Oracle(3))
    out = check_greedy(drafter, FIVE)
    assert any(len(r.accepted) == len(r.committed) for row in out.trace for r in row)


@pytest.mark.slow
@pytest.mark.parametrize("name", drafters())
def test_idle(name: str, check_greedy: Any) -> None:
    check_greedy(Idle(whole(drafters()[name]), every=3))


@pytest.mark.slow
def test_sure_chains(check_greedy: Any) -> None:
    out = check_greedy(whole(replace(drafters()["chained"], min_confidence=0.3)))
    assert {len(r.proposed) for row in out.trace for r in row} >= {0, 1, 2, 3}


@pytest.mark.parametrize("name", ALL)
def test_law(name: str, check_law: Any) -> None:
    check_law(whole(drafters(5, [0, 2, 3])[name]))


@pytest.mark.slow
def test_law_of_drawn_siblings(check_law: Any) -> None:
    check_law(whole(replace(drafters(5, [0, 2, 3])["tree"], sample=True)), plain=True)


@jax.jit(static_argnums=3)
def outputs_over(network: Any, model: Any, texts: Any, steps: int) -> list[Any]:
    """What drafts from every place of the texts are read out of."""
    mask, positions = segment_mask(jnp.ones_like(texts)), jnp.broadcast_to(jnp.arange(texts.shape[1]), texts.shape)
    true = network.feature(model(texts, positions, mask, features=network.features).features)
    return unroll(network, model, true, texts, positions, mask, steps)


@pytest.mark.parametrize("name", [pytest.param("one", marks=SLOW), pytest.param("chained", marks=SLOW), "tree"])
def test_drafting_is_the_unrolled_training_step(name: str, few: Any) -> None:
    """Every node's token has the rank it is drafted with, in what training computes for the path above it. After a text
    of two tokens the second and third module have no pairs yet, and the slots below theirs have to stay unseen.
    """
    drafter, prompts = drafters()[name], [[1, 2, 3, 4, 1, 2, 3, 4], [6, 5], [7, 8, 9]]
    tree: Any = drafter.tree
    job = specjax.prepare(few, prompts, drafter=drafter, max_new_tokens=20)
    state = job.prefill()
    draft, _ = jax.jit(lambda memory, seen: drafter.propose(memory, seen))(state.memory, context(few.model, state))
    tokens, parents = np.asarray(draft.tokens), np.asarray(draft.parents)
    assert np.asarray(draft.valid).all()
    rows: list[tuple[list[int], int, int, int, int]] = []
    for i, prompt in enumerate(prompts):
        paths: list[list[int]] = []
        nodes: dict[tuple[int, ...], int] = {}
        for node, (token, parent) in enumerate(zip(tokens[i], parents[i], strict=True)):
            above = paths[parent] if parent >= 0 else []
            paths.append([*above, int(token)])
            nodes[tuple(above)] = nodes.get(tuple(above), 0) + 1
            rows.append((prompt + above, len(prompt) - 2, len(above), node, i))
    texts = np.array([(text + [0] * 16)[:16] for text, *_ in rows], np.int32)
    outputs = outputs_over(drafter.network, few.model, texts, tree.max_depth)
    logits = [np.asarray(drafter.network.child_logits(x, few.model, step)) for step, x in enumerate(outputs)]
    # siblings come in the order of their ranks, and nodes in that of `choices`, level by level
    ranks = {node: choice[-1] for node, choice in enumerate(tree.choices)}
    for row, (_, place, step, node, i) in enumerate(rows):
        ranked = np.argsort(-logits[step][row, place], kind="stable")
        assert ranked[ranks[node]] == tokens[i, node], (name, i, node)


@pytest.mark.parametrize("name", ["chained", pytest.param("tree", marks=SLOW)])
def test_inputs_and_caches_are_the_true_ones(name: str, few: Any, forward: Any, monkeypatch: Any) -> None:
    """Ragged rows, drafts of its own and of the target's, wrong and right ones. In every round each module is fed with
    the output of the one before, at the same position, of the true text; afterwards each cache, and the outputs at the
    pending token, are those of the modules run over the whole text one after the other.
    """
    network, seen = drafters()[name].network, []
    count, module = network.num_modules, MtpNetwork.module

    def spy(
        self: Any, index: int, embedded: Any, hidden: Any, view: Any, cache: Any = None, earlier: Any = None
    ) -> Any:
        if feeding:
            jax.debug.callback(lambda *values: seen.append((index, *map(np.asarray, values))), hidden, starts[-1])
        return module(self, index, embedded, hidden, view, cache, earlier)

    def text(self: Any, target: Any, pairs: Any, *rest: Any) -> Any:
        feeding.append(True)
        starts.append(pairs.positions[:, 0])
        found = read_text(self, target, pairs, *rest)
        feeding.clear()
        return found

    feeding: list[bool] = []
    starts: list[Any] = []
    read_text = MtpNetwork.read_text
    monkeypatch.setattr(MtpNetwork, "module", spy)
    monkeypatch.setattr(MtpNetwork, "read_text", text)
    drafter = Replaced(Mtp(network, chain_tree(4), block_sizes=(5,)), Oracle(4), instead=3)
    job = specjax.prepare(few, [[9], [5, 6, 5], [1, 2, 3, 4, 1, 2, 3]], drafter=drafter, max_new_tokens=40)
    state = job.prefill()

    @jax.jit
    def teacher(network: Any, true: Any, tokens: Any) -> Any:
        """Each module over the whole text: h^(k-1), h^k, keys and values at t, which is slot t + k - 1 of the cache."""
        positions = jnp.broadcast_to(jnp.arange(64), (3, 64))
        seen = network._seen(positions, segment_mask(jnp.ones((3, 64))), None, None)
        hidden, found = true, []
        for i in range(count):
            embedded = network.embeddings(tokens[:, i + 1 : i + 65], few.model)
            given = hidden
            hidden, *block = module(network, i, embedded, given, replace_tables(network, seen, positions + i))
            found.append((given, hidden, block))
        return found

    counts, fed = set(), 0
    for _ in range(9):
        jax.effects_barrier()
        memory, lengths = jax.tree.map(np.asarray, state.memory[0]), np.asarray(state.length)
        texts = [np.asarray(state.tokens)[i, :n].tolist() for i, n in enumerate(lengths)]
        tokens = jnp.array([t + [0] * (70 - len(t)) for t in texts])
        found = teacher(network, network.feature(forward(few.model, texts, network.features)), tokens)
        found = jax.tree.map(np.asarray, found)
        for index, hidden, start in seen:
            for i, n in enumerate(lengths):
                for place in range(hidden.shape[1]):
                    slot = start[i] + place
                    if index <= slot < n - 1:
                        np.testing.assert_allclose(hidden[i, place], found[index][0][i, slot - index], atol=1e-4)
                        fed += 1
        seen.clear()
        width = network.config.layers.hidden_size
        for k, (_, hidden, block) in enumerate(found):
            for i, n in enumerate(lengths):
                if n > k + 1:
                    at = memory.feature[i, k * width : (k + 1) * width]
                    np.testing.assert_allclose(at, hidden[i, n - 2 - k], atol=1e-4)
                for ours, true in zip((memory.cache.keys[k], memory.cache.values[k]), block, strict=True):
                    np.testing.assert_allclose(ours[i, :, k : n - 1], true[i, :, : max(n - 1 - k, 0)], atol=1e-4)
        state, info = job.step(state)
        counts |= set(np.asarray(info.count)[np.asarray(info.count) > 0].tolist())
    assert counts >= {1, 5}
    assert fed >= (np.asarray(lengths) - 1 - 5).sum() * count - 3 * count


def replace_tables(network: Any, seen: Any, positions: Any) -> Any:
    """A view of whole texts from the module's own place."""
    return network._seen(positions, seen.mask, None, None).view(0)


def test_the_two_halves_of_the_projection(few: Any) -> None:
    """With the embedding's half of it zero, a module depends on the hidden state only, whichever comes first."""
    random = np.random.default_rng(0)
    a, b = (jnp.asarray(random.standard_normal((1, 3, 32)), jnp.float32) for _ in range(2))
    positions, mask = jnp.arange(3)[None], jnp.tril(jnp.ones((1, 3, 3), bool))
    for hidden_first in (True, False):
        network = modules(1, hidden_first=hidden_first)
        view = network._seen(positions, mask, None, None).view(0)
        embedding = slice(32, None) if hidden_first else slice(32)
        proj = network.around[0].proj
        proj[...] = proj[...].at[embedding].set(0)
        run = jax.jit(lambda embedded, hidden, network=network, view=view: network.module(0, embedded, hidden, view)[0])
        np.testing.assert_array_equal(run(a, b), run(b, b))
        assert not np.allclose(run(a, a), run(a, b))


def test_what_goes_on_to_the_next_module() -> None:
    """The output behind the module's final norm, or before it; the head reads it behind it in both cases."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 32)), jnp.float32)
    normed, raw = modules(2), modules(2, norm_output=False)
    view = normed._seen(jnp.arange(3)[None], jnp.tril(jnp.ones((1, 3, 3), bool)), None, None).view(1)
    a, b = normed.module(1, x, x, view)[0], raw.module(1, x, x, view)[0]
    assert not np.allclose(a, b, atol=0.1)
    for depth in (1, 2, 5):  # of module 2
        np.testing.assert_allclose(normed.read(a, depth), raw.read(b, depth), atol=1e-6)
    assert not np.allclose(raw.read(b, 0), raw.read(b, 1), atol=0.01)


def test_training_starts_from_the_target(few: Any) -> None:
    """The last layer over the target's hidden state, and a head that reads as the target's does."""
    for hidden_first in (True, False):
        config = MtpConfig.of(few.model.config, 2, hidden_first=hidden_first, draft_vocab_size=3)
        network, last = MtpNetwork.start(config, few.model, [3, 7, 11]), few.model.layers[-1]
        np.testing.assert_array_equal(network.target_ids, [3, 7, 11])
        for around, layer in zip(network.around, network.layers, strict=True):
            half = slice(32) if hidden_first else slice(32, None)
            np.testing.assert_array_equal(around.proj[...][half], np.eye(32))
            np.testing.assert_array_equal(around.norm[...], few.model.norm[...])
            np.testing.assert_array_equal(around.hidden_norm[...], 1)
            for name in ("attn_norm", "qkv", "out", "mlp_norm", "gate_up", "down"):
                np.testing.assert_array_equal(getattr(layer, name)[...], getattr(last, name)[...])


def test_bfloat16() -> None:
    """Of the target, of the modules, or of both."""
    for dtypes in (("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")):
        target = testing.tiny_target(testing.tiny_model(vocab_size=12, dtype=dtypes[0]))
        network = MtpNetwork.random(MtpConfig.of(target.model.config, 2), dtype=jnp.dtype(dtypes[1]))
        job = specjax.prepare(target, [[1, 2, 3]], drafter=Mtp(network, chain_tree(3)), max_new_tokens=8)
        state = jax.eval_shape(job.prefill)
        assert {x.dtype for x in state.memory.cache.keys} == {jnp.dtype(dtypes[1])}
        jax.eval_shape(job.step, state)


def test_long_prompts_are_filled_in_chunks(few: Any, forward: Any, monkeypatch: Any) -> None:
    """A prompt longer than a prefill pass ends in the same state as in one pass."""
    monkeypatch.setattr("specjax.models.prefill.CHUNK", 16)
    prompts = [np.random.default_rng(i).integers(12, size=n).tolist() for i, n in enumerate((46, 33, 5))]
    network = modules(2)
    long = specjax.prepare(few, prompts, drafter=Mtp(network, chain_tree(2)), max_new_tokens=4).prefill()
    memory = jax.tree.map(np.asarray, long.memory)
    true = network.feature(forward(few.model, prompts, network.features))
    tokens = jnp.asarray([(p + [0] * 64)[:64] for p in prompts])
    once = jax.jit(lambda network: network.read_text(few.model, pair(true, tokens), jnp.zeros((3, 64))))(network)
    once = jax.tree.map(np.asarray, once)
    for i, n in enumerate(map(len, prompts)):
        np.testing.assert_allclose(memory.feature[i], once.features[i, n - 2], atol=1e-4)
        for k in range(2):
            found, expected = memory.cache.keys[k][i], once.block.keys[k][i]
            np.testing.assert_allclose(found[:, k : n - 1], expected[:, k : n - 1], atol=1e-4)


@pytest.mark.parametrize("batch", [1, pytest.param(5, marks=SLOW)])
def test_the_loop_holds_no_second_cache(batch: int, cache_copies: Any) -> None:
    """Neither of the target's nor of the modules'."""
    config = testing.tiny_config(vocab_size=12, head_dim=64)
    copies, temporaries = cache_copies(
        Mtp(MtpNetwork.random(MtpConfig.of(config, 2)), chain_tree(3), block_sizes=(4,)), batch
    )
    assert copies == 0
    assert temporaries < 0.15


def test_bad_input(few: Any, table: Any) -> None:
    with pytest.raises(InputError, match="num_modules: expected a whole number of at least 1, got 0"):
        MtpConfig.of(few.model.config, 0)
    with pytest.raises(InputError, match="a draft vocabulary of 13 tokens: expected 1 to 12"):
        MtpConfig.of(few.model.config, draft_vocab_size=13)
    with pytest.raises(InputError, match="no windows and no experts"):
        MtpConfig(replace(few.model.config, windows=(4, None)))
    with pytest.raises(InputError, match="sample"):
        Mtp(modules(1), GrownTree(), sample=True)
    with pytest.raises(InputError, match="d2t is missing"):
        MtpNetwork.random(MtpConfig.of(few.model.config, draft_vocab_size=3))
    wide = MtpConfig.of(testing.tiny_config(hidden_size=64, vocab_size=12))
    with pytest.raises(InputError, match="hidden_size 64, and the target has 32"):
        specjax.generate(few, [[1, 2]], drafter=Mtp(MtpNetwork.random(wide), chain_tree(1)))
    with pytest.raises(InputError, match="width 64 cannot read the embeddings of a target of width 32"):
        MtpNetwork.start(wide, few.model)
    deep = Mtp(modules(1, feature="layer.9"), chain_tree(1))
    with pytest.raises(InputError, match=r"unknown feature 'layer\.9'"):
        specjax.generate(few, [[1, 2]], drafter=deep)
    narrow = MtpConfig.of(testing.tiny_config(hidden_size=3, vocab_size=64))
    with pytest.raises(InputError, match="embeddings"):
        specjax.generate(table, [[1, 2]], drafter=Mtp(MtpNetwork.random(narrow), chain_tree(1)))
