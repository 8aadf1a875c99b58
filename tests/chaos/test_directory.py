"""Runs whose directory is taken from under them, at random instants; slow.

Each must end with its code, leave alone what has come in its place, and go on where it
says that it is saved, to what an undisturbed run ends with.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import time

import pytest

from rsearch.runtime import checkpoint
from rsearch.runtime.metrics import read_metrics
from tests.chaos.resume import SHORT
from tests.runtime.test_held import (
    contents,
    delete,
    lock_again,
    move,
    replace_by_another,
    replace_by_copy,
)
from tests.small_run import (
    ROOT,
    arguments,
    child_environment,
    run_python,
    without_times,
)

LOSSES = [move, delete, replace_by_another, replace_by_copy, lock_again]
BEGIN_SECONDS, END_SECONDS = 300.0, 300.0
SPREAD_SECONDS = 12.0  # of the instants: about what the run takes from there
STOPPED = 3


def start(run, log):
    """A process that trains in `run`, once it has its directory and compiled code."""
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "rsearch.train", *arguments(run, **SHORT)],
            cwd=ROOT,
            env={**os.environ, **child_environment()},
            stdout=file,
            stderr=file,
        )
    end = time.monotonic() + BEGIN_SECONDS
    while not (run / "sft" / "metrics.jsonl").exists():
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.02)
    return process


def finish(run):
    done = run_python("-m", "rsearch.train", *arguments(run, **SHORT))
    assert done.returncode == 0, done.stderr


def outcome(run):
    """What two equal runs have in common: rows, and leaves of the last checkpoints."""
    stages = ("sft", "rl")
    folders = [run / stage / checkpoint.FOLDER for stage in stages]
    last = [checkpoint.read_manifest(f, checkpoint.latest(f)) for f in folders]
    rows = [without_times(read_metrics(run / s / "metrics.jsonl")) for s in stages]
    return [manifest["leaves"] for manifest in last], rows


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(run)
    return outcome(run)


@pytest.mark.fault(82, "at random instants", "exit code")
@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_a_run_that_loses_its_directory_is_saved_and_goes_on(
    tmp_path, undisturbed, number
):
    rng, lose = random.Random(number), LOSSES[number % len(LOSSES)]
    run, log = tmp_path / "parent" / "run", tmp_path / "log"
    path = run
    run.mkdir(parents=True)
    if number % 3 == 2:  # reached by a link
        path = tmp_path / "link"
        path.symlink_to(run)
    process = start(path, log)
    time.sleep(rng.uniform(0, SPREAD_SECONDS))
    if process.poll() is not None:
        pytest.skip("it had ended before")
    lose(run)
    before = contents(run)
    code = process.wait(END_SECONDS)
    told = log.read_text()
    assert code == STOPPED and "Traceback" not in told, told
    if not (lose is lock_again or code == 0):
        assert contents(run) == before
    (aside,) = re.findall(r"saved in (.+)$", told, re.M)
    assert not list(tmp_path.rglob("*.tmp"))
    finish(aside)
    assert outcome(type(run)(aside)) == undisturbed


@pytest.mark.fault(82, "unmounted")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_whose_disk_is_unmounted_is_saved_beside_it(tmp_path, undisturbed, seed):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a disk is not permitted here")
    try:
        process = start(disk / "run", tmp_path / "log")
        time.sleep(random.Random(seed).uniform(0, SPREAD_SECONDS))
        assert process.poll() is None
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    assert process.wait(END_SECONDS) == STOPPED, (tmp_path / "log").read_text()
    (aside,) = disk.iterdir()
    finish(aside)
    assert outcome(aside) == undisturbed
    shutil.rmtree(aside)
