"""How a draft compares with the target over given text: cross-entropy, and the figures that training logs."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.sampling import argmax
from specjax.training.supervised import Supervised


def draft_places(tokens: Int[Array, "B C"], ids: Int[Array, "Vd"] | None, vocab_size: int) -> Int[Array, "B C"]:
    """The draft id of each of the target's tokens; -1 for those that cannot be drafted."""
    if ids is None:
        return tokens
    return jnp.full(vocab_size, -1, jnp.int32).at[ids].set(jnp.arange(len(ids), dtype=jnp.int32))[tokens]


def cross_entropy(logits: Float[Array, "B C Vd"], law: Float[Array, "B C Vd"]) -> Float[Array, "B C"]:
    """-Σ_x p(x) log q(x), q the softmax of `logits`; p sums to 1."""
    return jax.nn.logsumexp(logits, axis=-1) - (law * logits).sum(-1)


def top(logits: Float[Array, "*B Vd"], ranks: int) -> Int[Array, "*B R"]:
    """The `ranks` most likely tokens, best first."""
    return argmax(logits)[..., None] if ranks == 1 else jax.lax.top_k(logits, ranks)[1]


@dataclass
class Agreement:
    """Whether each guess was the text's token, step by step, from every place that guesses.

    Figures, for the i-th guess (from 1):
        accuracy.i: right, of all supervised tokens it was made for (marginal).
        acceptance.i: right where the guesses 1 … i - 1 from the same place were right (conditional): what a greedy
            chain over the target's own greedy text has at position i.
        tokens_per_call: 1 and the guesses that were right in a row, on average over all places that guess. Decoding
            does not start from all places alike, see `acceptance.teacher_forced` for the walk that it takes.
    """

    shape: tuple[int, int]
    sums: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    reached: Any = True

    def add(self, step: int, rows: Supervised, right: Bool[Array, "B C"]) -> None:
        """The guesses of one step, at the places that made them."""
        made, hit = (self._scatter(rows, values) for values in (rows.valid, right & rows.valid))
        reached = made & self.reached
        accepted = hit & reached
        self.sums[f"accuracy.{step + 1}"] = _share(hit, made)
        self.sums[f"acceptance.{step + 1}"] = _share(accepted, reached)
        if step == 0:
            self.sums["tokens_per_call"] = _share(made, made)
        total, places = self.sums["tokens_per_call"]
        self.sums["tokens_per_call"] = (total + accepted.sum().astype(jnp.float32), places)
        self.reached = accepted

    def _scatter(self, rows: Supervised, values: Bool[Array, "B C"]) -> Bool[Array, "B T"]:
        blank = jnp.zeros(self.shape, bool)
        return jax.vmap(lambda row, index, value: row.at[index].max(value))(blank, rows.index, values)


def _share(part: Bool[Array, "B T"], whole: Bool[Array, "B T"]) -> tuple[Array, Array]:
    return part.sum().astype(jnp.float32), whole.sum().astype(jnp.float32)
