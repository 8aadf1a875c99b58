"""The losses that an update minimises, and the metrics logged with them."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rsearch.learn.batch import Batch
from rsearch.learn.losses import (
    clipped_surrogate,
    clipped_value_loss,
    kl_estimate,
    masked_sum,
    truncated_weight,
)


def imitation_loss(
    logp: jax.Array,
    _entropy: jax.Array,
    rows: Batch,
    weights: jax.Array,
    _kl_coef: jax.Array | None = None,
):
    """Return the negative log-likelihood of the demonstrator's tokens, and metrics."""
    loss = -masked_sum(logp * weights, rows.from_policy)
    return loss, {"loss": loss}


def policy_loss(
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
    kl_kind: str,
    kl_cap: float = 0.0,
    entropy_coef: float,
    logs_kl: bool | None = None,
    dual_clip: float = 0.0,
    tis_cap: float = 0.0,
    by_sequence: bool = False,
    token_loss: Callable | None = None,
) -> Callable:
    """Return a policy's loss, with a KL to the reference and an entropy bonus.

    Args:
        clip_low, clip_high, dual_clip, by_sequence: see `clipped_surrogate`.
        kl_coef: weight of the KL in the loss; 0 if the KL is in the reward or not used.
        kl_kind, kl_cap: see `kl_estimate`.
        entropy_coef: weight of the entropy bonus.
        logs_kl: whether there is a reference, so that the metrics include the KL to
            it; by default, whether the KL is in the loss.
        tis_cap: see `truncated_weight`; 0 = off, rows need no `sampled_logp`.
        token_loss: a user's function in place of `clipped_surrogate`: (logp,
            behavior_logp, advantage, from_policy, *, low, high) -> the same.

    Returns:
        (logp, entropy, rows, weights, kl_coef=None) -> (loss, metrics), both summed
        with `weights`. If its own `kl_coef`, a [] array, is given, it replaces the
        number given here, unless that is 0.
    """

    logs_kl = bool(kl_coef) if logs_kl is None else logs_kl
    token_loss = token_loss or functools.partial(
        clipped_surrogate, dual=dual_clip, by_sequence=by_sequence
    )

    def loss(logp, entropy, rows: Batch, weights, adapted_coef=None):
        mask = rows.from_policy
        # Values outside the mask must not reach a gradient, not even as 0 x NaN.
        logp, entropy, reference_logp = (
            jnp.where(mask, x, 0.0) for x in (logp, entropy, rows.reference_logp)
        )

        def mean(values):
            return masked_sum(values * weights, mask)

        total, is_clipped = token_loss(
            logp, rows.behavior_logp, rows.advantage, mask, low=clip_low, high=clip_high
        )
        metrics = {
            "entropy": mean(entropy),
            "clip_fraction": mean(is_clipped),
            "logp_gap": mean(jnp.abs(logp - rows.behavior_logp)),
        }
        if tis_cap:
            weight = truncated_weight(
                rows.behavior_logp, rows.sampled_logp, mask, cap=tis_cap
            )
            total = total * weight
            metrics["tis_weight"] = mean(weight)
        total = total - entropy_coef * entropy
        kl = kl_estimate(logp, reference_logp, kl_kind, cap=kl_cap)
        if kl_coef:
            total = total + (kl_coef if adapted_coef is None else adapted_coef) * kl
        if logs_kl:
            metrics["kl"] = mean(kl)
        return mean(total), {"loss": mean(total)} | metrics

    return loss


class TokenLossError(ValueError):
    """A user's token loss returned something else than two [B, T] arrays.

    The type tells it from the errors of JAX, which traces the loss.
    """


def checked_token_loss(name: str, token_loss: Callable) -> Callable:
    """Return a user's token loss, wrapped so that its results are checked.

    Args:
        name: name of the function, which opens the message.
        token_loss: see `policy_loss`.

    Raises:
        TokenLossError: when traced, the function did not return two [B, T] arrays.
    """

    def checked_loss(logp, *arrays, **bounds):
        result = token_loss(logp, *arrays, **bounds)
        is_pair = isinstance(result, tuple) and len(result) == 2
        shapes = [jnp.shape(x) for x in result] if is_pair else type(result).__name__
        if shapes != [logp.shape] * 2:
            raise TokenLossError(
                f"{name} returned {shapes}: must be (loss, is_clipped), both of the "
                f"shape {logp.shape} of logp"
            )
        return result

    return checked_loss


def value_loss(*, clip: float, over_response: bool) -> Callable:
    """Return a critic's clipped squared error.

    Args:
        clip: see `clipped_value_loss`.
        over_response: whether the loss includes retrieved tokens.

    Returns:
        (values, rows, weights) -> (loss, metrics), both summed with `weights`.
    """

    def loss(values, rows: Batch, weights):
        mask = rows.in_response if over_response else rows.from_policy
        errors = clipped_value_loss(values, rows.values, rows.returns, mask, clip=clip)

        def mean(values):
            return masked_sum(values * weights, mask)

        total = mean(errors)
        return total, {
            "critic_loss": total,
            "value": mean(rows.values),
            "return": mean(rows.returns),
        }

    return loss


@functools.partial(jax.jit, static_argnames="with_retrieved")
def sampler_gap(logp: jax.Array, rows: Batch, *, with_retrieved: bool):
    """Return the mean distance of the trainer's log-probabilities from the sampler's.

    It is only rounding if both are the same model in float32. If a nucleus was sampled
    from, up to -log(top_p) of it is due to the mass outside the nucleus.

    Args:
        logp: [..., T] log-probabilities of the trainer, before any update.
        rows: rows whose `behavior_logp` is the sampler's.
        with_retrieved: whether retrieved tokens are also learnt from. They were not
            sampled, have a `behavior_logp` of 0, and are left out.
    """
    mask = rows.from_policy
    if with_retrieved:
        mask = mask & (rows.behavior_logp != 0)
    total = masked_sum(jnp.abs(logp - rows.behavior_logp), mask)
    return total / jnp.maximum(jnp.sum(mask), 1)
