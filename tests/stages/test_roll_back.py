"""Roll-backs: collapsed steps are undone, and the run continues from before them."""

import dataclasses
import gc
import itertools
import shutil

import jax
import numpy as np
import pytest

from rsearch.config.recipes import StoppedError
from rsearch.hosts import preemption
from rsearch.hosts.preemption import PreemptedError
from rsearch.rollout.records import Rewarded
from rsearch.runtime import checkpoint
from rsearch.runtime.checkpoint import FOLDER as CHECKPOINTS
from rsearch.runtime.jsonl import read_jsonl
from rsearch.runtime.metrics import MetricsLog, read_metrics
from rsearch.runtime.run_directory import LostDirectoryError
from rsearch.setup.learners import state_shapes
from rsearch.setup.weights import initial_params
from rsearch.stages import rl, state
from rsearch.stages.state import StageState
from tests.small_run import config, load_setup, quick_compilation, without_times
from tests.stages.running import rl_stage
from tests.stages.test_rl import ONE_STEP, groups, rollout

__all__ = ["quick_compilation"]
STEPS = {"rl__steps": 6, "checkpoint__rl_steps": 1, "checkpoint__keep": 9}
BOUND = {"guards__max_empty": 0.5, "guards__patience": 2}
OWN = ONE_STEP | STEPS | BOUND | {"guards__on_collapse": "roll_back"}


def made_up(questions):
    """Return a group with one right rollout for each question, without a policy."""
    played = groups(*[[rollout("x"), rollout("y")]] * len(questions))
    return [
        Rewarded(dataclasses.replace(group, question=question), np.float32([1, 0]), {})
        for question, group in zip(questions, played, strict=True)
    ]


def collapsing(monkeypatch, beyond, *, rolls_out=False):
    """Make those steps exceed the bound for which beyond(step, roll-backs so far)."""
    taken, real = [], rl.sample_groups

    def sample_groups(play, questions, *, step, attempt, **settings):
        play = play if rolls_out else made_up
        settings |= {"step": step, "attempt": attempt}
        scored, metrics = real(play, questions, **settings)
        taken.append((step, [r.group.question.id for r in scored]))
        metrics["empty_answers"] = 0.9 if beyond(step, attempt) else 0.1
        return scored, metrics

    monkeypatch.setattr(rl, "sample_groups", sample_groups)
    return taken


@pytest.fixture(scope="module")
def setup():
    return load_setup(config(**OWN))


@pytest.fixture(scope="module")
def compiled(setup, tmp_path_factory):
    """(stage, parameters); the tests' stages are copies with the same functions."""
    return rl_stage(setup, tmp_path_factory.mktemp("compiled")), initial_params(setup)


@pytest.fixture
def collapse_of(compiled, tmp_path, monkeypatch):
    """A function that returns (stage, parameters, list that gets the steps taken)."""

    def collapse(beyond, *, rolls_out=False, **settings):
        stage, params = compiled
        c = config(**OWN | settings)
        taken = collapsing(monkeypatch, beyond, rolls_out=rolls_out)
        return dataclasses.replace(stage, config=c, folder=tmp_path), params, taken

    return collapse


def test_a_collapse_is_rolled_back_and_other_draws_follow(
    collapse_of, tmp_path, capsys
):
    def beyond(step, before):
        return step in (2, 3) and not before

    stage, params, taken = collapse_of(beyond)
    rl.run(stage, params)
    assert [step for step, _ in taken] == [0, 1, 2, 3, 2, 3, 4, 5]
    first, second = (dict(taken[a:b]) for a, b in ((2, 4), (4, 6)))
    assert all(first[step] != second[step] for step in (2, 3))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(6))
    assert all(row["empty_answers"] == 0.1 for row in rows)
    undone = read_jsonl(tmp_path / "rolled_back.jsonl")
    told = [(r["step"], r["empty_answers"], r["roll_back"]) for r in undone]
    assert told == [(2, 0.9, 1), (3, 0.9, 1)]
    folder = tmp_path / CHECKPOINTS
    assert {p.name for p in folder.iterdir()} == {
        *"123456",
        "3.collapsed",  # later collapsed steps are not saved
    }
    checkpoint.verify(folder, 3)
    assert "rolled back to step 2" in capsys.readouterr().err


def test_a_collapse_in_the_first_steps_goes_back_to_the_beginning(collapse_of):
    def beyond(step, before):
        return not before and step < 2

    own = {"checkpoint__rl_steps": 2}
    stage, params, taken = collapse_of(beyond, **own)
    rl.run(stage, params)
    assert [step for step, _ in taken] == [0, 1, 0, 1, 2, 3, 4, 5]


def test_a_stage_stops_after_max_roll_backs(collapse_of):
    own = {"guards__max_roll_backs": 1}
    stage, params, taken = collapse_of(lambda step, _: step > 0, **own)
    with pytest.raises(StoppedError, match="rolled back 1 times"):
        rl.run(stage, params)
    assert [step for step, _ in taken] == [0, 1, 2, 1, 2]
    with pytest.raises(StoppedError, match="rolled back 1 times"):
        rl.run(stage, params)  # a file counts them


def test_a_stage_stops_if_no_checkpoint_from_before_the_collapse_is_left(
    collapse_of, tmp_path
):
    def beyond(step, _):
        if step == 3:
            shutil.rmtree(tmp_path / CHECKPOINTS / "2")
        return step > 1

    stage, params, _ = collapse_of(beyond, checkpoint__keep=1)
    with pytest.raises(StoppedError, match="no checkpoint from before step 3 is left"):
        rl.run(stage, params)


@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_checkpoint_is_kept_as_long_as_a_roll_back_may_need_it(
    collapse_of, tmp_path, keep
):
    """Saves of steps that exceed the bound, or measure nothing, do not delete it."""

    def beyond(step, before):
        return 1 < step < 5 and not before

    own = {"checkpoint__keep": keep, "guards__patience": 3}
    stage, params, taken = collapse_of(beyond, **own)
    rl.run(stage, params)
    assert [step for step, _ in taken] == [*range(5), *range(2, 6)]
    actual = checkpoint.steps(tmp_path / CHECKPOINTS)
    assert actual == [*range(7 - keep, 7)]  # and is deleted afterwards


def test_saving_a_step_before_its_check_keeps_the_previous_checkpoint(
    collapse_of, tmp_path
):
    stage, params, _ = collapse_of(lambda *_: False, checkpoint__keep=1)
    progress = StageState(stage.config, "rl", stage.trainer, params, tmp_path)
    state = progress.train_state
    for owed in ({"empty_answers": 0.1}, {"empty_answers": 0.9}):
        with pytest.raises(PreemptedError), progress.save_on_preemption():
            progress.advance(state, pending_metrics=owed)
            raise PreemptedError("told to stop")
    assert checkpoint.steps(tmp_path / CHECKPOINTS) == [1, 2]


@pytest.mark.parametrize("first", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_two_checkpoints_are_enough_to_go_back(collapse_of, first):
    """Whichever step first exceeds the bound, no save deletes the one before it."""

    def beyond(step, before):
        return step >= first and not before

    own = {"checkpoint__keep": 2, "checkpoint__rl_steps": 2, "guards__patience": 3}
    stage, params, taken = collapse_of(beyond, **own)
    rl.run(stage, params)
    assert [step for step, _ in taken] == [*range(first + 3), *range(2, 6)]


@pytest.mark.slow
def test_a_roll_back_never_holds_two_states_in_memory(setup, collapse_of, monkeypatch):
    stage, params, _ = collapse_of(lambda step, before: step in (2, 3) and not before)
    sizes, real = [], checkpoint.restore

    def restore(*given, **settings):
        sizes.append(held())
        return real(*given, **settings)

    def held():
        gc.collect()
        return sum(x.nbytes for x in jax.live_arrays())

    monkeypatch.setattr(checkpoint, "restore", restore)
    before = held()
    rl.run(stage, params)
    shapes = state_shapes(setup, "rl")
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    assert len(sizes) == 1 and sizes[0] - before < state / 2


KILLS = [  # (object, function, which of its calls ends the run, from 0; error)
    (checkpoint, "set_aside", 1, KeyboardInterrupt),
    (state, "write_jsonl", 0, LostDirectoryError),
    (MetricsLog, "rewind", 1, KeyboardInterrupt),
    (checkpoint, "save", 0, KeyboardInterrupt),  # the first after the roll-back
]


def test_a_roll_back_that_is_killed_anywhere_gives_the_same_result(
    collapse_of, tmp_path, monkeypatch
):
    def beyond(step, before):
        return step in (2, 3, 4) and not before

    stage, params, taken = collapse_of(beyond, guards__patience=3, rolls_out=True)
    killed = dataclasses.replace(stage, folder=tmp_path / "killed")
    whole = rl.run(stage, params)
    undisturbed = taken.copy()
    taken.clear()
    for owner, name, number, error in KILLS:
        calls, real = itertools.count(), getattr(owner, name)

        def dying(*given, calls=calls, real=real, number=number, error=error, **named):
            if next(calls) == number:
                raise error
            return real(*given, **named)

        with monkeypatch.context() as patched, pytest.raises(error):
            patched.setattr(owner, name, dying)
            rl.run(killed, params)
    again = rl.run(killed, params)
    steps = [*range(5), 4, *range(2, 5), *range(2, 6)]
    assert [step for step, _ in taken] == steps
    assert taken[-4:] == undisturbed[-4:]
    jax.tree.map(np.testing.assert_array_equal, again, whole)
    for file in ("metrics.jsonl", "rolled_back.jsonl"):
        rows = (without_times(read_jsonl(s.folder / file)) for s in (killed, stage))
        assert next(rows) == next(rows)


@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stage_goes_back_to_the_same_step_if_a_stop_has_saved_another(
    collapse_of, tmp_path, monkeypatch, keep
):
    def beyond(step, before):
        return step in (3, 4) and not before

    own = {"checkpoint__keep": keep, "checkpoint__rl_steps": 2}
    stage, params, taken = collapse_of(beyond, **own)
    stopped = dataclasses.replace(stage, folder=tmp_path / "stopped")
    whole = rl.run(stage, params)
    undisturbed = taken.copy()
    taken.clear()
    real = rl.update_policy
    with monkeypatch.context() as patched:

        def update(*given, step, **settings):
            if step == 2:
                patched.setattr(preemption, "is_stop_requested", lambda: True)
            return real(*given, step=step, **settings)

        patched.setattr(rl, "update_policy", update)
        with pytest.raises(PreemptedError):
            rl.run(stopped, params)
    assert checkpoint.steps(stopped.folder / CHECKPOINTS) == [2, 3]
    again = rl.run(stopped, params)
    assert taken == undisturbed
    jax.tree.map(np.testing.assert_array_equal, again, whole)
