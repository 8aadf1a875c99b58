"""A decoder's weights in forms that are faster to decode with.

On CPUs its layers are separate arrays, because XLA's CPU backend cannot read a layer in
place from the stack that a scan runs over. Kernels of 8 bits take half as many bytes as
in bfloat16.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rsearch.models.attention.cached import Cache, index_cache
from rsearch.models.attention.pages import Pages
from rsearch.models.decoder import Decoder, Layer, unembed
from rsearch.models.norm import RMSNorm
from rsearch.models.rotary import rotation
from rsearch.models.sharding import MATRIX_AXES, platform_of

LARGE_LAYERS = 2**26  # bytes; copies of smaller layers stay in a CPU's caches
# Number of leading axes of a kernel that a product sums over.
SUMMED = {name: len(reads) for name, (reads, _) in MATRIX_AXES.items()} | {"gate_up": 1}
SEPARATE = "layers_apart"  # parameter key of a tuple with one tree per layer
MAX_INT8 = 127  # largest integer of an 8-bit kernel
UNEMBEDDING = "transposed_unembedding"  # parameter key of the unembedding as [V, D]


def _transposed_axes(path, axes) -> tuple:
    """Return a kernel's axes in the order that `multiply` expects if transposed."""
    num_summed = SUMMED.get(path[-1].key, 0)
    return *axes[num_summed:], *axes[:num_summed]


def _unstack(stack):
    """Split a stack into the parameters of each layer, with transposed kernels."""

    def layer_params(i):
        def transpose(path, x):
            return x[i].transpose(_transposed_axes(path, range(x.ndim - 1)))

        return jax.tree_util.tree_map_with_path(transpose, stack)

    return tuple(layer_params(i) for i in range(len(jax.tree.leaves(stack)[0])))


def with_layers_apart(params: dict, mesh: Mesh) -> dict:
    """Add a separate copy of each layer to the parameters, where that is faster.

    If the backend cannot read a layer in place (XLA on CPUs), a scan copies it out of
    the stack before multiplying. With large layers and one token per row, that is much
    of the time. Turned kernels save still more.

    Args:
        params: parameters from `place_for_decoding`.
        mesh: mesh that the parameters lie on.
    """
    stack = params["layers"]
    size = sum(x.nbytes for x in jax.tree.leaves(stack))
    if platform_of(mesh) != "cpu" or size < LARGE_LAYERS:
        return params

    def transpose(path, x):
        layer_axis, *axes = x.sharding.spec
        assert layer_axis is None, "the axis of layers is never sharded"
        return NamedSharding(mesh, PartitionSpec(*_transposed_axes(path, axes)))

    sharding = jax.tree_util.tree_map_with_path(transpose, stack)
    shardings = (sharding,) * len(jax.tree.leaves(stack)[0])
    params = params | {SEPARATE: jax.jit(_unstack, out_shardings=shardings)(stack)}
    if "unembedding" in params:
        kernel = params["unembedding"]
        axes = PartitionSpec(*reversed(kernel.sharding.spec))
        transpose_kernel = jax.jit(
            jnp.transpose, out_shardings=NamedSharding(mesh, axes)
        )
        params[UNEMBEDDING] = transpose_kernel(kernel)
    return params


@functools.partial(jax.jit, static_argnums=1)
def with_int8_kernels(params: dict, dtype: jax.typing.DTypeLike) -> dict:
    """Return a decoder's parameters with the kernels of its layers in 8 bits.

    A kernel W becomes integers from -127 to 127 and a step for each output. The step is
    the largest magnitude / 127, so that W = step x integers to within half a step.
    Activations keep their dtype; products are afterwards multiplied by the steps
    (`decoder.add_step_and_adapter`).

    Args:
        params: stacked parameters, as in training, without adapters.
        dtype: dtype of all other parameters.
    """
    other_params = {name: leaf for name, leaf in params.items() if name != "layers"}
    cast_params = jax.tree.map(lambda x: x.astype(dtype), other_params)
    return cast_params | {"layers": _quantized(params["layers"], dtype)}


def _quantized(tree, dtype):
    """Return a tree of stacked leaves with kernels as integers, and their steps."""
    leaves = {}
    for name, leaf in tree.items():
        if isinstance(leaf, dict):
            leaves[name] = _quantized(leaf, dtype)
        elif name not in SUMMED:
            leaves[name] = leaf.astype(dtype)
        else:
            axes = tuple(range(1, 1 + SUMMED[name]))  # the axes after that of layers
            leaf = leaf.astype(jnp.float32)
            largest = jnp.max(jnp.abs(leaf), axis=axes, keepdims=True)
            step = jnp.where(largest > 0, largest, 1.0) / MAX_INT8
            leaves[name] = jnp.round(leaf / step).astype(jnp.int8)
            leaves |= _named_steps(name, jnp.squeeze(step, axes))
    return leaves


def _named_steps(name, step):
    """Return {name: steps} with the names that layers use; a fused kernel has two."""
    if name == "gate_up":
        return {"gate_step": step[:, 0], "up_step": step[:, 1]}
    return {f"{name}_step": step}


def decode_step(
    model: Decoder,
    params: dict,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Cache | Pages,
    rows: jax.Array | None = None,
    table: jax.Array | None = None,
) -> tuple[jax.Array, Cache | Pages]:
    """Run the model on new tokens with a cache; see `Decoder.__call__`.

    Several tokens per row go through the scan over layers, which compiles in a fraction
    of the time and whose copies cost little compared with the computation.

    Args:
        model: the network.
        params: parameters laid out for decoding, with or without `with_layers_apart`.
        tokens: [B, T] int32 ids.
        positions: [B, T] int32 slots of the cache.
        cache: keys and values of earlier tokens.
        rows: [B] int32 rows of the cache, or None.
        table: [B, n] int32 pages of each row, or None.

    Returns:
        [B, T, D] hidden states, and the extended cache.
    """
    if SEPARATE not in params or tokens.shape[1] > 1:
        return model.apply({"params": params}, tokens, positions, cache, rows, table)
    spec = model.spec
    x = jnp.take(params["embedding"], tokens, axis=0).astype(model.dtype)
    index = index_cache(cache, positions, rows, table)
    turns = rotation(spec, positions)
    carry = x, cache, 0
    layer = Layer(spec, model.mesh, is_transposed=True)
    for layer_params in params[SEPARATE]:
        carry, _ = layer.apply({"params": layer_params}, carry, index, turns)
    x, cache, _ = carry
    norm = RMSNorm(spec.norm_eps)
    return norm.apply({"params": params["final_norm"]}, x), cache


def decode_logits(model: Decoder, params: dict, hidden: jax.Array) -> jax.Array:
    """Return the [B, V] float32 logits of hidden states [B, D] from `decode_step`."""
    if SEPARATE not in params:
        return model.apply({"params": params}, hidden, method="logits")
    kernel = params["embedding" if model.spec.tie_embeddings else UNEMBEDDING]
    # An embedding has a row for each id, so as an unembedding it is a turned kernel.
    return unembed(hidden, kernel, is_transposed=True)
