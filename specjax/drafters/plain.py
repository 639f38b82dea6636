"""Plain decoding: the drafter that proposes nothing."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.state import Context, Round
from specjax.trees import Draft


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plain:
    """Proposes nothing, so every round is one plain step of the target: one token a call at any batch size."""

    name: ClassVar[str] = "plain"
    num_nodes: ClassVar[int] = 0
    max_depth: ClassVar[int] = 0
    features: ClassVar[tuple[str, ...]] = ()
    wants_logits: ClassVar[bool] = False
    block_sizes: ClassVar[None] = None

    def init(self, context: Context, features: dict[str, Any], longest: int) -> None:
        return None

    def propose(self, memory: None, context: Context) -> tuple[Draft, None]:
        nothing = jnp.zeros((context.length.shape[0], 0), jnp.int32)
        return Draft(nothing, nothing, nothing.astype(bool)), None

    def update(self, memory: None, round: Round, context: Context) -> None:
        return None
