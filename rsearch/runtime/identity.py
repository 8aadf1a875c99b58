"""Record in run.json what determines a run's results, and compare it at each start.

config.json says what a run is to do; run.json says what it was done with: the run's id
and, for each start, the code, libraries, environment variables, devices and every
input. Identical starts share one entry of `starts`, which counts them. The list
`launches` has every start, with command line, host, times and exit code. A start that
was killed has no end time; the next start marks it as killed.

Changed code does not end a run, since a fixed bug or a new library is a reason to
continue. But a change is never ignored silently, and `--strict` refuses it.
"""

import contextlib
import datetime
import hashlib
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from rsearch.config.recipes import exit_code_of, fingerprint
from rsearch.hosts import preemption, processes
from rsearch.runtime import files
from rsearch.runtime.console import note
from rsearch.runtime.workdir import read_run_id, write_json

FORMAT = 1
FORMAT_KEY = "rsearch_run"  # key of run.json's format
FILE = "run.json"
MAX_NAMED = 6  # changed source files that one line names
GIT_SECONDS = 10.0  # if the file system hangs longer, the commit stays unknown
SHARED_SECONDS = 90.0  # NFS and gcsfuse may show a file of a minute ago
WRITE_SECONDS = 5.0  # likewise the end of a start that a signal ends
MAX_DIFF_BYTES = 1 << 22  # of uncommitted changes; a larger diff is hardly code
PACKAGE = pathlib.Path(__file__).resolve().parents[1]
SIBLING_FOLDERS = ("../configs", "../launch")  # runs start from them
_lock = threading.Lock()  # held while this process changes run.json


@contextlib.contextmanager
def recorded_start(
    folder: str | os.PathLike,
    command: str,
    config: ConfigDict,
    *,
    inputs: Mapping[str, str],
    bound: Collection[str] = (),
    strict: bool = False,
) -> Iterator[None]:
    """Record a start, and its exit code when the block ends; all hosts call this.

    Args:
        folder, command, config, inputs, bound: see `record_start`.
        strict: whether to refuse a start that differs from the last one, see
            `refuse_changes`.

    Raises:
        ValueError: as for these two functions.
    """
    indices = []

    def record():
        if strict:
            refuse_changes(folder, config, inputs=inputs)
        indices.append(
            record_start(folder, command, config, inputs=inputs, bound=bound)
        )

    def record_end(exit_code):
        for index in indices:  # empty on all hosts but host 0
            _record_end(pathlib.Path(folder), index, exit_code)

    def record_signal():
        # A file system that hangs must not prevent the process from ending.
        writer = threading.Thread(
            target=record_end, args=(preemption.EXIT_CODE,), daemon=True
        )
        writer.start()
        writer.join(WRITE_SECONDS)

    processes.on_host0(record)
    _check_shared(pathlib.Path(folder))
    with preemption.before_signal_exit(record_signal):
        try:
            yield
        except BaseException as error:
            record_end(exit_code_of(error))
            raise
    record_end(0)


def _check_shared(folder):
    """Refuse a directory that the hosts do not share: the first save would fail.

    Host 0 has just written run.json, which has the time of this start.
    """
    if processes.num_hosts() == 1:
        return

    def digest() -> bytes:
        file = folder / FILE
        return files.digest_file(file).encode() if file.is_file() else b"missing"

    expected = processes.allgather_bytes(digest())[0]
    end = time.monotonic() + SHARED_SECONDS
    with processes.same_error_on_all(ValueError):
        while digest() != expected:
            if time.monotonic() > end:
                raise ValueError(
                    f"{folder}: its {FILE} is not that of host 0; all hosts need the "
                    "same --workdir, on a disk that they share"
                )
            time.sleep(0.2)


def record_start(
    folder: str | os.PathLike,
    command: str,
    config: ConfigDict,
    *,
    inputs: Mapping[str, str],
    bound: Collection[str] = (),
) -> int:
    """Add a start to run.json, and note what has changed since the run's last start.

    The file is created if it is missing.

    Args:
        command: the command that starts, such as "train".
        inputs: {name: fingerprint} of everything that is read.
        bound: names of inputs that are not compared here, because `Workdir` does so.

    Returns:
        The index of its entry in `launches`.

    Raises:
        ValueError: run.json is damaged.
        OSError: the disk refuses the write.
    """
    folder = pathlib.Path(folder)
    start, diff = _describe_start(command, config, inputs)
    if diff:
        path = folder / f"code-{start['code']['diff']}.diff"
        if len(diff) > MAX_DIFF_BYTES:
            size = f"{len(diff)} bytes, more than {MAX_DIFF_BYTES}"
            note(f"{folder.name}: uncommitted changes are not stored: {size}")
        elif not path.exists():
            files.replace(path, diff)
    with _lock:
        record = read_record(folder) or {FORMAT_KEY: FORMAT, "starts": []}
        record["run"] = read_run_id(folder)
        starts = record["starts"]
        for line in _compare(_last_start(starts), start, bound) if starts else ():
            note(f"{folder.name}: {line}")
        if starts and _is_same(starts[-1], start):
            starts[-1]["count"] += 1
        else:
            starts.append({**start, "count": 1})
        launches = record.setdefault("launches", [])
        # This start holds the directory's lock, so that no earlier one still runs.
        for launch in launches:
            launch["killed"] = launch["ended"] is None
        launches.append(_describe_launch(len(starts)))
        write_json(folder / FILE, record)
        return len(launches) - 1


def _describe_launch(start_number) -> dict:
    """Return what distinguishes a start from others with the same entry of `starts`."""
    return {
        "start": start_number,
        "argv": sys.orig_argv,
        "directory": os.getcwd(),
        "checkout": str(PACKAGE.parent),
        "module_path": os.environ.get("PYTHONPATH", ""),
        "version": processes.installed_version("rsearch"),  # None in a bare checkout
        "host": socket.gethostname(),
        "process": os.getpid(),
        "began": _current_time(),
        "ended": None,
        "exit_code": None,
        "killed": False,
    }


def _record_end(folder, index, exit_code):
    """Record when and how a start has ended; a disk error is noted, not raised."""
    try:
        with _lock:
            record = read_record(folder) or {}
            launches = record.get("launches", [])
            # The directory may be lost, and another run's may be at its path.
            this_process = {"host": socket.gethostname(), "process": os.getpid()}
            is_recorded = len(launches) > index
            if is_recorded and this_process.items() <= launches[index].items():
                launches[index] |= {"ended": _current_time(), "exit_code": exit_code}
                write_json(folder / FILE, record)
    except Exception as error:
        note(f"{folder / FILE}: the end of this start was not recorded: {error}")


def _current_time() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def num_starts(folder: str | os.PathLike) -> int:
    """Return the number of entries of `starts`, the last of which is the current start.

    It is 0 if there is no run.json.
    """
    record = read_record(folder)
    return len(record["starts"]) if record else 0


def read_launches(folder: str | os.PathLike) -> list[tuple[dict, dict]]:
    """Return (entry of `starts`, entry of `launches`) of each start, oldest first.

    Raises:
        ValueError: run.json is missing, damaged, or from an earlier version that
            recorded no command lines.
    """
    record = read_record(folder)
    if record is None:
        raise ValueError(f"{folder}: not a run: it has no {FILE}")
    if "launches" not in record:
        raise ValueError(
            f"{folder}/{FILE}: written by an earlier version, without command lines"
        )
    starts, launches = record["starts"], record["launches"]
    return [(starts[launch["start"] - 1], launch) for launch in launches]


def describe_start(folder: str | os.PathLike, number: Any) -> dict[str, str]:
    """Return {name: value} of the code, libraries, variables and devices of an entry.

    Args:
        number: number of the entry of `starts`, from 1; {} is returned if there is no
            such entry.

    Raises:
        ValueError: run.json is damaged.
    """
    record = read_record(folder)
    starts = record["starts"] if record else []
    if type(number) is not int or not 0 < number <= len(starts):
        return {}
    start = starts[number - 1]
    code = start["code"]
    # Without git, the files' digests distinguish versions.
    names = [_commit(code) if code["commit"] else fingerprint(code["files"])]
    names += [code["diff"]] if code["diff"] else []
    return {"code": " ".join(names), **start["program"]}


def refuse_changes(
    folder: str | os.PathLike, config: ConfigDict, *, inputs: Mapping[str, str]
) -> None:
    """Refuse a start that differs from the run's last one; change nothing.

    Args:
        folder: folder of a run, or of one that has not begun.
        inputs: {name: fingerprint} of what is read, as far as it is known.

    Raises:
        ValueError: lists the differences.
    """
    record = read_record(folder)
    if record and record["starts"]:
        start, _ = _describe_start("", config, inputs)
        differences = _compare(_last_start(record["starts"]), start)
        if differences:
            raise ValueError(f"{folder}: --strict: {'; '.join(differences)}")


def changes_since(
    folder: str | os.PathLike,
    command: str,
    config: ConfigDict,
    *,
    inputs: Mapping[str, str],
    stage: str,
) -> list[str]:
    """Return sentences on what has changed since a run's last start of a command.

    Args:
        inputs: {name: fingerprint} of what a stage reads now.
        stage: name of the stage; run.json prefixes it to the names of inputs that only
            this stage reads.

    Raises:
        ValueError: run.json is damaged.
    """
    record = read_record(folder) or {"starts": []}
    starts = [start for start in record["starts"] if start["command"] == command]
    if not starts:
        return []
    last_start = starts[-1]
    names = {name: f"{stage}.{name}" for name in inputs}
    inputs = {
        names[name] if names[name] in last_start["inputs"] else name: value
        for name, value in inputs.items()
    }
    new_start, _ = _describe_start(command, config, inputs)
    return _compare(last_start, new_start)


def _describe_start(command, config, inputs) -> tuple[dict, bytes]:
    """Return the entry of a start, and the diff of the uncommitted changes."""
    import jax  # not at the top: commands that read run.json load no devices

    code, diff = _describe_code()
    versions = processes.program_versions()
    del versions["rsearch"]  # the code is recorded file by file
    kinds = sorted({device.device_kind for device in jax.devices()})
    devices = f"{jax.device_count()} x {', '.join(kinds)}"
    start = {
        "command": command,
        "time": _current_time(),
        "host": socket.gethostname(),
        "config": fingerprint(config),
        "code": code,
        "program": {
            **versions,
            "devices": devices,
            "hosts": str(processes.num_hosts()),
        },
        "inputs": dict(inputs),
    }
    return start, diff


def _last_start(starts) -> dict:
    """Return the last start, with each input's fingerprint from when it was last read.

    The last start may have read other inputs, for example to evaluate another dataset.
    """
    inputs = {}
    for start in starts:
        inputs |= start["inputs"]
    return {**starts[-1], "inputs": inputs}


def _compare(last, current, bound=()) -> list[str]:
    """Return sentences on how a start differs from an earlier one."""
    lines = []
    changed_files = _changed_names(last["code"]["files"], current["code"]["files"])
    if changed_files:
        file_list = ", ".join(changed_files[:MAX_NAMED])
        num_more = len(changed_files) - MAX_NAMED
        commits = [_commit(start["code"]) for start in (last, current)]
        lines.append(
            f"rsearch's code has changed since the last start, {commits[0]} -> "
            f"{commits[1]}: {file_list}"
            + (f" and {num_more} more files" if num_more > 0 else "")
        )
    old, new = last["program"], current["program"]
    lines += [
        f"{name} is now {new.get(name, 'missing')!r}, was "
        f"{old.get(name, 'missing')!r} at the last start"
        for name in _changed_names(old, new)
    ]
    old, new = last["inputs"], current["inputs"]
    lines += [
        f"{name} has changed since it was last read: its fingerprint was {old[name]}, "
        f"now {new[name]}"
        for name in _changed_names(old, new)
        if name in old and name in new and name not in bound
    ]
    return lines


def _changed_names(old, new) -> list[str]:
    return [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]


def _is_same(last_start, new_start) -> bool:
    names = ("command", "config", "code", "program", "inputs")
    return all(last_start[name] == new_start[name] for name in names)


def _commit(code) -> str:
    """Return the short form of a commit; a final "+" marks uncommitted changes."""
    return (code["commit"] or "no commit")[:10] + "+" * bool(code["diff"])


def _describe_code() -> tuple[dict, bytes]:
    """Return ({"commit", "diff": its digest, "files": their digests}, diff).

    The diff holds the uncommitted changes. Commit and digest are None without git.
    """
    is_tracked = _git("ls-files", "--error-unmatch", "__init__.py") is not None
    commit = (_git("rev-parse", "HEAD") or b"").decode().strip() if is_tracked else ""
    diff_command = ("diff", "--no-ext-diff", "--no-textconv", "--binary", "HEAD", "--")
    diff = (_git(*diff_command, ".", *SIBLING_FOLDERS) or b"") if commit else b""
    code = {
        "commit": commit or None,
        "diff": _digest(diff) if diff else "" if commit else None,
        "files": {
            path.relative_to(PACKAGE).as_posix(): _digest(path.read_bytes())
            for path in sorted(PACKAGE.rglob("*.py"))
        },
    }
    return code, diff


def _git(*arguments: str) -> bytes | None:
    """Return the output of a git command run in the package; None if it fails."""
    command = ["git", "-C", str(PACKAGE), "-c", "core.fsmonitor=false", *arguments]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_SECONDS,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout if result.returncode == 0 else None


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def read_record(folder: str | os.PathLike) -> dict | None:
    """Return run.json after checking its form; None if there is none.

    Raises:
        ValueError: no version has written it.
    """
    path = pathlib.Path(folder) / FILE
    if not path.exists():
        return None
    record = files.read_json(path)
    if not _is_record(record):
        raise ValueError(
            f"{path}: not the record of a run; move it away, and the next start writes "
            "a new one"
        )
    return record


def _is_record(record) -> bool:
    """Return whether a value has the form of run.json."""

    def has_texts(table, names):
        return all(isinstance(table[name], str) for name in names)

    def is_start(start):
        code = start["code"]
        tables = code["files"], start["program"], start["inputs"]
        return (
            all(isinstance(code[name], str | None) for name in ("commit", "diff"))
            and all(has_texts(table, table.keys()) for table in tables)
            and has_texts(start, ("command", "config"))
            and type(start["count"]) is int
        )

    def is_launch(launch):
        return (
            isinstance(launch["argv"], list)
            and all(isinstance(word, str) for word in launch["argv"])
            and has_texts(launch, ("directory", "began", "host"))
            # Launches of earlier versions lack these two.
            and all(
                isinstance(launch.get(name, ""), str)
                for name in ("checkout", "module_path")
            )
            and type(launch["start"]) is int
            and 0 < launch["start"] <= len(record["starts"])
            and "ended" in launch
        )

    try:
        starts, launches = record["starts"], record.get("launches", [])
        return (
            record[FORMAT_KEY] == FORMAT
            and isinstance(starts, list)
            and isinstance(launches, list)
            and all(map(is_start, starts))
            and all(map(is_launch, launches))
        )
    except (TypeError, LookupError, AttributeError):
        return False
