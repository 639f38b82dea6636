"""What EAGLE's networks are trained for.

Both objectives unroll the network over the text as decoding would (`drafters.eagle_unroll`), and compare its scores of
the token at t + 2 + s with the target's own law there. Only supervised tokens count, each once, however many steps
predict it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from specjax.drafters.eagle import Eagle
from specjax.drafters.eagle_networks import Eagle3Network, EagleNetwork
from specjax.drafters.eagle_unroll import unroll
from specjax.drafters.growing import GrownTree
from specjax.drafters.vocabulary import head_of
from specjax.errors import InputError
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
class Eagle3Objective:
    """EAGLE-3's training-time test (Li et al. 2025, section 3.2).

        loss = Σ_s decay^s Σ_u CE(p_u, q_su) / number of supervised tokens u

    p is the target's law before token u over the draft vocabulary, q the draft's at step s, that is when the token is
    s + 1 ahead of the pending one; drafts begin with a supervised token. There is no feature loss. Tokens outside the
    draft vocabulary are left out, as the draft can never be right there; in the accuracies they count as wrong.

    Attributes:
        steps: of the unroll (the paper: 7; speculators: 3).
        decay: weight of a step over that of the one before (0.8 in the published code).
        capacity: most supervised tokens of a row (`supervised.room`); None runs the head over every position.
        feature_layers: those of the network.
        tree: what the drafter that is measured drafts.
    """

    steps: int = 3
    decay: float = 0.8
    capacity: int | None = None
    feature_layers: tuple[int, ...] = ()
    tree: StaticTree | GrownTree = chain_tree(5)

    name: ClassVar[str] = "eagle3"
    rates: ClassVar[Mapping[str, float]] = MappingProxyType({})

    @property
    def features(self) -> tuple[str, ...]:
        return (*(f"layer.{i}" for i in self.feature_layers), "hidden")

    def losses(
        self,
        network: Eagle3Network,
        target: TargetModel,
        batch: Batch,
        features: dict[str, Float[Array, "B T M"]],
        key: Array,
    ) -> Losses:
        text = Drafted.of(batch, self.capacity)
        outputs = _unrolled(text, network, target, features, self.steps)
        ids, labels = network.target_ids, text.labels
        drafted = draft_places(labels.labels, ids, target.vocab_size)
        guesses = [text.guessing(step) for step in range(self.steps)]
        counts = [guess.rows.valid & (drafted >= 0) for guess in guesses]

        def loss(head: Array, target_head: Array, outputs: list[Array], fixed: Any) -> tuple[Array, list[Array]]:
            hidden, drafted, counts = fixed
            law = jax.nn.softmax(scores(hidden, target_head))
            total, right = jnp.float32(0.0), []
            for step, (output, count) in enumerate(zip(outputs, counts, strict=True)):
                logits = scores(output, head)
                total += self.decay**step * jnp.where(count, cross_entropy(logits, law), 0.0).sum()
                right.append(argmax(logits) == drafted)
            return total, right

        read = [guess.of(network.read(output)) for guess, output in zip(guesses, outputs, strict=True)]
        fixed = labels.at(features["hidden"]), drafted, counts
        places = places_of_part(drafted.shape, network.config.draft_vocab_size)
        total, right = sum_in_parts(loss, network.head[...], head_of(target, ids), read, fixed, places)
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
        network: Eagle3Network,
        target: TargetModel,
        batch: Batch,
        features: dict[str, Array],
        count: int,
        ranks: int,
    ) -> Int[Array, "B T k R"]:
        """See `acceptance.Guesser`."""
        return _ranked(network, target, batch, features, count, ranks)

    def decoding(self, network: Eagle3Network, target: Target) -> tuple[Drafter, Target]:
        return Eagle(network, self.tree), target


@dataclass(frozen=True)
class EagleObjective:
    """EAGLE-1's loss (Li et al. 2024, section 3.2): the next feature, and the token that the target reads out of it.

        loss = Σ_u ( w_feature · mean SmoothL1(f_u, g_u) + w_token · CE(p_u, q_u) ) / number of supervised tokens

    f is the target's feature before the supervised token u, g the network's output in its place; p and q are the
    softmax of the target's own frozen head over them. While training,
    features get uniform noise, (u - 0.5) · noise · 512 / row length, as the published code has it.

    Attributes:
        steps: of the unroll. 1 is EAGLE-1; with more, later steps count with `decay` (HASS, Zhang et al. 2025).
        feature_weight, token_weight: w (1.0 and 0.1 in the published code).
        noise: see above (0.2 in the published code).
        vocabulary: the tokens that CE is taken over; None for all. The head is most of a step's cost on a small target.
        shifted: pair each feature with the token after it. False pairs it with its own token, for the paper's
            comparison of what the shifted token gives (section 3.1); that can be trained and scored, not decoded.
        capacity, tree: as in `Eagle3Objective`.
    """

    steps: int = 1
    decay: float = 0.8
    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise: float = 0.2
    vocabulary: tuple[int, ...] | None = None
    shifted: bool = True
    capacity: int | None = None
    tree: StaticTree | GrownTree = chain_tree(5)

    name: ClassVar[str] = "eagle1"
    features: ClassVar[tuple[str, ...]] = ("hidden",)
    rates: ClassVar[Mapping[str, float]] = MappingProxyType({})

    def losses(
        self,
        network: EagleNetwork,
        target: TargetModel,
        batch: Batch,
        features: dict[str, Float[Array, "B T M"]],
        key: Array,
    ) -> Losses:
        hidden = features["hidden"].astype(jnp.float32)
        spread = self.noise * 512 / hidden.shape[1]
        noisy = hidden + spread * (jax.random.uniform(key, hidden.shape) - 0.5)
        text = Drafted.of(batch, self.capacity)
        outputs = _unrolled(text, network, target, {"hidden": noisy}, self.steps, int(self.shifted))
        ids = None if self.vocabulary is None else jnp.array(self.vocabulary, jnp.int32)
        labels = text.labels
        wanted = draft_places(labels.labels, ids, target.vocab_size)
        guesses = [text.guessing(step) for step in range(self.steps)]

        def loss(_: tuple[()], heads: tuple[Array, Array], outputs: list[Array], fixed: Any) -> tuple[Array, Any]:
            target_head, head = heads
            true, wanted, made = fixed
            law = jax.nn.softmax(scores(true, target_head))
            near, token, right = [], [], []
            for step, (output, valid) in enumerate(zip(outputs, made, strict=True)):
                logits = scores(output, head)
                weight = self.decay**step * valid
                near.append(weight * optax.huber_loss(output.astype(jnp.float32), true).mean(-1))
                token.append(weight * jnp.where(wanted >= 0, cross_entropy(logits, law), 0.0))
                right.append(argmax(logits) == wanted)
            total = self.feature_weight * sum(x.sum() for x in near) + self.token_weight * sum(x.sum() for x in token)
            return total, (near, token, right)

        given = [guess.of(output) for guess, output in zip(guesses, outputs, strict=True)]
        fixed = labels.at(hidden), wanted, [guess.rows.valid for guess in guesses]
        head = head_of(target, ids)
        places = places_of_part(wanted.shape, len(head))
        heads = head, head.astype(network.dtype)
        total, (near, token, right) = sum_in_parts(loss, (), heads, given, fixed, places)
        agreement = Agreement(batch.tokens.shape)
        for step, guess in enumerate(guesses):
            agreement.add(step, guess.rows, right[step])
        sums = {"loss.feature": near, "loss.token": token}
        figures = {name: (jnp.stack(values).sum(), text.count) for name, values in sums.items()}
        return Losses(total, text.count, agreement.sums | figures | text.figures)

    @property
    def chain_length(self) -> int | None:
        """Draft tokens of the drafter that is measured, where it drafts a chain."""
        return chain_length(self.tree)

    def ranked(
        self,
        network: EagleNetwork,
        target: TargetModel,
        batch: Batch,
        features: dict[str, Array],
        count: int,
        ranks: int,
    ) -> Int[Array, "B T k R"]:
        """See `acceptance.Guesser`."""
        return _ranked(network, target, batch, features, count, ranks, int(self.shifted))

    @property
    def decodes(self) -> bool:
        """Whether there is a drafter for what is trained."""
        return self.shifted

    def decoding(self, network: EagleNetwork, target: Target) -> tuple[Drafter, Target]:
        if not self.shifted:
            raise InputError("EAGLE-1 without the shifted token is for comparison only and cannot decode")
        return Eagle(network, self.tree), target


def _unrolled(
    text: Drafted, network: Any, target: TargetModel, features: dict[str, Array], steps: int, shift: int = 1
) -> list[Float[Array, "B C M"]]:
    """The network's outputs at the places that drafts start from."""
    tokens, positions = jnp.asarray(text.batch.tokens), jnp.asarray(text.batch.positions)
    mask = segment_mask(jnp.asarray(text.batch.segments))
    return unroll(network, target, network.fuse(features), tokens, positions, mask, steps, text.starts.index, shift)


def _ranked(
    network: Any,
    target: TargetModel,
    batch: Batch,
    features: dict[str, Array],
    count: int,
    ranks: int,
    shift: int = 1,
) -> Int[Array, "B T k R"]:
    tokens, positions = jnp.asarray(batch.tokens), jnp.asarray(batch.positions)
    mask = segment_mask(jnp.asarray(batch.segments))
    outputs = unroll(network, target, network.fuse(features), tokens, positions, mask, count, shift=shift)
    found = jnp.stack([top(network.logits(output, target), ranks) for output in outputs], axis=2)
    return found if network.target_ids is None else network.target_ids[found]
