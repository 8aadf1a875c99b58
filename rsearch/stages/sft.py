"""The supervised stage: imitate the policy's part of demonstrations."""

import dataclasses
import pathlib
import time
from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from rsearch.data.order import hold_out, step_items
from rsearch.learn.batch import pack_segments
from rsearch.learn.trainer import Trainer
from rsearch.runtime import console
from rsearch.runtime.compiles import num_compiles
from rsearch.runtime.metrics import MetricsLog
from rsearch.stages.state import StageState
from rsearch.types import Params, Rollout


@dataclasses.dataclass(frozen=True)
class SFTStage:
    """The objects and settings of a supervised stage.

    Attributes:
        config: configuration of the stage.
        folder: folder of the stage, for checkpoints, metrics.jsonl and curves.
        trainer: the compiled functions that train.
        demonstrations: rollouts to imitate.
        name: name of the stage.
        run_id: id of the run, which its checkpoints record.
    """

    config: ConfigDict
    folder: pathlib.Path
    trainer: Trainer
    demonstrations: Sequence[Rollout]
    name: str = "sft"
    run_id: str = ""


def run(stage: SFTStage, params: Params):
    """Train on demonstrations, continuing where an earlier start stopped.

    Args:
        stage: objects and settings of the stage.
        params: the policy's parameters before this stage. If the stage trains adapters,
            the result takes over their buffers, so that they must not be used again.

    Returns:
        The policy's parameters after the stage.
    """
    # Restore the newest checkpoint, or start from a copy of the policy.
    c, trainer = stage.config, stage.trainer
    state = StageState(
        c, "sft", trainer, params, stage.folder, name=stage.name, run_id=stage.run_id
    )
    base = trainer.base_of(params)
    if state.is_over:
        return trainer.final_weights(state.train_state.params, base)
    rows, held_out_rows = split_rows(stage)
    log = state.retry_io(lambda: MetricsLog(stage.folder, first_step=state.num_rows))

    with state.save_on_preemption(), log:
        if state.pending_metrics is not None:  # stopped before this row was written
            finish_step(state, log)
        steps = range(state.num_done, c.sft.steps)
        for step in console.progress(steps, f"{stage.name}: steps", total=len(steps)):
            state.stop_if_preempted()
            start = time.monotonic()
            # Which demonstrations a step sees depends only on seed and step.
            indices = step_items(len(rows), c.sft.batch_size, seed=c.seed, step=step)
            # Only the policy's segments are in the loss; the others are only read.
            batch = pack_segments([rows[i] for i in indices], c.sft.sequence_tokens)
            batch = trainer.put(batch, c.sft.micro_batch)
            train_state, metrics = trainer.update(state.train_state, base, batch)
            # Wait for the device: guards must see a bad gradient before the next step.
            metrics = jax.device_get(metrics)
            state.guards.on_update(step, metrics, batch, train_state.params)
            if held_out_rows and is_validation_due(c, step):
                params = train_state.params
                loss = validation_loss(stage, params, base, held_out_rows)
                metrics["validation_loss"] = loss
                if c.sft.keep == "lowest_loss":
                    state.record_loss(loss)
                    # Before the last step is saved, so that the stage's newest
                    # checkpoint holds the weights that the stage ends with.
                    if step + 1 == c.sft.steps:
                        train_state = state.with_lowest_loss(train_state)
            metrics["seconds"] = time.monotonic() - start
            metrics["compiles"] = num_compiles()
            state.advance(train_state, pending_metrics=metrics)
            finish_step(state, log)
    return trainer.final_weights(state.train_state.params, base)


def split_rows(stage: SFTStage) -> tuple[list, list]:
    """Return the rows of segments to learn from, and those that are held out.

    Demonstrations with the same opening, such as all those cut from one rollout, are
    kept together. Those that ask a question in another prompt, such as the baselines',
    may be on the other side.

    Raises:
        ValueError: the held-out share leaves none to learn from.
    """
    c, rows = stage.config, [rollout.segments for rollout in stage.demonstrations]
    openings = [segments[0].text for segments in rows]
    try:
        train_indices, held_out_indices = hold_out(
            openings, c.sft.validation_share, seed=c.seed
        )
    except ValueError as error:
        raise ValueError(
            f"config.sft.validation_share = {c.sft.validation_share}: {error}"
        ) from None
    return [rows[i] for i in train_indices], [rows[i] for i in held_out_indices]


def is_validation_due(c: ConfigDict, step: int) -> bool:
    """Return whether the validation loss is measured after a step, counted from 0."""
    return (step + 1) % c.sft.validate_every == 0 or step + 1 == c.sft.steps


def validation_loss(
    stage: SFTStage, params: Params, base: Params | None, rows: Sequence
) -> float:
    """Return the loss of the held-out rows, averaged as config.sft.loss_mean says."""
    c, trainer = stage.config, stage.trainer
    total, size = 0.0, 0
    for start in range(0, len(rows), c.sft.batch_size):
        batch_rows = rows[start : start + c.sft.batch_size]
        # Empty rows fill the last batch, so that no other shape is compiled.
        batch_rows = [*batch_rows, *[()] * (c.sft.batch_size - len(batch_rows))]
        batch = trainer.put(
            pack_segments(batch_rows, c.sft.sequence_tokens), c.sft.micro_batch
        )
        mean, count = trainer.imitation_loss(params, base, batch, kind=c.sft.loss_mean)
        total, size = total + mean * count, size + count
    return total / size


def finish_step(state: StageState, log: MetricsLog) -> None:
    """Log the last step's metrics, and save if a checkpoint is due."""
    state.retry_io(lambda: log.write(state.num_done - 1, state.pending_metrics))
    state.save_if_due()
