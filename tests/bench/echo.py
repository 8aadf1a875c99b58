"""Subjects that cost nothing."""

import os
import pathlib
import tempfile
import threading

from rsearch.bench.child import Unmeasured
from rsearch.runtime import files


def make(*, log="", fails_at=0):
    """One that numbers its repetitions, and notes the process that did each."""
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
    """Tells a user that this is no file, by a function of the package."""
    digest = files.read_json(path)
    raise AssertionError(digest)


def make_large():
    """One that holds 200 MB as it is prepared, and 50 MB in its second repetition."""
    whole = bytearray(b"x") * 200_000_000
    del whole
    number = 0

    def once():
        nonlocal number
        number += 1
        return {"size": len(bytearray(b"x") * 50_000_000) if number == 2 else 0}

    return once


def make_counted():
    """One that tells of memory of its own, not of its process's."""
    return lambda: {"peak_bytes": 5}


def make_stored():
    """One that leaves a directory."""
    folder = tempfile.mkdtemp()
    return lambda: {"folder": folder, "directory": os.getcwd()}


def make_missing():
    """One whose library is not there."""
    import a_library_that_nobody_has  # noqa: F401


def make_unmeasured():
    """One that works, and has no number."""
    raise Unmeasured("no setting will do")


def make_waiting(**settings):
    """Has a thread that nobody ever tells to end."""
    threading.Thread(target=threading.Event().wait).start()
    return make(**settings)
