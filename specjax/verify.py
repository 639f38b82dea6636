"""The target's pass over a block: every node sees the committed prefix, its ancestors and itself."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jaxtyping import Array, Float, Int

from specjax.cache import KVCache
from specjax.models.interface import TargetModel
from specjax.trees import Draft, block_mask, block_positions, block_tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seen:
    """What the target says of a block of T tokens.

    Attributes:
        logits: raw scores after each block token, float32.
        block: the block's keys and values, not yet in the cache.
        features: those asked for by name.
    """

    logits: Float[Array, "B T V"]
    block: KVCache
    features: dict[str, Float[Array, "B T M"]]


def verify(
    model: TargetModel,
    cache: KVCache,
    pending: Int[Array, "B"],
    length: Int[Array, "B"],
    draft: Draft,
    features: Sequence[str] = (),
) -> Seen:
    """Run the target over `[pending, nodes, probes]`. Reads the cache's first `length - 1` slots; writes nothing."""
    output = model(
        block_tokens(pending, draft),
        block_positions(draft, length),
        block_mask(draft),
        cache,
        length - 1,
        features,
    )
    return Seen(model.logits(output.hidden), output.block, output.features)
