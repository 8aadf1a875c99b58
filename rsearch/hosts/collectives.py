"""Arrays that lie on the devices of several hosts, brought to each of them.

A few rows at a time: an array of all layers may be larger than what a device holds.
"""

import functools

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rsearch.hosts.offload import on_device

PIECE_BYTES = 1 << 28  # that a device holds of an array at once, or one of its rows


def whole(array) -> np.ndarray:
    """An array on the host of each process, all of which ask for it together."""
    found = [np.asarray(piece) for piece in pieces(array)]
    return found[0] if len(found) == 1 else np.concatenate(found)


def pieces(array):
    """The rows of an array, one piece after another, on the host of each process.

    Args:
        array: of JAX or numpy. What one process has whole comes as it is; for the rest
            all processes ask together, and to the end.
    """
    if not isinstance(array, jax.Array):
        yield array
        return
    if array.is_fully_addressable or array.is_fully_replicated or not array.size:
        is_whole = array.is_fully_addressable
        yield _apart(array if is_whole else array.addressable_data(0))
        return
    array = on_device(array)
    num = len(array)
    step = min(num, max(1, PIECE_BYTES * num // array.nbytes))
    for start in range(0, num, step):
        # The last begins earlier, to have the others' shape.
        first = min(start, num - step)
        rows = take_rows(array.sharding.mesh, step)(array, first).addressable_data(0)
        yield np.asarray(rows)[start - first :]


def _apart(array):
    """The same buffers in an array of their own.

    What is read of an array stays on the host for as long as there is the array.
    """
    parts = [shard.data for shard in array.addressable_shards]
    whole = array.shape, array.sharding, parts
    return jax.make_array_from_single_device_arrays(*whole, dtype=array.dtype)


@functools.cache
def take_rows(mesh, num):
    """(array, first) -> so many of its rows, whole on every device of the mesh."""
    return jax.jit(
        lambda array, first: jax.lax.dynamic_slice_in_dim(array, first, num),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )
