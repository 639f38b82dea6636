"""Speculation that adapts: any drafter, with the number of nodes that are verified chosen round by round, or none.

    drafter = specjax.PromptLookup(num_draft_tokens=16)
    adaptive = specjax.Adaptive(drafter, specjax.measure_costs(target, drafter, batch_size=4))

A larger block brings more tokens and costs more time. How much more is measured once (`costs.Costs`); how many tokens
it brings is estimated from what has been accepted so far, in each row for itself. Of the block sizes that are compiled
into the loop (`ladder.ladder`) the one with the most expected tokens per second is taken, for all rows together: they
share the pass.

What is verified is decided by earlier rounds and by which nodes there are, never by a token drawn in this round, so the
law of the text stays the target's (docs/design.md, "When a drawn node stays lossless"). The sample does not: draws
depend on block sizes.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.costs import Costs
from specjax.drafters.check import check_drafter
from specjax.errors import InputError
from specjax.models.target import Target
from specjax.state import Context, Drafter, Round, static
from specjax.trees import Draft, ancestors

RANKS = 8  # siblings told apart; later ones count as the last


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """What the controller remembers, beside the drafter's own memory.

    Attributes:
        inner: the drafter's memory.
        offered, accepted: nodes of each sibling rank whose parent was accepted, and those of them that were accepted,
            per row; both fade.
        idle: rounds since something was last verified.
        patience: rounds to wait until something is verified again, to see whether things have changed.
    """

    inner: Any
    offered: Float[Array, "B R"]
    accepted: Float[Array, "B R"]
    idle: Int[Array, ""]
    patience: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adaptive:
    """A drafter whose drafts are cut where they stop to pay.

    Attributes:
        drafter: whose drafts they are.
        costs: what a round costs by the number of nodes, for this drafter's block sizes (`timing.measure_costs`).
        prior: the chance that a first sibling is accepted, before anything has been seen; it counts as `weight` nodes.
        weight: see `prior`.
        memory: how much of the counts is left after a round that tested something.
        patience: rounds without any draft until one is tried; twice as long each time that it does not pay, up to
            `most_patience`.
    """

    drafter: Drafter
    costs: Costs
    prior: float = static(default=0.5)
    weight: float = static(default=2.0)
    memory: float = static(default=0.95)
    patience: int = static(default=8)
    most_patience: int = static(default=128)

    def __post_init__(self) -> None:
        if not 0 < self.prior < 1 or not self.weight > 0 or not 0 < self.memory <= 1:
            raise InputError(
                f"Adaptive: expected prior between 0 and 1, weight above 0, memory above 0 and at most 1; got "
                f"{self.prior}, {self.weight}, {self.memory}"
            )
        if not 1 <= self.patience <= self.most_patience:
            raise InputError(
                f"Adaptive: expected 1 <= patience <= most_patience, got {self.patience} and {self.most_patience}"
            )
        if isinstance(self.costs, Costs):
            self.costs.check(self.drafter)

    def check(self, target: Target) -> None:
        check_drafter(self.drafter, target)

    @property
    def name(self) -> str:
        return f"adaptive-{self.drafter.name}"

    @property
    def num_nodes(self) -> int:
        return self.drafter.num_nodes

    @property
    def max_depth(self) -> int:
        return self.drafter.max_depth

    @property
    def features(self) -> tuple[str, ...]:
        return self.drafter.features

    @property
    def wants_logits(self) -> bool:
        return self.drafter.wants_logits

    @property
    def block_sizes(self) -> tuple[int, ...] | None:
        return self.drafter.block_sizes

    def init(self, context: Context, features: dict[str, Array], longest: int) -> Memory:
        counts = jnp.zeros((context.length.shape[0], RANKS), jnp.float32)
        return Memory(
            self.drafter.init(context, features, longest), counts, counts, jnp.int32(0), jnp.int32(self.patience)
        )

    def propose(self, memory: Memory, context: Context) -> tuple[Draft, Memory]:
        """The drafter's draft, cut; nothing is drafted where the best draft would not pay for itself."""
        curious = memory.idle >= memory.patience
        shape = jax.eval_shape(self.drafter.propose, memory.inner, context)[0]

        def drafts() -> tuple[Draft, Any]:
            return self.drafter.propose(memory.inner, context)

        def rests() -> tuple[Draft, Any]:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape), memory.inner

        draft, inner = jax.lax.cond(curious | self._worth(memory, context), drafts, rests)
        chosen = self._choose(memory, draft, context, curious)
        keep = jnp.arange(self.num_nodes) < chosen
        return replace(draft, valid=draft.valid & keep), replace(memory, inner=inner)

    def update(self, memory: Memory, round: Round, context: Context) -> Memory:
        """Count what was tested; the drafter's own update sees the round as it was."""
        inner = self.drafter.update(memory.inner, round, context)
        draft, batch = round.draft, round.count.shape[0]
        # behind a stop there is neither an accepted node nor a bonus token: the row has ended, and no one asks again
        real = jnp.arange(round.nodes.shape[1]) < round.count[:, None]
        on_path = jax.vmap(lambda row, nodes, ok: row.at[nodes].max(ok))(
            jnp.zeros((batch, 1 + self.num_nodes), bool), round.nodes, real
        )
        offered = draft.valid & jax.vmap(lambda row, parents: row[parents + 1])(on_path, draft.parents)
        ranks = jax.nn.one_hot(_ranks(draft), RANKS)
        more_offered = (ranks * offered[..., None]).sum(1)
        more_accepted = (ranks * (offered & on_path[:, 1:])[..., None]).sum(1)
        fade = jnp.where(offered.any(-1), self.memory, 1.0)[:, None]
        drafted, paid = draft.valid.any(), more_accepted.sum() > 0
        curious = drafted & (memory.idle >= memory.patience)
        longer = jnp.where(curious, jnp.minimum(2 * memory.patience, self.most_patience), memory.patience)
        return Memory(
            inner,
            memory.offered * fade + more_offered,
            memory.accepted * fade + more_accepted,
            jnp.where(drafted, 0, memory.idle + 1),
            jnp.where(drafted & paid, self.patience, longer),
        )

    def _chances(self, memory: Memory) -> Float[Array, "B R"]:
        """That a node is accepted where its parent is, by its rank among its siblings."""
        # what is left after the siblings before it is taken to be as hard as all of it was
        prior = self.prior * (1 - self.prior) ** jnp.arange(RANKS)
        return (memory.accepted + self.weight * prior) / (memory.offered + self.weight)

    def _worth(self, memory: Memory, context: Context) -> Bool[Array, ""]:
        """Whether any draft could pay for itself, drafting included; a chain stands for it, since nothing is drafted
        yet.
        """
        known = (memory.offered > 0).at[:, 0].set(True)  # a drafter of chains has no second siblings
        chance = jnp.minimum(jnp.where(known, self._chances(memory), 0.0).sum(-1), 1.0)
        running = context.running.astype(jnp.float32)
        best = jnp.float32(0.0)
        for at, nodes in enumerate(self.costs.nodes[1:], start=1):
            depth = jnp.arange(1, min(nodes, self.max_depth) + 1)
            tokens = (running * (1 + (chance[:, None] ** depth).sum(-1))).sum()
            best = jnp.maximum(best, tokens / (self.costs.draft + self.costs.verify[at]))
        free = self.costs.draft < 0.01 * self.costs.verify[0]
        return free | (best > running.sum() / self.costs.verify[0])

    def _choose(self, memory: Memory, draft: Draft, context: Context, curious: Bool[Array, ""]) -> Int[Array, ""]:
        """The number of nodes with the most expected tokens per second; the draft itself is paid already.

        Args:
            curious: at least the smallest block is taken.
        """
        chances = jnp.take_along_axis(self._chances(memory), _ranks(draft), axis=1)
        reach = jnp.where(draft.valid & context.running[:, None], _along_paths(draft, chances), 0.0)
        tokens = context.running.sum() + jnp.cumsum(reach.sum(0))
        sizes = jnp.array(self.costs.nodes)
        expected = jnp.where(sizes > 0, tokens[jnp.maximum(sizes, 1) - 1], context.running.sum())
        rates = expected / (self.costs.draft + self.costs.verify)
        rates = jnp.where(curious & (sizes == 0), 0.0, rates)
        return sizes[jnp.argmax(rates)]


def _ranks(draft: Draft) -> Int[Array, "B N"]:
    """How many siblings each node has before it, `RANKS - 1` at most."""
    same = (draft.parents[:, :, None] == draft.parents[:, None, :]) & draft.valid[:, None, :]
    before = jnp.tril(jnp.ones((draft.parents.shape[1],) * 2, bool), -1)
    return jnp.minimum((same & before).sum(-1), RANKS - 1)


def _along_paths(draft: Draft, chances: Float[Array, "B N"]) -> Float[Array, "B N"]:
    """The product of the chances of each node and its ancestors."""
    logs = jnp.log(jnp.maximum(chances, 1e-9))
    return jnp.exp(jnp.einsum("bna,ba->bn", ancestors(draft.parents).astype(jnp.float32), logs))
