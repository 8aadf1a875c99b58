"""The ScaNN library: without tensorflow, and with what the processor can do."""

import ctypes
import importlib.util
import pathlib
import sys

from rsearch.runtime.console import note

AVX2 = {"avx2", "fma"}  # what its kernels of this name are compiled for
AVX2_IS_USED = "_ZN14research_scann14flags_internal15should_use_avx2E"
PROCESSOR = pathlib.Path("/proc/cpuinfo")


def has_scann():
    """Whether it is installed; it is not imported for that."""
    return importlib.util.find_spec("scann") is not None


def import_scann():
    """ScaNN's operations on NumPy arrays, without tensorflow, told of AVX2.

    `import scann` imports tensorflow where it is installed, for operations that are not
    used here; it goes without where the import fails.

    Raises:
        ValueError: it is not installed.
    """
    if not has_scann():
        raise ValueError(
            "scann is not installed, which compares the codes of an index: install it, "
            "or build the index with --kind=brute_force"
        )
    if "scann" not in sys.modules:
        missing = object()
        held = sys.modules.get("tensorflow", missing)
        sys.modules["tensorflow"] = None
        try:
            import scann  # noqa: F401
        finally:
            if held is missing:
                del sys.modules["tensorflow"]
            else:
                sys.modules["tensorflow"] = held
    from scann.scann_ops.py import scann_ops_pybind

    use_avx2(sys.modules["scann_pybind"].__file__)
    return scann_ops_pybind


def use_avx2(library):
    """Lets ScaNN take its AVX2 kernels, where the processor has what they need.

    Its packages come with them, and choose by a variable: whether the processor was
    found to have AVX2. In those of 1.4.0 to 1.4.2 the test for that is compiled to
    "no", whatever the processor, and codes are compared by SSE4, in half as much time
    again. The kernels of AVX-512 are no faster than these, and are left alone.

    Args:
        library: path of the loaded extension module, which exports the variable.
    """
    if not processor_features() >= AVX2:
        return
    try:
        is_used = ctypes.c_bool.in_dll(ctypes.CDLL(library), AVX2_IS_USED)
    except ValueError:
        note("this version of scann cannot be told that the processor has AVX2")
        return
    is_used.value = True


def processor_features():
    """Names of what the processor can do, as Linux tells them; elsewhere none."""
    try:
        lines = PROCESSOR.read_text().splitlines()
    except OSError:
        return set()
    named = (line.partition(":") for line in lines)
    told = (value for name, _, value in named if name.strip() == "flags")
    return set(next(told, "").split())
