"""Hosts meet before JAX connects them: each host once, whoever else connects."""

import json
import socket
import subprocess
import threading
import time

import pytest

from rsearch.hosts import meeting
from rsearch.hosts.meeting import MAGIC, join_run, listen, receive_hosts
from tests.hosts.test_processes import free_port, start_hosts
from tests.small_run import ROOT, child_environment

STRANGERS = [
    b"",
    bytes(range(256)) * 8,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",  # the start of a TLS hello
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    MAGIC[:5],
    MAGIC + b"[" * 3000,
    MAGIC + b"not JSON\n",
    MAGIC + b'{"host": true}\n',
    MAGIC + b'{"host": 9, "num_hosts": 3}\n',
]


@pytest.fixture
def host0():
    """A function that starts host 0 and returns (port, list for its outcome)."""
    threads = []

    def start(num_hosts, **settings):
        listener, bound = listen("127.0.0.1", free_port())
        ended = []

        def receive():
            try:
                receive_hosts(listener, num_hosts, **settings)
                ended.append("go")
            except ValueError as error:
                ended.append(str(error))

        threads.append(threading.Thread(target=receive))
        threads[-1].start()
        return int(bound.rpartition(":")[2]), ended

    yield start
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def join_in_thread(port, host, num_hosts=3, **settings):
    """Join as a host in a thread; return (thread, list for its outcome)."""
    ended = []

    def work():
        try:
            join_run("127.0.0.1", port, host=host, num_hosts=num_hosts, **settings)
            ended.append("go")
        except ValueError as error:
            ended.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    return thread, ended


def connect(port, data=b""):
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(data)
    return connection


@pytest.mark.fault(85, "stranger's connection", "host twice")
def test_each_host_number_joins_once_whoever_else_connects(host0):
    port, ended = host0(3)
    unidentified = [connect(port, data) for data in STRANGERS for _ in range(3)]
    # The second to arrive is refused.
    both = [join_in_thread(port, 1), join_in_thread(port, 1)]
    end = time.monotonic() + 10
    while not any(ended for _, ended in both):
        assert time.monotonic() < end
        time.sleep(0.01)
    both.sort(key=lambda pair: bool(pair[1]))
    (first, first_end), (_, again_end) = both
    assert "--host=1" in again_end[0] and "already joined" in again_end[0]
    for other, wrong in ((3, "--host=3"), (0, "--host=0")):
        thread, end = join_in_thread(port, other)
        thread.join(10)
        assert wrong in end[0] and "0 to 2" in end[0]
    thread, end = join_in_thread(port, 2, num_hosts=4)
    thread.join(10)
    assert "--num_hosts=4" in end[0] and "--num_hosts=3" in end[0]
    last, last_end = join_in_thread(port, 2)
    for thread in (first, last):
        thread.join(10)
    assert (first_end, last_end) == (["go"], ["go"])
    for stranger in unidentified:
        stranger.close()
    assert ended in ([], ["go"])


@pytest.mark.fault(85, "stranger's connection")
def test_slow_strangers_do_not_keep_a_host_from_joining(host0, monkeypatch):
    monkeypatch.setattr(meeting, "MAX_STRANGERS", 8)
    port, _ = host0(2)
    slow = [connect(port, MAGIC[:3]) for _ in range(30)]
    thread, end = join_in_thread(port, 1, num_hosts=2)
    thread.join(10)
    assert end == ["go"]
    for connection in slow:
        connection.close()


def test_a_host_that_is_lost_before_all_have_joined_may_join_again(host0):
    port, _ = host0(3)
    line = {"host": 1, "num_hosts": 3, "name": "x"}
    lost = connect(port, MAGIC + json.dumps(line).encode() + b"\n")
    time.sleep(0.3)
    lost.close()
    time.sleep(0.3)
    pairs = [join_in_thread(port, 1), join_in_thread(port, 2)]
    for thread, end in pairs:
        thread.join(10)
        assert end == ["go"]


def test_a_host_that_does_not_join_is_named(host0):
    port, ended = host0(3, seconds=0.3)
    thread, end = join_in_thread(port, 2, seconds=1.5, taken_seconds=0.5)
    thread.join(10)
    assert "host 1 has not connected" in ended[0]
    assert f"127.0.0.1:{port}" in end[0] and "host 2" in end[0]


@pytest.mark.fault(85, "host twice")
@pytest.mark.parametrize("answer", [b"", b"\0\0\x24\x04\0\0\0\0\0", b"HTTP/1.1 400\n"])
def test_a_run_that_has_started_accepts_no_more_hosts(answer):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(answer)
                    connection.recv(1000)

        threading.Thread(target=serve, daemon=True).start()
        port = server.getsockname()[1]
        thread, end = join_in_thread(port, 1, taken_seconds=0.3)
        thread.join(10)
        server.shutdown(socket.SHUT_RDWR)
    assert "--host=1" in end[0] and "already begun" in end[0]


@pytest.mark.fault(85, "address")
def test_host_0_listens_at_the_given_address():
    port = free_port()
    for address, bind, expected in (
        ("127.0.0.1", "", "127.0.0.1"),
        ("[::1]", "", "[::1]"),
        ("10.255.255.1", "127.0.0.2", "127.0.0.2"),
    ):
        listener, bound = listen(address, port, bind=bind)
        with listener:
            assert bound == f"{expected}:{port}"
            assert listener.getsockname()[:2] == (expected.strip("[]"), port)
    for address, bind in (("192.0.2.1", ""), ("127.0.0.1", "192.0.2.1")):
        with pytest.raises(ValueError, match=r"192.0.2.1.* --bind=ADDRESS"):
            listen(address, port, bind=bind)
    for address, bind in (("a..b", ""), ("127.0.0.1", "a..b")):
        with pytest.raises(ValueError, match=r"a\.\.b:.* --bind=ADDRESS"):
            listen(address, port, bind=bind)


PROGRAM = """
import sys, time
from rsearch.config.recipes import parse_flags, run_command
from rsearch.hosts import preemption, processes

def work(argv):
    flags = parse_flags(argv, flags=processes.FLAGS)
    with preemption.handle_signals(10.0):
        with processes.connected(**flags, stall_seconds=12.0):
            print("connected", flush=True)
            end = time.monotonic() + 20
            while processes.allgather_int(int(time.monotonic() < end)).any():
                time.sleep(0.1)

preemption.exit_process(run_command(work))
"""


@pytest.mark.fault(85, "stranger's connection", "host twice", "proxy")
@pytest.mark.slow
def test_strangers_that_connect_do_not_disturb_a_run(monkeypatch):
    """By then JAX's service owns the port. The proxy, a dead one, must be bypassed."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    hosts = start_hosts("-c", PROGRAM)
    try:
        for host in hosts:
            assert "connected" in [host.stdout.readline() for _ in range(2)][-1]
        flag = next(word for word in hosts[0].args if "--coordinator" in word)
        port = int(flag.rpartition(":")[2])
        unidentified = [connect(port, data) for data in STRANGERS for _ in range(20)]
        for number, wrong in ((0, "in use"), (1, "already begun")):
            began = time.monotonic()
            again = subprocess.run(
                [*hosts[number].args],
                cwd=ROOT,
                env={**child_environment(), "PATH": "", "http_proxy": ""},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert again.returncode == 2 and wrong in again.stderr
            assert time.monotonic() - began < 30
        for host in hosts:
            _, error = host.communicate(timeout=120)
            assert host.returncode == 0, error
        for stranger in unidentified:
            stranger.close()
    finally:
        for host in hosts:
            host.kill()
