"""What a decoder is: one frozen configuration, read from a Hugging Face `config.json`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specjax.errors import CheckpointError
from specjax.models.keys import Keys


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        kind: "default", "linear", "llama3" or "yarn".
        theta: the base.
        factor, low_freq_factor, high_freq_factor, original_max_positions: linear / llama3 / yarn scaling.
        beta_fast, beta_slow, attention_factor, truncate: yarn; `attention_factor` multiplies cos and sin.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def scaling(self) -> dict[str, Any] | None:
        """Hugging Face's `rope_scaling` for it."""
        original = {"original_max_position_embeddings": self.original_max_positions}
        more: dict[str, dict[str, Any]] = {
            "linear": {},
            "llama3": original | {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor},
            "yarn": original
            | {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "truncate": self.truncate}
            | {"attention_factor": self.attention_factor},
        }
        return None if self.kind == "default" else {"rope_type": self.kind, "factor": self.factor} | more[self.kind]


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts: which layers have it, and how the router weighs its choices."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer.

    Attributes:
        family: "llama", "mistral", "qwen2", "qwen3", "qwen3_moe" or "gemma3".
        windows: per layer, the sliding window in tokens (a query sees the positions `> p - window`), or None for all.
        rope / local_rope: of the layers without and with a window (equal unless the family differs, as Gemma 3).
        norm_offset: 1.0 where the norm multiplies by (1 + w), as Gemma.
        sandwich_norms: norms after attention and feed-forward as well as before (Gemma 3).
        embed_scale: embeddings are multiplied by it.
        attention_scale: scores are multiplied by it (usually head_dim ** -0.5).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    local_rope: RopeConfig
    windows: tuple[int | None, ...]
    tie_embeddings: bool
    attention_scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    embed_scale: float = 1.0
    activation: str = "silu"
    moe: MoeConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str = "config.json") -> "ModelConfig":
        """Read a Hugging Face `config.json`, as transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`)
        writes it. An absent key takes the default of transformers 5 where that is safe, otherwise it is an error.

        Args:
            raw: the parsed file.
            source: its path, for messages.

        Raises:
            CheckpointError: an architecture, rotary embedding or feature that is not supported, a missing key, or a
                value of the wrong kind; the message names the file and the key.
        """
        family, keys = _family(Keys(raw, source))
        hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
        # null means one a query head; where the key is absent, only the families with a default know
        kv_heads = keys.integer("num_key_value_heads", default=heads if keys.has("num_key_value_heads") else None)
        if heads % kv_heads:
            raise keys.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        head_dim = keys.integer("head_dim", default=hidden // heads)
        if head_dim % 2:
            raise keys.error(f"head_dim {head_dim} is odd: rotary embedding needs an even one")
        layers, gemma = keys.integer("num_hidden_layers"), family == "gemma3"
        rope, local_rope = _ropes(keys, family)
        biased = family != "mistral" and keys.flag("attention_bias")
        scalar = keys.number("query_pre_attn_scalar") if gemma else head_dim
        _refuse(keys)
        return cls(
            family=family,
            vocab_size=keys.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=keys.integer("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=keys.number("rms_norm_eps"),
            max_positions=keys.integer("max_position_embeddings"),
            rope=rope,
            local_rope=local_rope,
            windows=_windows(keys, family, layers),
            tie_embeddings=keys.flag("tie_word_embeddings"),
            attention_scale=scalar**-0.5,
            qkv_bias=True if family == "qwen2" else biased,
            out_bias=False if family == "qwen2" else biased,
            qk_norm=family in ("qwen3", "qwen3_moe", "gemma3"),
            norm_offset=1.0 if gemma else 0.0,
            sandwich_norms=gemma,
            embed_scale=hidden**0.5 if gemma else 1.0,
            activation=_activation(keys, gemma),
            moe=_moe(keys, layers) if family == "qwen3_moe" else None,
            eos_token_ids=keys.ids("eos_token_id"),
            bos_token_id=next(iter(keys.ids("bos_token_id")), None),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that transformers (4 and 5) reads as this model.

        Raises:
            CheckpointError: windows or a rotary embedding that the family's file format cannot express.
        """
        model_type, architecture = _WRITTEN[self.family]
        raw: dict[str, Any] = {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope.theta,
            "rope_scaling": self.rope.scaling(),
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids) or None,
            "hidden_activation" if self.family == "gemma3" else "hidden_act": _ACTIVATION_NAMES[self.activation],
        }
        if self.family in ("llama", "qwen3", "qwen3_moe", "gemma3"):
            raw["attention_bias"] = self.out_bias
        if self.family == "gemma3":
            scalar = round(self.attention_scale**-2, 6)
            raw["query_pre_attn_scalar"] = int(scalar) if scalar == int(scalar) else scalar
            raw["rope_local_base_freq"] = self.local_rope.theta
            if self.local_rope.kind != "default":
                raise CheckpointError(f"gemma3 config.json has no place for local rope {self.local_rope.kind!r}")
        elif self.local_rope != self.rope:
            raise CheckpointError(f"{self.family} config.json has one rope for all layers, this model has two")
        if self.moe is not None:
            raw |= {
                "num_experts": self.moe.num_experts,
                "num_experts_per_tok": self.moe.experts_per_token,
                "moe_intermediate_size": self.moe.intermediate_size,
                "norm_topk_prob": self.moe.normalize,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [i for i, sparse in enumerate(self.moe.layers) if not sparse],
            }
        return raw | self._windows_to_hf()

    def _windows_to_hf(self) -> dict[str, Any]:
        sizes = {w for w in self.windows if w is not None}
        mixed = self.family in ("qwen2", "qwen3", "gemma3")
        if len(sizes) > 1 or (sizes and not mixed and None in self.windows) or (sizes and self.family == "llama"):
            raise CheckpointError(f"{self.family} config.json cannot express the windows {self.windows}")
        window = sizes.pop() if sizes else None
        raw: dict[str, Any] = {} if self.family == "llama" else {"sliding_window": window}
        if self.family.startswith("qwen"):
            raw["use_sliding_window"] = window is not None
        if mixed:
            raw["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in self.windows]
        return raw


_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ACTIVATION_NAMES = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_WRITTEN = {  # family -> model_type and architecture
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
# MiMo-7B is a Qwen2 with MTP modules, which are read as a drafter
_FAMILIES = {model_type: family for family, (model_type, _) in _WRITTEN.items()} | {"gemma3": "gemma3", "mimo": "qwen2"}
_ARCHITECTURES = {name: model_type for model_type, name in _WRITTEN.values()} | {
    "Gemma3ForConditionalGeneration": "gemma3",
    "MiMoForCausalLM": "mimo",
}
_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu"}
_QWEN = _COMMON | {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
# What transformers 5 takes for an absent key. num_key_value_heads of Mistral and Qwen is not among them: its default
# there (8, 32, 4) would be a guess about another model.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"max_position_embeddings": 2048, "num_key_value_heads": None},
    "mistral": _COMMON | {"max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "qwen3_moe": _QWEN | {"decoder_sparse_step": 1},
    "gemma3": _COMMON
    | {
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
}


def _family(keys: Keys) -> tuple[str, Keys]:
    """The family, and the keys of its text model with the family's defaults."""
    if not isinstance(keys.values, Mapping):
        raise keys.error("expected a JSON object")
    architectures = keys.get("architectures") or []
    model_type = keys.get("model_type") or next((_ARCHITECTURES[a] for a in architectures if a in _ARCHITECTURES), None)
    if model_type is None and not architectures:
        raise keys.error("missing key 'model_type'")
    if model_type not in _FAMILIES:
        name = model_type or architectures[0]
        raise keys.error(f"model type {name!r} is not supported; supported: {', '.join(sorted(_FAMILIES))}")
    # a drafter or a classifier calls itself by its base's model_type, and only the architecture tells
    if architectures and not any(a in _ARCHITECTURES for a in architectures):
        supported = ", ".join(sorted(_ARCHITECTURES))
        raise keys.error(f"architecture {architectures[0]!r} is not supported; supported: {supported}")
    family, values = _FAMILIES[model_type], dict(keys.values)
    if keys.get("quantization_config") is not None:
        method = keys.mapping("quantization_config").get("quant_method", "unknown")
        raise keys.error(f"weights quantised by {method!r} are not supported; use a checkpoint in bf16, f16 or f32")
    if model_type == "gemma3":
        text = keys.mapping("text_config")
        if not text:
            raise keys.error("missing key 'text_config'")
        outer = ("tie_word_embeddings", "eos_token_id", "bos_token_id")
        values = text | {k: values[k] for k in outer if values.get(k) is not None}
    return family, Keys(values, keys.source, _DEFAULTS[family])


def _refuse(keys: Keys) -> None:
    """Features that would change the output silently if ignored."""
    if keys.flag("mlp_bias"):
        raise keys.error("mlp_bias true is not supported: the feed-forward layers here have no biases")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if keys.get(key):
            raise keys.error(f"{key} {keys.get(key)!r} is not supported")


def _activation(keys: Keys, gemma: bool) -> str:
    key = "hidden_activation" if gemma else "hidden_act"
    if keys.get(key) not in _ACTIVATIONS:
        raise keys.error(f"{key} {keys.get(key)!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[keys.get(key)]


def _windows(keys: Keys, family: str, layers: int) -> tuple[int | None, ...]:
    """Per layer, the sliding window; the families differ in which keys decide."""
    switched_off = family.startswith("qwen") and not keys.flag("use_sliding_window")
    window = None
    if family != "llama" and not switched_off and keys.get("sliding_window") is not None:
        window = keys.integer("sliding_window")
    types = keys.get("layer_types")
    if family in ("llama", "mistral", "qwen3_moe"):  # every layer alike, whatever layer_types says
        return (window,) * layers
    if types is None and family == "gemma3":
        pattern = keys.integer("sliding_window_pattern")
        types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    elif types is None:
        full = keys.integer("max_window_layers", minimum=0)
        types = ["sliding_attention" if window and i >= full else "full_attention" for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise keys.error(f"'layer_types' is {types!r}, expected a list of {layers}, one a layer")
    unknown = [t for t in types if t not in ("full_attention", "sliding_attention")]
    if unknown:
        raise keys.error(f"layer type {unknown[0]!r} is not supported; supported: full_attention, sliding_attention")
    if window is None and "sliding_attention" in types:
        raise keys.error("'layer_types' has sliding_attention, but no 'sliding_window' is set")
    return tuple(window if t == "sliding_attention" else None for t in types)


def _moe(keys: Keys, layers: int) -> MoeConfig | None:
    experts = keys.integer("num_local_experts" if keys.has("num_local_experts") else "num_experts", minimum=0)
    if experts == 0:
        return None
    chosen, step = keys.integer("num_experts_per_tok"), keys.integer("decoder_sparse_step")
    if chosen > experts:
        raise keys.error(f"num_experts_per_tok {chosen} is more than the {experts} experts")
    dense = keys.get("mlp_only_layers") or []
    return MoeConfig(
        num_experts=experts,
        experts_per_token=chosen,
        intermediate_size=keys.integer("moe_intermediate_size"),
        normalize=keys.flag("norm_topk_prob"),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )


def _ropes(keys: Keys, family: str) -> tuple[RopeConfig, RopeConfig]:
    """Rotary embedding of the layers without and with a window. `rope_scaling` wins over `rope_parameters`."""
    parameters, scaling = keys.mapping("rope_parameters"), keys.mapping("rope_scaling")
    per_layer_type = [k for k, v in parameters.items() if isinstance(v, Mapping)]
    if family != "gemma3":
        if per_layer_type:
            raise keys.error(f"'rope_parameters' per layer type ({per_layer_type[0]}) is only supported for gemma3")
        rope = _rope(keys, scaling or parameters, "rope_theta")
        return rope, rope
    if parameters and not per_layer_type:
        raise keys.error("'rope_parameters' of gemma3 holds one object a layer type, full_attention, sliding_attention")
    full = dict(parameters.get("full_attention") or {}) | scaling
    return (
        _rope(keys, full, "rope_theta"),
        _rope(keys, dict(parameters.get("sliding_attention") or {}), "rope_local_base_freq"),
    )


def _rope(keys: Keys, values: dict[str, Any], theta_key: str) -> RopeConfig:
    """One rotary embedding, with the defaults of transformers' `modeling_rope_utils`."""
    given = Keys({k: v for k, v in values.items() if v is not None}, f"{keys.source}: rope parameters")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise keys.error(f"rope type {kind!r} is not supported; supported: {', '.join(_ROPE_KINDS)}")
    partial = given.get("partial_rotary_factor") or keys.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise keys.error(f"partial_rotary_factor {partial!r} is not supported; supported: 1.0")
    theta = given.number("rope_theta", default=keys.number(theta_key, default=keys.defaults[theta_key]))
    if kind == "default":
        return RopeConfig(theta=theta)
    longest = keys.integer("max_position_embeddings")
    # a value beside the rope parameters wins over one inside, as in transformers
    outer = keys.get("original_max_position_embeddings")
    original = int(outer) if outer else given.integer("original_max_position_embeddings", default=longest)
    # only yarn may leave its factor null: then it is the ratio of the two lengths
    ratio = longest / original if kind == "yarn" and "factor" in values else None
    factor = given.number("factor", default=ratio)
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    if kind == "llama3":
        low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
        return RopeConfig(kind, theta, factor, low, high, original)
    attention = given.get("attention_factor")
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_positions=original,
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(given, factor) if attention is None else float(attention),
        truncate=bool(given.values.get("truncate", True)),
    )


def _yarn_attention_factor(given: Keys, factor: float) -> float:
    """What cos and sin are multiplied by: 0.1 ln(factor) + 1, or DeepSeek's ratio of two such terms."""

    def term(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    return term(scale) / term(all_dim) if scale and all_dim else term(1.0)
