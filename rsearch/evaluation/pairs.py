"""Differences between rows of results that were measured on the same questions."""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from rsearch.evaluation.evaluator import TRANSCRIPTS
from rsearch.evaluation.predictions import RUN, read_predictions
from rsearch.evaluation.scoring import scores_of_rows
from rsearch.evaluation.statistics import mcnemar_p, paired_difference
from rsearch.text.normalize import NORMALIZERS


class PairedRows(NamedTuple):
    """Two rows on the same questions, by their positions, and the difference of both.

    Attributes:
        row, baseline: positions; differences are those of `row` minus `baseline`.
        n: questions.
        differences: {"em", "f1": (difference, (low, high))}, fractions from -1 to 1.
        p: of McNemar's exact test, by the exact match.
    """

    row: int
    baseline: int
    n: int
    differences: dict
    p: float


def pair_rows(
    rows: Sequence[tuple[pathlib.Path, dict]],
) -> tuple[list[PairedRows], dict[int, str]]:
    """Compare each row with the first one on the same questions, question by question.

    The questions are the same where the rows name one fingerprint of them, which covers
    ids, texts, answers and order. The scores of each come from transcripts.jsonl.

    Args:
        rows: (run's directory, row of its results.json).

    Returns:
        (pairs, {position: why this row has no pair}).
    """
    same: dict[tuple, list[int]] = {}
    unpaired: dict[int, str] = {}
    for i, (_, row) in enumerate(rows):
        questions, normalize = row.get("questions"), row.get("normalize")
        if not isinstance(questions, str) or normalize not in [*NORMALIZERS]:
            unpaired[i] = "their results do not name the questions and the normaliser"
        elif row.get("em") is None:
            unpaired[i] = "tools or judge failed in all their rollouts"
        else:
            same.setdefault((questions, normalize), []).append(i)
    files: dict[pathlib.Path, dict] = {}
    pairs = []
    for (_, normalize), members in same.items():
        if len(members) == 1:
            unpaired[members[0]] = "no other row has their questions and normaliser"
            continue
        baseline, first = None, []
        for i in members:
            folder, row = rows[i]
            try:
                predictions = _predictions_of(folder, row, files)
            except ValueError as error:
                unpaired[i] = str(error)
                continue
            if baseline is None:
                baseline, first = i, predictions
                continue
            if [p["question"] for p in predictions] != [p["question"] for p in first]:
                unpaired[i] = f"{folder / TRANSCRIPTS} has other questions"
                continue
            pairs.append(_pair(i, baseline, predictions, first, normalize))
        if baseline is not None and all(pair.baseline != baseline for pair in pairs):
            unpaired[baseline] = "the other rows with their questions have no pair"
    return pairs, unpaired


def _predictions_of(folder, row, files):
    """Return the row's predictions; ValueError where they are not those it counts."""
    path = folder / TRANSCRIPTS
    if path not in files:
        if not path.is_file():
            raise ValueError(f"{path} is not there")
        files[path] = read_predictions(path)
    predictions = files[path].get(tuple(row[name] for name in RUN), [])
    # A run that was stopped between its two files has an older one.
    if len(predictions) != row.get("n") or not _has_em(predictions, row):
        about = ", ".join(row[name] for name in RUN)
        raise ValueError(f"{path} and results.json differ on {about}")
    return predictions


def _has_em(predictions, row):
    scores = scores_of_rows(predictions, row["normalize"])
    return abs(scores["em"].mean() - row["em"]) < 1e-9


def _pair(row, baseline, predictions, first, normalize):
    ours, theirs = (scores_of_rows(x, normalize) for x in (predictions, first))
    return PairedRows(
        row,
        baseline,
        len(predictions),
        {name: paired_difference(ours[name], theirs[name]) for name in ("em", "f1")},
        mcnemar_p(ours["em"], theirs["em"]),
    )
