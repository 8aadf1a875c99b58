"""The retrieval service, asked by its own client and by others."""

import contextlib
import json

import httpx
import pytest

from rsearch import retriever
from rsearch.config.recipes import parse_command_line, validate
from rsearch.retrieval.service import RemoteSearch
from rsearch.runtime.server import JsonServer
from rsearch.setup.search import open_search
from rsearch.types import Passage
from tests.running_server import running
from tests.small_run import config

PASSAGES = [Passage(f"p{i}", f'"T{i}"\ntext {i}', 1.0 - i / 10) for i in range(5)]
SETTINGS = dict(top_k=3, max_k=4, max_query_chars=50)


def find(queries):
    """Four passages of every query but a blank one; some searches fail."""
    if "fail" in queries:
        return [None for _ in queries]
    return [tuple(PASSAGES[:4]) if q.strip() else () for q in queries]


@contextlib.contextmanager
def serving(search=find, **settings):
    """The address of a service."""
    server = JsonServer("127.0.0.1", 0, retriever.routes_of(search, **SETTINGS))
    for name, value in settings.items():
        setattr(server, name, value)
    with running(server):
        yield f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def ask(url, path, body):
    reply = httpx.post(url + path, json=body)
    return reply.status_code, reply.json()


@pytest.mark.parametrize("api", ["search_r1", "r1_searcher", "rearag"])
def test_a_run_finds_the_same_in_every_dialect(api):
    with serving() as url:
        search = RemoteSearch(url, api=api, top_k=2)
        search.check()
        actual = search(["a", " ", "b", "a"])
    contents = [[p.contents for p in own] for own in actual]
    two = [p.contents for p in PASSAGES[:2]]
    assert contents == [two, [], two, two]
    if api != "r1_searcher":  # which tells neither ids nor scores
        assert actual[0] == tuple(PASSAGES[:2])


def test_more_queries_than_a_service_takes_in_a_call_are_all_answered():
    asked = [f"q{i}" for i in range(2 * retriever.MAX_QUERIES + 1)]

    def echo(queries):
        return [(Passage(q, f"{q}\n.", 1.0),) for q in queries]

    with serving(echo) as url:
        actual = RemoteSearch(url, api="search_r1", top_k=1)(asked)
    assert [own[0].id for own in actual] == asked


def test_search_r1_is_answered_as_its_server_does():
    with serving() as url:
        body = {"queries": ["a"], "topk": 1, "return_scores": True}
        status, reply = ask(url, "/retrieve", body)
        assert (status, reply) == (
            200,
            {
                "result": [
                    [{"document": {"id": "p0", "contents": '"T0"\ntext 0'}, "score": 1}]
                ]
            },
        )
        _, reply = ask(url, "/retrieve", {"queries": ["a", "b"], "topk": None})
        assert [len(own) for own in reply["result"]] == [3, 3]


def test_r1_searcher_is_answered_as_its_server_does():
    with serving() as url:
        _, reply = ask(url, "/queries", {"queries": ["a", "b"], "k": 2})
    texts = ['"T0"\ntext 0', '"T1"\ntext 1']
    assert reply == {"queries": ["a", "b"], "answers": [texts, texts]}


def test_rearag_is_answered_as_its_server_does():
    documents = [{"id": "p0", "contents": '"T0"\ntext 0'}]
    with serving() as url:
        body = {"query": "a", "top_n": 1}
        assert ask(url, "/search", body) == (200, documents)
        body = {"query": "a", "top_n": 1, "return_score": True}
        assert ask(url, "/search", body) == (200, [documents, [1.0]])
        body = {"query": ["a", "b"], "top_n": 1}
        assert ask(url, "/batch_search", body) == (200, [documents, documents])


def test_a_run_asks_the_service_that_it_names():
    with serving() as url:
        search = open_search(config(retrieval__url=url, retrieval__top_k=2), None)
        assert search(["a"]) == [tuple(PASSAGES[:2])]
        assert str(search) == f"the service {url}/retrieve"
    with pytest.raises(ValueError, match="ConnectError; start one"):
        open_search(config(retrieval__url=url), None)
    for wrong in (dict(index="x", url=url), dict(fetch_pages=True)):
        c = config(**{f"retrieval__{name}": value for name, value in wrong.items()})
        with pytest.raises(ValueError, match=r"config\.retrieval"):
            validate(c)


def test_the_command_that_starts_a_service_has_the_flags_it_is_told_with():
    with serving() as url:
        pass
    with pytest.raises(ValueError) as error:
        RemoteSearch(url, api="search_r1", top_k=1).check()
    _, words = str(error.value).split("python -m rsearch.retriever ")
    c, _ = parse_command_line(words.split(), flags=retriever.FLAGS)
    validate(c)
    # Of the world its passages would be searched, and no index.
    assert c.retrieval.index == "DIR" and c.retrieval.corpus != "world"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/retrieve", {}, 400),
        ("/retrieve", {"queries": []}, 400),
        ("/retrieve", {"queries": "a"}, 400),
        ("/retrieve", {"queries": [1]}, 400),
        ("/retrieve", {"queries": ["x" * 51]}, 400),
        ("/retrieve", {"queries": ["a"] * 513}, 400),
        ("/retrieve", {"queries": ["a"], "topk": -1}, 400),
        ("/retrieve", {"queries": ["a"], "topk": 5}, 400),
        ("/retrieve", {"queries": ["a"], "topk": 1.5}, 400),
        ("/retrieve", {"queries": ["a"], "topk": "3"}, 400),
        ("/retrieve", {"queries": ["a"], "topk": True}, 400),
        ("/retrieve", {"queries": ["a"], "topk": False}, 400),
        ("/retrieve", {"queries": ["a"], "return_scores": "no"}, 400),
        ("/search", {"query": "a", "return_score": "false"}, 400),
        ("/queries", {"queries": None}, 400),
        ("/search", {"query": ["a"]}, 400),
        ("/search", {"query": None}, 400),
        ("/batch_search", {"query": "a"}, 400),
        ("/retrieve", {"queries": ["fail"]}, 503),
        ("/other", {"queries": ["a"]}, 404),
    ],
)
def test_what_makes_no_sense_is_refused(path, body, status):
    with serving() as url:
        actual, reply = ask(url, path, body)
        assert actual == status and reply.keys() == {"error"}
        assert ask(url, "/retrieve", {"queries": ["a"]})[0] == 200  # it goes on


@pytest.mark.parametrize("k", [0, 0.0, None])
def test_as_many_passages_as_configured_where_a_request_does_not_say(k):
    with serving() as url:
        _, reply = ask(url, "/retrieve", {"queries": ["a"], "topk": k})
        assert len(reply["result"][0]) == 3
        _, reply = ask(url, "/retrieve", {"queries": ["a"], "topk": 2.0})
        assert len(reply["result"][0]) == 2


def test_a_default_of_a_dialect_is_at_most_what_the_service_allows():
    """ReaRAG's is 10, this service's most is 4."""
    with serving() as url:
        status, reply = ask(url, "/search", {"query": "a"})
        assert status == 200 and len(reply) == 4


def test_lone_surrogates_are_no_fault():
    with serving() as url:
        body = json.dumps({"queries": ["\ud83d"]})
        kind = {"Content-Type": "application/json"}
        assert httpx.post(f"{url}/retrieve", content=body, headers=kind).is_success


def test_a_token_is_asked_for_and_given(monkeypatch):
    monkeypatch.setenv("SEARCH_KEY", "canary-0123")
    with serving(token="canary-0123") as url:
        search = RemoteSearch(url, api="search_r1", top_k=1, api_key_env="SEARCH_KEY")
        assert search(["a"]) == [(PASSAGES[0],)]
        assert "canary" not in f"{search} {search.fingerprint}"
        with pytest.raises(ValueError, match="HTTP 401"):
            RemoteSearch(url, api="search_r1", top_k=1).check()
