"""Everything that changes while decoding, as frozen pytrees: a step maps a state to the next one and nothing else."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import KVCache
from specjax.laws import Path
from specjax.models.interface import TargetModel
from specjax.sampling import Rules, Text, process
from specjax.stops import Stops
from specjax.trees import Draft

# Why a row ended; 0 while it runs. The names are what `generate` returns, BROKEN becomes an error.
RUNNING, STOP, STOP_STRING, LENGTH, CONTEXT, BROKEN = range(6)
FINISH_REASONS = {RUNNING: "running", STOP: "stop", STOP_STRING: "stop_string", LENGTH: "length", CONTEXT: "context"}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Counters:
    """What is counted while decoding, per row; `metrics.Stats` says what it means. D draft positions.

    Attributes:
        rounds: rounds in which the row was active (target calls).
        proposed, accepted: draft tokens, those beyond a cut left out.
        rejected: rounds that ended at a tested and rejected draft token.
        proposed_at, reached_at, accepted_at: rounds that proposed, tested, accepted a node at that depth.
    """

    rounds: Int[Array, "B"]
    proposed: Int[Array, "B"]
    accepted: Int[Array, "B"]
    rejected: Int[Array, "B"]
    proposed_at: Int[Array, "B D"]
    reached_at: Int[Array, "B D"]
    accepted_at: Int[Array, "B D"]

    @classmethod
    def zeros(cls, batch: int, depth: int) -> "Counters":
        row, at = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, depth), jnp.int32)
        return cls(row, row, row, row, at, at, at)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trace:
    """What each round did, R rounds at most.

    Attributes:
        tokens, parents, valid: the draft.
        nodes: block indices of the accepted path, the pending token (0) first; `accepted` nodes follow.
        accepted: accepted draft nodes that were committed.
        committed: the tokens that were committed, `count` of them.
        block_tokens: size of the block.
    """

    tokens: Int[Array, "R B N"]
    parents: Int[Array, "R B N"]
    valid: Bool[Array, "R B N"]
    nodes: Int[Array, "R B D+1"]
    accepted: Int[Array, "R B"]
    committed: Int[Array, "R B D+1"]
    count: Int[Array, "R B"]
    block_tokens: Int[Array, "R"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """The state of a decoding batch.

    Attributes:
        tokens: committed text, prompt and output; only the first `length` of a row are real.
        length: committed tokens; the pending token is the last of them.
        prompt_length: how many of them are the prompt.
        limit: length at which the row ends (prompt + max_new_tokens, or the end of the context).
        context_ends: whether that limit is the context's.
        finish: RUNNING, or why the row ended.
        stop_state: state of the stop-string automaton.
        cache: the target's keys and values of the positions `[0, length - 1)`.
        memory: the drafter's own state.
        key: one PRNG key a row.
        round: rounds so far.
        rules: sampling settings.
        stops: what ends a row.
        counters: see `Counters`.
        logprobs: log-probability of each output token under the target's unprocessed law, at its position; or None.
        trace: see `Trace`; or None.
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]
    prompt_length: Int[Array, "B"]
    limit: Int[Array, "B"]
    context_ends: Bool[Array, "B"]
    finish: Int[Array, "B"]
    stop_state: Int[Array, "B"]
    cache: KVCache
    memory: Any
    key: Array
    round: Int[Array, ""]
    rules: Rules
    stops: Stops
    counters: Counters
    logprobs: Float[Array, "B S"] | None = None
    trace: Trace | None = None

    @property
    def pending(self) -> Int[Array, "B"]:
        return jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)[:, 0]

    @property
    def running(self) -> Bool[Array, "B"]:
        return self.finish == RUNNING


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What a drafter may look at: the committed text, the target and its cache (read only), how tokens are drawn.

    Attributes:
        model: the target.
        cache: its keys and values of the positions `[0, length - 1)`.
        tokens, length, prompt_length: the committed text.
        room: tokens the row may still commit; a path of `room - 1` drafted tokens and the bonus token fills it.
        running: rows still decoding; drafts of the others are ignored.
        rules: sampling settings.
        key: one PRNG key a row, for the drafter alone, new each round.
    """

    model: TargetModel
    cache: KVCache
    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]
    prompt_length: Int[Array, "B"]
    room: Int[Array, "B"]
    running: Bool[Array, "B"]
    rules: Rules
    key: Array

    @property
    def pending(self) -> Int[Array, "B"]:
        return jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)[:, 0]

    def text(self, path: Int[Array, "B D"], depth: Int[Array, "B"]) -> Text:
        """The committed text followed by the first `depth` tokens of a path."""
        tokens = self.tokens
        if self.rules.reads_text and path.shape[1]:
            # past `length` nothing is read, so all of the path may be written; the text's capacity has room for it
            tokens = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))(
                tokens, path.astype(tokens.dtype), self.length
            )
        return Text(tokens, self.length + depth, self.prompt_length)

    def process(self, logits: Float[Array, "B V"], path: Int[Array, "B D"], depth: Int[Array, "B"]) -> Array:
        """Logits after `path[:, :depth]`, processed as the target's are: what a drafter draws its proposals from."""
        return process(logits, self.rules, self.text(path, depth))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Round:
    """What a drafter's `update` sees of a round, T tokens in the block, D + 1 at most on the path.

    Attributes:
        draft: what was verified.
        nodes: block indices of the committed path: the pending token (0), then the accepted nodes; padded with 0.
        tokens: the committed tokens (accepted ones, then the bonus token), cut at stops; padded with 0.
        count: how many were committed; 0 for rows that had ended. Then `nodes[:, :count]` are the block tokens that now
            lie in the cache, and `tokens[:, count - 1]` is the new pending token.
        start: committed length before the round; the old pending token stood at `start - 1`.
        features: the features the drafter asked for, at every block token (zeros past the block that was run).
        logits: the target's raw logits at every block token, where the drafter asked for them; else None.
    """

    draft: Draft
    nodes: Int[Array, "B D+1"]
    tokens: Int[Array, "B D+1"]
    count: Int[Array, "B"]
    start: Int[Array, "B"]
    features: dict[str, Float[Array, "B T M"]]
    logits: Float[Array, "B T V"] | None

    def along_path(self, values: Array) -> Array:
        """Block values `[B, T, ...]` at the nodes of the path: `[B, D+1, ...]`."""
        index = self.nodes.reshape(*self.nodes.shape, *(1,) * (values.ndim - 2))
        return jnp.take_along_axis(values, index, axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInfo:
    """What one step did.

    Attributes:
        draft: what was proposed and verified.
        path: what the law accepted, before cuts.
        count: tokens committed, per row.
        block_tokens: tokens in the block that was run.
    """

    draft: Draft
    path: Path
    count: Int[Array, "B"]
    block_tokens: Int[Array, ""]


class Drafter(Protocol):
    """Whatever proposes tokens: a pytree with three pure methods. Its settings are static.

    Attributes:
        num_nodes: N, nodes in a draft.
        max_depth: D, nodes on the longest path of a draft.
        features: names of the target's features that `init` and `update` want.
        wants_logits: whether `update` wants the logits of every node (they cost a `[B, T, V]` array a round).
        block_sizes: block sizes (in tokens, the pending one included) compiled into the loop; None: `ladder.ladder`'s.
    """

    @property
    def name(self) -> str: ...

    @property
    def num_nodes(self) -> int: ...

    @property
    def max_depth(self) -> int: ...

    @property
    def features(self) -> tuple[str, ...]: ...

    @property
    def wants_logits(self) -> bool: ...

    @property
    def block_sizes(self) -> tuple[int, ...] | None: ...

    def init(self, context: Context, features: dict[str, Float[Array, "B P M"]], longest: int) -> Any:
        """The drafter's state after the prompt.

        Args:
            features: the target's, over the prompt but its last token (unused values past a row's own).
            longest: no row has more such tokens.
        """
        ...

    def propose(self, memory: Any, context: Context) -> tuple[Draft, Any]:
        """A draft for every row. Never longer than useful: nodes deeper than `room - 1` are dropped by the engine."""
        ...

    def update(self, memory: Any, round: Round, context: Context) -> Any:
        """The state after a round; `context` is the one after the commit. The path need not be this drafter's own."""
        ...


def static(**kwargs: Any) -> Any:
    """A dataclass field that is part of the program, not of the data."""
    return field(metadata={"static": True}, **kwargs)
