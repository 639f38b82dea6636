"""What changes while training, as one frozen pytree, and the way from a network to it and back.

Parameters and buffers are flat dictionaries, from the path in the network ("layers.0.qkv") to the array: the names that
optimizers, checkpoints and placements go by.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of a run. The position in the data is the other half; checkpoints hold both.

    Attributes:
        step: optimizer steps done.
        params: what is trained, float32.
        buffers: what else the network holds (a draft vocabulary, say); never changed.
        optimizer: the optimizer's state.
        key: of the run. A step folds its number into it, so no state of a generator has to be carried along.
    """

    step: Int[Array, ""]
    params: dict[str, Array]
    buffers: dict[str, Array]
    optimizer: Any
    key: Array


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A network without its arrays: `network = skeleton.network(params, buffers)`, inside `jax.jit` too."""

    graph: Any
    variables: dict[str, tuple[tuple[Any, ...], Any]]  # name -> path in the network, kind of variable

    def network(self, params: Mapping[str, Array], buffers: Mapping[str, Array]) -> nnx.Module:
        """The network with these arrays in it."""
        values = {**params, **buffers}
        leaves = [(path, values[name] if kind is None else kind(values[name])) for name, (path, kind) in self.items()]
        return nnx.merge(self.graph, nnx.from_flat_state(leaves))

    def items(self) -> Any:
        return self.variables.items()


def take_apart(network: nnx.Module) -> tuple[Skeleton, dict[str, Array], dict[str, Array]]:
    """A network's skeleton, parameters and buffers. The arrays are the network's own, not copies."""
    graph, state = nnx.split(network)
    params: dict[str, Array] = {}
    buffers: dict[str, Array] = {}
    variables: dict[str, tuple[tuple[Any, ...], Any]] = {}
    for path, leaf in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        variable = isinstance(leaf, nnx.Variable)
        (params if isinstance(leaf, nnx.Param) else buffers)[name] = leaf[...] if variable else leaf
        variables[name] = (path, type(leaf) if variable else None)
    return Skeleton(graph, variables), params, buffers


def likely_dtype() -> str:
    """The dtype to compute in: bfloat16 where the device multiplies it faster than float32, as GPUs, TPUs and CPUs with
    instructions for it do.
    """
    if jax.default_backend() != "cpu":
        return "bfloat16"
    processor = Path("/proc/cpuinfo")
    flags = processor.read_text() if processor.exists() else ""
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


def cast(params: Mapping[str, Array], dtype: Any) -> dict[str, Array]:
    """Parameters in the dtype of the computation; whole numbers stay as they are."""
    return {name: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for name, x in params.items()}


def make_state(params: Mapping[str, Array], buffers: Mapping[str, Array], optimizer: Any, seed: int) -> TrainState:
    """The state before the first step, in arrays of its own: a step takes its state's memory, and the caller's network
    must survive that.
    """
    masters = {name: jnp.array(x, jnp.float32, copy=True) for name, x in params.items()}
    kept = {name: jnp.array(x, copy=True) for name, x in buffers.items()}
    return TrainState(jnp.zeros((), jnp.int32), masters, kept, optimizer.init(masters), jax.random.key(seed))
