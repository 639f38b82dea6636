"""`load`: a target by name, directory, file or Hub id."""

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.errors import CheckpointError, InputError
from specjax.models import default_target
from specjax.models.checkpoint import read_hf_directory
from specjax.models.config import ModelConfig
from specjax.models.decoder import Decoder
from specjax.models.gguf import read_gguf
from specjax.models.gguf_file import open_gguf
from specjax.models.tokenizer import Tokenizer

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, eq=False)
class Target:
    """A model that can be decoded, and what belongs to it.

    Attributes:
        model: the decoder, or anything with its methods.
        tokenizer: None for models that only know token ids.
        name: as it was asked for.
        revision: of a Hub model, the commit that was read.
        dtype: of the weights.
        eos_token_ids: any of them ends a text.
        files: the weights' files.
    """

    model: Any = field(repr=False)  # thousands of lines otherwise
    tokenizer: Tokenizer | None = None
    name: str = ""
    revision: str | None = None
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    files: tuple[Path, ...] = field(default=(), repr=False)

    @cached_property
    def weights_hash(self) -> str:
        """sha256 of the weights' file, or of the files' hashes in the order of their names; "" for a model that came
        from none. The files are read when it is first asked for.
        """
        digests = []
        for file in sorted(self.files):
            with open(file, "rb") as f:
                digests.append(hashlib.file_digest(f, "sha256").hexdigest())
        return "".join(digests) if len(digests) < 2 else hashlib.sha256("".join(digests).encode()).hexdigest()


def load(
    name_or_path: str | os.PathLike[str] | None = default_target.NAME,
    dtype: Any = "float32",
    mesh: Any = None,
    revision: str | None = None,
) -> Target:
    """Load a target.

    Args:
        name_or_path: "smollm2-135m-instruct" or None for the default target (fetched and converted on first use), a
            Hugging Face directory, a `.gguf` file, or the id of a Hub model.
        dtype: of the weights and the computation, "float32", "bfloat16" or "float16".
        mesh: a `jax.sharding.Mesh` to place the weights on; None for the default device.
        revision: branch, tag or commit of a Hub model.

    Raises:
        InputError: an unknown dtype, a default target that cannot be fetched.
        CheckpointError: nothing there, or something that is not a model of a supported family.
    """
    dtype = dtype_name(dtype)
    name = default_target.NAME if name_or_path is None else os.fspath(name_or_path)
    path = Path(name).expanduser()
    # the built-in name means the same everywhere, whatever lies in the working directory
    builtin = name.lower() == default_target.NAME
    local = builtin or path.exists() or _looks_like_a_path(name)
    if local and revision is not None:
        raise InputError(f"revision {revision!r}: only Hub models have revisions, {name!r} is none")
    if builtin:
        return _from_directory(default_target.default_target_directory(), default_target.NAME, dtype, mesh)
    if path.is_dir():
        return _from_directory(path, name, dtype, mesh)
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        folder = path.absolute().parent
        raise CheckpointError(
            f"{name}: a PyTorch pickle can run code when opened and is not read; convert it where you trust it: "
            'python -c "from transformers import AutoModelForCausalLM as A; '
            f"A.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\""
        )
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(path, name, dtype, mesh)
    if path.exists():
        raise CheckpointError(f"{name}: expected a directory with config.json and safetensors, or a .gguf file")
    if local:
        raise CheckpointError(f"{name}: no such file or directory")
    folder, commit = _from_hub(name, revision)
    return _from_directory(folder, name, dtype, mesh, commit)


def _from_directory(path: Path, name: str, dtype: str, mesh: Any, revision: str | None = None) -> Target:
    config, arrays = read_hf_directory(path)
    eos = (*config.eos_token_ids, *_generation_eos(path / "generation_config.json"))
    files = tuple(sorted(path.glob("*.safetensors")))
    tokenizer = Tokenizer.from_directory(path)
    return _target(config, arrays, tokenizer, name, dtype, mesh, revision=revision, eos=eos, files=files)


def _from_gguf(path: Path, name: str, dtype: str, mesh: Any) -> Target:
    file = open_gguf(path)
    has_tokenizer = "tokenizer.ggml.model" in file.metadata
    tokenizer = Tokenizer.from_gguf(file) if has_tokenizer else None
    config, arrays = read_gguf(file)
    return _target(config, arrays, tokenizer, name, dtype, mesh, eos=config.eos_token_ids, files=(path,))


def _target(
    config: ModelConfig,
    arrays: dict[str, np.ndarray],
    tokenizer: Tokenizer | None,
    name: str,
    dtype: str,
    mesh: Any,
    *,
    eos: tuple[int, ...],
    files: tuple[Path, ...],
    revision: str | None = None,
) -> Target:
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{name}: the tokenizer has {tokenizer.vocab_size} ids, the model's vocabulary {config.vocab_size}: "
            "they do not belong together"
        )
    eos = tuple(dict.fromkeys(eos))
    if wrong := [i for i in eos if i >= config.vocab_size]:
        raise CheckpointError(f"{name}: eos_token_id {wrong[0]} is outside the vocabulary of {config.vocab_size}")
    model = Decoder.from_arrays(config, arrays, dtype=jnp.dtype(dtype), mesh=mesh)
    return Target(model, tokenizer, name, revision, dtype, eos, files)


def _generation_eos(file: Path) -> tuple[int, ...]:
    """End-of-text ids of `generation_config.json`, where chat models list more of them than in config.json."""
    if not file.is_file():
        return ()
    try:
        ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        raise CheckpointError(f"{file}: cannot be read as a JSON object") from None
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise CheckpointError(f"{file}: eos_token_id is {ids!r}; expected a token id or a list of them")
    return tuple(ids)


def dtype_name(dtype: Any) -> str:
    """One of DTYPES, however it was given; raises InputError for others."""
    try:
        name = str(jnp.dtype(dtype).name)
    except TypeError:
        name = ""
    if name not in DTYPES:
        raise InputError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    return name


def _looks_like_a_path(name: str) -> bool:
    """A Hub id is `name` or `owner/name`; everything else can only be meant as a path."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) is None or name.endswith(".gguf")


def _from_hub(name: str, revision: str | None) -> tuple[Path, str | None]:
    """Download a model's configuration, safetensors and tokenizer; returns the folder and the commit."""
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
    extras = ["*/*", "consolidated*"]  # other formats in subfolders, and Mistral's second copy of the weights
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=extras))
    except Exception as error:  # the client raises its own, the HTTP library's and the system's exceptions
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{name!r}: no such directory, not the built-in {default_target.NAME!r}, and not to be had from the Hub"
            f"{'' if revision is None else f' at revision {revision!r}'} ({type(error).__name__}: {reason})"
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{name!r}: this Hub model has no safetensors files, and pickles are not read")
    # the client keeps a snapshot in a folder named after its commit
    return folder, folder.name if re.fullmatch(r"[0-9a-f]{40}", folder.name) else None
