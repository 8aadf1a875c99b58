"""Print one table over several runs: python -m rsearch.compare DIR DIR... [--group]

Each DIR is a run's directory, or a folder of such directories. A row is the last stage
that trained the policy, asked by its own protocol; --stage, --method and --dataset
choose others, or "all". Runs that differ in more than their seed are told apart by the
fields that differ, behind the recipe's name.

Rows on the same questions are compared with the first of them, question by question:
the difference with its 95 % interval (paired bootstrap) and the p of McNemar's exact
test, each pair for itself. Of rows without a pair, stderr says why.

Rows of one data set that were measured otherwise, with other questions, retrieval,
normaliser or judge, are refused, or with --allow=FIELD marked. What else differs in how
they were made, such as weights, budgets and code, is a table below.
"""

import os
import pathlib
import re
import reprlib
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rsearch.config.recipes import (
    ABSENT,
    fields,
    fingerprint,
    parse_flags,
    run_command,
)
from rsearch.config.stage_plan import START
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
from rsearch.evaluation.pairs import pair_rows
from rsearch.evaluation.predictions import RUN
from rsearch.evaluation.results import read_results
from rsearch.runtime.console import clean_line, note, table
from rsearch.runtime.files import expand
from rsearch.runtime.identity import describe_start
from rsearch.runtime.workdir import CONFIG, is_free, read_config
from rsearch.text.spelling import did_you_mean

ALL, LAST = "all", "last"
MAX_WORDS = 4  # fields behind a recipe's name
SCORES = ("em", "f1", "cover_em")
BEFORE = "em_before"  # the exact match of the same method at the run's start
JUDGED = ("judge", "judge_agreement")
JUDGE_COUNTS = ("judge_unparsed", "judge_failed")
PERCENT = (*SCORES, BEFORE, *JUDGED)
COUNTS = ("searches", "queries", "searches_right", "searches_wrong")
REQUIRED = (*MUST_BE_EQUAL, ENCODER)
REQUIRED += tuple(f"{JUDGED_BY}.{name}" for name in (*JUDGE_FIELDS, WEIGHTS))
NUMBERS = ("n", *PERCENT, *JUDGE_COUNTS, *COUNTS)
HEADINGS = {
    "n": "n",
    "em": "EM",
    BEFORE: "EM before",
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
FLAGS = {
    "stage": (LAST, "a stage, 'start', 'last' or 'all'"),
    "method": ("protocol", "of config.eval.methods, or 'all'"),
    "dataset": (ALL, "as in results.json, or 'all'"),
    "by_kind": (False, "a row for each kind of question"),
    "group": (False, "mean +- standard deviation over runs that differ in their seed"),
    "markdown": (False, "prints a Markdown table"),
    "allow": (
        "",
        "fields in which rows may differ that must be equal, or 'all'; marks such rows",
    ),
}
MARKS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


class ComparedRun(NamedTuple):
    """A directory, its configuration's fields by dotted name, and its results."""

    path: pathlib.Path
    config: dict
    rows: list


class ResultRow(NamedTuple):
    """A line of the table: what it is about, and {name: number or None}."""

    about: tuple
    values: dict


def main(argv: Sequence[str]) -> int:
    """Read the arguments and the runs, and print the table."""
    folders, words = [], []
    for word in argv:
        (words if word.startswith("-") or _is_value(words) else folders).append(word)
    flags = parse_flags(words, flags=FLAGS)
    if not folders:
        raise ValueError(
            "name at least one run's directory: python -m rsearch.compare DIR DIR..."
        )
    runs = [read_run(path) for path in find_runs(folders)]
    chosen = {name: flags[name] for name in ("stage", "method", "dataset")}
    measured = [
        (run, label, row)
        for run, label in zip(runs, label_runs(runs), strict=True)
        for row in choose(run, **chosen)
    ]
    facts = [facts_of(run, row) for run, _, row in measured]
    marks, footnotes = marks_of(measured, facts, parse_allow(flags["allow"]))
    rows, sources, made_by = [], [], {}
    for (run, label, row), mark, made in zip(measured, marks, facts, strict=True):
        row = _with_start(run, row, made)
        for kind, values in _kinds(row, flags["by_kind"]):
            name = f"{label} {mark}".rstrip()
            about = (name, row["stage"], row["method"], row["dataset"], kind)
            made_by.setdefault(about if flags["group"] else len(rows), []).append(made)
            rows.append((about, run.config["seed"], values))
            sources.append((run.path, row))
    if not rows:
        raise ValueError(_nothing(runs, chosen))
    rows = grouped(rows) if flags["group"] else [_single(*row) for row in rows]
    _print(rows, flags, num_runs=len(runs))
    for text in footnotes:
        print(f"\n{markdown_text(text) if flags['markdown'] else clean_line(text)}")
    if len(rows) > 1 and not flags["by_kind"]:
        names = _names_of(rows, sources, is_grouped=flags["group"])
        _print_made_by(names, [*made_by.values()], is_markdown=flags["markdown"])
        if not flags["group"]:
            _print_pairs(names, sources, is_markdown=flags["markdown"])
    return 0


def _is_value(words):
    """Return whether the word before takes this one as its value: --stage rl."""
    if not words or not words[-1].startswith("--") or "=" in words[-1]:
        return False
    return isinstance(FLAGS.get(words[-1][2:], (True,))[0], str)


def find_runs(folders: Iterable[str | os.PathLike]) -> list[pathlib.Path]:
    """Return the runs' directories: each folder itself, or those directly inside.

    Raises:
        ValueError: one that is no run and holds none.
    """
    runs = []
    for folder in map(expand, folders):
        if (folder / CONFIG).is_file():
            runs.append(folder)
            continue
        inside = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
        if not folder.is_dir():
            what = "a file" if folder.exists() else "not there"
            raise ValueError(f"{folder}: {what}; name a run's directory")
        if not inside:
            raise ValueError(
                f"{folder}: not a run: neither it nor a directory in it has {CONFIG}"
            )
        runs += inside
    return list(dict.fromkeys(runs))


def read_run(path: pathlib.Path) -> ComparedRun:
    """Read a run with its results.

    Raises:
        ValueError: no run, or one that has not been evaluated yet.
    """
    config = fields(read_config(path))
    if missing := {"name", "seed", "stages"} - config.keys():
        raise ValueError(f"{path}/{CONFIG}: has no field {min(missing)!r}")
    name, stages = config["name"], config["stages"]
    if not isinstance(name, str):
        raise ValueError(f"{path}/{CONFIG}: name = {reprlib.repr(name)}: expected text")
    if not isinstance(stages, list) or not all(isinstance(s, str) for s in stages):
        raise ValueError(
            f"{path}/{CONFIG}: stages = {reprlib.repr(stages)}: expected names"
        )
    if type(config["seed"]) is not int:
        raise ValueError(
            f"{path}/{CONFIG}: seed = {reprlib.repr(config['seed'])}: expected int"
        )
    rows = read_results(path)
    if not rows:
        raise ValueError(
            f"{path}: has no results yet; python -m rsearch.evaluate makes them"
        )
    return ComparedRun(path, config, rows)


def label_runs(runs: Sequence[ComparedRun]) -> list[str]:
    """Return each run's recipe, with the fields in which runs of it differ."""
    labels = []
    for run in runs:
        same = [r for r in runs if r.config["name"] == run.config["name"]]
        names = {name for r in same for name in r.config}
        differing = sorted(
            name
            for name in names - {"seed"}
            # A run may get more steps, but then it is not another seed of the shorter.
            if (not is_free(name) or name.endswith(".steps"))
            and len({str(r.config.get(name, ABSENT)) for r in same}) > 1
        )
        words = [f"{n}={run.config[n]}" for n in differing if n in run.config]
        if len(words) > MAX_WORDS:
            digest = fingerprint({"words": words})[:4]
            words = [
                *words[:MAX_WORDS],
                f"(and {len(words) - MAX_WORDS} more, {digest})",
            ]
        labels.append(" ".join([run.config["name"], *words]))
    return labels


def choose(run: ComparedRun, *, stage: str, method: str, dataset: str) -> list[dict]:
    """Return the chosen rows of results.json, in their order."""
    if stage == LAST:
        order = [START, *run.config["stages"]]
        known = [row["stage"] for row in run.rows if row["stage"] in order]
        stage = max(known, key=order.index, default=run.rows[-1]["stage"])
    wanted = {"stage": stage, "method": method, "dataset": dataset}
    return [
        row
        for row in run.rows
        if all(value in (ALL, row[name]) for name, value in wanted.items())
    ]


def _with_start(run, row, facts):
    """Return a row, and its kinds, beside the exact match that the run began with.

    One that was measured otherwise than the row is left out.
    """
    if row["stage"] == START:
        return row
    same = ("method", "dataset")
    start = {}
    for other in choose(run, stage=START, method=ALL, dataset=ALL):
        if all(other[name] == row[name] for name in same):
            start = other
            break
    if start and (unlike := disagreements([facts, facts_of(run, start)])[1]):
        about = clean_line(", ".join(row[name] for name in same))
        note(f"{run.path}: {about}: no {HEADINGS[BEFORE]}: at the start, {unlike[0]}")
        start = {}
    compared = {**row, BEFORE: start.get("em")}
    for name in ("by_kind", "by_known"):
        before = start.get(name, {})
        compared[name] = {
            kind: {**values, BEFORE: before.get(kind, {}).get("em")}
            for kind, values in row.get(name, {}).items()
        }
    return compared


def facts_of(run: ComparedRun, row: dict) -> RowFacts:
    """Return what a row and its entry of run.json say of how it was measured."""
    facts = row_facts(row, run.config)
    start = describe_start(run.path, row.get("start"))
    return facts._replace(shown={**facts.shown, **start})


def marks_of(
    measured: Sequence[tuple], facts: Sequence[RowFacts], allowed: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return a mark for each row, "" for most, and the footnotes of the marks.

    Args:
        measured: (run, label, row) of each row.
        facts: of each row.
        allowed: see `parse_allow`.

    Raises:
        ValueError: a row differs in what must be equal and is not allowed to.
    """
    unlike = disagreements(facts)
    refused = [
        (i, difference)
        for i, several in enumerate(unlike)
        for difference in several
        if not _is_allowed(difference.field, allowed)
    ]
    if refused:
        i, first = refused[0]
        rows = [
            f"{run.path} ({', '.join(value_text(row[n]) for n in RUN if row.get(n))})"
            for run, _, row in (measured[i], measured[first.position])
        ]
        fields = ",".join(dict.fromkeys(d.field for _, d in refused))
        raise ValueError(
            f"{first.field} = {value_text(first.value)} in {rows[0]}, "
            f"{value_text(first.other)} in {rows[1]}: must be equal in one table; "
            f"--allow={fields} marks what differs"
        )
    marks, texts = [], {}
    for several, made in zip(unlike, facts, strict=True):
        reasons = [str(difference) for difference in several]
        if made.missing:
            reasons.append(f"not recorded: {', '.join(made.missing)}")
        number = texts.setdefault("; ".join(reasons), len(texts) + 1) if reasons else ""
        marks.append(str(number).translate(MARKS))
    footnotes = [f"{str(n).translate(MARKS)} {text}" for text, n in texts.items()]
    return marks, footnotes


def parse_allow(text: str) -> list[str]:
    """Return the words of --allow.

    Raises:
        ValueError: one names no field, or section of fields, that must be equal.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    sections = {name.partition(".")[0] for name in REQUIRED}
    known = sorted({ALL, WORLD, *REQUIRED, *sections})
    for word in words:
        if word not in known and not word.startswith(f"{WORLD}."):
            hint = did_you_mean(word, known)
            raise ValueError(f"--allow={word}: expected of {', '.join(known)}{hint}")
    return words


def _is_allowed(field, words):
    """Return whether a field, its section or all are among the words of --allow."""
    return not {ALL, field, field.partition(".")[0]}.isdisjoint(words)


def _kinds(row, by_kind):
    """Return (kind, values) pairs: the row itself as "", or one pair a kind."""
    if not by_kind:
        return [("", row)]
    return [*row.get("by_kind", {}).items(), *row.get("by_known", {}).items()]


def _single(about, seed, values) -> ResultRow:
    """Return one run's row; numbers that older results lack are None."""
    numbers = {name: values.get(name) for name in NUMBERS}
    return ResultRow((*about, seed), {**numbers, "em_95": values.get("em_95")})


def grouped(rows: Sequence[tuple]) -> list[ResultRow]:
    """Return a row for each subject: means and deviations over its runs.

    Args:
        rows: (about, seed, values) of each run.

    Returns:
        Rows whose values are (mean, sample standard deviation) pairs, without deviation
        (None) where there is one run; about ends with the number of runs.
    """
    by_about: dict = {}
    for about, _, values in rows:
        by_about.setdefault(about, []).append(values)
    means = []
    for about, several in by_about.items():
        values = {}
        for name in NUMBERS:
            known = [v[name] for v in several if v.get(name) is not None]
            mean = statistics.fmean(known) if known else None
            values[name] = mean, statistics.stdev(known) if len(known) > 1 else None
        means.append(ResultRow((*about, len(several)), values))
    return means


def _print(rows, flags, *, num_runs):
    """Print the table, without columns that say the same everywhere."""
    names = ("recipe", "stage", "method", "dataset", "kind")
    names += ("runs",) if flags["group"] else ("seed",)
    always = ("recipe", "stage", names[-1])
    shown_columns = [
        i
        for i, name in enumerate(names)
        if name in always or len({row.about[i] for row in rows}) > 1
    ]
    shows_interval = not flags["group"] and not flags["by_kind"]
    shows_start = any(_mean_of(row.values[BEFORE]) is not None for row in rows)
    columns = [names[i] for i in shown_columns] + ["n"]
    columns += [HEADINGS[BEFORE]] if shows_start else []
    columns += ["EM", "95 % interval"] if shows_interval else ["EM"]
    is_judged = any(_mean_of(row.values[JUDGED[0]]) is not None for row in rows)
    judged = [*JUDGED, *JUDGE_COUNTS] if is_judged else []
    measured = [*SCORES[1:], *judged, *COUNTS]
    if flags["by_kind"]:
        measured = [*SCORES[1:], COUNTS[0]]
    columns += [HEADINGS[name] for name in measured]
    lines = []
    for row in rows:
        line = [str(row.about[i]) for i in shown_columns]
        shown = ("n", BEFORE, "em") if shows_start else ("n", "em")
        line += [_shown(name, row.values[name]) for name in shown]
        if shows_interval:
            line.append(_interval(row.values["em_95"]))
        lines.append(line + [_shown(name, row.values[name]) for name in measured])
    if flags["markdown"]:
        print(markdown(columns, lines), end="")
        return
    fixed = [
        row for i, row in enumerate(rows[0].about[1:4]) if i + 1 not in shown_columns
    ]
    title = f"{num_runs} runs, percent where it is a score: {', '.join(fixed)}"
    table(title.rstrip(": "), columns, lines)


def _print_made_by(names, made_by, *, is_markdown):
    """Print what rows were made by, as far as it differs and no column tells it.

    Args:
        names: of the rows.
        made_by: what each row's runs say of it.
        is_markdown: prints a Markdown table.
    """
    columns = {}
    for field in shown_fields([facts for several in made_by for facts in several]):
        column = [_values_of(field, several) for several in made_by]
        if len({*column}) > 1:  # seeds alone may differ
            columns[field] = column
    lines = [list(line) for line in zip(names, *columns.values(), strict=True)]
    if columns and is_markdown:
        print("\n" + markdown(["row", *columns], lines), end="")
    elif columns:
        table("what else differs", ["row", *columns], lines)


def _values_of(field, facts):
    """Return the value that a field has in one row's runs, or how many it has."""
    values = {value_text(f.shown[field]) for f in facts if field in f.shown}
    return f"{len(values)} values" if len(values) > 1 else "".join(values) or "-"


def _print_pairs(names, sources, *, is_markdown):
    """Print the differences of rows on the same questions, and which have none.

    Args:
        names: of the rows.
        sources: (run's directory, row of results.json) of each.
        is_markdown: prints a Markdown table.
    """
    pairs, unpaired = pair_rows(sources)
    lines = []
    for pair in pairs:
        line = [names[pair.row], names[pair.baseline], str(pair.n)]
        line += _difference(*pair.differences["em"])
        p = "-" if pair.p is None else f"{pair.p:.4f}"
        line.append("< 0.0001" if pair.p is not None and pair.p < 0.0001 else p)
        lines.append(line + _difference(*pair.differences["f1"]))
    interval = "95 % interval"
    columns = ["row", "minus", "n", "EM difference", interval, "McNemar's p"]
    columns += ["F1 difference", interval]
    if lines and is_markdown:
        print("\n" + markdown(columns, lines), end="")
    elif lines:
        table("differences on the same questions, in points of percent", columns, lines)
    for reason, count in Counter(unpaired.values()).items():
        note(f"{count} of {len(names)} rows are not paired: {reason}")


def _names_of(rows, sources, *, is_grouped):
    """Return what tells each row from the others, its recipe if nothing else does."""
    values = [row.about[:-1] for row in rows]
    if not is_grouped:
        seeds = [(f"seed {row.about[-1]}",) for row in rows]
        values = [a + b for a, b in zip(values, seeds, strict=True)]
    differing = [i for i in range(len(values[0])) if len({v[i] for v in values}) > 1]
    names = [" ".join(value[i] for i in differing or [0]) for value in values]
    if is_grouped:  # no two of them are about the same
        return names
    return [
        f"{name} ({path.name})" if names.count(name) > 1 else name
        for name, (path, _) in zip(names, sources, strict=True)
    ]


def _difference(value, interval):
    low, high = interval
    return [f"{100 * value:+.1f}", f"{100 * low:+.1f} to {100 * high:+.1f}"]


def _shown(name, value):
    """Format a number, or mean +- deviation, for the table."""
    if isinstance(value, tuple):
        mean, deviation = value
        if name == "n" or deviation is None:
            return _shown(name, mean)
        return f"{_shown(name, mean)} ± {_shown(name, deviation)}"
    if value is None:
        return "-"
    if name == "n" or (name in JUDGE_COUNTS and value == int(value)):
        return f"{value:.0f}"
    return f"{100 * value:.1f}" if name in PERCENT else f"{value:.2f}"


def _mean_of(value):
    return value[0] if isinstance(value, tuple) else value


def _interval(pair):
    return "-" if pair is None else f"{100 * pair[0]:.1f} - {100 * pair[1]:.1f}"


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; a cell is its text, whatever marks that holds."""
    is_number = [
        all(re.fullmatch(r"[-+\d.± ]+", line[i]) for line in lines)
        for i in range(len(columns))
    ]
    rule = ["---:" if right else "---" for right in is_number]

    def joined(cells):
        return f"| {' | '.join(map(markdown_text, cells))} |\n"

    return joined(columns) + joined(rule) + "".join(map(joined, lines))


def markdown_text(value: object) -> str:
    """Return a text on one line, without columns, markup, HTML or links in it."""
    text = clean_line(" ".join(str(value).split()))
    return re.sub(r"([\\`*|<>\[\]&~]|:(?=//)|(?<=www)\.)", r"\\\1", text)


def _nothing(runs, chosen):
    """Return the message for the case that no row is as wanted."""
    for name, value in chosen.items():
        known = sorted({row[name] for run in runs for row in run.rows})
        if value not in (ALL, LAST, *known):
            hint = did_you_mean(value, known)
            return f"--{name}={value}: the runs have {', '.join(known)}{hint}"
    flags = " ".join(f"--{name}={value}" for name, value in chosen.items())
    return f"no row of these runs has {flags}, with kinds of questions if asked for"


if __name__ == "__main__":
    sys.exit(run_command(main))
