"""Draft model: a smaller language model of the same vocabulary drafts a chain."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import KVCache, read_first, write
from specjax.drafters.confidence import check_confidence, confidence
from specjax.drafters.small_decoder import OverTarget, SmallDecoder
from specjax.drafters.vocabulary import Scores
from specjax.errors import InputError, check_block_sizes, check_whole
from specjax.models.interface import TargetModel
from specjax.models.prefill import prefill
from specjax.models.target import Target
from specjax.models.tokenizer import Tokenizer, compare
from specjax.sampling import argmax, categorical, distribution, process
from specjax.state import Context, Round, static
from specjax.trees import Draft, chain

CATCH_UP = 2  # tokens fed in one pass before drafting: the pending one, and the last draft token if all were accepted


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """The draft model's cache, and how much of it is right.

    Attributes:
        cache: keys and values; the first `valid` slots of a row belong to the committed text.
        valid: never more than the committed length minus 1.
        fed: tokens whose keys and values the last `propose` wrote at `base`, `base + 1`, …: the pending token first.
        base: see `fed`.
    """

    cache: KVCache
    valid: Int[Array, "B"]
    fed: Int[Array, "B N"]
    base: Int[Array, "B"]


class Beside:
    """A value that lies in a pytree without being part of the program: any two are equal, so nothing is compiled again
    for another one.
    """

    def __init__(self, value: Any = None):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Beside)

    def __hash__(self) -> int:
        return 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftModel:
    """Any decoder with the target's vocabulary, or a small one of the target's own layers, drafts `num_draft_tokens`
    tokens, one pass each (Leviathan et al. 2023; Chen et al. 2023).

    Where the temperature is above 0 proposals are drawn from the draft model's own law, processed as the target's is
    (q), unless `sample` is False: then they are its most likely tokens, deterministic. Its cache is only ever right or
    unused: `update` keeps what the committed text agrees with, and `propose` first feeds whatever is missing, however
    long this drafter has been idle and whoever proposed what was accepted.

    Attributes:
        model: what `specjax.load` returns, a bare model, or a `SmallDecoder`.
        num_draft_tokens: k.
        sample: draw proposals where the temperature is above 0.
        block_sizes: see `Drafter`.
        min_confidence: a draft ends before the token of which the draft model is less sure than this; 0 is off. See
            `confidence`.
        tokenizer: of the draft model, to be compared with the target's; taken from `model` where that has one.
    """

    model: TargetModel | SmallDecoder
    num_draft_tokens: int = static(default=4)
    sample: bool = static(default=True)
    block_sizes: tuple[int, ...] | None = static(default=None)
    min_confidence: float = static(default=0.0)
    tokenizer: Beside = static(default=Beside())

    name: ClassVar[str] = "draft-model"
    features: ClassVar[tuple[str, ...]] = ()
    wants_logits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_whole("num_draft_tokens", self.num_draft_tokens, 0)
        check_block_sizes(self.block_sizes)
        check_confidence(self.min_confidence)
        if self.model is None or isinstance(self.model, str):
            raise InputError(f"model: expected what specjax.load returns, got {self.model!r}")
        if isinstance(self.model, Target):
            object.__setattr__(self, "tokenizer", Beside(self.model.tokenizer))
            object.__setattr__(self, "model", self.model.model)

    @property
    def num_nodes(self) -> int:
        return self.num_draft_tokens

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    def init(self, context: Context, features: dict[str, Any], longest: int) -> Memory:
        batch, size = context.tokens.shape
        cache, _ = prefill(self.over(context.model), context.tokens, longest, size)
        fed = jnp.full((batch, self.num_draft_tokens), -1, jnp.int32)  # nothing yet, and -1 is no token
        return Memory(cache, context.length - 1, fed, context.length - 1)

    def propose(self, memory: Memory, context: Context) -> tuple[Draft, Memory]:
        batch, k = context.length.shape[0], self.num_draft_tokens
        if k == 0:
            return chain(memory.fed, jnp.zeros(batch, jnp.int32)), memory
        model = self.over(context.model)
        cache, hidden = self.catch_up(model, memory, context)

        def feed(state: tuple[KVCache, Array], token: Array, i: Array) -> tuple[tuple[KVCache, Array], Array]:
            cache, fed = state
            at = context.length + i
            block = (token[:, None], at[:, None], jnp.ones((batch, 1, 1), bool), cache, at)
            output = read_first(context.running, lambda: model(*block))
            return (write(cache, output.block, at), fed.at[:, i + 1].set(token)), output.hidden

        def scores(hidden: Array) -> Scores:
            return scores_of(model, hidden, context.model.vocab_size)

        fed = jnp.full_like(memory.fed, -1).at[:, 0].set(context.pending)
        # the last drafted token is not fed: the next `propose` does it if it is accepted
        draft, (cache, fed) = draft_chain(
            k, hidden, (cache, fed), feed, scores, context, self.sample, self.min_confidence
        )
        return draft, Memory(cache, context.length - 1, fed, context.length - 1)

    def over(self, target: TargetModel) -> TargetModel:
        """The model that drafts for this target."""
        return self.model.over(target) if isinstance(self.model, SmallDecoder) else self.model

    def catch_up(self, model: TargetModel, memory: Memory, context: Context) -> tuple[KVCache, Float[Array, "B 1 M"]]:
        """Feed every committed token that the cache lacks, the pending one included; return the state after the latter.

        In rounds that follow each other that is one or two tokens, hence one pass.
        """
        batch = context.length.shape[0]
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((CATCH_UP, CATCH_UP), bool)), (batch, CATCH_UP, CATCH_UP))

        def feed(cache: KVCache, valid: Array) -> Any:
            slots = valid[:, None] + jnp.arange(CATCH_UP)
            tokens = jnp.take_along_axis(context.tokens, slots, axis=1)
            return read_first(context.running, lambda: model(tokens, slots, mask, cache, valid))

        def body(carry: tuple[KVCache, Array, Array]) -> tuple[KVCache, Array, Array]:
            cache, valid, hidden = carry
            output = feed(cache, valid)
            new = jnp.minimum(context.length - valid, CATCH_UP)
            last = jnp.take_along_axis(output.hidden, jnp.maximum(new - 1, 0)[:, None, None], axis=1)
            hidden = jnp.where((new > 0)[:, None, None], last, hidden)
            return write(cache, output.block, valid), valid + new, hidden

        shape = jax.eval_shape(feed, memory.cache, memory.valid).hidden
        start = (memory.cache, memory.valid, jnp.zeros((batch, 1, shape.shape[-1]), shape.dtype))
        cache, _, hidden = jax.lax.while_loop(lambda carry: (carry[1] < context.length).any(), body, start)
        return cache, hidden

    def check(self, target: Target) -> None:
        """Raise InputError, saying what differs, if this model has another vocabulary than the target, or is a small
        decoder for another one.
        """
        if isinstance(self.model, SmallDecoder):
            self.model.check(target.model)
            return
        own: Tokenizer | None = self.tokenizer.value
        if own is None or target.tokenizer is None:
            if self.model.vocab_size != target.model.vocab_size:
                raise InputError(
                    f"the draft model has {self.model.vocab_size} tokens and the target {target.model.vocab_size}, and "
                    "there are no tokenizers to compare; use a draft model of the same vocabulary"
                )
            return
        first = compare(target.tokenizer, own)
        if first is not None:
            tokens = target.tokenizer.tokens()
            there = repr(tokens[first]) if first < len(tokens) else "none"
            raise InputError(
                f"the draft model has another vocabulary than the target: they differ first at token id {first} "
                f"({there} in the target); use a draft model of the same tokenizer"
            )

    def update(self, memory: Memory, round: Round, context: Context) -> Memory:
        """Keep the fed tokens that the committed text now agrees with."""
        slots = memory.base[:, None] + jnp.arange(memory.fed.shape[1])
        text = jnp.take_along_axis(context.tokens, jnp.minimum(slots, context.tokens.shape[1] - 1), axis=1)
        agree = (memory.fed == text) & (slots < context.length[:, None] - 1)
        run = jnp.cumprod(agree.astype(jnp.int32), axis=1).sum(-1)
        return replace(memory, valid=jnp.maximum(memory.valid, memory.base + run))


def draft_chain(
    num_draft_tokens: int,
    hidden: Float[Array, "B 1 M"],
    state: Any,
    feed: Callable[[Any, Int[Array, "B"], Int[Array, ""]], tuple[Any, Float[Array, "B 1 M"]]],
    scores: Callable[[Float[Array, "B 1 M"]], Scores],
    context: Context,
    sample: bool,
    min_confidence: float = 0.0,
) -> tuple[Draft, Any]:
    """A chain of one token or more, drafted one after the other; the last one is not fed.

    A row's chain ends before the first token whose `confidence` is below `min_confidence`. Whether a token is there is
    thus decided by those before it, so drawn ones stay lossless. Once the chains of all rows have ended nothing more is
    run.

    Args:
        hidden: what the first token is read out of: the state at the pending token.
        state: whatever `feed` carries along.
        feed: `(state, token, i) -> (state, hidden)` after draft token i, which stands at `context.length + i`.
        scores: of the tokens after a hidden state.
        sample: draw the tokens where the temperature is above 0.
        min_confidence: 0 is off.

    Returns:
        The draft, and the state after all tokens but the last, or after those that were fed.
    """
    batch, k = context.length.shape[0], num_draft_tokens
    if min_confidence > 0:
        return _sure_chain(k, hidden, state, feed, scores, context, sample, min_confidence)

    def draft_one(carry: tuple[Any, Array, Array], i: Array) -> tuple[tuple[Any, Array, Array], Any]:
        state, hidden, path = carry
        token, law = pick(scores(hidden), path, i, context, sample)
        state, hidden = feed(state, token, i)
        return (state, hidden, path.at[:, i].set(token)), law

    carry, laws = jax.lax.scan(draft_one, (state, hidden, jnp.zeros((batch, k), jnp.int32)), jnp.arange(k - 1))
    state, hidden, path = carry
    token, law = pick(scores(hidden), path, jnp.int32(k - 1), context, sample)
    path = path.at[:, k - 1].set(token)
    q = None if law is None else jnp.concatenate([jnp.moveaxis(laws, 0, 1), law[:, None]], axis=1)
    sound = jnp.cumprod(path < context.model.vocab_size, axis=1).sum(-1)  # a broken law drafts nothing
    return chain(path, sound, q), state


def _sure_chain(
    k: int, hidden: Array, state: Any, feed: Any, scores: Any, context: Context, sample: bool, min_confidence: float
) -> tuple[Draft, Any]:
    """`draft_chain` with a threshold; the same draws, and the same tokens up to where a row ends."""

    def look(hidden: Array, path: Array, i: Array) -> tuple[Array, Array, Array | None]:
        """Which rows are sure of token i, the token, and its law."""
        found = scores(hidden)
        token, law = pick(found, path, i, context, sample)
        return confidence(found.values[:, 0]) >= min_confidence, token, law

    def put(drafted: _Chain, hidden: Array, i: Array) -> _Chain:
        sure, token, law = look(hidden, drafted.path, i)
        going = drafted.going & sure
        laws = None if drafted.laws is None or law is None else drafted.laws.at[:, i].set(law)
        return _Chain(drafted.path.at[:, i].set(token), laws, drafted.length + going, going)

    def goes_on(carry: tuple[Array, Any, _Chain]) -> Array:
        i, _, drafted = carry
        return (i < k) & drafted.going.any()

    def draft_one(carry: tuple[Array, Any, _Chain]) -> tuple[Array, Any, _Chain]:
        i, state, drafted = carry
        state, hidden = feed(state, drafted.path[:, i - 1], i - 1)
        return i + 1, state, put(drafted, hidden, i)

    batch = context.length.shape[0]
    path, zero = jnp.zeros((batch, k), jnp.int32), jnp.int32(0)
    law = jax.eval_shape(look, hidden, path, zero)[2]
    laws = None if law is None else jnp.zeros((batch, k, law.shape[1]), law.dtype)
    first = put(_Chain(path, laws, jnp.zeros(batch, jnp.int32), context.running), hidden, zero)
    _, state, end = jax.lax.while_loop(goes_on, draft_one, (jnp.int32(1), state, first))
    sound = jnp.cumprod(end.path < context.model.vocab_size, axis=1).sum(-1)  # a broken law drafts nothing
    return chain(end.path, jnp.minimum(end.length, sound), end.laws), state


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Chain:
    """A chain that is being drafted: its tokens so far, their laws, how many are in the draft, which rows go on."""

    path: Int[Array, "B N"]
    laws: Float[Array, "B N V"] | None
    length: Int[Array, "B"]
    going: Bool[Array, "B"]


def pick(
    scores: Scores, path: Int[Array, "B N"], i: Int[Array, ""], context: Context, sample: bool
) -> tuple[Int[Array, "B"], Float[Array, "B V"] | None]:
    """Draft token i after `path[:, :i]`, and the law it was drawn from (None if it was not drawn)."""
    size, rules = context.model.vocab_size, context.rules
    scores = scores.readable(rules)
    values, text = scores.values[:, 0], context.text(path, jnp.full(path.shape[0], i, jnp.int32))
    law = None
    if sample and rules.drawn:
        law = distribution(values, rules, text)
        uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, i)))(context.key)
        index = categorical(law, uniform)
        law = scores.spread(law, 0.0)
    else:  # filters never drop the most likely token
        index = argmax(process(values, replace(rules, filters=()), text))
    return jnp.where(index < values.shape[-1], scores.tokens(index), size), law


def scores_of(model: TargetModel, hidden: Float[Array, "B 1 M"], vocab_size: int) -> Scores:
    """What can be drafted. Ids that only one of draft model and target has (padding) never are."""
    if isinstance(model, OverTarget):
        return model.scores(hidden)
    logits = model.logits(hidden)[:, :, :vocab_size]
    missing = ((0, 0), (0, 0), (0, vocab_size - logits.shape[-1]))
    return Scores(jnp.pad(logits, missing, constant_values=-jnp.inf), None, vocab_size)
