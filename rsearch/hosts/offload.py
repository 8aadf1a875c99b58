"""Arrays that rest in the memory of their hosts while devices need the room.

They stay laid out over the same devices, and are moved there before they are used.
"""

import jax
from jax.sharding import Mesh

DEVICE, HOST = "device", "pinned_host"  # kinds of memory, as JAX names them


def in_memory(shardings, kind: str):
    """The same shardings in another memory of the devices, such as HOST."""
    return jax.tree.map(lambda s: s.with_memory_kind(kind), shardings)


def check_host_memory(mesh: Mesh, why: str) -> None:
    """Refuses devices that cannot reach arrays in the memory of their host.

    Args:
        mesh: the devices.
        why: what asks for it, such as a field and its value.

    Raises:
        ValueError: they have no memory of the kind HOST.
    """
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise ValueError(
            f"{why}: {device.device_kind} has no memory {HOST!r}, only "
            f"{', '.join(kinds)}"
        )


def in_host_memory(tree):
    """Arrays moved to the memory of the hosts, laid out over the same devices."""
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    return jax.device_put(tree, in_memory(shardings, HOST))


def on_device(tree):
    """Arrays that may rest in the memory of the hosts, on the devices; else as is."""

    def back(x):
        if getattr(x, "sharding", None) is None or x.sharding.memory_kind != HOST:
            return x
        return jax.device_put(x, x.sharding.with_memory_kind(DEVICE))

    return jax.tree.map(back, tree)
