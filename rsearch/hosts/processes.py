"""Connect the processes that train together, and exchange data between them.

On a TPU slice or several GPU nodes, each host runs the same program on its own devices.
Questions, chats and rollouts are split over the hosts, and every host gets all the
results, so that the code that follows runs identically everywhere. The model's arrays
are sharded over the devices of all hosts (see `rsearch.models.sharding`).
"""

import contextlib
import functools
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

from rsearch.hosts import meeting, preemption
from rsearch.hosts.peers import PREEMPTED, Peers, wait_for_all_hosts
from rsearch.hosts.preemption import OutageError, PreemptedError

# Bytes that a host sends in one all-gather, which goes through its devices. Payloads
# are padded to one of these sizes, so that only this many programs are compiled.
SIZES = (1 << 8, 1 << 14, 1 << 18, 1 << 22)
CHUNK_BYTES = SIZES[-1]
AUTO = "auto"
ALL_DEVICES = ()  # all of a host's; by default JAX gives each SLURM task only one
MULTISLICE_PREFIX = "MEGASCALE_"  # of variables that libtpu reads in a multislice job
# Plug-ins for accelerators, whose own XLA may not recognise a CPU flag.
PLUGINS = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
LIBRARIES = ("jax", "jaxlib", *PLUGINS)
LIBRARIES += ("flax", "optax", "numpy", "orbax-checkpoint", "ml_dtypes", "safetensors")
LIBRARIES += ("transformers", "tokenizers", "datasets", "scann", "tensorflow-text")
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64")
VARIABLES += ("JAX_DEFAULT_MATMUL_PRECISION", "JAX_DEFAULT_PRNG_IMPL")
VARIABLES += ("JAX_THREEFRY_PARTITIONABLE", "NVIDIA_TF32_OVERRIDE")

CPU_COUNT_FLAG = "--xla_force_host_platform_device_count"
SCHEDULER_FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler"

FLAGS = {
    "coordinator": ("", "with several hosts: HOST:PORT of the first host, or auto"),
    "num_hosts": (0, "with HOST:PORT: number of hosts"),
    "host": (-1, "with HOST:PORT: number of this host, from 0"),
    "bind": ("", "with HOST:PORT: address at which host 0 listens; '' = HOST"),
}
STALL_FLAG = {
    "stall_seconds": (12.0, "with several hosts: silence after which a run ends"),
}


class OtherHostError(RuntimeError):
    """An error that another host has raised; that host reports the error itself."""


_rank_and_size = (0, 1)  # this host's number, and the number of hosts
_coordinator = ""  # the first host's name, if the user gave it


def connect(
    coordinator: str = "", *, num_hosts: int = 0, host: int = -1, bind: str = ""
) -> None:
    """Connect to the other hosts; call this before anything asks for devices.

    Args:
        coordinator: "" is a run on this host only. "auto" reads the settings of a TPU
            slice, SLURM, Open MPI or Kubernetes (`jax.distributed.initialize`).
            Otherwise HOST:PORT of host 0, reachable from every host. Only "auto"
            reads variables that an earlier job may have left.
        num_hosts: number of hosts, if the coordinator is an address.
        host: number of this host, from 0, if the coordinator is an address.
        bind: address that host 0 listens at; "" = the coordinator's.

    Raises:
        ValueError: an address without the number of hosts and of this host, or these
            without an address; a port that is in use; two hosts with the same number,
            or hosts that do not connect; hosts with different programs.
    """
    import jax  # not at the top: commands without a model load this module too

    global _rank_and_size, _coordinator
    if coordinator or CPU_COUNT_FLAG in os.environ.get("XLA_FLAGS", ""):
        order_collectives()
    if coordinator in ("", AUTO) and (num_hosts or host >= 0 or bind):
        raise ValueError("--num_hosts, --host and --bind need --coordinator=HOST:PORT")
    if not coordinator:
        for name in [name for name in os.environ if name.startswith(MULTISLICE_PREFIX)]:
            del os.environ[name]  # libtpu would wait for the other slices
        return
    # JAX's service would catch the signals that `rsearch.hosts.preemption` handles.
    jax.config.update("jax_enable_preemption_service", False)
    if coordinator == AUTO:
        try:
            jax.distributed.initialize(local_device_ids=ALL_DEVICES)
        except ValueError as error:  # JAX's message names no flag
            raise ValueError(
                f"--coordinator={AUTO}: JAX recognises no TPU slice, SLURM, Open MPI "
                f"or Kubernetes job here ({error}); write HOST:PORT"
            ) from error
    else:
        address, _, port = coordinator.rpartition(":")
        if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"--coordinator={coordinator}: write HOST:PORT, or {AUTO!r}"
            )
        if num_hosts < 1 or not 0 <= host < num_hosts:
            raise ValueError(
                f"--num_hosts={num_hosts} --host={host}: with --coordinator=HOST:PORT "
                "every host needs the number of hosts, and its own number from 0"
            )
        bound_address = None
        if host == 0:
            listener, bound_address = meeting.listen(address, int(port), bind=bind)
            meeting.receive_hosts(listener, num_hosts)
        else:
            meeting.join_run(address, int(port), host=host, num_hosts=num_hosts)
        # JAX's gRPC channel would try the environment's proxy for ever.
        os.environ["no_grpc_proxy"] = address.strip("[]")  # noqa: SIM112
        jax.config.update("jax_check_proxy_envs", False)
        jax.distributed.initialize(
            coordinator,
            num_hosts,
            host,
            ALL_DEVICES,
            coordinator_bind_address=bound_address,
        )
        _coordinator = address.strip("[]")
    _rank_and_size = jax.process_index(), jax.process_count()
    for size in SIZES:  # compile now, not in the middle of a run
        allgather_bytes(bytes(size))
    check_same_on_all(program_versions())


def order_collectives() -> None:
    """Have all CPU devices start a program's collectives in the same order.

    By default XLA schedules a CPU program for concurrency: devices may start two
    collectives in different orders, and then wait for each other for ever. A schedule
    set in XLA_FLAGS is kept. Call this before anything asks for devices.
    """
    is_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    flags = os.environ.get("XLA_FLAGS", "")
    if SCHEDULER_FLAG not in flags and (
        is_cpu or not any(map(installed_version, PLUGINS))
    ):
        os.environ["XLA_FLAGS"] = f"{flags} {SCHEDULER_FLAG}=false".strip()


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def program_versions() -> dict[str, str]:
    """Return {name: version or value} of the software that affects results."""
    versions = {"python": platform.python_version()}
    versions |= {name: v for name in LIBRARIES if (v := installed_version(name))}
    versions |= {name: os.environ.get(name, "") for name in VARIABLES}
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(pathlib.Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return versions | {"rsearch": digest.hexdigest()}


@contextlib.contextmanager
def connected(
    coordinator: str = "",
    *,
    num_hosts: int = 0,
    host: int = -1,
    bind: str = "",
    stall_seconds: float = 0.0,
) -> Iterator[None]:
    """Connect the hosts within the block, and end all of them if one fails.

    The failing host sends its error to the heartbeat threads of the others. These give
    their process a grace period to end by itself, then end it with code 1, whatever it
    is waiting for. If a host is silent for `stall_seconds` (unless that is 0), the
    others end with code 75.
    """
    connect(coordinator, num_hosts=num_hosts, host=host, bind=bind)
    if _rank_and_size[1] == 1:
        yield
        return
    import jax
    from jax._src import distributed  # its key-value store has no public name

    peers = Peers(distributed.global_state.client, host_index(), stall_seconds)
    report = functools.partial(peers.report_failure, PREEMPTED)
    with preemption.before_signal_exit(report), peers.heartbeat():
        try:
            yield
        except OutageError:  # on this host only
            peers.report_failure(PREEMPTED)
            raise
        except PreemptedError:  # on all hosts at the same point
            if is_host0():
                peers.wait_for_exits(_rank_and_size[1] - 1)
            else:
                preemption.set_exit_callback(peers.report_exit)
            raise
        except BaseException as error:  # Control-C on one host also ends all of them
            if _is_raised_in(jax, error):  # perhaps a collective that lost a host
                peers.wait_for_stall()
            peers.report_failure(f"{type(error).__name__}: {error}")
            # At exit JAX waits minutes for the other hosts. They must end before this
            # one does, or their collectives would fail first, with an error that does
            # not name the cause.
            peers.exit_after_grace()
            raise


def _is_raised_in(package, error) -> bool:
    """Return whether the error was raised in the package's own code."""
    if isinstance(error, package.errors.JaxRuntimeError):
        return True
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    return pathlib.Path(file).is_relative_to(pathlib.Path(package.__file__).parent)


def check_preempted(*, on_all_hosts: bool = False) -> None:
    """Raise PreemptedError if a run has received a request to stop.

    Args:
        on_all_hosts: whether all hosts call this at the same point; then all stop if
            any of them has received a request. Otherwise a run of several hosts
            continues, because the other hosts would wait for this one.

    Raises:
        PreemptedError: the run stops here.
    """
    if num_hosts() == 1:
        preemption.raise_if_stopping()
    elif on_all_hosts and allgather_int(preemption.is_stop_requested()).any():
        raise PreemptedError


def host_index() -> int:
    """Return the index of this host, from 0."""
    return _rank_and_size[0]


def num_hosts() -> int:
    """Return the number of hosts that train together."""
    return _rank_and_size[1]


def is_host0() -> bool:
    """Return whether this is host 0, which writes the run's files and prints."""
    return host_index() == 0


def host_address() -> str:
    """Return the IP address at which the other hosts can reach this one.

    It is the address of the interface towards host 0 or, if the user did not name
    host 0, of the default route.
    """
    target = _coordinator or "192.0.2.1"  # reserved for documentation, never in use
    kind, *_, sockaddr = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(sockaddr)  # this chooses the interface, and sends nothing
        return probe.getsockname()[0]


def barrier(name: str) -> None:
    """Wait until all hosts have reached this call."""
    if num_hosts() > 1:
        from jax.experimental import multihost_utils

        wait_for_all_hosts()
        multihost_utils.sync_global_devices(name)


def allgather_bytes(payload: bytes) -> list[bytes]:
    """Return the payload of every host, [hosts]; all hosts call this together."""
    if num_hosts() == 1:
        return [payload]
    from jax.experimental import multihost_utils

    # Sizes are sent in two halves: integers on a device have 32 bits.
    halves = multihost_utils.process_allgather(
        np.array([len(payload) >> 24, len(payload) & 0xFFFFFF], np.int32)
    )
    sizes = [(int(high) << 24) + int(low) for high, low in halves.reshape(-1, 2)]
    payloads = [bytearray() for _ in sizes]
    for start in range(0, max(sizes), CHUNK_BYTES):
        chunk = np.frombuffer(payload[start : start + CHUNK_BYTES], np.uint8)
        remaining = min(CHUNK_BYTES, max(sizes) - start)
        buffer = np.zeros(min(size for size in SIZES if size >= remaining), np.uint8)
        buffer[: len(chunk)] = chunk
        chunks = multihost_utils.process_allgather(buffer)
        for i, size in enumerate(sizes):
            payloads[i] += chunks[i, : max(0, min(remaining, size - start))].tobytes()
    return [bytes(data) for data in payloads]


def allgather_int(number: int) -> np.ndarray:
    """Return the number of every host, [hosts] int32; all hosts call this together."""
    array = np.array([number], np.int32)
    if num_hosts() == 1:
        return array
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(array).reshape(-1)


def map_hosts(
    work: Callable[[Sequence], Sequence],
    items: Sequence,
    *,
    encode: Callable[[Sequence], bytes],
    decode: Callable[[bytes, Sequence], Sequence],
) -> list:
    """Return `work(items)`; each host works on its share, and all get all results.

    Items are dealt out in turn: the first to host 0, the second to host 1, and so on.
    They should cost about the same. If the work fails on a host, `connected` ends the
    others, which would wait for its results.

    Args:
        work: (items) -> one result for each item; called on every host, even with no
            items, so that it may run collectives.
        items: the items, the same on all hosts.
        encode: (results) -> bytes.
        decode: (bytes, the items of these results) -> results.

    Returns:
        A result for each item, in the order of the items.
    """
    if num_hosts() == 1:
        return list(work(items))
    payload = encode(work(items[host_index() :: num_hosts()]))
    wait_for_all_hosts()
    results = [None] * len(items)
    for number, reply in enumerate(allgather_bytes(payload)):
        share = slice(number, None, num_hosts())
        results[share] = decode(reply, items[share])
    return results


def map_hosts_json(work: Callable[[Sequence], Sequence], items: Sequence) -> list:
    """Call `map_hosts` for work whose results are JSON values."""
    return map_hosts(
        work,
        items,
        encode=lambda results: json.dumps(list(results)).encode(),
        decode=lambda data, _: json.loads(data),
    )


def on_host0(work: Callable[[], None]) -> None:
    """Call `work` on host 0 only; if it fails, all hosts raise an error.

    Raises:
        ValueError: `work` raised a ValueError on host 0.
        RuntimeError: `work` raised another exception; host 0 raises the original one.
    """
    failure = None
    message = b""
    if is_host0():
        try:
            work()
        except Exception as error:
            kind = b"\1" if type(error) is ValueError else b"\0"
            failure = error
            message = kind + _encode_error(error)
    if num_hosts() > 1:
        wait_for_all_hosts()
    message = allgather_bytes(message)[0]
    if failure is not None:
        raise failure
    if message:
        kind = ValueError if message[:1] == b"\1" else RuntimeError
        raise kind(f"host 0: {message[1:].decode()}")


def _encode_error(error) -> bytes:
    """Encode an error's text, in which a path may contain lone surrogates."""
    return str(error).encode(errors="backslashreplace")


@contextlib.contextmanager
def same_error_on_all(kind: type[Exception]) -> Iterator[None]:
    """Raise an error of this kind on every host if one host raises it in the block.

    All hosts run the same block. Otherwise the failing host would leave it while the
    others continued, and they would wait for each other at different places.

    Raises:
        Exception: an error of this kind, the host's own or another host's, once every
            host has reached the end of the block. Other exceptions are raised
            immediately.
    """
    failure = None
    try:
        yield
    except kind as error:
        failure = error
    host_name = f"host {host_index()}"
    message = b"" if failure is None else _encode_error(f"{host_name}: {failure}")
    messages = allgather_bytes(message)
    if failure is not None:
        raise failure
    if any(messages):
        raise kind(next(filter(None, messages)).decode())


def check_same_on_all(inputs: dict) -> None:
    """Refuse to run if the hosts' inputs differ: their computations would diverge.

    Args:
        inputs: {name: JSON value}, such as fingerprints.

    Raises:
        ValueError: names the input that differs, and the host.
    """
    replies = [json.loads(r) for r in allgather_bytes(json.dumps(inputs).encode())]
    for number, other_inputs in enumerate(replies):
        for name in sorted(replies[0].keys() | other_inputs.keys()):
            if replies[0].get(name) != other_inputs.get(name):
                raise ValueError(
                    f"{name} is {other_inputs.get(name)!r} on host {number}, "
                    f"{replies[0].get(name)!r} on host 0; all hosts need the same"
                )
