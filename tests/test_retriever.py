"""The retrieval service, called by its own client and by public ones."""

import contextlib
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx
import pytest

from rsearch import retriever
from rsearch.config.checks import validate_search
from rsearch.config.recipes import parse_command_line, run_command, validate
from rsearch.retrieval.service import RemoteSearch
from rsearch.runtime.server import JsonServer
from rsearch.setup.search import open_search
from rsearch.types import Passage
from tests.running_server import running
from tests.small_run import arguments, config

PASSAGES = [Passage(f"p{i}", f'"T{i}"\ntext {i}', 1.0 - i / 10) for i in range(5)]
SETTINGS = dict(top_k=3, max_k=4, max_query_chars=50)


CLIENT = httpx.Client(trust_env=False)  # loads certificates once


def find(queries):
    """Return four passages for each query, none for a blank one; "fail" fails."""
    if "fail" in queries:
        return [None for _ in queries]
    return [tuple(PASSAGES[:4]) if q.strip() else () for q in queries]


@contextlib.contextmanager
def serving(search=find, *, token="", **settings):
    """Serve a search; yield the service's address."""
    routes = retriever.routes_of(search, **SETTINGS | settings)
    server = JsonServer("127.0.0.1", 0, routes, token=token, max_body_bytes=1 << 20)
    with running(server):
        yield f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def ask(url, path, body):
    reply = CLIENT.post(url + path, json=body)
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
    if api != "r1_searcher":  # whose replies have neither ids nor scores
        assert actual[0] == tuple(PASSAGES[:2])


def test_more_queries_than_a_service_takes_per_request_are_all_answered():
    asked = [f"q{i}" for i in range(1025)]

    def echo(queries):
        return [(Passage(q, f"{q}\n.", 1.0),) for q in queries]

    with serving(echo) as url:
        actual = RemoteSearch(url, api="search_r1", top_k=1)(asked)
    assert [own[0].id for own in actual] == asked


def test_search_r1s_requests_are_answered_as_by_its_own_server():
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


def test_r1_searchers_requests_are_answered_as_by_its_own_server():
    with serving() as url:
        _, reply = ask(url, "/queries", {"queries": ["a", "b"], "k": 2})
    texts = ['"T0"\ntext 0', '"T1"\ntext 1']
    assert reply == {"queries": ["a", "b"], "answers": [texts, texts]}


def test_rearags_requests_are_answered_as_by_its_own_server():
    documents = [{"id": "p0", "contents": '"T0"\ntext 0'}]
    with serving() as url:
        body = {"query": "a", "top_n": 1}
        assert ask(url, "/search", body) == (200, documents)
        body = {"query": "a", "top_n": 1, "return_score": True}
        assert ask(url, "/search", body) == (200, [documents, [1.0]])
        body = {"query": ["a", "b"], "top_n": 1}
        assert ask(url, "/batch_search", body) == (200, [documents, documents])


class Client(NamedTuple):
    """What a public client posts, and how it reads texts from the reply."""

    path: str
    body: Callable  # queries -> body
    read: Callable  # reply -> texts
    is_batched: bool = True
    two: str = 'Doc 1(Title: "T0") text 0\nDoc 2(Title: "T1") text 1\n'


def shown(form):
    """Return a function that formats a query's passages as a client does."""

    def word(texts):
        parts = (text.split("\n", 1) for text in texts)
        pairs = [(title, rest[0] if rest else "") for title, *rest in parts]
        return "".join(
            form.format(i, t, r, f"{t}\n{r}") for i, (t, r) in enumerate(pairs, 1)
        )

    return word


TITLED = shown("Doc {0}(Title: {1}) {2}\n")


def search_r1(queries, scores=True):
    return {"queries": queries, "topk": 2, "return_scores": scores}


def skyrl(queries):
    (query,) = queries
    return {"query": query, "topk": 2, "return_scores": True}


def rearag(queries):
    (query,) = queries
    return {"query": query, "top_n": 2, "return_score": False}


def flashrag(with_scores):
    return lambda q: {"query": q, "top_n": 2, "return_score": with_scores}


def wrapped(form):
    """Return a function that reads documents that come with scores."""
    return lambda reply: [
        form([hit["document"]["contents"] for hit in row]) for row in reply["result"]
    ]


def bare(reply):
    """Read documents without scores, and any other value as one without contents."""
    return [TITLED([d.get("contents", "") for d in row]) for row in reply["result"]]


def r1_searcher(reply):
    rows = [[re.sub(r"^\d+\s+", "", t) for t in row] for row in reply["answers"]]
    return ["".join(f"({i}){t}\n" for i, t in enumerate(row, 1)) for row in rows]


def contents(documents):
    return "\n\n".join(document["contents"] for document in documents)


NUMBERED = 'Doc 1: "T0"\ntext 0\nDoc 2: "T1"\ntext 1\n'
BARE = '"T0"\ntext 0\n\n"T1"\ntext 1'
CLIENTS = {
    "search_r1": Client("/retrieve", search_r1, wrapped(TITLED)),
    "verl": Client(
        "/retrieve",
        search_r1,
        wrapped(shown("Doc {0} (Title: {1})\n{2}\n\n")),
        two='Doc 1 (Title: "T0")\ntext 0\n\nDoc 2 (Title: "T1")\ntext 1\n\n',
    ),
    "skyrl": Client(
        "/retrieve", skyrl, wrapped(shown("Doc {0}: {3}\n")), False, NUMBERED
    ),
    "slime": Client("/retrieve", lambda q: search_r1(q, False), bare),
    "torchtitan": Client("/retrieve", lambda q: search_r1(q, False), bare),
    "r_search": Client(
        "/retrieve_2wikimultihopqa",
        search_r1,
        wrapped(shown("(Title: {1}) {2}\n")),
        two='(Title: "T0") text 0\n(Title: "T1") text 1\n',
    ),
    "rag_r1": Client(
        "/retrieve", search_r1, wrapped(shown("Doc {0}: {3}\n")), two=NUMBERED
    ),
    "r1_searcher": Client(
        "/queries",
        lambda q: {"queries": q, "k": 2},
        r1_searcher,
        two='(1)"T0"\ntext 0\n(2)"T1"\ntext 1\n',
    ),
    "rearag": Client("/search", rearag, lambda reply: [contents(reply)], False, BARE),
    "flashrag": Client(
        "/batch_search",
        flashrag(False),
        lambda reply: [contents(row) for row in reply],
        two=BARE,
    ),
    "flashrag with scores": Client(
        "/batch_search",
        flashrag(True),
        lambda reply: [
            contents(row)
            for row, scores in zip(*reply, strict=True)
            if scores == [1.0, 0.9][: len(row)]
        ],
        two=BARE,
    ),
}


@pytest.mark.fault(91, "public clients", "queries of a single text", "named routes")
@pytest.mark.parametrize("name", CLIENTS)
def test_a_public_client_shows_its_model_the_passages_found(name):
    client = CLIENTS[name]
    asked = [["a"], ["a", "b", "a"], [" ", "a"], []] if client.is_batched else [["a"]]
    with serving() as url:
        for queries in asked:
            status, reply = ask(url, client.path, client.body(queries))
            assert status == 200
            expected = [client.two if query.strip() else "" for query in queries]
            assert client.read(reply) == expected


DOCUMENT = {"id": "p0", "contents": '"T0"\ntext 0'}


@pytest.mark.fault(91, "replies without scores")
@pytest.mark.parametrize("path", ["/retrieve", "/retrieve_wiki-18"])
@pytest.mark.parametrize(
    ("flag", "hit"),
    [
        ({}, DOCUMENT),
        ({"return_scores": None}, DOCUMENT),
        ({"return_scores": False}, DOCUMENT),
        ({"return_scores": True}, {"document": DOCUMENT, "score": 1.0}),
    ],
)
def test_without_scores_a_passage_is_the_bare_document(path, flag, hit):
    with serving() as url:
        for asked in (
            {"queries": ["a"]},
            {"query": "a"},
            {"query": "a", "queries": None},
        ):
            assert ask(url, path, {**asked, "topk": 1, **flag}) == (
                200,
                {"result": [[hit]]},
            )


@pytest.mark.fault(91, "no queries")
@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/retrieve", {"queries": []}, {"result": []}),
        ("/retrieve_nq", {"queries": [], "return_scores": True}, {"result": []}),
        ("/queries", {"queries": []}, {"queries": [], "answers": []}),
        ("/batch_search", {"query": []}, []),
        ("/batch_search", {"query": [], "return_score": True}, [[], []]),
        ("/retrieve", {"queries": [""]}, {"result": [[]]}),
        ("/search", {"query": "", "return_score": True}, [[], []]),
    ],
)
def test_empty_requests_get_empty_results(path, body, expected):
    with serving() as url:
        assert ask(url, path, body) == (200, expected)


@pytest.mark.fault(91, "many queries")
def test_a_large_batch_is_searched_in_parts():
    sizes = []

    def echo(queries):
        sizes.append(len(queries))
        return [(Passage(query, query),) for query in queries]

    asked = [f"q{i // 2}" for i in range(2560)]  # each of them twice
    with serving(echo, max_queries=2560) as url:
        _, reply = ask(url, "/retrieve", {"queries": asked})
        assert [row[0]["contents"] for row in reply["result"]] == asked
        assert sum(sizes) == 1280 and max(sizes) <= 512
        assert ask(url, "/retrieve", {"queries": [*asked, "q"]})[0] == 400


@pytest.mark.parametrize("searches_at_once", [1, 2])
def test_searches_overlap_only_if_the_engine_allows_it(searches_at_once):
    both_began = threading.Barrier(2, timeout=1.0)

    def search(queries):
        try:
            both_began.wait()
        except threading.BrokenBarrierError:
            return [() for _ in queries]
        return [(PASSAGES[0],) for _ in queries]

    search.searches_at_once = searches_at_once
    with serving(search) as url, ThreadPoolExecutor(2) as threads:
        body = {"queries": ["a"]}
        asked = [threads.submit(ask, url, "/retrieve", body) for _ in range(2)]
        results = [reply.result()[1]["result"] for reply in asked]
    assert [bool(hits) for (hits,) in results] == 2 * [searches_at_once > 1]


@pytest.mark.fault(91, "many passages")
def test_the_deep_engine_is_used_only_for_requests_of_many_passages():
    calls = []

    def finding(num):
        def search(queries):
            calls.append(num)
            return [tuple(Passage(f"p{i}", "t") for i in range(num)) for _ in queries]

        return search

    with serving(finding(20), deep_search=finding(100), max_k=100) as url:
        for k in (3, 20, 21, 100, 101):
            status, reply = ask(url, "/retrieve", {"queries": ["a"], "topk": k})
            assert status == (200 if k <= 100 else 400)
            assert k > 100 or len(reply["result"][0]) == k
    assert calls == [20, 20, 100, 100]


@pytest.mark.fault(91, "long queries")
def test_the_limits_of_a_request_are_above_what_trainers_send():
    _, values = parse_command_line(
        ["--config=configs/quickstart.py"], flags=retriever.FLAGS
    )
    assert values["max_queries"] >= 2560 and values["max_query_chars"] >= 32_000
    assert values["max_body_bytes"] >= 2560 * 4000
    with serving(max_query_chars=values["max_query_chars"]) as url:
        long = "word " * 6000
        assert len(ask(url, "/retrieve", {"query": long})[1]["result"][0]) == 3


@pytest.mark.fault(91, "reasons in the status line")
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/retrieve", {"queries": "a"}, "queries"),
        ("/retrieve", {"query": "x" * 51}, "query"),
        ("/retrieve_nq", {"queries": ["a"], "topk": 99}, "passages"),
        ("/retrieve", {"queries": ["fail"]}, "search failed"),
        ("/nowhere", {}, "no such route"),
    ],
)
def test_the_status_line_has_the_reason_for_clients_that_print_no_body(
    path, body, field
):
    with serving() as url:
        reply = CLIENT.post(url + path, json=body)
        assert field in reply.reason_phrase
        assert reply.json()["error"].startswith(reply.reason_phrase)


@pytest.mark.fault(91, "passages as the client shows them")
def test_a_title_that_starts_with_a_number_is_kept():
    """R1-Searcher's client drops the number with which its server's texts start."""
    titles = ["1984\nA novel.", "300 BC\nA year.", "7up\nA drink.", '"1"\nA number.']

    def search(queries):
        return [tuple(Passage(t, t) for t in titles) for _ in queries]

    with serving(search) as url:
        _, reply = ask(url, "/queries", {"queries": ["a"], "k": 4})
        expected = "".join(f"({i}){text}\n" for i, text in enumerate(titles, 1))
        assert r1_searcher(reply) == [expected]
        (hits,) = RemoteSearch(url, api="r1_searcher", top_k=4)(["a"])
        assert [p.contents for p in hits] == titles
    lines = {("POST", "/queries"): lambda body: {"answers": [["12\tA title text"]]}}
    with running(JsonServer("127.0.0.1", 0, lines)) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        (hits,) = RemoteSearch(url, api="r1_searcher", top_k=1)(["a"])
        assert [p.contents for p in hits] == ["A title text"]


@pytest.mark.fault(91, "only what searching needs")
def test_a_service_loads_only_what_searching_needs():
    """Questions, model, tokenizer and reward need not exist or fit the corpus."""
    c = config(
        retrieval__engine="tests.test_retriever:find",
        data__train="world:train",
        data__dev="nowhere.jsonl",
        tokenizer__source="nowhere",
        model__source="world",
        world__people=0,
    )
    search, deep = retriever.open_engines(c, 4)
    validate_search(c)
    # Nor need the index be of the world that the questions come from.
    validate_search(config(retrieval__corpus="", retrieval__index="DIR"))
    assert search(["a"]) == [tuple(PASSAGES[:4])] and deep is None


def find_by_question(queries, question_ids):
    return find(queries)


find_by_question.wants_question_ids = True


def test_an_engine_that_takes_question_ids_is_not_served():
    name = "tests.test_retriever:find_by_question"
    with pytest.raises(ValueError, match=f"retrieval.engine = '{name}' takes the ids"):
        retriever.open_engines(config(retrieval__engine=name), 4)


def test_a_service_searches_the_world_of_its_configuration():
    c = config(retrieval__top_k=2)
    search, deep = retriever.open_engines(c, 50)
    (few,), (many,) = search(["the film"]), deep(["the film"])
    assert len(few) == 20 and len(many) == 50 and many[:20] == few


@pytest.mark.parametrize(
    "words",
    [
        ["--max_k=2", "--config.retrieval.top_k=3"],
        ["--max_queries=0"],
        ["--max_k=-1"],
        [
            "--max_k=9",
            "--config.retrieval.reranker=m",
            "--config.retrieval.rerank_from=8",
        ],
        ["--config.retrieval.index=x"],
        ["--config.retrieval.top_k=0"],
    ],
)
def test_a_wrong_command_ends_with_one_line_and_code_2(words, capsys):
    given = [w for w in arguments("x") if not w.startswith("--workdir")]
    assert run_command(retriever.main, [*given, "--port=0", *words]) == 2
    message = capsys.readouterr().err
    flag, _, value = words[0].removeprefix("--").partition("=")
    assert flag in message and value in message and "Traceback" not in message


def test_a_run_searches_with_the_service_that_it_names():
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


def test_the_command_suggested_for_starting_a_service_is_valid():
    with serving() as url:
        pass
    with pytest.raises(ValueError) as error:
        RemoteSearch(url, api="search_r1", top_k=1).check()
    _, words = str(error.value).split("python -m rsearch.retriever ")
    c, _ = parse_command_line(words.split(), flags=retriever.FLAGS)
    validate(c)
    # With the world as its corpus it would search that and not the index.
    assert c.retrieval.index == "DIR" and c.retrieval.corpus != "world"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/retrieve", {}, 400),
        ("/retrieve", {"queries": None, "query": None}, 400),
        ("/retrieve", {"queries": ["a"], "query": "a"}, 400),
        ("/retrieve", {"query": ["a"]}, 400),
        ("/retrieve", {"query": "x" * 51}, 400),
        ("/retrieve_wiki", {}, 400),
        ("/retrieve_", {"queries": ["a"]}, 404),
        ("/retrieve_a/b", {"queries": ["a"]}, 404),
        ("/retrieve", {"queries": "a"}, 400),
        ("/retrieve", {"queries": [1]}, 400),
        ("/retrieve", {"queries": ["x" * 51]}, 400),
        ("/retrieve", {"queries": ["a"] * (retriever.MAX_QUERIES + 1)}, 400),
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
def test_a_malformed_request_is_refused(path, body, status):
    with serving() as url:
        actual, reply = ask(url, path, body)
        assert actual == status and reply.keys() == {"error"}
        assert ask(url, "/retrieve", {"queries": ["a"]})[0] == 200  # it keeps serving


@pytest.mark.parametrize("k", [0, 0.0, None])
def test_a_request_without_a_number_of_passages_gets_the_configured_number(k):
    with serving() as url:
        _, reply = ask(url, "/retrieve", {"queries": ["a"], "topk": k})
        assert len(reply["result"][0]) == 3
        _, reply = ask(url, "/retrieve", {"queries": ["a"], "topk": 2.0})
        assert len(reply["result"][0]) == 2


def test_a_request_without_a_number_gets_its_servers_default():
    twelve = [Passage(f"p{i}", f"T{i}\ntext", 1.0) for i in range(12)]

    def search(queries):
        return [tuple(twelve) for _ in queries]

    with serving(search, top_k=4, max_k=12) as url:
        _, reply = ask(url, "/retrieve", {"queries": ["a"]})
        assert len(reply["result"][0]) == 4
        _, reply = ask(url, "/queries", {"queries": ["a"]})
        assert len(reply["answers"][0]) == 3
        assert len(ask(url, "/search", {"query": "a"})[1]) == 10
        assert len(ask(url, "/batch_search", {"query": ["a"]})[1][0]) == 10


def test_a_dialects_default_is_capped_by_the_services_maximum():
    """ReaRAG's default is 10, this service's maximum is 4."""
    with serving() as url:
        status, reply = ask(url, "/search", {"query": "a"})
        assert status == 200 and len(reply) == 4


def test_lone_surrogates_are_accepted():
    with serving() as url:
        body = json.dumps({"queries": ["\ud83d"]})
        kind = {"Content-Type": "application/json"}
        assert httpx.post(f"{url}/retrieve", content=body, headers=kind).is_success


def test_a_token_is_required_and_sent(monkeypatch):
    monkeypatch.setenv("SEARCH_KEY", "canary-0123")
    with serving(token="canary-0123") as url:
        search = RemoteSearch(url, api="search_r1", top_k=1, api_key_env="SEARCH_KEY")
        assert search(["a"]) == [(PASSAGES[0],)]
        assert "canary" not in f"{search} {search.fingerprint}"
        with pytest.raises(ValueError, match="HTTP 401"):
            RemoteSearch(url, api="search_r1", top_k=1).check()
