"""The launch scripts, with Pythons and a pip that only pretend."""

import os
import pathlib
import shutil
import stat
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / ".ci" / "run"]

# Says which version it is, makes environments of itself, and writes down what pip and
# the modules it runs are asked.
PYTHON = """#!/bin/bash
log() { echo "$*" >>"$FAKE_LOG"; }
case "$1 $2 $3" in
  "-c "*) [[ "$2" == *version_info* ]] && exit $(( {minor} != 11 && {minor} != 12 )) ;;
  "--version  ") echo "Python 3.{minor}.0" ;;
  "-m venv "*)
    log "venv $3 of 3.{minor}"
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    echo "PATH=$PWD/$3/bin:\\$PATH" >"$3/bin/activate"
    case $3 in /*) echo "PATH='$3/bin':\\$PATH" >"$3/bin/activate" ;; esac
    [ -z "$FAKE_NO_PIP" ] || exit 1
    touch "$3/has-pip" ;;
  "-m pip --version") [ -e "$(dirname "$0")/../has-pip" ] ;;
  "-m pip install") log "pip ${@: -1}"; [ -z "$FAKE_PIP_FAILS" ] ;;
  *) log "$@" ;;
esac
"""


class Checkout:
    """A checkout with the scripts, requirements of one line, and fake Pythons."""

    def __init__(self, folder):
        self.folder, self.bin, self.log = folder, folder / "bin", folder / "log"
        (folder / "repo" / "tests").mkdir(parents=True)
        self.repo = folder / "repo"
        shutil.copytree(ROOT / "launch", self.repo / "launch")
        self.require("a==1")
        (self.repo / "tests" / "requirements.txt").write_text("-r ../requirements.txt")
        self.bin.mkdir()
        for name in ("bash", "dirname", "cksum", "tr", "touch", "rm", "mkdir", "cp"):
            (self.bin / name).symlink_to(shutil.which(name))

    def require(self, line):
        (self.repo / "requirements.txt").write_text(line)

    def python(self, name, minor, folder=None):
        path = (folder or self.bin) / name
        path.write_text(PYTHON.replace("{minor}", str(minor)))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def run(self, script, *arguments, **environment):
        """(exit code, stderr, what the Pythons were asked in this run)."""
        self.log.write_text("")
        done = subprocess.run(
            [self.bin / "bash", self.repo / "launch" / script, *arguments],
            cwd=self.folder,
            env={"PATH": str(self.bin), "FAKE_LOG": str(self.log), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stderr, self.log.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


TRAIN = "-m rsearch.train --config=configs/quickstart.py"
MADE = ["venv .venv of 3.11", "pip requirements.txt"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_it_parses_and_can_be_run(script):
    subprocess.run(["bash", "-n", script], check=True)
    if script.name != "environment.sh":
        assert script.read_text().startswith("#!/usr/bin/env bash\n")
        assert "set -euo pipefail" in script.read_text()


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck here")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_shellcheck_finds_nothing(script):
    command = ["shellcheck", "--shell=bash", "--exclude=SC1091", script]
    subprocess.run(command, check=True)


def test_the_quickstart_makes_an_environment_once_and_passes_arguments_on(checkout):
    checkout.python("python3.11", 11)
    train = f"{TRAIN} --config.seed=1 --workdir=a b"
    for expected in ([*MADE, train], [train], [train]):
        code, error, log = checkout.run(
            "quickstart.sh", "--config.seed=1", "--workdir=a b"
        )
        assert (code, log) == (0, expected), error


def test_without_arguments_none_are_passed_on(checkout):
    checkout.python("python3.11", 11)
    assert checkout.run("quickstart.sh")[2][-1] == TRAIN


def test_changed_requirements_are_installed_again_and_so_are_the_old_ones(checkout):
    checkout.python("python3.11", 11)
    checkout.run("quickstart.sh")
    for line in ("a==2", "a==1"):
        checkout.require(line)
        _, _, log = checkout.run("quickstart.sh")
        assert log == ["pip requirements.txt", TRAIN]
        _, _, log = checkout.run("quickstart.sh")
        assert log == [TRAIN]


def test_test_requirements_are_installed_beside_the_others(checkout):
    checkout.python("python3.11", 11)
    (checkout.bin / "ruff").symlink_to("/bin/true")
    checkout.run("quickstart.sh")
    code, error, log = checkout.run("test.sh", "-m", "slow")
    assert (code, log) == (
        0,
        ["pip tests/requirements.txt", "-m pytest -m slow"],
    ), error
    assert checkout.run("quickstart.sh")[2] == [TRAIN]
    assert checkout.run("test.sh")[2] == ["-m pytest"]


def test_a_failed_installation_is_tried_again(checkout):
    checkout.python("python3.11", 11)
    code, _, log = checkout.run("quickstart.sh", FAKE_PIP_FAILS="1")
    assert code != 0 and log == MADE
    assert checkout.run("quickstart.sh")[2] == [MADE[1], TRAIN]


def test_an_environment_left_half_made_is_made_again(checkout):
    checkout.python("python3.11", 11)
    code, _, log = checkout.run("quickstart.sh", FAKE_NO_PIP="1")
    assert code != 0 and log == MADE[:1]
    assert checkout.run("quickstart.sh")[2] == [*MADE, TRAIN]


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python3.11": 11, "python3.12": 12, "python3": 13}, "3.11"),
        ({"python3.12": 12, "python3": 11}, "3.12"),
        ({"python3": 12}, "3.12"),
        ({"python3.11": 9, "python3": 11}, "3.11"),  # a shim that is not what it says
    ],
)
def test_it_takes_the_first_right_python(checkout, pythons, chosen):
    for name, minor in pythons.items():
        checkout.python(name, minor)
    assert checkout.run("quickstart.sh")[2][0] == f"venv .venv of {chosen}"


@pytest.mark.parametrize("pythons", [{}, {"python3": 10}, {"python3": 13}])
def test_without_a_right_python_it_says_what_it_needs(checkout, pythons):
    for name, minor in pythons.items():
        checkout.python(name, minor)
    code, error, log = checkout.run("quickstart.sh")
    assert code == 2 and log == []
    assert error.strip() == (
        "error: Python 3.11 or 3.12 is needed; name one in RSEARCH_PYTHON"
    )


def test_the_python_and_the_place_can_be_named(checkout):
    checkout.python("python3.11", 11)
    mine = checkout.python("mine", 12, checkout.folder)
    place = checkout.folder / "the venv"
    environment = dict(RSEARCH_PYTHON=str(mine), RSEARCH_VENV=str(place))
    for expected in (3, 1):
        code, error, log = checkout.run("quickstart.sh", **environment)
        assert code == 0 and len(log) == expected, error
    assert checkout.run("quickstart.sh", **environment)[2] == [TRAIN]
    assert not (checkout.repo / ".venv").exists()
    assert (place / "bin" / "python").exists()


def test_a_wrong_python_that_was_named_is_not_replaced_by_another(checkout):
    checkout.python("python3.11", 11)
    wrong = checkout.python("wrong", 9, checkout.folder)
    code, error, log = checkout.run("quickstart.sh", RSEARCH_PYTHON=str(wrong))
    assert code == 2 and log == []
    assert f"RSEARCH_PYTHON={wrong} is not Python 3.11 or 3.12" in error


def test_an_environment_of_another_python_is_refused(checkout):
    checkout.python("python3.11", 11)
    checkout.run("quickstart.sh")
    checkout.python("python", 10, checkout.repo / ".venv" / "bin")
    code, error, log = checkout.run("quickstart.sh")
    assert code == 2 and log == [] and ".venv is not of Python 3.11" in error


def test_it_runs_in_the_checkout_wherever_it_is_called_from(checkout):
    checkout.python("python3.11", 11)
    assert os.path.samefile(checkout.folder, checkout.repo.parent)
    checkout.run("quickstart.sh")  # called from the folder above
    assert (checkout.repo / ".venv").is_dir()
