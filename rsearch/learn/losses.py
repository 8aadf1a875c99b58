"""Loss formulas: masked means, divergences, clipped surrogate, value loss.

Dimensions: B rows, T tokens. Values outside a mask, even NaN, have no effect.
"""

import jax
import jax.numpy as jnp


def masked_sum(
    values: jax.Array, mask: jax.Array, axis: int | None = None
) -> jax.Array:
    """Sum the values where `mask` is True; all others, even NaN, count as 0."""
    return jnp.sum(jnp.where(mask, values, 0.0), axis=axis)


def row_weights(mask: jax.Array, kind: str, *, num_tokens: int = 1) -> jax.Array:
    """Return [..., B, T] weights that turn a sum over tokens into a kind of mean.

    Args:
        mask: [..., B, T] bool, True on tokens that count, for the whole update: leading
            axes are its micro-batches.
        kind: "token", every token has equal weight (DAPO, arXiv 2503.14476 eq. 12);
            "sequence", every row with tokens has equal weight, shared by its tokens
            (DeepSeekMath, arXiv 2402.03300 eq. 3);
            "constant", the sum divided by (rows with tokens) x `num_tokens` (Dr. GRPO,
            arXiv 2503.20783): the weights then need not sum to 1. Tunix and TRL also
            divide by the rows; verl's "seq-mean-token-sum-norm" divides only by tokens,
            so that its loss, and a gradient that is not clipped by its norm, grows with
            the number of rows;
            "micro_token", every micro-batch with tokens has equal weight, shared by its
            tokens (what verl's public code does).
        num_tokens: constant divisor of "constant".
    """
    counts = mask.astype(jnp.float32)
    if kind == "token":
        return counts / jnp.maximum(jnp.sum(counts), 1.0)
    if kind == "micro_token":
        sizes = jnp.sum(counts, axis=(-2, -1), keepdims=True)
        return counts / jnp.maximum(sizes, 1.0) / jnp.maximum(jnp.sum(sizes > 0), 1)
    lengths = jnp.sum(counts, axis=-1, keepdims=True)
    num_rows = jnp.maximum(jnp.sum(lengths > 0), 1)
    if kind == "constant":
        return counts / (num_rows * num_tokens)
    assert kind == "sequence", kind
    return counts / jnp.maximum(lengths, 1.0) / num_rows


def kl_estimate(
    logp: jax.Array, reference_logp: jax.Array, kind: str, *, cap: float = 0.0
) -> jax.Array:
    """Estimate KL(policy || reference) from each sampled token, as [B, T].

    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1 with d = reference_logp - logp.
    d is clipped to [-20, 20], so that exp(d) is finite. The gradient of k3 is
    1 - exp(d): a token that the policy all but excludes, with d = 20, weighs as much as
    10^8 others and, once the norm is clipped, dominates the whole update. With `cap`, a
    token whose k3 is larger has no gradient, so that the KL no longer pulls it back.

    Public code bounds other quantities: verl bounds k3's value to 10, and d only in k3;
    OpenRLHF bounds the value of each kind to [-10, 10]. All agree while d is within 2.5
    nats.

    Source: J. Schulman, "Approximating KL divergence" (2020).

    Args:
        logp, reference_logp: [B, T] log-probabilities of the tokens.
        kind: "k1", "k2" or "k3".
        cap: upper bound of k3's value, > 0; 0 means none.
    """
    d = jnp.clip(reference_logp - logp, -20.0, 20.0)
    if kind == "k1":
        return -d
    if kind == "k2":
        return d**2 / 2
    assert kind == "k3", kind
    value = jnp.exp(d) - d - 1
    return jnp.minimum(value, cap) if cap else value


def adapted_coefficient(coef: jax.Array, kl: jax.Array, *, target: float, gain: float):
    """Return the KL coefficient to use after an update that measured `kl`.

    coef x (1 + gain x e) with e = (kl - target) / target, clipped to [-0.2, 0.2].

    Source: Ziegler et al. (arXiv 1909.08593) section 2.2, where gain is 0.1.
    """
    error = jnp.clip((kl - target) / target, -0.2, 0.2)
    return coef * (1 + gain * error)


def sequence_gap(gap: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the [B, T] log of GSPO's ratio: a row's mean, with each token's gradient.

    It is GSPO-token's s_it = sg[s_i] x p / sg[p]. With one advantage per row and a mean
    by sequence, its gradient is that of GSPO's s_i.

    `clipped_surrogate` clips this logarithm to [-20, 20], verl's GSPO to at most 10.

    Source: arXiv 2507.18071 eq. 7 and eq. 14.

    Args:
        gap: [B, T] new minus old log-probability; 0 outside `mask`.
        mask: [B, T] bool.
    """
    lengths = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
    mean = masked_sum(gap, mask, axis=-1)[..., None] / lengths
    return jax.lax.stop_gradient(mean - gap) + gap


def clipped_surrogate(
    logp: jax.Array,
    behavior_logp: jax.Array,
    advantage: jax.Array,
    from_policy: jax.Array,
    *,
    low: float,
    high: float,
    dual: float = 0.0,
    by_sequence: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return PPO's clipped objective (arXiv 1707.06347 eq. 7) as a loss for each token.

    The ratio's logarithm is clipped to [-20, 20], so that a gradient of 0 stays 0 and
    does not become 0 x infinity. A `high` above `low` is DAPO's clip-higher (arXiv
    2503.14476 eq. 10).

    Args:
        logp: [B, T] log-probability of each token under the current policy.
        behavior_logp: [B, T] the same, under the policy before the update.
        advantage: [B, T] in reward units; treated as a constant.
        from_policy: [B, T] bool, False on the prompt, retrieved text and padding.
        low, high: the probability ratio is clipped to [1 - low, 1 + high].
        dual: if the advantage A is negative, the loss is at most -dual x A, however
            large the ratio (dual clip, arXiv 1912.09729); 0 = unbounded.
        by_sequence: whether the ratio is GSPO's, see `sequence_gap`.

    Returns:
        [B, T] loss, 0 outside `from_policy`, and [B, T] bool, True where it is clipped.
    """
    advantage = jnp.where(from_policy, advantage, 0.0)
    gap = jnp.where(from_policy, logp - behavior_logp, 0.0)
    if by_sequence:
        gap = sequence_gap(gap, from_policy)
    ratio = jnp.exp(jnp.clip(gap, -20.0, 20.0))
    clipped = jnp.clip(ratio, 1 - low, 1 + high)
    loss = -jnp.minimum(ratio * advantage, clipped * advantage)
    is_clipped = (clipped * advantage < ratio * advantage) & from_policy
    if dual:
        bound = jnp.where(advantage < 0, -dual * advantage, jnp.inf)
        is_clipped |= (loss > bound) & from_policy
        loss = jnp.minimum(loss, bound)
    return jnp.where(from_policy, loss, 0.0), is_clipped


def truncated_weight(
    logp: jax.Array, sampled_logp: jax.Array, mask: jax.Array, *, cap: float
) -> jax.Array:
    """Return [B, T] min(trainer's / sampler's probability, cap), 1 outside `mask`.

    The weight has no gradient. It corrects for the sampler's numerics, or its nucleus,
    where they differ from the trainer's.

    Source: Ionides, "Truncated importance sampling" (2008); per token between sampler
    and trainer as in the VeRL and OpenRLHF "TIS" option (Yao et al., 2025).

    Args:
        logp: [B, T] log-probability under the trainer's policy before the update.
        sampled_logp: [B, T] the same, under the distribution sampled from.
        mask: [B, T] bool.
        cap: > 0.
    """
    gap = jnp.where(mask, logp, 0.0) - jnp.where(mask, sampled_logp, 0.0)
    weight = jnp.minimum(jnp.exp(jnp.clip(gap, -20.0, 20.0)), cap)
    return jax.lax.stop_gradient(jnp.where(mask, weight, 1.0))


def clipped_value_loss(
    value: jax.Array,
    old_value: jax.Array,
    target: jax.Array,
    mask: jax.Array,
    *,
    clip: float,
) -> jax.Array:
    """Return [B, T] half the larger squared error, the value's or the clipped value's.

    The clipped value is within `clip` of the old one, so that a value that has moved
    further is not pushed on in that direction. The loss is 0 outside `mask`.

    Source: OpenAI baselines' ppo2; verl's `compute_value_loss` has the same.

    Args:
        value: [B, T] predicted now.
        old_value: [B, T] predicted before the step's updates.
        target: [B, T] returns; constants.
        mask: [B, T] bool.
        clip: > 0, or 0 for none.
    """
    value, old_value, target = (
        jnp.where(mask, x, 0.0) for x in (value, old_value, target)
    )
    error = (value - target) ** 2
    if clip:
        clipped_value = jnp.clip(value, old_value - clip, old_value + clip)
        error = jnp.maximum(error, (clipped_value - target) ** 2)
    return jnp.where(mask, 0.5 * error, 0.0)
