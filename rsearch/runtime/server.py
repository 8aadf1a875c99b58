"""Serve JSON over HTTP: a few routes, limits on what comes in, one token.

Each request has a thread; what it asks of the program must be safe to ask from several.
Nothing that a client sends can do more than get an error with a JSON body:
{"error": "..."}.
"""

import hmac
import http.server
import io
import ipaddress
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from rsearch.runtime.console import note

JSON = "application/json"
LINGER_SECONDS, LINGER_BYTES = 1.0, 1 << 25  # for a body that is refused unread


class RefusedError(Exception):
    """A request that is refused; the message says why, with an HTTP status."""

    def __init__(self, status: int, reason: str, **headers: str):
        super().__init__(reason)
        self.status = status
        self.headers = headers


class JsonServer(http.server.ThreadingHTTPServer):
    """A server of routes, until `shutdown`.

    Args:
        host, port: to listen at; port 0 takes a free one.
        routes: {("GET", "/health"): answer}: `answer` gets the body's JSON object, {}
            for GET, and returns one, or raises RefusedError.
        token: that each request has to carry as "Authorization: Bearer ..."; "" = none.
        max_body_bytes: a longer body is refused unread.
        max_waiting: requests under way at once; further ones are refused at once.
        timeout_seconds: how long a client may take for its request, head and body.

    Raises:
        ValueError: a host other machines can reach, without a token; a host or port
            that cannot be listened at.
    """

    request_queue_size = 128  # connections that wait to be taken, of a burst
    daemon_threads = False  # those under way end before the process does

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[tuple[str, str], Callable[[dict], dict]],
        *,
        token: str = "",
        max_body_bytes: int = 1 << 16,
        max_waiting: int = 64,
        timeout_seconds: float = 30.0,
    ):
        if not token and not is_loopback(host):
            raise ValueError(
                f"--host={host} can be reached from other machines: name an "
                "environment variable that holds a token, --token_env=NAME"
            )
        self.routes = routes
        self.token = token
        self.max_body_bytes = max_body_bytes
        self.timeout_seconds = timeout_seconds
        self.waiting = threading.BoundedSemaphore(max_waiting)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"cannot listen at {host}:{port}: {reason}") from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note a connection that failed, unless the client has broken it off."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            note(f"a connection failed: {error!r}")

    def serve(self) -> None:
        """Serve until SIGINT or SIGTERM; then let requests under way end."""

        def stop(*_):
            # From a thread, since shutdown waits for the loop that this interrupts.
            threading.Thread(target=self.shutdown).start()

        names = (signal.SIGINT, signal.SIGTERM)
        before = {name: signal.signal(name, stop) for name in names}
        try:
            self.serve_forever(poll_interval=0.1)
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)
            self.server_close()


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Received(io.RawIOBase):
    """The bytes of a request, with one deadline: a slow trickle does not extend it."""

    def __init__(self, connection, seconds):
        self._connection = connection
        self._end = time.monotonic() + seconds

    def readable(self):
        return True

    def readinto(self, buffer):
        remaining = self._end - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the request did not come in time")
        self._connection.settimeout(remaining)
        return self._connection.recv_into(buffer)


def _no_constant(name):
    raise ValueError(f"{name} is not JSON")


def _error(reason):
    return json.dumps({"error": str(reason)})


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection, one request."""

    server: JsonServer
    server_version, sys_version = "rsearch", ""

    def setup(self):
        self.timeout = self.server.timeout_seconds
        super().setup()
        self.rfile = io.BufferedReader(_Received(self.connection, self.timeout))

    has_unread = False  # a body that is still to come

    def do_GET(self):
        """Answer a request of any method by its route, or say why there is none."""
        self.has_unread = self.headers.get("Content-Length", "0") != "0"
        self._answer()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET
    do_HEAD = do_OPTIONS = do_TRACE = do_GET

    def _answer(self):
        headers = {}
        if not self.server.waiting.acquire(blocking=False):
            self._reply(503, _error("too many requests at once; try again later"))
            return
        try:
            status, reply = 200, json.dumps(self._route(), allow_nan=False)
        except RefusedError as refused:
            status, reply = refused.status, _error(refused)
            headers = refused.headers
        except TimeoutError:
            status, reply = 408, _error("the body did not come in time")
        except Exception as error:  # the service goes on; who runs it sees the fault
            self.log_error("%s %s: %r", self.command, self.path, error)
            status, reply = 500, _error("internal error")
        finally:
            self.server.waiting.release()
        self._reply(status, reply, headers)

    def _route(self):
        """Check the client, and return the reply of its route."""
        path = self.path.partition("?")[0]
        routes = self.server.routes
        self._check_client()
        answer = routes.get((self.command, path))
        if answer is None:
            methods = [method for method, known in routes if known == path]
            if methods:
                reason = f"{path} takes {' or '.join(methods)}"
                raise RefusedError(405, reason, Allow=", ".join(methods))
            known = ", ".join(f"{method} {known}" for method, known in routes)
            raise RefusedError(404, f"no such route; there is {known}")
        return answer(self._body() if self.command == "POST" else {})

    def _check_client(self):
        """Refuse clients without the token, and web pages that name a loopback."""
        if self.server.token:
            header = self.headers.get("Authorization", "")
            expected = f"Bearer {self.server.token}"
            if not hmac.compare_digest(header.encode(), expected.encode()):
                raise RefusedError(401, "Authorization: Bearer ... is missing or wrong")
            return
        name = self.headers.get("Host", "")
        host = name.rpartition(":")[0] if not name.endswith("]") else name
        if not is_loopback((host or name).strip("[]")):
            raise RefusedError(403, "this service answers its own machine only")

    def _body(self) -> dict:
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != JSON:
            raise RefusedError(415, f"Content-Type must be {JSON}")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise RefusedError(411, "Content-Length is missing")
        limit = self.server.max_body_bytes
        if len(length) > 18 or int(length) > limit:
            raise RefusedError(413, f"the body may have {limit} bytes")
        raw = self.rfile.read(int(length))
        self.has_unread = False
        try:
            body = json.loads(raw, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise RefusedError(400, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise RefusedError(400, "the body must be a JSON object")
        return body

    def _reply(self, status, reply, headers=None):
        data = reply.encode()
        self.connection.settimeout(self.timeout)
        self.close_connection = True  # an unread body must not become a request
        try:
            self.send_response(status)
            self.send_header("Content-Type", JSON)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Connection", "close")
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)
            if self.has_unread:
                self._linger()
        except OSError:
            pass  # the client has gone

    def _linger(self):
        """Read a little of an unread body.

        A client that is cut off while sending may never read the reply.
        """
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(LINGER_SECONDS)
        end = time.monotonic() + LINGER_SECONDS
        remaining = LINGER_BYTES
        while remaining > 0 and time.monotonic() < end:
            received = self.connection.recv(1 << 16)
            if not received:
                return
            remaining -= len(received)

    def send_error(self, code, message=None, explain=None):
        """Send errors of the HTTP protocol itself as JSON, too."""
        self._reply(int(code), _error(message or HTTPStatus(code).phrase))

    def log_message(self, format, *args):
        """Log nothing but errors: questions are private."""

    def log_error(self, format, *args):
        """Write one line to stderr."""
        note(format % args)
