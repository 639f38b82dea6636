"""Text in, text out: `generate` runs whole batches on the device, `stream` yields as rounds end."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from specjax.errors import SpecjaxError
from specjax.job import Job, prepare
from specjax.laws import Law
from specjax.metrics import Stats
from specjax.models.target import Target
from specjax.requests import Prompt
from specjax.sampling import Sampling
from specjax.state import BROKEN, FINISH_REASONS, RUNNING, Counters, DecodeState, Drafter
from specjax.text import certain_text, final_text


@dataclass(frozen=True)
class Round:
    """One round of one row, as a trace shows it.

    Attributes:
        proposed: tokens of the draft's valid nodes, in node order.
        parents: index of each one's parent; -1 = the pending token.
        accepted: indices of the nodes on the committed path.
        committed: tokens the round added: the accepted ones, and the bonus token unless a stop cut it.
        block_tokens: size of the block the target saw (the same for all rows of a batch).
    """

    proposed: list[int]
    parents: list[int]
    accepted: list[int]
    committed: list[int]
    block_tokens: int


@dataclass(frozen=True)
class Generation:
    """What `generate` returns; one entry a prompt in every list.

    Attributes:
        law: the acceptance law; under a lossy one the texts do not follow the target's own law (see `lossless`).
        prompt_ids: the prompts as the target saw them.
        token_ids: the new tokens; they end with the token that completes a stop.
        texts: the new text, without special tokens; it ends before a stop string. "" where there is no tokenizer.
        finish_reasons: "stop" (EOS), "stop_string", "length" (max_new_tokens) or "context" (its end).
        stats: counts of all rows.
        row_stats: counts of each row.
        logprobs: log-probability of each new token under the target's own law before any processing (temperature 1).
        trace: what each round did, per row.
        prefill_seconds, seconds: wall time of the prefill and of the decoding loop; the first call of a shape compiles.
    """

    law: Law
    prompt_ids: list[list[int]] = field(repr=False)
    token_ids: list[list[int]] = field(repr=False)
    texts: list[str]
    finish_reasons: list[str]
    stats: Stats
    row_stats: list[Stats] = field(repr=False)
    logprobs: list[list[float]] | None = field(repr=False)
    trace: list[list[Round]] | None = field(repr=False)
    prefill_seconds: float
    seconds: float

    @property
    def lossless(self) -> bool:
        """Whether the texts follow the target's law exactly."""
        return self.law.lossless


@dataclass(frozen=True)
class Piece:
    """What one round of `stream` adds to one row.

    Attributes:
        row: which prompt.
        token_ids: the tokens.
        text: text that is certain by now; it can lag behind the tokens (half a character, the start of a stop string).
        finish_reason: None while the row runs.
        lossless: whether the text follows the target's law exactly.
    """

    row: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    lossless: bool


def generate(
    target: Target,
    prompts: Sequence[Prompt],
    drafter: Drafter | None = None,
    law: Law | str | None = None,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    stop: str | Sequence[str] = (),
    seed: int | Sequence[int] = 0,
    logprobs: bool = False,
    trace: bool = False,
) -> Generation:
    """Decode a batch of prompts, drafting with `drafter`; the law of the output is the target's own, unless a lossy
    acceptance law is asked for.

    Args:
        prompts: each a string (raw text), a list of chat messages (put through the chat template), or token ids.
        drafter: None decodes plainly.
        law: None for "greedy" if every temperature is 0, else "rejection"; one of these names, or "block", or
            "typical", which is lossy; or a law object.
        max_new_tokens: per prompt; the end of the context may come first.
        sampling: None is greedy.
        stop: strings that end a row, besides the target's EOS ids.
        seed: one (each prompt then has its own stream, by its index), or one a prompt.
        logprobs: return the log-probability of each token.
        trace: return what each round did.

    Raises:
        InputError: a prompt, option or drafter that cannot be used, before anything is computed.
        SpecjaxError: the target's logits were not finite.
    """
    job = prepare(target, prompts, drafter, law, max_new_tokens, sampling, stop, seed, logprobs, trace)
    begin = time.perf_counter()
    state = jax.block_until_ready(job.prefill())
    filled = time.perf_counter()
    state = jax.block_until_ready(job.run(state))
    return replace(read(job, state), prefill_seconds=filled - begin, seconds=time.perf_counter() - filled)


def read(job: Job, state: DecodeState) -> Generation:
    """What a state of a job holds: of a finished one what `generate` returns, without times (NaN).

    Rows that run have "running" for a finish reason, and the text that is certain by now.

    Raises:
        SpecjaxError: the target's logits were not finite.
    """
    finish, length, tokens = (np.asarray(x) for x in (state.finish, state.length, state.tokens))
    _refuse_broken(finish, length)
    ids, tokenizer = job.prompt_ids, job.target.tokenizer
    new = [tokens[i, len(p) : length[i]].tolist() for i, p in enumerate(ids)]
    rows = row_stats(state.counters, [len(n) for n in new])
    ends = [certain_text if f == RUNNING else final_text for f in finish]
    return Generation(
        law=job.law,
        prompt_ids=ids,
        token_ids=new,
        texts=[text(tokenizer, n, job.stop) for text, n in zip(ends, new, strict=True)],
        finish_reasons=[FINISH_REASONS[int(f)] for f in finish],
        stats=Stats.total(rows),
        row_stats=rows,
        logprobs=_row_logprobs(state, ids, length) if job.arguments["logprobs"] else None,
        trace=read_trace(state) if job.arguments["trace_rounds"] else None,
        prefill_seconds=math.nan,
        seconds=math.nan,
    )


def stream(
    target: Target,
    prompts: Sequence[Prompt],
    drafter: Drafter | None = None,
    law: Law | str | None = None,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    stop: str | Sequence[str] = (),
    seed: int | Sequence[int] = 0,
) -> Iterator[Piece]:
    """The same as `generate`, round by round: yields a `Piece` for every row that a round added to.

    Errors in the arguments are raised at once, not at the first piece.
    """
    return _pieces(prepare(target, prompts, drafter, law, max_new_tokens, sampling, stop, seed))


def _pieces(job: Job) -> Iterator[Piece]:
    tokenizer, ids = job.target.tokenizer, job.prompt_ids
    state = job.prefill()
    shown = [0] * len(ids)
    done = np.array([len(p) for p in ids])
    finish = np.zeros(len(ids), np.int32)
    while (finish == 0).any():
        state, _ = job.step(state)
        finish, length, tokens = (np.asarray(x) for x in (state.finish, state.length, state.tokens))
        _refuse_broken(finish, length)
        for i in np.flatnonzero(length > done):
            new = tokens[i, len(ids[i]) : length[i]].tolist()
            ended = int(finish[i]) != 0
            text = (final_text if ended else certain_text)(tokenizer, new, job.stop)
            yield Piece(
                row=int(i),
                token_ids=tokens[i, done[i] : length[i]].tolist(),
                text=text[shown[i] :],
                finish_reason=FINISH_REASONS[int(finish[i])] if ended else None,
                lossless=job.law.lossless,
            )
            shown[i] = max(shown[i], len(text))
        done = length


def row_stats(counters: Counters, new_tokens: Sequence[int]) -> list[Stats]:
    """The device's counters as one `Stats` a row."""
    c = jax.tree.map(np.asarray, counters)
    return [
        Stats(
            new_tokens=int(n),
            target_calls=int(c.rounds[i]),
            proposed=int(c.proposed[i]),
            accepted=int(c.accepted[i]),
            rejected=int(c.rejected[i]),
            proposed_at=tuple(c.proposed_at[i].tolist()),
            reached_at=tuple(c.reached_at[i].tolist()),
            accepted_at=tuple(c.accepted_at[i].tolist()),
        )
        for i, n in enumerate(new_tokens)
    ]


def read_trace(state: DecodeState) -> list[list[Round]]:
    """The trace of a finished state, per row the rounds in which it was active."""
    t = jax.tree.map(np.asarray, state.trace)
    rows = []
    for i in range(t.count.shape[1]):
        rounds = []
        for r in range(int(state.round)):
            count = int(t.count[r, i])
            if count == 0:
                continue
            valid = np.flatnonzero(t.valid[r, i])
            number = {int(node): j for j, node in enumerate(valid)}
            path = t.nodes[r, i, 1 : 1 + t.accepted[r, i]] - 1
            rounds.append(
                Round(
                    proposed=t.tokens[r, i, valid].tolist(),
                    parents=[number.get(int(parent), -1) for parent in t.parents[r, i, valid]],
                    accepted=[number[int(node)] for node in path],
                    committed=t.committed[r, i, :count].tolist(),
                    block_tokens=int(t.block_tokens[r]),
                )
            )
        rows.append(rounds)
    return rows


def _refuse_broken(finish: np.ndarray, length: np.ndarray) -> None:
    for row in np.flatnonzero(finish == BROKEN):
        raise SpecjaxError(
            f"the target's law was not finite or allowed no token: prompt {row}, position {length[row]}; "
            "check the weights, the dtype and the processors"
        )


def _row_logprobs(state: DecodeState, ids: list[list[int]], length: np.ndarray) -> list[list[float]]:
    values = np.asarray(state.logprobs)
    return [values[i, len(p) : length[i]].tolist() for i, p in enumerate(ids)]
