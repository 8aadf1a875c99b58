"""Runs that lose their directory at random instants; slow.

Each must end with its exit code and leave alone whatever has replaced its directory.
Resumed where it says that it is saved, it must end as an undisturbed run does.
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
from tests.runtime.test_run_directory import (
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
STOPPED = 3
# Largest number of metrics rows after which a run loses its directory, and the most
# seconds that it continues before that: in sft it may reach the preparation of rl, and
# in rl it does not reach its last write.
INSTANTS = {"sft": (60, 1.0), "rl": (4, 0.1)}


def start(run, log, rng):
    """Start a process that trains in `run`, and return it at a random instant."""
    stage = rng.choice(sorted(INSTANTS))
    most_rows, most_seconds = INSTANTS[stage]
    rows, metrics = rng.randint(0, most_rows), run / stage / "metrics.jsonl"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "rsearch.train", *arguments(run, **SHORT)],
            cwd=ROOT,
            env={**os.environ, **child_environment()},
            stdout=file,
            stderr=file,
        )
    end = time.monotonic() + BEGIN_SECONDS
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < rows:
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.02)
    time.sleep(rng.uniform(0, most_seconds))
    assert process.poll() is None, log.read_text()
    return process


def finish(run):
    done = run_python("-m", "rsearch.train", *arguments(run, **SHORT))
    assert done.returncode == 0, done.stderr


def outcome(run):
    """Return what equal runs share: metrics rows and the last checkpoints' leaves."""
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
def test_a_run_that_loses_its_directory_is_saved_and_can_be_resumed(
    tmp_path, undisturbed, number
):
    rng, lose = random.Random(number), LOSSES[number % len(LOSSES)]
    run, log = tmp_path / "parent" / "run", tmp_path / "log"
    path = run
    run.mkdir(parents=True)
    if number % 3 == 2:  # reach it through a link
        path = tmp_path / "link"
        path.symlink_to(run)
    process = start(path, log, rng)
    lose(run)
    before = None if lose is lock_again else contents(run)
    code = process.wait(END_SECONDS)
    told = log.read_text()
    # If files are deleted during a save, a thread of Orbax may print a traceback.
    assert code == STOPPED and f'File "{ROOT}' not in told, told
    if lose is not lock_again:  # after which it keeps writing there until it notices
        assert contents(run) == before
    (aside,) = re.findall(r"saved in (.+)$", told, re.M)
    assert not list(tmp_path.rglob("*.tmp"))
    finish(aside)
    assert outcome(type(run)(aside)) == undisturbed


@pytest.mark.fault(82, "unmounted")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_whose_disk_is_unmounted_is_saved_under_the_mount_point(
    tmp_path, undisturbed, seed
):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a disk is not permitted here")
    try:
        process = start(disk / "run", tmp_path / "log", random.Random(seed))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    assert process.wait(END_SECONDS) == STOPPED, (tmp_path / "log").read_text()
    (aside,) = disk.iterdir()
    finish(aside)
    assert outcome(aside) == undisturbed
    shutil.rmtree(aside)
