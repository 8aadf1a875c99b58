"""Supervised stage: imitate the policy's part of demonstrations."""

import time

import jax

from rsearch import build, checkpoint, console
from rsearch.compiles import num_compiles
from rsearch.data.order import take
from rsearch.evaluate import CHECKPOINTS
from rsearch.learn.batch import pack_segments, split
from rsearch.learn.update import create_state, state_like
from rsearch.metrics import MetricsLog
from rsearch.models.weights import param_shapes


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
    learner, optimizer = build.make_learner(setup, "sft")
    like = state_like(param_shapes(setup.model.spec), optimizer, setup.mesh)
    found = checkpoint.newest_good(folder / CHECKPOINTS, like)
    if found is None:
        first, state = 0, create_state(params, optimizer, setup.mesh)
    else:
        first, state, _ = found
    if first >= c.sft.steps:
        return state.params
    rows = [r.segments for r in rollouts]
    with MetricsLog(folder, first_step=first) as metrics:
        steps = range(first, c.sft.steps)
        for step in console.progress(steps, "sft: steps", total=len(steps)):
            start = time.monotonic()
            chosen = take(len(rows), c.sft.batch_size, seed=c.seed, step=step)
            batch = pack_segments([rows[i] for i in chosen], c.sft.sequence_tokens)
            (batch,) = split(batch, 1, c.sft.micro_batch)
            state, measured = learner.update(state, learner.put(batch))
            measured = jax.device_get(measured)
            measured["seconds"] = time.monotonic() - start
            metrics.write(step, measured | {"compiles": num_compiles()})
            done = step + 1
            if done % c.checkpoint.sft_steps == 0 or done == c.sft.steps:
                keep = c.checkpoint.keep
                checkpoint.save(folder / CHECKPOINTS, done, state, {}, keep=keep)
    return state.params
