"""A paged KV cache: each row holds only as many pages as its tokens need.

A row's table lists its pages in order: position p of row b is stored in page
`table[b, p // N]`, at offset p % N. Each page holds all layers of its N tokens.

Dimensions: B rows, T new tokens, n pages per row, P pages in all, N tokens per page, K
key/value heads, C head width, L layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rsearch.models.spec import DecoderSpec

COMPUTE_PAGES = 4  # pages that the TPU kernel processes at once, at most
GPU_TOKENS = 64  # tokens that the GPU kernel processes at once, at least
GPU_SPLITS = 16  # parts of a row that the GPU kernel attends to in parallel, at most
BFLOAT16_BITS = jnp.dtype("uint16")  # cache dtype of bfloat16 numbers stored as bits


class Pages(NamedTuple):
    """Keys and values, [K, P, L, N, C] each."""

    k: jax.Array
    v: jax.Array


def empty_pages(
    spec: DecoderSpec, num_pages: int, page_tokens: int, dtype: jax.typing.DTypeLike
) -> Pages:
    """Return pages of zeros; a token is read only after it was written.

    Args:
        spec: the decoder's shape.
        num_pages: P.
        page_tokens: N.
        dtype: dtype of the arrays; see `cache_dtype`.
    """
    heads, layers = spec.num_kv_heads, spec.num_layers
    shape = (heads, num_pages, layers, page_tokens, spec.head_dim)
    return Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def cache_dtype(dtype: jax.typing.DTypeLike, platform: str) -> jnp.dtype:
    """Return the dtype in which a platform stores keys and values of a dtype.

    To write a token to a bfloat16 array, XLA's CPU backend widens the whole array.
    """
    if platform == "cpu" and dtype == jnp.bfloat16:
        return BFLOAT16_BITS
    return jnp.dtype(dtype)


def to_cached(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Convert keys or values to a cache's dtype."""
    if dtype == BFLOAT16_BITS:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), dtype)
    return x.astype(dtype)


def from_cached(x: jax.Array) -> jax.Array:
    """Convert a cache's keys or values back to numbers."""
    if x.dtype == BFLOAT16_BITS:
        return jax.lax.bitcast_convert_type(x, jnp.bfloat16)
    return x


def write_pages(
    pages: Pages,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    positions: jax.Array,
) -> Pages:
    """Write one layer's new keys and values to pages and return the pages.

    Args:
        pages: the cache before the call.
        layer: the number of the layer.
        k, v: [B, T, K, C] keys and values of the new tokens.
        table: [B, n] int32 pages of each row; P marks a missing page.
        positions: [B, T] int32; positions >= n x N mark padding, which writes nothing.
    """
    heads, num_pages, num_layers, size, width = pages.k.shape
    last = table.shape[1] - 1
    page = jnp.take_along_axis(table, jnp.minimum(positions // size, last), axis=1)
    is_stored = (positions < table.shape[1] * size) & (page < num_pages)
    # Heads, pages and tokens are flattened into one axis: with a separate leading axis
    # of heads, XLA copies all pages for each layer.
    total = heads * num_pages * num_layers * size
    assert total < 2**31, "more tokens than an int32 index can address"
    token_index = (page * num_layers + layer) * size + positions % size
    head_offset = jnp.arange(heads)[None, None] * (total // heads)
    indices = token_index[..., None] + head_offset  # [B, T, K]
    indices = jnp.where(is_stored[..., None], indices, total)

    def put(x, values):
        values = to_cached(values, x.dtype)
        flat = x.reshape(total, width).at[indices].set(values, mode="drop")
        return flat.reshape(x.shape)

    return Pages(put(pages.k, k), put(pages.v, v))


def put_rows(pages: Pages, k: jax.Array, v: jax.Array, table: jax.Array) -> Pages:
    """Write all layers' keys and values of whole rows to pages; return the pages.

    Args:
        pages: the cache before the call.
        k, v: [L, B, K, S, C] keys and values of the first S tokens of each row.
        table: as in `write_pages`; S tokens fit into its n pages.
    """
    size = pages.k.shape[3]
    num_layers, num_rows, heads, tokens, width = k.shape
    count = -(-tokens // size)

    def put(x, values):
        values = jnp.pad(values, ((0, 0),) * 3 + ((0, count * size - tokens), (0, 0)))
        values = values.reshape(num_layers, num_rows, heads, count, size, width)
        return x.at[:, table[:, :count]].set(
            values.transpose(2, 1, 3, 0, 4, 5), mode="drop"
        )

    return Pages(put(pages.k, k), put(pages.v, v))


def read_pages(
    pages: Pages, layer: jax.Array | int, table: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Read a layer's keys and values [B, K, n x N, C] from each row's pages in order.

    Args:
        pages: a cache.
        layer: the number of the layer.
        table: [B, n] int32 pages of each row.
    """

    def take(x):
        rows = jnp.moveaxis(x[:, table, layer], 0, 1)  # [B, K, n, N, C]
        return from_cached(rows.reshape(*rows.shape[:2], -1, rows.shape[-1]))

    return take(pages.k), take(pages.v)


def attend_pages(
    q: jax.Array,
    pages: Pages,
    layer: jax.Array | int,
    table: jax.Array,
    length: jax.Array,
    *,
    platform: str = "tpu",
    interpret: bool = False,
) -> jax.Array:
    """Compute attention of one token per row to its row's pages, with JAX's kernels.

    The kernel fetches only the pages that a row has filled.

    Args:
        q: [B, H, C] bfloat16 queries. On TPUs C is a multiple of 128, and the kernel
            multiplies in bfloat16 whatever the dtype; on GPUs C is a power of 2.
        pages: a cache.
        layer: the number of the layer.
        table: [B, n] int32 pages of each row.
        length: [B] int32 number of tokens that each row attends to, at least 1.
        platform: "tpu" or "gpu".
        interpret: run the GPU kernel's arithmetic without a GPU.

    Returns:
        [B, H, C] in the queries' dtype.
    """
    heads, num_pages, num_layers, size, width = pages.k.shape
    # Layers are folded into the axis of pages, so that no layer is copied out for the
    # kernel.
    flat_shape = (heads, num_pages * num_layers, size, width)
    table = jnp.minimum(table, num_pages - 1) * num_layers + layer
    scaled_q = (q.astype(jnp.float32) * width**-0.5).astype(q.dtype)
    operands = scaled_q, pages.k.reshape(flat_shape), pages.v.reshape(flat_shape)
    count = table.shape[1]
    if platform == "gpu":
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        block_pages = max(1, GPU_TOKENS // size)
        split_pages = block_pages * -(-count // (block_pages * GPU_SPLITS))
        num_splits = -(-count // split_pages)
        # Padding pages, which are never attended to: all splits have equal lengths.
        table = jnp.pad(table, ((0, 0), (0, num_splits * split_pages - count)))
        return paged_attention(
            *(*operands, table, length),
            pages_per_compute_block=block_pages,
            k_splits=num_splits,
            interpret=interpret,
        )
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    block_pages = next(n for n in range(COMPUTE_PAGES, 0, -1) if count % n == 0)
    return paged_attention(
        *operands, length, table, pages_per_compute_block=block_pages
    )
