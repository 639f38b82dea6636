"""Trees grown by confidence (EAGLE-2, Li et al. 2024): a node is worth the product of probabilities down to it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.eagle_step import Memory, Network, child_scores, feed_nodes, known, pick
from specjax.drafters.vocabulary import Scores
from specjax.errors import InputError
from specjax.state import Context
from specjax.trees import Draft, best


@dataclass(frozen=True)
class GrownTree:
    """How a tree grows, anew for each row and round.

    Attributes:
        depth: levels, the most tokens on a path (the authors' code counts one less).
        top_k: children of a node, and nodes of a level that get children.
        total: block tokens: the pending token and the `total - 1` best nodes of all levels.
    """

    depth: int = 6
    top_k: int = 10
    total: int = 60

    def __post_init__(self) -> None:
        for name in ("depth", "top_k", "total"):
            if getattr(self, name) < 1:
                raise InputError(f"GrownTree: expected {name} of at least 1, got {getattr(self, name)}")

    @property
    def num_nodes(self) -> int:
        return min(self.total - 1, self.top_k + (self.depth - 1) * self.top_k**2)

    @property
    def max_depth(self) -> int:
        return min(self.depth, self.total - 1)


def grow(network: Network, tree: GrownTree, memory: Memory, context: Context) -> Draft:
    """A tree by EAGLE-2's two phases (section 4): expand the most confident nodes level by level, then re-rank all.

    Which nodes exist depends on their tokens' probabilities, so they must not be drawn at random: siblings are the most
    likely tokens, deterministic.
    """
    batch, k = context.length.shape[0], tree.top_k
    paths = jnp.zeros((batch, 1, tree.depth), jnp.int32)
    scores = child_scores(network, context, memory.feature[:, None], paths, 0, filtered=False)
    level = _children(scores, jnp.where(known(context), 0.0, -jnp.inf)[:, None], k)
    levels, parents = [level], [jnp.full((batch, k), -1, jnp.int32)]
    frontier = jnp.broadcast_to(jnp.arange(k), (batch, k))  # nodes of the last level that get children
    above = jnp.zeros((batch, k, 0), bool)  # which of the nodes fed so far are above each of them
    features = jnp.broadcast_to(memory.feature[:, None], (batch, k, memory.feature.shape[-1]))
    paths, earlier, first = jnp.broadcast_to(paths, (batch, k, tree.depth)), None, 0
    for depth in range(1, tree.depth):
        tokens = pick(level.tokens, frontier)
        paths = paths.at[:, :, depth - 1].set(tokens)
        mask = jnp.concatenate([above, jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))], axis=2)
        features, earlier = feed_nodes(network, memory, context, tokens, features, depth, earlier, mask)
        scores = child_scores(network, context, features, paths, depth, filtered=False)
        parents.append(jnp.repeat(first + frontier, k, axis=1))
        first += level.tokens.shape[1]
        level = _children(scores, pick(level.scores, frontier), k)
        levels.append(level)
        _, frontier = jax.lax.top_k(level.scores, k)
        above, features, paths = (pick(values, frontier // k) for values in (mask, features, paths))
    tokens, values = (jnp.concatenate([getattr(x, name) for x in levels], axis=1) for name in ("tokens", "scores"))
    return best(tokens, jnp.concatenate(parents, axis=1), values, tree.num_nodes)


@dataclass(frozen=True)
class _Level:
    """Candidates: the k best children of each of W nodes, and log-probabilities of the paths down to them."""

    tokens: Int[Array, "B W*k"]
    scores: Float[Array, "B W*k"]


def _children(scores: Scores, above: Float[Array, "B W"], k: int) -> _Level:
    batch, nodes, size = scores.values.shape
    few = min(k, size)
    values, index = jax.lax.top_k(scores.values.reshape(batch * nodes, size), few)
    values = values.reshape(batch, nodes, few) - jax.nn.logsumexp(scores.values, axis=-1, keepdims=True)
    # rounding must not put a child above its parent; and NaN, of a law that is none, is no candidate
    values = above[:, :, None] + jnp.minimum(values, 0.0)
    values = jnp.where(jnp.isnan(values), -jnp.inf, values)
    missing = ((0, 0), (0, 0), (0, k - few))
    tokens = jnp.pad(scores.tokens(index.reshape(batch, nodes, few)), missing)
    values = jnp.pad(values, missing, constant_values=-jnp.inf)
    return _Level(tokens.reshape(batch, -1), values.reshape(batch, -1))
