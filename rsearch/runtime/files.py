"""Write files so that a crash leaves the old or the new contents, never a mixture."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import xxhash

from rsearch.runtime import run_directory
from rsearch.runtime.boundary import boundary

CHUNK_BYTES = 1 << 24
# Parts of a path made from a URL.
URL_PARTS = {"gs:", "s3:", "hdfs:", "http:", "https:"}
PATTERN_CHARS = "*?[\\"
# Errors of file systems without hard links, such as a bucket that gcsfuse mounts.
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP)
PARTIAL = ".partial."  # begins the temporary names of `replacing`, and of `create`


def expand(path: str | os.PathLike) -> pathlib.Path:
    """Expand ~ or ~user at the beginning of a path, as a shell does.

    Raises:
        ValueError: the user has no home directory.
    """
    expanded_path = pathlib.Path(os.path.expanduser(path))
    if expanded_path.parts[:1] == ("~",):  # no HOME, and no entry in the user database
        raise ValueError(f"{path}: HOME is not set; write the path without ~")
    return expanded_path


def check_path(path: str | os.PathLike) -> None:
    """Refuse a directory from which Orbax could not restore checkpoints.

    Orbax treats a path as a glob pattern. It saves below a path with such characters,
    but on restoring finds nothing there, without an error.

    Raises:
        ValueError: the path is a URL, or contains a character of glob patterns or bytes
            that the locale's encoding cannot decode.
    """
    path = pathlib.Path(path)
    if any("\ud800" <= letter <= "\udfff" for letter in str(path)):
        raise ValueError(
            f"{path} is not in the locale's encoding; checkpoints need a path in UTF-8 "
            "and a locale such as C.UTF-8"
        )
    if URL_PARTS & {*path.parts}:
        raise ValueError(f"{path} is a URL; mount the bucket, and name a directory")
    if signs := sorted({*PATTERN_CHARS} & {*str(path)}):
        raise ValueError(
            f"{path} contains {' '.join(signs)}: checkpoints below it could not be "
            f"read back; name a directory without {' '.join(PATTERN_CHARS)}"
        )


def check_output(flag: str, path: str | os.PathLike) -> None:
    """Refuse, before hours of work, an output file that could not be written.

    Args:
        flag: the flag that names the file, for messages.
        path: the file; an existing one will be overwritten.

    Raises:
        ValueError: its directory is missing or not writable, or the path itself is a
            directory or a file that is not writable.
    """
    path = pathlib.Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"--{flag}={path}: there is no directory {path.parent}")
    if path.is_dir():
        raise ValueError(f"--{flag}={path} is a directory; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--{flag}={path} is not writable")


def replace(path: str | os.PathLike, data: bytes | memoryview) -> None:
    """Write `data` to `path`, atomically and durably.

    Once this has returned, the new contents survive a power cut; if it does not return,
    the old ones are still there. The temporary file is `<name>.tmp`. One that a crash
    left is removed first; if it is a link, nothing is written to its target.

    Raises:
        LostDirectoryError: `path` belongs to a run that has lost its directory; the
            data is saved with the run.
    """
    requested_path = pathlib.Path(path)
    path = run_directory.locate(requested_path)
    temporary = path.with_name(path.name + ".tmp")
    # The name is predictable: another user of the directory might put a link to one of
    # our files there.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with boundary(str(path)):
        try:
            temporary.unlink(missing_ok=True)
            with open(os.open(temporary, flags, 0o666), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()  # a full disk needs its space
            raise
        sync_directory(path.parent)
    if path != requested_path:
        run_directory.stop_if_lost(requested_path)


def keep_damaged(path: str | os.PathLike, data: bytes | memoryview) -> pathlib.Path:
    """Append the damaged parts of a file to `<path>.damaged`; return that path.

    They are then durable there, and may be removed from the file itself.
    """
    path = run_directory.locate(path)
    damaged_path = path.with_name(f"{path.name}.damaged")
    with open(damaged_path, "ab", buffering=0) as file:
        append(file, data)
        os.fsync(file.fileno())
    sync_directory(damaged_path.parent)
    return damaged_path


def create(path: str | os.PathLike, data: bytes) -> bool:
    """Write `data` to `path` unless the file exists; return whether it was written.

    If several processes call this at the same time, on any hosts, only one creates the
    file, and no reader sees it incomplete. Without hard links, the last of those that
    do so at the same instant wins.
    """
    try:
        with boundary(str(path)), replacing(path, overwrites=False) as file:
            file.write(data)
    except FileExistsError:
        return False
    return True


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike, *, overwrites: bool = True
) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces `path` once it is completely written.

    Its temporary name is unique, so that several processes may write the same file at
    the same time.

    Raises:
        FileExistsError: `path` exists and `overwrites` is False; it is unchanged.
    """
    path = pathlib.Path(path)
    handle, temporary = tempfile.mkstemp(prefix=PARTIAL, dir=path.parent)
    try:
        with open(handle, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp gives access to the owner only, but the file may be shared.
        os.chmod(temporary, 0o644)
        if overwrites:
            os.replace(temporary, path)
        else:
            _rename_to_new(temporary, path)
    except OSError as error:
        # A write names no file, and the caller may read others.
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            error.filename = str(path)
        raise
    finally:
        pathlib.Path(temporary).unlink(missing_ok=True)
    sync_directory(path.parent)


def _rename_to_new(temporary, path):
    """Give a file the name `path`, which must not exist yet."""
    try:
        os.link(temporary, path)  # of several that do this at once, one succeeds
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError(
                errno.EEXIST, os.strerror(errno.EEXIST), str(path)
            ) from None
        os.replace(temporary, path)


@contextlib.contextmanager
def locked(
    path: str | os.PathLike, *, shared: bool = False, waits: bool = False
) -> Iterator[bool]:
    """Lock a file within the block; yield whether the lock is held.

    A missing file is created. Another process, on a network file system even one on
    another host, may already hold the lock. A lock ends with its process.

    Args:
        shared: whether to take a shared lock instead of an exclusive one.
        waits: whether to wait until the lock is free, instead of yielding False.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    # NFS grants a shared lock only on a file open for reading, and an exclusive lock
    # only on one open for writing.
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, kind if waits else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def read_json(path: str | os.PathLike) -> Any:
    """Return the value in a JSON file.

    Raises:
        ValueError: the file, which the message names, is not UTF-8, not JSON or nested
            too deeply.
        OSError: the file cannot be read.
    """
    try:
        return json.loads(pathlib.Path(path).read_bytes().decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} is not JSON: nested too deeply") from None


def append(file: BinaryIO, data: bytes) -> None:
    """Append `data` to an unbuffered file, completely or not at all.

    Raises:
        OSError: the disk refuses the write; the file is truncated to its old length.
    """
    with boundary(str(getattr(file, "name", "an open file"))):
        size = file.seek(0, os.SEEK_END)
        try:
            remaining = memoryview(data)
            # A disk that fills up accepts some bytes before it refuses a write.
            while remaining:
                remaining = remaining[file.write(remaining) :]
        except BaseException:
            file.truncate(size)
            raise


def sync(path: str | os.PathLike) -> None:
    """Make a file's contents durable, whichever process wrote them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: str | os.PathLike) -> None:
    """Make a directory's entries durable: files created, renamed or removed."""
    sync(os.path.join(path, ""))  # a path that ends in / leads to a directory


def sync_tree(path: str | os.PathLike) -> None:
    """Make a directory and everything in it durable."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            sync(os.path.join(folder, name))
        sync_directory(folder)


def digest_file(
    path: str | os.PathLike,
    *,
    progress: Callable[[pathlib.Path, int, int], None] = lambda *_: None,
) -> str:
    """Return the xxh3-128 of a file's bytes, in hexadecimal.

    Args:
        progress: called after each chunk with the path, the number of bytes read so far
            and the size.
    """
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            progress(pathlib.Path(path), file.tell(), size)
    return digest.hexdigest()


def sampled_digest(
    path: str | os.PathLike, *, num_blocks: int = 64, block_bytes: int = 1 << 16
) -> str:
    """Return the xxh3-128 of a file's size and of blocks spread evenly over it, in hex.

    Earlier versions identified weights by it, although most bytes of a large file are
    in none of the blocks.
    """
    size = os.path.getsize(path)
    digest = xxhash.xxh3_128(str(size).encode())
    with open(path, "rb") as file:
        for block in range(num_blocks):
            file.seek(block * max(size - block_bytes, 0) // max(num_blocks - 1, 1))
            digest.update(file.read(block_bytes))
    return digest.hexdigest()
