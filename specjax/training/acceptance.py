"""How many tokens a call the drafter gives: by the engine, and beside it the estimate from given text.

The estimate is teacher-forced: the drafter guesses from every place of a text that the target wrote greedily, and
`walk` goes through it as decoding would, round by round. Over such a text a guess is accepted exactly where it is the
next token, so both numbers are the same, near-ties aside. Where they are not, training and decoding feed the drafter
differently, which is the fault that users of other trainers report most.
"""

from collections.abc import Sequence
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
from specjax.training.batches import Batch
from specjax.training.features import online
from specjax.training.objective import Objective
from specjax.trees import StaticTree


class Guesser(Protocol):
    """An objective that can say what its drafter would guess over given text."""

    @property
    def features(self) -> tuple[str, ...]: ...

    def guesses(
        self,
        network: Any,
        target: TargetModel,
        batch: Batch,
        features: dict[str, Float[Array, "B T M"]],
        count: int,
    ) -> Int[Array, "B T k"]:
        """At t, what a greedy chain drafts for the tokens t + 2, t + 3, …, given the text up to t + 1: guess i is right
        only if it would be made after the right guesses before it.
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

    def decode(self, objective: Objective, network: nnx.Module) -> Stats:
        """What the engine counts with the current weights, greedily."""
        drafter, target = objective.decoding(network, self.target)
        parts = []
        for start in range(0, len(self.prompt_ids), self.batch_size):
            prompts = [list(ids) for ids in self.prompt_ids[start : start + self.batch_size]]
            parts.append(generate(target, prompts, drafter=drafter, max_new_tokens=self.max_new_tokens).stats)
        return Stats.total(parts)

    def teacher_forced(self, objective: Guesser, network: nnx.Module, num_draft_tokens: int) -> float:
        """Tokens per call of a greedy chain of that length, from the answers as they are."""
        size = max(len(p) + len(a) for p, a in zip(self.prompt_ids, self.answer_ids, strict=True))
        size = -(-size // 128) * 128
        model: Any = self.target.model
        committed = rounds = 0
        for prompt, answer in zip(self.prompt_ids, self.answer_ids, strict=True):
            text = np.array([*prompt, *answer], np.int32)
            guesses = np.asarray(_guess(objective, network, model, _alone(text, size), num_draft_tokens))[0]
            limit = len(prompt) + self.max_new_tokens
            committed += len(answer)
            rounds += walk(text, len(prompt), limit, guesses)
        return committed / rounds


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
        guesses: see `Guesser`.
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


def _guess(objective: Any, network: Any, model: Any, batch: Batch, count: int) -> Int[Array, "B T k"]:
    with jax.default_matmul_precision("highest"):
        return _guesses(objective, network, model, batch, count)


@jax.jit(static_argnums=(0, 4))
def _guesses(objective: Any, network: Any, model: Any, batch: Batch, count: int) -> Int[Array, "B T k"]:
    batch = jax.tree.map(jnp.asarray, batch)
    return objective.guesses(network, model, batch, online(model, batch, objective.features), count)
