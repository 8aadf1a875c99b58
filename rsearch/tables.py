"""Show a paper's table, and this package's rows beside it: python -m rsearch.tables

    python -m rsearch.tables --list
    python -m rsearch.tables rag_r1:3
    python -m rsearch.tables rag_r1:3 --runs=runs/baselines,mq=runs/rag_r1 --out=3.md
    python -m rsearch.tables rag_r1:3 --dry_run --topology=a100x8
    python -m rsearch.tables rag_r1:3,rag_r1:4 --size=tiny --at_once=2

The tables are data, in configs/tables. With --runs, lines of ours stand below each of
the paper's: the score, its 95 % interval where results.json states it, and the number
of questions. A cell that no run has measured is empty. docs/tables.md says which rows
of results.json count for which row of the table. With --size=tiny the recipes of all
rows are trained and asked on the embedded world, as far as that is not done yet; the
same command goes on where it was stopped. --config.FIELD=VALUE then holds for all runs.
"""

import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

from rsearch.config.recipes import parse_flags, run_command
from rsearch.evaluation.table_rows import (
    has_settings,
    is_of_row,
    is_of_set,
    number_of,
    settings_of,
)
from rsearch.evaluation.tables import (
    NO_NUMBER,
    PaperColumn,
    PaperRow,
    PaperTable,
    find_row,
    find_table,
    read_tables,
)
from rsearch.runtime import console, files
from rsearch.runtime.markup import (
    csv_table,
    latex_table,
    latex_text,
    markdown_table,
    markdown_text,
)

FORMATS = (".md", ".csv", ".tex")
FULL, TINY = "full", "tiny"  # of --size
FLAGS = {
    "list": (False, "prints every table: rows that this package makes, of all"),
    "runs": (
        "",
        "directories of runs, a,b,...; KEY=DIR is read for the row KEY alone",
    ),
    "setting": ("", "rows with this `setting` alone; '-' is the run's configuration"),
    "allow": ("", "as of rsearch.compare: marks rows that differ in these fields"),
    "size": (FULL, "'tiny': trains and asks on the embedded world what rows need"),
    "workdir": ("runs/tables", "of --size=tiny: has a directory for each run"),
    "at_once": (1, "of --size=tiny: runs at the same time"),
    "dry_run": (False, "lists the runs and evaluations that all rows need"),
    "topology": ("", "of --dry_run: adds hours on a machine, a100x8, v5p-32, ..."),
    "max_questions": (
        0,
        "of --dry_run and --size=tiny: of a set at most; 0 = all of them",
    ),
    "out": ("", f"a file that the tables are written to: {', '.join(FORMATS)}"),
}
FIELD = "--config."  # begins an argument for all runs
RUNS_SETTING = "-"  # of --setting, for rows that have none
OURS = ("ours", "95 %", "n")  # lines below a row of the paper
SCORES = ("em", "f1", "cover_em", "judge")  # which a table may print in percent
CSV_COLUMNS = (
    "table",
    "row",
    "label",
    "model",
    "made_by",
    "column",
    "set",
    "metric",
    "paper",
)
CSV_COLUMNS += ("ours", "low", "high", "n", "note")


class Cell(NamedTuple):
    """A measurement of a run for a cell, as a fraction or a count.

    Attributes:
        value: None where results.json has none.
        interval: of 95 %, or None.
        n: questions; 0 of an average.
        marks: the signs of notes.
    """

    value: float | None
    interval: tuple[float, float] | None = None
    n: int = 0
    marks: tuple[str, ...] = ()


class Ours(NamedTuple):
    """All that runs have measured of a table.

    Attributes:
        cells: {(row's key, column's name): cell}.
        notes: {mark: what differs}.
        remarks: what holds for all cells.
    """

    cells: dict[tuple[str, str], Cell]
    notes: dict[str, str]
    remarks: tuple[str, ...] = ()


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` as in `rsearch.config.recipes.parse_flags`."""
    positional = () if "--list" in argv else ("table",)
    settings = [word for word in argv if word.startswith(FIELD)]
    words = [word for word in argv if word not in settings]
    flags = parse_flags(words, flags=FLAGS, positional=positional)
    if flags["list"]:
        _print_list()
        return 0
    tables = {name: find_table(name) for name in flags["table"].split(",")}
    out = flags["out"]
    if out and pathlib.Path(out).suffix not in FORMATS:
        raise ValueError(f"--out={out}: expected a name that ends in {FORMATS}")
    if out:
        files.check_output("out", out)
    _check_flags(flags, settings, tables)
    failed, ours = {}, dict.fromkeys(tables)
    if flags["size"] == TINY:
        from rsearch.plan import tiny_tables  # with jax, as below

        tables = {n: tiny_tables.tiny_table(n, t) for n, t in tables.items()}
        texts = [setting.removeprefix(FIELD) for setting in settings]
        runs = tiny_tables.tiny_runs([*tables.values()], texts)
        workdir, limit = files.expand(flags["workdir"]), flags["max_questions"]
        if flags["dry_run"]:
            tiny_tables.show_jobs(runs, workdir, max_questions=limit)
            return 0
        failed = tiny_tables.fill(
            runs, workdir, at_once=flags["at_once"], max_questions=limit
        )
        for name, table in tables.items():
            sources = tiny_tables.find_results(table, texts, workdir, limit)
            ours[name] = _measure_tiny(table, sources, allow=flags["allow"])
    elif flags["dry_run"]:
        from rsearch.plan.table_runs import show_runs

        which = {n: flags[n] for n in ("topology", "max_questions")}
        for name, table in tables.items():
            show_runs(name, table, **which)
        return 0
    elif flags["runs"]:
        ((name, table),) = tables.items()
        named = parse_runs(flags["runs"], table)
        which = {n: flags[n] for n in ("setting", "allow")}
        ours[name] = _measure(table, named, **which)
    if out:
        text = _FORMATTERS[pathlib.Path(out).suffix](tables, ours)
        files.replace(out, text.encode())
        console.note(f"written: {out}")
    for name, table in {} if out else tables.items():
        _print(name, table, ours[name])
    return 1 if failed else 0


def _check_flags(flags, settings, tables):
    """Refuse flags that are not read with the others."""
    size, is_dry = flags["size"], flags["dry_run"]
    if size not in (FULL, TINY):
        raise ValueError(f"--size={size}: expected {FULL} or {TINY}")
    is_tiny = size == TINY
    read_with = {
        "runs": not is_dry and not is_tiny,
        "setting": bool(flags["runs"]),
        "allow": bool(flags["runs"]) or is_tiny,
        "out": not is_dry,
        "topology": is_dry and not is_tiny,
        "max_questions": is_dry or is_tiny,
        "workdir": is_tiny,
        "at_once": is_tiny,
    }
    needs = {"setting": "--runs", "allow": "--runs or --size=tiny"}
    needs |= dict.fromkeys(("workdir", "at_once"), "--size=tiny")
    needs |= {"topology": "--dry_run", "max_questions": "--dry_run or --size=tiny"}
    for flag, is_read in read_with.items():
        if not is_read and flags[flag] != FLAGS[flag][0]:
            why = f"is of {needs[flag]}" if flag in needs else "is not read with "
            if flag not in needs:
                why += "--dry_run" if is_dry else "--size=tiny"
            raise ValueError(f"--{flag}={flags[flag]}: {why}")
    for flag, least in (("max_questions", 0), ("at_once", 1)):
        if flags[flag] < least:
            raise ValueError(f"--{flag}={flags[flag]}: must be {least} or more")
    if settings and not is_tiny:
        raise ValueError(f"{settings[0]}: is of --size=tiny")
    if wrong := [word for word in settings if "=" not in word]:
        raise ValueError(f"{wrong[0]} needs a value: {wrong[0]}=...")
    if flags["runs"] and len(tables) > 1:
        raise ValueError(f"--runs={flags['runs']}: is of one table, not {len(tables)}")


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
        text: of the flag. A path with "=" in it needs a "/" before.
        table: whose rows are named.

    Raises:
        ValueError: no such row.
    """
    pairs = []
    for word in filter(None, text.split(",")):
        key, equals, folder = word.partition("=")
        is_named = equals and "/" not in key
        pairs.append((find_row(table, key).key, folder) if is_named else ("", word))
    return pairs


def _measure(table, runs, *, setting, allow) -> Ours:
    """Return what runs have measured of a table.

    Args:
        table: of the paper.
        runs: (row's key or "", directory) pairs.
        setting: of the rows that count; "" of all.
        allow: see `rsearch.compare.parse_allow`.

    Raises:
        ValueError: no row counts, two do for one cell, or rows differ in what must be
            equal.
    """
    # With jax, which no help should wait for.
    from rsearch import compare
    from rsearch.evaluation.runs import find_runs, read_run

    read = [
        (key, read_run(path)) for key, folder in runs for path in find_runs([folder])
    ]
    sets = list(dict.fromkeys(column.set for column in table.columns if column.set))
    sources = {}
    for row in table.rows:
        for name in sets:
            if chosen := _choose(table, row, name, read, setting):
                sources[row.key, name] = chosen
    used = {run.path for run, _ in sources.values()}
    unused = [str(run.path) for _, run in read if run.path not in used]
    why = "no row of its results counts for this table; docs/tables.md says which do"
    if not used:
        raise ValueError(f"--runs: {', '.join(unused)}: {why}")
    for path in unused:
        console.note(f"{path}: {why}")
    facts = [
        compare.facts_of(run, result)._replace(dataset=name)
        for (_, name), (run, result) in sources.items()
    ]
    marks, notes = _marks([*sources.values()], facts, allow)
    cells = {}
    for ((key, name), (_, result)), mark in zip(sources.items(), marks, strict=True):
        signs = [mark] if mark else []
        if unlike := _unlike_paper(table, result):
            signs.append(_sign(notes, unlike))
        for column in table.columns:
            value = number_of(result, column.metric) if column.set == name else None
            if value is not None:
                interval = result.get(f"{column.metric}_95")
                n = result.get("n") or 0
                cells[key, column.name] = Cell(value, interval, n, tuple(signs))
    for column in table.columns:
        for row in table.rows if column.mean_of else ():
            averaged = [cells.get((row.key, name)) for name in column.mean_of]
            if all(averaged) and all(c.n for c in averaged):
                marks = dict.fromkeys(m for cell in averaged for m in cell.marks)
                weights = [c.n for c in averaged] if column.by_questions else None
                mean = statistics.fmean([c.value for c in averaged], weights)
                cells[row.key, column.name] = Cell(mean, marks=tuple(marks))
    return Ours(cells, {mark: text for text, mark in notes.items()})


def _marks(sources, facts, allow):
    """Return a mark for each (run, row of results.json), "" for most, and {note: mark}.

    Raises:
        ValueError: rows differ in what must be equal.
    """
    from rsearch import compare

    measured = [(run, "", result) for run, result in sources]
    marks, footnotes = compare.marks_of(measured, facts, compare.parse_allow(allow))
    return marks, {t.partition(" ")[2]: t.partition(" ")[0] for t in footnotes}


def _sign(notes, text):
    """Return the mark of a note; a new one joins `notes`."""
    from rsearch import compare

    return notes.setdefault(text, str(len(notes) + 1).translate(compare.MARKS))


def _measure_tiny(table, sources, *, allow) -> Ours:
    """Return what has been measured of a table on the embedded world.

    Args:
        table: see `rsearch.plan.tiny_tables.tiny_table`.
        sources: {row's key: (run's directory, row of results.json)}.
        allow: see `rsearch.compare.parse_allow`.

    Raises:
        ValueError: rows differ in what must be equal.
    """
    from rsearch import compare
    from rsearch.plan import tiny_tables

    measured = [(compare.read_run(path), result) for path, result in sources.values()]
    facts = [compare.facts_of(run, result) for run, result in measured]
    marks, notes = _marks(measured, facts, allow)
    cells, first = {}, {}
    for (key, (path, result)), mark in zip(sources.items(), marks, strict=True):
        signs = [mark] if mark else []
        about = (path, *(result.get(name) for name in ("stage", "method", "setting")))
        if (same := first.setdefault(about, key)) != key:
            signs.append(_sign(notes, f"{same} and this row are the same run here"))
        if too_long := result.get("too_long"):
            text = f"{too_long} of {result['n']} questions have no room in the prompt"
            signs.append(_sign(notes, text))
        for column in table.columns:
            if cell := tiny_tables.cell_of(result, column):
                value, interval, n = cell
                cells[key, column.name] = Cell(value, interval, n, tuple(signs))
    notes = {mark: text for text, mark in notes.items()}
    return Ours(cells, notes, tiny_tables.remarks_of(table))


def _unlike_paper(table, result):
    """Return in which of the paper's settings a row of results.json differs, or ""."""
    made_by = result.get("made_by", {})
    differing = [
        f"{name} = {console.clean_line(str(made_by[name]))}, {value} in the paper"
        for name, value in table.settings.items()
        if name in made_by and made_by[name] != value
    ]
    return "; ".join(differing)


def _choose(table, row, name, read, setting):
    """Return the (run, row of results.json) that a cell is read from, or None."""
    wanted = row.key if any(key == row.key for key, _ in read) else ""
    settings = settings_of(table, row)
    candidates = []
    for key, run in read:
        largest: dict[tuple, dict] = {}  # all questions rather than the first N of them
        for result in run.rows if key == wanted else ():
            about = result["stage"], result["method"], result.get("setting", "")
            is_chosen = setting in ("", about[2] or RUNS_SETTING)
            if not is_chosen or not is_of_set(result["dataset"], name):
                continue
            is_row = is_of_row(result, run.config, row, is_named=bool(key))
            if is_row and (key or has_settings(result, run.config, settings)):
                several = (result, largest.get(about, result))
                largest[about] = max(several, key=lambda r: r.get("n") or 0)
        candidates += [(run, about, r) for about, r in largest.items()]
    if len(candidates) > 1:
        rows = [
            f"{run.path} ({', '.join(filter(None, about))})"
            for run, about, _ in candidates[:2]
        ]
        raise ValueError(
            f"--runs: {rows[0]} and {rows[1]} both have {name} of the row "
            f"{row.key!r}: name one run for it, or one --setting"
        )
    return (candidates[0][0], candidates[0][2]) if candidates else None


def _is_percent(table, column):
    """Return whether the column has scores in percent."""
    names = {c.name: c for c in table.columns}
    metric = names[column.mean_of[0]].metric if column.mean_of else column.metric
    return table.is_percent and metric in SCORES


def _scale(table, column):
    """Return what a value of ours is multiplied by, to be in the table's unit."""
    return 100 if _is_percent(table, column) else 1


def _digits(table, column):
    """Return the decimals that the column is printed with."""
    position = table.columns.index(column)
    texts = [row.numbers[position] for row in table.rows]
    decimals = [len(t.partition(".")[2]) for t in texts if t != NO_NUMBER]
    default = 1 if _is_percent(table, column) else 3 if column.metric in SCORES else 2
    return max(decimals, default=default)


def _ours_of(table, row, column, ours):
    """Return the texts of OURS of a cell."""
    cell = ours.cells.get((row.key, column.name))
    if cell is None:
        return "", "", ""
    scale, digits = _scale(table, column), _digits(table, column)
    value = f"{scale * cell.value:.{digits}f}{','.join(cell.marks)}"
    bounds = [f"{scale * bound:.{digits}f}" for bound in cell.interval or ()]
    return value, "-".join(bounds), str(cell.n or "")


def _lines(table, ours):
    """Yield (row, which line, texts of the columns) of the table."""
    for row in table.rows:
        numbers = ["" if n == NO_NUMBER else n for n in row.numbers]
        yield row, "paper", numbers
        if ours is None:
            continue
        texts = [_ours_of(table, row, column, ours) for column in table.columns]
        for name, values in zip(OURS, zip(*texts, strict=True), strict=True):
            if any(values):
                yield row, name, list(values)


def _print(name, table, ours):
    """Print a table on the terminal, columns that do not fit in tables below."""
    console.block(f"{name}, {table.source}", table.caption)
    lines = [
        ((row.key if which == "paper" else "", which), texts)
        for row, which, texts in _lines(table, ours)
    ]
    heads = ["row", "of"] if ours else ["row"]
    for start, end in _blocks(table.columns, heads, lines):
        names = [column.name for column in table.columns[start:end]]
        rows = [
            [*about[: len(heads)], *texts[start:end]]
            for about, texts in lines
            if about[0] or any(texts[start:end])
        ]
        console.table("", [*heads, *names], rows)
    made = [[row.key, row.label, row.model, made_by_text(row)] for row in table.rows]
    console.table("rows", ["row", "as printed", "model", "made by"], made)
    for text in _remarks(table, ours):
        print(console.clean_line(text))


def _blocks(columns: Sequence[PaperColumn], heads, lines):
    """Yield (start, end) of the columns that stand side by side on the terminal."""
    width = console.terminal_width() or console.PLAIN_WIDTH
    about = [max(len(a[i]) for a, _ in lines) + 3 for i in range(len(heads))]
    room = width - sum(about) - 1
    start, used = 0, 0
    for i, column in enumerate(columns):
        needed = max(map(len, (column.name, *(texts[i] for _, texts in lines)))) + 3
        if used + needed > room and i > start:
            yield start, i
            start, used = i, 0
        used += needed
    yield start, len(columns)


def made_by_text(row: PaperRow) -> str:
    """Return how this package makes a row, or why it does not."""
    if not row.is_runnable:
        return f"- {row.reason}"
    policy = f"{row.recipe} after {row.stage}" if row.recipe else ""
    made = " of ".join(filter(None, [row.method, policy]))
    return ", ".join([made, *row.settings, *row.asking])


def _remarks(table, ours):
    """Yield a line for each slip, and for each mark."""
    for slip in table.slips:
        about = ", ".join(filter(None, [slip.row, *slip.columns]))
        yield f"slip: {about}: {slip.text}"
    for mark, text in ours.notes.items() if ours else ():
        yield f"{mark} {text}"
    yield from ours.remarks if ours else ()


def _grid(table, ours):
    """Return the headings and lines of a file: labels and models as printed."""
    heads = ["row", "model", *(["of"] if ours else [])]
    lines = [
        [*([row.label, row.model, which][: len(heads)]), *texts]
        for row, which, texts in _lines(table, ours)
    ]
    return [*heads, *(column.name for column in table.columns)], lines


def _markdown(tables, ours):
    """Return the tables in Markdown, with their captions and remarks."""
    texts = []
    for name, table in tables.items():
        heading = f"## {name}: {table.title}\n\n" if len(tables) > 1 else ""
        remarks = map(markdown_text, _remarks(table, ours[name]))
        remarks = "".join(f"\n{text}\n" for text in remarks)
        grid = markdown_table(*_grid(table, ours[name]))
        about = f"{table.source}. {table.caption}"
        texts.append(f"{heading}{about}\n\n{grid}{remarks}")
    return "\n".join(texts)


def _latex(tables, ours):
    """Return the tables in LaTeX, with their captions and remarks."""
    return "\n".join(_latex_table(table, ours[n]) for n, table in tables.items())


def _latex_table(table, ours):
    columns, lines = _grid(table, ours)
    num_texts = len(columns) - len(table.columns)
    about = [f"{table.source}. {table.caption}", *_remarks(table, ours)]
    remarks = "".join(latex_text(text) + "\\par\n" for text in about)
    return latex_table(columns, lines, num_texts=num_texts) + remarks


def _csv(tables, ours):
    """Return a line for each cell, scores of ours in the table's unit."""
    lines = []
    for name, table in tables.items():
        for row in table.rows:
            for column, number in zip(table.columns, row.numbers, strict=True):
                about = [name, row.key, row.label, row.model, made_by_text(row)]
                about += [column.name, column.set, column.metric]
                about.append("" if number == NO_NUMBER else number)
                lines.append(about + _csv_cells(table, row, column, ours[name]))
    return csv_table(CSV_COLUMNS, lines)


def _csv_cells(table, row, column, ours):
    """Return what a line has of ours."""
    cell = ours.cells.get((row.key, column.name)) if ours else None
    if cell is None:
        return [""] * 5
    scale = _scale(table, column)
    bounds = [_rounded(scale * x) for x in cell.interval or ()] or ["", ""]
    note = "; ".join(ours.notes[mark] for mark in cell.marks)
    return [_rounded(scale * cell.value), *bounds, cell.n or "", note]


def _rounded(value):
    """Return a number without the noise of binary fractions, for a file."""
    return round(value, 6)


_FORMATTERS = {".md": _markdown, ".csv": _csv, ".tex": _latex}


if __name__ == "__main__":
    sys.exit(run_command(main))
