"""Gather arrays that lie on the devices of several hosts onto every host.

A few rows travel at a time: an array of all layers may be larger than what a device
holds.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rsearch.hosts.offload import on_device

CHUNK_BYTES = 1 << 28  # of an array that a device holds at once, or one of its rows


def gather_array(array: jax.Array | np.ndarray) -> np.ndarray:
    """Return an array in the memory of every host; all hosts call this together."""
    chunks = [np.asarray(chunk) for chunk in gather_chunks(array)]
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)


def gather_chunks(array: jax.Array | np.ndarray) -> Iterator[jax.Array | np.ndarray]:
    """Yield the rows of an array, chunk after chunk, in the memory of every host.

    Args:
        array: of JAX or numpy. One that this host can read by itself is yielded as it
            is; for any other all hosts iterate together, and to the end.
    """
    if not isinstance(array, jax.Array):
        yield array
        return
    if array.is_fully_addressable or array.is_fully_replicated or not array.size:
        is_here = array.is_fully_addressable
        yield _new_array_of(array if is_here else array.addressable_data(0))
        return
    array = on_device(array)
    num_rows = len(array)
    step = min(num_rows, max(1, CHUNK_BYTES * num_rows // array.nbytes))
    slice_rows = make_slice_rows(array.sharding.mesh, step)
    for start in range(0, num_rows, step):
        # The last chunk starts early, so that one compiled shape serves all of them.
        first = min(start, num_rows - step)
        rows = slice_rows(array, first).addressable_data(0)
        yield np.asarray(rows)[start - first :]


def _new_array_of(array):
    """Return a new array object over the same buffers.

    JAX caches the host copy of an array for as long as the array object lives; the
    copy of this object goes when the caller drops it.
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
