"""Run commands of this package as child processes, several at a time."""

import collections
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rsearch.config.spec import ROOT
from rsearch.hosts.preemption import EXIT_CODE, SIGNALS
from rsearch.runtime import console

POLL_SECONDS = 0.2
GPU_FRACTION = 0.92  # of a GPU's memory, shared by the jobs on it
GPU_MEMORY = (  # a user who has set any of these decides instead
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
MAX_STOPS = 5  # a job that ends with EXIT_CODE this often counts as failed


class Job(NamedTuple):
    """Commands that run one after another, each if the previous one has succeeded.

    Attributes:
        name: name of the job; its log is NAME.log.
        commands: the program and arguments of each process.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]


def run_jobs(
    jobs: Sequence[Job],
    out: pathlib.Path,
    *,
    at_once: int,
    gpus: Sequence[str] | None = None,
    on_end: Callable[[Job, int, float], None] = lambda *_: None,
) -> dict[str, int]:
    """Run jobs; if this is interrupted, stop the jobs that are running.

    A job that was stopped by a signal or an outage is queued again, after the others.

    Args:
        jobs: jobs with distinct names.
        out: existing directory for the logs.
        gpus: value of CUDA_VISIBLE_DEVICES for each of the `at_once` slots; None =
            the value of this process.
        on_end: called with a job that has ended, its exit code and its seconds.

    Returns:
        {name: exit code} of the jobs that failed.
    """
    queue, running_jobs, exit_codes, number = list(jobs), {}, {}, 0
    stop_counts = collections.Counter()
    num_on_gpu = 1 if gpus else min(at_once, len(queue))
    # A shell's background jobs ignore SIGINT, and their children would inherit that.
    names = set(SIGNALS)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
        names.remove(signal.SIGHUP)

    def handle(handler):
        for name in names:
            signal.signal(name, handler)

    def interrupt(*_):
        handle(lambda *_: None)  # a second signal must not keep the first from the jobs
        raise KeyboardInterrupt

    handle(interrupt)

    def start(slot, job, commands, start_time):
        log, job_gpus = out / f"{job.name}.log", gpus and gpus[slot]
        process = _start(commands[0], log, job_gpus, num_on_gpu)
        running_jobs[slot] = job, process, commands[1:], start_time

    try:
        while queue or running_jobs:
            for slot in range(at_once):
                if queue and slot not in running_jobs:
                    number += 1
                    job = queue.pop(0)
                    console.note(f"{job.name} begins ({number} of {len(jobs)})")
                    start(slot, job, job.commands, time.monotonic())
            time.sleep(POLL_SECONDS)
            for slot, (job, process, remaining, start_time) in list(
                running_jobs.items()
            ):
                code = process.poll()
                if code is None:
                    continue
                del running_jobs[slot]
                if code == 0 and remaining:
                    start(slot, job, remaining, start_time)
                    continue
                stop_counts[job.name] += code == EXIT_CODE
                if code == EXIT_CODE and stop_counts[job.name] < MAX_STOPS:
                    console.note(f"{job.name} was stopped; it is resumed later")
                    queue.append(job)
                    number -= 1
                    continue
                seconds = time.monotonic() - start_time
                on_end(job, code, seconds)
                outcome = "ends" if code == 0 else "FAILS"
                console.note(f"{job.name} {outcome} after {seconds / 60:.1f} minutes")
                if code:
                    exit_codes[job.name] = code
    finally:
        for _, process, *_ in running_jobs.values():
            process.send_signal(signal.SIGINT)
        handle(signal.default_int_handler)
        for _, process, *_ in running_jobs.values():
            process.wait()
    return exit_codes


def print_failures(failed: dict[str, int], out: pathlib.Path) -> None:
    """Print a line for each job that failed.

    Args:
        failed: result of `run_jobs`.
    """
    for name, code in failed.items():
        reason = ", killed, usually for lack of memory" if code in KILLED else ""
        console.note(f"{name}: exit code {code}{reason}, see {out / name}.log")


def _start(command, log, gpus, num_on_gpu):
    """Start a command's process in its own session, out of reach of Control-C."""
    environment = dict(os.environ)
    # JAX preallocates its share of a GPU; a second job would find no room.
    if not any(environment.get(name) for name in GPU_MEMORY):
        environment[GPU_MEMORY[0]] = f"{GPU_FRACTION / num_on_gpu:.3f}"
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
        # Otherwise JAX would fall back to the CPU if there is no such GPU.
        environment.setdefault("JAX_PLATFORMS", "cuda")
    with open(log, "ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
