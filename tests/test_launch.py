"""The launch scripts, with fake Pythons and a fake pip."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.pretended_checkout import checkout

__all__ = ["checkout"]
ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = [
    *sorted((ROOT / "launch").glob("*.sh")),
    *sorted((ROOT / "launch").glob("*.sbatch")),
    ROOT / ".ci" / "run",
]

TRAIN = "-m rsearch.train --config=configs/quickstart.py"
MADE = ["venv .venv of 3.11", "pip requirements.txt"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_a_script_parses_and_stops_at_the_first_error(script):
    subprocess.run(["bash", "-n", script], check=True)
    if script.name != "environment.sh":
        assert script.read_text().startswith("#!/usr/bin/env bash\n")
        assert "set -euo pipefail" in script.read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_shellcheck_finds_nothing(script):
    program = pathlib.Path(sys.executable).with_name("shellcheck")
    command = [program, "--shell=bash", "--exclude=SC1091", script]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_quickstart_makes_an_environment_once_and_passes_arguments_on(checkout):
    checkout.python("python3.11", 11)
    train = f"{TRAIN} --config.seed=1 --workdir=a b"
    for expected in ([*MADE, train], [train], [train]):
        code, error, log = checkout.run(
            "quickstart.sh", "--config.seed=1", "--workdir=a b"
        )
        assert (code, log) == (0, expected), error


def test_a_plan_for_gpus_has_an_environment_of_its_own(checkout):
    checkout.python("python3.11", 11)
    plan = "-m rsearch.plan --config=x --topology=h100x8"
    made, installed, actual = checkout.run("gpu_plan.sh", *plan.split()[2:])[2]
    assert actual == plan and installed.endswith(" launch/cuda12.txt")
    assert made == MADE[0].replace(".venv", ".venv-gpu-plan")


def test_without_arguments_none_are_passed_on(checkout):
    checkout.python("python3.11", 11)
    assert checkout.run("quickstart.sh")[2][-1] == TRAIN


def test_requirements_are_installed_again_when_changed_and_when_changed_back(checkout):
    checkout.python("python3.11", 11)
    checkout.run("quickstart.sh")
    for line in ("a==2", "a==1"):
        checkout.require(line)
        _, _, log = checkout.run("quickstart.sh")
        assert log == ["pip requirements.txt", TRAIN]
        _, _, log = checkout.run("quickstart.sh")
        assert log == [TRAIN]


def test_test_requirements_go_into_the_users_environment_if_it_is_named(checkout):
    checkout.python("python3.11", 11)
    (checkout.bin / "ruff").symlink_to("/bin/true")
    checkout.run("quickstart.sh")
    code, error, log = checkout.run("test.sh", "-m", "slow", RSEARCH_VENV=".venv")
    assert (code, log) == (
        0,
        ["pip tests/requirements.txt", "-m pytest -m slow"],
    ), error
    assert checkout.run("quickstart.sh")[2] == [TRAIN]


def test_tests_have_an_environment_of_their_own(checkout):
    """The users' environment has no package that only tests need, such as libtpu."""
    checkout.python("python3.11", 11)
    (checkout.bin / "ruff").symlink_to("/bin/true")
    checkout.run("quickstart.sh")
    code, error, log = checkout.run("test.sh", "-m", "slow")
    made = ["venv .venv-tests of 3.11", "pip tests/requirements.txt"]
    assert (code, log) == (0, [*made, "-m pytest -m slow"]), error
    assert checkout.run("quickstart.sh")[2] == [TRAIN]
    assert checkout.run("test.sh")[2] == ["-m pytest -n 2 --dist loadfile"]
    for file in ("requirements.txt", "launch/cuda12.txt", "launch/cuda13.txt"):
        assert "tpu" not in re.sub(r"#.*", "", (ROOT / file).read_text())


def test_any_file_of_requirements_is_installed_again_when_changed_back(checkout):
    checkout.python("python3.11", 11)
    (checkout.bin / "ruff").symlink_to("/bin/true")
    for line in ("b==1", "b==2", "b==1"):
        (checkout.repo / "tests" / "requirements.txt").write_text(line)
        log = checkout.run("test.sh")[2]
        assert "pip tests/requirements.txt" in log
    assert "pip tests/requirements.txt" not in checkout.run("test.sh")[2]


@pytest.mark.parametrize(("name", "code"), [("uv", 0), ("pip", 0), ("conda", 2)])
def test_the_installer_can_be_chosen(checkout, name, code):
    checkout.python("python3.11", 11)
    checkout.program("uv", '#!/bin/bash\necho "uv $*" >>"$FAKE_LOG"\n')
    actual, error, log = checkout.run("quickstart.sh", RSEARCH_INSTALLER=name)
    uv = "uv pip install --quiet --python .venv/bin/python -r requirements.txt"
    expected = {"uv": [MADE[0], uv, TRAIN], "pip": [*MADE, TRAIN], "conda": MADE[:1]}
    assert (actual, log) == (code, expected[name]), error
    assert not code or "RSEARCH_INSTALLER=conda" in error


def test_a_failed_installation_is_tried_again(checkout):
    checkout.python("python3.11", 11)
    code, _, log = checkout.run("quickstart.sh", FAKE_PIP_FAILS="1")
    assert code != 0 and log == MADE
    assert checkout.run("quickstart.sh")[2] == [MADE[1], TRAIN]


def test_a_half_made_environment_is_made_again(checkout):
    checkout.python("python3.11", 11)
    code, _, log = checkout.run("quickstart.sh", FAKE_NO_PIP="1")
    assert code != 0 and log == MADE[:1]
    assert checkout.run("quickstart.sh")[2] == [*MADE, TRAIN]


def test_an_environment_without_its_last_file_is_made_again(checkout):
    checkout.python("python3.11", 11)
    checkout.run("quickstart.sh")
    (checkout.repo / ".venv" / "bin" / "activate").unlink()
    code, error, log = checkout.run("quickstart.sh")
    assert (code, log) == (0, [*MADE, TRAIN]), error


def test_an_environment_whose_python_has_changed_gets_its_packages_again(checkout):
    checkout.python("python3.11", 11)
    checkout.run("quickstart.sh")
    (checkout.repo / ".venv" / "has-pip").unlink()  # another version has other packages
    assert checkout.run("quickstart.sh")[2] == [*MADE, TRAIN]


def test_an_environment_is_refused_if_its_python_is_gone(checkout):
    checkout.python("python3.11", 11)
    checkout.run("quickstart.sh")
    python = checkout.repo / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to(checkout.folder / "gone")
    code, error, log = checkout.run("quickstart.sh")
    assert (code, log) == (2, []) and "error: .venv is of a Python that" in error
    assert next(python.parent.parent.glob("installed-*"))  # other nodes may have it


def test_an_environment_begun_by_another_python_is_refused(checkout):
    """`python -m venv` keeps the python that it finds there."""
    checkout.python("python3.11", 11)
    checkout.program("touch", "#!/bin/bash\n")  # the fake Python makes its pip so
    code, error, _ = checkout.run("quickstart.sh")
    assert code == 2 and "error: .venv was made in part by another Python" in error


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_an_environment_that_was_moved_or_copied_is_refused(checkout, how):
    """Its activate still names the old path: python would be another one."""
    checkout.python("python3.11", 11)
    checkout.python("python", 12)
    checkout.run("quickstart.sh")
    if how == "moved":
        (checkout.repo / ".venv").rename(checkout.folder / "venv")
    else:
        shutil.copytree(checkout.repo / ".venv", checkout.folder / "venv")
    venv = str(checkout.folder / "venv")
    code, error, log = checkout.run("quickstart.sh", RSEARCH_VENV=venv)
    assert (code, log) == (2, []) and f"error: {venv} was made elsewhere" in error


def test_one_environment_does_not_get_two_versions_of_cuda(checkout):
    checkout.python("python3.11", 11)
    packages = checkout.repo / ".venv" / "lib" / "python3.11" / "site-packages"
    (packages / "jax_plugins" / "xla_cuda13").mkdir(parents=True)
    command = ". launch/environment.sh && rsearch_environment launch/"
    for file, expected in (("cuda12.txt", 2), ("cuda13.txt", 0), ("tpu.txt", 0)):
        done = checkout.bash(command + file)
        assert done.returncode == expected, done.stderr
        assert ("error: .venv has CUDA 13" in done.stderr) == (expected == 2)


def test_jobs_that_start_at_the_same_time_make_one_environment(checkout):
    checkout.python("python3.11", 11)
    checkout.link("flock", "sleep")
    checkout.log.touch()
    environment = {"PATH": str(checkout.bin), "FAKE_LOG": str(checkout.log)}
    command = [checkout.bin / "bash", checkout.repo / "launch" / "quickstart.sh"]
    jobs = [
        subprocess.Popen(command, env={**environment, "FAKE_SLOW": "0.5"})
        for _ in range(3)
    ]
    assert [job.wait(timeout=60) for job in jobs] == [0, 0, 0]
    assert checkout.log.read_text().splitlines() == [*MADE, TRAIN, TRAIN, TRAIN]


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python3.11": 11, "python3.12": 12, "python3": 13}, "3.11"),
        ({"python3.12": 12, "python3": 11}, "3.12"),
        ({"python3": 12}, "3.12"),
        ({"python3.11": 9, "python3": 11}, "3.11"),  # a shim of another version
    ],
)
def test_the_first_python_of_a_supported_version_is_taken(checkout, pythons, chosen):
    for name, minor in pythons.items():
        checkout.python(name, minor)
    assert checkout.run("quickstart.sh")[2][0] == f"venv .venv of {chosen}"


@pytest.mark.parametrize("pythons", [{}, {"python3": 10}, {"python3": 13}])
def test_without_a_supported_python_the_error_says_what_is_needed(checkout, pythons):
    for name, minor in pythons.items():
        checkout.python(name, minor)
    code, error, log = checkout.run("quickstart.sh")
    assert code == 2 and log == []
    assert error.strip() == (
        "error: Python 3.11 or 3.12 is needed: install one, for example by "
        "'uv python install 3.12', or name one in RSEARCH_PYTHON"
    )


def test_the_python_and_the_environments_folder_can_be_chosen(checkout):
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


def test_an_unsupported_python_that_was_chosen_is_refused(checkout):
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


def test_a_search_path_of_cd_does_not_lead_out_of_the_checkout(checkout):
    checkout.python("python3.11", 11)
    other = checkout.folder / "other"
    (other / "launch").mkdir(parents=True)
    done = checkout.bash("bash launch/quickstart.sh", CDPATH=str(other))
    assert done.returncode == 0, done.stderr
    assert (checkout.repo / ".venv").is_dir() and not (other / ".venv").exists()


def test_a_script_runs_in_the_checkout_wherever_it_is_called_from(checkout):
    checkout.python("python3.11", 11)
    assert os.path.samefile(checkout.folder, checkout.repo.parent)
    checkout.run("quickstart.sh")  # called from the folder above
    assert (checkout.repo / ".venv").is_dir()
