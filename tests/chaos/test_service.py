"""Both services under slow, idle, greedy or too many clients, and under SIGTERM.

Clients are plain sockets; only `made` and `serving` depend on the server's class.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import threading
import time
import tracemalloc

import pytest

from rsearch.hosts.preemption import OutageError
from rsearch.runtime.server import JsonServer
from rsearch.types import Passage
from tests.running_server import PASSAGES, routes, running

ASKED = {
    "tool": ("/search", {"question": "a"}, {"questions": ["a"] * 64}),
    "retriever": ("/retrieve", {"query": "a"}, {"queries": ["a"] * 64, "topk": 1}),
}
BIG = Passage("big", "T\n" + "x" * (5 << 20), 1.0)  # larger than a socket's buffers
LARGE = Passage("large", "T\n" + "x" * (1 << 16), 1.0)


@pytest.fixture(params=ASKED)
def name(request):
    """Return the name of the service under test."""
    return request.param


def find_big(queries):
    return [(BIG,) for _ in queries]


def find_large(queries):
    return [(LARGE,) for _ in queries]


def made(name, search, **settings):
    """Return a service that is not serving yet."""
    return JsonServer("127.0.0.1", 0, routes(name, search), **settings)


@contextlib.contextmanager
def serving(name, search=lambda queries: [PASSAGES for _ in queries], **settings):
    """Serve within the block; yields the service's port."""
    with running(made(name, search, **settings)) as server:
        yield server.server_address[1]


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def request(path, body=None):
    """Return the bytes of a request."""
    raw = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
    return f"{head}\r\n".encode() + raw


def reply_of(client):
    """Return (status, body) of the bytes received until the server closes."""
    received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else None, body


def ask(port, path, body=None):
    with connect(port) as client:
        client.sendall(request(path, body))
        return reply_of(client)


def ask_until_free(port, path, body):
    """Call `ask`, and repeat it while the service answers that it is busy."""
    end = time.monotonic() + 20
    while (reply := ask(port, path, body))[0] == 503 and time.monotonic() < end:
        time.sleep(0.01)
    return reply


class Held:
    """A search that waits until `go_on` is set."""

    def __init__(self):
        self.is_searching, self.go_on = threading.Event(), threading.Event()

    def __call__(self, queries):
        self.is_searching.set()
        assert self.go_on.wait(30)
        return [PASSAGES for _ in queries]


@contextlib.contextmanager
def held(name, **settings):
    """Yield (port, search, client) of a service that is searching for the client."""
    search = Held()
    path, body, _ = ASKED[name]
    with serving(name, search, **settings) as port, connect(port) as client:
        client.sendall(request(path, body))
        try:
            assert search.is_searching.wait(20)
            yield port, search, client
        finally:
            search.go_on.set()


def idle(port, name):
    return connect(port)


def half_a_head(port, name):
    client = connect(port)
    client.sendall(b"POST /retr")
    return client


def half_a_body(port, name):
    path, body, _ = ASKED[name]
    client = connect(port)
    client.sendall(request(path, body)[:-3])
    return client


def unread_reply(port, name):
    path, body, _ = ASKED[name]
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(request(path, body))
    return client


@pytest.mark.fault(90, "idle connections", "slow bodies", "bounded connections")
@pytest.mark.parametrize("slow", [idle, half_a_head, half_a_body, unread_reply])
def test_slow_clients_do_not_keep_others_from_an_answer(name, slow):
    limits = dict(max_connections=4, timeout_seconds=1.5, stop_seconds=0.8)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(serving(name, find_big, **limits))
        before = threading.active_count()
        for _ in range(6):
            stack.enter_context(slow(port, name))
        assert ask(port, "/health")[0] == 200
        assert (
            threading.active_count() <= before + 4 + 4
        )  # including those that are ending
        assert ask_until_free(port, *ASKED[name][:2])[0] == 200


@pytest.mark.fault(90, "fewer than the descriptors")
def test_the_connection_limit_is_below_the_process_limit_on_open_files(name):
    resource = pytest.importorskip("resource")
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    server = made(name, find_big, max_connections=1 << 40, max_waiting=1 << 40)
    server.server_close()
    assert limit == resource.RLIM_INFINITY or server.max_connections < limit


@pytest.mark.fault(90, "the body comes first")
def test_a_request_counts_as_waiting_only_once_it_has_arrived_completely(name):
    path, body, _ = ASKED[name]
    with contextlib.ExitStack() as stack:
        limits = dict(max_waiting=1, timeout_seconds=0.5)
        port = stack.enter_context(serving(name, **limits))
        slow = [stack.enter_context(half_a_body(port, name)) for _ in range(3)]
        assert ask(port, path, body)[0] == 200
        slow[0].sendall(request(path, body)[-3:])
        assert reply_of(slow[0])[0] == 200
        assert [reply_of(client)[0] for client in slow[1:]] == [408, 408]


@pytest.mark.fault(90, "health")
def test_health_is_answered_while_other_requests_are_refused(name):
    path, body, _ = ASKED[name]
    with held(name, max_waiting=1) as (port, search, client):
        assert ask(port, path, body)[0] == 503
        assert ask(port, "/health") == (200, b'{"status": "ok"}')
        search.go_on.set()
        assert reply_of(client)[0] == 200


def test_an_outage_is_answered_with_503(name):
    """OutageError is not an Exception; the client must get a reply nevertheless."""

    def search(queries):
        raise OutageError("unreachable")

    with serving(name, search) as port:
        status, reply = ask(port, *ASKED[name][:2])
        assert status == 503 and json.loads(reply)["error"]
        assert ask(port, "/health")[0] == 200


@pytest.mark.fault(90, "capped replies")
def test_a_huge_reply_is_refused_before_it_is_built(name):
    path, single, many = ASKED[name]
    with serving(name, find_large, max_reply_bytes=1 << 20) as port:
        if (
            name == "retriever"
        ):  # the tool's rollouts take far more memory than its reply
            tracemalloc.start()
        try:
            status, reply = ask(port, path, many)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert status == 413 and str(1 << 20) in json.loads(reply)["error"]
        assert peak < 1 << 20
        status, reply = ask(port, path, single)
        assert status == 200 and len(reply) > len(LARGE.contents)


@pytest.mark.fault(90, "SIGTERM")
def test_sigterm_ends_idle_connections_and_answers_every_request(name):
    """The signal arrives while connections of each kind are open."""
    search = Held()
    path, body, _ = ASKED[name]
    server = made(name, search, stop_seconds=4.0)
    port = server.server_address[1]
    ended, seconds = {}, []

    def clients():
        with contextlib.ExitStack() as stack:
            stack.callback(search.go_on.set)
            quiet = {"idle": idle, "head": half_a_head, "body": half_a_body}
            opened = {
                kind: [stack.enter_context(connected(port, name)) for _ in range(3)]
                for kind, connected in quiet.items()
            }
            asking = stack.enter_context(connect(port))
            asking.sendall(request(path, body))
            assert search.is_searching.wait(20)
            # Half of the burst is sent before the signal and may not have been
            # accepted yet; the other half is sent after it.
            burst = [stack.enter_context(connect(port)) for _ in range(20)]
            for client in burst[:10]:
                client.sendall(request("/health"))
            began = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
            for client in burst[10:]:
                client.sendall(request("/health"))
            for kind, some in opened.items():
                ended[kind] = [reply_of(client)[0] for client in some]
            ended["burst"] = [reply_of(client)[0] for client in burst]
            search.go_on.set()
            ended["asking"] = [reply_of(asking)[0]]
            seconds.append(time.monotonic() - began)

    thread = threading.Thread(target=clients)
    thread.start()
    try:
        server.serve()  # in the thread that receives signals
    finally:
        search.go_on.set()
        thread.join(20)
    assert ended == {
        "idle": [None] * 3,  # closed, not reset
        "head": [503] * 3,
        "body": [503] * 3,
        "burst": [200] * 20,
        "asking": [200],
    }
    assert seconds[0] < 4
    with pytest.raises(ConnectionRefusedError):
        connect(port)


def test_a_client_that_resets_its_connection_does_no_harm(name, capsys):
    path, body, _ = ASKED[name]
    with held(name, max_waiting=1) as (port, search, client):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        search.go_on.set()
        assert ask_until_free(port, path, body)[0] == 200
    assert "Traceback" not in capsys.readouterr().err
