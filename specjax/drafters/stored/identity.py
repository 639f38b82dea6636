"""Which target a drafter was made for, and whether a target is that one."""

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from specjax.drafters.stored.layout import parameter
from specjax.errors import InputError
from specjax.models.decoder import Decoder
from specjax.models.layout import recipes
from specjax.models.target import Target
from specjax.models.tokenizer import Tokenizer, compare, vocabulary_hash

_SAMPLES = 1024  # values of each parameter


def fingerprint(target: Target) -> str:
    """Sixteen hexadecimal digits that change with the target's weights.

    sha256 over every parameter's name, shape and some thousand of its values at equal distances, in the order of names.
    Values are rounded to bfloat16, so that a target loaded in float32 and in bfloat16 is the same one. It tells models
    and fine-tunes apart within milliseconds; it does not notice a single damaged weight (`Target.weights_hash` does).
    """
    model, digest = target.model, hashlib.sha256()
    if isinstance(model, Decoder):
        parameters = {path: parameter(model, path) for path in sorted(recipes(model.config))}
    else:
        parameters = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(model))}
    for path, value in parameters.items():
        digest.update(f"{path} {tuple(value.shape)} ".encode())
        some = jnp.ravel(value)[:: max(value.size // _SAMPLES, 1)]
        digest.update(np.asarray(some).astype(ml_dtypes.bfloat16).tobytes())
    return digest.hexdigest()[:16]


def describe(target: Target) -> dict[str, Any]:
    """What is stored of a target."""
    tokenizer, config = target.tokenizer, getattr(target.model, "config", None)
    return {
        "name": target.name,
        "revision": target.revision,
        "fingerprint": fingerprint(target),
        "vocab_size": target.model.vocab_size,
        "hidden_size": getattr(config, "hidden_size", None),
        "num_layers": getattr(config, "num_layers", None),
        "vocabulary": None if tokenizer is None else vocabulary_hash(tokenizer),
        "chat_template": None if tokenizer is None else tokenizer.template_hash,
    }


def check_target(stored: Mapping[str, Any], target: Target, source: Path, strict: bool) -> None:
    """Raise InputError unless `target` is the one described.

    Its name may be another one, its chat template too (with a warning: training saw other texts then). Another
    vocabulary is always an error, other weights only where `strict`.
    """
    tokenizer, name = target.tokenizer, stored.get("name")
    if tokenizer is not None and stored.get("vocabulary") not in (None, vocabulary_hash(tokenizer)):
        raise InputError(
            f"{source}: this drafter was made for {name!r}, whose tokenizer has other tokens than that of "
            f"{target.name!r}; load the target it was made for"
        )
    found = fingerprint(target)
    if strict and stored.get("fingerprint") not in (None, found):
        raise InputError(
            f"{source}: this drafter was made for {name!r} with weights {stored['fingerprint']}, and {target.name!r} "
            f"has weights {found}; load that target, or say strict=False to draft for another one all the same"
        )
    known = stored.get("vocabulary") is not None  # the target had a tokenizer when the drafter was saved
    if known and tokenizer is not None and stored.get("chat_template") != tokenizer.template_hash:
        warnings.warn(
            f"{source}: this drafter was trained with the chat template {stored.get('chat_template')}, and that of "
            f"{target.name!r} is {tokenizer.template_hash}: it has not seen such texts, and less may be accepted",
            stacklevel=3,
        )


def check_tokenizer(folder: Path, target: Target) -> None:
    """Raise InputError if the directory has a tokenizer with other tokens than the target's."""
    if target.tokenizer is None or not (folder / "tokenizer.json").is_file():
        return
    own = Tokenizer.from_directory(folder)
    first = None if own is None else compare(target.tokenizer, own)
    if own is None or first is None:
        return
    ours, theirs = (repr(t[first]) if first < len(t) else "none" for t in (target.tokenizer.tokens(), own.tokens()))
    raise InputError(
        f"{folder}: the drafter's tokenizer has other tokens than that of {target.name!r}: they differ first at token "
        f"id {first} ({theirs} and {ours}); use a drafter that was made for this target"
    )
