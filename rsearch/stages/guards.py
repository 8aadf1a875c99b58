"""Watch a stage's metrics, and stop it when they go wrong.

An update whose gradient is not finite changes nothing (see
`rsearch.learn.train_state.apply_gradients`). Here it is counted, and its batch is kept
for inspection; after several in a row the stage stops. A policy can also collapse
while all numbers are finite, which bounds on metrics detect.
"""

import contextlib
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

FOLDER = "skipped"  # in the stage's folder: batches of skipped updates
GRADIENTS = {"grad_norm": "policy", "critic_grad_norm": "critic"}  # norm -> model
FINITE_METRICS = (*GRADIENTS, "reward")
BOUNDS = {  # field of config.guards: (metric, whether higher values are worse)
    "min_entropy": ("entropy", False),
    "max_empty": ("empty_answers", True),
    "max_repeated": ("repeated_text", True),
    "max_kl": ("kl", True),
    "max_clipped": ("clip_fraction", True),
    "max_copied_queries": ("copied_queries", True),
    "max_repeated_queries": ("repeated_queries", True),
    "max_forged": ("forged_observations", True),
    "max_unsupported": ("unsupported_answers", True),
    "max_cut_observations": ("cut_observations", True),
    "min_supporting_recall": ("supporting_recall", False),
    "min_groups_with_spread": ("groups_with_spread", False),
}


class Collapse(NamedTuple):
    """A policy whose metrics were beyond a bound for config.guards.patience steps.

    Attributes:
        message: which metrics are beyond which bounds, and for how long.
        first_step: the first of these consecutive steps, from 0.
    """

    message: str
    first_step: int


class Guards:
    """The guards that watch the updates and steps of one stage.

    Args:
        config: configuration of the run; its section `guards` is used.
        stage: name of the stage.
        folder: folder of the stage.
    """

    def __init__(self, config: ConfigDict, stage: str, folder: pathlib.Path):
        self._g, self._stage, self._folder = config.guards, stage, folder / FOLDER
        self._skipped = 0  # consecutive updates
        self._steps_beyond = 0  # consecutive steps
        self._num_files = 0  # batches written
        self._since = 0  # the first of the consecutive steps
        self._bounds: list[str] = []  # the bounds that these steps were beyond

    def state(self) -> dict:
        """Return what a resumed run needs, as JSON values."""
        return {
            "skipped": self._skipped,
            "beyond": self._steps_beyond,
            "kept": self._num_files,
            "since": self._since,
            "bounds": self._bounds,
        }

    def restore(self, state: dict) -> None:
        """Restore what `state` returned."""
        self._skipped, self._num_files = state["skipped"], state["kept"]
        # Earlier versions did not store since when, or beyond which bounds: start over.
        self._steps_beyond = state["beyond"] if "bounds" in state else 0
        self._since, self._bounds = state.get("since", 0), state.get("bounds", [])

    @property
    def first_beyond(self) -> int | None:
        """Return the first of the consecutive steps beyond a bound; None if none is."""
        return self._since if self._steps_beyond else None

    def on_update(
        self, step: int, measured: Mapping[str, float], batch: Batch, params: Params
    ) -> bool:
        """Count an update, and return whether it was skipped, at least in part.

        The policy and the critic are updated separately: if only one gradient is not
        finite, the other model has been updated.

        Args:
            step: step that the update belongs to.
            measured: metrics of the update, on the host.
            batch: batch of the update.
            params: parameters after the update, also those of the critic if it has one.

        Raises:
            StoppedError: too many updates in a row were skipped.
        """
        numbers = {n: float(measured[n]) for n in FINITE_METRICS if n in measured}
        bad_numbers = {name: x for name, x in numbers.items() if not math.isfinite(x)}
        if not bad_numbers:
            self._skipped = 0
            return False
        self._skipped += 1
        problem = ", ".join(f"{name} = {x}" for name, x in bad_numbers.items())
        location = self._write_batch(step, batch)
        is_partial = len(bad_numbers) < len(numbers)
        owner = f" of the {GRADIENTS[min(bad_numbers)]}" if is_partial else ""
        # Bad parameters were broken by an earlier step; otherwise blame the batch.
        culprit = _first_non_finite(params)
        message = f"{problem}; {culprit}; this update{owner} is skipped{location}"
        console.note(f"{self._stage}: step {step + 1}: {message}")
        if self._skipped >= self._g.max_skipped:
            raise StoppedError(
                f"{self._stage}: {self._skipped} updates in a row were skipped, the "
                f"last in step {step + 1}, because of {problem}; {culprit}"
            )
        return True

    def on_step(self, step: int, measured: Mapping[str, float]) -> Collapse | None:
        """Count a step that is beyond a bound; return a Collapse after too many.

        Args:
            step: the step that was taken.
            measured: metrics of the step.

        Returns:
            The Collapse, if any; None if config.guards.on_collapse is "warn".
        """
        violations = {
            field: f"{metric} = {measured[metric]:.4g}, config.guards.{field} = {bound}"
            for field, (metric, more_is_worse) in BOUNDS.items()
            if (bound := self._g[field]) is not None
            and metric in measured
            and _is_beyond(measured[metric], bound, more_is_worse)
        }
        if not violations:
            # A step from which nothing is learnt lacks metrics and does not end the
            # series: the rollouts of a collapsed policy may be all alike.
            if all(BOUNDS[field][0] in measured for field in self._bounds):
                self._steps_beyond, self._bounds = 0, []
            return None
        # A roll-back must go back to before the first of these steps, not the last.
        self._since = self._since if self._steps_beyond else step
        self._bounds = sorted({*self._bounds, *violations})
        self._steps_beyond += 1
        if self._steps_beyond < self._g.patience:
            return None
        message = f"{self._stage}: step {step + 1}: {'; '.join(violations.values())}"
        if self._g.on_collapse == "warn":
            console.note(message)
            return None
        return Collapse(
            f"{message}, for {self._steps_beyond} steps in a row", self._since
        )

    def reset(self) -> None:
        """Forget the steps that a roll-back has undone."""
        self._skipped, self._steps_beyond, self._bounds = 0, 0, []

    def _write_batch(self, step, batch):
        """Write the batch, unless there are enough files; say where it is, or why not.

        All hosts count in the same way, and gather each array together.
        """
        if self._num_files >= self._g.dumps:
            return ""
        self._num_files += 1
        path = self._folder / f"{step}-{self._skipped}.npz"
        # A collective operation: every host takes part, even if it writes nothing.
        arrays = {name: collectives.gather_array(x) for name, x in named(batch).items()}
        if processes.is_host0():
            # The batch is only for people. An error here would end the stage in the
            # middle of an update, after which its state cannot be saved.
            try:
                self._folder.mkdir(exist_ok=True)
                np.savez(path, **arrays)
            except OSError as error:
                with contextlib.suppress(OSError):
                    path.unlink()  # a full disk has cut it short
                return f"; its batch is not stored: {error}"
        return f"; its batch is in {path}"


def _is_beyond(value, bound, more_is_worse):
    """Return whether a value is beyond its bound, or is NaN."""
    return not (value <= bound if more_is_worse else value >= bound)


def _first_non_finite(params) -> str:
    """Return a phrase that names the first parameter that is not finite, if any."""
    for name, x in named(params).items():
        if not bool(jax.numpy.isfinite(x).all()):
            return f"the first that is not finite is the parameter {name}"
    return "all parameters are finite"
