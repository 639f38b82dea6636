"""From logits to the distribution a token is drawn from: penalties, user processors, temperature, top-k, top-p, min-p.

The same processing applies to every verified row, to the bonus token and to the drafter's proposals, so that acceptance
laws compare the laws that tokens are really drawn from. No vocabulary row is ever sorted: top-k and top-p thresholds are
found by bisection on the bit pattern of a float.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.errors import InputError

Processor = Callable[[Float[Array, "V"], Int[Array, "S"], Int[Array, ""]], Float[Array, "V"]]
PerPrompt = float | Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Every number may be one for all prompts or a sequence, one a prompt.

    Attributes:
        temperature: 0 = greedy (the first of the most likely tokens); otherwise logits are divided by it.
        top_k: keep logits at least as large as the k-th largest (ties are kept); 0 = off.
        top_p: keep tokens whose strictly more likely tokens hold less than this mass, after top-k; 1 = off.
        min_p: keep tokens at least this times as likely as the most likely one; 0 = off.
        repetition_penalty: logits of tokens in prompt or output are divided by it if positive, else multiplied; 1 = off.
        frequency_penalty: subtracted for every occurrence of the token in the output; 0 = off.
        presence_penalty: subtracted once if the token occurs in the output; 0 = off.
        processors: pure functions `f(logits [V], tokens [S], length []) -> logits [V]`, applied in order after the
            penalties. Only the first `length` tokens are real; -inf forbids a token. Pass the same function objects again
            to reuse what is compiled.
    """

    temperature: PerPrompt = 0.0
    top_k: PerPrompt = 0
    top_p: PerPrompt = 1.0
    min_p: PerPrompt = 0.0
    repetition_penalty: PerPrompt = 1.0
    frequency_penalty: PerPrompt = 0.0
    presence_penalty: PerPrompt = 0.0
    processors: tuple[Processor, ...] = ()

    def validate(self, batch: int) -> None:
        """Raises InputError, naming the field and the value, unless every setting fits a batch of `batch` prompts."""
        _columns(self, batch)

    def rules(self, batch: int) -> "Rules":
        """The settings as arrays of `batch` rows. Raises InputError as `validate` does."""
        columns = _columns(self, batch)
        return Rules(
            **{name: jnp.asarray(column) for name, column in columns.items()},
            greedy=bool((columns["temperature"] == 0).any()),
            drawn=bool((columns["temperature"] > 0).any()),
            penalties=bool(
                (columns["repetition_penalty"] != 1).any()
                or (columns["frequency_penalty"] != 0).any()
                or (columns["presence_penalty"] != 0).any()
            ),
            filters=tuple(
                name for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)) if (columns[name] != off).any()
            ),
            processors=tuple(self.processors),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rules:
    """`Sampling` as a pytree: one row a prompt. New values compile nothing; switching a whole kind of processing on or
    off does, because what no row asks for costs nothing.

    Attributes:
        greedy, drawn: whether any row has temperature 0, a temperature above 0.
        penalties: whether any row has one.
        filters: which of "top_k", "top_p", "min_p" any row has.
        processors: as in `Sampling`.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    repetition_penalty: Float[Array, "B"]
    frequency_penalty: Float[Array, "B"]
    presence_penalty: Float[Array, "B"]
    greedy: bool = field(metadata={"static": True})
    drawn: bool = field(metadata={"static": True})
    penalties: bool = field(metadata={"static": True})
    filters: tuple[str, ...] = field(metadata={"static": True})
    processors: tuple[Processor, ...] = field(metadata={"static": True})

    @property
    def reads_text(self) -> bool:
        """Whether `process` reads the text at all (penalties, user processors)."""
        return self.penalties or bool(self.processors)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Text:
    """The text a row's logits are conditioned on, the path to the node included.

    Attributes:
        tokens: only the first `length` are real.
        length: number of real tokens.
        prompt_length: how many of them are the prompt; the rest is output.
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]
    prompt_length: Int[Array, "B"]


def process(logits: Float[Array, "B V"], rules: Rules, text: Text | None = None) -> Float[Array, "B V"]:
    """The logits of the law that tokens are drawn from, float32, -inf where a token is filtered out.

    Order: repetition penalty, frequency and presence penalties, user processors, temperature, top-k, top-p (of the
    tempered law restricted to top-k), min-p. Rows are shifted so that tempered logits are at most 0; rows with temperature
    0 are neither divided nor shifted: their law is one-hot, see `distribution`.

    Args:
        text: read (and needed) only if `rules.reads_text`.
    """
    logits = _edit(logits, rules, text)
    if not rules.drawn:
        return logits
    return _tempered(logits, rules)


def distribution(logits: Float[Array, "B V"], rules: Rules, text: Text | None = None) -> Float[Array, "B V"]:
    """The law that tokens are drawn from: softmax of `process`, one-hot at the first argmax where the temperature is 0.

    A row without any allowed token (or with a NaN) gives NaN, or zeros where the temperature is 0.
    """
    logits = _edit(logits, rules, text)
    sharp = None
    if rules.greedy:
        sharp = (lax.broadcasted_iota(jnp.int32, logits.shape, 1) == argmax(logits)[:, None]).astype(jnp.float32)
        if not rules.drawn:
            return sharp
    weights = jnp.exp(_tempered(logits, rules))
    law = weights / weights.sum(-1, keepdims=True)
    return law if sharp is None else jnp.where((rules.temperature == 0)[:, None], sharp, law)


def argmax(values: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """First index of the largest value; V, which is no token, where there is none (a NaN, or nothing but -inf).

    Max, then the smallest index that reaches it: both vectorise, where XLA's own argmax is scalar on CPU.
    """
    size = values.shape[-1]
    largest = values.max(-1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    return jnp.where((values == largest) & (largest > -jnp.inf), index, size).min(-1)


def categorical(weights: Float[Array, "B V"], uniform: Float[Array, "B"]) -> Int[Array, "B"]:
    """A token of each row, drawn with probability `weights / sum(weights)` by inverting the cumulative sum at `uniform`.

    Two levels (sums of blocks, then inside one block) instead of a running sum over the row. A token of weight 0 is never
    drawn, whatever rounding does; V, which is no token, where no weight is positive (or one is NaN).

    Args:
        weights: not negative; they need not sum to 1.
        uniform: in [0, 1).
    """
    batch, size = weights.shape
    width = max(1, 1 << (size.bit_length() // 2))
    blocks = jnp.pad(weights, ((0, 0), (0, -size % width))).reshape(batch, -1, width)
    sums = blocks.sum(-1)
    total = sums.sum(-1)
    block, before = _invert(sums, uniform * total)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token = block * width + _invert(inside, uniform * total - before)[0]
    return jnp.where(total > 0, token, size)


def _invert(weights: Float[Array, "B W"], target: Float[Array, "B"]) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """The first positive weight whose running sum exceeds `target` (else the last positive one), and the sum before it."""
    size = weights.shape[1]
    sums = jnp.cumsum(weights, axis=1)
    index = jnp.arange(size)
    first = jnp.where((sums > target[:, None]) & (weights > 0), index, size).min(-1)
    chosen = jnp.where(first < size, first, jnp.where(weights > 0, index, 0).max(-1))
    before = jnp.take_along_axis(sums - weights, chosen[:, None], axis=1)[:, 0]
    return chosen, before


def _edit(logits: Float[Array, "B V"], rules: Rules, text: Text | None) -> Float[Array, "B V"]:
    """Penalties and user processors, in float32."""
    logits = logits.astype(jnp.float32)
    if not rules.reads_text:
        return logits
    if text is None:
        raise InputError("penalties and processors read the text so far: give text=Text(tokens, length, prompt_length)")
    if rules.penalties:
        rows, size = logits.shape[0], logits.shape[1]
        place = jnp.arange(text.tokens.shape[1])
        real = place < text.length[:, None]
        output = real & (place >= text.prompt_length[:, None])
        row = jnp.arange(rows)[:, None]
        zeros = jnp.zeros((rows, size), jnp.float32)
        seen = zeros.at[row, jnp.where(real, text.tokens, size)].set(1.0, mode="drop")
        count = zeros.at[row, jnp.where(output, text.tokens, size)].add(1.0, mode="drop")
        repetition = rules.repetition_penalty[:, None]
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(seen > 0, repeated, logits)
        logits -= rules.frequency_penalty[:, None] * count + jnp.where(count > 0, rules.presence_penalty[:, None], 0)
    for processor in rules.processors:
        logits = jax.vmap(processor)(logits, text.tokens, text.length).astype(jnp.float32)
    return logits


def _tempered(logits: Float[Array, "B V"], rules: Rules) -> Float[Array, "B V"]:
    """Temperature and filters. Filters become one cut a row on the untempered logits, so that no rounding moves a token
    across it; all that follows is one pass over the row."""
    greedy = rules.temperature == 0
    temperature = jnp.where(greedy, 1.0, rules.temperature)
    if "top_k" in rules.filters or "top_p" in rules.filters:
        top = lax.top_k(logits, min(_TOP, logits.shape[1]))[0]
    else:
        top = logits.max(-1, keepdims=True)
    largest = top[:, :1]
    keep = jnp.ones((), bool)
    cut = jnp.full(logits.shape[:1], -jnp.inf)
    if "top_k" in rules.filters:
        cut = _top_k_cut(logits, top, jnp.where(greedy, 0, rules.top_k))
    if "top_p" in rules.filters:
        cut = _top_p_cut(logits, top, jnp.where(greedy, 1.0, rules.top_p), temperature, cut)
    scaled = (logits - largest) / temperature[:, None]
    keep = logits >= cut[:, None]
    if "min_p" in rules.filters:
        keep &= scaled >= jnp.log(rules.min_p)[:, None]
    if rules.filters:
        scaled = jnp.where(keep, scaled, -jnp.inf)
    return jnp.where(greedy[:, None], logits, scaled) if rules.greedy else scaled


# How many of the largest logits are looked at first; most cuts fall among them (lax.top_k is one scan of the row on CPU).
_TOP = 64


def _top_k_cut(
    logits: Float[Array, "B V"], top: Float[Array, "B W"], top_k: Int[Array, "B"]
) -> Float[Array, "B"]:
    """The k-th largest logit of each row, -inf where k is 0."""
    width = top.shape[1]
    fast = jnp.take_along_axis(top, jnp.clip(top_k - 1, 0, width - 1)[:, None], axis=1)[:, 0]
    far = top_k > width

    def search() -> Float[Array, "B"]:
        def over(middle: Float[Array, "B"]) -> Bool[Array, "B"]:
            return (logits > middle[:, None]).sum(-1, dtype=jnp.int32) >= top_k

        bottom = jnp.full(top_k.shape, _key(jnp.float32(-jnp.inf)) - 1)
        return jnp.where(far, _bisect(over, bottom, jnp.where(far, _key(top[:, -1]), bottom)), fast)

    cut = lax.cond(far.any(), search, lambda: fast)
    return jnp.where(top_k == 0, -jnp.inf, cut)


def _top_p_cut(
    logits: Float[Array, "B V"],
    top: Float[Array, "B W"],
    top_p: Float[Array, "B"],
    temperature: Float[Array, "B"],
    floor: Float[Array, "B"],
) -> Float[Array, "B"]:
    """The smallest logit that top-p keeps among those at or above `floor`; `floor` where top-p is 1."""

    def weigh(values: Float[Array, "B X"]) -> Float[Array, "B X"]:
        scaled = (values - top[:, :1]) / temperature[:, None]
        return jnp.where(values >= floor[:, None], jnp.exp(scaled), 0.0)

    limit = top_p * weigh(logits).sum(-1)
    larger = top[:, None, :] > top[:, :, None]
    above = jnp.where(larger, weigh(top)[:, None, :], 0.0).sum(-1)
    kept = (above < limit[:, None]) & (top >= floor[:, None])
    fast = jnp.where(kept, top, jnp.inf).min(-1)
    last = top[:, -1]
    far = (fast <= last) & (floor < last) & (top_p < 1)

    def search() -> Float[Array, "B"]:
        scaled = lax.optimization_barrier((logits - top[:, :1]) / temperature[:, None])
        weights = lax.optimization_barrier(weigh(logits))

        def over(middle: Float[Array, "B"]) -> Bool[Array, "B"]:
            return jnp.where(scaled > middle[:, None], weights, 0.0).sum(-1) >= limit

        # All tokens at or below this together weigh less than what top-p leaves out, so the cut is above it.
        bottom = jnp.log1p(-top_p) + jnp.log(limit / (top_p * logits.shape[1])) - 1.0
        bottom = _key(bottom)
        cut = _bisect(over, bottom, jnp.where(far, _key(scaled_last), bottom))
        slow = jnp.where(scaled >= cut[:, None], logits, jnp.inf).min(-1)
        return jnp.where(far, jnp.maximum(slow, floor), fast)

    scaled_last = (last - top[:, 0]) / temperature
    cut = lax.cond(far.any(), search, lambda: fast)
    return jnp.where(top_p < 1, cut, floor)


def _bisect(
    over: Callable[[Float[Array, "B"]], Bool[Array, "B"]], low: Int[Array, "B"], high: Int[Array, "B"]
) -> Float[Array, "B"]:
    """The smallest float between the keys `low` (excluded) and `high` that is not `over`; `over` falls with its argument.

    Bisection on the bit pattern: exact, at most 32 rounds, each one pass over [B, V].
    """

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
        above, searching = over(_float(middle)), low + 1 < high
        return jnp.where(searching & above, middle, low), jnp.where(searching & ~above, middle, high)

    def open_(bounds: tuple[Array, Array]) -> Bool[Array, ""]:
        return (bounds[0] + 1 < bounds[1]).any()

    return _float(lax.while_loop(open_, halve, (low, high))[1])


def _key(value: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """Integers in the order of the floats."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _float(key: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """The inverse of `_key`."""
    return lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)


def _columns(sampling: Sampling, batch: int) -> dict[str, np.ndarray]:
    """Every setting as an array of `batch` rows, checked."""
    limits: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
        "temperature": ("0 (greedy) or more", lambda x: x >= 0),
        "top_k": ("a whole number, 0 (off) or more", lambda x: (x >= 0) & (x == np.floor(x))),
        "top_p": ("above 0 and at most 1", lambda x: (x > 0) & (x <= 1)),
        "min_p": ("from 0 to 1", lambda x: (x >= 0) & (x <= 1)),
        "repetition_penalty": ("above 0", lambda x: x > 0),
        "frequency_penalty": ("a finite number", np.isfinite),
        "presence_penalty": ("a finite number", np.isfinite),
    }
    columns = {}
    for name, (expected, holds) in limits.items():
        given = getattr(sampling, name)
        try:
            column = np.asarray(given)
        except ValueError:
            column = np.asarray(None)
        if column.dtype.kind not in "iuf":
            raise InputError(f"sampling: {name} is {given!r}; expected {expected}, or a sequence of such, one a prompt")
        if column.shape not in ((), (batch,)):
            raise InputError(
                f"sampling: {name} has shape {column.shape}; expected one number, or {batch}, one for each prompt"
            )
        column = np.broadcast_to(column.astype(np.float64), (batch,))
        wrong = ~(np.isfinite(column) & holds(column))
        if wrong.any():
            raise InputError(f"sampling: {name} is {column[wrong][0]:g}; expected {expected}")
        kind = np.int32 if name == "top_k" else np.float32
        columns[name] = np.minimum(column, np.iinfo(np.int32).max).astype(kind) if name == "top_k" else column.astype(kind)
    if not all(callable(processor) for processor in sampling.processors):
        raise InputError("sampling: processors must be functions f(logits [V], tokens [S], length) -> logits [V]")
    return columns
