"""The root-mean-square norm and its gradient."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 (arXiv 1910.07467)."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise [..., D] over its last axis, in the dtype of x."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        return _normalise(x, scale, self.eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _normalise(x, scale, eps):
    """Normalise x [..., D] and multiply by a scale [D].

    Its gradient is written as contractions (einsum), which XLA's CPU backend computes
    much faster than the sums that automatic differentiation would give.
    """
    return _normalise_forward(x, scale, eps)[0]


def _normalise_forward(x, scale, eps):
    wide = x.astype(jnp.float32)
    share = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    wide_scale = jnp.expand_dims(scale, range(x.ndim - 1)).astype(x.dtype)
    return (wide * share).astype(x.dtype) * wide_scale, (x, scale, share)


def _normalise_backward(_, residuals, d_out):
    x, scale, share = residuals
    width = x.shape[-1]
    wide, d_out = x.astype(jnp.float32), d_out.astype(jnp.float32)
    d_normed = d_out * jnp.expand_dims(scale, range(x.ndim - 1)).astype(jnp.float32)
    projection = jnp.einsum("...d,...d->...", d_normed, wide)[..., None]
    d_x = share * d_normed - wide * (projection * share**3 / width)
    flat = (y.reshape(-1, width) for y in (d_out, wide * share))
    d_scale = jnp.einsum("nd,nd->d", *flat)
    return d_x.astype(x.dtype), d_scale.astype(scale.dtype)


_normalise.defvjp(_normalise_forward, _normalise_backward)
