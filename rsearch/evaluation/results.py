"""Write, read and show the rows of results.json and their transcripts."""

import itertools
import pathlib
import reprlib
import sys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from rsearch.data.demonstrations import DIRECT, PROTOCOL, RAG
from rsearch.evaluation.comparability import (
    MADE_BY,
    SAMPLES,
    SEEDS,
    manifest_fault,
)
from rsearch.evaluation.judge import Verdict
from rsearch.evaluation.predictions import RUN, run_key
from rsearch.evaluation.scoring import COSTS, scores_of_rows
from rsearch.evaluation.statistics import macro_scores
from rsearch.methods.names import split_name
from rsearch.rollout.health import HEALTH, NEEDLESS, NOTABLE, needless_searches
from rsearch.rollout.rollout_log import kind_record, reward_record, search_record
from rsearch.runtime import console, files, run_directory
from rsearch.runtime.console import clean_line
from rsearch.runtime.jsonl import read_jsonl, recover_jsonl, write_jsonl
from rsearch.runtime.workdir import write_json
from rsearch.text.normalize import NORMALIZERS
from rsearch.text.suspicion import is_suspicious
from rsearch.types import Group

JUDGE_COLUMNS = ("judge", "judge_agreement", "judge_unparsed", "judge_failed")
SAMPLING = ("rollouts", "em_sd")  # columns of rows with several samples or seeds
FAILURES = ("judge_error", "too_long")  # columns shown only if any row has some
LABELS = ("setting", "normalize")  # columns shown only if rows differ in them
ALL_COLUMNS = ("stage", "method", "dataset", *LABELS, "n", "rollouts", "em", "em_95")
ALL_COLUMNS += ("em_sd", "f1", "cover_em", *JUDGE_COLUMNS, "searches", "policy_tokens")
ALL_COLUMNS += ("answered", "malformed", "truncated", "tool_error", *FAILURES)
ALL_COLUMNS += ("skipped", "seconds")
SPECIAL = {*LABELS, *JUDGE_COLUMNS, *SAMPLING, *FAILURES}
COLUMNS = tuple(name for name in ALL_COLUMNS if name not in SPECIAL)
# Columns that a narrow terminal may hide, the most important first.
OPTIONAL = ("f1", "searches", "skipped", "em_sd", "judge", "tool_error", "judge_error")
OPTIONAL += ("too_long", "cover_em", "policy_tokens", "answered", "malformed")
OPTIONAL += ("truncated", "rollouts", "judge_agreement", "judge_unparsed")
OPTIONAL += ("judge_failed", "seconds")
NUMBERS = (*COLUMNS[3:5], *COLUMNS[6:], "queries", "searches_right", "searches_wrong")
JUDGE_NUMBERS = (*JUDGE_COLUMNS, "judge_right_em_wrong", "judge_wrong_em_right")
JUDGE_NUMBERS += ("judge_right_steps",)
NUMBERS += ("unsearched", *FAILURES, *JUDGE_NUMBERS, *HEALTH, *COSTS, *SAMPLING)
INTERVALS = ("em_95", "f1_95", "cover_em_95")
RESULTS, TRANSCRIPTS = "results.json", "transcripts.jsonl"
HINT = f"see {RESULTS}"
MACRO_HINT = "rsearch.score --macro prints them"
# Settings of methods that name the labels they learn from.
LABEL_SETTINGS = ("labels=", "dataset=")
# Headings of by_known: whether the embedded world's model knows all facts in advance.
KNOWN_HEADINGS = {"known": "known without search", "not known": "needs search"}


def transcripts(
    groups: Sequence[Group],
    row: dict,
    verdicts: Sequence[Verdict] = (),
    rewards: tuple[np.ndarray, Mapping[str, np.ndarray]] | None = None,
) -> list[dict]:
    """Return one JSON object for each rollout, for transcripts.jsonl.

    A sample's object also has its `seed`, and as `sample` its number among the
    question's samples with that seed.

    Args:
        groups: groups that the row was measured on.
        verdicts: verdict on each rollout; empty without a judge.
        rewards: [Q, G] rewards and {term: [Q, G]}; None if they are not computed.
    """
    key = {name: row[name] for name in RUN if name in row}
    made_by = row.get(MADE_BY, {})
    names: Iterable[dict] = itertools.repeat({})
    if SAMPLES in made_by:
        names = [
            {"seed": seed, "sample": sample}
            for seed in made_by[SEEDS]
            for sample in range(made_by[SAMPLES])
        ]
    rows = [
        {
            **key,
            "id": group.question.id,
            **kind_record(group.question),
            **name,
            "question": group.question.text,
            "golden_answers": list(group.question.golden_answers),
            "prediction": rollout.answer,
            "outcome": rollout.outcome.value,
            **search_record(rollout),
            **({"notes": [*map(list, rollout.notes)]} if rollout.notes else {}),
            "suspicious": sorted({p.id for p in rollout.passages if is_suspicious(p)}),
            "segments": [
                {"source": s.source.name.lower(), "text": s.text}
                for s in rollout.segments
            ],
        }
        for group in groups
        for rollout, name in zip(group.rollouts, names, strict=False)
    ]
    if rewards is not None:
        totals, terms = rewards
        records = [
            reward_record(i, totals[q], {name: x[q] for name, x in terms.items()})
            for q, group in enumerate(groups)
            for i in range(len(group.rollouts))
        ]
        rows = [r | record for r, record in zip(rows, records, strict=True)]
    if not verdicts:
        return rows
    return [
        {**row, "judge": {"score": v.score, "replies": list(v.replies)}}
        for row, v in zip(rows, verdicts, strict=True)
    ]


def record_results(folder: pathlib.Path, row: dict, rollouts: list[dict]) -> list[dict]:
    """Write a row to results.json and its `transcripts` to transcripts.jsonl.

    An earlier row of the same stage, method, dataset and setting is replaced. The row
    of the policy's protocol gets its `needless_searches` once there is a row of
    `direct` on the same questions.

    Returns:
        All rows of results.json.

    Raises:
        LostDirectoryError: the run has lost its directory; both files are in the
            directory that it is saved to instead.
    """

    def is_other(other):
        return run_key(other) != run_key(row)

    run_folder, folder = folder, run_directory.locate(folder)
    folder.mkdir(exist_ok=True)
    path = folder / TRANSCRIPTS
    # A damaged line must not cost rows that took hours to measure.
    old_lines = recover_jsonl(path, parse=_parse_transcript, on_bad=console.note)
    rollouts = [*filter(is_other, old_lines), *rollouts]
    write_jsonl(path, rollouts)
    rows = [*filter(is_other, read_results(folder)), row]
    # A row of `direct` completes the protocol's row, whichever of them comes first.
    rows = [
        _with_needless(r, rows, rollouts)
        if r["method"] == PROTOCOL
        and (r["stage"], r["dataset"]) == (row["stage"], row["dataset"])
        else r
        for r in rows
    ]
    write_json(folder / RESULTS, rows)
    run_directory.stop_if_lost(run_folder)
    return rows


def _with_needless(row, rows, rollouts):
    """Return a row of the protocol with its `needless_searches`.

    Args:
        rollouts: all lines of transcripts.jsonl.
    """
    same_fields = ("stage", "step", "dataset", "setting", "questions", "normalize")
    direct = [r for r in rows if r["method"] == DIRECT]
    is_known = any(all(r.get(n) == row.get(n) for n in same_fields) for r in direct)
    if not is_known or row.get("normalize") not in NORMALIZERS:
        return {**row, NEEDLESS: None}

    def of_method(method):
        key = run_key({**row, "method": method})
        return [r for r in rollouts if run_key(r) == key]

    answers = [r for r in of_method(DIRECT) if has_answers(r)]
    em = _means_by_id(answers, scores_of_rows(answers, row["normalize"])["em"])
    is_right = {name: score == 1 for name, score in em.items()}  # in all samples
    protocol_rollouts = of_method(PROTOCOL)
    search_rates = _means_by_id(
        protocol_rollouts, [bool(r.get("queries")) for r in protocol_rollouts]
    )
    return {**row, NEEDLESS: needless_searches(search_rates, is_right)}


def _means_by_id(rollouts, values) -> dict[str, float]:
    """Return {question id: mean value of its rollouts}."""
    by_id: dict[str, list] = {}
    for rollout, value in zip(rollouts, values, strict=True):
        by_id.setdefault(rollout["id"], []).append(value)
    return {name: sum(id_values) / len(id_values) for name, id_values in by_id.items()}


def has_answers(rollout: Mapping) -> bool:
    """Return whether a line of transcripts.jsonl has what exact match compares."""
    return {"prediction", "golden_answers"} <= rollout.keys()


def read_results(folder: pathlib.Path) -> list[dict]:
    """Return the rows of a run's results.json, oldest first; [] without one.

    Raises:
        ValueError: a field was not written by an evaluation; names file, row and field.
        OSError: the file cannot be read.
    """
    path = folder / RESULTS
    if not path.exists():
        return []
    rows = files.read_json(path)
    if not isinstance(rows, list):
        raise ValueError(f"{path}: not the results of a run; remove it")
    for number, row in enumerate(rows, start=1):
        if fault := _field_fault(row):
            raise ValueError(f"{path}: row {number}: {fault}")
    return rows


def _field_fault(row):
    """Return what is wrong with a field of a row, or of its kinds; or ""."""
    names = ("stage", "method", "dataset")
    if not isinstance(row, dict) or not row.keys() >= set(names):
        return f"{reprlib.repr(row)}: not the results of a run; remove it"
    for name in (*names, *(["setting"] if "setting" in row else ())):
        if not isinstance(row[name], str):
            return f"{name} = {reprlib.repr(row[name])}: expected text"
    scores = {"": row}
    for name in ("by_kind", "by_known"):
        kinds = row.get(name, {})
        if not isinstance(kinds, dict):
            return f"{name} = {reprlib.repr(kinds)}: expected an object"
        # Their names come from the dataset, and must not break a message's line.
        scores |= {f"{name}.{clean_line(k)}": v for k, v in kinds.items()}
    for field, values in scores.items():
        if not isinstance(values, dict):
            return f"{field} = {reprlib.repr(values)}: expected an object"
        for name in NUMBERS:
            if values.get(name) is not None and not _is_number(values[name]):
                key, value = f"{field}.{name}".lstrip("."), reprlib.repr(values[name])
                return f"{key} = {value}: expected a number or null"
        for name in INTERVALS:
            pair = values.get(name)
            is_pair = isinstance(pair, list) and len(pair) == 2
            if pair is not None and not (is_pair and all(map(_is_number, pair))):
                return f"{name} = {reprlib.repr(pair)}: expected two numbers"
    return _notes_fault(row.get("notes", {})) or manifest_fault(row)


def _notes_fault(notes):
    """Return what is wrong with a row's distributions of notes; or ""."""
    if not isinstance(notes, dict):
        return f"notes = {reprlib.repr(notes)}: expected an object"
    for name, summary in notes.items():
        numbers = []
        if isinstance(summary, dict):
            quartiles = summary.get("quartiles")
            numbers = [summary.get("n"), summary.get("mean")]
            numbers += quartiles if isinstance(quartiles, list) else []
        if len(numbers) != 7 or not all(map(_is_number, numbers)):
            text = f"notes.{clean_line(name)} = {reprlib.repr(summary)}"
            return f"{text}: expected n, mean and five quartiles"
    return ""


def _is_number(value):
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # NaN is not


def read_transcripts(folder: pathlib.Path) -> list[dict]:
    """Return the rollouts of a run's transcripts.jsonl; see `transcripts`.

    Raises:
        ValueError: a line was not written by an evaluation; names the file and line.
        OSError: the file cannot be read.
    """
    return read_jsonl(folder / TRANSCRIPTS, parse=_parse_transcript)


def normalizers_of(
    folder: pathlib.Path, rollouts: Sequence[Mapping], default: str
) -> list[str]:
    """Return the normaliser with which a run has scored each of its rollouts.

    An evaluation may have another one than the run's configuration.

    Args:
        rollouts: lines of transcripts.jsonl.
        default: normaliser of lines whose row of results.json names none.
    """
    names = {run_key(row): row.get("normalize") for row in read_results(folder)}
    row_names = [names.get(run_key(rollout)) for rollout in rollouts]
    return [name if name in [*NORMALIZERS] else default for name in row_names]


def _parse_transcript(row):
    if not isinstance(row, dict):
        raise ValueError(f"{reprlib.repr(row)}: expected an object")
    for name in ("stage", "method", "dataset", "id", "question"):
        if not isinstance(row.get(name), str):
            raise ValueError(f"{name} = {reprlib.repr(row.get(name))}: expected text")
    for name in ("setting", "prediction"):
        if not isinstance(row.get(name), str | None):
            raise ValueError(f"{name} = {reprlib.repr(row[name])}: expected text")
    golden = row.get("golden_answers", [])
    if not isinstance(golden, list) or not all(isinstance(g, str) for g in golden):
        raise ValueError(f"golden_answers = {reprlib.repr(golden)}: expected texts")
    segments = row.get("segments")
    if not isinstance(segments, list) or not all(
        isinstance(s, dict) and isinstance(s.get("text"), str) for s in segments
    ):
        raise ValueError(f"segments = {reprlib.repr(segments)}: expected texts")
    return row


def show_results(
    rows: Sequence[dict], config: ConfigDict, *, has_means: bool = False
) -> None:
    """Print the table of results, and smaller ones: means, costs, kinds and searches.

    The last one has only rows whose searches deserve a look, see NOTABLE.

    Args:
        has_means: whether to print means over datasets. All rows of a run may include
            training questions, or a set next to its parts: only the datasets that one
            evaluation names belong together.
    """
    methods, datasets = _method_names(rows), _dataset_names(rows)
    rows = [
        {
            **row,
            **_labels(row, config),
            "method": methods[row["method"]],
            "dataset": datasets[row["dataset"]],
        }
        for row in rows
    ]
    title = f"{config.name}: scores in percent, outcomes in rollouts"
    if "normalize" not in (labels := _differing_labels(rows)):
        normalizer = rows[0]["normalize"] if rows else config.eval.normalize
        title += f", answers normalised as {normalizer}"

    def cell(row, name):
        if row.get(name) is None:  # a row of an earlier version
            return None
        if name == "em_95":
            low, high = row["em_95"]
            return f"{100 * low:.1f} - {100 * high:.1f}"
        if name in ("em", "em_sd", "f1", "cover_em", "judge", "judge_agreement"):
            return f"{100 * row[name]:.1f}"
        if isinstance(row[name], float) and row[name] >= 1000:
            return f"{row[name]:.0f}"  # not 1.2e+04 seconds
        return row[name]

    shown = {*COLUMNS, *labels}
    shown |= {n for n in FAILURES if any(row.get(n) for row in rows)}
    shown |= {n for n in SAMPLING if any(row.get(n) is not None for row in rows)}
    shown |= {n for n in JUDGE_COLUMNS if any("judge" in row for row in rows)}
    columns = [name for name in ALL_COLUMNS if name in shown]
    cells = [[cell(row, name) for name in columns] for row in rows]
    # The judge's score is a mean over the calls that did not fail.
    is_judge_partial = any(row.get("judge_failed") for row in rows)
    never_hidden = ("judge_failed",) if is_judge_partial else ()
    optional = [n for n in OPTIONAL if n in columns and n not in never_hidden]
    console.table(title, columns, cells, optional=optional, hint=HINT)
    if has_means:
        _show_means(rows)
    _show_costs(rows)
    _show_notes(rows)
    _show_kinds(rows)
    _show_health(rows)


def _dataset_names(rows) -> dict[str, str]:
    """Return {dataset: its name, without folders if the names stay distinct}."""
    names = {row["dataset"]: row["dataset"].rpartition("/")[2] for row in rows}
    return _short_if_distinct(names)


def _method_names(rows) -> dict[str, str]:
    """Return {method: its name, without its labels if the names stay distinct}."""
    names = {}
    for row in rows:
        name, settings = split_name(row["method"])
        settings = [s for s in settings if not s.startswith(LABEL_SETTINGS)]
        names[row["method"]] = ":".join([name, *settings])
    return _short_if_distinct(names)


def _short_if_distinct(names: dict[str, str]) -> dict[str, str]:
    is_clear = len({*names.values()}) == len(names)
    return names if is_clear else {name: name for name in names}


def _subjects(rows) -> tuple[list[str], list[list[str]]]:
    """Return the headings and cells that identify the rows of a smaller table."""
    has_several = len({row["dataset"] for row in rows}) > 1
    headings = ["stage", "method", *(["dataset"] if has_several else [])]
    headings += _differing_labels(rows)
    return headings, [[row[name] for name in headings] for row in rows]


def _labels(row, config) -> dict[str, str]:
    """Return a row's values of LABELS; earlier versions recorded neither."""
    defaults = {"setting": "", "normalize": config.eval.normalize}
    values = {name: row.get(name) for name in LABELS}
    return {n: v if isinstance(v, str) else defaults[n] for n, v in values.items()}


def _differing_labels(rows) -> list[str]:
    """Return the names in LABELS in which rows differ."""
    return [name for name in LABELS if len({row[name] for row in rows}) > 1]


def _show_health(rows):
    """Print the search metrics, in percent, of rows where any of them is notable."""
    subject_headings, subjects = _subjects(rows)
    notable = [
        (subject, row)
        for subject, row in zip(subjects, rows, strict=True)
        if any((row.get(name) or 0) >= bound for name, bound in NOTABLE.items())
    ]
    if not notable:
        return

    def cell(row, name):
        return None if row.get(name) is None else f"{100 * row[name]:.0f}"

    cells = [
        [*subject, *(cell(row, name) for name in HEALTH)] for subject, row in notable
    ]
    headings = [name.partition("_")[0] for name in HEALTH]
    columns = [*subject_headings, *headings]
    console.table("searches, percent", columns, cells, optional=headings, hint=HINT)


def _show_means(rows):
    """Print the means over datasets, each counted once, of methods with several."""
    # In one evaluation a setting differs only by what defines a set, such as its index.
    labels = [name for name in _differing_labels(rows) if name != "setting"]
    names = ("stage", "method", *labels)
    scores = [interval.removesuffix("_95") for interval in INTERVALS]
    rows_by_system: dict[tuple, list] = {}
    for row in rows:
        # Earlier versions recorded no intervals.
        if all(row.get(interval) for interval in INTERVALS):
            system = tuple(row[name] for name in names)
            rows_by_system.setdefault(system, []).append(row)
    lines = []
    for system, system_rows in rows_by_system.items():
        if len(system_rows) < 2:
            continue
        line = [*system, len(system_rows)]
        means = macro_scores(system_rows, scores)
        for name in scores:
            low, high = means[f"{name}_95"]
            line += [f"{100 * means[name]:.1f}", f"{100 * low:.1f} - {100 * high:.1f}"]
        lines.append(line)
    if not lines:
        return
    values = [n for name in scores for n in (name, f"{name}_95")]
    title, columns = "means over datasets, percent", [*names, "datasets", *values]
    console.table(title, columns, lines, optional=values[2:], hint=MACRO_HINT)


def _show_costs(rows):
    """Print what an answer costs, if there are methods besides the policy's own."""
    if {row["method"] for row in rows} <= {PROTOCOL, DIRECT, RAG}:
        return
    subject_headings, subjects = _subjects(rows)
    names = (*COSTS[:1], "searches", *COSTS[1:], "policy_tokens")
    cells = [
        [*subject, *(_rounded(row.get(name)) for name in names)]
        for subject, row in zip(subjects, rows, strict=True)
    ]
    title, columns = "costs: means over questions", [*subject_headings, *names]
    console.table(title, columns, cells, optional=names, hint=HINT)


def _show_notes(rows):
    """Print the distribution of what methods noted about their steps."""
    subject_headings, subjects = _subjects(rows)
    cells = [
        [
            *subject,
            name,
            notes["n"],
            *map(_rounded, [notes["mean"], *notes["quartiles"]]),
        ]
        for subject, row in zip(subjects, rows, strict=True)
        for name, notes in row.get("notes", {}).items()
    ]
    if cells:
        numbers = ("mean", "least", "25 %", "median", "75 %", "greatest")
        columns = [*subject_headings, "note", "n", *numbers]
        title = "notes of methods on their steps"
        console.table(title, columns, cells, optional=numbers, hint=HINT)


def _rounded(value: float | None) -> str | None:
    """Return a mean in a few characters; None, as in earlier versions' rows, stays."""
    return None if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _show_kinds(rows):
    """Print exact match and searches, one column for each kind of question."""
    subject_headings, subjects = _subjects(rows)
    scores_by_kind = []
    for row in rows:
        by_known = row.get("by_known", {})
        known_scores = {
            KNOWN_HEADINGS.get(name, name): scores for name, scores in by_known.items()
        }
        scores_by_kind.append({**row.get("by_kind", {}), **known_scores})
    kinds = sorted({kind for by_kind in scores_by_kind for kind in by_kind})
    if len(kinds) < 2:
        return

    def cell(scores):
        scores = scores or {}
        if scores.get("searches") is None:
            return "-"
        em = "-" if scores.get("em") is None else f"{100 * scores['em']:.0f}"
        return f"{em} / {scores['searches']:.2f}"

    cells = [
        [*subject, *(cell(by_kind.get(kind)) for kind in kinds)]
        for subject, by_kind in zip(subjects, scores_by_kind, strict=True)
    ]
    title = "percent EM / searches, by kind"
    columns = [*subject_headings, *kinds]
    console.table(title, columns, cells, optional=kinds, hint=HINT)
