"""Serve JSON over HTTP: a few routes, limits on requests, one token.

Each request is handled in its own thread, so the functions of routes must be
thread-safe. The worst effect of anything a client sends is an error with a JSON body:
{"error": "..."}. The status line also has the reason, since most clients show it and
not the body. A reply is JSON, text, or a stream of server-sent events.
"""

import contextlib
import errno
import hmac
import http.server
import io
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from rsearch.runtime.connections import is_loopback
from rsearch.runtime.console import note

JSON = "application/json"
# The version is that of Prometheus's format.
PLAIN_TEXT = "text/plain; version=0.0.4; charset=utf-8"
EVENT_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "Connection": "close",
}
# Answered however many requests are in progress.
PROBES = ("/health", "/ready", "/metrics")
SEGMENT = re.compile("[A-Za-z0-9._-]{1,64}")  # what matches the {name} of a route
STOPPING_REASON = "the service is stopping; try again later"
LOADING_REASON = "the service is loading; try again later"
UNREACHABLE_REASON = "the search or a model is unreachable; try again later"
MAX_CONNECTIONS = 512
PHRASE_CHARS = 200  # of a reason in the status line
LINGER_SECONDS, LINGER_BYTES = 1.0, 1 << 25  # for a body that is refused unread
POLL_SECONDS = 0.5  # the main thread checks for the end this often
STALE_SHARE = 1 / 30  # of a client's time; after it, a slow client may make room
READING, ANSWERING, REPLYING = "reading", "answering", "replying"
STREAMING = "streaming"
CLOSING, ABANDONED = "closing", "abandoned"  # by the server, without and with a reply


class RefusedError(Exception):
    """A refusal of a request: the reason as message, and an HTTP status."""

    def __init__(self, status: int, reason: str, **headers: str):
        super().__init__(reason)
        self.status = status
        self.headers = headers


class PlainText(str):
    """A reply that is text, not JSON.

    Attributes:
        kind: its Content-Type.
        headers: {name: value} of additional headers.
    """

    kind = PLAIN_TEXT
    headers: Mapping[str, str] = MappingProxyType({})


def open_to_all(answer: Callable) -> Callable:
    """Mark the function of a route that needs no token.

    The route is also answered however many requests are in progress. A browser cannot
    send the token with an address that a person types, so the page that asks for the
    token must be public.
    """
    answer.is_open_to_all = True
    return answer


def follows_client(answer: Callable) -> Callable:
    """Mark the function of a route that takes (body, is_gone).

    `is_gone` returns whether the client has closed its connection, so that an answer
    that is no longer wanted need not be computed.
    """
    answer.follows_client = True
    return answer


def plain_error_body(path: str, refused: RefusedError) -> dict:
    """Return the JSON object of a reply that refuses a request."""
    return {"error": str(refused)}


class JsonServer(http.server.ThreadingHTTPServer):
    """A server of routes, until `shutdown`.

    Args:
        host, port: address to listen at; port 0 chooses a free one.
        routes: {("GET", "/health"): answer}: `answer` takes the body's JSON object, {}
            for GET, and returns a JSON object, PlainText, or an iterator of event texts
            that are sent as they come; or raises RefusedError. A path may end in a
            {name}, which matches any name. See also `follows_client`.
        token: token that each request must send as "Authorization: Bearer ..."; "" =
            no token is needed.
        max_body_bytes: a longer body is refused unread.
        max_reply_bytes: a longer reply is refused before it is built.
        max_waiting: number of requests answered at the same time; any more are refused
            immediately.
        max_connections: number of open connections; more wait until one ends. A client
            that has then been slow to send or to read for STALE_SHARE of its time is
            disconnected. None allows MAX_CONNECTIONS, or more if `max_waiting` needs
            them.
        timeout_seconds: how long a client may take to send its request, head and body.
        stop_seconds: time for requests in progress when the server is closed.
        error_body: (path, RefusedError) -> the JSON object that the client gets.

    Attributes:
        on_reply: called for each request that ends, with the route's path ("" if there
            is none), the status and the seconds.
        is_busy: called when all connections have ended; returns whether threads still
            work for clients that have left, for which the process will not wait.
        is_loading: whether `prepare` has not set all routes yet; see `serve`.

    Raises:
        ValueError: other machines can reach the host and there is no token, or the
            server cannot listen at this host and port.
    """

    request_queue_size = 1024  # connections of a burst that wait to be accepted
    daemon_threads = True  # server_close waits for them, but only for a bounded time

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[tuple[str, str], Callable[[dict], dict]],
        *,
        token: str = "",
        max_body_bytes: int = 1 << 16,
        max_reply_bytes: int = 1 << 28,
        max_waiting: int = 64,
        max_connections: int | None = None,
        timeout_seconds: float = 30.0,
        stop_seconds: float = 8.0,
        error_body: Callable[[str, RefusedError], dict] = plain_error_body,
    ):
        if not token and not is_loopback(host):
            raise ValueError(
                f"--host={host} can be reached from other machines: name an "
                "environment variable that holds a token, --token_env=NAME"
            )
        self.routes = routes
        self.error_body = error_body
        self.on_reply: Callable[[str, int, float], None] = lambda *_: None
        self.is_busy: Callable[[], bool] = lambda: False
        self.is_loading = False
        self.token = token
        self.max_body_bytes = max_body_bytes
        self.max_reply_bytes = max_reply_bytes
        self.timeout_seconds = timeout_seconds
        self.stop_seconds = stop_seconds
        # Twice as many connections, so that another client can always request /health.
        if max_connections is None:
            max_connections = max(MAX_CONNECTIONS, 2 * max_waiting)
        # The other descriptors are left for the index and other open files.
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors != resource.RLIM_INFINITY and max_connections > descriptors // 2:
            max_connections = max(2, descriptors // 2)
            if max_waiting > max_connections // 2:
                note(
                    f"at most {max_connections // 2} requests in progress, not "
                    f"{max_waiting}: ulimit -n is {descriptors}"
                )
        self.max_connections = max_connections
        max_waiting = max(1, min(max_waiting, max_connections // 2))
        self.waiting = threading.BoundedSemaphore(max_waiting)
        self._connections: dict[socket.socket, tuple[str, float]] = {}
        self._changed = threading.Condition()  # held to read or change them
        self._is_stopping = False
        self._num_abandoned = 0
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"cannot listen at {host}:{port}: {reason}") from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note a failed connection, unless an OSError shows that the client left."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            note(f"a connection failed: {error!r}")

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; make room if the process has no descriptor left."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                with self._changed:
                    self._close_stale()
                time.sleep(0.05)  # or the loop would spin until one is closed
            raise

    def process_request(self, request: socket.socket, client_address: Any) -> None:
        """Start the connection's thread once there is room for it."""
        with self._changed:
            while self._num_live() >= self.max_connections and not self._is_stopping:
                if not self._close_stale():
                    self._changed.wait(0.05)
            self._connections[request] = READING, time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:
        """Close a connection that has ended."""
        super().shutdown_request(request)
        with self._changed:
            self._connections.pop(request, None)
            self._changed.notify_all()

    def _num_live(self):
        states = (state for state, _ in self._connections.values())
        return sum(state != CLOSING for state in states)

    def _close_stale(self):
        """Close the oldest connection whose client is too slow; False if none is."""
        cutoff = time.monotonic() - STALE_SHARE * self.timeout_seconds
        for request, (state, start_time) in self._connections.items():
            if state in (READING, REPLYING) and start_time < cutoff:
                self._close(request, socket.SHUT_RDWR)
                return True
        return False

    def _close(self, request, direction):
        """Shut a connection down, which wakes its thread; the thread then ends."""
        self._connections[request] = CLOSING, time.monotonic()
        with contextlib.suppress(OSError):  # the client has disconnected
            request.shutdown(direction)

    def enter(self, request: socket.socket, state: str) -> bool:
        """Set the state of a connection; return False if it has been abandoned."""
        with self._changed:
            old_state, _ = self._connections[request]
            if old_state != ABANDONED:
                self._connections[request] = state, time.monotonic()
                self._changed.notify_all()
            return old_state != ABANDONED

    def is_closing(self, request: socket.socket) -> bool:
        """Return whether the server has stopped reading from a connection."""
        with self._changed:
            return self._connections[request][0] == CLOSING

    def serve(self, prepare: Callable[[], None] | None = None) -> None:
        """Serve until SIGINT or SIGTERM; then let requests in progress finish.

        If some do not finish within `stop_seconds`, the process ends anyway.

        Args:
            prepare: called once the server answers requests, to set the routes that
                take a while to load. Until then, requests of other routes get a 503. A
                signal during this call interrupts it.

        Raises:
            SystemExit: SIGTERM arrived during `prepare`; the exit code is 0.
            KeyboardInterrupt: SIGINT arrived during `prepare`.
        """
        self.is_loading = prepare is not None
        interruption = None  # what a signal has raised within `prepare`

        def stop(number, _):
            nonlocal interruption
            if self.is_loading:
                # A service that is still loading can stop right here: nothing is lost.
                os.write(2, b"ended before it was ready\n")  # stderr may be in use
                is_term = number == signal.SIGTERM
                interruption = SystemExit(0) if is_term else KeyboardInterrupt()
                raise interruption
            # In a thread, because shutdown waits for the loop.
            threading.Thread(target=self.shutdown).start()

        signals = (signal.SIGINT, signal.SIGTERM)
        old_handlers = {name: signal.signal(name, stop) for name in signals}
        loop = threading.Thread(target=self.serve_forever, args=(0.1,))
        loop.start()
        try:
            if prepare is not None:
                prepare()
            # Python drops what is raised in a callback of the garbage collector, and
            # JAX has one.
            if interruption is not None:
                raise interruption
            self.is_loading = False
            # The joins are short, since a signal just before one is handled after it.
            while loop.is_alive():
                loop.join(POLL_SECONDS)
        finally:
            for name, handler in old_handlers.items():
                signal.signal(name, handler)
            self.shutdown()
            self.server_close()
        if self._num_abandoned:
            note(f"ended before {self._num_abandoned} requests were answered")
        if self._num_abandoned or self.is_busy():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # there is no other way to stop their computations

    @property
    def url(self) -> str:
        """The address that it listens at, as a URL."""
        host, port = self.server_address[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def shutdown(self) -> None:
        """End `serve_forever`."""
        self._is_stopping = True
        super().shutdown()

    def server_close(self) -> None:
        """Stop listening, and end every connection within `stop_seconds`.

        Connections that have not sent their request get an eighth of that time.
        Requests that are not answered in time are refused.
        """
        self._is_stopping = True
        end = time.monotonic() + self.stop_seconds
        self._accept_waiting()
        super().server_close()

        def in_state(*states):
            connections = list(self._connections.items())
            return [request for request, (s, _) in connections if s in states]

        with self._changed:
            grace = self.stop_seconds / 8
            self._changed.wait_for(lambda: not in_state(READING), grace)
            for request in in_state(READING):
                self._close(request, socket.SHUT_RD)
            remaining = end - time.monotonic()
            self._changed.wait_for(lambda: not self._connections, remaining)
            for request in in_state(REPLYING, STREAMING, CLOSING):
                self._close(request, socket.SHUT_RDWR)
            abandoned_requests = in_state(ANSWERING)
            for request in abandoned_requests:
                self._connections[request] = ABANDONED, time.monotonic()
        self._num_abandoned = len(abandoned_requests)
        for request in abandoned_requests:
            _refuse_stopped(request)

    def _accept_waiting(self):
        """Take the connections in the system's queue, which closing would reset."""
        with contextlib.suppress(OSError):  # there are no more
            self.socket.settimeout(0)
            while True:
                self.process_request(*self.socket.accept())


def _refuse_stopped(request):
    """Reply to a request whose thread is still computing its answer."""
    reason = "the service has stopped"
    body = json.dumps({"error": reason})
    head = [f"HTTP/1.0 503 {reason}", f"Content-Type: {JSON}"]
    head += [f"Content-Length: {len(body)}", "Connection: close", "", body]
    with contextlib.suppress(OSError):  # the client has disconnected
        request.settimeout(0.1)
        request.sendall("\r\n".join(head).encode())
        request.shutdown(socket.SHUT_WR)


class _RequestStream(io.RawIOBase):
    """The bytes of a request, read by one deadline that no slow trickle extends."""

    def __init__(self, connection, seconds):
        self._connection = connection
        self._end = time.monotonic() + seconds

    def readable(self):
        return True

    def readinto(self, buffer):
        remaining = self._end - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the request did not arrive in time")
        self._connection.settimeout(remaining)
        return self._connection.recv_into(buffer)


def _refuse_constant(name):
    raise ValueError(f"{name} is not JSON")


def _phrase(reason):
    """Return a reason in a form fit for the status line: one short line of ASCII."""
    line = " ".join(reason[: 2 * PHRASE_CHARS].split())[:PHRASE_CHARS]
    return "".join(c if " " <= c <= "~" else "?" for c in line)


def _is_path(route_path, path):
    """Return whether a route's path, which may end in a {name}, matches this path."""
    prefix, brace, _ = route_path.partition("{")
    if not brace:
        return path == route_path
    return path.startswith(prefix) and bool(SEGMENT.fullmatch(path, len(prefix)))


def _is_longer(value, limit):
    """Return whether the strings in a JSON value exceed this many characters."""
    total, remaining = 0, [value]
    while remaining and total <= limit:
        item = remaining.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            remaining += item.values()
        elif isinstance(item, list | tuple):
            remaining += item
    return total > limit


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection, one request."""

    server: JsonServer
    server_version, sys_version = "rsearch", ""

    def setup(self):
        self.timeout = self.server.timeout_seconds
        super().setup()
        self.rfile = io.BufferedReader(_RequestStream(self.connection, self.timeout))

    has_unread = False  # whether a body may still be unread

    def do_GET(self):
        """Answer a request of any method by its route, or say why there is none."""
        length = self.headers.get("Content-Length", "0")
        self.has_unread = length != "0" or "Transfer-Encoding" in self.headers
        self.route, self.status, start_time = "", 500, time.monotonic()
        with contextlib.ExitStack() as reply_stack:
            try:
                reply = self._route(reply_stack)
            except RefusedError as refusal:
                self._refuse(refusal)
            except TimeoutError:
                self._refuse(RefusedError(408, "the body did not arrive in time"))
            except Exception as error:  # the service continues; its log has the error
                self._log_fault(error)
                self._refuse(RefusedError(500, "internal error"))
            except BaseException as error:  # OutageError, of what the answer asks
                self._log_fault(error)
                self._refuse(RefusedError(503, UNREACHABLE_REASON))
            else:
                if isinstance(reply, Iterator):
                    self._stream(reply)
                elif isinstance(reply, PlainText):
                    self._reply(200, reply, reply.headers, kind=reply.kind)
                else:
                    self._reply(200, reply)
        self.server.on_reply(self.route, self.status, time.monotonic() - start_time)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET
    do_HEAD = do_OPTIONS = do_TRACE = do_GET

    def _log_fault(self, error):
        self.log_error("%s %s: %r", self.command, self.path, error)

    def _route(self, reply_stack):
        """Check the client, and return the reply of the requested route."""
        path = self.path.partition("?")[0]
        routes = self.server.routes
        matches = [(m, p) for m, p in routes if _is_path(p, path)]
        answers = {method: routes[method, p] for method, p in matches}
        is_open = getattr(answers.get(self.command), "is_open_to_all", False)
        self._check_client(needs_token=not is_open)
        if not answers:
            if self.server.is_loading:
                raise RefusedError(503, LOADING_REASON)
            route_list = ", ".join(map(" ".join, routes))
            raise RefusedError(404, f"no such route; the routes are {route_list}")
        if self.command not in answers:
            reason = f"{path} takes {' or '.join(answers)}"
            raise RefusedError(405, reason, Allow=", ".join(answers))
        answer = answers[self.command]
        self.route = matches[0][1]
        # Read the whole body before admission, so that a slow client blocks no other.
        body = self._body() if self.command == "POST" else {}
        if is_open or path in PROBES:
            return self._encode(answer(body))
        if not self.server.waiting.acquire(blocking=False):
            raise RefusedError(503, "too many requests at once; try again later")
        with contextlib.ExitStack() as admission:
            admission.callback(self.server.waiting.release)
            self.server.enter(self.connection, ANSWERING)
            watches_client = getattr(answer, "follows_client", False)
            reply = answer(body, self._is_gone) if watches_client else answer(body)
            if not isinstance(reply, Iterator):
                return self._encode(reply)
            reply_stack.enter_context(admission.pop_all())
            return reply

    def _is_gone(self):
        """Return whether the client has closed its connection."""
        poller = select.poll()
        poller.register(self.connection, select.POLLIN)
        try:
            return bool(poller.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _encode(self, answer):
        if isinstance(answer, PlainText):
            return answer
        limit = self.server.max_reply_bytes
        reply = "" if _is_longer(answer, limit) else json.dumps(answer, allow_nan=False)
        if not reply or len(reply) > limit:
            raise RefusedError(413, f"the reply exceeds {limit} bytes: ask for less")
        return reply

    def _check_client(self, needs_token):
        """Check the token or, if there is none, that the Host header names a loopback.

        The latter keeps out web pages whose host name resolves to the loopback address.
        """
        if self.server.token:
            header = self.headers.get("Authorization", "")
            expected_header = f"Bearer {self.server.token}"
            is_valid = hmac.compare_digest(header.encode(), expected_header.encode())
            if needs_token and not is_valid:
                raise RefusedError(401, "Authorization: Bearer ... is missing or wrong")
            return
        name = self.headers.get("Host", "")
        host = name.rpartition(":")[0] if not name.endswith("]") else name
        if not is_loopback((host or name).strip("[]")):
            raise RefusedError(403, "this service only answers its own machine")

    def _body(self) -> dict:
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != JSON:
            raise RefusedError(415, f"Content-Type must be {JSON}")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise RefusedError(411, "Content-Length is missing")
        limit = self.server.max_body_bytes
        if len(length) > 18 or int(length) > limit:
            raise RefusedError(413, f"the body exceeds {limit} bytes")
        raw = self.rfile.read(int(length))
        self.has_unread = False
        if len(raw) < int(length):
            if self.server.is_closing(self.connection):
                raise RefusedError(503, STOPPING_REASON)
            raise RefusedError(400, "the body is shorter than its Content-Length")
        try:
            body = json.loads(raw, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise RefusedError(400, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise RefusedError(400, "the body must be a JSON object")
        return body

    def _refuse(self, refusal):
        path = getattr(self, "path", "").partition("?")[0]
        body = json.dumps(self.server.error_body(path, refusal))
        self._reply(refusal.status, body, refusal.headers, _phrase(str(refusal)))

    def _stream(self, events):
        """Send event texts as they come, until they end or the client disconnects."""
        self.close_connection = True
        self.status = 200
        with contextlib.closing(events):
            if not self.server.enter(self.connection, STREAMING):
                return
            try:
                self.connection.settimeout(self.timeout)
                self.send_response(200)
                for name, value in EVENT_HEADERS.items():
                    self.send_header(name, value)
                self.end_headers()
                for text in events:
                    self.wfile.write(f"data: {text}\n\n".encode())
            except OSError:
                pass  # the client has disconnected
            except Exception as error:  # the events have told the client
                self._log_fault(error)

    def _reply(self, status, reply, headers=None, phrase=None, kind=JSON):
        self.status = status
        data = reply.encode()
        self.close_connection = True  # an unread body must not be read as a request
        if not self.server.enter(self.connection, REPLYING):
            return
        try:
            self.connection.settimeout(self.timeout)
            self.send_response(status, phrase or None)
            self.send_header("Content-Type", kind)
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
            pass  # the client has disconnected

    def _linger(self):
        """Read a little of an unread body.

        A client that is cut off while sending may never read the reply.
        """
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(LINGER_SECONDS)
        end = time.monotonic() + LINGER_SECONDS
        remaining = LINGER_BYTES
        while remaining > 0 and time.monotonic() < end:
            data = self.connection.recv(1 << 16)
            if not data:
                return
            remaining -= len(data)

    def send_error(self, code, message=None, explain=None):
        """Send errors of the HTTP protocol itself as JSON as well."""
        self.has_unread = True
        self.request_version = "HTTP/1.0"  # a request line without one gets a head too
        if self.server.is_closing(self.connection):
            code, message = 503, STOPPING_REASON
        self._refuse(RefusedError(int(code), message or HTTPStatus(code).phrase))

    def log_message(self, format, *args):
        """Log nothing: questions are private, and only errors are logged."""

    def log_error(self, format, *args):
        """Write one line to stderr."""
        note(format % args)
