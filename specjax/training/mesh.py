"""Training over many devices: the mesh, and where batches, parameters and the optimizer's state lie on it.

Nothing else knows of devices: the compiled step is the same program on one of them and on many, and XLA puts the sums
over devices where the placement asks for them. Processes (`jax.distributed`) each hold their own devices of one mesh.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from specjax.errors import InputError
from specjax.models.sharding import spec
from specjax.training.state import take_apart

AXES = ("data", "fsdp", "tensor")
Axes = tuple[str | None, ...]


def parse_mesh(text: str, devices: Any = None) -> Mesh:
    """The mesh that `--mesh data=4,fsdp=2` asks for.

    Args:
        text: sizes of "data" (batches split), "fsdp" (batches and parameters) and "tensor" (parameters), in any order;
            those left out are 1.
        devices: default: all of them, of all processes, and their number must be the product of the sizes.

    Raises:
        InputError: not such a text, or another number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, size = (p.strip() for p in part.partition("="))
        if name not in AXES or name in sizes or not size.isascii() or not size.isdecimal() or int(size) < 1:
            raise InputError(f"mesh {text!r}: expected sizes of {', '.join(AXES)}, like data=4,fsdp=2")
        sizes[name] = int(size)
    shape = tuple(sizes.get(name, 1) for name in AXES)
    if not sizes or math.prod(shape) != len(devices):
        raise InputError(f"mesh {text!r}: {math.prod(shape)} devices; there are {len(devices)}")
    # devices come process by process, so the axes that split batches come first: a process reads rows that lie together
    return Mesh(np.asarray(devices).reshape(shape), AXES)


def check_mesh(mesh: Mesh | None, batch_size: int, accumulation: int) -> None:
    """Raise InputError unless the rows of a micro-batch can be dealt out evenly."""
    ways, processes = batch_ways(mesh), jax.process_count()
    if mesh is None and processes > 1:
        raise InputError(f"{processes} processes: expected a mesh of all their devices, like data={len(jax.devices())}")
    if batch_size % (accumulation * ways):
        over = f" and {ways} devices that batches are split over" if ways > 1 else ""
        raise InputError(
            f"batch size {batch_size}: expected a multiple of {accumulation * ways}, accumulation {accumulation}{over}"
        )
    if ways % processes:
        raise InputError(
            f"mesh: batches are split {ways} ways (data × fsdp) over {processes} processes; expected a multiple"
        )


def batch_ways(mesh: Mesh | None) -> int:
    """How many parts a batch is split into."""
    return 1 if mesh is None else math.prod(mesh.shape.get(name, 1) for name in ("data", "fsdp"))


def place_batch(mesh: Mesh | None, micro_batches: Any) -> Any:
    """Arrays `[A, B, …]` on the devices, B split over the mesh. Each process gives its own rows."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, micro_batches)

    def place(x: np.ndarray) -> jax.Array:
        axes = (None, "batch", *[None] * (x.ndim - 2))
        whole = (x.shape[0], x.shape[1] * jax.process_count(), *x.shape[2:])
        return jax.make_array_from_process_local_data(NamedSharding(mesh, spec(whole, axes, mesh)), x, whole)

    return jax.tree.map(place, micro_batches)


def place_model(mesh: Mesh | None, model: Any) -> Any:
    """A target on the mesh. What lies there already stays; what has no declared axes is whole on every device."""
    if mesh is None:
        return model
    if not isinstance(model, nnx.Module):
        return jax.tree.map(lambda x: _put(x, NamedSharding(mesh, PartitionSpec())), model)
    skeleton, params, buffers = take_apart(model)
    axes = declared_axes(model)
    return skeleton.network(place_arrays(mesh, params, axes), place_arrays(mesh, buffers, axes))


def place_arrays(mesh: Mesh | None, arrays: Mapping[str, Any], axes: Mapping[str, Axes]) -> dict[str, Any]:
    """Parameters or buffers on the mesh, by their axes."""
    if mesh is None:
        return dict(arrays)
    where = shardings(mesh, arrays, axes)
    return {name: _put(x, where[name]) for name, x in arrays.items()}


def place_state(mesh: Mesh | None, state: Any, axes: Mapping[str, Axes]) -> Any:
    """A `TrainState` on the mesh: parameters by their axes, and what the optimizer keeps of one beside it."""
    if mesh is None:
        return state
    params = shardings(mesh, state.params, axes)

    def place(path: Any, leaf: Any) -> Any:
        # the optimizer's arrays have their parameter's name at the end of their path, and its shape
        name = str(getattr(path[-1], "key", "")) if path else ""
        beside = name in params and jnp.shape(leaf) == state.params[name].shape
        return _put(leaf, params[name] if beside else NamedSharding(mesh, PartitionSpec()))

    return jax.tree_util.tree_map_with_path(place, state)


def gathering(arrays: Any) -> Callable[[Any], Any]:
    """What a compiled program does with weights before it uses them: bring the parts on the "fsdp" axis together.

    Left to itself, the compiler may move the activations to the parts of the weights instead, which are much larger.
    The gradient goes the other way: summed, and each device keeps its part.
    """

    def whole(sharding: Sharding) -> Sharding:
        if not isinstance(sharding, NamedSharding):
            return sharding
        parts = [(part,) if isinstance(part, str) else part or () for part in sharding.spec]
        kept = [tuple(name for name in part if name != "fsdp") for part in parts]
        return NamedSharding(sharding.mesh, PartitionSpec(*(part or None for part in kept)))

    where = jax.tree.map(lambda x: whole(x.sharding), arrays)
    if not any(isinstance(x, NamedSharding) for x in jax.tree.leaves(where)):
        return lambda values: values
    return lambda values: jax.lax.with_sharding_constraint(values, where)


def shardings(mesh: Mesh, arrays: Mapping[str, Any], axes: Mapping[str, Axes]) -> dict[str, Sharding]:
    """Where parameters lie, by their logical axes; those without any are whole on every device."""
    whole = NamedSharding(mesh, PartitionSpec())
    return {
        name: NamedSharding(mesh, spec(x.shape, axes[name], mesh)) if name in axes else whole
        for name, x in arrays.items()
    }


def declared_axes(network: nnx.Module) -> dict[str, Axes]:
    """The logical axes of a network's parameters, by name.

    A module built by `Module(config, make, …)` says them to `make`, so it is built once more out of shapes alone. Other
    arguments of its constructor are taken from the buffers of the same name. Modules made of such modules are searched.
    """
    wanted = list(inspect.signature(type(network).__init__).parameters)[1:]
    if wanted[:2] == ["config", "make"] and hasattr(network, "config"):
        told: dict[int, tuple[Any, Axes]] = {}

        def make(name: str, shape: tuple[int, ...], axes: Axes) -> Any:
            made = jax.ShapeDtypeStruct(shape, jnp.float32)
            told[id(made)] = (made, axes)
            return made

        rest = {name: _whole(getattr(network, name)) for name in wanted[2:] if hasattr(network, name)}
        build: Any = type(network)
        built = build(network.config, make, **rest)
        leaves = nnx.to_flat_state(nnx.state(built))
        return {_name(path): told[id(_value(leaf))][1] for path, leaf in leaves if id(_value(leaf)) in told}
    found: dict[str, Axes] = {}
    for key, child in nnx.iter_children(network):
        if isinstance(child, nnx.Module):
            found |= {f"{key}.{name}": axes for name, axes in declared_axes(child).items()}
    return found


def _whole(buffer: Any) -> np.ndarray:
    return np.asarray(_value(buffer))


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _put(x: Any, where: Sharding) -> Any:
    """Onto the devices; those of other processes get the same from their own process."""
    if isinstance(x, jax.Array) and (x.sharding == where or not x.is_fully_addressable):
        return jax.device_put(x, where)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_put(jax.random.key_data(x), where), impl=jax.random.key_impl(x))
    return jax.device_put(np.asarray(x), where)
