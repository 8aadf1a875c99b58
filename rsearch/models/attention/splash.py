"""Attention on TPUs with JAX's splash attention kernel.

It keeps the scores of a block of queries and keys on the chip, also in the backward
pass; XLA writes them to memory.

Dimensions: B rows, T new tokens, S cached slots, H heads, K key/value heads, C head
width.
"""

import functools
import math

import jax
import jax.numpy as jnp

ATTENDED = "attended"  # name of the outputs that attention saves for its gradient
LANES = 128  # lanes of a TPU register; head widths and blocks are multiples of it
BLOCK = 512  # largest block: queries (and keys) whose scores exist at once


def splash_within(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    text: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Compute `attend_within` with the TPU kernel on one device.

    Args:
        q: [B, T, H, C] queries.
        k, v: [B, K, T, C] keys and values.
        text: [B, T] int32 numbers of the tokens' texts.
        interpret: run the kernel's arithmetic without a TPU.

    Returns:
        [B, T, H, C] in the queries' dtype.
    """
    t, c = q.shape[1], q.shape[3]
    num_padded, block = _blocks(t)
    # The padding of the last block counts as a separate text.
    text = jnp.pad(text, ((0, 0), (0, num_padded - t)), constant_values=-1)

    kernel = _kernel(
        q.shape[2], (num_padded, num_padded), (block, block), True, interpret
    )

    def attend_row(q, k, v, text):
        return kernel(q, k, v, _segments(text, text))

    arrays = (_pad(x, num_padded) for x in (_scale_queries(q).swapaxes(1, 2), k, v))
    return jax.vmap(attend_row)(*arrays, text).swapaxes(1, 2)[:, :t, :, :c]


def splash_after(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    own_k: jax.Array,
    own_v: jax.Array,
    length: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Compute attention of new tokens to their rows' cached tokens and to themselves.

    This runs on one device. The kernel attends to the cache, and XLA to the new tokens,
    which are few; the two results are weighted by their softmax masses.

    Args:
        q: [B, T, H, C] queries of consecutive tokens.
        k, v: [B, K, S, C] cached keys and values.
        own_k, own_v: [B, T, K, C] keys and values of the new tokens.
        length: [B] int32 number of cache slots that hold earlier tokens.
        interpret: see `splash_within`.

    Returns:
        [B, T, H, C] in the queries' dtype.
    """
    (_, t, h, c), s = q.shape, k.shape[2]
    (num_padded_q, block_q), (num_padded, block) = _blocks(t), _blocks(s)
    kernel = _kernel(h, (num_padded_q, num_padded), (block_q, block), False, interpret)

    def attend_row(q, k, v, length):
        is_past = (jnp.arange(num_padded) < length).astype(jnp.int32)
        return kernel(q, k, v, _segments(jnp.ones(num_padded_q, jnp.int32), is_past))

    queries = _pad(_scale_queries(q).swapaxes(1, 2), num_padded_q)
    past_out, (log_mass,) = jax.vmap(attend_row)(
        queries, _pad(k, num_padded), _pad(v, num_padded), length
    )
    past_out, log_mass = past_out[:, :, :t, :c], log_mass[:, :, :t]
    # Without earlier tokens the kernel's output is meaningless and gets no weight.
    log_mass = jnp.where(length[:, None, None] > 0, log_mass, -jnp.inf)
    return _combine(q, own_k, own_v, past_out, log_mass)


def _combine(q, k, v, past_out, log_mass):
    """Combine attention among new tokens with attention to the past: [B, T, H, C]."""
    b, t, h, c = q.shape
    kv_heads = k.shape[2]
    grouped_q = q.reshape(b, t, kv_heads, h // kv_heads, c)
    scores = jnp.einsum(
        "btkgc,bskc->bkgts", grouped_q, k, preferred_element_type=jnp.float32
    )
    scores = jnp.where(jnp.tri(t, dtype=bool), scores / math.sqrt(c), -jnp.inf)
    log_mass = log_mass.reshape(b, kv_heads, h // kv_heads, t, 1)
    past_out = past_out.reshape(b, kv_heads, h // kv_heads, t, c)
    highest = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), log_mass)
    weights, share = jnp.exp(scores - highest), jnp.exp(log_mass - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True) + share
    own_out = jnp.einsum("bkgts,bskc->bkgtc", (weights / total).astype(v.dtype), v)
    out = own_out + (past_out * (share / total)).astype(v.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, h, c)


@functools.cache
def _mask(shape, is_causal):
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    return masks.CausalMask(shape) if is_causal else masks.FullMask(shape)


def _segments(q, kv):
    """Return segment ids: queries and keys with equal numbers see each other."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    return splash_attention.SegmentIds(q, kv)


def _kernel(num_heads, shape, blocks, is_causal, interpret):
    """Make a kernel of shape [queries, keys]; a full mask also returns log-masses."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    q, kv = blocks
    backward = {}
    if is_causal:
        backward = dict(block_q_dkv=q, block_kv_dkv=kv, block_q_dq=q, block_kv_dq=kv)
    return splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([_mask(shape, is_causal)] * num_heads),
        block_sizes=splash_attention.BlockSizes(block_q=q, block_kv=kv, **backward),
        head_shards=1,
        q_seq_shards=1,
        save_residuals=not is_causal,
        residual_checkpoint_name=ATTENDED,
        interpret=interpret,
    )


def _blocks(num_tokens) -> tuple[int, int]:
    """Return the padded number of tokens and the size of a block."""
    block = min(BLOCK, -(-num_tokens // LANES) * LANES)
    return -(-num_tokens // block) * block, block


def _scale_queries(q):
    """Scale queries by 1 / sqrt(C), which the kernel leaves to its caller."""
    return (q.astype(jnp.float32) / math.sqrt(q.shape[-1])).astype(q.dtype)


def _pad(x, num_tokens):
    """Pad [B, N, T, C] with zeros to the token and channel counts the kernel takes."""
    tokens, channels = num_tokens - x.shape[2], -x.shape[3] % LANES
    return jnp.pad(x, ((0, 0), (0, 0), (0, tokens), (0, channels)))
