"""The round: propose, verify, accept, commit. One step function, driven by a compiled loop (`run`) or by the host.

These functions compute in the matmul precision that is set; `Job` sets "highest" for float32, which exactness needs on
accelerators.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import KVCache, take, write
from specjax.errors import InputError
from specjax.ladder import ladder
from specjax.laws import Law, Path
from specjax.models.interface import TargetModel
from specjax.models.prefill import padded_length
from specjax.models.prefill import prefill as fill
from specjax.sampling import Rules, distribution, process
from specjax.state import (
    BROKEN,
    CONTEXT,
    LENGTH,
    RUNNING,
    STOP,
    STOP_STRING,
    Context,
    Counters,
    DecodeState,
    Drafter,
    Round,
    StepInfo,
    Trace,
)
from specjax.stops import Stops
from specjax.trees import Draft, depths, truncate
from specjax.verify import verify

DRAFT, ACCEPT = 0, 1  # uses of a row's randomness: keys are folded by round, then use, then node


def step(model: TargetModel, drafter: Drafter, law: Law, state: DecodeState) -> tuple[DecodeState, StepInfo]:
    """One round for every running row: at least one token each. Pure and of fixed shape; one target pass."""
    draft, memory = drafter.propose(state.memory, context(model, state))
    draft = bound(draft, state)
    seen, path = verify_and_accept(model, drafter, law, state, draft)
    state, round = commit(replace(state, memory=memory), draft, seen, path)
    memory = drafter.update(state.memory, round, context(model, state))
    return replace(state, memory=memory), StepInfo(draft, path, round.count, seen.block_tokens)


def run(
    model: TargetModel, drafter: Drafter, law: Law, state: DecodeState, leave: int | Int[Array, ""] = 0
) -> DecodeState:
    """Rounds until at most `leave` rows run: by default a whole generation, in one `lax.while_loop`."""

    def body(state: DecodeState) -> DecodeState:
        return step(model, drafter, law, state)[0]

    return jax.lax.while_loop(lambda state: state.running.sum() > leave, body, state)


def prefill(
    model: TargetModel,
    drafter: Drafter,
    tokens: Int[Array, "B S"],
    prompt_length: Int[Array, "B"],
    limit: Int[Array, "B"],
    rules: Rules,
    stops: Stops,
    key: Array,
    *,
    longest: int,
    context_ends: Bool[Array, "B"] | None = None,
    logprobs: bool = False,
    trace_rounds: int = 0,
) -> DecodeState:
    """The state before the first round: everything of the prompt but its last token is in the cache.

    Args:
        tokens: left-aligned prompts. S is the capacity of text and cache: at least `capacity(limit, drafter)` for the
            largest limit, and `models.prefill.padded_length(longest)`; `job.lay_out` makes it so.
        prompt_length: at least 1.
        limit: length at which each row ends.
        key: one PRNG key a row.
        longest: the longest prompt but its last token, or more (static): so much is prefilled.
        context_ends: rows whose limit is the end of the context.
        logprobs: keep the log-probability of every output token.
        trace_rounds: rounds to keep in the trace; 0 for none.
    """
    batch, size = tokens.shape
    if size < padded_length(longest):
        raise InputError(f"tokens: {size} slots, but prefill writes {padded_length(longest)}; see `job.lay_out`")
    cache, features = fill(model, tokens, longest, size, drafter.features)
    depth, nodes = drafter.max_depth, drafter.num_nodes
    trace = None
    if trace_rounds:
        ids = jnp.zeros((trace_rounds, batch, nodes), jnp.int32)
        path = jnp.zeros((trace_rounds, batch, depth + 1), jnp.int32)
        count, block_tokens = jnp.zeros((trace_rounds, batch), jnp.int32), jnp.zeros(trace_rounds, jnp.int32)
        trace = Trace(ids, ids, ids.astype(bool), path, count, path, count, block_tokens)
    zero = jnp.zeros(batch, jnp.int32)
    state = DecodeState(
        tokens=tokens,
        length=prompt_length,
        prompt_length=prompt_length,
        limit=limit,
        context_ends=jnp.zeros(batch, bool) if context_ends is None else context_ends,
        finish=zero + RUNNING,
        stop_state=zero,
        cache=cache,
        memory=None,
        key=key,
        round=jnp.zeros((), jnp.int32),
        rules=rules,
        stops=stops,
        counters=Counters.zeros(batch, depth),
        logprobs=jnp.zeros((batch, size), jnp.float32) if logprobs else None,
        trace=trace,
    )
    return replace(state, memory=drafter.init(context(model, state), features, longest))


def context(model: TargetModel, state: DecodeState) -> Context:
    """What the drafter may see of a state."""
    return Context(
        model=model,
        cache=state.cache,
        tokens=state.tokens,
        length=state.length,
        prompt_length=state.prompt_length,
        room=state.limit - state.length,
        running=state.running,
        rules=state.rules,
        key=_keys(state, DRAFT),
    )


def bound(draft: Draft, state: DecodeState) -> Draft:
    """Only nodes that can still be committed: in running rows, and with room for the bonus token behind them.

    It goes by depth alone, never by a token, so drawn nodes stay lossless.
    """
    room = state.limit - state.length - 1
    fits = depths(draft.parents, draft.valid) <= room[:, None]
    probes = draft.probes
    if probes is not None:
        probes = replace(probes, valid=probes.valid & state.running[:, None])
    return replace(draft, valid=draft.valid & fits & state.running[:, None], probes=probes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verified:
    """What leaves the verify branch, at the size of the largest block: only what commit and the drafter need."""

    block: KVCache  # keys and values of the pending token and the accepted path, [B, K, D+1, D]
    logprobs: Float[Array, "B D+1"] | None
    features: dict[str, Float[Array, "B T M"]]
    logits: Float[Array, "B T V"] | None
    block_tokens: Int[Array, ""]
    broken: Bool[Array, "B"]  # the target's law was no law (NaN logits, or every token forbidden)


def verify_and_accept(
    model: TargetModel, drafter: Drafter, law: Law, state: DecodeState, draft: Draft
) -> tuple[Verified, Path]:
    """The target pass over the smallest block of the ladder that holds the draft, and the law on its logits.

    The law runs inside the branch, so the `[B, T, V]` logits never leave it; the cache is read there and written only
    after it (a cache that a `switch` branch updates inside a loop is copied by XLA).
    """
    sizes = ladder(drafter)
    used = jnp.where(draft.valid, jnp.arange(1, drafter.num_nodes + 1), 0).max(initial=0)
    if draft.probes is not None:  # a round of probes alone still is more than a plain step
        used = jnp.maximum(used, draft.probes.valid.any().astype(used.dtype))
    branch = jnp.searchsorted(jnp.asarray(sizes), used)
    branches = [lambda n=n: _branch(model, drafter, law, state, draft, n) for n in sizes]
    if len(branches) == 1:
        # A conditional orders the write of the cache after every read of it; without one, XLA copies the cache.
        nothing = jax.eval_shape(branches[0])
        zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), nothing)
        return jax.lax.cond(state.running.any(), branches[0], zeros)
    return jax.lax.switch(branch, branches)


def _branch(
    model: TargetModel, drafter: Drafter, law: Law, state: DecodeState, draft: Draft, nodes: int
) -> tuple[Verified, Path]:
    cut = truncate(draft, nodes)
    if nodes == 0:
        cut = replace(cut, probes=None)
    seen = verify(model, state.cache, state.pending, state.length, cut, drafter.features)
    depth = min(drafter.max_depth, nodes)
    path = law(_NodeLaw(seen.logits, context(model, state)), cut, _keys(state, ACCEPT), depth)
    logprobs = _path_logprobs(seen.logits, path) if state.logprobs is not None else None
    full = 1 + drafter.num_nodes + (0 if draft.probes is None else draft.probes.tokens.shape[1])

    def pad(x: Array, size: int, axis: int = 1) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, size - x.shape[axis])
        return jnp.pad(x, widths)

    def at_block(x: Array) -> Array:
        """Block values at the places of the largest block: nodes first, probes behind all nodes."""
        head, probes = x[:, : 1 + nodes], x[:, 1 + nodes :]
        return pad(jnp.concatenate([pad(head, 1 + drafter.num_nodes), probes], axis=1), full)

    verified = Verified(
        block=jax.tree.map(lambda x: pad(x, drafter.max_depth + 1, 2), take(seen.block, path.nodes)),
        logprobs=None if logprobs is None else pad(logprobs, drafter.max_depth + 1),
        features={name: at_block(value) for name, value in seen.features.items()},
        logits=at_block(seen.logits) if drafter.wants_logits else None,
        block_tokens=jnp.int32(seen.logits.shape[1]),
        broken=path.bonus >= seen.logits.shape[-1],
    )
    path = replace(path, nodes=pad(path.nodes, drafter.max_depth + 1), tokens=pad(path.tokens, drafter.max_depth + 1))
    return verified, path


@dataclass(frozen=True)
class _NodeLaw:
    """The target's processed law at a node, made when a law asks for it."""

    raw: Float[Array, "B T V"]
    context: Context

    def logits(self, node: Int[Array, "B"], path: Int[Array, "B D"], depth: Int[Array, "B"]) -> Float[Array, "B V"]:
        return process(self._at(node), self.context.rules, self.context.text(path, depth))

    def probs(self, node: Int[Array, "B"], path: Int[Array, "B D"], depth: Int[Array, "B"]) -> Float[Array, "B V"]:
        return distribution(self._at(node), self.context.rules, self.context.text(path, depth))

    def _at(self, node: Int[Array, "B"]) -> Float[Array, "B V"]:
        return jax.vmap(lambda rows, i: rows[i])(self.raw, node)


def _path_logprobs(logits: Float[Array, "B T V"], path: Path) -> Float[Array, "B D+1"]:
    """Log-probability of each token of the path under the target's unprocessed law at the node before it."""
    rows = jax.vmap(lambda rows, nodes: rows[nodes])(logits, path.nodes)
    chosen = jnp.take_along_axis(rows, path.tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(rows, axis=-1)


def commit(state: DecodeState, draft: Draft, seen: Verified, path: Path) -> tuple[DecodeState, Round]:
    """Cut the path at the first stop, write tokens and cache, count. Rows that had ended commit nothing."""
    spots = jnp.arange(path.tokens.shape[1])
    offers = path.accepted + jnp.where(seen.broken, 0, 1)  # where the target's law is broken there is no bonus token
    offered = spots < offers[:, None]
    by_eos, by_string, automaton = state.stops.scan(state.stop_state, path.tokens)
    stopping = (by_eos | by_string) & offered
    first = jnp.where(stopping, spots, path.tokens.shape[1]).min(-1)
    stopped = first < offers
    broken = state.running & seen.broken & ~stopped  # behind a stop it would not have been asked
    count = jnp.where(state.running, jnp.where(stopped, first + 1, offers), 0)
    cut = count < path.accepted + 1

    last = jnp.maximum(count - 1, 0)[:, None]
    length = state.length + count
    full = jnp.where(state.context_ends, CONTEXT, LENGTH)
    why = jnp.where(jnp.take_along_axis(by_eos, last, axis=1)[:, 0], STOP, STOP_STRING)
    finish = jnp.where(stopped, why, jnp.where(length >= state.limit, full, RUNNING))
    finish = jnp.where(broken, BROKEN, jnp.where(state.running, finish, state.finish))

    kept = spots < count[:, None]
    tokens = jnp.where(kept, path.tokens, 0)
    nodes = jnp.where(kept, path.nodes, 0)
    logprobs = state.logprobs
    if logprobs is not None and seen.logprobs is not None:
        logprobs = _write_rows(logprobs, seen.logprobs, state.length)
    trace = state.trace
    if trace is not None:
        accepted = jnp.minimum(path.accepted, count)
        new = Trace(draft.tokens, draft.parents, draft.valid, path.nodes, accepted, tokens, count, seen.block_tokens)
        trace = jax.tree.map(lambda old, row: old.at[state.round].set(row), trace, new)
    after = replace(
        state,
        tokens=_write_rows(state.tokens, tokens, state.length),
        length=length,
        finish=finish,
        stop_state=jnp.where(count > 0, jnp.take_along_axis(automaton, last, axis=1)[:, 0], state.stop_state),
        cache=write(state.cache, seen.block, state.length - 1),
        round=state.round + 1,
        counters=tally(state.counters, draft, path, count, cut),
        logprobs=logprobs,
        trace=trace,
    )
    return after, Round(draft, nodes, tokens, count, state.length, seen.features, seen.logits)


def tally(counters: Counters, draft: Draft, path: Path, count: Int[Array, "B"], cut: Bool[Array, "B"]) -> Counters:
    """Count one round. What lies beyond a cut is not counted, neither as proposed nor as accepted."""
    depth = depths(draft.parents, draft.valid)
    active = count > 0
    counted = draft.valid & active[:, None] & (~cut[:, None] | (depth <= count[:, None]))
    accepted = jnp.minimum(path.accepted, count)
    rejected = path.rejected & active & ~cut
    level = jnp.arange(1, counters.proposed_at.shape[1] + 1)
    at_level = (counted[:, :, None] & (depth[:, :, None] == level)).any(1)
    passed = level <= accepted[:, None]
    tested = passed | (rejected[:, None] & (level == accepted[:, None] + 1))
    new = Counters(
        rounds=active.astype(jnp.int32),
        proposed=counted.sum(-1, dtype=jnp.int32),
        accepted=accepted,
        rejected=rejected.astype(jnp.int32),
        proposed_at=at_level.astype(jnp.int32),
        reached_at=tested.astype(jnp.int32),
        accepted_at=passed.astype(jnp.int32),
    )
    return jax.tree.map(jnp.add, counters, new)


def capacity(longest_limit: int, drafter: Drafter) -> int:
    """Slots needed by rows that end at `longest_limit`: a commit writes D + 1 slots wherever it starts."""
    return longest_limit + drafter.max_depth + 1


def _write_rows(old: Array, new: Array, start: Int[Array, "B"]) -> Array:
    return jax.vmap(lambda o, n, at: jax.lax.dynamic_update_slice(o, n.astype(o.dtype), (at,)))(old, new, start)


def _keys(state: DecodeState, use: int) -> Any:
    return jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, state.round), use))(state.key)
