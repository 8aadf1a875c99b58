"""Searches with a retrieval service that fails in every possible way."""

import contextlib
import gzip
import http.server
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rsearch.data.corpus import Corpus
from rsearch.hosts.preemption import OutageError
from rsearch.retrieval import service as remote
from rsearch.retrieval.service import RemoteSearch
from rsearch.types import Passage
from tests.running_server import running


def right(queries):
    """The body of a correct reply: for each query a passage named after it."""
    rows = [
        [{"document": {"id": q, "contents": f"{q}\n."}, "score": 1}] for q in queries
    ]
    return json.dumps({"result": rows}).encode()


class Service:
    """A service whose replies are written by `behave(handler, queries, number)`."""

    def __init__(self, behave):
        numbers = itertools.count()
        service, self.bodies = self, []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                length = int(self.headers["Content-Length"])
                body = json.loads(self.rfile.read(length))
                service.bodies.append(body)
                with contextlib.suppress(OSError):  # the client may have given up
                    behave(self, body.get("queries"), next(numbers))

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"


def send(handler, body, status=200, length=None, **headers):
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


@contextlib.contextmanager
def serving(behave):
    service = Service(behave)
    with running(service.server):
        yield service


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(remote, "PROBE_SECONDS", 0.05)
    monkeypatch.setattr(remote, "CHECK_SECONDS", 0.5)


def asking(url, **changed):
    settings = dict(
        api="search_r1", top_k=2, timeout_seconds=1.8, max_retries=1, log=print
    )
    return RemoteSearch(url, **(settings | changed))


def slowly(handler, queries, number):
    handler.send_response(200)
    handler.end_headers()
    for byte in right(queries):
        handler.wfile.write(bytes([byte]))
        time.sleep(0.05)


def slow_head(handler, queries, number):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Head: ")
    for _ in range(80):
        handler.wfile.write(b"x")
        time.sleep(0.05)


def interim(handler, queries, number):
    for _ in range(80):
        handler.wfile.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        time.sleep(0.05)


def reset(handler, queries, number):
    handler.connection.shutdown(2)


def endless(handler, queries, number):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(200):
        handler.wfile.write(b" " * (1 << 20))


def rows(*given):
    return json.dumps({"result": list(given)}).encode()


HIT = {"document": {"id": "a", "contents": "a\n."}, "score": 1}
BOMB = gzip.compress(b'{"result": [[' + b" " * 10**8)  # compressed: 0.1 MB
FAULTS = {
    "stopped": lambda h, q, n: time.sleep(3),
    "500": lambda h, q, n: send(h, b"{}", 500),
    "404": lambda h, q, n: send(h, b"{}", 404),
    "slow bytes": slowly,
    "slow head": slow_head,
    "interim replies": interim,
    "truncated": lambda h, q, n: send(h, right(q)[:-9], length=len(right(q)[:-9])),
    "cut off": lambda h, q, n: send(h, right(q)[:-9], length=len(right(q))),
    "wrong count": lambda h, q, n: send(h, right([*q, "more"])),
    "fewer": lambda h, q, n: send(h, rows()),
    "reset": reset,
    "wrong shape": lambda h, q, n: send(h, b'{"results": []}'),
    "html": lambda h, q, n: send(h, b"<html>busy</html>"),
    "no contents": lambda h, q, n: send(h, rows([{"document": {}, "score": 1}])),
    "contents no text": lambda h, q, n: send(
        h, rows([{"document": {"contents": 7}, "score": 1}])
    ),
    "score no number": lambda h, q, n: send(h, rows([HIT | {"score": "high"}])),
    "huge": endless,
    "compressed": lambda h, q, n: send(h, BOMB, Content_Encoding="gzip"),
    "nested": lambda h, q, n: send(h, b"[" * 100_000),
}


@pytest.mark.fault(30, "bounded wait")
@pytest.mark.fault(
    31, "fewer rows", "no contents", "contents no text", "HTML", "huge", "gzip bomb"
)
@pytest.mark.fault(32, "5xx", "reset", "half-open", "slow bytes")
@pytest.mark.fault(36, "call to a service")
@pytest.mark.parametrize("name", FAULTS)
def test_a_search_that_fails_returns_none_in_bounded_time(name):
    with serving(FAULTS[name]) as service:
        began = time.monotonic()
        assert asking(service.url)(["a"]) == [None]
        assert time.monotonic() - began < 3


def test_a_search_may_take_nearly_its_whole_timeout():
    def behave(handler, queries, number):
        time.sleep(1.5)
        send(handler, right(queries))

    with serving(behave) as service:
        assert asking(service.url, timeout_seconds=3.0)(["a"])[0] is not None


@pytest.mark.fault(30, "bounded wait")
@pytest.mark.fault(32, "slow bytes")
def test_a_reply_in_timely_parts_has_no_longer_than_the_timeout_in_total():
    def behave(handler, queries, number):
        time.sleep(1.0)
        handler.send_response(200)
        handler.end_headers()
        for _ in range(9):
            time.sleep(0.1)
            handler.wfile.write(b" ")
        time.sleep(4)

    with serving(behave) as service:
        began = time.monotonic()
        assert asking(service.url, timeout_seconds=2.0)(["a"]) == [None]
        assert time.monotonic() - began < 2.5


def rearag_reply(query):
    """The body of a reply in ReaRAG's dialect."""
    return json.dumps([[{"id": query, "contents": f"{query}\n."}], [1]]).encode()


def test_calls_that_wait_for_their_turn_get_the_whole_timeout(monkeypatch):
    monkeypatch.setattr(remote, "CONCURRENCY", 2)

    def behave(handler, queries, number):
        time.sleep(0.4)
        send(handler, rearag_reply("a"))

    with serving(behave) as service:
        search = asking(service.url, api="rearag", timeout_seconds=1.2, max_retries=0)
        assert None not in search(list("abcdefgh"))


@pytest.mark.fault(30, "bounded wait")
def test_a_stuck_service_is_not_asked_for_the_rest_of_a_search(monkeypatch):
    monkeypatch.setattr(remote, "CONCURRENCY", 2)
    with serving(FAULTS["stopped"]) as service:
        search = asking(service.url, api="rearag", timeout_seconds=0.5, max_retries=0)
        began = time.monotonic()
        assert search(list("abcdefghijkl")) == [None] * 12
        assert time.monotonic() - began < 2
        assert len(service.bodies) < 12


def raw(head):
    """A reply whose first lines are these bytes, with a correct body."""

    def behave(handler, queries, number):
        handler.wfile.write(head + b"\r\n\r\n" + right(queries))

    return behave


HUGE_NUMBERS = {
    "score of 400 digits": rows([HIT | {"score": 10**400}]),
    "score of 5000 digits": rows([HIT]).replace(b"1}", b"7" * 5000 + b"}"),
    "length of 400 digits": raw(b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 400),
    "negative length": raw(b"HTTP/1.1 200 OK\r\nContent-Length: -5"),
    "chunk of 400 digits": raw(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 400
    ),
    "status of 40 digits": raw(b"HTTP/1.1 " + b"2" * 40 + b" OK"),
    **{
        f"Retry-After: {value}": raw(
            b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nRetry-After: " + value.encode()
        )
        for value in (
            "9" * 400,
            "-1",
            "Mon, 01 Jan 99999999999999999999 00:00:00 GMT",
            "Mon, 01 Jan 0001 00:00:00 +9999",
            "Mon, 31 Dec 9999 23:59:59 -9999",
            "Mon, 99 Jan 2030 99:99:99 +" + "9" * 30,
        )
    },
}


@pytest.mark.fault(73, "score", "lengths", "dates")
@pytest.mark.parametrize("name", HUGE_NUMBERS)
def test_an_absurd_number_makes_a_search_fail(name):
    reply = HUGE_NUMBERS[name]
    behave = reply if callable(reply) else lambda h, q, n: send(h, reply)
    with serving(behave) as service:
        search = asking(service.url, max_retries=0, top_k=1)
        assert search(["a"]) == [None]
        assert search(["b"]) == [None]  # and no state is damaged


TEXTS = {  # by dialect: replies with a string or an object in place of a list
    "search_r1": [
        {"result": "ab"},
        {"result": {"0": [HIT]}},
        {"result": [HIT["document"]["contents"]]},
        {"result": [{"a": HIT}]},
        {"result": [["contents"]]},
        {"result": [[{"document": "contents", "score": 1}]]},
        {"result": [None]},
    ],
    "r1_searcher": [
        {"answers": "Paris"},
        {"answers": ["Paris"]},
        {"answers": {"0": ["Paris"]}},
        {"answers": [{"Paris": 1}]},
        {"answers": [[["Paris"]]]},
    ],
    "rearag": [
        {"a": 1, "b": 2},
        "ab",
        ["ab", [1, 2]],
        [[{"contents": "a\n."}], "1"],
        [[{"contents": "a\n."}], [1, 2]],
        [[{"contents": "a\n."}], {"0": 1}],
        [{"contents": 1, "id": 2}, [1, 2]],
    ],
    "serper": [
        {"organic": "ab"},
        {"organic": {"title": "T", "link": "http://a"}},
        {"organic": [{"title": ["T"], "link": "http://a"}]},
        {"organic": [{"title": "T", "link": None}]},
    ],
}


@pytest.mark.fault(75, "text for a list", "object for a list")
@pytest.mark.parametrize("api", TEXTS)
def test_a_string_in_place_of_a_list_is_no_list_of_letters(api):
    replies = iter(TEXTS[api])
    with serving(lambda h, q, n: send(h, json.dumps(next(replies)).encode())) as s:
        for _ in TEXTS[api]:
            assert asking(s.url, api=api, max_retries=0)(["query"]) == [None]


@pytest.mark.fault(75, "null id", "missing score", "score of another type")
def test_a_null_id_or_score_is_none_and_a_hit_of_wrong_types_is_left_out():
    def hit(contents, **fields):
        document = {"contents": contents}
        if "id" in fields:
            document["id"] = fields.pop("id")
        return {"document": document, **fields}

    body = rows(
        [
            hit("scored\n.", id=7, score=0.5),
            hit("without\n."),
            hit("null\n.", id=None, score=None),
            hit("blank id\n.", id="", score=2),
            *(hit("bad\n.", id="x", score=bad) for bad in (True, "0.9", [1], {})),
            *(hit("bad\n.", id=bad, score=1) for bad in (True, 1.5, ["x"], {})),
            hit(" \n", id="blank", score=1),
        ]
    )
    with serving(lambda h, q, n: send(h, body)) as service:
        (actual,) = asking(service.url, top_k=9)(["q"])
    assert [(p.id, p.score) for p in actual] == [
        ("7", 0.5),
        ("without", None),
        ("null", None),
        ("blank id", 2.0),
    ]


@pytest.mark.fault(75, "missing score")
@pytest.mark.parametrize("api", ["r1_searcher", "rearag", "serper"])
def test_passages_of_a_dialect_without_scores_keep_their_order(api):
    reply = {
        "r1_searcher": {"answers": [["b\n.", "a\n."]]},
        "rearag": [[{"contents": "b\n."}, {"contents": "a\n."}], None],
        "serper": {"organic": [{"title": t, "link": t} for t in "ba"]},
    }[api]
    with serving(lambda h, q, n: send(h, json.dumps(reply).encode())) as service:
        (actual,) = asking(service.url, api=api)(["q"])
    assert [(p.id, p.score) for p in actual] == [("b", None), ("a", None)]


def refusing(is_bad, status=400):
    """Refuse a call if any of its queries is bad, as servers do."""

    def behave(handler, queries, number):
        if any(map(is_bad, queries)):
            return send(handler, b'{"error": "a query is too long"}', status)
        send(handler, right(queries))

    return behave


@pytest.mark.fault(76, "question too long", "no outage")
@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_query_fails_alone_and_is_no_outage(status):
    with serving(refusing(lambda q: len(q) > 99, status)) as service:
        search = asking(service.url, max_retries=0, outage_seconds=0.0)
        queries = [*"abcdefg", "long" * 99, *"hij"]
        assert [r is None for r in search(queries)] == [len(q) > 99 for q in queries]
        assert len(service.bodies) < 11
        for number in range(4):  # such refusals say nothing about the service
            assert search([f"{number}" * 100]) == [None]


@pytest.mark.fault(76, "malformed hit", "malformed row")
def test_a_malformed_hit_or_row_affects_no_other_row():
    bad = {"document": {"id": "b"}, "score": 1}
    latin = HIT | {"document": {"id": "l", "contents": "caf\u00e9\n."}}
    body = rows([HIT, bad], [bad], "no list", [], [latin]).replace(b"\\u00e9", b"\xe9")
    with serving(lambda h, q, n: send(h, body)) as service:
        actual = asking(service.url, max_retries=0)(list("abcde"))
    assert actual[:4] == [(Passage("a", "a\n.", 1.0),), None, None, ()]
    assert actual[4][0].id == "l"
    assert len(service.bodies) == 1


@pytest.mark.fault(76, "long passage", "same bounds")
def test_a_long_passage_is_accepted_as_in_a_file_and_a_longer_one_fails_alone(
    tmp_path, monkeypatch
):
    long = "title\n" + "x" * 200_000
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "a", "contents": long}))
    (local,) = Corpus(tmp_path / "corpus.jsonl")

    def behave(handler, queries, number):
        hits = [[{"document": {"id": "a", "contents": long}}], [HIT]]
        send(handler, rows(*hits))

    with serving(behave) as service:
        actual = asking(service.url, top_k=1)(["a", "b"])
        assert actual[0][0].contents == local.contents == long
        monkeypatch.setattr(remote, "MAX_PASSAGE_BYTES", 100_000)
        actual = asking(service.url, top_k=1)(["a", "b"])
        assert actual[0] is None and actual[1][0].id == "a"


def test_a_service_that_refuses_all_of_several_queries_is_an_outage():
    with serving(refusing(lambda q: True)) as service:
        search = asking(service.url, max_retries=0, outage_seconds=0.0)
        with pytest.raises(OutageError):
            for _ in range(5):
                search(["a", "b"])


@pytest.mark.fault(32, "5xx", "reset")
@pytest.mark.parametrize("name", ["500", "reset", "wrong shape", "truncated"])
def test_a_call_that_fails_once_is_retried(name):
    def behave(handler, queries, number):
        if number == 0:
            return FAULTS[name](handler, queries, number)
        send(handler, right(queries))

    with serving(behave) as service:
        assert asking(service.url)(["a"]) == [(Passage("a", "a\n.", 1.0),)]


@pytest.mark.fault(32, "Retry-After in seconds")
def test_a_search_waits_as_long_as_retry_after_says():
    def behave(handler, queries, number):
        if number == 0:
            return send(handler, b"", 429, Retry_After="1")
        send(handler, right(queries))

    with serving(behave) as service:
        began = time.monotonic()
        search = asking(service.url, timeout_seconds=20.0)
        assert search(["a"])[0] is not None
        assert time.monotonic() - began >= 1


@pytest.mark.fault(33, "duplicates", "NaN score")
def test_hits_with_a_score_that_is_not_finite_and_repeated_hits_are_left_out():
    other = {"document": {"id": "b", "contents": "b\n."}, "score": 0.5}
    padding = [HIT | {"score": float(x)} for x in ("nan", "inf", "-inf")]
    body = rows([*padding, HIT, HIT, other, HIT])

    with serving(lambda h, q, n: send(h, body)) as service:
        (actual,) = asking(service.url)(["q"])
    assert [(p.id, p.score) for p in actual] == [("a", 1.0), ("b", 0.5)]


def test_the_open_web_is_asked_with_its_own_key(monkeypatch):
    monkeypatch.setenv("SERPER_KEY", "canary-0123")
    seen = []

    def behave(handler, queries, number):
        seen.append((handler.path, handler.headers["X-API-KEY"]))
        hit = {"title": "T", "link": "https://site.org/t", "snippet": "s", "rank": 1}
        body = {"organic": [hit, {"title": "U", "link": "https://site.org/u"}]}
        send(handler, json.dumps(body).encode())

    with serving(behave) as service:
        search = asking(service.url, api="serper", api_key_env="SERPER_KEY")
        (actual,) = search(["q"])
        of_site = asking(service.url, api="serper", site="a.org")
        of_site(["q"])
    assert service.bodies.pop()["q"] == "q site:a.org"
    assert of_site.fingerprint != search.fingerprint
    assert seen.pop() == ("/search", None)
    assert seen == [("/search", "canary-0123")]
    assert service.bodies == [{"q": "q", "num": 2}]
    assert [p.contents for p in actual] == ['"T"\ns', '"U"\n']
    assert [p.id for p in actual] == ["https://site.org/t", "https://site.org/u"]


def test_equal_and_blank_queries_are_not_sent_and_failures_are_not_cached():
    def behave(handler, queries, number):
        if number in (0, 1):
            return send(handler, b"{}", 500)
        send(handler, right(queries))

    with serving(behave) as service:
        search = asking(service.url)
        assert search(["a", "a", ""]) == [None, None, ()]
        assert search(["a", "b"])[0] is not None
        assert search(["b", "a", "c"])[1] is not None
    assert [b["queries"] for b in service.bodies[2:]] == [["a", "b"], ["c"]]


def test_a_failed_call_of_several_fails_only_its_own_queries(monkeypatch):
    monkeypatch.setattr(remote, "QUERIES_A_CALL", 2)

    def behave(handler, queries, number):
        send(handler, right(queries), 404 if "c" in queries else 200)

    with serving(behave) as service:
        actual = asking(service.url)(["a", "b", "c", "d", "e"])
    assert [own and own[0].id for own in actual] == ["a", "b", None, None, "e"]
    sent = sorted(body["queries"] for body in service.bodies)
    assert sent == [["a", "b"], ["c", "d"], ["e"]]


def test_searches_overlap_only_if_the_dialect_sends_many_queries_in_a_call():
    both = threading.Barrier(2)

    def behave(handler, queries, number):
        both.wait(20)  # for the other search
        send(handler, right(queries))

    with serving(behave) as service:
        search = asking(service.url, max_retries=0, timeout_seconds=60)
        assert search.searches_at_once > 1
        with ThreadPoolExecutor(2) as pool:
            actual = list(pool.map(search, [["a"], ["b"]]))
    assert [own[0].contents for (own,) in actual] == ["a\n.", "b\n."]
    assert asking(service.url, api="rearag").searches_at_once == 1


def test_a_query_of_two_overlapping_searches_is_sent_once():
    begun, may_answer = threading.Event(), threading.Event()

    def behave(handler, queries, number):
        begun.set()
        if "a" in queries:
            may_answer.wait(20)
        send(handler, right(queries))

    with serving(behave) as service, ThreadPoolExecutor(2) as pool:
        search = asking(service.url, max_retries=0, timeout_seconds=60)
        first = pool.submit(search, ["a"])
        assert begun.wait(20)
        second = pool.submit(search, ["b", "a"])
        while len(service.bodies) < 2:
            time.sleep(0.01)
        may_answer.set()
        assert second.result()[1] is first.result()[0] is not None
    assert [body["queries"] for body in service.bodies] == [["a"], ["b"]]


@pytest.mark.fault(30, "bounded wait")
def test_after_several_failures_a_search_waits_for_the_service_to_return():
    away = threading.Event()
    away.set()

    def behave(handler, queries, number):
        send(handler, right(queries), 503 if away.is_set() else 200)

    with serving(behave) as service:
        search = asking(service.url, max_retries=0)
        assert [search([q]) for q in "ab"] == [[None], [None]]
        threading.Timer(0.5, away.clear).start()
        began = time.monotonic()
        assert search(["c"])[0] is not None  # not wasted while it was unreachable
        assert 0.3 < time.monotonic() - began < 3


@pytest.mark.fault(30, "saved if it lasts")
def test_a_service_that_stays_unreachable_ends_the_run_with_an_outage():
    with serving(FAULTS["500"]) as service:
        search = asking(service.url, max_retries=0, outage_seconds=0.3)
        with pytest.raises(OutageError, match=r"unreachable for"):
            for query in "abc":
                search([query])


@pytest.mark.fault(30, "at the start")
def test_a_missing_service_is_reported_immediately_with_a_remedy():
    with serving(FAULTS["500"]) as service:
        url = service.url
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"python -m rsearch\.retriever"):
        asking(url).check()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("here:80", "config.retrieval.url 'here:80' must be an http"),
        ("ftp://host/", "must be an http"),
        ("http://me:hunter2@host/", "must not contain a password"),
        ("http://host/?key=hunter2", "must not contain a password, query"),
    ],
)
def test_an_invalid_url_or_one_with_a_secret_is_refused(url, message):
    with pytest.raises(ValueError) as error:
        asking(url)
    assert message in str(error.value) and "hunter2" not in str(error.value)
