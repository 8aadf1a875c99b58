"""Check that damaged and hostile files are refused in words and cost no memory.

    python -m tests.chaos.files --files=10000 --seed=0

takes small files of each kind that rsearch reads (weights, indices, vectors, corpora,
questions, checkpoints, runs, arguments), damages one or two of them at random, and
reads them with rsearch's own readers. A reader must either load the files or end as a
command does after a user's mistake: with code 2 and a message that is not a traceback.
The memory that it takes may be at most twice the files' size plus a constant. Readers
run in a process of their own, so that a reader that dies counts as a failure.

    python -m tests.chaos.files --kind=weights --only=17

repeats one of these changes and prints all that is known about it.
"""

import collections
import contextlib
import io
import json
import os
import pathlib
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback

from rsearch.config.recipes import parse_flags, run_command
from rsearch.runtime import console
from tests.chaos.mutations import damage

FLAGS = {
    "files": (10_000, "number of changed samples"),
    "seed": (0, "seed of the changes"),
    "kind": ("", "kind of the files; by default all kinds"),
    "only": (-1, "number of the only changed sample to try"),
    "worker": ("", "directory of the samples, for the process that reads them"),
}
SPARE_BYTES = 96 << 20  # in addition to twice the files' size: libraries' own buffers
MOST_BYTES = 4 << 30  # address space on top of that mapped once all has been loaded
LONGEST_SECONDS = 60.0


class Reader:
    """The process that reads; restarted if it dies."""

    words = ("-m", "tests.chaos.files")

    def __init__(self, folder: pathlib.Path):
        self._folder, self._process = folder, None

    def __call__(self, kind: str, seed: int, number: int) -> dict:
        """Return the `outcome` of one changed sample, and `told`, its message."""
        if self._process is None:
            self._start()
        asked = json.dumps([kind, seed, number]) + "\n"
        self._process.stdin.write(asked.encode())
        self._process.stdin.flush()
        waiting = [self._process.stdout]
        if not select.select(waiting, [], [], LONGEST_SECONDS)[0]:
            self.close()
            return {"outcome": "failed", "told": f"hung {LONGEST_SECONDS} s"}
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self.close()
        return {"outcome": "failed", "told": f"the reader died, code {code}"}

    def _start(self):
        self._process = subprocess.Popen(
            [sys.executable, *self.words, f"--worker={self._folder}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout.readline() == b'"ready"\n', "no reader starts"

    def close(self):
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None


def attempt(folder: pathlib.Path, kind: str, seed: int, number: int) -> dict:
    """Copy a sample, change it and read it, in this process."""
    from tests.chaos.samples import KINDS

    rng = random.Random(f"{kind} {seed} {number}")
    with tempfile.TemporaryDirectory() as scratch:
        place = pathlib.Path(scratch) / "sample"
        shutil.copytree(folder / kind, place)
        changed = []
        for _ in range(rng.choice((1, 1, 1, 2))):
            paths = sorted(p for p in place.rglob("*") if p.is_file())
            if paths:
                changed.append(damage(rng.choice(paths), rng))
        size = sum(p.stat().st_size for p in place.rglob("*") if p.is_file())
        actual = read(KINDS[kind][1], place)
        if actual["outcome"] != "failed" and actual["bytes"] > 2 * size + SPARE_BYTES:
            message = f"took {actual['bytes'] >> 20} MiB of memory for {size} bytes"
            actual = {**actual, "outcome": "failed", "told": message}
        return {**actual, "changed": changed}


def read(load, place: pathlib.Path) -> dict:
    """Read this folder as a command would, and return the outcome."""
    told = io.StringIO()
    before = _memory("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            code = run_command(lambda argv: load(place), [])
    except BaseException as error:  # a panic of Rust is not an Exception
        trace = traceback.format_exc()
        told = f"{type(error).__name__}: {str(error)[:300]}"
        return {"outcome": "failed", "told": told, "trace": trace}
    bytes_ = _memory("VmHWM") - before
    told = told.getvalue()
    outcome = {0: "loaded", 2: "refused"}.get(code, "failed")
    if outcome == "refused" and ("error: " not in told or "Traceback" in told):
        outcome = "failed"
    return {"outcome": outcome, "told": told[:2000], "bytes": bytes_}


def _memory(name):
    status = pathlib.Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(name)]
    return int(line.split()[1]) << 10


def serve(folder: pathlib.Path) -> int:
    """Serve as the process that reads: one line requests, one line replies."""
    import warnings

    from tests.chaos.samples import KINDS, make

    warnings.simplefilter("ignore")
    # C++ libraries may print to descriptor 1; that must not mix with the replies.
    replies = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    make(folder)
    for kind, (_, load) in KINDS.items():  # so that imports and compilations are over
        actual = read(load, folder / kind)
        assert actual["outcome"] == "loaded", (kind, actual)
    most = _memory("VmSize") + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    print('"ready"', file=replies, flush=True)
    for line in sys.stdin:
        told = attempt(folder, *json.loads(line))
        print(json.dumps(told), file=replies, flush=True)
    return 0


def run(folder: pathlib.Path, count: int, seed: int, kinds) -> list[dict]:
    """Try `count` changed samples and return [failures]."""
    reader, failures = Reader(folder), []
    outcomes = collections.defaultdict(collections.Counter)
    started = time.monotonic()
    try:
        for number in console.progress(range(count), "changed samples"):
            kind = kinds[number % len(kinds)]
            actual = reader(kind, seed, number)
            outcomes[kind][actual["outcome"]] += 1
            outcomes[kind]["MiB"] = max(
                outcomes[kind]["MiB"], actual.get("bytes", 0) >> 20
            )
            if actual["outcome"] == "failed":
                failures.append({**actual, "kind": kind, "number": number})
                console.note(f"{kind} {number}: {actual['told']}")
    finally:
        reader.close()
    columns = ("loaded", "refused", "failed", "MiB")
    rows = [(kind, *(outcomes[kind][name] for name in columns)) for kind in kinds]
    title = f"{count} changed samples, {time.monotonic() - started:.0f} s"
    console.table(title, ("kind", *columns), rows)
    return failures


def main(argv) -> int:
    """Run the command; return 1 if a reader did not behave."""
    given = parse_flags(argv, flags=FLAGS)
    if given["worker"]:
        return serve(pathlib.Path(given["worker"]))
    from tests.chaos.samples import KINDS

    if given["kind"] and given["kind"] not in KINDS:
        raise ValueError(f"--kind={given['kind']}: must be one of {', '.join(KINDS)}")
    kinds = [given["kind"]] if given["kind"] else list(KINDS)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        if given["only"] >= 0:
            reader = Reader(folder)
            actual = reader(kinds[0], given["seed"], given["only"])
            reader.close()
            print("\n".join(f"{name}: {value}" for name, value in actual.items()))
            return int(actual["outcome"] == "failed")
        failures = run(folder, given["files"], given["seed"], kinds)
    for failure in failures:
        again = f"--kind='{failure['kind']}' --seed={given['seed']}"
        print(f"{again} --only={failure['number']}: {failure['told'][:200]}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
