"""From logits to the distribution a token is drawn from: penalties, user processors, temperature, top-k, top-p, min-p.

The same processing applies to every verified row, to the bonus token and to the drafter's proposals, so that
acceptance laws compare the laws that tokens are really drawn from. No vocabulary row is ever sorted: top-k and top-p
thresholds are found by bisection on the bit pattern of a float.
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
        repetition_penalty: logits of tokens in prompt or output are divided by it if positive, else multiplied; 1 =
            off.
        frequency_penalty: subtracted for every occurrence of the token in the output; 0 = off.
        presence_penalty: subtracted once if the token occurs in the output; 0 = off.
        processors: pure functions `f(logits [V], tokens [S], length []) -> logits [V]`, applied in order after the
            penalties. Only the first `length` tokens are real; -inf forbids a token. Pass the same function objects
            again to reuse what is compiled.
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
    tempered law restricted to top-k), min-p. Tempered rows are shifted to a maximum of 0. Rows with temperature 0 are
    neither tempered nor filtered: their law is one-hot, see `distribution`.

    Args:
        text: read (and needed) only if `rules.reads_text`.
    """
    logits = _edit(logits, rules, text)
    if not rules.drawn:
        return logits
    scaled, _, keep = _weigh(logits, rules)
    if keep is not None:
        scaled = jnp.where(keep, scaled, -jnp.inf)
    return jnp.where((rules.temperature == 0)[:, None], logits, scaled) if rules.greedy else scaled


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
    _, weights, keep = _weigh(logits, rules)
    if keep is not None:
        weights = jnp.where(keep, weights, 0.0)
    law = weights / weights.sum(-1, keepdims=True)
    return law if sharp is None else jnp.where((rules.temperature == 0)[:, None], sharp, law)


def argmax(values: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """First index of the largest value; V, which is no token, where there is none (a NaN, an infinity, nothing but
    -inf).

    Max, then the smallest index that reaches it: both vectorise, where XLA's own argmax is scalar on CPU.
    """
    size = values.shape[-1]
    largest = values.max(-1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    return jnp.where((values == largest) & jnp.isfinite(largest), index, size).min(-1)


def categorical(weights: Float[Array, "B V"], uniform: Float[Array, "B"]) -> Int[Array, "B"]:
    """A token of each row, drawn with probability `weights / sum(weights)`: inverts the running sum at `uniform`.

    Two levels (sums of blocks, then inside one block) instead of a running sum over the row. A token of weight 0 is
    never drawn, whatever rounding does; V, which is no token, where no weight is positive (or one is NaN).

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
    """The first positive weight whose running sum exceeds `target`, else the last positive one; the sum before it."""
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
        edited = jax.vmap(processor)(logits, text.tokens, text.length)
        if edited.shape != logits.shape:
            raise InputError(f"processor {processor!r} returned {edited.shape[1:]}; expected {logits.shape[1:]}")
        logits = edited.astype(jnp.float32)
    return logits


def _weigh(
    logits: Float[Array, "B V"], rules: Rules
) -> tuple[Float[Array, "B V"], Float[Array, "B V"], Bool[Array, "B V"] | None]:
    """Tempered logits with maximum 0, their exponentials with maximum 1, and which of them filters keep (None: all).

    Every filter compares those same exponentials, so that rounding moves no token across a cut between two passes.
    """
    active = rules.temperature > 0
    temperature = jnp.where(active, rules.temperature, 1.0)
    scaled = (logits - logits.max(-1, keepdims=True)) / temperature[:, None]
    weights = jnp.exp(scaled)
    if not rules.filters:
        return scaled, weights, None
    weights = lax.optimization_barrier(weights)
    size = logits.shape[1]
    cut = jnp.zeros(logits.shape[:1])
    if "top_k" in rules.filters:
        on = active & (rules.top_k > 0) & (rules.top_k < size)
        cut = jnp.where(on, _cut(weights, jnp.ones_like, rules.top_k.astype(jnp.float32), on, cut), cut)
    if "top_p" in rules.filters:
        on = active & (rules.top_p < 1)
        total = jnp.where(weights >= cut[:, None], weights, 0.0).sum(-1)
        # All the tokens at or below `floor` together weigh at most half of what top-p leaves out. Tokens below the cut
        # of top-k do not disturb: where they would count, those above it alone exceed the limit.
        floor = (1 - rules.top_p) * total / (2 * size)
        cut = jnp.where(on, _cut(weights, lambda x: x, rules.top_p * total, on, floor), cut)
    if "min_p" in rules.filters:
        cut = jnp.maximum(cut, jnp.where(active, rules.min_p, 0.0))
    return scaled, weights, weights >= cut[:, None]


def _cut(
    weights: Float[Array, "B V"],
    measure: Callable[[Array], Array],
    limit: Float[Array, "B"],
    on: Bool[Array, "B"],
    floor: Float[Array, "B"],
) -> Float[Array, "B"]:
    """The smallest v in (floor, 1] such that the weights above v measure less than `limit`; rows not `on`: any value.

    That v is one of the weights. Bisection on the bit pattern of the float (floats that are not negative are ordered as
    their bits), one pass over [B, V] a round, would take about 27 rounds. Two short cuts: the first round asks whether
    the cut is the largest weight, 1; and once the interval is so narrow that it should hold about one weight, every
    second round lowers its upper end to the largest weight in it, which ends the search if that is the cut.
    """

    def search(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        turn, low, high = state
        snap = (turn >= _COARSE) & (turn % 2 == 0)
        top = lax.cond(snap, lambda: jnp.maximum(largest_up_to(high), low + 1), lambda: high)
        middle = jnp.where(snap | (turn == 0), top - 1, low + (high - low) // 2)
        over = jnp.where(weights > _float(middle)[:, None], measure(weights), 0.0).sum(-1) >= limit
        searching = low + 1 < high
        high = jnp.where(searching, jnp.where(over, top, middle), high)
        return turn + 1, jnp.where(searching & over, middle, low), high

    def largest_up_to(bits: Int[Array, "B"]) -> Int[Array, "B"]:
        return _bits(jnp.where(weights <= _float(bits)[:, None], weights, 0.0).max(-1))

    high = jnp.full(limit.shape, _bits(jnp.float32(1)))
    low = jnp.where(on, _bits(floor), high)
    _, _, high = lax.while_loop(lambda state: (state[1] + 1 < state[2]).any(), search, (jnp.int32(0), low, high))
    return _float(high)


_COARSE = 16  # rounds of bisection that narrow 20 octaves to about 1/1600 of one


def _bits(value: Float[Array, "*B"]) -> Int[Array, "*B"]:
    return lax.bitcast_convert_type(value, jnp.int32)


def _float(bits: Int[Array, "*B"]) -> Float[Array, "*B"]:
    return lax.bitcast_convert_type(bits, jnp.float32)


_COLDEST = np.float32(1e-20)


def _columns(sampling: Sampling, batch: int) -> dict[str, np.ndarray]:
    """Every setting as an array of `batch` rows, checked."""
    limits: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
        "temperature": ("0 (greedy) or more", lambda x: x >= 0),
        "top_k": ("a whole number, 0 (off) or more", lambda x: (x >= 0) & (x == np.floor(x))),
        "top_p": ("above 0 and at most 1", lambda x: (x > 0) & (x <= 1)),
        "min_p": ("from 0 to 1", lambda x: (x >= 0) & (x <= 1)),
        "repetition_penalty": ("above 0", lambda x: x >= np.finfo(np.float32).tiny),
        "frequency_penalty": ("a finite number", np.isfinite),
        "presence_penalty": ("a finite number", np.isfinite),
    }
    if not isinstance(sampling, Sampling):
        raise InputError(f"sampling: expected specjax.Sampling(…), got {sampling!r}")
    if not isinstance(sampling.processors, tuple | list):
        raise InputError(f"sampling: processors must be a tuple of functions, got {sampling.processors!r}")
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
        column = np.broadcast_to(column.astype(np.float64 if name == "top_k" else np.float32), (batch,))
        wrong = ~(np.isfinite(column) & holds(column))
        if wrong.any():
            raise InputError(f"sampling: {name} is {column[wrong][0]:g}; expected {expected}")
        columns[name] = column
    columns["top_k"] = np.minimum(columns["top_k"], np.iinfo(np.int32).max).astype(np.int32)
    # XLA flushes subnormal numbers to zero, and 0 means greedy: keep apart what was given apart.
    temperature = columns["temperature"]
    columns["temperature"] = np.where(temperature > 0, np.maximum(temperature, _COLDEST), temperature)
    if not all(callable(processor) for processor in sampling.processors):
        raise InputError("sampling: processors must be functions f(logits [V], tokens [S], length) -> logits [V]")
    return columns
