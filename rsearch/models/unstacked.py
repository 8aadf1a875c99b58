"""A decoder's layers one by one, for backends that cannot read a part of a stack."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rsearch.models.attention.cached import place_in
from rsearch.models.decoder import Decoder, Layer, multiply
from rsearch.models.norm import RMSNorm
from rsearch.models.rotary import rotation
from rsearch.models.sharding import platform_of

LARGE_LAYERS = 2**26  # bytes: of fewer, a CPU's caches hold what a scan copies
# Leading axes of a kernel that a product adds up.
SUMMED = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "gate_up": 1, "down": 1}
APART = "layers_apart"  # of parameters: a tuple of each layer's own
TURNED = "turned_unembedding"  # of parameters: [V, D]


def _turned(path, axes) -> tuple:
    """The axes of a parameter in the order that `multiply` wants of a turned kernel."""
    summed = SUMMED.get(path[-1].key, 0)
    return *axes[summed:], *axes[:summed]


def _apart(stack):
    """Each layer's parameters by themselves, of a stack of them all; kernels turned."""

    def own(i):
        def turned(path, x):
            return x[i].transpose(_turned(path, range(x.ndim - 1)))

        return jax.tree_util.tree_map_with_path(turned, stack)

    return tuple(own(i) for i in range(len(jax.tree.leaves(stack)[0])))


def with_layers_apart(params, mesh: Mesh):
    """Parameters with a copy of each layer's too, where that is faster.

    A scan copies a layer's part out of the stack before it multiplies, where the
    backend cannot read it in place (XLA's on CPUs). For one token a row that is a
    fourth of the time, if the layers are large, and turned kernels are another.

    Args:
        params: from `place_for_decoding`.
        mesh: that they lie on.
    """
    stack = params["layers"]
    size = sum(x.nbytes for x in jax.tree.leaves(stack))
    if platform_of(mesh) != "cpu" or size < LARGE_LAYERS:
        return params

    def turned(path, x):
        whole, *axes = x.sharding.spec
        assert whole is None, "a layer is nobody's part"
        return NamedSharding(mesh, PartitionSpec(*_turned(path, axes)))

    one = jax.tree_util.tree_map_with_path(turned, stack)
    shardings = (one,) * len(jax.tree.leaves(stack)[0])
    params = params | {APART: jax.jit(_apart, out_shardings=shardings)(stack)}
    if "unembedding" in params:
        kernel = params["unembedding"]
        axes = PartitionSpec(*reversed(kernel.sharding.spec))
        turn = jax.jit(jnp.transpose, out_shardings=NamedSharding(mesh, axes))
        params[TURNED] = turn(kernel)
    return params


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
    layer = Layer(spec, model.mesh, is_turned=True)
    for own in params[APART]:
        carry, _ = layer.apply({"params": own}, carry, *given)
    x, cache, _ = carry
    norm = RMSNorm(spec.norm_eps)
    return norm.apply({"params": params["final_norm"]}, x), cache


def logits_behind(model: Decoder, params, hidden):
    """[B, V] float32 logits of hidden states [B, D], by what `extended` takes."""
    if APART not in params:
        return model.apply({"params": params}, hidden, method="logits")
    kernel = params["embedding" if model.spec.tie_embeddings else TURNED]
    # An embedding has a row for each id: as the unembedding it is a turned kernel.
    return multiply(hidden[None], kernel, is_turned=True, dtype=jnp.float32)[0]
