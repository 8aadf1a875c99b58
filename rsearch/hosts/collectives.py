"""Gather arrays that are sharded over the devices of several hosts onto every host.

Rows are gathered a few at a time, because an array that stacks all layers may not fit
on one device.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rsearch.hosts.offload import on_device

CHUNK_BYTES = 1 << 28  # gathered onto a device at a time, unless one row is larger


def gather_array(array: jax.Array | np.ndarray) -> np.ndarray:
    """Return a whole array in host memory; all hosts call this together."""
    chunks = [np.asarray(chunk) for chunk in gather_chunks(array)]
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)


def gather_chunks(array: jax.Array | np.ndarray) -> Iterator[jax.Array | np.ndarray]:
    """Yield the rows of an array in chunks, in the memory of every host.

    Args:
        array: a JAX or numpy array. If this host can read all of it by itself, it is
            yielded in one piece. Otherwise all hosts must iterate together, and to
            the end.
    """
    if not isinstance(array, jax.Array):
        yield array
        return
    if array.is_fully_addressable or array.is_fully_replicated or not array.size:
        is_local = array.is_fully_addressable
        yield _rewrap(array if is_local else array.addressable_data(0))
        return
    array = on_device(array)
    num_rows = len(array)
    step = min(num_rows, max(1, CHUNK_BYTES * num_rows // array.nbytes))
    slice_rows = make_slice_rows(array.sharding.mesh, step)
    for start in range(0, num_rows, step):
        # The last chunk starts early, so that all chunks have the same compiled shape.
        first_row = min(start, num_rows - step)
        rows = slice_rows(array, first_row).addressable_data(0)
        yield np.asarray(rows)[start - first_row :]


def _rewrap(array):
    """Return a new array object over the same buffers.

    JAX caches the host copy of an array for as long as the array object lives. The
    copy made from this new object is freed when the caller drops it.
    """
    buffers = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        array.shape, array.sharding, buffers, dtype=array.dtype
    )


@functools.cache
def make_slice_rows(mesh: Mesh, num_rows: int) -> Callable[..., jax.Array]:
    """Return a jitted (array, first) -> [num_rows, ...], replicated over the mesh."""
    return jax.jit(
        lambda array, first: jax.lax.dynamic_slice_in_dim(array, first, num_rows),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )
