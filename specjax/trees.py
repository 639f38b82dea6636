"""Drafts as trees: the nodes one round proposes, and what follows from their parents (depths, positions, masks).

A chain is a tree of width 1. Everything is fixed-shape and jit-able; `N == 0` (plain decoding) is a tree like any
other. The *block* the target sees is `[pending token, draft nodes, probe nodes]`, T = 1 + N + P tokens; draft node `i`
has block index `i + 1`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.errors import InputError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Probes:
    """Extra tokens in the block whose logits go back to the drafter; they are never candidates and never accepted.

    Attributes:
        tokens: the probes' tokens.
        offsets: position of each probe minus the position of the pending token (0 or more).
        mask: what each probe sees inside the block `[pending, nodes, probes]`, itself included.
        valid: False for fillers: they see only themselves and nothing sees them.
    """

    tokens: Int[Array, "B P"]
    offsets: Int[Array, "B P"]
    mask: Bool[Array, "B P T"]
    valid: Bool[Array, "B P"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draft:
    """What one round proposes: a tree of nodes below the pending token.

    Valid nodes come first and `parents[i] < i`, so a draft can be cut to a smaller block; `order` makes it so.

    Attributes:
        tokens: the nodes' tokens.
        parents: index of each node's parent, -1 = the pending token.
        valid: False for fillers, which are never verified, accepted or counted.
        drawn: True where the token was drawn at random from `q`; None = every node is deterministic.
        q: the law node i's token was drawn from *given its earlier siblings*; read only where `drawn`.
        probes: nodes that are not candidates, or None.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    drawn: Bool[Array, "B N"] | None = None
    q: Float[Array, "B N V"] | None = None
    probes: Probes | None = None


def chain(
    tokens: Int[Array, "B N"],
    num_valid: Int[Array, "B"],
    q: Float[Array, "B N V"] | None = None,
    drawn: Bool[Array, "B N"] | None = None,
) -> Draft:
    """A draft of width 1 whose first `num_valid[b]` tokens are real. With `q` and no `drawn`, every token was drawn."""
    if drawn is not None and q is None:
        raise InputError("chain: drawn was given without q; give the law each token was drawn from")
    if q is not None and drawn is None:
        drawn = jnp.ones(tokens.shape, bool)
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return Draft(tokens, index - 1, index < num_valid[:, None], drawn, q)


@dataclass(frozen=True)
class StaticTree:
    """A tree whose shape does not depend on the text: each node says which child of its parent it is.

    Attributes:
        choices: per node, the ranks on the way down to it: (0,) is the best child of the pending token, (0, 2) the
            third best of its children. Level by level, siblings by rank, so that `parents[i] < i`.
        parents: index of each node's parent, -1 = the pending token.
    """

    choices: tuple[tuple[int, ...], ...]
    parents: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        return len(self.choices)

    @property
    def max_depth(self) -> int:
        return len(self.choices[-1]) if self.choices else 0

    @property
    def is_chain(self) -> bool:
        return self.max_depth == self.num_nodes

    def level(self, depth: int) -> list[int]:
        """The nodes at a depth (1 for children of the pending token)."""
        return [i for i, choice in enumerate(self.choices) if len(choice) == depth]


def static_tree(choices: Iterable[Iterable[int]]) -> StaticTree:
    """The tree of these nodes, given in any order as tuples of ranks.

    Raises:
        InputError: a node without its parent, one given twice, or a rank below 0.
    """
    given = [tuple(int(rank) for rank in choice) for choice in choices]
    ordered = tuple(sorted(given, key=lambda choice: (len(choice), choice)))
    index = {choice: i for i, choice in enumerate(ordered)} | {(): -1}
    for choice in given:
        if not choice or min(choice) < 0:
            raise InputError(f"static_tree: expected ranks of 0 or more, such as (0, 2), got {choice}")
        if choice[:-1] not in index:
            raise InputError(f"static_tree: node {choice} has no parent; add {choice[:-1]}")
    if len(index) <= len(given):
        twice = next(choice for choice in given if given.count(choice) > 1)
        raise InputError(f"static_tree: node {twice} was given twice")
    return StaticTree(ordered, tuple(index[choice[:-1]] for choice in ordered))


def chain_tree(num_tokens: int) -> StaticTree:
    """The chain of each node's best child."""
    return static_tree((0,) * depth for depth in range(1, num_tokens + 1))


def depths(parents: Int[Array, "B N"], valid: Bool[Array, "B N"]) -> Int[Array, "B N"]:
    """Depth of every node: 1 for a child of the pending token (whose own depth is 0); 0 for an invalid node."""
    return jnp.where(valid, ancestors(parents).sum(-1, dtype=jnp.int32), 0)


def ancestors(parents: Int[Array, "B N"]) -> Bool[Array, "B N N"]:
    """`[b, i, j]`: node j is node i or one of its ancestors, in any node order. O(log N) matrix products."""
    nodes = parents.shape[-1]
    reach = (parents[..., :, None] == jnp.arange(nodes)) | jnp.eye(nodes, dtype=bool)
    for _ in range(max(nodes - 1, 0).bit_length()):
        paths = reach.astype(jnp.float32)  # counts up to N: exact in every matmul precision
        reach = paths @ paths > 0
    return reach


def block_tokens(pending: Int[Array, "B"], draft: Draft) -> Int[Array, "B T"]:
    """The tokens the target sees: the pending token, the draft's nodes, its probes."""
    parts = [pending[:, None], draft.tokens] + ([] if draft.probes is None else [draft.probes.tokens])
    return jnp.concatenate(parts, axis=1)


def block_positions(draft: Draft, length: Int[Array, "B"]) -> Int[Array, "B T"]:
    """Positions of the block's tokens: the pending token at `length - 1`, a node at `length - 1 + depth`.

    Two nodes of one depth share a position. Fillers get the pending token's position: in range, and seen by nobody.
    """
    pending = length[:, None] - 1
    parts = [pending, pending + depths(draft.parents, draft.valid)]
    if draft.probes is not None:
        parts.append(pending + jnp.where(draft.probes.valid, draft.probes.offsets, 0))
    return jnp.concatenate(parts, axis=1)


def block_mask(draft: Draft) -> Bool[Array, "B T T"]:
    """`[b, i, j]`: block token i sees block token j (both in the order of `block_tokens`).

    A node sees the pending token, its ancestors and itself; a probe sees what its mask says; a filler sees only itself,
    and nothing else sees it.
    """
    batch, nodes = draft.tokens.shape
    sees = jnp.concatenate([jnp.ones((batch, nodes, 1), bool), ancestors(draft.parents)], axis=2)
    pending = jnp.zeros((batch, 1, 1 + nodes), bool).at[:, :, 0].set(True)
    mask = jnp.concatenate([pending, sees], axis=1)
    real = jnp.concatenate([jnp.ones((batch, 1), bool), draft.valid], axis=1)
    if draft.probes is not None:
        width = draft.probes.tokens.shape[1]
        mask = jnp.concatenate([jnp.pad(mask, ((0, 0), (0, 0), (0, width))), draft.probes.mask], axis=1)
        real = jnp.concatenate([real, draft.probes.valid], axis=1)
    return (mask & real[:, :, None] & real[:, None, :]) | jnp.eye(mask.shape[-1], dtype=bool)


def truncate(draft: Draft, num_nodes: int) -> Draft:
    """The first `num_nodes` nodes of every row (a static cut). Whole branches survive, because `parents[i] < i`.

    Probes stay, except those that saw a node that was cut: their logits would stand for another context.
    """
    total = draft.tokens.shape[1]
    if num_nodes >= total:
        return draft
    probes = draft.probes
    if probes is not None:
        lost = (probes.mask[:, :, 1 + num_nodes : 1 + total] & draft.valid[:, None, num_nodes:]).any(-1)
        mask = jnp.concatenate([probes.mask[:, :, : 1 + num_nodes], probes.mask[:, :, 1 + total :]], axis=2)
        probes = replace(probes, mask=mask, valid=probes.valid & ~lost)

    def first(values: Array | None) -> Array | None:
        return None if values is None else values[:, :num_nodes]

    return replace(
        draft,
        tokens=draft.tokens[:, :num_nodes],
        parents=draft.parents[:, :num_nodes],
        valid=draft.valid[:, :num_nodes],
        drawn=first(draft.drawn),
        q=first(draft.q),
        probes=probes,
    )


def order(
    tokens: Int[Array, "B N"],
    parents: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    drawn: Bool[Array, "B N"] | None = None,
    q: Float[Array, "B N V"] | None = None,
) -> Draft:
    """A draft out of nodes in any order: valid nodes first, `parents[i] < i`, see `ordering`."""
    index, parents, valid = ordering(parents, valid)

    def take(values: Array) -> Array:
        return jax.vmap(lambda row, places: row[places])(values, index)

    return Draft(
        take(tokens),
        parents,
        valid,
        None if drawn is None else take(drawn),
        None if q is None else take(q),
    )


def best(tokens: Int[Array, "B C"], parents: Int[Array, "B C"], scores: Float[Array, "B C"], num_nodes: int) -> Draft:
    """The draft of each row's `num_nodes` best candidates, best first; -inf is no candidate.

    `parents[i] < i`, and no score is above the parent's, so of two equal ones the parent is taken first and the chosen
    nodes form a tree. All are deterministic: candidates chosen by score could not be drawn ones and stay lossless.
    """
    room = max(num_nodes - scores.shape[1], 0)
    values, chosen = jax.lax.top_k(jnp.pad(scores, ((0, 0), (0, room)), constant_values=-jnp.inf), num_nodes)
    valid = values > -jnp.inf
    chosen = jnp.where(valid, chosen, 0)
    above = jnp.take_along_axis(parents, chosen, axis=1)
    same = (above[:, :, None] == chosen[:, None, :]) & valid[:, None, :]
    places = jnp.where(same, jnp.arange(num_nodes, dtype=jnp.int32), 0).sum(-1, dtype=jnp.int32)
    places = jnp.where(valid & (above >= 0), places, -1)
    return Draft(jnp.take_along_axis(tokens, chosen, axis=1), places, valid)


def ordering(
    parents: Int[Array, "B N"], valid: Bool[Array, "B N"]
) -> tuple[Int[Array, "B N"], Int[Array, "B N"], Bool[Array, "B N"]]:
    """Where each place of an ordered draft comes from, and the parents and validity there.

    Nodes below an invalid one become invalid, and so do nodes that never reach the pending token. The order given is
    kept where it can be: a node only waits for its ancestors, and fillers go last. So siblings stay in their order
    (which drawn siblings need: each q is conditional on the earlier ones), and a drafter that lists its best nodes
    first keeps them when the draft is cut.

    Returns:
        index: new place i holds old node `index[i]`.
        parents, valid: of the nodes in their new places.
    """
    nodes = parents.shape[-1]
    above = ancestors(parents)
    rooted = (above & (parents < 0)[:, None, :]).any(-1)
    valid = valid & rooted & ~(above & ~valid[:, None, :]).any(-1)
    places = jnp.arange(nodes)
    # Sorting keys, compared pairwise (N is small): fillers last, then the latest ancestor, depth, the old place.
    latest = jnp.where(above, places, -1).max(-1, initial=-1)
    key = (latest * (nodes + 1) + above.sum(-1)) + jnp.where(valid, 0, (nodes + 1) ** 2)
    before = (key[:, None, :] < key[:, :, None]) | ((key[:, None, :] == key[:, :, None]) & (places < places[:, None]))
    rank = before.sum(-1, dtype=jnp.int32)
    index = jnp.where(rank[:, None, :] == places[:, None], places, 0).sum(-1, dtype=jnp.int32)
    valid = jnp.take_along_axis(valid, index, axis=1)
    parents = jnp.take_along_axis(parents, index, axis=1)
    renamed = jnp.where(parents[:, :, None] == places, rank[:, None, :], 0).sum(-1, dtype=jnp.int32)
    return index, jnp.where(valid & (parents >= 0), renamed, -1), valid
