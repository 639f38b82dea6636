"""The tensors of a drafter's files, checked by their headers before any weight is read."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from specjax.drafters.stored.layout import LAYER, MIDLAYER
from specjax.errors import CheckpointError
from specjax.models.files import (
    DTYPES,
    INDEX,
    WEIGHTS,
    compare_shapes,
    one_line,
    open_safetensors,
    pickles,
    safetensors_files,
)

_INTEGERS = {"d2t": ("I64", "I32"), "t2d": ("BOOL",)}


@contextmanager
def open_tensors(folder: Path, single: str = WEIGHTS, prefix: str = "") -> Iterator["Tensors"]:
    """The tensors of `single`, or of the shards that an index lists; those alone whose names begin with `prefix`.

    Raises:
        CheckpointError: no safetensors file, or a truncated one.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such directory; expected one with config.json and {single}")
    files = safetensors_files(folder, single)
    if not files:
        raise _no_weights(folder, single)
    with ExitStack() as stack:
        yield Tensors(folder, [stack.enter_context(open_safetensors(file)) for file in files], prefix)


class Tensors:
    """Tensors by name; EAGLE-3's layer may be called "midlayer." or "layers.0.", and "model." may stand before a name.

    Attributes:
        shapes: of all of them, by plain name (`layers.0.…`).
    """

    def __init__(self, folder: Path, files: list[Any], prefix: str = ""):
        self.folder = folder
        self._where: dict[str, tuple[Any, str]] = {}
        for file in files:
            for stored in file.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
                # the other is a buffer that old checkpoints carry
                if not stored.startswith(prefix) or stored.endswith("rotary_emb.inv_freq"):
                    continue
                if plain(stored) in self._where:
                    other = self._where[plain(stored)][1]
                    raise CheckpointError(f"{folder}: tensors {other} and {stored} are two names of one parameter")
                self._where[plain(stored)] = (file, stored)
        self._headers = {name: file.get_slice(stored) for name, (file, stored) in self._where.items()}
        self.shapes = {name: tuple(header.get_shape()) for name, header in self._headers.items()}

    def __contains__(self, name: str) -> bool:
        return plain(name) in self._where

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless these tensors are there and no others, in these shapes and in a number format
        that can be read.
        """
        wanted = {**expected, **{name: shape for name, shape in optional.items() if name in self}}
        if not any(MIDLAYER in stored for _, stored in self._where.values()):  # errors call it what the file does
            wanted = {name.replace(MIDLAYER, LAYER): shape for name, shape in wanted.items()}
        names = {plain(name): name for name in wanted}
        found = {names.get(name, self._where[name][1]): shape for name, shape in self.shapes.items()}
        compare_shapes(str(self.folder), found, wanted)
        for name, header in self._headers.items():
            kinds = _INTEGERS.get(name, DTYPES)
            if header.get_dtype() not in kinds:
                raise CheckpointError(
                    f"{self.folder}: tensor {self._where[name][1]} is {header.get_dtype()}, expected {', '.join(kinds)}"
                )

    def read(self, name: str) -> np.ndarray:
        file, stored = self._where[plain(name)]
        try:
            return file.get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder}: cannot read tensor {stored}: {one_line(error)}") from error


def plain(name: str) -> str:
    """One name for what the forms call differently."""
    name = name.removeprefix("model.")
    return LAYER + name.removeprefix(MIDLAYER) if name.startswith(MIDLAYER) else name


def _no_weights(folder: Path, single: str) -> CheckpointError:
    found = pickles(folder)
    if not found:
        return CheckpointError(f"{folder}: no {single} and no {INDEX} in this directory")
    file, to = str(folder / found[0]), str(folder / single)
    return CheckpointError(
        f"{file}: a PyTorch pickle can run code when opened and is not read; convert it where you trust it: "
        'python -c "import torch, safetensors.torch as s; s.save_file({k: v.clone().contiguous() for k, v in '
        f"torch.load({file!r}, map_location='cpu', weights_only=True).items()}}, {to!r})\""
    )
