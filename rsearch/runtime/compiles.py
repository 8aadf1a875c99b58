"""Count the programs that XLA compiles in this process, and name those that take long.

A large model's programs take minutes to compile on a CPU, while nothing else happens.
"""

import threading

import jax

from rsearch.runtime.console import note

NOTE_AFTER = 15.0  # seconds

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
LOWERING_EVENT = "/jax/core/compile/jaxpr_to_mlir_module_duration"

_count = 0
_seconds = 0.0
_compiling = threading.local()  # its `timer` will name the program of this thread


def _listen(name, seconds, *, fun_name="a program", **_):
    global _count, _seconds
    if name == COMPILE_EVENT:
        _count += 1
        if seconds > NOTE_AFTER:
            note(f"compiled {fun_name} in {seconds:.0f} s")
    if name in (COMPILE_EVENT, LOWERING_EVENT):
        _seconds += seconds
        # Compiling in a thread begins when its lowering ends.
        if hasattr(_compiling, "timer"):
            _compiling.timer.cancel()
        if name == LOWERING_EVENT:
            text = f"compiling {fun_name}"
            _compiling.timer = threading.Timer(NOTE_AFTER, note, (text,))
            _compiling.timer.daemon = True
            _compiling.timer.start()


jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compiles() -> int:
    """Return how many programs were compiled, or loaded from a cache, since import."""
    return _count


def compile_seconds() -> float:
    """Return the seconds spent on lowering and compiling these, or on loading them."""
    return _seconds
