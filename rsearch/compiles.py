"""How often XLA has compiled something in this process."""

import jax

EVENT = "/jax/core/compile/backend_compile_duration"

_durations: list[float] = []


def _listen(name, seconds, **_):
    if name == EVENT:
        _durations.append(seconds)


jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compiles() -> int:
    """Programs compiled since this module was imported, those from a cache included."""
    return len(_durations)


def seconds_compiling() -> float:
    """Seconds spent on them."""
    return sum(_durations)
