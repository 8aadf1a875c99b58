"""A decoder's layers one by one, for backends that cannot read a part of a stack."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rsearch.models.attention import place_in
from rsearch.models.decoder import Decoder, Layer
from rsearch.models.norm import RMSNorm
from rsearch.models.rotary import rotation
from rsearch.models.sharding import DECODING_RULES, param_shardings, platform_of

LARGE_LAYERS = 2**26  # bytes: of fewer, a CPU's caches hold what a scan copies
APART = "layers_apart"  # of parameters: a tuple of each layer's own


def _apart(stack):
    """Each layer's parameters by themselves, of a stack of them all."""
    count = len(jax.tree.leaves(stack)[0])
    return tuple(jax.tree.map(lambda x, i=i: x[i], stack) for i in range(count))


def with_layers_apart(params, mesh: Mesh):
    """Parameters with a copy of each layer's too, where that is faster.

    A scan copies a layer's part out of the stack before it multiplies, where the
    backend cannot read it in place (XLA's on CPUs). For one token a row that is a
    fourth of the time, if the layers are large.

    Args:
        params: from `place_for_decoding`.
        mesh: that they lie on.
    """
    stack = params["layers"]
    size = sum(x.nbytes for x in jax.tree.leaves(stack))
    if platform_of(mesh) != "cpu" or size < LARGE_LAYERS:
        return params
    shapes = jax.eval_shape(_apart, stack)
    shardings = param_shardings({"layers": shapes}, mesh, DECODING_RULES)["layers"]
    return params | {APART: jax.jit(_apart, out_shardings=shardings)(stack)}


def extended(model: Decoder, params, tokens, positions, cache, rows=None, table=None):
    """What the model makes of new tokens, with a cache; see `Decoder.__call__`.

    Many tokens of a row go through a scan over the layers, which compiles in a fraction
    of the time; it copies little beside what they take.

    Args:
        model: the network.
        params: placed, with layers apart or not.
        tokens, positions, cache, rows, table: as the network takes them.
    """
    if APART not in params or tokens.shape[1] > 1:
        given = tokens, positions, cache, rows, table
        return model.apply({"params": params}, *given)
    spec = model.spec
    x = jnp.take(params["embedding"], tokens, axis=0).astype(model.dtype)
    given = place_in(cache, positions, rows, table), rotation(spec, positions)
    carry = x, cache, 0
    for own in params[APART]:
        carry, _ = Layer(spec, model.mesh).apply({"params": own}, carry, *given)
    x, cache, _ = carry
    norm = RMSNorm(spec.norm_eps)
    return norm.apply({"params": params["final_norm"]}, x), cache
