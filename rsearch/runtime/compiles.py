"""Count the programs that XLA compiles in this process, and name those that take long.

A large model's programs take minutes to compile on a CPU, while nothing else happens.
"""

import threading
import time

import jax

from rsearch.runtime.console import note

NOTE_AFTER = 15.0  # seconds

TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"
LOWERING_EVENT = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
EVENTS = (TRACE_EVENT, LOWERING_EVENT, COMPILE_EVENT)

_count = 0
_lock = threading.Lock()
# Programs are compiled while others are traced, and in several threads at once. Only
# the time from the first begin to the last end is added up, so that no second counts
# twice and the sum is never more than the time that passed.
_num_active = 0
_active_since = 0.0
_seconds = 0.0
_compiling = threading.local()  # its `timer` will name the program of this thread


def _begin(name, _, **__):
    global _num_active, _active_since
    if name in EVENTS:
        with _lock:
            if not _num_active:
                _active_since = time.monotonic()
            _num_active += 1


def _listen(name, seconds, *, fun_name="a program", **_):
    global _count, _num_active, _seconds
    if name not in EVENTS:
        return
    with _lock:
        _count += name == COMPILE_EVENT
        if _num_active:  # it may have begun before this module was imported
            _num_active -= 1
            if not _num_active:
                _seconds += time.monotonic() - _active_since
    if name == TRACE_EVENT:
        return
    if name == COMPILE_EVENT and seconds > NOTE_AFTER:
        note(f"compiled {fun_name} in {seconds:.0f} s")
    # Compiling in a thread begins when its lowering ends.
    if hasattr(_compiling, "timer"):
        _compiling.timer.cancel()
    if name == LOWERING_EVENT:
        text = f"compiling {fun_name}"
        _compiling.timer = threading.Timer(NOTE_AFTER, note, (text,))
        _compiling.timer.daemon = True
        _compiling.timer.start()


# JAX records a scalar when a step begins, and a duration when it ends or fails.
jax.monitoring.register_scalar_listener(_begin)
jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compiles() -> int:
    """Return how many programs were compiled, or loaded from a cache, since import."""
    return _count


def compile_seconds() -> float:
    """Return the seconds in which a thread traced, lowered, compiled or loaded these.

    A program that is being compiled counts with its seconds so far.
    """
    with _lock:
        unfinished = time.monotonic() - _active_since if _num_active else 0.0
        return _seconds + unfinished
