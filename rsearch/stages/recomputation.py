"""Recompute what a reinforcement-learning step learnt from, from its stored rollouts.

With all groups of the step, the batch is the one that was learnt from and goes through
the same programs: on the same machine all numbers are equal, bit for bit. With only
some of the groups, rows without tokens stand in for the others, so that the programs
are still the same. But rows that shared a micro-batch with missing ones are packed
differently, and therefore rounded differently.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from rsearch.learn.train_state import TrainState
from rsearch.rollout.records import params_fingerprint
from rsearch.rollout.rollout_log import rollout_rows
from rsearch.rollout.stored_groups import stored_groups
from rsearch.stages.groups import with_rewards
from rsearch.stages.policy_update import loss_rows, score_batch, update_policy
from rsearch.stages.rl import RLStage
from rsearch.types import Group, Outcome, Params, Rollout

IN_GROUP = ("grpo", "rloo")  # advantages that depend only on the rollouts of a group


@dataclasses.dataclass(frozen=True)
class RecomputedStep:
    """The recomputed lines of a step's file, and the metrics of its update.

    Attributes:
        rows: lines, see `rollout_log.rollout_rows`.
        metrics: metrics of the update; None if groups are missing.
        num_exact: number of first rollouts whose micro-batches are as they were.
        has_advantages: whether the available rollouts determine their advantages.
    """

    rows: list[dict]
    metrics: dict[str, float] | None
    num_exact: int
    has_advantages: bool


def recompute_step(
    stage: RLStage,
    train_state: TrainState,
    first_params: Params | None,
    stored: Sequence[Mapping],
    *,
    step: int,
) -> RecomputedStep:
    """Recompute the rewards, log-probabilities, advantages and update of a step.

    Args:
        stage: objects and settings of the stage.
        train_state: state before the step; its buffers are reused.
        first_params: the policy's parameters before the stage, for the KL and adapters;
            None if the stage needs neither.
        stored: lines of the step's file, for all its groups or the first ones.
        step: step number, from 0.

    Raises:
        ValueError: a line is not in this version's format, or the lines are not those
            of a step of this stage.
    """
    c, trainer = stage.config, stage.trainer
    try:
        groups, rewards = stored_groups(stored, {q.id: q for q in stage.questions})
        _check_sizes(stage, groups)
    except ValueError as error:
        raise ValueError(f"{stage.folder}: step {step}: {error}") from None
    # The weights that adapters are added to, and the reference of the KL.
    base = trainer.base_of(first_params)
    reference = first_params if c.rl.kl_coef else None
    # If the checkpoint is of another policy, that explains all differences below.
    weights = stage.rollouts.place_params(
        trainer.for_decoding(train_state.params, base)
    )
    fingerprint = params_fingerprint(weights)
    del weights  # the update needs its memory
    # Advantages are made from stored rewards: a changed reward function shows up once.
    results = with_rewards(*stage.score(groups))
    rows: list[dict] = []

    def record(batch, logp):
        # If the step did not need them, they are compared with the sampler's, which are
        # of the same distribution unless a nucleus was sampled from.
        if logp is None and batch is not None and c.rollout.top_p == 1:
            logp = trainer.score(train_state.params, base, batch)
        rows.extend(rollout_rows(step, results, batch, logp, params=fingerprint))

    num_rollouts, group_size = rewards.size, rewards.shape[1]
    num_missing = c.rl.questions_per_step - len(groups)
    # All groups: the update itself is repeated, and its state discarded.
    if not num_missing:
        metrics = {"in_loss": 0.0}
        # As in the stage, there is no update from rewards that are not finite.
        if np.isfinite(rewards).all():
            memory = stage.memory
            _, metrics = update_policy(
                c,
                trainer,
                train_state,
                groups,
                rewards,
                num_tokens=stage.num_tokens,
                step=step,
                name=stage.name,
                base=base,
                reference=reference,
                memory_rows=[] if memory is None else memory.rows(step),
                record=record,
            )
        else:
            record(None, None)
        return RecomputedStep(rows, metrics, num_rollouts, has_advantages=True)

    if all(row["advantage"] is None for row in stored):  # nothing was learnt
        record(None, None)
        return RecomputedStep(rows, None, num_rollouts, has_advantages=True)
    # Some groups: the batch keeps its shape, and so its programs. Rollouts without
    # tokens give no signal; groups of them do not change other groups' advantages.
    no_rollout = Rollout((), None, (), Outcome.TOOL_ERROR)
    padding = Group(groups[0].question, (no_rollout,) * group_size)
    batch = loss_rows(
        c,
        [*groups, *[padding] * num_missing],
        np.concatenate([rewards, np.zeros((num_missing, group_size), np.float32)]),
        num_tokens=stage.num_tokens,
    )
    batch, logp, _ = score_batch(
        c,
        trainer,
        train_state,
        batch,
        step=step,
        group_size=group_size,
        base=base,
        reference=reference,
    )
    record(batch, logp)
    # Exact are the groups in micro-batches whose rows are all available.
    num_exact = num_rollouts // c.rl.micro_batch * c.rl.micro_batch
    num_exact -= num_exact % group_size
    return RecomputedStep(rows, None, num_exact, c.rl.algorithm in IN_GROUP)


def _check_sizes(stage, groups):
    """Refuse groups that are too many, too small or too long for a step of the stage.

    All groups have as many rollouts as the first.
    """
    c, size = stage.config, len(groups[0].rollouts)
    if len(groups) > c.rl.questions_per_step or size != c.rollout.group_size:
        raise ValueError(
            f"{len(groups)} groups of {size} rollouts are stored; a step has "
            f"{c.rl.questions_per_step} of {c.rollout.group_size}"
        )
    num_tokens = max(r.num_tokens for group in groups for r in group.rollouts)
    if num_tokens > stage.num_tokens:
        raise ValueError(
            f"a rollout has {num_tokens} tokens; one of this stage has at most "
            f"{stage.num_tokens}"
        )
