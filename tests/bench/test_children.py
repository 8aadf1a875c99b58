"""Subjects that run in processes of their own and are measured in turns."""

import json
import os
import pathlib
import subprocess
import sys
import uuid
from types import SimpleNamespace

import pytest

from rsearch.bench import child
from rsearch.bench.comparison import ROOT, Subject, compare, run_in_process
from rsearch.config.recipes import is_user_error
from tests.bench import echo
from tests.models.tiny_bert import write_tiny_bert

ECHO = "tests.bench.echo"
STARTS_OTHERS = """
import pathlib, sys
from jax._src import xla_bridge
from rsearch.bench import neighbours
from rsearch.bench.networks import SHAPES, model_directory

if __name__ == "__main__":
    work, encoder = pathlib.Path(sys.argv[1]), sys.argv[2]
    with model_directory("", SHAPES["tiny"]) as path:
        assert (pathlib.Path(path) / "model.safetensors").is_file()
    neighbours.real_passages(
        work,
        corpus=str(work / "corpus.jsonl"),
        encoder=encoder,
        family="minilm",
        index="",
        questions="",
        num_queries=4,
    )
    assert (work / "real" / "exact.npy").is_file()
    print(xla_bridge.backends_are_initialized())
"""


def numbers(message):
    return [one["number"] for one in message]


def test_subjects_take_turns_in_processes_of_their_own(tmp_path, capsys):
    log = tmp_path / "log"
    one = Subject(ECHO, {"log": str(log)})
    actual = compare({"rsearch": one, "torch": one}, 3)
    # The first repetition, which compiles, does not count.
    assert numbers(actual["rsearch"]) == numbers(actual["torch"]) == [2, 3, 4]
    ran = log.read_text().split()
    assert ran[0] != ran[1] and ran[2:] == ran[:2] * 3
    assert "repetitions of rsearch and torch 8/8" in capsys.readouterr().err


def test_a_short_subject_does_each_repetition_twice_and_the_second_counts():
    one = {"rsearch": Subject(ECHO)}
    assert numbers(compare(one, 2, are_short=True)["rsearch"]) == [3, 5]
    assert numbers(compare(one, 2)["rsearch"]) == [2, 3]


def test_with_one_at_a_time_a_subject_ends_before_the_next_begins(tmp_path):
    log = tmp_path / "log"
    one = Subject(ECHO, {"log": str(log)})
    compare({"rsearch": one, "torch": one}, 2, one_at_a_time=True)
    ran = log.read_text().split()
    assert ran == [ran[0]] * 3 + [ran[-1]] * 3 and ran[0] != ran[-1]


def test_peers_that_are_missing_or_fail_are_reported_with_the_reason():
    actual = compare(
        {
            "rsearch": Subject(ECHO),
            "faiss": Subject(ECHO, make="make_missing"),
            "tunix": Subject(ECHO, {"fails_at": 2}),
            "hnsw": Subject(ECHO, make="make_unmeasured"),
        },
        2,
    )
    assert numbers(actual["rsearch"]) == [2, 3]
    assert actual["faiss"] == "a_library_that_nobody_has is not installed"
    assert "no more" in actual["tunix"]
    assert actual["hnsw"] == "no setting will do"


@pytest.mark.parametrize("settings", [{}, {"fails_at": 2}])
def test_a_subject_with_a_thread_that_never_ends_is_ended(settings):
    waiting = Subject(ECHO, settings, make="make_waiting")
    actual = compare({"rsearch": Subject(ECHO), "tunix": waiting}, 2)
    assert numbers(actual["rsearch"]) == [2, 3]
    assert ("no more" in actual["tunix"]) if settings else numbers(actual["tunix"])


def test_a_subject_runs_in_the_users_directory_and_its_files_are_removed(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (numbers,) = compare({"rsearch": Subject(ECHO, make="make_stored")}, 1)["rsearch"]
    assert numbers["directory"] == str(tmp_path)
    assert not pathlib.Path(numbers["folder"]).exists()


def test_a_subject_may_report_that_it_has_no_number():
    subject = Subject(ECHO, make="make_unmeasured")
    assert compare({"rsearch": subject}, 1) == {"rsearch": "no setting will do"}


def test_a_failure_of_rsearch_itself_is_raised():
    with pytest.raises(RuntimeError, match=r"(?s)rsearch: .*no more"):
        compare({"rsearch": Subject(ECHO, {"fails_at": 1})}, 1)


@pytest.mark.slow
def test_a_process_that_starts_others_uses_no_accelerator(tmp_path):
    write_tiny_bert(tmp_path / "bert")
    passages = [{"id": str(i), "contents": f"t{i}\nthe city"} for i in range(12)]
    lines = "".join(f"{json.dumps(passage)}\n" for passage in passages)
    (tmp_path / "corpus.jsonl").write_text(lines)
    program = tmp_path / "program.py"
    program.write_text(STARTS_OTHERS)
    done = subprocess.run(
        [sys.executable, program, tmp_path, tmp_path / "bert"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


def test_a_function_in_another_process_raises_its_errors_here(tmp_path):
    assert run_in_process(os.getpid) != os.getpid()
    (tmp_path / "x").write_text("{")
    with pytest.raises(ValueError, match="x is not JSON") as refused:
        run_in_process(echo.refuse, tmp_path / "x")
    assert is_user_error(refused.value)
    with pytest.raises(ValueError, match="badly formed") as failed:
        run_in_process(uuid.UUID, "a")
    assert not is_user_error(failed.value)


def test_memory_on_an_accelerator_is_the_devices(monkeypatch):
    """JAX, torch and the memory statistics of their devices are faked."""
    device = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 7})
    for backend, is_told in (("gpu", True), ("tpu", True), ("cpu", False)):
        jax = SimpleNamespace(
            default_backend=lambda backend=backend: backend, devices=lambda: [device]
        )
        monkeypatch.setitem(sys.modules, "jax", jax)
        assert (child.device_peak_bytes() == 7) == is_told
    forgotten = []
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        reset_peak_memory_stats=lambda: forgotten.append(1),
        max_memory_allocated=lambda: 9,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    child.reset_device_peak()
    assert forgotten == [1] and child.device_peak_bytes() == 9


def test_memory_that_a_subject_reports_itself_is_used():
    (one,) = compare({"rsearch": Subject(ECHO, make="make_counted")}, 1)["rsearch"]
    assert one == {"peak_bytes": 5}


def test_memory_is_measured_for_each_repetition_separately():
    one, other = compare({"rsearch": Subject(ECHO, make="make_large")}, 2)["rsearch"]
    assert one["peak_bytes"] > other["peak_bytes"] + 40_000_000
    assert one["peak_bytes"] < 150_000_000
