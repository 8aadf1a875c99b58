"""Sharding: one mesh (data, fsdp, tensor) and one table of logical axis rules.

AXES gives the logical axes of a parameter by its name, and RULES the mesh axis over
which a logical axis is sharded. Training shards parameters over `fsdp` and `tensor`;
decoding uses the same table without `fsdp`, so that a decoding step gathers no weights.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

# The input axes and the output axes of each matrix of a layer.
MATRIX_AXES = {
    "q": (("embed",), ("heads", "head_dim")),
    "k": (("embed",), ("kv_heads", "head_dim")),
    "v": (("embed",), ("kv_heads", "head_dim")),
    "o": (("heads", "head_dim"), ("embed",)),
    "gate": (("embed",), ("mlp",)),
    "up": (("embed",), ("mlp",)),
    "down": (("mlp",), ("embed",)),
}

# The trailing axes of each parameter; a stacked parameter also has a leading "layers"
# axis.
AXES = {
    "embedding": ("vocab", "embed"),
    "unembedding": ("embed", "vocab"),
    "value": ("embed",),
    "scale": ("norm",),
    "q_bias": ("heads", "head_dim"),
    "k_bias": ("kv_heads", "head_dim"),
    "v_bias": ("kv_heads", "head_dim"),
    "gate_up": ("embed", "gate_or_up", "mlp"),
}
for _name, (_reads, _writes) in MATRIX_AXES.items():
    AXES[_name] = (*_reads, *_writes)
    # Steps of 8-bit kernels; see rsearch/models/unstacked.py.
    AXES[f"{_name}_step"] = _writes
    # Adapters; see rsearch/models/lora.py.
    AXES[f"{_name}_a"] = (*_reads, "rank")
    AXES[f"{_name}_b"] = ("rank", *_writes)

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
    "rank": None,
}

DECODING_RULES = RULES | {"embed": None}


def make_mesh(
    *,
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Make a mesh over all devices; `data=-1` takes those left by the other axes.

    Args:
        data, fsdp, tensor: sizes of the axes.
        devices: devices to lay out; None means all devices, sorted by host.

    Raises:
        ValueError: the product of the axes is not the number of devices.
    """
    if devices is None:
        devices = all_devices()
    if data == -1:
        data = max(1, len(devices) // (fsdp * tensor))
    sizes = (data, fsdp, tensor)
    if math.prod(sizes) != len(devices):
        raise ValueError(
            f"mesh.data={data} x mesh.fsdp={fsdp} x mesh.tensor={tensor} is "
            f"{math.prod(sizes)}, but there are {len(devices)} devices"
        )
    return Mesh(np.asarray(devices).reshape(sizes), MESH_AXES)


def all_devices() -> list[jax.Device]:
    """Return the devices of all hosts, sorted by host."""
    # A host's devices are adjacent, so that `own_mesh` takes full rows.
    return sorted(jax.devices(), key=lambda d: (d.process_index, d.id))


def own_mesh(mesh: Mesh, host: int | None = None) -> Mesh:
    """Return the submesh of one host's devices, for rollouts on that host alone.

    Args:
        mesh: mesh over the devices of all hosts.
        host: number of the host; None means this one.

    Raises:
        ValueError: the tensor axis spans several hosts.
    """
    host_index = jax.process_index() if host is None else host
    tensor = mesh.shape["tensor"]
    owners = [d.process_index for d in mesh.devices.flat]
    if set(owners) == {host_index}:
        return mesh
    local_devices = [
        d for d, owner in zip(mesh.devices.flat, owners) if owner == host_index
    ]
    groups = np.asarray(owners).reshape(-1, tensor)
    if (groups != groups[:, :1]).any():
        raise ValueError(
            f"config.mesh.tensor = {tensor}: must divide the {len(local_devices)} "
            "devices of each host, because each host rolls out on its own"
        )
    return make_mesh(tensor=tensor, devices=local_devices)


def spread(array: jax.Array | np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Lay out an array, which every host has in full, over the devices of all hosts.

    Args:
        array: array of any shape.
        sharding: sharding of the result.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    array = np.asarray(array)
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index]
    )


def place_for_decoding(params: dict, mesh: Mesh) -> dict:
    """Lay parameters out over one host's mesh for decoding, without needless copies.

    Each device gathers parameters that are sharded over several hosts along `fsdp`, and
    then has its shard of the tensor axis. No device ever holds more than that.

    Args:
        params: parameters laid out over this mesh, or over one that contains it.
        mesh: a mesh from `own_mesh`.
    """
    shardings = param_shardings(params, mesh, DECODING_RULES)
    first_leaf = jax.tree.leaves(params)[0]
    if first_leaf.sharding.is_fully_addressable:
        return jax.device_put(params, shardings)
    gathered_shardings = param_shardings(
        params, first_leaf.sharding.mesh, DECODING_RULES
    )
    # An update may write a sharding differently, such as P() for P(None). Such an array
    # is already in place, and moving it would compile another program.
    gathered_shardings = jax.tree.map(
        lambda x, s: x.sharding if x.sharding.is_equivalent_to(s, x.ndim) else s,
        params,
        gathered_shardings,
    )
    params = jax.device_put(params, gathered_shardings)

    def to_local(leaf, sharding):
        shards = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)

    return jax.tree.map(to_local, params, shardings)


def param_shardings(params: dict, mesh: Mesh, rules: dict | None = None) -> dict:
    """Return the NamedSharding of each leaf.

    A vocabulary that its mesh axis does not divide is not sharded, because its size is
    that of the tokenizer and not the user's choice.

    Args:
        params: tree of arrays or ShapeDtypeStructs.
        mesh: mesh of the devices.
        rules: {logical axis: mesh axis or None}; None means RULES.

    Raises:
        ValueError: another axis is not divisible by the mesh axis that shards it.
    """

    rules = RULES if rules is None else rules

    def make_sharding(path, leaf):
        axes = AXES[path[-1].key]
        axes = ("layers",) * (leaf.ndim - len(axes)) + axes
        spec = [rules[axis] for axis in axes]
        for i, (size, mesh_axis) in enumerate(zip(leaf.shape, spec)):
            if mesh_axis is None or size % mesh.shape[mesh_axis] == 0:
                continue
            if axes[i] == "vocab":
                spec[i] = None
                continue
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"axis {i} of parameter {name} has size {size}, not "
                f"divisible by mesh.{mesh_axis}={mesh.shape[mesh_axis]}"
            )
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(make_sharding, params)


def with_shardings(shapes: dict, shardings: dict) -> dict:
    """Return ShapeDtypeStructs, each with its sharding."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        shardings,
    )


def shapes_with_shardings(shapes: dict, mesh: Mesh, rules: dict | None = None) -> dict:
    """Return shapes of parameters with their shardings over a mesh."""
    return with_shardings(shapes, param_shardings(shapes, mesh, rules))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of rows over data and fsdp; other axes are not sharded."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def num_shards(mesh: Mesh) -> int:
    """Return the number of shards that `batch_sharding` makes of rows."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def shard_axes(
    mesh: Mesh, num_heads: int, *num_rows: int
) -> tuple[tuple[str, ...] | None, str | None]:
    """Return (mesh axes for rows, mesh axis for heads), None for those not divisible.

    Args:
        mesh: mesh whose data and fsdp axes shard rows and whose tensor axis shards
            heads.
        num_heads: number of key/value heads; query heads are sharded with the head that
            they share.
        num_rows: numbers of rows of arrays that are all sharded in the same way, or not
            at all.
    """
    is_even = all(number % num_shards(mesh) == 0 for number in num_rows)
    rows = ("data", "fsdp") if is_even else None
    return rows, "tensor" if num_heads % mesh.shape["tensor"] == 0 else None


def device_of(mesh: Mesh | None) -> jax.Device:
    """Return a device of a mesh; None means the default backend."""
    return jax.devices()[0] if mesh is None else mesh.devices.flat[0]


def platform_of(mesh: Mesh | None) -> str:
    """Return the platform of a mesh's devices; None means the default backend."""
    return device_of(mesh).platform


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that puts a full array on every device."""
    return NamedSharding(mesh, PartitionSpec())
