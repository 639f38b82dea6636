"""Where parameters live: one table from logical axis names, declared where the parameter is, to the axes of a mesh."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RULES: dict[str, tuple[str, ...]] = {
    "model": ("fsdp",),
    "vocab": ("tensor",),
    "kv_heads": ("tensor",),
    "ffw": ("tensor",),
    "experts": (),
    "batch": ("data", "fsdp"),
}


def spec(shape: tuple[int, ...], axes: tuple[str | None, ...], mesh: Mesh) -> PartitionSpec:
    """The mesh axes of an array; an axis that does not divide evenly stays whole."""
    parts: list[Any] = []
    for size, axis in zip(shape, axes, strict=True):
        names = tuple(n for n in RULES.get(axis or "", ()) if n in mesh.shape)
        split = int(np.prod([mesh.shape[n] for n in names])) if names else 1
        parts.append(names if split > 1 and size % split == 0 else None)
    return PartitionSpec(*parts)


def place(value: np.ndarray, dtype: Any, axes: tuple[str | None, ...], mesh: Mesh | None) -> jax.Array:
    """Cast and put on the device, or over the mesh."""
    if mesh is None:
        return jnp.asarray(value, dtype)
    # `jax.make_mesh` gives explicit axes by default; here the compiler finds the shardings in between (automatic axes)
    sharding = NamedSharding(Mesh(mesh.devices, mesh.axis_names), spec(value.shape, axes, mesh))
    return jax.device_put(np.asarray(value).astype(jnp.dtype(dtype)), sharding)


def over_mesh(model: Any, rows: Any) -> Any:
    """Batch arrays `[B, …]` split over the mesh that the model's weights lie on; as they are where there is none.

    What decoding makes of them, the cache too, is split alike by the compiler.
    """
    placed = next((x.sharding for x in jax.tree.leaves(model) if isinstance(x.sharding, NamedSharding)), None)
    if placed is None:
        return rows
    mesh = cast(Mesh, placed.mesh)

    def split(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.ndim == 0:
            return x
        axes = ("batch", *[None] * (x.ndim - 1))
        return jax.device_put(x, NamedSharding(mesh, spec(x.shape, axes, mesh)))

    return jax.tree.map(split, rows)
