"""What is written of each kind of drafter: its `config.json`, its tensors, and what our own section says of it."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.drafters.draft_model import DraftModel
from specjax.drafters.eagle_networks import Eagle3Network, EagleNetwork
from specjax.drafters.medusa import MedusaHeads
from specjax.drafters.mtp_network import MtpNetwork
from specjax.drafters.small_decoder import SmallDecoder
from specjax.drafters.stored import layout
from specjax.drafters.stored.engines import usual_layers
from specjax.errors import InputError
from specjax.models.config import ModelConfig
from specjax.models.decoder import Decoder
from specjax.models.files import WEIGHTS
from specjax.models.layout import recipes
from specjax.models.target import Target, dtype_name

SPECULATORS = "0.9.0"  # the version whose form is written


@dataclass(frozen=True)
class Asked:
    """How a drafter is to be written; see `save_drafter`."""

    target: Target
    format: str
    dtype: Any
    base_model: str | None
    embeddings: bool | None

    def stored(self, own: Any) -> Any:
        """The tensors' dtype, for weights in `own`."""
        return jnp.dtype(dtype_name(own if self.dtype is None else self.dtype))

    def fits(self, **sizes: int) -> None:
        """Raise InputError unless the target has these sizes."""
        for name, expected in sizes.items():
            found = getattr(self.target.model.config, name)
            if found != expected:
                raise InputError(
                    f"save_drafter: this drafter is for a target with {name} {expected}, and the target has {found}"
                )


@dataclass(frozen=True)
class Form:
    """What is written of a drafter.

    Attributes:
        config: `config.json`, without our section.
        tensors: by name.
        section: what our section says of the network.
        weights: name of the tensors' file.
        files: more files, by name.
    """

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    section: dict[str, Any]
    weights: str = WEIGHTS
    files: dict[str, bytes] = field(default_factory=dict)


def form_of(kind: str, drafter: Any, asked: Asked) -> Form:
    """What is written of a drafter.

    Raises:
        InputError: one that does not fit the target.
    """
    if asked.embeddings is not None and kind not in ("eagle1", "eagle3"):
        raise InputError(
            f"embeddings: only EAGLE's files can have the target's, not those of a drafter of kind {kind!r}"
        )
    if asked.embeddings is False and drafter.network.config.own_embedding:
        raise InputError("embeddings=False: this network has embeddings of its own, which it cannot draft without")
    return _FORMS[kind](drafter, asked)


def _eagle1(drafter: Any, asked: Asked) -> Form:
    network: EagleNetwork = drafter.network
    config, c, target = network.config, network.config.layer, asked.target.model
    asked.fits(hidden_size=c.hidden_size, vocab_size=c.vocab_size)
    dtype = asked.stored(network.dtype)
    tensors = layout.to_tensors(layout.eagle1(config), network, dtype)
    if not config.own_embedding and asked.embeddings is not False:
        tensors |= _embeddings(target, dtype)
    if asked.format == "sglang":  # whose fc has a bias
        tensors.setdefault("fc.bias", np.zeros(c.hidden_size, dtype))
    section = {
        "features": "hidden: after the target's final norm",
        "fc_bias": config.fc_bias,
        "own_embedding": config.own_embedding,
        "rope": _rope(c),
    }
    architecture = "LlamaForCausalLMEagle" if asked.format == "sglang" else "LlamaForCausalLM"
    shape = replace(c, tie_embeddings=target.config.tie_embeddings)  # of the target's head, which reads the output
    return Form(shape.to_hf() | {"architectures": [architecture], "dtype": dtype.name}, tensors, section)


def _eagle3(drafter: Any, asked: Asked) -> Form:
    network: Eagle3Network = drafter.network
    config, c, target = network.config, network.config.layer, asked.target.model
    asked.fits(hidden_size=config.target_hidden_size, vocab_size=c.vocab_size)
    if max(config.feature_layers) > target.config.num_layers:
        raise InputError(
            f"save_drafter: feature layer {max(config.feature_layers)} does not exist in a target of "
            f"{target.config.num_layers} layers"
        )
    dtype, layers = asked.stored(network.dtype), list(config.feature_layers)
    tensors = layout.to_tensors(layout.eagle3(config), network, dtype) | layout.vocabulary_tensors(network)
    scaled = target.config.embed_scale != 1.0  # by the target, not by the engines that hand its embeddings out
    if not config.own_embedding and (scaled if asked.embeddings is None else asked.embeddings):
        tensors |= _embeddings(target, dtype)
    norms = {n: getattr(config, n) for n in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    section = {
        "features": "layer.i: the residual stream after i of the target's layers, before any norm",
        "feature_layers": layers,
        "draft_vocab_size": config.draft_vocab_size,
        "own_embedding": config.own_embedding,
        **norms,
        "rope": _rope(c),
    }
    # never tied: the head's vocabulary is not that of the embeddings
    layer = replace(c, tie_embeddings=False).to_hf()
    sizes: dict[str, Any] = {"draft_vocab_size": config.draft_vocab_size, "tie_word_embeddings": False}
    if config.target_hidden_size != c.hidden_size:
        sizes["target_hidden_size"] = config.target_hidden_size
    sizes["dtype"] = dtype.name
    if asked.format == "speculators":
        outer = _speculators(asked, drafter.max_depth) | sizes | norms
        outer |= {"eagle_aux_hidden_state_layer_ids": layers, "transformer_layer_config": layer}
        return Form(outer, {k.replace(layout.MIDLAYER, layout.LAYER): v for k, v in tensors.items()}, section)
    set_norms = {name: True for name, value in norms.items() if value}
    raw = layer | {"architectures": ["LlamaForCausalLMEagle3"]} | sizes | set_norms
    if not usual_layers(config, target.config):
        raw |= _other_layers(layers, asked.format)
    return Form(raw, tensors, section)


def _other_layers(layers: list[int], form: str) -> dict[str, Any]:
    """The key that vLLM reads, or SGLang's, which names the layers before."""
    if form == "vllm":
        return {"eagle_aux_hidden_state_layer_ids": layers}
    before = [i - 1 for i in layers]
    return {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": before}}


def _speculators(asked: Asked, tokens: int) -> dict[str, Any]:
    architectures = asked.target.model.config.to_hf()["architectures"]
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": asked.base_model, "architectures": architectures},
        },
    }


def _mtp(drafter: Any, asked: Asked) -> Form:
    network: MtpNetwork = drafter.network
    config, c = network.config, network.config.layers
    asked.fits(hidden_size=c.hidden_size, vocab_size=c.vocab_size)
    dtype = asked.stored(network.dtype)
    tensors = layout.to_tensors(layout.mtp(config), network, dtype)
    if config.draft_vocab_size is not None:
        tensors |= layout.vocabulary_tensors(network)
    section = {
        "feature": config.feature,
        "hidden_first": config.hidden_first,
        "norm_output": config.norm_output,
        "draft_vocab_size": config.draft_vocab_size,
        "rope": _rope(c),
    }
    return Form(c.to_hf() | {"architectures": None, "dtype": dtype.name}, tensors, section)


def _medusa(drafter: Any, asked: Asked) -> Form:
    heads: MedusaHeads = drafter.heads
    config, target = heads.config, asked.target.model
    asked.fits(hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    dtype, draft = asked.stored(heads.linear[...].dtype), config.draft_vocab_size
    tensors = layout.to_tensors(layout.medusa(config), heads, dtype)
    if draft is not None and asked.format == "medusa":
        if not config.shared_head:
            raise InputError(
                f"format 'medusa': its heads score every token, and these know {draft} of them; save them with "
                "format='specjax'"
            )
        draft = None  # the target's whole head is what engines will read
    if draft is not None:
        tensors |= layout.vocabulary_tensors(heads)
    if config.shared_head and asked.format == "medusa":
        head = np.asarray(target.embed[...] if target.config.tie_embeddings else target.head[...]).astype(dtype)
        tensors |= {name: head.copy() for name in layout.medusa_head(config).sources}
    raw = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": asked.base_model,
        "version": "2",
    }
    section = {
        "features": "hidden: after the target's final norm",
        "shared_head": config.shared_head,
        "draft_vocab_size": draft,
    }
    return Form(raw, tensors, section, layout.MEDUSA_WEIGHTS)


def _small_decoder(drafter: Any, asked: Asked) -> Form:
    network: SmallDecoder = drafter.model
    config = network.config
    dtype = asked.stored(network.dtype)
    tensors = layout.to_tensors(layout.small_decoder(config), network, dtype)
    if config.draft_vocab_size is not None:
        tensors |= layout.vocabulary_tensors(network)
    raw = config.layers.to_hf() | {"architectures": None, "draft_vocab_size": config.draft_vocab_size}
    section = {"draft_vocab_size": config.draft_vocab_size, "rope": _rope(config.layers)}
    return Form(raw | {"dtype": dtype.name}, tensors, section)


def _draft_model(drafter: Any, asked: Asked) -> Form:
    model = drafter.model
    if not isinstance(model, Decoder):
        raise InputError(f"save_drafter: a draft model must be a decoder, got a {type(model).__name__}")
    dtype = asked.stored(model.embed[...].dtype)
    tensors = layout.to_tensors(recipes(model.config), model, dtype)
    tokenizer: Any = drafter.tokenizer or asked.target.tokenizer
    files: dict[str, bytes] = {}
    if hasattr(tokenizer, "save"):
        with tempfile.TemporaryDirectory() as temporary:
            tokenizer.save(temporary)
            files = {file.name: file.read_bytes() for file in Path(temporary).iterdir() if file.is_file()}
    section = {"rope": _rope(model.config)}
    return Form(model.config.to_hf() | {"dtype": dtype.name}, tensors, section, files=files)


_FORMS: dict[str, Callable[[Any, Asked], Form]] = {
    "eagle1": _eagle1,
    "eagle3": _eagle3,
    "mtp": _mtp,
    "medusa": _medusa,
    "small-decoder": _small_decoder,
    "draft-model": _draft_model,
}


def whole_model(drafter: DraftModel, target: Decoder) -> DraftModel:
    """A small decoder with copies of the target's embeddings and head: an ordinary model. Others as they are."""
    network = drafter.model
    if not isinstance(network, SmallDecoder):
        return drafter
    if network.config.draft_vocab_size is not None:
        raise InputError(
            "format 'huggingface': a whole model scores every token, and this one knows "
            f"{network.config.draft_vocab_size} of them; save it with format='specjax'"
        )
    config = network.config.layers
    arrays = {path: layout.parameter(network, path) for path in layout.small_decoder(network.config)}
    arrays |= {"embed": target.embed[...]} | ({} if config.tie_embeddings else {"head": target.head[...]})
    return replace(drafter, model=Decoder(config, lambda name, shape, axes: arrays[name].astype(network.dtype)))


def _embeddings(target: Decoder, dtype: Any) -> dict[str, np.ndarray]:
    table = target.embeddings(jnp.arange(target.vocab_size)[None])[0]
    return {layout.EMBED: np.asarray(table).astype(dtype)}


def _rope(config: ModelConfig) -> dict[str, Any]:
    return {"theta": config.rope.theta, "scaling": config.rope.scaling()}
