"""A run whose directory is moved, deleted or replaced writes into no other run's."""

import contextlib
import fcntl
import os
import pathlib
import shutil
import subprocess

import numpy as np
import pytest

from rsearch.runtime import checkpoint, files, run_directory
from rsearch.runtime.journal import AppendLog
from rsearch.runtime.jsonl import append_jsonl
from rsearch.runtime.metrics import MetricsLog, read_metrics


def move(run):
    run.rename(run.with_name("elsewhere"))
    return "elsewhere"


def move_parent(run):
    run.parent.rename(run.parent.with_name("new parent"))
    return "../new parent/run"


def delete(run):
    while run.exists():  # the run may create a file there meanwhile
        shutil.rmtree(run, ignore_errors=True)


def replace_by_copy(run):
    """Replace it as some backups are restored."""
    copy = run.with_name("copy")
    with contextlib.suppress(shutil.Error):  # files that are gone by then
        shutil.copytree(run, copy)
    delete(run)
    copy.rename(run)


def replace_by_another(run):
    move(run)
    run.mkdir()
    (run / "config.json").write_text("of another run")
    return "elsewhere"


def put_a_file_there(run):
    delete(run)
    run.write_text("notes")


def point_elsewhere(run):
    """Redirect the symbolic link `run`; return the relative path of its old target."""
    target = run.resolve()
    run.unlink()
    run.symlink_to(run.parent)
    return os.path.relpath(target, run.parent)


def lock_again(run):
    """Do as another run would, on a file system that locks no directories."""
    (run / "lock").unlink()
    (run / "lock").touch()


LOSSES = [move, move_parent, delete, replace_by_copy, replace_by_another]
LOSSES += [put_a_file_there, lock_again]


@pytest.fixture
def run(tmp_path):
    """The path of a RunDirectory with a file in it."""
    path = tmp_path / "parent" / "run"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    directory = run_directory.RunDirectory(path)
    directory.contents["config.json"] = b"{}"
    yield path
    directory.close()


def where_it_is(run, new_name):
    """The directory that a lost run writes into."""
    if new_name:
        return (run.parent / new_name).resolve()
    (made,) = run.parent.glob("run.saved-*")
    return made


def contents(folder):
    """{path: bytes, or False for a directory} of a folder's contents, or of a file."""
    paths = [folder, *folder.rglob("*")] if folder.is_dir() else [folder]
    return {p: p.is_file() and p.read_bytes() for p in paths if p.exists()}


@pytest.mark.fault(82, "moved", "deleted", "replaced", "lock file made again")
@pytest.mark.parametrize("lose", LOSSES)
def test_writes_of_a_lost_run_follow_its_directory_and_end_it(run, lose):
    log = MetricsLog(run / "rl", tensorboard=False)
    journal = AppendLog(run / "rl", "rollouts")
    log.write(0, {"reward": 0.5})
    new_name = lose(run)
    before = contents(run)
    writers = (
        ("results.json", lambda path: files.replace(path, b"[1]")),
        ("rl/journal.jsonl", lambda path: append_jsonl(path, [2])),
    )
    for name, write in writers:
        with pytest.raises(run_directory.LostDirectoryError, match=str(run)) as caught:
            write(run / name)
        assert str(where_it_is(run, new_name)) in str(caught.value)
    journal.add(["q"], b"body")
    log.write(1, {"reward": 0.75})
    log.close()
    aside = where_it_is(run, new_name)
    checkpoint.save(
        run_directory.locate(run / "rl"), 3, {"x": np.float32([1, 2])}, {}, keep=2
    )
    checkpoint.verify(aside / "rl", 3)
    assert (aside / "results.json").read_bytes() == b"[1]"
    assert (aside / "config.json").read_bytes() == b"{}"
    assert (aside / "rl" / "journal.jsonl").read_bytes() == b"[2]\n"
    assert [row["step"] for row in read_metrics(aside / "rl" / "metrics.jsonl")] == [
        0,
        1,
    ]
    assert (
        AppendLog(aside / "rl", "rollouts").get(["q"]) == journal.get(["q"]) == b"body"
    )
    assert contents(run) == before


@pytest.mark.fault(82, "moved", "deleted", "replaced")
@pytest.mark.parametrize("lose", LOSSES)
def test_a_stage_of_a_lost_run_creates_nothing_at_the_old_path(run, lose):
    lose(run)
    before = contents(run)
    with pytest.raises(run_directory.LostDirectoryError, match=str(run)):
        MetricsLog(run / "rl", tensorboard=False)
    assert contents(run) == before


@pytest.mark.fault(82, "symbolic link")
def test_a_redirected_link_is_noticed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to("real")
    directory = run_directory.RunDirectory(tmp_path / "run")
    new_name = point_elsewhere(tmp_path / "run")
    with pytest.raises(run_directory.LostDirectoryError):
        files.replace(tmp_path / "run" / "results.json", b"[1]")
    assert (tmp_path / new_name / "results.json").read_bytes() == b"[1]"
    directory.close()


@pytest.mark.fault(82, "lock file deleted")
def test_a_deleted_lock_file_is_recreated_and_the_directory_stays_locked(run):
    (run / "lock").unlink()
    for enter in (run_directory.check_free, run_directory.RunDirectory):
        with pytest.raises(ValueError, match="in use"):
            enter(run)
    run_directory.stop_if_lost(run / "rl")
    with open(run / "lock") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert f"process {os.getpid()} " in (run / "lock").read_text()


@pytest.mark.fault(82, "two paths to it")
def test_a_directory_is_locked_whatever_path_leads_to_it(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    for path in (tmp_path / "link", tmp_path / "parent" / ".." / "parent" / "run"):
        for enter in (run_directory.check_free, run_directory.RunDirectory):
            with pytest.raises(ValueError, match=f"in use by process {os.getpid()} "):
                enter(path)


def test_a_directory_that_is_moved_back_is_not_lost(run):
    run.rename(run.with_name("elsewhere"))
    run.with_name("elsewhere").rename(run)
    run_directory.stop_if_lost(run)
    files.replace(run / "results.json", b"[1]")
    assert (run / "results.json").read_bytes() == b"[1]"
    assert run_directory.locate(run.with_name("results.json")) == run.with_name(
        "results.json"
    )


@pytest.mark.fault(82, "moved in a save")
def test_a_save_continues_where_the_directory_is_moved_to(run, monkeypatch):
    real = checkpoint.storage.write_tree

    def write_tree(path, arrays):
        replace_by_another(run)
        real(path, arrays)

    monkeypatch.setattr(checkpoint.storage, "write_tree", write_tree)
    checkpoint.save(run / "rl", 3, {"x": np.float32([1, 2])}, {}, keep=2)
    checkpoint.verify(run.with_name("elsewhere") / "rl", 3)
    assert [p.name for p in run.iterdir()] == ["config.json"]


@pytest.fixture
def mount(tmp_path):
    """A function that mounts a disk with `mount`'s arguments and returns its path."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def call(*words):
        done = subprocess.run(["mount", *words, str(disk)], capture_output=True)
        if done.returncode:
            pytest.skip("mounting a disk is not permitted here")
        return disk

    yield call
    subprocess.run(["umount", "-l", str(disk)], capture_output=True)


@pytest.mark.fault(82, "unmounted")
def test_an_unmounted_run_is_copied_before_it_is_gone(mount):
    disk = mount("-t", "tmpfs", "none")
    run = disk / "run"
    run.mkdir()
    directory = run_directory.RunDirectory(run)
    (run / "sft").mkdir()
    (run / "sft" / "weights").write_bytes(b"w")
    subprocess.run(["umount", "-l", str(disk)], check=True)
    with pytest.raises(run_directory.LostDirectoryError):
        files.replace(run / "results.json", b"[1]")
    directory.close()
    (aside,) = disk.glob("run.saved-*")
    names = {p.relative_to(aside).as_posix() for p in aside.rglob("*") if p.is_file()}
    assert names == {"results.json", "sft/weights", "lock"}


@pytest.mark.fault(82, "bind mount")
def test_a_directory_is_locked_through_a_bind_mount(run, mount):
    disk = mount("--bind", str(run))
    with pytest.raises(ValueError, match="in use"):
        run_directory.RunDirectory(disk)
    assert pathlib.Path(disk / "lock").exists()
