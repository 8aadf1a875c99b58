"""Check the fields of JSON records strictly: errors name the field and its value.

These functions are not given the file and line: callers prepend those to the message.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rsearch.runtime.jsonl import decode_json

MAX_NAMED = 5  # how many of the bad records left out are named
NO_VALUE = object()


def decode_record(raw: Any) -> dict:
    """Return as a dict a record that `rsearch.data.sources` yields.

    Args:
        raw: a line of JSON as bytes, with or without its line end, a parsed value, or
            the error of a table's row, which is raised.

    Raises:
        ValueError: invalid JSON (see `decode_json`), or a value other than an object.
    """
    if isinstance(raw, ValueError):
        raise raw
    record = decode_json(raw.rstrip(b"\r\n")) if isinstance(raw, bytes) else raw
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise ValueError(f"expected a JSON object, got {kind} {quote(record)}")
    return record


def check_text(value: Any, field: str) -> str:
    """Return `value` if it is text that is not blank; refuse anything else.

    Raises:
        ValueError: names the field and shows its value.
    """
    if not isinstance(value, str):
        kind = type(value).__name__
        raise ValueError(f"field {field}: expected text, got {kind} {quote(value)}")
    if not value or value.isspace():
        raise ValueError(f"field {field}: expected text, got {value!r}")
    check_unicode(value, field)
    return value


def check_unicode(value: str, field: str) -> None:
    """Refuse text with half a surrogate pair, which cannot be encoded."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        letter = value[error.start]
        # Tables are decoded with "surrogateescape", so that one line can be refused.
        is_byte = "\udc80" <= letter <= "\udcff"
        problem = f"half a surrogate pair{' or a byte that is not UTF-8' * is_byte}"
        raise ValueError(
            f"field {field}: {problem} {letter!a} at character {error.start + 1}"
        ) from None


def check_object(
    value: Any, field: str, names: Sequence[str], otherwise: str = ""
) -> None:
    """Refuse a value that is not an object with these keys.

    Args:
        names: required keys.
        otherwise: another accepted form, added to the message.
    """
    if not isinstance(value, dict) or any(name not in value for name in names):
        raise ValueError(
            f"field {field}: expected an object with {' and '.join(names)}{otherwise}, "
            f"got {quote(value)}"
        )


def check_string(value: Any, field: str) -> str:
    """Return `value` if it is text, which may be empty; refuse anything else."""
    if not isinstance(value, str):
        raise ValueError(f"field {field}: expected text, got {quote(value)}")
    check_unicode(value, field)
    return value


def check_id(value: Any, field: str) -> str:
    """Return an id as text; whole numbers are accepted."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return check_text(value, field)


def find_field(
    record: dict, names: Sequence[str], *, required: bool = True
) -> tuple[str, Any]:
    """Return (name, value) of the first of `names` whose value is not None.

    Args:
        names: names of fields, best first; a dot leads into a nested one.
        required: False returns (the first name, None) if no field has a value.

    Raises:
        ValueError: no field has a value, and one is required.
    """
    for name in names:
        value = field_value(record, name)
        if value is not NO_VALUE and value is not None:
            return name, value
    if required:
        field_names = quote(list(record))
        raise ValueError(
            f"field {' or '.join(names)}: missing; the fields are {field_names}"
        )
    return names[0], None


def field_value(record: dict, name: str) -> Any:
    """Return the value of a field, nested if its name has dots, or NO_VALUE."""
    if name in record:
        return record[name]
    for key in name.split("."):
        if not isinstance(record, dict) or key not in record:
            return NO_VALUE
        record = record[key]
    return record


def quote(value: Any, *, max_characters: int = 60) -> str:
    """Return a value's repr for an error message, cut to `max_characters`."""
    text = repr(value)
    return text if len(text) <= max_characters else text[: max_characters - 3] + "..."


def check_on_bad(on_bad: str) -> None:
    """Refuse a value of `on_bad` other than 'raise' and 'skip'."""
    if on_bad not in ("raise", "skip"):
        raise ValueError(f"{on_bad=}: expected 'raise' or 'skip'")


class BadRecords:
    """The bad records of a source: either the first raises, or all are counted.

    Args:
        on_bad: "raise" or "skip".

    Attributes:
        num: number of bad records.
        problems: what was wrong with the first MAX_NAMED of them.
    """

    def __init__(self, on_bad: str):
        check_on_bad(on_bad)
        self._on_bad = on_bad
        self.num = 0
        self.problems = []

    def add(self, origin: str, error: ValueError | str) -> None:
        """Count a bad record, or raise a ValueError that names its origin."""
        problem = f"{origin}: {error}"
        if self._on_bad == "raise":
            raise ValueError(problem) from None
        self.num += 1
        if self.num <= MAX_NAMED:
            self.problems.append(problem)


def report_skipped(
    source: Any,
    problems: Sequence[str],
    log: Callable[[str], None],
    *,
    count: int | None = None,
) -> None:
    """Report the first bad records that were left out, and how many there were.

    Args:
        problems: what was wrong with each of them, or with the first ones.
        count: number of bad records; None takes the number of problems.
    """
    count = len(problems) if count is None else count
    for problem in problems[:MAX_NAMED]:
        log(f"left out of {source}: {problem}")
    if count > MAX_NAMED:
        log(f"left out of {source}: {count:,} bad records in all")
