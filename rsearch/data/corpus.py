"""Read the passages of a corpus by offset: opening millions of them needs no memory.

The first opening reads the whole file once. It checks every record, takes the digest of
the bytes and writes where each line begins to an offsets file; later openings map that
file and are instant. A gzip corpus cannot be read at an offset, so its first opening
also unpacks it, next to the offsets.

Layout of the offsets file: a JSON header, padded with blanks to 4096 bytes, then
num + 1 little-endian uint64: the first byte of every line, and the size of the file.
"""

import array
import contextlib
import gzip
import itertools
import json
import operator
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from rsearch.data.records import (
    check_id,
    check_text,
    check_unicode,
    decode_record,
    shown,
)
from rsearch.runtime.console import note, progress
from rsearch.runtime.jsonl import BOM, GZIP_ERRORS, MAX_LINE_BYTES, file_kind
from rsearch.types import Passage

VERSION = 1
HEADER_BYTES = 4096
CHUNK_BYTES = 1 << 20  # read at once; progress counts these
NUM_SAMPLES = 16  # blocks of the corpus that are compared at every opening
SAMPLE_BYTES = 4096
LINES_AT_ONCE = 256  # read at once when going through the corpus in order


class Corpus:
    """Passages by their position; reading is safe from several threads.

    Args:
        path: JSON Lines, plain or gzip, of {"id", "contents"}, where the first line of
            the contents is the title, or of {"id", "title", "text"}, which are joined
            by a line feed. Ids are text or whole numbers. Line ends may be CRLF.
        cache: directory for the offsets file and, of a gzip corpus, the unpacked text;
            made where it is missing. Default: the corpus's own directory.

    Raises:
        ValueError: a bad record or an id used twice, as file:line: field; an empty or
            damaged file; a cache directory that cannot be written.
        OSError: the corpus cannot be read.
    """

    def __init__(
        self, path: str | os.PathLike, *, cache: str | os.PathLike | None = None
    ):
        self.path = pathlib.Path(path)
        files = _cache_files(self.path, cache)
        header = _read_header(self.path, files)
        if header is None:
            header = build_cache(self.path, files)
        self._fingerprint = header["fingerprint"]
        self._num = header["num"]
        # A plain view: indexing a memmap makes a new memmap every time.
        self._offsets = np.memmap(
            files.offsets, "<u8", "r", offset=HEADER_BYTES, shape=(self._num + 1,)
        ).view(np.ndarray)
        text_path = files.unpacked if header["plain"] else self.path
        self._file = os.open(text_path, os.O_RDONLY)
        self._size = os.fstat(self._file).st_size
        self._offsets_path = files.offsets

    @property
    def fingerprint(self) -> str:
        """Return the digest of the corpus's bytes, whether packed or not."""
        return self._fingerprint

    def __len__(self) -> int:
        return self._num

    def passage(self, index: int) -> Passage:
        """Return the passage at a position in [0, len)."""
        index = operator.index(index)
        # A negative index would be a search engine's 'no result', not the last passage.
        if not 0 <= index < self._num:
            raise IndexError(f"passage {index} of a corpus of {self._num}")
        ends = self._offsets[index : index + 2].tolist()
        self._check_ends(ends)
        line = os.pread(self._file, ends[1] - ends[0], ends[0])
        return self._decode(line, index)

    def passages(self, indices: Iterable[int]) -> list[Passage]:
        """Return [n] the passages at these positions, in this order."""
        return [self.passage(index) for index in indices]

    def __iter__(self) -> Iterator[Passage]:
        """Yield all passages in the order of the file."""
        for first in range(0, self._num, LINES_AT_ONCE):
            ends = self._offsets[first : first + LINES_AT_ONCE + 1].tolist()
            self._check_ends(ends)
            block = os.pread(self._file, ends[-1] - ends[0], ends[0])
            for row, (start, end) in enumerate(itertools.pairwise(ends)):
                line = block[start - ends[0] : end - ends[0]]
                yield self._decode(line, first + row)

    def _check_ends(self, ends):
        """Refuse impossible offsets: a damaged file might ask for terabytes."""
        is_rising = all(map(operator.lt, ends, ends[1:]))
        if not is_rising or ends[-1] > self._size:
            raise ValueError(
                f"{self._offsets_path} is damaged: lines end at bytes {shown(ends)} "
                f"of {self._size}; delete it, and it is made anew"
            )

    def _decode(self, line, index):
        try:
            passage_id, contents = parse_line(line)
        except ValueError as error:
            raise ValueError(
                f"{self.path}:{index + 1}: {error}; the corpus was changed after its "
                "offsets were read"
            ) from None
        return Passage(passage_id, contents)

    def close(self) -> None:
        """Close the file; nothing can be read afterwards."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        # An opening that failed has no file.
        if getattr(self, "_file", -1) >= 0:
            self.close()


def parse_line(line: bytes) -> tuple[str, str]:
    """Return the (id, contents) of one line of a corpus.

    Raises:
        ValueError: names the field that is wrong.
    """
    record = decode_record(line)
    if "id" not in record:
        raise ValueError(f"field id: missing; the fields are {shown(list(record))}")
    passage_id = check_id(record["id"], "id")
    if "contents" in record:
        return passage_id, check_text(record["contents"], "contents")
    if "title" not in record or "text" not in record:
        raise ValueError(
            "field contents: missing, and there is no title with text either; "
            f"the fields are {shown(list(record))}"
        )
    title = record["title"]
    if not isinstance(title, str):
        raise ValueError(f"field title: expected text, got {shown(title)}")
    check_unicode(title, "title")
    return passage_id, f"{title}\n{check_text(record['text'], 'text')}"


class CacheFiles(NamedTuple):
    """The paths of a corpus's cached files."""

    offsets: pathlib.Path
    unpacked: pathlib.Path


def _cache_files(path, cache):
    folder, stem = path.parent, path.name
    if cache is not None:
        # Several corpora named corpus.jsonl may share a cache.
        tag = xxhash.xxh3_64_hexdigest(os.fsencode(path.resolve()))
        folder, stem = pathlib.Path(cache), f"{path.stem[:40]}.{tag}"
    return CacheFiles(folder / f"{stem}.offsets", folder / f"{stem}.plain")


def _state(path):
    """Return size, time and samples of a corpus, which differ when it has changed."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        last = max(0, status.st_size - SAMPLE_BYTES)
        digest = xxhash.xxh3_64()
        for row in range(NUM_SAMPLES):
            start = last * row // (NUM_SAMPLES - 1)
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, start))
    return {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "samples": digest.hexdigest(),
    }


def _unpacked_state(path):
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _read_header(path, files):
    """Return the header of the offsets file; None where it is missing or outdated."""
    state = _state(path)
    try:
        with open(files.offsets, "rb") as file:
            header = _checked(json.loads(file.read(HEADER_BYTES)))
            file_bytes = os.fstat(file.fileno()).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError):
        note(f"{files.offsets} is damaged: reading {path} again")
        return None
    if header.get("version") != VERSION or header.get("source") != state:
        note(f"{path} was changed: reading it again")
        return None
    if file_bytes != HEADER_BYTES + 8 * (header["num"] + 1):
        note(f"{files.offsets} is damaged: reading {path} again")
        return None
    state = header["plain"]
    if state and not (
        files.unpacked.is_file() and _unpacked_state(files.unpacked) == state
    ):
        note(f"{files.unpacked} is missing or was changed: unpacking {path} again")
        return None
    return header


def _checked(header):
    """Return a header; refuse it where a field has the wrong type."""
    if not isinstance(header, dict):
        raise ValueError("the header is no object")
    if header.get("version") == VERSION and not (
        type(header.get("num")) is int
        and header["num"] > 0
        and isinstance(header.get("fingerprint"), str)
        and "plain" in header
    ):
        raise ValueError("a field is missing or of another kind")
    return header


def build_cache(path: pathlib.Path, files: CacheFiles) -> dict:
    """Read the corpus, write its cached files and return their header."""
    kind = file_kind(path)
    if kind == "empty":
        raise ValueError(f"{path}: the corpus is empty")
    if kind == "parquet":
        raise ValueError(f"{path}: a Parquet file; a corpus is JSON Lines")
    _check_writable(path, files.offsets.parent)
    before = _state(path)
    unpacked = path
    if kind == "gzip":
        _unpack(path, files.unpacked)
        unpacked = files.unpacked
    try:
        offsets, fingerprint = _scan(path, unpacked)
    except ValueError:
        if kind == "gzip":
            unpacked.unlink()
        raise
    if _state(path) != before:
        raise ValueError(f"{path}: was changed while it was being read")
    header = {
        "version": VERSION,
        "num": len(offsets) - 1,
        "fingerprint": fingerprint,
        "source": before,
        "plain": _unpacked_state(unpacked) if kind == "gzip" else None,
    }
    with _replacing(files.offsets) as file:
        file.write(json.dumps(header).encode().ljust(HEADER_BYTES))
        file.write(offsets.astype("<u8", copy=False).data)
    return header


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
            f"{path} (cache=...)"
        )


def _unpack(path, unpacked):
    done = 0
    chunks = iter(lambda: file.read(CHUNK_BYTES), b"")
    with gzip.open(path, "rb") as file, _replacing(unpacked) as out:
        try:
            for chunk in progress(chunks, f"unpacking {path.name}, MiB"):
                out.write(chunk)
                done += len(chunk)
        except GZIP_ERRORS as error:
            raise ValueError(
                f"{path}: truncated or damaged gzip data after {done} bytes of text: "
                f"{error}"
            ) from None


def _scan(path, unpacked):
    """Check all records; return ([num + 1] offsets, digest of all bytes)."""
    size = unpacked.stat().st_size
    digest = xxhash.xxh3_128()
    # 16 bytes a passage: texts of 29 million ids would need gigabytes.
    offsets, id_hashes = array.array("Q"), array.array("Q")
    position = 0
    for line in _lines(unpacked, size, digest, f"reading {path.name}, MiB"):
        skipped = len(BOM) if not offsets and line.startswith(BOM) else 0
        try:
            passage_id, _ = parse_line(line[skipped:])
        except ValueError as error:
            raise ValueError(f"{path}:{len(offsets) + 1}: {error}") from None
        offsets.append(position + skipped)
        id_hashes.append(xxhash.xxh3_64_intdigest(passage_id.encode()))
        position += len(line)
    if not offsets:
        raise ValueError(f"{path}: the corpus is empty")
    if position != size:
        raise ValueError(f"{path}: was changed while it was being read")
    offsets.append(size)
    offsets = np.frombuffer(offsets, np.uint64)
    _check_ids_differ(path, unpacked, offsets, np.frombuffer(id_hashes, np.uint64))
    return offsets, digest.hexdigest()


def _lines(unpacked, size, digest, label):
    """Yield the lines of a file with their ends, and digest all bytes meanwhile."""
    rest = b""
    with open(unpacked, "rb") as file:
        for _ in progress(range(-(-size // CHUNK_BYTES)), label):
            chunk = file.read(CHUNK_BYTES)
            digest.update(chunk)
            # Not splitlines: a lone carriage return ends no line.
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            for line in lines:
                yield line + b"\n"
            if len(rest) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{unpacked}: a line has more than {MAX_LINE_BYTES} bytes"
                )
    if rest:
        yield rest


def _check_ids_differ(path, unpacked, offsets, id_hashes):
    """Refuse an id used twice; equal hashes are compared as text."""
    ordered = np.sort(id_hashes)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(repeated):
        return
    first_line = {}
    with open(unpacked, "rb") as file:
        for row in np.flatnonzero(np.isin(id_hashes, repeated)).tolist():
            file.seek(int(offsets[row]))
            passage_id, _ = parse_line(file.readline())
            earlier = first_line.setdefault(passage_id, row + 1)
            if earlier != row + 1:
                raise ValueError(
                    f"{path}:{row + 1}: field id: {shown(passage_id)} was used on line "
                    f"{earlier} already"
                )


@contextlib.contextmanager
def _replacing(path):
    """Yield a file that replaces `path` once it is completely written."""
    handle, temporary = tempfile.mkstemp(prefix=".partial.", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp allows the owner alone; others may share this cache.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
