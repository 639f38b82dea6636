"""One step of EAGLE's drafting, shared by static and grown trees: score the children of some nodes, feed some nodes."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import KVCache
from specjax.drafters.eagle_networks import Eagle3Network, EagleNetwork
from specjax.drafters.vocabulary import Scores
from specjax.sampling import process
from specjax.state import Context


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """What EAGLE remembers between rounds.

    Attributes:
        cache: keys and values of the pairs `[0, length - 1)`, all made of the target's true features.
        feature: the network's output at the last of them, which stands for the feature of the pending token. A row with
            a single token has no pair yet, and nothing is drafted for it.
    """

    cache: KVCache
    feature: Float[Array, "B M"]


def child_scores(
    network: EagleNetwork | Eagle3Network,
    context: Context,
    features: Float[Array, "B W M"],
    paths: Int[Array, "B W D"],
    depth: int,
    filtered: bool,
) -> Scores:
    """Scores of the children of nodes, given the network's outputs at these.

    Args:
        features: the outputs.
        paths: the tokens from below the pending token to each node; the first `depth` are real.
        filtered: apply top-k, top-p and min-p too: needed where tokens are drawn, a cost without use where the best are
            taken.
    """
    rules = context.rules if filtered else replace(context.rules, filters=())
    logits = network.logits(features, context.model)
    scores = Scores(logits, network.target_ids, context.model.vocab_size).readable(rules)
    depths = jnp.full(paths.shape[0], depth, jnp.int32)

    def one(logits: Array, path: Array) -> Array:
        return process(logits, rules, context.text(path, depths))

    return replace(scores, values=jax.vmap(one, in_axes=1, out_axes=1)(scores.values, paths))


def feed_nodes(
    network: EagleNetwork | Eagle3Network,
    memory: Memory,
    context: Context,
    tokens: Int[Array, "B W"],
    features: Float[Array, "B W M"],
    depth: int,
    earlier: KVCache | None,
    mask: Bool[Array, "B W E+W"],
) -> tuple[Float[Array, "B W M"], KVCache]:
    """Run the network over nodes of one depth: each node's token with its parent's output in the feature's place.

    Args:
        tokens: of the nodes.
        features: the outputs at their parents.
        depth: of the nodes; 1 is a child of the pending token.
        earlier: keys and values of the nodes fed before.
        mask: what each node sees of those and of its own level: its ancestors and itself.

    Returns:
        The outputs at the nodes, and `earlier` with theirs added.
    """
    positions = jnp.broadcast_to(context.length[:, None] - 2 + depth, tokens.shape)
    embedded = network.embeddings(tokens, context.model)
    fed = network(embedded, features, positions, mask, memory.cache, context.length - 1, earlier)
    return fed.features, fed.block if earlier is None else _join(earlier, fed.block)


def _join(earlier: KVCache, block: KVCache) -> KVCache:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=2), earlier, block)


def known(context: Context) -> Bool[Array, "B"]:
    """Rows with anything to go on: a one-token text has no pair yet."""
    return context.length > 1


def pick(rows: Array, index: Any) -> Array:
    """`rows[b, index[b, w]]`: `[B, W, ...]` out of `[B, U, ...]`."""
    return jax.vmap(lambda row, places: row[places])(rows, index)
