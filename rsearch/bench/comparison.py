"""Measure subjects in turn, and put their numbers into the rows of a table."""

import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rsearch.bench.machine import MachineBounds
from rsearch.config.recipes import is_user_error
from rsearch.runtime.console import progress

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED_GPU_ENV = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # lets subjects share a GPU
SHOWN_LINES = 15  # last lines of a failed process's stderr that are shown
OURS = "rsearch"
HEADS = (
    *("case", "subject", "median", "unit", "lowest", "highest", "rsearch is"),
    *("bound", "share", "peak GB", "notes"),
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A program to measure, with its settings.

    Attributes:
        module: module of this package that defines the function `make`.
        settings: keyword arguments of that function; JSON values.
        make: name of the function that prepares the subject and returns a Repetition.
        python: interpreter to run it with; by default this process's.
    """

    module: str
    settings: dict = dataclasses.field(default_factory=dict)
    make: str = "make"
    python: str = sys.executable


def find_python(flag: str, path: str) -> str:
    """Return a peer's interpreter, which is this process's if the flag is empty.

    Raises:
        ValueError: there is no such program.
    """
    if path and shutil.which(path) is None:
        raise ValueError(f"--{flag}={path}: there is no such program")
    return path or sys.executable


def compare(
    subjects: dict[str, Subject],
    repeats: int,
    *,
    one_at_a_time: bool = False,
    are_short: bool = False,
) -> dict[str, list[dict] | str]:
    """Measure subjects, each in a process of its own.

    First, all are prepared and run one repetition that does not count. Then they take
    turns, so that a machine that slows down affects all of them.

    Args:
        repeats: number of repetitions that count.
        one_at_a_time: end each process before the next one begins, for subjects that
            would not fit into memory together.
        are_short: run an extra repetition that does not count before each one that
            does, since memory that was idle during the others' turns is slow at first.

    Returns:
        {name: the numbers of each repetition, or a sentence that says why there are
        none}. For rsearch it is a sentence only if it raises `child.Unmeasured`.

    Raises:
        RuntimeError: rsearch itself failed.
    """
    if one_at_a_time and len(subjects) > 1:
        results = {}
        for name, subject in subjects.items():
            results |= compare({name: subject}, repeats, are_short=are_short)
        return results
    results = {name: [] for name in subjects}
    with contextlib.ExitStack() as stack:
        # The parent removes it, since a child exits without any clean-up.
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(
                prefix="rsearch-bench-", ignore_cleanup_errors=True
            )
        )
        children = {}
        turns = [(i, name) for i in range(1 + repeats) for name in subjects]
        for i, name in progress(turns, f"repetitions of {' and '.join(subjects)}"):
            if i == 0:
                stderr = stack.enter_context(tempfile.TemporaryFile("w+"))
                children[name] = _Child(subjects[name], stderr, folder)
                stack.callback(children[name].end)
            if name in children:  # otherwise it has dropped out
                _repeat_once(name, children, results, i > 0 and are_short)
    # The first repetition prepares and compiles, so it does not count.
    return {n: r if isinstance(r, str) else r[1:] for n, r in results.items()}


def run_in_process(function: Callable, *args: Any) -> Any:
    """Call a function in a process that ends with the call, and return its result.

    The inputs of the subjects are prepared this way, because a process that has
    initialized an accelerator holds a TPU's chips, and most of a GPU's memory, until it
    exits.

    Args:
        function: function at the top level of a module, since it is pickled by name.
        args: its arguments; they are pickled, and so is its result.

    Raises:
        ValueError: the function refuses a user's settings.
    """
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        result, refusal = pool.submit(_call, function, args).result()
    if refusal is not None:
        # A pickled ValueError loses its traceback, which shows that it is for users.
        raise ValueError(refusal)
    return result


def _call(function, args):
    """Return (the function's result, its message for users); one of them is None."""
    try:
        return function(*args), None
    except ValueError as error:
        if not is_user_error(error):
            raise
        return None, str(error)


def _repeat_once(name, children, results, is_warmed):
    """Add a repetition. A peer that fails drops out; a failure of rsearch is raised."""
    try:
        if is_warmed:
            children[name].repeat()
        results[name].append(children[name].repeat())
    except _MissingError as missing:
        if name.startswith(OURS) and not isinstance(missing, _UnmeasuredError):
            raise RuntimeError(f"{name}: {missing}") from None
        children.pop(name).end()
        results[name] = str(missing)


class _MissingError(Exception):
    """A subject has no number; the message says why."""


class _UnmeasuredError(_MissingError):
    """A subject works but has no number."""


class _Child:
    """The process of one subject."""

    def __init__(self, subject: Subject, stderr: TextIO, folder: str):
        self._stderr = stderr
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [subject.python, "-m", "rsearch.bench.child"]
        self._process = subprocess.Popen(
            [*command, subject.module, subject.make, json.dumps(subject.settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={
                **SHARED_GPU_ENV,
                **os.environ,
                "PYTHONPATH": path,
                "TMPDIR": folder,
            },
        )

    def repeat(self) -> dict:
        """Return the numbers of one more repetition."""
        # If the process has ended, the end of its stderr says why.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise _MissingError(f"failed: {self._end_of_stderr()}")
        numbers = json.loads(line)
        if "missing" in numbers:
            raise _MissingError(numbers["missing"])
        if "unmeasured" in numbers:
            raise _UnmeasuredError(numbers["unmeasured"])
        return numbers

    def _end_of_stderr(self) -> str:
        self._process.wait()
        self._stderr.seek(0)
        return "\n".join(self._stderr.read().splitlines()[-SHOWN_LINES:])

    def end(self):
        """Close the pipes and wait until the process has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@dataclasses.dataclass(frozen=True)
class Bench:
    """Settings that all measurements of a run share.

    Attributes:
        repeats: repetitions of each measurement; their median counts.
    """

    machine: MachineBounds
    repeats: int = 5


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One number.

    Attributes:
        case: what was measured; all rows of a case measure the same work.
        subject: "rsearch", or a peer such as "transformers".
        value: median of the repetitions; None if there is none.
        low, high: lowest and highest value of the repetitions.
        ratio: factor by which rsearch is better than this subject; None for rsearch.
        bound: the machine's limit that is reached first, "FLOPs" or "bytes"; None if
            the case has no such bound, or the machine's is unknown.
        share: share of that bound that the median reaches.
        peak_bytes: peak memory of the processes while they were measured: host memory
            for searches and on CPUs, otherwise device memory; None if it is not
            compared.
        missing: reason why there is no value.
        counts: {name: number}, printed in the last column.
    """

    case: str
    subject: str
    value: float | None
    unit: str
    low: float | None = None
    high: float | None = None
    ratio: float | None = None
    bound: str | None = None
    share: float | None = None
    peak_bytes: float | None = None
    missing: str = ""
    counts: dict = dataclasses.field(default_factory=dict)


def make_row(
    case: str,
    subject: str,
    unit: str,
    values: Sequence[float] | str,
    *,
    our_values: Sequence[float] = (),
    more_is_better: bool = True,
    peak_bytes: float | None = None,
    counts: dict | None = None,
) -> Measurement:
    """Return the row for one subject's repetitions.

    Args:
        case, subject, unit, peak_bytes, counts: see `Measurement`.
        values: values of the repetitions, or the reason why there are none.
        our_values: rsearch's values for the same case, to compare a peer's with.
    """
    if isinstance(values, str):
        return Measurement(case, subject, None, unit, missing=values)
    value = statistics.median(values)
    ratio = None
    if subject != OURS and len(our_values):
        our_value = statistics.median(our_values)
        ratio = our_value / value if more_is_better else value / our_value
    return Measurement(
        case,
        subject,
        value,
        unit,
        min(values),
        max(values),
        ratio,
        peak_bytes=peak_bytes,
        counts=counts or {},
    )


def make_case_rows(
    case: str,
    unit: str,
    results: Mapping[str, list[dict] | str],
    number: Callable[[dict], float],
    *,
    more_is_better: bool = True,
    counts: Callable[[str, list[dict]], dict] = lambda subject, runs: {},
    bound: Callable[[Measurement, list[dict]], Measurement] = lambda row, runs: row,
    has_peak: bool = True,
    rivals: Mapping[str, str] | None = None,
) -> list[Measurement]:
    """Return a row for each subject of a case.

    Args:
        case, unit, more_is_better: as in `make_row`.
        results: the results of `compare`.
        number: function that maps a repetition's numbers to the value.
        counts: function that maps a subject and its repetitions to its counts.
        bound: function that adds the bound to a row, given its repetitions; see
            `with_bound`.
        rivals: {subject: rsearch's subject that it is compared with}; the others are
            compared with the one named OURS.
    """
    rows = []
    for name, runs in results.items():
        if isinstance(runs, str):
            rows.append(make_row(case, name, unit, runs))
            continue
        our_runs = results[(rivals or {}).get(name, OURS)]
        is_measured = not isinstance(our_runs, str)
        row = make_row(
            case,
            name,
            unit,
            [number(run) for run in runs],
            our_values=[number(run) for run in our_runs] if is_measured else (),
            more_is_better=more_is_better,
            peak_bytes=median_of(runs, "peak_bytes") if has_peak else None,
            counts=counts(name, runs),
        )
        rows.append(bound(row, runs))
    return rows


def median_of(runs: Sequence[dict], name: str) -> float:
    """Return the median of one number over a subject's repetitions."""
    return statistics.median(run[name] for run in runs)


def with_bound(
    row: Measurement,
    machine: MachineBounds,
    seconds: float,
    *phases: tuple[float, float],
    dtype: str = "float32",
) -> Measurement:
    """Return the row with its bound and the share of the bound that it reaches.

    The row is unchanged if the machine's bounds in this dtype are unknown.

    Args:
        seconds: median time of the work.
        phases: consecutive parts of the work, each as (fewest operations of matrix
            products, fewest bytes moved from and to memory). The bound is that of the
            longest phase; the share is that of all phases together.
    """
    if dtype not in machine.flops:
        return row
    peak, bandwidth = machine.flops[dtype], machine.bandwidth
    phase_bounds = [
        max((flops / peak, "FLOPs"), (num_bytes / bandwidth, "bytes"))
        for flops, num_bytes in phases
    ]
    share = sum(phase_seconds for phase_seconds, _ in phase_bounds) / seconds
    return dataclasses.replace(row, bound=max(phase_bounds)[1], share=share)


def cells(row: Measurement) -> tuple:
    """Return the row's readable columns, in the order of HEADS."""
    counts = ", ".join(f"{name} {value:,.6g}" for name, value in row.counts.items())
    peak = None if row.peak_bytes is None else round(row.peak_bytes / 1e9, 3)
    return (
        row.case,
        row.subject,
        row.value,
        row.unit,
        row.low,
        row.high,
        "-" if row.ratio is None else f"{row.ratio:.2f}x",
        row.bound or "-",
        "-" if row.share is None else f"{row.share:.0%}",
        peak,
        row.missing or counts or "-",
    )
