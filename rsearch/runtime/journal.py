"""Append records to a file so that a crash loses no record written before it.

A file is a sequence of records: the lengths of key and body, a digest of both, the key
in JSON, the body. A process that dies while writing leaves a torn end, and a disk may
damage earlier bytes. All bytes that are not part of a record with a matching digest are
moved to <file>.damaged, and the records after them are still used.

A log saves work, and keeps replies of services that cannot be obtained again. A run is
correct without it: if the disk refuses a write, the run notes that and continues.
"""

import itertools
import json
import mmap
import os
import pathlib
import re
import struct
import threading
from collections.abc import Sequence

import xxhash

from rsearch.hosts import processes
from rsearch.runtime import console, files, run_directory

HEADER = struct.Struct("<QQ16s")  # lengths of key and body, digest
# Where a header may begin after damaged bytes: lengths below 2^40, then a JSON list.
MAYBE_HEADER = re.compile(rb"(?=.{5}\0{3}.{5}\0{3}.{16}\[)", re.DOTALL)


class AppendLog:
    """An append-only log of keyed records in a stage's folder, with a file per host.

    The records of all hosts are read; if keys are equal, this host's latest record
    counts. Safe to use from several threads.

    Args:
        name: kind of records; the files are <name>-<host>.journal.
    """

    def __init__(self, folder: pathlib.Path, name: str):
        self._folder = folder
        self._name = name
        self._path = folder / f"{name}-{processes.host_index()}.journal"
        self._lock = threading.Lock()
        self._has_failed = False
        self._spans: dict[str, tuple[pathlib.Path, int, int]] = {}  # file, start, end
        paths = folder.glob(f"{name}-*.journal")
        # This host's file comes last: if keys are equal, the last one read counts.
        for path in sorted(paths, key=lambda p: (p == self._path, p.name)):
            damaged_spans = self._read(path)
            if path == self._path and damaged_spans:
                self._set_aside(damaged_spans)

    def __len__(self) -> int:
        """Return the number of records that can be read."""
        return len(self._spans)

    def get(self, key: Sequence) -> bytes | None:
        """Return the body of the record with this key, or None.

        Args:
            key: a list of JSON values.
        """
        name = json.dumps(key)
        if name not in self._spans:
            return None
        path, start, end = self._spans[name]
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(end - start)
        record = _record_at(data, 0)
        # Another host may have set aside damaged bytes, which moves its records.
        if record is None or record[0] != name:
            return None
        return data[record[1] : record[2]]

    def add(self, key: Sequence, body: bytes) -> bool:
        """Append a record to this host's file; return whether the disk took it."""
        name = json.dumps(key)
        raw_key = name.encode()
        header = HEADER.pack(len(raw_key), len(body), _digest(raw_key, body))
        with self._lock:
            try:
                path = run_directory.locate(self._path)
                with open(path, "ab", buffering=0) as file:
                    end = file.seek(0, os.SEEK_END)
                    files.append(file, header + raw_key + body)
            except OSError as error:
                if not self._has_failed:
                    console.note(f"{self._path}: {error}; continuing without a journal")
                self._has_failed = True
                return False
            size = HEADER.size + len(raw_key) + len(body)
            self._spans[name] = path, end, end + size
        return True

    def clear(self) -> None:
        """Delete this host's records, and the files of hosts no longer in the run."""
        with self._lock:
            self._spans.clear()
            run_directory.locate(self._path).unlink(missing_ok=True)
        if processes.is_host0():
            for path in self._folder.glob(f"{self._name}-*.journal"):
                host = path.stem.rpartition("-")[2]
                if not host.isdecimal() or int(host) >= processes.num_hosts():
                    path.unlink(missing_ok=True)

    def _read(self, path) -> list[tuple[int, int]]:
        """Index the records of a file; return the byte spans that are not records."""
        damaged_spans, position = [], 0
        with open(path, "rb") as file:
            if not (size := os.fstat(file.fileno()).st_size):
                return []
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                while position < size:
                    record = _record_at(data, position)
                    start = position
                    while record is None and position < size:
                        match = MAYBE_HEADER.search(data, position + 1)
                        position = match.start() if match else size
                        record = _record_at(data, position)
                    if start < position:
                        damaged_spans.append((start, position))
                    if record is not None:
                        start, (key, _, position) = position, record
                        self._spans[key] = path, start, position
        return damaged_spans

    def _set_aside(self, damaged_spans):
        """Move spans of bytes of this host's file to <file>.damaged."""
        data = memoryview(self._path.read_bytes())
        edges = [0, *itertools.chain(*damaged_spans), len(data)]
        good_parts = [data[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        damaged_bytes = b"".join(data[a:b] for a, b in damaged_spans)
        damaged_path = files.keep_damaged(self._path, damaged_bytes)
        files.replace(self._path, b"".join(good_parts))
        console.note(
            f"{self._path}: {len(damaged_bytes)} bytes from byte "
            f"{damaged_spans[0][0]} on are not records: "
            f"set aside in {damaged_path.name}"
        )
        self._read(self._path)


def _record_at(data, position):
    """Return (key, start of the body, end) of the record at a position, or None."""
    start = position + HEADER.size
    if start > len(data):
        return None
    key_size, body_size, digest = HEADER.unpack_from(data, position)
    end = start + key_size + body_size
    # The lengths in a damaged header may exceed the file, and the memory.
    if end > len(data):
        return None
    raw_key, body = data[start : start + key_size], data[start + key_size : end]
    if _digest(raw_key, body) != digest:
        return None
    return raw_key.decode(errors="replace"), start + key_size, end


def _digest(raw_key, body):
    return xxhash.xxh3_128(raw_key + body).digest()
