"""Low-rank adapters for a decoder's frozen weights: LoRA (arXiv 2106.09685).

A matrix W [in, out] with an adapter acts as W + alpha / r x A B. A [in, r] is random at
first and B [r, out] is 0, so that training begins with the base model. Adapters are a
separate tree with leaves at the places of their matrices: layers.attention.q_a and q_b
for layers.attention.q, each with a leading axis of layers. GLM-4's fused gate and up
have one adapter each.

Dimensions: L layers, D width, H heads, K key/value heads, C head width, F MLP width, r
rank.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rsearch.models.sharding import AXES, MATRIX_AXES, param_shardings
from rsearch.models.spec import DecoderSpec

MATRICES = tuple(MATRIX_AXES)
_IN_ATTENTION = ("q", "k", "v", "o")


def _tree(leaves):
    """Arrange {"q_a": leaf, ...} like the parameter tree."""
    other_leaves = {n: x for n, x in leaves.items() if n[:-2] not in _IN_ATTENTION}
    attention = {n: x for n, x in leaves.items() if n[:-2] in _IN_ATTENTION}
    return {"layers": other_leaves | ({"attention": attention} if attention else {})}


def adapter_shapes(spec: DecoderSpec, *, rank: int, matrices: Sequence[str]) -> dict:
    """Return the tree of adapters as float32 ShapeDtypeStructs.

    Args:
        spec: shape of the decoder.
        rank: r.
        matrices: names of the matrices that have an adapter, from MATRICES.
    """
    sizes = {
        "embed": spec.width,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "mlp": spec.mlp_width,
        "rank": rank,
    }
    leaves = {}
    for name in (f"{matrix}_{factor}" for matrix in matrices for factor in "ab"):
        shape = (spec.num_layers, *(sizes[axis] for axis in AXES[name]))
        leaves[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return _tree(leaves)


def num_adapter_params(spec: DecoderSpec, *, rank: int, matrices: Sequence[str]) -> int:
    """Return the number of parameters in the tree of `adapter_shapes`."""
    shapes = adapter_shapes(spec, rank=rank, matrices=matrices)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def init_adapters(
    spec: DecoderSpec, key: jax.Array, *, rank: int, matrices: Sequence[str]
) -> dict:
    """Return new adapters: A is random with variance 1 / in, and B is 0.

    A depends only on the key and its matrix, not on which other matrices have an
    adapter.

    Args:
        spec: shape of the decoder.
        key: random key.
        rank: r.
        matrices: names of the matrices that have an adapter, from MATRICES.
    """

    def make(path, leaf):
        name, _, factor = path[-1].key.rpartition("_")
        if factor == "b":
            return jnp.zeros(leaf.shape, leaf.dtype)
        leaf_key = jax.random.fold_in(key, MATRICES.index(name))
        deviation = math.prod(leaf.shape[1:-1]) ** -0.5
        return deviation * jax.random.normal(leaf_key, leaf.shape, leaf.dtype)

    shapes = adapter_shapes(spec, rank=rank, matrices=matrices)
    return jax.tree_util.tree_map_with_path(make, shapes)


def with_adapters(params: dict, adapters: dict, scale: float) -> dict:
    """Return one tree for a `Decoder`, in which adapters act without being merged.

    The adapters' gradient flows through the r numbers between A and B, and needs no
    gradient of the weights.

    Args:
        params: frozen parameters of the network.
        adapters: their adapters; other leaves, such as a value head, are copied.
        scale: alpha / r.
    """

    def scale_leaf(path, leaf):
        name, _, factor = path[-1].key.rpartition("_")
        return scale * leaf if factor == "b" and name in MATRICES else leaf

    return _union(params, jax.tree_util.tree_map_with_path(scale_leaf, adapters))


def _union(a, b):
    """Merge two nested dicts that have no leaf in common."""
    shared_names = a.keys() & b.keys()
    return {**a, **b, **{name: _union(a[name], b[name]) for name in shared_names}}


def merge_adapters(
    params: dict,
    adapters: dict,
    scale: float,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> dict:
    """Return parameters W + scale x A B, summed in float32 and then cast.

    Args:
        params: float32 parameters of the network.
        adapters: their adapters, and no other leaves.
        scale: alpha / r.
        dtype: dtype of the result.
    """
    layers = dict(params["layers"])
    layers["attention"] = dict(layers["attention"])
    leaves = dict(adapters["layers"])
    leaves |= leaves.pop("attention", {})
    changes = {}  # matrix -> [(index into the matrix, A, B)]
    for name in sorted({leaf[:-2] for leaf in leaves}):
        matrix, index = name, ...
        if name in ("gate", "up") and "gate_up" in layers:
            matrix, index = "gate_up", (slice(None), ("gate", "up").index(name))
        changes.setdefault(matrix, []).append(
            (index, leaves[f"{name}_a"], leaves[f"{name}_b"])
        )
    for name, matrix_changes in changes.items():
        holder = layers["attention"] if name in _IN_ATTENTION else layers
        holder[name] = _add_changes(holder[name], matrix_changes, scale, dtype)
    return jax.tree.map(lambda x: x.astype(dtype), params | {"layers": layers})


def _add_changes(kernel, changes, scale, dtype):
    """Return kernel + scale x A B, [L, ...], for the changes [(index, A, B)].

    Layers are changed one by one, in place if nothing is cast. If all were changed at
    once, XLA would hold the changes of all matrices in addition to their sums.
    """
    in_place = kernel.dtype == dtype

    def change_layer(layer, result):
        matrix = (result if in_place else kernel)[layer]
        for index, a, b in changes:
            rank = a.shape[-1]
            change = jnp.matmul(
                a[layer].reshape(-1, rank),
                b[layer].reshape(rank, -1),
                precision=jax.lax.Precision.HIGHEST,
            )
            matrix = matrix.at[index].add(scale * change.reshape(matrix[index].shape))
        return result.at[layer].set(matrix.astype(dtype))

    initial = kernel if in_place else jnp.zeros(kernel.shape, dtype)
    return jax.lax.fori_loop(0, len(kernel), change_layer, initial)


def make_merge(
    mesh: Mesh, scale: float, dtype: jax.typing.DTypeLike, *, donates: bool = False
) -> Callable[[dict, dict], dict]:
    """Compile `merge_adapters` as a function of params and adapters, over a mesh.

    Args:
        mesh: mesh of the devices.
        scale, dtype: see `merge_adapters`.
        donates: whether the result takes over the memory of params, which must then not
            be used again.

    Returns:
        (params, adapters) -> merged parameters.
    """

    def merge(params, adapters):
        result = merge_adapters(params, adapters, scale, dtype=dtype)
        shardings = param_shardings(result, mesh)
        return jax.lax.with_sharding_constraint(result, shardings)

    return jax.jit(merge, donate_argnums=(0,) if donates else ())
