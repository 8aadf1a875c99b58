"""Keep the programs that XLA compiles, so that the next process loads them.

They lie in $RSEARCH_CACHE/programs, or ~/.cache/rsearch/programs. A directory of
programs that cannot be used costs time, never an error.
"""

import contextlib
import os
import pathlib
import platform

import jax
import xxhash

from rsearch.runtime.digests import find_cache

MAX_BYTES = 4 << 30  # beyond which the oldest programs go
KEPT_SHARE = 0.5  # of them, so that not every start deletes


def keep_programs() -> None:
    """Have JAX keep compiled programs below the package's cache.

    A directory that JAX_COMPILATION_CACHE_DIR names stays; with
    JAX_ENABLE_COMPILATION_CACHE=0 JAX keeps none. Call it before the first program is
    compiled. Processes may share the directory, and be killed: JAX compiles anew what
    it cannot read.
    """
    if jax.config.jax_compilation_cache_dir:
        return
    try:
        folder = find_cache() / "programs" / _machine()
        folder.mkdir(parents=True, exist_ok=True)
        make_room(folder)
    except (OSError, RuntimeError):
        return
    if not os.access(folder, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def make_room(folder: pathlib.Path, max_bytes: int = MAX_BYTES) -> None:
    """Delete the oldest files of a directory where they are too many bytes in all.

    Args:
        folder: whose files other processes may read, write or delete meanwhile.
        max_bytes: beyond which half of so many remain.
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


def _machine() -> str:
    """Return a name for processors with the same instructions.

    Programs for CPUs hold instructions that others lack, and a home directory may be
    shared by machines of several kinds.
    """
    features = platform.processor()
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        keys = ("model name", "flags", "Features")  # the last as ARM says it
        features = "".join(sorted({x for x in lines if x.startswith(keys)}))
    return f"{platform.machine()}-{xxhash.xxh3_64_hexdigest(features.encode())}"
