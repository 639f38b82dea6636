"""Reading config.json: published forms, old and new, defaults, and everything that is refused."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from specjax.errors import CheckpointError
from specjax.models.config import ModelConfig, MoeConfig, RopeConfig

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(folder.parent.name for folder in GOLDEN.glob("*/expected.npz"))
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
GEMMA3 = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LLAMA3_SCALING = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}


@pytest.mark.parametrize("name", CASES)
def test_transformers_4_form_is_read_alike(name: str) -> None:
    """`rope_theta` and `rope_scaling` (with `type`) beside transformers 5's `rope_parameters`."""
    raw = json.loads((GOLDEN / name / "config.json").read_text())
    parameters = raw["rope_parameters"]
    old = without(raw, "rope_parameters")
    if "full_attention" in parameters:
        old["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    old["rope_theta"] = parameters["rope_theta"]
    scaling = without(parameters, "rope_theta", "rope_type") | {"type": parameters["rope_type"]}
    old["rope_scaling"] = None if scaling == {"type": "default"} else scaling
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(raw)


@pytest.mark.parametrize("name", CASES)
def test_to_hf_comes_back(name: str) -> None:
    config = ModelConfig.from_hf(json.loads((GOLDEN / name / "config.json").read_text()))
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert hash(config) == hash(ModelConfig.from_hf(config.to_hf()))


def test_llama() -> None:
    config = ModelConfig.from_hf(LLAMA | {"eos_token_id": [5, 7], "bos_token_id": 1})
    assert (config.head_dim, config.num_kv_heads, config.tie_embeddings) == (12, 2, False)
    assert config.rope == config.local_rope == RopeConfig(theta=10000.0)
    assert config.windows == (None,) * 4
    assert config.attention_scale == 12**-0.5
    assert (config.eos_token_ids, config.bos_token_id) == ((5, 7), 1)
    assert ModelConfig.from_hf(LLAMA | {"eos_token_id": 3}).eos_token_ids == (3,)
    assert ModelConfig.from_hf(LLAMA).eos_token_ids == ()
    assert ModelConfig.from_hf(without(LLAMA, "num_key_value_heads")).num_kv_heads == 4
    assert ModelConfig.from_hf(LLAMA | {"head_dim": 16}).head_dim == 16
    assert ModelConfig.from_hf(without(LLAMA, "model_type")).family == "llama"
    biased = ModelConfig.from_hf(LLAMA | {"attention_bias": True})
    assert biased.qkv_bias and biased.out_bias


def test_rope_kinds() -> None:
    def rope(**scaling: Any) -> RopeConfig:
        return ModelConfig.from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling}).rope

    assert rope(type="linear", factor=2) == RopeConfig("linear", 5e5, 2.0)
    llama3 = rope(rope_type="llama3", original_max_position_embeddings=256, **LLAMA3_SCALING)
    assert llama3 == RopeConfig("llama3", 5e5, 32.0, 1.0, 4.0, 256)
    yarn = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate, yarn.original_max_positions) == (32, 1, True, 128)
    assert rope(rope_type="yarn", factor=None, original_max_position_embeddings=128).factor == 4.0
    assert rope(rope_type="yarn", factor=4.0).original_max_positions == 512
    assert rope(rope_type="yarn", factor=4.0, attention_factor=1.5).attention_factor == 1.5
    deepseek = rope(rope_type="yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.5)
    assert deepseek.attention_factor == pytest.approx((0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1))
    beside = LLAMA | {"original_max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}
    assert ModelConfig.from_hf(beside).rope.original_max_positions == 64


def test_mistral() -> None:
    assert ModelConfig.from_hf(MISTRAL | {"sliding_window": None}).windows == (None,) * 4
    assert ModelConfig.from_hf(MISTRAL | {"sliding_window": 7}).windows == (7,) * 4
    assert ModelConfig.from_hf(MISTRAL).windows == (4096,) * 4  # what transformers takes


def test_qwen() -> None:
    config = ModelConfig.from_hf(QWEN2 | {"sliding_window": 7})
    assert config.qkv_bias and not config.out_bias and config.windows == (None,) * 4
    used = QWEN2 | {"use_sliding_window": True, "sliding_window": 7}
    assert ModelConfig.from_hf(used | {"max_window_layers": 3}).windows == (None, None, None, 7)
    assert ModelConfig.from_hf(used).windows == (None,) * 4  # max_window_layers 28
    types = ["sliding_attention", "full_attention"] * 2
    assert ModelConfig.from_hf(used | {"layer_types": types}).windows == (7, None, 7, None)
    qwen3 = ModelConfig.from_hf(QWEN3)
    assert qwen3.qk_norm and qwen3.head_dim == 16 and not qwen3.qkv_bias
    assert ModelConfig.from_hf(without(QWEN3, "head_dim")).head_dim == 128
    assert ModelConfig.from_hf(QWEN3 | {"attention_bias": True}).out_bias


def test_moe() -> None:
    assert ModelConfig.from_hf(MOE).moe == MoeConfig(8, 2, 32, False, (True,) * 4)
    sparse = MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True}
    assert ModelConfig.from_hf(sparse).moe == MoeConfig(8, 2, 32, True, (False, True, False, False))
    renamed = without(MOE, "num_experts") | {"num_local_experts": 8}
    assert ModelConfig.from_hf(renamed) == ModelConfig.from_hf(MOE)
    windowed = MOE | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}
    assert ModelConfig.from_hf(windowed).windows == (7,) * 4  # this family never looks at max_window_layers


def test_gemma3_text() -> None:
    config = ModelConfig.from_hf(GEMMA3 | {"sliding_window": 512, "num_hidden_layers": 7, "head_dim": 32})
    assert config.windows == (512,) * 5 + (None, 512)
    assert (config.rope.theta, config.local_rope.theta) == (1e6, 1e4)
    assert config.attention_scale == 256**-0.5
    assert (config.norm_offset, config.embed_scale, config.activation) == (1.0, 48**0.5, "gelu_tanh")
    assert config.qk_norm and config.sandwich_norms and config.tie_embeddings
    pattern = ModelConfig.from_hf(GEMMA3 | {"sliding_window": 8, "sliding_window_pattern": 2})
    assert pattern.windows == (8, None, 8, None)


def test_gemma3_multimodal() -> None:
    """As published for the 4B model: most keys are left to their defaults."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": text,
        "vision_config": {"hidden_size": 1152},
    }
    config = ModelConfig.from_hf(raw)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.rope == RopeConfig("linear", 1e6, 8.0) and config.local_rope == RopeConfig(theta=1e4)
    assert config.eos_token_ids == (1, 106) and config.tie_embeddings
    with pytest.raises(CheckpointError, match="missing key 'text_config'"):
        ModelConfig.from_hf(without(raw, "text_config"))


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        (LLAMA | {"model_type": "mamba"}, ["'mamba'", "supported: gemma3", "llama", "mistral", "qwen2", "qwen3_moe"]),
        (LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}, ["'LlamaForCausalLMEagle3'", "Qwen3MoeForCausalLM"]),
        ({"architectures": ["FalconForCausalLM"]}, ["'FalconForCausalLM'"]),
        ({}, ["missing key 'model_type'"]),
        (without(LLAMA, "hidden_size"), ["missing key 'hidden_size'"]),
        (without(LLAMA, "vocab_size"), ["missing key 'vocab_size'"]),
        (without(QWEN2, "num_key_value_heads"), ["missing key 'num_key_value_heads'"]),
        (without(MOE, "num_experts"), ["missing key 'num_experts'"]),
        (LLAMA | {"hidden_size": "48"}, ["'hidden_size' is '48'"]),
        (LLAMA | {"num_hidden_layers": 0}, ["'num_hidden_layers' is 0"]),
        (LLAMA | {"num_hidden_layers": 2.5}, ["'num_hidden_layers' is 2.5"]),
        (LLAMA | {"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        (LLAMA | {"head_dim": 7}, ["head_dim 7 is odd"]),
        (LLAMA | {"mlp_bias": True}, ["mlp_bias"]),
        (LLAMA | {"hidden_act": "relu"}, ["hidden_act 'relu'", "silu"]),
        (LLAMA | {"eos_token_id": "</s>"}, ["'eos_token_id' is '</s>'"]),
        (LLAMA | {"tie_word_embeddings": "no"}, ["'tie_word_embeddings' is 'no'"]),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, ["'awq'"]),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["'dynamic'", "default, linear, llama3, yarn"]),
        (LLAMA | {"rope_parameters": {"rope_type": "longrope"}}, ["'longrope'", "default, linear, llama3, yarn"]),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, ["missing key 'factor'"]),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["missing key 'low_freq_factor'"]),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn"}}, ["missing key 'factor'"]),
        (LLAMA | {"rope_scaling": 4.0}, ["'rope_scaling' is 4.0"]),
        (LLAMA | {"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        (QWEN3 | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, ["per layer type"]),
        (QWEN3 | {"layer_types": ["full_attention"]}, ["'layer_types'", "a list of 4"]),
        (QWEN3 | {"layer_types": ["linear_attention"] * 4}, ["'linear_attention'"]),
        (QWEN3 | {"layer_types": ["sliding_attention"] * 4}, ["no 'sliding_window'"]),
        (MOE | {"num_experts_per_tok": 9}, ["num_experts_per_tok 9", "8 experts"]),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, ["final_logit_softcapping 30.0"]),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping 50.0"]),
        (GEMMA3 | {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, ["full_attention"]),
    ],
)
def test_refused(raw: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_hf(raw, source="model/config.json")
    message = str(caught.value)
    assert message.startswith("model/config.json") and "\n" not in message
    assert all(part in message for part in parts), message


def test_to_hf_refuses_what_the_family_cannot_say() -> None:
    mistral = ModelConfig.from_hf(MISTRAL | {"sliding_window": 7})
    with pytest.raises(CheckpointError, match="windows"):
        dataclasses.replace(mistral, windows=(7, None, 7, None)).to_hf()
    with pytest.raises(CheckpointError, match="one rope"):
        dataclasses.replace(mistral, local_rope=RopeConfig(theta=5.0)).to_hf()
