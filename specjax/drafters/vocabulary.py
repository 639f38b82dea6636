"""Draft vocabularies: a drafter may know fewer tokens than its target, under ids of its own.

Draft id i stands for the target's id `i + d2t[i]`; everything outside has probability 0 in the drafter's law. Scores
stay over the draft vocabulary as long as they can: that is what makes a small head cheap.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from specjax.errors import InputError
from specjax.models.decoder import Decoder
from specjax.models.interface import TargetModel
from specjax.sampling import Rules


class Buffer(nnx.Variable):
    """What belongs to a network and is not trained."""


class DraftVocabulary:
    """A network with a draft vocabulary: mixed into an `nnx.Module`."""

    d2t: Buffer
    whole: bool
    vocab_sizes: tuple[int, int]

    def set_vocabulary(self, d2t: Any, draft_vocab_size: int, vocab_size: int) -> None:
        """Raises InputError where the offsets do not fit, or are missing where they are needed."""
        d2t = checked_d2t(d2t, draft_vocab_size, vocab_size)
        self.d2t = Buffer(jnp.asarray(d2t, jnp.int32))
        self.whole = draft_vocab_size == vocab_size and not d2t.any()
        self.vocab_sizes = (draft_vocab_size, vocab_size)

    @property
    def target_ids(self) -> Int[Array, "Vd"] | None:
        """The target's id of each draft id; None where they are the same."""
        return None if self.whole else self._ids()

    @property
    def t2d(self) -> Bool[Array, "V"]:
        """Which of the target's tokens can be drafted."""
        return jnp.zeros(self.vocab_sizes[1], bool).at[self._ids()].set(True)

    def _ids(self) -> Int[Array, "Vd"]:
        return jnp.arange(self.vocab_sizes[0]) + self.d2t[...]


def offsets(tokens: Any) -> Int[np.ndarray, "Vd"]:
    """`d2t` of a draft vocabulary: the target's ids, ascending, minus their places 0, 1, 2 and so on."""
    ids = np.sort(np.asarray(tokens, np.int64))
    return ids - np.arange(len(ids))


def checked_d2t(d2t: Any, draft_vocab_size: int, vocab_size: int) -> Int[np.ndarray, "Vd"]:
    """Raises InputError unless `d2t` maps a draft vocabulary of that size one to one into the target's."""
    if d2t is None:
        if draft_vocab_size != vocab_size:
            raise InputError(
                f"d2t is missing: a draft vocabulary of {draft_vocab_size} tokens out of {vocab_size} needs the "
                "mapping it was trained with"
            )
        d2t = np.zeros(vocab_size, np.int64)
    d2t = np.asarray(d2t, np.int64)
    if d2t.shape != (draft_vocab_size,):
        raise InputError(f"d2t: expected {draft_vocab_size} offsets, one a draft token, got shape {d2t.shape}")
    ids = d2t + np.arange(draft_vocab_size)
    if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) != len(ids):
        raise InputError(
            f"d2t: offsets must send the draft ids to different ids below {vocab_size} (target id = draft id + offset)"
        )
    return d2t


def logits_of(target: TargetModel, hidden: Float[Array, "B T M"], ids: Int[Array, "Vd"] | None) -> Array:
    """The target's scores of the tokens `ids` (None: of all), float32 `[B, T, Vd]`, for its hidden states."""
    if ids is None:
        return target.logits(hidden)
    if isinstance(target, Decoder):  # only the rows of the head that are wanted
        return target.logits(hidden, ids)
    return target.logits(hidden)[..., ids]


def head_of(target: TargetModel, ids: Int[Array, "Vd"] | None = None) -> Float[Array, "Vd M"]:
    """The target's head as a matrix: its rows of the tokens `ids`, or all of them.

    Raises:
        InputError: a target that is no `Decoder`: whether its scores are a product with a matrix is not known.
    """
    if not isinstance(target, Decoder):
        raise InputError(f"the head of the target is wanted as a matrix, and a {type(target).__name__} has none")
    return target.head_rows(ids)


@dataclass(frozen=True)
class Scores:
    """Logits of what can follow a node: raw, or processed as the target's are.

    Attributes:
        values: over the C tokens that can be drafted; -inf where a token is not allowed.
        ids: the target's id of each, None where they are the same.
        vocab_size: V.
    """

    values: Float[Array, "*B C"]
    ids: Int[Array, "C"] | None
    vocab_size: int

    def readable(self, rules: Rules) -> "Scores":
        """Over the target's ids, where penalties or processors will read them: they know no others."""
        if self.ids is None or not rules.reads_text:
            return self
        return replace(self, values=self.spread(self.values, -jnp.inf), ids=None)

    def tokens(self, index: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """The target's ids."""
        return index if self.ids is None else self.ids[index]

    def spread(self, values: Float[Array, "*B C"], rest: float) -> Float[Array, "*B V"]:
        """Values over the target's vocabulary, `rest` where nothing can be drafted."""
        if self.ids is None:
            return values
        return jnp.full((*values.shape[:-1], self.vocab_size), rest, values.dtype).at[..., self.ids].set(values)
