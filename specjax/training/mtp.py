"""What MTP modules are trained for, on a frozen target."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.growing import GrownTree
from specjax.drafters.mtp import Mtp, MtpNetwork
from specjax.drafters.mtp_unroll import unroll
from specjax.drafters.vocabulary import head_of
from specjax.models.interface import TargetModel
from specjax.models.target import Target
from specjax.sampling import argmax
from specjax.state import Drafter
from specjax.training.acceptance import chain_length
from specjax.training.agreement import Agreement, cross_entropy, draft_places, top
from specjax.training.batches import Batch
from specjax.training.drafted import Drafted
from specjax.training.features import segment_mask
from specjax.training.objective import Losses
from specjax.training.parts import places_of_part, scores, sum_in_parts
from specjax.trees import StaticTree, chain_tree


@dataclass(frozen=True)
class MtpObjective:
    """The modules' cross-entropies (DeepSeek-V3, section 2.2, equations 24 and 25), over texts of the target's own.

        loss = Σ_s decay^s Σ_u CE(p_u, q_su) / number of supervised tokens u

    q_su is the law of token u by the module that is asked s + 1 tokens ahead of the pending one: module s + 1, or the
    last one again. p_u is the frozen target's own law, or the token alone, as the report has it. Embeddings and head
    are the target's and stay as they are. Drafts begin with a supervised token. Tokens that cannot be drafted are left
    out of the loss; in the accuracies they count as wrong.

    Attributes:
        steps: tokens ahead that are trained: as many as will be drafted, whatever the number of modules.
        decay: weight of a step over that of the one before (the report: 1; FastMTP, Cai et al. 2025: 0.6).
        soft: learn p instead of the token.
        capacity: most supervised tokens of a row (`supervised.room`); None runs the head over every position.
        feature: that of the network's configuration.
        tree: what the drafter that is measured drafts.
    """

    steps: int = 3
    decay: float = 0.8
    soft: bool = True
    capacity: int | None = None
    feature: str = "hidden"
    tree: StaticTree | GrownTree = chain_tree(3)

    name: ClassVar[str] = "mtp"
    rates: ClassVar[Mapping[str, float]] = MappingProxyType({})

    @property
    def features(self) -> tuple[str, ...]:
        """The modules' own, and what the target's head reads."""
        return tuple(dict.fromkeys((self.feature, "hidden")))

    def losses(
        self,
        network: MtpNetwork,
        target: TargetModel,
        batch: Batch,
        features: dict[str, Float[Array, "B T M"]],
        key: Array,
    ) -> Losses:
        text = Drafted.of(batch, self.capacity)
        outputs = _unrolled(network, target, batch, features, self.steps, text.starts.index)
        ids, labels = network.target_ids, text.labels
        drafted = draft_places(labels.labels, ids, target.vocab_size)
        guesses = [text.guessing(step) for step in range(self.steps)]
        counts = [guess.rows.valid & (drafted >= 0) for guess in guesses]
        true_head = head_of(target, ids)

        def loss(_: tuple[()], heads: tuple[Array, Array], read: list[Array], fixed: Any) -> tuple[Array, list[Array]]:
            true_head, head = heads
            hidden, drafted, counts = fixed
            if self.soft:
                law = jax.nn.softmax(scores(hidden, true_head))
            total, right = jnp.float32(0.0), []
            for step, (output, count) in enumerate(zip(read, counts, strict=True)):
                logits = scores(output, head)
                if self.soft:
                    losses = cross_entropy(logits, law)
                else:
                    chosen = jnp.take_along_axis(logits, jnp.maximum(drafted, 0)[..., None], axis=-1)[..., 0]
                    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
                total += self.decay**step * jnp.where(count, losses, 0.0).sum()
                right.append(argmax(logits) == drafted)
            return total, right

        read = [guess.of(network.read(x, step)) for step, (guess, x) in enumerate(zip(guesses, outputs, strict=True))]
        fixed = labels.at(features["hidden"]), drafted, counts
        heads = true_head, true_head.astype(network.dtype)
        total, right = sum_in_parts(loss, (), heads, read, fixed, places_of_part(drafted.shape, len(true_head)))
        agreement = Agreement(batch.tokens.shape)
        for step, guess in enumerate(guesses):
            agreement.add(step, guess.rows, right[step])
        return Losses(total, text.count, agreement.sums | text.figures)

    @property
    def chain_length(self) -> int | None:
        """Draft tokens of the drafter that is measured, where it drafts a chain."""
        return chain_length(self.tree)

    def ranked(
        self,
        network: MtpNetwork,
        target: TargetModel,
        batch: Batch,
        features: dict[str, Array],
        count: int,
        ranks: int,
    ) -> Int[Array, "B T k R"]:
        """See `acceptance.Guesser`."""
        outputs = _unrolled(network, target, batch, features, count)
        best = [top(network.child_logits(x, target, step), ranks) for step, x in enumerate(outputs)]
        found = jnp.stack(best, axis=2)
        return found if network.target_ids is None else network.target_ids[found]

    def decoding(self, network: MtpNetwork, target: Target) -> tuple[Drafter, Target]:
        return Mtp(network, self.tree), target


def _unrolled(
    network: MtpNetwork,
    target: TargetModel,
    batch: Batch,
    features: dict[str, Array],
    steps: int,
    starts: Int[Array, "B C"] | None = None,
) -> list[Float[Array, "B C M"]]:
    tokens, positions, segments = (jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segments))
    mask, true = segment_mask(segments), network.feature(features)
    return unroll(network, target, true, tokens, positions, mask, steps, starts)
