"""Print one table over several runs: python -m rsearch.compare DIR DIR... [--group]

Each DIR is a run's directory or a folder of such directories. By default a row is about
the last stage that was evaluated, with the policy's own protocol. --stage, --method and
--dataset choose other rows, or "all"; the last two take lists, a,b,... of names, which
may lack a path's folders or a method's settings. A row is named after its run and,
where recipes or their fields differ, after the recipe with these fields; with --group
there is one row for each of those. The column `setting` shows what an evaluation
changed in the run's configuration; --setting chooses rows by it.

On a narrow terminal some columns are hidden; --wide shows them. --json, --csv,
--markdown and --latex print another format in place of the tables; --json=FILE writes
it to a file as well. CSV has only the rows. JSON and CSV have fractions, not percent.

Rows on the same questions are compared with the first of them, question by question:
the difference with its 95 % interval (paired bootstrap) and the p-value of McNemar's
exact test. stderr says why a row has no pair. With --group the differences are taken
seed by seed, with Student's t interval of their mean.

Rows of one dataset that were measured differently, with other questions, retrieval,
normaliser or judge, are refused, or marked if --allow=FIELD permits it. A table below
lists other differences in how rows were made, such as weights, budgets and code.
"""

import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rsearch.config.recipes import parse_flags, run_command
from rsearch.evaluation.comparability import (
    ENCODER,
    JUDGE_FIELDS,
    JUDGED_BY,
    MUST_BE_EQUAL,
    WEIGHTS,
    WORLD,
    RowFacts,
    disagreements,
    row_facts,
    shown_fields,
    value_text,
)
from rsearch.evaluation.figures import SUFFIXES
from rsearch.evaluation.pairs import (
    SEED_SCORES,
    compare_over_seeds,
    notes_on_means,
    pair_rows,
)
from rsearch.evaluation.predictions import RUN, run_key
from rsearch.evaluation.runs import (
    ALL,
    LAST,
    ComparedRun,
    config_difference,
    find_runs,
    label_of,
    label_runs,
    read_run,
    run_names,
    select_rows,
    split_names,
    stages_of,
    start_row,
)
from rsearch.runtime.console import clean_line, note, table
from rsearch.runtime.files import check_output, replace
from rsearch.runtime.identity import describe_start
from rsearch.runtime.markup import (
    csv_table,
    latex_table,
    latex_text,
    markdown_table,
    markdown_text,
)
from rsearch.text.spelling import did_you_mean

SCORES = ("em", "f1", "cover_em")
SETTING = "setting"  # what a row's evaluation changed in the run's configuration
EM_BEFORE = "em_before"  # the exact match of the same method at the run's start
JUDGE_SCORES = ("judge", "judge_agreement")
JUDGE_COUNTS = ("judge_unparsed", "judge_failed")
PERCENT = (*SCORES, EM_BEFORE, *JUDGE_SCORES)
COUNTS = ("searches", "queries", "searches_right", "searches_wrong")
REQUIRED = (*MUST_BE_EQUAL, ENCODER)
REQUIRED += tuple(f"{JUDGED_BY}.{name}" for name in (*JUDGE_FIELDS, WEIGHTS))
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
FORMATS = (("json", "JSON"), ("csv", "CSV"), ("markdown", "Markdown tables"))
FORMATS += (("latex", "LaTeX tables"),)
HINT = "--wide shows them"
TO_STDOUT = "-"  # value of a format's flag that names no file
# Columns that may be hidden on a narrow terminal, the most important first.
OPTIONAL = ("searches", "F1", "EM before", "seed", "judge", "cover-EM", "recipe")
OPTIONAL += ("queries", "judge = EM", "when right", "when wrong", "unparsed", "failed")
FLAGS = {
    "stage": (LAST, "a stage, 'start', 'last' or 'all'"),
    "method": ("protocol", "methods of config.eval.methods, a,b,..., or 'all'"),
    "dataset": (ALL, "datasets as named in results.json, a,b,..., or 'all'"),
    SETTING: (ALL, "the text of a row's setting, 'none' for rows without, or 'all'"),
    "by_kind": (False, "print a row for each kind of question"),
    "group": (False, "mean +- standard deviation over runs that differ in their seed"),
    "diff": (False, "add a table of the fields of config.json that differ"),
    "wide": (False, "show all columns even if the terminal is narrow"),
    **{name: ("", f"print {text}, or write it to =FILE") for name, text in FORMATS},
    "plot": ("", f"file to draw the runs' curves in: {', '.join(SUFFIXES)}"),
    "curves": ("", "metrics that --plot draws, a,b,...; empty = all that change"),
    "allow": (
        "",
        "fields that should be equal but may differ, or 'all'; such rows are marked",
    ),
}
MARKS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


class Grid(NamedTuple):
    """A table of texts.

    Attributes:
        lines: the texts of each line's cells.
        num_texts: number of columns, from the left, that hold no numbers.
        optional: headings that a narrow terminal may lack, most important first.
    """

    title: str
    columns: list[str]
    lines: list[list[str]]
    num_texts: int
    optional: tuple = ()


class ResultRow(NamedTuple):
    """A line of the table: its labels, and {name: number or None}."""

    labels: tuple
    values: dict


def main(argv: Sequence[str]) -> int:
    """Read the arguments and the runs, and print the table."""
    folders, words = [], []
    for word in argv:
        if word in [f"--{name}" for name, _ in FORMATS]:  # without a file
            word = f"{word}={TO_STDOUT}"
        (words if word.startswith("-") or _is_value(words) else folders).append(word)
    flags = parse_flags(words, flags=FLAGS)
    _check_outputs(flags)
    if not all(folders) or not folders:  # "" is not the working directory
        raise ValueError("no run's directory: python -m rsearch.compare DIR DIR...")
    needs_results = not flags["plot"]  # a run that is still training has curves
    runs = [read_run(path, needs_results=needs_results) for path in find_runs(folders)]
    names = run_names([run.path for run in runs])
    for run in [run for run in runs if not run.rows]:
        note(f"{run.path}: has no results yet; only its curves are drawn")
    if not any(run.rows for run in runs):
        _plot(runs, names, flags)
        return 0
    selection = _parse_selection(runs, flags)
    entries = [
        (run, (name, label), row)
        for run, name, label in zip(runs, names, label_runs(runs), strict=True)
        for row in select_rows(run, **selection)
    ]
    facts = [facts_of(run, row) for run, _, row in entries]
    marks, footnotes = marks_of(entries, facts, parse_allow(flags["allow"]))
    is_grouped = flags["group"]
    rows, sources, origins, by_seed = [], [], {}, {}
    for (run, labels, row), mark, origin in zip(entries, marks, facts, strict=True):
        row = _with_start(run, row, origin)
        first_label, *other_labels = labels[1:] if is_grouped else labels
        kinds = [*row.get("by_kind", {}).items(), *row.get("by_known", {}).items()]
        for kind, values in kinds if flags["by_kind"] else [("", row)]:
            row_key = (f"{first_label} {mark}".rstrip(), *other_labels)
            row_key += (row["stage"], row["method"], row["dataset"])
            row_key += (row.get("setting", ""), kind)
            origins.setdefault(row_key if is_grouped else len(rows), []).append(origin)
            if is_grouped:
                seeds, questions = by_seed.setdefault(row_key, {}), row.get("questions")
                if isinstance(questions, str):  # older runs do not record them
                    key = run.config["seed"], questions, kind
                    seeds.setdefault(key, []).append(values)
            rows.append((row_key, run.config["seed"], values))
            sources.append((run.path, row))
    words = " ".join(f"--{name}={flags[name]}" for name in selection)
    words += ", or kinds of questions for --by_kind" if flags["by_kind"] else ""
    if not rows:
        raise ValueError(f"no row of these runs has {words}")
    shown_paths = {path for path, _ in sources}
    for run in runs:
        if run.rows and run.path not in shown_paths:
            note(f"{run.path}: not in the table: no row has {words}")
    if is_grouped:
        footnotes += notes_on_means(rows, {name: HEADINGS[name] for name in PERCENT})
    rows = group_rows(rows) if is_grouped else [_single_row(*row) for row in rows]
    grids = [_results_grid(rows, flags, num_runs=len(shown_paths))]
    row_names, pairs = _names_of(rows, is_grouped=is_grouped), []
    if len(rows) > 1 and not flags["by_kind"]:
        grids.append(_provenance_grid(row_names, [*origins.values()]))
    if is_grouped:
        pairs = compare_over_seeds([*by_seed.values()])
        grids.append(_seeds_grid(row_names, pairs))
    elif len(rows) > 1 and not flags["by_kind"]:
        pairs, unpaired = pair_rows(sources)
        for reason, count in Counter(unpaired.values()).items():
            note(f"{count} of {len(rows)} rows are not paired: {reason}")
        grids.append(_pairs_grid(row_names, pairs))
    differing_fields = config_difference(runs) if flags["diff"] else {}
    if flags["diff"]:
        grids.append(_config_grid(names, differing_fields))
    grids = [grid for grid in grids if grid.lines]
    document = {
        "rows": _records(rows, [path for path, _ in sources], is_grouped=is_grouped),
        "notes": footnotes,
        "differences": [pair._asdict() for pair in pairs],
        "config": {field: dict(zip(names, v)) for field, v in differing_fields.items()},
    }
    _show(grids, footnotes, document, flags)
    if flags["plot"]:
        _plot(runs, names, flags)
    return 0


def _plot(runs, names, flags):
    """Draw the runs' curves in a file."""
    from rsearch.evaluation.curves import plot  # imports matplotlib

    path, metrics = flags["plot"], split_names(flags["curves"], ())
    folders = {name: run.path for name, run in zip(names, runs, strict=True)}
    replace(path, plot(path, folders, stages_of(runs), metrics))
    note(f"written: {path}")


def _full_name(name, known_names):
    """Return the only known name that this one abbreviates, else the name itself.

    A path is abbreviated to its file name, and a method with settings to its name.
    """
    full_names = [
        known
        for known in known_names
        if known.endswith(f"/{name}") or known.startswith(f"{name}:")
    ]
    is_clear = name not in (ALL, *known_names) and len(full_names) == 1
    return full_names[0] if is_clear else name


def _parse_selection(runs, flags):
    """Return the arguments of `select_rows` that the flags name."""
    selection = {field: flags[field] for field in ("stage", SETTING)}
    for field in ("stage", "method", "dataset", SETTING):
        known_names = sorted({label_of(row, field) for run in runs for row in run.rows})
        names = [flags[field]]
        if field not in selection:
            names = split_names(flags[field], known_names)
            names = selection[field] = [_full_name(name, known_names) for name in names]
        for name in names:
            if name not in (ALL, *known_names) and (field, name) != ("stage", LAST):
                hint = did_you_mean(name, known_names)
                # A setting may contain commas itself.
                name_list = ("; " if field == SETTING else ", ").join(known_names)
                raise ValueError(f"--{field}={name}: the runs have {name_list}{hint}")
    return selection


def _check_outputs(flags):
    """Refuse files that cannot be written, and several formats on stdout."""
    formats = [f"--{name}" for name, _ in FORMATS if flags[name] == TO_STDOUT]
    if len(formats) > 1:
        raise ValueError(f"{' and '.join(formats)} would mix: name files, --csv=FILE")
    for name in ("plot", *dict(FORMATS)):
        if flags[name] not in ("", TO_STDOUT):
            check_output(name, flags[name])
    if flags["curves"] and not flags["plot"]:
        raise ValueError(f"--curves={flags['curves']}: needs --plot=FILE")
    if flags["plot"] and not flags["plot"].endswith(SUFFIXES):
        raise ValueError(f"--plot={flags['plot']}: must end in {' or '.join(SUFFIXES)}")


def _is_value(words):
    """Return whether the next word is the value of the last one, as in --stage rl."""
    if not words or not words[-1].startswith("--") or "=" in words[-1]:
        return False
    return isinstance(FLAGS.get(words[-1][2:], (True,))[0], str)


def _with_start(run, row, facts):
    """Return a row with the exact match at its run's start, overall and by kind.

    The value is None if the start was not measured, or was measured differently.
    """
    start = start_row(run, row) or {}
    if start and (reasons := disagreements([facts, facts_of(run, start)])[1]):
        name = clean_line(", ".join(filter(None, run_key(row)[1:])))
        reason = f"no {HEADINGS[EM_BEFORE]}: at the start, {reasons[0]}"
        note(f"{run.path}: {name}: {reason}")
        start = {}
    extended_row = {**row, EM_BEFORE: start.get("em")}
    for name in ("by_kind", "by_known"):
        start_values = start.get(name, {})
        extended_row[name] = {
            kind: {**values, EM_BEFORE: start_values.get(kind, {}).get("em")}
            for kind, values in row.get(name, {}).items()
        }
    return extended_row


def facts_of(run: ComparedRun, row: dict) -> RowFacts:
    """Return how a row was measured, from the row and its entry in run.json."""
    facts = row_facts(row, run.config)
    start = describe_start(run.path, row.get("start"))
    return facts._replace(other_fields={**facts.other_fields, **start})


def marks_of(
    measured: Sequence[tuple], facts: Sequence[RowFacts], allowed: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return a mark for each row, "" for most, and the footnotes of the marks.

    Args:
        measured: (run, label, row) of each row.
        facts: how each row was measured; see `facts_of`.
        allowed: see `parse_allow`.

    Raises:
        ValueError: a row differs in a field that must be equal and is not allowed to
            differ.
    """
    row_differences = disagreements(facts)
    refused_differences = [
        (i, difference)
        for i, differences in enumerate(row_differences)
        for difference in differences
        if not _is_allowed(difference.field, allowed)
    ]
    if refused_differences:
        i, first = refused_differences[0]
        rows = [
            f"{run.path} ({', '.join(value_text(row[n]) for n in RUN if row.get(n))}, "
            f"{_format_value('n', row.get('n'))} questions)"
            for run, _, row in (measured[i], measured[first.position])
        ]
        fields = ",".join(dict.fromkeys(d.field for _, d in refused_differences))
        settings = {label_of(row, SETTING) for _, _, row in measured}
        choice = f"--{SETTING} chooses between settings, " if len(settings) > 1 else ""
        raise ValueError(
            f"{first.field} = {value_text(first.value)} in {rows[0]}, "
            f"{value_text(first.other)} in {rows[1]}: must be equal in one table; "
            f"{choice}--allow={fields} marks what differs"
        )
    marks, texts = [], {}
    for differences, origin in zip(row_differences, facts, strict=True):
        reasons = [str(difference) for difference in differences]
        if origin.missing:
            reasons.append(f"not recorded: {', '.join(origin.missing)}")
        number = texts.setdefault("; ".join(reasons), len(texts) + 1) if reasons else ""
        marks.append(str(number).translate(MARKS))
    footnotes = [f"{str(n).translate(MARKS)} {text}" for text, n in texts.items()]
    return marks, footnotes


def parse_allow(text: str) -> list[str]:
    """Return the words of --allow.

    Raises:
        ValueError: a word names no field or section of fields that must be equal.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    sections = {name.partition(".")[0] for name in REQUIRED}
    names = sorted({ALL, WORLD, *REQUIRED, *sections})
    for word in words:
        if word not in names and not word.startswith(f"{WORLD}."):
            hint = did_you_mean(word, names)
            raise ValueError(f"--allow={word}: must be one of {', '.join(names)}{hint}")
    return words


def _is_allowed(field, words):
    """Return whether --allow names a field, its section or all fields."""
    return not {ALL, field, field.partition(".")[0]}.isdisjoint(words)


def _single_row(row_key, seed, values) -> ResultRow:
    """Return one run's row, with None for numbers that older results lack."""
    numbers = {name: values.get(name) for name in NUMBERS}
    intervals = {f"{name}_95": values.get(f"{name}_95") for name in SCORES}
    return ResultRow((*row_key, seed), {**numbers, **intervals})


def group_rows(rows: Sequence[tuple]) -> list[ResultRow]:
    """Return one row for each key: means and deviations over its runs.

    Args:
        rows: (key, seed, values) of each run.

    Returns:
        Rows whose values are (mean, sample standard deviation) pairs; the deviation of
        a single run is None. Their `labels` end with the number of runs.
    """
    values_by_key: dict = {}
    for row_key, _, values in rows:
        values_by_key.setdefault(row_key, []).append(values)
    means = []
    for row_key, run_values in values_by_key.items():
        values = {}
        for name in NUMBERS:
            numbers = [v[name] for v in run_values if v.get(name) is not None]
            mean = statistics.fmean(numbers) if numbers else None
            values[name] = mean, statistics.stdev(numbers) if len(numbers) > 1 else None
        means.append(ResultRow((*row_key, len(run_values)), values))
    return means


def _label_names(*, is_grouped):
    """Return the names of the values in a row's `labels`."""
    names = ("recipe", "stage", "method", "dataset", SETTING, "kind")
    return (*names, "runs") if is_grouped else ("run", *names, "seed")


def _results_grid(rows, flags, *, num_runs) -> Grid:
    """Return the table of results without columns whose values are all the same."""
    names = _label_names(is_grouped=flags["group"])
    required_columns = (names[0], "stage", names[-1])
    shown_columns = []
    for i, name in enumerate(names):
        values = {row.labels[i] for row in rows}
        # A setting is shown even if all rows share it: the title does not name it.
        is_shown = any(values) if name == SETTING else len(values) > 1
        if name in required_columns or is_shown:
            shown_columns.append(i)
    shows_interval = not flags["group"] and not flags["by_kind"]
    shows_start = any(_mean_of(row.values[EM_BEFORE]) is not None for row in rows)
    leading_columns = ("n", EM_BEFORE, "em") if shows_start else ("n", "em")
    columns = [names[i] for i in shown_columns]
    columns += [HEADINGS[name] for name in leading_columns]
    columns += ["95 % interval"] if shows_interval else []
    is_judged = any(_mean_of(row.values[JUDGE_SCORES[0]]) is not None for row in rows)
    judge_columns = [*JUDGE_SCORES, *JUDGE_COUNTS] if is_judged else []
    scores = [*SCORES[1:], *judge_columns, *COUNTS]
    if flags["by_kind"]:
        scores = [*SCORES[1:], COUNTS[0]]
    columns += [HEADINGS[name] for name in scores]
    lines = []
    for row in rows:
        line = [str(row.labels[i]) for i in shown_columns]
        line += [_format_value(name, row.values[name]) for name in leading_columns]
        if shows_interval:
            bounds = (f"{100 * bound:.1f}" for bound in row.values["em_95"] or ())
            line.append(" - ".join(bounds) or "-")
        lines.append(line + [_format_value(name, row.values[name]) for name in scores])
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
    num_texts = len(shown_columns)
    return Grid(title.removesuffix(": "), columns, lines, num_texts, tuple(optional))


def _records(rows, paths, *, is_grouped):
    """Return an object for each row, as written to JSON and CSV: with fractions."""
    names = _label_names(is_grouped=is_grouped)
    records = []
    for i, row in enumerate(rows):
        record = dict(zip(names, row.labels, strict=True))
        if is_grouped:
            for name, (mean, deviation) in row.values.items():
                record |= {name: mean, f"{name}_sd": deviation}
        else:
            record = {"directory": str(paths[i]), **record, **row.values}
            for name in SCORES:
                low, high = record.pop(f"{name}_95") or (None, None)
                record |= {f"{name}_low": low, f"{name}_high": high}
        records.append(record)
    return records


def _show(grids, footnotes, document, flags):
    """Print the tables, or write them in the formats that the flags name."""
    formats = {
        "json": lambda: json.dumps(document, indent=2, allow_nan=False) + "\n",
        "csv": lambda: csv_table(
            [*document["rows"][0]], [row.values() for row in document["rows"]]
        ),
        "markdown": lambda: _markdown(grids, footnotes),
        "latex": lambda: _latex(grids, footnotes),
    }
    for name, make_text in formats.items():
        if flags[name] == TO_STDOUT:
            print(make_text(), end="")
        elif flags[name]:
            replace(flags[name], make_text().encode())
            note(f"written: {flags[name]}")
    if TO_STDOUT in [flags[name] for name in formats]:
        return
    for i, grid in enumerate(grids):
        settings = {"optional": grid.optional, "is_wide": flags["wide"]}
        table(grid.title, grid.columns, grid.lines, hint=HINT, **settings)
        for text in footnotes if i == 0 else ():
            print(f"\n{clean_line(text)}")


def _markdown(grids, footnotes):
    first, *rest = (markdown_table(grid.columns, grid.lines) for grid in grids)
    return "\n".join([first, *(f"{markdown_text(t)}\n" for t in footnotes), *rest])


def _latex(grids, footnotes):
    first, *rest = (
        latex_table(grid.columns, grid.lines, num_texts=grid.num_texts)
        for grid in grids
    )
    notes = (f"{latex_text(text)}\\par\n" for text in footnotes)
    return "\n".join([first, *notes, *rest])


def _provenance_grid(names, origins) -> Grid:
    """Return the table of differences in how rows were made that no column shows.

    Args:
        origins: for each row, the facts of its runs.
    """
    columns = {}
    for field in shown_fields([facts for group in origins for facts in group]):
        column = [_values_of(field, group) for group in origins]
        if len({*column}) > 1:  # otherwise only the seeds within rows differ
            columns[field] = column
    lines = [list(line) for line in zip(names, *columns.values(), strict=True)]
    headings = ["row", *columns]
    return Grid("what else differs", headings, lines if columns else [], len(headings))


def _config_grid(names, differing_fields) -> Grid:
    """Return the table of the fields in which the runs' configurations differ."""
    if not differing_fields:
        note("--diff: the configurations are the same")
    lines = [[field, *map(value_text, v)] for field, v in differing_fields.items()]
    columns = ["field", *names]
    return Grid("fields of config.json that differ", columns, lines, len(columns))


def _values_of(field, facts):
    """Return a field's value in the runs of one row, or the number of its values."""
    values = {
        value_text(f.other_fields[field]) for f in facts if field in f.other_fields
    }
    return f"{len(values)} values" if len(values) > 1 else "".join(values) or "-"


def _pairs_grid(names, pairs) -> Grid:
    """Return the table of differences between rows on the same questions."""
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


def _seeds_grid(names, pairs) -> Grid:
    """Return the table of differences between rows that are means over seeds."""
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


def _names_of(rows, *, is_grouped):
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


def _format_difference(value, interval, *, scale=100):
    decimals = 1 if scale == 100 else 2
    value, *bounds = (f"{scale * x:+.{decimals}f}" for x in (value, *(interval or ())))
    return [value, " to ".join(bounds) or "-"]


def _format_value(name, value):
    """Return a number, or mean +- deviation, formatted for the table."""
    if isinstance(value, tuple):
        mean, deviation = value
        if name == "n" or deviation is None:
            return _format_value(name, mean)
        return f"{_format_value(name, mean)} ± {_format_value(name, deviation)}"
    if value is None:
        return "-"
    if name == "n" or (name in JUDGE_COUNTS and value == int(value)):
        return f"{value:.0f}"
    return f"{100 * value:.1f}" if name in PERCENT else f"{value:.2f}"


def _mean_of(value):
    return value[0] if isinstance(value, tuple) else value


if __name__ == "__main__":
    sys.exit(run_command(main))
