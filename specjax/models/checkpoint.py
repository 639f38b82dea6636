"""Checkpoints in a Hugging Face directory: `config.json` and safetensors, in and out.

Everything that can be wrong with a checkpoint is found from the configuration and the files' headers, before any
weight is read.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from specjax.errors import CheckpointError
from specjax.models.config import ModelConfig
from specjax.models.files import (
    CONFIG,
    DTYPES,
    INDEX,
    WEIGHTS,
    compare_shapes,
    one_line,
    open_safetensors,
    pickles,
    read_json,
    replace_files,
    safetensors_files,
)
from specjax.models.layout import EMBED, HEAD, MTP_LAYERS, recipes


def read_hf_directory(path: str | os.PathLike[str]) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Read a directory as `save_pretrained` writes it: one or several safetensors files.

    Returns:
        The configuration, and the decoder's parameters by path in the checkpoint's own dtype (bfloat16 through
        ml_dtypes).

    Raises:
        CheckpointError: a missing, truncated or pickled file, an unsupported configuration, missing or unexpected
            tensors, a wrong shape or dtype; the message names the file and the tensors.
    """
    folder = Path(path)
    config = read_hf_config(folder)
    with ExitStack() as stack:
        tensors = _Tensors(
            [stack.enter_context(open_safetensors(file)) for file in _weight_files(folder)], folder, config
        )
        return config, assemble(config, tensors.read)


def read_hf_config(path: str | os.PathLike[str]) -> ModelConfig:
    """The configuration alone."""
    file = Path(path) / CONFIG
    return ModelConfig.from_hf(read_json(file), str(file))


def assemble(config: ModelConfig, read: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    """Build our parameters from tensors under their Hugging Face names, one parameter at a time."""
    return {
        path: np.ascontiguousarray(recipe.join([read(name) for name in recipe.sources]))
        for path, recipe in recipes(config).items()
    }


def write_hf_directory(
    path: str | os.PathLike[str], config: ModelConfig, arrays: Mapping[str, Any], **extra: Any
) -> None:
    """Write `config.json` and `model.safetensors`, readable by transformers and by `read_hf_directory`.

    Both files are written beside their place and renamed, so that an interrupted or failed save leaves the old
    checkpoint (or nothing) behind.

    Args:
        path: the directory, made if need be; other files in it stay.
        config: of the model.
        arrays: the decoder's parameters by path (NumPy or JAX), stored in their own dtype.
        extra: further keys for `config.json`.

    Raises:
        CheckpointError: parameters that do not fit the configuration, or a directory that cannot be written.
    """
    folder, table = Path(path), recipes(config)
    shapes = {name: tuple(value.shape) for name, value in arrays.items()}
    compare_shapes(str(folder), shapes, {name: recipe.shape for name, recipe in table.items()}, "parameter")
    tensors: dict[str, np.ndarray] = {}
    for name, recipe in table.items():
        parts = recipe.split(np.asarray(arrays[name]))
        tensors |= zip(recipe.sources, map(np.ascontiguousarray, parts), strict=True)
    text = json.dumps(config.to_hf() | {"dtype": str(tensors[EMBED].dtype)} | extra, indent=2) + "\n"
    # transformers asks for the "format" note
    replace_files(
        folder,
        {
            WEIGHTS: lambda file: save_file(tensors, file, metadata={"format": "pt"}),
            CONFIG: lambda file: file.write_text(text, encoding="utf-8"),
        },
    )


class _Tensors:
    """The tensors of open safetensors files under their plain names, checked against a configuration."""

    def __init__(self, files: list[Any], folder: Path, config: ModelConfig):
        self.where: dict[str, tuple[Any, str]] = {}
        for file in files:
            for stored in file.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
                name = _plain_name(stored, config)
                if name is not None:
                    self.where[name] = (file, stored)
        self.folder = str(folder)
        expected = {name: shape for recipe in recipes(config).values() for name, shape in recipe.sources.items()}
        spare = None
        if config.tie_embeddings and EMBED not in self.where and HEAD in self.where:
            self.where[EMBED] = self.where.pop(HEAD)  # saved without duplicates: either name may be the one kept
        elif config.tie_embeddings and HEAD in self.where:
            spare = self.where.pop(HEAD)
        headers = {name: file.get_slice(stored) for name, (file, stored) in self.where.items()}
        compare_shapes(self.folder, {n: tuple(h.get_shape()) for n, h in headers.items()}, expected)
        strange = {n: h.get_dtype() for n, h in headers.items() if h.get_dtype() not in DTYPES}
        if strange:
            name, dtype = next(iter(strange.items()))
            raise CheckpointError(f"{self.folder}: tensor {name} is {dtype}, expected {', '.join(DTYPES)}")
        if spare is not None:
            self._compare_head(*spare)

    def read(self, name: str) -> np.ndarray:
        file, stored = self.where[name]
        try:
            return file.get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder}: cannot read tensor {stored}: {one_line(error)}") from error

    def _compare_head(self, file: Any, stored: str) -> None:
        """A tied model reads its embeddings as its head; say so where the file has another one."""
        if not np.array_equal(file.get_tensor(stored), self.read(EMBED)):
            warnings.warn(
                f"{self.folder}: tie_word_embeddings is true, so the different {stored} in the file is not used; "
                "set it to false in config.json to use it",
                stacklevel=2,
            )


def _plain_name(stored: str, config: ModelConfig) -> str | None:
    """The tensor's name in a text-only checkpoint; None for tensors that are no part of the text model."""
    if stored.endswith("rotary_emb.inv_freq"):  # a buffer that old checkpoints carry
        return None
    if stored.startswith(MTP_LAYERS):  # a drafter's
        return None
    if config.family != "gemma3":
        return stored
    # multimodal checkpoints: "language_model.model.x" of transformers 4, "model.language_model.x" of 5
    if stored.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector.")):
        return None
    if stored.startswith("model.language_model."):
        return "model." + stored.removeprefix("model.language_model.")
    return stored.removeprefix("language_model.")


def _weight_files(folder: Path) -> list[Path]:
    if files := safetensors_files(folder):
        return files
    if found := pickles(folder):
        raise CheckpointError(
            f"{folder / found[0]}: a PyTorch pickle can run code when opened and is not read; convert it where you "
            f'trust it: python -c "import transformers as t; [A.from_pretrained({str(folder)!r}).save_pretrained('
            f'{str(folder) + "-safetensors"!r}) for A in (t.AutoModelForCausalLM, t.AutoTokenizer)]"'
        )
    raise CheckpointError(f"{folder}: no {WEIGHTS} and no {INDEX} in this directory")
