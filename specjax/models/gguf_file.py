"""The container: a GGUF file's header, and its tensors dequantised to float32."""

import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from specjax.errors import CheckpointError


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies.

    Attributes:
        shape: in NumPy's order, rows first.
        kind: how its values are stored.
        offset, nbytes: in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """An open GGUF file: its metadata as plain Python values, and where its tensors lie."""

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data: memoryview

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """One tensor, or one entry of its first axis, as float32."""
        tensor = self.tensors[name]
        shape, offset, nbytes = tensor.shape, tensor.offset, tensor.nbytes
        if index is not None:
            nbytes //= shape[0]
            offset, shape = offset + index * nbytes, shape[1:]
        block, size = GGML_QUANT_SIZES[tensor.kind]
        stored = np.frombuffer(self.data, np.uint8, nbytes, offset).reshape(*shape[:-1], shape[-1] // block * size)
        return np.asarray(dequantize(stored, tensor.kind), np.float32).reshape(shape)


def open_gguf(path: str | Path) -> GgufFile:
    """Read a file's header (version 2 or 3) and check that every tensor lies inside the file and can be dequantised.

    The `gguf` package has a reader too, which makes an array of every word of the vocabulary (seconds for a large
    one) and fails inside NumPy on a damaged file; this one names the tensor.

    Raises:
        CheckpointError: not a GGUF file, truncated, or of a version or quantisation that is not known.
    """
    path = str(path)
    try:
        with open(path, "rb") as f:
            magic = f.read(4)
            if magic != b"GGUF":
                raise CheckpointError(f"{path}: not a GGUF file (it begins with {magic!r}, not b'GGUF')")
            data = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        header = _Header(data)
    except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise CheckpointError(
            f"{path}: truncated or damaged: its header does not end within its {len(data)} bytes; download it again"
        ) from error
    except _HeaderError as error:
        raise CheckpointError(f"{path}: {error}") from None
    cut = [t.name for t in header.tensors.values() if t.offset + t.nbytes > len(data)]
    if cut:
        end = max(t.offset + t.nbytes for t in header.tensors.values())
        raise CheckpointError(
            f"{path}: truncated: it has {len(data)} bytes of {end}; incomplete tensors: {some(cut)}; download it again"
        )
    for kind in {t.kind for t in header.tensors.values()}:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            names = [t.name for t in header.tensors.values() if t.kind == kind]
            raise CheckpointError(f"{path}: quantisation {kind.name} is not supported; used by {some(names)}") from None
    return GgufFile(path, header.metadata, header.tensors, data)


def some(names: Iterable[str], count: int = 4) -> str:
    """The first few of many names."""
    names = list(names)
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" and {rest} more" if rest > 0 else "")


class _HeaderError(Exception):
    """A header that says something this reader does not understand."""


_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_MAX_DIMENSIONS = 4


class _Header:
    """Metadata and tensor table, read front to back."""

    def __init__(self, data: memoryview):
        self.data, self.position = data, 4
        version = self.number("<I")
        if version not in (2, 3):
            order = " (or a big-endian file)" if version & 0xFFFF == 0 else ""
            raise _HeaderError(f"GGUF version {version}{order} is not supported; expected 2 or 3, little-endian")
        num_tensors, num_keys = self.number("<Q"), self.number("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.text()
            self.metadata[key] = self.value(self.number("<I"))
        table = [self.entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise _HeaderError(f"general.alignment is {alignment!r}; expected a positive integer")
        start = math.ceil(self.position / alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, number, offset in table:
            if name in self.tensors:
                raise _HeaderError(f"tensor {name} appears twice")
            try:
                kind = GGMLQuantizationType(number)
            except ValueError:
                raise _HeaderError(f"tensor {name} has an unknown quantisation, type number {number}") from None
            block, size = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise _HeaderError(
                    f"tensor {name} has rows of {shape[-1]} values; {kind.name} needs multiples of {block}"
                )
            self.tensors[name] = GgufTensor(name, shape, kind, start + offset, math.prod(shape) // block * size)

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.data, self.position)
        self.position += struct.calcsize(code)
        return value

    def text(self) -> str:
        length = self.number("<Q")
        self.room(length)
        value = str(self.data[self.position : self.position + length], "utf-8")
        self.position += length
        return value

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _FLOAT32:
            return float(str(np.float32(self.number("<f"))))  # 1e-05, not 9.999999747378752e-06
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise _HeaderError(f"metadata of unknown type {kind}: the header is damaged")
        inner, count = self.number("<I"), self.number("<Q")
        self.room(count)
        if inner not in _SCALARS:
            return [self.value(inner) for _ in range(count)]
        values = list(struct.unpack_from(f"<{count}{_SCALARS[inner][1]}", self.data, self.position))
        self.position += struct.calcsize(_SCALARS[inner]) * count
        return values

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type number, offset."""
        name, dims = self.text(), self.number("<I")
        if not 0 < dims <= _MAX_DIMENSIONS:
            raise _HeaderError(f"tensor {name} has {dims} dimensions: the header is damaged")
        shape = tuple(self.number("<Q") for _ in range(dims))[::-1]
        return name, shape, self.number("<I"), self.number("<Q")

    def room(self, length: int) -> None:
        """A length beyond the end of the file is not worth allocating."""
        if length > len(self.data) - self.position:
            raise struct.error
