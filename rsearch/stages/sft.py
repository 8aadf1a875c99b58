"""Supervised stage: imitate the policy's part of demonstrations."""

import time

import jax

from rsearch import build, checkpoint, console
from rsearch.compiles import num_compiles
from rsearch.data.demonstrations import PROTOCOL
from rsearch.data.order import take
from rsearch.evaluate import CHECKPOINTS
from rsearch.learn.batch import pack_segments, split
from rsearch.learn.update import create_state, state_like
from rsearch.metrics import MetricsLog
from rsearch.models.weights import param_shapes
from rsearch.rollout.driver import replay
from rsearch.types import Outcome, Rollout


def run(setup: build.Setup, params, folder):
    """Trains on demonstrations, from where an earlier start of this stage stopped.

    Args:
        setup: of the run.
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
    rows = [r.segments for r in _replayed(setup)]
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


def _replayed(setup: build.Setup) -> list[Rollout]:
    """The demonstrations as rollouts of the current engine, each within its budget.

    Raises:
        ValueError: one does not follow its protocol, searches too often, or is too
            long.
    """
    limit = setup.config.sft.sequence_tokens
    demonstrations = build.demonstrations(setup)
    hosts, chats = {PROTOCOL: build.make_host(setup)}, {}
    for method in {d.method for d in demonstrations} - {PROTOCOL}:
        asked = [d.question for d in demonstrations if d.method == method]
        hosts[method] = build.make_baseline(setup, method)
        protocol = hosts[method].protocol
        chats[method] = build.baseline_chats(setup, method, protocol, asked)
    rollouts = []
    for demonstration in console.progress(demonstrations, "sft: demonstrations"):
        question, method = demonstration.question, demonstration.method
        chat = chats[method][question.id] if method in chats else None
        rollout = replay(hosts[method], question, demonstration.turns, messages=chat)
        if rollout.outcome == Outcome.TRUNCATED:
            raise ValueError(
                f"the demonstration of question {question.id} searches in its last "
                "turn; config.rollout.max_searches is "
                f"{setup.config.rollout.max_searches}"
            )
        if rollout.num_tokens > limit:
            raise ValueError(
                f"the demonstration of question {question.id} has {rollout.num_tokens} "
                f"tokens, config.sft.sequence_tokens is {limit}"
            )
        rollouts.append(rollout)
    return rollouts
