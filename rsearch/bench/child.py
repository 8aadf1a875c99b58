"""python -m rsearch.bench.child MODULE FUNCTION SETTINGS

The process that measures one subject. It prepares the subject, runs one repetition for
each line that it reads, and writes the numbers as a line of JSON. It adds the peak
memory of the process, or of its device on an accelerator, unless the subject returns
`peak_bytes` itself. It imports only the standard library, as it also runs in
interpreters that have none of the package's libraries.
"""

import contextlib
import importlib
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable

PROC = pathlib.Path("/proc")
Repetition = Callable[[], dict]  # does a subject's work once and returns its numbers


class Unmeasured(Exception):
    """Raised by a subject that works but has no number, with a reason on one line."""


def main(module: str, function: str, settings: str) -> None:
    """Run a repetition for each line of stdin, and print its numbers as JSON."""
    # If memory runs out, the kernel should kill this process rather than another.
    with contextlib.suppress(OSError):
        (PROC / "self" / "oom_score_adj").write_text("1000")
    # What libraries print to stdout must not mix with the answers, so stdout becomes
    # stderr, and the answers go to a copy of the original stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    repeat = None
    for _ in sys.stdin:
        try:
            if repeat is None:
                make = getattr(importlib.import_module(module), function)
                repeat = make(**json.loads(settings))
            reset_device_peak()
            numbers = repeat()
            if "peak_bytes" not in numbers:
                numbers["peak_bytes"] = device_peak_bytes()
        except ModuleNotFoundError as error:
            numbers = {"missing": f"{error.name} is not installed"}
        except Unmeasured as reason:
            numbers = {"unmeasured": str(reason)}
        print(json.dumps(numbers), file=answers, flush=True)


def _torch_on_cuda():
    """Return torch if it has initialized a GPU, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def reset_peak(process: str | int = "self") -> None:
    """Reset a process's peak memory to its current use; see proc(5)."""
    (PROC / str(process) / "clear_refs").write_text("5")


def peak_bytes(process: str | int = "self") -> int:
    """Return the peak host memory of a process since the last reset."""
    for line in (PROC / str(process) / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/{process}/status has no VmHWM")


def reset_device_peak() -> None:
    """Reset the peak memory of this process and, if torch uses a GPU, of that GPU."""
    reset_peak()
    if torch := _torch_on_cuda():
        torch.cuda.reset_peak_memory_stats()


def device_peak_bytes() -> int:
    """Return the peak memory of this process since the last reset.

    On an accelerator this counts the arrays on the first device. JAX cannot reset its
    peak there, so it is the peak since the process began.
    """
    if torch := _torch_on_cuda():
        return torch.cuda.max_memory_allocated()
    jax = sys.modules.get("jax")
    if jax is not None and jax.default_backend() != "cpu":
        return jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    return peak_bytes()


if __name__ == "__main__":
    # Subjects import Unmeasured from here; __main__.Unmeasured is a different class.
    from rsearch.bench import child

    status = 1
    try:
        child.main(*sys.argv[1:])
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # A normal exit waits for a peer's threads, maybe forever.
