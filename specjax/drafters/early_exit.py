"""Early exit: the target drafts for itself with some of its layers, reading its own cache.

    drafter = specjax.EarlyExit(layers=8)                                # the first eight, then norm and head
    drafter = specjax.EarlyExit(layers=(*range(8), *range(22, 30)))      # all but some in the middle

Nothing is trained, loaded or remembered. How good the drafts are depends on the target.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.cache import KVCache
from specjax.drafters.confidence import check_confidence
from specjax.drafters.draft_model import draft_chain, scores_of
from specjax.drafters.vocabulary import Scores
from specjax.errors import InputError, check_block_sizes, check_whole
from specjax.models import layers as F
from specjax.models.decoder import Decoder, View
from specjax.models.target import Target
from specjax.state import Context, Round, static
from specjax.trees import Draft, chain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EarlyExit:
    """The target's own first layers, then its final norm and head, draft a chain of tokens, one short pass each
    (Elhoushi et al. 2024, LayerSkip, section 4.3); or any of its layers in order, the others skipped (Zhang et
    al. 2024, Draft & Verify).

    It has no weights and no cache of its own: a layer that drafts reads the target's keys and values of the committed
    text, which verification has written. With the first layers those are the very ones that drafting would compute;
    where layers are skipped, those behind the gap see the text as the whole target does. Keys and values of the tokens
    being drafted stay beside the cache, and are forgotten with the round: nothing has to be caught up after rounds
    that others drafted.

    Where the temperature is above 0 tokens are drawn from this short model's own law, processed as the target's is (q),
    unless `sample` is False: then they are its most likely tokens, deterministic. A target that was not trained to be
    read early says little in its first layers.

    Attributes:
        layers: how many of the target's first layers, or the numbers of those that are run, rising (the first is 0).
        num_draft_tokens: k.
        sample: draw proposals where the temperature is above 0.
        block_sizes: see `Drafter`.
        min_confidence: a draft ends before the token of which the layers are less sure than this; 0 is off. See
            `confidence`.
    """

    layers: int | tuple[int, ...] = static()
    num_draft_tokens: int = static(default=4)
    sample: bool = static(default=True)
    block_sizes: tuple[int, ...] | None = static(default=None)
    min_confidence: float = static(default=0.0)

    name: ClassVar[str] = "early-exit"
    features: ClassVar[tuple[str, ...]] = ()
    wants_logits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_whole("num_draft_tokens", self.num_draft_tokens, 0)
        check_block_sizes(self.block_sizes)
        check_confidence(self.min_confidence)
        if not isinstance(self.layers, tuple):
            check_whole("layers", self.layers, 1)
            return
        rising = all(a < b for a, b in zip((-1, *self.layers), self.layers, strict=False))
        if not self.layers or not all(type(i) is int for i in self.layers) or not rising:
            raise InputError(
                f"layers: expected how many of the first layers, or rising numbers of layers, such as (0, 1, 5); got "
                f"{self.layers!r}"
            )

    def check(self, target: Target) -> None:
        """Raise InputError if the target has no such layers."""
        self._of(target.model)

    @property
    def num_nodes(self) -> int:
        return self.num_draft_tokens

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    def init(self, context: Context, features: dict[str, Any], longest: int) -> None:
        return None

    def propose(self, memory: None, context: Context) -> tuple[Draft, None]:
        batch, k = context.length.shape[0], self.num_draft_tokens
        if k == 0:
            return chain(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32)), None
        part = self._of(context.model)

        def feed(drafted: KVCache, token: Array, i: Array) -> tuple[KVCache, Array]:
            return part.feed(context, drafted, token, i + 1)

        def scores(hidden: Array) -> Scores:
            return scores_of(part.target, hidden, part.target.vocab_size)

        drafted, hidden = part.feed(context, part.nothing(context, k), context.pending, jnp.int32(0))
        draft, _ = draft_chain(k, hidden, drafted, feed, scores, context, self.sample, self.min_confidence)
        return draft, None

    def update(self, memory: None, round: Round, context: Context) -> None:
        return None

    def _of(self, target: Any) -> "_Part":
        if not isinstance(target, Decoder):
            raise InputError(f"early exit runs some layers of its target, and a {type(target).__name__} has none")
        layers = self.layers if isinstance(self.layers, tuple) else tuple(range(self.layers))
        if layers[-1] >= target.config.num_layers:
            raise InputError(f"EarlyExit: the target has {target.config.num_layers} layers, got layers={self.layers}")
        return _Part(target, layers)


@dataclass(frozen=True)
class _Part:
    """Some layers of the target, its final norm and its head."""

    target: Decoder
    layers: tuple[int, ...]

    def nothing(self, context: Context, size: int) -> KVCache:
        """Room for keys and values of `size` tokens, a layer each."""
        keys = (context.cache.keys[i] for i in self.layers)
        empty = tuple(jnp.zeros((*x.shape[:2], size, x.shape[3]), x.dtype) for x in keys)
        return KVCache(empty, empty)

    def feed(
        self, context: Context, drafted: KVCache, token: Int[Array, "B"], i: Int[Array, ""]
    ) -> tuple[KVCache, Float[Array, "B 1 M"]]:
        """Run token i of the pending one (0) and the drafted ones behind it.

        Args:
            drafted: keys and values of those before it.

        Returns:
            `drafted` with the token's own, and the hidden state after it.
        """
        target, cache = self.target, context.cache
        view = self._view(context, drafted.capacity, i)
        x = target.embeddings(token[:, None])
        keys, values = [], []
        for n, number in enumerate(self.layers):
            past, earlier = (cache.keys[number], cache.values[number]), (drafted.keys[n], drafted.values[n])
            x, key, value = target.layers[number](x, view, past, earlier)
            keys.append(jax.lax.dynamic_update_slice_in_dim(earlier[0], key, i, axis=2))
            values.append(jax.lax.dynamic_update_slice_in_dim(earlier[1], value, i, axis=2))
        hidden = F.rms_norm(x, target.norm[...], target.config.norm_eps, target.config.norm_offset)
        return KVCache(tuple(keys), tuple(values)), hidden

    def _view(self, context: Context, size: int, i: Int[Array, ""]) -> View:
        """What token i sees: the committed text, the tokens between it and the pending one, itself."""
        start = context.length - 1
        positions = start[:, None] + i
        view = View.make(self.target.config, positions, jnp.ones((*positions.shape, 1), bool), context.cache, start)
        behind = jnp.append(i - jnp.arange(size), 0)  # how far each key lies behind the token
        seen = jnp.append(jnp.arange(size) < i, True)
        block = {}
        for window in view.block:
            near = seen if window is None else seen & (behind < window)
            block[window] = jnp.broadcast_to(jnp.where(near, 0.0, F.MASKED), (*positions.shape, size + 1))
        return replace(view, block=block)
