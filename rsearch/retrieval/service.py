"""Search with a retrieval service over HTTP, in the published dialects.

A failed search is not an empty one: its queries get None, and the rollouts that asked
end as tool errors, out of the loss. After FAILURES_IN_A_ROW failed searches the next
one waits for the service to come back, and after `outage_seconds` the run is saved and
ends with code 75.
"""

import collections
import functools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

from rsearch.hosts.preemption import OutageError
from rsearch.protocols.tagged import whole_characters
from rsearch.runtime import console
from rsearch.runtime.calls import (
    HEADERS,
    Reply,
    check_url,
    parse_json,
    post,
    read_api_key,
    with_retries,
)
from rsearch.runtime.recorded import SingleFlight
from rsearch.types import Passage

FAILURES_IN_A_ROW = 3  # searches, until the next one waits for the service
PROBE_SECONDS = 2.0  # between two calls while the service is away
CHECK_SECONDS = 5.0  # that a service may take for its first answer
MAX_PASSAGE_BYTES = 1 << 16  # of each in a reply; JSON escapes included
ENVELOPE_BYTES = 1 << 16
CONCURRENCY = 16  # calls at once, of one search
QUERIES_A_CALL = 256  # at most; some services refuse many more
OVERLAPPING = 8  # searches at once, where a call takes many queries


class _SearchR1:
    """POST /retrieve {"queries", "topk", "return_scores"}, as Search-R1's server has.

    Its reply is {"result": [[{"document": {"id", "contents"}, "score"}]]}.
    """

    path, is_batched = "/retrieve", True

    @staticmethod
    def body(queries, top_k):
        return {"queries": list(queries), "topk": top_k, "return_scores": True}

    @staticmethod
    def hits(reply):
        return [[_scored(hit) for hit in row] for row in reply["result"]]


class _R1Searcher:
    """POST /queries {"queries", "k"}, as R1-Searcher's: texts without id or score.

    Its server's texts begin with their line number, which its client drops, too.
    """

    path, is_batched = "/queries", True

    @staticmethod
    def body(queries, top_k):
        return {"queries": list(queries), "k": top_k}

    @staticmethod
    def hits(reply):
        drop = functools.partial(re.sub, r"^\d+\s+", "")
        return [[_passage(drop(text)) for text in row] for row in reply["answers"]]


class _ReaRAG:
    """POST /search {"query", "top_n", "return_score"}, as ReaRAG's: one query a call.

    Its reply is [[{"id", "contents"}], [score]].
    """

    path, is_batched = "/search", False

    @staticmethod
    def body(queries, top_k):
        return {"query": queries[0], "top_n": top_k, "return_score": True}

    @staticmethod
    def hits(reply):
        documents, scores = reply
        pairs = zip(documents, scores, strict=True)
        return [[_scored({"document": d, "score": s}) for d, s in pairs]]


class _Serper:
    """POST /search {"q", "num"}, as serper.dev has for Google: one query a call.

    Its reply is {"organic": [{"title", "link", "snippet"}]}; passages have the links as
    ids.
    """

    path, is_batched = "/search", False

    @staticmethod
    def body(queries, top_k):
        return {"q": queries[0], "num": top_k}

    @staticmethod
    def hits(reply):
        return [[_linked(hit) for hit in reply["organic"]]]


APIS = {
    "search_r1": _SearchR1,
    "r1_searcher": _R1Searcher,
    "rearag": _ReaRAG,
    "serper": _Serper,
}


def _scored(hit) -> Passage:
    """Return a hit's passage; servers of a web search give neither id nor score."""
    document = hit["document"]
    score = hit.get("score", 0.0)
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise TypeError("a score is no number")
    passage = _passage(document["contents"])
    name = str(document["id"]) if "id" in document else passage.id
    return Passage(whole_characters(name), passage.contents, float(score))


def _linked(hit) -> Passage:
    texts = [hit["title"], hit["link"], hit.get("snippet", "")]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a hit is no text")
    title, link, snippet = map(whole_characters, texts)
    return Passage(link, f'"{title}"\n{snippet}')


def _passage(contents) -> Passage:
    if not isinstance(contents, str):
        raise TypeError("a passage is no text")
    text = whole_characters(contents)
    return Passage(text.partition("\n")[0][:80], text)


class RemoteSearch:
    """A SearchFn that calls a service; safe to call from several threads.

    Args:
        url: of the service; where it has no path, that of its dialect is added.
        api: a key of APIS.
        top_k: passages a query, at most.
        cache_size: queries whose passages are cached, the latest used; 0 = none.
        api_key_env: the environment variable with its key; "" sends none.
        timeout_seconds: for the search of a query, retries included, once it has begun;
            CONCURRENCY calls of one search run at once.
        max_retries: further calls after a transient failure.
        outage_seconds: that a service may be away before the run ends.

    Attributes:
        fingerprint: of the dialect; what a service finds may change at any time.
        searches_at_once: calls of this SearchFn that may overlap, since most of their
            time is waiting; 1 where a call already makes several requests at once.

    Raises:
        ValueError: the URL is none, or holds a secret; the key is not set.
    """

    def __init__(
        self,
        url: str,
        *,
        api: str,
        top_k: int,
        cache_size: int = 10_000,
        api_key_env: str = "",
        timeout_seconds: float = 25.0,
        max_retries: int = 3,
        outage_seconds: float = 300.0,
        say: Callable[[str], None] = console.note,
    ):
        self._api, self._top_k, self._cache_size = APIS[api], top_k, cache_size
        parsed = check_url(url, "config.retrieval.url")
        path = parsed.path if parsed.path.strip("/") else self._api.path
        self._target = str(parsed.copy_with(path=path))
        self._headers = dict(HEADERS)
        if api_key_env:
            key = read_api_key(api_key_env)
            if api == "serper":
                self._headers |= {"X-API-KEY": key}
            else:
                self._headers |= {"Authorization": f"Bearer {key}"}
        self._certificates = httpx.create_ssl_context()  # takes 30 ms, once
        self._seconds = timeout_seconds
        self._outage = outage_seconds
        self._say = say
        self._retries = max_retries
        self._cache: collections.OrderedDict = collections.OrderedDict()
        self._lock = threading.Lock()
        self._single_flight = SingleFlight()
        self._failures = 0
        self._away_since = None
        self.searches_at_once = OVERLAPPING if self._api.is_batched else 1
        self.fingerprint = f"service {api}"

    def __str__(self) -> str:
        """Return a short description of the service."""
        return f"the service {self._target}"

    def check(self) -> None:
        """Search once, so that a wrong address is refused before anything is loaded.

        Raises:
            ValueError: nobody answers in time, or not in this dialect.
        """
        with self._client() as client:
            deadline = time.monotonic() + CHECK_SECONDS
            reply = self._call(client, ["Where?"], deadline)
        if reply.value is None:
            raise ValueError(
                f"config.retrieval.url: {self._target}: {reply.why}; start one, for "
                "example: python -m rsearch.retriever --config=configs/search_r1.py "
                "--config.retrieval.index=DIR"
            )

    def __call__(self, queries: Sequence[str]) -> list[tuple[Passage, ...] | None]:
        """Return the passages of each query, best first; None where a search failed.

        A blank query has no passages, and is not sent.

        Raises:
            OutageError: the service has been away for too long.
        """
        results = {query: () for query in queries if not query.strip()}
        sent = [query for query in queries if query not in results]
        results |= self._single_flight(sent, known=self._cached, ask=self._search)
        return [results[query] for query in queries]

    def _cached(self, queries):
        """Return {query: passages} of the queries that are in the cache."""
        with self._lock:
            hits = {q: self._cache[q] for q in queries if q in self._cache}
            for query in hits:
                self._cache.move_to_end(query)
        return hits

    def _add_to_cache(self, pairs):
        if self._cache_size:
            self._cache |= pairs
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)

    def _search(self, queries):
        """Return passages or None of each query; wait while the service is away."""
        while True:
            began = time.monotonic()
            results = self._ask(queries)
            with self._lock:
                if self._is_final(results, began):
                    pairs = zip(queries, results, strict=True)
                    self._add_to_cache((q, r) for q, r in pairs if r is not None)
                    return results
            time.sleep(PROBE_SECONDS)

    def _is_final(self, results, began) -> bool:
        """Return whether these are the results; False while the service is away."""
        if any(result is not None for result in results):
            if self._failures >= FAILURES_IN_A_ROW:
                self._say(f"{self._target}: is back")
            self._failures = 0
            self._away_since = None
            return True
        self._failures += 1
        if self._away_since is None:
            self._away_since = began
        if self._failures < FAILURES_IN_A_ROW:
            return True
        away = time.monotonic() - self._away_since
        if away > self._outage:
            raise OutageError(f"{self._target}: away for {away:.0f} s")
        if self._failures == FAILURES_IN_A_ROW:
            self._say(f"{self._target}: away; waiting for it to come back")
        return False

    def _ask(self, queries):
        """Return passages or None of each query, with all calls and retries."""
        last_answer = time.monotonic()

        def ask(client, batch) -> Reply:
            nonlocal last_answer
            began = time.monotonic()
            # The calls before this one waited in vain: do not spend as long again.
            if began - last_answer > self._seconds:
                return Reply(None, "too slow")
            deadline = began + self._seconds

            def call():
                return self._call(client, batch, deadline)

            retries = self._retries if self._failures < FAILURES_IN_A_ROW else 0
            reply = with_retries(
                call, max_retries=retries, first_wait=0.5, deadline=deadline
            )
            if reply.value is not None:
                last_answer = time.monotonic()
            return reply

        size = QUERIES_A_CALL if self._api.is_batched else 1
        batches = [queries[i : i + size] for i in range(0, len(queries), size)]
        with (
            self._client() as client,
            ThreadPoolExecutor(min(CONCURRENCY, len(batches))) as pool,
        ):
            replies = list(pool.map(lambda batch: ask(client, batch), batches))
        failed = collections.Counter(r.why for r in replies if r.value is None)
        if failed and self._failures < FAILURES_IN_A_ROW:
            reasons = ", ".join(f"{why} ({n})" for why, n in failed.most_common(3))
            self._say(f"{self._target}: searches failed: {reasons}")
        results = []
        for batch, reply in zip(batches, replies, strict=True):
            results += reply.value if reply.value is not None else [None] * len(batch)
        return results

    def _client(self):
        return httpx.Client(headers=self._headers, verify=self._certificates)

    def _call(self, client, queries, deadline) -> Reply:
        sent = [whole_characters(query) for query in queries]
        body = json.dumps(self._api.body(sent, self._top_k))
        limit = ENVELOPE_BYTES + len(queries) * self._top_k * MAX_PASSAGE_BYTES
        return post(
            client,
            self._target,
            body.encode(),
            read=lambda received: self._read(received, len(queries)),
            max_bytes=limit,
            seconds=self._seconds,
            deadline=deadline,
        )

    def _read(self, received, count):
        """Return [count] tuples of passages, or None where the reply is malformed.

        Hits whose score is not finite, which some libraries pad with, are left out; so
        are repeated passages.
        """
        try:
            rows = self._api.hits(parse_json(received))
        except (LookupError, TypeError, ValueError, AttributeError):
            return None
        if len(rows) != count:
            return None
        results = []
        for row in rows:
            finite = [hit for hit in row if math.isfinite(hit.score)]
            unique = {(hit.id, hit.contents): hit for hit in reversed(finite)}
            ordered = [hit for hit in finite if unique[hit.id, hit.contents] is hit]
            results.append(tuple(ordered[: self._top_k]))
        return results
