"""Where arrays live: one mesh (data, fsdp, tensor) and one table of logical axis rules.

A parameter's logical axes follow from its name (AXES); which mesh axis carries a
logical axis follows from RULES. Training shards parameters over `fsdp` and `tensor`;
decoding uses the same table without `fsdp`, so that a step gathers no weights.
"""

import math

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

# The trailing axes of each parameter; a leading "layers" axis is added where it is
# stacked.
AXES = {
    "embedding": ("vocab", "embed"),
    "unembedding": ("embed", "vocab"),
    "value": ("embed",),
    "scale": ("norm",),
    "q": ("embed", "heads", "head_dim"),
    "k": ("embed", "kv_heads", "head_dim"),
    "v": ("embed", "kv_heads", "head_dim"),
    "o": ("heads", "head_dim", "embed"),
    "q_bias": ("heads", "head_dim"),
    "k_bias": ("kv_heads", "head_dim"),
    "v_bias": ("kv_heads", "head_dim"),
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "gate_up": ("embed", "gate_or_up", "mlp"),
    "down": ("mlp", "embed"),
}

RULES = {
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "layers": None,
    "head_dim": None,
    "gate_or_up": None,
    "norm": None,
}

DECODING_RULES = RULES | {"embed": None}


def make_mesh(*, data=-1, fsdp=1, tensor=1, devices=None) -> Mesh:
    """A mesh over all devices; `data=-1` takes what the other axes leave.

    Raises:
        ValueError: the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    if data == -1:
        data = max(1, len(devices) // (fsdp * tensor))
    sizes = (data, fsdp, tensor)
    if math.prod(sizes) != len(devices):
        raise ValueError(
            f"mesh.data={data} x mesh.fsdp={fsdp} x mesh.tensor={tensor} is "
            f"{math.prod(sizes)}, but there are {len(devices)} devices"
        )
    return Mesh(np.asarray(devices).reshape(sizes), MESH_AXES)


def logical_axes(path, num_dims: int) -> tuple[str, ...]:
    """The logical axes of the parameter at a key path of the tree."""
    name = path[-1].key
    axes = AXES[name]
    return ("layers",) * (num_dims - len(axes)) + axes


def param_specs(params, rules=None):
    """PartitionSpec of each leaf; `params` may hold arrays or ShapeDtypeStructs."""
    rules = RULES if rules is None else rules

    def spec(path, leaf):
        return PartitionSpec(*(rules[a] for a in logical_axes(path, leaf.ndim)))

    return jax.tree_util.tree_map_with_path(spec, params)


def param_shardings(params, mesh: Mesh, rules=None):
    """NamedSharding of each leaf.

    Raises:
        ValueError: an axis is not divisible by the mesh axis that carries it.
    """

    def named(path, leaf, spec):
        for axis, (size, mesh_axis) in enumerate(zip(leaf.shape, spec)):
            if mesh_axis is not None and size % mesh.shape[mesh_axis]:
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise ValueError(
                    f"axis {axis} of parameter {name} has size {size}, not "
                    f"divisible by mesh.{mesh_axis}={mesh.shape[mesh_axis]}"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(named, params, param_specs(params, rules))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows spread over data and fsdp; the other axes whole."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def num_shards(mesh: Mesh) -> int:
    """How many parts `batch_sharding` cuts rows into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())
