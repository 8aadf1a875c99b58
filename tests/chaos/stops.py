"""Measure how soon a run that is told to stop has saved its progress and ended.

    python -m tests.chaos.stops

trains the quickstart and, in its RL stage, sends it SIGTERM at random instants: five
times as one process and three times as two hosts on the loopback. Each start resumes
from the last stop. Each time the run must end within five seconds, with code 75 and a
checkpoint of the step that it had reached, whose files are verified. Finally one of the
two hosts is stopped by SIGSTOP: the other must end within 15 s and name that host.
"""

import os
import pathlib
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from rsearch.config.recipes import parse_flags, run_command
from rsearch.hosts.preemption import EXIT_CODE
from rsearch.runtime import checkpoint, console
from rsearch.runtime.metrics import read_metrics
from tests.hosts.test_processes import free_port
from tests.small_run import ROOT

MAX_SECONDS, MAX_SILENT_SECONDS = 5.0, 15.0
SPREAD_SECONDS = 6.0  # latest instant after a start's second row: a step or two
BEGIN_SECONDS = 1200.0  # limit for reaching the RL stage with all programs compiled
QUICKSTART = [
    "--config=configs/quickstart.py",
    "--config.rl.steps=1000",  # it never ends by itself
    "--config.eval.at_start=False",
    "--config.eval.methods=('protocol',)",
]
FLAGS = {
    "alone": (5, "number of signals to one process"),
    "together": (3, "number of signals to both of two hosts"),
    "seed": (0, "seed of the instants"),
    "workdir": ("", "directory that keeps the run (default: a temporary one)"),
}


def start(folder: pathlib.Path, count: int) -> list[subprocess.Popen]:
    """Start or resume the run on `count` hosts, and return its processes."""
    address = f"--coordinator=127.0.0.1:{free_port()}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
    }
    processes = []
    for host in range(count):
        own = [address, f"--num_hosts={count}", f"--host={host}"] if count > 1 else []
        with open(folder / f"log{host}", "wb") as log:
            processes.append(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "rsearch.train", *QUICKSTART),
                        *(f"--workdir={folder / 'run'}", *own),
                    ],
                    cwd=ROOT,
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
            )
    return processes


def told(folder: pathlib.Path, host: int) -> str:
    """Return a host's output."""
    return (folder / f"log{host}").read_text()


def begun(folder: pathlib.Path, count: int) -> list[subprocess.Popen]:
    """Start the run, and return its processes after two more steps of RL."""
    processes = start(folder, count)
    rows = folder / "run" / "rl" / "metrics.jsonl"
    before, end = _lines(rows), time.monotonic() + BEGIN_SECONDS
    while _lines(rows) < before + 2:
        ended = any(process.poll() is not None for process in processes)
        if ended or time.monotonic() > end:
            for process in processes:
                process.kill()
            raise RuntimeError(f"the run took no steps: {told(folder, 0)[-3000:]}")
        time.sleep(0.1)
    return processes


def _lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def stop(folder: pathlib.Path, count: int, wait: float) -> tuple[float, list[str]]:
    """Return the seconds from SIGTERM to the end of all processes, and what was wrong.

    Args:
        folder: directory that contains the run and its logs.
        count: number of hosts.
        wait: seconds between a metrics row of RL and the signal.
    """
    processes = begun(folder, count)
    time.sleep(wait)
    began, worked = time.monotonic(), sum(map(_processor_seconds, processes))
    for process in processes:
        process.send_signal(signal.SIGTERM)
    before = _processor_seconds_of_ended()
    codes = [_ended(process, 60) for process in processes]
    seconds = time.monotonic() - began
    worked = _processor_seconds_of_ended() - before - worked
    step = len(read_metrics(folder / "run" / "rl" / "metrics.jsonl"))
    wrong = []
    if any(code != EXIT_CODE for code in codes):
        wrong.append(f"exit codes {codes}: {told(folder, 0)[-3000:]}")
    # A step whose row is not written yet may be saved; the checkpoint holds the row.
    saved = checkpoint.latest(folder / "run" / "rl" / "checkpoints")
    if saved not in (step, step + 1):
        wrong.append(f"step {step} was reached, but {saved} is saved")
    verified = subprocess.run(
        [sys.executable, "-m", "rsearch.checkpoint", "verify", folder / "run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if verified.returncode:
        wrong.append(f"verify: {verified.stdout}{verified.stderr}")
    if seconds > MAX_SECONDS:
        wrong.append(f"{count} processes took {seconds:.1f} s to end")
    console.note(
        f"{count} processes: {seconds:.2f} s, {worked:.2f} s of CPU time; saved after "
        f"{saved} steps"
    )
    return seconds, wrong


def _processor_seconds(process):
    """Return the CPU seconds that a process, which has no children, has used."""
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2]
    ticks = sum(map(int, fields.split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _processor_seconds_of_ended():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def silence(folder: pathlib.Path) -> tuple[float, list[str]]:
    """Return the seconds until one host gives up the other, and what was wrong."""
    processes = begun(folder, 2)
    processes[1].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    code = _ended(processes[0], 60)
    seconds = time.monotonic() - began
    processes[1].kill()
    processes[1].wait()
    wrong = []
    if code != EXIT_CODE or "error: host 1" not in told(folder, 0):
        wrong.append(f"code {code}: {told(folder, 0)[-3000:]}")
    if seconds > MAX_SILENT_SECONDS:
        wrong.append(f"a silent host was given up after {seconds:.1f} s")
    return seconds, wrong


def _ended(process, seconds):
    """Return a process's exit code, killing it if it does not end in time."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def main(argv) -> int:
    """Run the command; return 1 if something is wrong."""
    given = parse_flags(argv, flags=FLAGS)
    rng, wrong = random.Random(given["seed"]), []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(given["workdir"] or folder).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        for count, name in ((1, "alone"), (2, "together")):
            taken = []
            for _ in range(given[name]):
                wait = rng.uniform(0, SPREAD_SECONDS)
                seconds, faults = stop(folder, count, wait)
                taken.append(seconds)
                wrong += faults
            if taken:
                each = ", ".join(f"{seconds:.1f}" for seconds in sorted(taken))
                median = statistics.median(taken)
                told = f"{count} processes: median {median:.1f} s of {each}"
                print(told, flush=True)
        if given["together"]:
            seconds, faults = silence(folder)
            wrong += faults
            print(f"a stopped host was given up after {seconds:.1f} s")
    for what in wrong:
        print(f"wrong: {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
