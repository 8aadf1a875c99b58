"""Log-probabilities, entropies and values of tokens, without ever holding [B, T, V]."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rsearch.learn.packing import PackedLayout, piecewise
from rsearch.models.decoder import Decoder
from rsearch.models.products import product, transposed
from rsearch.models.sharding import (
    DECODING_RULES,
    num_shards,
    param_shardings,
    platform_of,
)

# Elements from which a CPU multiplies by a tied float32 embedding as it is stored,
# untransposed. Published numbers of smaller models depend on the order of additions.
LARGE_EMBEDDING = 2**22


def token_logprobs(
    model: Decoder,
    params: Any,
    tokens: jax.Array,
    layout: PackedLayout | None = None,
    *,
    wanted: jax.Array | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """Return the log-probability of each token, and its distribution's entropy.

    Hidden states become logits one chunk of columns at a time, and again in the
    backward pass, so that memory is chunk_tokens x V and not B x T x V. A chunk holds
    all rows, so that rows that are sharded over devices stay where they are. A policy
    that reads far more than it writes learns from few tokens: with `wanted` only these
    become logits, in as many chunks as the row with the most of them needs.

    Args:
        model: the network.
        params: its parameters.
        tokens: [B, T] int32.
        layout: how they are packed for the network; None means that they are not. For
            gradients of one piece, see `packing.only_piece`.
        wanted: [B, T] bool, the tokens to score; None scores all.
        temperature: divides the logits, as in the sampler.
        chunk_tokens: tokens whose logits exist on each device at the same time, but at
            least one per row.

    Returns:
        [B, T] float32 log-probabilities and [B, T] float32 entropies in nats. Both are
        0 in the first column, which nothing precedes, for tokens that are not wanted
        and, with a layout, for padding.
    """
    run = functools.partial(
        _row_logprobs, model, params, temperature=temperature, chunk_tokens=chunk_tokens
    )
    if layout is not None:
        return piecewise(run, tokens, layout, wanted=wanted)
    return run(tokens, _row_positions(tokens), wanted)


def _row_logprobs(
    model, params, tokens, positions, wanted, *, temperature, chunk_tokens
):
    """Return (logp, entropy) of rows without a layout; see `token_logprobs`."""
    b, t = tokens.shape
    hidden, _ = model.apply({"params": params}, tokens[:, :-1], positions[:, :-1])
    device_rows = b if model.mesh is None else -(-b // num_shards(model.mesh))
    num_chunks = -(-(t - 1) // max(chunk_tokens // device_rows, 1))
    kernel, is_transposed = _logits_kernel(model, params)
    columns = -(-(t - 1) // num_chunks)
    target, num_needed = tokens[:, 1:], num_chunks
    if wanted is not None:
        wanted = wanted[:, 1:]
        # Wanted tokens come first in each row, so that the other chunks stay empty.
        order = jnp.argsort(~wanted, axis=1, stable=True)
        hidden = jnp.take_along_axis(hidden, order[..., None], axis=1)
        target = jnp.take_along_axis(target, order, axis=1)
        num_needed = -(-jnp.max(jnp.sum(wanted, axis=1)) // columns)

    def to_chunks(x):
        """Return a [B, T - 1, ...] array as [chunks, B, columns, ...]."""
        padding = num_chunks * columns - (t - 1)
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(b, num_chunks, columns, *x.shape[2:]).swapaxes(0, 1)

    chunks = to_chunks(hidden), to_chunks(target)
    logp, entropy = _score(kernel, *chunks, num_needed, temperature, is_transposed)

    def to_rows(x):
        """Return a [chunks, B, columns] array as [B, T], whose first column is 0."""
        x = x.swapaxes(0, 1).reshape(b, num_chunks * columns)[:, : t - 1]
        if wanted is not None:
            x = jnp.take_along_axis(x, jnp.argsort(order, axis=1), axis=1)
            x = jnp.where(wanted, x, 0.0)
        return jnp.pad(x, ((0, 0), (1, 0)))

    return to_rows(logp), to_rows(entropy)


def _logits_kernel(model, params):
    """Return the kernel that makes logits, and whether it is transposed.

    It is [D, V], or [V, D] if transposed, in the compute dtype, not sharded over fsdp.
    """
    name = "embedding" if model.spec.tie_embeddings else "unembedding"
    kernel = {name: params[name].astype(model.dtype)}
    if model.mesh is not None and model.mesh.size > 1:
        # All-gather along fsdp once, not again for each chunk.
        shardings = param_shardings(kernel, model.mesh, DECODING_RULES)
        kernel = jax.lax.with_sharding_constraint(kernel, shardings)
    if not model.spec.tie_embeddings:
        return kernel[name], False
    # On a CPU, transposing a large matrix takes as long as multiplying by it. In
    # bfloat16 a matrix transposed in a product is widened, see `products.transposed`.
    is_fast = model.dtype == jnp.bfloat16 or kernel[name].size >= LARGE_EMBEDDING
    is_transposed = platform_of(model.mesh) == "cpu" and is_fast
    return kernel[name] if is_transposed else kernel[name].T, is_transposed


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _score(kernel, states, target, num_needed, temperature, is_transposed):
    """Return log-probabilities of tokens and entropies, chunk by chunk.

    The backward pass recomputes the logits, and then their gradient directly. With p
    their softmax and H its entropy, it is (1 at the token, else 0) - p for the
    log-probability, and -p (log p + H) for the entropy. The kernel's gradient is summed
    over the chunks in float32.

    Args:
        kernel: [D, V], or [V, D] if transposed.
        states: [chunks, B, columns, D], of the same dtype.
        target: [chunks, B, columns] int32, the token after each state.
        num_needed: number of first chunks to score; the others are 0.
        temperature: divides the logits.
        is_transposed: whether the kernel's axes are [V, D].

    Returns:
        [chunks, B, columns] float32, twice.
    """
    return _score_forward(
        kernel, states, target, num_needed, temperature, is_transposed
    )[0]


def _score_forward(kernel, states, target, num_needed, temperature, is_transposed):
    def score_chunk(_, states, target):
        flat = _flatten_rows(states), _flatten_rows(target)
        scores = _score_chunk(kernel, *flat, temperature, is_transposed)
        return None, tuple(x.reshape(target.shape) for x in scores)

    _, (logp, log_mass, entropy) = _scan_needed(
        score_chunk, None, (states, target), num_needed
    )
    residuals = kernel, num_needed, states, target, log_mass, entropy
    return (logp, entropy), residuals


def _score_backward(temperature, is_transposed, residuals, d_out):
    kernel, num_needed, *chunk_residuals = residuals
    in_bfloat16 = kernel.dtype == jnp.bfloat16
    # In bfloat16 it is faster to transpose the sum than each chunk's logit gradient.
    transposes_sum = is_transposed and in_bfloat16

    def add_chunk(d_kernel, *chunk):
        states, *rest = map(_flatten_rows, chunk)
        d_logits = _logit_gradient(kernel, states, *rest, temperature, is_transposed)
        multiply = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        if is_transposed and not in_bfloat16:
            d_kernel += multiply("nv,nd->vd", d_logits, states)
        else:
            state_columns = transposed(states) if in_bfloat16 else states.T
            d_kernel += multiply("dn,nv->dv", state_columns, d_logits)
        equation = "nv,vd->nd" if is_transposed else "nv,dv->nd"
        d_states = multiply(equation, d_logits, kernel).astype(states.dtype)
        return d_kernel, d_states.reshape(chunk[0].shape)

    start = jnp.zeros(
        kernel.shape[::-1] if transposes_sum else kernel.shape, jnp.float32
    )
    chunks = (*chunk_residuals, *d_out)
    d_kernel, d_states = _scan_needed(add_chunk, start, chunks, num_needed)
    d_kernel = d_kernel.T if transposes_sum else d_kernel
    return d_kernel.astype(kernel.dtype), d_states, None, None


def _scan_needed(run, start, chunks, num_needed):
    """Return what `jax.lax.scan` returns, but run only the first chunks.

    Args:
        run: (carry, *chunk) -> (carry, outputs).
        start: the first carry.
        chunks: arrays of [chunks, ...].
        num_needed: number of chunks to run. Later chunks cost nothing, leave the carry
            as it is and have outputs of 0.
    """
    first_chunk = [x[0] for x in chunks]
    _, shapes = jax.eval_shape(run, start, *first_chunk)

    def step(carry, numbered_chunk):
        number, *chunk = numbered_chunk
        skip_result = carry, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.cond(
            number < num_needed, lambda: run(carry, *chunk), lambda: skip_result
        )

    numbers = jnp.arange(len(chunks[0]))
    return jax.lax.scan(step, start, (numbers, *chunks))


_score.defvjp(_score_forward, _score_backward)


def _flatten_rows(x):
    """Return a [B, columns, ...] array as [n, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _logits(kernel, states, temperature, is_transposed):
    """Return [n, V] float32 logits."""
    return product(states, kernel, is_transposed, jnp.float32) / temperature


def _score_chunk(kernel, states, target, temperature, is_transposed):
    """Return the [n] log-probabilities, log-sum-exps and entropies of n states."""
    logits = _logits(kernel, states, temperature, is_transposed)
    highest = jnp.max(logits, axis=-1, keepdims=True)
    # Computed once for both sums, which are products because XLA's CPU backend is
    # faster with a product than with a reduction.
    weights = jax.lax.optimization_barrier(jnp.exp(logits - highest))
    mass = jnp.einsum("nv,v->n", weights, jnp.ones(weights.shape[1]))
    log_mass = highest[:, 0] + jnp.log(mass)
    entropy = log_mass - jnp.einsum("nv,nv->n", weights, logits) / mass
    token_logits = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
    return token_logits - log_mass, log_mass, entropy


def _logit_gradient(
    kernel,
    states,
    target,
    log_mass,
    entropy,
    d_logp,
    d_entropy,
    temperature,
    is_transposed,
):
    """Return the [n, V] gradient of unscaled logits, in the states' dtype."""
    d_logp, d_entropy = d_logp[:, None], d_entropy[:, None]
    logp = _logits(kernel, states, temperature, is_transposed) - log_mass[:, None]
    is_chosen = jnp.arange(logp.shape[1])[None] == target[:, None]
    entropy_term = d_entropy * (logp + entropy[:, None])
    d_logits = jnp.where(is_chosen, d_logp, 0.0) - jnp.exp(logp) * (
        d_logp + entropy_term
    )
    return (d_logits / temperature).astype(states.dtype)


def token_values(
    model: Decoder, params: Any, tokens: jax.Array, layout: PackedLayout | None = None
) -> jax.Array:
    """Return [B, T] float32 values of the states in which the tokens were chosen.

    A token's state is the tokens before it. The first column, which nothing precedes,
    is 0.

    Args:
        model: the network, with a value head.
        params: its parameters.
        tokens: [B, T] int32.
        layout: see `token_logprobs`.
    """

    def run(tokens, positions, _wanted=None):
        hidden, _ = model.apply({"params": params}, tokens[:, :-1], positions[:, :-1])
        values = model.apply({"params": params}, hidden, method="values")
        return (jnp.pad(values, ((0, 0), (1, 0))),)

    if layout is not None:
        return piecewise(run, tokens, layout)[0]
    return run(tokens, _row_positions(tokens))[0]


def _row_positions(tokens):
    """Return [B, T] positions of rows that hold one text each."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
