"""Commands whose output does not fit on the disk, or with too few open files."""

import subprocess
import sys

import pytest

from rsearch.config import recipes as config

COMMAND = """
import pathlib, resource, sys
from rsearch.config import recipes as config
from rsearch.runtime import console

def main(argv):
    how, done = argv
    if how == "help":
        config.parse_flags(["--help"], flags={})
    if how == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
        kept = [open("/dev/null") for _ in range(50)]
    for i in range(2000 if how == "much" else 3):
        print("a result")
        console.note("a line of the log")
    list(console.progress(range(3), "work"))
    pathlib.Path(done).write_text("all of it")
    if how == "wrong":
        config.apply_overrides(config.load("configs/base.py"), {"sede": 1})

sys.exit(config.run_command(main, sys.argv[1:]))
"""


def run(how, done, **streams):
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    command = [sys.executable, "-c", COMMAND, how, str(done)]
    return subprocess.run(command, cwd=config.ROOT, text=True, timeout=120, **both)


@pytest.fixture
def full():
    with open("/dev/full", "w") as device:
        yield device


@pytest.mark.fault(42, "full log")
@pytest.mark.parametrize(("how", "code"), [("few", 0), ("much", 0), ("wrong", 2)])
def test_a_full_log_does_not_end_a_run(tmp_path, full, how, code):
    done = run(how, tmp_path / "done", stderr=full)
    assert (tmp_path / "done").read_text() == "all of it"
    assert done.returncode == code
    assert set(done.stdout.splitlines()) == {"a result"}


@pytest.mark.fault(42, "full log")
@pytest.mark.parametrize("how", ["few", "much", "help"])
def test_results_that_do_not_fit_are_an_error_in_one_line(tmp_path, full, how):
    done = run(how, tmp_path / "done", stdout=full)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: No space left on device: ")
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr


@pytest.mark.fault(42, "file descriptors")
def test_too_few_file_descriptors_are_an_error_in_one_line(tmp_path):
    done = run("files", tmp_path / "done")
    assert done.returncode == 2
    message = "error: Too many open files: /dev/null; ulimit -n allows more\n"
    assert done.stderr == message
