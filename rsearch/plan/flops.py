"""Count the floating-point operations of a function in JAX's trace of it."""

import math
import statistics
from collections.abc import Callable, Sequence

import jax


def count_flops(function: Callable, args: Sequence, *, rounds: float = 1) -> float:
    """Return the operations of all matrix products on all devices, at most.

    The costliest branch of a conditional counts; in a kernel, the mean of the branches,
    since causal attention visits about half of the blocks. A kernel's loop over the
    pages of a row counts as one round, as attention of one token is little work. Only
    matrix products are counted.

    Args:
        args: its arguments, arrays or shapes.
        rounds: rounds of each loop whose length depends on the data.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr, rounds, max)


def _count(jaxpr, rounds, combine):
    return sum(_equation_flops(eqn, rounds, combine) for eqn in jaxpr.eqns)


def _equation_flops(eqn, rounds, combine):
    """Return the operations of one equation; `combine` combines those of branches."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left_shape = eqn.invars[0].aval.shape
        inner = math.prod(left_shape[axis] for axis in contracted)
        return 2.0 * inner * math.prod(eqn.outvars[0].aval.shape)
    if name == "cond":
        return combine(_count(b.jaxpr, rounds, combine) for b in params["branches"])
    times = {"scan": params.get("length"), "while": rounds}.get(name, 1)
    if name == "shard_map":
        times = params["mesh"].size  # the trace is of one device; all do the same
    if name == "pallas_call":
        times = math.prod(params["grid_mapping"].grid)
        combine, rounds = statistics.mean, _blocks_visited(params)
    return times * sum(_count(inner, rounds, combine) for inner in _inner(params))


def _blocks_visited(params):
    """Return how many blocks of keys a block of queries of a kernel loops over.

    The loop over pages counts as one. Causal flash attention sees half of the blocks on
    average; its grid is over queries in the forward pass, and over queries and keys in
    the backward pass.
    """
    grid = params["grid_mapping"].grid
    num_blocks = {"mha_forward": grid[0], "mha_backward": grid[-1]}
    name = params["name"]
    return (num_blocks[name] + 1) / 2 if name in num_blocks else 1


def _inner(params):
    """Yield the traced functions among an equation's parameters."""
    for value in params.values():
        if hasattr(value, "jaxpr"):
            value = value.jaxpr
        if hasattr(value, "eqns"):
            yield value
