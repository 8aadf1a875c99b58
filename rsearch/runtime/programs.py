"""Cache the programs that XLA compiles on disk, so that the next process loads them.

They are in $RSEARCH_CACHE/programs, or ~/.cache/rsearch/programs. An unusable cache
costs time, but is never an error.
"""

import contextlib
import math
import os
import pathlib
import platform
import shutil

import jax
import xxhash

from rsearch.runtime.digests import find_cache

MIN_FREE_BYTES = 1 << 27  # on the cache's disk, to cache more programs
MAX_BYTES = 4 << 30  # beyond this size the oldest programs are deleted
KEPT_SHARE = 0.5  # of MAX_BYTES that is kept then, so that not every start deletes


def keep_programs() -> None:
    """Have JAX cache compiled programs below the package's cache directory.

    A directory set by JAX_COMPILATION_CACHE_DIR is used instead. With
    JAX_ENABLE_COMPILATION_CACHE=0 JAX caches nothing. Call this before the first
    program is compiled. Processes may share the directory, and be killed: JAX
    recompiles a program that it cannot read.
    """
    if jax.config.jax_compilation_cache_dir:
        return
    try:
        folder = find_cache() / "programs" / _machine_name()
        folder.mkdir(parents=True, exist_ok=True)
        make_room(folder)
    except (OSError, RuntimeError):
        return
    if not os.access(folder, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # JAX never replaces an entry that a full disk has cut short: it would recompile
    # that program at each start. Without room, entries are only read.
    has_room = shutil.disk_usage(folder).free >= MIN_FREE_BYTES
    min_seconds = 0.0 if has_room else math.inf
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min_seconds)


def make_room(folder: pathlib.Path, max_bytes: int = MAX_BYTES) -> None:
    """Delete the oldest files of a directory if its total size is too large.

    Args:
        folder: the directory; other processes may use or delete its files meanwhile.
        max_bytes: the largest total size; if it is exceeded, files are deleted until
            KEPT_SHARE of it remains.
    """
    files = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # deleted by another process
            status = path.stat()
            files.append((status.st_mtime_ns, status.st_size, path))
    excess = sum(size for _, size, _ in files) - max_bytes
    if excess <= 0:
        return
    excess += (1 - KEPT_SHARE) * max_bytes
    for _, size, path in sorted(files):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= size


def _machine_name() -> str:
    """Return a name shared by machines with the same processor and instruction set.

    CPU programs contain instructions that other processors lack, and different kinds of
    machines may share a home directory.
    """
    features = platform.processor()
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        keys = ("model name", "flags", "Features")  # the last is ARM's name for flags
        features = "".join(sorted({x for x in lines if x.startswith(keys)}))
    return f"{platform.machine()}-{xxhash.xxh3_64_hexdigest(features.encode())}"
