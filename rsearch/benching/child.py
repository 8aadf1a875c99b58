"""python -m rsearch.benching.child MODULE FUNCTION SETTINGS

The process of one subject: prepares it, and for each line it reads does one repetition
and writes its numbers as a line of JSON, with the most memory the process held
meanwhile. Runs in interpreters that have none of the package's libraries.
"""

import contextlib
import importlib
import json
import os
import pathlib
import sys
import traceback

SELF = pathlib.Path("/proc/self")


def main(module: str, function: str, settings: str) -> None:
    """Answers until nobody asks any more."""
    # Where memory runs out, this process goes and nobody else's.
    with contextlib.suppress(OSError):
        (SELF / "oom_score_adj").write_text("1000")
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    once = None
    for _ in sys.stdin:
        try:
            if once is None:
                make = getattr(importlib.import_module(module), function)
                once = make(**json.loads(settings))
            _forget_peak()
            told = {**once(), "peak_bytes": _peak_bytes()}
        except ModuleNotFoundError as error:
            told = {"missing": f"{error.name} is not installed"}
        print(json.dumps(told), file=answers, flush=True)


def _forget_peak():
    """The most memory held starts anew with what is held now (Linux, proc(5))."""
    (SELF / "clear_refs").write_text("5")


def _peak_bytes() -> int:
    """The most memory held since then."""
    for line in (SELF / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/self/status has no VmHWM")


if __name__ == "__main__":
    status = 1
    try:
        main(*sys.argv[1:])
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # A peer's threads may wait for more, and Python for them.
