"""Attention on GPUs with JAX's flash attention kernel, which is written in Triton.

It keeps the scores of a block of queries and keys on the chip, also in the backward
pass; XLA writes them to memory, and runs some ten kernels for each block.

Dimensions: B rows, T tokens, H heads, K key/value heads, C head width.
"""

import math

import jax
import jax.numpy as jnp

FORWARD, BACKWARD = 128, 32  # block sizes, in queries and in keys, of the two passes
# Widest head with full FORWARD blocks; shared memory limits wider ones.
MAX_FULL_BLOCK_WIDTH = 128
KERNEL_DTYPES = (jnp.bfloat16, jnp.float16)  # dtypes that the kernel multiplies
MIN_CAPABILITY = 8  # compute capability, A100's; older GPUs have less shared memory
MIN_WIDTH = 16  # head width of the smallest product that Triton supports


def has_gpu_kernels(
    device: jax.Device, dtype: jax.typing.DTypeLike, width: int
) -> bool:
    """Return whether attention on a device uses JAX's GPU kernels.

    Float32 does not: the kernels would round it to the ten bits of a TF32 product.

    Args:
        device: any device.
        dtype: dtype of queries, keys and values.
        width: C.
    """
    if device.platform != "gpu" or dtype not in KERNEL_DTYPES or width < MIN_WIDTH:
        return False
    version = str(getattr(device, "compute_capability", ""))
    major = version.partition(".")[0]
    return major.isdigit() and int(major) >= MIN_CAPABILITY


def is_power_of_2(*sizes: int) -> bool:
    """Return whether all sizes are powers of 2, as Triton requires of its blocks."""
    return all(size & (size - 1) == 0 for size in sizes)


def flash_within(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    text: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Compute `attend_within` with the GPU kernel on one device.

    Args:
        q: [B, T, H, C] queries.
        k, v: [B, K, T, C] keys and values.
        text: [B, T] int32 numbers of the tokens' texts.
        interpret: run the kernel's arithmetic without a GPU.

    Returns:
        [B, T, H, C] in the queries' dtype.
    """
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    (_, t, h, c), kv_heads = q.shape, k.shape[1]
    size = FORWARD if c <= MAX_FULL_BLOCK_WIDTH else FORWARD // 2
    padding = -t % size
    # The padding of the last block counts as a separate text.
    text = jnp.pad(text, ((0, 0), (0, padding)), constant_values=-1)

    def repeat_heads(x):
        # The kernel has no grouped-query attention: keys are repeated per query head.
        return jnp.repeat(x.swapaxes(1, 2), h // kv_heads, axis=2)

    def pad(x):
        return jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)))

    blocks = BlockSizes(
        block_q=size,
        block_k=size,
        block_q_dkv=BACKWARD,
        block_kv_dkv=BACKWARD,
        block_q_dq=BACKWARD,
        block_kv_dq=BACKWARD,
    )
    out = mha(
        *map(pad, (q, repeat_heads(k), repeat_heads(v))),
        text,
        sm_scale=1 / math.sqrt(c),
        causal=True,
        block_sizes=blocks,
        interpret=interpret,
    )
    return out[:, :t]
