"""Advantages and returns: rewards compared, summed, discounted and whitened.

Dimensions: Q questions, G rollouts per question, B rows, T tokens.
"""

import functools

import jax
import jax.numpy as jnp

from rsearch.learn.batch import Batch
from rsearch.learn.losses import kl_estimate, masked_sum


def group_advantages(
    reward: jax.Array,
    is_signal: jax.Array,
    *,
    normalize_std: bool,
    eps: float,
    ddof: int = 1,
) -> jax.Array:
    """Return GRPO's advantage: rewards compared within the group of one question.

    (r - mean) / (std + eps), with statistics over the rollouts in `is_signal`. It is 0
    in a group whose rewards are equal, or that has fewer than two such rollouts.

    Source: DeepSeekMath (arXiv 2402.03300) eq. 4.1.2; without the division, Dr. GRPO
    (arXiv 2503.20783).

    Args:
        reward: [Q, G] float32.
        is_signal: [Q, G] bool.
        normalize_std: whether to divide by the standard deviation.
        eps: added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population's.

    Returns:
        [Q, G] float32; 0 where not `is_signal`.
    """
    count = jnp.sum(is_signal, axis=1, keepdims=True)
    mean = masked_sum(reward, is_signal, 1)[:, None] / jnp.maximum(count, 1)
    centred = jnp.where(is_signal, reward - mean, 0.0)
    # If rewards are equal, the centred ones are rounding errors, which a division by
    # their standard deviation would make as large as a signal.
    highest = jnp.max(jnp.where(is_signal, reward, -jnp.inf), axis=1, keepdims=True)
    lowest = jnp.min(jnp.where(is_signal, reward, jnp.inf), axis=1, keepdims=True)
    if normalize_std:
        variance = jnp.sum(centred**2, axis=1, keepdims=True)
        centred = centred / (jnp.sqrt(variance / jnp.maximum(count - ddof, 1)) + eps)
    return jnp.where((highest > lowest) & is_signal, centred, 0.0)


def leave_one_out(reward: jax.Array, is_signal: jax.Array) -> jax.Array:
    """Return RLOO's advantage: the reward minus the mean of the group's other rewards.

    With n rollouts in `is_signal` it is n / (n - 1) times the centred reward. Source:
    Ahmadian et al. (arXiv 2402.14740).

    Args:
        reward: [Q, G] float32.
        is_signal: [Q, G] bool.

    Returns:
        [Q, G] float32; 0 where not `is_signal`, and where there are no other rewards.
    """
    count = jnp.sum(is_signal, axis=1, keepdims=True)
    centred = group_advantages(reward, is_signal, normalize_std=False, eps=0.0)
    return centred * count / jnp.maximum(count - 1, 1)


def reward_on_last_token(reward: jax.Array, mask: jax.Array) -> jax.Array:
    """Return [..., T], each row's reward on the last token of its mask, else 0."""
    num_remaining = jnp.cumsum(mask[..., ::-1], axis=-1)[..., ::-1]
    return jnp.where(mask & (num_remaining == 1), reward[..., None], 0.0)


def returns_to_go(rewards: jax.Array, mask: jax.Array) -> jax.Array:
    """Return [..., T], the sum of the rewards from each token on; 0 outside `mask`."""
    rewards = jnp.where(mask, rewards, 0.0)
    sums = jnp.cumsum(rewards[..., ::-1], axis=-1)[..., ::-1]
    return jnp.where(mask, sums, 0.0)


def whiten(
    values: jax.Array,
    mask: jax.Array,
    *,
    ddof: int,
    floor: float = 0.0,
    eps: float = 0.0,
) -> jax.Array:
    """Return [...] (value - mean) / sqrt(max(variance, floor) + eps) over `mask`.

    It is 0 outside `mask`. If all values are equal, such as a single one, all become 0.

    Args:
        values: [...] float32.
        mask: [...] bool; mean and variance are taken over it, across all rows.
        ddof: 1 for the sample variance, 0 for the population's.
        floor, eps: see above.
    """
    count = jnp.sum(mask)
    mean = masked_sum(values, mask) / jnp.maximum(count, 1)
    centred = jnp.where(mask, values - mean, 0.0)
    variance = jnp.sum(centred**2) / jnp.maximum(count - ddof, 1)
    scale = jnp.sqrt(jnp.maximum(variance, floor) + eps)
    return centred / jnp.where(scale > 0, scale, 1.0)


def gae(
    rewards: jax.Array, values: jax.Array, mask: jax.Array, *, gamma: float, lam: float
) -> tuple[jax.Array, jax.Array]:
    """Return generalised advantage estimates over a mask's tokens, as if adjacent.

    delta_t = r_t + gamma V_next - V_t and A_t = delta_t + gamma lam A_next, where
    "next" is the row's next token within `mask`; V_next and A_next are 0 after the
    last.

    Source: Schulman et al. (arXiv 1506.02438) eq. 11 and 16.

    Args:
        rewards: [..., T] float32.
        values: [..., T] float32, values of the states in which tokens were chosen.
        mask: [..., T] bool.
        gamma, lam: in [0, 1].

    Returns:
        [..., T] advantages and [..., T] returns A + V; 0 outside `mask`.
    """

    def step(carry, column):
        reward, value, is_in = column
        next_value, next_advantage = carry
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * lam * next_advantage
        # Tokens outside the mask are skipped: the carry passes them unchanged.
        carry = (
            jnp.where(is_in, value, next_value),
            jnp.where(is_in, advantage, next_advantage),
        )
        return carry, jnp.where(is_in, advantage, 0.0)

    rewards, values = jnp.where(mask, rewards, 0.0), jnp.where(mask, values, 0.0)
    zeros = jnp.zeros_like(values[..., 0])
    columns = tuple(jnp.moveaxis(x, -1, 0) for x in (rewards, values, mask))
    _, advantages = jax.lax.scan(step, (zeros, zeros), columns, reverse=True)
    advantages = jnp.moveaxis(advantages, 0, -1)
    return advantages, advantages + values


@functools.partial(
    jax.jit,
    static_argnames=(
        "algorithm",
        "group_size",
        "normalize_std",
        "eps",
        "ddof",
        "gamma",
        "lam",
        "over_response",
        "kl_kind",
        "kl_cap",
        "kl_credit",
    ),
)
def with_advantages(
    batch: Batch,
    *,
    group_size: int,
    algorithm: str = "grpo",
    normalize_std: bool = True,
    eps: float = 1e-6,
    ddof: int = 1,
    gamma: float = 1.0,
    lam: float = 1.0,
    over_response: bool = False,
    kl_coef: float | jax.Array | None = None,
    kl_kind: str = "k1",
    kl_cap: float = 0.0,
    kl_credit: str = "group",
) -> Batch:
    """Return the batch with an advantage on each policy token, and "ppo"'s returns.

    "grpo" and "rloo" give all tokens of a rollout the same advantage, relative to its
    group. "reinforce_pp" (arXiv 2501.03262) sums the rewards from each token on, and
    takes the z-score over all policy tokens; "reinforce_pp_baseline" first subtracts
    the group's mean from the reward (R1-Searcher's trainer). Both sum over the policy's
    tokens, as OpenRLHF's code does; verl's resets the sum to 0 at every observation
    between turns, so that earlier turns see no later reward. "ppo" is `gae`, also
    whitened. If the KL is in the reward, the last three use the KL of single tokens.

    Args:
        batch: all rows of a step, [Q x G, ...] or split into micro-batches; groups are
            contiguous. "ppo" needs `values`.
        group_size: G.
        algorithm: one of these five names.
        normalize_std, eps, ddof: for "grpo", see `group_advantages`.
        gamma, lam: for "ppo", see `gae`.
        over_response: whether retrieved tokens of the rollout take part in GAE,
            whitening and the critic's loss, as in Search-R1's public code.
        kl_coef: weight of the KL in the reward, a number or a [] array; None if the KL
            is in the loss or not used.
        kl_kind, kl_cap: see `kl_estimate`.
        kl_credit: for "grpo" and "rloo". "group": a rollout's KL is compared within its
            group, like its reward; "token": each token gets the KL from it on, as in
            OpenRLHF's trainer, without a comparison.
    """
    policy = batch.from_policy
    kl = jnp.zeros_like(batch.behavior_logp)
    if kl_coef is not None:
        kl = kl_estimate(batch.behavior_logp, batch.reference_logp, kl_kind, cap=kl_cap)
        kl = kl_coef * jnp.where(policy, kl, 0.0)
    is_signal = batch.is_signal.reshape(-1, group_size)
    reward = batch.reward.reshape(-1, group_size)
    row_kl = jnp.sum(kl, axis=-1).reshape(-1, group_size)
    if algorithm in ("grpo", "rloo"):
        # A rollout without policy tokens to learn from has a reward, but no KL.
        has_kl = is_signal & jnp.any(policy, axis=-1).reshape(-1, group_size)
        if algorithm == "rloo":
            advantage = leave_one_out(reward, is_signal)
            kl_advantage = leave_one_out(row_kl, has_kl)
        else:
            # The KL is not divided by the standard deviation: in a group in which all
            # answers are right, or all wrong, that would scale the estimate's noise up
            # to the size of a signal.
            advantage = group_advantages(
                reward, is_signal, normalize_std=normalize_std, eps=eps, ddof=ddof
            )
            kl_advantage = group_advantages(
                row_kl, has_kl, normalize_std=False, eps=eps
            )
        if kl_credit == "group":
            advantage -= kl_advantage
        advantage = advantage.reshape(batch.reward.shape)[..., None]
        if kl_credit == "token":
            advantage -= returns_to_go(kl, policy)
        return batch._replace(advantage=jnp.where(policy, advantage, 0.0))
    if algorithm == "reinforce_pp_baseline":
        reward = group_advantages(reward, is_signal, normalize_std=False, eps=eps)
    reward = jnp.where(is_signal, reward, 0.0).reshape(batch.reward.shape)
    mask = batch.in_response if over_response else policy
    rewards = reward_on_last_token(reward, mask) - kl
    if algorithm == "ppo":
        advantage, returns = gae(rewards, batch.values, mask, gamma=gamma, lam=lam)
        advantage = whiten(advantage, mask, ddof=1, eps=1e-8)
        batch = batch._replace(returns=returns)
    else:
        assert algorithm in ("reinforce_pp", "reinforce_pp_baseline"), algorithm
        advantage = whiten(returns_to_go(rewards, mask), mask, ddof=0, floor=1e-8)
    return batch._replace(advantage=jnp.where(policy, advantage, 0.0))
