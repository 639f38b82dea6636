"""Medusa-2: heads and target trained together. It changes the target."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from specjax.drafters.medusa import Medusa, MedusaHeads
from specjax.models.decoder import Decoder
from specjax.models.interface import TargetModel
from specjax.models.target import Target
from specjax.state import Drafter
from specjax.training.batches import Batch
from specjax.training.features import segment_mask
from specjax.training.medusa import MedusaObjective
from specjax.training.objective import Losses
from specjax.training.supervised import Supervised
from specjax.trees import StaticTree, chain_tree


class HeadsAndTarget(nnx.Module):
    """What Medusa-2 trains."""

    def __init__(self, heads: MedusaHeads, target: Decoder):
        self.heads = heads
        self.target = target


@dataclass(frozen=True)
class JointMedusaObjective:
    """Medusa-2 (Cai et al. 2024, section 2.2.2).

        loss = ( Σ_u CE(target before u, u) + coefficient · Σ_i decay^(i + 1) Σ_u CE(head i before u, u) ) / number of u

    over supervised tokens u. The first term keeps the target a language model, over text that it wrote itself close to
    the one it was. What decodes afterwards is another model than before: plain decoding and losslessness then refer to
    that one, and it has to be kept beside the heads.

    Attributes:
        coefficient: λ0 (0.2 in the paper).
        heads_rate: the heads' learning rate over the target's (4 in the paper).
        decay, soft, capacity, tree: as in `MedusaObjective`.
    """

    coefficient: float = 0.2
    heads_rate: float = 4.0
    decay: float = 0.8
    soft: bool = False
    capacity: int | None = None
    tree: StaticTree = chain_tree(4)

    name: ClassVar[str] = "medusa-2"
    features: ClassVar[tuple[str, ...]] = ()  # of the frozen target; it is not asked
    chain_length: ClassVar[None] = None  # the held-out texts are the unchanged target's

    @property
    def rates(self) -> dict[str, float]:
        """Learning rates over the run's, by how parameters' names begin."""
        return {"heads.": self.heads_rate}

    def losses(
        self,
        network: HeadsAndTarget,
        target: TargetModel,
        batch: Batch,
        features: dict[str, Float[Array, "B T M"]],
        key: Array,
    ) -> Losses:
        tokens, positions = jnp.asarray(batch.tokens), jnp.asarray(batch.positions)
        hidden = network.target(tokens, positions, segment_mask(jnp.asarray(batch.segments))).hidden
        rows = Supervised.of(batch, 1, self.capacity)
        logits = network.target.logits(rows.at(hidden))
        chosen = jnp.take_along_axis(logits, rows.labels[..., None], axis=-1)[..., 0]
        language = jnp.where(rows.valid, jax.nn.logsumexp(logits, axis=-1) - chosen, 0.0).sum()
        heads = MedusaObjective(self.decay, self.soft, self.capacity, self.tree)
        found = heads.over(network.heads, network.target, batch, hidden, frozen=False)
        figures = {"loss.language": (language, found.count), "loss.heads": (found.total, found.count)}
        return Losses(language + self.coefficient * found.total, found.count, found.figures | figures)

    def decoding(self, network: Any, target: Target) -> tuple[Drafter, Target]:
        return Medusa(network.heads, self.tree), replace(target, model=network.target, files=())
