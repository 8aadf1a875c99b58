"""AdamW and its learning-rate schedules."""

import jax
import jax.numpy as jnp
import optax

# Parameters that are vectors in each layer; weight decay would pull scales to 0.
VECTORS = ("scale", "q_bias", "k_bias", "v_bias", "value")


def make_optimizer(
    *,
    lr: float,
    warmup_steps: int,
    decay_steps: int,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    max_grad_norm: float,
    updates_per_rate: int = 0,
    moments_dtype: str = "float32",
) -> optax.GradientTransformation:
    """Return AdamW with global-norm clipping, linear warm-up and optional decay.

    Args:
        lr: peak learning rate.
        warmup_steps: number of warm-up updates; update u of these has
            lr * (u + 1) / warmup_steps, so that no update has a rate of 0.
        decay_steps: number of updates of the run; the rate falls linearly to a tenth of
            the peak at the last of them; 0 keeps it constant.
        b1, b2, eps, weight_decay: AdamW's (arXiv 1711.05101); norms and biases, which
            are vectors in each layer, do not decay.
        max_grad_norm: the gradient is clipped to this global norm.
        updates_per_rate: if not 0, warm up like verl's trainer, which sets the rate
            after each of its steps of this many updates: step k of the `warmup_steps`
            has lr * k / warmup_steps, the first 0. 0 warms up with every update.
        moments_dtype: see `moments_in_dtype`.
    """

    def warm_up(count):
        if updates_per_rate and warmup_steps:
            return jnp.minimum(1.0, (count // updates_per_rate) / warmup_steps)
        return jnp.minimum(1.0, (count + 1) / max(warmup_steps, 1))

    def schedule(count):
        if not decay_steps:
            return lr * warm_up(count)
        warmup_updates = warmup_steps * max(updates_per_rate, 1)
        num_decaying = max(decay_steps - 1 - warmup_updates, 1)
        progress = jnp.clip((count - warmup_updates) / num_decaying, 0, 1)
        return lr * warm_up(count) * (1 - 0.9 * progress)

    def mask_vectors(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key not in VECTORS, params
        )

    adamw = optax.adamw(
        schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=mask_vectors
    )
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm), moments_in_dtype(adamw, moments_dtype)
    )


def moments_in_dtype(
    inner: optax.GradientTransformation, dtype: str
) -> optax.GradientTransformation:
    """Store a transformation's floats, such as both of Adam's moments, in a dtype.

    They are float32 during computations. Rounding to the nearest bfloat16, with 8
    significant bits, loses up to 2^-8 of a moment each time. A moment that should fall
    by less than that may never fall, so b1 and b2 must not be above 0.996. (optax's
    `mu_dtype` applies only to the first moment.)

    Args:
        inner: the transformation.
        dtype: "float32" or "bfloat16".
    """

    def cast(state, dtype):
        return jax.tree.map(
            lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            state,
        )

    def init(params):
        return cast(inner.init(params), dtype)

    def update(grads, state, params=None):
        changes, state = inner.update(grads, cast(state, jnp.float32), params)
        return changes, cast(state, dtype)

    return optax.GradientTransformation(init, update)
