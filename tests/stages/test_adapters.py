"""Stages that train LoRA adapters, from the first stage to the exported model."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from rsearch import export
from rsearch.config.recipes import run_command
from rsearch.models.hf import checkpoint as huggingface
from rsearch.runtime import checkpoint
from rsearch.runtime.checkpoint import FOLDER as CHECKPOINTS
from rsearch.runtime.metrics import read_metrics
from rsearch.setup import agents
from rsearch.setup.learners import fresh_state, state_shapes
from rsearch.setup.weights import initial_params, trained_params
from rsearch.stages import rl
from tests.small_run import (
    arguments,
    config,
    load_setup,
    quick_compilation,
    run_python,
    without_times,
)
from tests.stages.running import rl_stage, run_rl
from tests.stages.test_learning import PPO, last_state, of_rl

__all__ = ["quick_compilation"]
# The entropy bonus gives a gradient even if no rewards differ, as is usual for policies
# with little training.
LOW = dict(model__lora_rank=2, model__lora_alpha=6.0, rl__entropy_coef=1.0)
GRPO = LOW | dict(stages=("rl",), rl__kl_coef=0.1, rl__lr=0.05)
BRIEF = LOW | dict(
    sft__steps=4,
    rl__steps=2,
    eval__at_start="false",
    eval__methods="protocol",
    checkpoint__sft_steps=4,
)


def whole(tree):
    """Copy the arrays of a tree to the host."""
    return jax.tree.map(np.array, tree)


def test_a_stage_of_adapters_changes_no_other_weight_and_resumes_exactly(tmp_path):
    setup = of_rl(GRPO | dict(rl__steps=2))
    params = initial_params(setup)
    before = whole(params)
    stage = rl_stage(setup, tmp_path / "whole")
    after = rl.run(stage, params)
    # The merged weights replace the base's: there is no room for both.
    assert all(x.is_deleted() for x in jax.tree.leaves(params))
    rows = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert rows[1]["compiles"] - rows[0]["compiles"] <= 3
    # The reference is the base model, so the KL is 0 until the first update.
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[1]["kl"] > 1e-4
    # Sampled from merged weights, scored with the adapters kept separate.
    assert all(row["logp_gap"] < 1e-5 for row in rows)
    _, state = last_state(setup, tmp_path / "whole")
    assert sum(x.size for x in jax.tree.leaves(state.params)) == 2 * (
        4 * (32 + 16) + 3 * (32 + 32)  # for one layer
    )
    a, b = (np.float64(state.params["layers"][f"down_{x}"]) for x in "ab")
    expected = before["layers"]["down"] + 6.0 / 2 * (a @ b)
    np.testing.assert_allclose(after["layers"]["down"], expected, atol=1e-6)
    np.testing.assert_array_equal(after["embedding"], before["embedding"])

    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / CHECKPOINTS / "2")
    resumed = dataclasses.replace(stage, folder=tmp_path / "parts")
    rl.run(resumed, initial_params(setup))
    _, parts = last_state(setup, tmp_path / "parts")
    jax.tree.map(np.testing.assert_array_equal, parts, state)
    again = read_metrics(tmp_path / "parts" / "metrics.jsonl")
    assert without_times(again) == without_times(rows)


@pytest.mark.slow
def test_a_value_model_of_adapters_shares_the_policys_base(tmp_path):
    setup = of_rl(PPO | LOW | dict(rl__steps=2))
    run_rl(setup, None, initial_params(setup), tmp_path)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows[0]["value"] == 0 != rows[1]["value"]
    assert all(row["tis_weight"] == pytest.approx(1, abs=1e-4) for row in rows)
    _, state = last_state(setup, tmp_path)
    assert state.critic.params.keys() == {"layers", "value"}
    assert np.any(state.critic.params["value"])
    begun = fresh_state(setup, "rl", initial_params(setup))
    own, other = begun.params["layers"]["up_a"], begun.critic.params["layers"]["up_a"]
    assert np.abs(own - other).max() > 0.01


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two stages that train adapters; copy it before changing it."""
    workdir = tmp_path_factory.mktemp("adapters") / "run"
    done = run_python("-m", "rsearch.train", *arguments(workdir, **BRIEF))
    assert done.returncode == 0, done.stderr
    return workdir


def leaves(workdir, stage, step):
    return checkpoint.read_manifest(workdir / stage / "checkpoints", step)["leaves"]


@pytest.mark.slow
def test_each_stage_starts_from_the_merged_weights_of_the_one_before(run, tmp_path):
    setup = load_setup(config(**LOW | dict(sft__steps=4, rl__steps=2)))
    expected = whole(initial_params(setup))["layers"]
    for stage, step in (("sft", 4), ("rl", 2)):
        like = state_shapes(setup, stage)
        folder = run / stage / "checkpoints"
        own = checkpoint.restore(folder, step, like).params["layers"]
        expected["gate"] = expected["gate"] + 3.0 * np.matmul(
            np.float64(own["gate_a"]), np.float64(own["gate_b"])
        )
        assert np.any(own["gate_b"])
    stage, step, params = trained_params(setup, run)
    assert (stage, step) == ("rl", 2)
    np.testing.assert_allclose(params["layers"]["gate"], expected["gate"], atol=1e-6)
    _, _, same = agents.stage_model("rl", setup.mesh, workdir=run)
    jax.tree.map(np.testing.assert_array_equal, same, params)
    out = tmp_path / "model"
    told = [*arguments(run, **BRIEF), f"--out={out}"]
    assert run_command(export.main, told) == 0
    loaded = huggingface.load_params(out, setup.model.spec)
    jax.tree.map(np.testing.assert_allclose, loaded, params)


@pytest.mark.slow
def test_a_run_of_adapters_resumes_exactly_but_not_without_earlier_stages(
    run, tmp_path
):
    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "rl" / "checkpoints" / "2")
    done = run_python("-m", "rsearch.train", *arguments(copy, **BRIEF))
    assert done.returncode == 0, done.stderr
    assert leaves(copy, "rl", 2) == leaves(run, "rl", 2)
    shutil.rmtree(copy / "sft" / "checkpoints" / "4")
    setup = load_setup(config(**LOW | dict(sft__steps=4, rl__steps=2)))
    with pytest.raises(ValueError, match="sft/checkpoints/4: no such checkpoint"):
        trained_params(setup, copy)
