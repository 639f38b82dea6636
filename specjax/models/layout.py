"""Our parameters and the Hugging Face tensors they are made of, in both directions.

Axes: M width, K key/value heads, G query heads a key/value head, D head width, F feed-forward, E experts, V vocabulary.
Hugging Face stores matrices `[out, in]`; query head h belongs to key/value head h // G.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specjax.models.config import ModelConfig

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
MTP_LAYERS = "model.mtp_layers."  # MTP modules in a target's checkpoint (MiMo-7B), which `load_drafter` reads


@dataclass(frozen=True)
class Recipe:
    """How one parameter is made.

    Attributes:
        sources: names and shapes of the Hugging Face tensors.
        shape: of the parameter.
        join / split: tensors to parameter, and back.
    """

    sources: Mapping[str, tuple[int, ...]]
    shape: tuple[int, ...]
    join: Callable[[Sequence[np.ndarray]], np.ndarray]
    split: Callable[[np.ndarray], list[np.ndarray]]


def recipes(config: ModelConfig) -> dict[str, Recipe]:
    """One recipe for every parameter of the decoder, by its path (`layers.0.qkv`)."""
    c = config
    table = {"embed": same(EMBED, c.vocab_size, c.hidden_size), "norm": same("model.norm.weight", c.hidden_size)}
    if not c.tie_embeddings:
        table["head"] = same(HEAD, c.vocab_size, c.hidden_size)
    for i in range(c.num_layers):
        layer = _attention(c, f"model.layers.{i}.self_attn.")
        for ours, theirs in _norms(c).items():
            layer[ours] = same(f"model.layers.{i}.{theirs}.weight", c.hidden_size)
        if c.moe is not None and c.moe.layers[i]:
            layer |= _experts(c, f"model.layers.{i}.mlp.")
        else:
            layer |= _feed_forward(c, f"model.layers.{i}.mlp.")
        table |= {f"layers.{i}.{name}": recipe for name, recipe in layer.items()}
    return table


def _norms(c: ModelConfig) -> dict[str, str]:
    if not c.sandwich_norms:
        return {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return {
        "attn_norm": "input_layernorm",
        "post_attn_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    }


def _attention(c: ModelConfig, at: str) -> dict[str, Recipe]:
    kv, group, head_dim = c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim
    rows = {"q_proj": c.num_heads * head_dim, "k_proj": kv * head_dim, "v_proj": kv * head_dim}

    def join(parts: Sequence[np.ndarray], rest: tuple[int, ...]) -> np.ndarray:
        q, k, v = (x.reshape(kv, -1, head_dim, *rest) for x in parts)
        return np.concatenate([q, k, v], axis=1)

    def split(x: np.ndarray) -> list[np.ndarray]:
        rest = x.shape[3:]
        return [part.reshape(-1, *rest) for part in (x[:, :group], x[:, group : group + 1], x[:, group + 1 :])]

    table = {
        "qkv": Recipe(
            {f"{at}{name}.weight": (size, c.hidden_size) for name, size in rows.items()},
            (c.hidden_size, kv, group + 2, head_dim),
            lambda parts: np.moveaxis(join(parts, (c.hidden_size,)), -1, 0),
            lambda x: split(np.moveaxis(x, 0, -1)),
        ),
        "out": Recipe(
            {f"{at}o_proj.weight": (c.hidden_size, c.num_heads * head_dim)},
            (kv, group * head_dim, c.hidden_size),
            lambda parts: parts[0].T.reshape(kv, group * head_dim, c.hidden_size),
            lambda x: [x.reshape(-1, c.hidden_size).T],
        ),
    }
    if c.qkv_bias:
        biases = {f"{at}{name}.bias": (size,) for name, size in rows.items()}
        table["qkv_bias"] = Recipe(biases, (kv, group + 2, head_dim), lambda parts: join(parts, ()), split)
    if c.out_bias:
        table["out_bias"] = same(f"{at}o_proj.bias", c.hidden_size)
    if c.qk_norm:
        table["q_norm"], table["k_norm"] = same(f"{at}q_norm.weight", head_dim), same(f"{at}k_norm.weight", head_dim)
    return table


def _feed_forward(c: ModelConfig, at: str) -> dict[str, Recipe]:
    width, hidden = c.intermediate_size, c.hidden_size
    return {
        "gate_up": Recipe(
            {f"{at}{name}_proj.weight": (width, hidden) for name in ("gate", "up")},
            (hidden, 2, width),
            lambda parts: np.stack([x.T for x in parts], axis=1),
            lambda x: [x[:, 0].T, x[:, 1].T],
        ),
        "down": transposed(f"{at}down_proj.weight", width, hidden),
    }


def _experts(c: ModelConfig, at: str) -> dict[str, Recipe]:
    assert c.moe is not None
    count, width, hidden = c.moe.num_experts, c.moe.intermediate_size, c.hidden_size

    def gate_up(parts: Sequence[np.ndarray]) -> np.ndarray:
        out = np.empty((count, hidden, 2, width), parts[0].dtype)
        for i, part in enumerate(parts):
            out[i // 2, :, i % 2] = part.T
        return out

    names = [(e, name) for e in range(count) for name in ("gate", "up")]
    return {
        "router": transposed(f"{at}gate.weight", hidden, count),
        "experts_gate_up": Recipe(
            {f"{at}experts.{e}.{name}_proj.weight": (width, hidden) for e, name in names},
            (count, hidden, 2, width),
            gate_up,
            lambda x: [x[e, :, i].T for e in range(count) for i in range(2)],
        ),
        "experts_down": Recipe(
            {f"{at}experts.{e}.down_proj.weight": (hidden, width) for e in range(count)},
            (count, width, hidden),
            lambda parts: np.stack([x.T for x in parts]),
            lambda x: [x[e].T for e in range(count)],
        ),
    }


def same(name: str, *shape: int) -> Recipe:
    """One tensor, as it is."""
    return Recipe({name: shape}, shape, lambda parts: parts[0], lambda x: [x])


def transposed(name: str, rows: int, columns: int) -> Recipe:
    """One matrix, stored `[columns, rows]`."""
    return Recipe({name: (columns, rows)}, (rows, columns), lambda parts: parts[0].T, lambda x: [x.T])
