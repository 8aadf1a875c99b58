"""Read the passages of a corpus by offset: opening millions of them needs no memory.

When a corpus is first opened, the whole file is read once: every record is checked, the
bytes are digested, and the offset of each record is written to an offsets file. Later
openings map that file and read only it and a few samples of the corpus. A gzip corpus
cannot be read at an offset, so it is also unpacked, next to the offsets.

Layout of the offsets file: a JSON header, padded with blanks to 4096 bytes, then
num + 1 little-endian uint64: the first byte of every record's line, and the end of the
last of these lines. Bad lines that were left out follow the line of a record.
"""

import array
import contextlib
import itertools
import json
import operator
import os
import pathlib
import shlex
import shutil
import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from rsearch.data.records import (
    BadRecords,
    check_id,
    check_on_bad,
    check_text,
    check_unicode,
    decode_record,
    quote,
    report_skipped,
)
from rsearch.runtime.console import note, progress
from rsearch.runtime.files import expand, replacing
from rsearch.runtime.jsonl import BOM, GZIP_ERRORS, MAX_LINE_BYTES, file_kind, open_text
from rsearch.types import Passage

VERSION = 1
HEADER_BYTES = 4096
CHUNK_BYTES = 1 << 20  # bytes per read; progress counts these chunks
NUM_SAMPLES = 16  # blocks of the corpus that are compared whenever it is opened
SAMPLE_BYTES = 4096
LINES_AT_ONCE = 256  # lines per read when iterating over the corpus
IDS = ("id", "_id", "docid", "doc_id")  # FlashRAG, BEIR, Tevatron, SciFact; best first


class Corpus:
    """Passages by position; reading is thread-safe.

    Args:
        path: path of JSON Lines, plain or gzip, with records that `parse_line` reads.
            Line ends may be CRLF, and blank lines may follow the last record.
        cache: directory for the offsets file and, for a gzip corpus, the unpacked text;
            created if missing. Offsets next to the corpus are used as well. Default:
            the corpus's own directory.
        on_bad: "raise" makes a bad record an error; "skip" leaves it out, and prints
            the first bad records and their number.

    Attributes:
        path: path of the corpus.
        fingerprint: digest of its text, the same whether packed or not.
        num_skipped: number of bad records that were left out.

    Raises:
        ValueError: a bad record or an id used twice, as file:line: field; an empty or
            damaged file, a directory or a pipe; a cache directory that cannot be
            written.
        OSError: the corpus cannot be read.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        cache: str | os.PathLike | None = None,
        on_bad: str = "raise",
    ):
        check_on_bad(on_bad)
        self.path = expand(path)
        if self.path.exists() and not self.path.is_file():
            raise ValueError(f"{path}: not a file; passages are read at their offsets")
        files = _cache_files(self.path, cache, on_bad)
        header = _read_header(self.path, files)
        if header is None and cache is not None:
            adjacent_files = _cache_files(self.path, None, on_bad)
            header = _read_header(self.path, adjacent_files)
            files = files if header is None else adjacent_files
        if header is None:
            header = build_cache(self.path, files)
        elif header["skipped"]:
            note(f"left out of {path}: {header['skipped']:,} bad records")
        self.num_skipped = header["skipped"]
        self.fingerprint = header["fingerprint"]
        self._num = header["num"]
        # A plain view, as indexing a memmap creates a new memmap every time.
        self._offsets = np.memmap(
            files.offsets, "<u8", "r", offset=HEADER_BYTES, shape=(self._num + 1,)
        ).view(np.ndarray)
        text_path = files.unpacked if header["plain"] else self.path
        self._file = os.open(text_path, os.O_RDONLY)
        # Unlike __del__, this never runs in an interpreter that is half shut down.
        self._close_file = weakref.finalize(self, os.close, self._file)
        self._size = os.fstat(self._file).st_size
        self._offsets_path = files.offsets

    def __len__(self) -> int:
        return self._num

    def passage(self, index: int) -> Passage:
        """Return the passage at a position in [0, len)."""
        index = operator.index(index)
        # A negative index is a search engine's 'no result', not the last passage.
        if not 0 <= index < self._num:
            raise IndexError(f"passage {index} of a corpus of {self._num}")
        offsets = self._offsets[index : index + 2].tolist()
        self._check_ends(offsets)
        line = os.pread(self._file, offsets[1] - offsets[0], offsets[0])
        return self._decode(line, index)

    def passages(self, indices: Iterable[int]) -> list[Passage]:
        """Return [n] the passages at these positions, in this order."""
        return [self.passage(index) for index in indices]

    def __iter__(self) -> Iterator[Passage]:
        """Yield all passages in the order of the file."""
        for first in range(0, self._num, LINES_AT_ONCE):
            offsets = self._offsets[first : first + LINES_AT_ONCE + 1].tolist()
            self._check_ends(offsets)
            block = os.pread(self._file, offsets[-1] - offsets[0], offsets[0])
            for row, (start, end) in enumerate(itertools.pairwise(offsets)):
                line = block[start - offsets[0] : end - offsets[0]]
                yield self._decode(line, first + row)

    def _check_ends(self, offsets):
        """Refuse impossible offsets: a damaged file might request terabytes."""
        is_rising = all(map(operator.lt, offsets, offsets[1:]))
        if not is_rising or offsets[-1] > self._size:
            raise ValueError(
                f"{self._offsets_path} is damaged: lines end at bytes {quote(offsets)} "
                f"of {self._size}; delete it to have it made again"
            )

    def _decode(self, line, index):
        try:
            passage_id, contents = parse_line(line.partition(b"\n")[0])
        except ValueError as error:
            # If records were left out, line numbers are not passage numbers.
            location = f" passage {index}" if self.num_skipped else index + 1
            raise ValueError(
                f"{self.path}:{location}: {error}; the corpus was changed after its "
                "offsets were read"
            ) from None
        return Passage(passage_id, contents)

    def close(self) -> None:
        """Close the file; nothing can be read afterwards."""
        self._close_file()
        self._file = -1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def parse_line(line: bytes) -> tuple[str, str]:
    """Return the (id, contents) of one line of a corpus.

    A record is one of
        - {"id", "contents"}: FlashRAG, Search-R1, R-Search, Pyserini. The first line of
          the contents is the title; other fields are not read, as in those projects.
        - {"id", "title", "text"}: BEIR, Tevatron, DPR in JSON, Atlas. Title and text
          are joined by a line feed. One of them may be empty or null, and the title may
          be missing; "section" is appended to the title, as in Atlas.
    The id, a text or a whole number, is the first of `IDS` that is present. Other
    fields, such as BEIR's "metadata" or "url", are not part of a passage.

    Raises:
        ValueError: names the field that is wrong.
    """
    return parse_record(decode_record(line))


def parse_record(record: dict) -> tuple[str, str]:
    """Return the (id, contents) of a record, see `parse_line`."""
    name = next((name for name in IDS if record.get(name) is not None), "id")
    if name not in record and record.keys().isdisjoint(IDS):
        raise ValueError(f"field id: missing; the fields are {quote(list(record))}")
    passage_id = check_id(record.get(name), name)
    if "text" not in record and "contents" not in record:
        raise ValueError(
            "field contents: missing, and there is no text either; the fields are "
            f"{quote(list(record))}"
        )
    if "text" not in record or not _is_empty(record.get("contents")):
        return passage_id, check_text(record["contents"], "contents")
    title = _title(record)
    text = record["text"]
    if isinstance(text, list):
        raise ValueError(
            f"field text: expected text, got list {quote(text)}; to make passages of "
            "an article's sentences or paragraphs, as in HotpotQA and KILT, use "
            "python -m rsearch.corpus --words=100"
        )
    if not _is_empty(text):
        check_text(text, "text")
    elif not title.strip():
        raise ValueError(f"field text: expected text, got {text!r}, and no title")
    return passage_id, f"{title}\n{text or ''}"


def _is_empty(value):
    return value is None or (isinstance(value, str) and not value.strip())


def _title(record):
    """Return the title of a record on one line; "" if it has none."""
    names = [n for n in ("title", "section") if record.get(n) not in (None, "")]
    for name in names:
        if not isinstance(record[name], str):
            raise ValueError(f"field {name}: expected text, got {quote(record[name])}")
        check_unicode(record[name], name)
    title = ": ".join(record[name] for name in names)
    # A line end within the title would move the rest of it into the text.
    return " ".join(title.split()) if "\n" in title or "\r" in title else title


class CacheFiles(NamedTuple):
    """The paths of a corpus's cached files, and how they treat bad records."""

    offsets: pathlib.Path
    unpacked: pathlib.Path
    on_bad: str = "raise"


def _cache_files(path, cache, on_bad):
    folder, stem = path.parent, path.name
    if cache is not None:
        # Several corpora named corpus.jsonl may share a cache.
        tag = xxhash.xxh3_64_hexdigest(os.fsencode(path.resolve()))
        folder, stem = expand(cache), f"{path.stem[:40]}.{tag}"
    return CacheFiles(folder / f"{stem}.offsets", folder / f"{stem}.plain", on_bad)


def _state(path):
    """Return a corpus's size, mtime and samples' digest, to tell if it has changed."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        last_start = max(0, status.st_size - SAMPLE_BYTES)
        digest = xxhash.xxh3_64()
        for row in range(NUM_SAMPLES):
            start = last_start * row // (NUM_SAMPLES - 1)
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, start))
    return {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "samples": digest.hexdigest(),
    }


def _read_header(path, files):
    """Return the header of the offsets file; None if that is missing or outdated."""
    state = _state(path)
    try:
        with open(files.offsets, "rb") as file:
            header = _check_header(json.loads(file.read(HEADER_BYTES)))
            offsets = xxhash.xxh3_64()
            while chunk := file.read(CHUNK_BYTES):
                offsets.update(chunk)
            file_bytes = file.tell()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError):
        note(f"{files.offsets} is damaged: reading {path} again")
        return None
    if header.get("version") != VERSION or header.get("source") != state:
        note(f"{path} was changed: reading it again")
        return None
    # Files from earlier versions of this program have no digest.
    is_intact = header.get("offsets") in (None, offsets.hexdigest())
    if not is_intact or file_bytes != HEADER_BYTES + 8 * (header["num"] + 1):
        note(f"{files.offsets} is damaged: reading {path} again")
        return None
    if header["plain"] and not _is_unpacked(files.unpacked, header["plain"]):
        note(f"{files.unpacked} is missing or was changed: unpacking {path} again")
        return None
    if header["skipped"] and files.on_bad == "raise":
        return None  # reading the corpus again names the first bad record
    return header


def _is_unpacked(path, state):
    """Return whether the unpacked text exists and is in this state."""
    if not path.is_file():
        return False
    actual = _state(path)
    # States from earlier versions of this program have no samples.
    return all(actual.get(name) == value for name, value in state.items())


def _check_header(header):
    """Return a header; refuse one in which a field has the wrong type."""
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    if header.get("version") == VERSION and not (
        type(header.get("num")) is int
        and header["num"] > 0
        and isinstance(header.get("fingerprint"), str)
        and isinstance(header.get("plain", 0), dict | None)
        and type(header.setdefault("skipped", 0)) is int
    ):
        raise ValueError("a field is missing or has the wrong type")
    return header


def build_cache(path: pathlib.Path, files: CacheFiles) -> dict:
    """Read the corpus, write its cached files and return their header."""
    kind = file_kind(path)
    if kind == "empty":
        raise ValueError(f"{path}: the corpus is empty")
    if kind == "parquet":
        raise ValueError(_not_jsonl(path, "a Parquet file"))
    _check_is_jsonl(path)
    _check_writable(path, files.offsets.parent)
    state = _state(path)
    bad_records = BadRecords(files.on_bad)
    with contextlib.ExitStack() as stack:
        # Records are checked while the text is unpacked, so a bad one ends both.
        unpacked = None
        if kind == "gzip":
            unpacked = stack.enter_context(replacing(files.unpacked))
        offsets, fingerprint = _scan(path, unpacked, bad_records)
        if _state(path) != state:
            raise ValueError(f"{path}: was changed while it was being read")
    report_skipped(path, bad_records.problems, note, count=bad_records.num)
    header = {
        "version": VERSION,
        "num": len(offsets) - 1,
        "fingerprint": fingerprint,
        "source": state,
        "plain": _state(files.unpacked) if kind == "gzip" else None,
        "offsets": xxhash.xxh3_64_hexdigest(offsets.data),
        "skipped": bad_records.num,
    }
    with replacing(files.offsets) as file:
        file.write(json.dumps(header).encode().ljust(HEADER_BYTES))
        file.write(offsets.data)
    return header


def _check_is_jsonl(path):
    """Refuse other layouts, naming each and the command that converts it."""
    try:
        with open_text(path) as file:
            first = file.readline(CHUNK_BYTES).removeprefix(BOM).strip()
    except GZIP_ERRORS:
        return  # the scan reports where
    if first.startswith(b"["):
        raise ValueError(_not_jsonl(path, "a JSON list"))
    if b"\t" in first and not first.startswith((b"{", b'"')):
        raise ValueError(_not_jsonl(path, "tab-separated values"))


def _not_jsonl(path, layout):
    return (
        f"{path}: {layout}; a corpus is JSON Lines: python -m rsearch.corpus "
        f"{shlex.quote(str(path))} --out=corpus.jsonl"
    )


def _check_writable(path, folder):
    """Refuse a directory that cannot be written, before the long work begins."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Root may write anywhere; a directory without any write bit is still meant
        # to stay as it is.
        is_writable = folder.stat().st_mode & 0o222 and os.access(folder, os.W_OK)
    except OSError:
        is_writable = False
    if not is_writable:
        raise ValueError(
            f"{folder} cannot be written: name another directory for the offsets of "
            f"{path} (--cache of rsearch.index, config.retrieval.corpus_cache of a run)"
        )


def _scan(path, unpacked, bad_records):
    """Check all records of a corpus.

    Args:
        unpacked: file that receives the text of a gzip corpus; None for a plain one.

    Returns:
        ([num + 1] <u8 offsets, digest of all bytes of the text).
    """
    digest = xxhash.xxh3_128()
    # 20 bytes a passage; 29 million ids as text would need gigabytes.
    offsets, id_hashes = array.array("Q"), array.array("Q")
    lines = array.array("I")  # line number of each passage, from 1
    position = end = number = num_blank = 0
    for number, line in enumerate(_read_lines(path, unpacked, digest), 1):
        start = position
        position += len(line)
        if number == 1 and line.startswith(BOM):
            line = line.removeprefix(BOM)
            start += len(BOM)
        if not line.strip():
            num_blank += 1
            continue
        # Blank lines are bad records unless they follow the last record.
        for blank_number in range(number - num_blank, number):
            bad_records.add(f"{path}:{blank_number}", "blank line")
        num_blank = 0
        try:
            passage_id, _ = parse_line(line)
        except ValueError as error:
            bad_records.add(f"{path}:{number}", error)
            continue
        offsets.append(start)
        id_hashes.append(xxhash.xxh3_64_intdigest(passage_id.encode()))
        lines.append(number)
        end = position
    if not offsets and bad_records.num:
        raise ValueError(
            f"{path}: all {bad_records.num:,} records are bad; first "
            f"{bad_records.problems[0]}"
        )
    if not offsets:
        location = f"{path}:1: blank line" if number else path
        raise ValueError(f"{location}: the corpus is empty")
    offsets = np.frombuffer(offsets, np.uint64)
    id_hashes = np.frombuffer(id_hashes, np.uint64)
    repeated_rows = []
    for row, passage_id, first_row in _repeated_ids(path, unpacked, offsets, id_hashes):
        repeated_rows.append(row)
        problem = f"{quote(passage_id)} was used on line {lines[first_row]} already"
        bad_records.add(f"{path}:{lines[row]}", f"field id: {problem}")
    offsets = np.append(np.delete(offsets, repeated_rows), np.uint64(end))
    return offsets.astype("<u8", copy=False), digest.hexdigest()


def _read_lines(path, unpacked, digest):
    """Yield the lines of the text with their ends, digesting and unpacking its bytes.

    Args:
        path, unpacked: see `_scan`.
        digest: updated with all bytes.
    """
    label, total = f"reading {path.name}, MiB", -(-path.stat().st_size // CHUNK_BYTES)
    if unpacked is not None:
        label, total = f"unpacking {path.name}, MiB", None
        max_bytes = shutil.disk_usage(unpacked.fileno()).free * 9 // 10
    num_bytes = 0
    partial_line = b""
    try:
        with open_text(path) as file:
            chunks = iter(lambda: file.read(CHUNK_BYTES), b"")
            for chunk in progress(chunks, label, total=total):
                digest.update(chunk)
                # Not splitlines: a lone carriage return does not end a line.
                lines = (partial_line + chunk).split(b"\n")
                # A chunk is far shorter than the limit, so no other line can exceed it.
                if len(lines[0]) > MAX_LINE_BYTES:
                    raise ValueError(
                        f"{path}: a line has more than {MAX_LINE_BYTES} bytes"
                    )
                partial_line = lines.pop()
                for line in lines:
                    yield line + b"\n"
                num_bytes += len(chunk)
                if unpacked is not None:
                    if num_bytes > max_bytes:
                        raise ValueError(
                            f"{path}: its text has more than {max_bytes} bytes, nine "
                            "tenths of the free space on the disk of its offsets"
                        )
                    unpacked.write(chunk)
    except GZIP_ERRORS as error:
        raise ValueError(
            f"{path}: truncated or damaged gzip data after {num_bytes} bytes of text: "
            f"{error}"
        ) from None
    if partial_line:
        yield partial_line


def _repeated_ids(path, unpacked, offsets, id_hashes):
    """Yield (row, id, first row) of each repeated id; ids of equal hash are compared.

    Args:
        path, unpacked: see `_scan`.
        offsets: [num] offsets of the records in the text.
        id_hashes: [num] hashes of their ids.
    """
    sorted_hashes = np.sort(id_hashes)
    repeated_hashes = sorted_hashes[1:][sorted_hashes[1:] == sorted_hashes[:-1]]
    if not len(repeated_hashes):
        return
    text = path
    if unpacked is not None:
        unpacked.flush()
        text = unpacked.fileno()
    first_rows = {}
    with open(text, "rb", closefd=unpacked is None) as file:
        for row in np.flatnonzero(np.isin(id_hashes, repeated_hashes)).tolist():
            file.seek(int(offsets[row]))
            passage_id, _ = parse_line(file.readline())
            first_row = first_rows.setdefault(passage_id, row)
            if first_row != row:
                yield row, passage_id, first_row
