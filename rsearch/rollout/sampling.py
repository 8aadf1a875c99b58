"""How a token is drawn, each row by a key of its own.

Dimensions: B rows, V vocabulary.
"""

import jax
import jax.numpy as jnp


def nucleus(logits, top_p: float):
    """Logits with all but the smallest set of mass >= top_p at -inf; no sort.

    The probability threshold is found by bisection: the kept mass is at least `top_p`
        and tokens within 2^-30 of the threshold's interval count as ties and are kept.

    Source: Holtzman et al., arXiv 1904.09751.

    Args:
        logits: [B, V] float32.
        top_p: in (0, 1).
    """
    probs = jax.nn.softmax(logits, axis=-1)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        mass = jnp.sum(jnp.where(probs >= middle, probs, 0.0), axis=-1, keepdims=True)
        enough = mass >= top_p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    top = jnp.max(probs, axis=-1, keepdims=True)
    low, _ = jax.lax.fori_loop(0, 30, halve, (jnp.zeros_like(top), top))
    return jnp.where(probs >= jnp.minimum(low, top), logits, -jnp.inf)


def first_largest(x):
    """[B] int32 of [B, V]: `argmax`, NaN apart, in two passes that processors have.

    XLA's own on CPUs goes through the pairs of value and index one by one, with all
    that is fused into it: of `jax.random.categorical` that is two thirds of the time.
    """
    x = jax.lax.optimization_barrier(x)
    size = x.shape[-1]
    is_top = x == jnp.max(x, axis=-1, keepdims=True)
    first = jnp.min(jnp.where(is_top, jnp.arange(size), size - 1), axis=-1)
    return first.astype(jnp.int32)


def sample(logits, keys, *, temperature: float, top_p: float):
    """One token a row, and its log-probability under the distribution sampled from.

    Args:
        logits: [B, V] float32.
        keys: [B] random keys; a row's draw depends on its own key alone.
        temperature: 0 takes the most likely token, whose log-probability is then 0.
        top_p: nucleus mass in (0, 1]; 1 keeps everything.

    Returns:
        [B] int32 tokens and [B] float32 log-probabilities.
    """
    if temperature == 0:
        return first_largest(logits), jnp.zeros(len(logits))
    logits = logits / temperature
    if top_p < 1:
        logits = nucleus(logits, top_p)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    tokens = first_largest(logits + noise)  # as `jax.random.categorical` draws
    logp = jax.nn.log_softmax(logits, axis=-1)
    return tokens, jnp.take_along_axis(logp, tokens[:, None], axis=-1)[:, 0]


def row_keys(key, names):
    """[B] keys that follow from a key and [B, 2] uint32 names, of each row its own."""
    fold = jax.vmap(jax.random.fold_in)
    first = jax.vmap(lambda name: jax.random.fold_in(key, name))(names[:, 0])
    return fold(first, names[:, 1])
