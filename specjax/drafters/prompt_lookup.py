"""Prompt lookup: the draft is what followed the text's last few tokens the last time they occurred."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.errors import InputError, check_block_sizes, check_whole
from specjax.state import Context, Round, static
from specjax.trees import Draft, chain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptLookup:
    """Looks the longest suffix of the text up in the text itself (Saxena 2023, "Prompt lookup decoding").

    Among the places where the longest matching n-gram occurs, the latest one that is followed by a whole draft is
    taken, or else the earliest, which is followed by the most. Runs on the device; where nothing matches, nothing is
    proposed. The defaults are the best of those tried on training prompts of several kinds on a CPU: one-token matches
    cost more in rejected drafts than they bring.

    Attributes:
        num_draft_tokens: k, tokens in a draft at most.
        max_ngram, min_ngram: lengths of the n-gram looked for, the longest first; the shortest is 2 unless said.
        window: only the last `window` tokens of the text are searched; None for all.
        block_sizes: see `Drafter`.
    """

    num_draft_tokens: int = static(default=8)
    max_ngram: int = static(default=4)
    min_ngram: int = static(default=None)
    window: int | None = static(default=None)
    block_sizes: tuple[int, ...] | None = static(default=None)

    name: ClassVar[str] = "prompt-lookup"
    features: ClassVar[tuple[str, ...]] = ()
    wants_logits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_whole("num_draft_tokens", self.num_draft_tokens, 0)
        check_whole("max_ngram", self.max_ngram, 1)
        if self.min_ngram is None:
            object.__setattr__(self, "min_ngram", min(2, self.max_ngram))
        check_whole("min_ngram", self.min_ngram, 1)
        if self.min_ngram > self.max_ngram:
            raise InputError(f"min_ngram: expected at most max_ngram, which is {self.max_ngram}, got {self.min_ngram}")
        if self.window is not None:
            check_whole("window", self.window, 1)
        check_block_sizes(self.block_sizes)

    @property
    def num_nodes(self) -> int:
        return self.num_draft_tokens

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    def init(self, context: Context, features: dict[str, Any], longest: int) -> None:
        return None

    def propose(self, memory: None, context: Context) -> tuple[Draft, None]:
        tokens, length = context.tokens, context.length[:, None]
        size, k = tokens.shape[1], self.num_draft_tokens
        place = jnp.arange(size)  # a continuation that starts here
        same = jnp.ones(tokens.shape, bool)
        matched = jnp.zeros(tokens.shape, jnp.int32)
        for j in range(self.max_ngram):  # compare the token j + 1 before the place with the one j + 1 before the end
            before = jnp.pad(tokens, ((0, 0), (j + 1, 0)))[:, :size]
            last = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - j, 0), axis=1)
            same = same & (before == last) & (place > j) & (length > j + 1)
            matched = matched + same
        known = place < length
        if self.window is not None:
            known = known & (place >= length - self.window)
        matched = jnp.where(known & (matched >= self.min_ngram), matched, 0)
        follows = length - place
        rank = jnp.where(follows >= k, size + place, size - place)  # below 2 * size
        best = jnp.argmax(matched * 2 * size + rank, axis=1)
        found = jnp.take_along_axis(matched, best[:, None], axis=1)[:, 0] > 0
        draft = jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (k,)))(
            jnp.pad(tokens, ((0, 0), (0, k))), best
        )
        num_valid = jnp.where(found, jnp.minimum(context.length - best, k), 0)
        return chain(draft, num_valid), None

    def update(self, memory: None, round: Round, context: Context) -> None:
        return None
