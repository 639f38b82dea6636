"""MTP modules over whole texts as if they drafted from every place at once: what training learns from, and the guesses
that decoding would make.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters.eagle_step import pick
from specjax.drafters.mtp_network import MtpNetwork
from specjax.models.decoder import View
from specjax.models.interface import TargetModel
from specjax.models.layers import Steps


def unroll(
    network: MtpNetwork,
    target: TargetModel,
    true: Float[Array, "B T M"],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    mask: Bool[Array, "B T T"],
    steps: int,
    starts: Int[Array, "B C"] | None = None,
) -> list[Float[Array, "B C M"]]:
    """The outputs that a draft of `steps` tokens from each place is read out of (`network.read`).

    Step s, from 0, pairs every t with the token at t + 1 + s: module s + 1 takes the output of module s there, and past
    the last module that one its own of the step before. A pair sees its module's pairs up to its own place, and of the
    steps past the modules only those of its own: what drafting from there would see. So output s at t is of the token
    at t + 2 + s, given that the draft was right so far.

    Args:
        true: the target's features, as `network.feature` gives them.
        tokens, positions: the text. Past its end tokens are 0, and what comes of them is of no use.
        mask: what each place sees, itself included (`features.segment_mask`).
        starts: places t; None for all. The modules have to run everywhere, the steps past them only there.
    """
    size = tokens.shape[1]
    padded = jnp.pad(tokens, ((0, 0), (0, steps + 1)))
    here = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    hidden, outputs, earlier = true, [], None
    for step in range(steps):
        if step == network.num_modules and starts is not None:
            hidden, mask, positions, here = (pick(x, starts) for x in (hidden, mask, positions, here))
        embedded = network.embeddings(pick(padded, here + step + 1), target)
        view = View.make(network.config.layers, positions + step, mask, None, None)
        index = min(step, network.num_modules - 1)
        hidden, keys, values = network.module(index, embedded, hidden, view, earlier=earlier)
        if step >= network.num_modules - 1:
            earlier = Steps(((keys, values),)) if earlier is None else earlier.then(keys, values)
        within = step < network.num_modules and starts is not None
        outputs.append(pick(hidden, starts) if within else hidden)
    return outputs
