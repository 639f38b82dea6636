"""The positions whose predictions are trained: only they go through a head, and their targets come with them."""

from dataclasses import dataclass, replace
from itertools import pairwise

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from specjax.errors import InputError
from specjax.training.batches import Batch, Rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Supervised:
    """Positions t of each row whose token t + shift is supervised and of the same conversation, C a row at most.

    The mask belongs to the tokens, so it moves with them: the prediction made at t counts where `mask[t + shift]`. The
    tokens in between are of the same conversation too, because a conversation's tokens lie next to each other.

    Attributes:
        index: the positions t, ascending; 0 where there are no more.
        valid: False there.
        labels: the tokens at `t + shift`; 0 there.
        missed: such positions that C had no room for, in all rows. `room` gives a C that holds all of them.
    """

    index: Int[Array, "B C"]
    valid: Bool[Array, "B C"]
    labels: Int[Array, "B C"]
    missed: Int[Array, ""]

    @classmethod
    def of(cls, batch: Batch, shift: int = 1, capacity: int | None = None) -> "Supervised":
        """Of a batch.

        Args:
            shift: how far ahead the prediction is: 1 for a language model's next token.
            capacity: C; None for every position of a row, whether supervised or not.

        Raises:
            InputError: a shift or capacity below 1.
        """
        if shift < 1 or (capacity is not None and capacity < 1):
            raise InputError(f"supervised positions: expected shift and capacity of 1 or more, got {shift}, {capacity}")
        tokens, mask, segments = (jnp.asarray(x) for x in (batch.tokens, batch.mask, batch.segments))
        size = tokens.shape[1]
        ahead = [jnp.pad(x[:, shift:], ((0, 0), (0, min(shift, size)))) for x in (tokens, mask, segments)]
        real = ahead[1] & (ahead[2] == segments) & (segments > 0)
        if capacity is None or capacity >= size:
            index = jnp.broadcast_to(jnp.arange(size), tokens.shape)
            return cls(index, real, jnp.where(real, ahead[0], 0), jnp.int32(0))
        index = jax.vmap(lambda row: jnp.nonzero(row, size=capacity, fill_value=0)[0])(real)
        number = real.sum(-1)
        valid = jnp.arange(capacity) < number[:, None]
        labels = jnp.where(valid, jnp.take_along_axis(ahead[0], index, axis=1), 0)
        return cls(index, valid, labels, jnp.maximum(number - capacity, 0).sum())

    @property
    def count(self) -> Int[Array, ""]:
        return self.valid.sum()

    def behind(self, by: int, segments: Int[Array, "B T"]) -> "Supervised":
        """The same labels in the same places, predicted from `by` positions further back in the conversation.

        Where the conversation does not reach back so far, nothing predicts, and `valid` is False.
        """
        index = self.index - by
        same = self.at(jnp.asarray(segments)) == jax.vmap(lambda row, i: row[i])(segments, jnp.maximum(index, 0))
        valid = self.valid & (index >= 0) & same
        return replace(self, index=jnp.where(valid, index, 0), valid=valid, labels=jnp.where(valid, self.labels, 0))

    def places(self, size: int) -> Int[Array, "B T"]:
        """Where each position of a row of `size` is in `index`; -1 for those that are not."""
        blank = jnp.full((self.index.shape[0], size), -1, jnp.int32)
        index = jnp.where(self.valid, self.index, size)  # past the end: dropped
        return jax.vmap(lambda row, i: row.at[i].set(jnp.arange(len(i), dtype=jnp.int32), mode="drop"))(blank, index)

    def at(self, values: Shaped[Array, "B T *R"], ahead: int = 0) -> Shaped[Array, "B C *R"]:
        """Values of a row's positions at the supervised ones, or so many positions after them (within the row)."""
        places = jnp.minimum(self.index + ahead, values.shape[1] - 1)
        return jax.vmap(lambda row, index: row[index])(values, places)


def room(rows: Rows, multiple: int = 8) -> int:
    """Supervised tokens of the row that has the most, rounded up: a capacity that misses none, whatever the shift."""
    counts = [int(rows.mask[start:end].sum()) for start, end in pairwise(rows.starts)]
    most = max(sum(counts[member] for member in members) for members in rows.members)
    return -(-most // multiple) * multiple
