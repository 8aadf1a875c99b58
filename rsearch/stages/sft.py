"""Supervised stage: imitate the policy's part of demonstrations."""

import time

import jax

from rsearch import build, console
from rsearch.compiles import num_compiles
from rsearch.data.order import take
from rsearch.learn.batch import cut, pack_segments
from rsearch.learn.packing import packed
from rsearch.metrics import MetricsLog
from rsearch.models.sharding import num_shards
from rsearch.stages.state import open_state, save_state, tell_if_skipped


def run(setup: build.Setup, rollouts, params, folder):
    """Trains on demonstrations, from where an earlier start of this stage stopped.

    Args:
        setup: of the run.
        rollouts: the demonstrations, from `build.replay_demonstrations`.
        params: of the policy before this stage.
        folder: of this stage: checkpoints, metrics.jsonl, curves.

    Returns:
        The policy's parameters after the stage.
    """
    c = setup.config
    learner, first, state = open_state(setup, "sft", params, folder)
    base = build.frozen(setup, params)
    if first >= c.sft.steps:
        return learner.plain(state.params, base)
    rows, shards = [r.segments for r in rollouts], num_shards(setup.mesh)
    with MetricsLog(folder, first_step=first) as metrics:
        steps = range(first, c.sft.steps)
        for step in console.progress(steps, "sft: steps", total=len(steps)):
            start = time.monotonic()
            chosen = take(len(rows), c.sft.batch_size, seed=c.seed, step=step)
            batch = pack_segments([rows[i] for i in chosen], c.sft.sequence_tokens)
            batch = packed(cut(batch, c.sft.micro_batch), multiple=shards)
            state, measured = learner.update(state, learner.put(batch), base=base)
            measured = jax.device_get(measured)
            tell_if_skipped("sft", step, measured)
            measured["seconds"] = time.monotonic() - start
            metrics.write(step, measured | {"compiles": num_compiles()})
            done = step + 1
            save_state(setup, "sft", done, state, folder)
    return learner.plain(state.params, base)
