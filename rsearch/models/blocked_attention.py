"""Attention within packed rows of text, block by block, forwards and backwards.

Dimensions: B rows, T tokens, H heads, K key/value heads, G = H / K heads sharing one, C
head width, n blocks of N tokens.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from rsearch.models.attention import attend
from rsearch.models.sharding import num_shards, platform_of
from rsearch.models.splash import splash_within

BLOCK = 64  # N, tokens whose scores exist at once, against as many


def attend_within(q, k, v, text, mesh: Mesh | None = None):
    """Attention within the texts of each row, of no token to a later one.

    Short rows have all their scores at once. Longer ones go by blocks and never hold
    [T, T] scores: the softmax is taken with a running maximum (Rabe and Staats, arXiv
    2112.05682; backwards as in FlashAttention, arXiv 2205.14135). Blocks of keys that
    lie before the texts of a block of queries, in all rows, are passed over, so that
    many texts in one row cost what they cost alone. On TPUs a kernel does the same.
    Every device has to do with its own rows and heads alone.

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
    rows = ("data", "fsdp") if len(q) % num_shards(mesh) == 0 else None
    heads = "tensor" if k.shape[1] % mesh.shape["tensor"] == 0 else None
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
    if t <= 2 * BLOCK:
        token = jnp.arange(t)
        visible = text[:, :, None] == text[:, None, :]
        return attend(q, k, v, visible & (token[None] <= token[:, None])[None])
    if platform == "tpu":
        return splash_within(q, k, v, text)
    n = -(-t // BLOCK)
    short = n * BLOCK - t
    # What fills the last block is a text of its own.
    text = jnp.pad(text, ((0, 0), (0, short)), mode="edge")
    text += (jnp.arange(n * BLOCK) >= t)[None]
    text = text.reshape(b, n, BLOCK).swapaxes(0, 1)
    q = jnp.pad(q, ((0, 0), (0, short), (0, 0), (0, 0)))
    q = q.reshape(b, n, BLOCK, kv_heads, h // kv_heads, c).transpose(1, 0, 3, 4, 2, 5)
    q = q.reshape(n, b * kv_heads, -1, c)

    def blocks(x):
        x = jnp.pad(x, ((0, 0), (0, 0), (0, short), (0, 0)))
        return x.reshape(b * kv_heads, n, BLOCK, c).swapaxes(0, 1)

    out = _blocked(q, blocks(k), blocks(v), text)
    out = out.reshape(n, b, h, BLOCK, c).transpose(1, 0, 3, 2, 4)
    return out.reshape(b, n * BLOCK, h, c)[:, :t]


@jax.custom_vjp
def _blocked(q, k, v, text):
    """[n, BK, GN, C] of queries like it, keys [n, BK, N, C] and texts [n, B, N].

    n blocks of N tokens. Axes are joined as in `attend`, for its reason.
    """
    return _blocked_forward(q, k, v, text)[0]


def _first_blocks(text):
    """[n] int32, the first block of keys that each block of queries looks at."""
    begins, ends = text[:, :, 0], text[:, :, -1]
    shared = jnp.any(ends[None] >= begins[:, None], axis=-1)
    return jnp.argmax(shared, axis=1).astype(jnp.int32)


def _scores(q, k, text_q, text_k, i, j):
    """[BK, GN, N] float32 of blocks i and j, -inf where a query may not look."""
    scores = jnp.einsum("ntc,nsc->nts", q, k, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(q.shape[-1])
    token = jnp.arange(BLOCK)
    is_past = (j * BLOCK + token)[None] <= (i * BLOCK + token)[:, None]
    visible = (text_q[:, :, None] == text_k[:, None, :]) & is_past[None]
    by_head = scores.reshape(len(text_q), -1, BLOCK, BLOCK)
    return jnp.where(visible[:, None], by_head, -jnp.inf).reshape(scores.shape)


def _blocked_forward(q, k, v, text):
    first = _first_blocks(text)

    def one(_, block):
        i, q, text_q = block

        def look(j, carry):
            highest, mass, total = carry
            scores = _scores(q, k[j], text_q, text[j], i, j)
            new = jnp.maximum(highest, jnp.max(scores, axis=-1))
            old_share = jnp.exp(highest - new)
            weights = jnp.exp(scores - new[..., None])
            mass = mass * old_share + jnp.sum(weights, axis=-1)
            seen = jnp.einsum(
                "nts,nsc->ntc",
                weights.astype(v.dtype),
                v[j],
                preferred_element_type=jnp.float32,
            )
            return new, mass, total * old_share[..., None] + seen

        shape = q.shape[:-1]
        # Finite, so that a block without a visible key leaves no NaN.
        lowest = jnp.full(shape, jnp.finfo(jnp.float32).min)
        start = lowest, jnp.zeros(shape), jnp.zeros(q.shape, jnp.float32)
        highest, mass, total = jax.lax.fori_loop(first[i], i + 1, look, start)
        out = (total / mass[..., None]).astype(q.dtype)
        return None, (out, highest + jnp.log(mass))

    _, (out, log_mass) = jax.lax.scan(one, None, (jnp.arange(len(q)), q, text))
    return out, (q, k, v, text, out, log_mass)


def _blocked_backward(kept, d_out):
    q, k, v, text, out, log_mass = kept
    first = _first_blocks(text)
    scale = 1 / math.sqrt(q.shape[-1])

    def one(carry, block):
        i, q, text_q, out, log_mass, d_out = block
        d_out = d_out.astype(jnp.float32)
        inner = jnp.sum(d_out * out.astype(jnp.float32), axis=-1, keepdims=True)

        def look(j, carry):
            d_q, d_k, d_v = carry
            scores = _scores(q, k[j], text_q, text[j], i, j)
            weights = jnp.exp(scores - log_mass[..., None])
            d_weights = jnp.einsum(
                "ntc,nsc->nts", d_out, v[j], preferred_element_type=jnp.float32
            )
            d_scores = weights * (d_weights - inner) * scale
            d_q += jnp.einsum("nts,nsc->ntc", d_scores, k[j].astype(jnp.float32))
            own_k = jnp.einsum("nts,ntc->nsc", d_scores, q.astype(jnp.float32))
            own_v = jnp.einsum("nts,ntc->nsc", weights, d_out)
            return d_q, d_k.at[j].add(own_k), d_v.at[j].add(own_v)

        start = (jnp.zeros(q.shape, jnp.float32), *carry)
        d_q, *carry = jax.lax.fori_loop(first[i], i + 1, look, start)
        return tuple(carry), d_q.astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    blocks = (jnp.arange(len(q)), q, text, out, log_mass, d_out)
    (d_k, d_v), d_q = jax.lax.scan(one, zeros, blocks)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None


_blocked.defvjp(_blocked_forward, _blocked_backward)
