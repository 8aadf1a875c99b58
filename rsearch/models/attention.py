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


def attend_cached(q, cache: Cache, layer, place: Place):
    """`attend` to what a layer's cache holds, each query up to its own position.

    Reads the cache no further than the longest row of the call reaches.
    """

    def look(num_slots):
        def read(x):
            if place.rows is not None:
                return x[layer, place.rows, :, :num_slots]
            shape = (1, *x.shape[1:3], num_slots, x.shape[4])
            return jax.lax.dynamic_slice(x, (layer, 0, 0, 0, 0), shape)[0]

        visible = jnp.arange(num_slots)[None, None] <= place.positions[:, :, None]
        return attend(q, read(cache.k), read(cache.v), visible)

    sizes = reaches(cache.k.shape[3])
    branches = [lambda size=size: look(size) for size in sizes]
    return jax.lax.switch(place.reach, branches)
