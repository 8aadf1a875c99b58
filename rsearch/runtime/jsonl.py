"""Read and write JSON Lines: one reader for a run's own files and for users' files.

Files that a run writes itself are read leniently, and a last line without its line feed
is dropped: a crash tore it. Files from users are read strictly: the `json` module
silently keeps the last of two equal keys, accepts NaN, reads 1e999 as an infinity, and
fails with a RecursionError on deep nesting, and here all four are errors of that line.
"""

import gzip
import io
import json
import math
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rsearch.hosts import processes
from rsearch.runtime import files, run_directory
from rsearch.runtime.boundary import REQUESTS, describe_error

BOM = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"  # first bytes of a gzip file
GZIP_LEVEL = 6  # for files that a run compresses: level 9 takes five times as long
MAX_LINE_BYTES = 1 << 24  # a small gzip file may hold gigabytes without a line end
# Text compresses to a third, repetitive records to a fiftieth, zeros to a thousandth.
MAX_RATIO = 200
MIN_UNPACKED_BYTES = 1 << 26  # any compressed file may hold this much, however small
COMPRESSED_FORMATS = {  # first bytes of other compressed files -> their format
    b"BZh": "bzip2",
    b"\xfd7zX": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
GZIP_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)  # of truncated or damaged data


def read_jsonl(
    path: str | os.PathLike,
    *,
    strict: bool = False,
    parse: Callable[[Any], Any] | None = None,
    on_bad: Callable[[str], None] | None = None,
) -> list:
    """Return the values of a JSON Lines file, one for each line.

    Args:
        path: the file, plain or gzip, in UTF-8, with or without a byte order mark.
        strict: whether the file is a user's. Repeated keys in one object, NaN,
            infinities and lines of more than MAX_LINE_BYTES are then refused, and a
            last line without its line feed is read. In a run's own file a crash has cut
            such a line short, and it is omitted.
        parse: (value) -> the value to return in its place; a ValueError makes the line
            a bad one.
        on_bad: called with the message of each bad line, which is then omitted; None
            raises the first one.

    Raises:
        ValueError: a bad line, named as file:line, or damaged gzip data.
        OSError: the file cannot be read.
    """
    values = []
    limit = MAX_LINE_BYTES if strict else None
    for number, line in jsonl_lines(path, drops_torn=not strict, max_line_bytes=limit):
        try:
            value = decode_json(line.rstrip(b"\r\n"), strict=strict)
            values.append(value if parse is None else parse(value))
        except ValueError as error:
            message = f"{path}:{number}: {error}"
            if on_bad is None:
                raise ValueError(message) from None
            on_bad(message)
    return values


def jsonl_lines(
    path: str | os.PathLike,
    *,
    drops_torn: bool = False,
    max_line_bytes: int | None = MAX_LINE_BYTES,
) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, bytes with their line end) of a plain or gzip file.

    Lines are not parsed, so that one bad line does not hide those after it. Blank lines
    at the end of the file are omitted. Whether a file is compressed is decided by its
    first bytes, not by its name.

    Args:
        drops_torn: whether to omit a last line without its line feed, as a crash leaves
            it.
        max_line_bytes: a longer line is refused; None allows any length.

    Raises:
        ValueError: a line of more than `max_line_bytes`, or damaged gzip data.
        OSError: the file cannot be read.
    """
    number = num_blank = 0
    try:
        with open_text(path) as file:
            # One byte more than the limit is enough to detect a line that is too long.
            size = -1 if max_line_bytes is None else max_line_bytes + 1
            lines = iter(lambda: file.readline(size), b"")
            for number, raw_line in enumerate(lines, 1):
                if max_line_bytes is not None and len(raw_line) > max_line_bytes:
                    raise ValueError(
                        f"{path}:{number}: a line of more than {max_line_bytes} bytes"
                    )
                if drops_torn and not raw_line.endswith(b"\n"):
                    return
                line = raw_line.removeprefix(BOM) if number == 1 else raw_line
                if not line.strip():
                    num_blank += 1
                    continue
                for blank_number in range(number - num_blank, number):
                    yield blank_number, b"\n"
                num_blank = 0
                yield number, line
    except GZIP_ERRORS as error:
        raise ValueError(
            f"{path}: truncated or damaged gzip data after line {number}: {error}"
        ) from None


def open_text(path: str | os.PathLike) -> io.BufferedReader:
    """Open a plain or gzip file for reading its uncompressed bytes.

    Reading raises one of GZIP_ERRORS if the compressed data is damaged or unpacks to
    more than `max_unpacked_bytes`.
    """
    with open(path, "rb") as file:
        is_gzip = file.read(2) == GZIP
    if is_gzip:
        return io.BufferedReader(_BoundedGzip(path), 1 << 18)
    return open(path, "rb")


def max_unpacked_bytes(path: str | os.PathLike) -> int:
    """Return how many bytes a gzip file may unpack to; more is an attack or damage."""
    return max(MIN_UNPACKED_BYTES, MAX_RATIO * os.path.getsize(path))


class _BoundedGzip(io.RawIOBase):
    """The uncompressed bytes of a gzip file, up to a limit."""

    def __init__(self, path):
        self._file = gzip.open(path, "rb")  # noqa: SIM115 - closed with this one
        self._limit = self._room = max_unpacked_bytes(path)

    def readable(self):
        return True

    def readinto(self, buffer):
        count = self._file.readinto(buffer)
        self._room -= count
        if self._room < 0:
            raise gzip.BadGzipFile(
                f"it unpacks to more than {self._limit} bytes, far more than text of "
                "this compressed size does; if this is intended, unpack it yourself"
            )
        return count

    def close(self):
        self._file.close()
        super().close()


def file_kind(path: str | os.PathLike) -> str:
    """Return 'gzip', 'parquet', 'empty' or 'text', by the first bytes of the file.

    Raises:
        ValueError: the file has another compressed format, or is UTF-16 text.
        OSError: the file is missing, unreadable or a directory.
    """
    with open(path, "rb") as file:
        head = file.read(4)
    if head.startswith(GZIP):
        return "gzip"
    if head == b"PAR1":
        return "parquet"
    for prefix, kind in COMPRESSED_FORMATS.items():
        if head.startswith(prefix):
            raise ValueError(f"{path}: {kind} data; unpack it, or pack it with gzip")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(f"{path}: UTF-16 text; it must be in UTF-8")
    return "text" if head else "empty"


def decode_json(data: bytes, *, strict: bool = True) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises:
        ValueError: not UTF-8, not JSON or nested too deeply; if `strict`, also a key
            repeated in one object, NaN or an infinity. The caller prefixes the message
            with file and line.
    """
    try:
        text = data.decode("utf-8")
        return (_STRICT if strict else _LENIENT).decode(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        if not text.strip():
            raise ValueError("blank line") from None
        position = f"column {error.colno}"
        if error.lineno > 1:
            position = f"line {error.lineno}, {position}"
        raise ValueError(f"invalid JSON at {position}: {error.msg}") from None
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except REQUESTS:
        raise
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except BaseException as error:
        # Not with `boundary`: each of a million lines would pay for that.
        raise ValueError(f"not read as JSON: {describe_error(error)}") from None


def write_jsonl(path: str | os.PathLike, rows: Iterable) -> None:
    """Write a JSON Lines file atomically and durably, on host 0. NaN is refused.

    A file whose name ends in .gz is compressed. The same rows give the same bytes, even
    if compressed.
    """
    lines = [json.dumps(row, allow_nan=False) + "\n" for row in rows]
    if processes.is_host0():
        data = "".join(lines).encode()
        if os.fspath(path).endswith(".gz"):
            data = gzip.compress(data, GZIP_LEVEL, mtime=0)
        files.replace(path, data)


def append_jsonl(path: str | os.PathLike, row: Any) -> None:
    """Append one line to a JSON Lines file, completely or not at all, on host 0.

    Raises:
        OSError: the disk refuses the write; the file is unchanged.
        LostDirectoryError: as for `files.replace`.
    """
    line = json.dumps(row, allow_nan=False) + "\n"
    if processes.is_host0():
        path = pathlib.Path(path)
        current_path = run_directory.locate(path)
        with open(current_path, "ab", buffering=0) as file:
            files.append(file, line.encode())
        if current_path != path:
            run_directory.stop_if_lost(path)


def recover_jsonl(
    path: str | os.PathLike,
    *,
    parse: Callable[[Any], Any] | None = None,
    on_bad: Callable[[str], None],
) -> list:
    """Return the values of a file that a run has appended to, before it is resumed.

    Bad lines, and a last line without its line feed, as a crash leaves it, are moved to
    <path>.damaged, on host 0. All other lines stay unchanged. There need be no file.

    Args:
        parse: as in `read_jsonl`.
        on_bad: called once, with a message, if there are bad lines.

    Raises:
        OSError: the file cannot be read or written.
    """
    try:
        data = pathlib.Path(path).read_bytes()
    except FileNotFoundError:
        return []
    values, good_lines, bad_lines, problem = [], [], [], ""
    for number, line in enumerate(io.BytesIO(data), 1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("cut short")
            body = line.removeprefix(BOM) if number == 1 else line
            value = decode_json(body.rstrip(b"\r\n"), strict=False)
            values.append(value if parse is None else parse(value))
            good_lines.append(line)
        except ValueError as error:
            bad_lines.append(line.removesuffix(b"\n") + b"\n")
            problem = problem or f"{path}:{number}: {error}"
    if bad_lines and processes.is_host0():
        damaged_path = files.keep_damaged(path, b"".join(bad_lines))
        files.replace(path, b"".join(good_lines))
        suffix = f" (and {len(bad_lines) - 1} more lines)" if len(bad_lines) > 1 else ""
        on_bad(f"{problem}{suffix}: set aside in {damaged_path.name}")
    return values


def _unique_keys(pairs):
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated_key = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"field {repeated_key}: given twice")
    return record


def _refuse_constant(name):
    raise ValueError(f"{name} is not JSON")


def _finite_float(digits):
    """Return the number; refuse one that only an infinity could stand for."""
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:40]} is too large a number")
    return value


# Decoders are made once: json.loads with hooks would make one for every line.
_LENIENT = json.JSONDecoder()
_STRICT = json.JSONDecoder(
    object_pairs_hook=_unique_keys,
    parse_constant=_refuse_constant,
    parse_float=_finite_float,
)
