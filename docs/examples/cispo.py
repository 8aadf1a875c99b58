"""A loss: CISPO (MiniMax-M1, arXiv 2506.13585, equation 4) in place of PPO's.

The importance weight is clipped and constant, so that every token has a gradient. The
KL, the entropy bonus and the mean over tokens are added around it as usual.
"""

import jax
import jax.numpy as jnp


def cispo(logp, behavior_logp, advantage, from_policy, *, low, high):
    """Return the [B, T] loss of each token, and [B, T] whether its weight is clipped.

    All arguments are [B, T]. `from_policy` is False on the prompt, on retrieved text
    and on padding, where the other arrays may hold anything.
    """
    gap = jnp.where(from_policy, logp - behavior_logp, 0.0)
    ratio = jnp.exp(jnp.clip(gap, -20.0, 20.0))
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1 - low, 1 + high))
    advantage = jnp.where(from_policy, advantage, 0.0)
    loss = -weight * advantage * jnp.where(from_policy, logp, 0.0)
    return loss, (ratio != weight) & from_policy
