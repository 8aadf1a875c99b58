"""Watch a stage\'s numbers, and stop it when they have gone wrong.

An update whose gradient is not finite is left out by itself (see
`rsearch.learn.train_state.stepped`). Here it is counted, and its batch is kept for
whoever looks into it; after several in a row the stage stops, its weights as they were.
A policy that collapses does so with finite numbers: bounds on what is measured tell.
"""

import math
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from rsearch.config.recipes import StoppedError
from rsearch.hosts import collectives, processes
from rsearch.learn.batch import Batch
from rsearch.runtime import console
from rsearch.runtime.checkpoint import named
from rsearch.types import Params

FOLDER = "skipped"  # of a stage: batches of updates that were left out
FINITE = ("grad_norm", "critic_grad_norm", "reward")
BOUNDS = {  # field of config.guards: (what is measured, whether more of it is worse)
    "min_entropy": ("entropy", False),
    "max_empty": ("empty_answers", True),
    "max_repeated": ("repeated_text", True),
    "max_kl": ("kl", True),
    "max_clipped": ("clip_fraction", True),
    "max_copied_queries": ("copied_queries", True),
    "max_repeated_queries": ("repeated_queries", True),
    "max_forged": ("forged_observations", True),
    "max_unsupported": ("unsupported_answers", True),
    "min_supporting_recall": ("supporting_recall", False),
}


class Collapse(NamedTuple):
    """A policy was beyond a bound for config.guards.patience steps.

    Attributes:
        message: what is beyond which bound, and since when.
        first_step: the first of these steps in a row, from 0.
    """

    message: str
    first_step: int


class Guards:
    """Watches over one stage.

    Args:
        config: of the run; its section guards counts.
        stage: its name.
        folder: of the stage.
    """

    def __init__(self, config: ConfigDict, stage: str, folder: pathlib.Path):
        self._g, self._stage, self._folder = config.guards, stage, folder / FOLDER
        self._skipped, self._beyond = 0, 0  # updates, and steps, in a row
        self._num_files = 0  # batches
        self._since = 0  # the first of the steps in a row
        self._bounds: list[str] = []  # that these were beyond

    def state(self) -> dict:
        """Return what a resumed run has to know, in JSON values."""
        return {
            "skipped": self._skipped,
            "beyond": self._beyond,
            "kept": self._num_files,
            "since": self._since,
            "bounds": self._bounds,
        }

    def restore(self, state: dict) -> None:
        """Restore what `state` returned."""
        self._skipped, self._num_files = state["skipped"], state["kept"]
        # Earlier versions did not tell since when, or beyond what: counted anew.
        self._beyond = state["beyond"] if "bounds" in state else 0
        self._since, self._bounds = state.get("since", 0), state.get("bounds", [])

    @property
    def first_beyond(self) -> int | None:
        """The first of the steps in a row that are beyond a bound; None if none is."""
        return self._since if self._beyond else None

    def on_update(
        self, step: int, measured: Mapping[str, float], batch: Batch, params: Params
    ) -> bool:
        """Count an update; tell whether it was skipped.

        Args:
            step: that it belongs to.
            measured: by the update, on the host.
            batch: that it was of.
            params: after it, which are those before it if it was left out.

        Raises:
            StoppedError: too many in a row were left out.
        """
        # The update itself has left the weights alone (`stepped`); here it is counted.
        numbers = {n: float(measured[n]) for n in FINITE if n in measured}
        bad = {name: x for name, x in numbers.items() if not math.isfinite(x)}
        if not bad:
            self._skipped = 0
            return False
        self._skipped += 1
        problem = ", ".join(f"{name} = {x}" for name, x in bad.items())
        file = self._write_batch(step, batch)
        where = f"; its batch is in {file}" if file else ""
        # Bad parameters were broken by an earlier step; else the batch is to blame.
        culprit = _first_bad(params)
        skipped = f"{problem}; {culprit}; this update is left out{where}"
        console.note(f"{self._stage}: step {step + 1}: {skipped}")
        if self._skipped >= self._g.max_skipped:
            raise StoppedError(
                f"{self._stage}: {self._skipped} updates in a row are left out, the "
                f"last in step {step + 1}, for {problem}; {culprit}. No "
                f"weight has changed since step {step + 2 - self._skipped}; the newest "
                "checkpoint is from before these"
            )
        return True

    def on_step(self, step: int, measured: Mapping[str, float]) -> Collapse | None:
        """Count a step that is beyond a bound; return a Collapse after too many.

        Args:
            step: that was taken.
            measured: of it.

        Returns:
            What has collapsed, unless config.guards.on_collapse is to tell alone.
        """
        beyond = {
            field: f"{what} = {measured[what]:.4g}, config.guards.{field} = {bound}"
            for field, (what, more_is_worse) in BOUNDS.items()
            if (bound := self._g[field]) is not None
            and what in measured
            and _is_beyond(measured[what], bound, more_is_worse)
        }
        if not beyond:
            # A step from which nothing is learnt tells nothing of the policy: such as
            # one whose rollouts are all alike, of a policy that has collapsed.
            if all(BOUNDS[field][0] in measured for field in self._bounds):
                self._beyond, self._bounds = 0, []
            return None
        # A roll-back must go to before the first of these steps, not before the last.
        self._since = self._since if self._beyond else step
        self._bounds = sorted({*self._bounds, *beyond})
        self._beyond += 1
        if self._beyond < self._g.patience:
            return None
        message = f"{self._stage}: step {step + 1}: {'; '.join(beyond.values())}"
        if self._g.on_collapse == "warn":
            console.note(message)
            return None
        return Collapse(f"{message}, for {self._beyond} steps in a row", self._since)

    def reset(self) -> None:
        """Forget the steps that a roll-back has undone."""
        self._skipped, self._beyond, self._bounds = 0, 0, []

    def _write_batch(self, step, batch):
        """Write the batch, unless there are enough files; return the file or None.

        All hosts count the same, and gather each array together.
        """
        if self._num_files >= self._g.dumps:
            return None
        self._num_files += 1
        path = self._folder / f"{step}-{self._skipped}.npz"
        # A collective: every host takes part, also one that writes nothing.
        arrays = {name: collectives.gather_array(x) for name, x in named(batch).items()}
        if processes.is_host0():
            self._folder.mkdir(exist_ok=True)
            np.savez(path, **arrays)
        return path


def _is_beyond(value, bound, more_is_worse):
    """Return whether a value is beyond its bound, or is no number."""
    return not (value <= bound if more_is_worse else value >= bound)


def _first_bad(params) -> str:
    """Return the name of the first parameter with a value that is not finite."""
    for name, x in named(params).items():
        if not bool(jax.numpy.isfinite(x).all()):
            return f"the first that is not finite is the parameter {name}"
    return "all parameters are finite"
