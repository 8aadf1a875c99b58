"""Let the hosts of a run meet, before JAX connects them.

JAX's service ends every process of a run with SIGABRT where a host's number comes
twice. Host 0 therefore listens at the coordinator's port itself first, until each
number has come once; then JAX's service takes the port. A host that comes later finds
that service in place of host 0, and ends without having spoken to it as a host.

A stranger's connection keeps nobody waiting: it is closed as soon as it sends anything
but a host's line, or when that is late.
"""

import contextlib
import errno
import json
import os
import selectors
import socket
import time

from rsearch.hosts.preemption import write_stderr

MAGIC = b"rsearch meeting 1 "  # begins each line, of a host and of host 0
ANY = "0.0.0.0"  # every interface
MAX_LINE = 1024  # bytes
MAX_STRANGERS = 128  # connections that have not sent their line yet
LINE_SECONDS = 5.0  # for a host's line, once it has connected
MEETING_SECONDS = 300.0  # until all hosts have come
TAKEN_SECONDS = 10.0  # that an earlier run may take to let the port go
RETRY_SECONDS = 0.2


def listen(address: str, port: int, *, bind: str = "") -> tuple[socket.socket, str]:
    """Listen where host 0 is told to.

    Args:
        address: of the coordinator. A name that this host knows as its loopback alone,
            as Debian writes its /etc/hosts, means every interface.
        port: of the coordinator.
        bind: address to listen at in its place, such as that of an interface behind a
            translated address; "" = the coordinator's.

    Returns:
        The listening socket, and the HOST:PORT that JAX's service binds to.

    Raises:
        ValueError: the port is in use, or no interface has the address.
    """
    flag = f"--coordinator={address}:{port}"
    try:
        host = bind.strip("[]") or _own_address(address.strip("[]"), port)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None)
        is_name = isinstance(error, socket.gaierror)
        reason = os.strerror(number) if number and not is_name else error
        hint = f"name another port on all hosts, --coordinator={address}:PORT"
        if number == errno.EADDRNOTAVAIL or is_name:
            hint = "name an address of this host, --bind=ADDRESS"
        flag += f" --bind={bind}" if bind else ""
        raise ValueError(f"{flag}: {reason}; {hint}") from None
    bound = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if host == ANY and not bind:
        write_stderr(f"host 0 listens at {bound}; --bind=ADDRESS names one interface")
    return listener, bound


def _own_address(address, port):
    """Return the IP address that a coordinator's name has here."""
    infos = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    addresses = [sockaddr[0] for *_, sockaddr in infos]
    others = [a for a in addresses if not a.startswith("127.") and a != "::1"]
    if others or address == "localhost" or address in addresses:
        return (others or addresses)[0]
    return ANY


def receive_hosts(
    listener: socket.socket, num_hosts: int, *, seconds: float = MEETING_SECONDS
) -> None:
    """Wait as host 0 until each of the others has come once, then let all go on.

    Args:
        listener: from `listen`; it is closed.
        num_hosts: of the run, host 0 included.
        seconds: to wait at most.

    Raises:
        ValueError: hosts are missing at the end; names their numbers.
    """
    hosts: dict[int, tuple[socket.socket, str]] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        selector = stack.enter_context(selectors.DefaultSelector())
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        strangers: dict[socket.socket, _Line] = {}
        end = time.monotonic() + seconds
        while len(hosts) < num_hosts - 1:
            if time.monotonic() > end:
                missing = [str(n) for n in range(1, num_hosts) if n not in hosts]
                raise ValueError(
                    f"--num_hosts={num_hosts}: host {', '.join(missing)} has not come "
                    f"within {seconds:g} s"
                )
            for key, _ in selector.select(RETRY_SECONDS):
                if key.fileobj.fileno() < 0:
                    continue  # closed in this round, for one that came later
                if key.fileobj is listener:
                    _accept(listener, selector, strangers, stack)
                elif key.fileobj in strangers:
                    _read(key.fileobj, selector, strangers, hosts, num_hosts)
                else:
                    _drop_lost(key.fileobj, selector, hosts)
            for connection, line in list(strangers.items()):
                if time.monotonic() > line.end:
                    _close(connection, selector, strangers)
        for connection, _ in hosts.values():
            _send(connection, {"go": True})


class _Line:
    """The bytes of a connection so far, and when its line must be complete."""

    def __init__(self):
        self.received = b""
        self.end = time.monotonic() + LINE_SECONDS


def _accept(listener, selector, strangers, stack):
    try:
        connection, _ = listener.accept()
    except OSError:  # it has gone again, or there is no descriptor for it
        return
    stack.callback(connection.close)
    connection.setblocking(False)
    if len(strangers) >= MAX_STRANGERS:
        _close(next(iter(strangers)), selector, strangers)  # the oldest
    strangers[connection] = _Line()
    selector.register(connection, selectors.EVENT_READ)


def _read(connection, selector, strangers, hosts, num_hosts):
    """Read a part of a connection's line; admit the host, or close the connection."""
    line = strangers[connection]
    try:
        data = connection.recv(MAX_LINE)
    except BlockingIOError:
        return
    except OSError:
        data = b""
    line.received += data
    is_strange = not line.received.startswith(MAGIC[: len(line.received)])
    if not data or is_strange or len(line.received) > MAX_LINE:
        _close(connection, selector, strangers)
        return
    if not line.received.endswith(b"\n"):
        return
    message = _parse(line.received)
    refusal = _refuse(message, hosts, num_hosts)
    if refusal:
        _send(connection, {"refused": refusal})
        _close(connection, selector, strangers)
        return
    del strangers[connection]
    hosts[message["host"]] = connection, str(message.get("name", "?"))


def _refuse(message, hosts, num_hosts):
    """Return why a host may not take part, or ""."""
    number = message.get("host")
    if type(number) is not int or not 0 < number < num_hosts:
        return f"--host={number}: there are the numbers 0 to {num_hosts - 1}"
    if message.get("num_hosts") != num_hosts:
        count = message.get("num_hosts")
        return f"--num_hosts={count}, but host 0 has --num_hosts={num_hosts}"
    if number in hosts:
        return f"--host={number}: {hosts[number][1]} has come with this number before"
    return ""


def _drop_lost(connection, selector, hosts):
    """Forget a host whose connection has ended: it may come again."""
    with contextlib.suppress(BlockingIOError):
        try:
            is_lost = not connection.recv(MAX_LINE)
        except ConnectionError:
            is_lost = True
        if is_lost:
            numbers = [n for n, (other, _) in hosts.items() if other is connection]
            del hosts[numbers[0]]
            _close(connection, selector, {})


def _close(connection, selector, strangers):
    strangers.pop(connection, None)
    selector.unregister(connection)
    connection.close()


def _send(connection, message):
    with contextlib.suppress(OSError):  # its sender has gone
        connection.setblocking(True)
        connection.settimeout(LINE_SECONDS)
        connection.sendall(MAGIC + json.dumps(message).encode() + b"\n")


def _parse(line):
    """Return the object of a line, {} where it is none."""
    try:
        message = json.loads(line.removeprefix(MAGIC))
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def join(
    address: str,
    port: int,
    *,
    host: int,
    num_hosts: int,
    seconds: float = MEETING_SECONDS,
    taken_seconds: float = TAKEN_SECONDS,
) -> None:
    """Come to host 0, and wait until it lets all hosts go on.

    Args:
        address, port: of the coordinator.
        host: number of this host.
        num_hosts: of the run.
        seconds: to wait for host 0 and for the other hosts.
        taken_seconds: to wait while something else listens there.

    Raises:
        ValueError: host 0 does not come, or refuses this host, or something else
            listens there, such as a run that has begun.
    """
    flag = f"--coordinator={address}:{port}"
    line = {"host": host, "num_hosts": num_hosts, "name": socket.gethostname()}
    end, taken_since, reason = time.monotonic() + seconds, None, "no answer"
    while (now := time.monotonic()) < end:
        try:
            # Not through the environment's proxies: hosts share a network.
            connection = socket.create_connection(
                (address.strip("[]"), port), timeout=end - now
            )
        except (OSError, OverflowError) as error:
            taken_since, reason = None, getattr(error, "strerror", None) or error
            time.sleep(RETRY_SECONDS)
            continue
        with connection:
            message = _ask(connection, line, end)
        if message.get("go"):
            return
        if refused := message.get("refused"):
            raise ValueError(f"{flag}: host 0 refuses this host: {refused}")
        # A run that is ending, its successor, or a stranger.
        taken_since = taken_since or now
        if time.monotonic() - taken_since > taken_seconds:
            raise ValueError(
                f"{flag} --host={host}: what answers there is no host 0 that waits "
                "for others: a run has begun there, or another program listens"
            )
        time.sleep(RETRY_SECONDS)
    raise ValueError(
        f"{flag}: host 0 has not let host {host} begin within {seconds:g} s: {reason}"
    )


def _ask(connection, line, end):
    """Send this host's line, and return host 0's message; {} of anything else."""
    received = b""
    try:
        connection.sendall(MAGIC + json.dumps(line).encode() + b"\n")
        while not received.endswith(b"\n") and len(received) < MAX_LINE:
            connection.settimeout(max(0.001, end - time.monotonic()))
            data = connection.recv(MAX_LINE)
            received += data
            if not data or not received.startswith(MAGIC[: len(received)]):
                return {}
    except OSError:
        return {}
    return _parse(received)
