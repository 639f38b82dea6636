"""Token recycling (Luo et al. 2024, "Turning Trash into Treasure"): the target's own runners-up, kept and drafted.

    drafter = TokenRecycling()                              # every request starts with what its prompt shows
    drafter = TokenRecycling().counted(answers, 49152)      # or with what usually follows each token

A matrix holds, for every token, k tokens that the target found likely when it last read that token. A draft follows the
matrix from the pending token down a static tree: a node of rank r is the r-th entry of its parent's row.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters.medusa import best_tree
from specjax.errors import InputError, check_block_sizes, check_whole
from specjax.models.target import Target
from specjax.sampling import argmax
from specjax.state import Context, Round, static
from specjax.trees import Draft, StaticTree, order

# How often the next token is a row's r-th entry: over answers of SmolLM2-135M, starting from counts over others.
_CHANCES = [[0.45, 0.15, 0.06, 0.037, 0.026, 0.016, 0.015, 0.012]] * 7
DEFAULT_TREE = best_tree(_CHANCES, 31)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenRecycling:
    """Drafts a tree out of the last continuations that the target ranked highest after each token.

    Every token the target reads, accepted or not, whoever proposed it, leaves its best continuations behind: the
    `fresh` best in front of what the row knew, the rest of the k best behind it, as far as there is room. `fresh=k` is
    the authors' rule, which forgets what a row knew.
    Where one token stands in a block several times, the last one on the committed path counts, or else the last one.

    Entries not known yet are -1 and draft nothing. Where the authors start with nothing, a cold start here knows what
    followed each token in the prompt, the latest first. Nodes are deterministic, so
    the tree is lossless at any temperature.

    Costs: the matrix, `[B, V, k]` int32 (V = 49152, k = 8: 1.6 MB a row), updated in place; and the block's logits,
    `[B, T, V]`, that `update` reads (T = 32: 6 MB a row), of which one pass finds the k best.

    Attributes:
        k: continuations kept of each token; ranks in the tree are below it.
        tree: the draft's shape. The default has 31 nodes, a block of 32.
        fresh: see above, 1 to k.
        matrix: what every request starts with, `[V, k]` ids or -1; None for nothing. Another one of the same shape
            compiles nothing. See `counted` and `after`.
        seed_prompt: whether the prompt's own successions are put into the matrix.
        block_sizes: see `Drafter`.
    """

    k: int = static(default=8)
    tree: StaticTree = static(default=DEFAULT_TREE)
    fresh: int = static(default=1)
    matrix: Int[Array, "V k"] | None = None
    seed_prompt: bool = static(default=True)
    block_sizes: tuple[int, ...] | None = static(default=None)

    name: ClassVar[str] = "recycling"
    features: ClassVar[tuple[str, ...]] = ()
    wants_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("k", self.k, 1)
        check_whole("fresh", self.fresh, 1)
        if self.fresh > self.k:
            raise InputError(f"fresh: expected at most k, which is {self.k}, got {self.fresh}")
        check_block_sizes(self.block_sizes)
        if not isinstance(self.tree, StaticTree):
            raise InputError(f"tree: expected a StaticTree, as static_tree makes it, got {self.tree!r}")
        highest = max((max(choice) for choice in self.tree.choices), default=0)
        if highest >= self.k:
            raise InputError(f"tree: it has rank {highest}, but k is {self.k}: ranks go from 0 to {self.k - 1}")

    def check(self, target: Target) -> None:
        size = target.model.vocab_size
        if self.matrix is not None and tuple(self.matrix.shape) != (size, self.k):
            raise InputError(
                f"TokenRecycling: the matrix has shape {tuple(self.matrix.shape)}; expected {(size, self.k)} for this "
                "target and k"
            )

    @property
    def num_nodes(self) -> int:
        return self.tree.num_nodes

    @property
    def max_depth(self) -> int:
        return self.tree.max_depth

    def init(self, context: Context, features: dict[str, Any], longest: int) -> Int[Array, "B V k"]:
        batch, size = context.tokens.shape[0], context.model.vocab_size
        start = jnp.full((size, self.k), -1, jnp.int32) if self.matrix is None else jnp.asarray(self.matrix, jnp.int32)
        memory = jnp.broadcast_to(start, (batch, size, self.k))
        if not self.seed_prompt:
            return memory

        def put(i: Array, memory: Array) -> Array:
            pair = jax.lax.dynamic_slice_in_dim(context.tokens, i, 2, axis=1)
            rows = _join(pair[:, 1:, None], _rows(memory, pair[:, :1]))
            return _write(memory, pair[:, :1], rows, (i + 1 < context.length)[:, None])

        return jax.lax.fori_loop(0, min(longest, context.tokens.shape[1] - 1), put, memory)

    def propose(self, memory: Int[Array, "B V k"], context: Context) -> tuple[Draft, Int[Array, "B V k"]]:
        tree, batch = self.tree, context.length.shape[0]
        parents = jnp.broadcast_to(jnp.array(tree.parents, jnp.int32), (batch, tree.num_nodes))
        if not tree.num_nodes:
            return Draft(parents, parents, parents >= 0), memory
        tokens = context.pending[:, None]  # the block's so far: the pending token, then nodes level by level
        known = jnp.ones((batch, 1), bool)
        for depth in range(1, tree.max_depth + 1):
            level = tree.level(depth)
            above = np.array([tree.parents[i] + 1 for i in level])
            ranks = np.array([tree.choices[i][-1] for i in level])
            said = memory[jnp.arange(batch)[:, None], tokens[:, above], ranks]
            known = jnp.concatenate([known, known[:, above] & (said >= 0)], axis=1)
            tokens = jnp.concatenate([tokens, jnp.maximum(said, 0)], axis=1)
        return order(tokens[:, 1:], parents, known[:, 1:]), memory

    def update(self, memory: Int[Array, "B V k"], round: Round, context: Context) -> Int[Array, "B V k"]:
        assert round.logits is not None  # asked for
        draft, nodes = round.draft, 1 + round.draft.tokens.shape[1]
        pending = jnp.take_along_axis(context.tokens, round.start[:, None] - 1, axis=1)
        tokens = jnp.concatenate([pending, draft.tokens], axis=1)
        read = jnp.pad(draft.valid, ((0, 0), (1, 0)), constant_values=True) & (round.count > 0)[:, None]
        kept = jnp.arange(round.nodes.shape[1]) < round.count[:, None]
        on_path = ((round.nodes[:, None, :] == jnp.arange(nodes)[:, None]) & kept[:, None, :]).any(-1)
        # the last one on the path, or else the last one: duplicates must not be left to the order of a scatter
        weight = jnp.where(read, jnp.arange(1, nodes + 1) + nodes * on_path, 0)
        same = tokens[:, :, None] == tokens[:, None, :]
        wins = read & (jnp.where(same, weight[:, None, :], 0).max(-1) == weight)
        new = best_tokens(round.logits[:, :nodes], self.k)
        rows = _join(new[:, :, : self.fresh], _rows(memory, tokens), new[:, :, self.fresh :])
        # nothing is learned where the target's law is none
        return _write(memory, tokens, rows, wins & (new[:, :, 0] >= 0))

    def counted(self, texts: Iterable[Sequence[int]], vocab_size: int) -> "TokenRecycling":
        """A drafter whose requests start with the k tokens that followed each token most often in texts (token ids).

        Best are answers of the target itself. No target pass is needed. Only tokens that these texts do not have keep
        the row that they had before.
        """
        counts: dict[int, Counter[int]] = defaultdict(Counter)
        for text in texts:
            ids = np.asarray(text)
            if ids.ndim != 1 or (ids.size and (ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= vocab_size)):
                raise InputError(
                    f"counted: expected texts as lists of token ids from 0 to {vocab_size - 1}, got {text!r}"
                )
            for token, after in pairwise(ids.tolist()):
                counts[token][after] += 1
        matrix = self._start(vocab_size)
        for token, followers in counts.items():
            best = [after for after, _ in followers.most_common(self.k)]
            matrix[token] = best + [-1] * (self.k - len(best))
        return replace(self, matrix=jnp.asarray(matrix))

    def after(self, memory: Int[Array, "B V k"]) -> "TokenRecycling":
        """A drafter whose requests start with what a batch has learned (its `state.memory`): for each token the entries
        of the last row that knows it.
        """
        rows = np.asarray(memory)
        matrix = self._start(rows.shape[1])
        for row in rows:
            matrix = np.where(row[:, :1] >= 0, row, matrix)
        return replace(self, matrix=jnp.asarray(matrix))

    def _start(self, vocab_size: int) -> np.ndarray:
        return np.full((vocab_size, self.k), -1, np.int32) if self.matrix is None else np.array(self.matrix)


def best_tokens(logits: Float[Array, "B T V"], k: int) -> Int[Array, "B T k"]:
    """The k most likely tokens, the best first, ties by id; -1 where there are no more (or where they are not finite).

    The k best lie in the k blocks that have the largest maxima. One pass over the rows finds those maxima, and what is
    left is small: 3 ms and 10 ms for one and four blocks of 32 rows of 49152, in a loop on two busy cores, where
    `lax.top_k` takes 6 and 74.
    """
    *lead, size = logits.shape
    count = -(-size // _WIDTH)
    padding = [(0, 0)] * len(lead) + [(0, count * _WIDTH - size)]
    blocks = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(*lead, count, _WIDTH)
    chosen = _largest(blocks.max(-1), min(k, count))
    chosen = jnp.sort(jnp.where(chosen >= 0, chosen, 0), axis=-1)  # in the order of ids, for ties
    fresh = jnp.concatenate([jnp.ones((*lead, 1), bool), chosen[..., 1:] != chosen[..., :-1]], axis=-1)
    values = jnp.take_along_axis(blocks, chosen[..., None], axis=-2)
    values = jnp.where(fresh[..., None], values, -jnp.inf).reshape(*lead, -1)
    ids = (chosen[..., None] * _WIDTH + jnp.arange(_WIDTH)).reshape(*lead, -1)
    places = _largest(values, min(k, values.shape[-1]))
    tokens = jnp.where(places >= 0, jnp.take_along_axis(ids, jnp.maximum(places, 0), axis=-1), -1)
    return jnp.pad(tokens, [(0, 0)] * len(lead) + [(0, k - tokens.shape[-1])], constant_values=-1)


_WIDTH = 128  # of a block of tokens


def _largest(values: Float[Array, "*B W"], k: int) -> Int[Array, "*B k"]:
    """Places of the k largest values, the largest first, ties by place; -1 where no finite one is left."""
    size, places = values.shape[-1], []
    for _ in range(k):
        place = argmax(values)
        places.append(jnp.where(place < size, place, -1))
        values = jnp.where(jnp.arange(size) == place[..., None], -jnp.inf, values)
    return jnp.stack(places, axis=-1)


def _join(*parts: Int[Array, "B T _"]) -> Int[Array, "B T k"]:
    """Rows of k tokens out of parts, in this order, each token once; -1 is none. The second part has k entries."""
    k = parts[1].shape[-1]
    given = jnp.concatenate(parts, axis=-1)
    places = jnp.arange(given.shape[-1])
    earlier = (given[..., :, None] == given[..., None, :]) & (places < places[:, None])
    kept = (given >= 0) & ~earlier.any(-1)
    to = (kept[..., None, :] & (places <= places[:, None])).sum(-1) - 1  # kept ones up to each
    found = kept[..., None, :] & (to[..., None, :] == jnp.arange(k)[:, None])
    return jnp.where(found, given[..., None, :] + 1, 0).sum(-1, dtype=jnp.int32) - 1


def _rows(memory: Int[Array, "B V k"], tokens: Int[Array, "B T"]) -> Int[Array, "B T k"]:
    return memory[jnp.arange(tokens.shape[0])[:, None], tokens]


def _write(
    memory: Int[Array, "B V k"], tokens: Int[Array, "B T"], rows: Int[Array, "B T k"], where: Bool[Array, "B T"]
) -> Int[Array, "B V k"]:
    """Put rows where `where` says so; no token may be written twice."""
    batch, size, _ = memory.shape
    return memory.at[jnp.arange(batch)[:, None], jnp.where(where, tokens, size)].set(rows, mode="drop")
