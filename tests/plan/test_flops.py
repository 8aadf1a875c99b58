"""Operations of matrix products, counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from rsearch.models.attention.splash import splash_within
from rsearch.models.sharding import make_mesh
from rsearch.plan.flops import count_flops

A, B = jnp.ones((4, 8)), jnp.ones((8, 8))
ONE = 2 * 4 * 8 * 8


def times(n):
    def run(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=n)[0]

    return run


def test_a_product_counts_two_for_each_pair_it_multiplies():
    assert count_flops(jnp.matmul, (A, B)) == ONE
    assert count_flops(jax.jit(lambda a, b: jnp.tanh(a @ b) + 1), (A, B)) == ONE
    batched = jnp.ones((3, 4, 8)), jnp.ones((3, 8, 5))
    assert count_flops(jnp.matmul, batched) == 3 * 2 * 4 * 8 * 5


def test_loops_count_as_often_as_they_run():
    assert count_flops(times(6), (A, B)) == 6 * ONE

    def until(x, w, n):
        step = lambda carry: (carry[0] + 1, carry[1] @ w)  # noqa: E731
        return jax.lax.while_loop(lambda c: c[0] < n, step, (0, x))[1]

    assert count_flops(until, (A, B, jnp.int32(3)), rounds=2.5) == 2.5 * ONE


def test_of_branches_the_dearest_counts():
    def either(flag, x, w):
        return jax.lax.cond(flag, lambda x: x, lambda x: x @ w @ w, x)

    assert count_flops(either, (jnp.bool_(True), A, B)) == 2 * ONE


def test_a_gradient_counts_with_what_it_computes_again():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    # Forwards, and the product for the weights alone.
    assert count_flops(jax.grad(loss), (B, A)) == 2 * ONE
    again = jax.grad(jax.checkpoint(loss))
    assert count_flops(again, (B, A)) == 3 * ONE


def test_a_kernel_counts_with_its_grid_and_half_the_blocks_of_causal_attention():
    rows, tokens, heads, width = 2, 1024, 4, 128
    q = jnp.ones((rows, tokens, heads, width))
    k = jnp.ones((rows, 2, tokens, width))
    text = jnp.zeros((rows, tokens), jnp.int32)

    def run(q, k):
        return jnp.sum(splash_within(q, k, k, text))

    # Scores, and their mean of the values; half of either is ever looked at.
    product = 2 * rows * heads * tokens * tokens * width / 2
    assert count_flops(run, (q, k)) == 2 * product
    # Backwards one kernel has three products, the other four; a sum beside is little.
    both = count_flops(jax.grad(run, argnums=(0, 1)), (q, k))
    assert both == pytest.approx((2 + 3 + 4) * product, rel=1e-3)


def test_what_each_device_does_counts_once_for_each_of_them():
    mesh = make_mesh(data=8)
    rows = PartitionSpec(("data", "fsdp"))
    product = jax.shard_map(
        jnp.matmul, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows
    )
    x, y = jnp.ones((16, 4)), jnp.ones((4, 5))
    assert count_flops(product, (x, y)) == 2 * 16 * 4 * 5
