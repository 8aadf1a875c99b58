"""Read the golden answers of a record, in whatever layout they were published.

An answer is a text, a list of texts, or an object such as TriviaQA's and SQuAD's. Any
of these may itself be serialized as text, as in columns of CSV and Parquet files.
Aliases in other fields also count as golden answers. Whatever looks like a list, an
alias or a flag of an unanswerable question, but cannot be interpreted, is refused.
"""

import ast
import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rsearch.data.records import check_object, check_text, find_field, quote
from rsearch.runtime.jsonl import decode_json

ALIASES = re.compile(
    r"((gold(en)?|o|obj|object)?(answers?|targets?)?alias(es)?)"
    r"|((alt|alternate|alternative|other|acceptable|accepted|possible|valid"
    r"|additional|equivalent|human)ans(wers?)?(alias(es)?)?)"
)
"""Other fields that hold golden answers; their names are folded as in `_role`."""

OTHER_ALIASES = re.compile(
    r"(s|subj|subject|question|query|entity|entities|title|wiki|page|passage|document"
    r"|normalized|normalised)(answers?)?alias(es)?"
)
"""Fields with aliases of something else, or answers that their publisher normalised."""

ANSWERABLE = ("answerable", "isanswerable")
UNANSWERABLE = ("unanswerable", "isunanswerable", "impossible", "isimpossible")
UNANSWERABLE += ("noanswer", "hasnoanswer", "isnoanswer")
TRUE, FALSE = ("true", "yes", "1", "1.0"), ("false", "no", "0", "0.0")
NESTED_FIELDS = ("metadata", "extra_info", "reward_model", "reward_spec")
"""Fields of a record that hold an object with more fields, possibly as JSON text."""
ANSWER_FIELDS = (
    "value",
    "target",
    "golden_answers",
    "answer",
    "answers",
    "text",
    "spans",
    "Value",  # in TriviaQA's own files
)
"""Fields of an object that hold the answer, best first."""
HIDDEN_ANSWER = "<unk>"  # replaces the answers of TriviaQA's test set
HTML_TAG = re.compile(r"</?[A-Za-z][^<>]*>")  # a token of NQ's pages

_ESCAPE = r"\\(?:[\\'\"nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})"
_QUOTED_TEXT = rf"""(?:'(?:[^'\\\n]|{_ESCAPE})*+'|"(?:[^"\\\n]|{_ESCAPE})*+")"""
# The repr of a NumPy array separates its texts by line ends or blanks, not commas.
_LIST = rf"\[\s*{_QUOTED_TEXT}(?:(?:\s*,\s*|\s+){_QUOTED_TEXT})*+\s*,?\s*\]"
PYTHON_LIST = re.compile(
    rf"{_LIST}|array\({_LIST}(?:,\s*dtype=[^()]*)?\)"
    rf"|\(\s*{_QUOTED_TEXT}(?:\s*,\s*{_QUOTED_TEXT})*+\s*,\s*\)"
    rf"|[({{]\s*{_QUOTED_TEXT}(?:\s*,\s*{_QUOTED_TEXT})++\s*[)}}]"
)
LIST_START = re.compile(r"""array\(|[\[{][\s\[({]*[bur]?["']""")
LITERALS = ("None", "True", "False", "nan", "null")


def golden_answers(
    record: dict, names: Sequence[str], further: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the golden answers of a record, then the aliases that are not among them.

    Args:
        names: fields of the answer, dotted if nested; the first one present counts.
        further: fields that hold more golden answers in this layout.

    Raises:
        ValueError: there is no answer, or it is neither text nor a list of texts; the
            record says that its question has none; it is unclear whether the aliases
            in some field are golden answers.
    """
    levels = [("", record)]
    for name in NESTED_FIELDS:
        if name in record and isinstance(fields := unpack_text(record[name]), dict):
            levels.append((f"{name}.", fields))
    for prefix, fields in levels:
        _check_answerable(fields, prefix)
    name, value = find_field(record, names)
    try:
        is_nq = name == "annotations" and _is_of_spans(value)
        answers = _annotated_texts(value, record) if is_nq else _texts(value, name)
        for alias, value in _aliases(levels, name, further):
            texts = dict.fromkeys(_texts(value, alias))
            answers += [text for text in texts if text not in answers]
    except RecursionError:
        raise ValueError(f"field {name}: nested too deeply") from None
    return tuple(answers)


def unpack_text(value: Any) -> Any:
    """Return the object or list that a JSON text holds; other values unchanged."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        with contextlib.suppress(ValueError):
            return decode_json(value.encode())
    return value


@functools.lru_cache(maxsize=1024)
def _role(field):
    """Return the role of a field, from the letters and digits of its name."""
    folded_name = re.sub(r"[^a-z0-9]", "", str(field).lower())
    if folded_name in ANSWERABLE + UNANSWERABLE:
        return "answerable" if folded_name in ANSWERABLE else "unanswerable"
    if ALIASES.fullmatch(folded_name):
        # Inside metadata, plain "aliases" may be those of anything.
        return "answer aliases" if "ans" in folded_name else "aliases"
    if "alias" in folded_name and not OTHER_ALIASES.fullmatch(folded_name):
        return "unknown aliases"
    return None


def _check_answerable(fields, prefix):
    """Refuse a record that is flagged as having no answer."""
    for field, value in fields.items():
        role = _role(field)
        if role not in ("answerable", "unanswerable") or _is_empty(value):
            continue
        flag = str(value).strip().lower()
        if flag not in TRUE + FALSE:
            raise ValueError(
                f"field {prefix}{field}: expected true or false, got {quote(value)}"
            )
        if (flag in TRUE) != (role == "answerable"):
            raise ValueError(
                f"field {prefix}{field}: {value!r}: the question has no answer"
            )


def _aliases(levels, main_field, further) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each field that holds more golden answers."""
    for prefix, fields in levels:
        for field, value in fields.items():
            role = "answer aliases" if field in further and not prefix else _role(field)
            if role is None or f"{prefix}{field}" == main_field:
                continue
            if _is_empty(unpack_text(value)):  # PopQA writes "[]"
                continue
            if role == "answer aliases" or (role == "aliases" and not prefix):
                yield f"{prefix}{field}", value
            # An integer is the number of aliases.
            if role == "unknown aliases" and not (prefix or isinstance(value, int)):
                raise ValueError(
                    f"field {field}: not known whether these are golden answers; if "
                    f"so, call the field answer_aliases: {quote(value)}"
                )


def _is_empty(value):
    return value is None or (hasattr(value, "__len__") and not len(value))


def _texts(value, name):
    """Return the texts of an answer; there is at least one."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, str):
        value = _unpack_answer(check_text(value, name), name)
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return _object_texts(value, name)
    if not isinstance(value, list | tuple):
        kind = type(value).__name__
        raise ValueError(
            f"field {name}: expected a text or a list of texts, got {kind} "
            f"{quote(value)}"
        )
    texts = [
        t for i, item in enumerate(value) for t in _item_texts(item, f"{name}[{i}]")
    ]
    if not texts:
        raise ValueError(f"field {name}: holds no answer")
    return texts


def _item_texts(item, name):
    """Return the texts of one item in a list of answers."""
    if isinstance(item, dict):
        if "provenance" in item and item.get("answer") is None:
            return []  # KILT: says where answers were found, but holds none
        return _object_texts(item, name)
    text = check_text(item, name)
    return [check_text(t, name) for t in _parse_list(text) or [text]]


def _object_texts(value, name):
    """Return the answer of an object, then its aliases.

    TriviaQA has {"value", "aliases", ...}, in its own files {"Value", "Aliases", ...},
    SQuAD {"text": [...], "answer_start": ...}, IIRC {"type", "answer_spans" or
    "answer_value" and "answer_unit"}, DROP {"number", "date", "spans"}; a ground truth
    of verl is {"target": ...}.
    """
    _check_answerable(value, f"{name}.")
    if value.get("type") == "none":  # IIRC
        raise ValueError(f"field {name}.type: 'none': the question has no answer")
    spans = value.get("answer_spans", value.get("spans"))
    if isinstance(spans, list) and len(spans) > 1:
        raise ValueError(
            f"field {name}: {len(spans)} spans make one answer; write it as one text: "
            f"{quote(spans)}"
        )
    date = value.get("date")
    if not _is_empty(value.get("answer_value")):
        unit = value.get("answer_unit") or ""
        answer = check_text(value["answer_value"], f"{name}.answer_value")
        return [f"{answer} {unit}".strip()]
    if not _is_empty(value.get("number")):
        return [check_text(value["number"], f"{name}.number")]
    if not spans and isinstance(date, dict) and any(date.values()):
        return [" ".join(str(date[n]) for n in ("day", "month", "year") if date.get(n))]
    main_field = next(
        (n for n in ("answer_spans", *ANSWER_FIELDS) if value.get(n) is not None), None
    )
    if main_field is None:
        raise ValueError(
            f"field {name}: expected a text or a list of texts, got dict {quote(value)}"
        )
    texts = _texts(value[main_field], f"{name}.{main_field}")
    if texts == [HIDDEN_ANSWER]:
        raise ValueError(
            f"field {name}.{main_field}: {HIDDEN_ANSWER!r}: the answer is not published"
        )
    for alias, inner in _aliases([("", value)], main_field, ()):
        texts += _texts(inner, f"{name}.{alias}")
    return list(dict.fromkeys(texts))


def _is_of_spans(annotations):
    """Return whether annotations are NQ's; those of other sets hold texts."""
    items = annotations if isinstance(annotations, list) else []
    return any(isinstance(item, dict) and "short_answers" in item for item in items)


def _annotated_texts(annotations, record):
    """Return the answers in NQ's annotations: short answers, and yes or no.

    An annotator's short answers are spans of the page's tokens. As in NQ-open, each is
    a golden answer, and so are those of all annotators.
    """
    texts = []
    for i, annotation in enumerate(_check_list(annotations, "annotations")):
        name = f"annotations[{i}]"
        check_object(annotation, name, ("short_answers", "yes_no_answer"))
        spans = _check_list(annotation["short_answers"], f"{name}.short_answers")
        for j, span in enumerate(spans):
            texts.append(_span_text(record, span, f"{name}.short_answers[{j}]"))
        verdict = annotation["yes_no_answer"]
        if verdict not in ("YES", "NO", "NONE"):
            raise ValueError(
                f"field {name}.yes_no_answer: expected 'YES', 'NO' or 'NONE', got "
                f"{quote(verdict)}"
            )
        if verdict != "NONE":
            texts.append(verdict.lower())
    if not texts:
        raise ValueError(
            "field annotations: holds no short answer: the question has no answer"
        )
    return list(dict.fromkeys(texts))


def _span_text(record, span, name):
    """Return the words of a span of NQ's page, joined by spaces, without HTML tags.

    The page is either `document_text`, tokens separated by single spaces, or the list
    `document_tokens`.
    """
    check_object(span, name, ("start_token", "end_token"))
    field, page = find_field(record, ("document_text", "document_tokens"))
    is_text = field == "document_text"
    tokens = check_text(page, field).split(" ") if is_text else _check_list(page, field)
    start, end = span["start_token"], span["end_token"]
    are_integers = type(start) is int is type(end)
    if not are_integers or not 0 <= start < end <= len(tokens):
        raise ValueError(
            f"field {name}: expected a span of the page's {len(tokens)} tokens, got "
            f"{quote(span)}"
        )
    if is_text:
        words = [token for token in tokens[start:end] if not HTML_TAG.fullmatch(token)]
    else:
        words = [
            check_text(token["token"], f"{field}[{i}].token")
            for i, token in enumerate(tokens[start:end], start)
            if not _is_html(token, f"{field}[{i}]")
        ]
    return check_text(" ".join(words), name)


def _is_html(token, name):
    """Return whether a token of NQ's page is a tag of HTML."""
    check_object(token, name, ("token", "html_token"))
    if not isinstance(token["html_token"], bool):
        raise ValueError(
            f"field {name}.html_token: expected true or false, got "
            f"{quote(token['html_token'])}"
        )
    return token["html_token"]


def _check_list(value, name):
    """Return `value` if it is a list; refuse anything else."""
    if not isinstance(value, list):
        raise ValueError(f"field {name}: expected a list, got {quote(value)}")
    return value


def _unpack_answer(text, name):
    """Return the list or object that a text holds, or the text if it is an answer.

    Raises:
        ValueError: the text begins like a list of texts but cannot be read as one.
    """
    value = unpack_text(text)
    if isinstance(value, list | dict):
        return value
    texts = _parse_list(text)
    if texts is not None:
        return texts
    start = text.lstrip()
    words = start.strip().strip("[]").replace(",", " ").split()
    has_only_literals = start.startswith("[") and all(map(_is_literal, words))
    if LIST_START.match(start) or has_only_literals:
        raise ValueError(
            f"field {name}: begins like a list, but is no list of texts: {quote(text)}"
        )
    return text


def _is_literal(word):
    try:
        float(word)
    except ValueError:
        return word in LITERALS
    return True


def _parse_list(text):
    """Return the texts of a list serialized as text; None if it is not one."""
    text = text.strip()
    value = unpack_text(text)
    if isinstance(value, list) and value and all(isinstance(t, str) for t in value):
        return value
    if not text.startswith(("[", "(", "{", "array(")) or not PYTHON_LIST.fullmatch(
        text
    ):
        return None
    try:
        return [ast.literal_eval(literal) for literal in re.findall(_QUOTED_TEXT, text)]
    except (SyntaxError, ValueError):  # \U00110000 is not a character
        return None
