"""Sample rollouts one step ahead, while the previous step is being learnt from.

With config.rl.max_staleness = 1, the sampling policy has not yet learnt from the
previous step. The rollouts keep that policy's log-probabilities, so that the loss's
ratio, or the weight bounded by `tis_cap`, compares the learning policy with the one
that sampled. This is the setting of AReaL (arXiv 2505.24298) with a staleness of at
most one.

A checkpoint needs the rollouts of the next step as well as the state, since the policy
that sampled them is not kept. They are stored first, exactly.
"""

import errno
import json
import pathlib
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from rsearch.rollout.records import Rewarded, decode_rewarded, encode_rewarded
from rsearch.runtime import checkpoint
from rsearch.runtime.journal import AppendLog
from rsearch.runtime.metrics import metrics_from_json, metrics_to_json
from rsearch.types import Question

NAME = re.compile(r"ahead_(\d+)-0\.journal")  # with the step of its rollouts


class SampledStep(NamedTuple):
    """The rollouts of a step, and their metrics.

    Attributes:
        scored: groups with their rewards.
        metrics: the metrics from `sample_groups`, and more.
        params: `params_fingerprint` of the policy that sampled.
        version: number of steps that this policy had learnt from.
    """

    scored: list[Rewarded]
    metrics: dict[str, float | None]
    params: str
    version: int


class PendingStep(NamedTuple):
    """The rollouts of a step before they are sampled.

    Attributes:
        sample: () -> (groups with their rewards, metrics).
        params: `params_fingerprint` of the policy that samples.
    """

    sample: Callable[[], tuple[list[Rewarded], dict[str, float | None]]]
    params: str


class RolloutsAhead:
    """The next step's rollouts, sampled in a thread; leaving the context ends it.

    Args:
        folder: folder of the stage.
        made_from: fingerprint of everything that rollouts depend on, except the policy.
        questions: questions of the stage.
    """

    def __init__(
        self, folder: pathlib.Path, made_from: str, questions: Sequence[Question]
    ):
        self._folder, self._made_from = folder, made_from
        self._questions = questions
        self._pool = ThreadPoolExecutor(1)
        self._is_cancelled = threading.Event()
        # By (step, attempt): the rollouts begun last, and those taken last.
        self._futures: dict[tuple[int, int], Future[SampledStep]] = {}

    def begin(
        self, pending: PendingStep, step: int, attempt: int, *, version: int
    ) -> None:
        """Begin to sample the rollouts of a step.

        Args:
            pending: samples them. No update may reuse the buffers of its parameters.
            step: step number, from 0.
            attempt: number of roll-backs so far.
            version: number of steps that the sampling policy has learnt from.
        """

        def sample() -> SampledStep:
            return SampledStep(*pending.sample(), pending.params, version)

        self._futures[step, attempt] = self._pool.submit(sample)

    def check(self) -> None:
        """Raise, to end the calling thread, if the stage has ended."""
        if self._is_cancelled.is_set():
            raise _CancelledError

    def take(self, step: int, attempt: int) -> SampledStep | None:
        """Wait for the rollouts of a step and return them; None if none were begun."""
        self.wait()
        future = self._futures.get((step, attempt))
        # A checkpoint of this step needs them until they have been learnt from.
        self._futures = {} if future is None else {(step, attempt): future}
        return None if future is None else future.result()

    def wait(self) -> None:
        """Wait until no rollouts are being sampled.

        Raises:
            Exception: whatever has ended the rollouts.
        """
        for future in self._futures.values():
            future.result()

    def store(self, step: int) -> bool:
        """Store the rollouts of a step for `restore`, before its checkpoint is saved.

        Rollouts stored for checkpoints that no longer exist are deleted.

        Returns:
            Whether the checkpoint may be saved: either no rollouts of this step were
            begun, or they have finished and are stored.

        Raises:
            OSError: the rollouts cannot be written.
        """
        saved_steps = checkpoint.steps(self._folder / checkpoint.FOLDER)
        for path in self._folder.glob("ahead_*"):
            match = NAME.fullmatch(path.name)
            if match and int(match[1]) not in saved_steps:
                path.unlink(missing_ok=True)
        for numbers, future in self._futures.items():
            if numbers[0] == step:
                if not future.done() or future.exception() is not None:
                    return False
                self._write(numbers, future.result())
        return True

    def _write(self, numbers, sampled):
        description = {
            "questions": [r.group.question.id for r in sampled.scored],
            "metrics": metrics_to_json(sampled.metrics),
            "params": sampled.params,
            "version": sampled.version,
        }
        log, key = self._log(numbers[0]), [self._made_from, *numbers]
        bodies = {
            "groups": encode_rewarded(sampled.scored),
            "about": json.dumps(description).encode(),
        }
        for name, body in bodies.items():
            # A disk without room for the groups may have room for their description.
            if not log.add([*key, name], body):  # the log has reported why
                problem = f"the rollouts of step {numbers[0] + 1} are not stored"
                raise OSError(errno.EIO, problem, str(self._folder))

    def restore(self, step: int, attempt: int) -> bool:
        """Load the rollouts that were stored for the checkpoint of a step.

        Returns:
            Whether there are any.
        """
        log, key = self._log(step), [self._made_from, step, attempt]
        description, groups = (log.get([*key, name]) for name in ("about", "groups"))
        if description is None or groups is None:
            return False
        description = json.loads(description)
        by_id = {question.id: question for question in self._questions}
        questions = [by_id[name] for name in description["questions"]]
        try:
            results = decode_rewarded(groups, questions)
        except ValueError:  # another version wrote it
            return False
        future: Future[SampledStep] = Future()
        future.set_result(
            SampledStep(
                results,
                metrics_from_json(description["metrics"]),
                description["params"],
                description["version"],
            )
        )
        self._futures[step, attempt] = future
        return True

    def _log(self, step):
        return AppendLog(self._folder, f"ahead_{step}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._is_cancelled.set()
        self._pool.shutdown()


class _CancelledError(Exception):
    """The stage ended before the rollouts of its next step did."""
