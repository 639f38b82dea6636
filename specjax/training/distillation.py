"""What a draft model is trained for: to say what its target would say."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.draft_model import DraftModel, scores_of
from specjax.drafters.small_decoder import SmallDecoder
from specjax.drafters.vocabulary import Scores, head_of
from specjax.errors import InputError, check_whole
from specjax.models.decoder import Decoder
from specjax.models.interface import TargetModel
from specjax.models.target import Target
from specjax.sampling import argmax
from specjax.state import Drafter
from specjax.training.agreement import Agreement, draft_places, top
from specjax.training.batches import Batch
from specjax.training.features import segment_mask
from specjax.training.objective import Losses
from specjax.training.parts import places_of_part, scores, sum_in_parts
from specjax.training.supervised import Supervised

DIVERGENCES = ("forward-kl", "reverse-kl", "tvd", "labels")


@dataclass(frozen=True)
class Distillation:
    """Distillation of a draft model over given text (Hinton et al. 2015), which should be the target's own
    (DistillSpec, Zhou et al. 2024, section 3).

        loss = Σ_u D(u) / number of supervised tokens u

    q is the draft model's law of token u given the text before it, p the target's; both are over the draft vocabulary
    and sum to 1 there. m is the share that the target gives to the draft vocabulary. D(u) is

        forward-kl   m Σ_x p(x) log(p(x) / q(x)), whose gradient is that of cross-entropy on m p
        reverse-kl   m Σ_x q(x) log(q(x) / p(x))
        tvd          1 - Σ_x min(m p(x), q(x)): the chance that rejection sampling rejects a token drawn from q
        labels       -log q(u), 0 where u cannot be drafted

    What the target gives to other tokens cannot be won, so a place counts for its m. By default m is taken to be 1
    where u can be drafted and 0 where it cannot: over text drawn from the target that is right on average, and it
    spares the target's head over all other tokens.

    Figures, each an average over the supervised tokens: those of `Agreement`, where the i-th guess of a place is the
    one that follows the true text, as it does in decoding if the guesses before it were right; and

        kl          forward-kl
        overlap     Σ_x min(m p(x), q(x)): the share of drawn tokens that is accepted
        agreement   whether the target's most likely token is the draft model's (by default: of those that can be
                    drafted, where u can)

    Attributes:
        divergence: one of `DIVERGENCES`.
        exact: compute m, and take the target's most likely token of all. Without a draft vocabulary nothing changes.
        capacity: most supervised tokens of a row (`supervised.room`); None runs the heads over every position.
        num_draft_tokens: of the drafter that is measured.
    """

    divergence: str = "forward-kl"
    exact: bool = False
    capacity: int | None = None
    num_draft_tokens: int = 4

    name: ClassVar[str] = "draft-model"
    features: ClassVar[tuple[str, ...]] = ("hidden",)
    rates: ClassVar[Mapping[str, float]] = MappingProxyType({})

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise InputError(f"divergence {self.divergence!r}: expected one of {', '.join(DIVERGENCES)}")
        check_whole("num_draft_tokens", self.num_draft_tokens, 1)

    def losses(
        self,
        network: SmallDecoder | Decoder,
        target: TargetModel,
        batch: Batch,
        features: dict[str, Float[Array, "B T M"]],
        key: Array,
    ) -> Losses:
        rows = Supervised.of(batch, 1, self.capacity)
        ids = network.target_ids if isinstance(network, SmallDecoder) else None
        wanted = draft_places(rows.labels, ids, target.vocab_size)
        learned, given = _heads(network, target)
        true_head = head_of(target, None if self.exact else ids)

        def loss(learned: Any, shared: Any, hidden: Array, fixed: Any) -> tuple[Array, dict[str, Array]]:
            given, true_head = shared
            true, wanted, valid = fixed
            law = _target_law(scores(true, true_head), ids if self.exact else None, wanted)
            values = scores(hidden, learned if given is None else given)
            log_q = jax.nn.log_softmax(values)
            total = jnp.where(valid, _divergence(self.divergence, law, log_q, wanted), 0.0).sum()
            best = argmax(values)
            found = {
                "kl": _divergence("forward-kl", law, log_q, wanted),
                "overlap": 1 - _divergence("tvd", law, log_q, wanted),
                "agreement": best == law.best,
                "right": best == wanted,
            }
            return total, found

        fixed = rows.at(features["hidden"]), wanted, rows.valid
        places = places_of_part(wanted.shape, len(true_head))
        hidden = rows.at(_hidden(network, target, batch))
        total, found = sum_in_parts(loss, learned, (given, true_head), hidden, fixed, places)

        count = rows.count.astype(jnp.float32)
        right = found.pop("right")
        figures = {name: (jnp.where(rows.valid, x, 0).sum().astype(jnp.float32), count) for name, x in found.items()}
        agreement = Agreement(batch.tokens.shape)
        for step in range(self.num_draft_tokens):
            agreement.add(step, rows.behind(step, jnp.asarray(batch.segments)), right)
        missed = {"missed": (rows.missed.astype(jnp.float32), jnp.float32(1))}
        return Losses(total, count, agreement.sums | figures | missed)

    def ranked(
        self,
        network: SmallDecoder | Decoder,
        target: TargetModel,
        batch: Batch,
        features: dict[str, Array],
        count: int,
        ranks: int,
    ) -> Int[Array, "B T k R"]:
        """See `acceptance.Guesser`."""
        found = _scores(network, target, batch)
        best = found.tokens(top(found.values, ranks))
        places = jnp.arange(best.shape[1])[:, None] + 1 + jnp.arange(count)
        return best[:, jnp.minimum(places, best.shape[1] - 1)]

    @property
    def chain_length(self) -> int:
        """Draft tokens of the drafter that is measured."""
        return self.num_draft_tokens

    def decoding(self, network: SmallDecoder | Decoder, target: Target) -> tuple[Drafter, Target]:
        return DraftModel(network, self.num_draft_tokens), target


def _hidden(network: SmallDecoder | Decoder, target: TargetModel, batch: Batch) -> Float[Array, "B T M"]:
    model = DraftModel(network).over(target)
    tokens, positions = jnp.asarray(batch.tokens), jnp.asarray(batch.positions)
    return model(tokens, positions, segment_mask(jnp.asarray(batch.segments))).hidden


def _scores(network: SmallDecoder | Decoder, target: TargetModel, batch: Batch) -> Scores:
    """The draft model's scores `[B, T, Vd]` of what follows each position."""
    return scores_of(DraftModel(network).over(target), _hidden(network, target, batch), target.vocab_size)


def _heads(network: SmallDecoder | Decoder, target: TargetModel) -> tuple[Any, Any]:
    """The draft model's head: what is learned of it, or the target's, which is given."""
    if isinstance(network, Decoder):
        return head_of(network), None
    if network.config.draft_vocab_size is None:
        return (), head_of(target).astype(network.dtype)
    return network.head[...], None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Law:
    """What the target says of the next token.

    Attributes:
        log_p: log-probabilities within the draft vocabulary, where they sum to 1.
        share: m, of the draft vocabulary.
        best: draft id of the most likely token; -1 for one that cannot be drafted.
    """

    log_p: Float[Array, "B C Vd"]
    share: Float[Array, "B C"]
    best: Int[Array, "B C"]


def _target_law(scores: Float[Array, "B C V"], ids: Int[Array, "Vd"] | None, wanted: Int[Array, "B C"]) -> _Law:
    """What the target says of the supervised tokens.

    Args:
        scores: of the draft vocabulary; with `ids`, of all tokens, so that its share is known.
        ids: of the draft vocabulary.
        wanted: draft ids of the supervised tokens; -1 for those that cannot be drafted.
    """
    if ids is None:
        can = wanted >= 0
        return _Law(jax.nn.log_softmax(scores), can.astype(jnp.float32), jnp.where(can, argmax(scores), -1))
    inside = scores[..., ids]
    top, total = jax.nn.logsumexp(inside, axis=-1), jax.nn.logsumexp(scores, axis=-1)
    best = jnp.where(inside.max(-1) == scores.max(-1), argmax(inside), -1)
    return _Law(inside - top[..., None], jnp.exp(top - total), best)


def _divergence(name: str, law: _Law, log_q: Float[Array, "B C Vd"], wanted: Int[Array, "B C"]) -> Float[Array, "B C"]:
    """D of every place, see `Distillation`."""
    log_p, share = law.log_p, law.share
    if name == "forward-kl":
        return share * (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
    if name == "reverse-kl":
        return share * (jnp.exp(log_q) * (log_q - log_p)).sum(-1)
    if name == "tvd":
        return 1 - jnp.minimum(share[..., None] * jnp.exp(log_p), jnp.exp(log_q)).sum(-1)
    chosen = jnp.take_along_axis(log_q, jnp.maximum(wanted, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(wanted >= 0, -chosen, 0.0)
