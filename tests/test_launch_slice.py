"""The launch script for TPU slices, with a fake gcloud."""

import signal
import subprocess
import sys
import time

import pytest

from tests.pretended_checkout import checkout

__all__ = ["checkout"]

GCLOUD = """#!/bin/bash
echo "$*" >>"$FAKE_LOG"
case "$*" in
  *" describe "*yaml*) echo "state: {failedData: {error: {message: $FAKE_WHY}}}" ;;
  *" describe "*)  # prints the next of the given states
    state=$(head -n 1 "$FAKE_STATES")
    [ "$(wc -l <"$FAKE_STATES")" -gt 1 ] && sed -i 1d "$FAKE_STATES"
    [ "$state" != broken ] || { echo "ERROR: UNAVAILABLE: the service" >&2; exit 1; }
    [ -n "$state" ] || { echo "ERROR: NOT_FOUND: Resource" >&2; exit 1; }
    echo "$state" ;;
  *" create "* | *" delete "*)  # prints the next of the given errors, if any
    said=$(head -n 1 "$FAKE_ERRORS")
    sed -i 1d "$FAKE_ERRORS"
    [ -z "$said" ] || { echo "ERROR: $said" >&2; exit 1; } ;;
  *rsearch.train*)  # ends with the next of the given exit codes
    code=$(head -n 1 "$FAKE_CODES")
    sed -i 1d "$FAKE_CODES"
    exit "$code" ;;
esac
"""
POD = ("pod", "--zone=z", "--type=v5litepod-16", "--spot", "--mount=10.0.0.2:/share")
TRAINED = ("--", "--config=configs/r_search.py", "--workdir=/shared/a b")


class Cloud:
    """A checkout with a fake gcloud."""

    def __init__(self, checkout, folder):
        self.checkout, self.folder = checkout, folder
        words = "git tar gzip head tail cat wc sed grep date sleep"
        checkout.link(*words.split())
        checkout.program("gcloud", GCLOUD)
        for command in (["init", "-q"], ["add", "-A"]):
            subprocess.run(["git", "-C", checkout.repo, *command], check=True)

    def run(self, *arguments, states=("",), codes=(0,), errors=(), environment=None):
        """Run the script; return (exit code, stderr, gcloud calls but `describe`)."""
        told = {"states": states, "codes": codes, "errors": errors}
        for name, values in told.items():
            lines = "".join(f"{value}\n" for value in values)
            (self.folder / name).write_text(lines)
        code, error, log = self.checkout.run(
            "tpu_pod.sh",
            *arguments,
            POLL_SECONDS="0",
            FAKE_WHY="no capacity",
            **{f"FAKE_{name.upper()}": str(self.folder / name) for name in told},
            **(environment or {}),
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
    """Return the kind of each logged call."""
    words = {"create": "create", "delete": "delete", "scp": "copy"}
    actual = []
    for line in log:
        verb = line.split()[1]
        actual.append(
            words.get(verb) or ("train" if "rsearch.train" in line else "set")
        )
    return actual


def test_a_slice_is_requested_used_and_deleted(cloud):
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


def test_apt_get_waits_while_a_host_updates_itself(cloud):
    _, _, log = cloud.run(*POD, *TRAINED, states=("ACTIVE",))
    (prepared,) = (line for line in log if "apt-get" in line)
    waiting = "sudo apt-get -o DPkg::Lock::Timeout=600 "
    assert prepared.count(waiting) == prepared.count("apt-get") == 4


def test_a_lost_slice_is_replaced_and_the_run_resumes(cloud):
    """The reported state may lag behind, so it is queried more than once."""
    states = ("ACTIVE", "ACTIVE", "broken", "SUSPENDED", "SUSPENDED", "", "ACTIVE")
    code, error, log = cloud.run(*POD, *TRAINED, states=states, codes=(255, 0))
    assert code == 0, error
    assert kinds(log) == [
        *("copy", "set", "train"),
        *("delete", "create", "copy", "set", "train", "delete"),
    ]
    assert "lost in attempt 1 of 10" in error


def test_a_stopped_run_resumes_on_the_same_slice(cloud):
    code, error, log = cloud.run(*POD, *TRAINED, states=("ACTIVE",), codes=(75, 0))
    assert code == 0, error
    assert kinds(log) == [*("copy", "set", "train") * 2, "delete"]
    assert "stopped in attempt 1 of 10" in error


def remote(checkout, command):
    """Start a host's command here, with the checkout's folder as its home."""
    environment = {"PATH": str(checkout.bin), "HOME": str(checkout.folder)}
    return subprocess.Popen(
        [checkout.bin / "bash", "-c", command], cwd=checkout.folder, env=environment
    )


def test_a_broken_connection_leaves_only_one_run_on_a_host(cloud, tmp_path):
    """gcloud repeats the command there while the first one is still running."""
    checkout = cloud.checkout
    _, _, log = cloud.run(*POD, *TRAINED, states=("ACTIVE",), codes=(75, 0))
    first, later = (
        line.partition("--command=")[2] for line in log if "rsearch.train" in line
    )
    checkout.link("flock")
    activate = tmp_path / "rsearch" / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    runs, over = tmp_path / "runs", tmp_path / "over"
    waits = f"while [ ! -e {over} ]; do sleep 0.01; done"
    checkout.program("python", f"#!/bin/bash\necho $$ >>{runs}\n{waits}\nexit 1\n")
    running = remote(checkout, first)
    deadline = time.monotonic() + 60
    while not runs.exists() or not runs.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    again = remote(checkout, first)
    with pytest.raises(subprocess.TimeoutExpired):
        again.wait(timeout=0.5)
    over.touch()
    assert (running.wait(timeout=60), again.wait(timeout=60)) == (1, 75)
    assert runs.read_text() == f"{running.pid}\n"
    assert remote(checkout, later).wait(timeout=60) == 1
    assert len(runs.read_text().splitlines()) == 2


def test_a_failed_program_is_not_retried_and_the_slice_is_kept(cloud):
    for own in (2, 1, 255):
        code, error, log = cloud.run(*POD, *TRAINED, states=("ACTIVE",), codes=(own,))
        assert code == own and kinds(log) == ["copy", "set", "train"]
        assert "the slice is kept" in error and "queued-resources delete pod" in error


def test_a_failed_query_does_not_mean_that_the_slice_is_gone(cloud):
    states = ("", "WAITING_FOR_RESOURCES", *["broken"] * 19, "ACTIVE")
    code, error, log = cloud.run(*POD, *TRAINED, states=states)
    assert code == 0, error
    assert kinds(log).count("create") == 1
    assert "ERROR: UNAVAILABLE: the service" in error
    states = ("WAITING_FOR_RESOURCES", "broken")
    code, error, log = cloud.run(*POD, *TRAINED, states=states)
    assert (code, log) == (2, [])
    assert "queued-resources delete pod" in error
    assert "gcloud failed 20 times in a row" in error


DOWN = "UNAVAILABLE: the service"


def test_a_failed_request_or_deletion_of_a_slice_is_retried(cloud):
    states = ("FAILED", "FAILED", "", "", "WAITING_FOR_RESOURCES", "ACTIVE")
    code, error, log = cloud.run(
        *POD, *TRAINED, states=states, errors=(DOWN, "", DOWN, "", "")
    )
    assert code == 0, error
    assert kinds(log)[:4] == ["delete", "delete", "create", "create"]
    assert kinds(log)[4:] == ["copy", "set", "train", "delete"]
    assert error.count(f"ERROR: {DOWN}") == 2
    own = {"states": ("",), "errors": [DOWN] * 99}
    code, error, log = cloud.run(*POD, *TRAINED, **own)
    assert (code, kinds(log)) == (2, ["create"] * 20)
    assert "gcloud failed 20 times in a row" in error
    assert "queued-resources delete pod" in error


def test_a_refused_slice_is_requested_only_once(cloud):
    own = {"states": ("",), "errors": ("INVALID_ARGUMENT: no such type",)}
    code, error, log = cloud.run(*POD, *TRAINED, **own)
    assert (code, kinds(log)) == (2, ["create"])
    assert "no such type" in error and "gcloud refuses to create it" in error
    assert "the slice is kept" not in error


def test_a_slice_that_could_not_be_deleted_is_reported(cloud):
    code, error, log = cloud.run(*POD, *TRAINED, states=("ACTIVE",), errors=(DOWN,))
    assert (code, kinds(log)) == (1, ["copy", "set", "train", "delete"])
    assert "the slice is kept" in error
    assert "queued-resources delete pod --zone=z --force" in error


def test_no_slice_is_requested_if_gcloud_cannot_query_it(cloud):
    code, error, log = cloud.run(*POD, *TRAINED, states=("broken",))
    assert (code, log) == (2, [])
    assert "ERROR: UNAVAILABLE: the service" in error
    assert "error: pod: gcloud cannot say whether it exists" in error


AGENT = """#!/bin/bash
[ "$*" = -l ] && [ -s "$HOME/held" ] || { echo "no identities" >&2; exit 1; }
while read -r file; do ssh-keygen -lf "$file"; done <"$HOME/held"
"""


def test_no_slice_is_requested_if_the_ssh_agent_lacks_gclouds_key(cloud, tmp_path):
    checkout, ssh = cloud.checkout, tmp_path / ".ssh"
    checkout.link("ssh-keygen")
    checkout.program("ssh-add", AGENT)
    ssh.mkdir()

    def run(*held, **own):
        (tmp_path / "held").write_text("".join(f"{ssh / name}\n" for name in held))
        own = {"HOME": str(tmp_path), **own}
        return cloud.run(*POD, *TRAINED, states=("ACTIVE",), environment=own)

    def make(name):
        command = [checkout.bin / "ssh-keygen", "-qN", "", "-f", ssh / name]
        subprocess.run(command, check=True)

    make("other")
    agent = {"SSH_AUTH_SOCK": "x"}
    key = ssh / "google_compute_engine"
    add = f"error: the ssh-agent lacks gcloud's key: ssh-add {key}\n"
    code, error, log = run("other", **agent)
    assert (code, log) == (2, [])
    assert f"gcloud compute config-ssh && ssh-add {key}\n" in error
    make(key.name)
    assert run("other", **agent) == (2, add, [])
    for held, own in (((key.name, "other"), agent), ((), agent), (("other",), {})):
        assert run(*held, **own)[0] == 0


def test_no_slice_is_requested_if_the_checkout_cannot_be_packed(cloud):
    (cloud.checkout.repo / "launch" / "tpu.txt").unlink()
    code, error, log = cloud.run(*POD, *TRAINED, states=("ACTIVE",))
    assert (code, log) == (2, [])
    assert "launch/tpu.txt" in error and "could not be packed" in error


def test_the_script_gives_up_after_the_last_attempt(cloud):
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


def test_a_failed_request_counts_as_an_attempt_and_its_reason_is_shown(cloud):
    failing = ("", "WAITING_FOR_RESOURCES", "FAILED", "FAILED")
    code, error, log = cloud.run(*POD, "--attempts=2", *TRAINED, states=failing * 9)
    assert (code, kinds(log)) == (2, ["create", "delete", "create"])
    assert error.count("no capacity") == 2
    assert "request failed in attempt 2 of 2" in error
    assert "queued-resources delete pod" in error
    own = {"states": (*failing, "", "ACTIVE")}
    code, error, log = cloud.run(*POD, "--attempts=2", *TRAINED, **own)
    assert code == 0, error
    assert kinds(log)[:3] == ["create", "delete", "create"]
    assert kinds(log)[3:] == ["copy", "set", "train", "delete"]


@pytest.mark.parametrize("how", ["--keep", "--existing"])
def test_a_slice_that_should_be_kept_is_not_deleted(cloud, how):
    code, error, log = cloud.run(*POD, how, *TRAINED, states=("ACTIVE",))
    assert code == 0, error
    assert kinds(log) == ["copy", "set", "train"]
    assert ("queued-resources delete pod" in error) == (how == "--keep")


@pytest.mark.parametrize("how", ["TERM", "INT"])
def test_an_interrupted_script_says_that_the_slice_is_kept(cloud, how):
    """The signal goes to the script and its children, as from a terminal."""
    sleep = f"#!{sys.executable}\nimport os, signal\n"
    sleep += f"signal.signal(signal.SIG{how}, signal.SIG_DFL)\n"
    sleep += f"os.kill(os.getppid(), signal.SIG{how})\n"
    sleep += f"os.kill(os.getpid(), signal.SIG{how})\n"
    cloud.checkout.program("sleep", sleep)
    code, error, log = cloud.run(*POD, *TRAINED, states=("", "PROVISIONING"))
    assert code == -signal.Signals[f"SIG{how}"] and kinds(log) == ["create"]
    assert "queued-resources delete pod --zone=z --force" in error


def test_ssh_notices_that_a_host_has_vanished(cloud):
    """By default it would wait for hours, since nothing closes the connection."""
    _, _, log = cloud.run(*POD, *TRAINED, states=("ACTIVE",))
    for line in log[1:-1]:
        assert "--ssh-flag=-o ConnectTimeout=30 -o ServerAliveInterval=60" in line


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
        (("pod", "--zone=z", "--type=v9", *TRAINED), "--type=v9 has no known runtime"),
        (("pod", "--zone=z", "--type=t"), "no -- and no arguments"),
        (("pod", "--zone=z", "--type=t", "--"), "nothing to train after --"),
        (("pod", "--zone=z", "--config=x", *TRAINED), "unknown argument --config=x"),
        ((*POD, "--attempts=0", *TRAINED), "--attempts=0 is not a number from 1"),
        ((*POD, "--mount=share", *TRAINED), "--mount=share: write HOST:/DIR"),
    ],
)
def test_no_slice_is_requested_with_wrong_arguments(cloud, arguments, said):
    code, error, log = cloud.run(*arguments)
    assert code == 2 and log == []
    assert f"error: {said}" in error
