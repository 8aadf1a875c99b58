"""The supervised stage: its loss, its validation loss and the weights it keeps."""

import dataclasses

import jax
import numpy as np
import pytest

from rsearch.data.order import step_items
from rsearch.runtime import checkpoint
from rsearch.runtime.metrics import read_metrics
from rsearch.setup.rollouts import replay_demonstrations
from rsearch.setup.weights import initial_params
from rsearch.stages import sft
from rsearch.types import Source
from tests.small_run import config, load_setup, quick_compilation
from tests.stages.running import run_sft, sft_stage

__all__ = ["quick_compilation"]
ALONE = dict(stages=("sft",), sft__baseline_share=0.0)


def log_likelihoods(model, params, ids):
    """Return [n] log-probs of the ids given those before, by one forward pass."""
    # Padded, so that few lengths are compiled; attention is causal.
    padded = np.pad(ids, (0, -len(ids) % 64))[None]
    positions = np.arange(padded.shape[1])[None]
    hidden, _ = model.apply({"params": params}, padded, positions)
    logits = np.asarray(model.apply({"params": params}, hidden, method="logits"))[0]
    logp = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return np.append(0, logp[np.arange(len(ids) - 1), ids[1:]])


def test_the_first_loss_is_over_the_policys_own_tokens_only(tmp_path):
    setup = load_setup(config(sft__steps=1, **ALONE))
    params = initial_params(setup)
    rollouts, total, count = replay_demonstrations(setup), 0.0, 0
    for i in step_items(len(rollouts), 8, seed=0, step=0):
        rollout = rollouts[i]
        ids = np.concatenate([s.token_ids for s in rollout.segments])
        own = np.concatenate(
            [[s.source == Source.POLICY] * len(s.token_ids) for s in rollout.segments]
        )
        total -= log_likelihoods(setup.model, params, ids)[own].sum()
        count += own.sum()
    trained = run_sft(setup, rollouts, params, tmp_path)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["loss"] == pytest.approx(total / count, rel=1e-5)
    assert row.keys() == {"step", "loss", "grad_norm", "seconds", "compiles"}
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), trained, params)
    assert all(jax.tree.leaves(moved))


def test_more_rows_than_demonstrations_are_filled_with_repeats(tmp_path):
    setup = load_setup(config(sft__steps=1, **ALONE))
    rollouts = replay_demonstrations(setup)[:3]
    run_sft(setup, rollouts, initial_params(setup), tmp_path)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert np.isfinite(row["loss"]) and row["loss"] > 0


def rows_of(segments):
    """Return [n] ids, and [n] bool: whether the policy wrote each of them."""
    ids = np.concatenate([s.token_ids for s in segments])
    source = [[s.source == Source.POLICY] * len(s.token_ids) for s in segments]
    return ids, np.concatenate(source)


@pytest.mark.parametrize(
    "kind", ["token", pytest.param("sequence", marks=pytest.mark.slow)]
)
def test_the_validation_loss_is_the_mean_over_the_held_out_rows(tmp_path, kind):
    whole = dict(sft__steps=2, sft__lr=0.0, optim__weight_decay=0.0)
    whole |= dict(sft__validation_share=0.4, sft__validate_every=1)
    setup = load_setup(config(sft__loss_mean=kind, **whole, **ALONE))
    params = initial_params(setup)
    stage = sft_stage(setup, replay_demonstrations(setup), tmp_path)
    learnt, held_out = sft.split_rows(stage)
    assert {r[0].text for r in learnt}.isdisjoint(r[0].text for r in held_out)
    assert len(held_out) > 8  # more than one batch
    losses = []
    for segments in held_out:
        ids, own = rows_of(segments)
        losses.append(-log_likelihoods(setup.model, params, ids)[own])
    expected = np.mean([x.mean() for x in losses])
    if kind == "token":
        expected = np.concatenate(losses).mean()
    sft.run(stage, params)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    found = [row["validation_loss"] for row in rows]
    assert found == pytest.approx([expected] * 2, rel=1e-4)


def test_a_stage_ends_with_the_weights_of_the_lowest_validation_loss(tmp_path):
    # The learning rate is so high that the loss soon rises again.
    whole = dict(sft__steps=4, sft__lr=1.0, checkpoint__keep=1)
    whole |= dict(sft__validation_share=0.2, sft__validate_every=1)
    whole |= dict(sft__keep="lowest_loss", stages=("sft_rewriter",))
    setup = load_setup(config(**ALONE | whole))
    rollouts = replay_demonstrations(setup)
    stage = dataclasses.replace(
        sft_stage(setup, rollouts, tmp_path), name="sft_rewriter"
    )
    trained = sft.run(stage, initial_params(setup))
    losses = [r["validation_loss"] for r in read_metrics(tmp_path / "metrics.jsonl")]
    best = int(np.argmin(losses)) + 1
    assert best < 4, losses
    folder = tmp_path / checkpoint.FOLDER
    assert set(checkpoint.steps(folder)) == {best, 4}
    assert checkpoint.read_manifest(folder, 4)["made_by"]["stage"] == stage.name
    _, held_out = sft.split_rows(stage)
    again = sft.validation_loss(stage, trained, None, held_out)
    assert again == pytest.approx(min(losses), rel=1e-5)
    # A later start of the stage reads the same weights.
    resumed = sft.run(stage, initial_params(setup))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), trained, resumed)
    assert all(jax.tree.leaves(same))
