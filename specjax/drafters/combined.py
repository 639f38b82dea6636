"""Several drafters' trees in one draft: a search in the text beside a network, for example.

    drafter = specjax.Combined([specjax.PromptLookup(8), specjax.load_drafter("eagle3", target)])

What the parts agree on is verified once, and where they differ the target decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters.check import check_drafter
from specjax.errors import InputError, check_block_sizes, check_whole
from specjax.models.target import Target
from specjax.state import Context, Drafter, Round, static
from specjax.trees import Draft, Probes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Combined:
    """Asks every part for its draft, in every round, and verifies all of them as one tree; see `merge`.

    Every part sees every round as it was verified, whoever proposed the accepted path, and with every node of the
    merged tree in it. Nothing is lost where parts draw their proposals: each draws with random numbers of its own, so
    the parts know nothing of each other, and the text follows the target's law whatever the parts are.

    Costs: all parts' drafting, and a block of all parts' nodes. `Adaptive` around a combination cuts that; parts that
    adapt by themselves would count the others' nodes too.

    Attributes:
        parts: two drafters or more. Of siblings those of an earlier part are tried first, which makes no difference to
            the text's law.
        total: nodes in a draft at most; None for all. What does not fit is left out from the end: the first part's
            draft is kept first, then what the second one adds, best first where that is how a part lists its nodes.
            Where proposals are drawn nothing may be left out, so parts must be deterministic then (`sample=False`).
        block_sizes: see `Drafter`; None for those that the parts ask for, taken together.
    """

    parts: Sequence[Drafter]
    total: int | None = static(default=None)
    block_sizes: tuple[int, ...] | None = static(default=None)

    name: ClassVar[str] = "combined"

    def __post_init__(self) -> None:
        if isinstance(self.parts, list):
            object.__setattr__(self, "parts", tuple(self.parts))
        if not isinstance(self.parts, tuple) or len(self.parts) < 2:
            raise InputError(f"parts: expected two drafters or more, got {self.parts!r}")
        for part in self.parts:
            if isinstance(part, type) or not callable(getattr(part, "propose", None)):
                raise InputError(f"parts: expected drafters, got {part!r}")
        if self.total is not None:
            check_whole("total", self.total, 1)
        check_block_sizes(self.block_sizes)
        if self.block_sizes is None:
            sizes = {size for part in self.parts for size in getattr(part, "block_sizes", None) or ()}
            object.__setattr__(self, "block_sizes", tuple(sorted(sizes)) or None)

    def check(self, target: Target) -> None:
        for part in self.parts:
            check_drafter(part, target)

    @property
    def num_nodes(self) -> int:
        nodes = sum(part.num_nodes for part in self.parts)
        return nodes if self.total is None else min(nodes, self.total)

    @property
    def max_depth(self) -> int:
        return min(max(part.max_depth for part in self.parts), self.num_nodes)

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for part in self.parts for name in part.features))

    @property
    def wants_logits(self) -> bool:
        return any(part.wants_logits for part in self.parts)

    def init(self, context: Context, features: dict[str, Float[Array, "B P M"]], longest: int) -> tuple[Any, ...]:
        memory = tuple(
            part.init(own, {name: features[name] for name in part.features}, longest)
            for part, own in zip(self.parts, self._contexts(context), strict=True)
        )
        if context.rules.drawn and self.num_nodes < sum(part.num_nodes for part in self.parts):
            self._check_deterministic(jax.eval_shape(self._drafts, memory, context))
        return memory

    def propose(self, memory: tuple[Any, ...], context: Context) -> tuple[Draft, tuple[Any, ...]]:
        proposed = self._drafts(memory, context)
        return merge([draft for draft, _ in proposed], self.num_nodes), tuple(after for _, after in proposed)

    def update(self, memory: tuple[Any, ...], round: Round, context: Context) -> tuple[Any, ...]:
        contexts = self._contexts(context)
        rounds = [
            replace(
                round,
                features={name: round.features[name] for name in part.features},
                logits=round.logits if part.wants_logits else None,
            )
            for part in self.parts
        ]
        if round.draft.probes is not None:
            drafts = [draft for draft, _ in jax.eval_shape(self._drafts, memory, context)]
            probes = [0 if draft.probes is None else draft.probes.tokens.shape[1] for draft in drafts]
            rounds = [_own_probes(r, sum(probes[:i]), probes[i]) for i, r in enumerate(rounds)]
        each = zip(self.parts, memory, rounds, contexts, strict=True)
        return tuple(part.update(own, round, context) for part, own, round, context in each)

    def _contexts(self, context: Context) -> list[Context]:
        """The context for each part: with the same random numbers two parts would draw the same tokens."""

        def fold(i: int) -> Array:
            return jax.vmap(lambda key: jax.random.fold_in(key, i))(context.key)

        return [replace(context, key=fold(i)) for i in range(len(self.parts))]

    def _drafts(self, memory: tuple[Any, ...], context: Context) -> list[tuple[Draft, Any]]:
        each = zip(self.parts, memory, self._contexts(context), strict=True)
        return [part.propose(own, context) for part, own, context in each]

    def _check_deterministic(self, proposed: Sequence[tuple[Draft, Any]]) -> None:
        for part, (draft, _) in zip(self.parts, proposed, strict=True):
            if draft.drawn is not None:
                raise InputError(
                    f"Combined: total={self.total} leaves nodes out, which drawn ones do not allow, and {part.name} "
                    "draws above temperature 0; make it deterministic (sample=False), or leave total out"
                )


def merge(drafts: Sequence[Draft], num_nodes: int) -> Draft:
    """One tree of all drafts' nodes, in their order: those of a row that there are, first; N = `num_nodes` at most.

    Of nodes with the same tokens down from the pending token only the first is kept, if it and the others are
    deterministic, and what is below the others goes below it. The target's law is not changed by that: at the second
    one's turn p has lost the token, which nothing could restore.

    A drawn node is always kept. If it repeats an earlier deterministic sibling it is never accepted, but its rejection
    takes q from p, and without that its siblings' turn would come with another law than the one that they were drawn
    for. What is below it goes below the earlier node: where that one is accepted nothing has been said of the drawn
    token yet, and the tokens below it were drawn after it. Drawn nodes stand for nobody else.

    Args:
        drafts: independent of each other: no random number in one has a share in another.
        num_nodes: less than there are in all only if every node is deterministic.
    """
    starts = np.cumsum([0, *(draft.tokens.shape[1] for draft in drafts)])
    tokens = jnp.concatenate([draft.tokens for draft in drafts], axis=1)
    valid = jnp.concatenate([draft.valid for draft in drafts], axis=1)
    parents = jnp.concatenate(
        [jnp.where(d.parents < 0, -1, d.parents + int(start)) for d, start in zip(drafts, starts, strict=False)], axis=1
    )
    draws = any(draft.drawn is not None for draft in drafts)
    drawn = jnp.concatenate([jnp.zeros_like(d.valid) if d.drawn is None else d.drawn for d in drafts], axis=1)

    stands = _who_stands_for(tokens, parents, valid, drawn)
    own = stands == jnp.arange(tokens.shape[1])
    kept = valid & (own | drawn)
    place = jnp.cumsum(kept, axis=1, dtype=jnp.int32) - 1
    place = jnp.where(kept & (place < num_nodes), place, -1)
    spot = jnp.take_along_axis(place, stands, axis=1)  # where a node's path ends in the merged tree

    at = place[:, None, :] == jnp.arange(num_nodes)[:, None]
    source = jnp.where(at, jnp.arange(tokens.shape[1]), 0).sum(-1, dtype=jnp.int32)

    def take(values: Array) -> Array:
        return jax.vmap(lambda row, places: row[places])(values, source)

    above = jnp.where(parents < 0, -1, jnp.take_along_axis(spot, jnp.maximum(parents, 0), axis=1))
    there = at.any(-1)
    return Draft(
        take(tokens),
        jnp.where(there, take(above), -1),
        there,
        take(drawn) if draws else None,
        take(_laws(drafts)) if draws else None,
        _probes(drafts, spot, starts, num_nodes),
    )


def _who_stands_for(
    tokens: Int[Array, "B C"], parents: Int[Array, "B C"], valid: Bool[Array, "B C"], drawn: Bool[Array, "B C"]
) -> Int[Array, "B C"]:
    """For each node the first deterministic one that has the same tokens down from the pending token, or itself.

    Level by level, until nothing changes: one turn where no two drafts agree.
    """
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    may = (tokens[:, :, None] == tokens[:, None, :]) & valid[:, :, None] & (valid & ~drawn)[:, None, :]
    may = may & (places <= places[:, None])

    def refine(state: tuple[Array, Array]) -> tuple[Array, Array]:
        stands, _ = state
        above = jnp.where(parents < 0, -1, jnp.take_along_axis(stands, jnp.maximum(parents, 0), axis=1))
        same = may & (above[:, :, None] == above[:, None, :])
        first = jnp.where(same, places, len(places)).min(-1, initial=len(places))
        new = jnp.minimum(first, places)
        return new, (new != stands).any()

    start = jnp.broadcast_to(places, tokens.shape)
    return jax.lax.while_loop(lambda state: state[1], refine, (start, jnp.array(True)))[0]


def _laws(drafts: Sequence[Draft]) -> Float[Array, "B C V"]:
    size = next(draft.q.shape[2] for draft in drafts if draft.q is not None)
    return jnp.concatenate(
        [jnp.zeros((*d.tokens.shape, size), jnp.float32) if d.q is None else d.q for d in drafts], axis=1
    )


def _probes(
    drafts: Sequence[Draft], spot: Int[Array, "B C"], starts: Int[np.ndarray, "..."], num_nodes: int
) -> Probes | None:
    """All drafts' probes, each seeing the merged nodes where its own were; without those that saw one that was cut."""
    total = sum(draft.probes.tokens.shape[1] for draft in drafts if draft.probes is not None)
    parts: list[Probes] = []
    before = 0
    for draft, start in zip(drafts, starts, strict=False):
        if draft.probes is None:
            continue
        probes, nodes, number = draft.probes, draft.tokens.shape[1], draft.probes.tokens.shape[1]
        to = spot[:, start : start + nodes]
        sees = probes.mask[:, :, 1 : 1 + nodes] & draft.valid[:, None]
        there = (sees[:, :, :, None] & (to[:, None, :, None] == jnp.arange(num_nodes))).any(2)
        lost = (sees & (to < 0)[:, None]).any(-1)
        each_other = jnp.pad(probes.mask[:, :, 1 + nodes :], ((0, 0), (0, 0), (before, total - before - number)))
        mask = jnp.concatenate([probes.mask[:, :, :1], there, each_other], axis=2)
        parts.append(replace(probes, mask=mask, valid=probes.valid & ~lost))
        before += number
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *parts) if parts else None


def _own_probes(round: Round, before: int, number: int) -> Round:
    """The round with those probes alone that a part proposed itself, behind all nodes."""
    draft, probes = round.draft, round.draft.probes
    assert probes is not None
    nodes = 1 + draft.tokens.shape[1]
    block = np.r_[:nodes, nodes + before : nodes + before + number]
    own = slice(before, before + number)
    mine = Probes(probes.tokens[:, own], probes.offsets[:, own], probes.mask[:, own][:, :, block], probes.valid[:, own])
    return replace(
        round,
        draft=replace(draft, probes=mine if number else None),
        features={name: value[:, block] for name, value in round.features.items()},
        logits=None if round.logits is None else round.logits[:, block],
    )
