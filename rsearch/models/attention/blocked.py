"""Attention within packed rows of text, block by block, and its gradient.

Dimensions: B rows, T tokens, H heads, K key/value heads, G = H / K query heads per
key/value head, C head width, n blocks of N queries, S keys in a block's window.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from rsearch.models.attention.cached import attend, first_covering_index, prefix_lengths
from rsearch.models.attention.flash import flash_within, has_gpu_kernels
from rsearch.models.attention.splash import ATTENDED, splash_within
from rsearch.models.products import transposed
from rsearch.models.sharding import device_of, shard_axes

MAX_DENSE_TOKENS = 128  # longest row, in tokens, whose scores are computed all at once


def block_size(num_tokens: int) -> int:
    """Return N for a row of T tokens; a short row is one block.

    Large blocks keep a processor's cores busy; small blocks compute fewer scores that
    are then masked.
    """
    if num_tokens <= MAX_DENSE_TOKENS:
        return num_tokens
    return 64 if num_tokens <= 512 else 128 if num_tokens <= 2048 else 256


def attend_within(
    q: jax.Array, k: jax.Array, v: jax.Array, text: jax.Array, mesh: Mesh | None = None
) -> jax.Array:
    """Compute causal attention within the texts of each row.

    Short rows compute all their scores at once. Longer rows are processed in blocks of
    queries and never hold [T, T] scores; the backward pass recomputes a block's weights
    (FlashAttention, arXiv 2205.14135). A block's window of keys reaches back to the
    start of its first text, rounded up to eighths of the row, so that many texts packed
    into one row cost little more than in separate rows. TPUs use a kernel instead, and
    so do GPUs for 16-bit inputs. Each device computes its own rows and heads; there is
    no communication.

    Args:
        q: [B, T, H, C] queries.
        k, v: [B, K, T, C] keys and values; H is a multiple of K.
        text: [B, T] int32, the number of each token's text; ascending from 0.
        mesh: mesh of the devices that hold these arrays, with rows over data and fsdp
            and heads over tensor; None means one device.

    Returns:
        [B, T, H, C] in the queries' dtype.
    """
    attend_shard = functools.partial(_attend_within, device=device_of(mesh))
    if mesh is None or mesh.size == 1:
        return attend_shard(q, k, v, text)
    rows, heads = shard_axes(mesh, k.shape[1], len(q))
    query_spec, key_spec = PartitionSpec(rows, None, heads), PartitionSpec(rows, heads)
    return jax.shard_map(
        attend_shard,
        mesh=mesh,
        in_specs=(query_spec, key_spec, key_spec, PartitionSpec(rows)),
        out_specs=query_spec,
        check_vma=False,
    )(q, k, v, text)


def _attend_within(q, k, v, text, device):
    """Compute `attend_within` on one device."""
    b, t, h, c = q.shape
    kv_heads = k.shape[1]
    if t <= MAX_DENSE_TOKENS:
        token = jnp.arange(t)
        visible = text[:, :, None] == text[:, None, :]
        return attend(q, k, v, visible & (token[None] <= token[:, None])[None])
    if device.platform == "tpu":
        return splash_within(q, k, v, text)
    if has_gpu_kernels(device, q.dtype, c):
        return flash_within(q, k, v, text)
    size = block_size(t)
    n = -(-t // size)
    num_padding = n * size - t
    # Without this barrier, JAX hoists the masks of all window sizes out of a scan over
    # layers and keeps them in memory.
    q, text = jax.lax.optimization_barrier((q, text))
    # The padding of the last block counts as a separate text.
    text = jnp.pad(text, ((0, 0), (0, num_padding)), mode="edge")
    text += (jnp.arange(n * size) >= t)[None]
    q = jnp.pad(q, ((0, 0), (0, num_padding), (0, 0), (0, 0)))
    q = q.reshape(b, n, size, kv_heads, h // kv_heads, c).transpose(1, 0, 3, 4, 2, 5)
    q = q.reshape(n, b * kv_heads, -1, c)

    def pad_keys(x):
        x = jnp.pad(x, ((0, 0), (0, 0), (0, num_padding), (0, 0)))
        return x.reshape(b * kv_heads, n * size, c)

    out = _attend_blocks(q, pad_keys(k), pad_keys(v), text)
    out = out.reshape(n, b, h, size, c).transpose(1, 0, 3, 2, 4)
    return out.reshape(b, n * size, h, c)[:, :t]


@jax.custom_vjp
def _attend_blocks(q, k, v, text):
    """Attend block by block; return [n, BK, GN, C], the shape of the queries.

    Keys and values are [BK, nN, C], texts [B, nN]. Axes are merged for the reason given
    in `attend`.
    """
    return _attend_blocks_forward(q, k, v, text)[0]


def _sizes(text, n) -> list[int]:
    """Return the ascending window sizes S that a block may use, in keys."""
    return prefix_lengths(text.shape[1], text.shape[1] // n)


def _window_indices(text, n):
    """Return the [n] int32 indices into `_sizes` of the windows the blocks need."""
    size = text.shape[1] // n
    first_texts, last_texts = text[:, ::size], text[:, size - 1 :: size]
    # [queries, keys]
    shares_text = jnp.any(last_texts[:, None] >= first_texts[:, :, None], axis=0)
    count = jnp.arange(1, n + 1) - jnp.argmax(shares_text, axis=1)
    return first_covering_index(_sizes(text, n), count * size)


def _window(i, n, num_keys, k, v, text):
    """Return the window of block i: (index of its first key, k, v, visible).

    Keys and values are [BK, S, C]; visible is [B, N, S], True where a query may attend
    to a key.
    """
    size = text.shape[1] // n
    first_key = jnp.maximum((i + 1) * size - num_keys, 0)

    def cut(x, begin, count):
        return jax.lax.dynamic_slice_in_dim(x, begin, count, axis=1)

    query, key = i * size + jnp.arange(size), first_key + jnp.arange(num_keys)
    query_text, text = cut(text, i * size, size), cut(text, first_key, num_keys)
    visible = query_text[:, :, None] == text[:, None, :]
    visible &= (key[None] <= query[:, None])[None]
    return first_key, cut(k, first_key, num_keys), cut(v, first_key, num_keys), visible


_multiply = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _scores(q, k, visible):
    """Return [BK, GN, S] float32 scores, -inf where a query may not attend."""
    scores = _multiply("ntc,nsc->nts", q, k)
    scores = scores / math.sqrt(q.shape[-1])
    by_head = scores.reshape(len(visible), -1, *visible.shape[1:])
    return jnp.where(visible[:, None], by_head, -jnp.inf).reshape(scores.shape)


def _sum_over_queries(weights, x):
    """Sum x [BK, GN, C] over queries with weights [BK, GN, S]: [BK, S, C] float32.

    XLA's CPU backend is faster if it transposes the small matrix; without the barrier
    it transposes the large one.
    """
    if x.dtype == jnp.float32:
        sums = jnp.einsum("ntc,nts->ncs", x, weights)
    else:
        sums = _multiply("nct,nts->ncs", transposed(x), weights)
    return jax.lax.optimization_barrier(sums).swapaxes(1, 2)


def _attend_blocks_forward(q, k, v, text):
    n = len(q)

    def attend_window(num_keys, i, q):
        _, near_k, near_v, visible = _window(i, n, num_keys, k, v, text)
        scores = _scores(q, near_k, visible)
        # The maximum is finite for every query, because a token always sees itself.
        highest = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - highest)
        mass = jnp.sum(weights, axis=-1, keepdims=True)
        weighted_values = _multiply("nts,nsc->ntc", weights.astype(v.dtype), near_v)
        # Not yet cast to the queries' dtype: to write one block of bfloat16, XLA's CPU
        # backend widens and narrows all blocks of all layers.
        return weighted_values / mass, (highest + jnp.log(mass))[..., 0]

    branches = [functools.partial(attend_window, size) for size in _sizes(text, n)]

    def attend_block(_, block):
        window_index, i, q = block
        return None, jax.lax.switch(window_index, branches, i, q)

    blocks = _window_indices(text, n), jnp.arange(n), q
    _, outputs = jax.lax.scan(attend_block, None, blocks)
    out, log_mass = checkpoint_name(outputs, ATTENDED)
    return out.astype(q.dtype), (q, k, v, text, out, log_mass)


def _attend_blocks_backward(residuals, d_out):
    q, k, v, text, out, log_mass = residuals
    n, scale = len(q), 1 / math.sqrt(q.shape[-1])

    def attend_window(num_keys, i, carry, q, out, log_mass, d_out):
        first_key, near_k, near_v, visible = _window(i, n, num_keys, k, v, text)
        weights = jnp.exp(_scores(q, near_k, visible) - log_mass[..., None])
        inner = jnp.sum(d_out.astype(jnp.float32) * out, axis=-1, keepdims=True)
        d_weights = _multiply("ntc,nsc->nts", d_out, near_v)
        # Softmax in float32, products in the compute dtype, as in FlashAttention.
        d_scores = (weights * (d_weights - inner) * scale).astype(q.dtype)
        d_q = _multiply("nts,nsc->ntc", d_scores, near_k)
        block_k = _sum_over_queries(d_scores, q)
        block_v = _sum_over_queries(weights.astype(d_out.dtype), d_out)

        def add(total, change):
            window_sum = jax.lax.dynamic_slice_in_dim(
                total, first_key, num_keys, axis=1
            )
            return jax.lax.dynamic_update_slice_in_dim(
                total, window_sum + change, first_key, axis=1
            )

        return (add(carry[0], block_k), add(carry[1], block_v)), d_q

    branches = [functools.partial(attend_window, size) for size in _sizes(text, n)]

    def add_block(carry, block):
        window_index, i, *arrays = block
        return jax.lax.switch(window_index, branches, i, carry, *arrays)

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    blocks = _window_indices(text, n), jnp.arange(n), q, out, log_mass, d_out
    (d_k, d_v), d_q = jax.lax.scan(add_block, zeros, blocks)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_attend_blocks.defvjp(_attend_blocks_forward, _attend_blocks_backward)
