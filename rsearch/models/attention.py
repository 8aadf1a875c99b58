"""Attention, within rows of text and to a cache of what rows have read before.

A cache has one slot a position: position p of row b lives at `k[layer, b, :, p]`,
whatever the row's length, so ragged rows need no padding on the left and no mask beyond
"slot <= my own position".

Dimensions: B rows, T new tokens, S cached slots, H heads, K key/value heads, G = H / K
heads sharing one, C head width, L layers.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from rsearch.models.sharding import num_shards, runs_on_tpu
from rsearch.models.splash import BLOCK, splash_after

REACH_STEP = 64  # slots; a cache is read in eighths of it, rounded up to these


class Cache(NamedTuple):
    """Keys and values of all layers, [L, B, K, S, C] each, in the compute dtype."""

    k: jax.Array
    v: jax.Array


def empty_cache(spec, num_rows: int, num_slots: int, dtype) -> Cache:
    """A cache of zeros for a DecoderSpec; a slot is read only after it was written."""
    shape = (spec.num_layers, num_rows, spec.num_kv_heads, num_slots, spec.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def attend(q, k, v, visible):
    """Grouped-query attention with float32 softmax.

    Args:
        q: [B, T, H, C] queries.
        k, v: [B, K, S, C] keys and values; H is a multiple of K.
        visible: [B, T, S] bool, True where the query may look.

    Returns:
        [B, T, H, C] in the queries' dtype.
    """
    b, t, h, c = q.shape
    groups = h // k.shape[1]
    q = q.reshape(b, t, k.shape[1], groups, c)
    scores = jnp.einsum("btkgc,bksc->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(c)
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bksc->btkgc", weights, v).reshape(b, t, h, c)


class Place(NamedTuple):
    """Where new tokens stand in a cache.

    Attributes:
        positions: [B, T] int32 slots written; at or past S is padding, which writes
            nothing.
        rows: [B] int32, the cache's row of each; one past the last writes nothing.
            None where the tokens have as many rows as the cache.
        reach: which of `reaches` covers all that any of them may look at.
    """

    positions: jax.Array
    rows: jax.Array | None
    reach: jax.Array


def reaches(num_slots: int) -> list[int]:
    """Ascending numbers of slots, the last one all: queries look at the first enough.

    A conversation is mostly far shorter than its budgets allow.
    """
    step = -(-num_slots // (8 * REACH_STEP)) * REACH_STEP
    return [*range(step, num_slots, step), num_slots]


def place_in(cache: Cache, positions, rows=None) -> Place:
    """The Place of tokens at these positions."""
    num_slots = cache.k.shape[3]
    longest = jnp.max(jnp.where(positions < num_slots, positions, 0))
    sizes = jnp.array(reaches(num_slots))
    return Place(positions, rows, jnp.searchsorted(sizes, longest + 1))


def extend_cache(cache: Cache, layer, k, v, place: Place) -> Cache:
    """The cache with keys and values [B, T, K, C] of a layer written to their place."""
    rows = jnp.arange(len(k)) if place.rows is None else place.rows
    at = (layer, rows[:, None], slice(None), place.positions)
    return Cache(cache.k.at[at].set(k, mode="drop"), cache.v.at[at].set(v, mode="drop"))


def attend_cached(q, k, v, cache: Cache, layer, place: Place, mesh: Mesh | None = None):
    """Writes new tokens to a layer's cache; each then looks up to its own position.

    Reads the cache no further than the longest row of the call reaches. Every device
    has to do with its own rows and heads alone, and asks no other for any.

    Args:
        q, k, v: [B, T, H or K, C]; where T > 1, a row's tokens stand one after another
            in its cache, and what is padding comes last.
        cache: as it was.
        layer: the number of the layer.
        place: of the tokens. Where `place.rows` has a multiple of the parts that rows
            are cut into, each part of it names rows of the same part of the cache.
        mesh: of the devices that hold all this; None is one device.

    Returns:
        [B, T, H, C] in the queries' dtype, and the cache.
    """
    if mesh is None or mesh.size == 1:
        return _attend_cached(q, k, v, cache, layer, place, runs_on_tpu(mesh))
    parts, cached_rows, kv_heads = num_shards(mesh), *cache.k.shape[1:3]
    is_cut = len(q) % parts == 0 and cached_rows % parts == 0
    rows = ("data", "fsdp") if is_cut else None
    heads = "tensor" if kv_heads % mesh.shape["tensor"] == 0 else None

    def own(q, k, v, cache, layer, place):
        if place.rows is not None and is_cut:
            own_rows = cache.k.shape[1]
            local = place.rows - jax.lax.axis_index(rows) * own_rows
            is_own = (local >= 0) & (local < own_rows)
            place = place._replace(rows=jnp.where(is_own, local, own_rows))
        return _attend_cached(q, k, v, cache, layer, place, runs_on_tpu(mesh))

    new, kept = PartitionSpec(rows, None, heads), PartitionSpec(None, rows, heads)
    row, whole = PartitionSpec(rows), PartitionSpec()
    caches = Cache(kept, kept)
    places = Place(row, None if place.rows is None else row, whole)
    return jax.shard_map(
        own,
        mesh=mesh,
        in_specs=(new, new, new, caches, whole, places),
        out_specs=(new, caches),
        check_vma=False,
    )(q, k, v, cache, jnp.asarray(layer), place)


def _attend_cached(q, k, v, cache, layer, place, on_tpu):
    """`attend_cached` on one device."""
    cache = extend_cache(cache, layer, k, v, place)

    def look(num_slots):
        def read(x):
            if place.rows is not None:
                return x[layer, place.rows, :, :num_slots]
            shape = (1, *x.shape[1:3], num_slots, x.shape[4])
            return jax.lax.dynamic_slice(x, (layer, 0, 0, 0, 0), shape)[0]

        if on_tpu and q.shape[1] > 1 and num_slots > BLOCK:
            first = place.positions[:, 0]
            before = jnp.where(first < cache.k.shape[3], first, 0)
            return splash_after(q, read(cache.k), read(cache.v), k, v, before)
        visible = jnp.arange(num_slots)[None, None] <= place.positions[:, :, None]
        return attend(q, read(cache.k), read(cache.v), visible)

    sizes = reaches(cache.k.shape[3])
    branches = [lambda size=size: look(size) for size in sizes]
    return jax.lax.switch(place.reach, branches), cache
