"""Gather arrays on one host; test_checkpoint_processes.py covers several hosts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rsearch.hosts import collectives
from rsearch.runtime import checkpoint

ROWS = np.arange(64, dtype=np.float32).reshape(16, 4)


@pytest.mark.parametrize("spec", [("a", "b"), (None, "a"), ()], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_a_gathered_array_leaves_no_copy_on_the_host(spec, dtype):
    """Otherwise the first save of a state of 7 B parameters would leave 91 GB there."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    rows = jnp.asarray(ROWS, dtype)
    array = jax.device_put(rows, NamedSharding(mesh, PartitionSpec(*spec)))
    assert checkpoint.describe(array) == checkpoint.describe(np.asarray(rows))
    np.testing.assert_array_equal(collectives.gather_array(array), rows)
    # JAX's private cache of the value; if JAX removes it, these checks can go too.
    assert array._npy_value is None
    np.asarray(array)
    assert array._npy_value is not None or array.is_fully_replicated


def test_numpy_arrays_are_returned_unchanged():
    assert collectives.gather_array(ROWS) is ROWS
    (piece,) = collectives.gather_chunks(ROWS)
    assert piece is ROWS
