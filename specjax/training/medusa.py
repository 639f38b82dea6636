"""What Medusa's heads are trained for."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.eagle_step import pick
from specjax.drafters.medusa import Medusa, MedusaHeads
from specjax.drafters.vocabulary import logits_of
from specjax.models.interface import TargetModel
from specjax.models.target import Target
from specjax.state import Drafter
from specjax.training.acceptance import chain_length
from specjax.training.agreement import Agreement, cross_entropy, draft_places, top
from specjax.training.batches import Batch
from specjax.training.objective import Losses
from specjax.training.supervised import Supervised
from specjax.trees import StaticTree, chain_tree


@dataclass(frozen=True)
class MedusaObjective:
    """Medusa-1 (Cai et al. 2024, section 2.2.1): the target is frozen, and each head learns the token that far ahead.

        loss = Σ_i decay^(i + 1) Σ_u CE(head i before token u, u) / number of supervised tokens u

    Head i reads the hidden state at t and scores the token at u = t + 2 + i, from places t whose first guess is
    supervised too. Tokens that the heads cannot draft are left out of the loss; in the accuracies they count as wrong.

    Attributes:
        decay: 0.8 in the published code; 1 is the plain sum.
        soft: learn the target's own law before token u instead of u itself.
        capacity: most supervised tokens of a row (`supervised.room`); None runs the heads over every position.
        tree: what the drafter that is measured drafts.
    """

    decay: float = 0.8
    soft: bool = False
    capacity: int | None = None
    tree: StaticTree = chain_tree(4)

    name: ClassVar[str] = "medusa"
    features: ClassVar[tuple[str, ...]] = ("hidden",)
    rates: ClassVar[Mapping[str, float]] = MappingProxyType({})

    def losses(
        self,
        network: MedusaHeads,
        target: TargetModel,
        batch: Batch,
        features: dict[str, Float[Array, "B T M"]],
        key: Array,
    ) -> Losses:
        hidden = features["hidden"]
        labels = Supervised.of(batch, 1, self.capacity)
        ids = network.target_ids
        starts = Supervised.of(batch, 2, self.capacity)
        law = jax.lax.stop_gradient(jax.nn.softmax(logits_of(target, labels.at(hidden), ids))) if self.soft else None
        places = labels.places(batch.tokens.shape[1])
        total, agreement = jnp.float32(0.0), Agreement(batch.tokens.shape)
        for head in range(network.config.num_heads):
            rows = starts.further(head, 2, batch)
            wanted = draft_places(rows.labels, ids, target.vocab_size)
            logits = network.head_logits(head, rows.at(hidden), target)
            if law is None:
                chosen = jnp.take_along_axis(logits, jnp.maximum(wanted, 0)[..., None], axis=-1)[..., 0]
                loss = jax.nn.logsumexp(logits, axis=-1) - chosen
            else:
                loss = cross_entropy(logits, pick(law, rows.at(places, head + 1)))
            total += self.decay ** (head + 1) * jnp.where(rows.valid & (wanted >= 0), loss, 0.0).sum()
            agreement.add(head, rows, logits.argmax(-1) == wanted)
        return Losses(total, labels.count.astype(jnp.float32), agreement.sums)

    @property
    def chain_length(self) -> int | None:
        """Draft tokens of the drafter that is measured, where it drafts a chain."""
        return chain_length(self.tree)

    def ranked(
        self,
        network: MedusaHeads,
        target: TargetModel,
        batch: Batch,
        features: dict[str, Array],
        count: int,
        ranks: int,
    ) -> Int[Array, "B T k R"]:
        """See `acceptance.Guesser`."""
        best = [top(network.head_logits(i, features["hidden"], target), ranks) for i in range(count)]
        found = jnp.stack(best, axis=2)
        return found if network.target_ids is None else network.target_ids[found]

    def decoding(self, network: MedusaHeads, target: Target) -> tuple[Drafter, Target]:
        return Medusa(network, self.tree), target
