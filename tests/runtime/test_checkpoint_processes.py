"""Checkpoints across processes: other device counts, hosts, and kills in a save."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rsearch.runtime import checkpoint
from tests.hosts.test_processes import run_hosts
from tests.xla import xla_flags

ROOT = pathlib.Path(__file__).resolve().parents[2]

RESTORE = """
import sys
import jax, numpy as np
from rsearch.runtime import checkpoint
from rsearch.runtime.metrics import MetricsLog
assert jax.device_count() == 2
like = {"w": jax.ShapeDtypeStruct((16, 8), "float32")}
tree = checkpoint.restore(sys.argv[1], 0, like)
np.testing.assert_array_equal(tree["w"], np.arange(128.0).reshape(16, 8))
with MetricsLog(sys.argv[2]) as log:
    log.write(0, {"loss": 1.0})
assert not {"tensorflow", "torch", "transformers"} & sys.modules.keys()
"""


def run_python(code, *arguments, devices=2):
    flags = {"XLA_FLAGS": xla_flags(devices), "JAX_PLATFORMS": "cpu"}
    environment = {**os.environ, **flags}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )


def test_restoring_and_logging_import_neither_torch_nor_tensorflow(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    w = jax.device_put(jnp.arange(128.0).reshape(16, 8), sharding)
    checkpoint.save(tmp_path / "run", 0, {"w": w}, {}, keep=1)
    process = run_python(RESTORE, tmp_path / "run", tmp_path / "log")
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert list((tmp_path / "log" / "tensorboard").glob("events*"))


DESCRIBE = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rsearch.hosts import collectives, processes
from rsearch.runtime import checkpoint
address, _, number = (word.partition("=")[2] for word in sys.argv[1:])
processes.connect(address, num_hosts=2, host=int(number))
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
rows = np.arange(6 * 4 * 4, dtype=np.float32).reshape(6, 4, 4)
for spec in (("a", "b"), (None, "b", "a"), (None, None, ("a", "b")), (None, "a"), ()):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    leaf = jax.make_array_from_callback(rows.shape, sharding, lambda at: rows[at])
    assert not leaf.is_fully_addressable
    for collectives.CHUNK_BYTES in (1, 4 * rows[0].nbytes, rows.nbytes, 1 << 28):
        most = max(rows[0].nbytes, collectives.CHUNK_BYTES)
        sizes = [piece.nbytes for piece in collectives.gather_chunks(leaf)]
        assert sum(sizes) == rows.nbytes
        assert max(sizes) <= most or leaf.is_fully_replicated
        np.testing.assert_array_equal(collectives.gather_array(leaf), rows)
        assert checkpoint.describe(leaf) == checkpoint.describe(rows)
print("described")
"""


def test_arrays_of_several_hosts_are_gathered_a_few_rows_at_a_time():
    """On each host, their digest is that of the whole array."""
    for code, out, error in run_hosts("-c", DESCRIBE, devices=2):
        assert code == 0 and out.endswith("described\n"), error


DAMAGED = """
import sys
import jax, numpy as np
from rsearch.runtime import checkpoint
from rsearch.hosts import processes
from rsearch.models.sharding import batch_sharding, make_mesh
directory, where, address, _, number = (w.rpartition("=")[2] for w in sys.argv[1:])
processes.connect(address, num_hosts=2, host=int(number))
rows = np.arange(8, dtype=np.float32).reshape(4, 2)
leaf = jax.make_array_from_callback(
    rows.shape, batch_sharding(make_mesh()), lambda at: rows[at]
)
for step in (1, 2):
    checkpoint.save(directory, step, {"w": leaf}, {}, keep=2)

def first_read(check):
    def checked(folder, *given):
        if number == "1" and folder.name == "2":
            raise checkpoint.DamagedError("not what was written")
        return check(folder, *given)
    return checked

setattr(checkpoint, where, first_read(getattr(checkpoint, where)))
like = {"w": jax.ShapeDtypeStruct(rows.shape, "float32", sharding=leaf.sharding)}
step, tree, _ = checkpoint.newest_good(directory, like)
print(step, float(tree["w"].sum()), checkpoint.steps(directory))
"""


@pytest.mark.fault(23, "hosts disagree")
@pytest.mark.parametrize("where", ["check_files", "check_leaves"])
def test_damage_that_only_one_host_sees_counts_for_all(tmp_path, where):
    told = run_hosts("-c", DAMAGED, tmp_path, where)
    for code, out, error in told:
        assert code == 0, error
        assert out.endswith("1 28.0 [1]\n")
    assert "host 1: not what was written; set aside as 2.damaged" in told[0][2]
    assert (tmp_path / "2.damaged" / "manifest.json").is_file()


SAVE_FOREVER = """
import itertools, sys
import jax.numpy as jnp
from rsearch.runtime import checkpoint
start = (checkpoint.latest(sys.argv[1]) or 0) + 1
for step in itertools.count(start):
    tree = {f"l{i}": jnp.full((64, 64), step, jnp.float32) for i in range(8)}
    print(step, flush=True)
    checkpoint.save(sys.argv[1], step, tree, {"step": step}, keep=2)
"""


@pytest.mark.fault(20, "in a save")
def test_kill_in_the_middle_of_a_save_loses_at_most_that_save(tmp_path):
    like = {f"l{i}": jax.ShapeDtypeStruct((64, 64), jnp.float32) for i in range(8)}
    rng = random.Random(3)
    for _ in range(3):
        process = run_python(SAVE_FOREVER, tmp_path, devices=1)
        first = int(process.stdout.readline())
        begun = first
        while begun < first + 3:  # the third save is under way
            begun = int(process.stdout.readline())
        time.sleep(rng.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        begun = int((process.communicate()[0].split() or [begun])[-1])
        step, tree, meta = checkpoint.newest_good(tmp_path, like)
        assert begun - 1 <= step <= begun and meta == {"step": step}
        assert all(np.all(np.asarray(leaf) == step) for leaf in tree.values())
        assert not list(tmp_path.glob("*.damaged*"))
