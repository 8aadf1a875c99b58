"""Score anybody's predictions: `python -m rsearch.score FILE.jsonl [--json]`.

Each line of the file, plain or gzip, is one question:

    {"question": "...", "golden_answers": ["..."], "prediction": "..."}

Golden answers are read as those of question files are, aliases such as
`answer_aliases` included; `prediction` is null where there is no answer; other fields
are ignored. The names of published files are read too: `golden_answer`, `answer`,
`possible_answers` or `answers` for the golden answers; `predicted_answer`, `pred_ans`
or, as in FlashRAG's intermediate_data.json, `output.pred` for the prediction. Where a
record has several, the first of this list counts. A JSON list does for lines.

The default normaliser is R1-Searcher's, which reproduces its published numbers; "squad"
is that of Search-R1 and R-Search, and "flashrag" has that package's F1.
"""

import json
import sys
from collections.abc import Sequence

from rsearch.config.recipes import parse_flags, run_command
from rsearch.data.golden import golden_answers
from rsearch.data.records import (
    NO_VALUE,
    check_record,
    check_text,
    decode_record,
    field_value,
    shown,
)
from rsearch.data.sources import json_records
from rsearch.evaluation.scoring import bootstrap_interval, score_rows, scores_of_rows
from rsearch.runtime.console import table
from rsearch.text.normalize import NORMALIZERS
from rsearch.text.spelling import did_you_mean

QUESTION = ("question",)
GOLDEN = ("golden_answers", "golden_answer", "answer", "possible_answers", "answers")
PREDICTION = ("prediction", "predicted_answer", "pred_ans", "output.pred")

HEADINGS = {"em": "exact match", "cover_em": "cover exact match", "f1": "F1"}

RUN = ("stage", "method", "dataset")  # what tells rsearch.evaluate's rows apart

FLAGS = {
    "json": (False, "prints one JSON object, fractions from 0 to 1, and no table"),
    "normalizer": (
        "r1_searcher",
        "how answers are normalised: squad, r1_searcher or flashrag",
    ),
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
        path: JSON lines or a JSON list, plain or gzip, in UTF-8; blank lines are
            skipped.

    Raises:
        ValueError: a bad record, as file:line: field, no record at all, or rows of
            several stages, methods or datasets, as a run's transcripts.jsonl has them.
    """
    rows, first = [], None
    for origin, raw in json_records(path):
        if isinstance(raw, bytes) and not raw.strip():
            continue
        try:
            record = decode_record(raw) if isinstance(raw, bytes) else check_record(raw)
            row, run = _parse_row(record)
            first = first or run
            if run != first:
                raise ValueError(_mixed(first, run))
        except ValueError as error:
            raise ValueError(f"{origin}: {error}") from None
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no rows to score")
    return rows


def _parse_row(record):
    """Return (row, run) of one record; errors name the field."""
    question = check_text(record[_field(record, QUESTION)], QUESTION[0])
    golden = golden_answers(record, (_field(record, GOLDEN),))
    name = _field(record, PREDICTION)
    prediction = field_value(record, name)
    if prediction is not None and not isinstance(prediction, str):
        kind = type(prediction).__name__
        raise ValueError(
            f"field {name}: expected text or null, got {kind} {shown(prediction)}"
        )
    row = {
        "question": question,
        "golden_answers": list(golden),
        "prediction": prediction,
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


def _field(record, names):
    """Return the first of these names that the record has."""
    for name in names:
        if field_value(record, name) is not NO_VALUE:
            return name
    hint = f" (or {' or '.join(names[1:])})" if names[1:] else ""
    raise ValueError(f"field {names[0]}{hint}: missing")


if __name__ == "__main__":
    sys.exit(run_command(main))
