"""Several hosts, as processes of this machine that communicate over loopback."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from rsearch.hosts import processes
from rsearch.runtime.jsonl import read_jsonl
from rsearch.runtime.metrics import read_metrics
from tests.small_run import (
    ROOT,
    arguments,
    child_environment,
    run_python,
    without_times,
)

SETTINGS = {
    "sft__steps": 20,
    "rl__dynamic_sampling_rounds": 1,
    "rl__steps": 2,
    "eval__methods": "('protocol',)",
    "eval__max_questions": 1,  # so one of two hosts has none
}


SCHEDULED = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
SPLIT = "--xla_force_host_platform_device_count=2"


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({"XLA_FLAGS": ""}, ""),  # one device: any schedule works
        ({"XLA_FLAGS": SPLIT, "JAX_PLATFORMS": "cpu"}, f"{SPLIT} {SCHEDULED}"),
        (
            {"XLA_FLAGS": f"{SPLIT} {SCHEDULED}".replace("false", "true")},
            f"{SPLIT} {SCHEDULED}".replace("false", "true"),
        ),
    ],
)
def test_collectives_of_split_cpus_start_in_one_order(
    monkeypatch, environment, expected
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    processes.connect()
    assert os.environ["XLA_FLAGS"] == expected


def test_accelerators_get_no_flag_that_they_may_reject(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("XLA_FLAGS", SPLIT)
    monkeypatch.setattr(processes, "installed_version", lambda name: name == "libtpu")
    processes.connect()
    assert os.environ["XLA_FLAGS"] == SPLIT


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def start_hosts(*command, devices=1, count=2):
    """Start `python *command` on each host; return the [hosts] processes."""
    address = f"--coordinator=127.0.0.1:{free_port()}"
    return [
        subprocess.Popen(
            [
                *map(str, [sys.executable, *command]),
                *(address, f"--num_hosts={count}", f"--host={number}"),
            ],
            cwd=ROOT,
            env={**os.environ, **child_environment(devices)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]


def run_hosts(*command, devices=1, count=2):
    """Run `python *command` on all hosts; return each's (exit code, stdout, stderr)."""
    started = start_hosts(*command, devices=devices, count=count)
    try:
        told = [process.communicate(timeout=900) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(p.returncode, *t) for p, t in zip(started, told, strict=True)]


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (("", 2, 0), "need --coordinator"),
        (("auto", 2, -1), "need --coordinator"),
        (("here", 2, 0), "write HOST:PORT, or 'auto'"),
        (("here:port", 2, 0), "write HOST:PORT, or 'auto'"),
        (("localhost:0", 2, 0), "write HOST:PORT, or 'auto'"),
        (("localhost:65536", 2, 1), "write HOST:PORT, or 'auto'"),
        (("a..b:99", 2, 0), "--coordinator=a..b:99: "),
        (("here:99", 0, -1), "--num_hosts=0 --host=-1: with"),
        (("here:99", 2, 2), "--num_hosts=2 --host=2: with"),
    ],
)
def test_invalid_connection_flags_are_refused(given, wrong):
    address, count, number = given
    with pytest.raises(ValueError) as error:
        processes.connect(address, num_hosts=count, host=number)
    assert wrong in str(error.value)


def test_auto_is_refused_where_jax_recognises_no_job():
    code = "from rsearch.hosts import processes; processes.connect('auto')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert "\nValueError: --coordinator=auto: " in done.stderr


@pytest.mark.fault(44, "of the coordinator")
def test_a_port_that_is_in_use_is_named_with_a_remedy():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        message = f"--coordinator={place}: Address already in use; name another port"
        with pytest.raises(ValueError, match=message):
            processes.connect(place, num_hosts=2, host=0)


@pytest.fixture
def pretended(monkeypatch):
    """Pretend to be host 1 of 2; return (host 0's deviating values, JAX's calls)."""
    first = {}

    def exchange(payload):
        own = json.loads(payload) if payload.startswith(b"{") else {}
        return [json.dumps(own | first).encode(), payload]

    calls = []
    monkeypatch.setattr(processes, "_rank_and_size", processes._rank_and_size)
    monkeypatch.setattr(processes, "_coordinator", "")
    monkeypatch.setattr(processes, "allgather_bytes", exchange)
    monkeypatch.setattr("jax.distributed.initialize", lambda *a, **_: calls.append(a))
    monkeypatch.setattr("rsearch.hosts.meeting.join_run", lambda *a, **_: None)
    monkeypatch.setenv("no_grpc_proxy", "")  # connecting sets it
    monkeypatch.setattr("jax.process_index", lambda: 1)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    return first, calls


@pytest.mark.fault(43, "versions")
@pytest.mark.parametrize("name", ["jax", "python", "rsearch", "XLA_FLAGS"])
def test_hosts_with_different_programs_are_refused(pretended, name):
    first, _ = pretended
    processes.connect("10.0.0.1:99", num_hosts=2, host=1)
    first[name] = "other"
    message = f"^{name} is '.*' on host 1, 'other' on host 0; all hosts need the same$"
    with pytest.raises(ValueError, match=message):
        processes.connect("10.0.0.1:99", num_hosts=2, host=1)


@pytest.mark.fault(45, "SLURM", "MEGASCALE")
def test_variables_that_an_earlier_job_left_are_ignored(pretended, monkeypatch):
    left = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}
    left |= {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_COORDINATOR_ADDRESS": "gone:8080"}
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    _, asked = pretended
    processes.connect("10.0.0.1:99", num_hosts=2, host=1)
    assert [words[:3] for words in asked] == [("10.0.0.1:99", 2, 1)]
    monkeypatch.setattr(processes, "_rank_and_size", (0, 1))
    processes.connect("")
    assert (processes.host_index(), processes.num_hosts()) == (0, 1) and len(asked) == 1
    assert not [name for name in os.environ if name.startswith("MEGASCALE_")]


ALONE = """
import sys
from rsearch.hosts import processes
import jax
given = dict(num_hosts=1, host=0) if sys.argv[1] != "auto" else {}
processes.connect(sys.argv[1], **given)
devices = jax.config.read("jax_cuda_visible_devices")
print(processes.host_index(), processes.num_hosts(), devices)
"""


@pytest.mark.fault(45, "SLURM")
@pytest.mark.parametrize("how", ["auto", "by hand"])
def test_a_host_of_a_slurm_job_uses_all_its_devices(how):
    """By default JAX would use only the device with the task's local number."""
    job = {"JOB_ID": "7", "STEP_NODELIST": "localhost", "NTASKS": "1", "PROCID": "0"}
    job |= {"LOCALID": "0", "STEP_NUM_NODES": "1"}
    port = free_port()
    place = "auto" if how == "auto" else f"127.0.0.1:{port}"
    variables = {f"SLURM_{name}": value for name, value in job.items()}
    variables["JAX_COORDINATOR_PORT"] = str(port)
    done = run_python("-c", ALONE, place, **variables)
    assert (done.returncode, done.stdout) == (0, "0 1 all\n"), done.stderr


def test_a_single_host_needs_no_others():
    processes.connect("")
    assert (processes.host_index(), processes.num_hosts(), processes.is_host0()) == (
        0,
        1,
        True,
    )
    processes.barrier("alone")
    assert processes.allgather_bytes(b"x") == [b"x"]
    assert processes.map_hosts_json(lambda items: [i * 2 for i in items], [1, 2]) == [
        2,
        4,
    ]
    processes.check_same_on_all({"a": 1})
    with pytest.raises(ValueError, match=r"^no$"):
        processes.on_host0(refuse)


def refuse():
    raise ValueError("no")


def talk(argv):
    """Exchange data between two hosts; each of them runs this."""
    from rsearch.config.recipes import parse_flags
    from rsearch.runtime.compiles import num_compiles

    given = parse_flags(argv, flags=processes.FLAGS)
    processes.connect(**given)
    num_before = num_compiles()
    for size in (1, 300, 5_000, 70_000, 300_000, 5_000_000):
        sent = bytes([processes.host_index()]) * (size - processes.host_index())
        assert processes.allgather_bytes(sent) == [b"\0" * size, b"\1" * (size - 1)]
    assert num_compiles() == num_before
    processes.CHUNK_BYTES = 1000
    here, other = processes.host_index(), 1 - processes.host_index()
    assert processes.num_hosts() == 2 and processes.is_host0() == (here == 0)
    sizes = (2500, 10)
    payloads = [bytes(np.arange(n) % 251) for n in sizes]
    assert processes.allgather_bytes(payloads[here]) == payloads
    assert processes.allgather_bytes(b"") == [b"", b""]

    worked = []

    def work(items):
        worked.extend(items)
        return [{"item": i, "by": here} for i in items]

    actual = processes.map_hosts_json(work, range(5))
    assert [f["item"] for f in actual] == list(range(5))
    assert [f["by"] for f in actual] == [0, 1, 0, 1, 0]
    assert worked == [i for i in range(5) if i % 2 == here]
    assert processes.map_hosts_json(work, [7]) == [{"item": 7, "by": 0}]

    with pytest.raises(ValueError, match=r"no$"):
        processes.on_host0(refuse)
    done = []
    processes.on_host0(lambda: done.append(here))
    assert done == ([0] if here == 0 else [])
    processes.check_same_on_all({"data": "same"})
    with pytest.raises(ValueError, match="index is 'b1' on host 1, 'b0' on host 0"):
        processes.check_same_on_all({"data": "same", "index": f"b{here}"})
    processes.barrier("the end")
    print(f"host {here} has heard {other}")


def test_two_hosts_exchange_data_and_failures():
    for number, (code, out, error) in enumerate(
        run_hosts("-m", "tests.hosts.test_processes")
    ):
        assert code == 0, error
        assert f"host {number} has heard" in out


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(workdir of a host with two devices, of two hosts with one each, outputs)."""
    folder = tmp_path_factory.mktemp("hosts")
    train = ("-m", "rsearch.train")
    one = run_python(*train, *arguments(folder / "one", **SETTINGS), devices=2)
    assert one.returncode == 0, one.stderr
    told = run_hosts(*train, *arguments(folder / "two", **SETTINGS))
    for code, _, error in told:
        assert code == 0, error
    return folder / "one", folder / "two", told


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Workdir of two hosts that roll out in one program with few KV-cache pages."""
    run = tmp_path_factory.mktemp("hosts") / "together"
    paged = dict(rollout__page_tokens=16, rollout__cache_tokens=2048)
    command = arguments(run, **SETTINGS, **paged, rollout__global_mesh=True)
    for code, _, error in run_hosts("-m", "rsearch.train", *command):
        assert code == 0, error
    return run


@pytest.mark.slow
def test_two_hosts_in_one_program_learn_the_same_as_one_host(runs, together):
    """Rollouts match to the token, log-probabilities up to rounding."""
    one, _, _ = runs
    for stage in ("sft", "rl"):
        ours, theirs = (
            without_times(read_metrics(run / stage / "metrics.jsonl"))
            for run in (together, one)
        )
        for own, other in zip(ours, theirs, strict=True):
            assert stage == "sft" or own.pop("restarts") >= 0  # reported with pages
            assert own == pytest.approx(other, rel=1e-4, abs=1e-6)
    texts = [read_jsonl(run / "transcripts.jsonl") for run in (together, one)]
    assert texts[0] == texts[1]


SAMPLED = [f"--config.eval.{x}" for x in ("temperature=1", "samples=2", "seeds=2")]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [[], SAMPLED])
def test_methods_answer_the_same_on_two_hosts_that_share_a_model(
    runs, tmp_path, sampling
):
    """Hosts with fewer questions, or fewer rounds of them, make empty calls."""
    asked = ["--methods=direct,iter_retgen,protocol", "--config.eval.max_questions=5"]
    asked += ["--config.eval.at_start=False", *sampling]
    command = ("-m", "rsearch.evaluate")
    for name in ("one", "two"):
        shutil.copytree(runs[0], tmp_path / name)
    told = run_python(*command, f"--workdir={tmp_path / 'one'}", *asked, devices=2)
    assert told.returncode == 0, told.stderr
    shared = [f"--workdir={tmp_path / 'two'}", "--config.rollout.global_mesh=True"]
    for code, _, error in run_hosts(*command, *shared, *asked):
        assert code == 0, error
    texts = [read_jsonl(tmp_path / n / "transcripts.jsonl") for n in ("one", "two")]
    for rows in texts:
        for row in rows:
            del row["setting"]  # it names the mesh
    num = 15 * (4 if sampling else 1)
    assert texts[0][-num:] == texts[1][-num:]
    assert len({row["method"] for row in texts[0][-num:]}) == 3


@pytest.mark.slow
def test_a_host_that_fails_in_a_shared_program_ends_the_others(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from rsearch import train\n"
        "from rsearch.config import recipes as config\n"
        "from rsearch.hosts import processes\n"
        "from rsearch.rollout import scheduler\n"
        "find = scheduler.RolloutScheduler._run_calls\n"
        "def broken(*args):\n"
        "    if processes.host_index() == 1:\n"
        "        raise ValueError('the index is gone')\n"
        "    return find(*args)\n"
        "scheduler.RolloutScheduler._run_calls = broken\n"
        "sys.exit(config.run_command(train.command, sys.argv[1:]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = arguments(tmp_path / "run", **SETTINGS, rollout__global_mesh=True)
    (first, _, other), (second, _, broken) = run_hosts(program, *command)
    assert first != 0 and "host 1 failed in its rollouts" in other
    assert second != 0 and "the index is gone" in broken


def test_a_host_that_fails_alone_ends_the_hosts_that_wait_for_it(tmp_path, monkeypatch):
    """The second host cannot read its demonstrations, and no exchange reports it."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from rsearch import train\n"
        "from rsearch.config import recipes as config\n"
        "from rsearch.hosts import peers, processes\n"
        "replay = train.replay_demonstrations\n"
        "def broken(*args, **settings):\n"
        "    if processes.host_index() == 1:\n"
        "        raise OSError('the disk is gone')\n"
        "    return replay(*args, **settings)\n"
        "train.replay_demonstrations = broken\n"
        "peers.GRACE_SECONDS = 2.0\n"
        "sys.exit(config.run_command(train.command, sys.argv[1:]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    began = time.monotonic()
    (first, _, other), (second, _, broken) = run_hosts(
        program, *arguments(tmp_path / "run", **SETTINGS)
    )
    assert first != 0 and "error: host 1 has failed: OSError: the disk is gone" in other
    assert second != 0 and "OSError: the disk is gone" in broken
    # Well before the minutes that JAX waits for a silent host.
    assert time.monotonic() - began < 90


def test_two_hosts_learn_the_same_as_one(runs):
    one, two, _ = runs
    for stage in ("sft", "rl"):
        rows = [read_metrics(run / stage / "metrics.jsonl") for run in (one, two)]
        assert without_times(rows[0]) == without_times(rows[1])
    results = [json.loads((run / "results.json").read_text()) for run in (one, two)]
    assert without_times(results[0]) == without_times(results[1])
    texts = [read_jsonl(run / "transcripts.jsonl") for run in (one, two)]
    assert texts[0] == texts[1]


def test_only_the_first_of_two_hosts_reports(runs):
    _, _, told = runs
    (_, out, error), (_, quiet_out, quiet) = told
    assert "begins in" in error and "of 2 hosts" in error and "protocol" in out
    assert "protocol" not in quiet_out and "rl: step" not in quiet


@pytest.mark.fault(24, "hosts")
def test_one_host_resumes_a_run_of_two_hosts(runs):
    _, two, _ = runs
    before = (two / "results.json").read_bytes()
    command = arguments(two, **SETTINGS)
    done = run_python("-m", "rsearch.train", *command, devices=2)
    assert done.returncode == 0 and "resumes in" in done.stderr, done.stderr
    assert (two / "results.json").read_bytes() == before


@pytest.mark.slow
def test_an_evaluation_ends_and_names_a_host_that_is_killed(runs, tmp_path):
    run = shutil.copytree(runs[1], tmp_path / "run")
    record = run / "run.json"
    num_launches = len(json.loads(record.read_text())["launches"])
    words = (f"--workdir={run}", "--methods=direct,rag")
    hosts = start_hosts("-m", "rsearch.evaluate", *words)
    while len(json.loads(record.read_text())["launches"]) == num_launches:
        assert [host.poll() for host in hosts] == [None, None]
        time.sleep(0.1)
    hosts[1].kill()
    _, error = hosts[0].communicate(timeout=120)
    assert hosts[0].returncode == 75 and "error: host 1 (" in error, error


@pytest.mark.fault(43, "configuration and inputs")
def test_hosts_with_different_configurations_are_stopped(tmp_path, monkeypatch):
    """The second host has another seed; both report it, and nothing is started."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from rsearch import train\n"
        "from rsearch.config import recipes as config\n"
        "words = sys.argv[1:]\n"
        "seed = words[-1].rpartition('=')[2]\n"
        "words = [w for w in words if not w.startswith('--config.seed')]\n"
        "words.append(f'--config.seed={seed}')\n"
        "sys.exit(config.run_command(train.command, words))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for code, _, error in run_hosts(program, *arguments(tmp_path / "run")):
        assert code == 2
        assert "config.seed is 1 on host 1, 0 on host 0" in error
    assert not pathlib.Path(tmp_path / "run").exists()


STARTED = """
import contextlib, sys
from rsearch.config import recipes
from rsearch.hosts import processes
from rsearch.runtime import identity
from rsearch.runtime.workdir import open_workdir
identity.SHARED_SECONDS = 1.0
config = recipes.load("configs/quickstart.py")
shared, own, address, _, number = (word.rpartition("=")[2] for word in sys.argv[1:])

def started(path):
    with (
        open_workdir(path, config) as workdir,
        identity.recorded_start(workdir.path, "train", config, inputs={}),
    ):
        processes.barrier("all have started")

with processes.connected(address, num_hosts=2, host=int(number), stall_seconds=60):
    started(shared)
    try:
        started(f"{own}{number}")
    except ValueError as error:
        print(error)
"""


def test_hosts_that_do_not_share_the_workdir_are_stopped_at_the_start(tmp_path):
    for code, out, error in run_hosts("-c", STARTED, tmp_path / "a", tmp_path / "b"):
        assert code == 0, error
        assert f"{tmp_path / 'b1'}: its run.json is not that of host 0" in out


if __name__ == "__main__":
    talk(sys.argv[1:])
