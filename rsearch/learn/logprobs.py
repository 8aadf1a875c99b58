"""Log-probabilities and entropies without ever holding [B, T, V]."""

import functools

import jax
import jax.numpy as jnp

from rsearch.models.decoder import Decoder


def token_logprobs(
    model: Decoder, params, tokens, *, temperature=1.0, chunk_tokens=1024
):
    """Log-probability of every token given those before it, and the entropy there.

    Hidden states become logits `chunk_tokens` at a time, in the backward pass again, so
    that the memory is chunk_tokens x V and not B x T x V.

    Args:
        model: the network.
        params: its parameters.
        tokens: [B, T] int32.
        temperature: logits are divided by it, as the sampler did.
        chunk_tokens: tokens whose logits exist at once.

    Returns:
        [B, T] float32 log-probabilities and [B, T] float32 entropies in nats; the first
        column, which nothing precedes, is 0.
    """
    b, t = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(t - 1)[None], (b, t - 1))
    hidden, _ = model.apply({"params": params}, tokens[:, :-1], positions)
    size = b * (t - 1)
    chunk = min(chunk_tokens, size)
    short = -size % chunk
    hidden = jnp.pad(hidden.reshape(size, -1), ((0, short), (0, 0)))
    targets = jnp.pad(tokens[:, 1:].reshape(size), (0, short))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def score(_, piece):
        states, target = piece
        logits = model.apply({"params": params}, states, method="logits") / temperature
        logits = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        entropy = -jnp.sum(jnp.exp(logits) * logits, axis=-1)
        chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        return None, (chosen, entropy)

    pieces = (hidden.reshape(-1, chunk, hidden.shape[-1]), targets.reshape(-1, chunk))
    _, (logp, entropy) = jax.lax.scan(score, None, pieces)

    def back(x):
        return jnp.pad(x.reshape(-1)[:size].reshape(b, t - 1), ((0, 0), (1, 0)))

    return back(logp), back(entropy)
