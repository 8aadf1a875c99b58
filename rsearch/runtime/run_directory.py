"""Lock a run's directory, and notice if its path leads somewhere else.

    <directory>/lock        locked while a run writes there; names its process

While a run trains for days, its directory may be moved, deleted or replaced, or its
file system unmounted. Writes through the old path would then land in another run's
directory or be lost. A run therefore opens its directory once, and all code that writes
below it calls `locate` for the current path. That is the old path, the path to which
the directory has been moved, or a new directory next to it,
<directory>.saved-<host>-<process>. A run that has lost its directory saves and ends
with LostDirectoryError: if it were restarted, it would start from nothing, or in
another run's directory.
"""

import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import socket
import threading

LOCK = "lock"
DESCRIPTORS = pathlib.Path("/proc/self/fd")  # on Linux: open descriptors, as paths
LOCKED_BY_OTHER = "another run has locked it"
# Errors of file systems that lock files but not directories, such as NFS.
UNSUPPORTED = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP)


class LostDirectoryError(RuntimeError):
    """The run's directory is no longer at its path; the run is saved elsewhere."""


class RunDirectory:
    """A run's directory, open until `close`; meanwhile `locate` knows where it is.

    Args:
        path: absolute path of the directory.
        locks: whether to lock it; False on all hosts of a run but the first.

    Attributes:
        crashed_holder: the process that had locked it and ended without releasing the
            lock, as the lock file names it; or "".
        contents: {file name: bytes} to write into a directory made in its place.

    Raises:
        ValueError: another run has locked it.
    """

    def __init__(self, path: pathlib.Path, *, locks: bool = True):
        self.path = path
        self.contents: dict[str, bytes] = {}
        self.crashed_holder = ""
        self._mutex = threading.Lock()
        self._substitute = None
        self._lock = self._lock_identity = None
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # No other directory gets this inode while it is open.
        self._identity = os.fstat(self._descriptor)
        try:
            if locks:
                # A lock file can be deleted and recreated during a run, the open
                # directory cannot; but some file systems lock only files.
                _lock_directory(self._descriptor, fcntl.LOCK_EX, path)
                self.crashed_holder = _find_holder(path)
                self._lock, self._lock_identity = _open_lock(path)
        except BaseException:
            os.close(self._descriptor)
            raise
        _open_directories.append(self)

    def close(self) -> None:
        """Release the lock. The lock file stays: deleting it would race with others."""
        _open_directories.remove(self)
        # Before the directory's lock, or the next holder would still find our name.
        if self._lock is not None:
            os.ftruncate(self._lock, 0)  # a file that names a process was not released
            os.close(self._lock)
        os.close(self._descriptor)

    def find(self) -> pathlib.Path:
        """Return where the directory is now, or a new directory made in its place.

        Raises:
            OSError: the file system does not respond.
        """
        with self._mutex:
            if self._substitute is not None:
                return self._substitute
            if not self._problem():
                return self.path
            if (moved_to := self._moved_to()) is not None:
                return moved_to
            process = f"{socket.gethostname()}-{os.getpid()}"
            substitute = self.path.with_name(f"{self.path.name}.saved-{process}")
            substitute.mkdir(parents=True, exist_ok=True)
            for name, data in self.contents.items():
                (substitute / name).write_bytes(data)
            self._substitute = substitute
            return substitute

    def stop_if_lost(self) -> None:
        """End the run if it has lost the directory.

        Raises:
            LostDirectoryError: says what has happened, and where the run is saved.
            OSError: the file system does not respond.
        """
        current_path = self.find()
        if current_path == self.path:
            return
        problem, copy_problem = self._problem(), ""
        if self._substitute is None:
            problem = f"moved to {current_path}"
        elif problem != LOCKED_BY_OTHER and self._lock is not None:
            copy_problem = self._copy_files()
        raise LostDirectoryError(
            f"{self.path}: {problem}; the run is saved in {current_path}{copy_problem}"
        )

    def anchor(self, path: pathlib.Path) -> pathlib.Path:
        """Return a path below the directory as one that starts with its descriptor.

        Raises:
            FileNotFoundError: the path is below the directory's old path, which the
                directory has just left.
        """
        current_path = self.find()
        if current_path != self._substitute and path.is_relative_to(current_path):
            return DESCRIPTORS / str(self._descriptor) / path.relative_to(current_path)
        if current_path != self.path and path.is_relative_to(self.path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return path

    def _problem(self):
        """Return what has happened to the directory; "" if nothing has."""
        if not _is_same(self.path, self._identity):
            if self.path.exists():
                return "another directory is in its place"
            return "deleted or unmounted"
        if self._lock is None or _is_same(self.path / LOCK, self._lock_identity):
            return ""
        if (self.path / LOCK).exists():
            return LOCKED_BY_OTHER
        try:  # only the lock file has been deleted
            new_lock, self._lock_identity = _open_lock(self.path)
        except ValueError:
            return LOCKED_BY_OTHER
        os.close(self._lock)
        self._lock = new_lock
        return ""

    def _moved_to(self):
        """Return the path to which the directory has been moved, or None."""
        try:
            path = pathlib.Path(os.readlink(DESCRIPTORS / str(self._descriptor)))
        except OSError:  # not Linux
            return None
        if _is_same(self.path, self._identity) or not _is_same(path, self._identity):
            return None
        return path

    def _copy_files(self):
        """Copy the files of an unmounted directory, which may vanish with this process.

        Returns the end of the message: "", or which error cut the copy short.
        """
        source = DESCRIPTORS / str(self._descriptor)
        try:
            for path in source.rglob("*"):
                target = self._substitute / path.relative_to(source)
                if path.is_file() and not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)
        except OSError as error:
            return f", without some of its files: {error}"
        return ""


_open_directories: list[RunDirectory] = []  # of this process


def locate(path: str | os.PathLike) -> pathlib.Path:
    """Return the path at which to write a file or folder of a run now.

    It is `path` itself unless it is in a run's directory that this process has opened
    and lost. In that case the parent folder of the new path is created.

    Raises:
        OSError: the file system does not respond.
    """
    path = pathlib.Path(path)
    directory = _find_directory(path)
    if directory is None or (current_path := directory.find()) == directory.path:
        return path
    new_path = current_path / path.absolute().relative_to(directory.path)
    new_path.parent.mkdir(parents=True, exist_ok=True)
    return new_path


def stop_if_lost(path: str | os.PathLike) -> None:
    """End the run whose directory is or contains `path`, if that directory is lost.

    Raises:
        LostDirectoryError: as for `RunDirectory.stop_if_lost`.
        OSError: the file system does not respond.
    """
    if (directory := _find_directory(path)) is not None:
        directory.stop_if_lost()


def anchor(path: pathlib.Path) -> pathlib.Path:
    """Return a path of the same folder that stays valid during a long save.

    It starts with the descriptor of the run's directory, which may be moved or replaced
    during the save. If the system has no such paths, `path` itself is returned. Each
    process has its own descriptors, so hosts cannot share the path.

    Raises:
        FileNotFoundError: the directory has been lost since it was located.
    """
    if DESCRIPTORS.is_dir():
        for directory in _open_directories:
            path = directory.anchor(path)
    return path


def check_free(path: pathlib.Path) -> None:
    """Refuse a directory that a run has locked.

    Raises:
        ValueError: the directory is locked; names the process that holds the lock.
    """
    for name, lock in (("", _lock_directory), (LOCK, _lock)):
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                lock(descriptor, fcntl.LOCK_SH, path)
            finally:
                os.close(descriptor)


def _find_directory(path):
    """Return the RunDirectory at or above `path`; None without one."""
    path = pathlib.Path(path).absolute()
    return next((d for d in _open_directories if path.is_relative_to(d.path)), None)


def _is_same(path, identity):
    """Return whether a path leads to the file or directory with this os.stat result."""
    try:
        return os.path.samestat(os.stat(path), identity)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _open_lock(directory):
    """Lock a directory's lock file and write our name; return (descriptor, stat)."""
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(descriptor, fcntl.LOCK_EX, directory)
    except BaseException:
        os.close(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    holder_line = f"process {os.getpid()} on {socket.gethostname()}\n"
    with contextlib.suppress(OSError):  # a full disk; the name is only for messages
        os.pwrite(descriptor, holder_line.encode(), 0)
    return descriptor, os.fstat(descriptor)


def _lock_directory(descriptor, kind, directory):
    """Lock a directory itself, if its file system supports that."""
    try:
        _lock(descriptor, kind, directory)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def _lock(descriptor, kind, directory):
    """Lock a directory or its lock file; raise ValueError if another run holds it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{directory}: in use by {_find_holder(directory) or 'another process'}; "
            "wait for it to end, or name another --workdir"
        ) from None


def _find_holder(directory):
    """Return the process that a lock file names; "" if its last holder released it."""
    with contextlib.suppress(FileNotFoundError):
        return (directory / LOCK).read_bytes()[:1000].decode(errors="replace").strip()
    return ""
