"""One step of drafting with an EAGLE network, or with MTP modules, shared by static and grown trees: score the children
of some nodes, feed some nodes.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import KVCache
from specjax.drafters.vocabulary import Scores
from specjax.models.interface import TargetModel
from specjax.sampling import process
from specjax.state import Context


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """What is remembered between rounds.

    Attributes:
        cache: keys and values of the pairs `[0, length - 1)`, all made of the target's true features.
        feature: the network's output at the last of them, which stands for the feature of the pending token. A row with
            a single token has no pair yet, and nothing is drafted for it.
    """

    cache: KVCache
    feature: Float[Array, "B M"]


class Network(Protocol):
    """What can be drafted with step by step."""

    @property
    def target_ids(self) -> Int[Array, "Vd"] | None: ...

    def embeddings(self, tokens: Int[Array, "B W"], target: TargetModel) -> Float[Array, "B W M"]: ...

    def child_logits(self, features: Float[Array, "B W M"], target: TargetModel, depth: int) -> Float[Array, "B W Vd"]:
        """Scores of the children of nodes of one depth, by the outputs at these."""
        ...

    def follow(
        self,
        depth: int,
        embedded: Float[Array, "B W M"],
        features: Float[Array, "B W M"],
        positions: Int[Array, "B W"],
        mask: Bool[Array, "B W E+W"],
        cache: KVCache,
        length: Int[Array, "B"],
        earlier: Any,
    ) -> Any:
        """Outputs at nodes of one depth, and their keys and values: `features`, `block`. See `feed_nodes`."""
        ...


def child_scores(
    network: Network,
    context: Context,
    features: Float[Array, "B W M"],
    paths: Int[Array, "B W D"],
    depth: int,
    filtered: bool,
) -> Scores:
    """Scores of the children of nodes, processed, given the network's outputs at these.

    Args:
        features: the outputs.
        paths: the tokens from below the pending token to each node; the first `depth` are real.
        filtered: apply top-k, top-p and min-p too: needed where tokens are drawn, a cost without use where the best are
            taken.
    """
    return processed(raw_scores(network, context, features, depth), context, paths, depth, filtered)


def raw_scores(network: Network, context: Context, features: Float[Array, "B W M"], depth: int) -> Scores:
    """Scores of the children of nodes of one depth, as the network gives them."""
    logits = network.child_logits(features, context.model, depth)
    return Scores(logits, network.target_ids, context.model.vocab_size)


def processed(scores: Scores, context: Context, paths: Int[Array, "B W D"], depth: int, filtered: bool) -> Scores:
    """Raw scores as they are drawn from; see `child_scores`."""
    rules = context.rules if filtered else replace(context.rules, filters=())
    scores = scores.readable(rules)
    depths = jnp.full(paths.shape[0], depth, jnp.int32)

    def one(logits: Array, path: Array) -> Array:
        return process(logits, rules, context.text(path, depths))

    return replace(scores, values=jax.vmap(one, in_axes=1, out_axes=1)(scores.values, paths))


def feed_nodes(
    network: Network,
    memory: Memory,
    context: Context,
    tokens: Int[Array, "B W"],
    features: Float[Array, "B W M"],
    depth: int,
    earlier: Any,
    mask: Bool[Array, "B W E+W"],
) -> tuple[Float[Array, "B W M"], Any]:
    """Run the network over nodes of one depth: each node's token with its parent's output in the feature's place.

    Args:
        tokens: of the nodes.
        features: the outputs at their parents.
        depth: of the nodes; 1 is a child of the pending token.
        earlier: keys and values of the nodes fed before; None where there are none.
        mask: what each node sees of those and of its own level: its ancestors and itself.

    Returns:
        The outputs at the nodes, and `earlier` with theirs added.
    """
    positions = jnp.broadcast_to(context.length[:, None] - 2 + depth, tokens.shape)
    embedded = network.embeddings(tokens, context.model)
    length = context.length - 1
    fed = network.follow(depth, embedded, features, positions, mask, memory.cache, length, earlier)
    return fed.features, fed.block if earlier is None else _join(earlier, fed.block)


def _join(earlier: Any, block: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=2), earlier, block)


def known(context: Context) -> Bool[Array, "B"]:
    """Rows with anything to go on: a one-token text has no pair yet."""
    return context.length > 1


def pick(rows: Array, index: Any) -> Array:
    """`rows[b, index[b, w]]`: `[B, W, ...]` out of `[B, U, ...]`."""
    return jax.vmap(lambda row, places: row[places])(rows, index)
