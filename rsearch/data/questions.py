"""Load questions from files and the Hugging Face hub, checking every record.

A source is a file or a dataset on the hub, see `rsearch.data.sources`. Its format is
recognised by the fields of its first record (`FORMATS`).
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from rsearch.data.golden import golden_answers, unpack_text
from rsearch.data.records import (
    check_id,
    check_on_bad,
    check_text,
    decode_record,
    field_value,
    find_field,
    quote,
)
from rsearch.data.sources import read_records
from rsearch.types import Passage, Question

IDS = ("id", "_id", "qid", "question_id", "questionid", "query_id")
FORMATS = {
    "verl": {
        "question": ("question", "extra_info.question", "prompt"),
        "answers": ("reward_model.ground_truth", "reward_spec.ground_truth"),
        "id": ("id", "extra_info.index"),
    },
    "flashrag": {"question": ("question",), "answers": ("golden_answers",), "id": IDS},
    # Also HotpotQA, 2WikiMultiHopQA, MuSiQue, TriviaQA, NQ-open, Bamboogle and IIRC.
    "r1_searcher": {
        "question": ("question",),
        "answers": ("answer",),
        "further": ("answers",),
        "id": ("idx", *IDS),
    },
    "popqa": {
        "question": ("question",),
        "answers": ("possible_answers",),
        "further": ("obj",),
        "id": IDS,
    },
    # DPR, WebQuestions and SQuAD. Tevatron's field is query, LongBench's is input.
    "dpr": {
        "question": ("question", "query", "input"),
        "answers": ("answers",),
        "id": IDS,
    },
    "frames": {  # SimpleQA's field is problem, CRAG's is query
        "question": ("prompt", "problem", "query"),
        "answers": ("answer",),
        "id": (*IDS, "interaction_id"),
    },
    "kilt": {"question": ("input",), "answers": ("output",), "id": IDS},
    "ircot": {
        "question": ("question_text",),
        "answers": ("answers_objects",),
        "id": IDS,
    },
    "nq": {  # with its pages; NQ-open has none
        "question": ("question_text",),
        "answers": ("annotations",),
        "id": (*IDS, "example_id"),
    },
    "freshqa": {
        "question": ("question",),
        "answers": ("answer_0",),
        "further": tuple(f"answer_{i}" for i in range(1, 10)),
        "id": IDS,
    },
    "gold": {
        "question": ("question", "query"),
        "answers": (
            "golden_answer",
            "gold_answers",
            "gold_answer",
            "ground_truths",
            "ground_truth",
            "final answer",
        ),
        "id": (*IDS, "task_id"),
    },
}
"""Format -> the fields of each role, best first; `further` adds golden answers.

A record has the first format of which it has both a question and an answers field,
ignoring case. A dot leads into a nested field.
"""

FIELD_ROLES = ("question", "answers", "id")
GOLD = ("paragraphs", "question_decomposition", "context", "supporting_facts")
GOLD += ("positive_ctxs",)
"""Fields that accompany question and answer in MuSiQue, HotpotQA and DPR's versions of
NQ and others, as published."""
MAX_DEPTH = 50  # nesting of metadata, which is copied and digested recursively
JSON_COLUMNS = ("reward_model", "reward_spec", "extra_info", "prompt")
"""Columns that some files store as JSON text."""


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
        fields: {"question": ..., "answers": ..., "id": ...}, each the name of a field
            (dotted if nested) that replaces the format's own; "" keeps the format's.
        limit: stop after this many questions; 0 reads all.
        on_bad: "raise" makes a bad record an error; "skip" leaves it out.
        check: called with each question; if it raises a ValueError, the record counts
            as bad. None adds no check.

    Returns:
        (list of Question, list of str): the questions, and what was wrong with each
        record that was left out, as file:line: field.

    Raises:
        ValueError: a bad record (no question, no answer, an id used twice, not JSON,
            not UTF-8, a blank line, ...); a source without a single good record; a
            damaged file; anything the hub refuses.
        OSError: the file cannot be read.
    """
    check_on_bad(on_bad)
    if limit < 0:
        raise ValueError(f"{limit=} must not be negative; 0 reads all")
    fields = _check_fields(fields)
    questions = []
    problems = []
    names_of: dict = {}
    origin_of_id = {}
    records = (
        record
        for origin, raw in read_records(source)
        for record in _listed_questions(origin, raw, fields)
    )
    for row, (origin, raw) in enumerate(records):
        try:
            record = decode_record(raw)
            for name in JSON_COLUMNS:
                if name in record:
                    record[name] = unpack_text(record[name])
            if not names_of:
                names_of = _recognise(record, fields)
            question = _question(record, row, names_of)
            if check is not None:
                check(question)
            first_origin = origin_of_id.setdefault(question.id, origin)
            if first_origin != origin:
                raise ValueError(
                    f"field id: {question.id!r} was used at {first_origin}"
                )
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
        # One line each: JSON has no raw line feed, so different lists differ in bytes.
        digest.update(json.dumps(values, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def supporting_passages(
    question: Question,
) -> tuple[Callable[[Passage], str], set[str]]:
    """Return (function from a passage to its key, keys of the gold passages).

    The metadata names the gold passages by `supporting_ids`, by `supporting_titles`, by
    HotpotQA's `supporting_facts` (pairs as published, or FlashRAG's object), or by the
    entries of MuSiQue's `paragraphs` with `is_supporting`. If it names none, or in
    another form, the set is empty: an error here could waste hours of rollouts.
    """
    if ids := _texts_of(question.metadata.get("supporting_ids")):
        return (lambda passage: passage.id), set(ids)
    return bare_title, set(supporting_titles(question))


def supporting_titles(question: Question) -> list[str]:
    """Return the titles of `supporting_passages`, each once, without quotes.

    They are in the order in which the metadata first mentions them.
    """
    metadata = question.metadata
    titles = _texts_of(metadata.get("supporting_titles"))
    facts = metadata.get("supporting_facts")
    if not titles and isinstance(facts, dict):
        titles = _texts_of(facts.get("title"))
    elif not titles and isinstance(facts, list):
        titles = _texts_of(
            [fact[0] for fact in facts if isinstance(fact, list) and fact]
        )
    paragraphs = metadata.get("paragraphs")
    if not titles and isinstance(paragraphs, list):
        objects = [x for x in paragraphs if isinstance(x, dict)]
        titles = _texts_of([x.get("title") for x in objects if x.get("is_supporting")])
    return list(dict.fromkeys(title.strip('" ') for title in titles))


def _texts_of(values):
    """Return the texts in a list; [] for anything else."""
    values = values if isinstance(values, list | tuple) else ()
    return [value for value in values if isinstance(value, str)]


def bare_title(passage: Passage) -> str:
    """Return a passage's title without the quotes that some corpora put around it."""
    return passage.title.strip('" ')


def _check_fields(fields):
    """Return {role: field name} of the roles for which a field is named."""
    fields = dict(fields or {})
    for role in fields:
        if role not in FIELD_ROLES:
            raise ValueError(f"fields: {role!r} is none of {', '.join(FIELD_ROLES)}")
    return {role: name for role, name in fields.items() if name}


def _listed_questions(origin, raw, fields):
    """Yield (origin, record) of the questions that IIRC lists under a passage.

    A record of another layout is yielded as it is.
    """
    with contextlib.suppress(ValueError):  # the caller's own decoding reports it
        raw = decode_record(raw)
    is_passage = isinstance(raw, dict) and "question" not in {*raw, *fields}
    questions = raw.get("questions") if is_passage else None
    # Other layouts may have a list of texts.
    is_list = isinstance(questions, list)
    if not is_list or (questions and all(isinstance(x, str) for x in questions)):
        yield origin, raw
        return
    for number, question in enumerate(questions, 1):
        yield f"{origin} question {number}", question


def _recognise(record, fields):
    """Return {role: names of its fields} of a source, given its first record."""
    format_fields = next(
        (f for f in FORMATS.values() if _has_format(record, f, fields)), None
    )
    if format_fields is None:
        if not {"question", "answers"} <= fields.keys():
            pairs = (
                f"{f['question'][0]} and {f['answers'][0]}" for f in FORMATS.values()
            )
            field_names = quote(list(record), max_characters=200)
            raise ValueError(
                f"no known format: expected {', or '.join(dict.fromkeys(pairs))}, or "
                "the names of the fields with question and answers; the fields are "
                f"{field_names}"
            )
        format_fields = FORMATS["flashrag"]
    spelling = {name.lower(): name for name in reversed(record)}
    names_of = {
        role: tuple(
            name if name in record else spelling.get(name, name) for name in names
        )
        for role, names in format_fields.items()
    }
    names_of |= {role: (name,) for role, name in fields.items()}
    return {"further": (), **names_of, "id_required": "id" in fields}


def _has_format(record, format_fields, fields):
    """Return whether a record has answers and, unless `fields` names it, a question."""
    field_names = {name.lower() for name in record}
    roles = ["answers"] if "question" in fields else ["answers", "question"]
    return all(
        any(name.split(".")[0] in field_names for name in format_fields[r])
        for r in roles
    )


def _question(record, row, names_of):
    """Return the Question of one record.

    Args:
        row: number of the record, from 0; replaces a missing id.
    """
    name, value = find_field(record, names_of["question"])
    text = check_text(_from_chat(value, name), name)
    answers = golden_answers(record, names_of["answers"], names_of["further"])
    name, value = find_field(record, names_of["id"], required=names_of["id_required"])
    question_id = f"row_{row}" if value is None else check_id(value, name)
    source = record.get("data_source")
    is_verl = "reward_model" in record or "reward_spec" in record
    if is_verl and isinstance(source, str) and source:
        # verl files concatenate datasets, each with its own numbering of ids and rows.
        split = field_value(record, "extra_info.split")
        is_index = name == "extra_info.index" and isinstance(split, str)
        middle = f"{split}_" if is_index else ""
        question_id = f"{source}_{middle}{question_id}"
    return Question(question_id, text, answers, _metadata(record))


def _from_chat(value, name):
    """Return the question of a verl prompt: the text after its last 'Question:'.

    Search-R1's message is an instruction and possibly examples, and ends with
    'Question: ...'; R-Search's is the question itself.
    """
    if name != "prompt":
        return value
    if isinstance(value, list | tuple | np.ndarray):
        user_messages = [
            message.get("content")
            for message in value
            if isinstance(message, dict) and message.get("role") == "user"
        ]
        if not user_messages or not isinstance(user_messages[-1], str):
            raise ValueError(f"field prompt: holds no user message: {quote(value)}")
        value = user_messages[-1]
    if not isinstance(value, str) or "Question:" not in value:
        return value
    question = value.rpartition("Question:")[2].strip()
    return question.removesuffix("\nAnswer:").strip()


def _metadata(record):
    """Return the other fields of a question, as JSON values."""
    gold_values = {name: record.get(name) for name in GOLD}
    metadata = {
        name: _to_json(v, name) for name, v in gold_values.items() if v is not None
    }
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
    """Return `value` as a JSON value; dates, bytes, NaN and the like become text."""
    if depth > MAX_DEPTH:
        raise ValueError(f"field {name}: nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        return {str(k): _to_json(v, name, depth + 1) for k, v in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_to_json(inner, name, depth + 1) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, str | int) else str(value)
