"""Subjects that take turns in being measured, and the rows that tell the result."""

import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from rsearch.bench.machine import Machine
from rsearch.config.recipes import is_for_users
from rsearch.runtime.console import progress

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARING = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # a GPU, with other subjects
TOLD_LINES = 15  # of a failed process's last words


@dataclasses.dataclass(frozen=True)
class Subject:
    """Who is measured.

    Attributes:
        module: of this package, that has `make`.
        settings: of `make`; JSON values.
        make: the function's name.
        python: the interpreter, where it needs libraries of its own.
        environment: variables beside those there are.
    """

    module: str
    settings: dict = dataclasses.field(default_factory=dict)
    make: str = "make"
    python: str = sys.executable
    environment: dict = dataclasses.field(default_factory=dict)


def compare(
    subjects: dict[str, Subject], repeats: int, *, one_at_a_time: bool = False
) -> dict[str, list[dict] | str]:
    """{name: the numbers of each repetition, or why there are none}.

    All are prepared first and do one repetition that does not count. Then they take
    turns, so that a machine that slows down slows all.

    Args:
        subjects: by name.
        repeats: repetitions that count.
        one_at_a_time: a process ends before the next begins, where they would not fit
            into memory together.

    Raises:
        RuntimeError: rsearch itself failed.
    """
    if one_at_a_time and len(subjects) > 1:
        parts = [compare({n: s}, repeats) for n, s in subjects.items()]
        return {name: found for part in parts for name, found in part.items()}
    found: dict[str, list[dict] | str] = {name: [] for name in subjects}
    with contextlib.ExitStack() as stack:
        children = {}
        turns = [(i, name) for i in range(1 + repeats) for name in subjects]
        for i, name in progress(turns, f"repetitions of {' and '.join(subjects)}"):
            if i == 0:
                said = stack.enter_context(tempfile.TemporaryFile("w+"))
                children[name] = _Child(subjects[name], said)
                stack.callback(children[name].end)
            if name in children:  # else it has dropped out
                _turn(name, children, found)
    # In the first it prepares and compiles, which does not count.
    return {n: told if isinstance(told, str) else told[1:] for n, told in found.items()}


def alone(function, *given):
    """What a function returns in a process of its own, that ends with it.

    What is prepared for the subjects is made so: a process that has begun to use an
    accelerator holds a TPU's chips, and most of a GPU's memory, until it ends.

    Args:
        function: of a module.
        given: its arguments; like what it returns, these go from process to process.

    Raises:
        ValueError: the function refuses what users gave.
    """
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        returned, refusal = pool.submit(_refusing, function, given).result()
    if refusal is not None:
        raise ValueError(refusal)
    return returned


def _refusing(function, given):
    """(what it returns, what it says to users instead); one of them is None."""
    try:
        return function(*given), None
    except ValueError as error:
        if not is_for_users(error):
            raise
        return None, str(error)


def _turn(name, children, found):
    """One more repetition; a subject that cannot go on drops out, but rsearch must."""
    try:
        found[name].append(children[name].ask())
    except _Missing as missing:
        if name.startswith(OURS):
            raise RuntimeError(f"{name}: {missing}") from None
        children.pop(name).end()
        found[name] = str(missing)


class _Missing(Exception):
    """A subject has no number, and why."""


class _Child:
    """The process of one subject."""

    def __init__(self, subject: Subject, said):
        self._said = said
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [subject.python, "-m", "rsearch.bench.child"]
        self._process = subprocess.Popen(
            [*command, subject.module, subject.make, json.dumps(subject.settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            cwd=ROOT,
            env={**SHARING, **os.environ, "PYTHONPATH": path, **subject.environment},
        )

    def ask(self) -> dict:
        """The numbers of one more repetition."""
        with contextlib.suppress(BrokenPipeError):  # its last words tell
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise _Missing(f"failed: {self._last_words()}")
        told = json.loads(line)
        if "missing" in told:
            raise _Missing(told["missing"])
        return told

    def _last_words(self) -> str:
        self._process.wait()
        self._said.seek(0)
        return "\n".join(self._said.read().splitlines()[-TOLD_LINES:])

    def end(self):
        """Waits until it has gone."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


OURS = "rsearch"
HEADS = (
    *("case", "subject", "median", "unit", "lowest", "highest", "rsearch is"),
    *("bound", "share", "peak GB", "told"),
)


@dataclasses.dataclass(frozen=True)
class Bench:
    """What all measurements of a run have in common.

    Attributes:
        machine: what it can do at best.
        repeats: repetitions of each measurement, of which the median is told.
    """

    machine: Machine
    repeats: int = 5


@dataclasses.dataclass(frozen=True)
class Row:
    """One number.

    Attributes:
        case: what was measured; the rows of a case are of the same work.
        subject: who did it: "rsearch", or a peer such as "transformers".
        value: median of the repetitions; None where there is none.
        unit: of it.
        low, high: lowest and highest of the repetitions.
        ratio: how many times better rsearch does than this subject; None of itself.
        bound: what the machine would run out of first, "FLOPs" or "bytes"; None where
            the case has no such bound, or the machine none that is known.
        share: of that bound, reached at the median.
        peak_bytes: most memory the processes held while they were measured: of
            searching that of the host, else on an accelerator that of its device; None
            where that is not asked.
        missing: why there is no value.
        counts: {name: number} told beside.
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


def row_of(
    case: str,
    subject: str,
    unit: str,
    values: Sequence[float] | str,
    *,
    ours: Sequence[float] = (),
    more_is_better: bool = True,
    peak_bytes: float | None = None,
    counts: dict | None = None,
) -> Row:
    """The row of one subject's repetitions.

    Args:
        case, subject, unit, peak_bytes, counts: of the Row.
        values: of the repetitions, or why there are none.
        ours: rsearch's repetitions of the same case, to compare a peer's with.
        more_is_better: of these numbers.
    """
    if isinstance(values, str):
        return Row(case, subject, None, unit, missing=values)
    value = statistics.median(values)
    ratio = None
    if subject != OURS and len(ours):
        ours = statistics.median(ours)
        ratio = ours / value if more_is_better else value / ours
    return Row(
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


def bounded(
    row: Row,
    machine: Machine,
    seconds: float,
    *phases: tuple[float, float],
    dtype: str = "float32",
) -> Row:
    """The row with its bound and the share of it that these seconds reach.

    Without them where nobody knows what the machine can do with such numbers.

    Args:
        row: without them.
        machine: that it was measured on.
        seconds: that the work took, by the median.
        phases: of the work, one after another: the operations of matrix products that
            each cannot do without, and the bytes that it must read from and write to
            memory, at least. The bound is that of the longest; the share, of all.
        dtype: that was computed in.
    """
    if not machine.is_known(dtype):
        return row
    least = []
    for flops, moved in phases:
        times = {"FLOPs": flops / machine.flops, "bytes": moved / machine.bandwidth}
        least.append(max((taken, bound) for bound, taken in times.items()))
    share = sum(taken for taken, _ in least) / seconds
    return dataclasses.replace(row, bound=max(least)[1], share=share)


def cells(row: Row) -> tuple:
    """The row's columns below HEADS, for people."""
    told = ", ".join(f"{name} {value:,.6g}" for name, value in row.counts.items())
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
        row.missing or told or "-",
    )
