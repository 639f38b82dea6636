"""A batch as decoding would draft in it: where drafts start, and which guess is of which supervised token."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.eagle_step import pick
from specjax.training.batches import Batch
from specjax.training.supervised import Supervised


@dataclass(frozen=True)
class Drafted:
    """A batch as it is drafted from.

    Attributes:
        starts: the places t whose first guess, the token at t + 2, is supervised: decoding starts no others.
        labels: the places before supervised tokens, for what the target says there, computed once for all steps.
    """

    batch: Batch
    starts: Supervised
    labels: Supervised

    @classmethod
    def of(cls, batch: Batch, capacity: int | None) -> "Drafted":
        return cls(batch, Supervised.of(batch, 2, capacity), Supervised.of(batch, 1, capacity))

    def guessing(self, step: int) -> "Guesses":
        """The guesses of a step of the unroll, each in the place of the label that it is of."""
        segments = jnp.asarray(self.batch.segments)
        rows = self.labels.behind(step + 1, segments)
        places = rows.at(self.starts.places(segments.shape[1]))
        return Guesses(replace(rows, valid=rows.valid & (places >= 0)), jnp.maximum(places, 0))

    @property
    def count(self) -> Float[Array, ""]:
        return self.labels.count.astype(jnp.float32)

    @property
    def figures(self) -> dict[str, tuple[Array, Array]]:
        return {"missed": (self.labels.missed.astype(jnp.float32), jnp.float32(1))}


@dataclass(frozen=True)
class Guesses:
    """What was guessed in one step.

    Attributes:
        rows: the labels with the places t = u - 2 - step that their guesses were made from; valid where one was.
        places: where those are among `Drafted.starts`.
    """

    rows: Supervised
    places: Int[Array, "B C"]

    def of(self, outputs: Float[Array, "B C M"]) -> Float[Array, "B C M"]:
        return pick(outputs, self.places)
