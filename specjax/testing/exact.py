"""The exact law of a target's next tokens, by enumeration in numpy, written apart from the library's own sampling."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from specjax.models.target import Target
from specjax.sampling import Sampling
from specjax.testing.models import TableModel


def exact_law(
    target: Target | Any, prompt: Sequence[int], n: int, sampling: Sampling | None = None
) -> Float[np.ndarray, "..."]:
    """The law of the first `n` tokens after a prompt, an array `[V] * n` that sums to 1.

    A table model's is read off its table; any other model scores all `V ** (n - 1)` continuations, without a cache.

    Args:
        sampling: one prompt's settings (numbers, not sequences); None is temperature 1.
    """
    model = target.model if isinstance(target, Target) else target
    sampling = Sampling(temperature=1.0) if sampling is None else sampling
    prompt = [int(t) for t in prompt]
    scores = _table_scores(model) if isinstance(model, TableModel) else _model_scores(model, prompt, n)
    law = np.zeros((model.vocab_size,) * n)

    def descend(text: tuple[int, ...], mass: float) -> None:
        step = mass * reference_law(scores([*prompt, *text]), [*prompt, *text], len(prompt), sampling)
        if len(text) == n - 1:
            law[text] = step
            return
        for token in np.flatnonzero(step):
            descend((*text, int(token)), step[token])

    descend((), 1.0)
    return law


def reference_law(
    logits: Float[np.ndarray, "V"], tokens: Sequence[int], prompt_length: int, sampling: Sampling
) -> Float[np.ndarray, "V"]:
    """The law of the token after `tokens` under `sampling`, by its definition and with full sorts (float64)."""
    s: Any = sampling
    logits = np.array(logits, np.float64)
    for token in set(tokens):
        logits[token] *= 1 / s.repetition_penalty if logits[token] > 0 else s.repetition_penalty
    for token in tokens[prompt_length:]:
        logits[token] -= s.frequency_penalty
    for token in set(tokens[prompt_length:]):
        logits[token] -= s.presence_penalty
    for processor in s.processors:
        text = jnp.asarray([*tokens, 0], jnp.int32)  # a slot past the end, as the engine's texts have
        logits = np.asarray(processor(jnp.asarray(logits, jnp.float32), text, jnp.int32(len(tokens))), np.float64)
    if s.temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    logits = logits / s.temperature
    if 0 < s.top_k < len(logits):
        logits[logits < np.sort(logits)[-int(s.top_k)]] = -np.inf
    law = _softmax(logits)
    larger = np.array([law[law > p].sum() for p in law])
    kept = larger < s.top_p if s.top_p < 1 else np.ones(len(law), bool)
    kept &= law >= s.min_p * law.max()
    return _softmax(np.where(kept, logits, -np.inf))


def _softmax(logits: Float[np.ndarray, "V"]) -> Float[np.ndarray, "V"]:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _table_scores(model: TableModel) -> Any:
    table = np.asarray(model.table)
    if table.ndim == 2:
        return lambda text: table[text[-1]]
    return lambda text: table[text[max(len(text) - 2, 0)], text[-1]]


def _model_scores(model: Any, prompt: list[int], n: int) -> Any:
    """Scores after the prompt and up to n - 1 tokens of every continuation, from one forward pass."""
    endings = list(product(range(model.vocab_size), repeat=n - 1))
    texts = np.array([[*prompt, *ending] for ending in endings], np.int32)
    rows, length = texts.shape
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    mask = np.broadcast_to(np.tril(np.ones((length, length), bool)), (rows, length, length))
    forward = jax.jit(lambda model, *args: model.logits(model(*args).hidden))
    logits = np.asarray(forward(model, texts, positions, mask), np.float64)
    number = {ending: row for row, ending in enumerate(endings)}

    def scores(text: list[int]) -> np.ndarray:
        ending = tuple(text[len(prompt) :])
        return logits[number[ending + (0,) * (n - 1 - len(ending))], len(text) - 1]

    return scores
