"""Attention within packed rows of text, block by block, forwards and backwards.

Dimensions: B rows, T tokens, H heads, K key/value heads, G = H / K heads sharing one, C
head width, n blocks of N queries, S keys that a block looks at.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from rsearch.models.attention.cached import attend, covering, reaches
from rsearch.models.attention.splash import ATTENDED, splash_within
from rsearch.models.sharding import cut_axes, platform_of

SHORT = 128  # tokens of a row that has all its scores at once


def block_size(num_tokens: int) -> int:
    """N of a row of T tokens, all of it where it is short.

    Large blocks keep a processor's cores busy, small ones look at little else.
    """
    if num_tokens <= SHORT:
        return num_tokens
    return 64 if num_tokens <= 512 else 128 if num_tokens <= 2048 else 256


def attend_within(q, k, v, text, mesh: Mesh | None = None):
    """Attention within the texts of each row, of no token to a later one.

    Short rows have all their scores at once. Longer ones go by blocks of queries and
    never hold [T, T] scores, backwards neither: what weighs a block's keys is computed
    again (FlashAttention, arXiv 2205.14135). A block looks at the keys from the first
    of its texts on, in eighths of the row, so that many texts in one row cost little
    more than they cost alone. On TPUs a kernel does the same. Every device has to do
    with its own rows and heads alone.

    Args:
        q: [B, T, H, C] queries.
        k, v: [B, K, T, C] keys and values; H is a multiple of K.
        text: [B, T] int32, the number of the text a token is of; ascending from 0.
        mesh: of the devices that hold them, rows over data and fsdp, heads over tensor;
            None is one device.

    Returns:
        [B, T, H, C] in the queries' dtype.
    """
    own = functools.partial(_attend_within, platform=platform_of(mesh))
    if mesh is None or mesh.size == 1:
        return own(q, k, v, text)
    rows, heads = cut_axes(mesh, k.shape[1], len(q))
    new, kept = PartitionSpec(rows, None, heads), PartitionSpec(rows, heads)
    return jax.shard_map(
        own,
        mesh=mesh,
        in_specs=(new, kept, kept, PartitionSpec(rows)),
        out_specs=new,
        check_vma=False,
    )(q, k, v, text)


def _attend_within(q, k, v, text, platform):
    """`attend_within` on one device."""
    b, t, h, c = q.shape
    kv_heads = k.shape[1]
    if t <= SHORT:
        token = jnp.arange(t)
        visible = text[:, :, None] == text[:, None, :]
        return attend(q, k, v, visible & (token[None] <= token[:, None])[None])
    if platform == "tpu":
        return splash_within(q, k, v, text)
    size = block_size(t)
    n = -(-t // size)
    short = n * size - t
    # Else JAX makes all masks outside a scan over layers, for every size of a window.
    q, text = jax.lax.optimization_barrier((q, text))
    # What fills the last block is a text of its own.
    text = jnp.pad(text, ((0, 0), (0, short)), mode="edge")
    text += (jnp.arange(n * size) >= t)[None]
    q = jnp.pad(q, ((0, 0), (0, short), (0, 0), (0, 0)))
    q = q.reshape(b, n, size, kv_heads, h // kv_heads, c).transpose(1, 0, 3, 4, 2, 5)
    q = q.reshape(n, b * kv_heads, -1, c)

    def keys(x):
        x = jnp.pad(x, ((0, 0), (0, 0), (0, short), (0, 0)))
        return x.reshape(b * kv_heads, n * size, c)

    out = _blocked(q, keys(k), keys(v), text)
    out = out.reshape(n, b, h, size, c).transpose(1, 0, 3, 2, 4)
    return out.reshape(b, n * size, h, c)[:, :t]


@jax.custom_vjp
def _blocked(q, k, v, text):
    """[n, BK, GN, C] of queries like it, keys [BK, nN, C] and texts [B, nN].

    Axes are joined as in `attend`, for its reason.
    """
    return _blocked_forward(q, k, v, text)[0]


def _sizes(text, n) -> list[int]:
    """Ascending numbers of keys, one of which a block looks at: S."""
    return reaches(text.shape[1], text.shape[1] // n)


def _needed(text, n):
    """[n] int32: which of `_sizes` each block of queries needs."""
    size = text.shape[1] // n
    begins, ends = text[:, ::size], text[:, size - 1 :: size]
    shared = jnp.any(ends[:, None] >= begins[:, :, None], axis=0)  # [queries, keys]
    count = jnp.arange(1, n + 1) - jnp.argmax(shared, axis=1)
    return covering(_sizes(text, n), count * size)


def _window(i, n, num_keys, k, v, text):
    """What block i looks at: (number of the first key, k, v, visible).

    Keys and values are [BK, S, C], and [B, N, S] says which query may look at which.
    """
    size = text.shape[1] // n
    first = jnp.maximum((i + 1) * size - num_keys, 0)

    def cut(x, begin, count):
        return jax.lax.dynamic_slice_in_dim(x, begin, count, axis=1)

    query, key = i * size + jnp.arange(size), first + jnp.arange(num_keys)
    own, text = cut(text, i * size, size), cut(text, first, num_keys)
    visible = own[:, :, None] == text[:, None, :]
    visible &= (key[None] <= query[:, None])[None]
    return first, cut(k, first, num_keys), cut(v, first, num_keys), visible


def _scores(q, k, visible):
    """[BK, GN, S] float32, -inf where a query may not look."""
    scores = jnp.einsum("ntc,nsc->nts", q, k, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(q.shape[-1])
    by_head = scores.reshape(len(visible), -1, *visible.shape[1:])
    return jnp.where(visible[:, None], by_head, -jnp.inf).reshape(scores.shape)


def _over_queries(weights, x):
    """[BK, S, C]: the sum over queries of weights [BK, GN, S] times [BK, GN, C].

    XLA's CPU backend takes half the time where the small matrix is the one that it has
    to turn; left to itself it turns the large one.
    """
    found = jnp.einsum("ntc,nts->ncs", x, weights)
    return jax.lax.optimization_barrier(found).swapaxes(1, 2)


def _blocked_forward(q, k, v, text):
    n = len(q)

    def look(num_keys, i, q):
        _, near_k, near_v, visible = _window(i, n, num_keys, k, v, text)
        scores = _scores(q, near_k, visible)
        highest = jnp.max(scores, axis=-1, keepdims=True)  # A token sees itself.
        weights = jnp.exp(scores - highest)
        mass = jnp.sum(weights, axis=-1, keepdims=True)
        seen = jnp.einsum(
            "nts,nsc->ntc",
            weights.astype(v.dtype),
            near_v,
            preferred_element_type=jnp.float32,
        )
        return (seen / mass).astype(q.dtype), (highest + jnp.log(mass))[..., 0]

    branches = [functools.partial(look, num_keys) for num_keys in _sizes(text, n)]

    def one(_, block):
        needed, i, q = block
        return None, jax.lax.switch(needed, branches, i, q)

    blocks = _needed(text, n), jnp.arange(n), q
    _, found = jax.lax.scan(one, None, blocks)
    out, log_mass = checkpoint_name(found, ATTENDED)
    return out, (q, k, v, text, out, log_mass)


def _blocked_backward(kept, d_out):
    q, k, v, text, out, log_mass = kept
    n, scale = len(q), 1 / math.sqrt(q.shape[-1])

    def look(num_keys, i, carry, q, out, log_mass, d_out):
        first, near_k, near_v, visible = _window(i, n, num_keys, k, v, text)
        weights = jnp.exp(_scores(q, near_k, visible) - log_mass[..., None])
        d_out = d_out.astype(jnp.float32)
        inner = jnp.sum(d_out * out.astype(jnp.float32), axis=-1, keepdims=True)
        d_weights = jnp.einsum(
            "ntc,nsc->nts", d_out, near_v, preferred_element_type=jnp.float32
        )
        d_scores = weights * (d_weights - inner) * scale
        d_q = jnp.einsum("nts,nsc->ntc", d_scores, near_k.astype(jnp.float32))
        own_k = _over_queries(d_scores, q.astype(jnp.float32))
        own_v = _over_queries(weights, d_out)

        def add(total, own):
            old = jax.lax.dynamic_slice_in_dim(total, first, num_keys, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(total, old + own, first, axis=1)

        return (add(carry[0], own_k), add(carry[1], own_v)), d_q.astype(q.dtype)

    branches = [functools.partial(look, num_keys) for num_keys in _sizes(text, n)]

    def one(carry, block):
        needed, i, *rest = block
        return jax.lax.switch(needed, branches, i, carry, *rest)

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    blocks = _needed(text, n), jnp.arange(n), q, out, log_mass, d_out
    (d_k, d_v), d_q = jax.lax.scan(one, zeros, blocks)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None


_blocked.defvjp(_blocked_forward, _blocked_backward)
