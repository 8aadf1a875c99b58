"""Floating-point operations of a function, counted in what JAX has traced of it."""

import math
import statistics
from collections.abc import Callable, Sequence

import jax


def count_flops(function: Callable, args: Sequence, *, rounds: float = 1) -> float:
    """Return the operations of all matrix products on all devices, at most.

    Of the branches of a conditional the dearest counts; in a kernel their mean, since
    causal attention looks at about half of the blocks. A kernel's loop over the pages
    of a row counts as one round: attention of one token is little. What is not a matrix
    product is not counted.

    Args:
        function: jitted or not.
        args: of it, arrays or shapes.
        rounds: of each loop whose length the data decides.
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
        times = params["mesh"].size  # each device does what is traced of one
    if name == "pallas_call":
        times, combine, rounds = _grid(params), statistics.mean, _blocks_seen(params)
    return times * sum(_count(inner, rounds, combine) for inner in _inner(params))


def _grid(params):
    """Return how often the body of a kernel runs."""
    return math.prod(params["grid_mapping"].grid)


def _blocks_seen(params):
    """Return how many blocks of keys a block of queries of a kernel loops over.

    The loop over pages counts as one. Causal flash attention, by its queries ahead and
    by both backwards, sees half of the blocks on average.
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
