"""A small JSON service over HTTP: a few routes, limits on what comes in, one token.

Each request has a thread; what it asks of the program must be safe to ask from several.
Nothing that a client sends can do more than get an error with a JSON body:
{"error": "..."}.
"""

import hmac
import http.server
import ipaddress
import json
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus

from rsearch.console import note

JSON = "application/json"


class RefusedError(Exception):
    """What a client asked cannot be done; says why, with an HTTP status."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


class JsonServer(http.server.ThreadingHTTPServer):
    """Serves routes until `shutdown`.

    Args:
        host, port: to listen at; port 0 takes a free one.
        routes: {("GET", "/health"): answer}: `answer` gets the body's JSON object, {}
            for GET, and returns one, or raises RefusedError.
        token: that each request has to carry as "Authorization: Bearer ..."; "" = none.
        max_body_bytes: a longer body is refused unread.
        max_waiting: requests under way at once; further ones are refused at once.
        timeout_seconds: how long a client may take for each part of its request.

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
        self.routes, self.token = routes, token
        self.max_body_bytes, self.timeout_seconds = max_body_bytes, timeout_seconds
        self.waiting = threading.BoundedSemaphore(max_waiting)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"cannot listen at {host}:{port}: {reason}") from None

    def handle_error(self, request, client_address) -> None:
        """One line on a connection that failed; nothing on one that was broken off."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            note(f"a connection failed: {error!r}")

    def serve(self) -> None:
        """Serves until SIGINT or SIGTERM; then lets requests under way end."""

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
    """Whether only this machine can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection, one request."""

    server: JsonServer
    server_version, sys_version = "rsearch", ""

    def setup(self):
        self.timeout = self.server.timeout_seconds
        super().setup()

    def do_GET(self):
        """A route without a body."""
        self._answer()

    def do_POST(self):
        """A route with a JSON object."""
        self._answer()

    def _answer(self):
        if not self.server.waiting.acquire(blocking=False):
            self._reply(503, {"error": "too many requests at once; try again later"})
            return
        try:
            status, reply = 200, self._route()
        except RefusedError as refused:
            status, reply = refused.status, {"error": str(refused)}
        except TimeoutError:
            status, reply = 408, {"error": "the body did not come in time"}
        except Exception as error:  # the service goes on; who runs it sees the fault
            self.log_error("%s %s: %r", self.command, self.path, error)
            status, reply = 500, {"error": "internal error"}
        finally:
            self.server.waiting.release()
        self._reply(status, reply)

    def _route(self):
        """The reply of the route, once the request may have one."""
        path = self.path.partition("?")[0]
        routes = self.server.routes
        self._check_client()
        answer = routes.get((self.command, path))
        if answer is None:
            methods = [method for method, known in routes if known == path]
            if methods:
                raise RefusedError(405, f"{path} takes {' or '.join(methods)}")
            known = ", ".join(f"{method} {known}" for method, known in routes)
            raise RefusedError(404, f"no such route; there is {known}")
        return answer(self._body() if self.command == "POST" else {})

    def _check_client(self):
        """Refuses strangers, and web pages that ask a loopback service by its name."""
        if self.server.token:
            given = self.headers.get("Authorization", "")
            wanted = f"Bearer {self.server.token}"
            if not hmac.compare_digest(given.encode(), wanted.encode()):
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
        most = self.server.max_body_bytes
        if len(length) > 18 or int(length) > most:
            raise RefusedError(413, f"the body may have {most} bytes")
        raw = self.rfile.read(int(length))
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            raise RefusedError(400, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise RefusedError(400, "the body must be a JSON object")
        return body

    def _reply(self, status, reply):
        data = json.dumps(reply, allow_nan=False).encode()
        self.close_connection = True  # an unread body must not become a request
        try:
            self.send_response(status)
            self.send_header("Content-Type", JSON)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass  # the client has gone

    def send_error(self, code, message=None, explain=None):
        """Errors of the protocol itself, as JSON too."""
        self._reply(int(code), {"error": message or HTTPStatus(code).phrase})

    def log_message(self, format, *args):
        """Only errors are logged: questions are nobody's business."""

    def log_error(self, format, *args):
        """One line on stderr."""
        note(format % args)
