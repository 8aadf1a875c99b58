"""Digests of large files, cached so that each start does not read the files again.

The cache is in $RSEARCH_CACHE/digests, or ~/.cache/rsearch/digests, with one small file
per digest. A digest is valid for the path, size, modification time, inode and device
that the file had when it was read. An unusable cache costs time, but is never an error.
"""

import json
import os
import pathlib
import re
from collections.abc import Callable

import xxhash

from rsearch.runtime import files

CACHE = "RSEARCH_CACHE"  # environment variable that names another cache directory
FULL_DIGEST_PREFIX = "xxh3:"  # prefix of the digest of all bytes of a file


def find_cache() -> pathlib.Path:
    """Return the cache directory, which may not exist yet.

    Raises:
        RuntimeError: $RSEARCH_CACHE is not set, and the user has no home directory.
    """
    home = os.environ.get(CACHE) or pathlib.Path.home() / ".cache" / "rsearch"
    return pathlib.Path(home).expanduser()


def weights_digest(
    path: str | os.PathLike,
    *,
    progress: Callable[[pathlib.Path, int, int], None] = lambda *_: None,
) -> str:
    """Return "<sampled> xxh3:<digest>" of a weights file, both in hexadecimal.

    The first digest, `files.sampled_digest`, is the only one that earlier versions
    computed; the inputs of runs that they began are recognised by it.

    Args:
        progress: called with the path, the number of bytes read so far and the size
            while the file is read.
    """

    def read(path):
        sampled = files.sampled_digest(path)
        full = files.digest_file(path, progress=progress)
        return f"{sampled} {FULL_DIGEST_PREFIX}{full}"

    return cached(path, "weights", read)


def earlier_form(fingerprint: str) -> str:
    """Return a fingerprint without whole-file digests, as earlier versions wrote it."""
    return re.sub(rf" {FULL_DIGEST_PREFIX}[0-9a-f]{{32}}(?=,|$)", "", fingerprint)


def cached(
    path: str | os.PathLike, kind: str, compute: Callable[[pathlib.Path], str]
) -> str:
    """Return `compute(path)`, from the cache if the file is unchanged.

    Args:
        kind: kind of digest; each kind has separate cache entries.
        compute: (path) -> text; reads the file.
    """
    path = pathlib.Path(path).resolve()
    identity = _identity(path)
    try:
        name = xxhash.xxh3_128_hexdigest(_encode([kind, *identity]))
        entry = find_cache() / "digests" / name
    except RuntimeError:  # no cache directory
        entry = None
    if entry is not None and (cached_digest := _read(entry, identity)) is not None:
        return cached_digest
    digest = compute(path)
    # If the file changed while it was read, the digest may cover a mixture.
    if entry is not None and _identity(path) == identity:
        _write(entry, identity, digest)
    return digest


def _identity(path):
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev]


def _encode(value):
    return json.dumps(value).encode()


def _read(entry, identity):
    """Return the digest in a cache entry; None if the entry is missing or damaged."""
    try:
        value = json.loads(entry.read_bytes())
        digest, check = value["digest"], value["check"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    is_intact = check == xxhash.xxh3_64_hexdigest(_encode([digest, *identity]))
    return digest if is_intact and isinstance(digest, str) else None


def _write(entry, identity, digest):
    """Write a cache entry; of concurrent writers one wins, all with the same text."""
    check = xxhash.xxh3_64_hexdigest(_encode([digest, *identity]))
    value = {"file": identity, "digest": digest, "check": check}
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(entry) as file:
            file.write(_encode(value))
    except OSError:  # disk full or read-only
        return
