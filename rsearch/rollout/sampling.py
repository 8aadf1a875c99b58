"""Sample a token for each row with the row's own random key.

Dimensions: B rows, V vocabulary.
"""

import jax
import jax.numpy as jnp


def nucleus(logits: jax.Array, top_p: float) -> jax.Array:
    """Set logits outside the smallest set of mass >= top_p to -inf, without sorting.

    The probability threshold is found by bisection. The mass kept is at least `top_p`;
    tokens within the final interval, 2^-30 of the initial one, count as ties and stay.

    Source: Holtzman et al., arXiv 1904.09751.

    Args:
        logits: [B, V] float32.
        top_p: in (0, 1).

    Returns:
        [B, V] float32.
    """
    probs = jax.nn.softmax(logits, axis=-1)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        mass = jnp.sum(jnp.where(probs >= middle, probs, 0.0), axis=-1, keepdims=True)
        has_mass = mass >= top_p
        return jnp.where(has_mass, middle, low), jnp.where(has_mass, high, middle)

    top = jnp.max(probs, axis=-1, keepdims=True)
    low, _ = jax.lax.fori_loop(0, 30, halve, (jnp.zeros_like(top), top))
    return jnp.where(probs >= jnp.minimum(low, top), logits, -jnp.inf)


def first_largest(x: jax.Array) -> jax.Array:
    """Return [B] int32, the first index of each row's maximum in [B, V], as `argmax`.

    Except for NaNs, the result is that of `jnp.argmax`. On CPUs, XLA's argmax visits
    pairs of value and index one by one, together with everything fused into it, which
    takes most of the time of `jax.random.categorical`. Two reductions vectorise.
    """
    x = jax.lax.optimization_barrier(x)
    size = x.shape[-1]
    is_top = x == jnp.max(x, axis=-1, keepdims=True)
    first = jnp.min(jnp.where(is_top, jnp.arange(size), size - 1), axis=-1)
    return first.astype(jnp.int32)


def sample(
    logits: jax.Array, keys: jax.Array, *, temperature: float, top_p: float
) -> tuple[jax.Array, jax.Array]:
    """Draw a token for each row, with its log-probability under the distribution used.

    Args:
        logits: [B, V] float32.
        keys: [B] random keys; a row's draw depends only on its own key.
        temperature: 0 takes the most likely token, whose log-probability is then 0.
        top_p: nucleus mass in (0, 1]; 1 keeps all tokens.

    Returns:
        [B] int32 tokens and [B] float32 log-probabilities.
    """
    if temperature == 0:
        return first_largest(logits), jnp.zeros(len(logits))
    logits = logits / temperature
    if top_p < 1:
        logits = nucleus(logits, top_p)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    tokens = first_largest(logits + noise)  # the same as `jax.random.categorical`
    logp = jax.nn.log_softmax(logits, axis=-1)
    return tokens, jnp.take_along_axis(logp, tokens[:, None], axis=-1)[:, 0]


def unscaled_logp(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return [B] float32 log-probabilities of the tokens at temperature 1.

    Args:
        logits: [B, V] float32.
        tokens: [B] int32.
    """
    token_logits = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return token_logits - jax.nn.logsumexp(logits, axis=-1)


def row_keys(key: jax.Array, names: jax.Array) -> jax.Array:
    """Return [B] random keys derived from a key and each row's two names.

    Args:
        key: random key of the whole call.
        names: [B, 2] uint32.
    """
    fold = jax.vmap(jax.random.fold_in)
    first_keys = jax.vmap(lambda name: jax.random.fold_in(key, name))(names[:, 0])
    return fold(first_keys, names[:, 1])


def sample_mixtures(
    logits: jax.Array,
    group: jax.Array,
    log_weight: jax.Array,
    keys: jax.Array,
    step: jax.Array,
    *,
    temperature: float,
    top_p: float,
) -> jax.Array:
    """Return [B]: a token of each group's mixture of distributions.

    Args:
        logits: [B, V] logits of the rows.
        group: [B] int32 group of each row, in [0, B).
        log_weight: [B] log of each row's weight in its group; -inf marks an unused row.
        keys: [B] random keys of the groups.
        step: [] number of tokens drawn before.
        temperature, top_p: see `sample`.
    """
    logp = jax.nn.log_softmax(logits) + log_weight[:, None]
    num = len(group)
    highest = jax.ops.segment_max(logp, group, num)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    mass = jax.ops.segment_sum(jnp.exp(logp - highest[group]), group, num)
    step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
    tokens, _ = sample(
        highest + jnp.log(mass), step_keys, temperature=temperature, top_p=top_p
    )
    return tokens
