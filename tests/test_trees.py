"""Trees: depths, positions, masks, order and cuts, against walking up the parents by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import trees
from specjax.errors import InputError
from specjax.trees import Draft, Probes

block_mask, block_positions, depths = (jax.jit(f) for f in (trees.block_mask, trees.block_positions, trees.depths))
order, truncate = jax.jit(trees.order), jax.jit(trees.truncate, static_argnums=1)


def paths(draft):
    """For each row, a dict from node index to the tuple of tokens from the pending token's child down to the node."""
    found = []
    arrays = (np.asarray(x) for x in (draft.tokens, draft.parents, draft.valid))
    for tokens, parents, valid in zip(*arrays, strict=True):
        row = {}
        for node in np.flatnonzero(valid):
            path, at = [], node
            while at >= 0:
                assert valid[at]
                path.append(int(tokens[at]))
                at = parents[at]
            row[int(node)] = tuple(reversed(path))
        found.append(row)
    return found


def random_forest(rng, nodes):
    """Tokens 0..nodes-1 in a shuffled order, so that a token names its node, and parents in that order."""
    parents = np.array([rng.integers(-1, i) if i else -1 for i in range(nodes)])
    place = rng.permutation(nodes)  # node i goes to place[i]
    tokens, shuffled = np.empty(nodes, int), np.empty(nodes, int)
    tokens[place] = np.arange(nodes)
    shuffled[place] = np.where(parents < 0, -1, place[parents])
    return tokens, shuffled


def test_a_chain_is_a_tree_of_width_one():
    draft = trees.chain(jnp.array([[7, 8, 9], [4, 5, 6]]), jnp.array([3, 1]))
    assert depths(draft.parents, draft.valid).tolist() == [[1, 2, 3], [1, 0, 0]]
    assert block_positions(draft, jnp.array([10, 20])).tolist() == [[9, 10, 11, 12], [19, 20, 19, 19]]
    assert trees.block_tokens(jnp.array([1, 2]), draft).tolist() == [[1, 7, 8, 9], [2, 4, 5, 6]]
    mask = np.asarray(block_mask(draft))
    assert (mask[0] == np.tril(np.ones((4, 4), bool))).all()
    assert mask[1].tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, False, True],
    ]
    assert draft.drawn is None
    assert draft.q is None


def test_a_chain_with_q_is_drawn_and_drawn_needs_q():
    tokens = jnp.zeros((2, 3), jnp.int32)
    assert trees.chain(tokens, jnp.array([3, 3]), q=jnp.ones((2, 3, 5)) / 5).drawn.all()
    with pytest.raises(InputError, match="without q"):
        trees.chain(tokens, jnp.array([3, 3]), drawn=jnp.ones((2, 3), bool))


def test_a_shuffled_tree_sees_its_ancestors_and_nothing_else():
    # The paths [0], [1], [0,0], [0,1], [1,0] below the pending token, in shuffled node order.
    wanted = {(10,), (11,), (10, 20), (10, 21), (11, 20)}
    draft = order(jnp.array([[20, 11, 21, 20, 10]]), jnp.array([[1, -1, 4, 4, -1]]), jnp.ones((1, 5), bool))
    (row,) = paths(draft)
    assert set(row.values()) == wanted
    assert (np.asarray(draft.parents)[0] < np.arange(5)).all()
    mask = np.asarray(block_mask(draft))[0]
    block = np.asarray(trees.block_tokens(jnp.array([99]), draft))[0]
    positions = np.asarray(block_positions(draft, jnp.array([50])))[0]
    assert mask[0].tolist() == [True] + [False] * 5  # the pending token does not see its children
    for node, path in row.items():
        seen = np.flatnonzero(mask[node + 1])
        assert tuple(block[seen][np.argsort(positions[seen])]) == (99, *path)
        assert positions[node + 1] == 49 + len(path)


@pytest.mark.parametrize("nodes", [1, 2, 3, 17, 64])
def test_order_keeps_every_path_and_drops_what_hangs_on_invalid_nodes(nodes):
    rng = np.random.default_rng(nodes)
    batch = 16
    forests = [random_forest(rng, nodes) for _ in range(batch)]
    tokens, parents = (np.stack(x) for x in zip(*forests, strict=True))
    valid = rng.random((batch, nodes)) < rng.choice([0.5, 0.9, 1.0], size=(batch, 1))
    draft = order(jnp.array(tokens), jnp.array(parents), jnp.array(valid))
    counts = np.asarray(draft.valid).sum(-1)
    assert (np.asarray(draft.valid) == (np.arange(nodes) < counts[:, None])).all()
    assert (np.asarray(draft.parents) < np.arange(nodes)).all()
    for row, got in enumerate(paths(draft)):
        expected = set()
        for node in range(nodes):
            path, at = [], node
            while at >= 0 and valid[row, at]:
                path.append(int(tokens[row, at]))
                at = parents[row, at]
            if at < 0:
                expected.add(tuple(reversed(path)))
        assert set(got.values()) == expected
        depth = np.asarray(depths(draft.parents, draft.valid))[row]
        assert all(depth[node] == len(path) for node, path in got.items())


def test_order_leaves_an_ordered_draft_alone_and_keeps_siblings_in_order():
    parents = jnp.array([[-1, 0, 1, -1, 3, 0]])  # best first, not by depth: a cut keeps the best
    index, new_parents, valid = trees.ordering(parents, jnp.array([[True] * 5 + [False]]))
    assert index.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert valid.tolist() == [[True] * 5 + [False]]
    assert new_parents.tolist() == [[-1, 0, 1, -1, 3, -1]]
    # Siblings 1, 2, 3 wait for their parent, node 4; their order (and so their q) stays.
    draft = order(jnp.array([[5, 1, 2, 3, 4]]), jnp.array([[-1, 4, 4, 4, -1]]), jnp.ones((1, 5), bool))
    assert draft.tokens.tolist() == [[5, 4, 1, 2, 3]]


def test_order_carries_q_and_drawn_along_and_drops_cycles():
    tokens = jnp.array([[3, 1, 2, 9, 8]])
    q = jax.nn.one_hot(tokens, 10)
    drawn = tokens == 2
    draft = order(tokens, jnp.array([[1, -1, 1, 4, 3]]), jnp.ones((1, 5), bool), drawn, q)
    assert draft.tokens[0, :3].tolist() == [1, 3, 2]
    assert draft.valid.tolist() == [[True, True, True, False, False]]
    assert (draft.q.argmax(-1) == draft.tokens).all()
    assert (draft.drawn == (draft.tokens == 2)).all()


def test_probes_see_their_mask_and_fillers_nothing():
    draft = trees.chain(jnp.array([[5, 6]]), jnp.array([1]))
    probe_mask = jnp.array([[[1, 1, 1, 1, 1], [1, 0, 0, 1, 1]]], bool)
    probes = Probes(jnp.array([[8, 9]]), jnp.array([[4, 7]]), probe_mask, jnp.array([[True, False]]))
    draft = Draft(draft.tokens, draft.parents, draft.valid, probes=probes)
    assert trees.block_tokens(jnp.array([4]), draft).tolist() == [[4, 5, 6, 8, 9]]
    assert block_positions(draft, jnp.array([3])).tolist() == [[2, 3, 2, 6, 2]]
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [1, 1, 0, 1, 0], [0, 0, 0, 0, 1]]
    assert block_mask(draft)[0].astype(int).tolist() == expected


def test_truncate_is_the_tree_of_the_first_nodes():
    rng = np.random.default_rng(0)
    tokens, parents = random_forest(rng, 12)
    draft = order(jnp.array(tokens)[None], jnp.array(parents)[None], jnp.ones((1, 12), bool))
    cut = truncate(draft, 5)
    assert cut.tokens.shape == (1, 5)
    before, after = paths(draft)[0], paths(cut)[0]
    assert after == {node: path for node, path in before.items() if node < 5}
    assert (block_mask(cut) == block_mask(draft)[:, :6, :6]).all()
    assert trees.truncate(draft, 12) is draft
    assert truncate(draft, 0).tokens.shape == (1, 0)


def test_truncate_keeps_the_probes_that_saw_nothing_of_what_was_cut():
    draft = trees.chain(jnp.array([[5, 6, 7], [5, 6, 7]]), jnp.array([3, 1]))
    mask = jnp.tile(jnp.array([[1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 1, 1]], bool)[None], (2, 1, 1))
    probes = Probes(jnp.full((2, 2), 8), jnp.full((2, 2), 4), mask, jnp.ones((2, 2), bool))
    cut = truncate(Draft(draft.tokens, draft.parents, draft.valid, probes=probes), 1)
    assert cut.probes.mask[0].astype(int).tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert cut.probes.valid.tolist() == [[True, False], [True, True]]  # in row 1 the cut node was a filler anyway
    assert block_mask(cut).shape == (2, 4, 4)


def test_no_nodes_at_all():
    empty = trees.chain(jnp.zeros((2, 0), jnp.int32), jnp.zeros(2, jnp.int32))
    for draft in (empty, order(empty.tokens, empty.parents, empty.valid), truncate(empty, 0)):
        assert block_mask(draft).tolist() == [[[True]], [[True]]]
        assert block_positions(draft, jnp.array([3, 5])).tolist() == [[2], [4]]
        assert trees.block_tokens(jnp.array([1, 2]), draft).tolist() == [[1], [2]]
        assert depths(draft.parents, draft.valid).shape == (2, 0)


def test_nothing_is_sorted():
    shape = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    text = order.lower(shape, shape, jax.ShapeDtypeStruct((2, 16), bool)).as_text()
    assert "stablehlo.sort" not in text
