"""The directory that a run owns: locked, bound to one configuration, resumable.

    <workdir>/lock          held while a run writes here; says who holds it
    <workdir>/config.json   the configuration of the run, compared at every later start
    <workdir>/<stage>/      checkpoints, metrics.jsonl and curves of a stage

A run goes on only with the configuration that it began with, but for the fields below.
"""

import fcntl
import json
import os
import pathlib
import socket

from rsearch import files
from rsearch.console import note
from rsearch.fields import diff, to_json

FORMAT = 1
MARK = "rsearch_workdir"  # tells our config.json from a model's
CONFIG = "config.json"
LOCK = "lock"
FREE_SECTIONS = (
    "checkpoint",  # when progress is saved
    "eval",  # what is measured; training does not look at it
    "mesh",  # the machine: same numbers to rounding, and checkpoints reshard
)
FREE_FIELDS = (
    "log_every",
    "model.remat",
    "retrieval.cache_size",
    "rollout.slots",
    "rl.micro_batch",
    "sft.micro_batch",
)
"""What a resumed run may change: nothing here alters what is drawn or learnt from."""


class Workdir:
    """A directory that this process alone writes into; a context manager.

    Args:
        path: made where it is missing.
        config: the run's configuration, validated.
        is_primary: False on the other processes of one run, which share the directory:
            they neither lock it nor write its config.json.

    Attributes:
        path: the directory, absolute.
        is_resumed: whether an earlier start had made it.

    Raises:
        ValueError: another run holds it, it belongs to a different configuration, or it
            is not empty and no workdir; nothing in it has been changed then.
    """

    def __init__(self, path, config, *, is_primary=True):
        self.path = pathlib.Path(path).absolute()
        self._lock = None
        _check_is_ours(self.path)
        self.is_resumed = (self.path / CONFIG).exists()
        if not is_primary:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path / LOCK)
        try:
            self.is_resumed = (self.path / CONFIG).exists()
            self._bind(config)
        except BaseException:
            self.close()
            raise

    def _bind(self, config):
        """Writes config.json, or compares with what is there."""
        now = json.loads(to_json(config))
        changes = []
        if self.is_resumed:
            before = read_config(self.path)
            changes = diff(before, now)
            started = [s for s in now["stages"] if (self.path / s).exists()]
            refused = [row for row in changes if not _may_change(row, now, started)]
            if refused:
                raise ValueError(_refusal(self.path, refused))
        for name, old, new in changes:
            note(f"{self.path.name}: config.{name} is now {new!r}, was {old!r}")
        if changes or not self.is_resumed:
            write_json(self.path / CONFIG, {MARK: FORMAT, "config": now})

    def stage(self, name):
        """The directory of a stage, made where it is missing."""
        assert name.isidentifier(), name
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        return folder

    def close(self):
        """Lets others in. The lock file stays: removing it would race with them."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def read_config(path):
    """The configuration that a workdir belongs to, as a plain dict.

    Raises:
        ValueError: the directory is no workdir, or its config.json cannot be read.
    """
    file = pathlib.Path(path) / CONFIG
    if not file.is_file():
        raise ValueError(f"{path}: not a workdir: it has no {CONFIG}")
    try:
        whole = json.loads(file.read_bytes())
        version, config = whole[MARK], whole["config"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file}: not the {CONFIG} of a workdir") from None
    if version != FORMAT:
        raise ValueError(f"{file}: format {version}, this program reads {FORMAT}")
    return config


def write_json(path, value):
    """Writes a JSON file atomically and durably, indented. NaN is refused: use None."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    files.replace(path, text.encode())


def write_rows(path, rows):
    """Writes a .jsonl file atomically and durably, one JSON object a line."""
    lines = [json.dumps(row, allow_nan=False) + "\n" for row in rows]
    files.replace(path, "".join(lines).encode())


def append_rows(path, rows):
    """Appends JSON objects to a .jsonl file, one a line; the file is made if missing.

    What a crash tore off at the end of the file is removed first.
    """
    lines = [json.dumps(row, allow_nan=False) + "\n" for row in rows]
    with open(path, "a+b", buffering=0) as file:
        file.truncate(_whole_lines(file))
        files.append(file, "".join(lines).encode())


def read_rows(path):
    """[rows] of a .jsonl file; a last line without its line feed is left out.

    Raises:
        ValueError: a line that is no JSON, as file:line.
    """
    lines = pathlib.Path(path).read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from None
    return rows


def _whole_lines(file):
    """Bytes up to and including the last line feed."""
    position = file.seek(0, os.SEEK_END)
    while position > 0:
        start = max(0, position - files.CHUNK_BYTES)
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0


def _check_is_ours(path):
    """Refuses a directory that holds something other than a run."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path}: --workdir is a file; it must be a directory")
    if not path.exists() or (path / CONFIG).exists():
        if path.exists():
            read_config(path)
        return
    # A start that was killed before it wrote its config.json leaves these.
    others = {p.name for p in path.iterdir()} - {LOCK, f"{CONFIG}.tmp"}
    if others:
        raise ValueError(
            f"{path}: not empty, and not a workdir (it holds {min(others)!r}); "
            "name an empty or a new directory"
        )


def _lock(path):
    """A descriptor that holds the lock; the kernel drops it when the process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise ValueError(
            f"{path.parent}: in use by {holder or 'another process'}; wait for it to "
            "end, or name another --workdir"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {_host()}\n".encode(), 0)
    return descriptor


def _host():
    return socket.gethostname()


def _may_change(row, config, started):
    """Whether a run may go on with this field changed.

    A stage may get more steps if its learning rate is constant after the warm-up,
    unless a later stage has started from its result. It cannot get fewer.
    """
    name, old, new = row
    section = name.partition(".")[0]
    if section in FREE_SECTIONS or name in FREE_FIELDS:
        return True
    stages = config["stages"]
    if section in stages and name == f"{section}.steps":
        if config[section].get("decay"):
            return False
        later = stages[stages.index(section) + 1 :]
        return new >= old and not set(later) & set(started)
    return False


def _refusal(path, rows):
    """What differs, as a table."""
    table = [("field", "there", "now")]
    table += [(f"config.{name}", repr(old), repr(new)) for name, old, new in rows]
    widths = [max(len(row[i]) for row in table) for i in (0, 1)]
    lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in table]
    return "\n".join(
        [
            f"{path}: holds a run with a different configuration; name another "
            "--workdir, or use its values:",
            *lines,
        ]
    )
