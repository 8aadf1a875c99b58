"""python -m rsearch.bench.child MODULE FUNCTION SETTINGS

The process of one subject. It prepares the subject, does one repetition for each line
that it reads, and writes the numbers as a line of JSON. It adds the peak memory of the
process, or on an accelerator that of its device, unless the subject returns
`peak_bytes` itself. It imports the standard library alone: it also runs in interpreters
that have none of the package's libraries.
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
Repetition = Callable[[], dict]  # does a subject's work once, and returns its numbers


class Unmeasured(Exception):
    """Raised by a subject that works and still has no number; says why in a line."""


def main(module: str, function: str, settings: str) -> None:
    """Do a repetition for each line of stdin, and print its numbers as JSON."""
    # Where memory runs out, the kernel is to end this process and no other.
    with contextlib.suppress(OSError):
        (PROC / "self" / "oom_score_adj").write_text("1000")
    # Libraries print to stdout too, which must not mix with the answers: they get
    # stderr in its place, and the answers a copy of the old stdout.
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
    """Return torch where it has begun to use a GPU, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def reset_peak(process: str | int = "self") -> None:
    """Reset the peak of a process's memory to what it holds now; see proc(5)."""
    (PROC / str(process) / "clear_refs").write_text("5")


def peak_bytes(process: str | int = "self") -> int:
    """Return the peak of the host memory of a process since the last reset."""
    for line in (PROC / str(process) / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/{process}/status has no VmHWM")


def reset_device_peak() -> None:
    """Reset the peaks of this process and, under torch, of its GPU."""
    reset_peak()
    if torch := _torch_on_cuda():
        torch.cuda.reset_peak_memory_stats()


def device_peak_bytes() -> int:
    """Return the peak of this process's memory since the last reset.

    On an accelerator it counts the arrays on the first device. JAX's peak there is that
    since the process began: JAX cannot reset it.
    """
    if torch := _torch_on_cuda():
        return torch.cuda.max_memory_allocated()
    jax = sys.modules.get("jax")
    if jax is not None and jax.default_backend() != "cpu":
        return jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    return peak_bytes()


if __name__ == "__main__":
    # Under this name subjects import Unmeasured; __main__.Unmeasured is another class.
    from rsearch.bench import child

    status = 1
    try:
        child.main(*sys.argv[1:])
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # Python would wait for a peer's threads, which may wait forever.
