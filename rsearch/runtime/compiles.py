"""Count the programs that XLA has compiled in this process, and the time it took."""

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
LOWERING_EVENT = "/jax/core/compile/jaxpr_to_mlir_module_duration"

_count = 0
_seconds = 0.0


def _listen(name, seconds, **_):
    global _count, _seconds
    if name == COMPILE_EVENT:
        _count += 1
    if name in (COMPILE_EVENT, LOWERING_EVENT):
        _seconds += seconds


jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compiles() -> int:
    """Return how many programs were compiled, or loaded from a cache, since import."""
    return _count


def compile_seconds() -> float:
    """Return the seconds spent on lowering and compiling these, or on loading them."""
    return _seconds
