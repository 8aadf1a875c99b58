"""What macOS lacks is not used, except in benchmarks, which need Linux."""

import ast
import pathlib

import pytest

import rsearch

LINUX_ONLY = {
    "os": (
        *("copy_file_range", "eventfd", "fdatasync", "getrandom", "memfd_create"),
        *("pidfd_open", "pipe2", "posix_fadvise", "posix_fallocate"),
        *("sched_getaffinity", "sched_setaffinity", "setns", "splice", "unshare"),
    ),
    "signal": ("SIGPWR", "SIGRTMIN", "sigtimedwait", "sigwaitinfo"),
    "socket": ("SOCK_CLOEXEC", "SOCK_NONBLOCK", "SO_PEERCRED"),
}
ROOT = pathlib.Path(rsearch.__file__).parent
ROOMS = sorted({path.parent for path in ROOT.rglob("*.py")} - {ROOT / "bench"})


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_no_function_is_used_that_macos_lacks(room):
    used = [
        f"{path.name}:{node.lineno}: {node.value.id}.{node.attr}"
        for path in room.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.attr in LINUX_ONLY.get(node.value.id, ())
    ]
    assert not used
