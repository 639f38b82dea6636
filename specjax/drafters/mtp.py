"""Drafting with MTP modules: those that a checkpoint comes with, or trained ones.

    target = specjax.load("MiMo-7B-RL")                                     # a directory
    drafter = specjax.load_drafter("MiMo-7B-RL", target)                    # the module in it, one token a round
    drafter = specjax.load_drafter("MiMo-7B-RL", target, num_draft_tokens=3)

    network = MtpNetwork.random(MtpConfig.of(target.model.config, num_modules=2))
    drafter = Mtp(network, chain_tree(4))                                   # tokens 3 and 4 by module 2 again

The drafter's caches hold the keys and values of the modules over the text up to the pending token (see `mtp_network`),
and all of them come from the target's true features: `update` runs every module over what the round committed. What
drafting computes stays beside the caches and is forgotten with the round.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.cache import KVCache, read_first, write
from specjax.drafters.eagle import check_drafting, draft
from specjax.drafters.eagle_networks import pair
from specjax.drafters.eagle_step import Memory
from specjax.drafters.growing import GrownTree
from specjax.drafters.mtp_network import MtpConfig as MtpConfig
from specjax.drafters.mtp_network import MtpNetwork as MtpNetwork
from specjax.models.prefill import chunk_size
from specjax.state import Context, Round, static
from specjax.trees import Draft, StaticTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mtp:
    """Drafts with MTP modules: a chain, a static tree or a tree grown by confidence.

    Attributes:
        network: the modules.
        tree: what a draft looks like; levels deeper than there are modules come from the last one again.
        sample, min_confidence: as `Eagle`'s.
        block_sizes: see `Drafter`.
    """

    network: MtpNetwork
    tree: StaticTree | GrownTree = static()
    sample: bool | None = static(default=None)
    block_sizes: tuple[int, ...] | None = static(default=None)
    min_confidence: float = static(default=0.0)

    name: ClassVar[str] = "mtp"
    wants_logits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_drafting(self.tree, self.sample, self.min_confidence)

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
        true = self.network.feature(features)
        cache = self.network.init_cache(batch, size)
        chunk, total = chunk_size(longest), true.shape[1] if longest else 0
        last = jnp.maximum(context.length - 2, 0)  # the pair at `length - 2` is the pending token's
        text = jnp.pad(context.tokens, ((0, 0), (0, 1)))

        def body(i: Array, carry: tuple[KVCache, Array, Array]) -> tuple[KVCache, Array, Array]:
            cache, before, pending = carry
            start = i * chunk
            part = jax.lax.dynamic_slice_in_dim(true, start, chunk, axis=1)
            tokens = jax.lax.dynamic_slice_in_dim(text, start, chunk + 1, axis=1)
            at = jnp.full(batch, start, jnp.int32)
            outputs = self.network.read_text(context.model, pair(part, tokens, at), before, cache, at)
            here = _at(outputs.features, jnp.clip(last - start, 0, chunk - 1))
            pending = jnp.where((last // chunk == i)[:, None], here, pending)
            return write(cache, outputs.block.cache, at), outputs.features[:, -1], pending

        nothing = jnp.zeros((batch, self.network.num_modules * true.shape[-1]), self.network.dtype)
        cache, _, pending = jax.lax.fori_loop(0, total // chunk, body, (cache, nothing, nothing))
        return Memory(cache, pending)

    def propose(self, memory: Memory, context: Context) -> tuple[Draft, Memory]:
        return draft(self.network, self.tree, memory, context, self.sample, self.min_confidence), memory

    def update(self, memory: Memory, round: Round, context: Context) -> Memory:
        """Feed the pairs that the round completed: the true features along its path, with the committed tokens."""
        start = round.start - 1  # where the old pending token stands
        true = self.network.feature({name: round.along_path(value) for name, value in round.features.items()})
        places = start[:, None] + jnp.arange(true.shape[1] + 1)
        text = jnp.take_along_axis(context.tokens, places, axis=1)
        pairs = pair(true, text, start)
        outputs = read_first(
            round.count > 0,
            lambda: self.network.read_text(context.model, pairs, memory.feature, memory.cache, start),
        )
        here = _at(outputs.features, jnp.maximum(round.count - 1, 0))
        feature = jnp.where((round.count > 0)[:, None], here, memory.feature)
        # slots past the round's own are written too, and written again before they are ever read
        return Memory(write(memory.cache, outputs.block.cache, start), feature)


def _at(rows: Float[Array, "B T M"], places: Array) -> Float[Array, "B M"]:
    return jax.vmap(lambda row, i: row[i])(rows, places)
