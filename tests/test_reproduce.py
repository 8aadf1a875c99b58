"""The commands that made a run, as run.json records them."""

import json
import shlex

import pytest

from rsearch import reproduce
from rsearch.config import recipes
from rsearch.runtime.identity import record_start
from rsearch.runtime.workdir import Workdir
from tests.small_run import ROOT


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run that was trained in two starts and evaluated in one."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    config = recipes.load("configs/base.py")
    with Workdir(tmp_path / "a run", config) as home:
        for command in ("train", "train", "evaluate"):
            record_start(home.path, command, config, inputs={})
    change(home.path, argv=["python", "-m", "rsearch.train", "--config=a b.py"])
    return home.path


def change(run, *, code=None, program=None, **launch):
    """Change the code, program or launch that run.json records for all starts."""
    record = json.loads((run / "run.json").read_text())
    for entry in record["starts"]:
        entry["code"] |= {"commit": "c" * 40, "diff": ""} | (code or {})
        entry["program"] |= program or {}
    for entry in record["launches"]:
        entry |= launch
    (run / "run.json").write_text(json.dumps(record))


def commands(run, capsys):
    """Return the words of each command that is printed for a run."""
    assert reproduce.main([str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [shlex.split(line) for line in lines if line and not line.startswith("#")]


def test_starts_with_the_same_command_line_are_printed_once(run, capsys):
    program = {"jax": "0.0.1", "XLA_FLAGS": "--a --b"}
    change(run, program=program, directory="/x y", checkout="/x y")
    cd, checkout, install, train = commands(run, capsys)
    assert cd == ["cd", "/x y"] and checkout == ["git", "checkout", "c" * 40]
    assert install[:4] == ["python", "-m", "pip", "install"]
    assert "jax==0.0.1" in install and not any("XLA" in word for word in install)
    # A new directory: in the run's own, the command would resume the run.
    again = f"--workdir={run}-again"
    command = ["python", "-m", "rsearch.train", "--config=a b.py", again]
    assert train == ["XLA_FLAGS=--a --b", *command]


def test_a_run_started_from_python_is_trained_with_its_configuration(
    run, capsys, monkeypatch
):
    """The program itself would resume the run; a notebook's would only begin a kernel.

    Whatever the program's name: only rsearch's own command lines take --workdir.
    """
    for argv in (["python", "my_rsearch.train.py"], ["python", "-m", "ipykernel", "x"]):
        change(run, argv=argv, program={"XLA_FLAGS": ""})
        words = commands(run, capsys)[-1]
        assert words[:2] == ["python", "-c"] and words[3:] == [f"{run}", f"{run}-again"]
    calls = []
    monkeypatch.setattr("rsearch.train.main", lambda *given: calls.append(given))
    monkeypatch.setattr("sys.argv", ["-c", *words[3:]])
    exec(words[2])  # noqa: S102
    ((config, workdir),) = calls
    assert config.to_dict() == recipes.load("configs/base.py").to_dict()
    assert workdir == f"{run}-again"
    change(run, argv=["/bin/python", "/bin/rsearch", "train", "--config=x"])
    assert commands(run, capsys)[-1][-1] == f"--workdir={run}-again"


def test_uncommitted_changes_are_applied_if_they_were_stored(run, capsys):
    change(run, code={"diff": "abc"})
    assert ["git", "apply"] not in [c[:2] for c in commands(run, capsys)]
    (run / "code-abc.diff").write_text("")
    applied = ["git", "apply", str(run / "code-abc.diff")]
    assert applied in commands(run, capsys)


def test_git_runs_in_the_checkout_if_the_run_was_trained_elsewhere(run, capsys):
    change(run, code={"diff": "abc"}, directory="/x y")
    (run / "code-abc.diff").write_text("")
    cd, checkout, apply, *_ = commands(run, capsys)
    git = ["git", "-C", str(ROOT)]
    assert cd == ["cd", "/x y"] and checkout == [*git, "checkout", "c" * 40]
    assert apply == [*git, "apply", str(run / "code-abc.diff")]
    path = run / "run.json"
    record = json.loads(path.read_text())
    for launch in record["launches"]:  # as an earlier version recorded them
        del launch["checkout"]
    path.write_text(json.dumps(record))
    assert ["git", "checkout", "c" * 40] in commands(run, capsys)


@pytest.mark.parametrize("field", ["checkout", "module_path"])
def test_a_launch_whose_path_is_no_text_is_refused(run, field):
    change(run, **{field: 3})
    with pytest.raises(ValueError, match=r"run\.json"):
        reproduce.main([str(run)])


def test_without_git_no_git_command_is_printed(run, capsys):
    change(run, code={"commit": None, "diff": None})
    assert "git" not in [words[0] for words in commands(run, capsys)]


def test_a_missing_or_inconsistent_run_json_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match=r"run\.json"):
        reproduce.main([str(tmp_path)])
    record = json.loads((run / "run.json").read_text())
    record["launches"][0]["start"] = 9
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"run\.json"):
        reproduce.main([str(run)])


def test_the_users_own_modules_are_named_and_can_be_imported(run, capsys):
    """The printed command has one --workdir, the new directory."""
    record = json.loads((run / "run.json").read_text())
    for entry in record["starts"]:
        entry["inputs"] = {"code:my_reward": "0123", "tokenizer": "4567"}
    (run / "run.json").write_text(json.dumps(record))
    change(run, argv=["rsearch", "train", "--workdir=runs/a"], module_path="mine:b c")
    *_, train = commands(run, capsys)
    again = f"--workdir={run}-again"
    assert train[-4:] == ["PYTHONPATH=mine:b c", "rsearch", "train", again]
    reproduce.main([str(run)])
    named = [line for line in capsys.readouterr().out.splitlines() if "needs" in line]
    assert named == ["# needs the module my_reward with digest 0123"]
