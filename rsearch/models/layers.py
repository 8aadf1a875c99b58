"""A decoder's layers one by one, for backends that cannot read a part of a stack."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rsearch.models.attention import place_in
from rsearch.models.decoder import Decoder, Layer, RMSNorm
from rsearch.models.sharding import DECODING_RULES, param_shardings

LARGE_LAYERS = 2**26  # bytes: of fewer, a CPU's caches hold what a scan copies


def by_layer(params):
    """Parameters with each layer's by themselves: `layers` is a tuple of trees.

    A scan copies a layer's part out of the stack before it multiplies, where the
    backend cannot read it in place (XLA's on CPUs). For one token a row that is a
    fourth of the time.
    """
    stack = params["layers"]
    count = len(jax.tree.leaves(stack)[0])
    layers = tuple(jax.tree.map(lambda x, i=i: x[i], stack) for i in range(count))
    return params | {"layers": layers}


def parted(params, mesh: Mesh):
    """Placed parameters `by_layer`, a copy, where that is faster: large ones on CPUs.

    Args:
        params: from `place_for_decoding`.
        mesh: that they lie on.
    """
    size = sum(x.nbytes for x in jax.tree.leaves(params["layers"]))
    if mesh.devices.flat[0].platform != "cpu" or size < LARGE_LAYERS:
        return params
    shapes = jax.eval_shape(by_layer, params)
    shardings = param_shardings(shapes, mesh, DECODING_RULES)
    return jax.jit(by_layer, out_shardings=shardings)(params)


def stacked(params):
    """Parameters as a scan over the layers wants them, from either form."""
    if not isinstance(params["layers"], tuple):
        return params
    return params | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])}


def extended(model: Decoder, params, tokens, positions, cache, rows=None, table=None):
    """What the model makes of new tokens, with a cache; see `Decoder.__call__`.

    Args:
        model: the network.
        params: stacked, or from `by_layer`.
        tokens, positions, cache, rows, table: as the network takes them.
    """
    if not isinstance(params["layers"], tuple):
        given = tokens, positions, cache, rows, table
        return model.apply({"params": params}, *given)
    spec = model.spec
    x = jnp.take(params["embedding"], tokens, axis=0).astype(model.dtype)
    carry = (x, place_in(cache, positions, rows, table), cache, 0)
    for own in params["layers"]:
        carry, _ = Layer(spec, model.mesh).apply({"params": own}, carry, None)
    x, _, cache, _ = carry
    norm = RMSNorm(spec.norm_eps)
    return norm.apply({"params": params["final_norm"]}, x), cache
