"""A failing disk costs no step: saves are retried, and earlier checkpoints stay."""

import dataclasses
import errno
import itertools
import os
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from rsearch.hosts import preemption, processes
from rsearch.learn.trainer import Trainer
from rsearch.runtime import checkpoint, console, run_directory, storage
from rsearch.runtime.checkpoint import FOLDER as CHECKPOINTS
from rsearch.runtime.metrics import MetricsLog, read_metrics
from rsearch.runtime.workdir import Workdir, read_config
from rsearch.setup.rollouts import replay_demonstrations
from rsearch.setup.weights import initial_params
from rsearch.stages import rl, sft
from rsearch.stages.guards import Guards
from rsearch.stages.state import StageState
from tests.runtime.test_run_directory import (
    contents,
    delete,
    lock_again,
    move,
    replace_by_another,
    where_it_is,
)
from tests.small_run import (
    PPO,
    arguments,
    config,
    load_setup,
    quick_compilation,
    without_times,
)
from tests.stages.running import run_rl, sft_stage, state_of
from tests.stages.test_rl import ONE_STEP
from tests.test_train import ROOT, assert_same_as_uninterrupted, child_environment

__all__ = ["quick_compilation"]
CODES = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES]
CODES += [errno.ENOENT, errno.ESTALE, errno.ENOTCONN, errno.ENODEV]


SAVES = dict(checkpoint__sft_steps=1, checkpoint__retry_seconds=30.0)


@pytest.fixture(scope="module")
def begun():
    """(setup, first parameters) of a stage that saves each step."""
    setup = load_setup(config(**SAVES))
    return setup, initial_params(setup)


@pytest.fixture
def progress(begun, tmp_path, monkeypatch, request):
    """State of a stage that saves each step: step 1 is saved, and step 2 is due."""
    monkeypatch.setattr(console, "RETRY_WAITS", (0.01, 0.02))
    setup, params = begun
    own_config = config(**SAVES | getattr(request, "param", {}))  # which tests change
    setup = dataclasses.replace(setup, config=own_config)
    params = jax.tree.map(lambda x: x.copy(), params)
    actual = state_of(setup, "sft", params, tmp_path)
    actual.advance(actual.train_state)
    actual.save_if_due()
    actual.advance(actual.train_state)
    return actual


def walked(value, name=""):
    """Return {dotted name: comparable value} of all that a stage's object holds."""
    if isinstance(value, Guards):
        value = vars(value)
    if isinstance(value, dict):
        parts = [walked(x, f"{name}.{key}") for key, x in value.items()]
        return {name: part for own in parts for name, part in own.items()}
    leaves = jax.tree_util.tree_leaves_with_path(value)
    arrays = all(hasattr(leaf, "dtype") for _, leaf in leaves)
    if leaves and arrays:
        return {
            name + jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
            for path, leaf in leaves
        }
    return {name: repr(value)}


def test_everything_that_changes_during_a_stage_is_restored(tmp_path, monkeypatch):
    """A new field that steps change but nothing saves makes this test fail."""
    own = (
        ONE_STEP
        | PPO
        | {"rl__steps": 3, "guards__min_entropy": 99.0, "model__lora_rank": 2}
    )
    setup = load_setup(config(**own, guards__patience=9))
    params, made = initial_params(setup), []

    class Watched(StageState):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            made.append((self, walked(vars(self))))

    monkeypatch.setattr(rl, "StageState", Watched)
    # Keep the base weights, to restore the state once more below.
    monkeypatch.setattr(Trainer, "final_weights", Trainer.for_decoding)
    run_rl(setup, None, params, tmp_path)
    ((progress, at_first),) = made
    at_last = walked(vars(progress))
    changed = {name for name in at_last if at_last[name] != at_first.get(name)}
    actual = walked(vars(state_of(setup, "rl", params, tmp_path)))
    assert {name for name in changed if actual.get(name) != at_last[name]} == set()
    names = [name for name in changed if name.startswith(".train_state")]
    for leaf in (".params", ".opt_state", ".critic", ".kl_coef"):
        assert any(leaf in name for name in names), leaf
    assert {".num_done", "._saved", ".guards._steps_beyond"} <= changed


def refuse(monkeypatch, where, code, times):
    """Make a function's first `times` calls fail like a disk; return [calls left]."""
    left, real = [times], getattr(*where)

    def asked(*args, **settings):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(code, os.strerror(code), "the file")
        return real(*args, **settings)

    monkeypatch.setattr(*where, asked)
    return left


PLACES = {
    "data": (storage, "write_tree"),
    "manifest": (checkpoint.files, "replace"),
    "directory": (pathlib.Path, "mkdir"),
}


FAST = set(zip(itertools.cycle(PLACES), CODES))


@pytest.mark.fault(82, "network disk away")
@pytest.mark.fault(21, "full", "read-only", "quota", "permission denied", "retried")
@pytest.mark.parametrize(
    ("place", "code"),
    [
        # The fast cases cover each error and each place; the other pairs are slow.
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
        for case in itertools.product(PLACES, CODES)
    ],
    ids=lambda value: errno.errorcode.get(value, value),
)
def test_a_save_is_retried_until_the_disk_accepts_it(
    progress, tmp_path, monkeypatch, capsys, place, code
):
    refuse(monkeypatch, PLACES[place], code, 3)
    progress.save_if_due()
    folder = tmp_path / CHECKPOINTS
    assert progress.is_saved and checkpoint.steps(folder) == [1, 2]
    checkpoint.verify(folder, 2)
    message = capsys.readouterr().err
    size = sum(np.asarray(x).nbytes for x in jax.tree.leaves(progress.train_state))
    assert message.count(os.strerror(code)) == 3 and "2 steps are held" in message
    assert f"{size:,} bytes" in message and str(folder / "2") in message


@pytest.mark.fault(84, "rows durable before the checkpoint")
def test_rows_are_durable_before_the_manifest_of_their_checkpoint(
    progress, tmp_path, monkeypatch
):
    durable, real = [], os.fsync

    def fsync(descriptor):
        durable.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, {"loss": 0.5})
        progress.save_if_due()
    assert durable.index("metrics.jsonl") < durable.index("manifest.json.tmp")


@pytest.mark.fault(82, "moved", "deleted", "replaced", "next save")
@pytest.mark.parametrize(
    ("lose", "every"),
    [
        (delete, 9),
        (replace_by_another, 1),
        pytest.param(move, 9, marks=pytest.mark.slow),
        pytest.param(lock_again, 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_loses_its_directory_is_saved_at_its_next_step(
    tmp_path, lose, every
):
    setup = load_setup(config(checkpoint__sft_steps=every))
    run = tmp_path / "run"
    with Workdir(run, setup.config) as home:
        progress = state_of(setup, "sft", initial_params(setup), home.stage("sft"))
        progress.advance(progress.train_state)
        progress.save_if_due()
        new_name = lose(run)
        before = contents(run)
        progress.advance(progress.train_state)
        for _ in range(2):  # the second time, it is asked to stop
            lost = pytest.raises(run_directory.LostDirectoryError, match=str(run))
            with lost, progress.save_on_preemption():
                progress.save_if_due()
                raise preemption.PreemptedError
        with pytest.raises(run_directory.LostDirectoryError):
            home.stage("rl")
    assert contents(run) == before
    aside = where_it_is(run, new_name)
    assert checkpoint.latest(aside / "sft" / CHECKPOINTS) == 2
    checkpoint.verify(aside / "sft" / CHECKPOINTS, 2)
    assert read_config(aside)["name"] == setup.config.name  # it can be resumed


@pytest.mark.parametrize("progress", [{"checkpoint__keep": 1}], indirect=True)
def test_an_old_checkpoint_that_cannot_be_deleted_stays(
    progress, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        checkpoint, "delete_step", lambda *_: (_ for _ in ()).throw(OSError(5, "x"))
    )
    progress.save_if_due()
    assert checkpoint.steps(tmp_path / CHECKPOINTS) == [1, 2]
    assert "checkpoints older" in capsys.readouterr().err


def test_a_save_gives_up_after_retry_seconds_and_earlier_ones_stay_whole(
    progress, tmp_path, monkeypatch
):
    refuse(monkeypatch, PLACES["data"], errno.ENOSPC, 10**9)
    with progress._config.unlocked() as c:
        c.checkpoint.retry_seconds = 0.05
    with pytest.raises(OSError, match="No space left on device") as error:
        progress.save_if_due()
    folder = tmp_path / CHECKPOINTS
    assert error.value.filename == str(folder / "2")
    assert checkpoint.steps(folder) == [1] and checkpoint.latest(folder) == 1
    checkpoint.verify(folder, 1)


def test_a_run_asked_to_stop_during_the_retries_does_not_wait(
    progress, tmp_path, monkeypatch
):
    refuse(monkeypatch, PLACES["data"], errno.ENOSPC, 10**9)
    monkeypatch.setattr(console, "RETRY_WAITS", (30.0, 30.0))
    monkeypatch.setattr(preemption, "is_stop_requested", lambda: True)
    began = time.monotonic()
    with (
        pytest.raises(preemption.PreemptedError, match="No space left"),
        progress.save_on_preemption(),
    ):
        progress.save_if_due()
    assert time.monotonic() - began < 10
    assert checkpoint.steps(tmp_path / CHECKPOINTS) == [1]


def test_a_supervised_step_whose_row_cannot_be_written_is_saved_with_it(
    tmp_path, monkeypatch
):
    """The update has reused the previous state's buffers: no other state is left."""
    setup = load_setup(config(stages=("sft",), sft__steps=4, checkpoint__sft_steps=9))
    params = initial_params(setup)
    stage = sft_stage(setup, replay_demonstrations(setup), tmp_path)

    def run(folder):
        sft.run(dataclasses.replace(stage, folder=folder), params)
        return read_metrics(folder / "metrics.jsonl")

    whole, real = run(tmp_path / "whole"), MetricsLog.write

    def write(self, step, values):
        if step == 2:
            patched.setattr(preemption, "is_stop_requested", lambda: True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")
        return real(self, step, values)

    parts = tmp_path / "parts"
    with monkeypatch.context() as patched:
        patched.setattr(MetricsLog, "write", write)
        with pytest.raises(preemption.PreemptedError, match="No space left"):
            run(parts)
    assert checkpoint.latest(parts / CHECKPOINTS) == 3
    assert without_times(run(parts)) == without_times(whole)


def test_with_several_hosts_a_failed_save_is_not_retried(progress, monkeypatch):
    refuse(monkeypatch, PLACES["data"], errno.ENOSPC, 10**9)
    monkeypatch.setattr(processes, "num_hosts", lambda: 2)
    with pytest.raises(OSError, match="No space left"):
        progress.save_if_due()


@pytest.fixture
def small_disk(tmp_path):
    """A nearly full disk of its own, and a function that enlarges it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a disk is not permitted here")
    try:
        yield (
            disk,
            lambda: subprocess.run(
                ["mount", "-o", "remount,size=100m", str(disk)], check=True
            ),
        )
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.fault(21, "full", "retried")
@pytest.mark.slow
def test_a_run_on_a_full_disk_continues_once_there_is_room(small_disk):
    disk, enlarge = small_disk
    process = subprocess.Popen(
        [sys.executable, "-m", "rsearch.train", *arguments(disk / "run")],
        cwd=ROOT,
        env=child_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    told = []
    for line in process.stderr:
        told.append(line)
        if "No space left" in line and "retrying" in line:
            break
    assert process.poll() is None, told
    enlarge()
    _, rest = process.communicate(timeout=300)
    assert process.returncode == 0, (told, rest)
    assert_same_as_uninterrupted(disk / "run")
