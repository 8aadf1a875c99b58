"""Trackers receive each row of metrics.jsonl once, whatever happens to them."""

import importlib.util
import json
import sys

import pytest

from configs import base
from rsearch import train
from rsearch.config.recipes import run_command
from rsearch.runtime import trackers
from rsearch.runtime.metrics import METRICS, MetricsLog, curve_values, read_metrics
from rsearch.runtime.trackers import TRACKERS, Follower, tracking

# It stores what it receives in files; while a file "outage" exists, it is unreachable.
FAKE = """
import json, os, pathlib

FOLDER = pathlib.Path(os.environ["FAKE_TRACKER"])


def Settings(**settings):
    return settings


class Run:
    def __init__(self, path, resumed):
        self.path, self.resumed = path, resumed
        self.starting_step = len(path.read_text().splitlines()) - 1

    def log(self, values, *, step, commit):
        if (FOLDER / "outage").exists():
            raise ConnectionError("no route")
        with open(self.path, "a") as file:
            file.write(json.dumps([step, values]) + chr(10))

    def finish(self):
        pass


def init(*, id, name, config, group, **settings):
    print("noise of a library")
    if (FOLDER / "outage").exists():
        raise ConnectionError("no route")
    path = FOLDER / f"{id}.jsonl"
    resumed = path.exists()
    if not resumed:
        path.write_text(json.dumps([name, group, config]) + chr(10))
    return Run(path, resumed)
"""


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The folder of a fake wandb, which this process and its children import."""
    folder = tmp_path / "server"
    (folder / "modules").mkdir(parents=True)
    (folder / "modules" / "wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(folder / "modules")
    monkeypatch.setenv("PYTHONPATH", str(folder / "modules"))
    monkeypatch.setenv("FAKE_TRACKER", str(folder))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield folder
    sys.modules.pop("wandb", None)


def make_run(tmp_path):
    run = tmp_path / "run"
    (run / trackers.FOLDER).mkdir(parents=True)
    return run


def follower(run):
    return Follower("wandb", run, ("sft", "rl"), {"rl": {"lr": 0.5}})


def write(run, steps, *, first_step=None, stage="rl", reward=0.5):
    with MetricsLog(run / stage, first_step=first_step, tensorboard=False) as log:
        for step in steps:
            row = {"reward": reward + step, "seconds": 0.1, "kl": None, "name": "x"}
            log.write(step, row)


def runs_on(server):
    """{name of a run: [(step, values)]}"""
    runs = {}
    for path in server.glob("*.jsonl"):
        (name, _, _), *rows = map(json.loads, path.read_text().splitlines())
        runs[name] = [tuple(row) for row in rows]
    return runs


def rows_of(run, stage="rl"):
    rows = read_metrics(run / stage / METRICS)
    return [(row["step"], curve_values(row)) for row in rows]


def test_a_tracker_receives_the_rows_of_each_stage_with_config_and_names(
    tmp_path, server
):
    run = make_run(tmp_path)
    write(run, range(3), stage="sft")
    sender = follower(run)
    sender.send_new()
    write(run, range(2))
    sender.send_new()
    write(run, range(2, 4), first_step=2)
    sender.send_new()
    assert runs_on(server) == {
        "run/sft": rows_of(run, "sft"),
        "run/rl": rows_of(run),
    }
    assert runs_on(server)["run/rl"][1] == (
        1,
        {"reward/reward": 1.5, "perf/seconds": 0.1},
    )
    heads = [path.read_text().splitlines()[0] for path in server.glob("*.jsonl")]
    assert [json.loads(head)[1:] for head in heads] == [
        ["run", {"rl": {"lr": 0.5}}]
    ] * 2


@pytest.mark.parametrize("begun", [0, 2])
def test_rows_that_an_outage_missed_are_sent_once_afterwards(tmp_path, server, begun):
    run = make_run(tmp_path)
    write(run, range(begun))
    sender = follower(run)
    sender.send_new()
    (server / "outage").touch()
    write(run, range(begun, 5), first_step=begun)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            sender.send_new()
    (server / "outage").unlink()
    sender.send_new()
    assert runs_on(server) == {"run/rl": rows_of(run)}


@pytest.mark.parametrize("forgotten", [0, 1])
def test_a_restart_continues_the_same_tracker_run_without_duplicates(
    tmp_path, server, forgotten
):
    """This also holds if it was killed between sending a row and recording that."""
    run = make_run(tmp_path)
    write(run, range(4))
    follower(run).send_new()
    journal = run / trackers.FOLDER / "wandb.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: len(lines) - forgotten]))
    write(run, range(2, 6), first_step=2)  # steps 2 and 3 are repeated
    follower(run).send_new()
    assert runs_on(server) == {"run/rl": rows_of(run)}


def test_if_a_step_gets_other_numbers_a_new_tracker_run_has_all_rows(tmp_path, server):
    run = make_run(tmp_path)
    write(run, range(4))
    sender = follower(run)
    sender.send_new()
    before = rows_of(run)
    write(run, range(2, 3), first_step=2, reward=0.75)
    sender.send_new()
    write(run, range(3, 5), first_step=3, reward=0.75)
    follower(run).send_new()
    assert runs_on(server) == {"run/rl": before, "run/rl-2": rows_of(run)}
    assert len(rows_of(run)) == 5


def test_a_separate_process_sends_rows_and_captures_the_librarys_output(
    tmp_path, server, capfd
):
    run = tmp_path / "run"
    run.mkdir()
    with tracking(("wandb",), run, stages=("rl",), config={"url": "http://a:b@c/"}):
        write(run, range(3))
    assert runs_on(server) == {"run/rl": rows_of(run)}
    assert capfd.readouterr() == ("", "")
    assert "noise" in (run / trackers.FOLDER / "wandb.log").read_text()
    (path,) = server.glob("*.jsonl")
    assert "a:b" not in path.read_text()
    (server / "outage").touch()
    with tracking(("wandb",), run, stages=("rl",), config={}):
        write(run, range(3, 5), first_step=3)
    (line,) = capfd.readouterr().err.splitlines()
    assert "wandb: ConnectionError: no route" in line
    assert runs_on(server) == {"run/rl": rows_of(run)[:3]}


@pytest.mark.parametrize("line", ["[1]", "{}", '{"stage": "rl", "step": []}', "3"])
def test_a_journal_with_absurd_rows_loses_them_and_sends_all_others(
    tmp_path, server, line
):
    run = make_run(tmp_path)
    write(run, range(2))
    follower(run).send_new()
    with open(run / trackers.FOLDER / "wandb.jsonl", "a") as journal:
        journal.write(line + "\n")
    write(run, range(2, 4), first_step=2)
    follower(run).send_new()
    assert runs_on(server) == {"run/rl": rows_of(run)}


def test_a_configuration_may_name_every_tracker_and_nothing_else():
    assert set(base.TRACKERS) == TRACKERS.keys()


def test_a_tracker_that_is_not_installed_is_refused_immediately(tmp_path, capsys):
    missing = [name for name in TRACKERS if importlib.util.find_spec(name) is None]
    if not missing:
        pytest.skip("all trackers are installed here")
    arguments = [
        "--config=configs/quickstart.py",
        f"--workdir={tmp_path / 'run'}",
        f"--config.log.track={missing[0]}",
    ]
    assert run_command(train.command, arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.log.track" in line and f"pip install -e '.[{missing[0]}]'" in line
    assert not (tmp_path / "run").exists()
