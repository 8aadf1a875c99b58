"""Products of activations and kernels, in the forms that are fast on CPUs.

Dimensions: B rows, T tokens, N = B x T, D input features that a product sums over, E
output features, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rsearch.models.sharding import platform_of

FEW_ROWS = 16  # with fewer rows, a CPU is faster with the kernel as the left matrix


def is_on_cpu(mesh: Mesh | None) -> bool:
    """Return whether a network runs on CPUs; None means the default backend."""
    return platform_of(mesh) == "cpu"


def multiply(
    x: jax.Array, kernel: jax.Array, *, mesh: Mesh | None, is_transposed: bool = False
) -> jax.Array:
    """Multiply activations [B, T, D] by a kernel: [B, T, E].

    Rows and tokens are merged into one axis: XLA's CPU backend computes the kernel's
    gradient several times slower if it has to contract two axes.

    Args:
        x: [B, T, D] activations.
        kernel: [D..., E...], with one or more axes each; [E..., D...] if transposed.
            With few rows, a CPU multiplies by a transposed kernel faster, because the
            numbers that it sums are contiguous.
        mesh: mesh of the devices; None means one device of the default backend.
        is_transposed: whether the kernel's axes are [E..., D...].
    """
    b, t, d = x.shape
    flat, kernel = x.reshape(b * t, d), kernel.astype(x.dtype)
    kernel = kernel.reshape((-1, d) if is_transposed else (d, -1))
    if x.dtype == jnp.bfloat16 and is_on_cpu(mesh):
        y = _product_on_cpu(flat, kernel, is_transposed).astype(x.dtype)
    elif is_transposed and b * t < FEW_ROWS:
        # Without the barrier, XLA undoes the transposition.
        y = jax.lax.optimization_barrier(kernel @ flat.T).T
    else:
        y = product(flat, kernel, is_transposed)
    return y.reshape(b, t, -1)


def product(
    x: jax.Array,
    kernel: jax.Array,
    is_transposed: bool,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Return the [N, E] product of [N, D] and [D, E], or [E, D] if it is transposed.

    Args:
        x: [N, D].
        kernel: [D, E], or [E, D].
        is_transposed: whether the kernel is [E, D].
        dtype: dtype of the product; None means the operands' dtype.
    """
    # XLA's CPU backend recognises a bfloat16 product in this form, but not when the
    # operand is an explicit transpose.
    equation = "nd,ed->ne" if is_transposed else "nd,de->ne"
    return jnp.einsum(equation, x, kernel, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product_on_cpu(x, kernel, is_transposed):
    """Compute `product` of bfloat16 operands with a float32 result.

    XLA's CPU backend has fast bfloat16 products only if the result is float32 and the
    left matrix is summed over its last axis. Otherwise it widens both operands, which
    takes several times as long.
    """
    return product(x, kernel, is_transposed, jnp.float32)


def _product_forward(x, kernel, is_transposed):
    return _product_on_cpu(x, kernel, is_transposed), (x, kernel)


def _product_backward(is_transposed, residuals, d_y):
    x, kernel = residuals
    d_y = d_y.astype(x.dtype)
    d_x = _product_on_cpu(d_y, kernel, not is_transposed)
    rows, columns = (d_y, x) if is_transposed else (x, d_y)
    d_kernel = _product_on_cpu(transposed(rows), columns, False)
    return d_x.astype(x.dtype), d_kernel.astype(kernel.dtype)


_product_on_cpu.defvjp(_product_forward, _product_backward)


def transposed(x: jax.Array) -> jax.Array:
    """Return matrices [..., D, E] transposed to [..., E, D] for a product on CPUs.

    XLA treats a transpose as the same numbers in another layout, even if a barrier
    follows, and its CPU backend has bfloat16 products only for the usual layout. Adding
    an axis before the barrier and removing it afterwards makes XLA move the numbers.
    """
    return jax.lax.optimization_barrier(x.swapaxes(-1, -2)[None])[0]
