"""Rollouts one step ahead: the policy that samples them, and how they survive stops."""

import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest

from rsearch.config.recipes import apply_overrides
from rsearch.hosts import preemption
from rsearch.rollout.records import Rewarded, encode_rewarded
from rsearch.rollout.rollout_log import read_rollouts
from rsearch.runtime import checkpoint, journal
from rsearch.runtime.metrics import read_metrics
from rsearch.setup import load
from rsearch.setup.weights import initial_params
from rsearch.stages import rl
from rsearch.stages.ahead import PendingStep, RolloutsAhead
from rsearch.types import Group, Outcome, Question, Rollout, Segment, Source
from tests.small_run import config, quick_compilation, without_times
from tests.stages.running import rl_stage

__all__ = ["quick_compilation"]
STEPS = 4
QUESTIONS = [Question(f"q{i}", "?", ("x",)) for i in range(2)]


@pytest.fixture(scope="module")
def setup():
    """A setup in which half of the devices train and half generate rollouts."""
    ahead = dict(rl__max_staleness=1, rollout__devices=jax.device_count() // 2)
    saves = dict(rl__steps=STEPS, checkpoint__rl_steps=2)
    return load.load_setup(config(stages=("rl",), **ahead, **saves))


@pytest.fixture(scope="module")
def stage(setup, tmp_path_factory):
    """A stage whose rewards differ, although its policy never answers.

    Stages in other folders are copies of it, which share its compiled functions.
    """
    stage = rl_stage(setup, tmp_path_factory.mktemp("stage"))

    def score(groups):
        _, terms, groups = stage.score(groups)
        sums = [[r.segments[1].token_ids.sum() for r in g.rollouts] for g in groups]
        return np.float32(np.array(sums) % 7), terms, groups

    return dataclasses.replace(stage, score=score)


@pytest.fixture(scope="module")
def uninterrupted(setup, stage):
    """(folder, parameters) of the stage, run without an interruption."""
    return stage.folder, rl.run(stage, initial_params(setup))


def test_training_and_rollouts_use_separate_halves_of_the_devices(setup):
    learning = {d.id for d in setup.mesh.devices.flat}
    sampling = {d.id for d in setup.rollout_mesh.devices.flat}
    assert len(learning) == len(sampling) == jax.device_count() // 2
    assert not learning & sampling


def test_a_step_learns_from_rollouts_of_the_policy_one_step_before(uninterrupted):
    folder, _ = uninterrupted
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["staleness"] for row in rows] == [0, 1, 1, 1]
    # In the first step the sampling policy is the learning one, up to rounding.
    gaps = [row["sampler_gap"] for row in rows]
    assert gaps[0] < 1e-4 < min(gaps[1:])
    stored = [read_rollouts(folder, step)[0] for step in range(STEPS)]
    assert [row["policy_version"] for row in stored] == [0, 0, 1, 2]
    policies = [row["params"] for row in stored]
    assert policies[0] == policies[1] and len({*policies}) == 3


@pytest.mark.parametrize(
    "num_scored", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4)), 3]
)
def test_a_stage_that_was_stopped_ends_as_if_it_had_not_been(
    setup, stage, uninterrupted, tmp_path, monkeypatch, num_scored
):
    """The stop comes when the thread has scored the rollouts of `num_scored` steps.

    The resumed stage has other values of fields that rollouts do not depend on.
    """
    stage = dataclasses.replace(stage, folder=tmp_path)
    scored = []

    def score(groups):
        scored.append(groups)
        if len(scored) == num_scored:
            monkeypatch.setattr(preemption, "is_stop_requested", lambda: True)
        return stage.score(groups)

    with pytest.raises(preemption.PreemptedError):
        rl.run(dataclasses.replace(stage, score=score), initial_params(setup))
    monkeypatch.undo()
    changes = {"checkpoint.keep": 3, "guards.patience": 9, "eval.examples": 1}
    changes |= {"log_every": 2, "data.max_dev": 3, "retrieval.outage_seconds": 9.0}
    changed = apply_overrides(setup.config, changes)
    resumed = dataclasses.replace(stage, config=changed)
    params = rl.run(resumed, initial_params(setup))
    folder, expected = uninterrupted
    assert jax.tree.all(jax.tree.map(np.array_equal, params, expected))
    rows, expected_rows = (
        without_times(read_metrics(path / "metrics.jsonl"))
        for path in (tmp_path, folder)
    )
    assert rows == expected_rows
    for step in range(STEPS):
        assert read_rollouts(tmp_path, step) == read_rollouts(folder, step)


def test_an_outage_while_a_checkpoint_waits_for_rollouts_loses_nothing(
    setup, stage, uninterrupted, tmp_path, monkeypatch
):
    """By then the update has reused the buffers of the previous state."""
    stage = dataclasses.replace(stage, folder=tmp_path)
    scored, updated = [], threading.Event()
    update_policy = rl.update_policy

    def update(*args, step, **settings):
        result = update_policy(*args, step=step, **settings)
        if step == 2:
            updated.set()
        return result

    def score(groups):
        scored.append(groups)
        if len(scored) == 4:
            assert updated.wait(60)
            raise preemption.OutageError("away")
        return stage.score(groups)

    monkeypatch.setattr(rl, "update_policy", update)
    with pytest.raises(preemption.OutageError):
        rl.run(dataclasses.replace(stage, score=score), initial_params(setup))
    monkeypatch.undo()
    assert checkpoint.steps(tmp_path / checkpoint.FOLDER) == [2]
    params = rl.run(stage, initial_params(setup))
    assert jax.tree.all(jax.tree.map(np.array_equal, params, uninterrupted[1]))


def scored_groups():
    segment = Segment(Source.POLICY, np.int32([3, 4]), np.float32([-0.1, -np.inf]), "a")
    rollout = Rollout((segment,), "x", (), Outcome.ANSWERED)
    rewards = np.float32([0.1, 0.7])
    return [
        Rewarded(Group(q, (rollout, rollout)), rewards, {"em": rewards})
        for q in QUESTIONS
    ]


def begin(ahead, sample, step=2, attempt=0):
    ahead.begin(PendingStep(sample, "ab"), step, attempt, version=step - 1)


def test_the_rollouts_that_a_checkpoint_needs_are_stored_before_it(
    tmp_path, monkeypatch
):
    done = threading.Event()
    metrics = {"reward": float("nan"), "searches": 1.5, "questions_asked": None}

    def sample():
        assert done.wait(60)
        return scored_groups(), metrics

    with RolloutsAhead(tmp_path, "made", QUESTIONS) as ahead:
        assert ahead.store(2) and not list(tmp_path.iterdir())  # nothing has begun
        begin(ahead, sample)
        assert not ahead.store(2)  # a checkpoint of step 2 needs these
        done.set()
        ahead.wait()
        assert ahead.store(2)
        sampled = ahead.take(2, 0)
    again = RolloutsAhead(tmp_path, "made", QUESTIONS)
    assert again.restore(2, 0) and again.store(2)
    restored = again.take(2, 0)
    assert encode_rewarded(restored.scored) == encode_rewarded(sampled.scored)
    assert (restored.params, restored.version) == ("ab", 1)
    np.testing.assert_equal(restored.metrics, metrics)
    # Another configuration, step or attempt has other rollouts.
    assert not RolloutsAhead(tmp_path, "other", QUESTIONS).restore(2, 0)
    assert not again.restore(2, 1) and not again.restore(3, 0)
    # They are deleted together with their checkpoint.
    monkeypatch.setattr(checkpoint, "steps", lambda folder: [2])
    again.store(4)
    assert [path.name for path in tmp_path.iterdir()] == ["ahead_2-0.journal"]
    monkeypatch.setattr(checkpoint, "steps", lambda folder: [4])
    again.store(4)
    assert not list(tmp_path.iterdir())


def test_rollouts_that_the_disk_refuses_are_stored_at_the_next_try(
    tmp_path, monkeypatch
):
    with RolloutsAhead(tmp_path, "made", QUESTIONS) as ahead:
        begin(ahead, lambda: (scored_groups(), {}))
        ahead.wait()

        append = journal.files.append

        def refuse_above(limit, file, data):
            if len(data) > limit:
                raise OSError(28, "No space left on device")
            append(file, data)

        # 300 bytes are too few for the groups, but enough for their description.
        for limit in (0, 300):
            with monkeypatch.context() as patched:
                refuse = functools.partial(refuse_above, limit)
                patched.setattr(journal.files, "append", refuse)
                with pytest.raises(OSError, match="rollouts of step 3 are") as error:
                    ahead.store(2)
            assert error.value.filename == str(tmp_path)
        assert ahead.store(2)
    assert RolloutsAhead(tmp_path, "made", QUESTIONS).restore(2, 0)


def test_rollouts_of_a_step_that_was_undone_are_dropped(tmp_path):
    with RolloutsAhead(tmp_path, "made", QUESTIONS) as ahead:
        begin(ahead, lambda: (scored_groups(), {}), step=5)
        assert ahead.take(2, 1) is None
        assert ahead.store(2) and ahead.take(5, 0) is None


def test_a_failure_in_the_thread_is_raised_and_nothing_is_stored(tmp_path):
    def fail():
        raise OSError("the service is gone")

    with RolloutsAhead(tmp_path, "made", QUESTIONS) as ahead:
        begin(ahead, fail)
        for wait in (ahead.wait, lambda: ahead.take(2, 0)):
            with pytest.raises(OSError, match="the service is gone"):
                wait()
            begin(ahead, fail)
        with pytest.raises(OSError):
            ahead.wait()
        assert not ahead.store(2)


def test_a_stage_that_fails_does_not_wait_for_the_next_rollouts(tmp_path):
    def sample():
        while True:  # as a rollout engine does between two tokens
            ahead.check()

    ahead = RolloutsAhead(tmp_path, "made", QUESTIONS)
    with pytest.raises(KeyError), ahead:
        begin(ahead, sample)
        raise KeyError
