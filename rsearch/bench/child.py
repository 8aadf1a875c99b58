"""python -m rsearch.bench.child MODULE FUNCTION SETTINGS

The process of one subject: prepares it, and for each line it reads does one repetition
and writes its numbers as a line of JSON. Beside them stands the most memory the process
held meanwhile, on an accelerator that of its device, but where the subject tells its
`peak_bytes` itself. Runs in interpreters that have none of the package's libraries.
"""

import contextlib
import importlib
import json
import os
import pathlib
import sys
import traceback

PROC = pathlib.Path("/proc")


class Unmeasured(Exception):
    """Raised by a subject that works, and still has no number; says why in a line."""


def main(module: str, function: str, settings: str) -> None:
    """Answers until nobody asks any more."""
    # Where memory runs out, this process goes and nobody else's.
    with contextlib.suppress(OSError):
        (PROC / "self" / "oom_score_adj").write_text("1000")
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
            told = once()
            if "peak_bytes" not in told:
                told["peak_bytes"] = _peak_bytes()
        except ModuleNotFoundError as error:
            told = {"missing": f"{error.name} is not installed"}
        except Unmeasured as reason:
            told = {"missing": str(reason)}
        print(json.dumps(told), file=answers, flush=True)


def _torch_on_cuda():
    """torch, where it has begun to use a GPU; else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def forget_peak(process="self") -> None:
    """The most memory a process held starts anew with what it holds (proc(5))."""
    (PROC / str(process) / "clear_refs").write_text("5")


def peak_bytes(process="self") -> int:
    """The most memory of the host that the process held since then."""
    for line in (PROC / str(process) / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/{process}/status has no VmHWM")


def _forget_peak():
    forget_peak()
    if torch := _torch_on_cuda():
        torch.cuda.reset_peak_memory_stats()


def _peak_bytes() -> int:
    """The most memory held since then.

    On an accelerator it is that of the arrays on the first device, and JAX's since the
    process began: it does not let its peak be forgotten.
    """
    if torch := _torch_on_cuda():
        return torch.cuda.max_memory_allocated()
    jax = sys.modules.get("jax")
    if jax is not None and jax.default_backend() != "cpu":
        return jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    return peak_bytes()


if __name__ == "__main__":
    # Imported under its name, as subjects import Unmeasured.
    from rsearch.bench import child

    status = 1
    try:
        child.main(*sys.argv[1:])
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # A peer's threads may wait for more, and Python for them.
