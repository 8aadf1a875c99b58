"""Digests of large files, cached so that a start does not read them again.

The cache lies in $RSEARCH_CACHE/digests, or ~/.cache/rsearch/digests, one small file a
digest. A digest counts for the path, size, time of change, inode and device that the
file had when it was read. A cache that cannot be used costs time, never an error.
"""

import json
import os
import pathlib
import re
from collections.abc import Callable

import xxhash

from rsearch.runtime import files

CACHE = "RSEARCH_CACHE"  # the environment variable that names another cache
WHOLE = "xxh3:"  # before the digest of all bytes of a file


def find_cache() -> pathlib.Path:
    """Return the directory of all that is cached, which may not have been made yet.

    Raises:
        RuntimeError: no variable names one, and the user has no home.
    """
    home = os.environ.get(CACHE) or pathlib.Path.home() / ".cache" / "rsearch"
    return pathlib.Path(home).expanduser()


def weights_digest(
    path: str | os.PathLike,
    *,
    progress: Callable[[pathlib.Path, int, int], None] = lambda *_: None,
) -> str:
    """Return "<sampled> xxh3:<digest>" of a file of weights, both in hexadecimal.

    The first, `files.sampled_digest`, is all that earlier versions computed: runs that
    they began are recognised by it.

    Args:
        path: the file.
        progress: called with path, bytes read so far and size, while the file is read.
    """

    def read(path):
        sampled = files.sampled_digest(path)
        return f"{sampled} {WHOLE}{files.digest_file(path, progress=progress)}"

    return cached(path, "weights", read)


def earlier_form(fingerprint: str) -> str:
    """Return a fingerprint without the digests of all bytes, as it once was."""
    return re.sub(rf" {WHOLE}[0-9a-f]{{32}}(?=,|$)", "", fingerprint)


def cached(
    path: str | os.PathLike, kind: str, compute: Callable[[pathlib.Path], str]
) -> str:
    """Return `compute(path)`, or its result for this very file from the cache.

    Args:
        path: a file.
        kind: of the digest; each has entries of its own.
        compute: path -> text; reads the file.
    """
    path = pathlib.Path(path).resolve()
    identity = _identity(path)
    entry = _entry(kind, identity)
    if entry is not None and (known := _read(entry, identity)) is not None:
        return known
    digest = compute(path)
    # What was written while it was read may be in the digest or not.
    if entry is not None and _identity(path) == identity:
        _write(entry, identity, digest)
    return digest


def _identity(path):
    status = path.stat()
    return [
        str(path),
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
        status.st_dev,
    ]


def _entry(kind, identity):
    """Return the file of a digest; None without a home."""
    try:
        folder = find_cache() / "digests"
    except RuntimeError:
        return None
    return folder / xxhash.xxh3_128_hexdigest(_packed([kind, *identity]))


def _packed(value):
    return json.dumps(value).encode()


def _read(entry, identity):
    """Return the digest in an entry; None if there is none, or a damaged one."""
    try:
        value = json.loads(entry.read_bytes())
        digest, check = value["digest"], value["check"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    is_right = check == xxhash.xxh3_64_hexdigest(_packed([digest, *identity]))
    return digest if is_right and isinstance(digest, str) else None


def _write(entry, identity, digest):
    """Write an entry; of several writers at once one wins, with the same text."""
    check = xxhash.xxh3_64_hexdigest(_packed([digest, *identity]))
    value = {"file": identity, "digest": digest, "check": check}
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        if _read(entry, identity) is None:
            entry.unlink(missing_ok=True)  # damaged
        files.create(entry, _packed(value))
    except OSError:  # full, read-only, or another process was faster
        return
