"""A paged cache holds and returns the same as a cache with its own slots per row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu
from jax.sharding import NamedSharding, PartitionSpec

from rsearch.models.attention.cached import Cache, attend, attend_cached, index_cache
from rsearch.models.attention.pages import Pages, attend_pages, put_rows, read_pages
from rsearch.models.sharding import make_mesh

LAYERS, HEADS, WIDTH, SIZE = 2, 2, 8, 16
MESH = make_mesh(data=2, fsdp=2, tensor=2)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def paged(cache, table, num_pages):
    """Return the same keys and values in these pages; other pages hold noise."""
    shape = HEADS, num_pages, LAYERS, SIZE, cache.k.shape[4]
    return put_rows(Pages(normal(8, *shape), normal(9, *shape)), *cache, table)


def shuffled(rows, count, *, spare=3, parts=1, seed=0):
    """Return (shuffled table of pages [rows, count], number of pages).

    Each part of the rows has pages of the same part only.
    """
    each = rows // parts * count + spare
    rng = np.random.default_rng(seed)
    own = [part * each + rng.permutation(each)[:-spare] for part in range(parts)]
    return np.concatenate(own).reshape(rows, count).astype(np.int32), parts * each


@pytest.mark.parametrize("mesh", [None, MESH], ids=["one", "eight"])
@pytest.mark.parametrize("tokens", [1, 5, 256])
def test_attention_to_shuffled_pages_equals_attention_to_contiguous_slots(mesh, tokens):
    rows, slots = 8, 480
    table, num_pages = shuffled(rows, slots // SIZE, parts=4)
    shape = LAYERS, rows, HEADS, slots, WIDTH
    cache = Cache(normal(1, *shape), normal(2, *shape))
    pages = paged(cache, table, num_pages)
    q, k, v = (normal(i, rows, tokens, n, WIDTH) for i, n in ((3, 4), (4, 2), (5, 2)))
    first = np.random.default_rng(6).integers(0, slots - tokens, (rows, 1))
    first[0], first[1] = 0, 31  # 31: the end of a page and the start of the next
    positions = jnp.array(first + np.arange(tokens)).at[7].set(slots)  # row 7: padding

    @functools.partial(jax.jit, static_argnames="mesh")
    def run(cache, table, mesh=None):
        place = index_cache(cache, positions, None, table)
        return attend_cached(q, k, v, cache, 1, place, mesh)

    expected, written = run(cache, None)
    if mesh is not None:
        spec = PartitionSpec("tensor", ("data", "fsdp"))
        pages = jax.device_put(pages, NamedSharding(mesh, spec))
    actual, pages = run(pages, table, mesh)
    np.testing.assert_allclose(actual[:7], expected[:7], atol=2e-6)
    for layer in range(LAYERS):
        for new, old in zip(read_pages(pages, layer, table), written, strict=True):
            np.testing.assert_array_equal(new, old[layer])


def test_rows_and_slots_without_pages_are_not_written():
    table, num_pages = shuffled(2, 4)
    shape = LAYERS, 2, HEADS, 40, WIDTH
    cache = Cache(normal(1, *shape), normal(2, *shape))
    table[1] = table[0, 2:] = num_pages
    before = Pages(*(jnp.zeros((HEADS, num_pages, LAYERS, SIZE, WIDTH)),) * 2)
    after = put_rows(before, *cache, table)
    touched = {p for p in range(num_pages) if np.any(after.k[:, p])}
    assert touched == set(table[0, :2].tolist())


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("pages_of_a_row", [3, 8])
def test_the_paged_kernel_equals_plain_attention(pages_of_a_row, platform):
    """The kernels for TPUs and GPUs are interpreted here."""
    rows, slots = 3, pages_of_a_row * SIZE
    table, num_pages = shuffled(rows, pages_of_a_row)
    shape = LAYERS, rows, HEADS, slots, 128
    cache = Cache(normal(1, *shape), normal(2, *shape))
    pages = paged(cache, table, num_pages)
    pages = Pages(*(x.astype(jnp.bfloat16) for x in pages))
    length = np.array([1, slots - SIZE - 3, slots])
    # A row has pages only for the slots that it has filled.
    filled = -(-length // SIZE)
    table[np.arange(pages_of_a_row) >= filled[:, None]] = num_pages
    q = normal(3, rows, 4, 128).astype(jnp.bfloat16)
    place = 1, jnp.array(table), jnp.array(length)
    if platform == "gpu":
        how = {"platform": "gpu", "interpret": True}
        actual = attend_pages(q, pages, *place, **how)
    else:
        with tpu.force_tpu_interpret_mode():
            actual = attend_pages(q, pages, *place)
    visible = jnp.array(np.arange(slots) < length[:, None])[:, None]
    whole = (x[1].astype(jnp.bfloat16).astype(jnp.float32) for x in cache)
    expected = attend(q[:, None].astype(jnp.float32), *whole, visible)[:, 0]
    np.testing.assert_allclose(actual.astype(jnp.float32), expected, atol=0.02)
