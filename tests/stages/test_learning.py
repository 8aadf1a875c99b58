"""The RL stage with a value model, refilled groups and memorised rows."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from rsearch.rollout.records import Rewarded
from rsearch.runtime import checkpoint
from rsearch.runtime.checkpoint import FOLDER as CHECKPOINTS
from rsearch.runtime.metrics import read_metrics
from rsearch.setup.learners import fresh_state, state_shapes
from rsearch.setup.weights import initial_params
from rsearch.stages import rl
from rsearch.stages.groups import (
    groups_and_rewards,
    rollouts_in_loss,
    sample_groups,
    summarize,
)
from rsearch.stages.guards import Guards
from rsearch.stages.policy_update import loss_rows
from rsearch.types import Outcome, Source
from tests import small_run
from tests.small_run import config, load_setup, quick_compilation, without_times
from tests.stages.running import learning, rl_stage, run_rl
from tests.stages.test_rl import TOOL, groups, largest_change, rollout, segment

__all__ = ["quick_compilation"]
PPO = dict(
    small_run.PPO,
    stages=("rl",),
    rl__tis_cap=2.0,
    rl__gae_lambda=0.95,
    reward={"format_ok": {"good": 0.1, "bad": -0.1}},  # untrained ones fail the format
)


def of_rl(c):
    """Return a setup for the rl stage of this configuration."""
    return load_setup(config(**c))


def last_state(setup, folder):
    """Return (step, all arrays) of the newest checkpoint."""
    like = state_shapes(setup, "rl")
    step, state, _ = checkpoint.newest_good(folder / CHECKPOINTS, like)
    return step, jax.device_get(state)


def test_ppo_learns_and_resumes_exactly_where_it_stopped(tmp_path):
    setup = of_rl(PPO | dict(rl__steps=2))
    params = initial_params(setup)
    stage = rl_stage(setup, tmp_path / "whole")
    after = rl.run(stage, params)
    rows = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert all(np.isfinite(v) for row in rows for v in row.values())
    # Each program that reads rows may be compiled once more, for fewer packed rows.
    assert rows[1]["compiles"] - rows[0]["compiles"] <= 5
    told = {"critic_loss", "critic_grad_norm", "value", "return", "kl", "tis_weight"}
    assert told <= rows[0].keys()
    # The value model predicts 0 before its first update, and something else after it.
    assert rows[0]["value"] == 0 != rows[1]["value"]
    step, whole = last_state(setup, tmp_path / "whole")
    assert step == 2 and int(whole.updates) == int(whole.critic.updates) == 2
    assert largest_change(params, after) > 0
    assert whole.kl_coef != pytest.approx(0.1)

    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / CHECKPOINTS / "2")
    rl.run(dataclasses.replace(stage, folder=tmp_path / "parts"), params)
    step, parts = last_state(setup, tmp_path / "parts")
    assert step == 2
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    again = read_metrics(tmp_path / "parts" / "metrics.jsonl")
    assert without_times(again) == without_times(rows)


def test_a_critic_learns_alone_while_it_is_pretrained():
    setup = of_rl(PPO | dict(rl__steps=2, critic__pretrain_steps=1))
    params = initial_params(setup)
    learn = learning(setup, reference=params)
    state = fresh_state(setup, "rl", params)
    played = groups(*[[rollout("x"), rollout("y", num_tokens=4)]] * 4)
    rewards = np.array([[1, 0]] * 4, np.float32)
    before = jax.device_get(state.critic.params)
    state, measured = learn(state, played, rewards, step=0)
    assert largest_change(params, state.params) == 0 and int(state.updates) == 0
    assert largest_change(before, jax.device_get(state.critic.params)) > 0
    assert "critic_loss" in measured and "loss" not in measured
    state, measured = learn(state, played, rewards, step=1)
    assert largest_change(params, state.params) > 0
    assert {"critic_loss", "loss"} <= measured.keys()


def test_a_step_without_a_policy_update_shows_no_entropy():
    measured = dict(reward=0.5, searches=2.0, policy_tokens=31.0, update_seconds=0.1)
    assert "31 tokens, entropy - (0.1 s)" in rl.step_line("rl", 1, 2, measured)
    assert "entropy 0.250 " in rl.step_line("rl", 1, 2, measured | dict(entropy=0.25))


@pytest.fixture(scope="module")
def setup():
    return of_rl(dict(stages=("rl",), rl__steps=1))


def playing(setup, *, good, size, rounds):
    """Return (question ids of the groups, rewards, metrics, ids asked in each round).

    Args:
        setup: setup with training questions.
        good: ids of the questions whose rollouts earn different rewards.
        size, rounds: questions per step, and the most rounds of further questions.
    """
    calls = []

    def play(questions):
        calls.append([q.id for q in questions])
        played = groups(*[[rollout("x"), rollout("y")]] * len(questions))
        return [
            Rewarded(
                dataclasses.replace(group, question=question),
                np.array([1, 0] if question.id in good else [1, 1], np.float32),
                {},
            )
            for question, group in zip(questions, played)
        ]

    scored, measured = sample_groups(
        play, setup.train, num_questions=size, rounds=rounds, seed=0, step=3
    )
    actual, rewards = groups_and_rewards(scored)
    return [g.question.id for g in actual], rewards, measured, calls


def test_groups_without_spread_are_replaced_by_those_of_other_questions(setup):
    _, _, measured, asked = playing(setup, good=(), size=4, rounds=3)
    assert [len(a) for a in asked] == [4, 4, 4, 4]
    assert measured["groups_learnt_from"] == 0
    own, further = asked[0], [i for some in asked[1:] for i in some]
    assert len({*own, *further}) == 16
    # Two of four have a spread, then one of two others, then neither of the last two.
    good = {own[0], own[2], further[1]}
    actual, rewards, measured, asked = playing(setup, good=good, size=4, rounds=3)
    assert asked == [own, further[:2], further[2:3], further[3:4]]
    assert actual == [own[0], further[1], own[2], own[3]]
    np.testing.assert_array_equal(rewards, [[1, 0]] * 3 + [[1, 1]])
    # Two of the step's own four questions have different rewards.
    assert measured["groups_with_spread"] == 0.5 and measured["reward"] == 0.75
    assert measured["questions_asked"] == 8
    assert measured["groups_learnt_from"] == 0.75


@pytest.mark.fault(77, "mean over nothing")
def test_the_reward_of_a_step_without_a_valid_rollout_is_none_and_not_0():
    (group,) = groups([TOOL, TOOL])
    parts = {"answer_em": np.full(2, np.nan, np.float32)}
    measured = summarize([Rewarded(group, np.zeros(2, np.float32), parts)])
    assert measured["reward"] is None and measured["reward_answer_em"] is None
    assert measured["groups_with_spread"] is None and measured["tool_error"] == 1
    line = rl.step_line("rl", 1, 2, measured)
    assert "reward -," in line and "entropy -" in line


def test_without_refills_a_step_plays_only_its_own_questions(setup):
    actual, rewards, measured, asked = playing(setup, good=(), size=4, rounds=0)
    assert asked == [actual] and (rewards == 1).all()
    assert measured["reward"] == 1 and "questions_asked" not in measured


@pytest.mark.fault(13, "counted")
def test_groups_without_spread_after_the_refills_are_not_in_the_loss(setup):
    played = groups([rollout("x"), rollout("y")], [rollout("x"), TOOL])
    rewards = np.array([[1, 0], [1, 0]], np.float32)
    in_loss = rollouts_in_loss(
        played, rewards, needs_variance=True, mask_truncated=False
    )
    np.testing.assert_array_equal(in_loss, [[1, 1], [0, 0]])


def test_groups_with_equal_rewards_can_be_masked_from_the_loss(setup):
    played = groups([rollout("x"), rollout("y")], [rollout("x"), rollout("y")])
    rewards = np.array([[1, 1], [1, 0]], np.float32)
    in_loss = []
    for masks in (False, True):
        c = config(stages=("rl",), rl__mask_equal_rewards=masks)
        rows = loss_rows(c, played, rewards, num_tokens=setup.num_tokens)
        in_loss.append(rows.from_policy.any(axis=1))
    np.testing.assert_array_equal(in_loss, [[1, 1, 1, 1], [0, 0, 1, 1]])


def test_truncated_rollouts_are_not_in_the_loss_but_in_their_groups_mean(setup):
    c = config(stages=("rl",), rl__mask_truncated=True, rl__old_logprobs="recompute")
    setup = dataclasses.replace(setup, config=c)
    cut = rollout(None, Outcome.TRUNCATED)
    played = groups(*[[rollout("x"), cut]] * 4)
    rewards = np.array([[1, 0]] * 4, np.float32)
    learn = learning(setup)
    params = initial_params(setup)
    state, measured = learn(fresh_state(setup, "rl", params), played, rewards)
    # Half of the rows are left, each better than its group's mean.
    assert measured["loss"] == pytest.approx(-np.sqrt(0.5), rel=1e-3)
    longer = rollout(None, Outcome.TRUNCATED, num_tokens=9)
    other = groups(*[[rollout("x"), longer]] * 4)
    again, _ = learn(fresh_state(setup, "rl", params), other, rewards)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),  # packed differently
        state.params,
        again.params,
    )


def test_an_update_that_would_break_the_policy_is_skipped_and_reported(
    setup, tmp_path, capsys
):
    whole = rollout("x")
    broken = dataclasses.replace(whole.segments[1], logp=np.full(3, np.nan, "f4"))
    broken = dataclasses.replace(whole, segments=(whole.segments[0], broken))
    played = groups(*[[broken, rollout("y")]] * 4)
    rewards = np.array([[1, 0]] * 4, np.float32)
    params = initial_params(setup)
    state = fresh_state(setup, "rl", params)
    learn = learning(setup, guards=Guards(setup.config, "rl", tmp_path))
    state, measured = learn(state, played, rewards, step=4)
    assert largest_change(params, state.params) == 0
    assert not np.isfinite(measured["grad_norm"])
    message = capsys.readouterr().err
    assert "rl: step 5: grad_norm = nan; all parameters are finite; this" in message


def test_stages_have_different_keys_and_the_plain_one_the_original_key():
    assert rl.stage_key("rl") == rl.STAGE_KEY
    keys = [rl.stage_key(name) for name in ("rl", "rl_a", "rl_b", "rl_answer")]
    assert len(set(keys)) == 4 and all(0 <= k < 2**31 for k in keys)


class Recorder:
    """A memory that always holds the same single conversation."""

    def __init__(self):
        self.seen = []

    def rows(self, step):
        """Return nothing before the second step."""
        own = segment(Source.POLICY, range(3, 9))
        return [(segment(Source.PROMPT, [1, 2]), own)] if step else []

    def collect(self, step, groups):
        """Record the step and how many groups and rollouts it has."""
        self.seen.append((step, len(groups), len(groups[0].rollouts)))
        return {"memory_size": step}

    def write(self):
        """Write nothing."""


def test_a_memory_is_called_each_step_and_learnt_from(tmp_path):
    """The run uses sequence ratios, a constant mean and Reinforce++ with a baseline."""
    setup = of_rl(
        dict(
            stages=("rl",),
            rl__steps=3,
            rl__algorithm="reinforce_pp_baseline",
            rl__ratio="sequence",
            rl__loss_mean="constant",
            rl__dual_clip=3.0,
            models__rewriter__source="any",
            rl__memorise_coef=0.5,
            rl__memorise_rows=8,
        )
    )
    memory = Recorder()
    params = initial_params(setup)
    run_rl(setup, None, params, tmp_path, stage="rl_recall", memory=memory)
    assert memory.seen == [(i, 4, 2) for i in range(3)]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    losses = [row.get("memory_loss", 0.0) for row in rows]
    assert losses[0] == 0 and losses[1] > losses[2] > 0
    assert [row["memory_size"] for row in rows] == [0, 1, 2]
    assert all(np.isfinite(v) for row in rows for v in row.values())
