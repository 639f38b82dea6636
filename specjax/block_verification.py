"""Block verification: a lossless law that judges a drawn chain as a whole and accepts more of it."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.laws import Path, Rejection, TargetLaw, Walk, multi_candidate, walk
from specjax.rows import at, children_of, first_true, put, uniforms
from specjax.sampling import categorical
from specjax.trees import Draft


@dataclass(frozen=True)
class BlockVerification:
    """Block verification (Sun et al. 2024, algorithm 2): of a chain the longest run is kept that passes a joint test.

    Token i of a chain, x_i, was drawn from q_i; P_i is the target's law there. With p_0 = 1 and

        p_i = min(1, p_{i-1} P_i(x_i) / q_i(x_i)),       S_i = sum over x of max(p_i P_{i+1}(x) - q_{i+1}(x), 0),
        h_i = S_i / (S_i + 1 - p_i), at the chain's end k: h_k = p_k,

    every place i passes with probability h_i by a number of its own, and the last one that does, t, ends the run. The
    bonus token is drawn from max(p_t P_{t+1} - q_{t+1}, 0), normalised, or from P_{k+1} if t = k.

    Why it is lossless: given the first i tokens, t >= i has probability p_i. That holds at the end, and where it holds
    for i + 1 it holds for i: the draft goes on past i with probability sum min(q, p_i P) = 1 - (S_i + 1 - p_i), and if
    it does not, i passes with h_i; together p_i. So token y follows an accepted x_1 … x_i by the draft with
    min(q(y), p_i P(y)), as the bonus token with max(p_i P(y) - q(y), 0): together p_i P(y), which is P. `Rejection` has
    the product of min(1, P / q) instead of p_i, which is never more: no draw wins back what an earlier one lost. No law
    that sees a chain and its laws alone accepts more tokens on average.

    Any draft is taken, and the law stays exact:

    - a deterministic token's q is one-hot; where all are, the number of accepted tokens has the law of `Rejection`;
    - a chain may end anywhere, by what was drawn before its end, but never by its next token;
    - at temperature 0 the text is that of `Greedy`;
    - at the first node with several children the chain ends; if that node is accepted, what is below it goes through
      `Rejection`. A tree that branches at once comes out as under `Rejection`, draw for draw. *How many* children a
      node has must not depend on the tokens drawn for them, which `Rejection` would allow for later siblings.

    It costs the target's processed law at every node of the chain until p_i is 0, where `Rejection` asks for it at
    accepted nodes only, and two passes over `[B, V]` for each. If a node's S_i vanishes in float32, which takes p_i = 1
    and P equal to q up to rounding, the bonus token comes from P. A node at which the target's law is no law ends the
    chain.
    """

    name: ClassVar[str] = "block"
    lossless: ClassVar[bool] = True

    def __call__(self, target_law: TargetLaw, draft: Draft, keys: Array, max_depth: int) -> Path:
        batch, num_nodes = draft.tokens.shape
        if num_nodes == 0 or max_depth == 0:
            return Rejection()(target_law, draft, keys, max_depth)
        uniform = uniforms(keys, num_nodes)
        tests, bonus_uniform = uniform[:, :, 0], uniform[:, :, 1]
        below = draft.valid[:, :, None] & (draft.parents[:, :, None] + 1 == jnp.arange(num_nodes + 1))
        branches = below.sum(1) > 1

        def judge(run: _Run) -> _Run:
            """Whether each row's node passes, and which one is next."""
            law = target_law.probs(run.node, run.path, run.depth)
            child = first_true(children_of(draft, run.node, run.going & (run.depth < max_depth)))
            moves = (child >= 0) & (law.sum(-1) > 0)
            token, q = _drawn_from(draft, jnp.maximum(child, 0), law.shape[1])
            joint = run.joint[:, None] * law
            excess = jnp.maximum(joint - q, 0.0)
            surplus = excess.sum(-1)
            lost = surplus + (1 - run.joint)  # the mass that the draft loses here
            test = at(tests, run.node)
            inner = (test * lost < surplus) | (lost <= 0)
            passes = run.going & jnp.where(moves, inner, test < run.joint)
            weights = jnp.where((moves & (surplus > 0))[:, None], excess, law)

            joint_token, q_token = at(joint, token), at(q, token)
            ratio = jnp.where(q_token > 0, joint_token / jnp.where(q_token > 0, q_token, 1.0), jnp.inf)
            chance = jnp.where(joint_token > 0, jnp.minimum(ratio, 1.0), 0.0)
            node, depth = jnp.where(moves, child + 1, run.node), run.depth + moves
            forks = moves & at(branches, node) & (depth < max_depth)
            hands_on = forks & (at(tests, node) < chance)
            return _Run(
                node=node,
                depth=depth,
                joint=jnp.where(moves, chance, run.joint),
                going=moves & (chance > 0) & ~forks,
                nodes=put(run.nodes, depth, node, moves),
                path=put(run.path, run.depth, token, moves),
                accepted=jnp.where(hands_on, depth, jnp.where(passes, run.depth, run.accepted)),
                weights=jnp.where(passes[:, None], weights, run.weights),
                hands_on=run.hands_on | hands_on,
            )

        zero = jnp.zeros(batch, jnp.int32)
        start = _Run(
            node=zero,
            depth=zero,
            joint=jnp.ones(batch),
            going=~branches[:, 0],
            nodes=jnp.zeros((batch, max_depth + 1), jnp.int32),
            path=jnp.zeros((batch, max_depth), jnp.int32),
            accepted=zero,
            weights=jnp.zeros(_law_shape(target_law, batch, max_depth)),
            hands_on=branches[:, 0],
        )
        end = lax.while_loop(lambda run: run.going.any(), judge, start)
        level = jnp.arange(max_depth + 1)
        nodes = jnp.where(level <= end.accepted[:, None], end.nodes, 0)
        node = at(nodes, end.accepted)
        chain = Walk(
            node=node,
            depth=end.accepted,
            bonus=categorical(end.weights, at(bonus_uniform, node)),
            going=end.hands_on,
            nodes=nodes,
            path=jnp.where(level[:-1] < end.accepted[:, None], end.path, 0),
        )
        return walk(draft, max_depth, multi_candidate(target_law, draft, keys), chain)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Run:
    """How far each row's chain has been judged.

    Attributes:
        node, depth, nodes, path: as in `laws.Walk`, down to the node that is judged next.
        joint: p_i of that node.
        going: whether it is to be judged.
        accepted: depth of the last node that passed.
        weights: what the bonus token after it is drawn from, not normalised.
        hands_on: it is a node with several children: `Rejection` goes on from there.
    """

    node: Int[Array, "B"]
    depth: Int[Array, "B"]
    joint: Float[Array, "B"]
    going: Bool[Array, "B"]
    nodes: Int[Array, "B D+1"]
    path: Int[Array, "B D"]
    accepted: Int[Array, "B"]
    weights: Float[Array, "B V"]
    hands_on: Bool[Array, "B"]


def _drawn_from(draft: Draft, index: Int[Array, "B"], size: int) -> tuple[Int[Array, "B"], Float[Array, "B V"]]:
    """The token of draft node `index[b]`, and the law it came from, one-hot where it is deterministic."""
    token = at(draft.tokens, index)
    q = (lax.broadcasted_iota(jnp.int32, (token.shape[0], size), 1) == token[:, None]).astype(jnp.float32)
    if draft.drawn is not None and draft.q is not None:
        q = jnp.where(at(draft.drawn, index)[:, None], at(draft.q, index), q)
    return token, q


def _law_shape(target_law: TargetLaw, batch: int, max_depth: int) -> tuple[int, ...]:
    row = jax.ShapeDtypeStruct((batch,), jnp.int32)
    path = jax.ShapeDtypeStruct((batch, max_depth), jnp.int32)
    return jax.eval_shape(target_law.probs, row, path, row).shape
