"""Attention, within rows of text and to a cache of what rows have read before.

A cache has one slot a position: position p of row b lives at `k[layer, b, :, p]`,
whatever the row's length, so ragged rows need no padding on the left and no mask beyond
"slot <= my own position".

Dimensions: B rows, T new tokens, S cached slots, H heads, K key/value heads, G = H / K
heads sharing one, C head width, L layers.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from rsearch.models.attention.pages import Pages, attend_pages, read_pages, write_pages
from rsearch.models.attention.splash import BLOCK, LANES, splash_after
from rsearch.models.sharding import cut_axes, platform_of

REACH_STEP = 64  # slots; a cache is read in eighths of it, rounded up to these
PIECE = 128  # new tokens of a row: so many look equally far, or more


class Cache(NamedTuple):
    """Keys and values of all layers, [L, B, K, S, C] each, in the compute dtype."""

    k: jax.Array
    v: jax.Array


def empty_cache(spec, num_rows: int, num_slots: int, dtype) -> Cache:
    """A cache of zeros for a DecoderSpec; a slot is read only after it was written."""
    shape = (spec.num_layers, num_rows, spec.num_kv_heads, num_slots, spec.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def attend(q, k, v, visible, *, divides_last=False):
    """Grouped-query attention with float32 softmax, on one device.

    Args:
        q: [B, T, H, C] queries.
        k, v: [B, K, S, C] keys and values; H is a multiple of K.
        visible: [B, T, S] bool, True where the query may look.
        divides_last: sums of values are divided, not weights before them. A CPU is a
            fifth faster so, but for gradients slower.

    Returns:
        [B, T, H, C] in the queries' dtype.
    """
    # Rows and heads are one axis, and so are heads that share one and tokens: XLA's CPU
    # backend is up to three times slower with more axes of a batch than one.
    (b, t, h, c), (_, kv_heads, s, _) = q.shape, k.shape
    q = q.reshape(b, t, kv_heads, h // kv_heads, c).transpose(0, 2, 3, 1, 4)
    q = q.reshape(b * kv_heads, -1, c)
    k, v = (x.reshape(b * kv_heads, s, c) for x in (k, v))
    scores = jnp.einsum("ntc,nsc->nts", q, k, preferred_element_type=jnp.float32)
    scores = (scores / math.sqrt(c)).reshape(b, h, t, s)
    scores = jnp.where(visible[:, None], scores, jnp.finfo(jnp.float32).min)
    if divides_last:
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        # Made once for both products.
        weights = jax.lax.optimization_barrier(weights.reshape(b * kv_heads, -1, s))
        mass = jnp.einsum("nts,nsc->ntc", weights, jnp.ones((len(weights), s, 1)))
    else:
        weights = jax.nn.softmax(scores, axis=-1).reshape(b * kv_heads, -1, s)
    out = jnp.einsum("nts,nsc->ntc", weights.astype(v.dtype), v)
    if divides_last:
        out = (out / mass).astype(v.dtype)
    return out.reshape(b, h, t, c).swapaxes(1, 2)


def attend_once(q, k, v, visible):
    """`attend` for one token of one row, the way CPUs do it fastest.

    A head's scores are a matrix times a vector, which XLA's CPU backend reads once; in
    products of all heads that share keys it takes half as long again.

    Args:
        q: [1, 1, H, C].
        k, v: [1, K, S, C].
        visible: [1, 1, S] bool.
    """
    kv_heads, width = k.shape[1], k.shape[3]
    queries = q.reshape(kv_heads, -1, width)
    dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
    by_head = [[dot(keys, x) for x in own] for keys, own in zip(k[0], queries)]
    scores = jnp.stack([jnp.stack(own) for own in by_head])
    scores = jnp.where(visible, scores / math.sqrt(width), jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("nsc,nts->nct", v[0], weights).swapaxes(1, 2).reshape(q.shape)


class Place(NamedTuple):
    """Where new tokens stand in a cache.

    Attributes:
        positions: [B, T] int32 slots written; at or past S is padding, which writes
            nothing.
        rows: [B] int32, the cache's row of each; one past the last writes nothing.
            None where the tokens have as many rows as the cache.
        reach: [B, n] int32, which of `reaches` covers all that each of the `pieces` of
            a row's tokens may look at; -1 where all of them are padding.
        table: [B, n] int32 pages of each, of a cache in pages; `rows` is then None.
    """

    positions: jax.Array
    rows: jax.Array | None
    reach: jax.Array
    table: jax.Array | None = None


def reaches(num_slots: int, step: int = REACH_STEP) -> list[int]:
    """Ascending numbers of slots, the last one all: queries look at the first enough.

    A conversation is mostly far shorter than its budgets allow.

    Args:
        num_slots: S.
        step: that all but the last are multiples of.
    """
    step = -(-num_slots // (8 * step)) * step
    return [*range(step, num_slots, step), num_slots]


def covering(sizes: list[int], needed) -> jax.Array:
    """int32: which of ascending sizes is the first that is as large as needed."""
    # One comparison with each: a search by halves is a loop of many small steps.
    which = jnp.searchsorted(jnp.array(sizes), needed, method="compare_all")
    return which.astype(jnp.int32)


def pieces(num_tokens: int) -> int:
    """How many equal pieces a row's new tokens look back in, where rows do one by one.

    The first of many tokens need not look as far as the last.

    Args:
        num_tokens: T.
    """
    most = max(1, num_tokens // PIECE)
    return next(n for n in range(most, 0, -1) if num_tokens % n == 0)


def place_in(cache: Cache | Pages, positions, rows=None, table=None) -> Place:
    """The Place of tokens at these positions."""
    if table is None:
        sizes = reaches(cache.k.shape[3])
    else:
        size = cache.k.shape[3]
        sizes = reaches(table.shape[1] * size, size)
    own = positions.reshape(len(positions), pieces(positions.shape[1]), -1)
    longest = jnp.max(jnp.where(own < sizes[-1], own, -1), axis=2)
    reach = covering(sizes, longest + 1)
    return Place(positions, rows, jnp.where(longest < 0, -1, reach), table)


def extend_cache(cache: Cache, layer, k, v, place: Place) -> Cache:
    """The cache with keys and values [B, T, K, C] of a layer written to their place."""
    rows = jnp.arange(len(k)) if place.rows is None else place.rows
    at = (layer, rows[:, None], slice(None), place.positions)
    return Cache(cache.k.at[at].set(k, mode="drop"), cache.v.at[at].set(v, mode="drop"))


def attend_cached(
    q, k, v, cache: Cache | Pages, layer, place: Place, mesh: Mesh | None = None
):
    """Writes new tokens to a layer's cache; each then looks up to its own position.

    Reads the cache no further than the longest row of the call reaches, or on CPUs each
    row no further than it reaches itself. Every device has to do with its own rows and
    heads alone, and asks no other for any.

    Args:
        q, k, v: [B, T, H or K, C]; where T > 1, a row's tokens stand one after another
            in its cache, and what is padding comes last.
        cache: as it was.
        layer: the number of the layer.
        place: of the tokens. Where B is a multiple of the parts that rows are cut into,
            each part of `place.rows` names rows, or of `place.table` pages, of the same
            part of the cache.
        mesh: of the devices that hold all this; None is one device.

    Returns:
        [B, T, H, C] in the queries' dtype, and the cache.
    """
    platform = platform_of(mesh)
    attend_here = _attend_paged if isinstance(cache, Pages) else _attend_cached
    if mesh is None or mesh.size == 1:
        return attend_here(q, k, v, cache, layer, place, platform)
    axes = (1, 0) if isinstance(cache, Pages) else (1, 2)  # of rows or pages, and heads
    cached, kv_heads = (cache.k.shape[axis] for axis in axes)
    rows, heads = cut_axes(mesh, kv_heads, len(q), cached)

    def own(q, k, v, cache, layer, place):
        def local(numbers):
            """Rows or pages by their number here; those of others are nobody's."""
            if numbers is None or rows is None:
                return numbers
            count = cache.k.shape[axes[0]]
            numbers -= jax.lax.axis_index(rows) * count
            return jnp.where((numbers >= 0) & (numbers < count), numbers, count)

        place = place._replace(rows=local(place.rows), table=local(place.table))
        return attend_here(q, k, v, cache, layer, place, platform)

    kept = [None] * 3
    kept[axes[0]], kept[axes[1]] = rows, heads
    caches = type(cache)(PartitionSpec(*kept), PartitionSpec(*kept))
    new, whole = PartitionSpec(rows, None, heads), PartitionSpec()
    places = jax.tree.map(lambda x: PartitionSpec(rows), place)
    return jax.shard_map(
        own,
        mesh=mesh,
        in_specs=(new, new, new, caches, whole, places),
        out_specs=(new, caches),
        check_vma=False,
    )(q, k, v, cache, jnp.asarray(layer), place)


def _attend_cached(q, k, v, cache, layer, place, platform):
    """`attend_cached` on one device."""
    cache = extend_cache(cache, layer, k, v, place)

    def read(place, num_slots):
        def cut(x):
            if place.rows is None:
                shape = (1, *x.shape[1:3], num_slots, x.shape[4])
                return jax.lax.dynamic_slice(x, (layer, 0, 0, 0, 0), shape)[0]
            # As an index of arrays and slices, all rows of all layers were cut first.
            shape = (1, 1, x.shape[2], num_slots, x.shape[4])

            def one(row):
                return jax.lax.dynamic_slice(x, (layer, row, 0, 0, 0), shape)[0, 0]

            return jax.vmap(one)(place.rows)

        return cut(cache.k), cut(cache.v)

    return _look_far(q, k, v, place, read, reaches(cache.k.shape[3]), platform), cache


def _attend_paged(q, k, v, pages, layer, place, platform):
    """`attend_cached` on one device, to a cache in pages."""
    table, size = place.table, pages.k.shape[3]
    num_slots = table.shape[1] * size
    pages = write_pages(pages, layer, k, v, table, place.positions)
    is_fit = q.dtype == jnp.bfloat16 and q.shape[3] % LANES == 0
    if platform == "tpu" and is_fit and q.shape[1] == 1:
        position = place.positions[:, 0]
        length = jnp.where(position < num_slots, position, 0) + 1
        return attend_pages(q[:, 0], pages, layer, table, length)[:, None], pages

    def read(place, num_slots):
        return read_pages(pages, layer, place.table[:, : num_slots // size])

    sizes = reaches(num_slots, size)
    return _look_far(q, k, v, place, read, sizes, platform), pages


def _look_far(q, k, v, place, read, sizes, platform):
    """What new tokens see, of a cache that is read no further than they reach.

    A CPU looks at one row after the other, of many tokens one piece after the other,
    each as far as it reaches itself. What it reads then stays in the processor's cache,
    rows that only wait cost nothing, and what a row sees depends on no other, to the
    last bit.

    Args:
        q, k, v, place: as `attend_cached` takes them, of one device.
        read: the first slots, [B, K, s, C] keys and values, by a Place and s.
        sizes: see `reaches`.
        platform: of the device.
    """

    def look(num_slots, q, k, v, place):
        kept = read(place, num_slots)
        return _look(q, k, v, *kept, sizes[-1], place, platform)

    branches = [functools.partial(look, size) for size in sizes]
    if platform != "cpu":
        longest = jnp.maximum(jnp.max(place.reach), 0)
        return jax.lax.switch(longest, branches, q, k, v, place)

    if place.rows is None and place.table is None:
        place = place._replace(rows=jnp.arange(len(q), dtype=jnp.int32))
    count = place.reach.shape[1]

    def cut(x):
        return x.reshape(len(x) * count, -1, *x.shape[2:])

    def for_each(x):
        return x if x is None else jnp.repeat(x, count, axis=0)

    place = Place(
        cut(place.positions),
        for_each(place.rows),
        cut(place.reach),
        for_each(place.table),
    )

    def nothing(q, *_):
        return jnp.zeros_like(q)

    def one(piece):
        piece = jax.tree.map(lambda x: x[None], piece)
        reach = piece[-1].reach[0, 0]
        return jax.lax.switch(reach + 1, [nothing, *branches], *piece)[0]

    return jax.lax.map(one, (cut(q), cut(k), cut(v), place)).reshape(q.shape)


def _look(q, k, v, read_k, read_v, num_slots, place, platform):
    """What new tokens see in the first of S slots, [B, K, s, C], and in themselves."""
    positions, read = place.positions, read_k.shape[2]
    if platform == "tpu" and q.shape[1] > 1 and read > BLOCK:
        before = jnp.where(positions[:, 0] < num_slots, positions[:, 0], 0)
        return splash_after(q, read_k, read_v, k, v, before)
    visible = jnp.arange(read)[None, None] <= positions[:, :, None]
    is_cpu = platform == "cpu"
    if is_cpu and q.shape[:2] == (1, 1):
        return attend_once(q, read_k, read_v, visible)
    return attend(q, read_k, read_v, visible, divides_last=is_cpu)
