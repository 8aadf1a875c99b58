"""Log the metrics of a stage step by step: metrics.jsonl, and TensorBoard curves.

metrics.jsonl is the authoritative record: one JSON object per line, with its `step`. It
is valid JSON even if a number is not finite: NaN and the infinities are written as the
strings "NaN", "Infinity" and "-Infinity", and read back as numbers. The curves are a
convenience, and their failure never stops a run.
"""

import contextlib
import json
import math
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from rsearch.hosts import processes
from rsearch.runtime import console, files, run_directory
from rsearch.runtime.jsonl import (
    decode_json,
    read_jsonl,
    recover_jsonl,
    write_jsonl,
)
from rsearch.runtime.metric_table import curve_name

METRICS = "metrics.jsonl"  # in a stage's directory
NUM_BINS = 30  # of a histogram
MAX_TEXT = 20_000  # characters of a text in TensorBoard
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsLog:
    """The open metrics files of one stage; a context manager. Only host 0 writes.

    Args:
        directory: the stage's directory; created if missing, but its parent must exist.
        first_step: rows of this step and later ones are dropped first, since a run may
            have continued after its last checkpoint; None keeps all rows.
        tensorboard: whether to write curves.

    Raises:
        LostDirectoryError: the run's directory is no longer at its path.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        first_step: int | None = None,
        tensorboard: bool = True,
    ):
        self.directory = pathlib.Path(directory)
        # If the run has been moved, using the path would create a new directory there.
        run_directory.stop_if_lost(self.directory)
        run_directory.anchor(self.directory).mkdir(exist_ok=True)
        self.path = self.directory / METRICS
        self._file = self._opened = None
        has_curves = tensorboard and processes.is_host0()
        self._curves = _Curves(self.directory / "tensorboard") if has_curves else None
        # Even if no step is given, because the last line may be torn.
        self.rewind(math.inf if first_step is None else first_step)

    def write(self, step: int, values: dict) -> None:
        """Append a row.

        Args:
            step: int; the rows of a stage are written in the order of their steps.
            values: {name: number, string, bool or None}; a scalar array is a number.

        Raises:
            OSError: the disk refuses the write; earlier rows stay intact.
        """
        assert "step" not in values, values
        if not processes.is_host0():
            return
        row = metrics_to_json(values)
        text = json.dumps({"step": int(step), **row}, allow_nan=False)
        self._follow()
        try:
            files.append(self._file, f"{text}\n".encode())
        except OSError as error:
            error.filename = str(self.path)  # it was opened by its anchored path
            # A network disk that comes back has lost its open files.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
            raise
        if self._curves:
            self._curves.write(step, metrics_from_json(row))

    def draw(
        self,
        step: int,
        distributions: Mapping[str, np.ndarray],
        texts: Sequence[str] = (),
    ) -> None:
        """Add histograms and texts to TensorBoard only, not to metrics.jsonl.

        Args:
            step: step of the row that is written next.
            distributions: {name: numbers}; numbers that are not finite are left out.
            texts: shown literally, not as Markdown.
        """
        if self._curves:
            self._curves.draw(step, distributions, texts)

    def rewind(self, step: float) -> None:
        """Drop the rows of `step` and later steps; set damaged rows aside.

        If rows before `step` are missing, a note says how many and in which range.
        """
        self.close()
        if not processes.is_host0():
            return
        rows = recover_jsonl(self.path, parse=_parse_row, on_bad=console.note)
        kept_rows = [row for row in rows if row["step"] < step]
        if len(kept_rows) < len(rows):
            write_jsonl(self.path, map(metrics_to_json, kept_rows))
        missing = set() if step == math.inf else set(range(step))
        missing -= {row["step"] for row in kept_rows}
        if missing:
            console.note(
                f"{self.path}: {len(missing)} of the rows before step {step} are "
                f"missing: step {min(missing)}"
                + (f" to {max(missing)}" if len(missing) > 1 else "")
            )
        self._open(self.path)
        if self._curves and step != math.inf:
            self._curves.rewind(step)

    def _follow(self):
        """Open the file where the run's directory is now, and take its rows along."""
        path = run_directory.locate(self.path)
        if self._file is not None and path != self._opened:
            with contextlib.suppress(OSError):  # if unreadable, only write new rows
                self._file.seek(0)
                files.replace(path, self._file.read())
            self._file.close()
            self._file = None
        if self._file is None:
            # A failed write may have left part of a row.
            recover_jsonl(path, parse=_parse_row, on_bad=console.note)
            self._open(path)

    def _open(self, path):
        # Unbuffered: a row is in the file when `write` returns.
        try:
            self._file = open(run_directory.anchor(path), "a+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            error.filename = str(path)
            raise
        self._opened = path

    def close(self) -> None:
        """Close the files; a later `rewind` opens them again."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a save has already reported it
                self._follow()
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._curves:
            self._curves.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """Return the rows of a metrics.jsonl, each a dict with its `step`.

    A last line without its line feed was torn by a crash and is skipped. Any other bad
    line is skipped with a warning that names it.
    """

    def warn(message):
        warnings.warn(message, stacklevel=4)

    return read_jsonl(path, parse=_parse_row, on_bad=warn)


def metrics_to_json(values: dict) -> dict:
    """Return the values of `MetricsLog.write` as JSON values."""
    row = {name: _to_scalar(name, value) for name, value in values.items()}
    return {n: number_to_json(x) if isinstance(x, float) else x for n, x in row.items()}


def number_to_json(value: float) -> float | str:
    """Return a finite number unchanged, and any other as the string that names it."""
    return value if math.isfinite(value) else json.dumps(value)


def metrics_from_json(row: dict) -> dict:
    """Return the values from which `metrics_to_json` made a row."""
    return {name: NON_FINITE.get(value, value) for name, value in row.items()}


def parse_rows(data: bytes) -> list[dict]:
    """Return the rows in lines of a metrics.jsonl; bad lines are skipped."""
    rows = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            rows.append(_parse_row(decode_json(line, strict=False)))
    return rows


def is_finite(value: object) -> bool:
    """Return whether a row's value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def curve_values(row: dict) -> dict[str, float]:
    """Return {curve name: number} of a row's numbers, without its `step`."""
    return {
        curve_name(name): float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and name != "step"
    }


def _parse_row(row):
    is_row = isinstance(row, dict) and type(row.get("step")) is int
    if not is_row or not all(map(_is_scalar, row.values())):
        raise ValueError("not a row of metrics")
    return metrics_from_json(row)


def _is_scalar(value):
    is_number = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return value is None or isinstance(value, str | bool) or is_number


def _to_scalar(name, value):
    """Return a Python number, string, bool or None."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    array = np.asarray(value)
    assert array.ndim == 0, f"{name} is no scalar: shape {array.shape}"
    assert array.dtype != object, f"{name} is no number: {value!r}"
    # bfloat16's item() returns a float, but not that of every extension type.
    is_exact = array.dtype.kind in "biu"
    return array.item() if is_exact else float(array)


class _Curves:
    """An event file for TensorBoard, written in this thread; tags include the group.

    tensorboardX's SummaryWriter writes from its own thread; if a full disk kills that
    thread, the queue fills up and the run hangs. Its EventsWriter has no such thread.
    """

    def __init__(self, directory):
        _import_tensorboardx()
        self.directory = directory
        self._writer = None
        self._has_failed = False

    def write(self, step, row):
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        def add():
            for name, value in curve_values(row).items():
                self._add(Event(step=int(step), summary=scalar(name, value)))
            self._writer.flush()

        self._attempt(add)

    def draw(self, step, distributions, texts):
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import histogram, text

        def add():
            for name, values in distributions.items():
                values = np.asarray(values, np.float64).reshape(-1)
                values = values[np.isfinite(values)]
                if values.size:
                    # A tag may have only one kind, and no curve has this one.
                    summary = histogram(f"distribution/{name}", values, NUM_BINS)
                    self._add(Event(step=int(step), summary=summary))
            for number, transcript in enumerate(texts):
                # An indented code block shows it literally, whatever markup is in it;
                # a line of the text could end a fenced one.
                lines = console.clean(transcript)[:MAX_TEXT].split("\n")
                block = "\n".join(f"    {line}" for line in lines)
                summary = text(f"rollouts/{number}", block)
                self._add(Event(step=int(step), summary=summary))

        self._attempt(add)

    def rewind(self, step):
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._attempt(lambda: self._add(Event(step=int(step), session_log=start)))

    def close(self):
        writer, self._writer = self._writer, None
        if writer is not None:
            self._attempt(writer.close)

    def _add(self, event):
        if self._writer is None:
            from tensorboardX.event_file_writer import EventsWriter

            directory = run_directory.locate(self.directory)
            directory.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(directory / "events"))
        event.wall_time = time.time()
        self._writer.write_event(event)

    def _attempt(self, action):
        if self._has_failed:
            return
        try:
            action()
        # No error in a mere convenience may end the run.
        except Exception as error:
            self._has_failed = True
            warnings.warn(
                f"no more TensorBoard curves in {self.directory}: {error!r}; "
                "metrics.jsonl is still written",
                stacklevel=3,
            )


def _import_tensorboardx():
    """Import tensorboardX without torch, which it would import if installed.

    That takes seconds, and drawing numbers does not need torch.
    """
    is_absent = "torch" not in sys.modules
    if is_absent:
        sys.modules["torch"] = None  # importing it raises an ImportError
    try:
        import tensorboardX  # noqa: F401
    finally:
        if is_absent:
            del sys.modules["torch"]


class LapTimer:
    """A timer of the consecutive parts of a step.

    Attributes:
        seconds: {"<part>_seconds": total seconds of all laps with this name}.
    """

    def __init__(self):
        """Start the first lap."""
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """End the current lap, add its time under this name, and start the next lap."""
        now = time.monotonic()
        key = f"{name}_seconds"
        self.seconds[key] = self.seconds.get(key, 0.0) + now - self._last
        self._last = now
