"""An EAGLE network over whole texts as if it drafted from every place at once: training-time test (EAGLE-3, section
3.2; HASS, Zhang et al. 2025, for EAGLE-1), and the guesses that decoding would make.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters.eagle_networks import Eagle3Network, EagleNetwork
from specjax.models.interface import TargetModel
from specjax.models.layers import Steps


def unroll(
    network: EagleNetwork | Eagle3Network,
    target: TargetModel,
    fused: Float[Array, "B T M"],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    mask: Bool[Array, "B T T"],
    steps: int,
    shift: int = 1,
) -> list[Float[Array, "B T M"]]:
    """The network's outputs over `steps` steps.

    Step s runs the pair at every t with the token at t + 1 + s, in the first step with the true feature, later with the
    output of the step before; the rotary position is advanced by s too. A pair sees the first step's pairs up to its
    own, and of the later steps only its own: what drafting from there would see. So output s at t scores the token at
    t + 2 + s, given that the draft was right so far.

    Args:
        fused: the target's features, as `network.fuse` makes them.
        tokens, positions: the text. Past its end tokens are 0, and what comes of them is of no use.
        mask: what each place sees, itself included (`features.segment_mask`).
        shift: 0 pairs t with its own token instead of the next, which no drafter here does.
    """
    outputs: list[Any] = []
    feature, earlier = fused, None
    for step in range(steps):
        ahead = min(step + shift, tokens.shape[1])
        following = jnp.pad(tokens[:, ahead:], ((0, 0), (0, ahead)))
        embedded = network.embeddings(following, target)
        fed = network(embedded, feature, positions + step, mask, earlier=earlier)
        keys, values = fed.block.keys[0], fed.block.values[0]
        earlier = Steps(((keys, values),)) if earlier is None else earlier.then(keys, values)
        feature = fed.features
        outputs.append(feature)
    return outputs
