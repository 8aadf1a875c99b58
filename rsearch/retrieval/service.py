"""Search with a retrieval service over HTTP, in one of the published dialects.

A failed search is not an empty one: its queries get None, and the rollouts that sent
them end as tool errors and are left out of the loss. Replies are checked query by query
and hit by hit: a malformed one fails alone, and a query that the service refuses does
not affect others. An outage is waited out; see `rsearch.runtime.calls.OutageWatch`.
"""

import collections
import json
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rsearch.protocols.base import replace_surrogates
from rsearch.runtime import console
from rsearch.runtime.calls import (
    PROBE_SECONDS,
    OutageWatch,
    Reply,
    Service,
    parse_json,
    post,
    with_retries,
)
from rsearch.runtime.jsonl import MAX_LINE_BYTES
from rsearch.runtime.recorded import SingleFlight
from rsearch.types import Passage

CHECK_SECONDS = 5.0  # how long a service may take to answer the first time
MAX_PASSAGE_BYTES = MAX_LINE_BYTES  # the same limit as for a corpus in a file
USUAL_PASSAGE_BYTES = 1 << 16  # replies may be this long per passage, plus one maximum
ENVELOPE_BYTES = 1 << 16
CONCURRENCY = 16  # concurrent calls of one search
QUERIES_A_CALL = 256  # maximum per call; some services refuse many more
CONCURRENT_SEARCHES = 8  # concurrent searches, if a call takes many queries


def _list(value) -> list:
    # Texts and dicts are iterable too, and would be taken apart.
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value


def _text(value) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return replace_surrogates(value)


# Each dialect has the body of a call and three readers of its reply: `rows` (one per
# query), `hits` of a row, and the `passage` of a hit. On malformed input they may raise
# any exception.


class _SearchR1:
    """POST /retrieve {"queries", "topk", "return_scores"}, as in Search-R1's server.

    Its reply is {"result": [[{"document": {"id", "contents"}, "score"}]]}. Servers that
    search the web return neither ids nor scores.
    """

    path, is_batched = "/retrieve", True

    @staticmethod
    def body(queries, top_k):
        return {"queries": queries, "topk": top_k, "return_scores": True}

    @staticmethod
    def rows(reply):
        return _list(reply["result"])

    hits = staticmethod(_list)

    @staticmethod
    def passage(hit):
        return _passage_of(hit["document"], hit.get("score"))


class _R1Searcher:
    """POST /queries {"queries", "k"}, as in R1-Searcher: texts without id or score.

    Texts from its server begin with their line number, which its client drops as well.
    """

    path, is_batched = "/queries", True

    @staticmethod
    def body(queries, top_k):
        return {"queries": queries, "k": top_k}

    @staticmethod
    def rows(reply):
        return _list(reply["answers"])

    hits = staticmethod(_list)

    @staticmethod
    def passage(hit):
        return _passage_of({"contents": re.sub(r"^\d+\s+", "", hit)}, None)


class _ReaRAG:
    """POST /search {"query", "top_n", "return_score"}, as in ReaRAG: one query a call.

    Its reply is [[{"id", "contents"}], [score]].
    """

    path, is_batched = "/search", False

    @staticmethod
    def body(queries, top_k):
        return {"query": queries[0], "top_n": top_k, "return_score": True}

    @staticmethod
    def rows(reply):
        return [_list(reply)]

    @staticmethod
    def hits(row):
        documents, scores = row
        scores = [None] * len(_list(documents)) if scores is None else _list(scores)
        return list(zip(documents, scores, strict=True))

    @staticmethod
    def passage(hit):
        document, score = hit
        return _passage_of(document, score)


class _Serper:
    """POST /search {"q", "num"}, serper.dev's API for Google: one query per call.

    Its reply is {"organic": [{"title", "link", "snippet"}]}; a passage's id is its
    link.
    """

    path, is_batched = "/search", False

    @staticmethod
    def body(queries, top_k):
        return {"q": queries[0], "num": top_k}

    @staticmethod
    def rows(reply):
        return [_list(reply["organic"])]

    @staticmethod
    def hits(row):
        return row

    @staticmethod
    def passage(hit):
        snippet = hit.get("snippet")
        title, snippet = _text(hit["title"]), "" if snippet is None else _text(snippet)
        document = {"id": _text(hit["link"]), "contents": f'"{title}"\n{snippet}'}
        return _passage_of(document, None)


APIS = {
    "search_r1": _SearchR1,
    "r1_searcher": _R1Searcher,
    "rearag": _ReaRAG,
    "serper": _Serper,
}


def _passage_of(document, score) -> Passage:
    """Return the passage of a hit; one without an id is named after its first line.

    A hit without a score keeps None: a score of 0 would rank it among other hits.
    """
    contents, passage_id = _text(document["contents"]), document.get("id")
    if len(contents.encode()) > MAX_PASSAGE_BYTES:
        raise ValueError("a passage longer than a corpus may have")
    if isinstance(passage_id, int) and not isinstance(passage_id, bool):
        passage_id = str(passage_id)
    passage_id = "" if passage_id is None else _text(passage_id)
    if score is not None:
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise TypeError("a score is not a number")
        score = float(score)  # raises OverflowError for a number of hundreds of digits
    return Passage(passage_id or contents.partition("\n")[0][:80], contents, score)


class RemoteSearch:
    """A SearchFn that calls a service; safe to call from several threads.

    Args:
        url: URL of the service; without a path, the path of its dialect is added.
        api: a key of APIS.
        top_k: maximum number of passages per query.
        cache_size: number of recently used queries whose passages are cached; 0
            disables the cache.
        api_key_env: environment variable that holds the service's key; "" sends none.
        key_over_http: see `rsearch.runtime.calls.Service`.
        timeout_seconds: time limit for a query once its call has begun, retries
            included; CONCURRENCY calls of one search run at once.
        max_retries: additional calls after a transient failure.
        outage_seconds: how long the service may be unreachable before the run ends.
        site: host that a web search is restricted to; "" means no restriction.
        log: called with a line about failures and outages.

    Attributes:
        fingerprint: names only the dialect and site, since what a service finds may
            change any day.
        searches_at_once: number of calls of this SearchFn that may overlap, since they
            mostly wait; 1 if a call already makes several requests at once.

    Raises:
        ValueError: `url` is not a URL or contains a secret; or the key is not set, or
            would be sent unencrypted.
    """

    def __init__(
        self,
        url: str,
        *,
        api: str,
        top_k: int,
        cache_size: int = 10_000,
        api_key_env: str = "",
        key_over_http: bool = False,
        timeout_seconds: float = 25.0,
        max_retries: int = 3,
        outage_seconds: float = 300.0,
        site: str = "",
        log: Callable[[str], None] = console.note,
    ):
        self._api, self._top_k, self._cache_size = APIS[api], top_k, cache_size
        self._service = Service(
            url,
            field="config.retrieval.url",
            path=lambda path: path if path.strip("/") else self._api.path,
            api_key_env=api_key_env,
            key_header="X-API-KEY" if api == "serper" else "Authorization",
            key_over_http=key_over_http,
        )
        self._watch = OutageWatch(
            self._service.masked_url,
            outage_seconds=outage_seconds,
            probe_seconds=PROBE_SECONDS,
            log=log,
        )
        self._seconds = timeout_seconds
        self._suffix = f" site:{site}" if site else ""
        self._log = log
        self._retries = max_retries
        self._cache: collections.OrderedDict = collections.OrderedDict()
        self._lock = threading.Lock()
        self._single_flight = SingleFlight()
        self.searches_at_once = CONCURRENT_SEARCHES if self._api.is_batched else 1
        self.fingerprint = f"service {api}{self._suffix}"

    def __str__(self) -> str:
        return f"the service {self._service.masked_url}"

    def check(self) -> None:
        """Search once, so that a wrong address is refused before anything is loaded.

        Raises:
            ValueError: nothing answers in time, or not in this dialect.
        """
        with self._service.client() as client:
            deadline = time.monotonic() + CHECK_SECONDS
            reply = self._call(client, ["Where?"], deadline, is_quoted=True)
        if reply.value is not None:
            (reply,) = reply.value
        if reply.value is None:
            raise ValueError(
                f"config.retrieval.url: {self._service.masked_url}: "
                f"{self._service.describe(reply)}; start one, for example: python -m "
                "rsearch.retriever --config=configs/search_r1.py "
                "--config.retrieval.index=DIR"
            )

    def __call__(self, queries: Sequence[str]) -> list[tuple[Passage, ...] | None]:
        """Return the passages of each query, best first; None if its search failed.

        A blank query has no passages and is not sent.

        Raises:
            OutageError: the service was unreachable for too long.
        """
        results = {query: () for query in queries if not query.strip()}
        texts = [query for query in queries if query not in results]
        results |= self._single_flight(
            texts, read_stored=self._cached, fetch=self._search
        )
        return [results[query] for query in queries]

    def _cached(self, queries):
        """Return {query: passages} for the queries that are in the cache."""
        with self._lock:
            hits = {q: self._cache[q] for q in queries if q in self._cache}
            for query in hits:
                self._cache.move_to_end(query)
        return hits

    def _search(self, queries):
        """Return the passages of each query, or None; wait out an outage."""
        replies = self._watch.repeat_until_back(lambda: self._ask(queries))
        results = [reply.value for reply in replies]
        with self._lock:
            pairs = zip(queries, results, strict=True)
            self._cache |= {q: r for q, r in pairs if r is not None}
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return results

    def _ask(self, queries) -> list[Reply]:
        """Return the reply to each query, after all calls and retries."""
        is_unreachable = self._watch.is_unreachable
        retries = 0 if is_unreachable else self._retries
        last_answer = time.monotonic()

        def search_batch(client, batch) -> list[Reply]:
            start_time = time.monotonic()
            # No call was answered for a whole timeout: do not wait that long again.
            if start_time - last_answer > self._seconds:
                return [Reply(None, "too slow")] * len(batch)
            return search_until(client, batch, start_time + self._seconds)

        def search_until(client, batch, deadline) -> list[Reply]:
            nonlocal last_answer
            reply = with_retries(
                lambda: self._call(client, batch, deadline),
                max_retries=retries,
                first_wait=0.5,
                deadline=deadline,
            )
            if reply.value is not None:
                last_answer = time.monotonic()
                return reply.value
            # A service refuses a whole call for any of its queries, so split it.
            if reply.is_own_fault and len(batch) > 1 and time.monotonic() < deadline:
                middle = len(batch) // 2
                halves = batch[:middle], batch[middle:]
                return [r for b in halves for r in search_until(client, b, deadline)]
            return [reply] * len(batch)

        size = QUERIES_A_CALL if self._api.is_batched else 1
        batches = [queries[i : i + size] for i in range(0, len(queries), size)]
        with (
            self._service.client() as client,
            ThreadPoolExecutor(min(CONCURRENCY, len(batches))) as pool,
        ):
            results = pool.map(lambda batch: search_batch(client, batch), batches)
            replies = [reply for batch_replies in results for reply in batch_replies]
        problems = collections.Counter(
            reply.reason for reply in replies if reply.reason
        )
        if problems and not is_unreachable:
            reasons = ", ".join(
                f"{reason} ({n})" for reason, n in problems.most_common(3)
            )
            self._log(f"{self._service.masked_url}: problems in searches: {reasons}")
        return replies

    def _call(self, client, queries, deadline, *, is_quoted=False) -> Reply:
        """Make one call; its reply's value is a list with a Reply to each query."""
        texts = [replace_surrogates(query) + self._suffix for query in queries]
        body = json.dumps(self._api.body(texts, self._top_k))
        usual_bytes = len(queries) * self._top_k * USUAL_PASSAGE_BYTES
        return post(
            client,
            self._service.target,
            body.encode(),
            read=lambda data: self._read(data, len(queries)),
            max_bytes=ENVELOPE_BYTES + MAX_PASSAGE_BYTES + usual_bytes,
            seconds=self._seconds,
            deadline=deadline,
            is_quoted=is_quoted,
        )

    def _read(self, data, count) -> list[Reply] | None:
        """Return [count] replies, or None if the reply as a whole is malformed."""
        try:
            rows = self._api.rows(parse_json(data))
        except Exception:  # nothing a service sends may end a run
            return None
        return [self._read_row(row) for row in rows] if len(rows) == count else None

    def _read_row(self, row) -> Reply:
        """Return a reply with the passages of one query; None if no hit is readable.

        Hits whose score is not finite, which some libraries use as padding, are left
        out, as are repeated and blank passages.
        """
        try:
            hits = self._api.hits(row)
        except Exception:
            return Reply(None, "a malformed list of hits", None, is_own_fault=True)
        passages: dict[tuple, Passage] = {}
        num_malformed = 0
        for hit in hits:
            if len(passages) == self._top_k:
                break
            try:
                passage = self._api.passage(hit)
            except Exception:
                num_malformed += 1
                continue
            is_finite = passage.score is None or math.isfinite(passage.score)
            if is_finite and passage.contents.strip():
                passages.setdefault((passage.id, passage.contents), passage)
        if num_malformed and not passages:
            return Reply(None, "only malformed hits", None, is_own_fault=True)
        reason = "a malformed hit was left out" if num_malformed else ""
        return Reply(tuple(passages.values()), reason)
