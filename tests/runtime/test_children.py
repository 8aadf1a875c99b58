"""Child processes: commands in sequence, several jobs in parallel, and their logs."""

import signal
import sys

import pytest

from rsearch.hosts.preemption import SIGNALS
from rsearch.runtime.children import Job, run_jobs


@pytest.fixture(autouse=True)
def handlers():
    before = {name: signal.getsignal(name) for name in SIGNALS}
    yield
    for name, handler in before.items():
        signal.signal(name, handler)


def python(text):
    return (sys.executable, "-c", text)


def test_a_jobs_next_command_runs_only_if_the_previous_one_succeeded(tmp_path):
    say = {n: python(f"print({n})") for n in (1, 2, 4)}
    jobs = [
        Job("well", (say[1], say[2])),
        Job("ill", (say[1], python("exit(3)"), say[4])),
    ]
    ends = []
    failed = run_jobs(
        jobs, tmp_path, at_once=2, on_end=lambda job, code, _: ends.append((job, code))
    )
    assert failed == {"ill": 3} and sorted(ends) == [(jobs[1], 3), (jobs[0], 0)]
    assert (tmp_path / "well.log").read_text().split() == ["1", "2"]
    assert (tmp_path / "ill.log").read_text().split() == ["1"]
