"""Describe and read the tables of papers in configs/tables/.

A table is data: what the paper prints, and how this package makes each row. Each file
of that folder is for one paper and defines a dict TABLES of {"the table's number":
PaperTable}. A figure has a number such as "fig3".
"""

import dataclasses
import pathlib
import statistics
from collections.abc import Mapping, Sequence

from rsearch.config.recipes import import_file
from rsearch.config.spec import ROOT
from rsearch.runtime.metrics import is_finite, read_metrics
from rsearch.text.spelling import did_you_mean

FOLDER = ROOT / "configs" / "tables"
NO_NUMBER = "-"  # in PaperRow.printed
NUM_SPANS = 5  # spans of a curve; each has a column for its mean


@dataclasses.dataclass(frozen=True)
class PaperColumn:
    """A column of numbers.

    Attributes:
        name: name as printed, with its metric.
        metric: a number of results.json (`seconds` are divided by the rollouts); "" for
            an average, and for numbers that results.json does not have.
        set: key of `rsearch.data.sets.SETS`; "" if `metric` is "".
        mean_of: names of the columns that an average is over.
        by_questions: whether the average is over all questions; otherwise it is over
            the columns.
    """

    name: str
    metric: str = ""
    set: str = ""
    mean_of: tuple[str, ...] = ()
    by_questions: bool = False


def columns_of(
    sets: Mapping[str, str], metrics: Mapping[str, str]
) -> tuple[PaperColumn, ...]:
    """Return a column for each metric of each set.

    Args:
        sets: {name as printed: key of SETS}.
        metrics: {name as printed: number of results.json}.
    """
    return tuple(
        PaperColumn(f"{name} {label}", metric, key)
        for name, key in sets.items()
        for label, metric in metrics.items()
    )


def average_of(
    name: str, columns: Sequence[PaperColumn], *, by_questions: bool = False
) -> PaperColumn:
    """Return a column of the average over others; see `PaperColumn`."""
    names = tuple(column.name for column in columns)
    return PaperColumn(name, mean_of=names, by_questions=by_questions)


@dataclasses.dataclass(frozen=True)
class TinyRow:
    """A row on the embedded world that differs by more than its recipe's `tiny`.

    Attributes:
        model: replaces the row's; "" means the one that recipes have at this size.
        recipe: replaces the row's; "" means the row's with the word `tiny`.
        settings: replace the row's.
        asking: replaces the row's.
        reason: why the embedded world has no such row.
    """

    model: str = ""
    recipe: str = ""
    settings: tuple[str, ...] = ()
    asking: tuple[str, ...] = ()
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class PaperRow:
    """A row: its numbers, and how this package makes it.

    Attributes:
        key: name of the row within its table.
        label: label as printed.
        printed: numbers of the columns as printed, separated by spaces; NO_NUMBER where
            there is none.
        model: model that answers, or that training starts from: its name on the hub or
            at its endpoint.
        method: method of config.eval.methods, run on the untrained model or on a
            recipe's policy; "" means the recipe's own protocol.
        recipe: configuration whose policy is evaluated; "" for an untrained model.
        stage: stage of the recipe after which it is evaluated.
        settings: "field=value" overrides of the recipe that this row needs.
        asking: "field=value" overrides of the evaluation only.
        reason: why no method and no recipe makes the row.
        tiny: the row on the embedded world; None means the recipe's `tiny` with the
            same settings.
    """

    key: str
    label: str
    printed: str
    model: str
    method: str = ""
    recipe: str = ""
    stage: str = ""
    settings: tuple[str, ...] = ()
    asking: tuple[str, ...] = ()
    reason: str = ""
    tiny: TinyRow | None = None

    @property
    def is_runnable(self) -> bool:
        """Return whether this package makes the row."""
        return not self.reason

    @property
    def numbers(self) -> tuple[str, ...]:
        """Return the printed numbers, one for each column."""
        return tuple(self.printed.split())


@dataclasses.dataclass(frozen=True)
class Erratum:
    """A printed number that cannot be right, or cannot be read.

    Attributes:
        row: key of its row; "" if whole columns are meant.
        columns: names of its columns; () if a whole row is meant.
    """

    row: str
    columns: tuple[str, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """A table of a paper.

    Attributes:
        title: a few words for the list of tables.
        source: the paper's arXiv number.
        caption: what was measured and how, in our words.
        slips: numbers to read with care.
        settings: {name of `made_by` in results.json: value} with which, according to
            the paper, all rows were measured.
        is_percent: whether scores are printed in percent; otherwise they are fractions
            from 0 to 1.
        curves: {name as printed: field of metrics.jsonl} of a figure that has training
            curves by step in place of columns.
    """

    title: str
    source: str
    caption: str
    columns: tuple[PaperColumn, ...]
    rows: tuple[PaperRow, ...]
    slips: tuple[Erratum, ...] = ()
    settings: Mapping[str, float] = dataclasses.field(default_factory=dict)
    is_percent: bool = False
    curves: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read_tables(folder: pathlib.Path = FOLDER) -> dict[str, PaperTable]:
    """Return {"paper:number": table} of every file in a folder.

    Raises:
        ValueError: a file is broken, or has no TABLES.
    """
    tables = {}
    for path in sorted(folder.glob("[!_]*.py")):
        paper = getattr(import_file(path), "TABLES", None)
        if not isinstance(paper, dict):
            raise ValueError(f"{path}: defines no dict TABLES")
        tables |= {f"{path.stem}:{number}": table for number, table in paper.items()}
    return tables


def find_table(name: str) -> PaperTable:
    """Return a table by its name, "paper:number", such as "rag_r1:3".

    Raises:
        ValueError: there is no such table.
    """
    tables = read_tables()
    if name not in tables:
        hint = did_you_mean(name, [*tables]) or f"; there are {', '.join(tables)}"
        raise ValueError(f"table {name!r}: not in configs/tables{hint}")
    return tables[name]


def find_row(table: PaperTable, key: str) -> PaperRow:
    """Return a row of a table by its key.

    Raises:
        ValueError: there is no such row.
    """
    rows = {row.key: row for row in table.rows}
    if key not in rows:
        hint = did_you_mean(key, [*rows]) or f"; there are {', '.join(rows)}"
        raise ValueError(f"row {key!r}: not in the table{hint}")
    return rows[key]


def with_curve_columns(table: PaperTable) -> PaperTable:
    """Return a table of curves with columns for means over fifths of the steps."""
    if not table.curves:
        return table
    columns = tuple(
        PaperColumn(f"{name} {span + 1}/{NUM_SPANS}")
        for name in table.curves
        for span in range(NUM_SPANS)
    )
    no_numbers = " ".join([NO_NUMBER] * len(columns))
    rows = tuple(dataclasses.replace(row, printed=no_numbers) for row in table.rows)
    return dataclasses.replace(table, columns=columns, rows=rows)


def read_row_curves(
    table: PaperTable, row: PaperRow, folder: pathlib.Path
) -> dict[str, list[tuple[int, float]]]:
    """Return {curve's name: (step, value) pairs} of a run; {} if it has no metrics."""
    path = folder / row.stage / "metrics.jsonl"
    lines = read_metrics(path) if path.exists() else []
    curves = {
        name: [(x["step"], x[field]) for x in lines if is_finite(x.get(field))]
        for name, field in table.curves.items()
    }
    return {name: points for name, points in curves.items() if points}


def curve_means(
    curves: Mapping[str, Sequence[tuple[int, float]]],
) -> dict[str, float]:
    """Return {name of a column: mean over its steps} of curves.

    Args:
        curves: see `read_row_curves`. A curve with fewer steps than columns is left
            out.
    """
    means = {}
    for name, points in curves.items():
        edges = [i * len(points) // NUM_SPANS for i in range(NUM_SPANS + 1)]
        for span in range(NUM_SPANS if len(points) >= NUM_SPANS else 0):
            values = [value for _, value in points[edges[span] : edges[span + 1]]]
            means[f"{name} {span + 1}/{NUM_SPANS}"] = statistics.fmean(values)
    return means
