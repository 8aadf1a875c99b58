"""Count how often XLA has compiled a program in this process."""

import jax

EVENT = "/jax/core/compile/backend_compile_duration"

_count = 0


def _listen(name, _seconds, **_):
    global _count
    if name == EVENT:
        _count += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compiles() -> int:
    """Return the programs compiled since this module was imported, or cached."""
    return _count
