"""Append records to a file so that a crash loses none that was written before it.

A file holds records one after the other: the lengths of key and body, a digest of both,
the key in JSON, the body. A process that dies while it writes leaves a torn end, which
is no record; reading stops at a record whose digest is wrong.

A log spares work, and keeps the replies of services that cannot be asked for again. A
run is right without it, too: where the disk refuses, it says so and goes on.
"""

import json
import os
import pathlib
import struct
import threading
from collections.abc import Sequence

import xxhash

from rsearch.hosts import processes
from rsearch.runtime import console, files, held

HEADER = struct.Struct("<QQ16s")  # lengths of key and body, digest


class AppendLog:
    """An append-only log of keyed records in a stage's folder, a file for each host.

    Records of all hosts are read; of equal keys this host's latest counts. Safe to use
    from several threads.

    Args:
        folder: of the stage.
        name: kind of records; the files are <name>-<host>.journal.
    """

    def __init__(self, folder: pathlib.Path, name: str):
        self._folder = folder
        self._name = name
        self._path = folder / f"{name}-{processes.host_index()}.journal"
        self._lock = threading.Lock()
        self._has_failed = False
        self._spans: dict[str, tuple[pathlib.Path, int, int]] = {}  # file, start, size
        paths = folder.glob(f"{name}-*.journal")
        # This host's file comes last: of equal keys the last one read counts.
        for path in sorted(paths, key=lambda p: (p == self._path, p.name)):
            end = self._read(path)
            if path == self._path and end < path.stat().st_size:
                os.truncate(path, end)

    def __len__(self) -> int:
        """Return the number of records that can be read."""
        return len(self._spans)

    def get(self, key: Sequence) -> bytes | None:
        """Return the body that was added with this key, or None.

        Args:
            key: a JSON value, such as a list of text and numbers.
        """
        span = self._spans.get(json.dumps(key))
        if span is None:
            return None
        path, start, size = span
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(size)

    def add(self, key: Sequence, body: bytes) -> None:
        """Append a record to this host's file."""
        name = json.dumps(key)
        raw_key = name.encode()
        header = HEADER.pack(len(raw_key), len(body), _digest(raw_key, body))
        with self._lock:
            try:
                path = held.locate(self._path)
                with open(path, "ab", buffering=0) as file:
                    end = file.seek(0, os.SEEK_END)
                    files.append(file, header + raw_key + body)
            except OSError as error:
                if not self._has_failed:
                    console.note(f"{self._path}: {error}; going on without a journal")
                self._has_failed = True
                return
            start = end + HEADER.size + len(raw_key)
            self._spans[name] = path, start, len(body)

    def clear(self) -> None:
        """Delete this host's records, and files of hosts that the run no longer has."""
        with self._lock:
            self._spans.clear()
            held.locate(self._path).unlink(missing_ok=True)
        if processes.is_host0():
            for path in self._folder.glob(f"{self._name}-*.journal"):
                host = path.stem.rpartition("-")[2]
                if not host.isdecimal() or int(host) >= processes.num_hosts():
                    path.unlink(missing_ok=True)

    def _read(self, path) -> int:
        """Index the records of a file; return the end of the last intact one."""
        end = 0
        file_size = path.stat().st_size
        with open(path, "rb") as file:
            while len(header := file.read(HEADER.size)) == HEADER.size:
                key_size, body_size, digest = HEADER.unpack(header)
                start = end + HEADER.size + key_size
                # Lengths of a damaged header may ask for more memory than there is.
                if start + body_size > file_size:
                    break
                raw_key = file.read(key_size)
                body = file.read(body_size)
                if _digest(raw_key, body) != digest:
                    break
                self._spans[raw_key.decode()] = path, start, body_size
                end = start + body_size
        return end


def _digest(raw_key, body):
    return xxhash.xxh3_128(raw_key + body).digest()
