"""Acceptance laws, one round at a time: exact values where they are known, 200,000 rows where they are random.

Every law test compares the joint law of the next tokens (the accepted path and the bonus token, continued by plain
sampling) with that of the target, by total variation; the threshold is what sampling noise explains.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import laws, sampling, trees
from specjax.block_verification import BlockVerification
from specjax.laws import Greedy, Path, Rejection, Typical
from specjax.sampling import Rules, Sampling, Text
from specjax.trees import Draft

ROWS = 200_000  # of one token
TREES = 100_000  # of whole trees
REJECTION = Rejection()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Table:
    """A target whose logits depend on the last token: a Markov chain with a known law."""

    scores: Any  # [V, V]
    pending: Any  # [B]
    rules: Rules
    prompt: Any = None  # [B, S] and the lengths [B], only where penalties read the text
    length: Any = None

    def _raw(self, path, depth):
        if path.shape[1] == 0:
            return self.scores[self.pending]
        last = jnp.take_along_axis(path, jnp.maximum(depth - 1, 0)[:, None], axis=1)[:, 0]
        return self.scores[jnp.where(depth > 0, last, self.pending)]

    def _text(self, path, depth):
        if self.prompt is None:
            return None
        place = jnp.arange(self.prompt.shape[1]) - self.length[:, None]
        own = jnp.take_along_axis(path, jnp.clip(place, 0, path.shape[1] - 1), axis=1)
        return Text(jnp.where(place >= 0, own, self.prompt), self.length + depth, jnp.ones_like(self.length))

    def logits(self, node, path, depth):
        return sampling.process(self._raw(path, depth), self.rules, self._text(path, depth))

    def probs(self, node, path, depth):
        return sampling.distribution(self._raw(path, depth), self.rules, self._text(path, depth))


order = jax.jit(trees.order)
run = jax.jit(lambda law, target, draft, keys, depth: law(target, draft, keys, depth), static_argnums=(0, 4))


def keys(rows, seed=0):
    return jax.random.split(jax.random.key(seed), rows)


def draws(rng, laws_):
    """One token of each row of `laws_` [B, V]."""
    return np.minimum((rng.random((len(laws_), 1)) > np.cumsum(laws_, axis=1)).sum(1), laws_.shape[1] - 1)


def noise(law, samples):
    """Total variation that sampling noise explains, but for one run in a million.

    The mean over outcomes of normal noise, and McDiarmid's bound on how far the distance strays from its mean.
    """
    mean = 0.5 * np.sqrt(2 / np.pi * law * (1 - law) / samples).sum()
    return mean + np.sqrt(np.log(1e6) / (2 * samples))


def distance(path, law, chain, pending, length, seed):
    """Total variation between the next `length` tokens after a round and the Markov chain [V, V] from `pending`."""
    rng = np.random.default_rng(seed)
    tokens, accepted = np.asarray(path.tokens), np.asarray(path.accepted)
    rows, size = len(tokens), len(chain)
    text = np.zeros((rows, length), int)
    for place in range(length):
        last = text[:, place - 1] if place else pending
        own = tokens[:, min(place, tokens.shape[1] - 1)]
        text[:, place] = np.where(place <= accepted, own, draws(rng, chain[last]))
    counts = np.bincount(np.ravel_multi_index(text.T, (size,) * length), minlength=size**length)
    return 0.5 * np.abs(counts / rows - law).sum()


def exact(chain, pending, length):
    """Joint law of the next `length` tokens, averaged over the rows' pending tokens."""
    law = np.bincount(pending, minlength=len(chain)) / len(pending) @ chain
    joint = law
    for _ in range(length - 1):
        joint = (joint[..., None] * chain).reshape(-1, *chain.shape) if joint.ndim == 1 else joint[..., None] * chain
    return joint.reshape(-1)


def check(law, draft, scores, pending, settings, depth, length=3, seed=0):
    """The distance of one law on one draft, and the distance that noise explains."""
    rules = Sampling(**settings).rules(len(pending))
    path = run(law, Table(jnp.array(scores), jnp.array(pending), rules), draft, keys(len(pending), seed), depth)
    one = Sampling(**settings).rules(len(scores))
    chain = np.asarray(sampling.distribution(jnp.array(scores), one), np.float64)
    law_ = exact(chain, pending, length)
    return distance(path, law_, chain, pending, length, seed), noise(law_, len(pending)), path


# One round of single-token drafts: the values of well-known mistakes.


def first_token(p, draft, law=REJECTION, temperature=1.0, **settings):
    """Empirical law of the first token when the target's logits are log p everywhere."""
    scores = jnp.broadcast_to(jnp.log(jnp.array(p)), (len(p), len(p)))
    rows = draft.tokens.shape[0]
    rules = Sampling(temperature=temperature, **settings).rules(rows)
    path = run(law, Table(scores, jnp.zeros(rows, int), rules), draft, keys(rows), draft.tokens.shape[1])
    return np.bincount(np.asarray(path.tokens[:, 0]), minlength=len(p)) / rows


def same(law, expected):
    return 0.5 * np.abs(law - np.array(expected)).sum() <= noise(np.array(expected), ROWS)


def drawn_chain(q, rng=None, said=None):
    """A chain of one token drawn from q; `said` is what the draft claims it was drawn from."""
    q = np.broadcast_to(np.array(q, np.float32), (ROWS, len(q)))
    tokens = draws(np.random.default_rng(1) if rng is None else rng, q)[:, None]
    said = q if said is None else np.broadcast_to(np.array(said, np.float32), q.shape)
    return trees.chain(jnp.array(tokens), jnp.ones(ROWS, int), jnp.array(said)[:, None])


def test_an_argmax_draft_is_deterministic():
    p = [0.4, 0.6]
    argmax = trees.chain(jnp.zeros((ROWS, 1), int), jnp.ones(ROWS, int))
    assert same(first_token(p, argmax), p)
    softmax = np.broadcast_to(np.array([0.9, 0.1], np.float32), (ROWS, 1, 2))
    wrong = first_token(p, replace(argmax, q=jnp.array(softmax), drawn=jnp.ones((ROWS, 1), bool)))
    assert not same(wrong, p)
    assert same(wrong, [4 / 9, 5 / 9])


def test_p_and_q_are_processed_and_filtered_tokens_never_appear():
    """A third of the rows each with top-k, top-p and min-p, which all leave the first two of three tokens."""
    p, q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    kind = np.arange(ROWS) % 3
    settings = {
        "top_k": np.where(kind == 0, 2, 0),
        "top_p": np.where(kind == 1, 0.75, 1.0),
        "min_p": np.where(kind == 2, 0.5, 0.0),
    }
    for drawn_from in (q, [0.0, 0.375, 0.625]):  # any law will do, if it is the one the token was drawn from
        law = first_token(p, drawn_chain(drawn_from), **settings)
        assert law[2] == 0
        assert same(law, [0.625, 0.375, 0])
    wrong = first_token(p, drawn_chain([0.0, 0.375, 0.625], said=q), **settings)
    assert not same(wrong, [0.625, 0.375, 0])
    assert same(wrong, [0.53125, 0.46875, 0])


def test_temperature_applies_to_both_sides():
    p, q = np.exp([2.0, 1, 0]), np.exp([1.0, 2, 0])
    cold_p, cold_q = p**2 / (p**2).sum(), q**2 / (q**2).sum()
    assert same(first_token(p, drawn_chain(cold_q), temperature=0.5), cold_p)
    np.testing.assert_allclose(cold_p, [0.867, 0.117, 0.016], atol=5e-4)
    # a drafter may have its own temperature if it says the law it drew from; saying another is wrong
    assert same(first_token(p, drawn_chain(q / q.sum()), temperature=0.5), cold_p)
    assert not same(first_token(p, drawn_chain(cold_q, said=q / q.sum()), temperature=0.5), cold_p)
    warm = first_token(p, drawn_chain(cold_q), temperature=1.0)
    assert not same(warm, cold_p)
    np.testing.assert_allclose(warm, [0.665, 0.245, 0.090], atol=5e-3)


def without_replacement(q, siblings, rng):
    """Siblings drawn one after the other without replacement: tokens [B, n], and the law each was drawn from."""
    laws_ = np.array(q, np.float64)
    tokens, said = [], []
    for _ in range(siblings):
        laws_ = laws_ / laws_.sum(1, keepdims=True)
        tokens.append(draws(rng, laws_))
        said.append(laws_.copy())
        laws_[np.arange(len(laws_)), tokens[-1]] = 0
    return np.stack(tokens, 1), np.stack(said, 1).astype(np.float32)


def siblings(tokens, said):
    return Draft(
        jnp.array(tokens),
        jnp.full(tokens.shape, -1),
        jnp.ones(tokens.shape, bool),
        jnp.ones(tokens.shape, bool),
        jnp.array(said),
    )


@dataclass(frozen=True)
class NoUpdate:
    """Wrong on purpose: siblings are tested against the same p; the bonus is drawn from p less the last sibling's q."""

    name: ClassVar[str] = "no update"
    lossless: ClassVar[bool] = False

    def __call__(self, target, draft, keys, max_depth):
        uniform = jax.vmap(lambda key: jax.random.uniform(key, (3,)))(keys)

        def choose(node, path, depth, descends):
            p = target.probs(node, path, depth)
            x, q = draft.tokens, draft.q
            p_x = jnp.take_along_axis(p, x, axis=1)
            q_x = jnp.take_along_axis(q, x[..., None], axis=2)[..., 0]
            accepts = (uniform[:, :2] * q_x < p_x) & (descends & (node == 0))[:, None]
            child = jnp.where(accepts[:, 0], 1, jnp.where(accepts[:, 1], 2, 0))
            left = jnp.where((node == 0)[:, None], jnp.maximum(p - q[:, 1], 0), p)
            return child, sampling.categorical(left, uniform[:, 2])

        return laws.walk(draft, max_depth, choose)


def test_two_drawn_siblings_and_the_ways_to_get_them_wrong():
    p, q = [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]
    raw = np.broadcast_to(np.array(q, np.float32), (ROWS, 4))
    tokens, said = without_replacement(raw, 2, np.random.default_rng(2))
    assert same(first_token(p, siblings(tokens, said)), p)
    not_renormalised = first_token(p, siblings(tokens, np.stack([raw, raw], 1)))
    assert not same(not_renormalised, p)
    np.testing.assert_allclose(not_renormalised, [0.357, 0.343, 0.2, 0.1], atol=5e-3)
    no_update = first_token(p, siblings(tokens, said), law=NoUpdate())
    assert not same(no_update, p)
    np.testing.assert_allclose(no_update, [0.26, 0.32, 0.28, 0.14], atol=5e-3)
    likeliest = siblings(np.broadcast_to([3, 2], (ROWS, 2)), said)  # top-k siblings treated as drawn
    assert not same(first_token(p, likeliest), p)
    # the other way round costs acceptance, not the law: a token drawn without looking at p may be called deterministic
    assert same(first_token(p, replace(siblings(tokens, said), drawn=None, q=None)), p)


# Whole trees on a Markov chain.


def grow(build, rows, chain_q, pending, seed):
    """A draft out of `build(add, last)`: `add(parent, rule)` puts a node below `parent` (-1 = pending) and returns it.

    Rules: "draw" from chain_q without replacement among drawn siblings, "redraw" with replacement, or a function of the
    parent's token for a deterministic node.
    """
    rng = np.random.default_rng(seed)
    size = chain_q.shape[1]
    nodes = []  # (parent, tokens, drawn, q)

    def add(parent, rule):
        last = nodes[parent][1] if parent >= 0 else pending
        q = np.array(chain_q[last], np.float64)
        if rule == "draw":
            for other, tokens, drawn, _ in nodes:
                if other == parent and drawn:
                    q[np.arange(rows), tokens] = 0
            q /= q.sum(1, keepdims=True)
        drawn = isinstance(rule, str)
        tokens = draws(rng, q) if drawn else rule(last) % size
        nodes.append((parent, tokens, drawn, q))
        return len(nodes) - 1

    build(add)
    place = rng.permutation(len(nodes))
    # a shuffle that keeps siblings in order, as drawn ones must be
    parents = np.array([node[0] for node in nodes])
    for parent in np.unique(parents):
        mine = np.flatnonzero(parents == parent)
        place[mine] = np.sort(place[mine])
    spot = np.argsort(place)  # position -> node
    renamed = np.array([-1 if parents[n] < 0 else place[parents[n]] for n in spot])
    return order(
        jnp.array(np.stack([nodes[n][1] for n in spot], 1)),
        jnp.broadcast_to(jnp.array(renamed), (rows, len(nodes))),
        jnp.ones((rows, len(nodes)), bool),
        jnp.broadcast_to(jnp.array([nodes[n][2] for n in spot]), (rows, len(nodes))),
        jnp.array(np.stack([nodes[n][3] for n in spot], 1), jnp.float32),
    )


def drawn_path(add):
    add(add(add(-1, "draw"), "draw"), "draw")


def fixed_path(add):
    add(add(add(-1, lambda last: last + 1), lambda last: 2 * last), lambda last: last)


def drawn_tree(add):
    for child in [add(-1, "draw") for _ in range(3)]:
        for _ in range(2):
            add(child, "draw")


def fixed_tree(add):
    one, two = add(-1, lambda last: last), add(-1, lambda last: last + 1)
    add(one, lambda last: last + 2), add(two, lambda last: last), add(two, lambda last: last + 3)
    add(-1, lambda last: last + 1)  # the same token twice: the second is never accepted


def mixed_tree(add):
    fixed, drawn, also = add(-1, lambda last: last + 1), add(-1, "draw"), add(-1, lambda last: last + 2)
    again = add(-1, "redraw")
    add(fixed, "draw"), add(fixed, lambda last: last), add(fixed, "draw")
    add(also, "redraw"), add(also, "redraw")
    add(add(drawn, lambda last: last), "draw"), add(again, "draw")


SCORES = np.array(
    [[1.0, 0.2, -0.5, 0.4], [-1.0, 1.5, 0.3, 0.0], [0.1, 0.1, 0.1, 1.0], [0.6, -0.8, 0.9, 0.2]], np.float32
)
DRAFTED = np.array([[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.4, 0.1], [0.5, 0.1, 0.3, 0.1], [0.2, 0.6, 0.1, 0.1]])


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (drawn_path, {"temperature": 0.8}),
        (fixed_path, {"temperature": 0.8}),
        (drawn_tree, {"temperature": 0.8}),
        (fixed_tree, {"temperature": 0.8}),
        (mixed_tree, {"temperature": 0.8}),
        (mixed_tree, {"temperature": 1.2, "top_k": 3, "min_p": 0.2}),
    ],
)
def test_rejection_follows_the_target_on_every_kind_of_tree(build, settings):
    pending = np.random.default_rng(5).integers(0, 4, TREES)
    draft = grow(build, TREES, DRAFTED, pending, seed=6)
    found, bound, path = check(Rejection(), draft, SCORES, pending, settings, depth=3)
    assert found <= bound
    assert 0 < np.asarray(path.accepted).mean() < 3


def test_the_threshold_catches_what_is_slightly_wrong():
    """The same trees with q off by a fifth for one token, or p of another temperature, do not pass."""
    pending = np.random.default_rng(5).integers(0, 4, TREES)
    draft = grow(drawn_tree, TREES, DRAFTED, pending, seed=6)
    off = replace(draft, q=draft.q.at[:, :, 0].multiply(0.8))
    found, bound, _ = check(Rejection(), off, SCORES, pending, {"temperature": 0.8}, depth=3)
    assert found > bound


@pytest.mark.parametrize("depth", [0, 2])
def test_a_path_no_longer_than_asked_for(depth):
    pending = np.random.default_rng(5).integers(0, 4, TREES // 2)
    draft = grow(mixed_tree, TREES // 2, DRAFTED, pending, seed=6)
    found, bound, path = check(Rejection(), draft, SCORES, pending, {"temperature": 0.8}, depth)
    assert found <= bound
    assert path.nodes.shape == path.tokens.shape == (TREES // 2, depth + 1)
    assert path.accepted.max() == depth
    assert not path.rejected[path.accepted == depth].any()


def random_draft(rng, rows, nodes, size, drawn=True):
    parents = np.stack([rng.integers(-1, np.arange(nodes), nodes) for _ in range(rows)])
    q = rng.dirichlet(np.ones(size), (rows, nodes)).astype(np.float32)
    return order(
        jnp.array(rng.integers(0, size, (rows, nodes))),
        jnp.array(parents),
        jnp.array(rng.random((rows, nodes)) < 0.9),
        jnp.array(rng.random((rows, nodes)) < 0.5) if drawn else None,
        jnp.array(q) if drawn else None,
    )


def test_temperature_zero_is_greedy_row_by_row():
    rng = np.random.default_rng(8)
    rows, size = 500, 3
    draft = random_draft(rng, rows, 12, size)
    temperature = rng.choice([0.0, 0.9], rows)
    rules = Sampling(temperature=temperature, min_p=0.05).rules(rows)
    target = Table(jnp.array(rng.normal(size=(size, size)), jnp.float32), jnp.zeros(rows, int), rules)
    rejection = run(Rejection(), target, draft, keys(rows), 6)
    greedy = run(Greedy(), target, draft, keys(rows), 6)
    cold = temperature == 0
    assert (np.asarray(greedy.accepted)[cold] > 1).sum() > 20
    for one, other in zip(jax.tree.leaves(rejection), jax.tree.leaves(greedy), strict=True):
        assert (np.asarray(one)[cold] == np.asarray(other)[cold]).all()
    assert (np.asarray(rejection.tokens) != np.asarray(greedy.tokens)).any()


@pytest.mark.parametrize("law", [Greedy(), Rejection(), BlockVerification(), Typical()])
def test_paths_are_paths_of_the_draft(law):
    rng = np.random.default_rng(9)
    rows, size, depth = 300, 3, 4
    draft = random_draft(rng, rows, 14, size)
    rules = Sampling(temperature=1.0).rules(rows)
    scores = jnp.array(rng.normal(size=(size, size)), jnp.float32)
    path = run(law, Table(scores, jnp.zeros(rows, int), rules), draft, keys(rows), depth)
    tokens, parents, valid = (np.asarray(x) for x in (draft.tokens, draft.parents, draft.valid))
    for row in range(rows):
        count = int(path.accepted[row])
        nodes = np.asarray(path.nodes[row])
        assert nodes[0] == 0
        assert (nodes[count + 1 :] == 0).all()
        assert (np.asarray(path.tokens[row, count + 1 :]) == 0).all()
        assert path.tokens[row, count] == path.bonus[row]
        for before, node, token in zip(nodes[:count], nodes[1 : count + 1], path.tokens[row], strict=False):
            assert parents[row, node - 1] == before - 1
            assert tokens[row, node - 1] == token
            assert valid[row, node - 1]
        children = valid[row] & (parents[row] == nodes[count] - 1)
        assert bool(path.rejected[row]) == (children.any() and count < depth)
        if law == Greedy():
            last = 0
            for token in np.asarray(path.tokens[row, : count + 1]):
                assert token == scores[last].argmax()
                last = token
            assert count == depth or path.bonus[row] not in tokens[row][children]


def test_a_second_sibling_can_be_the_right_one():
    draft = Draft(jnp.array([[1, 2, 0, 2]]), jnp.array([[-1, -1, 1, 1]]), jnp.ones((1, 4), bool))
    scores = jnp.array([[0.0, 1, 2], [2, 1, 0], [0, 1, 2]])  # 0 -> 2 -> 2 -> 2
    path = run(Greedy(), Table(scores, jnp.zeros(1, int), Sampling().rules(1)), draft, keys(1), 4)
    assert path.nodes.tolist() == [[0, 2, 4, 0, 0]]
    assert path.tokens.tolist() == [[2, 2, 2, 0, 0]]
    assert (path.accepted.tolist(), path.rejected.tolist()) == ([2], [False])


@pytest.mark.parametrize("law", [Greedy(), Rejection(), BlockVerification(), Typical()])
def test_nothing_proposed_is_plain_decoding(law):
    """No nodes, no valid node, and a target whose true token is id 0 (what fillers hold): nothing is accepted."""
    scores = jnp.array([[5.0, 0, 0]] * 3)
    rules = Sampling(temperature=[0.0, 0.01]).rules(2)
    target = Table(scores, jnp.array([1, 2]), rules)
    for nodes in (0, 3):
        draft = trees.chain(jnp.zeros((2, nodes), int), jnp.zeros(2, int))
        path = run(law, target, draft, keys(2), 3)
        assert path.accepted.tolist() == [0, 0]
        assert path.tokens.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0]]
        assert path.rejected.tolist() == [False, False]


@pytest.mark.parametrize("law", [Rejection(), BlockVerification(), Typical()])
def test_a_row_does_not_depend_on_its_batch_mates_or_on_where_the_draft_was_cut(law):
    rng = np.random.default_rng(10)
    rows, size = 64, 3
    draft = random_draft(rng, rows, 8, size)
    wide = order(*(jnp.pad(x, [(0, 0), (0, 5)] + [(0, 0)] * (x.ndim - 2)) for x in order_arguments(draft)))
    scores = jnp.array(rng.normal(size=(size, size)), jnp.float32)
    pending = jnp.array(rng.integers(0, size, rows))
    temperature = rng.choice([0.0, 0.5, 1.0], rows)
    all_keys = keys(rows)

    def paths(draft, rows_):
        rules = Sampling(temperature=temperature[rows_], min_p=0.05).rules(len(rows_))
        return run(law, Table(scores, pending[rows_], rules), draft, all_keys[rows_], 5)

    everything = paths(draft, np.arange(rows))
    chosen = rng.integers(0, rows, rows)  # in another order, with other mates
    some = paths(jax.tree.map(lambda x: np.asarray(x)[chosen], draft), chosen)
    padded = paths(wide, np.arange(rows))
    for whole, part, other in zip(*map(jax.tree.leaves, (everything, some, padded)), strict=True):
        assert (np.asarray(whole)[chosen] == np.asarray(part)).all()
        assert (np.asarray(whole) == np.asarray(other)).all()


def order_arguments(draft):
    return draft.tokens, draft.parents, draft.valid, draft.drawn, draft.q


def test_penalties_count_the_path_to_the_node():
    """Constant logits and a frequency penalty: 0,1,0,1,2,0,1,2 whatever is proposed, in blocks of any size."""
    wanted = [0, 1, 0, 1, 2, 0, 1, 2]
    rules = Sampling(frequency_penalty=1.0).rules(1)
    scores = jnp.array([[2.0, 1.4, 0.1]] * 3)
    for proposals in ([0, 1, 0, 1, 2, 0, 1, 2], [0, 0, 0, 0], [2, 2, 2], [0, 1, 1], [0, 1, 0, 2]):
        text = [2]
        while len(text) - 1 < len(wanted):
            done = len(text) - 1
            offered = [proposals[(done + i) % len(proposals)] for i in range(4)]
            draft = trees.chain(jnp.array([offered]), jnp.array([4]))
            prompt = jnp.array([text + [0] * (20 - len(text))])
            target = Table(scores, jnp.array([text[-1]]), rules, prompt, jnp.array([len(text)]))
            path = run(Greedy(), target, draft, keys(1), 4)
            new = path.tokens[0, : int(path.accepted[0]) + 1].tolist()
            assert new[:-1] == offered[: len(new) - 1]
            text += new
        assert text[1 : 1 + len(wanted)] == wanted


@pytest.mark.parametrize("law", [Greedy(), Rejection(), BlockVerification(), Typical()])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_law_give_no_token(law, temperature):
    scores = jnp.array([[0.0, jnp.nan, 1.0], [-jnp.inf] * 3, [0.0, 1.0, 2.0]])
    draft = trees.chain(jnp.zeros((3, 2), int), jnp.array([2, 2, 0]))
    target = Table(scores, jnp.arange(3), Sampling(temperature=temperature).rules(3))
    path = run(law, target, draft, keys(3), 2)
    assert path.bonus.tolist()[:2] == [3, 3]
    assert 0 <= path.bonus[2] < 3
    assert path.accepted.tolist() == [0, 0, 0]


def test_a_vanishing_residual_falls_back_to_p():
    """No law q is at least p everywhere, but rounding can make it so: the bonus token then comes from p."""
    draft = drawn_chain([0.5, 0.5, 0.0], said=[0.75, 0.75, 0.0])
    assert same(first_token([0.5, 0.5, 0.0], draft), [0.5, 0.5, 0.0])


@pytest.mark.parametrize("law", [Greedy(), Rejection(), BlockVerification(), Typical()])
def test_one_trace_and_no_sort(law):
    traces = []

    @jax.jit
    def accept(target, draft, keys):
        traces.append(1)
        return law(target, draft, keys, 4)

    rng = np.random.default_rng(11)
    scores = jnp.array(rng.normal(size=(5, 5)), jnp.float32)
    for seed, settings in enumerate(
        (
            {"temperature": [0.0, 1.0, 0.5], "top_p": 0.9, "top_k": 3},
            {"temperature": [1.0, 0.0, 2.0], "top_p": 0.5, "top_k": 2},
        )
    ):
        target = Table(scores, jnp.array([0, 1, 2]), Sampling(**settings).rules(3))
        draft = random_draft(rng, 3, 6, 5)
        path = accept(target, draft, keys(3, seed))
        assert isinstance(path, Path)
    assert len(traces) == 1
    assert "stablehlo.sort" not in accept.lower(target, draft, keys(3)).as_text()


def test_laws_are_values():
    assert hash(Greedy()) == hash(Greedy())
    assert Rejection() == Rejection() != Greedy()
    assert (Greedy().name, Rejection().name) == ("greedy", "rejection")
    assert Greedy().lossless
    assert Rejection().lossless
    assert Typical() == Typical(0.09, 0.3) != Typical(0.1)
    assert not Typical().lossless
