"""Everything that an update changes: its shardings, its start and an optimizer step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from rsearch.hosts.offload import HOST, in_memory, on_device
from rsearch.models.sharding import param_shardings, replicated
from rsearch.types import Params


class TrainState(NamedTuple):
    """Everything that an update changes; unused parts are None, and not in checkpoints.

    Attributes:
        updates: [] int32, optimizer steps taken.
        params: float32 master parameters; only the adapters of a network with adapters.
        opt_state: optax state.
        kl_coef: [] float32, weight of the KL if a controller adapts it.
        critic: the same for the value model, if there is one.
    """

    updates: jax.Array
    params: dict
    opt_state: optax.OptState
    kl_coef: jax.Array | None = None
    critic: "TrainState | None" = None


def state_shardings(state: TrainState, mesh: Mesh, *, offloads: bool = False):
    """Return the shardings of a TrainState; moments are sharded like the weights.

    Args:
        state: a TrainState, including its critic's if there is one.
        mesh: device mesh.
        offloads: whether moments are kept in host memory between steps.
    """
    replicated_sharding = replicated(mesh)
    params = param_shardings(state.params, mesh)
    moments = in_memory(params, HOST) if offloads else params
    structure = jax.tree.structure(state.params)

    def is_params(node):
        return jax.tree.structure(node) == structure

    opt_state = jax.tree.map(
        lambda node: moments if is_params(node) else replicated_sharding,
        state.opt_state,
        is_leaf=is_params,
    )
    critic = state.critic
    if critic is not None:
        critic = state_shardings(critic, mesh, offloads=offloads)
    kl_coef = None if state.kl_coef is None else replicated_sharding
    return TrainState(replicated_sharding, params, opt_state, kl_coef, critic)


def create_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    kl_coef: float | None = None,
    offloads: bool = False,
) -> TrainState:
    """Return a fresh state with a copy of float32 parameters, sharded over the mesh.

    They are copied because the first update reuses the state's buffers, while the
    parameters given may serve as reference.

    Args:
        params: parameters, on devices or in host memory.
        optimizer, mesh: see `make_update`.
        kl_coef: initial value if a controller adapts it; otherwise None.
        offloads: see `state_shardings`.
    """

    def create(params):
        params = jax.tree.map(jnp.copy, params)
        coef = None if kl_coef is None else jnp.float32(kl_coef)
        return TrainState(jnp.int32(0), params, optimizer.init(params), coef)

    params = on_device(params)
    shapes = jax.eval_shape(create, params)
    shardings = state_shardings(shapes, mesh, offloads=offloads)
    return jax.jit(create, out_shardings=shardings)(params)


def apply_gradients(
    state: TrainState,
    grads: Params,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    kl_coef: jax.Array | None = None,
) -> TrainState:
    """Return the state after an optimizer step along a gradient.

    If the gradient is not finite, the state stays as it is, since nothing in it would
    remain finite; the gradient's norm in the metrics shows this.

    Args:
        state: the state before the step.
        grads: gradient of its parameters.
        optimizer, mesh: see `make_update`.
        kl_coef: value for the state after the step.
    """
    changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, changes)
    next_state = state._replace(
        updates=state.updates + 1, params=params, opt_state=opt_state, kl_coef=kl_coef
    )
    is_finite = jnp.isfinite(optax.global_norm(grads))
    next_state = jax.tree.map(
        lambda new, old: jnp.where(is_finite, new, old), next_state, state
    )
    return jax.lax.with_sharding_constraint(
        next_state, state_shardings(next_state, mesh)
    )
