"""Run stages on the objects of a setup, as `rsearch.train` does."""

import dataclasses

import numpy as np

from rsearch.rewards.group import reward_groups
from rsearch.setup.learners import make_trainer
from rsearch.setup.stages import data_parts, rl_parts
from rsearch.stages import rl, sft
from rsearch.stages.curate import run as curate
from rsearch.stages.curate.rolling import DataStage
from rsearch.stages.groups import groups_and_rewards, summarize, with_rewards
from rsearch.stages.policy_update import update_policy
from rsearch.stages.state import StageState


def rl_stage(setup, folder, *, evaluator=None, name="rl", memory=None):
    """Return the objects of an RL stage, with the given memory."""
    return rl.RLStage(
        **rl_parts(setup, folder),
        name=name,
        evaluate=evaluator and (lambda params: evaluator(params, "protocol")[0]),
        memory=memory,
    )


def run_rl(setup, evaluator, params, folder, *, stage="rl", memory=None):
    """Run an RL stage and return its parameters."""
    made = rl_stage(setup, folder, evaluator=evaluator, name=stage, memory=memory)
    return rl.run(made, params)


def sft_stage(setup, demonstrations, folder):
    """Return the objects of a supervised stage."""
    trainer = make_trainer(setup, "sft")
    return sft.SFTStage(setup.config, folder, trainer, demonstrations)


def run_sft(setup, demonstrations, params, folder):
    """Run a supervised stage and return its parameters."""
    return sft.run(sft_stage(setup, demonstrations, folder), params)


def state_of(setup, kind, params, folder):
    """Return the state of a setup's stage, restored from `folder` if it has one."""
    trainer = make_trainer(setup, kind)
    return StageState(setup.config, kind, trainer, params, folder)


def learning(setup, *, reference=None, guards=None):
    """Return a function that makes the updates of one step.

    It maps (state, groups, rewards, step=, reference=) to (state, metrics).
    """
    trainer = make_trainer(setup, "rl")

    def learn(state, groups, rewards, *, step=0, reference=reference):
        return update_policy(
            setup.config,
            trainer,
            state,
            groups,
            np.asarray(rewards),
            num_tokens=setup.num_tokens,
            step=step,
            reference=reference,
            guards=guards,
        )

    return learn


def scored(setup, groups):
    """Reward rollouts as configured; return (groups, rewards, metrics)."""
    terms = setup.config.reward.to_dict()
    rewarded = with_rewards(
        *reward_groups(groups, terms, protocol=setup.protocol, judge=setup.judge)
    )
    return *groups_and_rewards(rewarded), summarize(rewarded)


def run_data(setup, params, folder, *, name="curate", make_rollouts=None):
    """Run a data stage, with another `make_rollouts` if one is given."""
    stage = DataStage(name=name, folder=folder, params=params, **data_parts(setup))
    if make_rollouts is not None:
        stage = dataclasses.replace(stage, make_rollouts=make_rollouts)
    curate.run(stage)
