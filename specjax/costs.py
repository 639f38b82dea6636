"""What a round costs, by the number of draft nodes; `timing.measure_costs` measures it."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.errors import InputError
from specjax.ladder import ladder
from specjax.state import Drafter, static


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Costs:
    """Seconds of a round's parts.

    Attributes:
        verify: of a target pass over each block size: the pending token and so many nodes.
        draft: of one proposal.
        nodes: numbers of draft nodes that blocks are compiled for, 0 first (`ladder`).
    """

    verify: Float[Array, "L"]
    draft: Float[Array, ""]
    nodes: tuple[int, ...] = static()

    @classmethod
    def of(cls, drafter: Drafter, verify: Sequence[float], draft: float = 0.0) -> "Costs":
        """Costs known from elsewhere: of each block size of `ladder(drafter)`, in any unit.

        Raises:
            InputError: numbers that are not above 0, or not one a block size.
        """
        nodes = ladder(drafter)
        if len(verify) != len(nodes):
            raise InputError(f"costs: expected {len(nodes)} numbers, for {nodes} draft nodes; got {len(verify)}")
        if not all(0 < x < float("inf") for x in verify) or not 0 <= draft < float("inf"):
            raise InputError(f"costs: expected seconds above 0, got {list(verify)} and {draft}")
        return cls(jnp.array(verify, jnp.float32), jnp.float32(draft), nodes)

    def check(self, drafter: Drafter) -> None:
        """Raise InputError unless they are of this drafter's block sizes."""
        if self.nodes != (nodes := ladder(drafter)):
            raise InputError(
                f"these costs are of blocks with {self.nodes} draft nodes, and the drafter's have {nodes}; "
                "measure them for this drafter"
            )
