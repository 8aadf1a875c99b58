"""An index whose parts lie on several hosts: each asks all, and merges what they find.

Hosts search when their rollouts want it, from a thread, and never at one moment. So
each serves its parts over HTTP to the others, which know its address and its token from
the meeting at the start (`rsearch.hosts.processes`):

    POST /nearest {"queries": base64 of float32 [n, D], "top_k": k}
    {"positions": base64 of int64 [n, k], "scores": base64 of float32 [n, k]}

A search has the answers of all hosts, or it fails as a whole within its time.
"""

import base64
import concurrent.futures
import json
import secrets
import threading
import time
from collections.abc import Callable

import httpx
import numpy as np

from rsearch.hosts import processes
from rsearch.retrieval.index import Index
from rsearch.retrieval.parts import PartsError, best_of
from rsearch.runtime.server import JSON, JsonServer, RefusedError

PATH = "/nearest"
MAX_BODY_BYTES = 1 << 26  # of a request: 12 thousand queries of 1024 features
QUERIES_AT_ONCE = 1024  # of a request
ENVELOPE_BYTES = 1 << 16  # around the numbers of a reply
MAX_TOP_K = 10_000
RETRIED = (408, 503)  # statuses that pass
FIRST_WAIT, MAX_WAIT = 0.05, 2.0  # seconds before a host is asked again


def spread_index(open_own: Callable[[], Index], *, timeout_seconds: float):
    """Meets the other hosts of the run and serves them this one's parts.

    All hosts call it together; it needs at least two.

    Args:
        open_own: opens this host's parts; see `rsearch.retrieval.index.open_index`.
        timeout_seconds: in which a search has to have the answers of all.

    Returns:
        The parts of all as a SpreadParts, and the manifest.

    Raises:
        ValueError: from `open_own`.
        RuntimeError: another host's parts could not be opened.
    """
    own = {}

    def serve(items):
        index = own["index"] = open_own()
        token = secrets.token_urlsafe(32)
        server = PartServer(processes.host_address(), index.nearest, token)
        told = {"address": server.url, "token": token, "first": index.first}
        return [{**told, "num": len(index.nearest)} for _ in items]

    told = processes.map_hosts_json(serve, range(processes.num_hosts()))
    here = processes.host_index()
    parts = [
        own["index"].nearest
        if number == here
        else RemoteParts(number, t["address"], t["token"], t["num"])
        for number, t in enumerate(told)
    ]
    firsts = [t["first"] for t in told]
    spread = SpreadParts(firsts, parts, here, timeout_seconds=timeout_seconds)
    return spread, own["index"].manifest


class PartServer:
    """Answers other hosts from this one's parts, on a thread, until the process ends.

    Args:
        host: address to listen at, on a free port.
        nearest: has len and search.
        token: that each request must carry.

    Attributes:
        url: that it is asked at.
    """

    def __init__(self, host, nearest, token):
        self._nearest = nearest
        self._server = JsonServer(
            host,
            0,
            {("POST", PATH): self._answer},
            token=token,
            max_body_bytes=MAX_BODY_BYTES,
            max_waiting=4 * processes.num_hosts(),
        )
        self._server.daemon_threads = True
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._server.server_address[1]}{PATH}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        """Listens no more."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, body):
        top_k = body.get("top_k")
        if type(top_k) is not int or not 1 <= top_k <= MAX_TOP_K:
            raise RefusedError(400, f"top_k must be a number from 1 to {MAX_TOP_K}")
        queries = _unpacked(body.get("queries"), "<f4")
        dim = self._nearest.dim
        if queries is None or len(queries) % dim or not np.isfinite(queries).all():
            raise RefusedError(400, f"queries must be finite float32 rows of {dim}")
        found = self._nearest.search(queries.reshape(-1, dim), top_k)
        return dict(zip(("positions", "scores"), map(_packed, found)))


class RemoteParts:
    """Another host's parts; safe to call from several threads.

    Args:
        host: its number, for what is said of it.
        url: of its PartServer.
        token: that it wants to see.
        num: vectors that it has.
    """

    def __init__(self, host, url, token, num):
        self._host, self._url, self._num = host, url, num
        # The machines' own network: no proxy of the environment leads there.
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {token}", "Content-Type": JSON},
            trust_env=False,
        )

    def __len__(self):
        return self._num

    def search(self, queries, top_k, end):
        """See Nearest; positions count from its first vector.

        Args:
            queries: [n, D] float32.
            top_k: how many to find.
            end: of the time that it has, by time.monotonic.

        Raises:
            PartsError: no answer in time, or one that cannot be right.
        """
        body = json.dumps({"queries": _packed(queries), "top_k": top_k}).encode()
        shape = len(queries), min(top_k, self._num)
        wait, why = FIRST_WAIT, "too slow"
        while time.monotonic() < end:
            try:
                status, reply = self._ask(body, shape, end)
            except httpx.HTTPError as error:  # it may be back in time
                status, why = RETRIED[0], type(error).__name__
            else:
                why = f"HTTP {status}"
            if status == 200:
                return self._checked(reply, shape)
            if status not in RETRIED:
                break
            time.sleep(max(0.0, min(wait, end - time.monotonic())))
            wait = min(2 * wait, MAX_WAIT)
        raise PartsError(f"host {self._host} did not answer a search: {why}")

    def _ask(self, body, shape, end):
        """(status, bytes of the reply)."""
        most = ENVELOPE_BYTES + 2 * 12 * shape[0] * shape[1]
        left = max(0.001, end - time.monotonic())
        with self._client.stream(
            "POST", self._url, content=body, timeout=left
        ) as reply:
            received = bytearray()
            for piece in reply.iter_raw():
                received += piece
                if len(received) > most:
                    raise PartsError(f"host {self._host} answered {most} bytes or more")
                # httpx's limit is on each read: a slow trickle never meets it.
                if time.monotonic() > end:
                    raise httpx.ReadTimeout("")
            return reply.status_code, bytes(received)

    def _checked(self, reply, shape):
        """The reply's positions and scores, if they can be what was asked for."""
        try:
            told = json.loads(reply)
            positions = _unpacked(told["positions"], "<i8")
            scores = _unpacked(told["scores"], "<f4")
        except (ValueError, KeyError, TypeError, RecursionError):
            positions = scores = None
        size = shape[0] * shape[1]
        is_right = (
            positions is not None
            and scores is not None
            and len(positions) == len(scores) == size
            and bool(np.isfinite(scores).all())
            and bool(((positions >= 0) & (positions < self._num)).all())
        )
        if is_right:
            positions, scores = positions.reshape(shape), scores.reshape(shape)
            in_order = np.sort(positions, axis=1)
            is_right = bool((np.diff(scores, axis=1) <= 0).all())
            is_right &= bool((np.diff(in_order, axis=1) > 0).all())
        if not is_right:
            raise PartsError(f"host {self._host} answered a search with something else")
        return positions, scores


class SpreadParts:
    """The parts of all hosts as one; has len and `search` as Nearest has.

    Args:
        firsts: [hosts] position of each host's first vector.
        parts: [hosts] this host's own as they are, RemoteParts of the others.
        here: number of this host.
        timeout_seconds: of a search of QUERIES_AT_ONCE.
    """

    def __init__(self, firsts, parts, here, *, timeout_seconds):
        self._firsts, self._parts, self._here = firsts, parts, here
        self._timeout = timeout_seconds
        self._threads = concurrent.futures.ThreadPoolExecutor(
            len(parts), thread_name_prefix="parts"
        )

    def __len__(self):
        return sum(map(len, self._parts))

    def search(self, queries, top_k):
        """See Nearest.

        Raises:
            PartsError: a host did not answer rightly and in time; tells which.
        """
        if not len(queries):
            return self._parts[self._here].search(queries, top_k)
        blocks = [
            self._search(queries[start : start + QUERIES_AT_ONCE], top_k)
            for start in range(0, len(queries), QUERIES_AT_ONCE)
        ]
        positions, scores = zip(*blocks)
        return np.concatenate(positions), np.concatenate(scores)

    def _search(self, queries, top_k):
        end = time.monotonic() + self._timeout
        asked = {
            number: self._threads.submit(part.search, queries, top_k, end)
            for number, part in enumerate(self._parts)
            if number != self._here
        }
        found = {self._here: self._parts[self._here].search(queries, top_k)}
        found |= {number: future.result() for number, future in asked.items()}
        both = [
            (first + found[number][0], found[number][1])
            for number, first in enumerate(self._firsts)
        ]
        return best_of(both, top_k)


def _packed(array):
    """Base64 of little-endian numbers of their own kind."""
    array = np.asarray(array)
    data = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return base64.b64encode(data).decode()


def _unpacked(text, dtype):
    """[n] numbers of such a text; None where it is none."""
    try:
        data = base64.b64decode(text, validate=True)
        return np.frombuffer(data, dtype)
    except (TypeError, ValueError):
        return None
