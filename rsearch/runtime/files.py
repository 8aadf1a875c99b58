"""Writing files so that a crash leaves the old contents or the new, never a mixture."""

import contextlib
import fcntl
import json
import os
import pathlib
import socket

import xxhash

CHUNK_BYTES = 1 << 24
LOCK = "lock"  # in the directory of a run: held while it writes there
URLS = {"gs:", "s3:", "hdfs:", "http:", "https:"}  # as a path begins with them
PATTERNS = "*?[\\"


def check_path(path):
    """Refuses a directory that what is saved below it could not be read back from.

    Orbax takes its path for a pattern of paths, and finds nothing of what it has saved
    below one that is another path as a pattern, without a word.

    Raises:
        ValueError: it is a URL, or holds a sign of patterns.
    """
    path = pathlib.Path(path)
    if URLS & {*path.parts}:
        raise ValueError(f"{path} is a URL; mount the bucket, and name a directory")
    if signs := sorted({*PATTERNS} & {*str(path)}):
        raise ValueError(
            f"{path} holds {' '.join(signs)}: checkpoints below it could not be read "
            f"back; name a directory without {' '.join(PATTERNS)}"
        )


def check_output(flag, path):
    """Refuses a file that could not be written later, after hours of work.

    Args:
        flag: that names it, for the message.
        path: the file; what is there already is written over.

    Raises:
        ValueError: its directory is not there or may not be written to, or it is a
            directory itself.
    """
    path = pathlib.Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"--{flag}={path}: there is no directory {path.parent}")
    if path.is_dir():
        raise ValueError(f"--{flag}={path} is a directory; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--{flag}={path} may not be written")


def replace(path, data):
    """Writes `data` (bytes) to `path`, atomically and durably.

    When this returns, the new contents survive a power cut; if it does not return, the
    old ones are still there. A leftover `<name>.tmp` is overwritten.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def create(path, data):
    """Writes `data` (bytes) to `path` unless there is such a file; says whether it did.

    Of several processes that call this at once, on any hosts, one creates the file, and
    nobody sees a part of it. A crash may leave a `<name>.<host>-<process>.tmp`.
    """
    path = pathlib.Path(path)
    own = f"{path.name}.{socket.gethostname()}-{os.getpid()}.tmp"
    temporary = path.with_name(own)
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    sync_directory(path.parent)
    return True


@contextlib.contextmanager
def locked(path, *, shared=False, waits=False):
    """Holds a lock on a file, made where it is missing; gives whether it is held.

    Locks of other processes, on a network file system also of other hosts, keep it
    from being held: any of them, or if `shared` those that are not. `waits` is for
    these to go. A lock goes with its process.
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


def read_json(path):
    """The value in a JSON file.

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


def append(file, data):
    """Writes `data` (bytes) at the end of an unbuffered file, whole or not at all.

    Raises:
        OSError: the disk refuses; the file has its old length again.
    """
    size = file.seek(0, os.SEEK_END)
    try:
        rest = memoryview(data)
        while rest:  # a disk that fills up takes a part first, and refuses the next
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(size)
        raise


def sync_directory(path):
    """Makes the names in a directory durable: what was made, renamed or removed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path):
    """Makes a directory durable with everything in it."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(folder)


def digest_file(path):
    """xxh3-128 of a file's bytes, in hexadecimal."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sampled_digest(path, *, num_blocks=64, block_bytes=1 << 16):
    """xxh3-128 of a file's size and of blocks spread evenly over it, in hexadecimal.

    For files too large to be read at every start: tells other weights apart, not a
    single changed bit.
    """
    size = os.path.getsize(path)
    digest = xxhash.xxh3_128(str(size).encode())
    with open(path, "rb") as file:
        for block in range(num_blocks):
            file.seek(block * max(size - block_bytes, 0) // max(num_blocks - 1, 1))
            digest.update(file.read(block_bytes))
    return digest.hexdigest()
