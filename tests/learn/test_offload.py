"""Arrays offloaded to host memory come back bit-identical."""

import os
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from rsearch.hosts.offload import HOST, check_host_memory, in_host_memory, on_device
from rsearch.learn.batch import to_micro_batches
from rsearch.learn.objectives import policy_loss
from rsearch.learn.optimizer import make_optimizer
from rsearch.learn.train_state import create_state, state_shardings
from rsearch.models.sharding import make_mesh, param_shardings, with_shardings
from rsearch.runtime import checkpoint
from tests.learn.learner import Learner
from tests.learn.test_update import ADAMW, GRPO, MODEL, V, make_batch, one_device
from tests.rollout import tiny


def eight_devices():
    return make_mesh(data=2, fsdp=2, tensor=2)


def kinds(tree):
    """Return the kinds of memory that a tree's arrays are in, except scalars."""
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def learn(mesh, offloads, num_updates=2):
    """Return (learner, last state, [(state, metrics) after each update]).

    With `offloads`, the initial parameters are in host memory too.
    """
    optimizer = make_optimizer(**ADAMW)
    learner = Learner(
        MODEL,
        optimizer,
        mesh,
        loss=policy_loss(**GRPO),
        loss_mean="token",
        chunk_tokens=16,
        offloads=offloads,
    )
    params = tiny.params(vocab_size=V)
    params = jax.device_put(params, param_shardings(params, mesh))
    params = in_host_memory(params) if offloads else params
    state = create_state(params, optimizer, mesh, offloads=offloads)
    states = []
    for seed in range(num_updates):
        if offloads:
            assert kinds(state.opt_state) == {HOST} and kinds(params) == {HOST}
            assert HOST not in kinds(state.params)
        batch = learner.put(
            to_micro_batches(make_batch(seed), 4 if mesh.size > 1 else 8)
        )
        state, metrics = learner.update(state, batch)
        states.append(jax.tree.map(np.array, (state, metrics)))
    return learner, state, states


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "eight"])
def test_moments_in_host_memory_change_no_bit(tmp_path, name):
    # This process uses the flags of real runs. With those of tests.xla, a step that is
    # a program of its own rounds differently from one that is part of the update.
    flags = f"--xla_force_host_platform_device_count={8 if name == 'eight' else 1}"
    environment = os.environ | {"XLA_FLAGS": flags}
    subprocess.run(
        [sys.executable, "-m", "tests.learn.test_offload", name, str(tmp_path)],
        env=environment,
        check=True,
        timeout=300,
    )


def check_bits(mesh, folder):
    """Compare learning with moments on the device and in host memory."""
    _, _, expected = learn(mesh, False)
    learner, state, actual = learn(mesh, True)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert kinds(state.opt_state) == {HOST} and HOST not in kinds(state.params)
    assert learner.num_traces == 1  # the gradient's; the step is a separate program
    like = with_shardings(state, state_shardings(state, mesh, offloads=True))
    checkpoint.save(folder, 2, state, {}, keep=1)
    restored = checkpoint.restore(folder, 2, like)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert kinds(restored.opt_state) == {HOST} and HOST not in kinds(restored.params)


def test_an_offloaded_reference_comes_back_unchanged():
    mesh = eight_devices()
    params = create_state(
        tiny.params(vocab_size=V), make_optimizer(**ADAMW), mesh
    ).params
    away = in_host_memory(params)
    assert kinds(away) == {HOST} and HOST not in kinds(params)
    back = on_device(away)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    for there, here in zip(jax.tree.leaves(back), jax.tree.leaves(params)):
        assert there.sharding == here.sharding
    same = on_device(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(params)))


def test_devices_that_cannot_use_host_memory_are_refused():
    check_host_memory(one_device(), "config.model.offload = ('optimizer',)")
    memory = types.SimpleNamespace(kind="unpinned_host")
    device = types.SimpleNamespace(
        device_kind="Abacus", addressable_memories=lambda: [memory]
    )
    mesh = types.SimpleNamespace(devices=np.array([device]))
    message = r"model.offload = \('optimizer',\): Abacus has no memory 'pinned_host'"
    with pytest.raises(ValueError, match=message):
        check_host_memory(mesh, "config.model.offload = ('optimizer',)")


if __name__ == "__main__":
    makers = {"one": one_device, "eight": eight_devices}
    check_bits(makers[sys.argv[1]](), pathlib.Path(sys.argv[2]))
