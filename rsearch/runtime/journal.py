"""Journals: what a stage has found since its last checkpoint, record by record.

A file holds records one after the other: the lengths of key and body, a digest of both,
the key in JSON, the body. A process that dies while it writes leaves a torn end, which
is no record; a record whose digest is wrong ends what can be read.

It spares work and keeps what nobody can ask for again. A run without it is right, too:
a disk that refuses it is told of, and the run goes on.
"""

import json
import os
import pathlib
import struct
import threading
from collections.abc import Sequence

import xxhash

from rsearch.hosts import processes
from rsearch.runtime import console, files

HEAD = struct.Struct("<QQ16s")  # lengths of key and body, digest


class Journal:
    """The journal of one kind of record in a stage's folder; each host writes its own.

    What any host has written is read; of equal keys this host's latest counts. Safe to
    be used from several threads.

    Args:
        folder: of the stage.
        name: of the kind; its files are <name>-<host>.journal.
    """

    def __init__(self, folder: pathlib.Path, name: str):
        self._folder, self._name = folder, name
        self._own = folder / f"{name}-{processes.host_index()}.journal"
        self._lock, self._is_refused = threading.Lock(), False
        self._places: dict[str, tuple[pathlib.Path, int, int]] = {}
        found = folder.glob(f"{name}-*.journal")
        for path in sorted(found, key=lambda p: (p == self._own, p.name)):
            end = self._read(path)
            if path == self._own and end < path.stat().st_size:
                os.truncate(path, end)

    def __len__(self):
        """Records that can be found."""
        return len(self._places)

    def get(self, key: Sequence) -> bytes | None:
        """The body that was added with this key; None where there is none.

        Args:
            key: a JSON value, such as a list of text and numbers.
        """
        place = self._places.get(json.dumps(key))
        if place is None:
            return None
        path, start, size = place
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(size)

    def add(self, key: Sequence, body: bytes) -> None:
        """Writes a record at the end of this host's file."""
        name = json.dumps(key)
        told = name.encode()
        head = HEAD.pack(len(told), len(body), _digest(told, body))
        with self._lock:
            try:
                with open(self._own, "ab", buffering=0) as file:
                    end = file.seek(0, os.SEEK_END)
                    files.append(file, head + told + body)
            except OSError as error:
                if not self._is_refused:
                    console.note(f"{self._own}: {error}; going on without a journal")
                self._is_refused = True
                return
            start = end + HEAD.size + len(told)
            self._places[name] = self._own, start, len(body)

    def clear(self) -> None:
        """Forgets all records, and those of hosts that there are no more."""
        with self._lock:
            self._places.clear()
            self._own.unlink(missing_ok=True)
        if processes.is_host0():
            for path in self._folder.glob(f"{self._name}-*.journal"):
                host = path.stem.rpartition("-")[2]
                if not host.isdecimal() or int(host) >= processes.num_hosts():
                    path.unlink(missing_ok=True)

    def _read(self, path) -> int:
        """Notes where a file's records are; where the last whole one ends."""
        end, size = 0, path.stat().st_size
        with open(path, "rb") as file:
            while len(head := file.read(HEAD.size)) == HEAD.size:
                told_size, body_size, digest = HEAD.unpack(head)
                start = end + HEAD.size + told_size
                if start + body_size > size:
                    break
                told, body = file.read(told_size), file.read(body_size)
                if _digest(told, body) != digest:
                    break
                self._places[told.decode()] = path, start, body_size
                end = start + body_size
        return end


def _digest(told, body):
    return xxhash.xxh3_128(told + body).digest()
