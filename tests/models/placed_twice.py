"""Lay out parameters of two hosts for decoding; test_sharding.py runs it on each host.

It is a module of its own because that file imports torch, which takes seconds.
"""

import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rsearch.config.recipes import parse_flags
from rsearch.hosts import processes
from rsearch.models import sharding
from rsearch.runtime.compiles import num_compiles


def place_twice(argv):
    """Lay out parameters, and the updated ones, and count the compiled programs."""
    processes.connect(**parse_flags(argv, flags=processes.FLAGS))
    mesh = sharding.make_mesh(fsdp=2)
    params = {"down": np.arange(32.0).reshape(8, 4), "scale": np.arange(8.0)}
    at_first = sharding.param_shardings(params, mesh)
    updated = at_first | {"scale": NamedSharding(mesh, PartitionSpec())}
    assert updated["scale"] != at_first["scale"]
    counts = []
    for shardings in (at_first, updated):
        laid = jax.tree.map(sharding.spread, params, shardings)
        placed = sharding.place_for_decoding(laid, sharding.own_mesh(mesh))
        counts.append(num_compiles())
        jax.tree.map(np.testing.assert_array_equal, placed, params)
    assert counts[0] == counts[1] > 0


if __name__ == "__main__":
    place_twice(sys.argv[1:])
