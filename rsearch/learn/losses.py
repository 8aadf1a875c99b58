"""The formulas: advantages, divergences, the clipped surrogate, masked means.

Dimensions: B rows, T tokens, Q questions, G rollouts of one question.
"""

import jax.numpy as jnp


def masked_sum(values, mask, axis=None):
    """Sum where `mask` holds; what lies outside, be it NaN, has no say."""
    return jnp.sum(jnp.where(mask, values, 0.0), axis=axis)


def row_weights(from_policy, kind: str):
    """[B, T] weights that turn a sum over policy tokens into the mean that is wanted.

    Args:
        from_policy: [B, T] bool, of the whole update, not of one micro-batch.
        kind: "token", every policy token counts alike; "sequence", every row with
            policy tokens counts alike, by the mean over its own (DeepSeekMath, arXiv
            2402.03300).
    """
    mask = from_policy.astype(jnp.float32)
    if kind == "token":
        return mask / jnp.maximum(jnp.sum(mask), 1.0)
    assert kind == "sequence", kind
    lengths = jnp.sum(mask, axis=-1, keepdims=True)
    num_rows = jnp.sum(lengths > 0)
    return mask / jnp.maximum(lengths, 1.0) / jnp.maximum(num_rows, 1)


def group_advantages(reward, is_signal, *, normalize_std, eps, ddof=1):
    """GRPO's advantage: rewards compared within the group of one question.

    (r - mean) / (std + eps), statistics over the rollouts that are a signal. A group
    without spread, or with fewer than two such rollouts, has nothing to compare: 0.

    Source: DeepSeekMath (arXiv 2402.03300) eq. 4.1.2; without the division, Dr. GRPO
    (arXiv 2503.20783).

    Args:
        reward: [Q, G] float32.
        is_signal: [Q, G] bool.
        normalize_std: divide by the standard deviation.
        eps: added to the standard deviation.
        ddof: 1 for the sample's, 0 for the population's.

    Returns:
        [Q, G] float32; 0 where not `is_signal`.
    """
    count = jnp.sum(is_signal, axis=1, keepdims=True)
    mean = masked_sum(reward, is_signal, 1)[:, None] / jnp.maximum(count, 1)
    centred = jnp.where(is_signal, reward - mean, 0.0)
    spread = jnp.max(jnp.where(is_signal, reward, -jnp.inf), axis=1, keepdims=True) > (
        jnp.min(jnp.where(is_signal, reward, jnp.inf), axis=1, keepdims=True)
    )
    if normalize_std:
        variance = jnp.sum(centred**2, axis=1, keepdims=True)
        centred = centred / (jnp.sqrt(variance / jnp.maximum(count - ddof, 1)) + eps)
    return jnp.where(spread & is_signal, centred, 0.0)


def kl_estimate(logp, reference_logp, kind: str):
    """[B, T] estimate of KL(policy || reference) from the sampled token.

    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1 with d = reference_logp - logp.
    d is kept in [-20, 20], so that exp(d) is finite.

    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    d = jnp.clip(reference_logp - logp, -20.0, 20.0)
    if kind == "k1":
        return -d
    if kind == "k2":
        return d**2 / 2
    assert kind == "k3", kind
    return jnp.exp(d) - d - 1


def clipped_surrogate(logp, behavior_logp, advantage, from_policy, *, low, high):
    """PPO's clipped objective (arXiv 1707.06347 eq. 7), a loss for every token.

    The ratio's logarithm is kept in [-20, 20], so that a gradient of 0 stays 0 and does
    not become 0 x infinity.

    Args:
        logp: [B, T] log-probability of each token under the current policy.
        behavior_logp: [B, T] the same, under the policy that sampled the token.
        advantage: [B, T] in reward units; a constant here.
        from_policy: [B, T] bool, False on the prompt, retrieved text and padding.
        low, high: the probability ratio is kept in [1 - low, 1 + high].

    Returns:
        [B, T] loss, 0 outside `from_policy`, and [B, T] bool, where the clip holds.
    """
    gap = jnp.where(from_policy, logp - behavior_logp, 0.0)
    ratio = jnp.exp(jnp.clip(gap, -20.0, 20.0))
    clipped = jnp.clip(ratio, 1 - low, 1 + high)
    loss = -jnp.minimum(ratio * advantage, clipped * advantage)
    is_clipped = (clipped * advantage < ratio * advantage) & from_policy
    return jnp.where(from_policy, loss, 0.0), is_clipped
