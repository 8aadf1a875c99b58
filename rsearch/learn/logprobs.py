"""Log-probabilities and entropies without ever holding [B, T, V]; and values."""

import functools

import jax
import jax.numpy as jnp

from rsearch.learn.packing import piecewise
from rsearch.models.decoder import Decoder
from rsearch.models.sharding import DECODING_RULES, num_shards, param_shardings


def token_logprobs(
    model: Decoder, params, tokens, layout=None, *, temperature=1.0, chunk_tokens=1024
):
    """Log-probability of every token given those before it, and the entropy there.

    Hidden states become logits a few columns at a time, in the backward pass again, so
    that the memory is chunk_tokens x V and not B x T x V. Every piece holds all rows:
    rows that are spread over devices stay where they are.

    Args:
        model: the network.
        params: its parameters.
        tokens: [B, T] int32.
        layout: in which they go through the network; None as they are. For gradients
            of one piece, see `packing.summed`.
        temperature: logits are divided by it, as the sampler did.
        chunk_tokens: tokens whose logits exist at once on each device, but at least
            one a row.

    Returns:
        [B, T] float32 log-probabilities and [B, T] float32 entropies in nats; the first
        column, which nothing precedes, is 0; with a layout, so is padding.
    """
    run = functools.partial(
        _row_logprobs,
        model,
        params,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
    )
    if layout is not None:
        return piecewise(run, tokens, layout)
    return run(tokens, _from_zero(tokens))


def _row_logprobs(model, params, tokens, positions, *, temperature, chunk_tokens):
    """As `token_logprobs`, of rows as they are: (logp, entropy)."""
    b, t = tokens.shape
    hidden, _ = model.apply({"params": params}, tokens[:, :-1], positions[:, :-1])
    here = b if model.mesh is None else -(-b // num_shards(model.mesh))
    num_pieces = -(-(t - 1) // max(chunk_tokens // here, 1))
    kernel = _gathered(model, params)
    columns = -(-(t - 1) // num_pieces)

    def cut(x):
        """[pieces, B, columns, ...] of [B, T - 1, ...]."""
        short = num_pieces * columns - (t - 1)
        x = jnp.pad(x, ((0, 0), (0, short)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(b, num_pieces, columns, *x.shape[2:]).swapaxes(0, 1)

    logp, entropy = _scored(kernel, cut(hidden), cut(tokens[:, 1:]), temperature)

    def back(x):
        """[B, T] of [pieces, B, columns]; the first column is 0."""
        x = x.swapaxes(0, 1).reshape(b, num_pieces * columns)[:, : t - 1]
        return jnp.pad(x, ((0, 0), (1, 0)))

    return back(logp), back(entropy)


def _gathered(model, params):
    """[D, V] that makes logits, in the compute dtype; whole along fsdp."""
    name = "embedding" if model.spec.tie_embeddings else "unembedding"
    own = {name: params[name].astype(model.dtype)}
    if model.mesh is not None and model.mesh.size > 1:
        # Once for all pieces.
        shardings = param_shardings(own, model.mesh, DECODING_RULES)
        own = jax.lax.with_sharding_constraint(own, shardings)
    return own[name].T if model.spec.tie_embeddings else own[name]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _scored(kernel, states, target, temperature):
    """Log-probabilities of tokens and entropies, piece by piece.

    Backwards, logits are made again, and of them their gradient in one go: with p their
    softmax and H its entropy, (1 at the token, else 0) - p for the log-probability, and
    -p (log p + H) for the entropy. The kernel's is summed over the pieces in float32.

    Args:
        kernel: [D, V].
        states: [pieces, B, columns, D], of the same dtype.
        target: [pieces, B, columns] int32, the token after each.
        temperature: logits are divided by it.

    Returns:
        [pieces, B, columns] float32, twice.
    """
    return _scored_forward(kernel, states, target, temperature)[0]


def _scored_forward(kernel, states, target, temperature):
    def one(_, piece):
        flat = jax.tree.map(_rows, piece)
        found = _scored_piece(kernel, *flat, temperature)
        return None, jax.tree.map(lambda x: x.reshape(piece[1].shape), found)

    _, (logp, log_mass, entropy) = jax.lax.scan(one, None, (states, target))
    return (logp, entropy), (kernel, states, target, log_mass, entropy)


def _scored_backward(temperature, kept, d_out):
    kernel, *of_pieces = kept

    def one(d_kernel, piece):
        states, *rest = jax.tree.map(_rows, piece)
        d_logits = _logit_gradient(kernel, states, *rest, temperature)
        d_kernel += jnp.matmul(states.T, d_logits, preferred_element_type=jnp.float32)
        return d_kernel, (d_logits @ kernel.T).reshape(piece[0].shape)

    pieces = (*of_pieces, *d_out)
    start = jnp.zeros(kernel.shape, jnp.float32)
    d_kernel, d_states = jax.lax.scan(one, start, pieces)
    return d_kernel.astype(kernel.dtype), d_states, None


_scored.defvjp(_scored_forward, _scored_backward)


def _rows(x):
    """[n, ...] of [B, columns, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _logits(kernel, states, temperature):
    """[n, V] float32."""
    logits = jnp.matmul(states, kernel, preferred_element_type=jnp.float32)
    return logits / temperature


def _scored_piece(kernel, states, target, temperature):
    """Of states [n, D] and tokens [n]: log-probability, log of the mass, entropy."""
    logits = _logits(kernel, states, temperature)
    highest = jnp.max(logits, axis=-1, keepdims=True)
    # Made once for both sums, as products, which XLA's CPU backend is faster with.
    weights = jax.lax.optimization_barrier(jnp.exp(logits - highest))
    mass = jnp.einsum("nv,v->n", weights, jnp.ones(weights.shape[1]))
    log_mass = highest[:, 0] + jnp.log(mass)
    entropy = log_mass - jnp.einsum("nv,nv->n", weights, logits) / mass
    chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
    return chosen - log_mass, log_mass, entropy


def _logit_gradient(
    kernel, states, target, log_mass, entropy, d_logp, d_entropy, temperature
):
    """[n, V] in the states' dtype: of logits before the temperature."""
    d_logp, d_entropy = d_logp[:, None], d_entropy[:, None]
    logp = _logits(kernel, states, temperature) - log_mass[:, None]
    is_chosen = jnp.arange(logp.shape[1])[None] == target[:, None]
    by_entropy = d_entropy * (logp + entropy[:, None])
    d_logits = jnp.where(is_chosen, d_logp, 0.0) - jnp.exp(logp) * (d_logp + by_entropy)
    return (d_logits / temperature).astype(states.dtype)


def token_values(model: Decoder, params, tokens, layout=None):
    """[B, T] float32 value of the state each token was chosen in: the tokens before it.

    The first column, which nothing precedes, is 0.

    Args:
        model: the network, with a value head.
        params: its parameters.
        tokens: [B, T] int32.
        layout: as in `token_logprobs`.
    """

    def run(tokens, positions):
        hidden, _ = model.apply({"params": params}, tokens[:, :-1], positions[:, :-1])
        values = model.apply({"params": params}, hidden, method="values")
        return (jnp.pad(values, ((0, 0), (1, 0))),)

    if layout is not None:
        return piecewise(run, tokens, layout)[0]
    return run(tokens, _from_zero(tokens))[0]


def _from_zero(tokens):
    """[B, T] positions of rows that hold one text each."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
