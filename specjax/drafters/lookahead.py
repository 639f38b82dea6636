"""Lookahead decoding (Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding"): the
target writes ahead of the text in several places at once, and what it wrote there is drafted when the text gets there.

    drafter = LookaheadDecoding()                             # W = 15, N = 5, G = 15
    drafter = LookaheadDecoding(window=0, ngram=5, guesses=7)   # only what the text itself has shown

Both branches of the paper are one target pass: candidates are the nodes of the draft, the window is its probes.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax.errors import InputError, check_block_sizes, check_whole
from specjax.sampling import argmax
from specjax.state import Context, Round, static
from specjax.trees import Draft, Probes, order


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """What a row has collected; n is the length of an n-gram.

    Attributes:
        pool: for each token the n - 1 tokens that followed it, G times, the latest first; -1 where there are no more.
        window: trajectories, one a column, a level for each of the last n - 1 rounds, the oldest first. The pending
            token stands for what is in the first column of the first level.
        age: rounds that the window has been through.
    """

    pool: Int[Array, "B V G n-1"]
    window: Int[Array, "B n-1 W"]
    age: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LookaheadDecoding:
    """Drafts a tree of n-grams that begin with the pending token, out of a pool that a window of guesses fills.

    *Lookahead branch.* The window has W columns and N - 1 levels. Column i of level l stands i + l positions behind the
    pending token, which is column 0 of level 0 itself. It sees the text, level 0 up to its own column, and its own
    column up to its own level (Figure 2 of the paper). Each round appends to every column the target's most likely
    token after it, and drops level 0: a column is a text that the target goes on with, one token a round, in front of
    tokens that change. Before that the column, an n-gram now, goes into the pool.

    *Verification branch.* The G latest n-grams that begin with the pending token are verified together, with what
    begins alike as one node. Nodes are deterministic, so the tree is lossless at any temperature. (Trajectories are
    greedy at any temperature, as the authors' are.)

    The window starts with random tokens of the prompt, and its n-grams count once the target has written all but the
    first token of them. It moves by one position a round, however many tokens were accepted, as in the authors' code.
    The pool also keeps the n-grams of the committed text, which with W = 0 are all there is, and by default the
    prompt's; the authors' code has both as one option.

    Costs: blocks of up to (N - 1) (G + W) tokens; the pool, `[B, V, G, N - 1]` int32 (V = 49152 and the defaults: 12 MB
    a row), updated in place; and, where there is a window, the block's logits, `[B, T, V]`.

    Attributes:
        window: W, trajectories; 0 for no window, which leaves out the probes.
        ngram: N, tokens of an n-gram: the one it is found by and N - 1 that are drafted. At least 3 with a window.
        guesses: G, n-grams kept of each token, and verified together.
        seed_prompt: whether the prompt's own n-grams are put into the pool.
        block_sizes: see `Drafter`; the window's tokens come on top.
    """

    window: int = static(default=15)
    ngram: int = static(default=5)
    guesses: int = static(default=15)
    seed_prompt: bool = static(default=True)
    block_sizes: tuple[int, ...] | None = static(default=None)

    name: ClassVar[str] = "lookahead"
    features: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_whole("window", self.window, 0)
        check_whole("ngram", self.ngram, 2)
        check_whole("guesses", self.guesses, 1)
        if self.window and self.ngram < 3:
            raise InputError(
                f"ngram: expected at least 3 with a window, got {self.ngram}; window=0 takes pairs of the text alone"
            )
        check_block_sizes(self.block_sizes)

    @property
    def num_nodes(self) -> int:
        return self.guesses * (self.ngram - 1)

    @property
    def max_depth(self) -> int:
        return self.ngram - 1

    @property
    def wants_logits(self) -> bool:
        return self.window > 0

    def init(self, context: Context, features: dict[str, Any], longest: int) -> Memory:
        batch, capacity = context.tokens.shape
        pool = jnp.full((batch, context.model.vocab_size, self.guesses, self.ngram - 1), -1, jnp.int32)
        if self.seed_prompt:

            def put(i: Array, pool: Array) -> Array:
                gram = jax.lax.dynamic_slice_in_dim(context.tokens, i, self.ngram, axis=1)
                return remember(pool, gram[:, None], (i + self.ngram <= context.length)[:, None])

            pool = jax.lax.fori_loop(0, max(min(longest + 1, capacity) + 1 - self.ngram, 0), put, pool)

        def some(key: Array, tokens: Array, length: Array) -> Array:
            return tokens[jax.random.randint(key, (self.ngram - 1, self.window), 0, length)]

        window = jax.vmap(some)(context.key, context.tokens, context.length)
        return Memory(pool, window.astype(jnp.int32), jnp.zeros(batch, jnp.int32))

    def propose(self, memory: Memory, context: Context) -> tuple[Draft, Memory]:
        guesses = memory.pool[jnp.arange(context.length.shape[0]), context.pending]
        draft = fold(guesses, guesses[:, :, 0] >= 0)
        if self.window:
            draft = replace(draft, probes=self._probes(memory.window))
        return draft, memory

    def update(self, memory: Memory, round: Round, context: Context) -> Memory:
        grams, real = _latest(round, context, self.ngram)
        window, age, probes = memory.window, memory.age, round.draft.probes
        if self.window and probes is not None:
            assert round.logits is not None  # asked for
            # where the target's law is none any token will do: what comes of it is no more than a guess
            said = jnp.minimum(argmax(round.logits[:, -self.window :]), round.logits.shape[-1] - 1)
            ran = probes.valid.all(-1) & (round.count > 0)
            pending = jnp.take_along_axis(context.tokens, round.start[:, None] - 1, axis=1)[:, 0]
            levels = jnp.concatenate([window.at[:, 0, 0].set(pending), said[:, None]], axis=1)
            written = jnp.broadcast_to((ran & (age >= self.ngram - 2))[:, None], said.shape)
            grams = jnp.concatenate([levels.swapaxes(1, 2), grams], axis=1)
            real = jnp.concatenate([written, real], axis=1)
            window = jnp.where(ran[:, None, None], levels[:, 1:], window)
            age = age + ran
        return Memory(remember(memory.pool, grams, real), window, age)

    def _probes(self, window: Int[Array, "B n-1 W"]) -> Probes:
        """The window but its first place, level by level; the last W of them say what comes next."""
        batch, levels, width = window.shape
        level, column = np.divmod(np.arange(levels * width, dtype=np.int32), width)
        above = (level <= level[:, None]) & (column == column[:, None])
        sees = above | ((level == 0) & (column <= column[:, None]))
        mask = np.insert(sees, [1] * self.num_nodes, False, axis=1)[1:]  # the first place is the pending token's
        tokens = window.reshape(batch, -1)[:, 1:]
        return Probes(
            tokens=tokens,
            offsets=jnp.broadcast_to(jnp.asarray(level + column)[1:], tokens.shape),
            mask=jnp.broadcast_to(jnp.asarray(mask), (batch, *mask.shape)),
            valid=jnp.ones(tokens.shape, bool),
        )


def fold(guesses: Int[Array, "B G D"], real: Bool[Array, "B G"]) -> Draft:
    """The tree of several continuations of the pending token: what begins alike is one node.

    Args:
        guesses: D tokens each; they come into the tree in this order.
        real: the others are left out.
    """
    batch, number, depth = guesses.shape
    equal = (guesses[:, :, None] == guesses[:, None]) & real[:, None, :, None]
    alike = jnp.cumprod(equal, axis=-1) > 0  # [b, i, j, d]: j is as i up to there
    first = jnp.argmax(alike, axis=2)
    valid = (first == jnp.arange(number)[:, None]) & real[:, :, None]
    above = first[:, :, :-1] * depth + jnp.arange(depth - 1)
    parents = jnp.pad(above, ((0, 0), (0, 0), (1, 0)), constant_values=-1).astype(jnp.int32)
    tokens, parents, valid = (x.reshape(batch, number * depth) for x in (jnp.maximum(guesses, 0), parents, valid))
    return order(tokens, parents, valid)


def remember(
    pool: Int[Array, "B V G n-1"], grams: Int[Array, "B I n"], real: Bool[Array, "B I"]
) -> Int[Array, "B V G n-1"]:
    """Put n-grams into the pool one after the other, each as its first token's latest: one that was there moves up, and
    what G later ones follow is forgotten.

    Args:
        real: the others are left out.
    """
    batch, size, most, _ = pool.shape
    row, places = jnp.arange(batch)[:, None], jnp.arange(grams.shape[1])
    tokens, new = grams[:, :, 0], grams[:, :, 1:]
    same = (tokens[:, :, None] == tokens[:, None]) & real[:, None]
    # The G latest different ones are what is left of a row, in whatever steps they came: the last n-gram of a token
    # writes for all of them.
    last = real & ~(same & (places > places[:, None])).any(-1)
    mine = jnp.where(same[..., None], new[:, None], -1)[:, :, ::-1]
    given = jnp.concatenate([mine, pool[row, tokens]], axis=2)
    spots = jnp.arange(given.shape[2])
    earlier = (given[:, :, :, None] == given[:, :, None]).all(-1) & (spots < spots[:, None])
    kept = (given[..., 0] >= 0) & ~earlier.any(-1)
    to = jnp.cumsum(kept, axis=-1) - 1
    chosen = kept[:, :, None] & (to[:, :, None] == jnp.arange(most)[:, None])
    found = jnp.take_along_axis(given, jnp.where(chosen, spots, 0).sum(-1)[..., None], axis=2)
    rows = jnp.where(chosen.any(-1)[..., None], found, -1)
    return pool.at[row, jnp.where(last, tokens, size)].set(rows, mode="drop")


def _latest(round: Round, context: Context, n: int) -> tuple[Int[Array, "B I n"], Bool[Array, "B I"]]:
    """The n-grams that end with a token committed in this round, in the text's order."""
    index = jnp.arange(round.tokens.shape[1])
    starts = round.start[:, None] + index + 1 - n
    grams = jax.vmap(lambda text, at: text[at])(context.tokens, jnp.maximum(starts, 0)[:, :, None] + jnp.arange(n))
    return grams, (index < round.count[:, None]) & (starts >= 0)
