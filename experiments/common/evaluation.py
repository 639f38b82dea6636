"""Decode conversations plainly and with drafters in turns, and keep every timed call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import specjax
from common.drafters import PLAIN, Named
from common.prompts import Conversation, messages, prompt_ids
from common.timing import without_compiling
from specjax import Generation, InputError, Sampling, Target

TURN_STRIDE = 1_000_003  # seeds of a prompt's turns lie this far apart


@dataclass(frozen=True)
class Unit:
    """Conversations of one task that are decoded as one batch; `batch_size` of them, fewer at a task's end."""

    task: str
    members: tuple[Conversation, ...]


@dataclass(frozen=True)
class Plan:
    """How to decode.

    Attributes:
        batch_size: a smaller batch is filled up by repeating its prompts, so that a task runs one program.
        law: acceptance law of all but plain decoding; None: the lossless one for these settings.
        seed: each prompt's own seed is made of it, its place in the file and the turn.
        repetitions: how often the first `repeated_units` units of each task are decoded; the others are decoded once.
    """

    batch_size: int
    max_new_tokens: int
    sampling: Sampling
    law: str | None
    seed: int
    repetitions: int
    repeated_units: int


@dataclass(frozen=True)
class Call:
    """One turn of one unit with one drafter.

    Attributes:
        unit: its number.
        turn: from 0.
        rows: the conversations that have such a turn. The generation's first rows are theirs, in this order; the other
            ones are repeats.
        generation: what came out, trace included.
        seconds, prefill_seconds: of each time it was decoded.
    """

    task: str
    unit: int
    turn: int
    drafter: Named
    rows: tuple[Conversation, ...]
    generation: Generation
    seconds: tuple[float, ...]
    prefill_seconds: tuple[float, ...]


def make_units(conversations: Sequence[Conversation], batch_size: int) -> list[Unit]:
    """Batches within each task."""
    units = []
    for task in dict.fromkeys(c.task for c in conversations):
        members = [c for c in conversations if c.task == task]
        units += [Unit(task, tuple(members[i : i + batch_size])) for i in range(0, len(members), batch_size)]
    return units


def check_prompts(target: Target, conversations: Sequence[Conversation]) -> None:
    """Raise InputError for a first turn that the target's context cannot hold."""
    context = target.model.max_positions
    for c in conversations:
        size = len(prompt_ids(target, c))
        if size >= context:
            raise InputError(
                f"prompt {c.question_id} of {c.task} has {size} tokens, but the context of {context} must hold the "
                "prompt and at least one new token; leave it out or shorten it"
            )


def evaluate(
    target: Target, drafters: Sequence[Named], units: Sequence[Unit], plan: Plan, done: Callable[[list[Call]], None]
) -> tuple[list[Call], float]:
    """Every unit, turn by turn, with every drafter. Plain decoding's answers are the history that all of them see; a
    conversation ends early where its history fills the context.

    Args:
        drafters: plain decoding first.
        done: called with the calls of a unit after it.

    Returns:
        The calls, and the seconds that went into warming up (compiling, and the runs thrown away for it).
    """
    calls: list[Call] = []
    warming = 0.0
    seen: dict[str, int] = {}
    for number, unit in enumerate(units):
        repetitions = plan.repetitions if seen.get(unit.task, 0) < plan.repeated_units else 1
        seen[unit.task] = seen.get(unit.task, 0) + 1
        answers: dict[int, list[str]] = {c.index: [] for c in unit.members}
        turn, rows = 0, unit.members
        first = len(calls)
        while rows:
            new, warmed = _decode_turn(target, drafters, unit, number, turn, rows, answers, repetitions, plan)
            calls += new
            warming += warmed
            plain = next(call for call in new if call.drafter.kind == PLAIN)
            for c, text in zip(rows, plain.generation.texts, strict=False):
                answers[c.index].append(text)
            turn += 1
            rows = tuple(
                c
                for c in rows
                if turn < len(c.turns) and len(prompt_ids(target, c, answers[c.index])) < target.model.max_positions
            )
        done(calls[first:])
    return calls, warming


def _decode_turn(
    target: Target,
    drafters: Sequence[Named],
    unit: Unit,
    number: int,
    turn: int,
    rows: tuple[Conversation, ...],
    answers: dict[int, list[str]],
    repetitions: int,
    plan: Plan,
) -> tuple[list[Call], float]:
    batch = [rows[i % len(rows)] for i in range(plan.batch_size)]
    prompts = [messages(c, answers[c.index]) for c in batch]
    seeds = [(plan.seed + c.index + TURN_STRIDE * turn) % 2**32 for c in batch]
    timed: dict[str, list[Generation]] = {d.label: [] for d in drafters}
    warming = 0.0
    for repetition in range(repetitions):
        for d in drafters if (number + turn + repetition) % 2 == 0 else reversed(drafters):
            generation, warmed = without_compiling(
                lambda d=d: specjax.generate(  # type: ignore[misc]
                    target,
                    prompts,
                    drafter=d.drafter,
                    law=None if d.kind == PLAIN else plan.law,
                    max_new_tokens=plan.max_new_tokens,
                    sampling=plan.sampling,
                    seed=seeds,
                    trace=True,
                )
            )
            timed[d.label].append(generation)
            warming += warmed
    calls = [
        Call(
            task=unit.task,
            unit=number,
            turn=turn,
            drafter=d,
            rows=rows,
            generation=timed[d.label][0],
            seconds=tuple(g.seconds for g in timed[d.label]),
            prefill_seconds=tuple(g.prefill_seconds for g in timed[d.label]),
        )
        for d in drafters
    ]
    return calls, warming
