"""What the formulas make of a run's rounds: tokens per call and speedups, for other draft lengths and batches."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from common.drafters import Named
from common.evaluation import Call
from specjax import Stats, theory
from specjax.ladder import ladder
from specjax.metrics import ratio

DEFINITIONS = {
    "predicted_tokens_per_call": "1 + Σ over draft positions of the product of the chances down to each; a chance is "
    "the conditional acceptance there times the share of the rounds that came so far and had a token to test",
    "predicted_speedup": "tokens per call / (draft steps × c + v), v the measured cost of the blocks that the rounds "
    "need, relative to a pass over one token, as their mean",
    "formula_tokens_per_call": "(1 - α^(k+1)) / (1 - α), of one α for all positions; chains only",
    "formula_speedup": "(1 - α^(k+1)) / (1 - α) / (k c + v(k + 1)); chains only",
}


@dataclass(frozen=True)
class Drafted:
    """A drafter's rounds, whatever they cost.

    Attributes:
        chances: by draft position, the chance that a token is accepted there in a round that accepted all before it:
            conditional acceptance times the share of those rounds that had a token to test there.
        alpha: accepted / (accepted + rejections tested); None where nothing was tested.
        lengths: number of rounds by how many nodes they proposed.
        blocks: number of rounds by the tokens of their block.
    """

    chances: tuple[float, ...]
    alpha: float | None
    lengths: Mapping[int, int]
    blocks: Mapping[int, int]

    @classmethod
    def of(cls, calls: Sequence[Call]) -> "Drafted":
        """From the counts and traces of one drafter's calls, decoded one prompt at a time."""
        stats = Stats.total(call.generation.stats for call in calls)
        rounds = [r for call in calls for row in call.generation.trace or [] for r in row]
        came = (stats.target_calls, *stats.accepted_at)
        conditional = stats.acceptance_by_position()["conditional"]
        tested = [ratio(n, before) for n, before in zip(stats.reached_at, came, strict=False)]
        return cls(
            chances=tuple((share or 0.0) * (a or 0.0) for share, a in zip(tested, conditional, strict=True)),
            alpha=stats.alpha,
            lengths=Counter(len(r.proposed) for r in rounds),
            blocks=Counter(r.block_tokens for r in rounds),
        )

    def tokens_per_call(self, depth: int) -> float:
        """Of chains of at most that length, or of the drafts as they were."""
        return float(theory.chain_tokens(self.chances[:depth]))

    def chain_blocks(self, drafter: Named) -> Mapping[int, int]:
        """The blocks of a drafter that proposes the same chains up to its own length."""
        sizes = ladder(drafter.drafter)
        blocks: Counter[int] = Counter()
        for length, rounds in self.lengths.items():
            nodes = min(length, drafter.drafter.num_nodes)
            blocks[1 + next(size for size in sizes if size >= nodes)] += rounds
        return blocks


def is_chain(drafter: Named) -> bool:
    return drafter.drafter.num_nodes == drafter.drafter.max_depth


def predict_speedup(
    tokens_per_call: float,
    depth: int,
    blocks: Mapping[int, int],
    draft_cost: float,
    verify_cost: Mapping[int, float],
    rows: int = 1,
) -> float:
    """Speedup over plain decoding: tokens per call / (depth × c + mean cost of a block).

    Args:
        depth: drafter steps a round.
        blocks: number of rounds by block size, of one row.
        verify_cost: time of a pass by the tokens in each row's block, at this number of rows.
        rows: decoded together; the largest block that one of them needs is everyone's, and they need independently.
    """
    sizes = sorted(blocks)
    below = np.cumsum([blocks[size] for size in sizes]) / sum(blocks.values())
    shares = np.diff(below**rows, prepend=0.0)
    speeds = theory.round_speedup(tokens_per_call, depth, sizes, draft_cost, verify_cost)
    return float(1 / np.average(1 / speeds, weights=shares))


def formula(
    drafter: Named, alpha: float | None, draft_cost: float, verify_cost: Mapping[int, float]
) -> tuple[float | None, float | None]:
    """Tokens per call and speedup by one α; None for trees, and where nothing was tested."""
    if alpha is None or not is_chain(drafter):
        return None, None
    k = drafter.drafter.max_depth
    return float(theory.expected_tokens(alpha, k)), float(theory.speedup(alpha, k, draft_cost, verify_cost))
