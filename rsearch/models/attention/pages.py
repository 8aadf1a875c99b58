"""A cache in pages: rows hold as many of them as they have use for.

A row's table names its pages in order, so that position p of row b lives in page
`table[b, p // N]`, at p % N. Each page has all layers of its N tokens.

Dimensions: B rows, T new tokens, n pages of a row, P pages, N tokens of a page, K
key/value heads, C head width, L layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

COMPUTE_PAGES = 4  # that the kernel takes at once, where a row has so many


class Pages(NamedTuple):
    """Keys and values, [K, P, L, N, C] each, in the compute dtype."""

    k: jax.Array
    v: jax.Array


def empty_pages(spec, num_pages: int, page_tokens: int, dtype) -> Pages:
    """Pages of zeros for a DecoderSpec; a token is read only after it was written."""
    shape = (
        *(spec.num_kv_heads, num_pages, spec.num_layers, page_tokens),
        spec.head_dim,
    )
    return Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write_pages(pages: Pages, layer, k, v, table, positions) -> Pages:
    """The pages with keys and values [B, T, K, C] of a layer written to their place.

    Args:
        pages: as they were.
        layer: the number of the layer.
        k, v: what is written.
        table: [B, n] int32 pages of each row; P is nobody's and takes nothing.
        positions: [B, T] int32; at or past n x N is padding, which writes nothing.
    """
    heads, num_pages, num_layers, size, width = pages.k.shape
    last = table.shape[1] - 1
    page = jnp.take_along_axis(table, jnp.minimum(positions // size, last), axis=1)
    is_there = (positions < table.shape[1] * size) & (page < num_pages)
    # Tokens of all pages on one axis: with one for the heads before it, XLA copies
    # the whole for each layer.
    total = heads * num_pages * num_layers * size
    assert total < 2**31, "more tokens than an index counts"
    first = (page * num_layers + layer) * size + positions % size
    of_head = jnp.arange(heads)[None, None] * (total // heads)
    at = first[..., None] + of_head  # [B, T, K]
    at = jnp.where(is_there[..., None], at, total)

    def put(x, new):
        flat = x.reshape(total, width).at[at].set(new, mode="drop")
        return flat.reshape(x.shape)

    return Pages(put(pages.k, k), put(pages.v, v))


def put_rows(pages: Pages, k, v, table) -> Pages:
    """The pages with all that [L, B, K, S, C] keys and values hold, row by row.

    Args:
        pages: as they were.
        k, v: of each row the first S tokens.
        table: as in `write_pages`; S tokens fit into its n pages.
    """
    size = pages.k.shape[3]
    num_layers, num_rows, heads, tokens, width = k.shape
    count = -(-tokens // size)

    def put(x, new):
        new = jnp.pad(new, ((0, 0),) * 3 + ((0, count * size - tokens), (0, 0)))
        new = new.reshape(num_layers, num_rows, heads, count, size, width)
        return x.at[:, table[:, :count]].set(
            new.transpose(2, 1, 3, 0, 4, 5), mode="drop"
        )

    return Pages(put(pages.k, k), put(pages.v, v))


def read_pages(pages: Pages, layer, table):
    """Keys and values [B, K, n x N, C] of a layer, of each row's pages in order."""

    def take(x):
        found = jnp.moveaxis(x[:, table, layer], 0, 1)  # [B, K, n, N, C]
        return found.reshape(*found.shape[:2], -1, found.shape[-1])

    return take(pages.k), take(pages.v)


def attend_pages(q, pages: Pages, layer, table, length):
    """Attention of one token a row to its pages, by a TPU's kernel.

    The kernel fetches the pages that a row has filled, and no others.

    Args:
        q: [B, H, C] bfloat16 queries, C a multiple of 128; the kernel multiplies in
            bfloat16 whatever it is given.
        pages, layer, table: see `write_pages`.
        length: [B] int32 tokens that each row looks at, 1 at least.

    Returns:
        [B, H, C] in the queries' dtype.
    """
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    heads, num_pages, num_layers, size, width = pages.k.shape
    once = next(n for n in range(COMPUTE_PAGES, 0, -1) if table.shape[1] % n == 0)
    # Layers as so many pages more: what the kernel is given is never cut out.
    flat = (heads, num_pages * num_layers, size, width)
    table = jnp.minimum(table, num_pages - 1) * num_layers + layer
    scaled = (q.astype(jnp.float32) * width**-0.5).astype(q.dtype)
    return paged_attention(
        *(scaled, pages.k.reshape(flat), pages.v.reshape(flat), length, table),
        pages_per_compute_block=once,
    )
