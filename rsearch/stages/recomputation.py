"""Compute what a step of reinforcement learnt from again, from its stored rollouts.

With all groups of the step the batch is the one that was learnt from, and goes through
the same programs: all numbers are equal to the bit on the same machine. With some of
the groups rows without tokens stand for the others, so that the programs are the same,
too; but rows that shared a micro-batch with others are packed otherwise, which rounds
otherwise.
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

IN_GROUP = ("grpo", "rloo")  # advantages that follow from the rollouts of a group


@dataclasses.dataclass(frozen=True)
class RecomputedStep:
    """The lines of a step's file, computed again, and the metrics of its update.

    Attributes:
        rows: see `rollout_log.rollout_rows`.
        metrics: of the update; None where groups are missing.
        num_exact: so many first rollouts have the micro-batches that they had.
        has_advantages: whether the rollouts there are say what theirs are.
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
    """Compute rewards, log-probabilities, advantages and the update of a step again.

    Args:
        stage: its objects.
        train_state: before the step; its buffers are reused.
        first_params: of the policy before the stage, for the KL and adapters; None
            where the stage needs neither.
        stored: lines of the step's file, of all its groups or of the first ones.
        step: from 0.

    Raises:
        ValueError: a line is not as this version writes it.
    """
    c, trainer = stage.config, stage.trainer
    try:
        groups, rewards = stored_groups(stored, {q.id: q for q in stage.questions})
    except ValueError as error:
        raise ValueError(f"{stage.folder}: step {step}: {error}") from None
    # The weights that adapters stand beside, and those that the KL is to.
    base = trainer.base_of(first_params)
    reference = first_params if c.rl.kl_coef else None
    # A checkpoint of another policy would explain all that differs below.
    decoding = stage.rollouts.place_params(
        trainer.for_decoding(train_state.params, base)
    )
    fingerprint = params_fingerprint(decoding)
    del decoding  # the update needs its room
    # Advantages follow from the stored rewards: another reward function is named once.
    scored = with_rewards(*stage.score(groups))
    rows: list[dict] = []

    def record(batch, logp):
        # Where the step needed none, these stand beside the sampler's, which come from
        # the same distribution unless a nucleus was sampled from.
        if logp is None and batch is not None and c.rollout.top_p == 1:
            logp = trainer.score(train_state.params, base, batch)
        rows.extend(rollout_rows(step, scored, batch, logp, params=fingerprint))

    num_rollouts, group_size = rewards.size, rewards.shape[1]
    num_missing = c.rl.questions_per_step - len(groups)
    # All groups: the update itself is taken again, and its state forgotten.
    if not num_missing:
        metrics = {"in_loss": 0.0}
        # As the stage does: there is no update from rewards that are not finite.
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
    # tokens are no signal; a group of these changes no other group's advantages.
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
    # Of groups that lie in micro-batches all of whose rows are there.
    num_exact = num_rollouts // c.rl.micro_batch * c.rl.micro_batch
    num_exact -= num_exact % group_size
    return RecomputedStep(rows, None, num_exact, c.rl.algorithm in IN_GROUP)
