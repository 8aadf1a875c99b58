"""Sharding: one mesh (data, fsdp, tensor) and one table of logical axis rules.

A parameter's logical axes follow from its name (AXES); which mesh axis carries a
logical axis follows from RULES. Training shards parameters over `fsdp` and `tensor`;
decoding uses the same table without `fsdp`, so that a step gathers no weights.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

# The axes that each matrix of a layer reads, and those that it writes.
MATRIX_AXES = {
    "q": (("embed",), ("heads", "head_dim")),
    "k": (("embed",), ("kv_heads", "head_dim")),
    "v": (("embed",), ("kv_heads", "head_dim")),
    "o": (("heads", "head_dim"), ("embed",)),
    "gate": (("embed",), ("mlp",)),
    "up": (("embed",), ("mlp",)),
    "down": (("mlp",), ("embed",)),
}

# The trailing axes of each parameter; a leading "layers" axis is added where it is
# stacked.
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
    # Steps of kernels of 8 bits, see rsearch/models/unstacked.py.
    AXES[f"{_name}_step"] = _writes
    # Adapters, see rsearch/models/lora.py.
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
    """Make a mesh over all devices; `data=-1` takes what the other axes leave.

    Args:
        data, fsdp, tensor: sizes of the axes.
        devices: to lay out; None stands for all, sorted by host.

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
    # A host's devices are neighbours, so that `own_mesh` takes full rows.
    return sorted(jax.devices(), key=lambda d: (d.process_index, d.id))


def own_mesh(mesh: Mesh, host: int | None = None) -> Mesh:
    """Return the submesh of one host's devices, on which it rolls out on its own.

    Args:
        mesh: over the devices of all hosts.
        host: number of the host; None is this one.

    Raises:
        ValueError: the tensor axis reaches over several hosts.
    """
    here = jax.process_index() if host is None else host
    tensor = mesh.shape["tensor"]
    owners = [d.process_index for d in mesh.devices.flat]
    if set(owners) == {here}:
        return mesh
    local = [d for d, owner in zip(mesh.devices.flat, owners) if owner == here]
    groups = np.asarray(owners).reshape(-1, tensor)
    if (groups != groups[:, :1]).any():
        raise ValueError(
            f"config.mesh.tensor = {tensor}: must divide the {len(local)} devices of "
            "each host, which rolls out on its own"
        )
    return make_mesh(tensor=tensor, devices=local)


def spread(array: jax.Array | np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Lay out an array, which every host has in full, over the devices of all hosts.

    Args:
        array: of any shape.
        sharding: of the result.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    array = np.asarray(array)
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index]
    )


def place_for_decoding(params: dict, mesh: Mesh) -> dict:
    """Lay parameters out over one host's mesh for decoding, without needless copies.

    Parameters that are sharded over several hosts are gathered along `fsdp` by each
    device, which then has its shard of the tensor axis; no device ever has more.

    Args:
        params: laid out over this mesh, or over one that contains it.
        mesh: from `own_mesh`.
    """
    shardings = param_shardings(params, mesh, DECODING_RULES)
    first = jax.tree.leaves(params)[0]
    if first.sharding.is_fully_addressable:
        return jax.device_put(params, shardings)
    gathered = param_shardings(params, first.sharding.mesh, DECODING_RULES)
    # An update may spell a sharding differently, P() for P(None). Such an array is in
    # place already, and moving it would compile another program.
    gathered = jax.tree.map(
        lambda x, s: x.sharding if x.sharding.is_equivalent_to(s, x.ndim) else s,
        params,
        gathered,
    )
    params = jax.device_put(params, gathered)

    def to_local(leaf, sharding):
        shards = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)

    return jax.tree.map(to_local, params, shardings)


def param_shardings(params: dict, mesh: Mesh, rules: dict | None = None) -> dict:
    """Return the NamedSharding of each leaf.

    A vocabulary that its mesh axis does not divide is not sharded: its size is the
    tokenizer's, and the user cannot choose it.

    Args:
        params: tree of arrays or ShapeDtypeStructs.
        mesh: devices.
        rules: {logical axis: mesh axis or None}; None stands for RULES.

    Raises:
        ValueError: another axis is not divisible by the mesh axis that carries it.
    """

    rules = RULES if rules is None else rules

    def named(path, leaf):
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

    return jax.tree_util.tree_map_with_path(named, params)


def with_shardings(shapes: dict, shardings: dict) -> dict:
    """Return ShapeDtypeStructs, each with its sharding."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        shardings,
    )


def laid_out(shapes: dict, mesh: Mesh, rules: dict | None = None) -> dict:
    """Return shapes of parameters with their shardings over a mesh."""
    return with_shardings(shapes, param_shardings(shapes, mesh, rules))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of rows over data and fsdp; other axes are not sharded."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def num_shards(mesh: Mesh) -> int:
    """Return the number of shards that `batch_sharding` makes of rows."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def cut_axes(
    mesh: Mesh, num_heads: int, *num_rows: int
) -> tuple[tuple[str, ...] | None, str | None]:
    """Return (mesh axes for rows, mesh axis for heads), None where they do not divide.

    Args:
        mesh: its data and fsdp axes shard rows, its tensor axis shards heads.
        num_heads: number of key/value heads; query heads go with the head they share.
        num_rows: numbers of rows that are sharded in the same way, or none of them is.
    """
    is_even = all(number % num_shards(mesh) == 0 for number in num_rows)
    rows = ("data", "fsdp") if is_even else None
    return rows, "tensor" if num_heads % mesh.shape["tensor"] == 0 else None


def device_of(mesh: Mesh | None) -> jax.Device:
    """Return a device of a mesh; None stands for the default backend."""
    return jax.devices()[0] if mesh is None else mesh.devices.flat[0]


def platform_of(mesh: Mesh | None) -> str:
    """Return the platform of a mesh's devices; None stands for the default backend."""
    return device_of(mesh).platform


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that puts the full array on every device."""
    return NamedSharding(mesh, PartitionSpec())
