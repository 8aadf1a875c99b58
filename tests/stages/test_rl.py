"""The RL stage: rewards, failures, and one step with each of its settings."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsearch.evaluation.evaluator import Evaluator
from rsearch.hosts import preemption
from rsearch.learn.train_state import create_state
from rsearch.models.hf import checkpoint as huggingface
from rsearch.rollout.rollout_log import read_rollouts, stored_steps
from rsearch.runtime.journal import AppendLog
from rsearch.runtime.metrics import read_metrics
from rsearch.setup.learners import policy_optimizer
from rsearch.setup.rollouts import make_host, make_rollouts
from rsearch.setup.stages import evaluation_parts, make_score
from rsearch.setup.weights import initial_params
from rsearch.stages import rl
from rsearch.tools.search import search_use
from rsearch.types import (
    Group,
    Outcome,
    Question,
    Rollout,
    Segment,
    Source,
)
from tests.small_run import config, load_setup, quick_compilation
from tests.stages.running import learning, rl_stage, run_rl, scored

__all__ = ["quick_compilation"]
ONE_STEP = dict(stages=("rl",), rl__steps=1)
STEP_FIELDS = {
    *("empty_answers", "repeated_text", "suspicious_passages", "in_loss"),
    *("reward", "reward_answer_em", "reward_format_ok", "groups_with_spread"),
    *("searches", "tool_calls", "policy_tokens", "tokens", "compiles"),
    *("loss", "entropy", "clip_fraction", "logp_gap", "sampler_gap", "grad_norm"),
    *("forged_observations", "supporting_recall"),
    *("rollout_seconds", "reward_seconds", "update_seconds"),
    *(outcome.value for outcome in Outcome),
}


@pytest.fixture(scope="module")
def setup():
    return load_setup(config(**ONE_STEP))


@pytest.fixture(scope="module")
def compiled(setup, tmp_path_factory):
    """A stage of this setup; the tests' stages are copies that share its functions."""
    return rl_stage(setup, tmp_path_factory.mktemp("compiled"))


def segment(source, ids):
    ids = np.array(ids, np.int32)
    return Segment(source, ids, np.full(len(ids), -2.0, np.float32), "")


def rollout(answer, outcome=Outcome.ANSWERED, num_tokens=3):
    """Return a rollout of two prompt tokens and then the policy's, log-prob -2 each."""
    segments = (
        segment(Source.PROMPT, [1, 2]),
        segment(Source.POLICY, range(3, 3 + num_tokens)),
    )
    return Rollout(segments, answer, (), outcome)


def groups(*rows):
    """Return a group for each row of rollouts; the right answer is 'x'."""
    return [
        Group(Question(f"q{i}", "?", ("x",)), tuple(row)) for i, row in enumerate(rows)
    ]


TOOL = rollout("x", Outcome.TOOL_ERROR, num_tokens=5)


def with_reward(setup, judge=None, **terms):
    c = config(reward=terms, models__judge__source="any", **ONE_STEP)
    return dataclasses.replace(setup, config=c, judge=judge)


@pytest.mark.fault(13, "counted")
def test_rollouts_with_a_failed_tool_are_left_out_of_the_rewards(setup):
    setup = with_reward(setup, answer_em={"weight": 2.0})
    played = groups(
        [rollout("x"), rollout("y")], [TOOL, rollout("x", num_tokens=4)], [TOOL, TOOL]
    )
    judged, rewards, measured = scored(setup, played)
    np.testing.assert_array_equal(rewards, [[2, 0], [0, 2], [0, 0]])
    assert list(judged) == played
    assert measured["reward"] == pytest.approx((2 + 0 + 2) / 3)
    assert measured["reward_answer_em"] == pytest.approx(2 / 3)
    # The third group has no valid rollout; one of the other two has different rewards.
    assert measured["groups_with_spread"] == 1 / 2
    assert measured["tool_error"] == 3 / 6
    assert measured["answered"] == 3 / 6
    assert measured["policy_tokens"] == pytest.approx((3 + 3 + 5 + 4 + 5 + 5) / 6)
    assert measured["tokens"] == measured["policy_tokens"] + 2


def box(text):
    """Return a rollout that searched once and wrote this evidence."""
    written = f"<original_evidence>{text}</original_evidence><answer>x</answer>"
    own = dataclasses.replace(segment(Source.POLICY, [3]), text=written)
    whole = rollout("x")
    return dataclasses.replace(
        whole, segments=(whole.segments[0], own), tool_uses=(search_use(("q",), ((),)),)
    )


@pytest.mark.fault(38, "excluded")
def test_a_judge_that_fails_takes_its_rollout_out_of_the_step(setup):
    def judge(chats):
        told = [chat[-1]["content"] for chat in chats]
        return [None if "lost" in text else "x" for text in told]

    terms = {"evidence_f1": {}, "answer_em": {}}
    judging = with_reward(setup, judge, **terms)
    played = groups([box("kept"), box("lost")])
    judged, rewards, measured = scored(judging, played)
    np.testing.assert_array_equal(rewards, [[2, 0]])
    assert [r.outcome for r in judged[0].rollouts] == ["answered", "judge_error"]
    assert (measured["judge_error"], measured["answered"]) == (0.5, 0.5)
    assert measured["reward"] == 2 and measured["reward_evidence_f1"] == 1
    # If the term has a weight of 0, the rollout stays, and its NaN is in no mean.
    watching = with_reward(setup, judge, **{**terms, "evidence_f1": {"weight": 0.0}})
    judged, rewards, measured = scored(watching, played)
    np.testing.assert_array_equal(rewards, [[1, 1]])
    assert (measured["judge_error"], measured["reward_evidence_f1"]) == (0, 1)


def learn_from(setup, played, rewards, *, steps=1, **changes):
    """Learn from these rollouts; return (parameters before, after, metrics)."""
    c = config(**ONE_STEP, rl__questions_per_step=4, **changes)
    setup = dataclasses.replace(setup, config=c)
    optimizer = policy_optimizer(setup.config, "rl")
    before = initial_params(setup)
    state = create_state(before, optimizer, setup.mesh)
    for _ in range(steps):
        state, measured = learning(setup)(state, played, rewards)
    return before, state.params, measured


def largest_change(before, after):
    changes = jax.tree.map(lambda a, b: float(abs(a - b).max()), before, after)
    return max(jax.tree.leaves(changes))


@pytest.mark.fault(14, "no trained token")
def test_a_step_in_which_everything_failed_changes_nothing(setup):
    """Neither weight decay nor the momentum of the previous step changes anything."""
    good = groups(*[[rollout("x"), rollout("y")]] * 4)
    _, rewards, _ = scored(setup, good)
    optimizer = policy_optimizer(setup.config, "rl")
    state = create_state(initial_params(setup), optimizer, setup.mesh)
    state, _ = learning(setup)(state, good, rewards)
    before = jax.device_get(state)
    played = groups(*[[TOOL, TOOL]] * 4)
    _, rewards, measured = scored(setup, played)
    assert measured["reward"] is None and measured["tool_error"] == 1
    assert measured["groups_with_spread"] is None
    after, measured = learning(setup)(state, played, rewards)
    assert measured == {"in_loss": 0}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), before)


def test_a_stage_is_named_in_the_note_of_a_step_without_update(
    setup, compiled, tmp_path, capsys
):
    c = config(**ONE_STEP, reward={"answer_em": {}}, rl__mask_equal_rewards=True)
    setup = dataclasses.replace(setup, config=c)
    own = dict(config=c, score=make_score(setup), folder=tmp_path, name="rl_2")
    rl.run(dataclasses.replace(compiled, **own), initial_params(setup))
    assert "rl_2: no rollout of this step is in the loss" in capsys.readouterr().err


@pytest.mark.fault(30, "out of the loss")
def test_failed_rollouts_do_not_change_the_update_from_the_others(setup):
    good = [[rollout("x"), rollout("y", num_tokens=4)]] * 2
    rewards = np.array([[1, 0], [1, 0], [0, 0], [0, 0]], np.float32)
    failed = groups(*good, [TOOL, TOOL], [TOOL, TOOL])
    longer = dataclasses.replace(TOOL, segments=TOOL.segments * 3)
    others = groups(*good, [longer, longer], [longer, TOOL])
    _, first, measured = learn_from(setup, failed, rewards)
    _, second, _ = learn_from(setup, others, 5 + rewards * 0 + rewards)
    assert measured["grad_norm"] > 0 and measured["in_loss"] == 4 / 8
    jax.tree.map(np.testing.assert_array_equal, first, second)


def evaluated(stage, setup, folder):
    """Return a copy of the stage in a folder, with the setup's evaluation."""
    evaluator = Evaluator(**evaluation_parts(setup))

    def evaluate(params):
        return evaluator(params, "protocol")[0]

    return dataclasses.replace(stage, folder=folder, evaluate=evaluate)


def test_a_step_writes_the_expected_metrics(setup, compiled, tmp_path):
    rl.run(evaluated(compiled, setup, tmp_path), initial_params(setup))
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["searches"] == 0  # so there are no shares of searches
    assert row.keys() == {"step", *STEP_FIELDS}
    shares = [row[outcome.value] for outcome in Outcome]
    assert sum(shares) == pytest.approx(1)
    assert all(np.isfinite(v) for v in row.values())
    # The world knows which passages its questions need.
    assert row["supporting_recall"] == 0
    # The first update is on the policy that sampled: the ratio is 1 everywhere.
    assert row["clip_fraction"] == 0 and row["logp_gap"] < 1e-4
    assert row["sampler_gap"] == row["logp_gap"]
    # Its first groups are stored; the row's reward is the mean of theirs.
    assert stored_steps(tmp_path) == [0]
    stored = read_rollouts(tmp_path, 0)
    assert [(r["group"], r["rollout"]) for r in stored] == [
        (group, i) for group in range(4) for i in range(2)
    ]
    assert np.mean([r["reward"] for r in stored]) == pytest.approx(row["reward"])


def test_a_run_asked_to_stop_during_rollouts_starts_no_update(
    setup, compiled, tmp_path, monkeypatch
):
    def score(groups):
        monkeypatch.setattr(preemption, "is_stop_requested", lambda: True)
        return stage.score(groups)

    def update(*args):
        raise AssertionError("an update has begun")

    stage = dataclasses.replace(compiled, folder=tmp_path)
    trainer = dataclasses.replace(stage.trainer, update=update)
    stopped = dataclasses.replace(stage, score=score, trainer=trainer)
    with pytest.raises(preemption.PreemptedError):
        rl.run(stopped, initial_params(setup))
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_stage_killed_right_after_its_last_save_leaves_no_journal(
    setup, compiled, tmp_path, monkeypatch
):
    def clear(self):
        raise KeyboardInterrupt

    stage = dataclasses.replace(compiled, folder=tmp_path)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(AppendLog, "clear", clear)
        rl.run(stage, initial_params(setup))
    assert list(tmp_path.glob("*.journal"))
    rl.run(stage, initial_params(setup))
    assert not list(tmp_path.glob("*.journal"))


VALUE_MODEL = "PPO with a value model that first learns alone"
LOTS = dict(rl__kl_coef=0.1, rl__updates_per_step=2, rl__micro_batch=8)
SETTINGS = {
    "KL in the loss, old log-probs recomputed, mean by sequence, two updates": dict(
        rl__kl_place="loss",
        rl__kl_kind="k3",
        rl__old_logprobs="recompute",
        rl__loss_mean="sequence",
        rl__questions_per_step=8,
        rl__entropy_coef=0.01,
        **LOTS,
    ),
    "KL in the reward, no std normalization, nucleus sampling": dict(
        rl__kl_place="reward",
        rl__kl_kind="k1",
        rl__kl_coef=0.1,
        rl__normalize_std=False,
        rollout__temperature=0.7,
        rollout__top_p=0.9,
        rl__old_logprobs="recompute",
    ),
    VALUE_MODEL: dict(
        rl__algorithm="ppo",
        rl__kl_place="reward",
        rl__kl_kind="k1",
        rl__kl_coef=0.1,
        rollout__group_size=1,
        rl__questions_per_step=8,
        critic__pretrain_steps=1,
    ),
}


@pytest.mark.parametrize(
    "settings",
    [
        # tests/stages/test_learning.py pretrains a value model on hand-made rollouts.
        pytest.param(s, id=name, marks=pytest.mark.slow if name == VALUE_MODEL else ())
        for name, s in SETTINGS.items()
    ],
)
def test_every_setting_runs_and_measures_finite_numbers(tmp_path, settings):
    setup = load_setup(config(**ONE_STEP | settings | dict(rl__steps=2)))
    before = initial_params(setup)
    after = run_rl(setup, None, before, tmp_path)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert all(np.isfinite(v) for row in rows for v in row.values())
    in_loss = settings["rl__kl_place"] == "loss"
    # While the value model learns alone, in the first step, the policy is not updated.
    alone = settings.get("critic__pretrain_steps", 0)
    assert ["kl" in row for row in rows] == [not alone, True]
    assert rows[1]["compiles"] - rows[0]["compiles"] == alone
    # The sampler's probabilities equal the trainer's, up to the mass outside top_p.
    outside = -np.log(settings.get("rollout__top_p", 1.0))
    for row in rows:
        assert row["sampler_gap"] == pytest.approx(0, abs=1e-5 + outside)
        assert (row["sampler_gap"] > 1e-5) == (outside > 0)
    # Untrained policies earn no reward; only the entropy or the KL moves them.
    assert np.isfinite(largest_change(before, after))
    if in_loss:
        assert rows[1]["kl"] > 0 and largest_change(before, after) > 0
        assert rows[0]["logp_gap"] > 0  # from the second update on the same rollouts


@pytest.fixture(scope="module")
def expected_gap(setup):
    """The mean |log-prob + 2| of a rollout's tokens under the first parameters."""
    params = initial_params(setup)
    ids = np.array([[1, 2, 3, 4, 5]])
    hidden, _ = setup.model.apply({"params": params}, ids, np.arange(5)[None])
    logits = setup.model.apply({"params": params}, hidden, method="logits")
    logp = jax.nn.log_softmax(logits)[0, np.arange(1, 4), ids[0, 2:]]
    return np.mean(np.abs(logp + 2))


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(rl__old_logprobs="recompute", rl__mask_retrieved=False),
        dict(rl__updates_per_step=2, rl__micro_batch=4),
    ],
)
def test_the_sampler_gap_is_measured_whatever_the_old_log_probs_are(
    setup, expected_gap, settings
):
    """The rollouts give each sampled token a log-probability of -2."""
    actual = dataclasses.replace(segment(Source.SEARCH, [7, 8]), logp=np.zeros(2))
    one = rollout("x")
    one = dataclasses.replace(one, segments=(*one.segments, actual))
    played = groups(*[[one, rollout("y")]] * 4)
    rewards = np.array([[1, 0]] * 4, np.float32)
    _, _, measured = learn_from(setup, played, rewards, **settings)
    assert measured["sampler_gap"] == pytest.approx(expected_gap, rel=1e-4)


def test_int8_rollouts_are_corrected_by_the_policys_own_log_probs(tmp_path):
    settings = dict(rollout__int8_kernels=True, rl__entropy_coef=0.01)
    corrected = dict(rl__old_logprobs="recompute", rl__tis_cap=2.0)
    setup = load_setup(config(**ONE_STEP | settings | corrected))
    before = initial_params(setup)
    after = run_rl(setup, None, before, tmp_path)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert 1e-5 < row["sampler_gap"] < 0.1
    # The ratio compares the policy with itself, not with the kernels that sampled.
    assert row["clip_fraction"] == 0 and row["logp_gap"] < 1e-5
    assert largest_change(before, after) > 0
    # Evaluations use the policy without quantization.
    engine = functools.partial(
        make_rollouts, setup, make_host(setup), temperature=1.0, top_p=1.0
    )
    for is_step, dtype in (True, jnp.int8), (False, jnp.float32):
        placed = engine(group_size=1, is_step=is_step).place_params(before)
        assert placed["layers"]["down"].dtype == dtype


def test_the_k2_estimator_works_too(setup):
    played = groups(*[[rollout("x"), rollout("y")]] * 4)
    rewards = np.array([[1, 0]] * 4, np.float32)
    c = config(**ONE_STEP, rl__kl_coef=0.5, rl__kl_kind="k2")
    setup = dataclasses.replace(setup, config=c)
    optimizer = policy_optimizer(setup.config, "rl")
    params = initial_params(setup)
    state = create_state(params, optimizer, setup.mesh)
    reference = jax.tree.map(lambda x: 1.1 * x, params)
    learn = learning(setup, reference=reference)
    state, measured = learn(state, played, rewards)
    assert measured["kl"] > 0 and measured["grad_norm"] > 0
    # With the policy as its own reference there is no divergence at all.
    same = jax.tree.map(lambda x: 1.0 * x, state.params)
    _, measured = learn(state, played, rewards, reference=same)
    assert measured["kl"] == pytest.approx(0, abs=1e-9)


def test_dev_scores_are_measured_during_training_and_compile_once(
    setup, compiled, tmp_path
):
    c = config(**ONE_STEP | dict(rl__steps=4), eval__every_steps=2)
    setup = dataclasses.replace(setup, config=c)
    stage = evaluated(compiled, setup, tmp_path)
    rl.run(dataclasses.replace(stage, config=c), initial_params(setup))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert ["dev_em" in row for row in rows] == [False, True, False, True]
    assert rows[2]["compiles"] == rows[3]["compiles"]


def test_r_search_learns_from_its_judge(tmp_path, setup):
    """The judge is the untrained policy itself, exported and loaded again."""
    folder = tmp_path / "judge"
    params = initial_params(setup)
    huggingface.export(folder, params, setup.model.spec, setup.tokenizer)
    terms = {"answer_f1": {}, "evidence_f1": {}, "r_search_format": {}}
    c = config(
        **ONE_STEP,
        protocol__name="r_search",
        reward=terms,
        models__judge__source=str(folder),
        models__judge__max_prompt_tokens=300,
        models__judge__max_reply_tokens=4,
        models__judge__max_concurrent=8,
        rl__kl_coef=0.001,
    )
    judged = load_setup(c)
    calls = []

    def judge(chats):
        replies = judged.judge(chats)
        calls.extend(replies)
        return replies

    judging = dataclasses.replace(judged, judge=judge)
    run_rl(judging, None, initial_params(judged), tmp_path / "r")
    (row,) = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert {f"reward_{name}" for name in terms} <= row.keys()
    assert all(np.isfinite(v) for v in row.values())
    # This policy writes no evidence; a rollout that does is judged like this.
    _, rewards, measured = scored(judging, groups([box("a"), box("b")]))
    assert len(calls) == 2 and all(isinstance(reply, str) for reply in calls)
    assert measured["judge_error"] == 0 and np.isfinite(rewards).all()
    json.dumps(measured, allow_nan=False)
