"""What is counted while decoding, and how every printed number is defined."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any

DEFINITIONS = {
    "tokens_per_call": "committed new tokens / rounds in which the row was active; the bonus token counts; plain is 1",
    "acceptance_rate": "accepted / proposed draft tokens; fillers and tokens beyond a stop are not counted",
    "alpha": "accepted / (accepted + rejections tested): the per-token chance of the formulas",
    "marginal": "P(the i-th draft token of the path is accepted), over the rounds that proposed one at depth i",
    "conditional": "the same, over the rounds that accepted the first i-1 and had one to test at depth i",
}


@dataclass(frozen=True)
class Stats:
    """Counts of a decoding run; what lies beyond a stop is counted nowhere.

    Attributes:
        new_tokens: committed tokens.
        target_calls: rounds in which the row was active.
        proposed, accepted: draft tokens.
        rejected: rounds that ended at a draft token that was tested and rejected.
        proposed_at, reached_at, accepted_at: by draft position: rounds that proposed a token there, that tested one
            there, that accepted one there.
    """

    new_tokens: int = 0
    target_calls: int = 0
    proposed: int = 0
    accepted: int = 0
    rejected: int = 0
    proposed_at: tuple[int, ...] = ()
    reached_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()

    @property
    def tokens_per_call(self) -> float | None:
        return ratio(self.new_tokens, self.target_calls)

    @property
    def acceptance_rate(self) -> float | None:
        return ratio(self.accepted, self.proposed)

    @property
    def alpha(self) -> float | None:
        return ratio(self.accepted, self.accepted + self.rejected)

    def acceptance_by_position(self) -> dict[str, list[float | None]]:
        """Acceptance at each draft position, "marginal" and "conditional" (see `DEFINITIONS`)."""
        return {
            "marginal": [ratio(a, n) for a, n in zip(self.accepted_at, self.proposed_at, strict=True)],
            "conditional": [ratio(a, n) for a, n in zip(self.accepted_at, self.reached_at, strict=True)],
        }

    @classmethod
    def total(cls, parts: Iterable["Stats"]) -> "Stats":
        """The counts of several rows or runs added up."""
        parts = list(parts)
        counts: dict[str, Any] = {f.name: _add([getattr(part, f.name) for part in parts]) for f in fields(cls)}
        return cls(**counts)


def ratio(part: float, whole: float) -> float | None:
    """None where there is nothing to divide by: no data is not 0."""
    return part / whole if whole else None


def _add(values: Sequence[Any]) -> Any:
    """Sum of numbers, or of tuples place by place (shorter ones end early)."""
    if values and isinstance(values[0], tuple):
        return tuple(sum(place) for place in zip_longest(*values, fillvalue=0))
    return sum(values)
