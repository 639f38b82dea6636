"""What is minimised: an objective turns a network, a batch and the target's features into a loss."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from specjax.models.interface import TargetModel
from specjax.models.target import Target
from specjax.state import Drafter
from specjax.training.batches import Batch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Losses:
    """Sums, so that micro-batches and devices with different numbers of supervised tokens add up to one batch.

    Attributes:
        total: summed over supervised tokens. The gradient that is applied is that of `total / count`, with both summed
            over the whole accumulated batch and all devices first: the loop divides once, at the end.
        count: of the supervised tokens, float32. 0 comes with total 0 and zero gradients.
        figures: name -> (sum, count), for the log: "accuracy.1", "loss.feature", …
    """

    total: Float[Array, ""]
    count: Float[Array, ""]
    figures: dict[str, tuple[Array, Array]] = field(default_factory=dict)

    def __add__(self, other: "Losses") -> "Losses":
        return jax.tree.map(jnp.add, self, other)


class Objective(Protocol):
    """A frozen dataclass of settings that do not change: hashable, and static in the compiled step."""

    @property
    def name(self) -> str: ...

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the target's features that the loss reads; "hidden" gives its logits too."""
        ...

    @property
    def rates(self) -> Mapping[str, float]:
        """Learning rates over the run's, by how parameters' names begin; {} where all are the same."""
        ...

    def losses(
        self,
        network: nnx.Module,
        target: TargetModel,
        batch: Batch,
        features: dict[str, Float[Array, "B T M"]],
        key: Array,
    ) -> Losses:
        """A pure function, differentiable in the network's `nnx.Param` leaves.

        Args:
            network: its parameters in the dtype of the computation; the masters are float32.
            target: frozen.
            batch: one micro-batch.
            features: of the target over the batch's tokens.
            key: of this micro-batch alone, for losses that draw.
        """
        ...

    def decoding(self, network: nnx.Module, target: Target) -> tuple[Drafter, Target]:
        """What decodes with the current weights, and the target that it decodes for: another one than was given only
        where training changes the target too (Medusa-2).
        """
        ...
