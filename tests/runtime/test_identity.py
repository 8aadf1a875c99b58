"""run.json records what results depend on, and each start reports what has changed."""

import contextlib
import copy
import json
import os
import sys

import pytest

from rsearch.config import recipes
from rsearch.hosts.preemption import PreemptedError
from rsearch.runtime.identity import (
    changes_since,
    num_starts,
    record_start,
    recorded_start,
    refuse_changes,
)
from rsearch.runtime.workdir import Workdir

INPUTS = {"tokenizer": "1234", "data.dev": "abcd"}


@pytest.fixture(scope="module")
def config():
    return recipes.load("configs/base.py")


@pytest.fixture
def run(tmp_path, config):
    """The folder of a run that has started once."""
    with Workdir(tmp_path / "run", config) as home:
        record_start(home.path, "train", config, inputs=INPUTS)
    return home.path


def read(run):
    return json.loads((run / "run.json").read_text())


def change_last_start(run, change):
    """Edit the record as if the last start had used something else."""
    record = read(run)
    change(record["starts"][-1])
    (run / "run.json").write_text(json.dumps(record))


@pytest.mark.fault(83, "recorded")
def test_a_start_is_recorded_with_code_libraries_devices_and_inputs(run):
    record = read(run)
    (start,) = record["starts"]
    assert record["run"] == json.loads((run / "config.json").read_text())["run"]
    assert start["code"]["files"].keys() >= {"train.py", "stages/rl.py"}
    assert start["program"].keys() >= {"jax", "tokenizers", "XLA_FLAGS", "devices"}
    assert start["inputs"] == INPUTS and start["count"] == 1


def test_equal_starts_share_an_entry_and_other_starts_add_one(run, config, capsys):
    record_start(run, "train", config, inputs=INPUTS)
    assert [start["count"] for start in read(run)["starts"]] == [2]
    record_start(run, "evaluate", config, inputs=INPUTS)
    assert num_starts(run) == 2
    assert not capsys.readouterr().err


CHANGES = {
    "code": (
        lambda start: start["code"]["files"].update({"rewards/form.py": "0"}),
        ["rewards/form.py"],
    ),
    "library": (
        lambda start: start["program"].update(jax="0.0.1"),
        ["jax", "'0.0.1'"],
    ),
    "variable": (
        lambda start: start["program"].update(XLA_FLAGS="--xla_x"),
        ["XLA_FLAGS", "'--xla_x'"],
    ),
    "device": (
        lambda start: start["program"].update(devices="8 x TPU v5"),
        ["devices", "'8 x TPU v5'"],
    ),
    "held-out questions": (
        lambda start: start["inputs"].update({"data.dev": "ffff"}),
        ["data.dev", "ffff", "abcd"],
    ),
}


@pytest.mark.fault(
    83, "code", "library", "variable", "device", "held-out questions", "strict"
)
@pytest.mark.parametrize("change, words", CHANGES.values(), ids=CHANGES)
def test_a_start_with_a_change_reports_it_and_strict_refuses(
    run, config, capsys, change, words
):
    change_last_start(run, change)
    before = copy.deepcopy(read(run))
    with pytest.raises(ValueError) as refused:
        refuse_changes(run, config, inputs=INPUTS)
    assert all(word in str(refused.value) for word in [str(run), *words])
    assert read(run) == before
    record_start(run, "train", config, inputs=INPUTS)
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in words)
    assert num_starts(run) == 2
    refuse_changes(run, config, inputs=INPUTS)  # the next start is the same


def test_changes_are_those_since_the_last_start_of_the_same_command(run, config):
    def changes(**inputs):
        return changes_since(run, "train", config, inputs=inputs, stage="rl")

    record_start(run, "evaluate", config, inputs={"tokenizer": "9"})
    assert not changes(tokenizer="1234", new="1")
    assert "tokenizer" in changes(tokenizer="9")[0]
    # The stage has its own tokenizer, which is not compared with the base's.
    change_last_start(run, lambda start: start.update(command="train"))
    change_last_start(run, lambda start: start["inputs"].update({"rl.tokenizer": "8"}))
    assert not changes(tokenizer="8")
    assert "rl.tokenizer" in changes(tokenizer="9")[0]
    (run / "run.json").unlink()
    assert not changes(tokenizer="9")


def test_inputs_are_compared_with_the_last_start_that_read_them(run, config, capsys):
    """An evaluation of other questions in between hides no change."""
    other = {"tokenizer": "1234", "data.dev (data.dev=e)": "eeee"}
    record_start(run, "evaluate", config, inputs=other)
    record_start(run, "train", config, inputs=INPUTS)
    record_start(run, "evaluate", config, inputs=other)
    refuse_changes(run, config, inputs=INPUTS)
    assert not capsys.readouterr().err
    changed = INPUTS | {"data.dev": "ffff"}
    with pytest.raises(ValueError, match="abcd"):
        refuse_changes(run, config, inputs=changed)
    record_start(run, "train", config, inputs=changed)
    (line,) = capsys.readouterr().err.splitlines()
    assert "abcd" in line and "ffff" in line
    record_start(run, "evaluate", config, inputs=other | {"data.dev (data.dev=e)": "9"})
    (line,) = capsys.readouterr().err.splitlines()
    assert "eeee" in line


def test_strict_refuses_nothing_in_a_new_run(tmp_path, config):
    refuse_changes(tmp_path / "new", config, inputs=INPUTS)


def test_a_run_of_an_earlier_version_gets_an_id_and_keeps_it(run, config):
    body = json.loads((run / "config.json").read_text())
    del body["run"]
    (run / "config.json").write_text(json.dumps(body))
    (run / "run.json").unlink()
    with Workdir(run, config) as first:
        assert first.run_id
        record_start(run, "train", config, inputs=INPUTS)
    with Workdir(run, config) as second:
        assert second.run_id == first.run_id == read(run)["run"]


ENDS = {
    "finished": (None, 0),
    "a user's mistake": (ValueError("of the package"), 1),  # raised here, in a test
    "stopped by itself": (recipes.StoppedError("collapsed"), 3),
    "preempted": (PreemptedError(), 75),
    "interrupted": (KeyboardInterrupt(), 130),
    "an internal error": (KeyError("x"), 1),
}


@pytest.mark.parametrize("error, code", ENDS.values(), ids=ENDS)
def test_a_start_is_recorded_with_its_command_line_and_exit_code(
    tmp_path, config, error, code
):
    def start():
        with recorded_start(home.path, "train", config, inputs=INPUTS):
            (launch,) = read(home.path)["launches"]
            assert launch["ended"] is None and launch["exit_code"] is None
            if error is not None:
                raise error

    with Workdir(tmp_path / "run", config) as home, contextlib.ExitStack() as stack:
        if error is not None:
            stack.enter_context(pytest.raises(type(error)))
        start()
    (launch,) = read(home.path)["launches"]
    assert (launch["start"], launch["exit_code"], launch["killed"]) == (1, code, False)
    assert launch["argv"] == sys.orig_argv and launch["process"] == os.getpid()
    assert launch["began"] <= launch["ended"]


def test_a_start_that_was_killed_is_recognised_by_the_next(run, config):
    with recorded_start(run, "train", config, inputs=INPUTS):
        killed, present = read(run)["launches"]
        assert killed["killed"] and killed["exit_code"] is killed["ended"] is None
        assert not present["killed"]
    record_start(run, "train", config, inputs=INPUTS)
    assert [x["killed"] for x in read(run)["launches"]] == [True, False, False]


def test_the_record_of_another_run_at_its_path_is_left_unchanged(run, config):
    with recorded_start(run, "train", config, inputs=INPUTS):
        record = read(run)
        record["launches"][-1]["process"] += 1
        (run / "run.json").write_text(json.dumps(record))
    assert read(run) == record


def test_a_record_of_an_earlier_version_is_continued(run, config):
    record = read(run)
    del record["launches"]
    (run / "run.json").write_text(json.dumps(record))
    assert record_start(run, "train", config, inputs=INPUTS) == 0
    assert read(run)["starts"][0]["count"] == 2


@pytest.mark.parametrize(
    "text",
    [
        '{"rsearch_run": 1, "starts": [], "launches": [{"argv": "x"}]}',
        "",
        "[]",
        "{}",
        '{"rsearch_run": 2, "starts": []}',
        '{"rsearch_run": 1, "starts": [{"code": 1}]}',
        '{"rsearch_run": 1, "starts": [{"code": {"diff": "", "files": {}}, '
        '"command": "", "config": "", "program": {}, "inputs": {}, "count": 1}]}',
        '{"rsearch_run": 1, "starts": {"a": NaN}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_record_is_refused_by_name_and_left_unchanged(run, config, text):
    (run / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json"):
        record_start(run, "train", config, inputs=INPUTS)
    assert (run / "run.json").read_text() == text
