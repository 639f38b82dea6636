"""Answers written by the target itself, in its own template: what a drafter of that target should be trained on.

A row holds `prompt_ids`, the ids that the target saw, and `token_ids`, those it wrote; `read_conversations` reads them,
and nothing renders them again. Rows come in shards. All of a row's randomness comes from its index, and which rows
share a batch from the lengths of a shard's prompts, so a run that was killed goes on to give the rows of an unbroken
one.
"""

import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.drafters.prompt_lookup import PromptLookup
from specjax.errors import InputError, check_whole
from specjax.models.target import Target
from specjax.sampling import Sampling
from specjax.state import Drafter
from specjax.training.answers import Answer, decode_all
from specjax.training.prompts import PromptFiles, Request
from specjax.training.questions import find_fault, same_text, user_turn
from specjax.training.rendering import RESERVED
from specjax.training.shards import Run, open_run

QUESTION, ANSWER = 0, 1  # uses of a row's seed
TOO_LONG = "too long"  # prompts that leave the context, or the recipe's limit, no room
DRAFTERS: dict[str, Drafter | None] = {"plain": None, "prompt-lookup": PromptLookup()}

# bytes of JSON that a token's text takes, at most on average; English has about four and a half
_TEXT_BYTES = 6
_ROW_BYTES = 300


@dataclass(frozen=True)
class Recipe:
    """What rows depend on besides the target and the prompts; a run is continued with the recipe it began with.

    Attributes:
        max_new_tokens: of an answer; a longer one is cut and says so (`finish_reason` "length").
        temperature, top_k, top_p, min_p: how answers are drawn; temperature 0 is greedy.
        question_tokens: of a question; longer ones are dropped.
        question_temperature, question_top_p: how questions are drawn.
        max_prompt_tokens: longer prompts are left out and counted.
        template_options: variables for the chat template, such as `enable_thinking`.
        seed: of everything drawn.
        batch_size: prompts decoded together; batches shrink, see `answers`.
        shard_size: prompts (or questions) of a shard. A batch is made of one shard's prompts, and a killed run loses
            the shard that it was at.
        drafter: "plain" or "prompt-lookup".
        compress: write .jsonl.gz.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    question_tokens: int = 256
    question_temperature: float = 1.0
    question_top_p: float = 0.95
    max_prompt_tokens: int = 1024
    template_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    batch_size: int = 32
    shard_size: int = 256
    drafter: str = "plain"
    compress: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "question_tokens", "max_prompt_tokens", "batch_size", "shard_size"):
            check_whole(name, getattr(self, name), 1)
        check_whole("seed", self.seed, 0)
        if self.drafter not in DRAFTERS:
            raise InputError(f"drafter {self.drafter!r}: expected one of {', '.join(DRAFTERS)}")
        if taken := [name for name in RESERVED if name in self.template_options]:
            raise InputError(f"template option {taken[0]!r}: it is set for each rendering; expected other variables")
        self.sampling.validate(1)
        self.question_sampling.validate(1)
        if self.question_temperature == 0:
            raise InputError("question_temperature 0: all questions would be the same one; expected more than 0")

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    @property
    def question_sampling(self) -> Sampling:
        return Sampling(temperature=self.question_temperature, top_p=self.question_top_p)


@dataclass(frozen=True)
class FromNothing:
    """So many questions, written by the target; those that are of no use are dropped and not replaced."""

    count: int

    def __post_init__(self) -> None:
        check_whole("questions from nothing", self.count, 1)


Progress = Callable[[int, int | None], None]
"""Called with a number of texts that have ended and their tokens; None for texts of shards that were there before."""


def synthesize(
    target: Target,
    prompts: PromptFiles | FromNothing,
    recipe: Recipe,
    output: str | Path,
    budget_mb: float | None = None,
    progress: Progress = lambda texts, tokens: None,
) -> Run:
    """Write rows until all shards are there; returns the finished run.

    A directory that holds part of the same run is continued, one that holds all of it is left as it is.

    Args:
        prompts: from `read_prompts`, or a number of questions to be made up.
        output: directory for shards and manifest.
        budget_mb: megabytes that the finished run may take at most, by an estimate made before anything is computed.
        progress: told of texts as they end.

    Raises:
        InputError: prompts that cannot be rendered, a run of another recipe in the directory, a run over budget.
        SpecjaxError: a shard that cannot be written; those before it stay.
    """
    size = num_prompts(prompts)
    first = _encode_first(target, prompts, recipe)
    _check_budget(largest_size(target, prompts, first, recipe), budget_mb, size)
    identity = {"settings": _settings(recipe), "target": _describe(target), "prompts": _origin(prompts)}
    versions = {"python": platform.python_version(), "jax": jax.__version__}
    notes = {"target_name": target.name, "target_revision": target.revision, "versions": versions}
    run = open_run(Path(output), identity, -(-size // recipe.shard_size), notes)
    seen: set[str] = set()
    for number in range(run.num_shards):
        start, end = number * recipe.shard_size, min((number + 1) * recipe.shard_size, size)
        if number in run.shards:
            rows = run.rows(number) if isinstance(prompts, FromNothing) else []
            progress(num_texts(prompts, start, end), None)
        else:
            began = time.monotonic()
            rows, dropped = _make_shard(target, prompts, first, recipe, range(start, end), seen, progress)
            run.add(number, rows, dropped, began, recipe.compress)
        if isinstance(prompts, FromNothing):
            seen |= {same_text(_question(row)) for row in rows}
    return run


def num_prompts(prompts: PromptFiles | FromNothing) -> int:
    return prompts.count if isinstance(prompts, FromNothing) else len(prompts.requests)


def num_texts(prompts: PromptFiles | FromNothing, start: int = 0, end: int | None = None) -> int:
    """How many texts the target writes for some of the prompts, at most: what `progress` counts."""
    if isinstance(prompts, FromNothing):
        return 2 * len(range(prompts.count)[start:end])
    return sum(request.num_answers for request in prompts.requests[start:end])


def largest_size(
    target: Target, prompts: PromptFiles | FromNothing, first: Sequence[Sequence[int]], recipe: Recipe
) -> int:
    """Bytes of all rows before compression, where every answer has the most tokens it may have.

    Args:
        first: ids of each request's first prompt.
    """
    token = len(str(target.model.vocab_size - 1)) + 1 + _TEXT_BYTES
    answer = recipe.max_new_tokens
    if isinstance(prompts, FromNothing):
        opening = len(user_turn(target, recipe.template_options).opening) + 32  # and what the template adds after it
        return prompts.count * (_ROW_BYTES + token * (opening + recipe.question_tokens + answer))
    tokens = 0
    for request, ids in zip(prompts.requests, first, strict=True):
        prompt = len(ids)
        for turn in range(request.num_answers):
            tokens += min(prompt, recipe.max_prompt_tokens) + answer
            more = "".join(str(m["content"]) for m in request.turns[turn + 1]) if turn + 1 < request.num_answers else ""
            prompt += answer + len(more) // 2 + 32
    return token * tokens + _ROW_BYTES * num_texts(prompts)


def row_seed(seed: int, index: int, use: int, turn: int = 0) -> int:
    """The seed of one text: `generate(target, [row["prompt_ids"]], seed=[row["seed"]], …)` writes it again."""
    return int(np.random.SeedSequence([seed, index, use, turn]).generate_state(1)[0])


def _make_shard(
    target: Target,
    prompts: PromptFiles | FromNothing,
    first: Sequence[list[int]],
    recipe: Recipe,
    part: range,
    seen: set[str],
    progress: Progress,
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    dropped: Counter[str] = Counter()
    if isinstance(prompts, FromNothing):
        requests = _ask(target, recipe, part, seen, dropped, progress)
        encoded = [_encode(target, request, request.turns[0], recipe) for request in requests]
    else:
        requests, encoded = list(prompts.requests[part.start : part.stop]), list(first[part.start : part.stop])
    rows = _answer(target, requests, encoded, recipe, dropped, progress)
    return rows, dict(sorted(dropped.items()))


def _ask(
    target: Target, recipe: Recipe, part: range, seen: set[str], dropped: Counter[str], progress: Progress
) -> list[Request]:
    """The questions of some indices that are of use."""
    turn = user_turn(target, recipe.template_options)
    tokenizer = turn.target.tokenizer
    assert tokenizer is not None  # `user_turn`
    questions = decode_all(
        turn.target,
        [turn.opening] * len(part),
        [row_seed(recipe.seed, index, QUESTION) for index in part],
        recipe.batch_size,
        max_new_tokens=recipe.question_tokens,
        sampling=recipe.question_sampling,
        stop=turn.stop,
        done=lambda answers: progress(len(answers), _count(answers)),
    )
    requests, seen = [], set(seen)
    for index, question in zip(part, questions, strict=True):
        fault = find_fault(tokenizer, question, seen)
        if fault is not None:
            dropped[fault] += 1
            continue
        text = question.text.strip()
        seen.add(same_text(text))
        requests.append(Request(index, f"question {index}", (({"role": "user", "content": text},),)))
    progress(len(part) - len(requests), 0)
    return requests


def _answer(
    target: Target,
    requests: Sequence[Request],
    encoded: Sequence[list[int]],
    recipe: Recipe,
    dropped: Counter[str],
    progress: Progress,
) -> list[dict[str, Any]]:
    """A row for each answer, turn by turn: own answers are the history of those after them."""
    rows: list[dict[str, Any]] = []
    longest = min(recipe.max_prompt_tokens, target.model.max_positions - 1)
    going = [(request, list(request.turns[0]) if request.turns else []) for request in requests]
    prompts = list(encoded)
    turn = 0
    while going:
        kept = [n for n, ids in enumerate(prompts) if len(ids) <= longest]
        lost = [request.num_answers - turn for n, (request, _) in enumerate(going) if len(prompts[n]) > longest]
        if lost:
            dropped[TOO_LONG] += sum(lost)
            progress(sum(lost), 0)
        going, prompts = [going[n] for n in kept], [prompts[n] for n in kept]
        seeds = [row_seed(recipe.seed, request.index, ANSWER, turn) for request, _ in going]
        answers = decode_all(
            target,
            prompts,
            seeds,
            recipe.batch_size,
            drafter=DRAFTERS[recipe.drafter],
            max_new_tokens=recipe.max_new_tokens,
            sampling=recipe.sampling,
            done=lambda answers: progress(len(answers), _count(answers)),
        )
        for (request, chat), ids, seed, answer in zip(going, prompts, seeds, answers, strict=True):
            if request.turns:
                chat.append({"role": "assistant", "content": answer.text})
            rows.append(_row(request, turn, seed, list(chat), ids, answer))
        turn += 1
        going = [(request, chat) for request, chat in going if turn < request.num_answers]
        for request, chat in going:
            chat += request.turns[turn]
        prompts = [_encode(target, request, chat, recipe) for request, chat in going]
    return sorted(rows, key=lambda row: (row["index"], row["turn"]))


def _row(
    request: Request, turn: int, seed: int, chat: list[Mapping[str, Any]], ids: list[int], answer: Answer
) -> dict[str, Any]:
    row: dict[str, Any] = {"index": request.index, "turn": turn, "source": request.source, "seed": seed}
    row["finish_reason"] = answer.finish_reason
    if chat:
        row["messages"] = chat
    if request.tools:
        row["tools"] = request.tools
    return row | {"prompt_ids": ids, "token_ids": answer.token_ids}


def _question(row: Mapping[str, Any]) -> str:
    return str(row["messages"][0]["content"])


def _encode_first(target: Target, prompts: PromptFiles | FromNothing, recipe: Recipe) -> list[list[int]]:
    """The prompts of all first turns: what cannot be rendered is found before anything is computed."""
    if isinstance(prompts, FromNothing):
        return []
    return [_encode(target, request, request.turns[0] if request.turns else (), recipe) for request in prompts.requests]


def _encode(target: Target, request: Request, chat: Sequence[Mapping[str, Any]], recipe: Recipe) -> list[int]:
    """The prompt as the target sees it."""
    if request.prompt_ids is not None:
        largest, size = max(request.prompt_ids), target.model.vocab_size
        if largest >= size:
            raise InputError(f"{request.where}: token id {largest} is outside the target's vocabulary of {size}")
        return list(request.prompt_ids)
    if target.tokenizer is None:
        raise InputError(f"{request.where}: this target has no tokenizer; expected prompt_ids")
    options = dict(recipe.template_options) | ({"tools": request.tools} if request.tools else {})
    try:
        return target.tokenizer.encode_chat(chat, **options)
    except InputError as error:
        raise InputError(f"{request.where}: {error}") from None


def _check_budget(largest: int, budget_mb: float | None, prompts: int) -> None:
    if budget_mb is not None and largest > budget_mb * 1e6:
        raise InputError(
            f"{prompts} prompts may take up to {largest / 1e6:,.1f} MB, over the budget of {budget_mb:g} MB; "
            "raise the budget, or lower the number of prompts or max_new_tokens"
        )


def _settings(recipe: Recipe) -> dict[str, Any]:
    return asdict(recipe) | {"template_options": dict(recipe.template_options)}


def _describe(target: Target) -> dict[str, Any]:
    """What makes a target the same one; its name only where it came from no file."""
    tokenizer = target.tokenizer
    return {
        "weights": target.weights_hash or target.name,
        "dtype": target.dtype,
        "template": tokenizer.template_hash if tokenizer is not None else None,
        "eos_token_ids": list(target.eos_token_ids),
        "platform": jax.default_backend(),
    }


def _origin(prompts: PromptFiles | FromNothing) -> dict[str, Any]:
    if isinstance(prompts, FromNothing):
        return {"from_nothing": prompts.count}
    return {
        "files": [{"file": name, "sha256": digest} for name, digest in prompts.files],
        "read": prompts.read,
        "duplicates": prompts.duplicates,
        "number": len(prompts.requests),
        "texts": num_texts(prompts),
    }


def _count(answers: Sequence[Answer]) -> int:
    return sum(len(answer.token_ids) for answer in answers)
