"""List the runs and evaluations that fill papers' tables on the embedded world.

A row of a recipe uses the recipe's variant `tiny`. A method is run with the small model
that the paper's recipe at this size has in place of the row's model. Rows of several
tables that need the same run are measured once.
"""

import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rsearch.config.recipes import (
    apply_overrides,
    diff,
    fields,
    load,
    run_label,
    to_json,
    validate,
)
from rsearch.config.stage_plan import check_plan, kind_of, stage_configs
from rsearch.evaluation.results import read_results
from rsearch.evaluation.runs import is_same_run
from rsearch.evaluation.statistics import wilson_interval
from rsearch.evaluation.table_rows import PROTOCOL, number_of
from rsearch.evaluation.tables import (
    FOLDER,
    PaperColumn,
    PaperRow,
    PaperTable,
    TinyRow,
)
from rsearch.methods.names import READER_METHODS, split_name
from rsearch.runtime import console, run_directory
from rsearch.runtime.children import Job, print_failures, run_jobs

TINY = "tiny"  # the variant of a recipe, and the size of a table
SOURCE, NAME, WORLD = ".source", ".name", "world:"
DEV, TRAIN = "world:dev", "world:train"  # sets of questions
METHOD_RECIPE = "configs/search_r1.py:tiny"  # recipe whose budgets methods run within
# Prompts with worked examples are longer than a rollout.
LONG_PROMPTS = "eval.max_prompt_tokens=1600"
# All rows of a table use one normaliser. The world's answers are names and years, for
# which all normalisers agree.
NORMALIZE = "eval.normalize=squad"
TRAINING = ("eval.at_start=False", f"eval.methods={PROTOCOL}", NORMALIZE)
NUM_LABELLED = 200  # training questions that a method learns from
CHOOSERS = ("skr", "adaptive_rag")
CHOOSE_FROM = ("direct", "rag", "ircot")
RECOMP = "recomp_extractive"
SAMPLED = "the labels that it learns from are sampled, see docs/learned_methods.md"
UNMADE = {
    "self_rag": "no model of the embedded world has reflection tokens",
    "rearter": SAMPLED,
    "cr_planner": SAMPLED,
}
ALL_KINDS = "all"
SEARCHES = {"searches": "searches"}
METRICS = {"em": "EM", "cover_em": "CEM", "f1": "F1", **SEARCHES}  # of each kind
COSTS = {**SEARCHES, "tokens": "tokens", "seconds": "seconds"}
POLL_SECONDS = 2.0  # seconds between checks of a directory that is locked
# Seconds on two CPU cores that run nothing else, including compilation.
SECONDS = {"curate": 40.0, "sft": 40.0, "rl": 30.0}  # per stage
SECONDS_OF_STEP = {"curate": 0.0, "sft": 0.5, "rl": 6.0}
SECONDS_OF_COMMAND = 25.0
SECONDS_OF_METHOD = {"flare": 1.5, "ircot": 0.3, "": 0.05}  # per question


class TinyRun(NamedTuple):
    """A directory of results: of a run, or of an untrained model that methods use.

    Attributes:
        name: name of the directory.
        settings: "field=value" overrides of the recipe.
        model: the untrained model; "" for a run.
    """

    name: str
    recipe: str
    settings: tuple[str, ...] = ()
    model: str = ""


def tiny_table(name: str, table: PaperTable) -> PaperTable:
    """Return a table whose rows say how they are made on the embedded world.

    To the paper's columns it adds ours: the paper's metrics for each kind of question
    ("world:KIND" is then the column's set), and what answers cost.

    Raises:
        ValueError: a recipe has no variant `tiny`.
    """
    stand_ins = _stand_ins(name, table)
    columns = () if table.curves else _columns(table)
    return dataclasses.replace(
        table,
        columns=table.columns + columns,
        rows=tuple(_tiny_row(row, stand_ins, len(columns)) for row in table.rows),
        settings={},
    )


def _columns(table):
    """Return the columns that hold our numbers."""
    printed_metrics = {column.metric for column in table.columns}
    kinds = (ALL_KINDS, *load(METHOD_RECIPE).world.kinds)
    names = [(kind, m) for m in METRICS if m in printed_metrics for kind in kinds]
    names += [(ALL_KINDS, metric) for metric in COSTS]
    titles = METRICS | COSTS
    return tuple(
        PaperColumn(f"{kind} {titles[metric]}", metric, f"{WORLD}{kind}")
        for kind, metric in dict.fromkeys(names)
    )


def _tiny_row(row, stand_ins, num_columns):
    """Return a row with its recipe, model and settings for the embedded world."""
    tiny = row.tiny or TinyRow(settings=row.settings, asking=row.asking)
    model = tiny.model or stand_ins.get(row.model, "")
    reason = row.reason or tiny.reason or UNMADE.get(split_name(row.method)[0], "")
    if not reason and not model:
        reason = f"the embedded world has nothing in place of {row.model}"
    return dataclasses.replace(
        row,
        printed=" ".join([row.printed, *["-"] * num_columns]),
        method="" if reason else row.method,
        recipe="" if reason or not row.recipe else tiny_recipe(tiny.recipe, row),
        settings=tiny.settings,
        asking=tiny.asking,
        reason=reason,
        tiny=dataclasses.replace(tiny, model=model),
    )


def tiny_recipe(recipe: str, row: PaperRow) -> str:
    """Return a row's recipe on the embedded world, without variants of no effect.

    Args:
        recipe: recipe of a `TinyRow`; "" is the row's recipe with `tiny`.
        row: a row that has a recipe.
    """
    path, _, variant = (recipe or row.recipe).partition(":")
    words = [TINY, *(w for w in variant.split(",") if w not in ("", TINY))]
    for word in words[1:]:
        other_words = [w for w in words if w != word]
        if _values(_spell(path, other_words)) == _values(_spell(path, words)):
            words = other_words
    return _spell(path, words)


def _spell(path, words):
    return f"{path}:{','.join(words)}"


@functools.cache
def _values(recipe):
    """Return {dotted name: value} of a recipe, without its name."""
    return fields(load(recipe)) | {"name": ""}


def _stand_ins(name, table):
    """Return {model of the paper: its stand-in on the embedded world}."""
    rows = [r for r in table.rows if r.recipe and not (r.tiny and r.tiny.reason)]
    recipes = dict.fromkeys(row.recipe for row in rows)
    paper = f"configs/{name.partition(':')[0]}.py"
    if (FOLDER.parent.parent / paper).is_file():
        recipes[paper] = None
    stand_ins = {}
    for recipe in recipes:
        path, _, variant = recipe.partition(":")
        full = _values(recipe)
        tiny = _values(_spell(path, [TINY, *filter(None, variant.split(","))]))
        for field, world in tiny.items():
            if field.endswith(SOURCE) and str(world).startswith(WORLD):
                section = field.removesuffix(SOURCE)
                for model in (full.get(field), full.get(f"{section}{NAME}")):
                    if model:
                        stand_ins.setdefault(model, world)
    for row in rows:
        if row.method not in READER_METHODS:
            stand_ins[row.model] = _values(tiny_recipe("", row))["model.source"]
    return stand_ins


def run_of(row: PaperRow, settings: Sequence[str] = ()) -> TinyRun:
    """Return the directory in which a row is measured.

    Args:
        row: a runnable row of a `tiny_table`.
        settings: "field=value" overrides for all rows.
    """
    if not row.recipe:
        model = row.tiny.model
        label = run_label(model.replace(":", "_"), settings)
        return TinyRun(label, METHOD_RECIPE, tuple(settings), model)
    settings = (*row.settings, *settings)
    return TinyRun(run_label(load(row.recipe).name, settings), row.recipe, settings)


def tiny_runs(
    tables: Sequence[PaperTable], settings: Sequence[str] = ()
) -> dict[TinyRun, list[PaperRow]]:
    """Return {directory: its rows} for all rows of several tables.

    Args:
        settings: "field=value" overrides for all rows.

    Raises:
        ValueError: a run's configuration is not valid.
    """
    rows_of: dict[TinyRun, list[PaperRow]] = {}
    for table in tables:
        for row in table.rows:
            if row.is_runnable:
                rows_of.setdefault(run_of(row, settings), []).append(row)
    for run in rows_of:
        try:
            config = _config(run)
            validate(config)
            check_plan(config)
        except ValueError as error:
            raise ValueError(f"{run.name}: {error}") from None
    return rows_of


def questions_name(max_questions: int, questions: str = DEV) -> str:
    """Return the name of the questions in results.json.

    Args:
        max_questions: most questions that are asked; 0 is all.
        questions: name of a set of the world's questions.
    """
    return f"{questions}[:{max_questions}]" if max_questions else questions


def find_result(
    results: Sequence[Mapping],
    dataset: str,
    *,
    stage: str,
    method: str = PROTOCOL,
    setting: str = "",
) -> Mapping | None:
    """Return a row of results.json, or None.

    Args:
        dataset: see `questions_name`.
        stage: stage after which the policy was asked, or name of an untrained model.
        method: name of the method, with the settings that it must have.
        setting: setting of the evaluation, see `rsearch.evaluate`.
    """
    method_name, needed_settings = split_name(method)
    for result in results:
        name, settings = split_name(result["method"])
        result_key = name, result["dataset"], result["stage"], result.get("setting", "")
        is_match = result_key == (method_name, dataset, stage, setting)
        if is_match and {*needed_settings} <= {*settings}:
            return result
    return None


def _result_of(results, dataset, run, row):
    """Return the row of results.json that a table's row is read from, or None."""
    config = _config(run)
    changes = diff(config, apply_overrides(config, row.asking))
    return find_result(
        results,
        dataset,
        stage=row.stage or row.tiny.model,
        method=row.method or PROTOCOL,
        setting=", ".join(f"{name}={value}" for name, _, value in changes),
    )


def job_of(
    run: TinyRun, rows: Sequence[PaperRow], folder: pathlib.Path, max_questions: int
) -> Job:
    """Return the Job of commands that a directory still needs; none if it is complete.

    Args:
        max_questions: most held-out questions that are asked; 0 is all.

    Raises:
        ValueError: the results there were not written by an evaluation.
    """
    dataset, results = questions_name(max_questions), read_results(folder)
    limit = (f"eval.max_questions={max_questions}",)
    commands = []
    if not run.model:
        # The stages after which the policy is evaluated.
        stages = [
            stage
            for stage, c in stage_configs(_config(run))
            if c.trains == "policy" and kind_of(stage) != "curate"
        ]
        if not all(find_result(results, dataset, stage=stage) for stage in stages):
            settings = (*run.settings, *TRAINING, *limit)
            commands.append(_command("train", run, folder, settings))
    methods: dict[tuple, dict] = {}
    for row in rows:
        if not _result_of(results, dataset, run, row) and (row.method or row.asking):
            names = methods.setdefault(row.asking, {})
            names[row.method or PROTOCOL] = None
    for asking, names in methods.items():
        settings = (*asking, *limit)
        if run.model:
            settings = (*run.settings, LONG_PROMPTS, *settings)
        learners = (*CHOOSERS, RECOMP)
        fixed_methods = [name for name in names if split_name(name)[0] not in learners]
        if fixed_methods:
            commands.append(_command("evaluate", run, folder, settings, fixed_methods))
        commands += _learning_commands(run, folder, results, settings, names)
    return Job(run.name, tuple(commands))


def _learning_commands(run, folder, results, settings, names):
    """Return commands to label questions and to run methods that learn from them."""
    commands, max_questions = [], f"eval.max_questions={NUM_LABELLED}"
    other_settings = [s for s in settings if not s.startswith("eval.max_q")]
    label_settings = (*other_settings, max_questions)
    choosers = [name for name in names if split_name(name)[0] in CHOOSERS]
    questions = questions_name(NUM_LABELLED, TRAIN)
    if choosers:
        missing = [
            method
            for method in CHOOSE_FROM
            if not find_result(results, questions, stage=run.model, method=method)
        ]
        if missing:
            asks = _command("evaluate", run, folder, label_settings, missing)
            commands.append((*asks, f"--sets={TRAIN}"))
        path = f"labels={folder / 'transcripts.jsonl'}:dataset={questions}"
        method_specs = [f"{name}:{path}" for name in choosers]
        commands.append(_command("evaluate", run, folder, settings, method_specs))
    for name in names:
        if split_name(name)[0] == RECOMP:
            path = folder.with_name(f"{folder.name}-sentences.jsonl")
            if not path.exists():
                asks = _command("evaluate", run, folder, label_settings)
                commands.append((*asks, f"--sets={TRAIN}", f"--label_sentences={path}"))
            method_specs = [f"{name}:labels={path}"]
            commands.append(_command("evaluate", run, folder, settings, method_specs))
    return commands


def _command(module, run, folder, settings, methods=()):
    """Return the arguments of a process of rsearch.train or rsearch.evaluate."""
    words = [sys.executable, "-m", f"rsearch.{module}"]
    if run.model or module == "train":  # evaluating a run uses its configuration
        words.append(f"--config={run.recipe}")
    words += [f"--config.{text}" for text in settings]
    words += [f"--model={run.model}"] if run.model else []
    words += [f"--methods={','.join(methods)}"] if methods else []
    return (*words, f"--workdir={folder}")


@functools.cache
def _config(run):
    """Return the configuration of a run, locked."""
    return apply_overrides(load(run.recipe), run.settings)


def hours_of(job: Job, run: TinyRun, max_questions: int) -> float:
    """Return the approximate hours of a job on two cores that run nothing else."""
    num_questions = max_questions or _config(run).world.dev_questions
    seconds = SECONDS_OF_COMMAND * len(job.commands)
    for command in job.commands:
        if "rsearch.train" in command:
            for stage, c in stage_configs(_config(run)):
                kind = kind_of(stage)
                steps = 0 if kind == "curate" else c[kind].steps
                seconds += SECONDS[kind] + SECONDS_OF_STEP[kind] * steps
        for word in command:
            flag, _, methods = word.partition("=")
            if flag == "--methods":
                names = [split_name(name)[0] for name in methods.split(",")]
                rates = SECONDS_OF_METHOD
                seconds += num_questions * sum(rates.get(n, rates[""]) for n in names)
    return seconds / 3600


def folders_of(
    runs: Mapping[TinyRun, Sequence[PaperRow]],
    out: pathlib.Path,
    others: Mapping[pathlib.Path, Mapping],
    *,
    max_questions: int,
) -> dict[TinyRun, pathlib.Path]:
    """Return each run's directory: a complete one of `others`, or one with its name.

    Args:
        out: directory in which new directories are made.
        others: {directory: {dotted name: value}} of existing runs.
    """
    folders = {}
    for run, rows in runs.items():
        config = {} if run.model else json.loads(to_json(_config(run)))
        complete_folders = (
            path
            for path, values in others.items()
            if config
            and is_same_run(fields(config), values)
            and not job_of(run, rows, path, max_questions).commands
        )
        folders[run] = next(complete_folders, out / run.name)
    return folders


def fill(
    runs: Mapping[TinyRun, Sequence[PaperRow]],
    folders: Mapping[TinyRun, pathlib.Path],
    out: pathlib.Path,
    *,
    at_once: int,
    max_questions: int,
) -> dict[str, int]:
    """Run the jobs that are not complete yet.

    Args:
        out: directory of the logs; created if missing.

    Returns:
        {directory's name: exit code} of the jobs that failed.
    """
    for folder in folders.values():
        _wait_for(folder)
    jobs = [job_of(r, rows, folders[r], max_questions) for r, rows in runs.items()]
    unfinished = [job for job in jobs if job.commands]
    console.note(f"{len(jobs)} parts in {out}, {len(jobs) - len(unfinished)} are over")
    out.mkdir(parents=True, exist_ok=True)
    exit_codes = run_jobs(unfinished, out, at_once=at_once)
    print_failures(exit_codes, out)
    return exit_codes


def _wait_for(folder):
    """Wait for a run that has outlived an earlier, killed instance of this command."""
    is_noted = False
    while folder.is_dir():
        try:
            return run_directory.check_free(folder)
        except ValueError as error:
            if not is_noted:
                console.note(f"waiting for another run: {error}")
            is_noted = True
            time.sleep(POLL_SECONDS)


def show_jobs(
    runs: Mapping[TinyRun, Sequence[PaperRow]],
    folders: Mapping[TinyRun, pathlib.Path],
    max_questions: int,
) -> None:
    """Print the runs and evaluations of tables, and the hours of those missing."""
    lines, total = [], 0.0
    for run, rows in runs.items():
        job = job_of(run, rows, folders[run], max_questions)
        hours = hours_of(job, run, max_questions)
        total += hours
        methods = [split_name(row.method or PROTOCOL)[0] for row in rows]
        stages = "" if run.model else ", ".join(_config(run).stages)
        state = f"{hours:.2f}" if job.commands else "is over"
        lines.append([run.name, stages, ", ".join(dict.fromkeys(methods)), state])
    heads = ["directory", "trains", "asks", "hours"]
    console.table("runs and evaluations on the embedded world", heads, lines)
    console.note(
        f"about {total:.1f} hours on two cores, one part after another; before that, "
        "the world's small models take about a quarter of an hour, once per seed"
    )


def find_results(
    table: PaperTable,
    settings: Sequence[str],
    folders: Mapping[TinyRun, pathlib.Path],
    max_questions: int,
) -> dict[str, tuple[pathlib.Path, Mapping]]:
    """Return {row's key: (directory, row of its results.json)} for measured rows.

    Args:
        settings: "field=value" overrides for all rows.
    """
    sources, dataset = {}, questions_name(max_questions)
    for row in table.rows:
        if row.is_runnable:
            run = run_of(row, settings)
            folder = folders[run]
            if result := _result_of(read_results(folder), dataset, run, row):
                sources[row.key] = folder, result
    return sources


def remarks_of(table: PaperTable) -> tuple[str, ...]:
    """Return what readers must know about our numbers in a table."""
    texts = [
        "ours: the embedded world, models of less than a million parameters; its kinds "
        "of questions stand for none of the paper's sets, so that a number of ours "
        "compares with no number of the paper's, only rows of ours with each other"
    ]
    metrics = {column.metric for column in table.columns}
    if any(metric.startswith("judge") for metric in metrics):
        texts.append("ours: no judge; no model of this size can be one")
    if not table.curves and any(not c.mean_of and not c.metric for c in table.columns):
        texts.append("ours: results.json has no number for some columns of the paper")
    reasons: dict[str, list[str]] = {}
    for row in table.rows:
        if not row.is_runnable:
            reasons.setdefault(row.reason, []).append(row.key)
    texts += [f"not run: {', '.join(k)}: {reason}" for reason, k in reasons.items()]
    return tuple(texts)


def cell_of(
    result: Mapping, column: PaperColumn
) -> tuple[float, tuple[float, float] | None, int] | None:
    """Return (value, its interval, questions) in one of our columns, or None.

    The interval for one kind is Wilson's; that of a mean of fractions, such as F1 or
    exact match over samples, is known only for all questions together.
    """
    if not column.set.startswith(WORLD):
        return None
    kind, metric = column.set.removeprefix(WORLD), column.metric
    values = result if kind == ALL_KINDS else result.get("by_kind", {}).get(kind, {})
    value, n = number_of(values, metric), values.get("n", 0)
    if value is None or not n:
        return None
    interval = values.get(f"{metric}_95")
    if kind != ALL_KINDS and metric in ("em", "cover_em") and "rollouts" not in result:
        interval = wilson_interval(round(value * n), n)
    return value, interval, n
