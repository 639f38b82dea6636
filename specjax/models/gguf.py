"""A GGUF file as the Hugging Face model that it was converted from.

llama.cpp's converter renames the tensors, stores q and k rows in another order for some architectures and adds one to
Gemma's norms; here all of that is undone, so that everything after is shared with Hugging Face checkpoints.
"""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import CheckpointError
from specjax.models.checkpoint import assemble
from specjax.models.config import ModelConfig
from specjax.models.gguf_file import GgufFile, open_gguf, some
from specjax.models.keys import Keys
from specjax.models.layout import recipes


def read_gguf(path: str | Path | GgufFile) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Read a GGUF file: a llama (Llama, Mistral, SmolLM), qwen2, qwen3, qwen3moe or gemma3 model.

    Returns:
        The configuration, and the decoder's parameters by path, dequantised to float32.

    Raises:
        CheckpointError: not a GGUF file, truncated, an unknown architecture or quantisation, missing or unexpected
            tensors, a wrong shape; the message names the file and the tensors. All of it is found before a weight
            is read.
    """
    file = path if isinstance(path, GgufFile) else open_gguf(path)
    config = ModelConfig.from_hf(hf_config(file), file.path)
    where = _places(file, config)
    # Only these are stored in llama.cpp's order of rotary pairs; the other architectures keep Hugging Face's.
    permuted = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)" if config.family in ("llama", "mistral") else "(?!)")

    def read(hf_name: str) -> np.ndarray:
        name, expert = where[hf_name]
        array = file.read(name, expert)
        if permuted.fullmatch(name):
            return _half_rotation(array, config.head_dim)
        return array - np.float32(config.norm_offset) if name.endswith("norm.weight") else array

    return config, assemble(config, read)


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The `config.json` of the model in the file."""
    if file.metadata.get("split.count", 0) > 1:
        raise CheckpointError(
            f"{file.path}: one of {file.metadata['split.count']} parts of a model; join them with "
            "llama-gguf-split --merge"
        )
    arch = file.metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise CheckpointError(f"{file.path}: architecture {arch!r} is not supported; supported: {known}")
    prefix = f"{arch}."
    values = {k.removeprefix(prefix): _single(v) for k, v in file.metadata.items() if k.startswith(prefix)}
    keys = Keys(values, f"{file.path}: {arch} metadata")
    embed = file.tensors.get("token_embd.weight")
    if embed is None:
        raise CheckpointError(f"{file.path}: 1 missing tensor(s): token_embd.weight")
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", default=hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, default=head_dim) != head_dim:
            raise keys.error(f"{key} {keys.get(key)} is not supported; supported: the head width, {head_dim}")
    layers = keys.integer("block_count")
    if layers > len(file.tensors):
        raise keys.error(f"block_count is {layers}, but the file has only {len(file.tensors)} tensors")
    ids = Keys(file.metadata, file.path)
    eos = [i for name in ("eos", "eot", "eom") for i in ids.ids(f"tokenizer.ggml.{name}_token_id")]
    config: dict[str, Any] = {
        "model_type": _ARCHITECTURES[arch],
        "vocab_size": embed.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.integer("context_length"),
        "rope_theta": keys.number("rope.freq_base", default=10000.0),
        "rope_scaling": _rope_scaling(file, keys),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(eos)) or None,
    }
    experts = keys.integer("expert_count", default=0, minimum=0)
    if arch == "qwen3moe":
        width = keys.integer("expert_feed_forward_length")
        config |= {
            "num_experts": experts,
            "num_experts_per_tok": keys.integer("expert_used_count"),
            "moe_intermediate_size": width,
            "intermediate_size": keys.integer("feed_forward_length", default=width),
            "norm_topk_prob": True,  # not in the file; llama.cpp always does
        }
    elif experts:
        raise keys.error(f"expert_count {experts} is not supported: mixtures of experts only of architecture qwen3moe")
    else:
        config["intermediate_size"] = keys.integer("feed_forward_length")
    if arch == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        if window := keys.integer("attention.sliding_window", default=0, minimum=0):
            config |= {"model_type": "mistral", "sliding_window": window}
    return config | (_gemma3(config, keys) if arch == "gemma3" else {})


_ARCHITECTURES = {  # GGUF's name (Mistral's files say "llama") -> model_type
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
}

_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INSIDE = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_INSIDE_GEMMA3 = _INSIDE | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def _places(file: GgufFile, config: ModelConfig) -> dict[str, tuple[str, int | None]]:
    """Hugging Face name -> tensor of the file, and which expert of it; names and shapes checked."""
    inside = _INSIDE_GEMMA3 if config.family == "gemma3" else _INSIDE
    where: dict[str, tuple[str, int | None]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for recipe in recipes(config).values():
        for hf_name, shape in recipe.sources.items():
            stem, kind = hf_name.rsplit(".", 1)
            layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
            if layer is None:
                name, expert = f"{_OUTSIDE[stem]}.{kind}", None
            else:
                of_expert = re.search(r"experts\.(\d+)\.", layer[2])
                expert = int(of_expert[1]) if of_expert else None
                part = re.sub(r"experts\.\d+\.", "experts.", layer[2])
                name = f"blk.{layer[1]}.{inside[part]}.{kind}"
            where[hf_name] = name, expert
            shapes[name] = shape if expert is None or config.moe is None else (config.moe.num_experts, *shape)
    if missing := [name for name in shapes if name not in file.tensors]:
        raise CheckpointError(f"{file.path}: {len(missing)} missing tensor(s): {some(missing)}")
    if unexpected := [name for name in file.tensors if name not in shapes and name != _ROPE_TABLE]:
        raise CheckpointError(f"{file.path}: {len(unexpected)} unexpected tensor(s): {some(unexpected)}")
    found = {name: file.tensors[name].shape for name in shapes}
    if wrong := [f"{n} is {list(found[n])}, expected {list(s)}" for n, s in shapes.items() if found[n] != s]:
        raise CheckpointError(f"{file.path}: {len(wrong)} tensor(s) of the wrong shape: {some(wrong, 2)}")
    return where


def _half_rotation(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of q or k from llama.cpp's order (a rotary pair side by side) to Hugging Face's (half a head apart)."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _gemma3(config: dict[str, Any], keys: Keys) -> dict[str, Any]:
    """What llama.cpp knows of Gemma 3 without the file saying so."""
    layers = config["num_hidden_layers"]
    pattern = keys.get("attention.sliding_window_pattern") or 6
    local = pattern if isinstance(pattern, list) else [(i + 1) % int(pattern) != 0 for i in range(layers)]
    # the 27B model (62 layers) alone scales its queries by hidden/heads instead of the head width
    scalar = config["hidden_size"] / config["num_attention_heads"] if layers == 62 else config["head_dim"]
    scale = keys.number("attention.scale", default=scalar**-0.5)
    return {
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": ["sliding_attention" if w else "full_attention" for w in local],
        "rope_local_base_freq": keys.number("rope.freq_base_swa", default=10000.0),
        "query_pre_attn_scalar": round(scale**-2, 4),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
    }


_ROPE_TABLE = "rope_freqs.weight"


def _rope_scaling(file: GgufFile, keys: Keys) -> dict[str, Any] | None:
    """Hugging Face's `rope_scaling`."""
    if _ROPE_TABLE in file.tensors:
        return _llama3_scaling(file, keys)
    factor = keys.number("rope.scaling.factor", default=keys.number("rope.scale_linear", default=1.0))
    kind = keys.get("rope.scaling.type") or ("none" if factor == 1.0 else "linear")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise keys.error(f"rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn, llama3's table")
    for key, usual in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if keys.get(f"rope.scaling.{key}") not in (None, usual):
            raise keys.error(f"rope.scaling.{key} {keys.get(f'rope.scaling.{key}')} is not supported")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", default=32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", default=1.0),
        # llama.cpp multiplies yarn's own factor by this one
        "attention_factor": keys.number("rope.scaling.yarn_attn_factor", default=1.0)
        * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
    }


def _llama3_scaling(file: GgufFile, keys: Keys) -> dict[str, Any] | None:
    """Llama 3's scaling, which a file holds as a table: what each frequency is divided by.

    The four numbers behind the table are not in the file. The factor is its largest entry, low and high are 1 and 4 in
    all of Llama 3.x, and an entry between 1 and the factor tells the original length; the table must come out of them
    again, so whatever they are called, the frequencies are right.
    """
    table = file.read(_ROPE_TABLE).reshape(-1).astype(np.float64)
    if np.all(table == 1.0):
        return None
    low, high, positions, factor = 1.0, 4.0, 8192, float(table.max())
    wavelength = 2 * np.pi * keys.number("rope.freq_base", default=10000.0) ** (np.arange(len(table)) / len(table))
    between = np.flatnonzero((table > 1.0) & (table < factor))
    if len(between):
        smooth = (1 / table[between[0]] - 1 / factor) / (1 - 1 / factor)
        positions = round(float(wavelength[between[0]] * (low + smooth * (high - low))))
    smooth = np.clip((positions / wavelength - low) / (high - low), 0.0, 1.0)
    if not np.allclose(table, 1 / ((1 - smooth) / factor + smooth), rtol=1e-5):
        raise CheckpointError(f"{file.path}: {_ROPE_TABLE} is not a table of Llama 3's kind; others are not supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": positions,
    }


def _single(value: Any) -> Any:
    """Some converters write one number a layer where all are the same."""
    alike = isinstance(value, list) and len(value) > 0 and all(v == value[0] for v in value)
    return value[0] if alike and not isinstance(value[0], bool) else value
