"""Whether a greedy text is the one that plain decoding gives; and where not, whether by a near-tie or by a fault."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax import Sampling, Target
from specjax.models.interface import TargetModel
from specjax.sampling import Rules, Text, process

# A block of another size rounds differently. In float32 two logits this close may trade places; in the short formats
# the noise grows with the logits, so there the limit is so many units in the last place of the largest one.
FLOAT32_LIMIT = 1e-4
SHORT_LIMIT_ULP = 2  # the most seen on the default target in bfloat16 was 0.4
PAD = 128  # texts are padded to whole multiples, so that few programs are compiled


@dataclass(frozen=True)
class Fork:
    """The first place where a greedy text leaves plain decoding's.

    Attributes:
        position: index among the new tokens.
        plain_token, token: the two tokens; None where a text had ended.
        gap: between their logits, when the target reads the text up to there in one pass.
        worst_gap: the most that any token of the whole text lies below the target's best there, read in one pass.
        limit: a larger gap than this is a fault.
    """

    position: int
    plain_token: int | None
    token: int | None
    gap: float | None
    worst_gap: float
    limit: float

    @property
    def near_tie(self) -> bool:
        return self.gap is not None and max(self.gap, self.worst_gap) <= self.limit

    def __str__(self) -> str:
        return self.describe("FAULT")

    def describe(self, otherwise: str) -> str:
        """One line, that calls what is no near-tie by the name of `otherwise`."""
        gap = "one text ends here" if self.gap is None else f"logits {self.gap:.2g} apart"
        return (
            f"{'near-tie' if self.near_tie else otherwise} at new token {self.position + 1}: {self.token} instead of "
            f"{self.plain_token}, {gap}; no token of the text is more than {self.worst_gap:.2g} below the best "
            f"(near-tie: up to {self.limit:.2g})"
        )


def examine(
    target: Target, sampling: Sampling, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> Fork | None:
    """Compare a greedy text with plain decoding's, token for token; None if they are the same."""
    if list(plain) == list(other):
        return None
    common = min(len(plain), len(other))
    position = next((i for i in range(common) if plain[i] != other[i]), common)
    below, largest = gaps(target, sampling, prompt, other)
    gap = None
    if position < common:
        gap = float(abs(below[position] - gaps(target, sampling, prompt, plain)[0][position]))
    return Fork(
        position=position,
        plain_token=plain[position] if position < len(plain) else None,
        token=other[position] if position < len(other) else None,
        gap=gap,
        worst_gap=float(below.max(initial=0.0)),
        limit=near_tie_limit(target.dtype, largest),
    )


def near_tie_limit(dtype: str, largest_logit: float) -> float:
    """The largest gap that rounding explains."""
    if dtype == "float32":
        return FLOAT32_LIMIT
    return SHORT_LIMIT_ULP * float(jnp.finfo(dtype).eps) * largest_logit


def gaps(
    target: Target, sampling: Sampling, prompt: Sequence[int], tokens: Sequence[int]
) -> tuple[Float[np.ndarray, "N"], float]:
    """How far each token's logit lies below the best one there, and the largest logit in size.

    The target reads the whole text in one pass, without a cache.
    """
    size = -(-(len(prompt) + len(tokens)) // PAD) * PAD
    text = np.zeros(size, np.int32)
    text[: len(prompt) + len(tokens)] = [*prompt, *tokens]
    count = -(-len(tokens) // PAD) * PAD
    places = np.minimum(len(prompt) + np.arange(count), size - 1)  # where the new tokens stand
    below, largest = _gaps(target.model, sampling.rules(count), text, places, len(prompt))
    return np.asarray(below)[: len(tokens)], float(np.asarray(largest)[: len(tokens)].max(initial=0.0))


@jax.jit
def _gaps(
    model: TargetModel, rules: Rules, text: Int[Array, "S"], places: Int[Array, "N"], prompt_length: Int[Array, ""]
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    size, count = text.shape[0], places.shape[0]
    hidden = model(text[None], jnp.arange(size)[None], jnp.tril(jnp.ones((1, size, size), bool))).hidden
    raw = model.logits(hidden[:, places - 1])[0]
    texts = Text(jnp.broadcast_to(text, (count, size)), places, jnp.full(count, prompt_length))
    logits = process(raw, rules, texts)
    chosen = jnp.take_along_axis(logits, text[places][:, None], axis=1)[:, 0]
    return logits.max(-1) - chosen, jnp.abs(raw).max(-1)
