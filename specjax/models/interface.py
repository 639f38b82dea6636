"""What the engine asks of a target model; `Decoder` is one, the table model of `specjax.testing` another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import KVCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Output:
    """What a forward pass over a block returns.

    Attributes:
        hidden: `[B, T, M]` after the final norm (what the head reads).
        block: the block's own keys and values, `[B, K, T, D]` a layer.
        features: the named ones that were asked for, `[B, T, M]` each: "layer.i" is the residual stream after i layers
            (0 = embeddings, L = before the final norm), "hidden" the one after the final norm.
    """

    hidden: Float[Array, "B T M"]
    block: KVCache
    features: dict[str, Float[Array, "B T M"]]


class TargetModel(Protocol):
    """A model over blocks of tokens: it reads a cache and never writes it. A pytree."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int:
        """The context: no token may stand at this position or later."""
        ...

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T T"],
        cache: KVCache | None = None,
        length: Int[Array, "B"] | None = None,
        features: Sequence[str] = (),
    ) -> Output:
        """Forward over a block.

        Args:
            tokens: the block.
            positions: of each token; two nodes of one depth share one.
            mask: what each token sees of its own block (itself always).
            cache: the committed prefix, read only; None for no prefix.
            length: how many slots of the cache are valid, per row.
            features: names of features to return.
        """
        ...

    def logits(self, hidden: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        """Scores of every token, float32."""
        ...

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache of `capacity` slots a row."""
        ...
