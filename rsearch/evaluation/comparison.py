"""The rows of a comparison of runs, and their tables: see `rsearch.compare`."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rsearch.evaluation.comparability import RowFacts, shown_fields, value_text
from rsearch.evaluation.pairs import SEED_SCORES, PairedRows, SeedPairs
from rsearch.evaluation.runs import ComparedRun

SCORES = ("em", "f1", "cover_em")
SETTING = "setting"  # what a row's evaluation changed in the run's configuration
EM_BEFORE = "em_before"  # the exact match of the same method at the run's start
JUDGE_SCORES = ("judge", "judge_agreement")
JUDGE_COUNTS = ("judge_unparsed", "judge_failed")
PERCENT = (*SCORES, EM_BEFORE, *JUDGE_SCORES)
COUNTS = ("searches", "queries", "searches_right", "searches_wrong")
NUMBERS = ("n", *PERCENT, *JUDGE_COUNTS, *COUNTS)
HEADINGS = {
    "n": "n",
    "em": "EM",
    EM_BEFORE: "EM before",
    "f1": "F1",
    "cover_em": "cover-EM",
    "judge": "judge",
    "judge_agreement": "judge = EM",
    "judge_unparsed": "unparsed",
    "judge_failed": "failed",
    "searches": "searches",
    "queries": "queries",
    "searches_right": "when right",
    "searches_wrong": "when wrong",
}
# Columns that may be hidden on a narrow terminal, the most important first.
OPTIONAL = ("searches", "F1", "EM before", "seed", "judge", "cover-EM", "recipe")
OPTIONAL += ("queries", "judge = EM", "when right", "when wrong", "unparsed", "failed")


class Grid(NamedTuple):
    """A table of texts.

    Attributes:
        lines: the texts of each line's cells.
        num_text_columns: number of columns of text, from the left; the others are
            numbers.
        optional: headings that a narrow terminal may lack, most important first.
    """

    title: str
    columns: list[str]
    lines: list[list[str]]
    num_text_columns: int
    optional: tuple = ()


class Entry(NamedTuple):
    """A row of a run's results, or its values for one kind of question.

    Attributes:
        facts: how the row was measured.
        labels: its labels without the seed; see `_label_names`.
        values: {name: number}.
    """

    run: ComparedRun
    row: dict
    facts: RowFacts
    labels: tuple
    values: dict

    @property
    def seed(self) -> int:
        """The seed of its run."""
        return self.run.config["seed"]


class ResultRow(NamedTuple):
    """A line of the table: its labels, and {name: number or None}."""

    labels: tuple
    values: dict


def single_row(entry: Entry) -> ResultRow:
    """Return one run's row, with None for numbers that older results lack."""
    numbers = {name: entry.values.get(name) for name in NUMBERS}
    intervals = {f"{name}_95": entry.values.get(f"{name}_95") for name in SCORES}
    return ResultRow((*entry.labels, entry.seed), {**numbers, **intervals})


def mean_row(group: Sequence[Entry]) -> ResultRow:
    """Return one row for entries with the same labels: (mean, deviation) pairs.

    The sample standard deviation of a single run is None. The row's labels end with the
    number of runs.
    """
    values = {}
    for name in NUMBERS:
        numbers = [e.values[name] for e in group if e.values.get(name) is not None]
        mean = statistics.fmean(numbers) if numbers else None
        values[name] = mean, statistics.stdev(numbers) if len(numbers) > 1 else None
    return ResultRow((*group[0].labels, len(group)), values)


def values_by_seed(group: Sequence[Entry]) -> dict[tuple, list[dict]]:
    """Return {key of a seed and its questions: values of each entry with them}."""
    seeds: dict[tuple, list[dict]] = {}
    for entry in group:
        questions = entry.row.get("questions")
        if isinstance(questions, str):  # older runs do not record them
            kind = entry.labels[-1]
            seeds.setdefault((entry.seed, questions, kind), []).append(entry.values)
    return seeds


def _label_names(*, is_grouped: bool) -> tuple[str, ...]:
    """Return the names of the values in a row's `labels`.

    Args:
        is_grouped: whether rows are means over runs.
    """
    names = ("recipe", "stage", "method", "dataset", SETTING, "kind")
    return (*names, "runs") if is_grouped else ("run", *names, "seed")


def results_grid(
    rows: Sequence[ResultRow], *, num_runs: int, is_grouped: bool, by_kind: bool
) -> Grid:
    """Return the table of results without columns whose values are all the same.

    Args:
        num_runs: number of runs that the rows are about.
        is_grouped: whether rows are means over runs.
        by_kind: whether rows are about kinds of questions.
    """
    names = _label_names(is_grouped=is_grouped)
    required_columns = (names[0], "stage", names[-1])
    shown_columns = []
    for i, name in enumerate(names):
        values = {row.labels[i] for row in rows}
        # A setting is shown even if all rows share it: the title does not name it.
        is_shown = any(values) if name == SETTING else len(values) > 1
        if name in required_columns or is_shown:
            shown_columns.append(i)
    shows_interval = not is_grouped and not by_kind
    shows_start = any(_mean_of(row.values[EM_BEFORE]) is not None for row in rows)
    leading_columns = ("n", EM_BEFORE, "em") if shows_start else ("n", "em")
    columns = [names[i] for i in shown_columns]
    columns += [HEADINGS[name] for name in leading_columns]
    columns += ["95 % interval"] if shows_interval else []
    is_judged = any(_mean_of(row.values[JUDGE_SCORES[0]]) is not None for row in rows)
    judge_columns = [*JUDGE_SCORES, *JUDGE_COUNTS] if is_judged else []
    scores = [*SCORES[1:], *judge_columns, *COUNTS]
    if by_kind:
        scores = [*SCORES[1:], COUNTS[0]]
    columns += [HEADINGS[name] for name in scores]
    lines = []
    for row in rows:
        line = [str(row.labels[i]) for i in shown_columns]
        line += [format_value(name, row.values[name]) for name in leading_columns]
        if shows_interval:
            bounds = (f"{100 * bound:.1f}" for bound in row.values["em_95"] or ())
            line.append(" - ".join(bounds) or "-")
        lines.append(line + [format_value(name, row.values[name]) for name in scores])
    common_values = [
        rows[0].labels[i]
        for i, name in enumerate(names)
        if name in ("method", "dataset") and i not in shown_columns
    ]
    count = "1 run" if num_runs == 1 else f"{num_runs} runs"
    title = f"{count}, scores in percent: {', '.join(common_values)}"
    # Grouped rows may differ only in the recipe's name, so it is never hidden. Nor are
    # failed calls of a judge: its score is a mean over the others.
    is_partial = any(_mean_of(row.values["judge_failed"]) for row in rows)
    never_hidden = (names[0], HEADINGS["judge_failed"]) if is_partial else names[:1]
    optional = [c for c in OPTIONAL if c in columns and c not in never_hidden]
    title = title.removesuffix(": ")  # if there are no common values
    return Grid(title, columns, lines, len(shown_columns), tuple(optional))


def row_records(
    rows: Sequence[ResultRow], entries: Sequence[Entry], *, is_grouped: bool
) -> list[dict]:
    """Return an object for each row, as written to JSON and CSV: with fractions.

    Args:
        entries: unless rows are means over runs, the entry of each row.
    """
    names = _label_names(is_grouped=is_grouped)
    records = []
    for i, row in enumerate(rows):
        record = dict(zip(names, row.labels, strict=True))
        if is_grouped:
            for name, (mean, deviation) in row.values.items():
                record |= {name: mean, f"{name}_sd": deviation}
        else:
            record = {"directory": str(entries[i].run.path), **record, **row.values}
            for name in SCORES:
                low, high = record.pop(f"{name}_95") or (None, None)
                record |= {f"{name}_low": low, f"{name}_high": high}
        records.append(record)
    return records


def provenance_grid(names: Sequence[str], groups: Sequence[Sequence[Entry]]) -> Grid:
    """Return the table of differences in how rows were made that no column shows.

    Args:
        names: from `names_of`.
        groups: the entries of each row.
    """
    columns = {}
    for field in shown_fields([entry.facts for group in groups for entry in group]):
        column = [_values_of(field, group) for group in groups]
        if len({*column}) > 1:  # otherwise only the seeds within rows differ
            columns[field] = column
    lines = [list(line) for line in zip(names, *columns.values(), strict=True)]
    headings = ["row", *columns]
    return Grid("what else differs", headings, lines if columns else [], len(headings))


def config_grid(names: Sequence[str], differing_fields: Mapping[str, Sequence]) -> Grid:
    """Return the table of the fields in which the runs' configurations differ.

    Args:
        names: names of the runs.
        differing_fields: {field: its value in each run}.
    """
    lines = [[field, *map(value_text, v)] for field, v in differing_fields.items()]
    columns = ["field", *names]
    return Grid("fields of config.json that differ", columns, lines, len(columns))


def pairs_grid(names: Sequence[str], pairs: Sequence[PairedRows]) -> Grid:
    """Return the table of differences between rows on the same questions.

    Args:
        names: from `names_of`.
    """
    lines = []
    for pair in pairs:
        line = [names[pair.row], names[pair.baseline], str(pair.n)]
        line += _format_difference(*pair.differences["em"])
        line.append(pair.p_text or "-")
        lines.append(line + _format_difference(*pair.differences["f1"]))
    columns = ["row", "minus", "n", "EM difference", "95 % interval", "McNemar's p"]
    optional = ("F1 difference", "F1 interval")
    title = "differences on the same questions, in percentage points"
    return Grid(title, [*columns, *optional], lines, 2, optional)


def seeds_grid(names: Sequence[str], pairs: Sequence[SeedPairs]) -> Grid:
    """Return the table of differences between rows that are means over seeds.

    Args:
        names: from `names_of`.
    """
    columns = ["row", "minus", "seeds"]
    for name in SEED_SCORES:
        columns += [f"{HEADINGS[name]} difference", f"{HEADINGS[name]} interval"]
    lines = []
    for pair in pairs:
        line = [names[pair.row], names[pair.baseline], str(pair.n)]
        for name in SEED_SCORES:
            scale = 100 if name in PERCENT else 1
            value = pair.differences.get(name)
            line += _format_difference(*value, scale=scale) if value else ["-", "-"]
        lines.append(line)
    title = "differences on the same seeds, in percentage points and in searches"
    return Grid(title, columns, lines, 2, ("F1 difference", "F1 interval"))


def names_of(rows: Sequence[ResultRow], *, is_grouped: bool) -> list[str]:
    """Return a name that distinguishes each row; if need be, its run or recipe.

    Seeds are left out and, unless rows are grouped, recipes: the run implies them.
    """
    skipped_names = () if is_grouped else ("recipe",)
    columns = [
        i
        for i, name in enumerate(_label_names(is_grouped=is_grouped)[:-1])
        if name not in skipped_names and len({row.labels[i] for row in rows}) > 1
    ]
    names = [" ".join(filter(None, (row.labels[i] for i in columns))) for row in rows]
    return [name or row.labels[0] for name, row in zip(names, rows, strict=True)]


def _values_of(field, group):
    """Return a field's value in the runs of one row, or the number of its values."""
    all_fields = [entry.facts.other_fields for entry in group]
    values = {value_text(fields[field]) for fields in all_fields if field in fields}
    return f"{len(values)} values" if len(values) > 1 else "".join(values) or "-"


def _format_difference(value, interval, *, scale=100):
    decimals = 1 if scale == 100 else 2
    value, *bounds = (f"{scale * x:+.{decimals}f}" for x in (value, *(interval or ())))
    return [value, " to ".join(bounds) or "-"]


def format_value(name: str, value: float | tuple | None) -> str:
    """Return a number, or mean +- deviation, formatted for the table."""
    if isinstance(value, tuple):
        mean, deviation = value
        if name == "n" or deviation is None:
            return format_value(name, mean)
        return f"{format_value(name, mean)} ± {format_value(name, deviation)}"
    if value is None:
        return "-"
    if name == "n" or (name in JUDGE_COUNTS and value == int(value)):
        return f"{value:.0f}"
    return f"{100 * value:.1f}" if name in PERCENT else f"{value:.2f}"


def _mean_of(value):
    return value[0] if isinstance(value, tuple) else value
