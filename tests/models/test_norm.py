"""Compare the norm's hand-written gradient with the one that JAX derives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsearch.models.norm import RMSNorm

EPS = 1e-3


def plain(x, scale):
    """Return the norm by its definition, for JAX to differentiate."""
    wide = x.astype(jnp.float32)
    wide = wide / jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + EPS)
    return wide.astype(x.dtype) * jnp.broadcast_to(scale, x.shape).astype(x.dtype)


def ours(x, scale):
    return RMSNorm(EPS).apply({"params": {"scale": scale}}, x)


@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 3, 4, 8)])  # hidden states and heads
@pytest.mark.parametrize("dtype, near", [(jnp.float32, 1e-5), (jnp.bfloat16, 3e-2)])
def test_the_norm_and_its_gradient_equal_those_of_the_definition(shape, dtype, near):
    keys = jax.random.split(jax.random.key(0), 3)
    x, weight = (jax.random.normal(key, shape) for key in keys[:2])
    scale = 1 + jax.random.normal(keys[2], shape[-1:]) / 2
    x = (0.1 * x).astype(dtype)  # small enough for EPS to matter

    def gradient(norm):
        def loss(x, scale):
            return jnp.sum(norm(x, scale).astype(jnp.float32) * weight)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, scale)

    for actual, expected in zip(*map(jax.tree.leaves, map(gradient, (ours, plain)))):
        assert actual.dtype == expected.dtype
        np.testing.assert_allclose(actual, expected, rtol=near, atol=near * 10)
