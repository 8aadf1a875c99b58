"""Show a paper's table next to rows measured here: python -m rsearch.tables TABLE

    python -m rsearch.tables --list
    python -m rsearch.tables rag_r1:3
    python -m rsearch.tables rag_r1:3 --runs=runs/baselines,mq=runs/rag_r1 --out=3.md
    python -m rsearch.tables rag_r1:3 --dry_run --topology=a100x8
    python -m rsearch.tables rag_r1:3,rag_r1:4 --size=tiny --at_once=2

The tables are data in configs/tables. With --runs, our lines follow each row of the
paper: the score, its 95 % interval if results.json has it, and the number of questions.
A cell that no run has measured is empty. docs/tables.md says which rows of results.json
count for which row of a table. With --size=tiny the recipes of all rows are trained and
evaluated on the embedded world, except for what is done already; the same command
resumes after an interruption. --config.FIELD=VALUE then applies to all runs.
"""

import pathlib
import statistics
import sys
from collections.abc import Sequence

from rsearch.config.recipes import parse_flags, run_command
from rsearch.evaluation import figures
from rsearch.evaluation.table_cells import (
    OURS,
    PAPER,
    Cell,
    Measured,
    column_spans,
    csv_tables,
    latex_tables,
    made_by_text,
    markdown_tables,
    panels_of,
    remark_lines,
    span_lines,
    table_lines,
)
from rsearch.evaluation.table_rows import (
    has_settings,
    is_of_row,
    is_of_set,
    is_run_of_row,
    number_of,
    settings_of,
)
from rsearch.evaluation.tables import (
    PaperTable,
    curve_means,
    find_row,
    find_table,
    read_row_curves,
    read_tables,
    with_curve_columns,
)
from rsearch.runtime import console, files

FORMATS = (".md", ".csv", ".tex")
FULL, TINY = "full", "tiny"  # values of --size
FLAGS = {
    "list": (False, "list every table with how many of its rows this package makes"),
    "runs": (
        "",
        "directories of runs, a,b,...; KEY=DIR is read only for the row KEY; with "
        "--size=tiny: runs that are not trained again",
    ),
    "setting": ("", "only results with this `setting`; '-' = the run's configuration"),
    "allow": ("", "as for rsearch.compare: marks rows that differ in these fields"),
    "size": (FULL, "'tiny': train and evaluate on the embedded world what rows need"),
    "workdir": ("runs/tables", "with --size=tiny: parent directory of the runs"),
    "at_once": (1, "with --size=tiny: number of runs at the same time", 1),
    "dry_run": (False, "list the runs and evaluations that all rows need"),
    "topology": ("", "with --dry_run: add hours on a machine, a100x8, v5p-32, ..."),
    "max_questions": (
        0,
        "with --dry_run or --size=tiny: most questions of a set; 0 = all",
        0,
    ),
    "out": ("", f"file to write the tables to: {', '.join(FORMATS)}"),
    "plot": ("", f"file to draw the table in: {', '.join(figures.SUFFIXES)}"),
}
FIELD = "--config."  # prefix of an argument for all runs
# Fields that select the questions; all rows of a table answer the same.
QUESTIONS_FIELDS = ("data.dev", "eval.draw_seed", "eval.max_questions")
RUNS_SETTING = "-"  # value of --setting for rows that have none


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` as in `rsearch.config.recipes.parse_flags`."""
    positional = () if "--list" in argv else ("table",)
    settings = [word for word in argv if word.startswith(FIELD)]
    words = [word for word in argv if word not in settings]
    flags = parse_flags(words, flags=FLAGS, positional=positional)
    if flags["list"]:
        _print_list()
        return 0
    tables = {
        name: with_curve_columns(find_table(name)) for name in flags["table"].split(",")
    }
    out, plot = flags["out"], flags["plot"]
    for flag, suffixes in (("out", FORMATS), ("plot", figures.SUFFIXES)):
        path = flags[flag]
        if path and pathlib.Path(path).suffix not in suffixes:
            raise ValueError(
                f"--{flag}={path}: expected a name that ends in {' or '.join(suffixes)}"
            )
        if path:
            files.check_output(flag, path)
    _check_flags(flags, settings, tables)
    failed_runs, measurements = {}, dict.fromkeys(tables)
    if flags["size"] == TINY:
        overrides = [setting.removeprefix(FIELD) for setting in settings]
        tables, measurements, failed_runs = _fill_tables(tables, overrides, flags)
    elif flags["dry_run"]:
        # Imports jax, which --help should not wait for; likewise below.
        from rsearch.plan.table_runs import show_runs

        options = {n: flags[n] for n in ("topology", "max_questions")}
        show_runs(tables, **options)
    elif flags["runs"]:
        from rsearch.evaluation.runs import find_runs, read_run

        ((name, table),) = tables.items()
        keyed_runs = [
            (key, read_run(path))
            for key, folder in parse_runs(flags["runs"], table)
            for path in find_runs([folder])
        ]
        options = {n: flags[n] for n in ("setting", "allow")}
        measure = _measure_curves if table.curves else _measure
        measurements[name] = measure(table, keyed_runs, **options)
    if plot:
        ((name, table),) = tables.items()
        panels = panels_of(table, measurements[name])
        if not panels:
            raise ValueError(f"--plot={plot}: {name} has no numbers yet; see --runs")
        picture = figures.draw(
            pathlib.Path(plot).suffix, f"{name}: {table.title}", panels
        )
        files.replace(plot, picture)
        console.note(f"written: {plot}")
    if out:
        text = _FORMATTERS[pathlib.Path(out).suffix](tables, measurements)
        files.replace(out, text.encode())
        console.note(f"written: {out}")
    is_shown = not (out or plot or flags["dry_run"])
    for name, table in tables.items() if is_shown else ():
        _print_table(name, table, measurements[name])
    return 1 if failed_runs else 0


def _fill_tables(tables, settings, flags):
    """Train and evaluate what tables need on the embedded world; list it in a dry run.

    Args:
        settings: overrides "field=value" for all runs.

    Returns:
        {name: table at this size}, {name: our measurements}, and {run's name: exit
        code} of the runs that failed.
    """
    from rsearch import compare
    from rsearch.evaluation.runs import find_runs, read_run
    from rsearch.plan import tiny_tables

    compare.parse_allow(flags["allow"])  # fail now rather than after hours
    tables = {n: tiny_tables.tiny_table(n, t) for n, t in tables.items()}
    runs = tiny_tables.tiny_runs([*tables.values()], settings)
    max_questions, workdir = flags["max_questions"], files.expand(flags["workdir"])
    run_paths = [*filter(None, flags["runs"].split(","))]
    folders = tiny_tables.folders_of(
        runs,
        workdir,
        {path: read_run(path).config for path in find_runs(run_paths)},
        max_questions=max_questions,
    )
    if flags["dry_run"]:
        tiny_tables.show_jobs(runs, folders, max_questions)
        return tables, {}, {}
    failed_runs = tiny_tables.fill(
        runs, folders, workdir, at_once=flags["at_once"], max_questions=max_questions
    )
    measurements = {}
    for name, table in tables.items():
        sources = tiny_tables.find_results(table, settings, folders, max_questions)
        measurements[name] = _measure_tiny(table, sources, allow=flags["allow"])
    return tables, measurements, failed_runs


def _check_flags(flags, settings, tables):
    """Refuse flags that have no effect together with the others."""
    size, is_dry = flags["size"], flags["dry_run"]
    if size not in (FULL, TINY):
        raise ValueError(f"--size={size}: expected {FULL} or {TINY}")
    is_tiny = size == TINY
    flag_effects = {
        "runs": is_tiny or not is_dry,
        "setting": bool(flags["runs"]),
        "allow": bool(flags["runs"]) or is_tiny,
        "out": not is_dry,
        "plot": not is_dry,
        "topology": is_dry and not is_tiny,
        "max_questions": is_dry or is_tiny,
        "workdir": is_tiny,
        "at_once": is_tiny,
    }
    needs = {"setting": "--runs", "allow": "--runs or --size=tiny"}
    needs |= dict.fromkeys(("workdir", "at_once"), "--size=tiny")
    needs |= {
        "topology": "--dry_run without --size=tiny",
        "max_questions": "--dry_run or --size=tiny",
    }
    for flag, has_effect in flag_effects.items():
        if not has_effect and flags[flag] != FLAGS[flag][0]:
            mode = "--dry_run" if is_dry else f"--size={TINY}"
            reason = f"needs {needs[flag]}" if flag in needs else f"not with {mode}"
            raise ValueError(f"--{flag}={flags[flag]}: {reason}")
    if settings and not is_tiny:
        raise ValueError(f"{settings[0]}: needs --size=tiny")
    if valueless := [word for word in settings if "=" not in word]:
        raise ValueError(f"{valueless[0]} needs a value: {valueless[0]}=...")
    for setting in settings:
        if setting.removeprefix(FIELD).split("=")[0] in QUESTIONS_FIELDS:
            raise ValueError(
                f"{setting}: the tables choose the questions; --max_questions=N takes "
                "the first N"
            )
    for flag in ("plot",) if is_tiny else ("plot", "runs"):
        if flags[flag] and len(tables) > 1:
            raise ValueError(f"--{flag}={flags[flag]}: one table, not {len(tables)}")


def _print_list():
    """Print a line for each table."""
    rows = [
        [name, f"{sum(r.is_runnable for r in t.rows)} / {len(t.rows)}", t.title]
        for name, t in read_tables().items()
    ]
    console.table("tables of the papers", ["table", "rows we make", "measured"], rows)


def parse_runs(text: str, table: PaperTable) -> list[tuple[str, str]]:
    """Return the (row's key or "", directory) pairs of --runs.

    Args:
        text: the flag's value. A path that contains "=" needs a "/" before it.
        table: the table whose rows the keys name.

    Raises:
        ValueError: there is no such row.
    """
    pairs = []
    for word in filter(None, text.split(",")):
        key, equals, folder = word.partition("=")
        is_named = equals and "/" not in key
        pairs.append((find_row(table, key).key, folder) if is_named else ("", word))
    return pairs


def _measure(table, keyed_runs, *, setting, allow) -> Measured:
    """Return what runs have measured for a table.

    Args:
        keyed_runs: (row's key or "", ComparedRun) pairs.
        setting: setting of the results that count; "" counts all.
        allow: see `rsearch.compare.parse_allow`.

    Raises:
        ValueError: no result counts, two count for one cell, or rows differ in a field
            that must be equal.
    """
    from rsearch import compare

    sets = list(dict.fromkeys(column.set for column in table.columns if column.set))
    sources = {}
    for row in table.rows:
        for name in sets:
            if source := _choose_source(table, row, name, keyed_runs, setting):
                sources[row.key, name] = source
    used_paths = {run.path for run, _ in sources.values()}
    unused_paths = [
        str(run.path) for _, run in keyed_runs if run.path not in used_paths
    ]
    reason = "no row of its results counts for this table; docs/tables.md says which do"
    if not used_paths:
        raise ValueError(f"--runs: {', '.join(unused_paths)}: {reason}")
    for path in unused_paths:
        console.note(f"{path}: {reason}")
    facts = [
        compare.facts_of(run, result)._replace(dataset=name)
        for (_, name), (run, result) in sources.items()
    ]
    marks, notes = _marks([*sources.values()], facts, allow)
    cells = {}
    for ((key, name), (_, result)), mark in zip(sources.items(), marks, strict=True):
        cell_marks = [mark] if mark else []
        if difference := _differences_from_paper(table, result):
            cell_marks.append(_mark_of(notes, difference))
        for column in table.columns:
            value = number_of(result, column.metric) if column.set == name else None
            if value is not None:
                interval = result.get(f"{column.metric}_95")
                n = result.get("n") or 0
                cells[key, column.name] = Cell(value, interval, n, tuple(cell_marks))
    for column in table.columns:
        for row in table.rows if column.mean_of else ():
            set_cells = [cells.get((row.key, name)) for name in column.mean_of]
            if all(set_cells) and all(c.n for c in set_cells):
                marks = dict.fromkeys(m for cell in set_cells for m in cell.marks)
                weights = [c.n for c in set_cells] if column.by_questions else None
                mean = statistics.fmean([c.value for c in set_cells], weights)
                cells[row.key, column.name] = Cell(mean, marks=tuple(marks))
    return Measured(cells, {mark: text for text, mark in notes.items()})


def _measure_curves(table, keyed_runs, *, setting, allow) -> Measured:
    """Return the curves that runs have for a table.

    Args:
        keyed_runs: as for `_measure`.
        setting, allow: must be "", since curves are not read from results.json.

    Raises:
        ValueError: no run belongs to a row, or two runs belong to the same row.
    """
    for flag, value in (("setting", setting), ("allow", allow)):
        if value:
            raise ValueError(f"--{flag}={value}: has no effect on curves")
    folders = {}
    for row in table.rows:
        wanted_key = row.key if any(key == row.key for key, _ in keyed_runs) else ""
        settings = settings_of(table, row)
        for run in [run for key, run in keyed_runs if key == wanted_key]:
            if not (wanted_key or is_run_of_row(run.config, row, settings)):
                continue
            if row.key in folders:
                raise ValueError(
                    f"--runs: {folders[row.key]} and {run.path} both belong to the row "
                    f"{row.key!r}: name one run for it"
                )
            folders[row.key] = run.path
    measurement = _curves_of(table, folders)
    if not measurement.curves:
        raise ValueError("--runs: none of them belongs to a row and has its metrics")
    return measurement


def _curves_of(table, folders, remarks=()):
    """Return the curves of a table, and their means as cells.

    Args:
        folders: {row's key: run's directory}.
        remarks: see `Measured`.
    """
    curves, cells, notes, first_keys = {}, {}, {}, {}
    for row in table.rows:
        if row.key in folders:
            curves[row.key] = read_row_curves(table, row, folders[row.key])
            first_key = first_keys.setdefault((folders[row.key], row.stage), row.key)
            text = f"{first_key} and this row are the same run here"
            marks = (_mark_of(notes, text),) if first_key != row.key else ()
            for name, mean in curve_means(curves[row.key]).items():
                cells[row.key, name] = Cell(mean, marks=marks)
    notes = {mark: text for text, mark in notes.items()}
    curves = {key: row_curves for key, row_curves in curves.items() if row_curves}
    return Measured(cells, notes, remarks, curves)


def _marks(sources, facts, allow):
    """Return a mark for each row, "" if nothing differs, and {footnote: its mark}."""
    from rsearch import compare

    marks, footnotes = compare.marks_of(sources, facts, compare.parse_allow(allow))
    return marks, {t.partition(" ")[2]: t.partition(" ")[0] for t in footnotes}


def _mark_of(notes, text):
    """Return the mark of a note, which is added to `notes` if it is new."""
    from rsearch import compare

    return notes.setdefault(text, str(len(notes) + 1).translate(compare.MARKS))


def _measure_tiny(table, sources, *, allow) -> Measured:
    """Return what has been measured for a table on the embedded world.

    Args:
        table: see `rsearch.plan.tiny_tables.tiny_table`.
        sources: {row's key: (run's directory, row of results.json)}.
        allow: see `rsearch.compare.parse_allow`.
    """
    from rsearch import compare
    from rsearch.evaluation.runs import read_run
    from rsearch.plan import tiny_tables

    remarks = tiny_tables.remarks_of(table)
    if table.curves:
        folders = {key: path for key, (path, _) in sources.items()}
        return _curves_of(table, folders, remarks)
    entries = [(read_run(path), result) for path, result in sources.values()]
    facts = [compare.facts_of(run, result) for run, result in entries]
    marks, notes = _marks(entries, facts, allow)
    cells, first_keys = {}, {}
    for (key, (path, result)), mark in zip(sources.items(), marks, strict=True):
        cell_marks = [mark] if mark else []
        run_key = (path, *(result.get(name) for name in ("stage", "method", "setting")))
        if (first_key := first_keys.setdefault(run_key, key)) != key:
            cell_marks.append(
                _mark_of(notes, f"{first_key} and this row are the same run here")
            )
        if too_long := result.get("too_long"):
            text = f"{too_long} of {result['n']} questions do not fit into the prompt"
            cell_marks.append(_mark_of(notes, text))
        for column in table.columns:
            if cell := tiny_tables.cell_of(result, column):
                value, interval, n = cell
                cells[key, column.name] = Cell(value, interval, n, tuple(cell_marks))
    notes = {mark: text for text, mark in notes.items()}
    return Measured(cells, notes, remarks)


def _differences_from_paper(table, result):
    """Return the paper's settings in which a row of results.json differs, or ""."""
    made_by = result.get("made_by", {})
    differences = [
        f"{name} = {console.clean_line(str(made_by[name]))}, {value} in the paper"
        for name, value in table.settings.items()
        if name in made_by and made_by[name] != value
    ]
    return "; ".join(differences)


def _choose_source(table, row, name, keyed_runs, setting):
    """Return the (run, row of results.json) that a cell is read from, or None."""
    wanted_key = row.key if any(key == row.key for key, _ in keyed_runs) else ""
    settings = settings_of(table, row)
    candidates = []
    for key, run in keyed_runs:
        largest: dict[tuple, dict] = {}  # prefers all questions to the first N of them
        for result in run.rows if key == wanted_key else ():
            result_key = result["stage"], result["method"], result.get("setting", "")
            is_chosen = setting in ("", result_key[2] or RUNS_SETTING)
            if not is_chosen or not is_of_set(result["dataset"], name):
                continue
            is_row = is_of_row(result, run.config, row, is_named=bool(key))
            if is_row and (key or has_settings(result, run.config, settings)):
                pair = (result, largest.get(result_key, result))
                largest[result_key] = max(pair, key=lambda r: r.get("n") or 0)
        candidates += [(run, result_key, r) for result_key, r in largest.items()]
    if len(candidates) > 1:
        rows = [
            f"{run.path} ({', '.join(filter(None, result_key))})"
            for run, result_key, _ in candidates[:2]
        ]
        raise ValueError(
            f"--runs: {rows[0]} and {rows[1]} both have {name} for the row "
            f"{row.key!r}: name one run for it, or one --setting"
        )
    return (candidates[0][0], candidates[0][2]) if candidates else None


def _print_table(name, table, measurement):
    """Print a table; columns that do not fit the terminal go into tables below it."""
    console.block(f"{name}, {table.source}", table.caption)
    headings = ["row", "of"] if measurement else ["row"]
    has_numbers = measurement or not table.curves  # papers print no numbers for curves
    for start, end in _blocks(table, headings, measurement) if has_numbers else ():
        names = [column.name for column in table.columns[start:end]]
        rows, previous_key = [], None
        for row, source, texts in span_lines(table, measurement, start, end):
            key = row.key if row.key != previous_key else ""
            rows.append([*(key, source)[: len(headings)], *texts])
            previous_key = row.key
        console.table("", [*headings, *names], rows)
    row_descriptions = [
        [row.key, row.label, row.model, made_by_text(row)] for row in table.rows
    ]
    console.table("rows", ["row", "as printed", "model", "made by"], row_descriptions)
    for text in remark_lines(table, measurement):
        print(console.clean_line(text))


def _blocks(table, headings, measurement):
    """Yield (start, end) of each group of columns that fits the terminal's width."""
    width = console.terminal_width() or console.PLAIN_WIDTH
    lines = [*table_lines(table, measurement)]
    widths = [max(len(row.key) for row in table.rows), max(map(len, (PAPER, *OURS)))]
    room = width - sum(n + 3 for n in widths[: len(headings)]) - 1
    for start, end in column_spans(table):
        used_width = 0
        for i, column in enumerate(table.columns[start:end], start):
            texts = (texts[i] for _, _, texts in lines)
            column_width = max(map(len, (column.name, *texts))) + 3
            if used_width + column_width > room and i > start:
                yield start, i
                start, used_width = i, 0
            used_width += column_width
        yield start, end


_FORMATTERS = {".md": markdown_tables, ".csv": csv_tables, ".tex": latex_tables}


if __name__ == "__main__":
    sys.exit(run_command(main))
