"""Have the hosts of a run meet before JAX connects them.

JAX's service ends every process of a run with SIGABRT if two hosts use the same number.
Host 0 therefore first listens at the coordinator's port itself until every number has
connected once; then JAX's service takes over the port. A host that connects later finds
that service in place of host 0, and ends without having registered with it.

Connections from other programs delay nothing: they are closed as soon as they send
anything but a host's line, or when that line is late.
"""

import contextlib
import errno
import json
import os
import selectors
import socket
import time

from rsearch.hosts.preemption import write_stderr

MAGIC = b"rsearch meeting 1 "  # begins each line, in both directions
ALL_INTERFACES = "0.0.0.0"  # every interface
MAX_LINE = 1024  # bytes
MAX_STRANGERS = 128  # connections that have not sent their line yet
LINE_SECONDS = 5.0  # how long a host may take to send its line after connecting
MEETING_SECONDS = 300.0  # how long to wait until all hosts have connected
TAKEN_SECONDS = 10.0  # how long an earlier run may take to release the port
RETRY_SECONDS = 0.2


def listen(address: str, port: int, *, bind: str = "") -> tuple[socket.socket, str]:
    """Listen as host 0 at the coordinator's port.

    Args:
        address: the coordinator's address. A name that resolves only to this host's
            loopback, as in Debian's /etc/hosts, means every interface.
        bind: address to listen at instead, such as that of an interface behind a
            translated address (NAT); "" = the coordinator's.

    Returns:
        The listening socket, and the HOST:PORT that JAX's service is to bind to.

    Raises:
        ValueError: the port is in use, or no interface has the address.
    """
    flag = f"--coordinator={address}:{port}"
    try:
        host = bind.strip("[]") or _own_address(address.strip("[]"), port)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:  # the latter of a malformed name
        # The numbers of errors about names are negative.
        code = getattr(error, "errno", None) or -1
        reason = os.strerror(code) if code > 0 else error
        hint = f"name another port on all hosts, --coordinator={address}:PORT"
        if code == errno.EADDRNOTAVAIL or code < 0:
            hint = "name an address of this host, --bind=ADDRESS"
        flag += f" --bind={bind}" if bind else ""
        raise ValueError(f"{flag}: {reason}; {hint}") from None
    bound_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if host == ALL_INTERFACES and not bind:
        write_stderr(
            f"host 0 listens at {bound_address}; --bind=ADDRESS names one interface"
        )
    return listener, bound_address


def _own_address(address, port):
    """Return the IP address that the coordinator's name resolves to on this host."""
    infos = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    addresses = [sockaddr[0] for *_, sockaddr in infos]
    other_addresses = [a for a in addresses if not a.startswith("127.") and a != "::1"]
    if other_addresses or address == "localhost" or address in addresses:
        return (other_addresses or addresses)[0]
    return ALL_INTERFACES


def receive_hosts(
    listener: socket.socket, num_hosts: int, *, seconds: float = MEETING_SECONDS
) -> None:
    """Wait as host 0 until every other host has connected, then release them all.

    Args:
        listener: the socket from `listen`; it is closed.

    Raises:
        ValueError: some hosts have not connected in time; names their numbers.
    """
    hosts: dict[int, tuple[socket.socket, str]] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        selector = stack.enter_context(selectors.DefaultSelector())
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        pending_lines: dict[socket.socket, _Line] = {}
        end = time.monotonic() + seconds
        while len(hosts) < num_hosts - 1:
            if time.monotonic() > end:
                missing = [str(n) for n in range(1, num_hosts) if n not in hosts]
                raise ValueError(
                    f"--num_hosts={num_hosts}: host {', '.join(missing)} has not "
                    f"connected within {seconds:g} s"
                )
            for key, _ in selector.select(RETRY_SECONDS):
                if key.fileobj.fileno() < 0:
                    continue  # closed in this round to make room for a newer one
                if key.fileobj is listener:
                    _accept(listener, selector, pending_lines, stack)
                elif key.fileobj in pending_lines:
                    _read(key.fileobj, selector, pending_lines, hosts, num_hosts)
                else:
                    _forget_disconnected(key.fileobj, selector, hosts)
            for connection, line in list(pending_lines.items()):
                if time.monotonic() > line.end:
                    _close(connection, selector, pending_lines)
        for connection, _ in hosts.values():
            _send(connection, {"go": True})


class _Line:
    """The bytes received from a connection, and when its line must be complete."""

    def __init__(self):
        self.received = b""
        self.end = time.monotonic() + LINE_SECONDS


def _accept(listener, selector, pending_lines, stack):
    try:
        connection, _ = listener.accept()
    except OSError:  # the peer has closed it, or no file descriptor is left
        return
    stack.callback(connection.close)
    connection.setblocking(False)
    if len(pending_lines) >= MAX_STRANGERS:
        _close(next(iter(pending_lines)), selector, pending_lines)  # the oldest
    pending_lines[connection] = _Line()
    selector.register(connection, selectors.EVENT_READ)


def _read(connection, selector, pending_lines, hosts, num_hosts):
    """Read more of a connection's line; admit the host, or close the connection."""
    line = pending_lines[connection]
    try:
        data = connection.recv(MAX_LINE)
    except BlockingIOError:
        return
    except OSError:
        data = b""
    line.received += data
    is_foreign = not line.received.startswith(MAGIC[: len(line.received)])
    if not data or is_foreign or len(line.received) > MAX_LINE:
        _close(connection, selector, pending_lines)
        return
    if not line.received.endswith(b"\n"):
        return
    message = _parse(line.received)
    refusal = _refuse(message, hosts, num_hosts)
    if refusal:
        _send(connection, {"refused": refusal})
        _close(connection, selector, pending_lines)
        return
    del pending_lines[connection]
    hosts[message["host"]] = connection, str(message.get("name", "?"))


def _refuse(message, hosts, num_hosts):
    """Return why a host may not join, or ""."""
    number = message.get("host")
    if type(number) is not int or not 0 < number < num_hosts:
        return f"--host={number}: the numbers are 0 to {num_hosts - 1}"
    if message.get("num_hosts") != num_hosts:
        count = message.get("num_hosts")
        return f"--num_hosts={count}, but host 0 has --num_hosts={num_hosts}"
    if number in hosts:
        return f"--host={number}: {hosts[number][1]} has already joined as this number"
    return ""


def _forget_disconnected(connection, selector, hosts):
    """Forget a host whose connection has ended, so that it may connect again."""
    with contextlib.suppress(BlockingIOError):
        try:
            is_lost = not connection.recv(MAX_LINE)
        except ConnectionError:
            is_lost = True
        if is_lost:
            numbers = [n for n, (other, _) in hosts.items() if other is connection]
            del hosts[numbers[0]]
            _close(connection, selector, {})


def _close(connection, selector, pending_lines):
    pending_lines.pop(connection, None)
    selector.unregister(connection)
    connection.close()


def _send(connection, message):
    with contextlib.suppress(OSError):  # the other end has closed the connection
        connection.settimeout(LINE_SECONDS)
        connection.sendall(MAGIC + json.dumps(message).encode() + b"\n")


def _parse(line):
    """Return the JSON object in a line, or {} if there is none."""
    try:
        message = json.loads(line.removeprefix(MAGIC))
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def join_run(
    address: str,
    port: int,
    *,
    host: int,
    num_hosts: int,
    seconds: float = MEETING_SECONDS,
    taken_seconds: float = TAKEN_SECONDS,
) -> None:
    """Connect to host 0, and wait until it releases all hosts.

    Args:
        seconds: how long to wait for host 0 and for the other hosts.
        taken_seconds: how long to keep trying while something else listens there.

    Raises:
        ValueError: host 0 does not answer, or refuses this host, or something else
            listens there, such as a run that has already begun.
    """
    flag = f"--coordinator={address}:{port}"
    line = {"host": host, "num_hosts": num_hosts, "name": socket.gethostname()}
    end, taken_since, reason = time.monotonic() + seconds, None, "no answer"
    while (now := time.monotonic()) < end:
        try:
            # The environment's proxies are not used: hosts share a network.
            connection = socket.create_connection(
                (address.strip("[]"), port), timeout=end - now
            )
        except (OSError, UnicodeError) as error:
            taken_since, reason = None, getattr(error, "strerror", None) or error
            time.sleep(RETRY_SECONDS)
            continue
        with connection:
            message = _exchange_lines(connection, line, end)
        if message.get("go"):
            return
        if refusal := message.get("refused"):
            raise ValueError(f"{flag}: host 0 refuses this host: {refusal}")
        # Another run that is ending or has begun, or another program.
        taken_since = taken_since or now
        if time.monotonic() - taken_since > taken_seconds:
            raise ValueError(
                f"{flag} --host={host}: no host 0 is waiting for other hosts there: "
                "a run has already begun, or another program listens"
            )
        time.sleep(RETRY_SECONDS)
    raise ValueError(
        f"{flag}: host 0 has not released host {host} within {seconds:g} s: {reason}"
    )


def _exchange_lines(connection, line, end):
    """Send this host's line, and return host 0's message; {} for any other answer."""
    reply = b""
    try:
        connection.sendall(MAGIC + json.dumps(line).encode() + b"\n")
        while not reply.endswith(b"\n") and len(reply) < MAX_LINE:
            connection.settimeout(max(0.001, end - time.monotonic()))
            data = connection.recv(MAX_LINE)
            reply += data
            if not data or not reply.startswith(MAGIC[: len(reply)]):
                return {}
    except OSError:
        return {}
    return _parse(reply)
