"""`save_drafter`: a trained drafter as a directory that serving engines read."""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from specjax.drafters.draft_model import DraftModel
from specjax.drafters.stored.card import model_card
from specjax.drafters.stored.configs import SECTION
from specjax.drafters.stored.drafting import Drafter, settings_of
from specjax.drafters.stored.engines import FORMATS, kind_of, obstacles
from specjax.drafters.stored.forms import Asked, form_of, whole_model
from specjax.drafters.stored.identity import describe
from specjax.errors import InputError
from specjax.models.decoder import Decoder
from specjax.models.default_target import HUB_IDS
from specjax.models.files import CONFIG, replace_files
from specjax.models.target import Target

README = "README.md"


def save_drafter(
    path: str | os.PathLike[str],
    drafter: Drafter,
    target: Target,
    *,
    format: str | None = None,
    dtype: Any = None,
    base_model: str | None = None,
    embeddings: bool | None = None,
    training: Mapping[str, Any] | None = None,
    force: bool = False,
) -> None:
    """Write a drafter's directory: `config.json`, safetensors, and a model card.

    Each file is written beside its place and renamed when all are complete, so that an interrupted save leaves the old
    drafter (or nothing) behind. What engines do not know (the target's fingerprint, its chat template, how it drafts,
    how it was trained) goes under one key of `config.json`, "specjax".

    Args:
        path: the directory, made if need be.
        drafter: an `Eagle`, `Mtp`, `Medusa` or `DraftModel`; its tree and settings become the stored defaults.
        target: the model it was trained for.
        format: of EAGLE, "vllm" (the default; an EAGLE-3 head of the default layers is SGLang's too), "sglang", or for
            EAGLE-3 "speculators"; of MTP modules "specjax"; of Medusa, "specjax" (the default: the target's head is not
            copied) or "medusa", the official form, which knows no draft vocabulary; of a `SmallDecoder`, "specjax" (the
            default) or "huggingface", a whole model; of other models "huggingface".
        dtype: of the tensors; None for the network's own.
        base_model: name of the target for engines, such as a Hub id; None for the target's own name (the default
            target's is that of its model on the Hub).
        embeddings: copy the target's token embeddings into EAGLE's files, or not. None: where the form has them
            (EAGLE-1's, which engines read without, too) or the target scales them (EAGLE-3).
        training: how it was trained, for the record and the card: recipe, data, tokens, steps, figures; JSON.
        force: write the files even if the engine that `format` names would not draft with them as this library does.

    Raises:
        InputError: a drafter that does not fit the target, or a format that cannot hold it; the message says why.
        CheckpointError: a directory that cannot be written.
    """
    kind, folder = kind_of(drafter), Path(path).expanduser()
    if not isinstance(target, Target):
        raise InputError(f"target: expected what specjax.load returns, got {type(target).__name__}")
    form = format or next(iter(FORMATS[kind]))
    if form not in FORMATS[kind]:
        raise InputError(f"format {format!r}: a drafter of kind {kind!r} has {', '.join(FORMATS[kind])}")
    if isinstance(drafter, DraftModel):
        drafter.check(target)
        if form == "huggingface":
            drafter = whole_model(drafter, target.model)
    elif not isinstance(target.model, Decoder):
        raise InputError(f"save_drafter: {kind} drafts for a decoder, got a {type(target.model).__name__}")
    config, engine = getattr(target.model, "config", None), FORMATS[kind][form]
    against = obstacles(drafter, config, form, engine) if engine else []
    if against and not force:
        raise InputError(
            f"format {form!r}: {engine} would not draft with this drafter as it was trained: {'; '.join(against)}; "
            "choose another format, or say force=True"
        )
    base_model = base_model or HUB_IDS.get(target.name, target.name) or None
    kind = kind_of(drafter)
    written = form_of(kind, drafter, Asked(target, form, dtype, base_model, embeddings))
    section = {"drafter": kind, "version": _version()} | written.section
    section |= {"target": describe(target), "drafting": settings_of(drafter), "training": dict(training or {})}
    text = _json(written.config | {SECTION: section})
    card = model_card(drafter, section, written.tensors, config, form, base_model)
    _alone(folder, written.weights)
    writers: dict[str, Callable[[Path], Any]] = {name: partial(_write, data) for name, data in written.files.items()}
    # transformers asks for the "format" note
    writers[written.weights] = lambda file: save_file(written.tensors, file, metadata={"format": "pt"})
    writers |= {CONFIG: partial(_write, text.encode()), README: partial(_write, card.encode())}
    replace_files(folder, writers)


def _alone(folder: Path, weights: str) -> None:
    """Engines read every safetensors file that they find."""
    others = [file.name for file in folder.glob("*.safetensors*") if file.name != weights] if folder.is_dir() else []
    if others:
        raise InputError(f"{folder}: it holds another model's {min(others)}; choose another directory")


def _json(config: dict[str, Any]) -> str:
    try:
        return json.dumps(config, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise InputError(
            f"training: expected what JSON can hold (text, finite numbers, lists, dicts): {error}"
        ) from None


def _version() -> str | None:
    try:
        return version("specjax")
    except PackageNotFoundError:  # run from a checkout
        return None


def _write(data: bytes, file: Path) -> None:
    file.write_bytes(data)
