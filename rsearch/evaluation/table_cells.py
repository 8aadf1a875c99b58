"""Format a paper's table and what runs measured of it as lines, files or panels."""

import itertools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rsearch.evaluation.figures import Bars, Line, Panel
from rsearch.evaluation.tables import NO_NUMBER, PaperColumn, PaperRow, PaperTable
from rsearch.runtime.markup import (
    csv_table,
    latex_table,
    latex_text,
    markdown_table,
    markdown_text,
)

WORLD = "world"  # prefix of the set of a column of ours
PAPER = "paper"  # the line with a row's printed numbers
OURS = ("ours", "95 %", "n")  # our lines below it
# Fractions of results.json that a table may print in percent.
SCORES = ("em", "f1", "cover_em", "judge", "unsearched")
CSV_COLUMNS = ("table", "row", "label", "model", "made_by", "column", "set", "metric")
CSV_COLUMNS += ("paper", "ours", "low", "high", "n", "note")


# {method: what replaces a part that its authors trained}; see configs/FIDELITY.md.
REPLACED_PARTS = {
    "selective_context": "words replace the phrases of a parser",
    "recomp_extractive": "a linear map of frozen vectors replaces the tuned encoder",
    "skr": "the search's encoder replaces SimCSE, over labels of the same model",
    "adaptive_rag": "softmax regression on frozen vectors replaces the tuned T5",
    "rearter": "logistic regression on frozen vectors replaces the reward model",
    "cr_planner": "logistic regressions on frozen vectors replace the critics",
}


class Cell(NamedTuple):
    """A run's measurement for a cell, as a fraction or a count.

    Attributes:
        value: the number; None if results.json has none.
        interval: 95 % interval, or None.
        n: number of questions; 0 for an average.
        marks: marks of its notes.
    """

    value: float | None
    interval: tuple[float, float] | None = None
    n: int = 0
    marks: tuple[str, ...] = ()


class Measured(NamedTuple):
    """Everything that runs have measured of a table.

    Attributes:
        cells: {(row's key, column's name): cell}.
        notes: {mark: what differs}.
        remarks: remarks on all cells.
        curves: {row's key: {curve's name: (step, value) pairs}}.
    """

    cells: dict[tuple[str, str], Cell]
    notes: dict[str, str]
    remarks: tuple[str, ...] = ()
    curves: Mapping[str, Mapping[str, Sequence]] = types.MappingProxyType({})


def is_world_column(column: PaperColumn) -> bool:
    """Return whether a column is for the embedded world, which no paper measures."""
    return column.set.startswith(f"{WORLD}:")


def _is_percent(table, column):
    """Return whether the column has scores in percent."""
    names = {c.name: c for c in table.columns}
    metric = names[column.mean_of[0]].metric if column.mean_of else column.metric
    return table.is_percent and metric in SCORES


def _scale(table, column):
    """Return the factor that converts a value of ours to the table's unit."""
    return 100 if _is_percent(table, column) else 1


def _digits(table, column):
    """Return the number of decimals that the column is printed with."""
    position = table.columns.index(column)
    texts = [row.numbers[position] for row in table.rows]
    decimals = [len(t.partition(".")[2]) for t in texts if t != NO_NUMBER]
    default = 1 if _is_percent(table, column) else 3 if column.metric in SCORES else 2
    return max(decimals, default=default)


def _measured_texts(table, row, column, measured):
    """Return a cell's texts, one for each line of OURS."""
    cell = measured.cells.get((row.key, column.name))
    if cell is None:
        return "", "", ""
    scale, digits = _scale(table, column), _digits(table, column)
    value = f"{scale * cell.value:.{digits}f}{','.join(cell.marks)}"
    bounds = [f"{scale * bound:.{digits}f}" for bound in cell.interval or ()]
    return value, "-".join(bounds), str(cell.n or "")


def table_lines(
    table: PaperTable, measured: Measured | None
) -> Iterator[tuple[PaperRow, str, list[str]]]:
    """Yield each line of a table as (row, name of the line, column texts).

    Args:
        measured: measured cells; None yields only the paper's lines.
    """
    for row in table.rows:
        numbers = ["" if n == NO_NUMBER else n for n in row.numbers]
        yield row, PAPER, numbers
        if measured is None:
            continue
        texts = [
            _measured_texts(table, row, column, measured) for column in table.columns
        ]
        for name, values in zip(OURS, zip(*texts, strict=True), strict=True):
            if any(values):
                yield row, name, list(values)


def made_by_text(row: PaperRow) -> str:
    """Return how this package makes a row, or why it does not."""
    if not row.is_runnable:
        return f"- {row.reason}"
    asked_model = row.tiny.model if row.tiny else ""
    policy = f"{row.recipe} after {row.stage}" if row.recipe else asked_model
    source = " of ".join(filter(None, [row.method, policy]))
    return ", ".join([source, *row.settings, *row.asking])


def remark_lines(table: PaperTable, measured: Measured | None) -> Iterator[str]:
    """Yield a line for each slip, mark, replaced part of a method, and remark."""
    for slip in table.slips:
        cell_name = ", ".join(filter(None, [slip.row, *slip.columns]))
        yield f"slip: {cell_name}: {slip.text}"
    for mark, text in measured.notes.items() if measured else ():
        yield f"{mark} {text}"
    if measured is None:
        return
    measured_keys = {key for key, _ in measured.cells}
    for row in table.rows:
        if row.key in measured_keys and row.method in REPLACED_PARTS:
            yield f"ours: {row.key}: {REPLACED_PARTS[row.method]}"
    yield from measured.remarks


def column_spans(table: PaperTable) -> list[tuple[int, int]]:
    """Return (start, end) of each span of columns: the paper's, and ours."""
    columns = table.columns
    edges = [
        i
        for i in range(1, len(columns))
        if is_world_column(columns[i]) != is_world_column(columns[i - 1])
    ]
    return [*itertools.pairwise([0, *edges, len(columns)])]


def span_lines(
    table: PaperTable, measured: Measured | None, start: int, end: int
) -> Iterator[tuple[PaperRow, str, list[str]]]:
    """Yield the `table_lines` that have a text in a span of columns.

    If the columns are the paper's, a row without any text yields its first line.
    """
    all_lines = table_lines(table, measured)
    for _, row_lines in itertools.groupby(all_lines, key=lambda line: line[0].key):
        lines = [
            (row, line_name, texts[start:end]) for row, line_name, texts in row_lines
        ]
        with_text = [line for line in lines if any(line[2])]
        yield from with_text or (
            [] if is_world_column(table.columns[start]) else lines[:1]
        )


def grid_of(
    table: PaperTable, measured: Measured | None, start: int, end: int
) -> tuple[list[str], list[list[str]]]:
    """Return the headings and lines of a file, with labels and models as printed.

    Intervals follow their scores. If all rows of a column have the same number of
    questions, that number is in the heading.
    """
    columns = table.columns[start:end]
    counts = [_count_of(column, measured) for column in columns]
    heads = ["row", "model", *(["of"] if measured else [])]
    heads += [f"{c.name} (n {n})" if n else c.name for c, n in zip(columns, counts)]
    num_texts = len(heads) - len(columns)
    _, interval, num_questions = OURS
    lines = []
    for row, line_name, texts in span_lines(table, measured, start, end):
        if line_name == interval:
            scores = zip(lines[-1][num_texts:], texts, strict=True)
            lines[-1][num_texts:] = [f"{x} ({y})" if y else x for x, y in scores]
        elif line_name != num_questions or any(
            text not in ("", n) for text, n in zip(texts, counts, strict=True)
        ):
            lines.append([*[row.label, row.model, line_name][:num_texts], *texts])
    return heads, lines


def _count_of(column, measured):
    """Return the number of questions that all rows share in a column, or ""."""
    cells = measured.cells.items() if measured else ()
    counts = {cell.n for (_, name), cell in cells if name == column.name and cell.n}
    return str(counts.pop()) if len(counts) == 1 else ""


def markdown_tables(
    tables: Mapping[str, PaperTable], measured: Mapping[str, Measured | None]
) -> str:
    """Return tables in Markdown, with their captions and remarks."""
    texts = []
    for name, table in tables.items():
        heading = f"## {name}: {table.title}\n\n" if len(tables) > 1 else ""
        lines = map(markdown_text, remark_lines(table, measured[name]))
        remarks = "".join(f"\n{text}\n" for text in lines)
        grids = "\n".join(
            markdown_table(*grid_of(table, measured[name], *span))
            for span in column_spans(table)
        )
        caption = f"{table.source}. {table.caption}"
        texts.append(f"{heading}{caption}\n\n{grids}{remarks}")
    return "\n".join(texts)


def latex_tables(
    tables: Mapping[str, PaperTable], measured: Mapping[str, Measured | None]
) -> str:
    """Return tables in LaTeX, with their captions and remarks."""
    texts = []
    for name, table in tables.items():
        grids = []
        for start, end in column_spans(table):
            columns, lines = grid_of(table, measured[name], start, end)
            num_texts = len(columns) - (end - start)
            grids.append(latex_table(columns, lines, num_text_columns=num_texts))
        remarks = [
            f"{table.source}. {table.caption}",
            *remark_lines(table, measured[name]),
        ]
        paragraphs = [latex_text(text) + "\\par\n" for text in remarks]
        texts.append("".join([*grids, *paragraphs]))
    return "\n".join(texts)


def csv_tables(
    tables: Mapping[str, PaperTable], measured: Mapping[str, Measured | None]
) -> str:
    """Return CSV with a line for each cell, our scores in the table's unit."""
    lines = []
    for name, table in tables.items():
        for row in table.rows:
            for column, number in zip(table.columns, row.numbers, strict=True):
                cells = [name, row.key, row.label, row.model, made_by_text(row)]
                cells += [column.name, column.set, column.metric]
                cells.append("" if number == NO_NUMBER else number)
                lines.append(
                    cells + _measured_cells(table, row, column, measured[name])
                )
    return csv_table(CSV_COLUMNS, lines)


def _measured_cells(table, row, column, measured):
    """Return our part of a cell's line."""
    cell = measured.cells.get((row.key, column.name)) if measured else None
    if cell is None:
        return [""] * 5
    scale = _scale(table, column)
    bounds = [_rounded(scale * x) for x in cell.interval or ()] or ["", ""]
    note = "; ".join(measured.notes[mark] for mark in cell.marks)
    return [_rounded(scale * cell.value), *bounds, cell.n or "", note]


def _rounded(value):
    """Return a number without the noise of binary fractions, for a file."""
    return round(value, 6)


def panels_of(table: PaperTable, measured: Measured | None) -> list[Panel]:
    """Return the panels of a table's figure: one for each curve, or for each metric.

    Rows of the same run share one line. Columns of the embedded world, for which no
    paper has numbers, get panels of their own.
    """
    rows = [*enumerate(table.rows)]
    if table.curves:
        lines: dict[str, dict] = {name: {} for name in table.curves}
        for i, row in rows if measured else ():
            for name, points in measured.curves.get(row.key, {}).items():
                members = lines[name].setdefault(tuple(map(tuple, points)), [])
                members.append((i, _label(table, row)))
        return [
            Panel(
                name,
                (),
                [_line(points, *members) for points, members in curve_lines.items()],
            )
            for name, curve_lines in lines.items()
            if curve_lines
        ]
    groups: dict[tuple, list[PaperColumn]] = {}
    for column in table.columns:
        if not column.mean_of:
            key = column.metric, is_world_column(column)
            groups.setdefault(key, []).append(column)
    panels = []
    for (metric, is_world), columns in groups.items():
        series = [
            bars
            for i, row in rows
            for bars in _bars(table, i, row, columns, measured)
            if any(value is not None for value in bars.values)
        ]
        if series:
            title = f"{metric}, embedded world" if is_world else metric
            panels.append(Panel(title, [column.name for column in columns], series))
    return panels


def _line(points, *members):
    """Return the line of rows, each (number, label), that share these points."""
    (number, _), *_ = members
    return Line(", ".join(label for _, label in members), number, points)


def _label(table, row):
    """Return a row's label, with its key if several rows share the label."""
    is_shared = [r.label for r in table.rows].count(row.label) > 1
    return f"{row.label} ({row.key})" if is_shared else row.label


def _bars(table, number, row, columns, measured):
    """Return a row's bars, the paper's and ours, in the table's unit."""
    numbers = dict(zip(table.columns, row.numbers, strict=True))
    paper = [None if numbers[c] == NO_NUMBER else float(numbers[c]) for c in columns]
    values, intervals = [], []
    for column in columns:
        cell = measured.cells.get((row.key, column.name)) if measured else None
        scale = _scale(table, column)
        values.append(cell and scale * cell.value)
        bounds = cell.interval if cell else None
        intervals.append(bounds and tuple(scale * bound for bound in bounds))
    label = _label(table, row)
    no_intervals = [None] * len(columns)
    return (
        Bars(label, number, paper, no_intervals, True),
        Bars(label, number, values, intervals, False),
    )
