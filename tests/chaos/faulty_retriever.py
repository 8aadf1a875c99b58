"""A retriever that dies and comes back, behind a proxy that fails in all other ways.

The retriever is a real `python -m rsearch.retriever`. Between it and the run, a Proxy
lets requests pass for a while, then fails those of a search in one way, then lets
requests pass again and goes on to the next way. Three of the ways act on the server's
process, and all searches meet two of these three. Any other fault hits one search; the
other searches that the run has in flight pass.
"""

import contextlib
import email.utils
import http.client
import http.server
import itertools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import NamedTuple

from tests.hosts.test_processes import free_port
from tests.small_run import ROOT, child_environment

PATH = "/retrieve"
JUNK = "what no query has found"
PASSED, NAN = "", "NaN scores"
KILLED, STOPPED, RESTARTED = "killed: refused", "stopped", "restarted: 502"
OF_PROCESS = (KILLED, STOPPED, RESTARTED)
WHOLE = KILLED, RESTARTED  # faults that hit all searches; the others hit only one
CALM = 4, 3.0  # requests and seconds between two faults, at least
AWAY_SECONDS = 4.0  # downtime of a killed server; a client's waits sum to 3.5 s
LOST = 12.0  # seconds without a request after which a search counts as given up
WAIT_SECONDS = 60.0  # time limit for the server to start, or a client to give up


class Retriever:
    """A process that serves a recipe's index.

    Args:
        words: arguments of `python -m rsearch.retriever`.
        log: file that receives its output.
    """

    def __init__(self, words, log):
        self.port = free_port()
        self._words, self._log = [*words, f"--port={self.port}"], log
        self.start()

    def start(self) -> None:
        """Start the server and wait until it answers."""
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rsearch.retriever", *self._words],
                cwd=ROOT,
                env={**os.environ, **child_environment()},
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + WAIT_SECONDS
        while not self._answers():
            assert self.process.poll() is None and time.monotonic() < end, self._log
            time.sleep(0.05)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.ask("GET", "/health")[0] == 200
        return False

    def ask(self, method, path, body=None) -> tuple[int, bytes]:
        """Send a request and return the status and body of the reply."""
        asking = http.client.HTTPConnection("127.0.0.1", self.port, WAIT_SECONDS)
        with contextlib.closing(asking):
            asking.request(method, path, body, {"Content-Type": "application/json"})
            reply = asking.getresponse()
            return reply.status, reply.read()

    def end(self, how: signal.Signals) -> None:
        """Send the signal `how` and wait until the server has ended."""
        self.process.send_signal(how)
        if how != signal.SIGKILL:
            self.process.send_signal(signal.SIGCONT)
        self.process.wait(WAIT_SECONDS)


class Request(NamedTuple):
    """A request that has arrived at the proxy.

    Attributes:
        at: time of arrival, by time.monotonic().
        kind: how it fails; "" if it passes.
        search: number of its search's first request. Requests with equal bodies belong
            to the same search until one of them passes.
    """

    at: float
    kind: str
    search: int


class Proxy:
    """A proxy that forwards requests to a retriever, except those that it fails.

    Args:
        retriever: the retriever, already started.
        calm: least number of requests and least seconds between two faults while
            `in_full`.
        most: {kind or "": number of a search's requests that fail}, for lasting faults.
        rounds: how often to go through all faults while `in_full`; 0 means forever.
        lost: seconds without a request after which a search counts as given up.

    Attributes:
        in_full: if True, the server is also killed, stopped and restarted, and in every
            other round faults last until searches fail; else each fault fails a single
            request.
        requests: all requests so far.
        answered: when requests that passed were answered, by time.monotonic().
    """

    def __init__(self, retriever: Retriever, *, calm=CALM, most, rounds=0, lost=LOST):
        self.retriever, self.in_full = retriever, False
        self.requests: list[Request] = []
        self.answered: list[float] = []
        self.is_away = threading.Event()
        self._calm, self._most, self._lost = calm, most, lost
        self._last = rounds * len(FAULTS)
        self._brief = itertools.cycle(k for k in FAULTS if k not in OF_PROCESS)
        self._full, self._num_full = itertools.cycle(FAULTS), 0
        self._lock = threading.Lock()
        self._kind, self._left, self._passed, self._ended = PASSED, 0, 0, 0.0
        self._met: tuple[bytes, float] = (
            b"",
            0.0,
        )  # body that meets the fault; when last
        self._searches: dict[bytes, int] = {}  # body -> number, until one passes
        self.turn = itertools.count()  # for faults that alternate between two forms
        self.port = 0
        self.listen()

    def listen(self) -> None:
        """Accept connections, in threads of its own."""
        own = type("Handler", (_Handler,), {"proxy": self})
        address = "127.0.0.1", self.port
        self._server = http.server.ThreadingHTTPServer(address, own)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,)).start()

    def refuse(self) -> None:
        """Stop listening, so that connections are refused."""
        self._server.shutdown()
        self._server.server_close()

    def take(self, body: bytes) -> tuple[str, bool]:
        """Return how a request with this body fails, and whether the fault ends."""
        with self._lock:
            now = time.monotonic()
            kind = self._next(now, body)
            search = self._searches.setdefault(body, len(self.requests))
            self.requests.append(Request(now, kind, search))
            if kind in (PASSED, NAN):
                del self._searches[body]
            return kind, not self._left

    def _next(self, now, body):
        """Return the kind of a request."""
        if self._left and not (self.in_full or self._kind in OF_PROCESS):
            self._left = 0
        if self._left and self._kind not in WHOLE:
            whose, since = self._met
            if body != whose and now - since < self._lost:
                return PASSED
        if not self._left:
            self._passed += 1
            few, soon = self._calm if self.in_full else CALM
            is_over = self.in_full and self._num_full == self._last > 0
            if is_over or self._passed <= few or now - self._ended < soon:
                return PASSED
            self._begin()
        self._met = body, now
        self._left -= 1
        if not self._left:
            self._ended = now
        return self._kind

    def _begin(self):
        self._passed, self._left = 0, 1
        if not self.in_full:
            self._kind = next(self._brief)
            return
        self._kind, self._num_full = next(self._full), self._num_full + 1
        # In the first round all faults last, in the second none do, and so on.
        if (self._num_full - 1) // len(FAULTS) % 2 == 0:
            self._left = self._most.get(self._kind, self._most[""])
        if self._kind in WHOLE:
            self._left = 1 << 30  # until the server is back

    def renew(self, how: signal.Signals) -> None:
        """End the server and restart it, in a thread."""

        def work():
            self.retriever.end(how)
            if how == signal.SIGKILL:
                time.sleep(AWAY_SECONDS)
            self.retriever.start()
            if how == signal.SIGKILL:
                self.listen()
            with self._lock:
                self._left, self._ended = 0, time.monotonic()
            self.is_away.clear()

        if not self.is_away.is_set():
            self.is_away.set()
            threading.Thread(target=work).start()

    def table(self) -> dict[str, tuple[int, int, int]]:
        """Return {kind: (requests, searches that succeeded in spite of it, failed)}."""
        last = {r.search: r.kind in (PASSED, NAN) for r in self.requests}
        told = {}
        for kind in FAULTS:
            searches = {r.search for r in self.requests if r.kind == kind}
            succeeded = sum(last[search] for search in searches)
            count = sum(r.kind == kind for r in self.requests)
            told[kind] = count, succeeded, len(searches) - succeeded
        return told

    def close(self) -> None:
        """Stop listening and end the retriever."""
        self.refuse()
        self.retriever.end(signal.SIGKILL)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection, one request."""

    proxy: Proxy

    def do_POST(self):
        """Forward the request, or fail it."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        kind, is_last = self.proxy.take(body)
        with contextlib.suppress(OSError):  # the client has given up
            if kind != PASSED:
                return FAULTS[kind](self, body, is_last)
            self.reply(*self.proxy.retriever.ask("POST", PATH, body))
            self.proxy.answered.append(time.monotonic())

    def reply(self, status, body, **headers):
        """Send a complete reply."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def begin(self):
        """Send the head of a reply without a Content-Length."""
        self.send_response(200)
        self.end_headers()

    def found(self, body) -> list:
        """Return the rows that the server finds."""
        return json.loads(self.proxy.retriever.ask("POST", PATH, body)[1])["result"]

    def reply_rows(self, rows):
        """Reply with these rows, valid or not."""
        self.reply(200, json.dumps({"result": rows}).encode())

    def log_message(self, *_):
        """Log nothing."""


def killed(handler, body, is_last):
    """Kill the server during the request; connections are refused until it is back."""
    handler.proxy.refuse()
    handler.proxy.renew(signal.SIGKILL)


def restarted(handler, body, is_last):
    """Restart the server cleanly; reply 502 meanwhile, as a gateway would."""
    handler.proxy.renew(signal.SIGTERM)
    handler.reply(502, b"")


def stopped(handler, body, is_last):
    """Stop the server, so that it accepts the connection but never answers."""
    server = handler.proxy.retriever
    os.kill(server.process.pid, signal.SIGSTOP)
    with socket.create_connection(("127.0.0.1", server.port)) as asking:
        head = f"POST {PATH} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        asking.sendall(head.encode() + body)
        both = [asking, handler.connection]
        ready, _, _ = select.select(both, [], [], WAIT_SECONDS)
    if is_last:
        os.kill(server.process.pid, signal.SIGCONT)
    assert ready == [handler.connection], "the server was not stopped"


def error_500(handler, body, is_last):
    """Reply with a server error."""
    handler.reply(500, b"<html>Internal Server Error</html>")


def busy_429(handler, body, is_last):
    """Reply with too many requests: retry after a second, or at a date."""
    when = "1"
    if next(handler.proxy.turn) % 2:
        when = email.utils.formatdate(time.time() + 1, usegmt=True)
    handler.reply(429, b"", Retry_After=when)


def slow(handler, body, is_last):
    """Reply with one byte per second."""
    handler.begin()
    for byte in json.dumps({"result": handler.found(body)}).encode():
        handler.wfile.write(bytes([byte]))
        time.sleep(1)


def truncated(handler, body, is_last):
    """Reply with half of the JSON."""
    whole = json.dumps({"result": handler.found(body)}).encode()
    handler.reply(200, whole[: len(whole) // 2])


def another_count(handler, body, is_last):
    """Reply with one row too few or one too many."""
    rows = handler.found(body)
    handler.reply_rows(rows[1:] if next(handler.proxy.turn) % 2 else [*rows, []])


def reset(handler, body, is_last):
    """Reset the connection."""
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.connection.close()


def another_shape(handler, body, is_last):
    """Reply with rows that are not lists, or contents that are not text."""
    rows = handler.found(body)
    if next(handler.proxy.turn) % 2:
        handler.reply_rows([None for _ in rows])
    else:
        hit = {"document": {"id": "a", "contents": 7}, "score": 1.0}
        handler.reply_rows([[hit] for _ in rows])


def huge(handler, body, is_last):
    """Reply with an endless body."""
    handler.begin()
    while True:
        handler.wfile.write(b" " * (1 << 16))


def nan_scores(handler, body, is_last):
    """Put a hit without a score before the right ones, as some libraries pad."""
    hit = {"document": {"id": "-1", "contents": JUNK}, "score": float("nan")}
    handler.reply_rows([[hit, *row] for row in handler.found(body)])


FAULTS = {
    KILLED: killed,
    STOPPED: stopped,
    RESTARTED: restarted,
    "HTTP 500": error_500,
    "HTTP 429": busy_429,
    "slow bytes": slow,
    "truncated JSON": truncated,
    "wrong count": another_count,
    "connection reset": reset,
    "wrong shape": another_shape,
    "huge body": huge,
    NAN: nan_scores,
}
