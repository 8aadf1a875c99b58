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
        layout: in which they go through the network; None as they are.
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
    params = _gathered(model, params)
    columns = -(-(t - 1) // num_pieces)

    def cut(x):
        """[pieces, B, columns, ...] of [B, T - 1, ...]."""
        short = num_pieces * columns - (t - 1)
        x = jnp.pad(x, ((0, 0), (0, short)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(b, num_pieces, columns, *x.shape[2:]).swapaxes(0, 1)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def score(_, piece):
        states, target = piece
        logits = model.apply({"params": params}, states, method="logits") / temperature
        logits = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        entropy = -jnp.sum(jnp.exp(logits) * logits, axis=-1)
        chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        return None, (chosen, entropy)

    pieces = cut(hidden), cut(tokens[:, 1:])
    _, (logp, entropy) = jax.lax.scan(score, None, pieces)

    def back(x):
        """[B, T] of [pieces, B, columns]; the first column is 0."""
        x = x.swapaxes(0, 1).reshape(b, num_pieces * columns)[:, : t - 1]
        return jnp.pad(x, ((0, 0), (1, 0)))

    return back(logp), back(entropy)


def _gathered(model, params):
    """The parameters; what makes logits is whole along fsdp, once for all pieces."""
    if model.mesh is None or model.mesh.size == 1:
        return params
    name = "embedding" if model.spec.tie_embeddings else "unembedding"
    own = {name: params[name].astype(model.dtype)}
    shardings = param_shardings(own, model.mesh, DECODING_RULES)
    return params | jax.lax.with_sharding_constraint(own, shardings)


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
