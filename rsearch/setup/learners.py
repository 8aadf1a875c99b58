"""Make trainers: a stage's compiled functions and the train states they update."""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from rsearch.hosts.offload import in_host_memory
from rsearch.learn import objectives, update
from rsearch.learn.optimizer import make_optimizer
from rsearch.learn.train_state import TrainState, create_state, state_shardings
from rsearch.learn.trainer import Trainer
from rsearch.models.decoder import Decoder, param_shapes
from rsearch.models.lora import init_adapters, make_merge
from rsearch.models.sharding import shapes_with_shardings, with_shardings
from rsearch.setup.context import Setup
from rsearch.text.extension import load_reference
from rsearch.types import Params


def make_trainer(setup: Setup, kind: str) -> Trainer:
    """Return the Trainer of a stage of this kind ("sft" or "rl").

    Its functions compile when they are first called.
    """
    c = setup.config
    learning = dict(adapter_scale=_adapter_scale(c))
    if kind == "sft":
        settings = dict(loss=objectives.imitation_loss, loss_mean=c.sft.loss_mean)
        reading = dict(chunk_tokens=c.model.logit_chunk)
    else:
        settings = policy_settings(setup)
        temperature = c.rollout.temperature
        reading = dict(chunk_tokens=c.model.logit_chunk, temperature=temperature)
    score_values = update_values = None
    if has_critic(setup, kind):
        value_model = Decoder(
            # Without a separate logit matrix, see `critic_params`.
            dataclasses.replace(setup.model.spec, tie_embeddings=True),
            dtype=setup.model.dtype,
            remat=setup.model.remat,
            value_head=True,
        )
        score_values = update.make_value_scorer(value_model, setup.mesh, **learning)
        update_values = update.make_value_update(
            value_model,
            _critic_optimizer(c),
            setup.mesh,
            offloads=_offloads(c),
            **value_settings(c),
            **learning,
        )
    return Trainer(
        mesh=setup.mesh,
        score=update.make_policy_scorer(setup.model, setup.mesh, **reading, **learning),
        update=update.make_policy_update(
            setup.model,
            policy_optimizer(c, kind),
            setup.mesh,
            offloads=_offloads(c),
            **settings,
            **reading,
            **learning,
        ),
        score_values=score_values,
        update_values=update_values,
        merge=make_weight_merge(setup) if c.model.lora_rank else None,
        decode_dtype=setup.model.dtype,
        state_shapes=state_shapes(setup, kind),
        fresh_state=functools.partial(fresh_state, setup, kind),
    )


def make_weight_merge(setup: Setup):
    """Return a maker of compiled merges of adapters into their base; see `Trainer`."""

    @functools.cache  # one program per dtype and per choice of donating the base
    def merge(dtype, donates):
        scale = _adapter_scale(setup.config)
        return make_merge(setup.mesh, scale, dtype, donates=donates)

    return merge


def policy_optimizer(c: ConfigDict, kind: str):
    """Return the optimizer of a stage's policy; `kind` is "sft" or "rl"."""
    section = c[kind]
    updates, steps = section.get("updates_per_step", 1), section.steps
    if section.get("algorithm") == "ppo":  # only the critic learns in the first steps
        steps -= c.critic.pretrain_steps
    return make_optimizer(
        lr=section.lr,
        warmup_steps=section.warmup_steps,
        decay_steps=steps * updates if section.decay else 0,
        updates_per_rate=updates if section.get("lr_first_step_zero", False) else 0,
        **c.optim,
    )


def _critic_optimizer(c: ConfigDict):
    return make_optimizer(
        lr=c.critic.lr,
        warmup_steps=c.critic.warmup_steps,
        decay_steps=0,
        updates_per_rate=c.rl.updates_per_step if c.rl.lr_first_step_zero else 0,
        **{**c.optim, "max_grad_norm": c.critic.max_grad_norm},
    )


def offload_reference(setup: Setup, params: Params):
    """Move a stage's initial weights to where they are kept while it trains.

    This is host memory if config.model.offload includes "reference".
    """
    is_offloaded = "reference" in setup.config.model.offload
    return in_host_memory(params) if is_offloaded else params


def _offloads(c):
    """Return whether the optimizer's moments are kept in host memory."""
    return "optimizer" in c.model.offload


def _adapter_scale(c):
    """Return alpha / r; it has no meaning without adapters."""
    return c.model.lora_alpha / max(c.model.lora_rank, 1)


def policy_settings(setup: Setup) -> dict:
    """Return the settings of an RL stage's update of the policy."""
    s, limits = setup.config.rl, setup.limits
    token_loss = None
    if s.loss:
        token_loss = objectives.checked_token_loss(
            f"config.rl.loss = {s.loss!r}", load_reference("config.rl.loss", s.loss)
        )
    loss = objectives.policy_loss(
        clip_low=s.clip_low,
        clip_high=s.clip_high,
        dual_clip=s.dual_clip,
        kl_coef=s.kl_coef if s.kl_place == "loss" else 0.0,
        kl_kind=s.kl_kind,
        kl_cap=s.kl_cap,
        entropy_coef=s.entropy_coef,
        logs_kl=s.kl_coef > 0,
        tis_cap=s.tis_cap,
        by_sequence=s.ratio == "sequence",
        token_loss=token_loss,
    )
    return dict(
        loss=loss,
        loss_mean=s.loss_mean,
        loss_tokens=s.loss_tokens or limits.num_turns * limits.max_turn_tokens,
        memorise_coef=s.memorise_coef,
        kl_target=s.kl_target,
        kl_gain=s.kl_gain,
    )


def value_settings(c: ConfigDict) -> dict:
    """Return the settings of an RL stage's update of the value model."""
    over_response = c.rl.advantage_mask == "response"
    return dict(
        loss=objectives.value_loss(
            clip=c.critic.value_clip, over_response=over_response
        ),
        # In the public code that averages by micro-batches, each device's micro-batch
        # of the critic is one row: 8 rows over 8 devices.
        loss_mean="sequence" if c.rl.loss_mean == "micro_token" else "token",
        over_response=over_response,
    )


def has_critic(setup: Setup, kind: str) -> bool:
    """Return whether a stage of this kind trains a value model with the policy."""
    return kind == "rl" and setup.config.rl.algorithm == "ppo"


def fresh_state(setup: Setup, kind: str, params: Params) -> TrainState:
    """Return the initial state of a stage of this kind.

    A value model starts from the policy's weights, with a head of zeros. With
    config.model.lora_rank the state instead holds adapters of each, which initially
    change nothing, and the value model's head; both use the same frozen weights.
    """
    optimizer = policy_optimizer(setup.config, kind)
    s, offloads = setup.config[kind], _offloads(setup.config)
    # Only a controller changes the coefficient, which is then part of the state.
    is_adaptive = s.get("kl_controller", "fixed") == "adaptive"
    coef = s.kl_coef if is_adaptive else None
    make_critic_params, params = _initial_params(setup, params)
    state = create_state(params, optimizer, setup.mesh, kl_coef=coef, offloads=offloads)
    if has_critic(setup, kind):
        optimizer = _critic_optimizer(setup.config)
        critic = create_state(
            make_critic_params(), optimizer, setup.mesh, offloads=offloads
        )
        state = state._replace(critic=critic)
    return state


def _initial_params(setup, params):
    """Return a maker of the value model's initial parameters, and the policy's."""
    c = setup.config
    if not c.model.lora_rank:
        return functools.partial(update.critic_params, params), params
    # Each stage draws other adapters.
    key = jax.random.key(c.seed)
    key = jax.random.fold_in(key, zlib.crc32(" ".join(c.stages).encode()))

    def draw_adapters(index):
        index_key = jax.random.fold_in(key, index)
        rank, matrices = c.model.lora_rank, c.model.lora_matrices
        return init_adapters(setup.model.spec, index_key, rank=rank, matrices=matrices)

    head = jnp.zeros(setup.model.spec.width, jnp.float32)
    return lambda: draw_adapters(1) | {"value": head}, draw_adapters(0)


def state_shapes(setup: Setup, kind: str) -> TrainState:
    """Return the shapes and shardings of `fresh_state`, to restore a checkpoint."""
    make_state = functools.partial(fresh_state, setup, kind)
    state = jax.eval_shape(make_state, param_shapes(setup.model.spec))
    offloads = _offloads(setup.config)
    shardings = state_shardings(state, setup.mesh, offloads=offloads)
    return with_shardings(state, shardings)


def weight_shapes(setup: Setup):
    """Return shapes and shardings of the policy's full weights, even with adapters."""
    return shapes_with_shardings(param_shapes(setup.model.spec), setup.mesh)
