"""Send the rows of metrics.jsonl to experiment trackers: config.log.track.

Trackers are independent of training. For each tracker a separate process follows the
files that training writes anyway, and a journal in the run's directory records what has
been sent. A tracker that fails, hangs or prints does not affect training, and rows that
were missed are sent later, if need be by a later start of the run:

    <workdir>/trackers/<name>.jsonl   runs in the tracker, and the rows that each has
    <workdir>/trackers/<name>.log     output of the tracker's library

Each stage is a run in the tracker. Steps that are repeated after a crash are not sent
again. If their numbers differ, for example after a roll-back, a new run is started in
the tracker with all rows of metrics.jsonl, because trackers only append and would show
both versions.
"""

import collections
import contextlib
import importlib.util
import itertools
import json
import os
import pathlib
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rsearch.config.fields import fields, fingerprint
from rsearch.runtime import console, files
from rsearch.runtime.boundary import PACKAGE, describe_error
from rsearch.runtime.jsonl import append_jsonl, recover_jsonl
from rsearch.runtime.metrics import METRICS, curve_values, metrics_to_json, parse_rows

FOLDER = "trackers"  # in a run's directory
ENTRY_TYPES = (  # of an entry of the journal: a new run, or a row that was sent
    {"stage": str, "run": str},
    {"stage": str, "step": int, "sent": str},
)
PROJECT = "rsearch"  # the tracker's project, unless the environment names one
MAX_ROWS = 100  # sent in one call
POLL_SECONDS = 2.0
MAX_SECONDS_BETWEEN_TRIES = 300.0
END_SECONDS = 30.0  # for sending the remaining rows after training has ended
STOP_SECONDS = 5.0  # the same if training was stopped or has failed


class StepRow(NamedTuple):
    """The numbers of a step.

    Attributes:
        step: its index, from 0.
        values: {curve name: number}.
        digest: digest of the numbers, except those of the group "perf", which differ
            whenever a step is repeated.
    """

    step: int
    values: dict[str, float]
    digest: str


class TrackedRun(NamedTuple):
    """A run in a tracker: one stage.

    Attributes:
        id: hexadecimal id.
        name: readable name, which includes the stage.
        group: name of the whole rsearch run.
        folder: where the tracker's library stores its files.
    """

    id: str
    name: str
    group: str
    config: dict
    folder: str


class Wandb:
    """Weights & Biases; it reads WANDB_MODE, WANDB_PROJECT and its other variables."""

    def __init__(self, run: TrackedRun):
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=run.group,
            name=run.name,
            id=run.id,
            resume="allow",
            config=run.config,
            dir=os.environ.get("WANDB_DIR", run.folder),
            settings=wandb.Settings(console="off", silent=True),
        )
        # None while offline: W&B then cannot query the server.
        self.num_received = self._run.starting_step if self._run.resumed else None

    def send(self, rows: Sequence[StepRow]) -> None:
        """Log the numbers of steps; W&B sends them from its own process."""
        for row in rows:
            self._run.log(row.values, step=row.step, commit=True)

    def close(self) -> None:
        """Send what is queued."""
        self._run.finish()


class Trackio:
    """Trackio; it reads TRACKIO_DIR, TRACKIO_SPACE_ID and its other variables."""

    num_received = None

    def __init__(self, run: TrackedRun):
        import trackio

        self._run = trackio.init(
            os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run.name}-{run.id}",  # Trackio resumes runs by their names
            group=run.group,
            config=run.config,
            resume="allow",
            embed=False,
        )

    def send(self, rows: Sequence[StepRow]) -> None:
        """Log the numbers of steps; Trackio sends them from its own thread."""
        for row in rows:
            self._run.log(row.values, step=row.step)

    def close(self) -> None:
        """Send what is queued."""
        self._run.finish()


class MLflow:
    """MLflow; it reads MLFLOW_TRACKING_URI and its other variables."""

    RUN, NUM_STEPS = "rsearch.run", "rsearch.num_steps"  # tags of a run
    MAX_PARAMS, MAX_METRICS = 100, 1000  # in one call

    def __init__(self, run: TrackedRun):
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            experiment_id = self._client.create_experiment(name)
        else:
            experiment_id = experiment.experiment_id
        tag_filter = f"tags.`{self.RUN}` = '{run.id}'"
        remote_runs = self._client.search_runs(
            [experiment_id], filter_string=tag_filter
        )
        if remote_runs:
            remote_run = remote_runs[0]
        else:
            tags = {self.RUN: run.id, "rsearch.group": run.group}
            remote_run = self._client.create_run(
                experiment_id, run_name=run.name, tags=tags
            )
        self._id = remote_run.info.run_id
        self.num_received = int(remote_run.data.tags.get(self.NUM_STEPS, 0))
        self._client.update_run(self._id, status="RUNNING")
        if not remote_run.data.params:
            params = [Param(n, str(x)) for n, x in fields(run.config).items()]
            for start in range(0, len(params), self.MAX_PARAMS):
                self._client.log_batch(
                    self._id, params=params[start : start + self.MAX_PARAMS]
                )

    def send(self, rows: Sequence[StepRow]) -> None:
        """Send the numbers of steps, and the number of steps that the run then has."""
        from mlflow.entities import Metric, RunTag

        time_ms = int(1000 * time.time())
        max_values = max(len(row.values) for row in rows)
        rows_per_call = max(1, self.MAX_METRICS // max(1, max_values))
        for start in range(0, len(rows), rows_per_call):
            chunk = rows[start : start + rows_per_call]
            self._client.log_batch(
                self._id,
                metrics=[
                    Metric(name, value, time_ms, row.step)
                    for row in chunk
                    for name, value in row.values.items()
                ],
                # In the same call, so that no row is sent twice after a failure.
                tags=[RunTag(self.NUM_STEPS, str(chunk[-1].step + 1))],
            )

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


TRACKERS = {"wandb": Wandb, "trackio": Trackio, "mlflow": MLflow}
"""Classes by the names of their packages, which are also the names of the extras.

Each is constructed from a TrackedRun and has `send`, `close` and `num_received`: the
number of steps that the tracker has from earlier starts, or None if it cannot tell.
"""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed.

    Raises:
        ValueError: a package is missing; the message says how to install it.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        # A folder of this name in the working directory is found as a package.
        if spec is None or spec.origin is None:
            raise ValueError(
                f"config.log.track = {name!r}: the package {name} is missing: "
                f"pip install -e '.[{name}]'"
            )


@contextlib.contextmanager
def tracking(
    names: Sequence[str],
    folder: pathlib.Path,
    *,
    stages: Sequence[str],
    config: dict,
) -> Iterator[None]:
    """Have trackers follow a run within the block.

    Args:
        names: keys of TRACKERS; () on hosts that do not write the run's files.
        config: configuration of the run, as JSON values.
    """
    if not names:
        yield
        return
    task = {"folder": str(folder), "stages": list(stages), "config": _mask_urls(config)}
    (folder / FOLDER).mkdir(exist_ok=True)
    children = {name: _start(name, folder / FOLDER, task) for name in names}
    seconds = STOP_SECONDS
    try:
        yield
        seconds = END_SECONDS
    finally:
        end = time.monotonic() + seconds
        for child in children.values():
            with contextlib.suppress(BrokenPipeError):  # it has already ended
                child.stdin.close()
        for name, child in children.items():
            try:
                child.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                console.note(f"{name} lacks some rows: the next start sends them")
            finally:
                child.kill()


def _mask_urls(value: Any) -> Any:
    """Return a configuration with the credentials in its URLs masked."""
    from rsearch.runtime.connections import mask_url

    if isinstance(value, dict):
        return {name: _mask_urls(x) for name, x in value.items()}
    return mask_url(value) if isinstance(value, str) and "://" in value else value


def _start(name, folder, task):
    """Start the process of a tracker, which ends after its stdin is closed."""
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with open(folder / f"{name}.log", "ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__, name],
            stdin=subprocess.PIPE,
            stdout=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Control-C must reach the run only
        )
    with contextlib.suppress(BrokenPipeError):  # it has failed, and logged why
        child.stdin.write(json.dumps(task).encode() + b"\n")
        child.stdin.flush()
    return child


class Follower:
    """The rows of a run that a tracker has, and those that it lacks.

    Args:
        name: a key of TRACKERS.
    """

    def __init__(
        self, name: str, folder: pathlib.Path, stages: Sequence[str], config: dict
    ):
        self._name, self._folder, self._config = name, folder, config
        self._stages = {stage: _Stage(folder / stage / METRICS) for stage in stages}
        self._journal = folder / FOLDER / f"{name}.jsonl"
        self._tracker, self._open_stage = None, None
        entries = recover_jsonl(self._journal, parse=_parse_entry, on_bad=console.note)
        for entry in entries:
            if stage := self._stages.get(entry["stage"]):
                stage.apply(entry)

    def send_new(self) -> None:
        """Send the rows that the tracker lacks; its exceptions are not caught."""
        for name, stage in self._stages.items():
            while rows := stage.next_rows():
                if any(row.step in stage.sent for row in rows):  # with other numbers
                    self.close()
                    self._begin(name, stage)
                elif self._open_stage != name:
                    self._open(name, stage)
                else:
                    self._tracker.send(rows)
                    for row in rows:
                        entry = {"stage": name, "step": row.step, "sent": row.digest}
                        self._record(stage, entry)

    def close(self) -> None:
        """Close the tracker, which then sends its queued rows."""
        tracker, self._tracker, self._open_stage = self._tracker, None, None
        if tracker is not None:
            tracker.close()

    def _open(self, name, stage):
        self.close()
        if not stage.run:
            self._begin(name, stage)
        group = self._folder.name
        run = TrackedRun(
            stage.run,
            f"{group}/{name}" + (f"-{stage.num_runs}" if stage.num_runs > 1 else ""),
            group,
            self._config,
            str(self._journal.parent),
        )
        self._tracker = TRACKERS[self._name](run)
        self._open_stage = name
        if (num_received := self._tracker.num_received) is not None:
            stage.correct(num_received)

    def _begin(self, name, stage):
        """Begin a new run in the tracker, which has no rows yet."""
        self._record(stage, {"stage": name, "run": secrets.token_hex(4)})

    def _record(self, stage, entry):
        append_jsonl(self._journal, entry)
        stage.apply(entry)


def _parse_entry(entry):
    """Return an entry of the journal; refuse one that `_record` has not written."""
    is_dict = isinstance(entry, dict)
    types = {name: type(value) for name, value in entry.items()} if is_dict else {}
    if types not in ENTRY_TYPES:
        raise ValueError("not an entry of a tracker's journal")
    return entry


class _Stage:
    """A stage's rows: those read but not sent, and those in the tracker's current run.

    Attributes:
        run: id of the current run in the tracker; "" before there is one.
        num_runs: number of runs of this stage that have begun in the tracker.
        sent: {step: digest of its numbers, or None if it is not known}.
    """

    def __init__(self, path):
        self.run, self.num_runs, self.sent = "", 0, {}
        self._path, self._inode, self._offset = path, None, 0
        self._rows = collections.deque()  # rows read, some perhaps already sent

    def apply(self, entry):
        """Apply an entry of the journal."""
        if "run" in entry:
            self.run, self.num_runs, self.sent = entry["run"], self.num_runs + 1, {}
            self._inode = None  # so that all rows are read again
        else:
            self.sent[entry["step"]] = entry["sent"]

    def correct(self, num_received):
        """Correct `sent` if the tracker reports another number of steps."""
        digests = {step: self.sent.get(step) for step in range(num_received)}
        if digests.keys() != self.sent.keys():
            self.sent, self._inode = digests, None

    def next_rows(self):
        """Return up to MAX_ROWS rows that the tracker lacks."""
        self._read()
        while self._rows and self._is_sent(self._rows[0]):
            self._rows.popleft()
        rows = itertools.islice(self._rows, MAX_ROWS)
        return [row for row in rows if not self._is_sent(row)]

    def _is_sent(self, row):
        return self.sent.get(row.step, "") in (row.digest, None)

    def _read(self):
        """Read the file's new lines, or all lines if the file was rewritten."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset = status.st_ino, 0
                self._rows.clear()
            file.seek(self._offset)
            data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._offset += len(data)
            self._rows += map(_make_row, parse_rows(data))


def _make_row(values):
    curves = curve_values(values)
    stable_curves = {n: x for n, x in curves.items() if not n.startswith("perf/")}
    return StepRow(values["step"], curves, fingerprint(metrics_to_json(stable_curves)))


def send_rows(name: str) -> None:
    """Send the rows of the run described by stdin's first line, until stdin is closed.

    Args:
        name: a key of TRACKERS.
    """
    # Libraries, even native ones, print to the log only.
    terminal = open(os.dup(2), "w", errors="backslashreplace")  # noqa: SIM115
    os.dup2(1, 2)

    def print_note(text):
        with contextlib.redirect_stderr(terminal), contextlib.suppress(OSError):
            console.note(text)
            terminal.flush()

    task = json.loads(sys.stdin.buffer.readline())
    folder = pathlib.Path(task["folder"])
    log = folder / FOLDER / f"{name}.log"
    # The tracker process of an earlier, killed start may still be sending.
    with files.locked(log, waits=True):
        follower = Follower(name, folder, task["stages"], task["config"])
        is_over, has_failed, seconds = False, False, 0.0
        while not is_over:
            readable, *_ = select.select([sys.stdin], [], [], seconds)
            is_over = bool(readable)
            try:
                follower.send_new()
                if is_over:
                    follower.close()
            except Exception as error:
                if is_over or not has_failed:
                    retry_time = "by the next start of the run" if is_over else "later"
                    print_note(
                        f"{name}: {describe_error(error)}; missing rows are sent "
                        f"{retry_time}; see {log}"
                    )
                has_failed = True
                with contextlib.suppress(Exception):
                    follower.close()
                doubled_seconds = max(2 * seconds, POLL_SECONDS)
                seconds = min(doubled_seconds, MAX_SECONDS_BETWEEN_TRIES)
            else:
                if has_failed:
                    print_note(f"{name} has all rows now")
                has_failed, seconds = False, POLL_SECONDS


if __name__ == "__main__":
    send_rows(sys.argv[1])
