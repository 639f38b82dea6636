"""The target of a script: by name, or random weights in the shape of a known model, which tell its step times too."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

import specjax
from specjax import InputError, Target
from specjax.models.config import ModelConfig
from specjax.models.decoder import Decoder


@dataclass(frozen=True)
class Shape:
    """What decides a decoder's speed."""

    model_type: str
    layers: int
    width: int
    ffw: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool


SHAPES = {
    "smollm2-135m": Shape("llama", 30, 576, 1536, 9, 3, 64, 49152, True),
    "smollm2-360m": Shape("llama", 32, 960, 2560, 15, 5, 64, 49152, True),
    "smollm2-1.7b": Shape("llama", 24, 2048, 8192, 32, 32, 64, 49152, True),
    "llama-3.2-1b": Shape("llama", 16, 2048, 8192, 32, 8, 64, 128256, True),
    "llama-3.1-8b": Shape("llama", 32, 4096, 14336, 32, 8, 128, 128256, False),
    "qwen2.5-0.5b": Shape("qwen2", 24, 896, 4864, 14, 2, 64, 151936, True),
    "qwen2.5-1.5b": Shape("qwen2", 28, 1536, 8960, 12, 2, 128, 151936, True),
    "qwen2.5-3b": Shape("qwen2", 36, 2048, 11008, 16, 2, 128, 151936, True),
    "qwen2.5-7b": Shape("qwen2", 28, 3584, 18944, 28, 4, 128, 152064, False),
    "qwen3-4b": Shape("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, True),
    "qwen3-8b": Shape("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, False),
}


def shape_config(name: str) -> ModelConfig:
    """The configuration of a named shape. Raises InputError for an unknown name."""
    if name not in SHAPES:
        raise InputError(f"unknown shape {name!r}: expected one of {', '.join(SHAPES)}")
    s = SHAPES[name]
    raw = {
        "model_type": s.model_type,
        "num_hidden_layers": s.layers,
        "hidden_size": s.width,
        "intermediate_size": s.ffw,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "vocab_size": s.vocab,
        "tie_word_embeddings": s.tied,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
    }
    return ModelConfig.from_hf(raw, name)


def load_target(name: str, dtype: str, random_config: str | None = None) -> Target:
    """The target by its name, or a random one of a named shape; float32 is multiplied as float32 from now on."""
    if dtype == "float32":  # else accelerators multiply it in shorter formats, and texts fork
        jax.config.update("jax_default_matmul_precision", "highest")
    return specjax.load(name, dtype=dtype) if random_config is None else random_target(random_config, dtype)


def random_target(name: str, dtype: str) -> Target:
    """A target of a named shape with random weights, made on the device, without a tokenizer."""
    config = shape_config(name)
    keys = iter(jax.random.split(jax.random.key(0), 64 * config.num_layers))
    draw = jax.jit(lambda key, shape: (0.02 * jax.random.normal(key, shape)).astype(jnp.dtype(dtype)), static_argnums=1)

    def make(path: str, shape: tuple[int, ...], axes: Any) -> Array:
        return jnp.ones(shape, jnp.dtype(dtype)) if path.endswith("norm") else draw(next(keys), shape)

    return Target(Decoder(config, make), None, f"random {name}", dtype=dtype)
