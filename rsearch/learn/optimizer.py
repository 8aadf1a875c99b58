"""AdamW and its learning-rate schedules."""

import jax
import jax.numpy as jnp
import optax

VECTORS = ("scale", "q_bias", "k_bias", "v_bias", "value")  # these do not decay


def make_optimizer(
    *,
    lr,
    warmup_steps,
    decay_steps,
    b1,
    b2,
    eps,
    weight_decay,
    max_grad_norm,
    updates_per_rate=0,
    moments_dtype="float32",
) -> optax.GradientTransformation:
    """AdamW with global-norm clipping, linear warmup and, if asked, a linear decay.

    Args:
        lr: peak learning rate.
        warmup_steps: update u of these has lr * (u + 1) / warmup_steps: none is lost at
            0.
        decay_steps: updates of the run; the rate falls linearly to a tenth of the peak,
            which the last of them has; 0 keeps it constant.
        b1, b2, eps, weight_decay: of AdamW (arXiv 1711.05101); norms and biases, which
            are vectors in each layer, do not decay.
        max_grad_norm: the gradient's global norm is cut to this.
        updates_per_rate: warm up as verl's trainer does, which sets the rate after each
            of its steps of this many updates: step k of the `warmup_steps` has
            lr * k / warmup_steps, the first 0. 0 = not so.
        moments_dtype: see `resting_as`.
    """

    def warm(count):
        if updates_per_rate and warmup_steps:
            return jnp.minimum(1.0, (count // updates_per_rate) / warmup_steps)
        return jnp.minimum(1.0, (count + 1) / max(warmup_steps, 1))

    def schedule(count):
        if not decay_steps:
            return lr * warm(count)
        first = warmup_steps * max(updates_per_rate, 1)
        last = max(decay_steps - 1 - first, 1)
        done = jnp.clip((count - first) / last, 0, 1)
        return lr * warm(count) * (1 - 0.9 * done)

    def decays(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key not in VECTORS, params
        )

    adamw = optax.adamw(
        schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decays
    )
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm), resting_as(adamw, moments_dtype)
    )


def resting_as(inner, dtype) -> optax.GradientTransformation:
    """A transformation whose floats, such as both of Adam's moments, rest in a dtype.

    They are float32 while it computes, so that an update is what float32 makes of the
    moments as they rest. Lost is what rounding to the nearest bfloat16, of 8 bits,
    takes: up to 2^-8 of a moment each time. One that should fall by less than that may
    stay where it is for good, so that b1 and b2 must not be above 0.996. (Of optax's
    own settings, `mu_dtype` is of the first moment alone.)

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
