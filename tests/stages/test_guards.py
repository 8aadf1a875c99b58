"""Numbers that go wrong: nothing is learnt from them; they are kept; a run stops."""

import gc
import math
import shutil

import jax
import numpy as np
import pytest

from rsearch import build, checkpoint
from rsearch.config import StoppedError
from rsearch.evaluate import CHECKPOINTS
from rsearch.metrics import read as read_metrics
from rsearch.stages import rl, sft
from rsearch.stages.guards import FOLDER, Guards
from rsearch.stages.learning import Learning
from rsearch.stages.state import Progress
from rsearch.workdir import read_rows
from tests.small_run import config, load_setup, quick_compilation
from tests.stages.test_rl import ONE_STEP, groups, rollout

__all__ = ["quick_compilation"]
FINE, BAD = {"grad_norm": 1.0}, {"grad_norm": math.nan}
PARAMS = {"layers": {"q": np.ones(3)}, "norm": np.ones(2)}


def guards(folder, **settings):
    names = {f"guards__{name}": value for name, value in settings.items()}
    return Guards(config(**names), "rl", folder)


def test_updates_left_out_are_counted_in_a_row_and_then_it_stops(tmp_path, capsys):
    own = guards(tmp_path, max_skipped=2, dumps=2)
    batch = {"tokens": np.arange(4)}
    assert own.look(0, BAD, batch, PARAMS)
    assert not own.look(1, FINE, batch, PARAMS)
    assert own.look(2, {"critic_grad_norm": math.inf}, batch, PARAMS)
    with pytest.raises(StoppedError) as error:
        own.look(3, BAD, batch, PARAMS)
    assert "2 updates in a row" in str(error.value)
    assert "all parameters are finite" in str(error.value)
    assert "since step 3" in str(error.value)
    told = capsys.readouterr().err
    assert "grad_norm = nan; all parameters are finite; this update is left" in told
    kept = sorted((tmp_path / FOLDER).glob("*.npz"))
    assert [path.name for path in kept] == ["0-1.npz", "2-1.npz"]
    with np.load(kept[0], allow_pickle=False) as found:
        np.testing.assert_array_equal(found["tokens"], batch["tokens"])


def test_the_parameter_that_is_not_finite_is_named(tmp_path):
    own = guards(tmp_path, max_skipped=1, dumps=0)
    broken = {"layers": {"q": np.array([1.0, np.nan])}, "norm": np.ones(2)}
    with pytest.raises(StoppedError, match=r"is the parameter layers\.q"):
        own.look(0, BAD, {}, broken)
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.parametrize(
    ("bound", "measured"),
    [
        ({"min_entropy": 0.5}, {"entropy": 0.4}),
        ({"max_empty": 0.5}, {"empty_answers": 0.6}),
        ({"max_repeated": 0.5}, {"repeated_text": 0.6}),
        ({"max_kl": 0.5}, {"kl": 0.6}),
        ({"max_clipped": 0.5}, {"clip_fraction": 0.6}),
    ],
)
def test_a_policy_that_collapses_is_told_of_or_stopped(
    tmp_path, capsys, bound, measured
):
    fine = dict.fromkeys(measured, 0.5)
    own = guards(tmp_path, patience=2, **bound)
    for values in (measured, fine, measured):
        assert own.check(0, values) is None
    assert "config.guards" not in capsys.readouterr().err
    assert own.check(1, measured) is None
    told = f"config.guards.{next(iter(bound))} = 0.5"
    assert told in capsys.readouterr().err
    own = guards(tmp_path, patience=2, on_collapse="stop", **bound)
    assert own.check(6, measured) is None
    collapse = own.check(7, measured)
    assert told in collapse.told and "for 2 steps in a row" in collapse.told
    assert collapse.first_step == 6


def test_what_teaches_nothing_tells_nothing_and_what_is_no_number_is_beyond(tmp_path):
    """Once a policy has collapsed its rollouts are all alike."""
    own = guards(tmp_path, patience=3, on_collapse="stop", min_entropy=0.5)
    for step, measured in enumerate([{"entropy": 0.4}, {"in_loss": 0.0}] * 2):
        assert own.check(step, measured) is None
    collapse = own.check(4, {"entropy": math.nan})
    assert collapse.first_step == 0 and "entropy = nan" in collapse.told
    assert own.check(5, {"entropy": 0.6}) is None
    assert own.check(6, {"entropy": 0.4}) is None


def test_without_bounds_nothing_collapses(tmp_path, capsys):
    own = guards(tmp_path, on_collapse="stop", patience=1)
    numbers = {"entropy": 0.0, "empty_answers": 1.0, "kl": 1e9}
    assert own.check(0, numbers) is None
    assert not capsys.readouterr().err


def test_what_was_counted_goes_on(tmp_path):
    own, other = guards(tmp_path, max_skipped=2), guards(tmp_path, max_skipped=2)
    own.look(0, BAD, {}, PARAMS)
    other.restore(own.state())
    with pytest.raises(StoppedError):
        other.look(1, BAD, {}, PARAMS)


def test_all_that_guards_count_is_in_their_state(tmp_path):
    """A count that a run which goes on began anew would end it elsewhere."""
    own, other = (guards(tmp_path, max_kl=0.5, patience=9) for _ in range(2))
    own.look(0, BAD, {}, PARAMS)
    own.check(3, {"kl": 1.0})
    changed = {n for n, v in vars(own).items() if v != vars(other)[n]}
    assert changed == {f"_{name}" for name in own.state()} != set()
    other.restore(own.state())
    assert other.state() == own.state()


@pytest.fixture(scope="module")
def setup():
    return load_setup(config(**ONE_STEP, guards__max_skipped=2))


@pytest.mark.fault(38, "NaN")
def test_a_step_with_bad_rewards_changes_no_bit(setup, tmp_path):
    own = Guards(setup.config, "rl", tmp_path)
    learner, _ = build.make_learner(setup, "rl")
    state = build.fresh_state(setup, "rl", build.initial_params(setup))
    before = jax.device_get(state)
    played = groups(*[[rollout("x"), rollout("y", num_tokens=4)]] * 4)
    rewards = np.tile(np.array([[1.0, np.inf]], np.float32), (4, 1))
    learning = Learning(setup, learner, guards=own)
    state, measured = learning(state, played, rewards)
    assert measured == {"in_loss": 0}
    after = jax.device_get(state)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert list((tmp_path / FOLDER).glob("*.npz"))
    with pytest.raises(StoppedError):
        learning(state, played, rewards)


def test_a_stage_that_stops_keeps_its_last_checkpoint(tmp_path, monkeypatch):
    """And says in which step; a run that goes on has counted what was before."""
    setup = load_setup(
        config(**ONE_STEP | dict(rl__steps=4), guards__max_skipped=2, rl__kl_coef=0.0)
    )
    params = build.initial_params(setup)
    told = rl.rewarded

    def broken(setup, played):
        found = told(setup, played)
        if len(read_metrics(tmp_path / "metrics.jsonl")) < 1:
            return found
        return [one._replace(rewards=one.rewards + np.inf) for one in found]

    monkeypatch.setattr(rl, "rewarded", broken)
    with pytest.raises(StoppedError, match="in step 3"):
        rl.run(setup, None, params, tmp_path)
    assert checkpoint.latest(tmp_path / CHECKPOINTS) == 2
    progress = Progress(setup, "rl", params, tmp_path)
    assert progress.guards.state()["skipped"] == 1


def test_a_supervised_stage_stops_likewise(tmp_path):
    setup = load_setup(config(stages=("sft",), sft__steps=6, guards__max_skipped=3))
    rollouts = build.replay_demonstrations(setup)
    params = jax.tree.map(lambda x: x * np.nan, build.initial_params(setup))
    with pytest.raises(StoppedError, match="sft: 3 updates in a row"):
        sft.run(setup, rollouts, params, tmp_path)
    assert len(list((tmp_path / FOLDER).glob("*.npz"))) == 3


@pytest.mark.fault(29, "step aborted", "parameter named")
def test_a_policy_whose_logits_are_not_finite_samples_and_teaches_nothing(
    tmp_path, capsys
):
    """Nothing hangs; the parameter is named with the first step, and it stops."""
    run = dict(rl__steps=9, guards__max_skipped=2, rl__kl_coef=0.0)
    setup = load_setup(config(**ONE_STEP | run))
    params = build.initial_params(setup)
    scale = params["layers"]["attention"]["q"]
    params["layers"]["attention"]["q"] = scale.at[0, 0].set(np.nan)
    told = r"the first that is not finite is the parameter layers\.attention\.q"
    with pytest.raises(StoppedError, match=told):
        rl.run(setup, None, params, tmp_path)
    first = capsys.readouterr().err
    assert f"rl: step 1: grad_norm = nan; {told}".replace("\\", "") in first


STEPS = {"rl__steps": 6, "checkpoint__rl_steps": 1, "checkpoint__keep": 9}
BOUND = {"guards__max_empty": 0.5, "guards__patience": 2}


def collapsing(monkeypatch, beyond):
    """Has steps be beyond the bound: beyond(step, how often it was taken before)."""
    taken, told = [], rl.together

    def measure(found):
        groups, rewards, measured = told(found)
        ids = [group.question.id for group in groups]
        step = measure.step
        before = sum(one == step for one, _ in taken)
        taken.append((step, ids))
        measured["empty_answers"] = 0.9 if beyond(step, before) else 0.1
        return groups, rewards, measured

    real = rl.gather

    def gather(setup, play, step, **settings):
        measure.step = step
        return real(setup, play, step, **settings)

    monkeypatch.setattr(rl, "together", measure)
    monkeypatch.setattr(rl, "gather", gather)
    return taken


def collapse_of(monkeypatch, tmp_path, beyond, **settings):
    """Steps that were taken, in order, of a stage that rolls back."""
    own = ONE_STEP | STEPS | BOUND | {"guards__on_collapse": "roll_back"} | settings
    setup = load_setup(config(**own))
    taken = collapsing(monkeypatch, beyond)
    params = build.initial_params(setup)
    return setup, params, taken


def test_a_collapse_is_rolled_back_and_other_draws_follow(
    tmp_path, monkeypatch, capsys
):
    def beyond(step, before):
        return step in (2, 3) and not before

    setup, params, taken = collapse_of(monkeypatch, tmp_path, beyond)
    rl.run(setup, None, params, tmp_path)
    assert [step for step, _ in taken] == [0, 1, 2, 3, 2, 3, 4, 5]
    first, second = (dict(taken[a:b]) for a, b in ((2, 4), (4, 6)))
    assert all(first[step] != second[step] for step in (2, 3))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(6))
    assert all(row["empty_answers"] == 0.1 for row in rows)
    undone = read_rows(tmp_path / "rolled_back.jsonl")
    told = [(r["step"], r["empty_answers"], r["roll_back"]) for r in undone]
    assert told == [(2, 0.9, 1), (3, 0.9, 1)]
    folder = tmp_path / CHECKPOINTS
    assert {p.name for p in folder.iterdir()} == {
        *"123456",
        "3.collapsed",  # what has collapsed is not saved again
    }
    checkpoint.verify(folder, 3)
    assert "rolled back to step 2" in capsys.readouterr().err


def test_a_collapse_in_the_first_steps_goes_back_to_the_beginning(
    tmp_path, monkeypatch
):
    def beyond(step, before):
        return not before and step < 2

    own = {"checkpoint__rl_steps": 2}
    setup, params, taken = collapse_of(monkeypatch, tmp_path, beyond, **own)
    rl.run(setup, None, params, tmp_path)
    assert [step for step, _ in taken] == [0, 1, 0, 1, 2, 3, 4, 5]


def test_after_so_many_roll_backs_it_stops(tmp_path, monkeypatch):
    own = {"guards__max_roll_backs": 1}
    always = collapse_of(monkeypatch, tmp_path, lambda step, _: step > 0, **own)
    setup, params, taken = always
    with pytest.raises(StoppedError, match="rolled back 1 times"):
        rl.run(setup, None, params, tmp_path)
    assert [step for step, _ in taken] == [0, 1, 2, 1, 2]
    with pytest.raises(StoppedError, match="rolled back 1 times"):
        rl.run(setup, None, params, tmp_path)  # what counts them is a file


def test_where_nothing_from_before_is_kept_it_stops(tmp_path, monkeypatch):
    def beyond(step, _):
        if step == 3:
            shutil.rmtree(tmp_path / CHECKPOINTS / "2")
        return step > 1

    own = {"checkpoint__keep": 2}
    setup, params, _ = collapse_of(monkeypatch, tmp_path, beyond, **own)
    with pytest.raises(StoppedError, match=r"before step 3 is kept.*keep = 2"):
        rl.run(setup, None, params, tmp_path)


@pytest.mark.parametrize("first", [2, 3])
def test_two_checkpoints_are_enough_to_go_back(tmp_path, monkeypatch, first):
    """Whichever step is the first beyond: a save would let the one before it go."""

    def beyond(step, before):
        return step >= first and not before

    own = {"checkpoint__keep": 2, "checkpoint__rl_steps": 2, "guards__patience": 3}
    setup, params, taken = collapse_of(monkeypatch, tmp_path, beyond, **own)
    rl.run(setup, None, params, tmp_path)
    assert [step for step, _ in taken] == [*range(first + 3), *range(2, 6)]


def test_going_back_two_states_are_never_held(tmp_path, monkeypatch):
    setup, params, _ = collapse_of(
        monkeypatch, tmp_path, lambda step, before: step in (2, 3) and not before
    )
    sizes, real = [], checkpoint.restore

    def restore(*given, **settings):
        sizes.append(held())
        return real(*given, **settings)

    def held():
        gc.collect()
        return sum(x.nbytes for x in jax.live_arrays())

    monkeypatch.setattr(checkpoint, "restore", restore)
    before = held()
    rl.run(setup, None, params, tmp_path)
    shapes = build.state_shapes(setup, "rl")
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    assert len(sizes) == 1 and sizes[0] - before < state / 2


def test_a_roll_back_that_is_interrupted_ends_alike(tmp_path, monkeypatch):
    """Wherever it was killed: what is drawn hangs on the number of roll-backs alone."""

    def beyond(step, before):
        return step in (2, 3) and not before

    setup, params, taken = collapse_of(monkeypatch, tmp_path, beyond)
    whole = rl.run(setup, None, params, tmp_path / "whole")
    taken.clear()
    real = checkpoint.save

    def save(folder, step, *rest, **settings):
        if step == 3 and len(taken) == 5:  # the first save after the roll-back
            raise KeyboardInterrupt
        real(folder, step, *rest, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save", save)
        with pytest.raises(KeyboardInterrupt):
            rl.run(setup, None, params, tmp_path / "killed")
    again = rl.run(setup, None, params, tmp_path / "killed")
    assert [step for step, _ in taken] == [0, 1, 2, 3, 2, 2, 3, 4, 5]
    assert taken[4] == taken[5]
    jax.tree.map(np.testing.assert_array_equal, again, whole)
