"""A run small enough for a test: the quickstart, each part as small as possible."""

import contextlib
import dataclasses
import fcntl
import functools
import os
import pathlib
import subprocess
import sys
from unittest import mock

import jax
import pytest

from rsearch.config import recipes as configuration
from rsearch.models.sharding import make_mesh
from rsearch.setup import load
from tests.session import SESSION_FOLDER, make_session_folder
from tests.xla import xla_flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Shared by all processes of a pytest session; outside one, a folder of this process.
_own_folder = None if SESSION_FOLDER in os.environ else make_session_folder()
SESSION = pathlib.Path(os.environ[SESSION_FOLDER])

SIZES = {
    "name": "small",
    "model.width": 32,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.mlp_width": 32,
    "world.people": 40,
    "world.films": 20,
    "world.companies": 10,
    "world.cities": 10,
    "world.train_questions": 40,
    "world.dev_questions": 6,
    "retrieval.hashed_dim": 512,
    "rollout.max_prompt_tokens": 40,
    "rollout.max_turn_tokens": 24,
    "rollout.max_observation_tokens": 24,
    "rollout.max_concurrent": 8,
    "rollout.group_size": 2,
    "rollout.temperature": 1.0,
    "sft.steps": 60,  # enough for a policy that searches and answers
    "sft.batch_size": 8,
    "sft.micro_batch": 8,
    "sft.sequence_tokens": 160,
    "sft.warmup_steps": 0,
    "sft.lr": 1e-2,
    "sft.repeats": 1,
    "sft.baseline_share": 0.2,
    "rl.steps": 3,
    "rl.questions_per_step": 4,
    "rl.micro_batch": 8,
    "rl.warmup_steps": 0,
    "rl.lr": 1e-3,
    # Untrained policies hardly ever answer: this term gives groups some spread.
    "reward": {"answer_em": {}, "format_ok": {"good": 0.1, "bad": 0.0}},
    "checkpoint.sft_steps": 20,
    "checkpoint.rl_steps": 1,
    "checkpoint.keep": 2,
}
PPO = {  # with a value model, the KL term in the rewards, and an adaptive coefficient
    "rl__algorithm": "ppo",
    "rl__kl_coef": 0.1,
    "rl__kl_place": "reward",
    "rl__kl_kind": "k1",
    "rl__kl_controller": "adaptive",
    "rl__old_logprobs": "recompute",
    "critic__lr": 1e-3,
}


def config(**overrides):
    """Return the quickstart at these sizes; `__` in a name stands for a dot."""
    changes = {name.replace("__", "."): value for name, value in overrides.items()}
    recipe = configuration.load(str(ROOT / "configs" / "quickstart.py"))
    return configuration.apply_overrides(recipe, SIZES | changes)


def arguments(workdir, **overrides):
    """Return the same configuration as command-line arguments."""
    changes = {name.replace("__", "."): value for name, value in overrides.items()}
    return [
        "--config=configs/quickstart.py",
        f"--workdir={workdir}",
        *(f"--config.{name}={value}" for name, value in (SIZES | changes).items()),
    ]


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Compile without optimizations, like child processes, which load the programs."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@contextlib.contextmanager
def on_one_device():
    """Set up runs of this process on one device, for which `finished()` has compiled.

    The programs are loaded; those for all devices would be compiled for this test.
    """

    def make(**axes):
        return make_mesh(**axes, devices=jax.devices()[:1])

    with mock.patch.object(load, "make_mesh", make):
        yield


@pytest.fixture(scope="module")
def one_device():
    """Set up all runs of a module on one device."""
    with on_one_device():
        yield


@functools.cache
def finished():
    """Return the workdir of a complete run of `config()` on one device.

    The run could import neither tensorflow nor torch, and read no pickle. Copy the
    directory before changing it.
    """
    workdir, output = SESSION / "finished", SESSION / "stdout"
    with (SESSION / "finished.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            done = run_python("-m", "tests.interrupted_run", "", *arguments(workdir))
            assert done.returncode == 0, done.stderr
            output.write_text(done.stdout)
    return workdir


def load_setup(whole):
    """Return what `load_setup` does, but for one device, which compiles faster."""
    setup = load.load_setup(whole)
    mesh = make_mesh(devices=jax.devices()[:1])
    return dataclasses.replace(setup, mesh=mesh, rollout_mesh=mesh)


def without_times(rows):
    """Return rows of metrics or results without the fields that vary between runs."""
    return [
        {
            name: value
            for name, value in row.items()
            if not name.endswith("seconds") and name not in ("compiles", "start")
        }
        for row in rows
    ]


def run_python(*command, devices=1, **environment):
    """Run `python *command` in the checkout and return the finished process.

    Programs that one process of the session has compiled are loaded by the others.
    """
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, **child_environment(devices), **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )


def child_environment(devices=1):
    """Return variables that give a child process this many CPU devices."""
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    }
