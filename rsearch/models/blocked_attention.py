"""Attention within packed rows of text, block by block, forwards and backwards.

Dimensions: B rows, T tokens, H heads, K key/value heads, G = H / K heads sharing one, C
head width, n blocks of N tokens.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rsearch.models.attention import attend
from rsearch.models.sharding import runs_on_tpu
from rsearch.models.splash import splash_within

BLOCK = 64  # N, tokens whose scores exist at once, against as many


def attend_within(q, k, v, text, mesh: Mesh | None = None):
    """Attention within the texts of each row, of no token to a later one.

    Short rows have all their scores at once. Longer ones go by blocks and never hold
    [T, T] scores: the softmax is taken with a running maximum (Rabe and Staats, arXiv
    2112.05682; backwards as in FlashAttention, arXiv 2205.14135). Blocks of keys that
    lie before the texts of a block of queries, in all rows, are passed over, so that
    many texts in one row cost what they cost alone. On TPUs a kernel does the same.

    Args:
        q: [B, T, H, C] queries.
        k, v: [B, K, T, C] keys and values; H is a multiple of K.
        text: [B, T] int32, the number of the text a token is of; ascending from 0.
        mesh: of the devices that hold them, rows over data and fsdp, heads over tensor;
            None is one device.

    Returns:
        [B, T, H, C] in the queries' dtype.
    """
    b, t, h, c = q.shape
    kv_heads = k.shape[1]
    if t <= 2 * BLOCK:
        token = jnp.arange(t)
        visible = text[:, :, None] == text[:, None, :]
        return attend(q, k, v, visible & (token[None] <= token[:, None])[None])
    if runs_on_tpu(mesh):
        return splash_within(q, k, v, text, mesh)
    n = -(-t // BLOCK)
    short = n * BLOCK - t
    # What fills the last block is a text of its own.
    text = jnp.pad(text, ((0, 0), (0, short)), mode="edge")
    text += (jnp.arange(n * BLOCK) >= t)[None]
    q = q.reshape(b, t, kv_heads, h // kv_heads, c).transpose(0, 2, 3, 1, 4)
    q, k, v = (
        jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, short), (0, 0)]) for x in (q, k, v)
    )
    q, k, v = (
        jnp.moveaxis(x.reshape(*x.shape[:-2], n, BLOCK, c), -3, 0) for x in (q, k, v)
    )
    text = text.reshape(b, n, BLOCK).swapaxes(0, 1)
    out = _blocked(q, k, v, text)
    out = jnp.moveaxis(out, 0, -3).reshape(b, kv_heads, h // kv_heads, n * BLOCK, c)
    return out[..., :t, :].transpose(0, 3, 1, 2, 4).reshape(b, t, h, c)


@jax.custom_vjp
def _blocked(q, k, v, text):
    """[n, B, K, G, N, C] of queries like it, keys [n, B, K, N, C] and texts [n, B, N].

    n blocks of N tokens.
    """
    return _blocked_forward(q, k, v, text)[0]


def _first_blocks(text):
    """[n] int32, the first block of keys that each block of queries looks at."""
    begins, ends = text[:, :, 0], text[:, :, -1]
    shared = jnp.any(ends[None] >= begins[:, None], axis=-1)
    return jnp.argmax(shared, axis=1).astype(jnp.int32)


def _scores(q, k, text_q, text_k, i, j):
    """[B, K, G, N, N] float32 of blocks i and j, -inf where a query may not look."""
    scores = jnp.einsum("bkgtc,bksc->bkgts", q, k, preferred_element_type=jnp.float32)
    token = jnp.arange(q.shape[3])
    is_past = (j * len(token) + token)[None] <= (i * len(token) + token)[:, None]
    visible = (text_q[:, :, None] == text_k[:, None, :]) & is_past[None]
    return jnp.where(visible[:, None, None], scores / math.sqrt(q.shape[-1]), -jnp.inf)


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
                "bkgts,bksc->bkgtc",
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
                "bkgtc,bksc->bkgts", d_out, v[j], preferred_element_type=jnp.float32
            )
            d_scores = weights * (d_weights - inner) * scale
            d_q += jnp.einsum("bkgts,bksc->bkgtc", d_scores, k[j].astype(jnp.float32))
            own_k = jnp.einsum("bkgts,bkgtc->bksc", d_scores, q.astype(jnp.float32))
            own_v = jnp.einsum("bkgts,bkgtc->bksc", weights, d_out)
            return d_q, d_k.at[j].add(own_k), d_v.at[j].add(own_v)

        start = (jnp.zeros(q.shape, jnp.float32), *carry)
        d_q, *carry = jax.lax.fori_loop(first[i], i + 1, look, start)
        return tuple(carry), d_q.astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    blocks = (jnp.arange(len(q)), q, text, out, log_mass, d_out)
    (d_k, d_v), d_q = jax.lax.scan(one, zeros, blocks)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None


_blocked.defvjp(_blocked_forward, _blocked_backward)
