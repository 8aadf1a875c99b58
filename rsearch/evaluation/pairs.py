"""Compare rows of results that were measured on the same questions."""

import pathlib
import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rsearch.evaluation.predictions import RUN, read_predictions, run_key
from rsearch.evaluation.results import TRANSCRIPTS
from rsearch.evaluation.scoring import scores_of_questions
from rsearch.evaluation.statistics import (
    mcnemar_p,
    paired_difference,
    seed_interval,
)
from rsearch.text.normalize import NORMALIZERS

SEED_SCORES = ("em", "f1", "searches")


class PairedRows(NamedTuple):
    """Two rows on the same questions, and how they differ.

    Attributes:
        row, baseline: positions of the rows; differences are `row` minus `baseline`.
        n: number of questions.
        differences: {"em", "f1": (difference, (low, high))}, fractions from -1 to 1.
        p: p-value of McNemar's exact test on exact matches; None if these are means
            over samples.
    """

    row: int
    baseline: int
    n: int
    differences: dict
    p: float | None

    @property
    def p_text(self) -> str:
        """Return the p-value as tables show it, never as 0; "" if there is none."""
        if self.p is None:
            return ""
        return "< 0.0001" if self.p < 0.0001 else f"{self.p:.4f}"


class SeedPairs(NamedTuple):
    """Two rows that are means over seeds, and how they differ.

    Attributes:
        row, baseline: positions of the rows; differences are `row` minus `baseline`.
        n: number of seeds that both rows have.
        differences: {name in SEED_SCORES: (mean difference, (low, high))}, without
            scores that any run lacks. The interval is None if all seeds have the same
            difference.
    """

    row: int
    baseline: int
    n: int
    differences: dict


def compare_over_seeds(
    rows: Sequence[Mapping[Hashable, Sequence[Mapping]]],
) -> list[SeedPairs]:
    """Compare each row with the first one on the same questions, seed by seed.

    Runs of one seed and the same questions are compared: in the embedded world each
    seed has its own questions, elsewhere all seeds have the same. The interval is over
    seeds, see `seed_interval`.

    Args:
        rows: for each row, {key of a seed and its questions: {score: mean} of each run
            with them}.

    Returns:
        Pairs of rows that share at least two seeds.
    """
    pairs = []
    for i, seeds in enumerate(rows):
        shared_keys = [[key for key in seeds if key in other] for other in rows[:i]]
        baseline = next(
            (j for j, keys in enumerate(shared_keys) if len(keys) > 1), None
        )
        if baseline is None:
            continue
        keys, differences = shared_keys[baseline], {}
        for name in SEED_SCORES:
            runs = [run for k in keys for run in (*seeds[k], *rows[baseline][k])]
            if any(run.get(name) is None for run in runs):
                continue
            deltas = [
                _mean(seeds[key], name) - _mean(rows[baseline][key], name)
                for key in keys
            ]
            differences[name] = statistics.fmean(deltas), seed_interval(deltas)
        pairs.append(SeedPairs(i, baseline, len(keys), differences))
    return pairs


def _mean(runs, name):
    return statistics.fmean(run[name] for run in runs)


def notes_on_means(
    runs_by_row: Mapping[tuple, Sequence[tuple[int, Mapping]]],
    headings: Mapping[str, str],
) -> list[str]:
    """Return notes on means that count a seed several times or leave out a run.

    Args:
        runs_by_row: {labels of a row: (seed, scores) of each of its runs}.
        headings: {score: its heading} of the scores to check.
    """
    notes = []
    for labels, runs in runs_by_row.items():
        row = " ".join(filter(None, labels))
        for seed, count in Counter(seed for seed, _ in runs).items():
            if count > 1:
                notes.append(f"{row}: {count} runs have the seed {seed}")
        for name, heading in headings.items():
            count = sum(scores.get(name) is not None for _, scores in runs)
            if 0 < count < len(runs):
                share = f"{count} of {len(runs)} runs"
                notes.append(f"{row}: {heading} is the mean of {share}")
    return notes


def pair_rows(
    rows: Sequence[tuple[pathlib.Path, dict]],
) -> tuple[list[PairedRows], dict[int, str]]:
    """Compare each row with the first one on the same questions, question by question.

    The questions are the same if the rows record the same fingerprint of them, which
    covers ids, texts, answers and order. The rows must also have the same normaliser.
    The scores of each question come from transcripts.jsonl.

    Args:
        rows: (run's directory, row of its results.json) pairs.

    Returns:
        (pairs, {position: why this row has no pair}).
    """
    row_groups: dict[tuple, list[int]] = {}
    reasons: dict[int, str] = {}
    for i, (_, row) in enumerate(rows):
        questions, normalize = row.get("questions"), row.get("normalize")
        if not isinstance(questions, str) or normalize not in [*NORMALIZERS]:
            reasons[i] = "their results do not name the questions and the normaliser"
        elif row.get("em") is None:
            reasons[i] = "tools or judge failed in all their rollouts"
        else:
            row_groups.setdefault((questions, normalize), []).append(i)
    files: dict[pathlib.Path, dict] = {}
    pairs = []
    for members in row_groups.values():
        if len(members) == 1:
            reasons[members[0]] = "no other row has their questions and normaliser"
            continue
        baseline, first_questions, first_scores = None, [], {}
        for i in members:
            folder, row = rows[i]
            try:
                questions, scores = _scores_of(folder, row, files)
            except ValueError as error:
                reasons[i] = str(error)
                continue
            if baseline is None:
                baseline, first_questions, first_scores = i, questions, scores
                continue
            if questions != first_questions:
                reasons[i] = f"{folder / TRANSCRIPTS} has other questions"
                continue
            differences = {
                name: paired_difference(scores[name], first_scores[name])
                for name in ("em", "f1")
            }
            is_binary = np.isin([scores["em"], first_scores["em"]], (0, 1)).all()
            p = mcnemar_p(scores["em"], first_scores["em"]) if is_binary else None
            pairs.append(PairedRows(i, baseline, len(questions), differences, p))
        if baseline is not None and all(pair.baseline != baseline for pair in pairs):
            reasons[baseline] = "the other rows with their questions have no pair"
    return pairs, reasons


def _scores_of(folder, row, files):
    """Return a row's questions and their scores; ValueError if transcripts disagree.

    `files` caches {path: predictions}.
    """
    path = folder / TRANSCRIPTS
    if path not in files:
        if not path.is_file():
            raise ValueError(f"{path} is not there")
        files[path] = read_predictions(path)
    predictions = files[path].get(run_key(row), [])
    scores = scores_of_questions(predictions, row["normalize"])
    # A run that was stopped between writing its two files has an outdated one.
    is_same = predictions and len(scores["em"]) == row.get("n")
    if not is_same or abs(scores["em"].mean() - row["em"]) >= 1e-9:
        row_name = ", ".join(row[name] for name in RUN if row.get(name))
        raise ValueError(f"{path} and results.json differ on {row_name}")
    # The samples of a question are adjacent, and repeat its text.
    per_question = len(predictions) // len(scores["em"])
    return [p["question"] for p in predictions[::per_question]], scores
