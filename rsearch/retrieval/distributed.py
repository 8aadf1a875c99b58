"""Search an index whose parts lie on several hosts: query all hosts, merge the results.

Hosts search from threads whenever their rollouts need it, never all at the same moment.
Each host therefore serves its parts to the others over HTTP. Addresses and tokens are
exchanged through `rsearch.hosts.processes` when the index is opened:

    POST /nearest {"queries": base64 of float32 [n, D], "top_k": k, "stamp", "mac"}
    {"positions": base64 of int64 [n, k], "scores": base64 of float32 [n, k]}

A token is "<bearer>.<key>". The bearer is sent over the network in the clear; the key
is not. The key signs a request together with its stamp, which is the client's name and
a number that may be used once. A request replayed from the network is refused.

A search returns the merged results of all hosts, or fails by its deadline. It never
returns the results of some parts only.
"""

import base64
import concurrent.futures
import hmac
import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import httpx
import numpy as np

from rsearch.hosts import processes
from rsearch.retrieval.index import Index
from rsearch.retrieval.nearest import IndexPartError, MergedParts, Nearest, merge_best
from rsearch.runtime.calls import HEADERS, Reply, parse_json, post, with_retries
from rsearch.runtime.server import JsonServer, RefusedError

PATH = "/nearest"
MAX_BODY_BYTES = 1 << 26  # of a request: 12 thousand queries of 1024 features
MAX_BATCH = 1024  # queries per request
MAX_REORDERED = 1024  # how far a client's requests may arrive out of order
ENVELOPE_BYTES = 1 << 16  # size of a reply beyond its arrays
MAX_TOP_K = 10_000
FIRST_WAIT, MAX_WAIT = 0.05, 2.0  # seconds before a request is retried
MALFORMED_ANSWER = "gave a malformed answer to a search"
MAX_RETRIES = 1000  # never reached: the search's deadline comes first


def distribute_index(
    open_local: Callable[[], Index], *, timeout_seconds: float
) -> tuple["DistributedNearest", dict]:
    """Serve this host's parts of an index to the other hosts, and connect to theirs.

    All hosts call this together; there must be at least two.

    Args:
        open_local: opens this host's parts; see `rsearch.retrieval.index.open_index`.
        timeout_seconds: time within which all hosts must answer a search.

    Returns:
        The parts of all hosts as one index, and the manifest.

    Raises:
        ValueError: raised by `open_local`.
        RuntimeError: another host's parts could not be opened.
    """
    local_indexes = []

    def serve(items):
        index = open_local()
        local_indexes.append(index)
        token = f"{secrets.token_urlsafe(32)}.{secrets.token_urlsafe(32)}"
        server = NearestServer(processes.host_address(), index.nearest, token)
        return [
            {
                "address": server.url,
                "token": token,
                "first": index.first,
                "num": len(index.nearest),
            }
            for _ in items
        ]

    addresses = processes.map_hosts_json(serve, range(processes.num_hosts()))
    (index,) = local_indexes
    host = processes.host_index()
    hosts = [
        index.nearest
        if number == host
        else RemoteNearest(number, a["address"], a["token"], a["num"])
        for number, a in enumerate(addresses)
    ]
    firsts = [a["first"] for a in addresses]
    nearest = DistributedNearest(firsts, hosts, host, timeout_seconds=timeout_seconds)
    return nearest, index.manifest


class NearestServer:
    """A server of this host's vectors, on a thread that runs until the process ends.

    Args:
        host: address to listen on; the port is chosen among the free ones.
        nearest: has `len`, `dim` and `search`.
        token: each request must carry its bearer and be signed with its key.

    Attributes:
        url: URL for requests.
    """

    def __init__(self, host: str, nearest: Nearest | MergedParts, token: str):
        self._nearest = nearest
        bearer, _, self._key = token.partition(".")
        self._lock = threading.Lock()
        self._used_numbers: dict[str, set[int]] = {}  # the latest of each client
        self._server = JsonServer(
            host,
            0,
            {("POST", PATH): self._answer},
            token=bearer,
            max_body_bytes=MAX_BODY_BYTES,
            max_waiting=4 * processes.num_hosts(),
        )
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._server.server_address[1]}{PATH}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def _check_stamp(self, body):
        """Refuse a request that is not signed, or whose stamp was used before."""
        stamp, mac = body.get("stamp"), body.get("mac")
        expected = _mac(self._key, stamp, body)
        if not isinstance(mac, str) or not hmac.compare_digest(
            mac.encode(errors="replace"), expected.encode()
        ):
            raise RefusedError(401, "the request is not signed with the key")
        client, number = stamp  # one of the hosts signed it, so its shape is right
        with self._lock:
            used_numbers = self._used_numbers.setdefault(client, set())
            oldest = max(used_numbers, default=0) - MAX_REORDERED
            if number in used_numbers or number < oldest:
                raise RefusedError(401, "the request was received before")
            used_numbers.add(number)
            if len(used_numbers) > 2 * MAX_REORDERED:
                self._used_numbers[client] = {n for n in used_numbers if n >= oldest}

    def _answer(self, body):
        top_k = body.get("top_k")
        if type(top_k) is not int or not 1 <= top_k <= MAX_TOP_K:
            raise RefusedError(400, f"top_k must be a number from 1 to {MAX_TOP_K}")
        queries = _decode_array(body.get("queries"), "<f4")
        dim = self._nearest.dim
        if queries is None or len(queries) % dim or not np.isfinite(queries).all():
            raise RefusedError(400, f"queries must be finite float32 rows of {dim}")
        self._check_stamp(body)
        positions, scores = self._nearest.search(queries.reshape(-1, dim), top_k)
        return {"positions": _encode_array(positions), "scores": _encode_array(scores)}


class RemoteNearest:
    """A client of another host's vectors; safe to call from several threads.

    Args:
        host: number of that host, for messages.
        num: number of vectors that it holds.
    """

    def __init__(self, host: int, url: str, token: str, num: int):
        self._host = host
        self._url = url
        bearer, _, self._key = token.partition(".")
        self._name = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._num = num
        # Hosts share a network, so a proxy from the environment must not be used.
        self._client = httpx.Client(
            headers={**HEADERS, "Authorization": f"Bearer {bearer}"},
            trust_env=False,
            verify=False,  # the addresses are http://
        )

    def __len__(self) -> int:
        return self._num

    def search(
        self, queries: np.ndarray, top_k: int, end: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Search as Nearest does; positions count from that host's first vector.

        Args:
            queries: [n, D] float32.
            end: deadline, as a value of time.monotonic().

        Raises:
            IndexPartError: there was no answer in time, or it cannot be right.
        """
        request = {"queries": _encode_array(queries), "top_k": top_k}
        shape = len(queries), min(top_k, self._num)
        # A position and a score take 12 bytes; base64 less than doubles them.
        max_bytes = ENVELOPE_BYTES + 2 * 12 * shape[0] * shape[1]

        def call() -> Reply:
            return post(
                self._client,
                self._url,
                self._signed(request),  # the server answers each stamp once
                read=lambda data: self._read(data, shape),
                max_bytes=max_bytes,
                seconds=max(0.001, end - time.monotonic()),
                deadline=end,
            )

        # A host that is busy or unreachable may recover before the deadline.
        reply = with_retries(
            call,
            max_retries=MAX_RETRIES,
            first_wait=FIRST_WAIT,
            max_wait=MAX_WAIT,
            deadline=end,
        )
        if reply.value is not None:
            return reply.value
        failure = (
            "" if reply.reason == MALFORMED_ANSWER else "did not answer a search: "
        )
        raise IndexPartError(f"host {self._host} {failure}{reply.reason}")

    def _signed(self, request):
        """Return the bytes of a request, with a stamp that its server accepts once."""
        stamp = [self._name, next(self._numbers)]
        mac = _mac(self._key, stamp, request)
        return json.dumps({**request, "stamp": stamp, "mac": mac}).encode()

    def _read(self, data, shape) -> Reply:
        """Return the reply's positions and scores; no value if they cannot be right."""
        payload = parse_json(data)
        arrays = payload if isinstance(payload, dict) else {}
        positions = _decode_array(arrays.get("positions"), "<i8")
        scores = _decode_array(arrays.get("scores"), "<f4")
        malformed = Reply(None, MALFORMED_ANSWER, None)  # a retry would get the same
        if positions is None or scores is None:
            return malformed
        if not len(positions) == len(scores) == shape[0] * shape[1]:
            return malformed
        positions, scores = positions.reshape(shape), scores.reshape(shape)
        is_right = (
            np.isfinite(scores).all()
            and ((positions >= 0) & (positions < self._num)).all()
            and (np.diff(scores, axis=1) <= 0).all()
            and (np.diff(np.sort(positions, axis=1), axis=1) > 0).all()
        )
        return Reply((positions, scores)) if is_right else malformed


class DistributedNearest:
    """The parts of all hosts as one index, with the `len` and `search` of Nearest.

    Args:
        firsts: [hosts] position of each host's first vector.
        hosts: [hosts] the local Nearest for this host, a RemoteNearest for each other.
        timeout_seconds: time limit for a search of MAX_BATCH queries.
    """

    def __init__(
        self,
        firsts: Sequence[int],
        hosts: Sequence[Nearest | MergedParts | RemoteNearest],
        host: int,
        *,
        timeout_seconds: float,
    ):
        self._firsts = firsts
        self._hosts = hosts
        self._host = host
        self._timeout = timeout_seconds
        self._threads = concurrent.futures.ThreadPoolExecutor(
            len(hosts), thread_name_prefix="parts"
        )

    def __len__(self) -> int:
        return sum(map(len, self._hosts))

    def search(self, queries: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Search the vectors of all hosts, as Nearest does.

        Raises:
            IndexPartError: a host gave no valid answer in time; the message names it.
        """
        if not len(queries):
            return self._hosts[self._host].search(queries, top_k)
        blocks = [
            self._search(queries[start : start + MAX_BATCH], top_k)
            for start in range(0, len(queries), MAX_BATCH)
        ]
        positions, scores = zip(*blocks)
        return np.concatenate(positions), np.concatenate(scores)

    def _search(self, queries, top_k):
        deadline = time.monotonic() + self._timeout
        futures = {
            number: self._threads.submit(host.search, queries, top_k, deadline)
            for number, host in enumerate(self._hosts)
            if number != self._host
        }
        # This host searches its own vectors while the others search theirs.
        results = {self._host: self._hosts[self._host].search(queries, top_k)}
        results |= {number: future.result() for number, future in futures.items()}
        shifted = [
            (first + results[number][0], results[number][1])
            for number, first in enumerate(self._firsts)
        ]
        return merge_best(shifted, top_k)


def _mac(key, stamp, request):
    """Return the signature of a request, in hexadecimal."""
    message = json.dumps([stamp, request.get("queries"), request.get("top_k")])
    return hmac.new(key.encode(), message.encode(), "sha256").hexdigest()


def _encode_array(array):
    """Return the base64 of an array's little-endian numbers, keeping their type."""
    array = np.asarray(array)
    data = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return base64.b64encode(data).decode()


def _decode_array(text, dtype):
    """Return the [n] numbers encoded in a text, or None if it does not decode."""
    try:
        data = base64.b64decode(text, validate=True)
        return np.frombuffer(data, dtype)
    except (TypeError, ValueError):
        return None
