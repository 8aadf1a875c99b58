"""The JSON service: who is answered, and what a client or a user can do wrong."""

import contextlib
import http.client
import json
import socket
import struct
import threading
import time

import pytest

from rsearch.serving import JsonServer

ROUTES = {("GET", "/health"): lambda body: {"status": "ok"}}


@contextlib.contextmanager
def serving(routes=None, **settings):
    """A service in a thread, until the block ends."""
    server = JsonServer("127.0.0.1", 0, routes or ROUTES, **settings)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
        assert not thread.is_alive()


def ask(server, method="POST", path="/search", body=None, **headers):
    """(status, JSON) of one request."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=60)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json"} if method == "POST" else {}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, raw if method == "POST" else None, sent)
    reply = connection.getresponse()
    found = reply.status, json.loads(reply.read())
    connection.close()
    return found


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", 70_000), ("127.0.0.1", -1), ("no.host.at.all", 0)]
)
def test_where_nobody_can_listen_is_a_users_error(host, port):
    with pytest.raises(ValueError, match=f"cannot listen at {host}:{port}"):
        JsonServer(host, port, {}, token="t")


def test_a_taken_port_is_a_users_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"127.0.0.1:{port}: Address already"):
            JsonServer("127.0.0.1", port, {})


def test_a_connection_that_breaks_off_leaves_no_traceback(capsys):
    with serving() as server:
        for _ in range(3):
            broken = socket.create_connection(server.server_address[:2])
            # Closed with a reset, while the request's first line is awaited.
            broken.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            broken.sendall(b"POST /sea")
            broken.close()
        assert ask(server, "GET", "/health")[0] == 200
        time.sleep(0.2)
        assert "Traceback" not in capsys.readouterr().err


def test_with_a_token_only_those_who_carry_it_are_answered():
    with serving(token="s3cret") as server:
        assert ask(server, "GET", "/health")[0] == 401
        wrong = ask(server, "GET", "/health", Authorization="Bearer s3cret2")
        assert wrong[0] == 401
        right = {"Authorization": "Bearer s3cret", "Host": "any.example"}
        assert ask(server, "GET", "/health", **right)[0] == 200


def test_a_fault_is_an_internal_error_that_tells_clients_nothing(capsys):
    def broken(body):
        raise RuntimeError("path of a secret")

    with serving({("GET", "/health"): broken}) as server:
        told = ask(server, "GET", "/health")
        assert told == (500, {"error": "internal error"})
    assert "path of a secret" in capsys.readouterr().err
