"""Acceptance laws: which nodes of a draft are kept, and the target's own token that ends the round.

A law is a pure function `law(target_law, draft, keys, max_depth) -> Path`. *Lossless* laws reproduce the target's
law exactly; a lossy one (`Typical`) says so. `Greedy` and `Rejection` differ in one function, `choose`, which `walk`
calls at every node on the way down. `block_verification` has one more law, `requests.LAWS` their names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.errors import InputError
from specjax.rows import at, children_of, first_true, put, uniforms
from specjax.sampling import argmax, categorical
from specjax.trees import Draft, ancestors, depths


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Path:
    """What a law accepted: D = max_depth nodes at most, padded with 0.

    Attributes:
        nodes: block indices: 0 (the pending token), then the accepted nodes (draft node i has block index i + 1).
        accepted: number of accepted draft nodes.
        tokens: the accepted tokens, then the bonus token at index `accepted`.
        bonus: the target's own token after the path; V, which is no token, where the target's law there is no law
            (NaN logits, or every token forbidden): callers check.
        rejected: the path ended at a node that had a valid child, so a rejection was tested.
    """

    nodes: Int[Array, "B D+1"]
    accepted: Int[Array, "B"]
    tokens: Int[Array, "B D+1"]
    bonus: Int[Array, "B"]
    rejected: Bool[Array, "B"]


class TargetLaw(Protocol):
    """The target's processed law at one node of each row, computed when asked for, so that only visited nodes cost.

    `node` holds block indices (0 = pending token), `path[:, :depth]` the tokens between the pending token and the node,
    the node's own included.
    """

    def logits(self, node: Int[Array, "B"], path: Int[Array, "B D"], depth: Int[Array, "B"]) -> Float[Array, "B V"]:
        """Processed logits, -inf where filtered (`sampling.process`)."""
        ...

    def probs(self, node: Int[Array, "B"], path: Int[Array, "B D"], depth: Int[Array, "B"]) -> Float[Array, "B V"]:
        """Probabilities, one-hot where the temperature is 0 (`sampling.distribution`)."""
        ...


class Law(Protocol):
    """What `decode.step` asks of an acceptance law. Laws are hashable: they are compiled into the program.

    Attributes:
        name: for results and tables.
        lossless: whether the text follows the target's law exactly.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]

    def __call__(self, target_law: TargetLaw, draft: Draft, keys: Array, max_depth: int) -> Path:
        """The accepted path of one round.

        Args:
            keys: one PRNG key a row, used for nothing else. A node's fate depends on its row's key and its block index,
                neither on the batch nor on how far the draft was cut.
            max_depth: the most nodes a path can hold.
        """
        ...


@dataclass(frozen=True)
class Greedy:
    """Accept the child that is the target's argmax; the text is that of plain greedy decoding, token for token."""

    name: ClassVar[str] = "greedy"
    lossless: ClassVar[bool] = True

    def __call__(self, target_law: TargetLaw, draft: Draft, keys: Array, max_depth: int) -> Path:
        def choose(node, path, depth, descends):
            best = argmax(target_law.logits(node, path, depth))
            match = children_of(draft, node, descends) & (draft.tokens == best[:, None])
            return first_true(match) + 1, best

        return walk(draft, max_depth, choose)


@dataclass(frozen=True)
class Rejection:
    """Recursive multi-candidate rejection sampling; on a chain, speculative sampling.

    At a node, siblings are tried in index order against p, the target's law there (Miao et al. 2023, SpecInfer, section
    4.3; with one child each Leviathan et al. 2023, algorithm 1, and Chen et al. 2023, algorithm 2):

    - a drawn child x is accepted with probability min(1, p(x) / q(x)), where q is the law it was drawn from given its
      earlier siblings; if it fails, p becomes norm(max(p - q, 0));
    - a deterministic child x (its q is one-hot) is accepted with probability p(x); if it fails, p loses x;
    - if none is left, the bonus token is drawn from what p has become.

    The law never renormalises q: a drafter that draws siblings without replacement gives each node the law without its
    earlier siblings. Rows with temperature 0 come out as under `Greedy`. If max(p - q, 0) vanishes in float32, which
    takes p equal to q up to rounding, p is left as it was before the subtraction.
    """

    name: ClassVar[str] = "rejection"
    lossless: ClassVar[bool] = True

    def __call__(self, target_law: TargetLaw, draft: Draft, keys: Array, max_depth: int) -> Path:
        return walk(draft, max_depth, multi_candidate(target_law, draft, keys))


@dataclass(frozen=True)
class Typical:
    """Typical acceptance: keep what the target finds plausible. *Lossy*: a plausible draft is taken whatever its share
    of the target's law, so texts lean towards the drafter's (Cai et al. 2024, Medusa, section 2.3.1).

    A node with token x is accepted where all nodes above it are and

        p(x) > min(epsilon, alpha * exp(-H(p))),

    p the target's processed law above it and H(p) its entropy in nats. Of the accepted nodes one of the deepest ends
    the path: the one whose tokens are together most likely under the target, then the first. The bonus token is drawn
    from the target's law there, so every round commits at least one token that is the target's own, and plain decoding
    is as it is under `Rejection`.

    At temperature 0 p is one-hot, nothing but the argmax is above the threshold, and the text is that of `Greedy`.

    Attributes:
        epsilon: at least 0, below 1. The default is that of the authors' decoding loop.
        alpha: at least 0. The default is that loop's, the square root of epsilon.
    """

    epsilon: float = 0.09
    alpha: float = 0.3

    name: ClassVar[str] = "typical"
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, below in (("epsilon", 1.0), ("alpha", float("inf"))):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
                raise InputError(f"{name}: expected a number of at least 0 and below {below:g}, got {value!r}")

    def __call__(self, target_law: TargetLaw, draft: Draft, keys: Array, max_depth: int) -> Path:
        num_nodes = draft.tokens.shape[1]
        depth, above = depths(draft.parents, draft.valid), ancestors(draft.parents)
        level = jnp.arange(max_depth + 1)
        parent = draft.parents + 1
        has_child = ((parent[:, :, None] == jnp.arange(num_nodes + 1)) & draft.valid[:, :, None]).any(1)
        inner = has_child & (jnp.pad(depth, ((0, 0), (1, 0))) < max_depth)

        def way_to(node: Int[Array, "B"], values: Int[Array, "B N"]) -> Int[Array, "B D+1"]:
            """The values of a node and of those above it, each at its depth."""
            on_way = at(above, jnp.maximum(node - 1, 0)) & (node > 0)[:, None] if num_nodes else draft.valid
            return jnp.where((on_way[:, :, None]) & (depth[:, :, None] == level), values[:, :, None], 0).sum(1)

        def probs(node: Int[Array, "B"]) -> Float[Array, "B V"]:
            path = way_to(node, draft.tokens)[:, 1:]
            return target_law.probs(node, path, at(jnp.pad(depth, ((0, 0), (1, 0))), node))

        def judge(state: _Judged) -> _Judged:
            """Each row's first accepted node whose children are not judged yet."""
            node = jnp.maximum(first_true(state.waiting), 0)
            p = probs(node)
            entropy = -jnp.where(p > 0, p * jnp.log(p), 0.0).sum(-1, keepdims=True)
            p_token = jnp.take_along_axis(p, draft.tokens, axis=1, mode="clip")
            plausible = p_token > jnp.minimum(self.epsilon, self.alpha * jnp.exp(-entropy))
            new = children_of(draft, node, state.waiting.any(-1)) & plausible
            score = jnp.where(new, at(jnp.pad(state.score, ((0, 0), (1, 0))), node)[:, None] + jnp.log(p_token), 0)
            done = jnp.arange(num_nodes + 1) == node[:, None]
            waiting = (state.waiting & ~done) | (jnp.pad(new, ((0, 0), (1, 0))) & inner)
            return _Judged(waiting, state.accepted | new, jnp.where(new, score, state.score))

        root = jnp.arange(num_nodes + 1) == 0
        start = _Judged(inner & root, jnp.zeros_like(draft.valid), jnp.zeros(draft.tokens.shape))
        end = lax.while_loop(lambda state: state.waiting.any(), judge, start) if num_nodes else start
        accepted = jnp.where(end.accepted, depth, 0).max(-1, initial=0)
        deepest = end.accepted & (depth == accepted[:, None])
        best = jnp.where(deepest, end.score, -jnp.inf).max(-1, keepdims=True, initial=-jnp.inf)
        last = first_true(deepest & (end.score == best)) + 1
        bonus = categorical(probs(last), at(uniforms(keys, num_nodes)[:, :, 1], last))
        index = jnp.broadcast_to(jnp.arange(1, num_nodes + 1, dtype=jnp.int32), draft.tokens.shape)
        path = way_to(last, draft.tokens)[:, 1:]
        tokens = put(jnp.pad(path, ((0, 0), (0, 1))), accepted, bonus, True)
        rejected = children_of(draft, last, accepted < max_depth).any(-1)
        return Path(way_to(last, index), accepted, tokens, bonus, rejected)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Judged:
    """Accepted nodes: which there are, the log-probability of the tokens down to each, and the block indices of those
    whose children come up next.
    """

    waiting: Bool[Array, "B N+1"]
    accepted: Bool[Array, "B N"]
    score: Float[Array, "B N"]


Choose = Callable[
    [Int[Array, "B"], Int[Array, "B D"], Int[Array, "B"], Bool[Array, "B"]], tuple[Int[Array, "B"], Int[Array, "B"]]
]


def walk(draft: Draft, max_depth: int, choose: Choose, start: "Walk | None" = None) -> Path:
    """The way down a draft, one visited node of each row at a time, until no row goes on.

    Args:
        choose: `(node [B], path [B,D], depth [B], descends [B]) -> (child, bonus)`: the block index of the accepted
            child of `node`, 0 if the row ends here, and the bonus token if it does. Where `descends` is False no child
            may be accepted: the row has ended, or its path is full.
        start: where each row is; None: all of them at the pending token.
    """
    batch, num_nodes = draft.tokens.shape
    zero = jnp.zeros(batch, jnp.int32)
    if start is None:
        start = Walk(
            node=zero,
            depth=zero,
            bonus=zero,
            going=jnp.ones(batch, bool),
            nodes=jnp.zeros((batch, max_depth + 1), jnp.int32),
            path=jnp.zeros((batch, max_depth), jnp.int32),
        )

    def visit(state: Walk) -> Walk:
        child, bonus = choose(state.node, state.path, state.depth, state.going & (state.depth < max_depth))
        moves = child > 0
        ends = state.going & ~moves
        depth = state.depth + moves
        token = at(draft.tokens, jnp.maximum(child - 1, 0)) if num_nodes else zero
        return Walk(
            node=jnp.where(moves, child, state.node),
            depth=depth,
            bonus=jnp.where(ends, bonus, state.bonus),
            going=moves,
            nodes=put(state.nodes, depth, child, moves),
            path=put(state.path, state.depth, token, moves),
        )

    if num_nodes == 0 or max_depth == 0:  # plain decoding: one visit, no loop
        end = visit(start)
    else:
        end = lax.while_loop(lambda state: state.going.any(), visit, start)
    tokens = put(jnp.pad(end.path, ((0, 0), (0, 1))), end.depth, end.bonus, True)
    rejected = children_of(draft, end.node, end.depth < max_depth).any(-1)
    return Path(end.nodes, end.depth, tokens, end.bonus, rejected)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Walk:
    """Where each row is.

    Attributes:
        node: the block index it has come to.
        depth: how far down that is.
        bonus: the bonus token, in rows that have ended.
        going: whether it goes on.
        nodes, path: as in `Path` and `TargetLaw`, down to `node`; 0 below it.
    """

    node: Int[Array, "B"]
    depth: Int[Array, "B"]
    bonus: Int[Array, "B"]
    going: Bool[Array, "B"]
    nodes: Int[Array, "B D+1"]
    path: Int[Array, "B D"]


def multi_candidate(target_law: TargetLaw, draft: Draft, keys: Array) -> Choose:
    """How `Rejection` chooses a child: recursive multi-candidate rejection sampling."""
    uniform = uniforms(keys, draft.tokens.shape[1])

    def choose(node, path, depth, descends):
        p = target_law.probs(node, path, depth)
        child, p = _try_children(p, draft, children_of(draft, node, descends), uniform[:, :, 0])
        bonus_uniform = at(uniform[:, :, 1], node)
        ends = child == 0
        bonus = lax.cond(ends.any(), lambda: categorical(p, bonus_uniform), lambda: jnp.zeros_like(node))
        return child, bonus

    return choose


def _try_children(
    p: Float[Array, "B V"], draft: Draft, children: Bool[Array, "B N"], uniform: Float[Array, "B N+1"]
) -> tuple[Int[Array, "B"], Float[Array, "B V"]]:
    """Tries each row's children in index order; costs one pass over [B, V] for each rejection, none otherwise.

    Returns:
        The accepted child's block index (0 if none was), and the law its siblings' rejections left, not normalised.
    """
    batch, num_nodes = draft.tokens.shape
    if num_nodes == 0:
        return jnp.zeros(batch, jnp.int32), p
    vocabulary = lax.broadcasted_iota(jnp.int32, p.shape, 1)

    def attempt(state: _Tries) -> _Tries:
        p, mass = state.p, state.mass
        trying, sibling = state.sibling >= 0, jnp.maximum(state.sibling, 0)
        token = at(draft.tokens, sibling)
        p_token = at(p, token)
        q_token = jnp.ones_like(p_token)
        if draft.drawn is not None and draft.q is not None:
            drawn = at(draft.drawn, sibling)
            q_token = jnp.where(drawn, jax.vmap(lambda q, i, x: q[i, x])(draft.q, sibling, token), 1.0)
        accepted = trying & (at(uniform, sibling + 1) * q_token * mass < p_token)
        failed = trying & ~accepted

        def reject() -> tuple[Array, Array]:
            left = jnp.where(vocabulary == token[:, None], 0.0, p)
            total = mass - p_token  # positive: a rejected deterministic child has p_token < mass
            if draft.drawn is not None and draft.q is not None:
                excess = jnp.maximum(p / mass[:, None] - at(draft.q, sibling), 0.0)
                left = jnp.where(drawn[:, None], excess, left)
                total = jnp.where(drawn, excess.sum(-1), total)
            changed = failed & (total > 0)
            return jnp.where(changed[:, None], left, p), jnp.where(changed, total, mass)

        p, mass = lax.cond(failed.any(), reject, lambda: (p, mass))
        untried = children & (jnp.arange(num_nodes) > sibling[:, None]) & failed[:, None]
        return _Tries(p, mass, first_true(untried), jnp.where(accepted, sibling + 1, state.child))

    start = _Tries(p, jnp.ones(batch, p.dtype), first_true(children), jnp.zeros(batch, jnp.int32))
    end = lax.while_loop(lambda state: (state.sibling >= 0).any(), attempt, start)
    return end.child, end.p


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Tries:
    """Siblings being tried: what is left of p, its sum, the sibling up next or -1, the accepted block index or 0."""

    p: Float[Array, "B V"]
    mass: Float[Array, "B"]
    sibling: Int[Array, "B"]
    child: Int[Array, "B"]
