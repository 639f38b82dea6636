"""The target's features over training rows: computed where they are used, or once and kept on disk.

A feature is `[B, T, M]` at every token of a batch, named as in `models.interface.Output`. `online` computes them inside
the compiled training step, where they never leave the device: right where the target is fast. Training for several
epochs on a slow device reads the same features again and again: `store` computes them once, row by row, and `Stored`
reads them back by the numbers of the rows. Features are large (at width 4096 and four features a token takes 32 KiB in
bfloat16), so their size is estimated before anything is computed, and refused where it is over the budget.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.errors import InputError, SpecjaxError
from specjax.models.interface import TargetModel
from specjax.training.batches import Batch, Rows

MANIFEST = "features.json"
SHARD_ROWS = 32  # rows of a file; what a killed run computes again is at most that much
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def segment_mask(segments: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """What each token of packed rows sees: those of its own conversation up to itself (padding: of the padding)."""
    size = segments.shape[1]
    return (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((size, size), bool))


def online(model: TargetModel, batch: Batch, names: Sequence[str]) -> dict[str, Float[Array, "B T M"]]:
    """The features of a batch, in one pass of the frozen target."""
    tokens, positions, segments = (jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segments))
    output = model(tokens, positions, segment_mask(segments), features=tuple(names))
    return {name: jax.lax.stop_gradient(value) for name, value in output.features.items()}


@dataclass(frozen=True)
class Stored:
    """Features on disk. A callable: `stored(batch.rows)` gives them for a batch.

    Attributes:
        directory: where they are.
        names, widths: of the features, which lie one after the other on the last axis.
        dtype: "bfloat16" or "float32".
        num_rows, length: how many rows, of how many tokens.
        fingerprint: of the rows (`Rows.fingerprint`) and of the target, which must be those of the training.
    """

    directory: Path
    names: tuple[str, ...]
    widths: tuple[int, ...]
    dtype: str
    num_rows: int
    length: int
    fingerprint: str

    def __call__(self, rows: Int[np.ndarray, "B"]) -> dict[str, Float[np.ndarray, "B T M"]]:
        """The features of these rows, zeros for filler rows (-1)."""
        out = np.zeros((len(rows), self.length, sum(self.widths)), DTYPES[self.dtype])
        for place, row in enumerate(np.asarray(rows).tolist()):
            if row >= 0:
                out[place] = self._shard(row // SHARD_ROWS)[row % SHARD_ROWS]
        parts = np.split(out, np.cumsum(self.widths)[:-1], axis=-1)
        return dict(zip(self.names, parts, strict=True))

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.length * sum(self.widths) * np.dtype(DTYPES[self.dtype]).itemsize

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // SHARD_ROWS)

    def path(self, shard: int) -> Path:
        return self.directory / f"{shard:05d}.npy"

    def _shard(self, shard: int) -> np.ndarray:
        # numpy's files know no bfloat16: its bits are kept as 16-bit integers
        return np.load(self.path(shard), mmap_mode="r").view(DTYPES[self.dtype])


def store(
    model: TargetModel,
    rows: Rows,
    names: Sequence[str],
    directory: Path,
    fingerprint: str,
    dtype: str = "bfloat16",
    batch_size: int = 4,
    budget_bytes: int = 20 * 2**30,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Stored:
    """Compute the features of all rows, or what is missing of them.

    Args:
        model: the target.
        rows: all of one length.
        names: the features.
        directory: made where it is missing; one that holds features of the same rows and target, these among them, is
            continued.
        fingerprint: what tells this target from others.
        dtype: of the numbers on disk.
        batch_size: rows in a pass.
        budget_bytes: the most that may be on disk.
        progress: told how many rows of how many are done.

    Raises:
        InputError: over the budget or over the free space, or a directory with features of something else.
    """
    if dtype not in DTYPES:
        raise InputError(f"features of dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    if len(lengths := set(rows.lengths)) != 1:
        raise InputError(
            f"features are stored for rows of one length; these have {sorted(lengths)} (leave out buckets)"
        )
    length = rows.lengths[0]
    plain = _empty(length, batch_size)
    shapes = jax.eval_shape(lambda model, batch: online(model, batch, names), model, plain)
    widths = tuple(shapes[name].shape[-1] for name in names)
    stored = Stored(directory, tuple(names), widths, dtype, len(rows), length, f"{rows.fingerprint}-{fingerprint}")
    _reserve(stored, budget_bytes)
    stored = _claim(stored)
    program = jax.jit(lambda model, batch: jnp.concatenate([*online(model, batch, stored.names).values()], axis=-1))
    for shard in range(stored.num_shards):
        numbers = list(range(shard * SHARD_ROWS, min((shard + 1) * SHARD_ROWS, len(rows))))
        if not stored.path(shard).exists():
            parts = []
            for start in range(0, len(numbers), batch_size):
                chosen = numbers[start : start + batch_size]
                batch = rows.batch([*chosen, *[-1] * (batch_size - len(chosen))])
                parts.append(np.asarray(program(model, batch)[: len(chosen)].astype(dtype)))
                progress(chosen[-1] + 1, len(rows))
            _write(stored.path(shard), np.concatenate(parts))
        progress(numbers[-1] + 1, len(rows))
    return stored


def _empty(length: int, batch_size: int) -> Batch:
    zeros = np.zeros((batch_size, length), np.int32)
    return Batch(zeros, zeros.astype(bool), zeros, zeros, np.full(batch_size, -1, np.int32))


def _reserve(stored: Stored, budget: int) -> None:
    """Raise InputError unless all of it may and can be stored."""
    size, what = (
        stored.num_bytes,
        f"{stored.num_rows:,} rows of {stored.length} tokens, {sum(stored.widths)} numbers each",
    )
    advice = "raise it, use fewer conversations, or compute features online"
    if size > budget:
        raise InputError(f"features would take {_gib(size)} ({what}), more than the budget of {_gib(budget)}; {advice}")
    stored.directory.mkdir(parents=True, exist_ok=True)
    missing = sum(not stored.path(shard).exists() for shard in range(stored.num_shards)) / stored.num_shards
    free = shutil.disk_usage(stored.directory).free
    if size * missing > free:
        raise InputError(f"features would take {_gib(size)} ({what}), and {stored.directory} has {_gib(free)} free")


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"


def _claim(stored: Stored) -> Stored:
    """Write the manifest, or compare it with the one that is there, which may have further features."""
    path = stored.directory / MANIFEST
    described: dict[str, Any] = json.loads(json.dumps(asdict(stored) | {"directory": "."}))
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(described, indent=1))
        os.replace(temporary, path)
        return stored
    found = json.loads(path.read_text())
    if set(stored.names) <= set(found["names"]):
        described |= {"names": found["names"], "widths": found["widths"]}
    differs = [key for key in described if found.get(key) != described[key]]
    if differs:
        key = differs[0]
        raise InputError(
            f"{stored.directory} holds other features: {key} is {found.get(key)!r} there and {described[key]!r} "
            "here; give another directory, or remove it"
        )
    return replace(stored, names=tuple(found["names"]), widths=tuple(found["widths"]))


def _write(path: Path, values: np.ndarray) -> None:
    """Write a shard beside its place and rename it: what has the name is whole."""
    temporary = path.with_suffix(".tmp")
    bits = values.view(np.uint16) if values.dtype == ml_dtypes.bfloat16 else values
    try:
        with temporary.open("wb") as file:
            np.save(file, bits)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise SpecjaxError(
            f"cannot write features to {path}: {error.strerror}; what was stored before is kept, start again with room"
        ) from error
    os.replace(temporary, path)
