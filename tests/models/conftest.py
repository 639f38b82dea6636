"""GGUF files made by the `gguf` package, with the changes that llama.cpp's converter makes to the weights."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

GOLDEN = Path(__file__).parent / "golden"
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
F32 = gguf.GGMLQuantizationType.F32
Kinds = Callable[[str], gguf.GGMLQuantizationType]
Change = Callable[[dict[str, np.ndarray]], object]


@pytest.fixture
def to_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Convert a Hugging Face directory: `to_gguf(folder, kinds=…, change=…, metadata=…)` returns the file.

    `kinds` says how a tensor is stored by its GGUF name, `change` edits the tensors under these names, `metadata`
    replaces or adds keys (None leaves one out).
    """

    def convert(
        folder: str | Path,
        kinds: Kinds = lambda name: F32,
        change: Change = lambda tensors: None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Path:
        folder = GOLDEN / folder
        config = json.loads((folder / "config.json").read_text())
        arch = ARCHITECTURES[config["model_type"]]
        file = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
        keys = describe(gguf.MODEL_ARCH_NAMES[arch], config) | dict(metadata or {})
        for key, value in keys.items():
            add(writer, key, value)
        tensors = rename(arch, config, load_file(folder / "model.safetensors"))
        change(tensors)
        for name, value in tensors.items():
            kind = kinds(name) if value.ndim > 1 else F32
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    return convert


@pytest.fixture(name="llama3_table")
def llama3_table_fixture() -> Callable[..., np.ndarray]:
    return llama3_table


@pytest.fixture
def vocabulary() -> Callable[..., dict[str, Any]]:
    return gguf_vocabulary


def describe(arch: str, c: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp's metadata for a config.json of transformers 5."""
    ropes = c["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    keys = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "rope.dimension_count": c["head_dim"],
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        keys["rope.scaling.yarn_beta_fast"] = rope["beta_fast"]
    if c["model_type"] == "mistral":
        keys["attention.sliding_window"] = c["sliding_window"]
    if c["model_type"] == "qwen3_moe":
        keys["expert_count"], keys["expert_used_count"] = c["num_local_experts"], c["num_experts_per_tok"]
        keys["expert_feed_forward_length"] = c["moe_intermediate_size"]
    if c["model_type"] == "gemma3_text":
        keys["attention.sliding_window"] = c["sliding_window"]
        keys["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in c["layer_types"]]
        keys["attention.scale"] = c["query_pre_attn_scalar"] ** -0.5
        keys["rope.freq_base_swa"] = ropes["sliding_attention"]["rope_theta"]
    ids = {"tokenizer.ggml.bos_token_id": c["bos_token_id"], "tokenizer.ggml.eos_token_id": c["eos_token_id"]}
    return {f"{arch}.{k}": v for k, v in keys.items()} | ids


def rename(arch: gguf.MODEL_ARCH, c: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """llama.cpp's tensors, by the name table of its own package."""
    names = gguf.get_tensor_name_map(arch, c["num_hidden_layers"])
    out: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for hf_name, stored in tensors.items():
        value = stored.astype(np.float32)
        if c["model_type"] in ("llama", "mistral") and "q_proj" in hf_name:
            value = permute(value, c["num_attention_heads"])
        if c["model_type"] in ("llama", "mistral") and "k_proj" in hf_name:
            value = permute(value, c["num_key_value_heads"])
        if c["model_type"] == "gemma3_text" and hf_name.endswith("norm.weight"):
            value = value + 1
        stem, suffix = hf_name.rsplit(".", 1)
        if ".experts." in stem:
            before, after = stem.split(".experts.")
            stem = f"{before}.experts.{after.split('.')[1]}"
            experts.setdefault(f"{names.get_name(stem)}.{suffix}", []).append(value)
        else:
            out[f"{names.get_name(stem)}.{suffix}"] = value
    rope = c["rope_parameters"]
    if rope.get("rope_type") == "llama3":
        out["rope_freqs.weight"] = llama3_table(c["head_dim"], rope)
    return out | {name: np.stack(values) for name, values in experts.items()}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    shape = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def llama3_table(dim: int, rope: dict[str, Any]) -> np.ndarray:
    """`LlamaModel.generate_extra_tensors` of llama.cpp's convert_hf_to_gguf.py."""
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / dim)
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def gguf_vocabulary(tokenizer: Tokenizer, model: str, pre: str, special: int, **more: Any) -> dict[str, Any]:
    """The `tokenizer.` metadata of a BPE tokenizer whose first `special` ids are control tokens."""
    parsed = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(parsed["vocab"], key=parsed["vocab"].__getitem__)
    is_byte = [model == "llama" and t.startswith("<0x") for t in tokens]
    keys = {
        "model": model,
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if i < special else 6 if is_byte[i] else 1 for i in range(len(tokens))],
    }
    if model == "llama":
        keys["scores"] = [-float(i) for i in range(len(tokens))]
    else:
        keys["merges"] = [" ".join(pair) for pair in parsed["merges"]]
    return {f"tokenizer.ggml.{k}": v for k, v in (keys | more).items()}
