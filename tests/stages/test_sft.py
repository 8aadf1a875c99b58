"""The supervised stage: what its loss is of, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsearch.data.order import take
from rsearch.runtime.metrics import read_metrics
from rsearch.setup.rollouts import replay_demonstrations
from rsearch.setup.weights import initial_params
from rsearch.types import Source
from tests.small_run import config, load_setup, quick_compilation
from tests.stages.running import run_sft

__all__ = ["quick_compilation"]
ALONE = dict(stages=("sft",), sft__baseline_share=0.0)


def log_likelihoods(model, params, ids):
    """[n] log-probability of each id given those before it, by one forward pass."""
    ids = jnp.asarray(ids)[None]
    positions = jnp.arange(ids.shape[1])[None]
    hidden, _ = model.apply({"params": params}, ids, positions)
    logits = np.asarray(model.apply({"params": params}, hidden, method="logits"))[0]
    logp = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return np.append(0, logp[np.arange(len(logits) - 1), np.asarray(ids)[0, 1:]])


def test_its_first_loss_is_that_of_the_policys_own_tokens(tmp_path):
    setup = load_setup(config(sft__steps=1, **ALONE))
    params = initial_params(setup)
    rollouts, total, count = replay_demonstrations(setup), 0.0, 0
    for i in take(len(rollouts), 8, seed=0, step=0):
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
