import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsearch.models.attention.blocked import MAX_DENSE_TOKENS, attend_within
from rsearch.models.attention.cached import attend
from rsearch.models.sharding import make_mesh

BLOCK = 64  # queries per block in short rows, such as most of these


def texts(rows, tokens, seed=0, shortest=20, longest=150):
    """Return [rows, tokens] numbers of texts of random lengths, the last one cut."""
    rng = np.random.default_rng(seed)
    numbers = np.zeros((rows, tokens), np.int32)
    for row in numbers:
        start = number = 0
        while start < tokens:
            end = start + int(rng.integers(shortest, longest))
            row[start:end] = number
            start, number = end, number + 1
    return jnp.asarray(numbers)


def operands(tokens, *, rows=3, heads=4, kv_heads=2, width=8, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (rows, tokens, heads, width), dtype)
    k = jax.random.normal(keys[1], (rows, kv_heads, tokens, width), dtype)
    v = jax.random.normal(keys[2], (rows, kv_heads, tokens, width), dtype)
    return q, k, v


within = jax.jit(attend_within)  # one program instead of one for each operation


@jax.jit
def whole(q, k, v, text):
    """Return attention within each text, with all scores formed at once."""
    token = jnp.arange(text.shape[1])
    visible = text[:, :, None] == text[:, None, :]
    return attend(q, k, v, visible & (token[None] <= token[:, None])[None])


def check_kernel(how, q, k, v, text):
    """Check a kernel's values and gradients against plain attention."""

    def loss(how):
        return lambda *x: jnp.sum(jnp.sin(how(*x)))

    def ours(q, k, v):
        return how(q, k, v, text, interpret=True)

    def plain(q, k, v):
        return whole(q, k, v, text)

    np.testing.assert_allclose(jax.jit(ours)(q, k, v), plain(q, k, v), atol=2e-6)
    actual = jax.jit(jax.grad(loss(ours), argnums=(0, 1, 2)))(q, k, v)
    expected = jax.jit(jax.grad(loss(plain), argnums=(0, 1, 2)))(q, k, v)
    for a, b in zip(actual, expected):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


LENGTHS = (MAX_DENSE_TOKENS + 1, 3 * BLOCK, 4 * BLOCK + 15, 1300)
FAST = {(MAX_DENSE_TOKENS + 1, 1), (3 * BLOCK, 2), (4 * BLOCK + 15, 4), (1300, 2)}


@pytest.mark.parametrize(
    ("tokens", "kv_heads"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
        for case in itertools.product(LENGTHS, (1, 2, 4))
    ],
)
def test_attention_in_blocks_equals_plain_attention(tokens, kv_heads):
    q, k, v = operands(tokens, kv_heads=kv_heads)
    text = texts(3, tokens)
    np.testing.assert_allclose(within(q, k, v, text), whole(q, k, v, text), atol=2e-6)

    def loss(how):
        return lambda q, k, v: jnp.sum(jnp.sin(how(q, k, v, text)))

    ours = jax.jit(jax.grad(loss(within), argnums=(0, 1, 2)))(q, k, v)
    plain = jax.jit(jax.grad(loss(whole), argnums=(0, 1, 2)))(q, k, v)
    for a, b in zip(ours, plain):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6)


def test_a_text_that_fills_the_row_attends_to_all_of_its_past():
    tokens = 3 * BLOCK + 1
    q, k, v = operands(tokens)
    text = jnp.zeros((3, tokens), jnp.int32)
    np.testing.assert_allclose(within(q, k, v, text), whole(q, k, v, text), atol=2e-6)
    # The last query's weight on the first key is not lost between blocks.
    moved = v.at[:, :, 0].add(100.0)
    change = within(q, k, moved, text) - within(q, k, v, text)
    assert jnp.abs(change[:, -1]).min() > 1e-4


def test_other_texts_have_no_influence_even_with_nan():
    tokens = 4 * BLOCK
    q, k, v = operands(tokens, rows=1)
    text = jnp.asarray(np.repeat([[0, 1]], 2 * BLOCK, axis=1))
    first = within(q, k, v, text)[:, : 2 * BLOCK]
    late = (jnp.arange(tokens) >= 2 * BLOCK)[None, None, :, None]
    spoilt = within(q, jnp.where(late, jnp.nan, k), jnp.where(late, jnp.nan, v), text)
    np.testing.assert_array_equal(spoilt[:, : 2 * BLOCK], first)
    second = within(q, k, v, text)[:, 2 * BLOCK :]
    spoilt = within(q, jnp.where(late, k, jnp.nan), jnp.where(late, v, jnp.nan), text)
    # Whole blocks of another text are never read.
    np.testing.assert_array_equal(spoilt[:, 2 * BLOCK :], second)


def test_padding_with_one_text_per_token_gives_finite_gradients():
    tokens = 3 * BLOCK
    q, k, v = operands(tokens, rows=1)
    text = jnp.maximum(jnp.arange(tokens) - BLOCK, 0)[None]

    def loss(*x):
        return jnp.sum(within(*x, text) ** 2)

    grads = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    assert all(jnp.isfinite(g).all() for g in grads)
    # A token that is a text by itself attends only to itself.
    out = within(q, k, v, text)
    np.testing.assert_allclose(out[0, -1, 0], v[0, 0, -1], atol=1e-6)


def test_bfloat16_is_as_close_to_float32_as_in_plain_attention():
    tokens = 3 * BLOCK
    text = texts(3, tokens)
    exact = whole(*operands(tokens), text)
    half = operands(tokens, dtype=jnp.bfloat16)
    error = jnp.abs(within(*half, text) - exact).max()
    plain = jnp.abs(whole(*half, text) - exact).max()
    assert within(*half, text).dtype == jnp.bfloat16
    assert error <= 2 * plain


def test_peak_memory_is_far_below_that_of_all_scores():
    tokens = 16 * BLOCK

    def peak(how):
        text = jnp.zeros((1, tokens), jnp.int32)
        loss = jax.grad(lambda q, k, v: jnp.sum(how(q, k, v, text) ** 2), (0, 1, 2))
        compiled = jax.jit(loss).lower(*operands(tokens, rows=1)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert peak(attend_within) < peak(whole) / 6


@pytest.mark.parametrize("rows, kv_heads", [(4, 2), (3, 2), (4, 1)])
@pytest.mark.parametrize("tokens", [20, MAX_DENSE_TOKENS + 40])
def test_several_devices_equal_one_whether_they_split_rows_and_heads_or_not(
    rows, kv_heads, tokens
):
    """Three rows are not split into four parts, nor one key/value head into two."""
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    q, k, v = operands(tokens, rows=rows, kv_heads=kv_heads)
    text = texts(rows, tokens)

    def found(mesh):
        def loss(q, k, v):
            return jnp.sum(jnp.sin(attend_within(q, k, v, text, mesh)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)

    for a, b in zip(*map(jax.tree.leaves, (found(mesh), found(None)))):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6)
