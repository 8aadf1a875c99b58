"""Where a stage stands: its newest checkpoint, or its beginning, and what follows."""

import contextlib
import time

from rsearch import setup as build
from rsearch.config.recipes import StoppedError
from rsearch.evaluation.evaluator import CHECKPOINTS
from rsearch.hosts import preemption, processes
from rsearch.runtime import checkpoint, console
from rsearch.runtime.jsonl import read_jsonl, write_jsonl
from rsearch.runtime.metrics import MetricsLog, from_json, read_metrics, to_json
from rsearch.stages.guards import Collapse, Guards

# In a checkpoint's meta: the row of its last step, where it is not yet measured, and
# what the guards have counted.
OWED, GUARDS = "owed", "guards"
ROLLED_BACK = "rolled_back.jsonl"  # of a stage: rows of metrics of steps undone
WAITS = 1.0, 60.0  # seconds until a disk that refuses is asked again, at first and last


class Progress:
    """A stage's state, step by step, and what of it is saved.

    Args:
        setup: of the stage.
        kind: "sft" or "rl".
        params: of the policy before the stage; a fresh state copies them.
        folder: of the stage.
        stage: its name, where it is not its kind.

    Attributes:
        guards: see `rsearch.stages.guards`.
        learner: of the policy.
        state: the TrainState after `done` steps.
        done: steps; at first those that the newest good checkpoint has.
        owed: what was measured in the last of them, where the stage was told to stop
            before all of it was; else None.
        roll_backs: how often the stage has gone back to an earlier step.
    """

    def __init__(self, setup: build.Setup, kind: str, params, folder, *, stage=""):
        self._setup, self._kind, self._folder = setup, kind, folder / CHECKPOINTS
        self.learner, _ = build.make_learner(setup, kind)
        like = build.state_shapes(setup, kind)
        found = checkpoint.newest_good(self._folder, like)
        self._params, self._like, self._journal = params, like, folder / ROLLED_BACK
        self.owed, self.guards = None, Guards(setup.config, stage or kind, folder)
        lost = read_jsonl(self._journal) if self._journal.exists() else []
        self.roll_backs = max((row["roll_back"] for row in lost), default=0)
        if found is None:
            self.done, self.state = 0, build.fresh_state(setup, kind, params)
        else:
            self.done, self.state, meta = found
            if OWED in meta:
                self.owed = from_json(meta[OWED])
            if GUARDS in meta:  # earlier versions had none
                self.guards.restore(meta[GUARDS])
        self._saved = self.done

    @property
    def num_steps(self) -> int:
        """Steps of the whole stage."""
        return self._setup.config[self._kind].steps

    @property
    def _every(self) -> int:
        """Steps between two saves."""
        return self._setup.config.checkpoint[f"{self._kind}_steps"]

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be done."""
        return self.done >= self.num_steps and self.owed is None

    @property
    def is_saved(self) -> bool:
        """Whether its newest checkpoint has all steps."""
        return self._saved == self.done

    @property
    def num_rows(self) -> int:
        """Rows of metrics that there are of these steps."""
        return self.done - (self.owed is not None)

    @contextlib.contextmanager
    def kept(self):
        """Within it steps are taken; what they have come to is saved if they must end.

        Raises:
            PreemptedError: the run was told to stop, and all of it is saved.
        """
        with preemption.defer_exit():
            try:
                yield
            except preemption.OutageError:
                if (
                    processes.num_hosts() == 1
                ):  # others do not know of it, and save nothing
                    self._save()
                raise
            except preemption.PreemptedError:
                try:
                    self._save()
                except OSError as error:
                    told = f"not saved: {error}"
                    raise preemption.PreemptedError(told) from error
                console.note(f"saved after {self.done} steps, in {self._folder}")
                raise

    def heed(self, collapse: Collapse, metrics: MetricsLog) -> None:
        """Stops where a policy has collapsed, or goes back to before that.

        The steps that are undone leave their rows in rolled_back.jsonl, and their
        checkpoints set aside.

        Args:
            collapse: what has.
            metrics: of the stage; its rows of these steps are dropped.

        Raises:
            StoppedError: config.guards has it stop, or no roll-back is left, or nothing
                from before the collapse is kept.
        """
        g, first = self._setup.config.guards, collapse.first_step
        if g.on_collapse == "stop":
            raise StoppedError(collapse.told)
        if self.roll_backs >= g.max_roll_backs:
            raise StoppedError(f"{collapse.told}; rolled back {self.roll_backs} times")
        seen = checkpoint.steps_by_host(self._folder)
        before = _newest(set.intersection(*seen), first)
        if not before and first >= self._every:
            raise StoppedError(
                f"{collapse.told}; no checkpoint from before step {first + 1} is left"
            )
        self.guards.forget()
        self.state = None  # there may be no room for two
        if before:
            state = checkpoint.restore(self._folder, before, self._like)
            meta = checkpoint.read_manifest(self._folder, before)["meta"]
            if GUARDS in meta:
                self.guards.restore(meta[GUARDS])
        else:
            state = build.fresh_state(self._setup, self._kind, self._params)
        self.roll_backs += 1
        undone = [row for row in read_metrics(metrics.path) if row["step"] >= before]
        rows = [to_json(row) | {"roll_back": self.roll_backs} for row in undone]
        processes.barrier("rows read")  # before the first host drops them
        old = read_jsonl(self._journal) if self._journal.exists() else []
        write_jsonl(self._journal, old + rows)
        for step in sorted(set.union(*seen)):
            if step > before:
                checkpoint.set_aside(self._folder, step, why="collapsed")
        metrics.rewind(before)
        self.state, self.done, self._saved, self.owed = state, before, before, None
        console.note(f"{collapse.told}; rolled back to step {before}")

    def begin_step(self) -> None:
        """Ends the stage here if the hosts have been told to stop."""
        processes.check_preempted(on_all_hosts=True)

    def advance(self, state, owed=None) -> None:
        """Another step is taken: the state after it, and what was measured so far."""
        self.state, self.owed = state, owed
        self.done += 1

    def outlast(self, write) -> None:
        """Writes to a disk; to one that refuses, again until it has been mended.

        A disk that is full holds no run up for good: someone makes room, and no step is
        lost. Several hosts do not wait: each would have to know of the other's disk.

        Args:
            write: () -> None, which may be called again where it has failed.

        Raises:
            OSError: it has refused for config.checkpoint.retry_seconds.
            PreemptedError: it refuses, and the run was told to stop.
        """
        wait, longest = WAITS
        end = time.monotonic() + self._setup.config.checkpoint.retry_seconds
        while True:
            try:
                return write()
            except OSError as error:
                told, left = str(error), end - time.monotonic()
                if left <= 0 or processes.num_hosts() > 1:
                    raise
            console.note(
                f"{told}; asking again for {left:.0f} s, {self.done} steps kept"
            )
            again = time.monotonic() + min(wait, left)
            while time.monotonic() < again:
                if preemption.is_stop_requested():
                    raise preemption.PreemptedError(f"not written: {told}")
                time.sleep(0.1)
            wait = min(2 * wait, longest)

    def save_if_due(self) -> None:
        """Saves where the configuration says so, and at the end."""
        self.owed = None
        if self.done % self._every == 0 or self.done == self.num_steps:
            self.outlast(self._save)

    def _save(self):
        if self.is_saved:
            return
        meta = {GUARDS: self.guards.state()}
        if self.owed is not None:
            meta[OWED] = to_json(self.owed)
        common = set.intersection(*checkpoint.steps_by_host(self._folder))
        # A disk may have refused the very last of what a save does.
        if self.done not in common:
            own = dict(
                keep=self._setup.config.checkpoint.keep, spare=self._spare(common)
            )
            checkpoint.save(self._folder, self.done, self.state, meta, **own)
        self._saved = self.done

    def _spare(self, found):
        """The checkpoint that is gone back to if what is counted becomes a collapse."""
        if self._setup.config.guards.on_collapse != "roll_back":
            return None
        first = self.guards.first_beyond
        if first is None and self.owed is not None:  # not looked at yet
            first = self.done - 1
        return None if first is None else _newest(found, first)


def _newest(found, step):
    """The newest of the checkpoints up to a step; 0 where there is none."""
    return max((one for one in found if one <= step), default=0)
