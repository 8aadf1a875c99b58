"""Score anybody's predictions: `python -m rsearch.score FILE.jsonl [--json]`.

Each line of the file, plain or gzip, is one question:

    {"question": "...", "golden_answers": ["..."], "prediction": "..."}

`golden_answers` may be a single string, `prediction` is null where there is no answer,
and other fields are ignored. The names of R1-Searcher's published files are read too:
`golden_answer` or `answer` for the golden answers, `predicted_answer` or `pred_ans` for
the prediction. Where a line has several, the first of this list counts.

The default normaliser is R1-Searcher's, which reproduces its published numbers; "squad"
is that of Search-R1 and R-Search.
"""

import json
import sys
from collections.abc import Sequence

from rsearch.config.recipes import parse_flags, run_command
from rsearch.data.records import check_record, check_text, shown
from rsearch.evaluation.scoring import bootstrap_interval, score_rows, scores_of_rows
from rsearch.runtime.console import table
from rsearch.runtime.jsonl import read_jsonl
from rsearch.text.normalize import NORMALIZERS
from rsearch.text.spelling import did_you_mean

QUESTION = ("question",)
GOLDEN = ("golden_answers", "golden_answer", "answer")
PREDICTION = ("prediction", "predicted_answer", "pred_ans")

HEADINGS = {"em": "exact match", "cover_em": "cover exact match", "f1": "F1"}

RUN = ("stage", "method", "dataset")  # what tells rsearch.evaluate's rows apart

FLAGS = {
    "json": (False, "prints one JSON object, fractions from 0 to 1, and no table"),
    "normalizer": ("r1_searcher", "how answers are normalised: squad or r1_searcher"),
}


def main(argv: Sequence[str]):
    """Read the arguments, score the file, and print the table."""
    flags = parse_flags(argv, flags=FLAGS, positional=("FILE.jsonl",))
    normalizer = flags["normalizer"]
    if normalizer not in NORMALIZERS:
        names = " or ".join(NORMALIZERS)
        hint = did_you_mean(normalizer, list(NORMALIZERS))
        raise ValueError(f"--normalizer={normalizer}: must be {names}{hint}")
    rows = read_predictions(flags["FILE.jsonl"])
    if flags["json"]:
        print(json.dumps(score_rows(rows, normalizer), allow_nan=False))
        return 0
    scores = scores_of_rows(rows, normalizer)
    lines = []
    for name, values in scores.items():
        low, high = bootstrap_interval(values)
        interval = f"{100 * low:.1f} to {100 * high:.1f}"
        lines.append((HEADINGS[name], f"{100 * values.mean():.1f}", interval))
    title = f"{len(rows)} questions, {normalizer}"
    table(title, ("metric", "percent", "95 % interval"), lines)
    return 0


def read_predictions(path: str) -> list[dict]:
    """Return the rows of a file: `question`, `golden_answers` and `prediction` of each.

    Args:
        path: JSON lines, plain or gzip, in UTF-8; blank lines are skipped.

    Raises:
        ValueError: a bad line, as file:line: field, no line at all, or rows of several
            stages, methods or datasets, as a run's transcripts.jsonl has them.
    """
    runs = []

    def parse(record):
        row, run = _parse_row(record)
        runs.append(run)
        if run != runs[0]:
            raise ValueError(_mixed(runs[0], run))
        return row

    rows = read_jsonl(path, torn="read", blank="skip", strict=True, parse=parse)
    if not rows:
        raise ValueError(f"{path}: no rows to score")
    return rows


def _parse_row(record):
    """Return (row, run) of one record; errors name the field."""
    check_record(record)
    question = check_text(record[_field(record, QUESTION)], QUESTION[0])
    golden = _field(record, GOLDEN)
    prediction = _field(record, PREDICTION)
    predicted = record[prediction]
    if predicted is not None and not isinstance(predicted, str):
        raise _wrong(prediction, "text or null", predicted)
    row = {
        "question": question,
        "golden_answers": _golden_answers(golden, record[golden]),
        "prediction": predicted,
    }
    return row, tuple(record.get(name) for name in RUN)


def _mixed(first, second):
    """Return the message on rows that do not belong into one mean."""
    name, before, now = next(
        (n, a, b) for n, a, b in zip(RUN, first, second, strict=True) if a != b
    )
    return (
        f"field {name}: {now!r} after rows of {before!r}; score them apart, for "
        "example of the lines that grep finds"
    )


def _golden_answers(field, value):
    answers = [value] if isinstance(value, str) else value
    if not isinstance(answers, list):
        raise _wrong(field, "text or a list of texts", value)
    if not answers:
        raise ValueError(f"field {field}: expected at least one golden answer, got []")
    return [check_text(answer, field) for answer in answers]


def _field(record, names):
    """Return the first of these names that the record has."""
    for name in names:
        if name in record:
            return name
    hint = f" (or {' or '.join(names[1:])})" if names[1:] else ""
    raise ValueError(f"field {names[0]}{hint}: missing")


def _wrong(field, expected, value):
    kind = type(value).__name__
    return ValueError(f"field {field}: expected {expected}, got {kind} {shown(value)}")


if __name__ == "__main__":
    sys.exit(run_command(main))
