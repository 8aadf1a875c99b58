"""What a benchmark tells: rows of a table, and of a JSON file."""

import dataclasses
import statistics
from collections.abc import Sequence

from rsearch.bench.machine import Machine

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
