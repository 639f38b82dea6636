"""Suffix decoding (Oliaro et al. 2024, "SuffixDecoding"): the most frequent continuations of the longest suffix that
occurred before, in the row's own text or in a corpus of earlier ones.

    drafter = SuffixDecoding()                     # the row's own text
    out = specjax.generate(target, prompts, drafter=drafter)
    drafter = drafter.remember(out)                # and these prompts and answers, in the requests to come
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.errors import InputError, check_block_sizes, check_whole
from specjax.state import Context, Round, static
from specjax.trees import Draft, chain

if TYPE_CHECKING:
    from specjax.generate import Generation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SuffixDecoding:
    """Drafts a chain, longer where more of the text's end is found again and where its continuations agree.

    The places where some suffix of the text occurred before are found by running comparison, and the `places` best of
    them are kept: the longest matches, of equal ones the latest, those of the own text first. Then, for every match
    length m, the places that match at least m tokens vote: the next token is their most frequent one, and those that
    said so vote on. A token's probability is its share of the votes times that of the token before it. A draft ends
    before its probability falls below `min_probability`, and at `factor * m` tokens. Of all m the draft that expects
    the most accepted tokens is taken, which is the sum of its probabilities (section 4 of the paper, whose suffix trees
    hold the same counts); of equal ones that of the longest match. It is deterministic, so lossless at any temperature.

    Costs per row and round: reading corpus and text once per matched token (the search ends where nothing matches any
    longer), and votes among `places`, whatever the corpus. Nothing is remembered between rounds.

    Attributes:
        num_draft_tokens: tokens in a draft at most.
        factor: tokens drafted for each matched one at most.
        min_probability: see above; 0 drafts whatever has been seen.
        min_match, max_match: the shortest and the longest match looked for.
        places: occurrences that vote.
        corpus: `[C]` token ids of earlier texts, each text followed by -1, so that no match runs across two texts; None
            for no corpus. `remember` fills it. Another one of the same size compiles nothing.
        block_sizes: see `Drafter`.
    """

    num_draft_tokens: int = static(default=16)
    factor: float = static(default=2.0)
    min_probability: float = static(default=0.1)
    min_match: int = static(default=2)
    max_match: int = static(default=24)
    places: int = static(default=48)
    corpus: Int[Array, "C"] | None = None
    block_sizes: tuple[int, ...] | None = static(default=None)

    name: ClassVar[str] = "suffix"
    features: ClassVar[tuple[str, ...]] = ()
    wants_logits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_whole("num_draft_tokens", self.num_draft_tokens, 0)
        for name in ("min_match", "max_match", "places"):
            check_whole(name, getattr(self, name), 1)
        if self.min_match > self.max_match:
            raise InputError(f"min_match: expected at most max_match, which is {self.max_match}, got {self.min_match}")
        if not 0 < self.factor < float("inf"):
            raise InputError(f"factor: expected a number above 0, got {self.factor!r}")
        if not 0 <= self.min_probability <= 1:
            raise InputError(f"min_probability: expected a number from 0 to 1, got {self.min_probability!r}")
        check_block_sizes(self.block_sizes)

    def check(self, target: Any) -> None:
        if self.corpus is None:
            return
        corpus, size = np.asarray(self.corpus), target.model.vocab_size
        if corpus.ndim != 1 or corpus.dtype.kind != "i" or ((corpus < -1) | (corpus >= size)).any():
            raise InputError(
                f"SuffixDecoding: expected a corpus of token ids below {size} in one row, -1 after each text; "
                "for another target start with an empty one"
            )

    @property
    def num_nodes(self) -> int:
        return self.num_draft_tokens

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    def remember(self, texts: "Generation | Iterable[Sequence[int]]", capacity: int = 16_384) -> "SuffixDecoding":
        """A drafter with more texts in its corpus, the latest last; what no longer fits is forgotten, oldest first.

        Args:
            texts: a `Generation` (its prompts, each with its answer), or texts as token ids.
            capacity: tokens in the corpus, separators included; where there is a corpus, its size stays as it is.
        """
        check_whole("capacity", capacity, 2)
        rows: Iterable[Sequence[int]]
        if isinstance(texts, Iterable):
            rows = texts
        else:
            rows = [prompt + answer for prompt, answer in zip(texts.prompt_ids, texts.token_ids, strict=True)]
        old = np.full(capacity, -1, np.int32) if self.corpus is None else np.asarray(self.corpus)
        parts = [old]
        for row in rows:
            ids = np.asarray(row, np.int32)
            if ids.ndim != 1 or (ids < 0).any():
                raise InputError(f"remember: expected texts as lists of token ids, got {row!r}")
            parts += [ids, np.array([-1], np.int32)]
        return replace(self, corpus=jnp.asarray(np.concatenate(parts)[-len(old) :]))

    def init(self, context: Context, features: dict[str, Any], longest: int) -> None:
        return None

    def propose(self, memory: None, context: Context) -> tuple[Draft, None]:
        batch, k = context.tokens.shape[0], self.num_draft_tokens
        if not k:
            return chain(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32)), None
        own = jnp.where(jnp.arange(context.tokens.shape[1]) < context.length[:, None], context.tokens, -1)
        # behind a -1 of its own the corpus ends, whatever it ends with
        corpus = jnp.pad(jnp.zeros(0, jnp.int32) if self.corpus is None else self.corpus, (0, 1), constant_values=-1)
        texts = jnp.concatenate([jnp.broadcast_to(corpus, (batch, corpus.shape[0])), own], axis=1)
        matched = self._matches(texts, context)
        place, matched = _longest(jnp.where((texts >= 0) & (matched >= self.min_match), matched, 0), self.places)
        follows = jnp.pad(texts, ((0, 0), (0, k)), constant_values=-1)
        follows = jax.vmap(lambda row, at: row[at])(follows, place[:, :, None] + jnp.arange(k))
        return chain(*self._vote(follows, matched)), None

    def update(self, memory: None, round: Round, context: Context) -> None:
        return None

    def _matches(self, texts: Int[Array, "B X"], context: Context) -> Int[Array, "B X"]:
        """How many tokens before each place are those at the end of the row's text, `max_match` at most."""
        size, most = texts.shape[1], self.max_match
        padded = jnp.pad(texts, ((0, 0), (most, 0)), constant_values=-1)

        def compare(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            j, same, matched = state
            before = jax.lax.dynamic_slice_in_dim(padded, most - 1 - j, size, axis=1)
            at = context.length[:, None] - 1 - j
            last = jnp.take_along_axis(context.tokens, jnp.maximum(at, 0), axis=1)
            same = same & (before == last) & (at >= 0)
            return j + 1, same, matched + same

        start = jnp.int32(0), jnp.ones(texts.shape, bool), jnp.zeros(texts.shape, jnp.int32)
        # every place matches at the start; a row's end, where the suffix itself stands, is followed by -1: no place
        real = texts >= 0
        return jax.lax.while_loop(lambda s: (s[0] < most) & (s[1] & real).any(), compare, start)[2]

    def _vote(
        self, follows: Int[Array, "B P k"], matched: Int[Array, "B P"]
    ) -> tuple[Int[Array, "B k"], Int[Array, "B"]]:
        """The draft of the most expected tokens among those of all match lengths, and how many tokens it has."""
        batch, _, k = follows.shape
        lengths = jnp.arange(self.min_match, self.max_match + 1)
        cap = jnp.floor(self.factor * lengths + 1e-6)

        def extend(state: _Votes) -> _Votes:
            said = jax.lax.dynamic_slice_in_dim(follows, state.step, 1, axis=2)[:, :, 0]
            voting = state.voting & (said >= 0)[:, None]
            same = (said[:, :, None] == said[:, None, :]).astype(jnp.float32)
            votes = jnp.where(voting, voting.astype(jnp.float32) @ same, 0.0)  # of the token each place says
            most = votes.max(-1)
            chance = state.chance * most / jnp.maximum(voting.sum(-1), 1)
            first = jnp.argmax(votes, axis=-1)
            token = jnp.take_along_axis(said, first, axis=1)
            grows = (most > 0) & (chance >= self.min_probability) & (state.step < cap)
            chance = jnp.where(grows, chance, 0.0)
            return _Votes(
                step=state.step + 1,
                voting=voting & (said[:, None] == token[:, :, None]) & grows[:, :, None],
                chance=chance,
                expected=state.expected + chance,
                tokens=jax.lax.dynamic_update_slice_in_dim(state.tokens, token[:, :, None], state.step, axis=2),
                count=state.count + grows,
            )

        levels = (batch, lengths.shape[0])
        start = _Votes(
            step=jnp.int32(0),
            voting=matched[:, None, :] >= lengths[:, None],
            chance=jnp.ones(levels),
            expected=jnp.zeros(levels),
            tokens=jnp.zeros((*levels, k), jnp.int32),
            count=jnp.zeros(levels, jnp.int32),
        )
        end = jax.lax.while_loop(lambda s: (s.step < k) & s.voting.any(), extend, start)
        best = levels[1] - 1 - jnp.argmax(end.expected[:, ::-1], axis=1)
        chosen = jax.vmap(lambda rows, at: rows[at])
        return jnp.maximum(chosen(end.tokens, best), 0), chosen(end.count, best)


def _longest(matched: Int[Array, "B X"], few: int) -> tuple[Int[Array, "B P"], Int[Array, "B P"]]:
    """The `few` places with the longest matches, of equal ones the latest, and the matches; 0 where there are no more.

    One place a turn, until no row has any: usually there are few. (`lax.top_k` would sort the whole text.)
    """
    batch, size = matched.shape
    scores = jnp.where(matched > 0, matched * size + jnp.arange(size), 0)  # all different, and they tell the place
    blocks = jnp.pad(scores, ((0, 0), (0, -size % _WIDTH))).reshape(batch, -1, _WIDTH)
    row = jnp.arange(batch)

    def take(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        i, tops, found = state
        best = tops.max(-1)
        block = best % size // _WIDTH
        inside = blocks[row, block]
        below = jnp.where(inside < best[:, None], inside, 0).max(-1)
        return i + 1, tops.at[row, block].set(below), found.at[:, i].set(best)

    start = jnp.int32(0), blocks.max(-1), jnp.zeros((batch, few), scores.dtype)
    found = jax.lax.while_loop(lambda state: (state[0] < few) & (state[1] > 0).any(), take, start)[2]
    return found % size, found // size


_WIDTH = 128  # of a block of places


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Votes:
    """Drafts that grow, one for each of M match lengths, P places voting.

    Attributes:
        step: tokens so far.
        voting: places that said every token of the draft so far.
        chance: probability of the last token (0 where the draft has ended).
        expected: the sum of those.
        tokens, count: the drafts.
    """

    step: Int[Array, ""]
    voting: Bool[Array, "B M P"]
    chance: Float[Array, "B M"]
    expected: Float[Array, "B M"]
    tokens: Int[Array, "B M k"]
    count: Int[Array, "B M"]
