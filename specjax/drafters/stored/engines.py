"""What serving engines make of a stored drafter: what keeps one from reading it, and the command that serves it.

From the sources of vLLM 0.33 and SGLang 0.5.23.
"""

import json
import shlex
from typing import Any

from specjax.drafters.draft_model import DraftModel
from specjax.drafters.eagle import Eagle
from specjax.drafters.eagle_config import Eagle3Config, default_layers
from specjax.drafters.eagle_networks import Eagle3Network, EagleNetwork
from specjax.drafters.growing import GrownTree
from specjax.drafters.medusa import Medusa
from specjax.drafters.mtp import Mtp
from specjax.drafters.small_decoder import SmallDecoder
from specjax.drafters.stored.drafting import Drafter
from specjax.errors import InputError
from specjax.models.config import ModelConfig

# The forms of each kind, the default first, with the engine that each is for.
FORMATS: dict[str, dict[str, str | None]] = {
    "eagle1": {"vllm": "vLLM", "sglang": "SGLang"},
    "eagle3": {"vllm": "vLLM", "sglang": "SGLang", "speculators": "vLLM"},
    "mtp": {"specjax": None},
    "medusa": {"specjax": None, "medusa": None},
    "small-decoder": {"specjax": None, "huggingface": None},
    "draft-model": {"huggingface": None},
}
ENGINES = ("vLLM", "SGLang")
HERE = "THIS_DIRECTORY"


def kind_of(drafter: Drafter) -> str:
    """One of `configs.KINDS`."""
    if isinstance(drafter, Eagle):
        return drafter.network.name
    if isinstance(drafter, Mtp):
        return "mtp"
    if isinstance(drafter, Medusa):
        return "medusa"
    if isinstance(drafter, DraftModel):
        return "small-decoder" if isinstance(drafter.model, SmallDecoder) else "draft-model"
    raise InputError(f"drafter: expected an Eagle, Mtp, Medusa or DraftModel, got {drafter!r}")


def usual_layers(config: Eagle3Config, target: ModelConfig) -> bool:
    """Whether the features are of the layers that engines take where nothing says otherwise."""
    try:
        return config.feature_layers == default_layers(target.num_layers)
    except InputError:  # a target so shallow that they are none
        return False


def obstacles(drafter: Drafter, target: ModelConfig | None, form: str, engine: str) -> list[str]:
    """What keeps an engine from drafting with the files as this library does; empty if nothing is known to.

    Args:
        target: the target's configuration (EAGLE has one).
        form: one of FORMATS.
        engine: one of ENGINES.
    """
    if isinstance(drafter, Medusa):
        return ["vLLM has dropped Medusa" if engine == "vLLM" else "SGLang has no Medusa"]
    if isinstance(drafter, Mtp):
        return ["it takes MTP modules from the target's own checkpoint only"]
    if isinstance(drafter, DraftModel):
        if form == "specjax":
            return ["its layers read the target's embeddings; format='huggingface' writes a whole model"]
        return []
    assert target is not None
    network = drafter.network
    found = _of_layer(network, target, engine)
    if isinstance(network, EagleNetwork):
        return found + _of_eagle1(network, form, engine)
    return found + _of_eagle3(network, target, form, engine)


def _of_layer(network: EagleNetwork | Eagle3Network, target: ModelConfig, engine: str) -> list[str]:
    c, found = network.config.layer, []
    if c.activation != "silu":
        found.append(f"its feed-forward layer has the activation {c.activation}, the engine's has silu")
    if c.qk_norm:
        found.append("its layer has query and key norms, the engine's has none")
    if c.qkv_bias and engine == "SGLang":
        found.append("its layer has query, key and value biases, the engine's has none")
    same_width = not isinstance(network, Eagle3Network) or network.config.target_hidden_size == c.hidden_size
    other_embedding = network.config.own_embedding or target.embed_scale != 1.0
    if engine == "SGLang" and other_embedding and same_width:
        found.append("its embeddings are others than the target's, which the engine would use")
    return found


def _of_eagle1(network: EagleNetwork, form: str, engine: str) -> list[str]:
    if engine == "vLLM":
        return ["fc has a bias, the engine's has none"] if network.config.fc_bias or form == "sglang" else []
    return [] if form == "sglang" else ["it wants another architecture and a bias of fc: format='sglang'"]


def _of_eagle3(network: Eagle3Network, target: ModelConfig, form: str, engine: str) -> list[str]:
    config, found = network.config, []
    usual = usual_layers(config, target)
    if len(config.feature_layers) != 3:
        found.append(f"it takes the features of {len(config.feature_layers)} layers, the engine of three")
    if engine == "vLLM":
        if form == "sglang" and not usual:
            found.append("its files number the layers as SGLang does: format='vllm'")
        return found
    if form == "speculators":
        found.append("it reads no speculators directories: format='sglang'")
    elif form == "vllm" and not usual:
        found.append("it would take the features of its default layers instead: format='sglang'")
    if form == "sglang" and not usual and 0 in config.feature_layers:
        found.append("it cannot take the embeddings (layer 0) as a feature")
    if config.norm_before_residual:
        found.append("its residual is the normed feature, the engine's always the raw one")
    return found


def command(drafter: Drafter, form: str, engine: str, base_model: str | None) -> str:
    """The command that serves the target with this drafter."""
    base = shlex.quote(base_model or "TARGET")
    if engine == "vLLM":
        if form == "speculators" and base_model is not None:
            return f"vllm serve {HERE}"  # it names its target
        method = {"eagle1": "eagle", "eagle3": "eagle3"}.get(kind_of(drafter), "draft_model")
        settings = {"method": method, "model": HERE, "num_speculative_tokens": drafter.max_depth}
        return f"vllm serve {base} --speculative-config '{json.dumps(settings)}'"
    name = {"eagle1": "EAGLE", "eagle3": "EAGLE3"}.get(kind_of(drafter), "STANDALONE")
    tree: Any = getattr(drafter, "tree", None)
    grown = isinstance(tree, GrownTree)
    depth, top_k, total = (
        (tree.depth, tree.top_k, tree.total) if grown else (drafter.max_depth, 1, drafter.max_depth + 1)
    )
    return (
        f"python -m sglang.launch_server --model-path {base} --speculative-algorithm {name} "
        f"--speculative-draft-model-path {HERE} --speculative-num-steps {depth} --speculative-eagle-topk {top_k} "
        f"--speculative-num-draft-tokens {total}"
    )
