"""Drafters' parameters and the tensors they are stored as, in both directions.

Names and shapes are those that serving engines read. Axes: M drafter width, Mt target width, V target vocabulary, Vd
draft vocabulary; matrices are stored `[out, in]`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from specjax.drafters.eagle_config import Eagle3Config, EagleConfig
from specjax.drafters.medusa import MedusaConfig
from specjax.drafters.mtp_network import MtpConfig
from specjax.drafters.small_decoder import SmallDecoderConfig
from specjax.drafters.vocabulary import DraftVocabulary
from specjax.models.config import ModelConfig
from specjax.models.layout import HEAD, MTP_LAYERS, Recipe, recipes, same, transposed

EMBED = "embed_tokens.weight"
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
MIDLAYER, LAYER = "midlayer.", "layers.0."  # EAGLE-3's one layer, in the official form and in that of `speculators`

Table = dict[str, Recipe]


def eagle1(config: EagleConfig) -> Table:
    """EAGLE-1's and EAGLE-2's network."""
    c = config.layer
    table = {"fc": transposed("fc.weight", 2 * c.hidden_size, c.hidden_size)}
    if config.fc_bias:
        table["fc_bias"] = same("fc.bias", c.hidden_size)
    if config.own_embedding:
        table["embed"] = same(EMBED, c.vocab_size, c.hidden_size)
    return table | _layer(c, LAYER, c.hidden_size)


def eagle3(config: Eagle3Config) -> Table:
    """EAGLE-3's network, its layer under the official name; d2t and t2d are no parameters, see `vocabulary_tensors`."""
    c, count = config.layer, len(config.feature_layers)
    width, inputs = c.hidden_size, count * config.target_hidden_size
    table = {
        "fc": transposed("fc.weight", inputs, width),
        "embed_norm": same(f"{MIDLAYER}input_layernorm.weight", width),
        "feature_norm": same(f"{MIDLAYER}hidden_norm.weight", width),
        "norm": same("norm.weight", width),
        "head": same(HEAD, config.draft_vocab_size, width),
    }
    if config.norm_before_fc:
        table["input_norm"] = same("input_norm.weight", inputs)
    if config.fc_norm:
        sources = {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(count)}
        table["fc_norm"] = Recipe(sources, (count, config.target_hidden_size), np.stack, list)
    if config.own_embedding:
        table["embed"] = same(EMBED, c.vocab_size, width)
    return table | _layer(c, MIDLAYER, 2 * width)


def mtp(config: MtpConfig) -> Table:
    """MTP modules, named as MiMo-7B's."""
    c, table = config.layers, {}
    for path, recipe in recipes(c).items():
        if path.startswith("layers."):
            sources = {MTP_LAYERS + name.removeprefix("model.layers."): size for name, size in recipe.sources.items()}
            table[path] = replace(recipe, sources=sources)
    for i in range(c.num_layers):
        at = f"{MTP_LAYERS}{i}."
        table |= {
            f"around.{i}.hidden_norm": same(f"{at}hidden_layernorm.weight", c.hidden_size),
            f"around.{i}.embed_norm": same(f"{at}token_layernorm.weight", c.hidden_size),
            f"around.{i}.proj": transposed(f"{at}input_proj.weight", 2 * c.hidden_size, c.hidden_size),
            f"around.{i}.norm": same(f"{at}final_layernorm.weight", c.hidden_size),
        }
    return table


def medusa(config: MedusaConfig) -> Table:
    """Medusa's heads: block j of head i is `{i}.{j}.linear`, its map to the vocabulary `{i}.{number of blocks}`."""
    heads, blocks, width = config.num_heads, config.num_layers, config.hidden_size
    each = [(i, j) for i in range(heads) for j in range(blocks)]
    shape = (heads, blocks, width, width)
    table = {
        "linear": Recipe(
            {f"{i}.{j}.linear.weight": (width, width) for i, j in each},
            shape,
            lambda parts: np.stack([part.T for part in parts]).reshape(shape),
            lambda x: [x[i, j].T for i, j in each],
        ),
        "bias": Recipe(
            {f"{i}.{j}.linear.bias": (width,) for i, j in each},
            shape[:3],
            lambda parts: np.stack(parts).reshape(shape[:3]),
            lambda x: [x[i, j] for i, j in each],
        ),
    }
    return table if config.shared_head else table | {"head": medusa_head(config)}


def medusa_head(config: MedusaConfig) -> Recipe:
    """The maps to the vocabulary, `[H, Vd, M]`."""
    shape = (config.num_heads, config.draft_vocab_size or config.vocab_size, config.hidden_size)
    sources = {f"{i}.{config.num_layers}.weight": shape[1:] for i in range(config.num_heads)}
    return Recipe(sources, shape, np.stack, list)


def small_decoder(config: SmallDecoderConfig) -> Table:
    """Layers and final norm as a Hugging Face decoder's, without its embeddings; a head where it has its own."""
    c = config.layers
    table = {name: recipe for name, recipe in recipes(c).items() if name not in ("embed", "head")}
    if config.draft_vocab_size is not None:
        table["head"] = same(HEAD, config.draft_vocab_size, c.hidden_size)
    return table


def vocabulary_tensors(network: DraftVocabulary) -> dict[str, np.ndarray]:
    """`d2t`, the offset of each draft id from the target's, and `t2d`, which of the target's tokens can be drafted."""
    d2t: Int[np.ndarray, Vd] = np.asarray(network.d2t[...]).astype(np.int64)
    t2d: Bool[np.ndarray, V] = np.asarray(network.t2d)
    return {"d2t": d2t, "t2d": t2d}


def to_tensors(table: Table, network: Any, dtype: Any) -> dict[str, np.ndarray]:
    """The tensors of a network's parameters, cast to `dtype`."""
    tensors: dict[str, np.ndarray] = {}
    for path, recipe in table.items():
        parts = recipe.split(np.asarray(parameter(network, path)).astype(dtype))
        tensors |= zip(recipe.sources, map(np.ascontiguousarray, parts), strict=True)
    return tensors


def to_arrays(table: Table, read: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters by path, out of tensors by name."""
    return {
        path: np.ascontiguousarray(recipe.join([read(name) for name in recipe.sources]))
        for path, recipe in table.items()
    }


def shapes(table: Mapping[str, Recipe]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors."""
    return {name: shape for recipe in table.values() for name, shape in recipe.sources.items()}


def parameter(module: Any, path: str) -> Any:
    """A module's parameter by its path, such as `layers.0.qkv`."""
    for step in path.split("."):
        module = module[int(step)] if step.isdigit() else getattr(module, step)
    return module[...]


def _layer(c: ModelConfig, at: str, input_width: int) -> Table:
    """The one decoder layer, without a norm before attention, which reads `input_width` numbers."""
    table = {name: recipe for name, recipe in recipes(c).items() if name.startswith("layers.0.")}
    del table["layers.0.attn_norm"]
    table["layers.0.qkv"] = recipes(replace(c, hidden_size=input_width))["layers.0.qkv"]

    def renamed(recipe: Recipe) -> Recipe:
        sources = {at + name.removeprefix("model.layers.0."): shape for name, shape in recipe.sources.items()}
        return replace(recipe, sources=sources)

    return {name: renamed(recipe) for name, recipe in table.items()}
