"""Supervised stage: imitate the policy's part of demonstrations."""

import dataclasses
import pathlib
import time
from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from rsearch.data.order import take
from rsearch.learn.batch import pack_segments
from rsearch.learn.trainer import Trainer
from rsearch.runtime import console
from rsearch.runtime.compiles import num_compiles
from rsearch.runtime.metrics import MetricsLog
from rsearch.stages.state import StageState
from rsearch.types import Params, Rollout


@dataclasses.dataclass(frozen=True)
class SFTStage:
    """The objects of a supervised stage.

    Attributes:
        config: of the stage.
        folder: of the stage: checkpoints, metrics.jsonl, curves.
        trainer: compiled updates.
        demonstrations: rollouts to imitate.
        run_id: of the run, which its checkpoints name.
    """

    config: ConfigDict
    folder: pathlib.Path
    trainer: Trainer
    demonstrations: Sequence[Rollout]
    run_id: str = ""


def run(stage: SFTStage, params: Params):
    """Train on demonstrations, from where an earlier start of this stage stopped.

    Args:
        stage: its objects.
        params: of the policy before this stage; if it trains adapters, they become what
            it returns, and must not be touched again.

    Returns:
        The policy's parameters after the stage.
    """
    # The newest checkpoint, or a fresh state that copies the policy.
    c, trainer = stage.config, stage.trainer
    state = StageState(c, "sft", trainer, params, stage.folder, run_id=stage.run_id)
    base = trainer.base_of(params)
    if state.is_over:
        return trainer.final_weights(state.train_state.params, base)
    rows = [rollout.segments for rollout in stage.demonstrations]
    log = MetricsLog(stage.folder, first_step=state.num_rows)

    with state.save_on_preemption(), log:
        if state.pending_metrics is not None:  # stopped before this row was written
            finish_step(state, log)
        steps = range(state.done, c.sft.steps)
        for step in console.progress(steps, "sft: steps", total=len(steps)):
            state.stop_if_preempted()
            start = time.monotonic()
            # Which demonstrations a step sees is a function of seed and step alone.
            chosen = take(len(rows), c.sft.batch_size, seed=c.seed, step=step)
            # The policy's segments alone are in the loss; all others are only read.
            batch = pack_segments([rows[i] for i in chosen], c.sft.sequence_tokens)
            batch = trainer.put(batch, c.sft.micro_batch)
            train_state, metrics = trainer.update(state.train_state, base, batch)
            # Waits for the device: guards must see a bad gradient before the next step.
            metrics = jax.device_get(metrics)
            state.guards.on_update(step, metrics, batch, train_state.params)
            metrics["seconds"] = time.monotonic() - start
            metrics["compiles"] = num_compiles()
            state.advance(train_state, pending_metrics=metrics)
            finish_step(state, log)
    return trainer.final_weights(state.train_state.params, base)


def finish_step(state: StageState, log: MetricsLog) -> None:
    """Log the last step's metrics, and save where a checkpoint is due."""
    state.retry_io(lambda: log.write(state.done - 1, state.pending_metrics))
    state.save_if_due()
