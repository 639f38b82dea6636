"""`load_drafter`: a trained drafter from a directory, ours or another project's."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.drafters.draft_model import DraftModel
from specjax.drafters.eagle import Eagle
from specjax.drafters.medusa import Medusa
from specjax.drafters.mtp import Mtp
from specjax.drafters.stored import configs
from specjax.drafters.stored.drafting import Drafter, check_settings, draft_with
from specjax.drafters.stored.identity import check_target, check_tokenizer
from specjax.drafters.stored.layout import MEDUSA_WEIGHTS
from specjax.drafters.stored.reading import Source, read_eagle1, read_eagle3, read_medusa, read_mtp, read_small_decoder
from specjax.drafters.stored.tensors import open_tensors
from specjax.errors import CheckpointError, InputError
from specjax.models.decoder import Decoder
from specjax.models.files import CONFIG, WEIGHTS, read_json
from specjax.models.keys import Keys
from specjax.models.layout import MTP_LAYERS
from specjax.models.target import Target, dtype_name, load
from specjax.shipped import shipped_path

_CLASSES: dict[str, type[Drafter]] = {
    "eagle1": Eagle,
    "eagle3": Eagle,
    "mtp": Mtp,
    "medusa": Medusa,
    "small-decoder": DraftModel,
    "draft-model": DraftModel,
}


def load_drafter(
    path: str | os.PathLike[str],
    target: Target,
    *,
    dtype: Any = "float32",
    mesh: Any = None,
    strict: bool = True,
    feature_layers: Sequence[int] | None = None,
    **settings: Any,
) -> Drafter:
    """Load a drafter for a target: what `save_drafter` writes, and what others do.

    Read are EAGLE-1 and EAGLE-3 heads as vLLM and SGLang serve them (`midlayer.*` or `layers.0.*`), `speculators`
    directories of EAGLE-3, the MTP modules in a MiMo-7B checkpoint, Medusa heads, and a Hugging Face directory or GGUF
    file of a whole model as a `DraftModel`; from safetensors only.

    Args:
        path: the directory, or the name of a drafter that comes with specjax: see `specjax.shipped`.
        target: what `specjax.load` returns; the drafter must have been made for it.
        dtype: of the network's weights and computation, "float32", "bfloat16" or "float16".
        mesh: a `jax.sharding.Mesh` to place the weights on; None for the default device.
        strict: refuse a target whose weights are not those that the drafter was made for (where the drafter says). Its
            shape and its vocabulary must fit in any case.
        feature_layers: EAGLE-3's, where its files do not say or are ambiguous: the residual stream after so many
            layers.
        settings: of the drafter, instead of those stored with it: `tree` or `num_draft_tokens` (a chain), `sample`,
            `block_sizes`, `min_confidence`.

    Returns:
        An `Eagle`, `Mtp`, `Medusa` or `DraftModel`. Without stored or given settings, EAGLE drafts a chain of 5, Medusa
        a chain as long as it has heads, MTP one as long as it has modules.

    Raises:
        InputError: a drafter that does not fit the target, or an unknown setting.
        CheckpointError: a directory that is none of these, or damaged; the message names file and tensor.
    """
    if not isinstance(target, Target):
        raise InputError(f"target: expected what specjax.load returns, got {type(target).__name__}")
    dtype = dtype_name(dtype)
    folder = shipped_path(path) or Path(path).expanduser()
    if folder.suffix == ".gguf" and folder.is_file():
        return _draft_model(folder, target, dtype, mesh, {}, settings)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such directory; expected one with config.json and {WEIGHTS}")
    keys = Keys(read_json(folder / CONFIG), str(folder / CONFIG))
    own = configs.section(keys)
    if own is None:
        check_tokenizer(folder, target)
    else:
        check_target(own.mapping("target"), target, folder, strict)
    kind = configs.kind_by_config(keys, own)
    if kind is None:
        with open_tensors(folder) as tensors:
            kind = configs.kind_by_tensors(tensors.shapes, str(folder))
    cls = _CLASSES[kind]
    check_settings(cls, settings)
    if feature_layers is not None and kind != "eagle3":
        raise InputError(f"feature_layers: only EAGLE-3 has them, and {folder} holds a drafter of kind {kind!r}")
    stored = _stored_settings(keys, own)
    if kind == "draft-model":
        return _draft_model(folder, target, dtype, mesh, stored, settings)
    if not isinstance(target.model, Decoder):
        raise InputError(f"{folder}: this drafter needs a decoder as its target, got a {type(target.model).__name__}")
    file = MEDUSA_WEIGHTS if kind == "medusa" else WEIGHTS
    with open_tensors(folder, file, MTP_LAYERS if kind == "mtp" and own is None else "") as tensors:
        source = Source(keys, own, tensors, target.model, dtype, mesh)
        network: Any
        if kind == "eagle3":
            network = read_eagle3(source, feature_layers)
        else:
            readers: dict[str, Callable[[Source], Any]] = {
                "eagle1": read_eagle1,
                "mtp": read_mtp,
                "medusa": read_medusa,
                "small-decoder": read_small_decoder,
            }
            network = readers[kind](source)
    return draft_with(cls, network, stored, settings, keys.source)


def _draft_model(
    path: Path, target: Target, dtype: Any, mesh: Any, stored: Mapping[str, Any], settings: Mapping[str, Any]
) -> Drafter:
    check_settings(DraftModel, settings)
    model: Any = load(path.absolute(), dtype, mesh)  # never the built-in target of that name
    drafter = draft_with(DraftModel, model, stored, settings, str(path / CONFIG))
    assert isinstance(drafter, DraftModel)
    drafter.check(target)
    return drafter


def _stored_settings(keys: Keys, own: Keys | None) -> dict[str, Any]:
    """How it drafts unless told otherwise."""
    if own is not None:
        return own.mapping("drafting")
    methods = keys.mapping("speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    count = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return {"num_draft_tokens": count} if isinstance(count, int) else {}
