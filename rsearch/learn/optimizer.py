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

    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.adamw(
            schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decays
        ),
    )
