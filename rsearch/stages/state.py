"""The state of a stage: its progress, its checkpoints and its roll-backs."""

import contextlib
import json
import math
import os
import pathlib
import reprlib
from collections.abc import Callable
from typing import Any

import jax
from ml_collections import ConfigDict

from rsearch.config.recipes import StoppedError, to_json
from rsearch.hosts import preemption, processes
from rsearch.learn.train_state import TrainState
from rsearch.learn.trainer import Trainer
from rsearch.runtime import checkpoint, console, files, run_directory
from rsearch.runtime.jsonl import read_jsonl, write_jsonl
from rsearch.runtime.metrics import (
    METRICS,
    MetricsLog,
    metrics_from_json,
    metrics_to_json,
    read_metrics,
)
from rsearch.stages.guards import Collapse, Guards
from rsearch.types import Params

# Keys of a checkpoint's meta: metrics of its last step that are not all measured yet,
# and the guards' counts.
PENDING = "owed"
GUARDS = "guards"
ROLLED_BACK = "rolled_back.jsonl"  # in the stage's folder: metrics of undone steps


class StageState:
    """The training state of a stage, step by step, and its checkpoints.

    Attributes:
        guards: see `rsearch.stages.guards`.
        train_state: the TrainState after `num_done` steps.
        num_done: number of steps taken; initially that of the newest good checkpoint.
        pending_metrics: metrics of the last step until it is evaluated and logged;
            then None.
        roll_backs: how often the stage has gone back to an earlier step.
        store_with_checkpoint: called with `num_done` before a save, to store what the
            next step needs in addition to the state. If it returns False, nothing is
            saved. May be None.
        lowest: (steps taken, validation loss) of the lowest validation loss; None if
            none is recorded.
    """

    def __init__(
        self,
        config: ConfigDict,
        kind: str,
        trainer: Trainer,
        params: Params,
        folder: pathlib.Path,
        *,
        name: str = "",
        run_id: str = "",
    ):
        """Restore the newest good checkpoint, or start afresh.

        Args:
            config: configuration of the stage.
            kind: "sft" or "rl".
            trainer: creates fresh states, and provides their shapes.
            params: the policy's parameters before the stage; a fresh state copies them.
            folder: folder of the stage.
            name: name of the stage, if it differs from its kind.
            run_id: id of the run, as in run.json; "" is not compared.
        """
        self._config, self._kind = config, kind
        self._trainer, self._params = trainer, params
        self._folder = folder / checkpoint.FOLDER
        self._rolled_back = folder / ROLLED_BACK
        self.guards = Guards(config, name or kind, folder)
        self.pending_metrics, self.lowest, self.store_with_checkpoint = None, None, None
        # The count of roll-backs enters the random keys: it must survive a restart.
        undone_rows = read_undone(self._rolled_back)
        self.roll_backs = max((row["roll_back"] for row in undone_rows), default=0)
        # A damaged checkpoint is skipped in favour of the one before it.
        self._made_by = {"run": run_id, "stage": name or kind}
        newest = checkpoint.newest_good(
            self._folder, trainer.state_shapes, made_by=self._made_by
        )
        if newest is None:
            self.num_done = 0
            self.train_state = trainer.fresh_state(params)
        else:
            self.num_done, self.train_state, meta = newest
            if PENDING in meta:
                self.pending_metrics = metrics_from_json(meta[PENDING])
            if GUARDS in meta:  # earlier versions had none
                self.guards.restore(meta[GUARDS])
            if checkpoint.LOWEST in meta:
                self.lowest = tuple(meta[checkpoint.LOWEST])
        self._saved = self.num_done

    @property
    def num_steps(self) -> int:
        """Return the number of steps of the whole stage."""
        return self._config[self._kind].steps

    @property
    def _every(self) -> int:
        """Return the number of steps between two saves."""
        return self._config.checkpoint[f"{self._kind}_steps"]

    def is_due(self, num_done: int) -> bool:
        """Return whether a checkpoint is due after this many steps."""
        is_lowest = self.lowest is not None and self.lowest[0] == num_done
        return num_done % self._every == 0 or num_done == self.num_steps or is_lowest

    @property
    def is_over(self) -> bool:
        """Return whether no step and no metric is left to do."""
        return self.num_done >= self.num_steps and self.pending_metrics is None

    @property
    def is_saved(self) -> bool:
        """Return whether the newest checkpoint includes all steps taken."""
        return self._saved == self.num_done

    @property
    def num_rows(self) -> int:
        """Return the number of steps whose row of metrics has been written."""
        return self.num_done - (self.pending_metrics is not None)

    @contextlib.contextmanager
    def save_on_preemption(self):
        """Save the newest state if the run stops or fails within this block.

        Raises:
            PreemptedError: the run was told to stop; the message says if saving failed.
            LostDirectoryError: the run's directory is no longer at its path.
        """
        # A signal is noted, and the step continues until the state is consistent.
        with preemption.defer_exit():
            try:
                yield
            except (preemption.OutageError, run_directory.LostDirectoryError):
                # With several hosts, the others do not know of it and save nothing.
                if processes.num_hosts() == 1:
                    self._save()
                raise
            except preemption.PreemptedError:
                try:
                    self._save()
                except OSError as error:
                    raise preemption.PreemptedError(f"not saved: {error}") from error
                if self.is_saved:
                    console.note(
                        f"saved after {self.num_done} steps, in {self._folder}"
                    )
                raise
            except StoppedError:
                raise  # the state has gone wrong and is not worth keeping
            except BaseException:
                self._save_before_failing()
                raise

    def _save_before_failing(self):
        """Save steps that no checkpoint has yet, if possible; report if it is not."""
        # Other hosts do not know of the failure, and would save nothing.
        if self.is_saved or processes.num_hosts() > 1:
            return
        arrays = jax.tree.leaves(self.train_state)
        if not arrays or any(array.is_deleted() for array in arrays):
            return  # in the middle of an update, which has reused the state's buffers
        try:
            self._save()
        except Exception as error:
            console.note(f"not saved after {self.num_done} steps: {error}")
        else:
            if self.is_saved:
                console.note(f"saved after {self.num_done} steps, in {self._folder}")

    def handle_collapse(self, collapse: Collapse, metrics: MetricsLog) -> None:
        """Stop after a policy has collapsed, or go back to before the collapse.

        The metrics of undone steps are moved to rolled_back.jsonl, and their
        checkpoints are set aside.

        Args:
            collapse: details of the collapse.
            metrics: metrics log of the stage; its rows of undone steps are dropped.

        Raises:
            StoppedError: config.guards says to stop, no roll-back is left, nothing from
                before the collapse is kept, or the run's directory is lost.
        """
        try:  # the files below may belong to another run by now
            run_directory.stop_if_lost(self._folder)
        except run_directory.LostDirectoryError as error:
            raise StoppedError(f"{collapse.message}; {error}") from error
        g, first_step = self._config.guards, collapse.first_step
        if g.on_collapse == "stop":
            raise StoppedError(collapse.message)
        if self.roll_backs >= g.max_roll_backs:
            raise StoppedError(
                f"{collapse.message}; rolled back {self.roll_backs} times"
            )
        # Hosts may see a shared file system differently: only what all see counts.
        host_steps = checkpoint.steps_by_host(self._folder)
        target = self._step_to_go_back_to(set.intersection(*host_steps), first_step)
        if not target and first_step >= self._every:
            raise StoppedError(
                f"{collapse.message}; no checkpoint from before step "
                f"{first_step + 1} is left"
            )
        self.guards.reset()
        self.train_state = None  # there may be no memory for two
        if target:
            state = checkpoint.restore(self._folder, target, self._trainer.state_shapes)
            meta = checkpoint.read_manifest(self._folder, target)["meta"]
            if GUARDS in meta:
                self.guards.restore(meta[GUARDS])
        else:
            state = self._trainer.fresh_state(self._params)
        # Set aside, not deleted: they are needed to investigate the collapse.
        for step in sorted(set.union(*host_steps)):
            if step > target:
                checkpoint.set_aside(self._folder, step, reason="collapsed")
        self.train_state, self.pending_metrics = state, None
        self.num_done = self._saved = target
        # Rows of the undone steps move to a file of their own, since these steps will
        # be measured again. They also count the roll-backs, and are therefore written
        # last: a run that is killed before this repeats the steps and goes back again.
        undone = [row for row in read_metrics(metrics.path) if row["step"] >= target]
        number = self.roll_backs + 1
        rows = read_undone(self._rolled_back)
        rows += [metrics_to_json(row) | {"roll_back": number} for row in undone]
        processes.barrier("rows read")  # before the first host drops them

        def write():
            write_jsonl(self._rolled_back, rows)
            metrics.rewind(target)

        self.retry_io(write)
        self.roll_backs = number
        console.note(f"{collapse.message}; rolled back to step {target}")

    def stop_if_preempted(self) -> None:
        """End the stage here if the hosts have been told to stop."""
        processes.check_preempted(on_all_hosts=True)

    def advance(
        self, train_state: TrainState, pending_metrics: dict | None = None
    ) -> None:
        """Count another step, given the state after it and its metrics so far."""
        self.train_state, self.pending_metrics = train_state, pending_metrics
        self.num_done += 1

    def record_loss(self, loss: float) -> None:
        """Record the validation loss of step `num_done` + 1, before it is counted.

        If it is the lowest so far, a checkpoint is due, and is kept until a lower loss.
        """
        if loss < (math.inf if self.lowest is None else self.lowest[1]):
            self.lowest = self.num_done + 1, loss

    def with_lowest_loss(self, train_state: TrainState) -> TrainState:
        """Return the state with the parameters of the lowest recorded loss.

        Args:
            train_state: state after `num_done` + 1 steps; its buffers may be reused.
        """
        # If no loss is recorded, none was finite.
        step, loss = self.lowest or (self.num_done + 1, math.nan)
        if step == self.num_done + 1:
            return train_state
        console.note(
            f"{self._made_by['stage']}: weights of step {step}, validation loss "
            f"{loss:.4g}"
        )
        jax.tree.map(lambda x: x.delete(), train_state.params)
        shapes = self._trainer.state_shapes
        params = checkpoint.restore(
            self._folder, step, {"params": shapes.params}, is_part=True
        )
        return train_state._replace(**params)

    def retry_io(self, write: Callable[[], Any]) -> Any:
        """Write to disk; see `console.retry_io`."""
        return console.retry_io(
            write,
            seconds=self._config.checkpoint.retry_seconds,
            held=f"{self.num_done} steps are",
        )

    def save_if_due(self) -> None:
        """Save if the configuration says so, and at the end.

        Raises:
            LostDirectoryError: the run's directory is no longer at its path. The state
                is saved where the directory is now, or in a new one.
        """
        self.pending_metrics = None
        self.retry_io(lambda: self._save(only_if_lost=not self.is_due(self.num_done)))

    def _save(self, *, only_if_lost=False):
        if only_if_lost and processes.num_hosts() > 1:
            return  # communicating with the others in every step takes time
        # All hosts write where the first one does.
        folder_bytes = os.fsencode(run_directory.locate(self._folder))
        folder = pathlib.Path(os.fsdecode(processes.allgather_bytes(folder_bytes)[0]))
        is_lost = folder != self._folder
        if (only_if_lost or self.is_saved) and not is_lost:
            return
        if self.store_with_checkpoint is not None and not self.store_with_checkpoint(
            self.num_done
        ):
            console.note(
                f"not saved after {self.num_done} steps: the next step's rollouts have "
                f"not finished; the same command resumes after step {self._saved}"
            )
            return
        meta = {GUARDS: self.guards.state()}
        if self.pending_metrics is not None:
            meta[PENDING] = metrics_to_json(self.pending_metrics)
        if self.lowest is not None:
            meta[checkpoint.LOWEST] = list(self.lowest)
        # A host that does not see a checkpoint yet would otherwise wait for a save that
        # the others skip.
        common_steps = set.intersection(*checkpoint.steps_by_host(folder))
        # Sync the metrics first: a resumed run does not measure these steps again.
        rows = folder.with_name(METRICS)
        if processes.is_host0() and rows.exists():
            files.sync(rows)
            files.sync_directory(rows.parent)
        # An earlier save may have failed only in its very last operation.
        if self.num_done not in common_steps:
            checkpoint.save(
                folder,
                self.num_done,
                self.train_state,
                meta,
                keep=self._config.checkpoint.keep,
                spare=self._checkpoint_to_keep(common_steps),
                made_by=self._made_by | {"config": json.loads(to_json(self._config))},
            )
        self._saved = self.num_done
        if is_lost:
            run_directory.stop_if_lost(self._folder)
            raise run_directory.LostDirectoryError(
                f"{self._folder} is lost; saved in {folder}"
            )

    def _checkpoint_to_keep(self, steps):
        """Return the checkpoint to end with or to go back to, which must be kept."""
        if self.lowest is not None:
            return self.lowest[0]
        if self._config.guards.on_collapse != "roll_back":
            return None
        first_step = self.guards.first_beyond
        if first_step is None:
            if self.pending_metrics is not None:  # not checked yet
                first_step = self.num_done - 1
            elif self.num_done % self._every == 0:
                return None  # the next collapse goes back to this checkpoint
            else:
                first_step = self.num_done
        return self._step_to_go_back_to(steps, first_step)

    def _step_to_go_back_to(self, steps, first_step):
        """Return the checkpoint from before a collapse; 0 if there is none.

        Stops and failures save more steps than an undisturbed run has. Such a
        checkpoint would give another result, and is used only if the right one is lost.
        """
        regular_steps = {step for step in steps if step % self._every == 0}
        target = _newest_step(regular_steps, first_step)
        if not target and first_step >= self._every:
            target = _newest_step(steps, first_step)
        return target


def read_undone(path: pathlib.Path) -> list[dict]:
    """Return the rows of a rolled_back.jsonl, each with its roll-back's number.

    Raises:
        ValueError: a line, which the message names with its file, was not written by a
            roll-back. It is not skipped, since random keys depend on the number of
            roll-backs.
        OSError: the file cannot be read.
    """

    def parse(row):
        is_row = isinstance(row, dict) and type(row.get("roll_back")) is int
        if not is_row or row["roll_back"] < 1:
            raise ValueError(f"{reprlib.repr(row)}: expected a row with its roll_back")
        return row

    return read_jsonl(path, parse=parse) if path.exists() else []


def _newest_step(steps, last):
    """Return the newest of the checkpoints up to a step; 0 if there is none."""
    return max((step for step in steps if step <= last), default=0)
