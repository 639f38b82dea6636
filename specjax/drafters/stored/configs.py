"""What a stored drafter is, read from its `config.json` and the names of its tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specjax.drafters.eagle_config import Eagle3Config, EagleConfig, default_layers
from specjax.drafters.medusa import MedusaConfig
from specjax.drafters.mtp_network import MtpConfig
from specjax.drafters.small_decoder import SmallDecoderConfig
from specjax.errors import CheckpointError, InputError
from specjax.models.config import ModelConfig
from specjax.models.keys import Keys

SECTION = "specjax"  # our key of config.json
KINDS = ("eagle1", "eagle3", "medusa", "mtp", "small-decoder", "draft-model")

_EAGLE1 = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "Qwen2ForCausalLMEagle")
_EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_FOREIGN = ("eagle", "medusa", "dflash", "mtp", "nextn", "speculator", "dspark")  # in names of architectures
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_MTP = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")  # how models count their modules
_MTP_READ = "read are MiMo-7B's (model type 'mimo'), whose layers are dense"


def section(keys: Keys) -> Keys | None:
    """Our own key of a config.json; None in a drafter that others made."""
    if not keys.has(SECTION):
        return None
    own = Keys(keys.mapping(SECTION), f"{keys.source}: {SECTION!r}")
    if own.get("drafter") not in KINDS:
        raise own.error(f"'drafter' is {own.get('drafter')!r}, expected one of {', '.join(KINDS)}")
    return own


def kind_by_config(keys: Keys, own: Keys | None) -> str | None:
    """One of KINDS, or None where only the tensors can tell.

    Raises:
        CheckpointError: a drafter of a kind that is not read.
    """
    if own is not None:
        return str(own.get("drafter"))
    supported = "supported: EAGLE-1, EAGLE-3, MTP modules, Medusa, and models of their own"
    if keys.has("speculators_model_type"):
        if keys.get("speculators_model_type") != "eagle3":
            raise keys.error(
                f"speculators model type {keys.get('speculators_model_type')!r} is not supported; {supported}"
            )
        return "eagle3"
    if keys.has("medusa_num_heads"):
        return "medusa"
    architectures = keys.get("architectures") or []
    for name in map(str, architectures if isinstance(architectures, list) else [architectures]):
        if name in _EAGLE1 or name in _EAGLE3:
            return "eagle1" if name in _EAGLE1 else "eagle3"
        if any(part in name.lower() for part in _FOREIGN):
            raise keys.error(f"drafter architecture {name!r} is not supported; {supported}")
    if any(keys.get(key) for key in _MTP):
        if keys.get("model_type") == "mimo":
            return "mtp"
        raise keys.error(f"MTP modules of model type {keys.get('model_type')!r} are not supported; {_MTP_READ}")
    return None


def kind_by_tensors(names: Mapping[str, Any], source: str) -> str:
    """EAGLE heads in official form may call themselves by the target's architecture; `fc` tells.

    Raises:
        CheckpointError: MTP modules in a form that is not read.
    """
    foreign = [name for name in names if name.startswith("mtp.") or name.endswith(".eh_proj.weight")]
    if foreign:
        raise CheckpointError(f"{source}: tensor {foreign[0]} is of MTP modules that are not supported; {_MTP_READ}")
    if "fc.weight" not in names:
        return "draft-model"
    return "eagle3" if "layers.0.hidden_norm.weight" in names else "eagle1"


def eagle1_config(keys: Keys, tensors: Mapping[str, Any], own: Keys | None) -> EagleConfig:
    """Whether there are embeddings of its own is not said yet: it takes the tensors to know."""
    if keys.flag("add_para_norm"):
        raise keys.error("add_para_norm true is not supported")
    bias = "fc.bias" in tensors if own is None else own.flag("fc_bias")
    return EagleConfig(_layer(keys), fc_bias=bias)


def eagle3_config(
    keys: Keys, own: Keys | None, target: ModelConfig, feature_layers: Sequence[int] | None
) -> Eagle3Config:
    """As a configuration with embeddings of its own: it takes the tensors to know whether it has."""
    outer = keys
    speculators = keys.has("speculators_model_type")
    if speculators:
        keys = Keys(keys.mapping("transformer_layer_config"), f"{keys.source}: 'transformer_layer_config'")
    elif outer.mapping("eagle_config").get("use_aux_hidden_state") is False:
        raise outer.error("eagle_config.use_aux_hidden_state false is not supported")
    for key in ("parallel_drafting", "mask_token_id"):
        if outer.get(key) not in (None, False):
            raise outer.error(f"{key} {outer.get(key)!r} is not supported: drafting of several tokens in one pass")
    if outer.get("logit_scale") not in (None, 1, 1.0):
        raise outer.error(f"logit_scale {outer.get('logit_scale')!r} is not supported")
    layer = _layer(keys)
    draft_vocab_size = outer.integer("draft_vocab_size", default=layer.vocab_size)
    if draft_vocab_size != layer.vocab_size and (outer.flag("tie_word_embeddings") or keys.flag("tie_word_embeddings")):
        raise outer.error(
            f"tie_word_embeddings is true, but the draft vocabulary has {draft_vocab_size} of {layer.vocab_size} "
            "tokens, so its head cannot be the embeddings; set it to false"
        )
    before_residual = outer.flag("norm_before_residual")
    if speculators and outer.get("norm_before_residual") is None:
        before_residual = True  # as vLLM reads such directories
    aux = Keys(outer.mapping("eagle_config"), f"{outer.source}: 'eagle_config'")
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=outer.integer("target_hidden_size", default=layer.hidden_size),
        feature_layers=_feature_layers(outer, own, target.num_layers, feature_layers),
        norm_before_residual=before_residual,
        norm_before_fc=outer.flag("norm_before_fc") or aux.flag("norm_before_fc"),
        fc_norm=outer.flag("fc_norm"),
        norm_output=outer.flag("norm_output"),
        own_embedding=True,
    )


def medusa_config(keys: Keys, own: Keys | None, target: ModelConfig) -> MedusaConfig:
    """Width and vocabulary are the target's; a draft vocabulary is known to our own form only."""
    reduced = own is not None and own.get("draft_vocab_size") is not None
    return MedusaConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_heads=keys.integer("medusa_num_heads"),
        num_layers=keys.integer("medusa_num_layers"),
        shared_head=own is not None and own.flag("shared_head"),
        draft_vocab_size=own.integer("draft_vocab_size") if own is not None and reduced else None,
    )


def mtp_config(keys: Keys, own: Keys | None) -> MtpConfig:
    """In our own form `config.json` is that of a model made of the modules' layers; else it is the target's."""
    layers = ModelConfig.from_hf(keys.values, keys.source)
    if any(layers.windows):
        raise keys.error("MTP modules with a sliding window are not supported")
    if own is None:  # MiMo-7B's; `mtp_network` says what is known of it
        count = keys.integer("num_nextn_predict_layers")
        return MtpConfig.of(layers, count, hidden_first=True, feature=f"layer.{layers.num_layers}", norm_output=True)
    feature, reduced = own.get("feature"), own.get("draft_vocab_size") is not None
    if feature != "hidden" and not str(feature).startswith("layer."):
        raise own.error(f"'feature' is {feature!r}, expected 'hidden' or 'layer.L'")
    return MtpConfig(
        replace(layers, tie_embeddings=False),
        hidden_first=own.flag("hidden_first"),
        feature=str(feature),
        norm_output=own.flag("norm_output"),
        draft_vocab_size=own.integer("draft_vocab_size") if reduced else None,
    )


def small_decoder_config(keys: Keys) -> SmallDecoderConfig:
    """Its layers are a model's without embeddings, so `config.json` is that model's."""
    layers = ModelConfig.from_hf(keys.values, keys.source)
    reduced = keys.get("draft_vocab_size") is not None
    return SmallDecoderConfig(layers, keys.integer("draft_vocab_size") if reduced else None)


def _layer(keys: Keys) -> ModelConfig:
    """The one decoder layer of an EAGLE network."""
    if keys.integer("num_hidden_layers") != 1:
        raise keys.error(
            f"num_hidden_layers is {keys.get('num_hidden_layers')}; only EAGLE heads of one layer are supported"
        )
    values = {key: value for key, value in keys.values.items() if key != "architectures"}
    config = ModelConfig.from_hf({"model_type": "llama"} | values, keys.source)
    if config.family not in _FAMILIES:
        raise keys.error(
            f"an EAGLE layer of model type {config.family!r} is not supported; supported: {', '.join(_FAMILIES)}"
        )
    if config.windows != (None,):
        raise keys.error(f"an EAGLE layer with a sliding window of {config.windows[0]} tokens is not supported")
    return replace(config, tie_embeddings=False)


def _feature_layers(keys: Keys, own: Keys | None, num_layers: int, asked: Sequence[int] | None) -> tuple[int, ...]:
    """Layer i stands for the residual stream after i of the target's layers."""
    source = "feature_layers" if asked is not None else "eagle_aux_hidden_state_layer_ids"
    layers: Any = asked
    if layers is None and own is not None:
        source, layers = "feature_layers", own.get("feature_layers")
    if layers is None:
        layers = keys.get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        layers = _nested(keys, num_layers)
    if layers is None:
        return default_layers(num_layers)
    if not isinstance(layers, list | tuple) or not layers or not all(_whole(i) for i in layers):
        raise keys.error(f"{source!r} is {layers!r}, expected a list of numbers of layers")
    if len(set(layers)) < len(layers):
        raise InputError(f"{keys.source}: the feature layers {_listed(layers)} collide; expected different ones")
    if max(layers) > num_layers:
        raise InputError(
            f"{keys.source}: feature layer {max(layers)} does not exist in a target of {num_layers} layers; use the "
            "target it was made for"
        )
    return tuple(layers)


def _nested(keys: Keys, num_layers: int) -> list[int] | None:
    """Ids of `eagle_config` mean the layers themselves to vLLM, the layers before to SGLang. Where one of the two
    readings gives the default layers, it is that one.
    """
    ids = keys.mapping("eagle_config").get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(_whole(i) for i in ids):
        raise keys.error(
            f"eagle_config.eagle_aux_hidden_state_layer_ids is {ids!r}, expected a list of numbers of layers"
        )
    after = [i + 1 for i in ids]
    usual = [2, num_layers // 2, num_layers - 3]
    if usual in (ids, after):
        return usual
    raise InputError(
        f"{keys.source}: eagle_config.eagle_aux_hidden_state_layer_ids {ids} means other layers to vLLM than to "
        f"SGLang; say feature_layers=({_listed(ids)}) if it was trained for vLLM, ({_listed(after)}) if for SGLang"
    )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
