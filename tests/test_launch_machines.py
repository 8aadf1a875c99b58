"""The launch scripts for GPU nodes and SLURM, on fake machines."""

import json
import re
import shutil
import subprocess

import pytest

from rsearch.runtime.workdir import may_differ
from tests.pretended_checkout import ROOT, checkout

__all__ = ["checkout"]

NVIDIA = """#!/bin/bash
[ -n "$FAKE_DRIVER" ] || { echo "no devices were found" >&2; exit 9; }
case "$*" in
  *driver_version*) printf '%s\\n%s\\n' "$FAKE_DRIVER" "$FAKE_DRIVER" ;;
  *name,memory.total*) printf 'A100, 80 GiB\\nA100, 80 GiB\\n' ;;
  *) exit 8 ;;
esac
"""
SRUN = """#!/bin/bash
echo "srun $*" >>"$FAKE_LOG"
[ -z "$SRUN_CPUS_PER_TASK" ] || echo "$SRUN_CPUS_PER_TASK cores" >>"$FAKE_LOG"
while [[ "$1" == --* ]]; do shift; done
[ -z "$FAKE_SRUN_CODE" ] || exit "$FAKE_SRUN_CODE"
exec "$@"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >>"$FAKE_LOG"
"""


GRACE = "--config.checkpoint.grace_seconds=165"


def on_gpus(checkout):
    """Give the checkout fake GPUs and a fake SLURM, and return it."""
    checkout.python("python3.11", 11)
    checkout.link("sort", "uniq", "sed")
    checkout.program("nvidia-smi", NVIDIA)
    checkout.program("srun", SRUN)
    checkout.program("scontrol", SCONTROL)
    return checkout


@pytest.mark.parametrize(
    ("driver", "file"),
    [("580.65.06", "cuda13"), ("575.1", "cuda12"), ("525.60.13", "cuda12")],
)
def test_a_gpu_node_installs_the_cuda_version_that_its_driver_supports(
    checkout, driver, file
):
    on_gpus(checkout)
    train = ["--config=configs/r_search.py", "--workdir=a b"]
    code, error, log = checkout.run("gpu_node.sh", *train, FAKE_DRIVER=driver)
    assert code == 0, error
    assert log == [
        "venv .venv of 3.11",
        f"pip launch/{file}.txt",
        "-m rsearch.train --config=configs/r_search.py --workdir=a b",
    ]


@pytest.mark.parametrize(
    ("driver", "said"),
    [("", "nvidia-smi finds no GPU"), ("470.82.01", "470.82.01 is too old")],
)
def test_a_node_without_a_gpu_or_with_an_old_driver_is_refused(checkout, driver, said):
    on_gpus(checkout)
    code, error, log = checkout.run("gpu_node.sh", "--config=x", FAKE_DRIVER=driver)
    assert code == 2 and log == []
    assert f"error: {said}" in error or f"driver {said}" in error


def test_a_dry_run_of_a_gpu_node_does_nothing(checkout):
    on_gpus(checkout)
    train = ("--dry_run", "-x", "--workdir=a b")
    code, _, log = checkout.run("gpu_node.sh", *train, FAKE_DRIVER="580.1")
    assert (code, log) == (0, [])
    assert not (checkout.repo / ".venv").exists()
    assert "would install launch/cuda13.txt into .venv\n" in checkout.told
    assert "would run python -m rsearch.train -x --workdir=a\\ b\n" in checkout.told


def test_a_dry_run_needs_no_gpu(checkout):
    code, error, log = checkout.run("gpu_node.sh", "--dry_run", "-x")
    assert (code, log) == (0, []), error
    assert checkout.told.startswith("no GPU here")
    assert "would run python -m rsearch.train -x\n" in checkout.told
    checkout.run("gpu_node.sh", "--dry_run")
    assert "would run python -m rsearch.train\n" in checkout.told


def build(checkout, name, **arguments):
    """Do what `docker build` does with a Dockerfile; return (image, entry point)."""
    image = checkout.folder / "image"
    for line in (checkout.repo / "launch" / name).read_text().splitlines():
        verb, _, rest = line.partition(" ")
        if verb == "WORKDIR":
            image.mkdir()
        elif verb == "ARG":
            arguments = dict([rest.split("=")]) | arguments
        elif verb == "COPY":
            *sources, target = rest.split()
            for source in sources:
                if source == ".":
                    shutil.copytree(checkout.repo, image, dirs_exist_ok=True)
                else:
                    (image / target).mkdir(exist_ok=True)
                    shutil.copy(checkout.repo / source, image / target)
        elif verb == "RUN":
            environment = {"PATH": str(checkout.bin), "FAKE_LOG": str(checkout.log)}
            subprocess.run(
                json.loads(rest), cwd=image, env=environment | arguments, check=True
            )
        elif verb == "ENTRYPOINT":
            return image, json.loads(rest)
        else:
            assert verb in ("#", "FROM", "ENV")


@pytest.mark.parametrize(
    ("name", "file", "arguments"),
    [
        ("cpu", "requirements.txt", {}),
        ("gpu", "launch/cuda13.txt", {}),
        ("gpu", "launch/cuda12.txt", {"REQUIREMENTS": "launch/cuda12.txt"}),
    ],
)
def test_an_image_has_what_its_entry_point_needs(checkout, name, file, arguments):
    on_gpus(checkout)
    image, entry = build(checkout, f"Dockerfile.{name}", **arguments)
    assert checkout.log.read_text().splitlines()[1:] == [f"pip {file}"]
    checkout.log.write_text("")
    driver = "525.1" if "cuda12" in file else "580.1"
    own = {"PATH": str(checkout.bin), "FAKE_LOG": str(checkout.log)}
    command = [*entry, "--config.seed=1"]
    subprocess.run(command, cwd=image, env=own | {"FAKE_DRIVER": driver}, check=True)
    (line,) = checkout.log.read_text().splitlines()
    assert line.startswith("-m rsearch.train ") and line.endswith(" --config.seed=1")


def test_an_image_is_not_installed_again_when_the_code_changes():
    for name in ("cpu", "gpu"):
        text = (ROOT / "launch" / f"Dockerfile.{name}").read_text()
        assert text.index("\nRUN ") < text.index("\nCOPY . .\n")


def test_a_job_of_several_nodes_gets_a_coordinator(checkout):
    on_gpus(checkout)
    submitted = {"SLURM_SUBMIT_DIR": str(checkout.repo)}
    train = "--config=configs/r_search.py"
    for nodes, more in (("1", ""), ("2", " --coordinator=auto")):
        code, error, log = checkout.run(
            "slurm.sbatch", train, SLURM_JOB_NUM_NODES=nodes, **submitted
        )
        assert code == 0, error
        run = f"-m rsearch.train {GRACE} {train}{more}"
        assert log[-2:] == [f"srun --kill-on-bad-exit=0 python {run}", run]
    assert log == log[-2:]  # the environment is made once
    cores = {"SLURM_CPUS_PER_TASK": "32"}
    _, _, log = checkout.run("slurm.sbatch", train, **submitted, **cores)
    assert "32 cores" in log


@pytest.mark.parametrize(
    ("own", "fraction"),
    [
        ({}, ".92"),
        ({"XLA_CLIENT_MEM_FRACTION": ".5"}, ".5"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, ""),  # JAX refuses both together
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, ""),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, ""),
    ],
)
def test_most_of_a_gpus_memory_is_taken_unless_the_user_sets_a_share(
    checkout, own, fraction
):
    on_gpus(checkout)
    own = {"FAKE_TELLS": "XLA_CLIENT_MEM_FRACTION", **own}
    own |= {"SLURM_SUBMIT_DIR": str(checkout.repo), "FAKE_DRIVER": "580.1"}
    for script in ("gpu_node.sh", "slurm.sbatch"):
        code, error, log = checkout.run(script, "--config=x", **own)
        assert code == 0, error
        assert log[-1] == fraction


@pytest.mark.parametrize("code", [75, 2])
def test_a_job_is_requeued_if_it_was_stopped_but_not_if_it_failed(checkout, code):
    on_gpus(checkout)
    job = {"SLURM_SUBMIT_DIR": str(checkout.repo), "SLURM_JOB_ID": "77"}
    actual, error, log = checkout.run(
        "slurm.sbatch", "--config=x", FAKE_SRUN_CODE=str(code), **job
    )
    assert actual == code, error
    assert log[-1] == "scontrol requeue 77" if code == 75 else "srun" in log[-1]


SRUN_OF_TWO_NODES = """#!/bin/bash
# The first node ends with 2. If srun then stops the second, that one ends with 75, else
# with 2, a moment later. srun ends with the highest code.
case "$*" in *--kill-on-bad-exit=0*) exit 2 ;; *) exit 75 ;; esac
"""


def test_a_job_that_fails_on_several_nodes_is_not_requeued(checkout):
    on_gpus(checkout).program("srun", SRUN_OF_TWO_NODES)
    job = {"SLURM_SUBMIT_DIR": str(checkout.repo), "SLURM_JOB_ID": "77"}
    code, error, log = checkout.run(
        "slurm.sbatch", "--config=x", SLURM_JOB_NUM_NODES="2", **job
    )
    assert code == 2 and "scontrol requeue 77" not in log, error


def test_a_dry_run_of_a_job_does_nothing_and_needs_no_cluster(checkout):
    train = ("--config=configs/r_search.py", "--workdir=a b")
    told = {}
    for nodes in ("1", "2"):
        code, error, log = checkout.run(
            "slurm.sbatch",
            "--dry_run",
            *train,
            SLURM_SUBMIT_DIR=str(checkout.repo),
            SLURM_JOB_NUM_NODES=nodes,
        )
        assert (code, log) == (0, []), error
        told[nodes] = checkout.told.splitlines()
    assert not (checkout.repo / ".venv").exists()
    run = f"would run srun --kill-on-bad-exit=0 python -m rsearch.train {GRACE}"
    run += " --config=configs/r_search.py --workdir=a\\ b"
    assert told["1"][0] == "would install launch/cuda13.txt into .venv"
    assert told["1"][-1] == run and "rsearch.train ... --dry_run" in told["1"][1]
    assert told["2"][-1] == f"{run} --coordinator=auto"
    checkout.link("sed")
    (checkout.repo / "trials").write_text("python -m rsearch.train --config=x\n")
    submitted = {"SLURM_SUBMIT_DIR": str(checkout.repo)}
    code, error, log = checkout.run("slurm.sbatch", "--dry_run", "trials", **submitted)
    assert (code, log) == (2, []) and "set SLURM_ARRAY_TASK_ID=1" in error
    one = {"SLURM_SUBMIT_DIR": str(checkout.repo), "SLURM_ARRAY_TASK_ID": "1"}
    code, error, log = checkout.run("slurm.sbatch", "--dry_run", "trials", **one)
    assert (code, log) == (0, []), error
    assert checkout.told.splitlines()[-1] == (
        "would run srun --kill-on-bad-exit=0 --ntasks=1 bash -c "
        f"exec\\ python\\ -m\\ rsearch.train\\ --config=x\\ {GRACE}"
    )


def test_sbatch_finds_its_options_before_the_first_command():
    """It reads options no further. A requeued job appends to its log."""
    lines = (ROOT / "launch" / "slurm.sbatch").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    options = [line.split()[1] for line in lines if line.startswith("#SBATCH")]
    assert [line for line in lines[:first] if line.startswith("#SBATCH")] == [
        f"#SBATCH {option}" for option in options
    ]
    assert {"--requeue", "--open-mode=append"} <= set(options)


def test_each_task_of_a_job_array_runs_its_own_line(checkout):
    on_gpus(checkout)
    trials = checkout.repo / "trials"
    trials.write_text(
        "python -m rsearch.train --config=x '--workdir=a b'\n"
        "python -m rsearch.train --config=y\n"
    )
    submitted = {"SLURM_SUBMIT_DIR": str(checkout.repo)}
    for task, line in (("1", "--config=x --workdir=a b"), ("2", "--config=y")):
        code, error, log = checkout.run(
            "slurm.sbatch", "trials", SLURM_ARRAY_TASK_ID=task, **submitted
        )
        assert code == 0, error
        assert log[-1] == f"-m rsearch.train {line} {GRACE}"
    for task, argument in (("3", "trials"), ("0", "trials"), ("1", "missing")):
        code, error, log = checkout.run(
            "slurm.sbatch", argument, SLURM_ARRAY_TASK_ID=task, **submitted
        )
        assert code == 2 and log == []
        assert "error: " in error
    assert (
        f"{trials.name} has no line 0"
        in checkout.run("slurm.sbatch", "trials", SLURM_ARRAY_TASK_ID="0", **submitted)[
            1
        ]
    )


def test_a_jobs_grace_period_is_shorter_than_its_warning_and_set_once(checkout):
    on_gpus(checkout)
    script = (ROOT / "launch" / "slurm.sbatch").read_text()
    told_before = re.search(r"--signal=USR1@(\d+)", script)[1]
    assert int(GRACE.partition("=")[2]) < int(told_before)
    job = {"SLURM_SUBMIT_DIR": str(checkout.repo)}
    assert checkout.run("slurm.sbatch", "--config=x", **job)[2][-1].count(GRACE) == 1
    field = GRACE.partition("=")[0]
    trials = checkout.repo / "trials"
    for own in ((f"{field}=9",), (field, "9")):  # a field is set once
        run = f"-m rsearch.train --config=x {' '.join(own)}"
        _, _, log = checkout.run("slurm.sbatch", "--config=x", *own, **job)
        assert log[-1] == run
        trials.write_text(f"python {run}\n")
        array = {"SLURM_ARRAY_TASK_ID": "1", **job}
        assert checkout.run("slurm.sbatch", "trials", **array)[2][-1] == run


def test_the_grace_period_may_be_changed_when_a_run_is_resumed():
    field = GRACE.removeprefix("--config.").partition("=")[0]
    assert may_differ(field, {"stages": ("rl",)})


def test_a_job_submitted_outside_the_checkout_is_refused(checkout, tmp_path):
    on_gpus(checkout)
    code, error, log = checkout.run("slurm.sbatch", SLURM_SUBMIT_DIR=str(tmp_path))
    assert code == 2 and log == [] and "submit it from the checkout" in error
