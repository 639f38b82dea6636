"""EAGLE: one decoder layer that continues the target's own features (Li et al. 2024; EAGLE-2, 2024; EAGLE-3, 2025).

    config = EagleConfig.of(target.model.config)
    drafter = Eagle(EagleNetwork.random(config), chain_tree(5))                        # EAGLE-1, a chain
    drafter = Eagle(network, static_tree([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]))     # EAGLE-1, a static tree
    drafter = Eagle(network, GrownTree(depth=6, top_k=10, total=60))                   # EAGLE-2
    drafter = Eagle(eagle3_network, GrownTree(depth=6, top_k=8, total=32))             # EAGLE-3

The drafter's cache holds the keys and values of the pairs `[0, length - 1)` (see `eagle_networks`), and all of them
come from the target's true features: `update` runs the network over what the round committed. What drafting computes
from the network's own outputs stays beside the cache and is forgotten with the round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import KVCache, read_first, write
from specjax.drafters.confidence import check_confidence, confidence
from specjax.drafters.eagle_networks import Eagle3Network, EagleNetwork, feed, pair
from specjax.drafters.eagle_step import Memory, Network, child_scores, feed_nodes, known, processed, raw_scores
from specjax.drafters.growing import GrownTree, grow
from specjax.drafters.vocabulary import Scores
from specjax.errors import InputError
from specjax.models.prefill import chunk_size
from specjax.sampling import argmax, categorical
from specjax.state import Context, Round, static
from specjax.trees import Draft, StaticTree, chain, chain_tree, order


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Eagle:
    """Drafts with an EAGLE network: a chain, a static tree or a tree grown by confidence.

    Attributes:
        network: EAGLE-1's (which is EAGLE-2's) or EAGLE-3's.
        tree: what a draft looks like.
        sample: draw the tokens where the temperature is above 0 (siblings without replacement) instead of taking the
            most likely ones. None: chains do, trees do not. A grown tree cannot.
        block_sizes: see `Drafter`.
        min_confidence: a chain ends before the token of which the network is less sure than this; 0 is off, and trees
            have none. See `confidence`.
    """

    network: EagleNetwork | Eagle3Network
    tree: StaticTree | GrownTree = static(default=chain_tree(5))
    sample: bool | None = static(default=None)
    block_sizes: tuple[int, ...] | None = static(default=None)
    min_confidence: float = static(default=0.0)

    wants_logits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_drafting(self.tree, self.sample, self.min_confidence)

    @property
    def name(self) -> str:
        return "eagle2" if isinstance(self.tree, GrownTree) and self.network.name == "eagle1" else self.network.name

    @property
    def features(self) -> tuple[str, ...]:
        return self.network.features

    @property
    def num_nodes(self) -> int:
        return self.tree.num_nodes

    @property
    def max_depth(self) -> int:
        return self.tree.max_depth

    def init(self, context: Context, features: dict[str, Float[Array, "B P M"]], longest: int) -> Memory:
        batch, size = context.tokens.shape
        fused = self.network.fuse(features)
        cache = self.network.init_cache(batch, size)
        chunk, total = chunk_size(longest), fused.shape[1] if longest else 0
        last = jnp.maximum(context.length - 2, 0)  # the pair at `length - 2` is the pending token's
        text = jnp.pad(context.tokens, ((0, 0), (0, 1)))

        def body(i: Array, carry: tuple[KVCache, Array]) -> tuple[KVCache, Array]:
            cache, feature = carry
            start = i * chunk
            part = jax.lax.dynamic_slice_in_dim(fused, start, chunk, axis=1)
            tokens = jax.lax.dynamic_slice_in_dim(text, start, chunk + 1, axis=1)
            at = jnp.full(batch, start, jnp.int32)
            fed = feed(self.network, context.model, pair(part, tokens, at), cache, at)
            here = jax.vmap(lambda row, i: row[i])(fed.features, jnp.clip(last - start, 0, chunk - 1))
            feature = jnp.where((last // chunk == i)[:, None], here, feature)
            return write(cache, fed.block, at), feature

        nothing = jnp.zeros((batch, fused.shape[-1]), fused.dtype)
        return Memory(*jax.lax.fori_loop(0, total // chunk, body, (cache, nothing)))

    def propose(self, memory: Memory, context: Context) -> tuple[Draft, Memory]:
        return draft(self.network, self.tree, memory, context, self.sample, self.min_confidence), memory

    def update(self, memory: Memory, round: Round, context: Context) -> Memory:
        """Feed the pairs that the round completed: the true features along its path, with the committed tokens."""
        start = round.start - 1  # where the old pending token stands
        features = self.network.fuse({name: round.along_path(value) for name, value in round.features.items()})
        places = start[:, None] + jnp.arange(features.shape[1] + 1)
        text = jnp.take_along_axis(context.tokens, places, axis=1)
        pairs = pair(features, text, start)
        fed = read_first(round.count > 0, lambda: feed(self.network, context.model, pairs, memory.cache, start))
        last = jnp.maximum(round.count - 1, 0)
        feature = jax.vmap(lambda row, i: row[i])(fed.features, last)
        feature = jnp.where((round.count > 0)[:, None], feature, memory.feature)
        # slots past the round's own are written too, and written again before they are ever read
        return Memory(write(memory.cache, fed.block, start), feature)


def check_drafting(tree: StaticTree | GrownTree, sample: bool | None, min_confidence: float) -> None:
    """Raise InputError for settings of `draft` that do not go together."""
    if sample and isinstance(tree, GrownTree):
        raise InputError("sample: a grown tree chooses nodes by their tokens, so drawn ones would not be lossless")
    check_confidence(min_confidence)
    if min_confidence and not (isinstance(tree, StaticTree) and tree.is_chain):
        raise InputError(
            "min_confidence: only a chain ends early; a grown tree chooses its nodes by confidence already, and "
            "any other has a fixed shape"
        )


def draft(
    network: Network,
    tree: StaticTree | GrownTree,
    memory: Memory,
    context: Context,
    sample: bool | None,
    min_confidence: float,
) -> Draft:
    """A draft of that shape, with settings as `Eagle` has them."""
    if isinstance(tree, GrownTree):
        return grow(network, tree, memory, context)
    draw = (tree.is_chain if sample is None else sample) and context.rules.drawn
    if min_confidence:
        return sure_chain(network, tree, memory, context, draw, min_confidence)
    return fill(network, tree, memory, context, draw)


def fill(network: Network, tree: StaticTree, memory: Memory, context: Context, draw: bool) -> Draft:
    """The tokens of a static tree, level by level; only nodes with children are fed.

    Args:
        draw: draw siblings without replacement, each q the draft law without its earlier siblings; else child r of a
            node is its r-th most likely token.
    """
    batch = context.length.shape[0]
    parents = jnp.broadcast_to(jnp.array(tree.parents, jnp.int32), (batch, tree.num_nodes))
    if not tree.num_nodes:
        return Draft(parents, parents, parents >= 0)
    levels: list[_Children] = []
    parents_of_level = [-1]  # the nodes whose children come next: the pending token to begin with
    fed: list[int] = []  # those fed, in the order of `earlier`
    features, earlier = memory.feature[:, None], None
    paths = jnp.zeros((batch, 1, tree.max_depth), jnp.int32)
    exists = known(context)[:, None]
    for depth in range(1, tree.max_depth + 1):
        level = tree.level(depth)
        slots = np.array([parents_of_level.index(tree.parents[i]) for i in level])
        scores = child_scores(network, context, features, paths, depth - 1, filtered=draw)
        children = _draw(scores, level, slots, context) if draw else _rank(scores, tree, level, slots)
        children = replace(children, exists=children.exists & exists[:, slots])
        levels.append(children)
        inner = [j for j, i in enumerate(level) if i in tree.parents]
        if inner:
            parents_of_level = [level[j] for j in inner]
            fed += parents_of_level
            mask = np.array([[_is_above(tree, j, i) for j in fed] for i in parents_of_level])
            slots, inner_ids = slots[inner], np.array(inner)
            tokens, exists = children.tokens[:, inner_ids], children.exists[:, inner_ids]
            paths = paths[:, slots].at[:, :, depth - 1].set(tokens)
            features, earlier = feed_nodes(
                network,
                memory,
                context,
                tokens,
                features[:, slots],
                depth,
                earlier,
                jnp.broadcast_to(jnp.asarray(mask), (batch, *mask.shape)),
            )
    if tree.is_chain:
        return _as_chain(levels)
    tokens, exists, q = _together(levels)
    return order(tokens, parents, exists, jnp.ones_like(exists) if draw else None, q)


def sure_chain(
    network: Network,
    tree: StaticTree,
    memory: Memory,
    context: Context,
    draw: bool,
    min_confidence: float,
) -> Draft:
    """`fill` for a chain, which ends before the first token whose `confidence` is below a threshold: the same draws,
    and the same tokens up to there. Once the chains of all rows have ended nothing more is run.
    """
    batch = context.length.shape[0]

    def step(depth: int, paths: Array, features: Array, earlier: Any) -> tuple[Any, ...]:
        """The child at this depth, the output that it is read out of, and keys and values so far."""
        if depth > 1:  # the token above is fed only now that it is needed
            above, mask = paths[:, :, depth - 2], jnp.ones((batch, 1, depth - 1), bool)
            features, earlier = feed_nodes(network, memory, context, above, features, depth - 1, earlier, mask)
        raw = raw_scores(network, context, features, depth - 1)
        scores = processed(raw, context, paths, depth - 1, filtered=draw)
        level, slots = [depth - 1], np.array([0])
        child = _draw(scores, level, slots, context) if draw else _rank(scores, tree, level, slots)
        sure = confidence(raw.values) >= min_confidence
        return child.tokens, child.exists & sure, child.q, features, earlier

    def zeros(shapes: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    going = (known(context) & context.running)[:, None]
    paths = jnp.zeros((batch, 1, tree.max_depth), jnp.int32)
    features, earlier = memory.feature[:, None], None
    levels: list[_Children] = []
    for depth in range(1, tree.max_depth + 1):
        run = partial(step, depth, paths, features, earlier)
        rest = partial(zeros, jax.eval_shape(run))
        tokens, exists, q, features, earlier = jax.lax.cond(going.any(), run, rest)
        going &= exists
        levels.append(_Children(tokens, going, q))
        paths = paths.at[:, :, depth - 1].set(tokens)
    return _as_chain(levels)


@dataclass(frozen=True)
class _Children:
    """The nodes of one level: a node exists where there was a token left for it, and above it."""

    tokens: Int[Array, "B W"]
    exists: Bool[Array, "B W"]
    q: Float[Array, "B W V"] | None = None


def _together(levels: Sequence[_Children]) -> tuple[Array, Array, Array | None]:
    tokens = jnp.concatenate([level.tokens for level in levels], axis=1)
    exists = jnp.concatenate([level.exists for level in levels], axis=1)
    laws = [level.q for level in levels if level.q is not None]
    return tokens, exists, jnp.concatenate(laws, axis=1) if laws else None


def _as_chain(levels: Sequence[_Children]) -> Draft:
    tokens, exists, q = _together(levels)
    return chain(tokens, exists.sum(-1), q)


def _rank(scores: Scores, tree: StaticTree, level: list[int], slots: np.ndarray) -> _Children:
    """The most likely children of the level's parents, by rank."""
    ranks = np.array([tree.choices[i][-1] for i in level])
    size = scores.values.shape[-1]
    if not ranks.any():
        index = argmax(scores.values)[:, slots]
        exists = index < size
    else:
        values, index = jax.lax.top_k(scores.values, min(int(ranks.max()) + 1, size))
        enough = jnp.asarray(ranks < size)
        ranks = np.where(ranks < size, ranks, 0)
        index, exists = index[:, slots, ranks], enough & (values[:, slots, ranks] > -jnp.inf)
    return _Children(scores.tokens(jnp.where(exists, index, 0)), exists)


def _draw(scores: Scores, level: list[int], slots: np.ndarray, context: Context) -> _Children:
    """Children drawn without replacement, in the order of the level's nodes; at temperature 0 the most likely ones."""
    left = list(jnp.moveaxis(scores.values, 1, 0))  # of each parent
    tokens, exists, laws = [], [], []
    for node, slot in zip(level, slots, strict=True):
        values = left[slot]
        top = argmax(values)
        there = top < values.shape[-1]
        places = jnp.arange(values.shape[-1])
        sharp = (places == top[:, None]).astype(jnp.float32)
        soft = jax.nn.softmax(jnp.where(there[:, None], values, 0.0))
        q = jnp.where((context.rules.temperature == 0)[:, None], sharp, soft)
        uniform = jax.vmap(lambda key, node=node: jax.random.uniform(jax.random.fold_in(key, node)))(context.key)
        token = jnp.where(there, categorical(q, uniform), 0)
        left[slot] = jnp.where(places == token[:, None], -jnp.inf, values)
        tokens.append(scores.tokens(token))
        exists.append(there)
        laws.append(scores.spread(q, 0.0))
    return _Children(jnp.stack(tokens, axis=1), jnp.stack(exists, axis=1), jnp.stack(laws, axis=1))


def _is_above(tree: StaticTree, node: int, other: int) -> bool:
    """Whether `node` is `other` or one of its ancestors."""
    choice = tree.choices[node]
    return tree.choices[other][: len(choice)] == choice
