"""Makes the golden files: one tiny random checkpoint a family, and the logits that PyTorch transformers gives for it.

    python tests/models/golden/make_golden.py

Needs PyTorch (CPU). Each folder holds config.json, model.safetensors and expected.npz (input ids, float32 logits).
The sizes are chosen so that a mistake shows: head_dim is not hidden / heads, norm weights and biases are random, the
text is longer than the sliding window, and the rotary scaling is active within it.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
ROWS, LENGTH = 2, 40
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
LOCAL_AND_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


@dataclass(frozen=True)
class Case:
    """A checkpoint: the family's transformers classes (`Llama` + `Config`, `ForCausalLM`), options, stored dtype."""

    name: str
    classes: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"

    def config(self) -> Any:
        prefix = "Gemma3Text" if self.classes == "Gemma3" else self.classes
        return getattr(transformers, f"{prefix}Config")(**(SIZES | self.options))

    def model(self, seed: int) -> Any:
        """The model with random weights, rounded to the stored dtype but kept in float32."""
        model = getattr(transformers, f"{self.classes}ForCausalLM")(self.config())
        model.set_attn_implementation("eager")
        randomize(model, seed, getattr(torch, self.dtype))
        return model.eval()


# stored as golden files
CASES = (
    Case("llama", "Llama", dtype="float16"),
    Case("llama-llama3", "Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    Case("llama-linear", "Llama", {"rope_parameters": LINEAR, "attention_bias": True}),
    Case("mistral", "Mistral", {"sliding_window": 8}),
    Case("qwen2", "Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    Case("qwen3-yarn", "Qwen3", {"rope_parameters": YARN, "tie_word_embeddings": True, "max_position_embeddings": 256}),
    Case("qwen3-moe", "Qwen3Moe", dict(num_hidden_layers=4, mlp_only_layers=[1], **EXPERTS)),
    Case(
        "gemma3",
        "Gemma3",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 8,
            "query_pre_attn_scalar": 20,
            "rope_parameters": LOCAL_AND_GLOBAL,
        },
    ),
)
# compared with a live PyTorch only
VARIANTS = (
    Case("llama-yarn-truncate", "Llama", {"rope_parameters": YARN | {"truncate": False}}),
    Case("llama-yarn-mscale", "Llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    Case("llama-one-kv-head", "Llama", {"num_key_value_heads": 1}),
    Case("mistral-no-window", "Mistral", {"sliding_window": None}),
    Case("qwen2-no-window", "Qwen2"),
    Case(
        "qwen3-bias-window",
        "Qwen3",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    Case(
        "qwen3-moe-step",
        "Qwen3Moe",
        dict(decoder_sparse_step=2, use_sliding_window=True, sliding_window=6, **EXPERTS | {"norm_topk_prob": False}),
    ),
    Case("gemma3-untied", "Gemma3", {"sliding_window": 8, "tie_word_embeddings": False, "attention_bias": True}),
)


def main() -> None:
    for seed, case in enumerate(CASES):
        model, folder = case.model(seed), HERE / case.name
        ids = input_ids(seed)
        expected = logits(model, ids)
        save(model, folder, case.dtype)
        np.savez_compressed(folder / "expected.npz", input_ids=ids, logits=expected)
        size = sum(f.stat().st_size for f in folder.iterdir())
        print(f"{case.name}: {size / 1000:.0f} kB", file=sys.stderr)


def randomize(model: Any, seed: int, dtype: Any) -> None:
    """Every weight random, norms and biases included, with scores and logits of order one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            value = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                offset = 0.0 if "Gemma" in type(model).__name__ else 1.0
                value = offset + 0.4 * value
            elif weight.ndim > 1:
                value = value * 1.3 / weight.shape[-1] ** 0.5
            weight.copy_(value.to(dtype).to(torch.float32))


def input_ids(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], (ROWS, LENGTH))


def logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(ids), use_cache=False).logits.float().numpy()


def save(model: Any, folder: Path, dtype: str) -> None:
    """As a Hugging Face directory, without what a generation needs. The model is of no use afterwards: its rotary
    frequencies have been rounded with the weights.
    """
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
