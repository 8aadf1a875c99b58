"""Runs that receive a signal to stop save their state and exit soon."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest

from rsearch.hosts.preemption import EXIT_CODE
from rsearch.runtime import checkpoint
from rsearch.runtime.metrics import read_metrics
from tests.hosts.test_processes import start_hosts
from tests.llm.test_endpoint import reply, serving
from tests.small_run import (
    ROOT,
    arguments,
    child_environment,
    quick_compilation,
    run_python,
)
from tests.test_train import assert_same_as_uninterrupted

__all__ = ["quick_compilation"]
RARE_SAVES = dict(checkpoint__sft_steps=1000, checkpoint__rl_steps=1000)
ONLY_RL = {"stages": "('rl',)", "eval__at_start": False}  # starts training immediately
PROGRAM = """
import signal, sys, time
from rsearch.config import recipes as config
from rsearch.hosts import preemption
from rsearch.runtime import console
saved = sys.argv[2]
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup

def work(argv):
    with preemption.handle_signals(float(sys.argv[3])):
        if sys.argv[1] == "nothing":
            print("ready", flush=True)
            time.sleep(60)
        with preemption.defer_exit():
            print("ready", flush=True)
            try:
                while True:
                    time.sleep(0.01)
                    if sys.argv[1] != "deaf":
                        preemption.raise_if_stopping()
            except preemption.PreemptedError:
                console.note("saving")
                open(saved, "w").write("all of it")
                if sys.argv[1] == "slow":
                    time.sleep(60)
                raise

sys.exit(config.run_command(work, []))
"""


def stopped(saved, kind, *, grace=30.0, signals=(signal.SIGTERM,)):
    """Signal PROGRAM; return (exit code, seconds since the first signal, stderr)."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, kind, str(saved), str(grace)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    for name in signals:
        process.send_signal(name)
        time.sleep(0.3)
    _, told = process.communicate(timeout=60)
    return process.returncode, time.monotonic() - began, told


ALARM = """
import signal, time
from rsearch.hosts import preemption

rung = []
with preemption.handle_signals(30.0), preemption.defer_exit():
    signal.signal(signal.SIGALRM, lambda *_: rung.append(True))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    time.sleep(0.5)
    preemption.raise_if_stopping()
assert rung
"""


def test_a_signal_that_user_code_handles_stops_nothing():
    run = subprocess.run(
        [sys.executable, "-c", ALARM], cwd=ROOT, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.fault(40, "SIGTERM", "SIGUSR1", "SIGHUP")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_saves_everything_and_exits_with_75(tmp_path, name):
    saved = tmp_path / "saved"
    code, seconds, told = stopped(saved, "saves", signals=(signal.Signals[name],))
    assert (code, saved.read_text()) == (EXIT_CODE, "all of it")
    assert seconds < 5 and name in told and "Traceback" not in told


def test_a_run_with_nothing_unsaved_exits_immediately(tmp_path):
    code, seconds, told = stopped(tmp_path / "saved", "nothing")
    assert code == EXIT_CODE and seconds < 5 and "nothing is unsaved" in told


@pytest.mark.parametrize(
    ("make_log", "name"), [(os.pipe, "SIGINT"), (pty.openpty, "SIGHUP")]
)
def test_a_signal_that_also_ends_the_log_saves_and_exits_with_75(
    tmp_path, make_log, name
):
    """Control-C also ends `tee`, and a terminal that is closed sends SIGHUP."""
    saved, (reader, writer) = tmp_path / "saved", make_log()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "saves", str(saved), "30"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=writer,
    )
    os.close(writer)
    with process:
        assert process.stdout.readline() == b"ready\n"
        os.close(reader)
        process.send_signal(signal.Signals[name])
        assert process.wait(60) == EXIT_CODE
    assert saved.read_text() == "all of it"


BAR = """
import time
from rsearch.hosts import preemption
from rsearch.runtime import console

with preemption.handle_signals(30.0):
    for _ in console.progress(range(9), "steps"):
        time.sleep(60)
"""


def test_a_signal_during_a_progress_bar_leaves_the_terminal_with_a_cursor():
    terminal, stderr = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", BAR], cwd=ROOT, env=environment, stderr=stderr
    )
    os.close(stderr)
    output = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while data := os.read(terminal, 4096):
            if b"steps" in data and b"steps" not in output:
                process.send_signal(signal.SIGINT)
            output += data
    os.close(terminal)
    assert process.wait(60) == EXIT_CODE and b"SIGINT" in output
    assert output.rfind(b"\x1b[?25h") > output.rfind(b"\x1b[?25l") >= 0


def test_a_run_that_exceeds_its_grace_period_exits_unsaved(tmp_path):
    code, seconds, told = stopped(tmp_path / "saved", "deaf", grace=0.5)
    assert code == EXIT_CODE and seconds < 5 and "without saving" in told
    assert not (tmp_path / "saved").exists()


@pytest.mark.fault(40, "SIGINT twice")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_second_signal_exits_immediately(tmp_path, name):
    both = (signal.Signals[name],) * 2
    code, seconds, told = stopped(tmp_path / "saved", "slow", signals=both)
    assert code == EXIT_CODE and seconds < 5 and f"{name} again" in told


@pytest.mark.fault(40, "every stage")
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["append rl/metrics", "append sft/metrics"])
def test_a_stopped_run_resumes_bit_identically(tmp_path, moment):
    """Saves are rare here: the signal must save the step, or it would be repeated."""
    own = arguments(tmp_path / "run", **RARE_SAVES)
    command = ["-m", "tests.interrupted_run"]
    done = run_python(*command, f"SIGTERM@{moment}", *own)
    assert done.returncode == EXIT_CODE, done.stderr
    assert "Traceback" not in done.stderr and "saved after 1 steps" in done.stderr
    stage = moment.split()[1].partition("/")[0]
    assert checkpoint.steps(tmp_path / "run" / stage / "checkpoints") == [1]
    assert len(read_metrics(tmp_path / "run" / stage / "metrics.jsonl")) == 1
    done = run_python(*command, "never", *own)
    assert done.returncode == 0, done.stderr
    assert_same_as_uninterrupted(tmp_path / "run")


def test_a_signal_between_two_stages_exits_immediately(tmp_path):
    command = arguments(tmp_path / "run")
    done = run_python("-m", "tests.interrupted_run", "SIGINT@replace results", *command)
    assert done.returncode == EXIT_CODE, done.stderr
    assert "Traceback" not in done.stderr


def test_a_signal_ends_an_evaluation_whose_judge_hangs(tmp_path):
    is_asked, is_over = threading.Event(), threading.Event()

    def hang(number, body):
        if number:  # the first call checks the endpoint
            is_asked.set()
            is_over.wait(60)
        return reply("True")

    with serving(hang) as endpoint:
        judge = {"source": endpoint.url, "name": "m", "api_key_env": ""}
        names = {f"models__eval_judge__{n}": value for n, value in judge.items()}
        words = arguments(tmp_path / "run", eval__methods="direct", **names)
        process = subprocess.Popen(
            [sys.executable, "-m", "rsearch.evaluate", *words],
            cwd=ROOT,
            env={**os.environ, **child_environment()},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert is_asked.wait(600)
            start_time = time.monotonic()
            process.send_signal(signal.SIGINT)
            error = process.communicate(timeout=60)[1]
            seconds = time.monotonic() - start_time
        finally:
            is_over.set()
            process.kill()
    assert process.returncode == EXIT_CODE and seconds < 20, error
    assert "SIGINT" in error.splitlines()[-1] and "Traceback" not in error
    launches = json.loads((tmp_path / "run" / "run.json").read_text())["launches"]
    assert launches[-1]["exit_code"] == EXIT_CODE


STARTING = """
import sys, threading, time
from rsearch.hosts import preemption
preemption.exit_on_signals()
print("ready", flush=True)
if sys.argv[1] == "imports":
    time.sleep(60)
while sys.argv[1] == "handlers are exchanged":
    with preemption.handle_signals(60.0):
        pass
while sys.argv[1] == "busy":
    sum(range(100))
with preemption.handle_signals(60.0):
    pass
time.sleep(60)
"""


@pytest.mark.fault(89, "imports", "handlers are exchanged", "after the run")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_while_a_command_starts_exits_with_75(name):
    for moment in ("imports", "handlers are exchanged", "busy", "after the run"):
        process = subprocess.Popen(
            [sys.executable, "-c", STARTING, moment],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.Signals[name])
        _, told = process.communicate(timeout=10)
        assert process.returncode == EXIT_CODE and name in told, (moment, told)


@pytest.mark.fault(89, "imports", "loading", "first step")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
@pytest.mark.parametrize("seconds", [0.5, 1.0, 2.0, 4.0, 8.0, 12.0])
def test_a_signal_to_a_starting_run_exits_with_75(tmp_path, name, seconds):
    process = subprocess.Popen(
        [sys.executable, "-m", "rsearch.train", *arguments(tmp_path / "run")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(seconds)
    process.send_signal(signal.Signals[name])
    _, told = process.communicate(timeout=60)
    assert process.returncode == EXIT_CODE and "Traceback" not in told, told
    config = tmp_path / "run" / "config.json"
    assert not config.exists() or json.loads(config.read_text())


def begun(tmp_path, **settings):
    """Start two hosts; return (workdir, processes) in the middle of a long RL stage."""
    run = tmp_path / "run"
    command = arguments(run, **RARE_SAVES, **ONLY_RL, rl__steps=1000, **settings)
    processes = start_hosts("-m", "rsearch.train", *command)
    rows = run / "rl" / "metrics.jsonl"
    end = time.monotonic() + 300
    while not rows.exists() or rows.read_bytes().count(b"\n") < 2:
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < end
        time.sleep(0.1)
    return run, processes


def ended(processes, seconds):
    """Wait at most `seconds`; return each host's (exit code, stderr)."""
    told = [None] * len(processes)

    def wait(i):
        told[i] = processes[i].communicate()[1]

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(len(told))]
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(end - time.monotonic())
    alive = [i for i, thread in enumerate(threads) if thread.is_alive()]
    for process in processes:
        process.kill()
    for thread in threads:
        thread.join()
    assert not alive, (alive, told)
    return [(p.returncode, t) for p, t in zip(processes, told, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("asked", [(0, 1), (1,)])
def test_two_hosts_save_together_whichever_gets_the_signal(tmp_path, asked):
    run, processes = begun(tmp_path)
    for number in asked:
        processes[number].send_signal(signal.SIGTERM)
    for code, error in ended(processes, 15):
        assert code == EXIT_CODE, error
        assert "Traceback" not in error
    rows = read_metrics(run / "rl" / "metrics.jsonl")
    assert checkpoint.steps(run / "rl" / "checkpoints") == [len(rows)]


@pytest.mark.fault(41, "stopped")
@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_hanging_host_ends_the_run_with_an_error_that_names_it(tmp_path, number):
    _, processes = begun(tmp_path)
    processes[number].send_signal(signal.SIGSTOP)
    ((code, error),) = ended([processes[1 - number]], 15)
    processes[number].kill()
    processes[number].communicate()
    assert code == EXIT_CODE, error
    assert f"error: host {number}" in error and "not been heard from" in error


@pytest.mark.fault(41, "killed")
@pytest.mark.slow
def test_a_killed_host_ends_the_run_with_an_error_that_names_it(tmp_path):
    """The error is not that of the exchange that fails because the host is missing."""
    _, processes = begun(tmp_path)
    processes[1].kill()
    (_, (code, error)) = ended(processes[::-1], 20)
    assert code == EXIT_CODE, error
    assert "error: host 1" in error and "not been heard from" in error
