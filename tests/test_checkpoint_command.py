"""The command rsearch.checkpoint: list, verify and delete checkpoints."""

import pathlib
import shutil
from unittest import mock

import pytest

from rsearch import checkpoint as checkpoint_command
from rsearch.config import recipes
from rsearch.config.recipes import run_command
from rsearch.runtime import checkpoint, files, run_directory, storage
from rsearch.runtime.workdir import Workdir
from tests.runtime.test_checkpoint import (
    all_files,
    delete_when_read,
    flip_bit,
    make_tree,
    saved,
)

__all__ = ["saved"]


def command(*words):
    return run_command(checkpoint_command.main, [str(word) for word in words])


def test_the_command_lists_whole_torn_and_damaged_checkpoints(saved, capsys):
    (saved / "3").mkdir()
    shutil.copytree(saved / "1", saved / "0.damaged")
    assert command("ls", saved) == 0
    message = capsys.readouterr().out
    for name, state in (("0.damaged", "damaged"), ("2", "whole"), ("3", "torn")):
        assert any(name in line and state in line for line in message.splitlines()), (
            message
        )


@pytest.mark.parametrize("when", ["before it is read", "while it is read"])
def test_a_step_that_a_run_deletes_meanwhile_is_not_listed(
    saved, monkeypatch, capsys, when
):
    rglob = pathlib.Path.rglob

    def delete(path, pattern):
        found = list(rglob(path, pattern)) if when == "while it is read" else []
        if path == saved / "1":
            shutil.rmtree(path)
            monkeypatch.setattr(pathlib.Path, "is_file", lambda path: True)
        return found or rglob(path, pattern)

    monkeypatch.setattr(pathlib.Path, "rglob", delete)
    assert command("ls", saved) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    steps = [row[3] for row in rows if "whole" in row]
    assert steps == ["2"], rows


def test_the_command_verifies_and_changes_nothing(saved, capsys):
    assert command("verify", saved) == 0
    path = max(all_files(saved / "2"), key=lambda p: p.stat().st_size)
    flip_bit(path, path.stat().st_size // 2)
    before = sorted(saved.rglob("*"))
    assert command("verify", saved) == 1
    assert path.name in capsys.readouterr().err
    assert sorted(saved.rglob("*")) == before
    assert command("verify", saved, "--step=1") == 0
    for step in (9, -5):
        assert command("verify", saved, f"--step={step}") == 2
        assert f"step {step}" in capsys.readouterr().err


def test_a_step_that_a_run_deletes_meanwhile_is_not_damaged(saved, monkeypatch, capsys):
    delete_when_read(monkeypatch, saved / "1")
    assert command("verify", saved) == 0
    message = capsys.readouterr().err
    assert f"{saved / '1'}: deleted meanwhile" in message
    assert f"{saved / '2'}: verified" in message


def test_a_verification_of_nothing_is_not_a_success(tmp_path, capsys):
    (tmp_path / "rl" / "checkpoints" / "3").mkdir(parents=True)  # torn
    assert command("verify", tmp_path) == 2
    assert f"{tmp_path}: no stage" in capsys.readouterr().err


def test_a_flag_of_another_action_is_refused_before_anything_is_deleted(saved, capsys):
    before = sorted(saved.rglob("*"))
    for words in (("gc", saved, "--step=2"), ("verify", saved, "--keep=1")):
        assert command(*words) == 2
        assert f"{words[2].partition('=')[0]} is only" in capsys.readouterr().err
    assert sorted(saved.rglob("*")) == before


def test_verification_reads_one_leaf_at_a_time(saved):
    """All leaves together may exceed a device's memory."""
    with mock.patch.object(storage, "read_tree", wraps=storage.read_tree) as read_tree:
        checkpoint.verify(saved, 2)
    asked = [call.args[1] for call in read_tree.call_args_list]
    assert len(asked) > 1 and all(len(leaves) == 1 for leaves in asked)


def test_the_command_deletes_old_and_torn_checkpoints(saved, capsys):
    (saved / "3").mkdir()
    shutil.copytree(saved / "1", saved / "0.damaged")
    before = {p.name for p in saved.iterdir()}
    assert command("gc", saved, "--keep=1", "--dry_run") == 0
    assert {p.name for p in saved.iterdir()} == before
    assert command("gc", saved, "--keep=1") == 0
    assert {p.name for p in saved.iterdir()} == {"2", "0.damaged"}
    assert command("gc", saved, "--keep=1", "--damaged") == 0
    assert {p.name for p in saved.iterdir()} == {"2"}


def test_the_checkpoint_of_the_lowest_loss_is_not_deleted(tmp_path):
    folder = tmp_path / "run" / "sft" / checkpoint.FOLDER
    for step, lowest in ((1, 1), (2, 2), (3, 2), (4, 2)):
        meta = {checkpoint.LOWEST: [lowest, 0.5]}
        checkpoint.save(folder, step, make_tree(step), meta, keep=9)
    assert command("gc", folder, "--keep=1") == 0
    assert checkpoint.steps(folder) == [2, 4]


def test_the_command_finds_the_checkpoints_of_every_stage(
    saved, tmp_path_factory, capsys
):
    run = tmp_path_factory.mktemp("run")
    for stage in ("sft", "rl"):
        shutil.copytree(saved, run / stage / "checkpoints")
    assert command("ls", run) == 0
    message = capsys.readouterr().out
    assert "sft" in message and "rl" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("list", "."), "must be one of ls, verify, gc"),
        (("ls", "nowhere"), "no such directory"),
        (("ls", "EMPTY"), "holds no checkpoints"),
        (("gc", ".", "--keep=0"), "must be 1 or more"),
        (("ls",), "directory is missing"),
    ],
)
def test_the_command_refuses_wrong_arguments(tmp_path, capsys, words, message):
    words = [str(tmp_path) if word == "EMPTY" else word for word in words]
    assert command(*words) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_deleted_while_a_run_holds_the_directory(saved, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(saved, run / "rl" / "checkpoints")
    (run / "rl" / "checkpoints" / "3").mkdir()  # a save under way
    lock = run / run_directory.LOCK
    with files.locked(lock) as is_held:
        assert is_held
        for place in (run, run / "rl", run / "rl" / "checkpoints"):
            assert command("gc", place, "--keep=1") == 2
            assert f"{run}: in use" in capsys.readouterr().err
    assert (run / "rl" / "checkpoints" / "3").exists()
    assert command("gc", run, "--keep=1") == 0
    assert [p.name for p in (run / "rl" / "checkpoints").iterdir()] == ["2"]


@pytest.mark.parametrize("why", checkpoint.SET_ASIDE_REASONS)
def test_a_checkpoint_set_aside_is_deleted_only_on_request(saved, why, capsys):
    checkpoint.set_aside(saved, 1, reason=why)
    assert command("ls", saved) == 0
    assert f"1.{why}" in capsys.readouterr().out
    others = [f"--{other}" for other in checkpoint.SET_ASIDE_REASONS if other != why]
    assert command("gc", saved, *others) == 0
    assert (saved / f"1.{why}").exists()
    assert command("gc", saved, f"--{why}") == 0
    assert sorted(p.name for p in saved.iterdir()) == ["2"]


@pytest.mark.fault(83, "verified")
def test_a_checkpoint_of_another_run_fails_verification(tmp_path, capsys):
    with Workdir(tmp_path / "run", recipes.load("configs/base.py")) as home:
        folder = home.stage("rl") / checkpoint.FOLDER
    for step, run in enumerate([home.run_id, "beef"], 1):
        made_by = {"run": run, "stage": "rl"}
        checkpoint.save(folder, step, make_tree(step), {}, keep=2, made_by=made_by)
    assert command("verify", home.path) == 1
    verified, foreign = capsys.readouterr().err.splitlines()
    assert "verified" in verified and "'beef'" in foreign and home.run_id in foreign


@pytest.mark.parametrize("saved_name", ["sft_rewriter", "sft"])  # earlier versions: sft
def test_a_supervised_stage_with_a_name_is_verified_by_it(tmp_path, capsys, saved_name):
    with Workdir(tmp_path / "run", recipes.load("configs/base.py")) as home:
        folder = home.stage("sft_rewriter") / checkpoint.FOLDER
    made_by = {"run": home.run_id, "stage": saved_name}
    made_by["config"] = {"stages": ["sft_rewriter"]}
    checkpoint.save(folder, 1, make_tree(1), {}, keep=2, made_by=made_by)
    assert command("verify", home.path) == 0
    folder.parent.rename(home.path / "sft")
    capsys.readouterr()
    assert command("verify", home.path) == 1
    assert "'sft_rewriter'" in capsys.readouterr().err
