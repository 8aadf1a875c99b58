"""Read the configurations and results of runs that are compared."""

import os
import pathlib
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from rsearch.config.fields import ABSENT, fields, fingerprint
from rsearch.config.stage_plan import START
from rsearch.evaluation.predictions import run_key
from rsearch.evaluation.results import read_results
from rsearch.runtime.files import expand
from rsearch.runtime.workdir import CONFIG, may_differ, read_config

ALL, LAST = "all", "last"
AS_TRAINED = "none"  # a row whose evaluation changed nothing in the configuration
MAX_WORDS = 4  # fields shown after a recipe's name


class ComparedRun(NamedTuple):
    """A directory, its configuration's fields by dotted name, and its results."""

    path: pathlib.Path
    config: dict
    rows: list


def find_runs(folders: Iterable[str | os.PathLike]) -> list[pathlib.Path]:
    """Return directories of runs: each folder itself, or the runs directly inside it.

    Raises:
        ValueError: a folder is not a run and contains none.
    """
    runs = []
    for folder in map(expand, folders):
        if (folder / CONFIG).is_file():
            runs.append(folder)
            continue
        inner_runs = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
        if not folder.is_dir():
            problem = "a file" if folder.exists() else "not there"
            raise ValueError(f"{folder}: {problem}; name a run's directory")
        if not inner_runs:
            raise ValueError(
                f"{folder}: not a run: neither it nor a directory in it has {CONFIG}"
            )
        runs += inner_runs
    unique_runs: dict[pathlib.Path, pathlib.Path] = {}
    for run in runs:  # a link or an absolute path is another name of the same run
        unique_runs.setdefault(run.resolve(), run)
    return list(unique_runs.values())


def read_run(path: pathlib.Path, *, needs_results: bool = True) -> ComparedRun:
    """Read a run with its results.

    Args:
        needs_results: whether to refuse a run that has not been evaluated yet.

    Raises:
        ValueError: the directory is not a run, is damaged, or lacks needed results.
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
    if needs_results and not rows:
        raise ValueError(
            f"{path}: has no results yet; python -m rsearch.evaluate makes them"
        )
    return ComparedRun(path, config, rows)


def run_names(paths: Sequence[pathlib.Path]) -> list[str]:
    """Return a name for each run: the end of its path, long enough to be unique."""
    parts = [path.absolute().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len({*names}) == len(names):
            break
    return names


def stages_of(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the stages of all runs, in their order."""
    return list(dict.fromkeys(stage for run in runs for stage in run.config["stages"]))


def config_difference(runs: Sequence[ComparedRun]) -> dict[str, list]:
    """Return {field: its value in each run, or ABSENT} of the fields that differ."""
    names = sorted({name for run in runs for name in run.config})
    values = {name: [run.config.get(name, ABSENT) for run in runs] for name in names}
    return {n: v for n, v in values.items() if len({*map(str, v)}) > 1}


def label_runs(runs: Sequence[ComparedRun]) -> list[str]:
    """Return each run's recipe, with the fields in which runs of that recipe differ."""
    labels = []
    for run in runs:
        recipe_runs = [r for r in runs if r.config["name"] == run.config["name"]]
        names = {name for r in recipe_runs for name in r.config}
        differing_fields = sorted(
            name
            for name in names - {"seed"}
            # A run with more steps is more than another seed of a shorter one.
            if (not may_differ(name, run.config) or name.endswith(".steps"))
            and len({str(r.config.get(name, ABSENT)) for r in recipe_runs}) > 1
        )
        words = [f"{n}={run.config[n]}" for n in differing_fields if n in run.config]
        if len(words) > MAX_WORDS:
            digest = fingerprint({"words": words})[:4]
            words = [
                *words[:MAX_WORDS],
                f"(and {len(words) - MAX_WORDS} more, {digest})",
            ]
        labels.append(" ".join([run.config["name"], *words]))
    return labels


def is_same_run(config: Mapping, other: Mapping) -> bool:
    """Return whether two configurations differ only in fields that a run may change.

    Args:
        config: {dotted name: JSON value}, as in `ComparedRun`.
    """
    return all(
        config.get(name, ABSENT) == other.get(name, ABSENT)
        for name in {*config, *other} - {"name"}
        # With more steps it is a different run.
        if name.endswith(".steps") or not may_differ(name, config)
    )


def last_stage(rows: Sequence[Mapping], stages: Sequence[str]) -> str:
    """Return the last of a run's stages that has rows, else the stage of the last row.

    Args:
        rows: rows with a "stage", which may be the run's start; not empty.
    """
    order = [START, *stages]
    known_stages = [row["stage"] for row in rows if row["stage"] in order]
    return max(known_stages, key=order.index, default=rows[-1]["stage"])


def split_names(text: str, known: Collection[str]) -> list[str]:
    """Return the names in a flag's value, a,b,...

    Args:
        known: names that exist; a value that equals one of them is that one name, even
            if it contains a comma, as a file's name may.
    """
    if text in known:
        return [text]
    return [name for word in text.split(",") if (name := word.strip())]


def select_rows(
    run: ComparedRun,
    *,
    stage: str,
    method: str | Collection[str],
    dataset: str | Collection[str],
    setting: str = ALL,
) -> list[dict]:
    """Return the chosen rows of results.json, in their order.

    Args:
        run: a run; without results, it has no rows.
        stage: a stage, LAST or ALL.
        method, dataset: a name or several, or ALL.
        setting: what the rows' evaluation changed in the run's configuration, as text;
            AS_TRAINED if nothing, or ALL.
    """
    if stage == LAST and run.rows:
        stage = last_stage(run.rows, run.config["stages"])
    selection = {
        "stage": stage,
        "method": method,
        "dataset": dataset,
        "setting": setting,
    }
    names = {
        field: [value] if isinstance(value, str) else value
        for field, value in selection.items()
    }
    return [
        row
        for row in run.rows
        if all(
            ALL in names[field] or label_of(row, field) in names[field]
            for field in names
        )
    ]


def label_of(row: Mapping, field: str) -> str:
    """Return a row's stage, method, dataset or setting; AS_TRAINED for no setting."""
    return row.get(field) or AS_TRAINED  # earlier versions wrote no setting


def start_row(run: ComparedRun, row: Mapping) -> dict | None:
    """Return the row of the same method, dataset and setting at the run's start.

    Returns:
        The row of results.json; None if the start was not evaluated in this way, or
        this is the row of the start.
    """
    if row["stage"] == START:
        return None
    key = run_key({**row, "stage": START})
    return next((other for other in run.rows if run_key(other) == key), None)
