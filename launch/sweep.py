#!/usr/bin/env python3
"""Train a recipe once for each combination of settings, and compare the runs.

    python launch/sweep.py --config=configs/quickstart.py --out=runs/lr \\
        --config.rl.lr=3e-4,6e-4 --config.seed=0,1,2 --at_once=2

Values are separated by commas outside brackets and quotes; the command above has six
trials. Trials that do not form a grid are listed in a file, one a line, as additional
arguments of `rsearch.train`:

    python launch/sweep.py --config=configs/r1_searcher.py:tiny --out=runs/rewards \\
        --trials=trials.txt

A trial's run is in OUT/NAME and its output in OUT/NAME.log. The name has the fields
that differ between trials; a field with one value is the same for all. The same command
resumes a sweep that was stopped; trials that have succeeded are not run again, unless
their directory was deleted.
"""

import itertools
import os
import pathlib
import re
import shlex
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rsearch import compare
from rsearch.config.recipes import (
    REQUIRED,
    apply_overrides,
    check_effective,
    load,
    parse_flags,
    run_command,
    to_json,
    validate,
)
from rsearch.config.stage_plan import check_plan
from rsearch.runtime import console
from rsearch.runtime.children import Job, print_failures, run_jobs
from rsearch.runtime.jsonl import append_jsonl, read_jsonl, recover_jsonl
from rsearch.setup.checks import check_names

RECORD = "sweep.jsonl"  # in OUT: a line for each trial that has ended
FIELD = "--config."
QUOTED = re.compile(r"""\A(['"])((?:(?!\1).)*)\1\Z""", re.DOTALL)
MAX_NAME = 120  # characters of a directory's name
FLAGS = {
    "config": (None, "the recipe, FILE[:VARIANT], for trials that do not name one"),
    "out": (REQUIRED, "directory of the sweep, which gets a run for each trial"),
    "trials": ("", "file with one trial a line: arguments of rsearch.train"),
    "at_once": (1, "trials that run at the same time", 1),
    "gpus_each": (0, "GPUs reserved for each trial; 0 = all trials share all GPUs", 0),
    "commands": (False, "prints a command for each trial, without running any"),
    "group": (False, "prints mean and deviation over seeds in the table"),
    "allow": ("", "fields in which the table's rows may differ; see rsearch.compare"),
    "dry_run": (False, "checks and shows the trials, without running any"),
}


class Trial(NamedTuple):
    """One run: the name of its directory and the arguments of rsearch.train."""

    name: str
    words: tuple[str, ...]


def main(argv) -> int:
    """Check every trial, run those that are left, and print the table."""
    axes, other_words = split_axes(argv)
    flags = parse_flags(other_words, flags=FLAGS)
    compare.parse_allow(flags["allow"])  # refused now rather than after hours
    at_once = flags["at_once"]
    gpus = split_gpus(at_once, flags["gpus_each"]) if flags["gpus_each"] else None
    out = pathlib.Path(flags["out"])
    trials = expand(axes, read_trials(flags["trials"]), flags["config"])
    check_trials(trials)
    if flags["commands"]:
        for trial in trials:
            command = shlex.join(train_command(trial, out, python="python"))
            print(command.replace("\n", "'$'\\n''"))  # a line each, for bash
        return 0
    finished_trials = finished(out)
    if flags["dry_run"]:
        rows = [(t.name, shlex.join(t.words), t in finished_trials) for t in trials]
        console.table(str(out), ("trial", "arguments", "is over"), rows)
        return 0
    out.mkdir(parents=True, exist_ok=True)
    # A crash may have cut its last line.
    recover_jsonl(out / RECORD, on_bad=console.note)
    remaining_trials = [trial for trial in trials if trial not in finished_trials]
    console.note(
        f"{len(trials)} trials in {out}, {len(trials) - len(remaining_trials)} are over"
    )
    failed_trials = run_trials(remaining_trials, out, at_once=at_once, gpus=gpus)
    run_folders = [str(out / t.name) for t in trials if t.name not in failed_trials]
    print_failures(failed_trials, out)
    if run_folders:  # last, since it refuses runs that were measured differently
        words = ["--group"] if flags["group"] else []
        words += [f"--allow={flags['allow']}"] if flags["allow"] else []
        compare.main([*run_folders, *words])
    return 1 if failed_trials else 0


def split_axes(argv) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Split a command line into [(--config.FIELD, values)] and other arguments.

    Raises:
        ValueError: a field has no value or is given twice.
    """
    axes, other_words, words = {}, [], list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith(FIELD):
            other_words.append(word)
            continue
        name, equals, value = word.partition("=")
        if not equals:
            if not words:
                raise ValueError(f"{name} needs a value: {name}=...")
            value = words.pop(0)
        if name in axes:
            raise ValueError(f"{name} is given twice; write {name}=A,B")
        axes[name] = split_values(name, value)
    return list(axes.items()), other_words


def split_values(name, text) -> list[str]:
    """Return the values between commas, except commas in brackets or quotes.

    Quotes around a whole value are removed, as a shell does.

    Raises:
        ValueError: a value is empty or given twice, or brackets or quotes do not match.
    """
    values, start, closing, quote = [], 0, [], ""
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            closing.append(")]}"["([{".index(letter)])
        elif letter in ")]}":
            if not closing or closing.pop() != letter:
                raise ValueError(f"{name}={text}: {letter!r} closes nothing")
        elif letter == "," and not closing:
            values.append(text[start:i].strip())
            start = i + 1
    if quote or closing:
        raise ValueError(f"{name}={text}: no {quote or closing[-1]} at the end")
    values.append(text[start:].strip())
    if "" in values:
        raise ValueError(f"{name}={text}: an empty value; write '' for an empty string")
    values = [QUOTED.sub(r"\2", value) for value in values]
    if len(set(values)) < len(values):
        raise ValueError(f"{name}={text}: a value is given twice")
    return values


def read_trials(path) -> list[tuple[str, list[str]]]:
    """Return [(file:line, arguments)] of a file of trials; [("", [])] without a file.

    Raises:
        ValueError: a line is not a trial (the error names file:line), or there is none.
    """
    if not path:
        return [("", [])]
    trial_lines = []
    lines = pathlib.Path(path).read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        source = f"{path}:{number}"
        try:
            words = shlex.split(line.decode(), comments=True)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
        if bad_words := [w for w in words if not w.startswith((FIELD, "--config="))]:
            raise ValueError(
                f"{source}: {bad_words[0]!r}; a trial is written as "
                "--config.FIELD=VALUE"
            )
        if bad_words := [word for word in words if "=" not in word]:
            raise ValueError(
                f"{source}: {bad_words[0]} needs a value: {bad_words[0]}=..."
            )
        if words:
            trial_lines.append((source, words))
    if not trial_lines:
        raise ValueError(f"{path}: no trial in it")
    return trial_lines


def expand(axes, lines, recipe) -> list[Trial]:
    """Return a trial for each line of the list and combination of the axes' values.

    Args:
        axes: [(--config.FIELD, values)].
        lines: [(file:line, arguments)], from `read_trials`.
        recipe: recipe of the lines that name none; or None.

    Raises:
        ValueError: a trial has no recipe, a line sets the field of an axis, or two
            trials have the same name.
    """
    names, values = [name for name, _ in axes], [values for _, values in axes]
    trials, sources = [], {}
    for source, words in lines:
        recipe_words = [word for word in words if word.startswith("--config=")]
        if not recipe_words and recipe is None:
            raise ValueError("--config=... is missing: the recipe to train")
        if repeated_fields := {word.partition("=")[0] for word in words} & set(names):
            raise ValueError(
                f"{source}: {repeated_fields.pop()} is also set on the command line"
            )
        other_words = [word for word in words if word not in recipe_words]
        for combination in itertools.product(*values):
            axis_words = [f"{n}={v}" for n, v in zip(names, combination, strict=True)]
            differing = [
                w for w, v in zip(axis_words, values, strict=True) if len(v) > 1
            ]
            name = name_trial(
                [w.partition("=")[2] for w in recipe_words], [*other_words, *differing]
            )
            if name in sources:
                raise ValueError(
                    f"{source or 'the sweep'}: a second trial named {name}"
                    + (f", after {sources[name]}" if sources[name] else "")
                )
            sources[name] = source
            trial_words = (
                *(recipe_words or [f"--config={recipe}"]),
                *other_words,
                *axis_words,
            )
            trials.append(Trial(name, trial_words))
    return trials


def name_trial(recipes, words) -> str:
    """Return a name such as 'rl.lr=3e-4-seed=0'; recipes, if any, come first."""
    stems = [re.sub(r"(^|.*/)([^/:]+?)(\.py)?(:|$)", r"\2\4", r) for r in recipes]
    parts = [*stems, *(word.removeprefix(FIELD) for word in words)]
    name = "-".join(re.sub(r"[^\w.=+-]+", "_", part) for part in parts)
    if len(name) > MAX_NAME:
        raise ValueError(f"a trial's name has more than {MAX_NAME} characters: {name}")
    return name or "trial"


def check_trials(trials):
    """Refuse a trial that could not start or repeats another, before any starts.

    Raises:
        ValueError: what `rsearch.train` would raise, after the trial's name; or two
            trials have the same configuration, as with 1e-4 and 0.0001.
    """
    names = {}
    for trial in trials:
        recipe = trial.words[0].partition("=")[2]
        overrides = [word.removeprefix("--") for word in trial.words[1:]]
        try:
            config = apply_overrides(load(recipe), overrides)
            validate(config)
            check_effective(config)
            check_plan(config)
            check_names(config)
        except ValueError as error:
            raise ValueError(f"{trial.name}: {error}") from error
        other = names.setdefault(to_json(config), trial.name)
        if other != trial.name:
            raise ValueError(f"{trial.name}: the same configuration as {other}")


def train_command(trial, out, *, python=sys.executable) -> list[str]:
    """Return the arguments of the process that trains the trial."""
    workdir = f"--workdir={out / trial.name}"
    return [python, "-m", "rsearch.train", *trial.words, workdir]


def finished(out) -> set[Trial]:
    """Return the trials that have succeeded and whose run has not been deleted."""
    record = out / RECORD
    rows = read_jsonl(record, parse=_parse_end) if record.exists() else []
    trials = [Trial(r["name"], tuple(r["words"])) for r in rows if r["exit_code"] == 0]
    return {trial for trial in trials if (out / trial.name).is_dir()}


def _parse_end(row):
    """Return a row of the record; refuse one that `run_trials` cannot have written."""
    try:
        is_end = type(row["exit_code"]) is int
        texts = [row["name"], *row["words"]]
    except (TypeError, LookupError):
        is_end = False
    if not is_end or not all(isinstance(text, str) for text in texts):
        raise ValueError("not a trial's name, words and exit_code; delete the line")
    return row


def split_gpus(at_once, gpus_each) -> list[str]:
    """Return the CUDA_VISIBLE_DEVICES of each of the trials that run at the same time.

    If this process has a CUDA_VISIBLE_DEVICES, it is split between the trials.

    Raises:
        ValueError: it names too few GPUs.
    """
    num_gpus, visible_gpus = at_once * gpus_each, os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(num_gpus)]
    if visible_gpus is not None:
        names = [name.strip() for name in visible_gpus.split(",") if name.strip()]
    if len(names) < num_gpus:
        raise ValueError(
            f"--at_once={at_once} trials of --gpus_each={gpus_each} need {num_gpus} "
            f"GPUs, but CUDA_VISIBLE_DEVICES={visible_gpus}"
        )
    return [",".join(names[i : i + gpus_each]) for i in range(0, num_gpus, gpus_each)]


def run_trials(trials, out, *, at_once, gpus=None) -> dict[str, int]:
    """Run the trials; return {name: exit code} of those that failed.

    If `gpus` is given, each trial that is running has the GPUs of one of its items.
    """
    words = {trial.name: trial.words for trial in trials}
    jobs = [Job(trial.name, (tuple(train_command(trial, out)),)) for trial in trials]

    def record(job, exit_code, seconds):
        row = {"name": job.name, "words": words[job.name], "exit_code": exit_code}
        try:  # the trials that are running must not be stopped
            append_jsonl(out / RECORD, row | {"seconds": round(seconds, 1)})
        except OSError as error:
            console.note(f"{error}: {job.name} will count as unfinished")

    return run_jobs(jobs, out, at_once=at_once, gpus=gpus, on_end=record)


if __name__ == "__main__":
    sys.exit(run_command(main))
