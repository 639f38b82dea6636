"""How many tokens a call the drafter gives: by the engine, and beside it the estimate from given text.

The estimate is teacher-forced: the drafter guesses from every place of a text that the target wrote greedily, and
`walk` goes through it as decoding would, round by round. Over such a text a guess is accepted exactly where it is the
next token, so both numbers are the same, near-ties aside. Where they are not, training and decoding feed the drafter
differently, which is the fault that users of other trainers report most.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax.errors import InputError
from specjax.generate import generate
from specjax.metrics import Stats
from specjax.models.interface import TargetModel
from specjax.models.target import Target
from specjax.requests import Prompt
from specjax.state import Drafter
from specjax.training.batches import Batch
from specjax.training.features import online
from specjax.training.objective import Objective
from specjax.trees import StaticTree


class Guesser(Protocol):
    """An objective that can say what its drafter would guess over given text."""

    @property
    def features(self) -> tuple[str, ...]: ...

    def ranked(
        self,
        network: Any,
        target: TargetModel,
        batch: Batch,
        features: dict[str, Float[Array, "B T M"]],
        count: int,
        ranks: int,
    ) -> Int[Array, "B T k R"]:
        """At t, the most likely tokens for the places t + 2, t + 3, …, best first, given the text up to before each
        place: what a draft from t has there if it was right so far.
        """
        ...


@dataclass(frozen=True)
class HeldOut:
    """Prompts with the target's own greedy answers, to measure a drafter on.

    Attributes:
        target: who wrote the answers.
        prompt_ids, answer_ids: the texts.
        batch_size: prompts decoded at once.
    """

    target: Target
    prompt_ids: tuple[tuple[int, ...], ...]
    answer_ids: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    batch_size: int

    @classmethod
    def of(cls, target: Target, prompts: Sequence[Prompt], max_new_tokens: int = 128, batch_size: int = 8) -> "HeldOut":
        """Let the target answer, plainly."""
        if not prompts:
            raise InputError("no held-out prompts to measure tokens per call on")
        ids: list[tuple[int, ...]] = []
        answers: list[tuple[int, ...]] = []
        for start in range(0, len(prompts), batch_size):
            result = generate(target, prompts[start : start + batch_size], max_new_tokens=max_new_tokens)
            ids += map(tuple, result.prompt_ids)
            answers += map(tuple, result.token_ids)
        return cls(target, tuple(ids), tuple(answers), max_new_tokens, batch_size)

    def answered_by(self, target: Target) -> "HeldOut":
        """The same prompts with another target's answers."""
        return HeldOut.of(target, [list(p) for p in self.prompt_ids], self.max_new_tokens, self.batch_size)

    def decode(self, objective: Objective, network: nnx.Module) -> Stats:
        """What the engine counts with the current weights, greedily."""
        return self.decode_with(*objective.decoding(network, self.target))

    def decode_with(self, drafter: Drafter, target: Target) -> Stats:
        """What the engine counts with a drafter, greedily."""
        parts = []
        for start in range(0, len(self.prompt_ids), self.batch_size):
            prompts = [list(ids) for ids in self.prompt_ids[start : start + self.batch_size]]
            parts.append(generate(target, prompts, drafter=drafter, max_new_tokens=self.max_new_tokens).stats)
        return Stats.total(parts)

    def teacher_forced(self, objective: Guesser, network: nnx.Module, num_draft_tokens: int) -> float:
        """Tokens per call of a greedy chain of that length, from the answers as they are."""
        committed = rounds = 0
        for text, start, ranked in self._ranked(objective, network, num_draft_tokens, 1):
            committed += len(text) - start
            rounds += walk(text, start, start + self.max_new_tokens, ranked[..., 0])
        return committed / rounds

    def rank_accuracies(
        self, objective: Guesser, network: nnx.Module, depth: int, ranks: int
    ) -> Float[np.ndarray, "D R"]:
        """How often the token at each depth of a draft is its r-th most likely guess, from every place of the answers:
        what `best_tree` makes a static tree of.
        """
        hits, places = np.zeros((depth, ranks)), np.zeros((depth, 1))
        for text, start, ranked in self._ranked(objective, network, depth, ranks):
            for i in range(depth):
                pending = np.arange(max(start, 2), len(text) - i)  # committed length before the round
                hits[i] += (ranked[pending - 2, i] == text[pending + i, None]).sum(0)
                places[i] += len(pending)
        return hits / np.maximum(places, 1)

    def _ranked(
        self, objective: Guesser, network: nnx.Module, count: int, ranks: int
    ) -> Iterator[tuple[Int[np.ndarray, "n"], int, Int[np.ndarray, "T k R"]]]:
        """Each text, the length of its prompt, and the guesses over it."""
        size = max(len(p) + len(a) for p, a in zip(self.prompt_ids, self.answer_ids, strict=True))
        size = -(-size // 128) * 128
        model: Any = self.target.model
        for prompt, answer in zip(self.prompt_ids, self.answer_ids, strict=True):
            text = np.array([*prompt, *answer], np.int32)
            with jax.default_matmul_precision("highest"):
                found = _guess(objective, network, model, _alone(text, size), count, ranks)
            yield text, len(prompt), np.asarray(found)[0]


def chain_length(tree: Any) -> int | None:
    """Nodes of a tree that is a chain; None of any other."""
    return tree.num_nodes if isinstance(tree, StaticTree) and tree.is_chain else None


def walk(text: Int[np.ndarray, "n"], prompt_length: int, limit: int, guesses: Int[np.ndarray, "T k"]) -> int:
    """Rounds that greedy decoding takes for the text after the prompt.

    With n tokens committed the draft comes from place n - 2 (there is none before the second token), of at most
    `limit - n - 1` tokens; its right beginning is committed, and one token more.

    Args:
        text: prompt and answer.
        limit: length at which the row ends.
        guesses: the likeliest of `Guesser.ranked`.
    """
    length, rounds = prompt_length, 0
    while length < len(text):
        ahead = text[length : length + guesses.shape[1]]
        ahead = ahead[: max(limit - length - 1, 0)]
        right = guesses[length - 2, : len(ahead)] == ahead if length > 1 else np.zeros(0, bool)
        length += int(np.cumprod(right).sum()) + 1
        rounds += 1
    return rounds


def _alone(text: Int[np.ndarray, "n"], size: int) -> Batch:
    """One text as a batch of one row."""
    real = np.arange(size) < len(text)
    tokens = np.zeros((1, size), np.int32)
    tokens[0, : len(text)] = text
    positions = np.where(real, np.arange(size), 0)[None].astype(np.int32)
    return Batch(tokens, real[None], real[None].astype(np.int32), positions, np.zeros(1, np.int32))


@jax.jit(static_argnums=(0, 4, 5))
def _guess(objective: Any, network: Any, model: Any, batch: Batch, count: int, ranks: int) -> Int[Array, "B T k R"]:
    batch = jax.tree.map(jnp.asarray, batch)
    return objective.ranked(network, model, batch, online(model, batch, objective.features), count, ranks)
