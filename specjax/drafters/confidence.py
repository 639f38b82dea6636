"""How sure a drafter is of its next token, and where it had better stop.

A token that the drafter itself finds unlikely is likely rejected, and all behind it with it. A chain that ends before
such a token costs fewer draft steps and fits a smaller block. What is asked here, for each token by itself, is the
drafter's greatest probability, as in BiLD (Kim et al. 2023: the small model hands over where it is below a threshold)
and Kangaroo (Liu et al. 2024: drafting stops there). The product down a path is what EAGLE-2 orders trees by
(`growing`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.errors import InputError


def confidence(values: Float[Array, "*B C"]) -> Float[Array, "*B"]:
    """The probability of the most likely next token, by the drafter's raw scores, whatever will be drawn from them.

    It belongs to a place in the text and not to the token that is proposed there, so it may decide whether one is: a
    threshold on the probability of a *drawn* token would have to keep that token and stop behind it, or the tokens left
    would no longer follow the law they are judged by. At temperature 0 the two are the same. Temperature, penalties and
    filters are left out: they sharpen the law, and say nothing of what the target will do.

    Args:
        values: scores of the C tokens that can be drafted. A law that is none (NaN) gives 0.
    """
    sure = jnp.exp(values.max(-1) - jax.nn.logsumexp(values, axis=-1))
    return jnp.where(jnp.isnan(sure), 0.0, sure)


def check_confidence(value: Any) -> None:
    """Raise InputError for a threshold that is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise InputError(f"min_confidence: expected a probability, 0 (off) or more and below 1; got {value!r}")
