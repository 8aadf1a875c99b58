"""JSON records read from bytes, strictly: what is wrong is said, nothing is guessed.

The `json` module keeps the last of two equal keys in silence, accepts NaN and fails
with a RecursionError on deep nesting. Here all three are errors of that record. None of
these functions knows which file and line it looks at: callers put that in front of the
message.
"""

import gzip
import json
import zlib

BOM = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 1 << 24  # a small gzip file may hold gigabytes without a line end
GZIP_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)
"""What reading a truncated or damaged gzip file raises."""


def decode_json(text):
    """The value of a JSON text.

    Args:
        text: bytes in UTF-8.

    Raises:
        ValueError: not UTF-8, not JSON, a key twice in one object, NaN or infinity, or
            nested too deeply.
    """
    try:
        text = text.decode("utf-8")
        return _DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        if not text.strip():
            raise ValueError("blank line") from None
        where = f"column {error.colno}"
        if error.lineno > 1:
            where = f"line {error.lineno}, {where}"
        raise ValueError(f"invalid JSON at {where}: {error.msg}") from None
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None


def decode_record(line):
    """The JSON object on one line.

    Args:
        line: bytes, with or without its line end.

    Raises:
        ValueError: as `decode_json`, and for any other value than an object.
    """
    return check_record(decode_json(line.rstrip(b"\r\n")))


def check_record(record):
    """`record`, refused where it is no object."""
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise ValueError(f"expected a JSON object, got {kind} {shown(record)}")
    return record


def check_text(value, field):
    """`value`, refused where it is no text or a blank one.

    Raises:
        ValueError: with the field's name and its value.
    """
    if not isinstance(value, str):
        kind = type(value).__name__
        raise ValueError(f"field {field}: expected text, got {kind} {shown(value)}")
    if not value or value.isspace():
        raise ValueError(f"field {field}: expected text, got {value!r}")
    check_unicode(value, field)
    return value


def check_unicode(value, field):
    """Refuses text with half a surrogate pair, which no encoder can write."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])
        place = error.start + 1
        raise ValueError(
            f"field {field}: half a surrogate pair {half} at character {place}"
        ) from None


def check_id(value, field):
    """An id as text; whole numbers are accepted."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return check_text(value, field)


def shown(value, *, max_characters=60):
    """A value as an error message shows it."""
    text = repr(value)
    return text if len(text) <= max_characters else text[: max_characters - 3] + "..."


def file_kind(path):
    """'gzip', 'parquet', 'empty' or 'text', by the first bytes of the file.

    Raises:
        OSError: it is missing, unreadable or a directory.
    """
    with open(path, "rb") as file:
        head = file.read(4)
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    if head == b"PAR1":
        return "parquet"
    return "text" if head else "empty"


def _object(pairs):
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"field {twice}: given twice")
    return record


def _constant(name):
    raise ValueError(f"{name} is not JSON")


# One decoder for all lines: json.loads with hooks would build one a call.
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
