"""Attention to a cache of the keys and values of each row's earlier tokens.

A cache has one slot per position: position p of row b is stored at `k[layer, b, :, p]`,
whatever the row's length. Ragged rows therefore need no left padding and no mask other
than "slot <= the query's position".

Dimensions: B rows, T new tokens, S cached slots, H heads, K key/value heads, G = H / K
query heads per key/value head, C head width, L layers.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from rsearch.models.attention.flash import has_gpu_kernels, is_power_of_2
from rsearch.models.attention.pages import (
    Pages,
    attend_pages,
    from_cached,
    read_pages,
    to_cached,
    write_pages,
)
from rsearch.models.attention.splash import BLOCK, LANES, splash_after
from rsearch.models.sharding import device_of, shard_axes
from rsearch.models.spec import DecoderSpec

SHORT_READ = 128  # slots; in a cache whose eighths are longer, short rows read less
REACH_STEP = 64  # slots; read lengths are eighths of the cache, rounded up to this
CHUNK_TOKENS = 128  # least number of a row's new tokens that share a read length


class Cache(NamedTuple):
    """Keys and values of all layers, [L, B, K, S, C] each."""

    k: jax.Array
    v: jax.Array


def empty_cache(
    spec: DecoderSpec, num_rows: int, num_slots: int, dtype: jax.typing.DTypeLike
) -> Cache:
    """Return a cache of zeros; a slot is read only after it was written.

    Args:
        spec: the decoder's shape.
        num_rows: B.
        num_slots: S.
        dtype: dtype of the arrays; see `rsearch.models.attention.pages.cache_dtype`.
    """
    shape = (spec.num_layers, num_rows, spec.num_kv_heads, num_slots, spec.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    *,
    divides_last: bool = False,
) -> jax.Array:
    """Compute grouped-query attention with a float32 softmax, on one device.

    Args:
        q: [B, T, H, C] queries.
        k, v: [B, K, S, C] keys and values; H is a multiple of K.
        visible: [B, T, S] bool, True where the query may attend.
        divides_last: normalise the weighted sums of values instead of the weights. This
            is faster on CPUs, but slower for gradients.

    Returns:
        [B, T, H, C] in the queries' dtype.
    """
    # Rows and key/value heads are merged into one axis, and so are tokens and the query
    # heads that share keys: XLA's CPU backend is much slower with several batch axes.
    (b, t, h, c), (_, kv_heads, s, _) = q.shape, k.shape
    q = q.reshape(b, t, kv_heads, h // kv_heads, c).transpose(0, 2, 3, 1, 4)
    q = q.reshape(b * kv_heads, -1, c)
    k, v = (x.reshape(b * kv_heads, s, c) for x in (k, v))
    scores = jnp.einsum("ntc,nsc->nts", q, k, preferred_element_type=jnp.float32)
    scores = (scores / math.sqrt(c)).reshape(b, h, t, s)
    scores = jnp.where(visible[:, None], scores, jnp.finfo(jnp.float32).min)
    if divides_last:
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        # With the barrier, XLA computes the weights only once for both products.
        weights = jax.lax.optimization_barrier(weights.reshape(b * kv_heads, -1, s))
        mass = jnp.einsum("nts,nsc->ntc", weights, jnp.ones((len(weights), s, 1)))
    else:
        weights = jax.nn.softmax(scores, axis=-1).reshape(b * kv_heads, -1, s)
    sum_dtype = jnp.float32 if divides_last else None  # makes bfloat16 fast on CPUs
    weights = weights.astype(v.dtype)
    out = jnp.einsum("nts,nsc->ntc", weights, v, preferred_element_type=sum_dtype)
    if divides_last:
        out = (out / mass).astype(v.dtype)
    return out.reshape(b, h, t, c).swapaxes(1, 2)


def attend_single_token(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array
) -> jax.Array:
    """Compute `attend` for one token of one row, in the form that is fastest on CPUs.

    A head's scores are a matrix-vector product, for which XLA's CPU backend reads the
    matrix once. A single product for all heads that share keys is slower, and so are
    products of bfloat16.

    Args:
        q: [1, 1, H, C] query.
        k, v: [1, K, S, C] keys and values.
        visible: [1, 1, S] bool.

    Returns:
        [1, 1, H, C].
    """
    kv_heads, width = k.shape[1], k.shape[3]
    queries, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    queries = queries.reshape(kv_heads, -1, width)
    head_scores = [[keys @ x for x in group] for keys, group in zip(k[0], queries)]
    scores = jnp.stack([jnp.stack(group) for group in head_scores])
    scores = jnp.where(visible, scores / math.sqrt(width), jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("nsc,nts->nct", v[0], weights).swapaxes(1, 2)
    return out.reshape(q.shape).astype(q.dtype)


class CacheIndex(NamedTuple):
    """The rows and slots of a cache that new tokens belong to.

    Attributes:
        positions: [B, T] int32 slots to write; positions >= S mark padding, which
            writes nothing.
        rows: [B] int32 rows of the cache; an index one past the last row writes
            nothing. None means all rows in order.
        reach: [B, n] int32, index into `reach_lengths` of the number of slots that
            each of the n chunks of a row's tokens may attend to; -1 where a chunk is
            all padding.
        table: [B, n] int32 pages of each row of a paged cache; `rows` is then None.
    """

    positions: jax.Array
    rows: jax.Array | None
    reach: jax.Array
    table: jax.Array | None = None


def prefix_lengths(num_slots: int, step: int = REACH_STEP) -> list[int]:
    """Return ascending read lengths in slots; a query uses the first that suffices.

    The last one is all slots. Most conversations are much shorter than their budgets
    allow.

    Args:
        num_slots: S.
        step: all lengths except the last are multiples of this.
    """
    step = -(-num_slots // (8 * step)) * step
    return [*range(step, num_slots, step), num_slots]


def reach_lengths(num_slots: int, step: int = REACH_STEP) -> list[int]:
    """Return ascending numbers of slots that a row's part of a cache may be read to.

    In a small cache they are the eighths of `prefix_lengths`. A large cache, in which
    short rows would read too much, begins with a quarter and a half of an eighth, and
    leaves out five and seven eighths.

    Args:
        num_slots: S.
        step: see `prefix_lengths`.
    """
    eighth = -(-num_slots // (8 * step)) * step
    if eighth <= SHORT_READ:
        return prefix_lengths(num_slots, step)
    # At most eight, as in a small cache: each length is compiled for each layer.
    quarters = (1, 2, 4, 8, 12, 16, 24)  # quarters of an eighth
    lengths = {-(-eighth * count // (4 * step)) * step for count in quarters}
    return [*sorted(n for n in lengths if n < num_slots), num_slots]


def first_covering_index(sizes: list[int], needed: jax.Array) -> jax.Array:
    """Return the index of the first size that is at least as large as needed.

    Args:
        sizes: ascending numbers.
        needed: [...] int.

    Returns:
        [...] int32.
    """
    # Comparing with all sizes is one operation; a binary search is a loop.
    index = jnp.searchsorted(jnp.array(sizes), needed, method="compare_all")
    return index.astype(jnp.int32)


def num_chunks(num_tokens: int) -> int:
    """Return the number of equal chunks that CPUs split a row's new tokens into.

    Each chunk reads the cache only as far as it needs: among many tokens, the first
    ones attend to fewer slots than the last.

    Args:
        num_tokens: T.
    """
    limit = max(1, num_tokens // CHUNK_TOKENS)
    return next(n for n in range(limit, 0, -1) if num_tokens % n == 0)


def index_cache(
    cache: Cache | Pages,
    positions: jax.Array,
    rows: jax.Array | None = None,
    table: jax.Array | None = None,
) -> CacheIndex:
    """Return the CacheIndex of new tokens.

    Args:
        cache: the cache that they are written to.
        positions: [B, T] int32 slots, >= S for padding.
        rows: [B] int32 rows of the cache; None means all rows in order.
        table: [B, n] int32 pages of each row, for a paged cache.
    """
    if table is None:
        sizes = reach_lengths(cache.k.shape[3])
    else:
        size = cache.k.shape[3]
        sizes = reach_lengths(table.shape[1] * size, size)
    chunks = positions.reshape(len(positions), num_chunks(positions.shape[1]), -1)
    last_position = jnp.max(jnp.where(chunks < sizes[-1], chunks, -1), axis=2)
    reach = first_covering_index(sizes, last_position + 1)
    return CacheIndex(positions, rows, jnp.where(last_position < 0, -1, reach), table)


def extend_cache(
    cache: Cache, layer: jax.Array | int, k: jax.Array, v: jax.Array, index: CacheIndex
) -> Cache:
    """Write one layer's new keys and values to a cache and return it.

    Args:
        cache: the cache before the call.
        layer: the number of the layer.
        k, v: [B, T, K, C] keys and values of the new tokens.
        index: rows and slots of the tokens.
    """
    rows = jnp.arange(len(k)) if index.rows is None else index.rows
    # Heads are indexed separately: to write all heads of a token together, TPUs would
    # make them contiguous, and copy all layers' caches from and to the layout that
    # attention reads.
    heads = jnp.arange(k.shape[2])[None, :, None]
    indices = (layer, rows[:, None, None], heads, index.positions[:, None])
    k, v = (to_cached(x.swapaxes(1, 2), cache.k.dtype) for x in (k, v))
    return Cache(
        cache.k.at[indices].set(k, mode="drop"), cache.v.at[indices].set(v, mode="drop")
    )


def attend_cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: Cache | Pages,
    layer: jax.Array | int,
    index: CacheIndex,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Cache | Pages]:
    """Write new tokens to a layer's cache; let each attend up to its own position.

    The cache is read only as far as the longest row of the call needs, and on CPUs only
    as far as each row itself needs. Each device computes its own rows and heads; there
    is no communication.

    Args:
        q: [B, T, H, C] queries. If T > 1, a row's tokens have consecutive slots, and
            padding comes last.
        k, v: [B, T, K, C] keys and values of the new tokens.
        cache: the cache before the call, made for the same dtype; see `empty_cache`.
        layer: the number of the layer.
        index: rows and slots of the tokens. If B is a multiple of the number of row
            shards, each shard of `index.rows` (or `index.table`) names only rows (or
            pages) in the same shard of the cache.
        mesh: mesh of the devices that hold these arrays; None means one device.

    Returns:
        [B, T, H, C] in the queries' dtype, and the cache.
    """
    device = device_of(mesh)
    attend_on_device = _attend_paged if isinstance(cache, Pages) else _attend_cached
    if mesh is None or mesh.size == 1:
        return attend_on_device(q, k, v, cache, layer, index, device)
    # The cache's axis of rows (or pages) and its axis of heads.
    axes = (1, 0) if isinstance(cache, Pages) else (1, 2)
    num_cached, kv_heads = (cache.k.shape[axis] for axis in axes)
    rows, heads = shard_axes(mesh, kv_heads, len(q), num_cached)

    def attend_shard(q, k, v, cache, layer, index):
        def renumber(numbers):
            """Renumber this shard's rows or pages from 0; others become invalid."""
            if numbers is None or rows is None:
                return numbers
            count = cache.k.shape[axes[0]]
            numbers -= jax.lax.axis_index(rows) * count
            return jnp.where((numbers >= 0) & (numbers < count), numbers, count)

        index = index._replace(rows=renumber(index.rows), table=renumber(index.table))
        return attend_on_device(q, k, v, cache, layer, index, device)

    cache_axes = [None] * 3
    cache_axes[axes[0]], cache_axes[axes[1]] = rows, heads
    caches = type(cache)(PartitionSpec(*cache_axes), PartitionSpec(*cache_axes))
    token_spec, replicated = PartitionSpec(rows, None, heads), PartitionSpec()
    index_specs = jax.tree.map(lambda x: PartitionSpec(rows), index)
    return jax.shard_map(
        attend_shard,
        mesh=mesh,
        in_specs=(token_spec, token_spec, token_spec, caches, replicated, index_specs),
        out_specs=(token_spec, caches),
        check_vma=False,
    )(q, k, v, cache, jnp.asarray(layer), index)


def _attend_cached(q, k, v, cache, layer, index, device):
    """Compute `attend_cached` on one device."""
    cache = extend_cache(cache, layer, k, v, index)

    def read(index, num_slots):
        def cut(x):
            if index.rows is None:
                shape = (1, *x.shape[1:3], num_slots, x.shape[4])
                return jax.lax.dynamic_slice(x, (layer, 0, 0, 0, 0), shape)[0]
            # Indexing with arrays and slices would make XLA copy all layers first.
            shape = (1, 1, x.shape[2], num_slots, x.shape[4])

            def cut_row(row):
                return jax.lax.dynamic_slice(x, (layer, row, 0, 0, 0), shape)[0, 0]

            return jax.vmap(cut_row)(index.rows)

        return from_cached(cut(cache.k)), from_cached(cut(cache.v))

    sizes = reach_lengths(cache.k.shape[3])
    return _attend_chunks(q, k, v, index, read, sizes, device.platform), cache


def _attend_paged(q, k, v, pages, layer, index, device):
    """Compute `attend_cached` on one device, with a paged cache."""
    table, size = index.table, pages.k.shape[3]
    num_slots = table.shape[1] * size
    pages = write_pages(pages, layer, k, v, table, index.positions)
    width, platform = q.shape[3], device.platform
    has_kernels = has_gpu_kernels(device, q.dtype, width)
    can_use_kernel = {
        "tpu": width % LANES == 0,
        "gpu": has_kernels and is_power_of_2(width, size),
    }
    if q.dtype == jnp.bfloat16 and q.shape[1] == 1 and can_use_kernel.get(platform):
        position = index.positions[:, 0]
        length = jnp.where(position < num_slots, position, 0) + 1
        out = attend_pages(q[:, 0], pages, layer, table, length, platform=platform)
        return out[:, None], pages

    def read(index, num_slots):
        return read_pages(pages, layer, index.table[:, : num_slots // size])

    sizes = reach_lengths(num_slots, size)
    return _attend_chunks(q, k, v, index, read, sizes, platform), pages


def _attend_chunks(q, k, v, index, read, sizes, platform):
    """Let new tokens attend to the cache, reading it only as far as they need.

    On a CPU each chunk of a row is computed separately and reads as far as it needs.
    What it reads then stays in the processor's cache, padding rows cost nothing, and a
    row's result is bitwise independent of other rows.

    Args:
        q, k, v, index: one device's part of the arguments of `attend_cached`.
        read: (CacheIndex, s) -> [B, K, s, C] keys and values of the first s slots.
        sizes: from `reach_lengths`.
        platform: the device's platform.
    """

    def attend_slots(num_slots, q, k, v, index):
        cached_kv = read(index, num_slots)
        return _attend_prefix(q, k, v, *cached_kv, sizes[-1], index, platform)

    branches = [functools.partial(attend_slots, size) for size in sizes]
    if platform != "cpu":
        max_reach = jnp.maximum(jnp.max(index.reach), 0)
        return jax.lax.switch(max_reach, branches, q, k, v, index)

    if index.rows is None and index.table is None:
        index = index._replace(rows=jnp.arange(len(q), dtype=jnp.int32))
    count = index.reach.shape[1]

    def split_chunks(x):
        return x.reshape(len(x) * count, -1, *x.shape[2:])

    def repeat_chunks(x):
        return x if x is None else jnp.repeat(x, count, axis=0)

    index = CacheIndex(
        split_chunks(index.positions),
        repeat_chunks(index.rows),
        split_chunks(index.reach),
        repeat_chunks(index.table),
    )

    def skip_padding(q, *_):
        return jnp.zeros_like(q)

    def attend_chunk(chunk):
        chunk = jax.tree.map(lambda x: x[None], chunk)
        reach = chunk[-1].reach[0, 0]
        out = jax.lax.switch(reach + 1, [skip_padding, *branches], *chunk)[0]
        # To write one chunk into a bfloat16 stack, XLA would widen the whole stack.
        return out.astype(jnp.float32)

    out = jax.lax.map(
        attend_chunk, (split_chunks(q), split_chunks(k), split_chunks(v), index)
    )
    return out.reshape(q.shape).astype(q.dtype)


def _attend_prefix(q, k, v, read_k, read_v, num_slots, index, platform):
    """Let new tokens attend to the first s slots [B, K, s, C] and to themselves."""
    positions, num_read = index.positions, read_k.shape[2]
    if platform == "tpu" and q.shape[1] > 1 and num_read > BLOCK:
        num_earlier = jnp.where(positions[:, 0] < num_slots, positions[:, 0], 0)
        return splash_after(q, read_k, read_v, k, v, num_earlier)
    visible = jnp.arange(num_read)[None, None] <= positions[:, :, None]
    is_cpu = platform == "cpu"
    if is_cpu and q.shape[:2] == (1, 1):
        return attend_single_token(q, read_k, read_v, visible)
    return attend(q, read_k, read_v, visible, divides_last=is_cpu)
