"""Supervised stage: imitate the policy's part of demonstrations."""

import functools
import time

import jax

from rsearch import setup as build
from rsearch.data.order import take
from rsearch.learn.batch import cut, pack_segments
from rsearch.learn.packing import packed
from rsearch.models.sharding import num_shards
from rsearch.runtime import console
from rsearch.runtime.compiles import num_compiles
from rsearch.runtime.metrics import MetricsLog
from rsearch.stages.state import Progress


def run(setup: build.Setup, rollouts, params, folder):
    """Trains on demonstrations, from where an earlier start of this stage stopped.

    Args:
        setup: of the run.
        rollouts: the demonstrations, from `build.replay_demonstrations`.
        params: of the policy before this stage; if it trains adapters, they become what
            it returns, and must not be touched again.
        folder: of this stage: checkpoints, metrics.jsonl, curves.

    Returns:
        The policy's parameters after the stage.
    """
    c, progress = setup.config, Progress(setup, "sft", params, folder)
    learner, base = progress.learner, build.frozen(setup, params)
    if progress.is_over:
        return learner.left(progress.state.params, base)
    rows, shards = [r.segments for r in rollouts], num_shards(setup.mesh)
    with progress.kept(), MetricsLog(folder, first_step=progress.num_rows) as metrics:

        def measure(step, row):
            progress.outlast(functools.partial(metrics.write, step, row))
            progress.save_if_due()

        if progress.owed is not None:
            measure(progress.done - 1, progress.owed)
        steps = range(progress.done, c.sft.steps)
        for step in console.progress(steps, "sft: steps", total=len(steps)):
            progress.begin_step()
            start = time.monotonic()
            chosen = take(len(rows), c.sft.batch_size, seed=c.seed, step=step)
            batch = pack_segments([rows[i] for i in chosen], c.sft.sequence_tokens)
            batch = packed(cut(batch, c.sft.micro_batch), multiple=shards)
            batch = learner.put(batch)
            state, measured = learner.update(progress.state, batch, base=base)
            measured = jax.device_get(measured)
            progress.guards.look(step, measured, batch, state.params)
            measured["seconds"] = time.monotonic() - start
            row = measured | {"compiles": num_compiles()}
            progress.advance(state, owed=row)  # the old one's buffers are gone
            measure(step, row)
    return learner.left(progress.state.params, base)
