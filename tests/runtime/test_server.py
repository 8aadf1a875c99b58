"""The JSON service: which requests it answers, and errors of clients and users."""

import contextlib
import http.client
import json
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

from rsearch.runtime.server import JsonServer, RefusedError, open_to_all
from tests.running_server import running
from tests.small_run import ROOT

ROUTES = {
    ("GET", "/health"): lambda body: {"status": "ok"},
    ("GET", "/quick"): lambda body: {"status": "ok"},
    ("GET", "/open"): open_to_all(lambda body: {"status": "ok"}),
}


@contextlib.contextmanager
def serving(routes=None, **settings):
    """A service in a thread, until the block ends."""
    with running(JsonServer("127.0.0.1", 0, routes or ROUTES, **settings)) as server:
        yield server


def ask(server, method="POST", path="/search", body=None, **headers):
    """Send one request; return (status, JSON)."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=60)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json"} if method == "POST" else {}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, raw if method == "POST" else None, sent)
    reply = connection.getresponse()
    actual = reply.status, json.loads(reply.read())
    connection.close()
    return actual


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", 70_000), ("127.0.0.1", -1), ("no.host.at.all", 0)]
)
def test_an_address_that_cannot_be_bound_is_a_users_error(host, port):
    with pytest.raises(ValueError, match=f"cannot listen at {host}:{port}"):
        JsonServer(host, port, {}, token="t")


@pytest.mark.fault(44, "of a service")
def test_a_taken_port_is_a_users_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"127.0.0.1:{port}: Address already"):
            JsonServer("127.0.0.1", port, {})


def test_an_aborted_connection_leaves_no_traceback(capsys):
    with serving() as server:
        for _ in range(3):
            broken = socket.create_connection(server.server_address[:2])
            # Close with a reset, while the server waits for the request's first line.
            broken.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            broken.sendall(b"POST /sea")
            broken.close()
        assert ask(server, "GET", "/health")[0] == 200
        time.sleep(0.2)
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.fault(49, "strangers")
def test_with_a_token_only_requests_that_carry_it_are_answered():
    with serving(token="s3cret") as server:
        assert ask(server, "GET", "/health")[0] == 401
        wrong = ask(server, "GET", "/health", Authorization="Bearer s3cret2")
        assert wrong[0] == 401
        right = {"Authorization": "Bearer s3cret", "Host": "any.example"}
        assert ask(server, "GET", "/health", **right)[0] == 200
        assert ask(server, "GET", "/open")[0] == 200
        assert ask(server, "POST", "/open")[0] == 401


@contextlib.contextmanager
def held(**settings):
    """(service, is answering, go on): a service that answers once `go_on` is set."""
    is_answering, go_on = threading.Event(), threading.Event()

    def slow(body):
        is_answering.set()
        assert go_on.wait(30)
        return {"status": "late"}

    routes = {**ROUTES, ("GET", "/slow"): slow}
    with serving(routes, **settings) as server:
        try:
            yield server, is_answering, go_on
        finally:
            go_on.set()


@pytest.mark.fault(49, "many at once")
def test_excess_requests_are_refused_immediately():
    with held(max_waiting=1) as (server, is_answering, go_on):
        actual = []
        asking = threading.Thread(
            target=lambda: actual.append(ask(server, "GET", "/slow"))
        )
        asking.start()
        assert is_answering.wait(30)
        many = [ask(server, "GET", "/quick") for _ in range(20)]
        assert {status for status, _ in many} == {503}
        assert ask(server, "GET", "/open")[0] == 200
        go_on.set()
        asking.join(30)
        assert actual == [(200, {"status": "late"})]
        assert ask(server, "GET", "/quick")[0] == 200  # there is room again


@pytest.mark.fault(49, "client gone")
def test_a_client_that_disconnects_before_its_reply_frees_its_place(capsys):
    with held(max_waiting=1) as (server, is_answering, go_on):
        gone = socket.create_connection(server.server_address[:2])
        gone.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert is_answering.wait(30)
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
        go_on.set()
        end = time.monotonic() + 30
        while ask(server, "GET", "/quick")[0] == 503 and time.monotonic() < end:
            time.sleep(0.01)
        assert ask(server, "GET", "/quick")[0] == 200
    assert "Traceback" not in capsys.readouterr().err


def test_a_request_in_progress_is_answered_before_the_service_ends():
    actual = []
    with held() as (server, is_answering, go_on):
        asking = threading.Thread(
            target=lambda: actual.append(ask(server, "GET", "/slow"))
        )
        asking.start()
        assert is_answering.wait(30)
        server.shutdown()
        go_on.set()
    asking.join(30)
    assert actual == [(200, {"status": "late"})]


def test_a_body_that_does_not_arrive_times_out():
    with serving({("POST", "/x"): dict}, timeout_seconds=0.2) as server:
        slow = socket.create_connection(server.server_address[:2], timeout=30)
        head = b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
        slow.sendall(head + b"Content-Type: application/json\r\n\r\n{")
        assert slow.recv(100).startswith(b"HTTP/1.0 408")
        slow.close()


@pytest.mark.parametrize("head", [b"GE", b"POST /x HTTP/1.1\r\nContent-Length: 99\r\n"])
def test_a_request_that_arrives_byte_by_byte_times_out(head):
    with serving({("POST", "/x"): dict}, timeout_seconds=0.5) as server:
        slow = socket.create_connection(server.server_address[:2], timeout=30)
        started = time.monotonic()
        with slow, contextlib.suppress(OSError):
            slow.sendall(head)
            while time.monotonic() < started + 10:
                slow.sendall(b"a")
                time.sleep(0.05)
        assert time.monotonic() < started + 5
        assert ask(server, "POST", "/x", {})[0] == 200


def test_the_sender_of_a_body_that_is_refused_unread_gets_the_reason():
    """http.client sends the whole body before it reads any of the reply."""
    with serving({("POST", "/x"): dict}, max_body_bytes=4096) as server:
        status, told = ask(server, path="/x", body=b"x" * 10_000_000)
        assert (status, told) == (413, {"error": "the body exceeds 4096 bytes"})


@pytest.mark.fault(49, "SIGTERM")
def test_sigterm_lets_a_request_in_progress_finish():
    script = (
        "import time; from rsearch.runtime.server import JsonServer\n"
        "def slow(body): print('asked', flush=True); time.sleep(1.5); return {'a': 1}\n"
        "server = JsonServer('127.0.0.1', 0, {('GET', '/slow'): slow})\n"
        "print(server.server_address[1], flush=True); server.serve()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(process.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert process.stdout.readline() == "asked\n"
            process.send_signal(signal.SIGTERM)
            received = b"".join(iter(lambda: client.recv(1000), b""))
        assert received.startswith(b"HTTP/1.0 200") and received.endswith(b'{"a": 1}')
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.stdout.close()


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)],
)
def test_a_signal_interrupts_a_service_that_is_loading(number, error):
    server = JsonServer("127.0.0.1", 0, {})
    with pytest.raises(error) as caught:
        server.serve(lambda: signal.raise_signal(number))
    assert error is KeyboardInterrupt or caught.value.code == 0


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)],
)
def test_a_service_that_is_loading_stops_even_if_a_library_drops_the_signal(
    number, error
):
    """Python drops what is raised in a callback of the garbage collector."""

    def load():
        with contextlib.suppress(BaseException):
            signal.raise_signal(number)

    server = JsonServer("127.0.0.1", 0, {})
    timer = threading.Timer(5.0, server.shutdown)  # in case it is not stopped
    timer.start()
    with pytest.raises(error):
        server.serve(load)
    timer.cancel()


@pytest.mark.fault(90, "an answer that takes too long")
def test_sigterm_refuses_a_request_that_cannot_be_answered_in_time():
    script = (
        "import time; from rsearch.runtime.server import JsonServer\n"
        "def slow(body): print('asked', flush=True); time.sleep(60)\n"
        "routes = {('GET', '/slow'): slow}\n"
        "server = JsonServer('127.0.0.1', 0, routes, stop_seconds=0.4)\n"
        "print(server.server_address[1], flush=True); server.serve()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            port = int(process.stdout.readline())
            with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
                client.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert process.stdout.readline() == "asked\n"
                process.send_signal(signal.SIGTERM)
                received = b"".join(iter(lambda: client.recv(1000), b""))
            assert received.startswith(b"HTTP/1.0 503 the service")
            assert json.loads(received.partition(b"\r\n\r\n")[2]).keys() == {"error"}
            assert process.wait(10) == 0
        finally:
            process.kill()


@pytest.mark.fault(90, "SIGTERM")
def test_sigterm_ends_a_service_that_still_works_for_clients_that_have_left():
    script = (
        "import threading, time; from rsearch.runtime.server import JsonServer\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "server = JsonServer('127.0.0.1', 0, {}, stop_seconds=0.4)\n"
        "server.is_busy = lambda: True\n"
        "server.serve(lambda: print('ready', flush=True))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.5)  # it is not loading any more
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_while_a_service_is_loading_its_missing_routes_are_not_ready():
    server = JsonServer("127.0.0.1", 0, ROUTES)
    replies = []

    def prepare():
        replies.extend(ask(server, *asked)[0] for asked in both)
        threading.Timer(0.2, server.shutdown).start()

    both = ("GET", "/health"), ("POST", "/search")
    server.serve(prepare)
    assert replies == [200, 503]


@pytest.mark.parametrize(
    ("descriptors", "max_waiting", "connections", "is_noted"),
    [
        (1 << 20, 256, 512, False),
        (1 << 20, 1000, 2000, False),
        (resource.RLIM_INFINITY, 1000, 2000, False),
        (1024, 1000, 512, True),
    ],
)
def test_as_many_requests_can_be_in_progress_as_wanted_or_a_line_says_why_not(
    descriptors, max_waiting, connections, is_noted, monkeypatch, capsys
):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    server = JsonServer("127.0.0.1", 0, {}, max_waiting=max_waiting)
    server.server_close()
    assert server.max_connections == connections
    assert (f"ulimit -n is {descriptors}" in capsys.readouterr().err) == is_noted


@pytest.mark.parametrize(
    ("host", "start"), [("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:")]
)
def test_the_address_of_a_service_is_a_url(host, start):
    try:
        server = JsonServer(host, 0, {})
    except ValueError:
        pytest.skip(f"this machine has no {host}")
    server.server_close()
    assert server.url == f"{start}{server.server_address[1]}"


@pytest.mark.parametrize(
    ("reason", "phrase"),
    [
        ("one\r\nSet-Cookie: a=b", "one Set-Cookie: a=b"),
        ("caf\u00e9 \U0001f600 \x00\x1b[2J \ud83d", "caf? ? ??[2J ?"),
        ("x" * 5000, "x" * 200),
        ("", "Bad Request"),
    ],
)
def test_a_reason_becomes_one_line_of_the_status(reason, phrase):
    def refuse(body):
        raise RefusedError(400, reason)

    with serving({("GET", "/x"): refuse}) as server:
        connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
        connection.request("GET", "/x")
        reply = connection.getresponse()
        assert (reply.status, reply.reason) == (400, phrase)
        assert reply.getheader("Set-Cookie") is None
        assert json.loads(reply.read()) == {"error": reason}
        connection.close()


def test_a_route_that_ends_in_a_name_accepts_any_valid_name():
    routes = {("POST", "/of_{name}"): lambda body: {"a": 1}}
    with serving(routes) as server:
        for path, status in {
            "/of_wiki-18": 200,
            "/of_a.b_c?x=1": 200,
            "/of_": 404,
            "/of_a/b": 404,
            "/of_%2e": 404,
            "/of_" + "a" * 65: 404,
        }.items():
            assert ask(server, path=path, body={})[0] == status, path
        assert ask(server, "GET", "/of_a")[0] == 405


def test_a_body_in_chunks_is_refused():
    with serving({("POST", "/x"): dict}) as server:
        connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
        chunks = iter([b"x" * 100_000] * 20)
        head = {"Content-Type": "application/json"}
        connection.request("POST", "/x", chunks, head, encode_chunked=True)
        assert connection.getresponse().status == 411
        connection.close()


def test_a_body_that_ends_early_is_refused():
    with serving({("POST", "/x"): dict}) as server:
        client = socket.create_connection(server.server_address[:2], timeout=30)
        head = b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
        client.sendall(head + b"Content-Type: application/json\r\n\r\n{}")
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100).startswith(b"HTTP/1.0 400 the body is shorter")
        client.close()


def test_an_exception_is_an_internal_error_that_tells_clients_nothing(capsys):
    def broken(body):
        raise RuntimeError("path of a secret")

    with serving({("GET", "/health"): broken}) as server:
        told = ask(server, "GET", "/health")
        assert told == (500, {"error": "internal error"})
    assert "path of a secret" in capsys.readouterr().err
