"""Read predictions and golden answers from files of our evaluations or of others."""

import os
from collections.abc import Mapping

from rsearch.data.golden import golden_answers
from rsearch.data.records import (
    NO_VALUE,
    check_text,
    decode_record,
    field_value,
    quote,
)
from rsearch.data.sources import json_records

QUESTION = ("question",)
GOLDEN = ("golden_answers", "golden_answer", "answer", "possible_answers", "answers")
PREDICTION = ("prediction", "predicted_answer", "pred_ans", "output.pred")

# Fields that distinguish the rows of rsearch.evaluate.
RUN = ("stage", "method", "dataset", "setting")


def read_predictions(path: str | os.PathLike) -> dict[tuple, list[dict]]:
    """Return the rows of a file, grouped by stage, method, dataset and setting.

    Args:
        path: file of JSON lines or a JSON list, plain or gzip, in UTF-8; blank lines
            are skipped. See `rsearch.score` for the names of the fields.

    Returns:
        {values of RUN: rows} in the file's order; values that a row lacks are None.
        Each row has `question`, `golden_answers` and `prediction`; if it is one of a
        question's samples, `sample_of` is the question's id.

    Raises:
        ValueError: a record is bad, given as file:line: field, or there is none.
    """
    rows_by_run: dict[tuple, list[dict]] = {}
    for origin, raw in json_records(path):
        if isinstance(raw, bytes) and not raw.strip():
            continue
        try:
            row, run = _parse_row(decode_record(raw))
        except ValueError as error:
            raise ValueError(f"{origin}: {error}") from None
        rows_by_run.setdefault(run, []).append(row)
    if not rows_by_run:
        raise ValueError(f"{path}: no rows to score")
    return rows_by_run


def run_key(row: Mapping) -> tuple:
    """Return the values of RUN in a row; None for those that it lacks.

    Args:
        row: row of results.json, of transcripts.jsonl, or of anyone's predictions.
    """
    return tuple(row.get(name) or None for name in RUN)


def _parse_row(record):
    """Return (row, run) of one record; errors name the field."""
    question = check_text(record[_field(record, QUESTION)], QUESTION[0])
    golden = golden_answers(record, (_field(record, GOLDEN),))
    name = _field(record, PREDICTION)
    prediction = field_value(record, name)
    if prediction is not None and not isinstance(prediction, str):
        kind = type(prediction).__name__
        raise ValueError(
            f"field {name}: expected text or null, got {kind} {quote(prediction)}"
        )
    row = {
        "question": question,
        "golden_answers": list(golden),
        "prediction": prediction,
    }
    if isinstance(record.get("sample"), int) and isinstance(record.get("id"), str):
        row["sample_of"] = record["id"]
    run = run_key(record)
    for name, value in zip(RUN, run, strict=True):
        if not isinstance(value, str | int | None):
            kind = type(value).__name__
            raise ValueError(f"field {name}: expected text, got {kind} {quote(value)}")
    return row, run


def _field(record, names):
    """Return the first of these names that the record has."""
    for name in names:
        if field_value(record, name) is not NO_VALUE:
            return name
    hint = f" (or {' or '.join(names[1:])})" if names[1:] else ""
    raise ValueError(f"field {names[0]}{hint}: missing")
