"""Turn a step's groups and rewards into optimizer steps of policy and critic."""

import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from rsearch.hosts.offload import on_device
from rsearch.learn.advantages import with_advantages
from rsearch.learn.batch import Batch, pack, pack_segments, split_batch
from rsearch.learn.objectives import sampler_gap
from rsearch.learn.train_state import TrainState
from rsearch.learn.trainer import Trainer
from rsearch.runtime import console
from rsearch.stages.groups import rollouts_in_loss, valid_rollouts
from rsearch.stages.guards import Guards
from rsearch.types import Group, Params


def update_policy(
    c: ConfigDict,
    trainer: Trainer,
    train_state: TrainState,
    groups: Sequence[Group],
    rewards: np.ndarray,
    *,
    num_tokens: int,
    step: int = 0,
    name: str = "rl",
    base: Params | None = None,
    reference: Params | None = None,
    memory_rows: Sequence = (),
    guards: Guards | None = None,
    record: Callable[[Batch | None, jax.Array | None], None] = lambda batch, logp: None,
) -> tuple[TrainState, dict[str, float]]:
    """Take the optimizer steps for the rollouts of one step.

    Updates without a token in the loss are skipped, because the optimizer's momentum
    would still move the policy. If a reward is not finite, all updates are skipped.

    Args:
        c: configuration of the stage.
        trainer: the compiled functions that train.
        train_state: state before the updates; its buffers are reused.
        groups: Q groups of G.
        rewards: [Q, G].
        num_tokens: T.
        step: step number, from 0; a critic, if there is one, first learns alone.
        name: name of the stage.
        base: frozen weights that adapters are added to, or None.
        reference: parameters of the reference model, or None; they may be in host
            memory.
        memory_rows: rows of segments to memorise, at most config.rl.memorise_rows.
        guards: check each update; None without.
        record: called before the first update with the batch, including advantages, and
            with the trainer's log-probabilities if they are computed; called with None
            for both if nothing is learnt from the step.

    Returns:
        The state, and the metrics averaged over the updates. `in_loss` is the share of
        rollouts with tokens in the loss, and `sampler_gap` the distance of the
        sampler's log-probabilities from the trainer's.
    """
    s = c.rl
    rows = loss_rows(c, groups, rewards, num_tokens=num_tokens)
    # Updates without a token in the loss are skipped individually below.
    is_useful = [p.from_policy.any() for p in split_batch(rows, s.updates_per_step)]
    if not any(is_useful):
        console.note(f"{name}: no rollout of this step is in the loss; no update")
        record(None, None)
        return train_state, {"in_loss": 0.0}
    # A reward that is not finite would make every advantage of its group NaN.
    largest = float(np.max(np.abs(rewards[valid_rollouts(groups)]), initial=0.0))
    if guards is not None and not math.isfinite(largest):
        record(None, None)
        guards.on_update(step, {"reward": largest}, rows, train_state.params)
        return train_state, {"in_loss": 0.0}

    # Score all rows before the first update, which reuses the policy's buffers.
    batch, trainer_logp, gap = score_batch(
        c,
        trainer,
        train_state,
        rows,
        step=step,
        group_size=len(groups[0].rollouts),
        base=base,
        reference=reference,
    )
    # Record before the updates, so that the state can still be saved if writing fails.
    record(batch, trainer_logp)
    memory = None
    if s.memorise_coef:
        # Always the same number of rows: nothing recompiles while the set grows.
        empty = [()] * (s.memorise_rows - len(memory_rows))
        memory = pack_segments([*memory_rows, *empty], num_tokens)
        memory = trainer.put(memory, s.micro_batch)

    trains_policy, update_metrics = _trains_policy(c, trainer, step), []
    for minibatch, learns in zip(split_batch(batch, s.updates_per_step), is_useful):
        if not learns:
            continue
        # Two updates, each of which reuses its own state's buffers.
        policy, critic = train_state._replace(critic=None), train_state.critic
        metrics = {}
        if trainer.update_values is not None:
            critic, critic_metrics = trainer.update_values(critic, base, minibatch)
            metrics |= jax.device_get(critic_metrics)
        if trains_policy:
            policy, policy_metrics = trainer.update(policy, base, minibatch, memory)
            metrics |= jax.device_get(policy_metrics)
        train_state = policy._replace(critic=critic)
        update_metrics.append(metrics)
        if guards is not None:
            params = train_state.params
            if critic is not None:
                params = {"policy": params, "critic": critic.params}
            guards.on_update(step, metrics, minibatch, params)
    # Metrics are means over the updates; all have been transferred to the host above.
    mean = jax.tree.map(lambda *values: float(np.mean(values)), *update_metrics)
    mean["in_loss"] = float(np.mean(rows.from_policy.any(axis=1)))
    # Later updates compare with a policy that has moved: only the first gives the gap.
    mean["sampler_gap"] = float(update_metrics[0]["logp_gap"] if gap is None else gap)
    return train_state, mean


def loss_rows(
    c: ConfigDict, groups: Sequence[Group], rewards: np.ndarray, *, num_tokens: int
) -> Batch:
    """Return the step's rollouts as rows, masking those outside the loss.

    Args:
        c: configuration of the stage.
        groups: Q groups of G.
        rewards: [Q, G].
        num_tokens: T.
    """
    s = c.rl
    # Choose the rollouts to learn from. Rollouts whose tool or judge failed give no
    # signal, and `pack` leaves them out of the loss in any case.
    in_loss = rollouts_in_loss(
        groups,
        rewards,
        needs_variance=s.mask_equal_rewards or s.dynamic_sampling_rounds > 0,
        mask_truncated=s.mask_truncated,
    )
    return pack(
        groups, rewards, num_tokens, learns=in_loss, masks_retrieved=s.mask_retrieved
    )


def score_batch(
    c: ConfigDict,
    trainer: Trainer,
    train_state: TrainState,
    rows: Batch,
    *,
    step: int,
    group_size: int,
    base: Params | None = None,
    reference: Params | None = None,
) -> tuple[Batch, jax.Array | None, jax.Array | None]:
    """Score a step's rows before its updates, and return them with advantages.

    Args:
        c, trainer, step, base, reference: see `update_policy`.
        train_state: state before the updates.
        rows: from `loss_rows`.
        group_size: G.

    Returns:
        The [M, b, T] batch; and the trainer's log-probabilities and their mean distance
        from the sampler's, both None if the configuration does not need them.
    """
    s = c.rl
    batch = trainer.put(rows, s.micro_batch)
    gap = trainer_logp = None
    # The sampler's log-probabilities differ from the trainer's by rounding (other
    # kernels, bfloat16 copy): recomputing makes the first ratio exactly 1.
    if s.old_logprobs == "recompute" or not _trains_policy(c, trainer, step):
        trainer_logp = trainer.score(train_state.params, base, batch)
        gap = sampler_gap(trainer_logp, batch, with_retrieved=not s.mask_retrieved)
    if s.old_logprobs == "recompute":
        if s.tis_cap:  # truncated importance sampling compares with the sampler's
            batch = batch._replace(sampled_logp=batch.behavior_logp)
        batch = batch._replace(behavior_logp=trainer_logp)
    # The reference may be kept in host memory, and is on the devices only for this.
    if reference is not None:
        logp = trainer.score(on_device(reference), None, batch)
        batch = batch._replace(reference_logp=logp)
    # GAE needs the values of all rows under the critic before its first update.
    if trainer.update_values is not None:
        values = trainer.score_values(train_state.critic.params, base, batch)
        batch = batch._replace(values=values)
    # Over all rows, before they are split, because whitening spans all updates.
    batch = add_advantages(s, batch, train_state.kl_coef, group_size)
    return batch, trainer_logp, gap


def _trains_policy(c, trainer, step) -> bool:
    """Return whether the policy learns in this step: at first only a critic learns."""
    return trainer.update_values is None or step >= c.critic.pretrain_steps


def add_advantages(
    s: ConfigDict, batch: Batch, kl_coef: jax.Array | None, group_size: int
) -> Batch:
    """Return the batch with advantages, as configured in config.rl."""
    reward_kl_coef = None
    if s.kl_coef and s.kl_place == "reward":
        reward_kl_coef = s.kl_coef if kl_coef is None else kl_coef
    return with_advantages(
        batch,
        algorithm=s.algorithm,
        group_size=group_size,
        normalize_std=s.normalize_std,
        eps=s.std_eps,
        ddof=s.std_ddof,
        gamma=s.gamma,
        lam=s.gae_lambda,
        over_response=s.advantage_mask == "response",
        kl_coef=reward_kl_coef,
        kl_kind=s.kl_kind,
        kl_cap=s.kl_cap,
        kl_credit=s.kl_credit,
    )
