"""Write files so that a crash leaves the old contents or the new, never a mixture."""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import xxhash

from rsearch.runtime import held
from rsearch.runtime.boundary import boundary

CHUNK_BYTES = 1 << 24
URLS = {"gs:", "s3:", "hdfs:", "http:", "https:"}  # as a path begins with them
PATTERNS = "*?[\\"


def expand(path: str | os.PathLike) -> pathlib.Path:
    """Return a path with ~ and ~user at its beginning expanded, as a shell does.

    Raises:
        ValueError: the user has no home directory.
    """
    expanded = pathlib.Path(os.path.expanduser(path))
    if expanded.parts[:1] == ("~",):  # no HOME, and no entry in the list of users
        raise ValueError(f"{path}: HOME is not set; write the path without ~")
    return expanded


def check_path(path: str | os.PathLike) -> None:
    """Refuse a directory from which Orbax could not read its checkpoints back.

    Orbax treats its path as a glob pattern. It saves below a path with such characters,
    but finds nothing there, and does not say so.

    Raises:
        ValueError: it is a URL, or holds a character of glob patterns, or bytes that
            are no text to Python.
    """
    path = pathlib.Path(path)
    if any("\ud800" <= letter <= "\udfff" for letter in str(path)):
        raise ValueError(
            f"{path} is not written in the locale's encoding; checkpoints want a path "
            "in UTF-8, and a locale such as C.UTF-8"
        )
    if URLS & {*path.parts}:
        raise ValueError(f"{path} is a URL; mount the bucket, and name a directory")
    if signs := sorted({*PATTERNS} & {*str(path)}):
        raise ValueError(
            f"{path} holds {' '.join(signs)}: checkpoints below it could not be read "
            f"back; name a directory without {' '.join(PATTERNS)}"
        )


def check_output(flag: str, path: str | os.PathLike) -> None:
    """Refuse an output file that could not be written later, after hours of work.

    Args:
        flag: names the file in the message.
        path: the file; an existing one will be overwritten.

    Raises:
        ValueError: its directory is missing or not writable, or it is a directory
            itself.
    """
    path = pathlib.Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"--{flag}={path}: there is no directory {path.parent}")
    if path.is_dir():
        raise ValueError(f"--{flag}={path} is a directory; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--{flag}={path} may not be written")


def replace(path: str | os.PathLike, data: bytes | memoryview) -> None:
    """Write `data` to `path`, atomically and durably.

    When this returns, the new contents survive a power cut; if it does not return, the
    old ones are still there. A leftover `<name>.tmp` is removed first, and nothing is
    written where it leads.

    Raises:
        LostDirectoryError: `path` is of a run that has lost its directory; the data is
            saved with the run.
    """
    wanted = pathlib.Path(path)
    path = held.locate(wanted)
    temporary = path.with_name(path.name + ".tmp")
    with boundary(str(path)):
        _write_new(temporary, data)
        os.replace(temporary, path)
        sync_directory(path.parent)
    if path != wanted:
        held.stop_if_lost(wanted)


def keep_damaged(path: str | os.PathLike, data: bytes | memoryview) -> pathlib.Path:
    """Append what is damaged in a file to `<path>.damaged`; return that path.

    It is durable then, and may be taken out of the file itself.
    """
    path = held.locate(path)
    aside = path.with_name(f"{path.name}.damaged")
    with open(aside, "ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(aside.parent)
    return aside


def create(path: str | os.PathLike, data: bytes) -> bool:
    """Write `data` to `path` unless the file exists; return whether it was written.

    Of several processes that call this at once, on any hosts, one creates the file, and
    no reader sees it incomplete. A crash may leave a `<name>.<host>-<process>.tmp`.
    """
    path = pathlib.Path(path)
    process = f"{socket.gethostname()}-{os.getpid()}"
    temporary = path.with_name(f"{path.name}.{process}.tmp")
    _write_new(temporary, data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    sync_directory(path.parent)
    return True


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike, *, overwrites: bool = True
) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` once it is completely written.

    Its temporary name is unique: several processes may write the same file at once.

    Args:
        path: the file.
        overwrites: False leaves a file alone that is there already.

    Raises:
        FileExistsError: `path` is there, and stays as it was.
    """
    path = pathlib.Path(path)
    handle, temporary = tempfile.mkstemp(prefix=".partial.", dir=path.parent)
    try:
        with open(handle, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp allows the owner alone; others may share the file.
        os.chmod(temporary, 0o644)
        if overwrites:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
    finally:
        pathlib.Path(temporary).unlink(missing_ok=True)
    sync_directory(path.parent)


def _write_new(path, data):
    """Write a new file durably, in place of one that is left over."""
    path.unlink(missing_ok=True)
    # Its name can be guessed, and another user of the directory might put a link to a
    # file of ours there.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o666), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def locked(
    path: str | os.PathLike, *, shared: bool = False, waits: bool = False
) -> Iterator[bool]:
    """Lock a file within the block; yield whether the lock is held.

    The file is created where it is missing. Other processes, on a network file system
    also on other hosts, may hold it already. A lock ends with its process.

    Args:
        path: the file.
        shared: share the lock with others that share it.
        waits: wait until the lock is free, instead of yielding False.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    # NFS gives the one kind of lock for reading only, the other for writing only.
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
        ValueError: it is not UTF-8, not JSON or nested too deeply; names the file.
        OSError: it cannot be read.
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
        OSError: the disk refuses; the file has its old length again.
    """
    with boundary(str(getattr(file, "name", "an open file"))):
        size = file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(data)
            # A disk that fills up takes some bytes first, and refuses the next write.
            while rest:
                rest = rest[file.write(rest) :]
        except BaseException:
            file.truncate(size)
            raise


def sync(path: str | os.PathLike) -> None:
    """Make a file's contents durable, whoever has written them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: str | os.PathLike) -> None:
    """Make the entries of a directory durable: files created, renamed or removed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: str | os.PathLike) -> None:
    """Make a directory durable with everything in it."""
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
        path: the file.
        progress: called with path, bytes read so far and size, after each chunk.
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
    """Return the xxh3-128 of a file's size and of blocks spread evenly over it.

    Earlier versions knew weights by it, though most bytes of a large file are in none
    of the blocks. In hexadecimal.
    """
    size = os.path.getsize(path)
    digest = xxhash.xxh3_128(str(size).encode())
    with open(path, "rb") as file:
        for block in range(num_blocks):
            file.seek(block * max(size - block_bytes, 0) // max(num_blocks - 1, 1))
            digest.update(file.read(block_bytes))
    return digest.hexdigest()
