"""An EAGLE network over whole texts as if it drafted from every place at once: training-time test (EAGLE-3, section
3.2; HASS, Zhang et al. 2025, for EAGLE-1), and the guesses that decoding would make.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters.eagle_networks import Eagle3Network, EagleNetwork
from specjax.drafters.eagle_step import pick
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
    starts: Int[Array, "B C"] | None = None,
    shift: int = 1,
) -> list[Float[Array, "B C M"]]:
    """The network's outputs over `steps` steps, at the places that drafts start from.

    Step s runs the pair at every t with the token at t + 1 + s, in the first step with the true feature, later with the
    output of the step before; the rotary position is advanced by s too. A pair sees the first step's pairs up to its
    own, and of the later steps only its own: what drafting from there would see. So output s at t scores the token at
    t + 2 + s, given that the draft was right so far.

    Args:
        fused: the target's features, as `network.fuse` makes them.
        tokens, positions: the text. Past its end tokens are 0, and what comes of them is of no use.
        mask: what each place sees, itself included (`features.segment_mask`).
        starts: places t; None for all. The first step has to run everywhere, the later ones only there.
        shift: 0 pairs t with its own token instead of the next, which no drafter here does.
    """
    size = tokens.shape[1]
    padded = jnp.pad(tokens, ((0, 0), (0, steps + shift)))
    first = network(network.embeddings(padded[:, shift : size + shift], target), fused, positions, mask)
    keys, values, feature = first.block.keys[0], first.block.values[0], first.features
    earlier = Steps(((keys, values),))
    if starts is not None:
        feature, mask, positions = (pick(x, starts) for x in (feature, mask, positions))
    outputs = [feature]
    for step in range(1, steps):
        here = jnp.arange(size) if starts is None else starts
        following = pick(padded, jnp.broadcast_to(here + step + shift, positions.shape))
        fed = network(network.embeddings(following, target), feature, positions + step, mask, earlier=earlier)
        earlier, feature = earlier.then(fed.block.keys[0], fed.block.values[0]), fed.features
        outputs.append(feature)
    return outputs
