"""Low-rank adapters beside a decoder's frozen weights: LoRA (arXiv 2106.09685).

A matrix W [in, out] with an adapter acts as W + alpha / r x A B: A [in, r] begins at
random, B [r, out] at 0, so that nothing has changed at first. Adapters are a tree of
their own, whose leaves lie where the matrices do: layers.attention.q_a and q_b beside
layers.attention.q, each with a leading axis of layers. GLM-4's fused gate and up have
one each.

Dimensions: L layers, D width, H heads, K key/value heads, C head width, F MLP width, r
rank.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rsearch.models.sharding import param_shardings
from rsearch.models.spec import DecoderSpec

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
_IN_ATTENTION = ("q", "k", "v", "o")


def _ends(spec: DecoderSpec):
    """{matrix: (axes of what it reads, axes of what it writes)}."""
    d, f = (spec.width,), (spec.mlp_width,)
    heads = spec.num_heads, spec.head_dim
    kv_heads = spec.num_kv_heads, spec.head_dim
    return {
        "q": (d, heads),
        "k": (d, kv_heads),
        "v": (d, kv_heads),
        "o": (heads, d),
        "gate": (d, f),
        "up": (d, f),
        "down": (f, d),
    }


def _tree(leaves):
    """The tree of {"q_a": leaf, ...}."""
    own = {n: x for n, x in leaves.items() if n[:-2] not in _IN_ATTENTION}
    attention = {n: x for n, x in leaves.items() if n[:-2] in _IN_ATTENTION}
    return {"layers": own | ({"attention": attention} if attention else {})}


def adapter_shapes(spec: DecoderSpec, *, rank: int, matrices):
    """The tree of adapters as ShapeDtypeStructs, float32.

    Args:
        spec: shape of the decoder.
        rank: r.
        matrices: which have one, of MATRICES.
    """
    leaves = {}
    for name in matrices:
        read, written = _ends(spec)[name]
        for part, shape in ("a", (*read, rank)), ("b", (rank, *written)):
            leaves[f"{name}_{part}"] = jax.ShapeDtypeStruct(
                (spec.num_layers, *shape), jnp.float32
            )
    return _tree(leaves)


def num_adapter_params(spec: DecoderSpec, *, rank: int, matrices) -> int:
    """Numbers in such a tree."""
    shapes = adapter_shapes(spec, rank=rank, matrices=matrices)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def init_adapters(spec: DecoderSpec, key, *, rank: int, matrices):
    """Fresh adapters: A of variance 1 / in, whatever the other matrices, and B of 0."""

    def make(path, leaf):
        name, _, part = path[-1].key.rpartition("_")
        if part == "b":
            return jnp.zeros(leaf.shape, leaf.dtype)
        own = jax.random.fold_in(key, MATRICES.index(name))
        deviation = math.prod(leaf.shape[1:-1]) ** -0.5
        return deviation * jax.random.normal(own, leaf.shape, leaf.dtype)

    shapes = adapter_shapes(spec, rank=rank, matrices=matrices)
    return jax.tree_util.tree_map_with_path(make, shapes)


def joined(params, adapters, scale: float):
    """One tree for a `Decoder`, in which adapters act without being merged.

    The gradient by the adapters, which all flows through the r numbers between A and B,
    needs none by the weights.

    Args:
        params: of the network, frozen.
        adapters: a tree of theirs; further leaves, such as a value head, are taken
            over.
        scale: alpha / r.
    """

    def scaled(path, leaf):
        name, _, part = path[-1].key.rpartition("_")
        return scale * leaf if part == "b" and name in MATRICES else leaf

    return _union(params, jax.tree_util.tree_map_with_path(scaled, adapters))


def _union(a, b):
    """Two nested dicts in one; no leaf is in both."""
    both = a.keys() & b.keys()
    return {**a, **b, **{name: _union(a[name], b[name]) for name in both}}


def merged(params, adapters, scale: float, *, dtype=jnp.float32):
    """Plain parameters W + scale x A B, added up in float32 and then cast.

    Args:
        params: of the network, float32.
        adapters: a tree of theirs, and nothing else.
        scale: alpha / r.
        dtype: of the result.
    """
    layers = dict(params["layers"])
    layers["attention"] = dict(layers["attention"])
    own = dict(adapters["layers"])
    own |= own.pop("attention", {})
    changes = {}  # matrix -> [(the part of it, A, B)]
    for name in sorted({leaf[:-2] for leaf in own}):
        matrix, index = name, ...
        if name in ("gate", "up") and "gate_up" in layers:
            matrix, index = "gate_up", (slice(None), ("gate", "up").index(name))
        changes.setdefault(matrix, []).append(
            (index, own[f"{name}_a"], own[f"{name}_b"])
        )
    for name, parts in changes.items():
        place = layers["attention"] if name in _IN_ATTENTION else layers
        place[name] = _changed(place[name], parts, scale, dtype)
    return jax.tree.map(lambda x: x.astype(dtype), params | {"layers": layers})


def _changed(kernel, parts, scale, dtype):
    """[L, ...] of the dtype: kernel + scale x A B, of each (index, A, B) in its part.

    Layer by layer, in place where nothing is cast: all at once, XLA holds the changes
    of all matrices beside their sums.
    """
    in_place = kernel.dtype == dtype

    def one(layer, whole):
        own = (whole if in_place else kernel)[layer]
        for index, a, b in parts:
            rank = a.shape[-1]
            change = jnp.matmul(
                a[layer].reshape(-1, rank),
                b[layer].reshape(rank, -1),
                precision=jax.lax.Precision.HIGHEST,
            )
            own = own.at[index].add(scale * change.reshape(own[index].shape))
        return whole.at[layer].set(own.astype(dtype))

    begun = kernel if in_place else jnp.zeros(kernel.shape, dtype)
    return jax.lax.fori_loop(0, len(kernel), one, begun)


def make_merge(mesh: Mesh, scale: float, dtype, *, donates: bool = False):
    """`merged` as a compiled function of params and adapters, laid out over a mesh.

    Args:
        mesh: devices.
        scale, dtype: see `merged`.
        donates: the result takes the place of params, which must not be touched again.
    """

    def merge(params, adapters):
        whole = merged(params, adapters, scale, dtype=dtype)
        shardings = param_shardings(whole, mesh)
        return jax.lax.with_sharding_constraint(whole, shardings)

    return jax.jit(merge, donate_argnums=(0,) if donates else ())
