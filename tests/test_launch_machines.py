"""The launch scripts for GPU nodes, SLURM and TPU slices, on machines that pretend."""

import subprocess

import pytest

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


def on_gpus(checkout):
    """A checkout on a machine with GPUs and SLURM, or what pretends to be such."""
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
def test_a_gpu_node_installs_the_cuda_that_its_driver_runs(checkout, driver, file):
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
def test_a_node_without_a_fit_gpu_is_refused(checkout, driver, said):
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


def test_a_job_of_several_nodes_meets(checkout):
    on_gpus(checkout)
    submitted = {"SLURM_SUBMIT_DIR": str(checkout.repo)}
    train = "--config=configs/r_search.py"
    for nodes, more in (("1", ""), ("2", " --coordinator=auto")):
        code, error, log = checkout.run(
            "slurm.sbatch", train, SLURM_JOB_NUM_NODES=nodes, **submitted
        )
        assert code == 0, error
        assert log[-2:] == [
            f"srun --kill-on-bad-exit=1 python -m rsearch.train {train}{more}",
            f"-m rsearch.train {train}{more}",
        ]
    assert log == log[-2:]  # the environment is made once
    cores = {"SLURM_CPUS_PER_TASK": "32"}
    _, _, log = checkout.run("slurm.sbatch", train, **submitted, **cores)
    assert "32 cores" in log


@pytest.mark.parametrize("code", [75, 2])
def test_a_job_that_was_told_to_stop_is_queued_again(checkout, code):
    on_gpus(checkout)
    job = {"SLURM_SUBMIT_DIR": str(checkout.repo), "SLURM_JOB_ID": "77"}
    found, error, log = checkout.run(
        "slurm.sbatch", "--config=x", FAKE_SRUN_CODE=str(code), **job
    )
    assert found == code, error
    assert log[-1] == "scontrol requeue 77" if code == 75 else "srun" in log[-1]


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
    run = "would run srun --kill-on-bad-exit=1 python -m rsearch.train"
    run += " --config=configs/r_search.py --workdir=a\\ b"
    assert told["1"] == ["would install launch/cuda13.txt into .venv", run]
    assert told["2"][1] == f"{run} --coordinator=auto"
    checkout.link("sed")
    (checkout.repo / "trials").write_text("python -m rsearch.train --config=x\n")
    one = {"SLURM_SUBMIT_DIR": str(checkout.repo), "SLURM_ARRAY_TASK_ID": "1"}
    code, error, log = checkout.run("slurm.sbatch", "--dry_run", "trials", **one)
    assert (code, log) == (0, []), error
    assert checkout.told.splitlines()[-1] == (
        "would run srun --kill-on-bad-exit=1 --ntasks=1 bash -c "
        "exec\\ python\\ -m\\ rsearch.train\\ --config=x"
    )


def test_sbatch_finds_its_options_before_the_first_command():
    """It reads no further; a job that is run again adds to its log."""
    lines = (ROOT / "launch" / "slurm.sbatch").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    options = [line.split()[1] for line in lines if line.startswith("#SBATCH")]
    assert [line for line in lines[:first] if line.startswith("#SBATCH")] == [
        f"#SBATCH {option}" for option in options
    ]
    assert {"--requeue", "--open-mode=append"} <= set(options)


def test_a_job_array_runs_a_line_each(checkout):
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
        assert log[-1] == f"-m rsearch.train {line}"
    for task, argument in (("3", "trials"), ("1", "missing")):
        code, error, log = checkout.run(
            "slurm.sbatch", argument, SLURM_ARRAY_TASK_ID=task, **submitted
        )
        assert code == 2 and log == []
        assert "error: " in error


def test_a_job_from_elsewhere_is_refused(checkout, tmp_path):
    on_gpus(checkout)
    code, error, log = checkout.run("slurm.sbatch", SLURM_SUBMIT_DIR=str(tmp_path))
    assert code == 2 and log == [] and "submit it from the checkout" in error


GCLOUD = """#!/bin/bash
echo "$*" >>"$FAKE_LOG"
case "$*" in
  *" describe "*)  # the next of the states that are told of
    state=$(head -n 1 "$FAKE_STATES")
    [ "$(wc -l <"$FAKE_STATES")" -gt 1 ] && sed -i 1d "$FAKE_STATES"
    [ "$state" != broken ] || { echo "ERROR: UNAVAILABLE: the service" >&2; exit 1; }
    [ -n "$state" ] || { echo "ERROR: NOT_FOUND: Resource" >&2; exit 1; }
    echo "$state" ;;
  *rsearch.train*)  # and the next of the codes that training ends with
    code=$(head -n 1 "$FAKE_CODES")
    sed -i 1d "$FAKE_CODES"
    exit "$code" ;;
esac
"""
POD = ("pod", "--zone=z", "--type=v5litepod-16", "--spot", "--mount=10.0.0.2:/share")
TRAINED = ("--", "--config=configs/r_search.py", "--workdir=/shared/a b")


class Cloud:
    """A checkout beside a gcloud that pretends."""

    def __init__(self, checkout, folder):
        self.checkout, self.folder = checkout, folder
        checkout.link(
            "git", "tar", "gzip", "head", "tail", "wc", "sed", "grep", "date", "sleep"
        )
        checkout.program("gcloud", GCLOUD)
        for command in (["init", "-q"], ["add", "-A"]):
            subprocess.run(["git", "-C", checkout.repo, *command], check=True)

    def run(self, *arguments, states=("",), codes=(0,)):
        """(exit code, stderr, commands that gcloud was given but for `describe`)."""
        for name, values in (("states", states), ("codes", codes)):
            lines = "".join(f"{value}\n" for value in values)
            (self.folder / name).write_text(lines)
        code, error, log = self.checkout.run(
            "tpu_pod.sh",
            *arguments,
            POLL_SECONDS="0",
            FAKE_STATES=str(self.folder / "states"),
            FAKE_CODES=str(self.folder / "codes"),
        )
        short = [line.removeprefix("compute tpus ") for line in log]
        return code, error, [s for s in short if " describe " not in s]


@pytest.fixture
def cloud(checkout, tmp_path):
    return Cloud(checkout, tmp_path)


CREATE = (
    "queued-resources create pod --zone=z --node-id=pod "
    "--accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --spot"
)
DELETE = "queued-resources delete pod --zone=z --force --quiet"
COPY = "tpu-vm scp /tmp/rsearch-pod.tgz pod:rsearch.tgz --zone=z --worker=all"


def kinds(log):
    """What was done, in words."""
    words = {"create": "create", "delete": "delete", "scp": "copy"}
    found = []
    for line in log:
        verb = line.split()[1]
        found.append(words.get(verb) or ("train" if "rsearch.train" in line else "set"))
    return found


def test_a_slice_is_asked_for_used_and_deleted(cloud):
    states = ("", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
    code, error, log = cloud.run(*POD, *TRAINED, states=states)
    assert code == 0, error
    assert kinds(log) == ["create", "copy", "set", "train", "delete"]
    assert log[:2] == [CREATE, COPY] and log[-1] == DELETE
    assert "mount 10.0.0.2:/share /shared" in log[2]
    assert log[2].endswith("rsearch_environment launch/tpu.txt")
    assert log[3].endswith(
        "exec python -m rsearch.train --config=configs/r_search.py "
        "--workdir=/shared/a\\ b --coordinator=auto"
    )
    assert "WAITING_FOR_RESOURCES" in error and "ACTIVE" in error


def test_a_slice_that_is_lost_is_replaced_and_the_run_goes_on(cloud):
    """Its state may lag behind: it is looked at more than once."""
    states = ("ACTIVE", "ACTIVE", "broken", "SUSPENDED", "SUSPENDED", "", "ACTIVE")
    code, error, log = cloud.run(*POD, *TRAINED, states=states, codes=(255, 0))
    assert code == 0, error
    assert kinds(log) == [
        *("copy", "set", "train"),
        *("delete", "create", "copy", "set", "train", "delete"),
    ]
    assert "lost in attempt 1 of 10" in error


def test_a_run_that_was_told_to_stop_goes_on_there(cloud):
    code, error, log = cloud.run(*POD, *TRAINED, states=("ACTIVE",), codes=(75, 0))
    assert code == 0, error
    assert kinds(log) == [*("copy", "set", "train") * 2, "delete"]
    assert "stopped in attempt 1 of 10" in error


def test_a_program_that_fails_is_not_tried_again_and_the_slice_is_kept(cloud):
    for own in (2, 1, 255):
        code, error, log = cloud.run(*POD, *TRAINED, states=("ACTIVE",), codes=(own,))
        assert code == own and kinds(log) == ["copy", "set", "train"]
        assert "the slice is kept" in error and "queued-resources delete pod" in error


def test_a_look_that_fails_is_not_a_slice_that_is_gone(cloud):
    states = ("", "WAITING_FOR_RESOURCES", *["broken"] * 19, "ACTIVE")
    code, error, log = cloud.run(*POD, *TRAINED, states=states)
    assert code == 0, error
    assert kinds(log).count("create") == 1
    assert "ERROR: UNAVAILABLE: the service" in error
    states = ("WAITING_FOR_RESOURCES", "broken")
    code, error, log = cloud.run(*POD, *TRAINED, states=states)
    assert (code, log) == (2, [])
    assert "queued-resources delete pod" in error
    assert "gcloud did not say 20 times what has become of it" in error


def test_nothing_is_asked_for_where_gcloud_cannot_look(cloud):
    code, error, log = cloud.run(*POD, *TRAINED, states=("broken",))
    assert (code, log) == (2, [])
    assert "ERROR: UNAVAILABLE: the service" in error
    assert "error: pod: gcloud does not say whether it is there" in error


def test_a_checkout_that_cannot_be_packed_costs_no_slice(cloud):
    (cloud.checkout.repo / "launch" / "tpu.txt").unlink()
    code, error, log = cloud.run(*POD, *TRAINED, states=("ACTIVE",))
    assert (code, log) == (2, [])
    assert "launch/tpu.txt" in error and "could not be packed" in error


def test_attempts_end(cloud):
    code, error, log = cloud.run(
        *(*POD, "--attempts=2", *TRAINED),
        states=("ACTIVE", "FAILED", "ACTIVE", "FAILED"),
        codes=(255, 255),
    )
    assert code == 2 and kinds(log).count("train") == 2
    assert "error: pod: lost or stopped 2 times" in error
    own = {"states": ("ACTIVE",), "codes": (75, 75)}
    code, error, log = cloud.run(*POD, "--attempts=2", *TRAINED, **own)
    assert code == 2 and kinds(log).count("train") == 2
    assert "queued-resources delete pod" in error


@pytest.mark.parametrize("how", ["--keep", "--existing"])
def test_what_is_to_be_kept_is_not_deleted(cloud, how):
    code, error, log = cloud.run(*POD, how, *TRAINED, states=("ACTIVE",))
    assert code == 0, error
    assert kinds(log) == ["copy", "set", "train"]


def test_a_dry_run_prints_what_it_would_do(cloud):
    code, _, log = cloud.run(*POD, "--dry_run", *TRAINED)
    assert (code, log) == (0, [])
    lines = cloud.checkout.told.splitlines()
    lines = [line.removeprefix("gcloud compute tpus ").rstrip() for line in lines]
    packed = lines.pop(0)
    assert packed.startswith("git ls-files ")
    assert packed.endswith("| tar --null --files-from=- -czf /tmp/rsearch-pod.tgz")
    assert kinds(lines) == ["create", "copy", "set", "train", "delete"]
    assert [lines[0], lines[1], lines[-1]] == [CREATE, COPY, DELETE]


@pytest.mark.parametrize(
    ("kind", "version"),
    [
        ("v5p-32", "v2-alpha-tpuv5"),
        ("v6e-16", "v2-alpha-tpuv6e"),
        ("v4-16", "tpu-ubuntu2204-base"),
    ],
)
def test_each_type_of_slice_has_its_runtime(cloud, kind, version):
    own = ("pod", "--zone=z", f"--type={kind}", "--dry_run", *TRAINED)
    for more, expected in (((), version), (("--version=other",), "other")):
        code, error, _ = cloud.run("pod", *more, *own[1:])
        assert code == 0, error
        assert f" --runtime-version={expected} " in cloud.checkout.told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "the slice's name comes first"),
        (("--zone=z",), "the slice's name comes first"),
        (("pod", "--type=t", *TRAINED), "--zone=... is missing"),
        (("pod", "--zone=z", *TRAINED), "--type=... is missing"),
        (("pod", "--zone=z", "--type=v9", *TRAINED), "--type=v9 has no runtime"),
        (("pod", "--zone=z", "--type=t"), "no -- and no arguments"),
        (("pod", "--zone=z", "--type=t", "--"), "nothing to train after --"),
        (("pod", "--zone=z", "--config=x", *TRAINED), "unknown argument --config=x"),
        ((*POD, "--attempts=0", *TRAINED), "--attempts=0 is not a number from 1"),
        ((*POD, "--mount=share", *TRAINED), "--mount=share: write HOST:/DIR"),
    ],
)
def test_a_slice_that_is_not_described_is_not_asked_for(cloud, arguments, said):
    code, error, log = cloud.run(*arguments)
    assert code == 2 and log == []
    assert f"error: {said}" in error
