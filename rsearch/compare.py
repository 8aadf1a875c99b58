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
import sys
from collections import Counter
from collections.abc import Sequence

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
    value_text,
)
from rsearch.evaluation.comparison import (
    EM_BEFORE,
    HEADINGS,
    PERCENT,
    SETTING,
    Entry,
    config_grid,
    format_value,
    mean_row,
    names_of,
    pairs_grid,
    provenance_grid,
    results_grid,
    row_records,
    seeds_grid,
    single_row,
    values_by_seed,
)
from rsearch.evaluation.figures import SUFFIXES
from rsearch.evaluation.pairs import compare_over_seeds, notes_on_means, pair_rows
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

REQUIRED = (*MUST_BE_EQUAL, ENCODER)
REQUIRED += tuple(f"{JUDGED_BY}.{name}" for name in (*JUDGE_FIELDS, WEIGHTS))
FORMATS = (("json", "JSON"), ("csv", "CSV"), ("markdown", "Markdown tables"))
FORMATS += (("latex", "LaTeX tables"),)
HINT = "--wide shows them"
TO_STDOUT = "-"  # value of a format's flag that names no file
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


def main(argv: Sequence[str]) -> int:
    """Read the arguments and the runs, and print the tables."""
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
    if any(run.rows for run in runs):
        _show_tables(runs, names, flags)
    if flags["plot"]:
        _plot(runs, names, flags)
    return 0


def _show_tables(runs, names, flags):
    """Compare the rows that the flags choose; print or write the tables."""
    entries, footnotes = _choose_entries(runs, names, flags)
    by_kind, is_grouped = flags["by_kind"], flags["group"]
    if is_grouped:
        groups_by_labels: dict[tuple, list[Entry]] = {}
        for entry in entries:
            groups_by_labels.setdefault(entry.labels, []).append(entry)
        groups = [*groups_by_labels.values()]
        rows = [mean_row(group) for group in groups]
    else:
        groups = [[entry] for entry in entries]
        rows = [single_row(entry) for entry in entries]
    num_runs = len({entry.run.path for entry in entries})
    grids = [
        results_grid(rows, num_runs=num_runs, is_grouped=is_grouped, by_kind=by_kind)
    ]
    row_names, pairs = names_of(rows, is_grouped=is_grouped), []
    if len(rows) > 1 and not by_kind:
        grids.append(provenance_grid(row_names, groups))
    if is_grouped:
        runs_by_labels = {
            labels: [(entry.seed, entry.values) for entry in group]
            for labels, group in groups_by_labels.items()
        }
        headings = {name: HEADINGS[name] for name in PERCENT}
        footnotes += notes_on_means(runs_by_labels, headings)
        pairs = compare_over_seeds([values_by_seed(group) for group in groups])
        grids.append(seeds_grid(row_names, pairs))
    elif len(rows) > 1 and not by_kind:
        pairs, unpaired = pair_rows([(entry.run.path, entry.row) for entry in entries])
        for reason, count in Counter(unpaired.values()).items():
            note(f"{count} of {len(rows)} rows are not paired: {reason}")
        grids.append(pairs_grid(row_names, pairs))
    differing_fields = config_difference(runs) if flags["diff"] else {}
    if flags["diff"]:
        if not differing_fields:
            note("--diff: the configurations are the same")
        grids.append(config_grid(names, differing_fields))
    document = {
        "rows": row_records(rows, entries, is_grouped=is_grouped),
        "notes": footnotes,
        "differences": [pair._asdict() for pair in pairs],
        "config": {field: dict(zip(names, v)) for field, v in differing_fields.items()},
    }
    _show([grid for grid in grids if grid.lines], footnotes, document, flags)


def _choose_entries(runs, names, flags):
    """Return the entries that the flags choose, and footnotes on how they differ.

    Raises:
        ValueError: the flags choose nothing, or rows that do not belong in one table.
    """
    selection = _parse_selection(runs, flags)
    sources = [(run, row) for run in runs for row in select_rows(run, **selection)]
    all_facts = [facts_of(run, row) for run, row in sources]
    marks, footnotes = marks_of(sources, all_facts, parse_allow(flags["allow"]))
    recipes = label_runs(runs)
    run_labels = zip(recipes) if flags["group"] else zip(names, recipes, strict=True)
    labels_by_path = dict(zip([run.path for run in runs], run_labels, strict=True))
    entries = []
    for (run, row), mark, facts in zip(sources, marks, all_facts, strict=True):
        row = _with_start(run, row, facts)
        first_label, *other_labels = labels_by_path[run.path]
        labels = [f"{first_label} {mark}".rstrip(), *other_labels]
        labels += [row["stage"], row["method"], row["dataset"], row.get(SETTING, "")]
        kinds = [*row.get("by_kind", {}).items(), *row.get("by_known", {}).items()]
        for kind, values in kinds if flags["by_kind"] else [("", row)]:
            entries.append(Entry(run, row, facts, (*labels, kind), values))
    words = " ".join(f"--{name}={flags[name]}" for name in selection)
    words += ", or kinds of questions for --by_kind" if flags["by_kind"] else ""
    if not entries:
        raise ValueError(f"no row of these runs has {words}")
    shown_paths = {entry.run.path for entry in entries}
    for run in runs:
        if run.rows and run.path not in shown_paths:
            note(f"{run.path}: not in the table: no row has {words}")
    return entries, footnotes


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
    sources: Sequence[tuple[ComparedRun, dict]],
    facts: Sequence[RowFacts],
    allowed: Sequence[str],
) -> tuple[list[str], list[str]]:
    """Return a mark for each row, "" for most, and the footnotes of the marks.

    Args:
        sources: (run, row of its results) of each row.
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
            f"{format_value('n', row.get('n'))} questions)"
            for run, row in (sources[i], sources[first.position])
        ]
        fields = ",".join(dict.fromkeys(d.field for _, d in refused_differences))
        settings = {label_of(row, SETTING) for _, row in sources}
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
        latex_table(grid.columns, grid.lines, num_text_columns=grid.num_text_columns)
        for grid in grids
    )
    notes = (f"{latex_text(text)}\\par\n" for text in footnotes)
    return "\n".join([first, *notes, *rest])


if __name__ == "__main__":
    sys.exit(run_command(main))
