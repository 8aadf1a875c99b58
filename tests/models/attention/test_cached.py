"""Attention to a cache: how far it is read, which rows, and over which devices."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from rsearch.models.attention import cached as attention
from rsearch.models.attention.cached import (
    Cache,
    attend,
    attend_cached,
    empty_cache,
    extend_cache,
    index_cache,
    num_chunks,
    prefix_lengths,
    reach_lengths,
)
from rsearch.models.attention.pages import Pages, cache_dtype, from_cached, to_cached
from rsearch.models.decoder import Decoder
from rsearch.models.sharding import make_mesh
from rsearch.models.spec import DecoderSpec
from tests.models import reference

SPEC = DecoderSpec(
    vocab_size=50,
    width=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=24,
)
SLOTS = 1100  # read lengths 64, 128, 192, 384, 576, 768, 1100


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Turn XLA's and LLVM's optimisations off: each program here runs a few times."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_heads_of_one_group_share_keys_and_values():
    q = normal(0, 1, 3, 4, 8)
    k, v = normal(1, 1, 2, 5, 8), normal(2, 1, 2, 5, 8)
    visible = jnp.ones((1, 3, 5), bool)
    grouped = attend(q, k, v, visible)
    repeated = attend(q, jnp.repeat(k, 2, 1), jnp.repeat(v, 2, 1), visible)
    np.testing.assert_allclose(grouped, repeated, atol=1e-6)


def test_a_single_token_attends_as_it_does_among_others():
    q, k, v = normal(0, 3, 4, 4, 8), normal(1, 3, 2, 7, 8), normal(2, 3, 2, 7, 8)
    last = jnp.array([[1, 2, 3, 6], [0] * 4, [5] * 4])
    visible = jnp.arange(7)[None, None] <= last[:, :, None]
    together = attend(q, k, v, visible)
    for i in range(4):
        own = slice(i, i + 1)
        alone = attend(q[:, own], k, v, visible[:, own])
        np.testing.assert_allclose(alone, together[:, own], atol=1e-6)


def test_weights_may_be_normalised_after_the_sum():
    q, k, v = normal(0, 3, 4, 4, 8), normal(1, 3, 2, 7, 8), normal(2, 3, 2, 7, 8)
    last = jnp.array([[1, 2, 3, 6], [0] * 4, [5] * 4])
    visible = jnp.arange(7)[None, None] <= last[:, :, None]
    actual = attend(9 * q, k, v, visible, divides_last=True)
    np.testing.assert_allclose(actual, attend(9 * q, k, v, visible), atol=1e-6)


@pytest.mark.parametrize(
    "num_slots, expected",
    [
        (1, [1]),
        (64, [64]),
        (65, [64, 65]),
        (512, [64, 128, 192, 256, 320, 384, 448, 512]),
        (513, [128, 256, 384, 512, 513]),
        (1100, [192, 384, 576, 768, 960, 1100]),
    ],
)
def test_prefix_lengths_by_hand(num_slots, expected):
    assert prefix_lengths(num_slots) == expected


@given(st.integers(1, 200_000))
def test_at_most_eight_prefix_lengths_ascend_up_to_all_slots(num_slots):
    sizes = prefix_lengths(num_slots)
    assert sizes[0] >= 1 and sizes[-1] == num_slots and len(sizes) <= 8
    assert (np.diff(sizes) > 0).all()


@pytest.mark.parametrize(
    "num_slots, step, expected",
    [
        (320, 64, [64, 128, 192, 256, 320]),
        (1024, 64, [128, 256, 384, 512, 640, 768, 896, 1024]),
        (1100, 64, [64, 128, 192, 384, 576, 768, 1100]),
        (3400, 128, [128, 256, 512, 1024, 1536, 2048, 3072, 3400]),
        (8192, 128, [256, 512, 1024, 2048, 3072, 4096, 6144, 8192]),
    ],
)
def test_read_lengths_by_hand(num_slots, step, expected):
    """A small cache has equal steps; in a large one, short rows have short lengths."""
    assert reach_lengths(num_slots, step) == expected


@given(st.integers(1, 200_000), st.sampled_from([1, 16, 64, 128]))
def test_at_most_eight_reach_lengths_ascend_up_to_all_slots(num_slots, step):
    sizes = reach_lengths(num_slots, step)
    assert sizes[0] >= 1 and sizes[-1] == num_slots and len(sizes) <= 8
    assert (np.diff(sizes) > 0).all() and all(size % step == 0 for size in sizes[:-1])


SHAPE = jax.eval_shape(lambda: empty_cache(SPEC, 1, SLOTS, jnp.float32))


@settings(deadline=None)
@given(st.lists(st.integers(0, 2 * SLOTS), min_size=1, max_size=4))
def test_an_index_takes_the_shortest_prefix_that_covers_every_slot_written(positions):
    place = index_cache(SHAPE, jnp.array([positions]))
    written = [p for p in positions if p < SLOTS]  # the others are padding
    needed = max(written, default=0) + 1
    covering = [size for size in reach_lengths(SLOTS) if size >= needed]
    assert not written or reach_lengths(SLOTS)[int(place.reach[0, 0])] == covering[0]
    assert written or place.reach == -1


@pytest.fixture(scope="module", params=["together", "one by one"])
def rows_read(request):
    """Read the rows of a cache together, as accelerators do, or singly, as CPUs do."""
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "together":
            gpu = types.SimpleNamespace(platform="gpu")
            patched.setattr(attention, "device_of", lambda mesh: gpu)
        attend_to_cache.clear_cache(), read.clear_cache()
        yield request.param
        attend_to_cache.clear_cache(), read.clear_cache()


@functools.partial(jax.jit, static_argnames="everything")
def attend_to_cache(q, cache, positions, rows, everything=False):
    """Run `attend_cached` on layer 1, on all slots if `everything`."""
    place = index_cache(cache, positions, rows)
    if everything:
        last = len(reach_lengths(cache.k.shape[3])) - 1
        place = place._replace(reach=jnp.full_like(place.reach, last))
    # The new keys and values change nothing: they equal those in the cache.
    here = jnp.where(place.positions < cache.k.shape[3], place.positions, 0)
    own = jnp.arange(len(q)) if rows is None else rows
    k, v = (x[1, own[:, None], :, here] for x in cache)
    return attend_cached(q, k, v, cache, 1, place)[0]


@pytest.fixture(scope="module")
def full():
    """A cache of five rows in which every slot is filled."""
    shape = (2, 5, 2, SLOTS, 8)
    return Cache(normal(1, *shape), normal(2, *shape))


@pytest.mark.parametrize("longest", [0, 191, 192, 500, SLOTS - 1])
@pytest.mark.parametrize("rows", [None, [3, 0, 4]])
def test_attention_to_the_prefix_equals_attention_to_all_slots(
    full, longest, rows, rows_read
):
    count = 5 if rows is None else len(rows)
    q = normal(3, count, 2, 4, 8)
    positions = np.random.default_rng(4).integers(0, longest + 1, (count, 2))
    positions[1, 1] = longest
    chosen = None if rows is None else jnp.array(rows)
    actual = attend_to_cache(q, full, jnp.array(positions), chosen)
    whole = attend_to_cache(q, full, jnp.array(positions), chosen, everything=True)
    np.testing.assert_allclose(actual, whole, atol=2e-6)
    # It also equals the definition with a mask over all slots.
    own = slice(None) if rows is None else np.array(rows)
    visible = jnp.array(np.arange(SLOTS) <= positions[:, :, None])
    expected = attend(q, full.k[1, own], full.v[1, own], visible)
    np.testing.assert_allclose(actual, expected, atol=2e-6)


def test_slots_beyond_the_prefix_are_not_read(full, rows_read):
    """A NaN there would make everything NaN."""
    spoilt = Cache(*(x.at[:, :, :, 192:].set(jnp.nan) for x in full))
    positions = jnp.array([[191], [3], [SLOTS], [0], [50]])  # the third row is padding
    q = normal(5, 5, 1, 4, 8)
    for rows in (None, jnp.arange(5)):
        actual = attend_to_cache(q, spoilt, positions, rows)
        assert np.isfinite(actual).all()
        further = attend_to_cache(q, spoilt, positions.at[1, 0].set(192), rows)
        is_finite = np.isfinite(further).all(axis=(1, 2, 3))
        alone = [True, False, True, True, True]
        assert (
            is_finite.tolist() == alone
            if rows_read == "one by one"
            else not any(is_finite)
        )


@pytest.mark.parametrize(
    "num_tokens, expected",
    [(1, 1), (255, 1), (256, 2), (304, 2), (307, 1), (392, 2), (456, 3), (512, 4)],
)
def test_the_number_of_chunks_by_hand(num_tokens, expected):
    assert num_chunks(num_tokens) == expected


def test_each_chunk_of_new_tokens_reads_only_as_far_as_it_needs():
    """Three rows of 384 tokens in chunks of 128; the second row has only 200 tokens."""
    offset = np.arange(384)
    begins = np.array([[60], [300], [700]])
    positions = begins + offset
    positions[1, 200:] = SLOTS
    shape = 2, 3, 2, SLOTS, 8
    whole = Cache(normal(1, *shape), normal(2, *shape))
    place = index_cache(whole, jnp.array(positions))
    assert place.reach.tolist() == [[2, 3, 4], [4, 4, -1], [6, 6, 6]]
    q = normal(3, 3, 384, 4, 8)
    visible = jnp.array(np.arange(SLOTS) <= positions[:, :, None])
    expected = attend(q, whole.k[1], whole.v[1], visible)
    # Slots that no chunk may attend to are not read.
    spoilt = Cache(*(x.at[:, 0, :, 576:].set(jnp.nan) for x in whole))
    for rows in (None, jnp.arange(3)):
        actual = attend_to_cache(q, spoilt, jnp.array(positions), rows)
        is_token = positions < SLOTS
        np.testing.assert_allclose(actual[is_token], expected[is_token], atol=2e-6)
    # The first chunk's result does not depend on chunks of its row that read further.
    near = Cache(*(x.at[:, 0, :, 192:].set(jnp.nan) for x in whole))
    actual = attend_to_cache(q, near, jnp.array(positions), None)
    np.testing.assert_allclose(actual[0, :128], expected[0, :128], atol=2e-6)
    assert np.isnan(actual[0, 128:]).all()


def test_keys_and_values_are_written_to_their_rows_and_slots_only(full):
    k, v = normal(6, 3, 2, 2, 8), normal(7, 3, 2, 2, 8)
    # Row 5 is beyond the cache; slot SLOTS is padding.
    rows, positions = np.array([4, 5, 1]), np.array([[7, SLOTS], [8, 9], [SLOTS, 2]])
    place = index_cache(full, jnp.array(positions), jnp.array(rows))
    written = extend_cache(full, 1, k, v, place)
    for new, old, given_values in ((written.k, full.k, k), (written.v, full.v, v)):
        expected = np.array(old)
        expected[1, 4, :, 7] = given_values[0, 0]
        expected[1, 1, :, 2] = given_values[2, 1]
        np.testing.assert_array_equal(new, expected)


@jax.jit
def read(params, cache, tokens, positions, rows):
    return Decoder(SPEC).apply({"params": params}, tokens, positions, cache, rows)


def test_reading_some_rows_equals_reading_all_and_leaves_the_others_unchanged(
    rows_read,
):
    params = reference.random_params(SPEC)
    tokens = np.random.default_rng(8).integers(0, 50, (5, 6))
    first, second = (np.broadcast_to(np.arange(*at), (5, 3)) for at in ((0, 3), (3, 6)))
    cache = empty_cache(SPEC, 5, 80, jnp.float32)
    _, cache = read(params, cache, tokens[:, :3], first, None)
    expected, whole = read(params, cache, tokens[:, 3:], second, None)
    # Rows 3 and 1, in this order; 5 is beyond the cache, though its tokens are real.
    rows = np.array([3, 5, 1])
    part = tokens[[3, 0, 1], 3:]
    actual, extended = read(params, cache, part, second[:3], rows)
    np.testing.assert_allclose(
        np.asarray(actual)[[0, 2]], np.asarray(expected)[[3, 1]], atol=1e-5
    )
    for new, old, all_rows in zip(extended, cache, whole):
        for row in range(5):
            source = all_rows if row in (1, 3) else old
            np.testing.assert_allclose(new[:, row], source[:, row], atol=1e-5)
            if row not in (1, 3):
                np.testing.assert_array_equal(new[:, row], old[:, row])


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("is_paged", [False, True])
def test_a_cache_stored_as_uint16_equals_one_in_bfloat16(tokens, is_paged):
    def some(seed, *shape):
        return normal(seed, *shape).astype(jnp.bfloat16)

    table, shape = None, (2, 2, 2, 64, 8)
    cache = Cache(some(1, *shape), some(2, *shape))
    if is_paged:
        table = jnp.array([[3, 1, 4, 8], [5, 2, 6, 0]])
        cache = Pages(some(1, 2, 9, 2, 16, 8), some(2, 2, 9, 2, 16, 8))
    q, k, v = (some(i, 2, tokens, n, 8) for i, n in ((3, 4), (4, 2), (5, 2)))
    positions = jnp.array([[30], [7]]) + jnp.arange(tokens)[None]

    @jax.jit
    def run(cache):
        place = index_cache(cache, positions, None, table)
        return attend_cached(q, k, v, cache, 1, place)

    out, written = run(cache)
    dtype = cache_dtype(jnp.bfloat16, "cpu")
    bits = jax.tree.map(lambda x: to_cached(x, dtype), cache)
    out_of_bits, written_bits = run(bits)
    np.testing.assert_array_equal(out_of_bits, out)
    for new, old in zip(written_bits, written):
        assert new.dtype == jnp.uint16
        np.testing.assert_array_equal(from_cached(new), old)


MESH = make_mesh(data=2, fsdp=2, tensor=2)
CUT = NamedSharding(MESH, PartitionSpec(None, ("data", "fsdp"), "tensor"))


@pytest.mark.parametrize("rows", [None, [1, 8, 2, 8, 8, 5, 7, 6], [0, 8, 3]])
def test_devices_attend_only_to_the_rows_and_heads_that_they_hold(rows, rows_read):
    """Eight rows make four parts; row 8 is padding. Three rows cannot be split."""
    shape = (2, 8, 2, 300, 8)
    cache = Cache(normal(1, *shape), normal(2, *shape))
    count = 8 if rows is None else len(rows)
    q, k, v = (normal(i, count, 3, n, 8) for i, n in ((3, 4), (4, 2), (5, 2)))
    positions = np.random.default_rng(6).integers(0, 290, (count, 1)) + np.arange(3)
    rows = None if rows is None else jnp.array(rows)

    def run(q, k, v, cache, mesh):
        place = index_cache(cache, jnp.array(positions), rows)
        return attend_cached(q, k, v, cache, 1, place, mesh)

    expected = jax.jit(run, static_argnums=4)(q, k, v, cache, None)
    run = jax.jit(run, static_argnums=4)
    on_devices = jax.device_put(cache, CUT)
    out, written = run(q, k, v, on_devices, MESH)
    mine = slice(None) if rows is None else np.array(rows) < 8
    np.testing.assert_allclose(out[mine], expected[0][mine], atol=2e-6)
    for new, old in zip(written, expected[1]):
        np.testing.assert_array_equal(new, old)
    # Devices exchange no part of the cache, unless the rows cannot be split.
    if count == 8:
        text = run.lower(q, k, v, on_devices, MESH).compile().as_text()
        assert "f32[2,8" not in text.partition("ENTRY")[2]
        assert not re.search("all-gather|all-reduce|all-to-all|permute", text)
