"""Whatever one of our files contains, its reader names the fault in one line."""

import json
import pathlib
import warnings

import pytest

from launch import sweep
from rsearch import compare
from rsearch.config import recipes
from rsearch.evaluation.results import (
    read_results,
    read_transcripts,
    record_results,
    show_results,
)
from rsearch.runtime.checkpoint import read_manifest
from rsearch.runtime.journal import AppendLog
from rsearch.runtime.jsonl import read_jsonl
from rsearch.runtime.metrics import MetricsLog, read_metrics
from rsearch.runtime.workdir import CONFIG, Workdir, check_workdir, read_config
from rsearch.stages.memory import read_memory
from rsearch.stages.state import read_undone

GZIP = b"\x1f\x8b\x08junk"
BASE = recipes.load("configs/base.py")
VALUES = [None, True, -1, 10**400, float("nan"), float("inf"), "", "x", [], [[]], {}]
VALUES += [
    [None],
    [1, "x"],
    {"": None},
    {"em": []},
    {"x": {"x": [{}]}},
    "\x1b]0;",
]
BYTES = [
    b"",
    b"\0",
    b"\xff\xfe{",
    b"[" * 100_000,
    b"{",
    b"1" * 5000,
    GZIP,
]
ABOUT = {"stage": "rl", "method": "protocol", "dataset": "d"}
RESULT = ABOUT | {"step": 1, "n": 2, "em": 0.5, "em_95": [0.4, 0.6], "f1": 0.5}
RESULT |= {"searches": 1.5, "by_kind": {"one": {"em": 0.5, "searches": 1.0}}}
RESULT |= {"made_by": {"retrieval": "x", "protocol.tools": ["y"]}, "start": 1}
RESULT |= {"judged_by": {"source": "j"}}
RESULT |= {"notes": {"p": {"n": 1, "mean": 0.5, "quartiles": [0.5] * 5}}}
TRANSCRIPT = ABOUT | {"id": "q", "question": "Who?", "prediction": None}
TRANSCRIPT |= {"segments": [{"source": "policy", "text": "t"}]}


def mutants(value):
    """Yield the value with itself or any value inside it replaced or left out."""
    yield from VALUES
    if isinstance(value, dict):
        for key, inner in value.items():
            yield {k: v for k, v in value.items() if k != key}
            yield from ({**value, key: mutant} for mutant in mutants(inner))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from ([*value[:i], m, *value[i + 1 :]] for m in mutants(inner))


def contents(value, *, is_jsonl):
    """Yield the bytes of files with absurd content, as JSON or JSON Lines."""
    for mutant in mutants(value):
        yield json.dumps(mutant).encode() + b"\n"
    for data in BYTES:
        yield data + b"\n" if is_jsonl else data


def compare_runs(run):
    every = [str(run), "--stage=all", "--method=all"]
    compare.main([*every, "--markdown"])
    if any(row.get("by_kind") for row in read_results(run)):
        compare.main([*every, "--by_kind", "--group"])


def show(run):
    if rows := read_results(run):
        show_results(rows, BASE)


def start(run):
    check_workdir(run, BASE)
    Workdir(run, BASE).close()
    compare_runs(run)


CONFIGURATION = {"name": "x", "seed": 1, "stages": ["rl"], "rl": {"steps": 3}}
FILES = {  # name: (valid content, its reader)
    "results.json": ([RESULT], lambda run: (show(run), compare_runs(run))),
    CONFIG: (
        {"rsearch_workdir": 1, "config": CONFIGURATION, "inputs": {"data": "abc"}},
        lambda run: (read_config(run), start(run)),
    ),
    "sweep.jsonl": (
        {"name": "a", "words": ["--config=x"], "exit_code": 0},
        sweep.finished,
    ),
    "transcripts.jsonl": (TRANSCRIPT, read_transcripts),
    "rolled_back.jsonl": (
        {"step": 1, "roll_back": 1},
        lambda run: read_undone(run / "rolled_back.jsonl"),
    ),
    "memory.jsonl": (
        {"step": 1, "id": "q", "question": "Who?", "text": "t"},
        lambda run: read_memory(run / "memory.jsonl"),
    ),
    "7/manifest.json": ({"schema": 1, "step": 7}, lambda run: read_manifest(run, 7)),
}


@pytest.fixture
def run(tmp_path):
    """The directory of a run that can be compared."""
    folder = tmp_path / "run"
    (folder / "7").mkdir(parents=True)
    whole = {"rsearch_workdir": 1, "config": CONFIGURATION}
    (folder / CONFIG).write_text(json.dumps(whole))
    (folder / "results.json").write_text(json.dumps([RESULT]))
    return folder


def refusal(read, run):
    """Return the error that a command would print; "" if the reader succeeds."""
    try:
        read(run)
    except (ValueError, OSError) as error:
        assert recipes.is_user_error(error), repr(error)
        return str(error)
    return ""


@pytest.mark.fault(88, "results", "configuration", "record of a sweep", "transcripts")
@pytest.mark.fault(88, "manifest", "undone rows", "memory", "directory in its place")
@pytest.mark.parametrize("name", FILES)
def test_absurd_content_is_refused_in_one_line(run, name, capsys):
    value, read = FILES[name]
    path, num_refused = run / name, 0
    for data in contents(value, is_jsonl=path.suffix == ".jsonl"):
        path.write_bytes(data)
        if message := refusal(read, run):
            num_refused += 1
            assert path.name in message or str(run) in message, (data, message)
            # A configuration of another run is refused with a table of both.
            is_table = name == CONFIG and "--accept=" in message
            assert "\n" not in message or is_table, (data, message)
            assert len(message) < 1000 or is_table, (data, message)
    assert num_refused > 15
    path.unlink()
    path.mkdir()
    assert name == CONFIG or str(path.parent) in refusal(read, run)


@pytest.mark.fault(88, "metrics", "journal", "directory in its place")
def test_absurd_rows_are_skipped_and_the_rows_after_them_are_read(tmp_path):
    path, good = tmp_path / "metrics.jsonl", b'{"step": 1, "reward": 0.5}\n'
    journal = tmp_path / "searches-0.journal"
    for data in contents({"step": 0, "reward": 0.5}, is_jsonl=True):
        path.write_bytes(data + good)
        if not data.startswith(GZIP):  # which read_metrics refuses
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert read_metrics(path)[-1] == {"step": 1, "reward": 0.5}
        with MetricsLog(tmp_path, tensorboard=False) as log:
            log.write(2, {})
        assert [row["step"] for row in read_metrics(path)][-2:] == [1, 2]
        journal.write_bytes(data)
        AppendLog(tmp_path, "searches").add(["q"], b"body")
        assert AppendLog(tmp_path, "searches").get(["q"]) == b"body"
    for file in (path, journal):
        file.unlink()
        file.mkdir()
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        MetricsLog(tmp_path, tensorboard=False)
    with pytest.raises(OSError, match=r"searches-0\.journal"):
        AppendLog(tmp_path, "searches")


@pytest.mark.fault(88, "transcripts")
def test_damaged_transcripts_do_not_lose_an_evaluation(run: pathlib.Path):
    path = run / "transcripts.jsonl"
    other = TRANSCRIPT | {"method": "rag"}
    path.write_text(f"[1]\n{json.dumps(other)}\n")
    record_results(run, RESULT, [TRANSCRIPT])
    assert read_transcripts(run) == [other, TRANSCRIPT]
    assert read_jsonl(path.with_name("transcripts.jsonl.damaged")) == [[1]]
