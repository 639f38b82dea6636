"""Speculative decoding of laws that are written down, by the library's acceptance laws: a million tokens in seconds.

A law over tokens, or a Markov chain (a row of probabilities after each token), stands for the target, another one for
the drafter; what comes out is compared with what the target says.

>>> from specjax import simulate
>>> drawn = simulate.texts(p=[0.6, 0.3, 0.1], q=[0.1, 0.2, 0.7], runs=100_000)  # a drafter that is badly wrong
>>> drawn.passed, round(drawn.alpha, 1)
(True, 0.4)
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.errors import InputError, check_whole
from specjax.laws import Law
from specjax.metrics import ratio
from specjax.requests import choose_law
from specjax.sampling import Sampling, categorical
from specjax.theory import Numbers, as_laws, total_variation
from specjax.trees import chain

SIGMAS = 5  # a right law fails about once in a million simulations


@dataclass(frozen=True)
class Simulation:
    """What the simulated texts look like, beside what they should.

    Attributes:
        law: shares of the texts, `[V] * num_tokens`.
        exact: the target's own law of them.
        distance: total variation between the two.
        noise: the distance that sampling explains: mean plus five standard deviations of what as many texts drawn from
            `exact` itself show.
        alpha: kept share, accepted / (accepted + rejected) draft tokens; None where none was tested.
        tokens_per_call: tokens of whole rounds, the bonus token included / rounds.
        runs: texts.
    """

    law: Float[np.ndarray, "..."]
    exact: Float[np.ndarray, "..."]
    distance: float
    noise: float
    alpha: float | None
    tokens_per_call: float
    runs: int

    @property
    def worst(self) -> float:
        """The largest error of any text's share."""
        return float(np.abs(self.law - self.exact).max())

    @property
    def passed(self) -> bool:
        """Whether the distance is no more than noise."""
        return self.distance <= self.noise


def texts(
    p: Numbers,
    q: Numbers,
    claimed: Numbers | None = None,
    *,
    num_draft_tokens: int = 1,
    num_tokens: int = 1,
    runs: int = 1_000_000,
    start: int = 0,
    law: Law | str | None = None,
    seed: int = 0,
    exact: Numbers | None = None,
) -> Simulation:
    """Decode the first `num_tokens` tokens of many texts by rounds of drafts, and compare their joint law with p's.

    Args:
        p: the target's law: probabilities `[V]`, the same after every token, or `[V, V]`, those after each token.
        q: what draft tokens are drawn from, likewise.
        claimed: what the acceptance law is told they were drawn from; None for q, the truth.
        num_draft_tokens: draft length.
        num_tokens: tokens a text; rounds go on until every text has them.
        start: the token before the texts.
        law: as in `generate`, None for rejection sampling.
        exact: the law that texts are held against, like p; None for p.

    Raises:
        InputError: laws that are none or do not fit, more than 100,000 possible texts.
    """
    for name, value, least in (
        ("num_draft_tokens", num_draft_tokens, 0),
        ("num_tokens", num_tokens, 1),
        ("runs", runs, 1),
    ):
        check_whole(name, value, least)
    given = as_laws(p=p, q=q, claimed=q if claimed is None else claimed, exact=p if exact is None else exact)
    size = given[0].shape[-1]
    for name, table in zip(("p", "q", "claimed", "exact"), given, strict=True):
        if table.shape not in ((size,), (size, size)):
            raise InputError(f"{name}: expected probabilities [{size}] or [{size}, {size}], got shape {table.shape}")
    target, drafter, said, wanted = (np.broadcast_to(table, (size, size)) for table in given)
    check_whole("start", start, 0)
    if start >= size:
        raise InputError(f"start: {start}, but there are only {size} tokens")
    if size**num_tokens > 100_000:
        raise InputError(f"num_tokens: {size} ** {num_tokens} texts; expected at most 100,000")
    rows = min(runs, max(1, 4_000_000 // (size * (num_draft_tokens + 1))))
    tokens, counts = _draw(
        *(jnp.asarray(table, jnp.float32) for table in (target, drafter, said)),
        jnp.int32(start),
        jax.random.split(jax.random.key(seed), -(-runs // rows)),
        law=choose_law(law, Sampling(temperature=1.0).rules(1)),
        num_draft_tokens=num_draft_tokens,
        num_tokens=num_tokens,
        rows=rows,
    )
    codes = np.ravel_multi_index(tuple(np.asarray(tokens)[:runs].T), (size,) * num_tokens)
    shares = np.bincount(codes, minlength=size**num_tokens) / runs
    joint = wanted[start]
    for _ in range(num_tokens - 1):
        joint = joint[..., None] * wanted
    rounds, accepted, rejected = np.asarray(counts)[:runs].sum(0)
    return Simulation(
        law=shares.reshape(joint.shape),
        exact=joint,
        distance=total_variation(shares, joint.reshape(-1)),
        noise=_noise(joint.reshape(-1), runs, seed),
        alpha=ratio(float(accepted), float(accepted + rejected)),
        tokens_per_call=float(1 + accepted / rounds),
        runs=runs,
    )


def mismatch(
    p: Numbers, q: Numbers, temperature: float = 0.5, runs: int = 200_000, seed: int = 0
) -> dict[str, Simulation]:
    """What becomes of one token's law at a temperature that is not applied to p and q alike, beside what was asked for.

    - "alike": p, the drafter's draws and the q that the law is told are tempered. Right.
    - "q untempered": draws and q are the drafter's own law, p is tempered. Right too, only the share of drafts that
      are kept differs: any q serves if it is the one that tokens are drawn from.
    - "q claimed untempered": draws are tempered, the q that the law is told is not. Wrong: `theory.output_law`.
    - "p untempered": draws and q are tempered, p is not. Wrong: texts follow p without the temperature.

    Args:
        p, q: laws over tokens, `[V]`, before the temperature.
        temperature: other than 1, which would change nothing.
    """
    if any(law.ndim != 1 for law in as_laws(p=p, q=q)):
        raise InputError("mismatch: expected laws of one token, p [V] and q [V]")
    cold_p, cold_q = tempered(p, temperature), tempered(q, temperature)
    if temperature == 1:
        raise InputError("mismatch: temperature 1 changes nothing; expected another")
    cases: dict[str, tuple[Any, Any, Any]] = {
        "alike": (cold_p, cold_q, cold_q),
        "q untempered": (cold_p, q, q),
        "q claimed untempered": (cold_p, cold_q, q),
        "p untempered": (p, cold_q, cold_q),
    }
    return {name: texts(*laws, runs=runs, seed=seed, exact=cold_p) for name, laws in cases.items()}


def tempered(p: Numbers, temperature: float) -> Float[np.ndarray, "*B V"]:
    """The law p at a temperature above 0: norm(p^(1/T))."""
    (p,) = as_laws(p=p)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < float("inf"):
        raise InputError(f"temperature: expected one number above 0, got {temperature!r}")
    with np.errstate(divide="ignore"):
        scores = np.log(p)
    weights = np.exp((scores - scores.max(-1, keepdims=True)) / temperature)
    return weights / weights.sum(-1, keepdims=True)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Chain:
    """A Markov chain as a `TargetLaw`: the law at a node depends on its token alone."""

    table: Float[Array, "V V"]
    pending: Int[Array, "B"]

    def probs(self, node: Int[Array, "B"], path: Int[Array, "B D"], depth: Int[Array, "B"]) -> Float[Array, "B V"]:
        before = jnp.concatenate([self.pending[:, None], path], axis=1)
        return self.table[jnp.take_along_axis(before, depth[:, None], axis=1)[:, 0]]

    def logits(self, node: Int[Array, "B"], path: Int[Array, "B D"], depth: Int[Array, "B"]) -> Float[Array, "B V"]:
        return jnp.log(self.probs(node, path, depth))


@partial(jax.jit, static_argnames=("law", "num_draft_tokens", "num_tokens", "rows"))
def _draw(
    target: Float[Array, "V V"],
    drafter: Float[Array, "V V"],
    claimed: Float[Array, "V V"],
    start: Int[Array, ""],
    keys: Array,
    *,
    law: Law,
    num_draft_tokens: int,
    num_tokens: int,
    rows: int,
) -> tuple[Int[Array, "R n"], Int[Array, "R 3"]]:
    """Texts, and each one's rounds, accepted and rejected draft tokens; `rows` texts at a time."""

    def one_round(state: Any) -> Any:
        text, length, last, counts, key = state
        key, draw_key, law_key = jax.random.split(key, 3)
        uniform = jax.random.uniform(draw_key, (num_draft_tokens, rows))
        token, drafted, said = last, [], []
        for i in range(num_draft_tokens):
            said.append(claimed[token])
            token = categorical(drafter[token], uniform[i])
            drafted.append(token)
        if drafted:
            draft = chain(jnp.stack(drafted, 1), jnp.full(rows, num_draft_tokens), jnp.stack(said, 1))
        else:
            draft = chain(jnp.zeros((rows, 0), jnp.int32), jnp.zeros(rows, jnp.int32))
        path = law(_Chain(target, last), draft, jax.random.split(law_key, rows), num_draft_tokens)
        place = jnp.arange(num_tokens) - length[:, None]
        new = jnp.take_along_axis(path.tokens, jnp.clip(place, 0, num_draft_tokens), axis=1)
        text = jnp.where((place >= 0) & (place <= path.accepted[:, None]), new, text)
        counted = jnp.stack([jnp.ones_like(length), path.accepted, path.rejected.astype(jnp.int32)], 1)
        counts = counts + jnp.where((length < num_tokens)[:, None], counted, 0)
        return text, length + path.accepted + 1, path.bonus, counts, key

    def some(key: Array) -> tuple[Array, Array]:
        zero = jnp.zeros(rows, jnp.int32)
        begin = (jnp.zeros((rows, num_tokens), jnp.int32), zero, zero + start, jnp.zeros((rows, 3), jnp.int32), key)
        end = lax.while_loop(lambda state: (state[1] < num_tokens).any(), one_round, begin)
        return end[0], end[3]

    tokens, counts = lax.map(some, keys)
    return tokens.reshape(-1, num_tokens), counts.reshape(-1, 3)


def _noise(law: Float[np.ndarray, "X"], runs: int, seed: int) -> float:
    random = np.random.default_rng(seed)
    law = law / law.sum()
    distances = [0.5 * np.abs(random.multinomial(runs, law) / runs - law).sum() for _ in range(200)]
    return float(np.mean(distances) + SIGMAS * np.std(distances)) + 1e-9
