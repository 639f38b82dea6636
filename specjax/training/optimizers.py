"""Optimizers and learning-rate schedules, by optax."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array
from optax.contrib import MuonDimensionNumbers, muon

from specjax.errors import InputError

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "linear", "constant")

# Which axes of a weight are its inputs and which its outputs; the others number independent matrices. Fused weights are
# taken apart: keys, values and every query head of a group are a matrix each, and so are gate and up.
_MATRICES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "qkv": ((0,), (1, 3)),  # [M, K, G+2, D]
    "out": ((0, 1), (2,)),  # [K, G*D, M]
    "gate_up": ((0,), (2,)),  # [M, 2, F]
    "experts_gate_up": ((1,), (3,)),  # [E, M, 2, F]
}


@dataclass(frozen=True)
class Optimization:
    """How parameters follow the gradient.

    Attributes:
        optimizer: "adamw", or "muon": matrices by Muon (Jordan 2024), with updates scaled to AdamW's size (Liu et al.
            2025, section 2.2), so that learning rate and weight decay mean the same; embeddings, heads, norms and
            biases by AdamW (with Nesterov's momentum, as optax's Muon has it).
        learning_rate: the highest.
        schedule: after the warm-up, "cosine" or "linear" down to `final_rate`, or "constant".
        warmup: share of the run's steps in which the rate rises linearly; the first step already has some of it.
        final_rate: where the schedule ends, as a share of `learning_rate`.
        weight_decay: of matrices only (norms and biases have none), times the learning rate.
        clip: the gradient's greatest norm over all parameters; 0 for no clipping.
        beta1, beta2, epsilon: AdamW's.
        momentum: Muon's.
    """

    optimizer: str = "adamw"
    learning_rate: float = 1e-4
    schedule: str = "cosine"
    warmup: float = 0.0
    final_rate: float = 0.0
    weight_decay: float = 0.0
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.95

    def __post_init__(self) -> None:
        for name, value, known in (("optimizer", self.optimizer, OPTIMIZERS), ("schedule", self.schedule, SCHEDULES)):
            if value not in known:
                raise InputError(f"{name} is {value!r}; expected one of {', '.join(known)}")
        if not 0 <= self.warmup < 1:
            raise InputError(f"warmup is {self.warmup}; expected a share of the steps, at least 0 and less than 1")
        for name in ("learning_rate", "epsilon"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{name} is {getattr(self, name)}; expected a number above 0")
        for name in ("weight_decay", "clip"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(f"{name} is {getattr(self, name)}; expected 0 or more")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; expected at least 0 and less than 1")
        if not 0 <= self.final_rate <= 1:
            raise InputError(f"final_rate is {self.final_rate}; expected a share of the learning rate, from 0 to 1")


def make_schedule(settings: Optimization, steps: int) -> Callable[[Any], Array]:
    """The learning rate of step 0, 1, … `steps - 1`."""
    peak, warmup = settings.learning_rate, min(round(settings.warmup * steps), steps - 1)
    rest = max(steps - warmup, 1)
    if settings.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, settings.final_rate)
    elif settings.schedule == "linear":
        after = optax.linear_schedule(peak, peak * settings.final_rate, rest)
    else:
        after = optax.constant_schedule(peak)
    if not warmup:
        return after
    first = peak / (warmup + 1)  # a first step of rate 0 would be lost
    return optax.join_schedules([optax.linear_schedule(first, peak, warmup), after], [warmup])


def make_optimizer(settings: Optimization) -> optax.GradientTransformation:
    """From gradients to the direction that, times minus the learning rate, is added to the parameters.

    Parameters are a flat dictionary by name, as in `TrainState`. The learning rate is the caller's, so that it goes by
    the step of the run.
    """
    s = settings
    parts = [optax.clip_by_global_norm(s.clip)] if s.clip else []
    if s.optimizer == "muon":
        # a rate of -1 leaves the direction; decay is added below, since this one would reach AdamW's norms too
        direction = muon(
            -1.0,
            beta=s.momentum,
            eps=s.epsilon,
            adam_b1=s.beta1,
            adam_b2=s.beta2,
            muon_weight_dimension_numbers=matrices,
            consistent_rms=0.2,
        )
    else:
        direction = optax.scale_by_adam(s.beta1, s.beta2, s.epsilon)
    parts.append(direction)
    if s.weight_decay:
        parts.append(optax.add_decayed_weights(s.weight_decay, decayed))
    return optax.chain(*parts)


def descend(params: Any, direction: Any, rate: Array) -> Any:
    """Parameters after one step."""
    return jax.tree.map(lambda p, d: p - (rate * d).astype(p.dtype), params, direction)


def matrices(params: Mapping[str, Array]) -> dict[str, MuonDimensionNumbers | None]:
    """What Muon makes orthogonal: for each parameter its input and output axes, None for those that are AdamW's.

    Those are norms, biases, and what has the vocabulary on one side: embeddings and heads.
    """
    found: dict[str, MuonDimensionNumbers | None] = {}
    for name, value in params.items():
        last = _last(name)
        # optax asks again with what is not Muon's masked
        if isinstance(value, optax.MaskedNode) or value.ndim < 2 or _is_vector(last) or last in ("embed", "head"):
            found[name] = None
        else:
            inputs, outputs = _MATRICES.get(last, ((value.ndim - 2,), (value.ndim - 1,)))
            found[name] = MuonDimensionNumbers(inputs, outputs)
    return found


def decayed(params: Mapping[str, Array]) -> dict[str, bool]:
    """Which parameters weight decay applies to: matrices, embeddings and heads among them."""
    return {name: jnp.ndim(value) >= 2 and not _is_vector(_last(name)) for name, value in params.items()}


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _is_vector(name: str) -> bool:
    """Biases and norms may have many axes (`bias [H, J, M]`, `fc_norm [3, M]`), so it is not their shape that tells."""
    return name.rpartition("_")[2] in ("bias", "norm")
