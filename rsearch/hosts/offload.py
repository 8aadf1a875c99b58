"""Offload arrays to host memory while devices need the room.

An offloaded array keeps its sharding over the same devices, and is moved back to them
before it is used.
"""

from typing import Any

import jax
from jax.sharding import Mesh

DEVICE, HOST = "device", "pinned_host"  # JAX's names for kinds of memory


def in_memory(shardings: Any, kind: str) -> Any:
    """Return a tree of the same shardings in another kind of memory, such as HOST."""
    return jax.tree.map(lambda s: s.with_memory_kind(kind), shardings)


def check_host_memory(mesh: Mesh, field: str) -> None:
    """Refuse devices that cannot keep arrays in host memory.

    Args:
        field: the field that needs host memory, and its value, for messages.

    Raises:
        ValueError: the devices have no memory of the kind HOST.
    """
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise ValueError(
            f"{field}: {device.device_kind} has no memory {HOST!r}, only "
            f"{', '.join(kinds)}"
        )


def in_host_memory(tree: Any) -> Any:
    """Move a tree of arrays to host memory, sharded over the same devices."""
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    return jax.device_put(tree, in_memory(shardings, HOST))


def on_device(tree: Any) -> Any:
    """Move the leaves that are in host memory to their devices; keep the others."""

    def to_device(x):
        if getattr(x, "sharding", None) is None or x.sharding.memory_kind != HOST:
            return x
        return jax.device_put(x, x.sharding.with_memory_kind(DEVICE))

    return jax.tree.map(to_device, tree)
