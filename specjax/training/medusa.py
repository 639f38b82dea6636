"""What Medusa's heads are trained for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.medusa import Medusa, MedusaHeads
from specjax.drafters.vocabulary import head_of
from specjax.models.interface import TargetModel
from specjax.models.target import Target
from specjax.sampling import argmax
from specjax.state import Drafter
from specjax.training.acceptance import chain_length
from specjax.training.agreement import Agreement, cross_entropy, draft_places, top
from specjax.training.batches import Batch
from specjax.training.objective import Losses
from specjax.training.parts import places_of_part, scores, sum_in_parts
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
        return self.over(network, target, batch, features["hidden"])

    def over(
        self,
        network: MedusaHeads,
        target: TargetModel,
        batch: Batch,
        hidden: Float[Array, "B T M"],
        frozen: bool = True,
    ) -> Losses:
        """The loss over the target's hidden states. Where the target is not frozen, gradients reach its head too."""
        segments = jnp.asarray(batch.segments)
        labels = Supervised.of(batch, 1, self.capacity)
        ids = network.target_ids
        started = Supervised.of(batch, 2, self.capacity).places(segments.shape[1]) >= 0
        wanted = draft_places(labels.labels, ids, target.vocab_size)
        places = [labels.behind(head + 1, segments) for head in range(network.config.num_heads)]
        places = [replace(rows, valid=rows.valid & rows.at(started)) for rows in places]
        shared = network.config.shared_head
        head = head_of(target, ids).astype(network.dtype) if shared else network.head[...]
        learned, given = ((), head) if shared and frozen else (head, ())
        true_head = head_of(target, ids) if self.soft else ()

        def loss(learned: Any, shared_arrays: Any, read: list[Array], fixed: Any) -> tuple[Array, list[Array]]:
            given, true_head = shared_arrays
            head = given if shared and frozen else learned
            hidden, wanted, counts = fixed
            law = jax.nn.softmax(scores(hidden, true_head)) if self.soft else None
            total, right = jnp.float32(0.0), []
            for i, (x, count) in enumerate(zip(read, counts, strict=True)):
                logits = scores(x, head if shared else head[i])
                if law is None:
                    chosen = jnp.take_along_axis(logits, jnp.maximum(wanted, 0)[..., None], axis=-1)[..., 0]
                    loss = jax.nn.logsumexp(logits, axis=-1) - chosen
                else:
                    loss = cross_entropy(logits, law)
                total += self.decay ** (i + 1) * jnp.where(count, loss, 0.0).sum()
                right.append(argmax(logits) == wanted)
            return total, right

        read = [network.read(i, rows.at(hidden)) for i, rows in enumerate(places)]
        counts = [rows.valid & (wanted >= 0) for rows in places]
        fixed = (labels.at(hidden) if self.soft else (), wanted, counts)
        part = places_of_part(wanted.shape, head.shape[-2])
        total, right = sum_in_parts(loss, learned, (given, true_head), read, fixed, part)
        agreement = Agreement(batch.tokens.shape)
        for i, rows in enumerate(places):
            agreement.add(i, rows, right[i])
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
        head = head_of(target, network.target_ids) if network.config.shared_head else network.head[...]
        hidden = [network.read(i, features["hidden"]) for i in range(count)]
        shared = network.config.shared_head
        best = [top(scores(x, head if shared else head[i]), ranks) for i, x in enumerate(hidden)]
        found = jnp.stack(best, axis=2)
        return found if network.target_ids is None else network.target_ids[found]

    def decoding(self, network: MedusaHeads, target: Target) -> tuple[Drafter, Target]:
        return Medusa(network, self.tree), target
