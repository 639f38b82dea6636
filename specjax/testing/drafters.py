"""Drafters whose behaviour is known: always right, always wrong, told what to say, and trees of drawn siblings.

They are slow (some run the target themselves) and meant for tests; wrap your own drafter in `Idle` or `Replaced` to see
whether its state survives rounds that are not its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters.check import check_drafter
from specjax.models.target import Target
from specjax.sampling import argmax, categorical
from specjax.state import Context, Drafter, Round, static
from specjax.trees import Draft, Probes, chain, order


@dataclass(frozen=True)
class Stateless:
    """What drafters without a state of their own share; subclasses propose, and say `num_nodes` and `max_depth`."""

    features: ClassVar[tuple[str, ...]] = ()
    wants_logits: ClassVar[bool] = False

    def init(self, context: Context, features: dict[str, Any], longest: int) -> None:
        return None

    def update(self, memory: None, round: Round, context: Context) -> None:
        return None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Oracle(Stateless):
    """The target itself drafts what it would say greedily (its processed argmax, penalties included). Under greedy
    decoding every node is accepted in every round, or else something about positions, masks or the cache is wrong.

    Attributes:
        num_draft_tokens: k.
        decoys: wrong siblings put before every right node, so that only the last of 1 + decoys siblings is right and
            the accepted path lies scattered in the block.
        block_sizes: see `Drafter`.
    """

    num_draft_tokens: int = static(default=4)
    decoys: int = static(default=0)
    block_sizes: tuple[int, ...] | None = static(default=None)

    name: ClassVar[str] = "oracle"
    shift: ClassVar[int] = 0  # added to the argmax

    @property
    def num_nodes(self) -> int:
        return self.num_draft_tokens * (1 + self.decoys)

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    def propose(self, memory: None, context: Context) -> tuple[Draft, None]:
        batch, k, width = context.length.shape[0], self.num_draft_tokens, 1 + self.decoys
        size = context.model.vocab_size
        path = peek(context, k, self.shift)
        decoys = (path[:, :, None] + jnp.arange(1, width)) % size
        tokens = jnp.concatenate([decoys, path[:, :, None]], axis=2).reshape(batch, k * width)
        # the last sibling of a level carries the next level
        parents = jnp.arange(k * width) // width * width - 1
        draft = Draft(tokens, jnp.broadcast_to(parents, tokens.shape), jnp.ones(tokens.shape, bool))
        known = jnp.cumprod(path < size, axis=1).sum(-1)  # a broken target drafts nothing
        return replace(draft, valid=jnp.arange(k * width) < known[:, None] * width), None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adversarial(Oracle):
    """Always drafts a token that is not the target's argmax: under greedy decoding nothing is ever accepted."""

    name: ClassVar[str] = "adversarial"
    shift: ClassVar[int] = 1


def peek(context: Context, k: int, shift: int = 0) -> Int[Array, "B k"]:
    """The next k tokens that the target finds most likely (plus `shift`), each given the ones before it."""
    batch, size = context.length.shape[0], context.model.vocab_size
    positions = context.length[:, None] - 1 + jnp.arange(k + 1)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((k + 1, k + 1), bool)), (batch, k + 1, k + 1))

    def extend(i: Array, path: Array) -> Array:
        block = jnp.concatenate([context.pending[:, None], path], axis=1)
        hidden = context.model(block, positions, mask, context.cache, context.length - 1).hidden
        logits = context.model.logits(jax.lax.dynamic_slice_in_dim(hidden, i, 1, axis=1))[:, 0]
        best = argmax(context.process(logits, path, jnp.full(batch, i, jnp.int32)))
        token = jnp.where(best < size, (best + shift) % size, best)
        return path.at[:, i].set(token)

    return jax.lax.fori_loop(0, k, extend, jnp.zeros((batch, k), jnp.int32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Replay(Stateless):
    """Proposes what a script says about each output position, whatever has been committed before it.

    Attributes:
        script: the token to propose as the i-th new one, a row a prompt; -1 ends a draft before that position. Another
            script of the same shape compiles nothing.
        num_draft_tokens: k.
        block_sizes: see `Drafter`.
    """

    script: Int[Array, "B S"]
    num_draft_tokens: int = static(default=4)
    block_sizes: tuple[int, ...] | None = static(default=None)

    name: ClassVar[str] = "replay"

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], num_draft_tokens: int = 4, **options: Any) -> "Replay":
        """From lists of any lengths, one a prompt."""
        script = np.full((len(rows), max(map(len, rows))), -1, np.int32)
        for row, tokens in zip(script, rows, strict=True):
            row[: len(tokens)] = tokens
        return cls(jnp.asarray(script), num_draft_tokens, **options)

    @property
    def num_nodes(self) -> int:
        return self.num_draft_tokens

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    def propose(self, memory: None, context: Context) -> tuple[Draft, None]:
        size = self.script.shape[1]
        index = (context.length - context.prompt_length)[:, None] + jnp.arange(self.num_draft_tokens)
        said = jnp.take_along_axis(self.script, jnp.minimum(index, size - 1), axis=1)
        real = jnp.cumprod((said >= 0) & (index < size), axis=1)
        return chain(jnp.where(real > 0, said, 0), real.sum(-1)), None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TableTree(Stateless):
    """A full tree (or chain) drafted from a table keyed by the parent's token, processed as the target's logits are.

    Attributes:
        table: `[V, V]` logits of the draft law after a token.
        depth: levels.
        siblings: one letter a child of a node: "s" draws it from the draft law, "d" takes the law's most likely token,
            which makes it deterministic. "s" is a chain, "ss" two drawn siblings, "ds" a deterministic and a drawn one.
        replace: False draws without replacement: a sibling's law is the draft law without its earlier siblings, and
            where nothing is left of that the sibling is missing. True draws each from the whole law.
    """

    table: Float[Array, "V V"]
    depth: int = static(default=2)
    siblings: str = static(default="ss")
    replace: bool = static(default=False)

    name: ClassVar[str] = "table-tree"
    block_sizes: ClassVar[None] = None

    @classmethod
    def random(
        cls, vocab_size: int = 4, depth: int = 2, siblings: str = "ss", replace: bool = False, seed: int = 1
    ) -> "TableTree":
        table = 1.5 * np.random.default_rng(seed).standard_normal((vocab_size, vocab_size))
        return cls(jnp.asarray(table, jnp.float32), depth, siblings, replace)

    @property
    def num_nodes(self) -> int:
        return sum(len(self.siblings) ** level for level in range(1, self.depth + 1))

    @property
    def max_depth(self) -> int:
        return self.depth

    def propose(self, memory: None, context: Context) -> tuple[Draft, None]:
        batch = context.length.shape[0]
        parents: list[int] = []
        nodes: list[_Node] = []
        level = [(-1, context.pending, jnp.zeros((batch, self.depth), jnp.int32), jnp.ones(batch, bool))]
        for depth in range(self.depth):
            below = []
            for parent, last, path, exists in level:
                scores = context.process(self.table[last], path, jnp.full(batch, depth, jnp.int32))
                for kind in self.siblings:
                    node = self._child(kind, scores, context, len(nodes))
                    if not self.replace:
                        scores = jnp.where(jnp.arange(scores.shape[1]) == node.token[:, None], -jnp.inf, scores)
                    below.append((len(nodes), node.token, path.at[:, depth].set(node.token), exists & node.exists))
                    parents.append(parent)
                    nodes.append(replace(node, exists=exists & node.exists))
            level = below
        tokens, valid, q = (jnp.stack([getattr(n, name) for n in nodes], axis=1) for name in ("token", "exists", "q"))
        drawn = jnp.broadcast_to(jnp.array([n.kind == "s" for n in nodes]), tokens.shape)
        return order(tokens, jnp.broadcast_to(jnp.array(parents, jnp.int32), tokens.shape), valid, drawn, q), None

    def _child(self, kind: str, scores: Float[Array, "B V"], context: Context, node: int) -> "_Node":
        """One child, given what is left of the draft law's scores; it exists if anything is."""
        best = argmax(scores)
        exists = best < scores.shape[1]
        sharp = (jnp.arange(scores.shape[1]) == best[:, None]).astype(jnp.float32)
        soft = jax.nn.softmax(jnp.where(exists[:, None], scores, 0.0))
        q = jnp.where((context.rules.temperature == 0)[:, None], sharp, soft)
        token = best
        if kind == "s":
            uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, node)))(context.key)
            token = jnp.where(exists, categorical(q, uniform), 0)
        return _Node(kind, jnp.where(exists, token, 0), exists, q)


@dataclass(frozen=True)
class _Node:
    kind: str
    token: Int[Array, "B"]
    exists: Bool[Array, "B"]
    q: Float[Array, "B V"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prober:
    """Wraps a chain drafter and adds three probes to every draft: a chain of two after the pending token, beside the
    nodes, and one below the first node. `memory["logits"]` is what the target said at them in the last round.

    Attributes:
        drafter: proposes the nodes.
        tokens: the probes' tokens.
    """

    drafter: Drafter
    tokens: tuple[int, int, int] = static(default=(1, 2, 3))

    name: ClassVar[str] = "prober"
    wants_logits: ClassVar[bool] = True

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
    def block_sizes(self) -> tuple[int, ...] | None:
        return self.drafter.block_sizes

    def init(self, context: Context, features: dict[str, Any], longest: int) -> dict[str, Any]:
        batch = context.length.shape[0]
        logits = jnp.zeros((batch, 3, context.model.vocab_size))
        valid = jnp.zeros((batch, 3), bool)
        return {"inner": self.drafter.init(context, features, longest), "logits": logits, "valid": valid}

    def propose(self, memory: dict[str, Any], context: Context) -> tuple[Draft, dict[str, Any]]:
        draft, inner = self.drafter.propose(memory["inner"], context)
        batch, nodes = draft.tokens.shape
        mask = np.zeros((3, 1 + nodes + 3), bool)
        mask[:, 0] = True  # the pending token
        mask[0, nodes + 1] = mask[1, [nodes + 1, nodes + 2]] = mask[2, [1, nodes + 3]] = True
        probes = Probes(
            tokens=jnp.broadcast_to(jnp.array(self.tokens), (batch, 3)),
            offsets=jnp.broadcast_to(jnp.array([1, 2, 2]), (batch, 3)),
            mask=jnp.broadcast_to(jnp.asarray(mask), (batch, *mask.shape)),
            valid=jnp.ones((batch, 3), bool).at[:, 2].set(draft.valid[:, 0]),
        )
        return replace(draft, probes=probes), {**memory, "inner": inner}

    def update(self, memory: dict[str, Any], round: Round, context: Context) -> dict[str, Any]:
        inner = self.drafter.update(memory["inner"], round, context)
        assert round.logits is not None  # asked for
        assert round.draft.probes is not None
        return {"inner": inner, "logits": round.logits[:, -3:], "valid": round.draft.probes.valid}


@dataclass(frozen=True)
class _Wrapper:
    """What `Idle` and `Replaced` share: everything is the wrapped drafter's."""

    drafter: Drafter

    def check(self, target: Target) -> None:
        check_drafter(self.drafter, target)

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Idle(_Wrapper):
    """Lets a drafter propose only in every `every`-th round; in the others it only sees `update`, of an empty draft.

    Its state must stay right: `Idle(DraftModel(target))` still has every proposal accepted.
    """

    every: int = static(default=3)

    name: ClassVar[str] = "idle"

    def init(self, context: Context, features: dict[str, Any], longest: int) -> tuple[Any, Array]:
        return self.drafter.init(context, features, longest), jnp.int32(0)

    def propose(self, memory: tuple[Any, Array], context: Context) -> tuple[Draft, tuple[Any, Array]]:
        inner, number = memory
        shapes, _ = jax.eval_shape(self.drafter.propose, inner, context)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        nothing = replace(nothing, parents=nothing.parents - 1)
        turn = number % self.every == self.every - 1
        draft, inner = jax.lax.cond(turn, self.drafter.propose, lambda inner, _: (nothing, inner), inner, context)
        return draft, (inner, number + 1)

    def update(self, memory: tuple[Any, Array], round: Round, context: Context) -> tuple[Any, Array]:
        return self.drafter.update(memory[0], round, context), memory[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Replaced(_Wrapper):
    """Lets a drafter propose, and then verifies `other`'s proposals instead in `instead` of every four rounds.

    The drafter's state must survive paths that it did not propose. Both draft the same number of nodes.
    """

    other: Drafter = field(default_factory=Oracle)
    instead: int = static(default=2)

    name: ClassVar[str] = "replaced"

    def init(self, context: Context, features: dict[str, Any], longest: int) -> tuple[Any, Any, Array]:
        first, second = (d.init(context, features, longest) for d in (self.drafter, self.other))
        return first, second, jnp.int32(0)

    def propose(self, memory: tuple[Any, Any, Array], context: Context) -> tuple[Draft, tuple[Any, Any, Array]]:
        own, first = self.drafter.propose(memory[0], context)
        others, second = self.other.propose(memory[1], context)
        own = replace(own, drawn=None, q=None) if others.q is None else own
        draft = jax.tree.map(lambda a, b: jnp.where(memory[2] % 4 < self.instead, b, a), own, others)
        return draft, (first, second, memory[2] + 1)

    def update(self, memory: tuple[Any, Any, Array], round: Round, context: Context) -> tuple[Any, Any, Array]:
        first = self.drafter.update(memory[0], round, context)
        return first, self.other.update(memory[1], round, context), memory[2]
