"""Decoding many prompts: sorted by length into batches, and batches that shrink as their rows end.

A batch runs as long as its longest answer. Where no more than half of its rows are left, those go on as a batch of half
the size, as long as a round's cost goes with the rows. On two CPU cores a round of SmolLM2-135M takes 27, 44, 63 and
100 ms for 1, 8, 16 and 32 rows; 32 answers of 65 to 384 tokens (300 on average) took 66 s in a batch that shrinks,
77 s and more in one that does not. Rows do not notice: their random numbers come from their own seeds and the round.
(Other sizes round differently, which can turn a near-tie.)

A row that ended is not replaced by a new one before the batch has ended: the rounds of a batch are counted together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.errors import SpecjaxError
from specjax.job import Job, prepare
from specjax.models.target import Target
from specjax.sampling import Sampling
from specjax.state import BROKEN, FINISH_REASONS, LENGTH, RUNNING, DecodeState, Drafter
from specjax.text import final_text

SMALLEST = 8  # rows; a smaller batch's rounds are hardly shorter


@dataclass(frozen=True)
class Answer:
    """What the target wrote after a prompt.

    Attributes:
        token_ids: its tokens, the one that ends the turn included.
        text: without special tokens; it ends before a stop string. "" where there is no tokenizer.
        finish_reason: as in `Generation`.
    """

    token_ids: list[int]
    text: str
    finish_reason: str


def decode_all(
    target: Target,
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    batch_size: int,
    *,
    drafter: Drafter | None = None,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    done: Callable[[list[Answer]], None] = lambda answers: None,
) -> list[Answer]:
    """The answer to each prompt, in their order.

    Which prompts share a batch follows from their lengths alone. An answer is that of `generate` with the prompt's
    seed, but for near-ties that batches of another size round otherwise.

    Args:
        prompts: token ids.
        seeds: one a prompt.
        done: called with the answers of a batch when it has ended.

    Raises:
        InputError: as `generate`.
        SpecjaxError: the target's logits were not finite.
    """
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    answers: dict[int, Answer] = {}
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        size = _smallest(sizes(batch_size), len(members))
        rows = members + members[:1] * (size - len(members))
        job = prepare(
            target,
            [prompts[i] for i in rows],
            drafter,
            None,
            max_new_tokens,
            sampling,
            stop,
            [seeds[i] for i in rows],
        )
        new = dict(zip(members, _decode(job, len(members), sizes(batch_size)), strict=True))
        answers |= new
        done(list(new.values()))
    return [answers[i] for i in range(len(prompts))]


def sizes(batch_size: int) -> list[int]:
    """The sizes that a batch may have, the largest first: at most three, since each is a program to compile."""
    return [batch_size, *(size for size in (batch_size // 2, batch_size // 4) if size >= SMALLEST)]


def _decode(job: Job, members: int, ladder: Sequence[int]) -> list[Answer]:
    """The answers of a batch's first `members` rows; the other ones only fill it up."""
    state = job.prefill()
    finish = jnp.where(jnp.arange(len(job.prompt_ids)) < members, state.finish, LENGTH)
    state = replace(state, finish=finish)
    rows = np.arange(len(job.prompt_ids))  # which prompt each row of the state is
    found: dict[int, Answer] = {}
    while len(found) < members:
        smaller = [size for size in ladder if size < len(rows)]
        state = job.run(state, smaller[0] if smaller else 0)
        found |= _ended(job, state, rows, members)
        running = np.asarray(state.running)
        if running.any():
            places = np.argsort(~running, kind="stable")[: _smallest(ladder, int(running.sum()))]
            state, rows = _take(state, places), rows[places]
    return [found[i] for i in range(members)]


def _ended(job: Job, state: DecodeState, rows: np.ndarray, members: int) -> Iterator[tuple[int, Answer]]:
    finish, length, tokens = (np.asarray(x) for x in (state.finish, state.length, state.tokens))
    for place, row in enumerate(rows.tolist()):
        if finish[place] == RUNNING or row >= members:
            continue
        if finish[place] == BROKEN:
            raise SpecjaxError(
                f"the target's law was not finite or allowed no token: after {length[place]} tokens of a text that "
                f"begins with the ids {job.prompt_ids[row][:8]}; check the weights and the dtype"
            )
        new = tokens[place, len(job.prompt_ids[row]) : length[place]].tolist()
        text = final_text(job.target.tokenizer, new, job.stop)
        yield row, Answer(new, text, FINISH_REASONS[int(finish[place])])


BY_ROW = (
    *("tokens", "length", "prompt_length", "limit", "context_ends", "finish", "stop_state"),
    *("cache", "memory", "key", "rules", "counters"),
)


@jax.jit
def _take(state: DecodeState, places: Int[Array, "b"]) -> DecodeState:
    """Some rows of a state. What a drafter remembers must have a row a prompt on its first axis."""

    def rows(tree: Any) -> Any:
        return jax.tree.map(lambda x: x[places], tree)

    return replace(state, **{name: rows(getattr(state, name)) for name in BY_ROW})


def _smallest(ladder: Sequence[int], rows: int) -> int:
    return min(size for size in ladder if size >= rows)
