"""Attention on GPUs: the flash attention kernel that comes with JAX, in Triton.

It keeps the scores of a block of queries and keys on the chip, in the backward pass
too; XLA writes them to memory, and runs some ten kernels for each block.

Dimensions: B rows, T tokens, H heads, K key/value heads, C head width.
"""

import math

import jax
import jax.numpy as jnp

FORWARD, BACKWARD = 128, 32  # queries, and keys, whose scores exist at once
WIDE = 128  # channels of a head; of wider ones FORWARD is halved: shared memory ends
HALVES = (jnp.bfloat16, jnp.float16)  # what its products take
MIN_CAPABILITY = 8  # of compute: A100's; older GPUs have less shared memory
MIN_WIDTH = 16  # channels of the smallest product in Triton


def has_gpu_kernels(
    device: jax.Device, dtype: jax.typing.DTypeLike, width: int
) -> bool:
    """Return whether attention on a device uses JAX's kernels for GPUs.

    It does not for float32, which they would round to the ten bits of a TF32 product.

    Args:
        device: any.
        dtype: of queries, keys and values.
        width: C.
    """
    if device.platform != "gpu" or dtype not in HALVES or width < MIN_WIDTH:
        return False
    version = str(getattr(device, "compute_capability", ""))
    major = version.partition(".")[0]
    return major.isdigit() and int(major) >= MIN_CAPABILITY


def is_power_of_2(*sizes: int) -> bool:
    """Return whether all sizes are, as Triton wants those of its blocks."""
    return all(size & (size - 1) == 0 for size in sizes)


def flash_within(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    text: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Compute `attend_within` with the kernel, on one device.

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
    size = FORWARD if c <= WIDE else FORWARD // 2
    padding = -t % size
    # The padding of the last block is a text of its own.
    text = jnp.pad(text, ((0, 0), (0, padding)), constant_values=-1)

    def heads_last(x):
        # The kernel has no heads that share keys: they are repeated for each query's.
        return jnp.repeat(x.swapaxes(1, 2), h // kv_heads, axis=2)

    def padded(x):
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
        *map(padded, (q, heads_last(k), heads_last(v))),
        text,
        sm_scale=1 / math.sqrt(c),
        causal=True,
        block_sizes=blocks,
        interpret=interpret,
    )
    return out[:, :t]
