"""Guards: bad updates are skipped and stored, and a run that goes wrong stops."""

import dataclasses
import errno
import math

import jax
import numpy as np
import pytest

from rsearch.config.recipes import StoppedError
from rsearch.runtime import checkpoint
from rsearch.runtime.checkpoint import FOLDER as CHECKPOINTS
from rsearch.runtime.metrics import read_metrics
from rsearch.setup.learners import fresh_state
from rsearch.setup.rollouts import replay_demonstrations
from rsearch.setup.weights import initial_params
from rsearch.stages import rl
from rsearch.stages.guards import FOLDER, Guards
from rsearch.stages.state import StageState
from tests.small_run import config, load_setup, quick_compilation
from tests.stages.running import learning, rl_stage, run_sft
from tests.stages.test_rl import ONE_STEP, groups, rollout

__all__ = ["quick_compilation"]
FINE, BAD = {"grad_norm": 1.0}, {"grad_norm": math.nan}
PARAMS = {"layers": {"q": np.ones(3)}, "norm": np.ones(2)}


def guards(folder, **settings):
    names = {f"guards__{name}": value for name, value in settings.items()}
    return Guards(config(**names), "rl", folder)


def test_too_many_skipped_updates_in_a_row_stop_the_run(tmp_path, capsys):
    own = guards(tmp_path, max_skipped=2, dumps=2)
    batch = {"tokens": np.arange(4)}
    assert own.on_update(0, BAD, batch, PARAMS)
    assert not own.on_update(1, FINE, batch, PARAMS)
    assert own.on_update(2, {"critic_grad_norm": math.inf}, batch, PARAMS)
    with pytest.raises(StoppedError) as error:
        own.on_update(3, BAD, batch, PARAMS)
    assert "2 updates in a row" in str(error.value)
    assert "all parameters are finite" in str(error.value)
    assert "last in step 4" in str(error.value)
    message = capsys.readouterr().err
    assert "grad_norm = nan; all parameters are finite" in message
    assert "this update is skipped" in message
    kept = sorted((tmp_path / FOLDER).glob("*.npz"))
    assert [path.name for path in kept] == ["0-1.npz", "2-1.npz"]
    with np.load(kept[0], allow_pickle=False) as actual:
        np.testing.assert_array_equal(actual["tokens"], batch["tokens"])


def test_a_batch_that_the_disk_refuses_does_not_end_the_stage(tmp_path, capsys):
    (tmp_path / FOLDER).write_bytes(b"")  # not a folder
    own = guards(tmp_path, max_skipped=3, dumps=1)
    assert own.on_update(0, BAD, {"tokens": np.arange(4)}, PARAMS)
    assert own.on_update(1, BAD, {"tokens": np.arange(4)}, PARAMS)
    message = capsys.readouterr().err
    assert f"{tmp_path / FOLDER}" in message and "its batch is not stored" in message
    assert "its batch is in" not in message


def test_half_a_batch_is_not_left_on_a_full_disk(tmp_path, monkeypatch, capsys):
    def save_half(path, **arrays):
        path.write_bytes(b"PK")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", save_half)
    own = guards(tmp_path, max_skipped=3, dumps=1)
    assert own.on_update(0, BAD, {"tokens": np.arange(4)}, PARAMS)
    assert "its batch is not stored" in capsys.readouterr().err
    assert not list((tmp_path / FOLDER).iterdir())


@pytest.mark.parametrize("name", ["policy", "critic"])
def test_an_update_that_is_skipped_in_part_names_the_model(tmp_path, capsys, name):
    own = guards(tmp_path, max_skipped=2, dumps=0)
    norms = {"grad_norm": 1.0, "critic_grad_norm": 1.0}
    norms[{"policy": "grad_norm", "critic": "critic_grad_norm"}[name]] = math.nan
    assert own.on_update(0, norms, {}, PARAMS)
    assert f"this update of the {name} is skipped" in capsys.readouterr().err


def test_the_parameter_that_is_not_finite_is_named(tmp_path):
    own = guards(tmp_path, max_skipped=1, dumps=0)
    broken = {"layers": {"q": np.array([1.0, np.nan])}, "norm": np.ones(2)}
    with pytest.raises(StoppedError, match=r"is the parameter layers\.q"):
        own.on_update(0, BAD, {}, broken)
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.parametrize(
    ("bound", "measured"),
    [
        ({"min_entropy": 0.5}, {"entropy": 0.4}),
        ({"max_empty": 0.5}, {"empty_answers": 0.6}),
        ({"max_repeated": 0.5}, {"repeated_text": 0.6}),
        ({"max_kl": 0.5}, {"kl": 0.6}),
        ({"max_clipped": 0.5}, {"clip_fraction": 0.6}),
        ({"max_copied_queries": 0.5}, {"copied_queries": 0.6}),
        ({"max_repeated_queries": 0.5}, {"repeated_queries": 0.6}),
        ({"max_forged": 0.5}, {"forged_observations": 0.6}),
        ({"max_unsupported": 0.5}, {"unsupported_answers": 0.6}),
        ({"max_cut_observations": 0.5}, {"cut_observations": 0.6}),
        ({"min_supporting_recall": 0.5}, {"supporting_recall": 0.4}),
        ({"min_groups_with_spread": 0.5}, {"groups_with_spread": 0.4}),
    ],
)
def test_a_collapsing_policy_is_reported_or_stopped(tmp_path, capsys, bound, measured):
    fine = dict.fromkeys(measured, 0.5)
    own = guards(tmp_path, patience=2, **bound)
    for values in (measured, fine, measured):
        assert own.on_step(0, values) is None
    assert "config.guards" not in capsys.readouterr().err
    assert own.on_step(1, measured) is None
    message = f"config.guards.{next(iter(bound))} = 0.5"
    assert message in capsys.readouterr().err
    own = guards(tmp_path, patience=2, on_collapse="stop", **bound)
    assert own.on_step(6, measured) is None
    collapse = own.on_step(7, measured)
    assert message in collapse.message and "for 2 steps in a row" in collapse.message
    assert collapse.first_step == 6


def test_a_step_without_an_update_is_ignored_and_nan_exceeds_every_bound(tmp_path):
    """A collapsed policy's rollouts are all alike, so its steps have no update."""
    own = guards(tmp_path, patience=3, on_collapse="stop", min_entropy=0.5)
    for step, measured in enumerate([{"entropy": 0.4}, {"in_loss": 0.0}] * 2):
        assert own.on_step(step, measured) is None
    collapse = own.on_step(4, {"entropy": math.nan})
    assert collapse.first_step == 0 and "entropy = nan" in collapse.message
    assert own.on_step(5, {"entropy": 0.6}) is None
    assert own.on_step(6, {"entropy": 0.4}) is None


def test_a_step_within_the_exceeded_bounds_ends_the_count(tmp_path):
    """Other metrics may be missing, such as entropy while only a value model learns."""
    bounds = dict(patience=2, on_collapse="stop", min_entropy=0.5, max_empty=0.5)
    own = guards(tmp_path, **bounds)
    for step, empty in enumerate([0.9, 0.1, 0.9, 0.1]):
        assert own.on_step(step, {"empty_answers": empty}) is None
    assert own.first_beyond is None
    for step, measured in [(4, {"empty_answers": 0.9}), (5, {"entropy": 0.6})]:
        assert own.on_step(step, measured) is None
    assert own.on_step(6, {"entropy": 0.4}).first_step == 4  # answers may yet be empty


def test_a_count_saved_by_an_earlier_version_starts_over(tmp_path):
    """It has no first step, and a roll-back would undo everything."""
    own = guards(tmp_path, patience=3, on_collapse="roll_back", max_kl=0.5)
    own.restore({"skipped": 1, "beyond": 2, "kept": 0})
    assert own.on_step(200, {"kl": 1.0}) is None
    assert own.state() == {"skipped": 1, "kept": 0} | {
        "beyond": 1,
        "since": 200,
        "bounds": ["max_kl"],
    }


def test_without_bounds_nothing_collapses(tmp_path, capsys):
    own = guards(tmp_path, on_collapse="stop", patience=1)
    numbers = {"entropy": 0.0, "empty_answers": 1.0, "kl": 1e9}
    assert own.on_step(0, numbers) is None
    assert not capsys.readouterr().err


def test_restored_guards_continue_their_count(tmp_path):
    own, other = guards(tmp_path, max_skipped=2), guards(tmp_path, max_skipped=2)
    own.on_update(0, BAD, {}, PARAMS)
    other.restore(own.state())
    with pytest.raises(StoppedError):
        other.on_update(1, BAD, {}, PARAMS)


def test_every_count_of_the_guards_is_in_their_state(tmp_path):
    """If a resumed run restarted a count, it would end at a different step."""
    own, other = (guards(tmp_path, max_kl=0.5, patience=9) for _ in range(2))
    own.on_update(0, BAD, {}, PARAMS)
    own.on_step(3, {"kl": 1.0})
    changed = {n for n, v in vars(own).items() if v != vars(other)[n]}
    assert len(changed) == len(own.state()) > 0
    other.restore(own.state())
    assert other.state() == own.state()
    # Every attribute that counting has changed is restored, whatever its name.
    assert {n: vars(other)[n] for n in changed} == {n: vars(own)[n] for n in changed}


@pytest.fixture(scope="module")
def setup():
    return load_setup(config(**ONE_STEP, guards__max_skipped=2))


@pytest.mark.fault(38, "NaN")
def test_a_step_with_bad_rewards_changes_no_bit_of_the_state(setup, tmp_path):
    own = Guards(setup.config, "rl", tmp_path)
    state = fresh_state(setup, "rl", initial_params(setup))
    before = jax.device_get(state)
    played = groups(*[[rollout("x"), rollout("y", num_tokens=4)]] * 4)
    rewards = np.tile(np.array([[1.0, np.inf]], np.float32), (4, 1))
    learn = learning(setup, guards=own)
    state, measured = learn(state, played, rewards)
    assert measured == {"in_loss": 0}
    after = jax.device_get(state)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert list((tmp_path / FOLDER).glob("*.npz"))
    with pytest.raises(StoppedError):
        learn(state, played, rewards)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(stage of four steps, its parameters); copies of it share its functions."""
    run = dict(rl__steps=4, guards__max_skipped=2, rl__kl_coef=0.0)
    setup = load_setup(config(**ONE_STEP | run))
    return rl_stage(setup, tmp_path_factory.mktemp("compiled")), initial_params(setup)


def test_a_stage_that_stops_keeps_its_last_checkpoint(compiled, tmp_path):
    """It names the step, and a resumed run keeps the earlier count."""
    stage, params = compiled
    stage = dataclasses.replace(stage, folder=tmp_path)

    def broken(groups):
        rewards, terms, groups = stage.score(groups)
        is_first = len(read_metrics(tmp_path / "metrics.jsonl")) < 1
        return (rewards if is_first else rewards + np.inf), terms, groups

    with pytest.raises(StoppedError, match="in step 3"):
        rl.run(dataclasses.replace(stage, score=broken), params)
    assert checkpoint.latest(tmp_path / CHECKPOINTS) == 2
    progress = StageState(stage.config, "rl", stage.trainer, params, tmp_path)
    assert progress.guards.state()["skipped"] == 1


def test_a_supervised_stage_stops_after_bad_updates_too(tmp_path):
    setup = load_setup(config(stages=("sft",), sft__steps=6, guards__max_skipped=3))
    rollouts = replay_demonstrations(setup)
    params = jax.tree.map(lambda x: x * np.nan, initial_params(setup))
    with pytest.raises(StoppedError, match="sft: 3 updates in a row"):
        run_sft(setup, rollouts, params, tmp_path)
    assert len(list((tmp_path / FOLDER).glob("*.npz"))) == 3


@pytest.mark.fault(29, "step aborted", "parameter named")
def test_a_policy_whose_logits_are_not_finite_samples_but_is_not_updated(
    compiled, tmp_path, capsys
):
    """Nothing hangs; the first step names the parameter, and the run stops."""
    stage, params = compiled
    params = jax.tree.map(lambda x: x, params)
    scale = params["layers"]["attention"]["q"]
    params["layers"]["attention"]["q"] = scale.at[0, 0].set(np.nan)
    message = r"the first that is not finite is the parameter layers\.attention\.q"
    with pytest.raises(StoppedError, match=message):
        rl.run(dataclasses.replace(stage, folder=tmp_path), params)
    first = capsys.readouterr().err
    assert f"rl: step 1: grad_norm = nan; {message}".replace("\\", "") in first
