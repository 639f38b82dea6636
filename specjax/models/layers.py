"""The pieces a decoder layer is made of: norm, rotary embedding, attention over a cache and a block, experts."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.models.config import MoeConfig, RopeConfig

PIECE = 192  # tokens of a text whose attention is computed at once
MASKED = -1e30  # finite: a row of only masked scores gives no NaN, and exp(MASKED - max) is exactly 0


def rms_norm(x: Float[Array, "... M"], weight: Float[Array, "M"], eps: float, offset: float) -> Float[Array, "... M"]:
    """Root-mean-square norm in float32, times `offset + weight` (offset 1 for Gemma)."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    if offset:
        return (y * (offset + weight.astype(jnp.float32))).astype(x.dtype)
    return y.astype(x.dtype) * weight


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse wavelengths `[D/2]` after scaling, float32; each kind as Hugging Face's `modeling_rope_utils` has it."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    base = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.kind == "linear":
        return base / np.float32(rope.factor)
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / base
        low = rope.original_max_positions / rope.low_freq_factor
        high = rope.original_max_positions / rope.high_freq_factor
        blend = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        smooth = (1 - blend) * base / rope.factor + blend * base
        out = np.where(wavelength > low, base / rope.factor, base)
        return np.where((wavelength <= low) & (wavelength >= high), smooth, out).astype(np.float32)
    if rope.kind == "yarn":

        def dimension(rotations: float) -> float:
            turns = rope.original_max_positions / (rotations * 2 * math.pi)
            return head_dim * math.log(turns) / (2 * math.log(rope.theta))

        low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)
        keep = 1 - np.clip(ramp, 0, 1)
        return (base / np.float32(rope.factor) * (1 - keep) + base * keep).astype(np.float32)
    return base


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """Cosines and sines of the half-rotation form, float32."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim)
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(x: Float[Array, "B T K H D"], tables: tuple[Array, Array]) -> Float[Array, "B T K H D"]:
    """Apply rotary embedding to heads; `tables` are `[B, T, D]`."""
    cos, sin = (t[:, :, None, None, :].astype(x.dtype) for t in tables)
    low, high = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-high, low], axis=-1) * sin


def cache_bias(
    positions: Int[Array, "B T"], length: Int[Array, "B"], capacity: int, window: int | None
) -> Float[Array, "B #T S"]:
    """What each query sees of the cache, as 0 or MASKED: slots below `length`, inside the window by position.

    Without a window all queries of a row see the same, and the T axis is 1.
    """
    slots = jnp.arange(capacity)
    seen = (slots < length[:, None])[:, None, :]
    if window is not None:
        seen = seen & (positions[:, :, None] - slots < window)
    return jnp.where(seen, 0.0, MASKED)


def block_bias(positions: Int[Array, "B T"], mask: Bool[Array, "B T T"], window: int | None) -> Float[Array, "B T T"]:
    """What each query sees of its own block: the mask (ancestors and itself), and the window by position difference."""
    if window is not None:  # a tree's index is not its position
        mask = mask & (positions[:, :, None] - positions[:, None, :] < window)
    return jnp.where(mask, 0.0, MASKED)


def attention(
    q: Float[Array, "B K G T D"],
    block: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]],
    block_mask: Float[Array, "B T U"],
    cache: tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]] | None,
    cache_mask: Float[Array, "B #T S"] | None,
    scale: float,
) -> Float[Array, "B K G T D"]:
    """Softmax attention over the cached prefix and the block's own keys and values, without joining the two arrays.

    The block may hold keys of earlier tokens besides the T queries' own. Masks are additive (0 or MASKED). Every
    query sees itself, so the sum is never empty, and none after itself: a long text is taken piece by piece, each with
    the keys up to its end. Softmax in float32.
    """
    keys, values = block
    batch, heads, group, tokens, width = q.shape
    if cache is None and PIECE < tokens == keys.shape[2]:
        ends = [(start, min(start + PIECE, tokens)) for start in range(0, tokens, PIECE)]
        pieces = [
            attention(q[..., start:end, :], (keys[:, :, :end], values[:, :, :end]), mask, None, None, scale)
            for start, end in ends
            for mask in [block_mask[:, start:end, :end]]
        ]
        return jnp.concatenate(pieces, axis=3)
    # queries on the left of both products, heads and tokens in one axis: XLA's CPU matmul reads cached keys and
    # values as they lie then; the other way round it converts and copies all of them in bfloat16
    q = (q * scale).astype(keys.dtype).reshape(batch, heads, group * tokens, width)

    def scores(k, bias):
        raw = jnp.einsum("bknd,bksd->bkns", q, k, preferred_element_type=jnp.float32)
        raw = raw.reshape(batch, heads, group, tokens, -1) + bias[:, None, None]
        return raw.reshape(batch, heads, group * tokens, -1)

    def mix(weights, v):
        return jnp.einsum("bkns,bksd->bknd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)

    own = scores(keys, block_mask)
    top = jnp.max(own, axis=-1, keepdims=True)
    if cache is None:
        own = jnp.exp(own - top)
        mixed, total = mix(own, values), jnp.sum(own, axis=-1)
    else:
        past = scores(cache[0], cache_mask)
        top = jnp.maximum(top, jnp.max(past, axis=-1, keepdims=True))
        own, past = jnp.exp(own - top), jnp.exp(past - top)
        mixed, total = mix(own, values) + mix(past, cache[1]), jnp.sum(own, axis=-1) + jnp.sum(past, axis=-1)
    return (mixed / total[..., None]).astype(keys.dtype).reshape(batch, heads, group, tokens, width)


@dataclass(frozen=True)
class Steps:
    """Keys and values `[B, K, T, D]` of the earlier steps of an unrolled text (EAGLE-3's training-time test)."""

    pairs: tuple[tuple[Array, Array], ...]

    def then(self, keys: Array, values: Array) -> "Steps":
        return Steps((*self.pairs, (keys, values)))


def unrolled_attention(
    q: Float[Array, "B K G T D"],
    own: tuple[Float[Array, "B K T D"], Float[Array, "B K T D"]],
    steps: Steps,
    mask: Float[Array, "B T T"],
    scale: float,
) -> Float[Array, "B K G T D"]:
    """Attention of one step over a whole text: it sees the first step's keys as `mask` (0 or MASKED) says, and of every
    later step, its own included, the one at its own place.

    The same as `attention` with all steps' keys and a mask of diagonals, without computing what the diagonals hide.
    """
    (keys, values), *later = steps.pairs
    later = [*later, own]
    q = (q * scale).astype(keys.dtype)
    scores = jnp.einsum("bkgtd,bkud->bkgtu", q, keys, preferred_element_type=jnp.float32) + mask[:, None, None]
    beside = [jnp.einsum("bkgtd,bktd->bkgt", q, k, preferred_element_type=jnp.float32) for k, _ in later]
    top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1), jnp.max(jnp.stack(beside), axis=0)))
    weights = jnp.exp(scores - top[..., None])
    total = weights.sum(-1)
    mixed = jnp.einsum("bkgtu,bkud->bkgtd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    for score, (_, v) in zip(beside, later, strict=True):
        weight = jnp.exp(score - top)
        total = total + weight
        mixed = mixed + weight[..., None] * v[:, :, None].astype(jnp.float32)
    return (mixed / total[..., None]).astype(q.dtype)


def activate(name: str, x: Array) -> Array:
    return jax.nn.silu(x) if name == "silu" else jax.nn.gelu(x, approximate=True)


def experts(
    x: Float[Array, "T M"],
    router: Float[Array, "M E"],
    gate_up: Float[Array, "E M 2 F"],
    down: Float[Array, "E F M"],
    config: MoeConfig,
    activation: str,
) -> Float[Array, "T M"]:
    """Each token through its top experts, weighted by the router's softmax (Qwen3-MoE)."""
    tokens, width = x.shape
    weights = jax.nn.softmax((x @ router).astype(jnp.float32), axis=-1)
    weights, chosen = jax.lax.top_k(weights, config.experts_per_token)
    if config.normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)  # a few tokens times their experts, not the vocabulary
    sizes = jnp.bincount(flat, length=config.num_experts).astype(jnp.int32)
    rows = x[order // config.experts_per_token]
    mid = jax.lax.ragged_dot(rows, gate_up.reshape(config.num_experts, width, -1), sizes)
    gate, up = jnp.split(mid, 2, axis=-1)
    out = jax.lax.ragged_dot(activate(activation, gate) * up, down, sizes)
    out = jnp.zeros_like(out).at[order].set(out).reshape(tokens, config.experts_per_token, width)
    return jnp.sum(out * weights[..., None].astype(out.dtype), axis=1)
