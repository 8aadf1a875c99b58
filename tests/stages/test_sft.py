"""The supervised stage: what its loss is of, and what it refuses."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsearch import build
from rsearch.data.order import take
from rsearch.metrics import read as read_metrics
from rsearch.rollout.driver import replay
from rsearch.stages import sft
from rsearch.types import Source
from tests.small_run import config, load_setup, quick_compilation

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
    params = build.initial_params(setup)
    host, total, count = build.make_host(setup), 0.0, 0
    made = build.demonstrations(setup)
    for i in take(len(made), 8, seed=0, step=0):
        rollout = replay(host, made[i].question, made[i].turns)
        ids = np.concatenate([s.token_ids for s in rollout.segments])
        own = np.concatenate(
            [[s.source == Source.POLICY] * len(s.token_ids) for s in rollout.segments]
        )
        total -= log_likelihoods(setup.model, params, ids)[own].sum()
        count += own.sum()
    trained = sft.run(setup, params, tmp_path)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["loss"] == pytest.approx(total / count, rel=1e-5)
    assert row.keys() == {"step", "loss", "grad_norm", "seconds", "compiles"}
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), trained, params)
    assert all(jax.tree.leaves(moved))


def test_more_rows_than_demonstrations_are_filled_with_repeats(tmp_path):
    path = write(tmp_path, {"question": "Q?", "turns": ["<answer> A </answer>"]})
    setup = load_setup(config(sft__demonstrations=path, sft__steps=1, **ALONE))
    sft.run(setup, build.initial_params(setup), tmp_path / "out")
    (row,) = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert np.isfinite(row["loss"]) and row["loss"] > 0


def write(folder, *rows):
    path = folder / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("turns", "changes", "message"),
    [
        (["I give up."], {}, "turn 1 has no action: 'I give up.'"),
        (["<search> x </search>"], {}, "1 turns do not end it"),
        (["<answer> A </answer>"] * 2, {}, "ended with turn 1 of 2"),
        (["<answer> A </answer> B"], {}, "goes on beyond its action: ' B'"),
        ([f"{'x ' * 99}<answer> A </answer>"], {}, "tokens in a turn > 24"),
        (
            ["<search> x </search>", "<answer> A </answer>"],
            dict(sft__sequence_tokens=20),
            r"has \d+ tokens, config.sft.sequence_tokens is 20",
        ),
        (
            ["<search> x </search>", "<search> y </search>"],
            dict(rollout__max_searches=1),
            r"searches in its last turn; config\.rollout\.max_searches is 1",
        ),
    ],
)
def test_a_demonstration_that_no_rollout_could_be_is_refused(
    tmp_path, turns, changes, message
):
    path = write(tmp_path, {"question": "Q?", "turns": turns})
    c = config(sft__demonstrations=path, **changes, **ALONE)
    setup = load_setup(c)
    with pytest.raises(ValueError, match=message) as told:
        sft.run(setup, build.initial_params(setup), tmp_path / "out")
    assert "d.jsonl:1" in str(told.value)
