"""Load questions from files and from the Hugging Face hub, every record checked.

A source is a file or a data set on the hub, as `rsearch.data.sources` has it. Its
format is recognised by the fields of its first record (`FORMATS`).
"""

import json
import os
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from rsearch.data.records import (
    check_id,
    check_record,
    check_text,
    decode_record,
    shown,
)
from rsearch.data.sources import read_records
from rsearch.types import Question

FORMATS = {
    "verl": {
        "has": ("reward_model",),
        "question": ("question", "extra_info.question", "prompt"),
        "answers": ("reward_model.ground_truth.target", "reward_model.ground_truth"),
        "id": ("id", "extra_info.index"),
    },
    "flashrag": {
        "has": ("question", "golden_answers"),
        "question": ("question",),
        "answers": ("golden_answers",),
        "id": ("id",),
    },
    "r1_searcher": {
        "has": ("question", "answer"),
        "question": ("question",),
        "answers": ("answer",),
        "id": ("idx", "id"),
    },
}
"""Format -> the fields that identify it, and the fields of each role, best first.

A dot leads into a nested field.
"""

FIELD_ROLES = ("question", "answers", "id")
GOLD = ("paragraphs", "question_decomposition", "context", "supporting_facts")
"""Fields of a question beside its answer in MuSiQue and HotpotQA, as published."""
MAX_DEPTH = 50  # of metadata, which is copied and digested by recursion
NO_VALUE = object()


def load_questions(
    source: str | os.PathLike,
    *,
    fields: dict[str, str] | None = None,
    limit: int = 0,
    on_bad: str = "raise",
    check: Callable[[Question], None] | None = None,
) -> tuple[list[Question], list[str]]:
    """Load questions, in the order of the source.

    Args:
        source: as in `sources.read_records`.
        fields: {"question": ..., "answers": ..., "id": ...}, each the name of a
            field (dotted where nested) in place of the format's own; "" names none.
        limit: stop after this many questions; 0 reads all.
        on_bad: a bad record is an error with "raise"; with "skip" it is left out.
        check: called with each question; where it raises a ValueError the record is a
            bad one. None checks nothing more.

    Returns:
        (list of Question, list of str): the questions, and what was wrong with each
        record that was left out, as file:line: field.

    Raises:
        ValueError: a bad record (no question, no answer, an id used twice, not JSON,
            not UTF-8, a blank line, ...); a source without one good record; a damaged
            file; anything that the hub refuses.
        OSError: the file cannot be read.
    """
    if on_bad not in ("raise", "skip"):
        raise ValueError(f"{on_bad=}: expected 'raise' or 'skip'")
    if limit < 0:
        raise ValueError(f"{limit=} must not be negative; 0 reads all")
    fields = _check_fields(fields)
    questions = []
    problems = []
    names_of = None
    origin_of_id = {}
    for row, (origin, raw) in enumerate(read_records(source)):
        try:
            record = decode_record(raw) if isinstance(raw, bytes) else raw
            check_record(record)
            if names_of is None:
                names_of = _recognise(record, fields)
            question = _question(record, row, names_of)
            if check is not None:
                check(question)
            earlier = origin_of_id.setdefault(question.id, origin)
            if earlier != origin:
                raise ValueError(f"field id: {question.id!r} was used at {earlier}")
        except ValueError as error:
            problem = f"{origin}: {error}"
            if on_bad == "raise":
                raise ValueError(problem) from None
            problems.append(problem)
            continue
        questions.append(question)
        if len(questions) == limit:
            break
    if not questions and problems:
        count = len(problems)
        raise ValueError(f"{source}: all {count} records are bad; first {problems[0]}")
    if not questions:
        raise ValueError(f"{source}: holds no record")
    return questions, problems


def questions_fingerprint(questions: Sequence[Question]) -> str:
    """Return a digest of questions: order, ids, texts, answers and metadata."""
    digest = xxhash.xxh3_128()
    for question in questions:
        values = [
            question.id,
            question.text,
            list(question.golden_answers),
            dict(question.metadata),
        ]
        # A line each: JSON holds no raw line feed, so no two lists share one digest.
        digest.update(json.dumps(values, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _check_fields(fields):
    """Return {role: name} of the fields that are named."""
    fields = dict(fields or {})
    for role in fields:
        if role not in FIELD_ROLES:
            raise ValueError(f"fields: {role!r} is none of {', '.join(FIELD_ROLES)}")
    return {role: name for role, name in fields.items() if name}


def _recognise(record, fields):
    """Return {role: names of its fields} of a source, by its first record."""
    known = next(
        (f for f in FORMATS.values() if all(name in record for name in f["has"])), None
    )
    if known is None:
        if not {"question", "answers"} <= fields.keys():
            formats = [f"{'+'.join(f['has'])} ({n})" for n, f in FORMATS.items()]
            have = shown(list(record), max_characters=200)
            raise ValueError(
                f"no known format: expected the fields {' or '.join(formats)}, or the "
                f"names of those with question and answers; the fields are {have}"
            )
        known = FORMATS["flashrag"]
    names_of = {role: known[role] for role in FIELD_ROLES}
    names_of.update({role: (name,) for role, name in fields.items()})
    return {**names_of, "id_required": "id" in fields}


def _question(record, row, names_of):
    """Return the Question of one record.

    Args:
        record: dict.
        row: its number from 0, which stands in for an id.
        names_of: from `_recognise`.
    """
    name, value = _find(record, names_of["question"])
    text = check_text(_from_chat(value, name), name)
    name, value = _find(record, names_of["answers"])
    answers = _answers(value, name)
    name, value = _find(record, names_of["id"], required=names_of["id_required"])
    question_id = f"row_{row}" if value is None else check_id(value, name)
    source = record.get("data_source")
    if "reward_model" in record and isinstance(source, str) and source:
        # verl files join data sets whose ids and indices each start anew.
        split = _lookup(record, "extra_info.split")
        is_index = name == "extra_info.index" and isinstance(split, str)
        middle = f"{split}_" if is_index else ""
        question_id = f"{source}_{middle}{question_id}"
    return Question(question_id, text, answers, _metadata(record))


def _find(record, names, *, required=True):
    """Return (name, value) of the first of `names` whose value is not None."""
    for name in names:
        value = _lookup(record, name)
        if value is not NO_VALUE and value is not None:
            return name, value
    if required:
        have = shown(list(record))
        raise ValueError(f"field {' or '.join(names)}: missing; the fields are {have}")
    return names[0], None


def _lookup(record, name):
    """Return the value of a field, nested where its name has dots, or ABSENT."""
    if name in record:
        return record[name]
    for key in name.split("."):
        if not isinstance(record, dict) or key not in record:
            return NO_VALUE
        record = record[key]
    return record


def _from_chat(value, name):
    """Return the question of a chat: the text after 'Question:' in its last message.

    Search-R1's message is an instruction that ends so; R-Search's is the question.
    """
    if name != "prompt" or not isinstance(value, list | tuple | np.ndarray):
        return value
    said = [
        message.get("content")
        for message in value
        if isinstance(message, dict) and message.get("role") == "user"
    ]
    if not said or not isinstance(said[-1], str):
        raise ValueError(f"field prompt: holds no user message: {shown(value)}")
    instruction, mark, question = said[-1].partition("Question:")
    return question.strip() if mark else instruction


def _answers(value, name):
    """Return golden answers as a tuple; a single text is one answer."""
    if isinstance(value, str):
        return (check_text(value, name),)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        kind = type(value).__name__
        raise ValueError(
            f"field {name}: expected a text or a list of them, got {kind} "
            f"{shown(value)}"
        )
    if not value:
        raise ValueError(f"field {name}: holds no answer")
    return tuple(check_text(text, f"{name}[{i}]") for i, text in enumerate(value))


def _metadata(record):
    """Return the other fields of a question, as JSON values."""
    gold = {name: record.get(name) for name in GOLD}
    metadata = {name: _to_json(v, name) for name, v in gold.items() if v is not None}
    for name in ("extra_info", "metadata"):
        value = _to_json(record.get(name), name)
        if isinstance(value, dict):
            metadata.update(value)
        elif value is not None:
            metadata[name] = value
    if isinstance(record.get("data_source"), str):
        metadata["data_source"] = record["data_source"]
    return metadata


def _to_json(value, name, depth=0):
    """Return `value` as JSON can write it; dates, bytes and the like as text."""
    if depth > MAX_DEPTH:
        raise ValueError(f"field {name}: nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        return {str(k): _to_json(v, name, depth + 1) for k, v in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_to_json(inner, name, depth + 1) for inner in value]
    is_json = value is None or isinstance(value, str | int | float)
    return value if is_json else str(value)
