"""Combined drafts: what is merged and how, that no part loses track, and that the text stays the target's own."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decode, testing
from specjax.drafters.combined import Combined, merge
from specjax.drafters.eagle import Eagle
from specjax.drafters.eagle_config import Eagle3Config, EagleConfig
from specjax.drafters.eagle_networks import Eagle3Network, EagleNetwork
from specjax.drafters.growing import GrownTree
from specjax.drafters.medusa import Medusa, MedusaConfig, MedusaHeads
from specjax.drafters.small_decoder import SmallDecoder
from specjax.errors import InputError
from specjax.sampling import Sampling
from specjax.state import FINISH_REASONS
from specjax.testing import Oracle, Prober, Replay, TableTree, law_test
from specjax.trees import Draft, chain_tree, static_tree

V = 4
TABLE = testing.tiny_target(testing.TableModel.random(V))
LOOKUP = specjax.PromptLookup(3, max_ngram=3, min_ngram=1)
DRAFT_MODEL = specjax.DraftModel(testing.TableModel.random(V, seed=1), 2)


def eagle1(vocab_size: int = 12) -> EagleNetwork:
    return EagleNetwork.random(EagleConfig.of(testing.tiny_config(vocab_size=vocab_size)), scale=0.3)


def everyone(target: specjax.Target) -> list[Any]:
    config = testing.tiny_config(vocab_size=12)
    three = Eagle3Network.random(Eagle3Config.of(config, 12, feature_layers=(0, 1, 2)), 1, scale=0.3)
    heads = MedusaHeads.random(MedusaConfig(32, 12, 2), scale=0.3)
    return [
        specjax.PromptLookup(4, max_ngram=3, min_ngram=1),
        specjax.SuffixDecoding(3, min_match=1),
        specjax.TokenRecycling(2, static_tree([(0,), (1,), (0, 0)])),
        Medusa(heads, static_tree([(0,), (1,), (0, 0)])),
        Eagle(eagle1(), static_tree([(0,), (1,), (0, 0), (0, 1)])),
        Eagle(three, chain_tree(3)),
        specjax.DraftModel(SmallDecoder.start(target.model, (1,)), 3),
        specjax.EarlyExit((1,), 2),
        specjax.LookaheadDecoding(window=2, ngram=3, guesses=2),
    ]


def whole(parts: list[Any], **options: Any) -> Combined:
    """Compiled for no block size but the whole draft's: compiling is what costs here."""
    drafter = Combined(parts, **options)
    return replace(drafter, block_sizes=(drafter.num_nodes + 1,))


def test_end_of_text_inside_a_block(check_greedy: Any) -> None:
    """One row alone. One part is always right, so every draft is accepted whole until the text ends in the middle of
    one: after 12 tokens, five a round.
    """
    out = check_greedy(whole([LOOKUP, Oracle(4, decoys=1)]), [[5, 6, 5]])
    assert [len(r.accepted) for r in out.trace[0]] == [4, 4, 2]
    assert out.finish_reasons == ["stop"]


@pytest.mark.slow
def test_everyone_at_once(few: Any, prompts: Any) -> None:
    """All drafters there are, five ragged rows: the text is the plain one, token for token, however rows end. And no
    part loses track: it proposes what it would have proposed had the text so far been its prompt, although most of what
    was accepted came from others. The two that remember more than the text have what the target said last.
    """
    drafter, prompts = whole(everyone(few)), [*prompts, [2, 6]]
    assert (drafter.num_nodes, drafter.max_depth, drafter.wants_logits) == (29, 4, True)
    assert drafter.features == ("hidden", "layer.0", "layer.1", "layer.2")
    job = specjax.prepare(few, prompts, drafter, max_new_tokens=45)
    state, rounds, accepts = job.prefill(), 0, set()
    mine, others = np.zeros(len(drafter.parts), int), np.zeros(len(drafter.parts), int)
    while state.running.any():
        running = np.flatnonzero(state.running)
        compared = rounds < 12
        if compared:
            memories = (state.memory, fresh(few.model, drafter, state))
            found, expected = (proposals(few.model, drafter, memory, state) for memory in memories)
        state, info = job.step(state)
        rounds += 1
        accepted, committed = np.asarray(info.path.accepted), np.asarray(info.path.tokens)
        matrix, pool = np.asarray(state.memory[2]), np.asarray(state.memory[8].pool)
        for row in running:
            merged = in_order(info.draft, row)
            assert len(set(merged)) == len(merged)  # what is said twice is there once
            accepts.add(int(accepted[row]))
            text = np.asarray(state.tokens)[row, : int(state.length[row])].tolist()
            assert matrix[row, text[-2], 0] == text[-1]
            assert len(text) < 3 or text[-2:] in pool[row, text[-3]].tolist()
            way = tuple(committed[row, : accepted[row]].tolist())
            for number, part in enumerate(drafter.parts if compared else ()):
                own = in_order(found[number], row)
                assert part.name in ("recycling", "lookahead") or own == in_order(expected[number], row)
                mine[number] += bool(way) and way in own
                others[number] += bool(way) and way[:1] not in own
    print(f"\naccepted, from the part itself and from others only: {mine.tolist()}, {others.tolist()}")
    assert (mine > 0).sum() >= 7
    assert (others > 5).all()
    assert accepts >= {0, 1, 2}
    plain = specjax.generate(few, prompts, max_new_tokens=45)
    new = [row[len(p) : n] for row, p, n in zip(np.asarray(state.tokens), prompts, state.length, strict=True)]
    assert [row.tolist() for row in new] == plain.token_ids
    assert [FINISH_REASONS[int(f)] for f in state.finish] == plain.finish_reasons
    assert set(plain.finish_reasons) == {"stop", "length", "context"}


@jax.jit
def fresh(model: Any, drafter: Any, state: Any) -> Any:
    """The memory after a prompt that is the text so far."""
    rest = {"rules": state.rules, "stops": state.stops, "key": state.key, "longest": 55}
    return decode.prefill(model, drafter, state.tokens, state.length, state.limit, **rest).memory


@jax.jit
def proposals(model: Any, drafter: Combined, memory: Any, state: Any) -> list[Draft]:
    """What each part proposes."""
    seen = decode.context(model, state)
    return [part.propose(own, seen)[0] for part, own in zip(drafter.parts, memory, strict=True)]


def in_order(draft: Draft, row: int) -> list[tuple[int, ...]]:
    """The tokens from below the pending token to each node."""
    found: dict[int, tuple[int, ...]] = {-1: ()}
    for i in np.flatnonzero(draft.valid[row]):
        found[int(i)] = (*found[int(draft.parents[row, i])], int(draft.tokens[row, i]))
    return [path for path in found.values() if path]


def some_draft(random: np.random.Generator, nodes: int, drawn: bool) -> Draft:
    """20 rows of random trees over few tokens; with `drawn`, some nodes are."""
    shape = (20, nodes)
    parents = np.stack([random.integers(-1, i, 20) for i in range(nodes)], axis=1).astype(np.int32)
    valid = np.arange(nodes) < random.integers(0, nodes + 1, (20, 1))
    tokens = random.integers(0, 3, shape).astype(np.int32)
    if not drawn:
        return Draft(*map(jnp.asarray, (tokens, parents, valid)))
    return Draft(*map(jnp.asarray, (tokens, parents, valid, random.random(shape) < 0.4, random.random((*shape, 3)))))


@pytest.mark.parametrize(("drawn", "kept"), [((False, False, False), 17), ((True, False, True), 17), ((False,) * 3, 6)])
def test_merging_one_node_after_the_other(drawn: tuple[bool, ...], kept: int) -> None:
    """Against the definition, node by node: a deterministic twin is folded, a drawn node stays, children move."""
    random = np.random.default_rng(0)
    drafts = [some_draft(random, n, d) for n, d in zip((6, 4, 7), drawn, strict=True)]
    merged = jax.jit(merge, static_argnums=1)(drafts, kept)
    assert merged.tokens.shape == (20, kept)
    assert (merged.drawn is not None) == any(drawn)
    folded = moved = 0
    for row in range(20):
        nodes: list[tuple[int, int, bool, Any]] = []
        for draft in drafts:
            spots: list[int] = []
            for i in np.flatnonzero(draft.valid[row]):
                above, token = int(draft.parents[row, i]), int(draft.tokens[row, i])
                parent = spots[above] if above >= 0 else -1
                is_drawn = draft.drawn is not None and bool(draft.drawn[row, i])
                twins = [n for n, node in enumerate(nodes) if node[:3] == (token, parent, False)]
                spots.append(twins[0] if twins else len(nodes))
                folded += bool(twins) and not is_drawn
                moved += bool(twins) and is_drawn
                if is_drawn or not twins:
                    nodes.append((token, parent, is_drawn, draft.q[row, i] if is_drawn else None))
        nodes = nodes[:kept]
        count = len(nodes)
        assert np.asarray(merged.valid)[row].tolist() == [True] * count + [False] * (kept - count)
        assert np.asarray(merged.tokens)[row, :count].tolist() == [node[0] for node in nodes]
        assert np.asarray(merged.parents)[row].tolist() == [node[1] for node in nodes] + [-1] * (kept - count)
        for i, (*_, is_drawn, q) in enumerate(nodes):
            assert merged.drawn is None or bool(merged.drawn[row, i]) == is_drawn
            if is_drawn:
                np.testing.assert_array_equal(merged.q[row, i], q)
    assert folded > 30
    assert moved > 5 or not any(drawn)


def test_nothing_to_merge() -> None:
    target, parts = TABLE, [specjax.Plain(), specjax.PromptLookup(0)]
    out = specjax.generate(target, [[1, 2], [3]], Combined(parts), max_new_tokens=4)
    assert out.token_ids == specjax.generate(target, [[1, 2], [3]], max_new_tokens=4).token_ids
    assert (out.stats.target_calls, out.stats.proposed) == (8, 0)


def test_total_keeps_the_first_parts_nodes(few: Any, prompts: Any) -> None:
    """Six of up to 3 + 12 nodes: the first part's, then the best of the others that fit."""
    grown = Eagle(eagle1(), GrownTree(depth=3, top_k=3, total=13))
    parts = [specjax.PromptLookup(3, min_ngram=1), grown]
    job = specjax.prepare(few, prompts, Combined(parts, total=6), max_new_tokens=30)
    assert (job.drafter.num_nodes, job.drafter.max_depth) == (6, 3)
    state, cut = job.prefill(), 0
    for _ in range(8):
        own, room = proposals(few.model, job.drafter, state.memory, state), np.asarray(state.limit - state.length)
        running = np.flatnonzero(state.running)
        state, info = job.step(state)
        for row in running:
            first, second = (in_order(draft, row) for draft in own)
            expected = list(dict.fromkeys(first + second))
            cut += len(expected) > 6
            assert in_order(info.draft, row) == [path for path in expected[:6] if len(path) < room[row]]
    assert cut > 10


EVERYTHING = Sampling(
    temperature=[0.8, 1.2],
    top_k=3,
    top_p=[0.95, 0.9],
    min_p=0.05,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.2,
)
LAWS: dict[str, list[Any]] = {
    "lookup and a draft model": [LOOKUP, DRAFT_MODEL],
    "the same law, deterministic and drawn twice": [TableTree.random(V, 2, k) for k in "dss"],
    "drawn first": [TableTree.random(V, 2, "s"), TableTree.random(V, 2, "d")],
    "trees of all kinds": [TableTree.random(V, 2, k, seed=s) for s, k in enumerate(("ds", "ss", "sd"))],
    "drawn twice": [TableTree.random(V, 2, "dd"), TableTree.random(V, 2, "ss", replace=True)],
    "probes": [Prober(TableTree.random(V, 2, "s")), LOOKUP],
    "combined": [LOOKUP, Combined([DRAFT_MODEL, DRAFT_MODEL])],
}
PROMPTS = [[1, 0, 2, 1, 0, 2, 1, 0], [3, 1, 3]]


def test_law() -> None:
    """Keys that parts share, or drawn nodes that are folded, would show."""
    drafter = whole(LAWS["the same law, deterministic and drawn twice"])
    check(law_test(TABLE, drafter, sampling=EVERYTHING, prompts=PROMPTS, samples=60_000))


@pytest.mark.slow
@pytest.mark.parametrize("law", ["rejection", "block"])
@pytest.mark.parametrize(
    "settings", [Sampling(temperature=0.8), Sampling(temperature=[0.0, 1.0], top_p=0.9), EVERYTHING]
)
@pytest.mark.parametrize("name", LAWS)
def test_every_law(name: str, settings: Sampling, law: str) -> None:
    check(law_test(TABLE, whole(LAWS[name]), law, sampling=settings, prompts=PROMPTS, samples=200_000))


def check(result: testing.LawResult) -> None:
    print(f"\ndistance {result.distance:.5f}, expected {result.expected:.5f}, noise {result.noise:.5f}")
    assert result.passed, result
    assert result.crossed > 0.1
    assert result.acceptance_rate > 0.05


@pytest.mark.slow
def test_law_of_a_transformer(check_law: Any) -> None:
    """A network with features, a model with a cache, a search: drawn, deterministic, of different depths."""
    model = testing.tiny_model(vocab_size=5, seed=4)
    check_law(
        whole([specjax.PromptLookup(2, min_ngram=1), specjax.DraftModel(model, 1), Eagle(eagle1(5), chain_tree(2))])
    )


@pytest.mark.slow
def test_law_of_a_cut_tree(check_law: Any) -> None:
    grown = Eagle(eagle1(5), GrownTree(depth=3, top_k=2, total=8))
    check_law(whole([specjax.PromptLookup(2, min_ngram=1), grown], total=5))


def test_each_part_gets_its_own_probes() -> None:
    """The target's logits at both parts' probes, behind nodes that were folded and nodes that were not: those of the
    table after the tokens that each probe sees. A wrong mask or position makes them NaN.
    """
    target = testing.tiny_target(testing.TableModel.random(12, seed=3))
    prompts = [[5, 6, 5], [9]]
    plain = np.array(specjax.generate(target, prompts, max_new_tokens=40).token_ids)
    random = np.random.default_rng(0)
    scripts = [np.where(random.random(plain.shape) < right, plain, (plain + 1) % 12) for right in (0.7, 0.5)]
    parts = [
        Prober(Replay(jnp.asarray(script, jnp.int32), 3), tokens)
        for script, tokens in zip(scripts, ((1, 2, 3), (4, 5, 6)), strict=True)
    ]
    job = specjax.prepare(target, prompts, whole(parts), max_new_tokens=40)
    state, table, folded = job.prefill(), np.asarray(target.model.table), 0
    for _ in range(8):
        at = np.asarray(state.length - state.prompt_length)
        pending, before = np.asarray(state.pending), np.asarray(state.tokens)
        state, info = job.step(state)
        folded += int((np.asarray(info.draft.valid).sum(-1) < 6).sum())
        for part, script, memory in zip(parts, scripts, state.memory, strict=True):
            a, b, c = part.tokens
            for row in range(2):
                first = script[row, at[row]]
                expected = [table[pending[row], a], table[a, b], table[first, c]]
                assert memory["valid"][row].all()
                np.testing.assert_allclose(memory["logits"][row], expected, rtol=1e-6)
    assert before.shape == (2, 128)
    assert folded > 4


def test_probes_go_with_the_node_they_saw() -> None:
    """A chain of three with probes behind a tree of three, cut to four nodes: the probe at the first node sees its twin
    or has gone with it.
    """
    target = testing.tiny_target(testing.TableModel.random(12, seed=3))
    plain = specjax.generate(target, [[5, 6, 5], [9]], max_new_tokens=20).token_ids
    wrong = [[(t + 1) % 12 for t in row] for row in plain]
    for script, there in ((plain, True), (wrong, False)):
        parts = [Replay.of(plain, 3), Prober(Replay.of(script, 3))]
        job = specjax.prepare(target, [[5, 6, 5], [9]], whole(parts, total=3), max_new_tokens=20)
        state, _ = job.step(job.prefill())
        assert np.asarray(state.memory[1]["valid"]).tolist() == [[True, True, there]] * 2


def test_nothing_is_compiled_again(few: Any, prompts: Any) -> None:
    """Other weights, texts and acceptances."""
    sizes = []
    for seed in (0, 1):
        heads = MedusaHeads.random(MedusaConfig(32, 12, 2), seed, scale=0.3)
        parts = [specjax.PromptLookup(4, min_ngram=1), Medusa(heads, static_tree([(0,), (1,), (0, 0)]))]
        specjax.generate(few, prompts[seed:] + prompts[:seed], whole(parts), max_new_tokens=45)
        sizes.append(specjax.job._run._cache_size())
    assert sizes[0] == sizes[1]


def test_block_sizes_are_those_of_the_parts() -> None:
    small, large = specjax.PromptLookup(4, block_sizes=(3, 5)), specjax.PromptLookup(8)
    assert Combined([small, large]).block_sizes == (3, 5)
    assert Combined([large, large]).block_sizes is None
    assert Combined([small, large], block_sizes=(7,)).block_sizes == (7,)
    assert jax.tree.map(lambda x: x, Combined([small, large])) == Combined((small, large))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Combined([LOOKUP]), "parts: expected two drafters or more"),
        (lambda: Combined(LOOKUP), "parts: expected two drafters or more"),
        (lambda: Combined([LOOKUP, "suffix"]), "parts: expected drafters, got 'suffix'"),
        (lambda: Combined([LOOKUP, specjax.PromptLookup]), "parts: expected drafters, got <class"),
        (lambda: Combined([LOOKUP, LOOKUP], total=0), "total: expected a whole number of at least 1"),
        (lambda: Combined([LOOKUP, LOOKUP], block_sizes=[3]), "block_sizes: expected a tuple"),
    ],
)
def test_bad_settings(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_parts_are_checked(few: Any) -> None:
    with pytest.raises(InputError, match="the draft model has 4 tokens and the target 12"):
        specjax.prepare(few, [[1]], Combined([LOOKUP, DRAFT_MODEL]))


def test_drawn_nodes_cannot_be_left_out() -> None:
    """Said before anything is computed; and only where something is drawn and left out."""
    parts, sampled = [LOOKUP, DRAFT_MODEL], Sampling(temperature=1.0)
    job = specjax.prepare(TABLE, [[1, 2]], Combined(parts, total=4), sampling=sampled)
    message = r"total=4 leaves nodes out, .* draft-model draws above temperature 0; .*sample=False"
    with pytest.raises(InputError, match=message):
        jax.eval_shape(job.prefill)
    for drafter, sampling in (
        (Combined(parts, total=4), Sampling()),
        (Combined(parts, total=5), sampled),
        (Combined([LOOKUP, replace(DRAFT_MODEL, sample=False)], total=4), sampled),
    ):
        jax.eval_shape(specjax.prepare(TABLE, [[1, 2]], drafter, sampling=sampling).prefill)
