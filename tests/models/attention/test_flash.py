"""Compare the GPU kernel, interpreted here, with attention that forms all scores."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsearch.models.attention.flash import flash_within, has_gpu_kernels
from rsearch.plan.flops import count_flops
from tests.models.attention.test_blocked import (
    check_kernel,
    operands,
    texts,
    whole,
)


@pytest.mark.parametrize(
    ("tokens", "width", "kv_heads"),
    [
        (140, 16, 2),
        pytest.param(300, 64, 1, marks=pytest.mark.slow),
        pytest.param(300, 128, 4, marks=pytest.mark.slow),
        pytest.param(129, 256, 2, marks=pytest.mark.slow),  # smaller blocks
        pytest.param(260, 80, 2, marks=pytest.mark.slow),  # not a power of two
    ],
)
def test_the_kernel_equals_plain_attention(tokens, width, kv_heads):
    q, k, v = operands(tokens, rows=2, width=width, kv_heads=kv_heads)
    check_kernel(flash_within, q, k, v, texts(2, tokens))


def test_the_kernel_in_bfloat16_is_close_to_float32():
    q, k, v = operands(200, rows=1, width=32, dtype=jnp.bfloat16)
    text = texts(1, 200)
    actual = flash_within(q, k, v, text, interpret=True)
    assert actual.dtype == jnp.bfloat16
    exact = whole(*(x.astype(jnp.float32) for x in (q, k, v)), text)
    np.testing.assert_allclose(actual.astype(jnp.float32), exact, atol=0.02)


def test_recent_gpus_use_the_kernel_for_16_bit_dtypes():
    def uses(capability, dtype=jnp.bfloat16, width=64):
        gpu = types.SimpleNamespace(platform="gpu", compute_capability=capability)
        return has_gpu_kernels(gpu, dtype, width)

    assert uses("8.0") and uses("10.0", jnp.float16) and uses("9.0", width=16)
    assert not uses("9.0", jnp.float32) and not uses("9.0", width=8)
    assert not uses("7.5") and not uses("gfx942")  # an AMD GPU
    assert not has_gpu_kernels(jax.devices("cpu")[0], jnp.bfloat16, 64)


def test_the_plan_counts_half_the_blocks_of_its_causal_attention():
    rows, tokens, heads, width = 2, 4096, 4, 128
    q, k, _ = jax.eval_shape(
        lambda: operands(tokens, rows=rows, heads=heads, width=width)
    )
    text = jnp.zeros((rows, tokens), jnp.int32)

    def run(q, k):
        return jnp.sum(flash_within(q, k, k, text))

    # One product forms the scores, another sums the values; causality halves both.
    product = 2 * rows * heads * tokens * tokens * width / 2
    assert count_flops(run, (q, k)) == pytest.approx(2 * product, rel=0.05)
    # The backward pass has two loops, with four and three products.
    both = count_flops(jax.grad(run, argnums=(0, 1)), (q, k))
    assert both == pytest.approx((2 + 4 + 3) * product, rel=0.05)
