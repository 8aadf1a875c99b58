"""Benchmark subjects that do no work."""

import os
import pathlib
import tempfile
import threading

from rsearch.bench.child import Unmeasured
from rsearch.runtime import files


def make(*, log="", fails_at=0):
    """Return a subject that numbers its repetitions and logs the process of each."""
    number = 0

    def once():
        nonlocal number
        number += 1
        print("printed by a library")
        if log:
            with pathlib.Path(log).open("a") as file:
                file.write(f"{os.getpid()}\n")
        if number == fails_at:
            raise RuntimeError("no more")
        return {"number": number}

    return once


def refuse(path):
    """Read a damaged file with a function of the package, which must refuse it."""
    digest = files.read_json(path)
    raise AssertionError(digest)


def make_large():
    """Return a subject that takes 200 MB to prepare, and 50 MB in repetition 2."""
    whole = bytearray(b"x") * 200_000_000
    del whole
    number = 0

    def once():
        nonlocal number
        number += 1
        return {"size": len(bytearray(b"x") * 50_000_000) if number == 2 else 0}

    return once


def make_counted():
    """Return a subject that reports its peak memory itself."""
    return lambda: {"peak_bytes": 5}


def make_stored():
    """Return a subject that leaves a directory behind."""
    folder = tempfile.mkdtemp()
    return lambda: {"folder": folder, "directory": os.getcwd()}


def make_missing():
    """Import a library that is not installed."""
    import a_library_that_nobody_has  # noqa: F401


def make_unmeasured():
    """Raise Unmeasured, as a subject that works but has no number."""
    raise Unmeasured("no setting will do")


def make_waiting(**settings):
    """Return a subject with a thread that never ends by itself."""
    threading.Thread(target=threading.Event().wait).start()
    return make(**settings)
