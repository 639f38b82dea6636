"""Ways to decode, ours and others', on the same prompts in turns: their texts, and their seconds, prefill included."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from common.timing import without_compiling

import specjax
from specjax import Drafter, Target

RESAMPLES = 2000

Decode = Callable[[Sequence[int], int], tuple[list[int], float]]
"""Of a prompt and the most new tokens: the new tokens, greedy, and the seconds they took."""


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Attributes:
        note: settings, and what sets it apart.
        same_weights: it computes in float32 with the target's own weights, so that its texts must be the target's.
    """

    name: str
    decode: Decode
    note: str = ""
    same_weights: bool = True


@dataclass
class Ran:
    """What came of a method: for each prompt its text, and the seconds of each time it was decoded."""

    method: Method
    texts: list[list[int]] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each prompt."""
        return [len(text) / float(np.median(s)) for text, s in zip(self.texts, self.seconds, strict=True)]

    @property
    def rate(self) -> float:
        """Tokens per second of all prompts together."""
        return sum(map(len, self.texts)) / sum(float(np.median(s)) for s in self.seconds)

    def same_texts(self, other: "Ran") -> int:
        return sum(a == b for a, b in zip(self.texts, other.texts, strict=True))


def ours(target: Target, drafter: Drafter) -> Decode:
    """Ours, with a drafter."""

    def decode(prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], float]:
        g, _ = without_compiling(
            lambda: specjax.generate(target, [list(prompt)], drafter=drafter, max_new_tokens=max_new_tokens)
        )
        return g.token_ids[0], g.prefill_seconds + g.seconds

    return decode


def run_methods(
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    repetitions: int = 1,
    warm: bool = True,
    done: Callable[[], None] = lambda: None,
) -> list[Ran]:
    """Every prompt by every method, prompt by prompt, the order of the methods turned round each time.

    Args:
        warm: first decode everything once without timing it, so that whatever a method compiles is there.
        done: called after each.
    """
    results = [Ran(method) for method in methods]
    for repetition in range(-1 if warm else 0, repetitions):
        for number, prompt in enumerate(prompts):
            for result in results if (repetition + number) % 2 == 0 else reversed(results):
                text, seconds = result.method.decode(prompt, max_new_tokens)
                if len(result.texts) == number:
                    result.texts.append(text)
                    result.seconds.append([])
                if repetition >= 0:
                    result.seconds[number].append(seconds)
                done()
    return results


def rate_interval(result: Ran, base: Ran, seed: int = 0) -> list[float] | None:
    """95% interval of the ratio of two rates, by bootstrap over the prompts; None for a single one."""
    if len(result.texts) < 2:
        return None
    totals = [
        (np.array([len(text) for text in r.texts]), np.array([np.median(s) for s in r.seconds])) for r in (result, base)
    ]
    drawn = np.random.default_rng(seed).integers(len(result.texts), size=(RESAMPLES, len(result.texts)))
    mine, other = (tokens[drawn].sum(1) / seconds[drawn].sum(1) for tokens, seconds in totals)
    return [float(x) for x in np.percentile(mine / other, [2.5, 97.5])]


def fastest(
    trials: dict[str, Decode], prompt: Sequence[int], new_tokens: int = 16
) -> tuple[str, dict[str, float | str]]:
    """Which of some settings of one method is the fastest: the best of two short runs of each, after one to warm up.

    Returns:
        Its name, and tokens per second by name, or why there are none.
    """
    rates: dict[str, float | str] = {}
    for name, decode in trials.items():
        try:
            decode(prompt, new_tokens)
            runs = [decode(prompt, new_tokens) for _ in range(2)]
        except Exception as error:  # whatever another project's compiler says: a setting that does not work here
            first = (str(error).strip() or "no message").splitlines()[0]
            rates[name] = f"does not work here: {type(error).__name__}: {first}"
            continue
        rates[name] = max(len(text) / seconds for text, seconds in runs)
    measured = {name: rate for name, rate in rates.items() if isinstance(rate, float)}
    if not measured:
        raise specjax.SpecjaxError("; ".join(f"{name} {reason}" for name, reason in rates.items()))
    return max(measured, key=measured.__getitem__), rates
