"""What speculative decoding gains on paper: tokens per call, speedups, the best draft length, the batch that ends it.

>>> from specjax import theory
>>> round(theory.expected_tokens(0.8, k=4), 2)
3.36
>>> round(theory.speedup(0.8, k=4, draft_cost=0.05), 2)
2.8
>>> best = theory.best_draft_length(0.8, draft_cost=0.05)
>>> best.k, round(best.speedup, 2)
(8, 3.09)
>>> round(theory.acceptance([0.6, 0.3, 0.1], [0.3, 0.6, 0.1]), 2)
0.7
>>> round(theory.batch_speedup(0.8, 4, 0.05, batch=128, pass_cost=theory.Roofline(critical_tokens=128)), 2)
0.65

Arguments are numbers or arrays that broadcast, in float64; numbers give numbers. With α every draft token is accepted
with the same chance, independently of the others; measured acceptance by position goes into `chain_tokens` and
`tree_tokens`. `specjax.simulate` draws what is computed here.

Leviathan et al. 2023 is "Fast Inference from Transformers via Speculative Decoding". α, c and k (their γ) are those of
docs/design.md.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from specjax.errors import InputError, check_whole
from specjax.trees import StaticTree

Numbers = float | Sequence[float] | np.ndarray
Cost = float | Mapping[int, float] | Callable[[int], float]


def expected_tokens(alpha: Numbers, k: Numbers) -> Any:
    """Tokens a target call gives, the bonus token included: (1 - α^(k+1)) / (1 - α), and k + 1 for α = 1.

    Leviathan et al. 2023, equation 1.

    Args:
        alpha: chance that a draft token is accepted, from 0 to 1.
        k: draft length, 0 or more.
    """
    alpha, k = _together(alpha=_chances("alpha", alpha), k=_whole("k", k, 0))
    sure = alpha == 1
    below = np.where(sure, 0.5, alpha)
    with np.errstate(divide="ignore"):  # log 0, which comes out as one token
        tokens = -np.expm1((k + 1) * np.log(below)) / (1 - below)  # no cancellation, however close to 1 α is
    return _plain(np.where(sure, k + 1.0, tokens))


def chain_tokens(conditional: Numbers) -> Any:
    """Tokens per call of a chain whose i-th token is accepted with chance a_i once the first i - 1 were: 1 + Σ Π a.

    Σ_i P(the first i draft tokens are accepted), and the bonus token; `expected_tokens` is the case of equal a_i.

    Args:
        conditional: a_1 … a_k along the last axis, for example `Stats.acceptance_by_position()["conditional"]`.
    """
    chances = _chances("conditional", conditional)
    if chances.ndim == 0:
        raise InputError(f"conditional: expected a_1 … a_k, got {conditional!r}; for one chance use expected_tokens")
    return _plain(1 + np.cumprod(chances, axis=-1).sum(-1))


def tree_tokens(tree: StaticTree | Sequence[int] | np.ndarray, chances: Numbers) -> float:
    """Tokens per call of a tree: 1 + Σ over nodes of the product of the chances on the way down to the node.

    At most one of several siblings is accepted, so the nodes of a depth exclude each other and the sum over all nodes
    is the expected length of the path (Chen et al. 2024, Sequoia, on the construction of trees).

    Args:
        tree: a static tree, or each node's parent, below its own index; -1 = the pending token.
        chances: per node, the chance that it is accepted once its parent was. Those of siblings add up to 1 at most.
    """
    parents = _numbers("tree", tree.parents if isinstance(tree, StaticTree) else tree, -1, whole=True).astype(int)
    a = _chances("chances", chances)
    nodes = parents.size
    if parents.ndim != 1:
        raise InputError(f"tree: expected a StaticTree or a list of parents, got {_shown(parents)}")
    if a.shape != (nodes,):
        raise InputError(f"chances: expected one for each of the tree's {nodes} nodes, got shape {a.shape}")
    for node, parent in enumerate(parents):
        if parent >= node:
            raise InputError(f"tree: the parent of node {node} is {parent}; expected -1 to {node - 1} (`trees.order`)")
    children = np.bincount(parents + 1, weights=a, minlength=nodes + 1)
    if children.max(initial=0) > 1 + 1e-6:
        place = int(children.argmax()) - 1
        above = "the pending token" if place < 0 else f"node {place}"
        raise InputError(f"chances: those of the children of {above} add up to {children.max():g}; expected 1 at most")
    reached = np.ones(nodes + 1)  # of block indices: the pending token first
    for node, parent in enumerate(parents):
        reached[node + 1] = a[node] * reached[parent + 1]
    return float(reached.sum())


def speedup(alpha: Numbers, k: Numbers, draft_cost: Numbers, verify_cost: Cost = 1.0) -> Any:
    """Speed over plain decoding: expected_tokens(α, k) / (k c + v(k + 1)).

    Leviathan et al. 2023, theorem 3.8, where v = 1: a pass over few tokens takes as long as one over a single token.

    Args:
        draft_cost: c, time of one drafter step / time of one plain target step.
        verify_cost: v, the time of a target pass over a block: a number (of plain steps), or a function or a table
            {block tokens: time} in any unit, of which only the ratio to one token's counts. Between a table's sizes
            the time is interpolated.
    """
    k = _whole("k", k, 0)
    return round_speedup(expected_tokens(alpha, k), k, k + 1, draft_cost, verify_cost)


def round_speedup(
    tokens_per_call: Numbers, draft_steps: Numbers, block_tokens: Numbers, draft_cost: Numbers, verify_cost: Cost = 1.0
) -> Any:
    """The same for rounds of any kind, trees and measured ones: tokens_per_call / (draft_steps c + v(block_tokens)).

    Args:
        draft_steps: drafter steps a round, for a tree its depth.
        block_tokens: tokens the target sees a round, the pending one included.
        draft_cost, verify_cost: as in `speedup`.
    """
    tokens, steps, block, c = _together(
        tokens_per_call=_numbers("tokens_per_call", tokens_per_call),
        draft_steps=_numbers("draft_steps", draft_steps),
        block_tokens=_whole("block_tokens", block_tokens, 1),
        draft_cost=_numbers("draft_cost", draft_cost),
    )
    return _plain(tokens / (steps * c + _relative(verify_cost, block)))


@dataclass(frozen=True)
class Best:
    """A draft length, and the speedup there. k = 0 is plain decoding: no draft length is faster."""

    k: int
    speedup: float


def best_draft_length(alpha: Numbers, draft_cost: float, verify_cost: Cost = 1.0, max_k: int | None = None) -> Best:
    """The shortest of the fastest draft lengths, and its speedup.

    With v = 1 there is a gain exactly if α > c, and then at least (1 + α) / (1 + c): that is k = 1 (Leviathan et al.
    2023, corollary 3.9).

    Args:
        alpha: α, or a_1 … a_k as in `chain_tokens`.
        draft_cost, verify_cost: as in `speedup`.
        max_k: the longest draft to consider. None: all the chances that were given, and what a table of costs covers;
            64 for one α.
    """
    chances = _chances("alpha", alpha)
    if chances.ndim > 1:
        raise InputError(f"alpha: expected α or a_1 … a_k, got an array of shape {chances.shape}")
    longest = chances.size if chances.ndim else 64
    if isinstance(verify_cost, Mapping):
        _relative(verify_cost, np.ones(1))  # checked before its sizes are read
        longest = min(longest, max(verify_cost) - 1)
    if max_k is not None:
        check_whole("max_k", max_k, 0)
        if chances.ndim and max_k > chances.size:
            raise InputError(f"max_k: {max_k}, but alpha has only {chances.size} draft positions")
        longest = max_k
    c = _numbers("draft_cost", draft_cost)
    if c.ndim:
        raise InputError(f"draft_cost: expected one number, got {_shown(c)}")
    k = np.arange(longest + 1)
    if chances.ndim:
        tokens = 1 + np.concatenate([[0], np.cumsum(np.cumprod(chances[:longest]))])
    else:
        tokens = expected_tokens(chances, k)
    speeds = round_speedup(tokens, k, k + 1, c, verify_cost)
    best = int((speeds > speeds.max() - _ROUNDING).argmax())
    return Best(best, float(speeds[best]))


def total_variation(p: Numbers, q: Numbers) -> Any:
    """½ Σ |p - q| over the last axis."""
    p, q = as_laws(p=p, q=q)
    return _plain(0.5 * np.abs(p - q).sum(-1))


def acceptance(p: Numbers, q: Numbers) -> Any:
    """α at one position: Σ min(p, q) = 1 - total_variation(p, q), over the last axis.

    Leviathan et al. 2023, corollary 3.6. With p the target's law and q the drafter's, both as tokens are drawn from
    them.
    """
    p, q = as_laws(p=p, q=q)
    return _plain(np.minimum(p, q).sum(-1))


def residual(p: Numbers, q: Numbers) -> Float[np.ndarray, "*B V"]:
    """The law of the token that replaces a rejected one: norm(max(p - q, 0)); p where p = q and nothing is rejected.

    Leviathan et al. 2023, section 2.3, and Chen et al. 2023, algorithm 2.
    """
    p, q = as_laws(p=p, q=q)
    excess = np.maximum(p - q, 0)
    total = excess.sum(-1, keepdims=True)
    return np.where(total > 0, excess / np.where(total > 0, total, 1), p)


def output_law(p: Numbers, q: Numbers, claimed: Numbers | None = None) -> Float[np.ndarray, "*B V"]:
    """The law of the token that rejection sampling commits: q min(1, p / c) + (1 - Σ q min(1, p / c)) residual(p, c).

    It is p where the claimed law c is the law q that the draft token was drawn from (Leviathan et al. 2023, appendix
    A.1), whatever q is, and in general not p where it is another: q before temperature and filters, say.

    Args:
        claimed: c, the law that the acceptance rule is told; None for q.
    """
    p, q, c = as_laws(p=p, q=q, claimed=q if claimed is None else claimed)
    kept = q * np.minimum(1, np.divide(p, c, out=np.full(np.broadcast(p, c).shape, np.inf), where=c > 0))
    return kept + (1 - kept.sum(-1, keepdims=True)) * residual(p, c)


@dataclass(frozen=True)
class Roofline:
    """Time of a target pass over n tokens: that of reading the weights, or of computing, whichever is longer.

    seconds(n) = s · max(1, n / critical_tokens), Williams et al. 2009. The cache that attention reads is left out: it
    belongs to each row and makes long texts stay memory-bound for longer. A function of n, so it serves as
    `verify_cost` (of a single row) and as `pass_cost`.

    Attributes:
        critical_tokens: tokens at which a pass turns from memory-bound to compute-bound.
        weights_seconds: s, time to read the weights once; in any unit where only ratios matter.
    """

    critical_tokens: float
    weights_seconds: float = 1.0

    def __post_init__(self) -> None:
        for name in ("critical_tokens", "weights_seconds"):
            _positive(name, getattr(self, name))

    @classmethod
    def of_device(
        cls, weight_bytes: float, bandwidth: float, flops: float, bytes_per_weight: float = 2.0
    ) -> "Roofline":
        """From data sheets: a pass reads every weight once, and multiplies and adds with each of them for every token.

        s = weight_bytes / bandwidth, critical_tokens = s · flops / (2 · weights) = bytes_per_weight · flops /
        (2 · bandwidth): the model's size does not matter for it.

        Args:
            weight_bytes: bytes of the weights that a pass reads.
            bandwidth: of memory, bytes a second.
            flops: floating-point operations a second.
            bytes_per_weight: 2 for bfloat16.
        """
        s = _positive("weight_bytes", weight_bytes) / _positive("bandwidth", bandwidth)
        weights = weight_bytes / _positive("bytes_per_weight", bytes_per_weight)
        return cls(s * _positive("flops", flops) / (2 * weights), s)

    def __call__(self, tokens: Numbers) -> Any:
        """Seconds of a pass over so many tokens, all rows together."""
        n = _numbers("tokens", tokens)
        return _plain(self.weights_seconds * np.maximum(1, n / self.critical_tokens))

    def cost(self, tokens: Numbers) -> Any:
        """The same relative to a pass over one token."""
        return self(tokens) / self(1)


def batch_speedup(alpha: Numbers, k: Numbers, draft_cost: Numbers, batch: Numbers, pass_cost: Cost) -> Any:
    """Speedup over plain decoding at the same batch size b: expected_tokens(α, k) / (k c + t(b (k + 1)) / t(b)).

    Args:
        draft_cost: c at this batch size.
        batch: rows, 1 or more.
        pass_cost: t, time of a target pass over so many tokens, all rows together: a `Roofline`, or a function or table
            as in `speedup`.
    """
    if not callable(pass_cost) and not isinstance(pass_cost, Mapping):
        raise InputError(f"pass_cost: expected a Roofline, a function or a table of times by tokens, got {pass_cost!r}")
    alpha, k, c, batch = _together(
        alpha=_chances("alpha", alpha),
        k=_whole("k", k, 0),
        draft_cost=_numbers("draft_cost", draft_cost),
        batch=_whole("batch", batch, 1),
    )
    verify = _relative(pass_cost, batch * (k + 1)) / _relative(pass_cost, batch)
    return _plain(expected_tokens(alpha, k) / (k * c + verify))


def crossover_batch(alpha: float, k: int, draft_cost: float, roofline: Roofline) -> int | None:
    """The smallest batch at which speculation is slower than plain decoding, and from which on it stays so.

    The pass costs b (k + 1) / critical_tokens plain steps in between, so that is the first whole b above
    critical_tokens · (expected_tokens(α, k) - k c) / (k + 1), or 1 where drafts do not even pay for themselves.

    Args:
        draft_cost: c, taken to be the same at every batch size.

    Returns:
        None where speculation never loses.
    """
    check_whole("k", k, 0)
    if not isinstance(roofline, Roofline):
        raise InputError(f"roofline: expected theory.Roofline(critical_tokens), got {roofline!r}")
    gain = np.asarray(expected_tokens(alpha, k) - k * _numbers("draft_cost", draft_cost))
    if gain.ndim:
        raise InputError("crossover_batch: expected one number for alpha and for draft_cost, got an array")
    if gain < 1 - _ROUNDING:
        return 1
    if gain > k + 1 - _ROUNDING:
        return None
    return math.floor(roofline.critical_tokens * float(gain) / (k + 1) + _ROUNDING) + 1


_ROUNDING = 1e-9  # what float64 may do to a tie


def as_laws(**given: Any) -> list[np.ndarray]:
    """Probabilities over the last axis, all of one vocabulary, each made to sum to 1 exactly."""
    laws: list[np.ndarray] = []
    for name, value in given.items():
        law = _chances(name, value)
        if law.ndim == 0 or law.shape[-1] == 0:
            raise InputError(f"{name}: expected a law over tokens, got {value!r}")
        total = law.sum(-1, keepdims=True)
        if (np.abs(total - 1) > 1e-3).any():
            far = float(total.flat[np.abs(total - 1).argmax()])
            raise InputError(f"{name}: expected probabilities that sum to 1, got a sum of {far:g}; normalise them")
        if laws and law.shape[-1] != laws[0].shape[-1]:
            raise InputError(f"{name}: {law.shape[-1]} tokens, but {next(iter(given))} has {laws[0].shape[-1]}")
        laws.append(law / total)
    _together(**{name: law[..., 0] for name, law in zip(given, laws, strict=True)})
    return laws


def _relative(cost: Any, tokens: np.ndarray) -> np.ndarray:
    """Cost of passes over so many tokens, relative to one token."""
    if isinstance(cost, Mapping):
        return _interpolated(cost, tokens)
    if callable(cost):
        values, where = np.unique(tokens, return_inverse=True)
        costs = np.array([_positive(f"cost of {n:.0f} tokens", cost(int(n))) for n in (1, *values)])
        return (costs[1:] / costs[0])[where].reshape(np.shape(tokens))
    return np.where(tokens == 1, 1.0, _positive("cost", cost))


def _interpolated(table: Mapping[int, float], tokens: np.ndarray) -> np.ndarray:
    if not all(isinstance(size, int | np.integer) and size > 0 for size in table) or 1 not in table:
        raise InputError(f"cost: a table needs whole numbers of tokens from 1 on, with 1 among them; got {dict(table)}")
    sizes = sorted(table)
    costs = [_positive(f"cost of {size} tokens", table[size]) for size in sizes]
    if tokens.size and tokens.max() > sizes[-1]:
        raise InputError(f"cost: the table ends at {sizes[-1]} tokens, but {tokens.max():.0f} are asked for; extend it")
    return np.interp(tokens, sizes, costs) / costs[0]


def _plain(values: np.ndarray) -> Any:
    """A float for a single number."""
    return float(values) if np.ndim(values) == 0 else values


def _shown(values: np.ndarray) -> str:
    """In one line."""
    return f"an array of {values.dtype}, shape {values.shape}" if values.ndim else str(values)


def _numbers(name: str, value: Any, least: float = 0, most: float = math.inf, whole: bool = False) -> np.ndarray:
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = np.array(np.nan)
    fits = np.isfinite(array) & (array >= least) & (array <= most) & (not whole or array == np.floor(array))
    if not fits.all():
        kind = "whole numbers" if whole else "numbers"
        limits = f"{least:g} to {most:g}" if most < math.inf else f"{least:g} or more"
        given = float(array[~fits].flat[0])
        raise InputError(f"{name}: expected {kind}, {limits}, got {'no number' if math.isnan(given) else given}")
    return array


def _chances(name: str, value: Any) -> np.ndarray:
    return _numbers(name, value, 0, 1)


def _whole(name: str, value: Any, least: int) -> np.ndarray:
    return _numbers(name, value, least, whole=True)


def _positive(name: str, value: Any) -> float:
    array = _numbers(name, value)
    if array.ndim or array == 0:
        raise InputError(f"{name}: expected one number above 0, got {_shown(array)}")
    return float(array)


def _together(**arrays: np.ndarray) -> list[np.ndarray]:
    try:
        return list(np.broadcast_arrays(*arrays.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise InputError(f"shapes that do not broadcast: {shapes}") from None
