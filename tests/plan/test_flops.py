"""Floating-point operations of matrix products, counted by hand."""

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


def test_a_product_counts_two_operations_for_each_multiplied_pair():
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


def test_the_most_expensive_branch_counts():
    def either(flag, x, w):
        return jax.lax.cond(flag, lambda x: x, lambda x: x @ w @ w, x)

    assert count_flops(either, (jnp.bool_(True), A, B)) == 2 * ONE


def test_a_gradient_counts_with_its_recomputation():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    # The forward pass, and the product for the gradient of the weights only.
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

    # The scores, and their weighted mean of the values; half of each is masked.
    product = 2 * rows * heads * tokens * tokens * width / 2
    assert count_flops(run, (q, k)) == 2 * product
    # In the backward pass one kernel has three products and the other four; the sum
    # next to them adds little.
    both = count_flops(jax.grad(run, argnums=(0, 1)), (q, k))
    assert both == pytest.approx((2 + 3 + 4) * product, rel=1e-3)


def test_the_work_of_each_device_counts():
    mesh = make_mesh(data=8)
    rows = PartitionSpec(("data", "fsdp"))
    product = jax.shard_map(
        jnp.matmul, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows
    )
    x, y = jnp.ones((16, 4)), jnp.ones((4, 5))
    assert count_flops(product, (x, y)) == 2 * 16 * 4 * 5
