"""The processes that train together, and what they tell each other.

On a TPU slice or several GPU nodes each host runs the same program on its own devices.
Work that questions, chats or rollouts can be split by is shared out, and everyone gets
all the results, so that what follows is the same everywhere; the model's own arrays are
cut over the devices of all (see `rsearch.models.sharding`).
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rsearch.hosts import preemption
from rsearch.hosts.peers import PREEMPTED, Peers, await_all
from rsearch.hosts.preemption import OutageError, PreemptedError

# Bytes of each host in one exchange, which passes through its devices; a program each.
SIZES = (1 << 8, 1 << 14, 1 << 18, 1 << 22)
PIECE_BYTES = SIZES[-1]
AUTO = "auto"
ALL = ()  # devices of a host: by itself JAX gives each SLURM task one of them
SLICES = "MEGASCALE_"  # what libtpu reads of a job of several slices
LIBRARIES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
LIBRARIES += ("flax", "optax", "numpy")
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64")
VARIABLES += ("JAX_DEFAULT_MATMUL_PRECISION",)

FLAGS = {
    "coordinator": ("", "of several hosts: HOST:PORT of the first, or auto"),
    "num_hosts": (0, "with HOST:PORT: how many there are"),
    "host": (-1, "with HOST:PORT: the number of this one, from 0"),
}


class OtherHostError(RuntimeError):
    """Another host has failed, which raises its own error itself."""


_place = (0, 1)  # this host's number, and how many there are
_peers: Peers | None = None  # the watch over the others, within `meeting`
_coordinator = ""  # the first host's name, where it was told by hand


def begin(coordinator: str = "", *, num_hosts: int = 0, host: int = -1) -> None:
    """Meets the other hosts; to be called before anything asks for devices.

    Args:
        coordinator: "" is a run on this host alone. "auto" takes what a TPU slice,
            SLURM, Open MPI or Kubernetes tells (`jax.distributed.initialize`).
            Otherwise HOST:PORT, of the host of number 0, as everyone can reach it.
            Only "auto" looks at variables that an earlier job may have left.
        num_hosts: where the coordinator is given as an address.
        host: number of this one, from 0.

    Raises:
        ValueError: an address without the other two, or these without an address; a
            port that is in use; hosts with different programs.
    """
    import jax  # not at the top: commands without a model load this module too

    global _place, _coordinator
    if coordinator in ("", AUTO) and (num_hosts or host >= 0):
        raise ValueError("--num_hosts and --host want --coordinator=HOST:PORT")
    if not coordinator:
        for name in [name for name in os.environ if name.startswith(SLICES)]:
            del os.environ[name]  # libtpu would wait for the other slices
        return
    # JAX's would take the signals that `rsearch.hosts.preemption` waits for.
    jax.config.update("jax_enable_preemption_service", False)
    if coordinator == AUTO:
        jax.distributed.initialize(local_device_ids=ALL)
    else:
        address, _, port = coordinator.rpartition(":")
        if not address or not port.isdecimal():
            raise ValueError(
                f"--coordinator={coordinator}: write HOST:PORT, or {AUTO!r}"
            )
        if num_hosts < 1 or not 0 <= host < num_hosts:
            raise ValueError(
                f"--num_hosts={num_hosts} --host={host}: with --coordinator=HOST:PORT "
                "every host is told how many there are, and its own number from 0"
            )
        if host == 0:
            _check_free(address, int(port))
        jax.distributed.initialize(coordinator, num_hosts, host, ALL)
        _coordinator = address.strip("[]")
    _place = jax.process_index(), jax.process_count()
    for size in SIZES:  # compiled here, not in the middle of a run
        exchange(bytes(size))
    check_alike(program())


def _check_free(address, port):
    """Refuses a port that another process listens at, which JAX would wait for."""
    try:
        socket.create_server(("", port)).close()
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) else error
        raise ValueError(
            f"--coordinator={address}:{port}: {reason}; name another port on all "
            f"hosts, --coordinator={address}:PORT"
        ) from None


def program() -> dict[str, str]:
    """What numbers follow from beside configuration and inputs: {name: what it is}."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found |= {name: os.environ.get(name, "") for name in VARIABLES}
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(pathlib.Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return found | {"rsearch": digest.hexdigest()}


@contextlib.contextmanager
def meeting(
    coordinator: str = "",
    *,
    num_hosts: int = 0,
    host: int = -1,
    stall_seconds: float = 0.0,
) -> Iterator:
    """`begin`, and an end for all: where one host fails, none waits for it for ever.

    What it has failed with is told to the others' watching threads. They leave their
    hosts the time to end by themselves, as those do that were told anyway, and then end
    them with code 1, whatever these are waiting for. A host that is not heard of for
    `stall_seconds`, if that is not 0, ends the others with code 75.
    """
    global _peers
    begin(coordinator, num_hosts=num_hosts, host=host)
    if _place[1] == 1:
        yield
        return
    import jax
    from jax._src import distributed  # its key-value store has no public name

    peers = Peers(distributed.global_state.client, index(), stall_seconds)
    preemption.before_end(lambda: peers.tell(PREEMPTED))
    _peers = peers
    with peers.watched():
        try:
            yield
        except OutageError:  # of this one alone
            peers.tell(PREEMPTED)
            raise
        except PreemptedError:  # on all of them
            if is_first():
                peers.await_others(_place[1] - 1)
            else:
                preemption.before_leave(peers.leave)
            raise
        except BaseException as error:  # Control-C on one host ends them all, too
            if _is_raised_in(jax, error):  # as by an exchange whose other end is gone
                peers.await_silence()
            peers.tell(f"{type(error).__name__}: {error}")
            # At its exit JAX waits for the others, minutes long. They end before it
            # does, or what they are in would fail first, with an error that says
            # nothing.
            peers.end_later()
            raise
        finally:
            _peers = None


def _is_raised_in(package, error) -> bool:
    """Whether the error is the package's own."""
    if isinstance(error, package.errors.JaxRuntimeError):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return pathlib.Path(last).is_relative_to(pathlib.Path(package.__file__).parent)


def check_preempted(*, together: bool = False) -> None:
    """Ends the work here if this host, or with others any of them, was told to stop.

    Args:
        together: all hosts are at the same point, and go on or end together. Elsewhere
            one of several hosts goes on: the others would wait for it.

    Raises:
        PreemptedError: they have been.
    """
    if num_hosts() == 1:
        preemption.check()
    elif together and exchange_number(preemption.is_asked()).any():
        raise PreemptedError


def index() -> int:
    """The number of this host, from 0."""
    return _place[0]


def num_hosts() -> int:
    """How many hosts train together."""
    return _place[1]


def is_first() -> bool:
    """Whether this host writes the run's files and talks to people."""
    return index() == 0


def address() -> str:
    """Of this host, as the others can reach it: an IP address.

    That of the interface towards the first host or, where nobody named it, of the
    default route.
    """
    target = _coordinator or "192.0.2.1"  # set apart for examples: nobody is there
    kind, *_, place = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # chooses the interface, and sends nothing
        return probe.getsockname()[0]


def barrier(name: str) -> None:
    """Waits until all have come here."""
    if num_hosts() > 1:
        from jax.experimental import multihost_utils

        await_all()
        multihost_utils.sync_global_devices(name)


def exchange(payload: bytes) -> list[bytes]:
    """[hosts] what each has given, in their order."""
    if num_hosts() == 1:
        return [payload]
    from jax.experimental import multihost_utils

    # In two halves: what passes through a device has 32 bits.
    halves = multihost_utils.process_allgather(
        np.array([len(payload) >> 24, len(payload) & 0xFFFFFF], np.int32)
    )
    sizes = [(int(high) << 24) + int(low) for high, low in halves.reshape(-1, 2)]
    found = [bytearray() for _ in sizes]
    for start in range(0, max(sizes), PIECE_BYTES):
        piece = np.frombuffer(payload[start : start + PIECE_BYTES], np.uint8)
        left = min(PIECE_BYTES, max(sizes) - start)
        most = min(size for size in SIZES if size >= left)
        sent = np.zeros(most, np.uint8)
        sent[: len(piece)] = piece
        got = multihost_utils.process_allgather(sent)
        for i, size in enumerate(sizes):
            found[i] += got[i, : max(0, min(left, size - start))].tobytes()
    return [bytes(part) for part in found]


def exchange_number(number: int) -> np.ndarray:
    """[hosts] int32 what each has given, in their order."""
    own = np.array([number], np.int32)
    if num_hosts() == 1:
        return own
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(own).reshape(-1)


def share(
    work: Callable[[Sequence], Sequence],
    items: Sequence,
    *,
    encode: Callable[[Sequence], bytes],
    decode: Callable[[bytes, Sequence], Sequence],
) -> list:
    """`work(items)`, each host working on its own, all getting all results.

    The first item is the first host's, the second the second's, and so on: items cost
    about the same.

    Args:
        work: (items) -> as many results; called on every host, also with no items, so
            that it may do what all have to do together.
        items: the same on all hosts.
        encode: results -> bytes.
        decode: (bytes, the items they are of) -> results.

    Returns:
        A result for each item, in their order.

    Raises:
        RuntimeError: the work failed on another host; on its own host its exception is
            raised instead, at once within `meeting`, which ends the others.
    """
    if num_hosts() == 1:
        return list(work(items))
    failed, told = None, b""
    try:
        told = b"\1" + encode(work(items[index() :: num_hosts()]))
    except Exception as error:  # told to all, who would wait for ever
        if _peers is not None:
            raise  # now: their own work may take days
        failed, told = error, b"\0" + f"{type(error).__name__}: {error}".encode()
    await_all()
    replies = exchange(told)
    if failed is not None:
        raise failed
    results = [None] * len(items)
    for number, reply in enumerate(replies):
        if reply[:1] == b"\0":
            raise RuntimeError(f"host {number}: {reply[1:].decode()}")
        own = slice(number, None, num_hosts())
        results[own] = decode(reply[1:], items[own])
    return results


def share_records(work: Callable[[Sequence], Sequence], items: Sequence) -> list:
    """`share` of work whose results are JSON values."""
    return share(
        work,
        items,
        encode=lambda results: json.dumps(list(results)).encode(),
        decode=lambda data, _: json.loads(data),
    )


def on_first(work: Callable[[], None]) -> None:
    """Does on the first host what others cannot do too; all fail where it fails.

    Raises:
        ValueError: as it was raised on the first host.
        RuntimeError: another exception was.
    """
    failed, told = None, b""
    if is_first():
        try:
            work()
        except Exception as error:
            kind = b"\1" if type(error) is ValueError else b"\0"
            failed, told = error, kind + f"{error}".encode()
    if num_hosts() > 1:
        await_all()
    told = exchange(told)[0]
    if failed is not None:
        raise failed
    if told:
        kind = ValueError if told[:1] == b"\1" else RuntimeError
        raise kind(f"host 0: {told[1:].decode()}")


@contextlib.contextmanager
def alike(kind: type[Exception]) -> Iterator:
    """Within it all do the same; an error of this kind on one of them is one of all.

    Otherwise they would part here, and wait for each other at different places.

    Raises:
        Exception: of the kind, its own on each host that has one, after the last has
            come to the end; another kind at once.
    """
    own = None
    try:
        yield
    except kind as error:
        own = error
    told = exchange(b"" if own is None else f"host {index()}: {own}".encode())
    if own is not None:
        raise own
    if any(told):
        raise kind(next(filter(None, told)).decode())


def check_alike(told: dict) -> None:
    """Refuses hosts that do not have the same inputs, which would drift apart.

    Args:
        told: {name: JSON value}, such as fingerprints.

    Raises:
        ValueError: names what differs, and on which host.
    """
    replies = [json.loads(r) for r in exchange(json.dumps(told).encode())]
    for number, other in enumerate(replies):
        for name in sorted(replies[0].keys() | other.keys()):
            if replies[0].get(name) != other.get(name):
                raise ValueError(
                    f"{name} is {other.get(name)!r} on host {number}, "
                    f"{replies[0].get(name)!r} on host 0; all need the same"
                )
