"""An index split over several hosts finds what the whole finds, or fails openly."""

import base64
import contextlib
import itertools
import json
import sys
import threading
import time

import httpx
import numpy as np
import pytest

from rsearch.hosts import processes
from rsearch.retrieval import distributed
from rsearch.retrieval.distributed import (
    PATH,
    DistributedNearest,
    NearestServer,
    RemoteNearest,
)
from rsearch.retrieval.engine import PassageList, SearchEngine
from rsearch.retrieval.nearest import IndexPartError, Nearest, build_searcher
from rsearch.retrieval.vectors import Vectors
from rsearch.runtime.server import JsonServer, RefusedError
from rsearch.setup.search import open_search
from tests.hosts.test_processes import run_hosts
from tests.retrieval.fakes import TableEncoder, numbered, unit_rows
from tests.running_server import running


def exact(rows):
    return Nearest(Vectors([rows]), build_searcher(rows, None), None)


@pytest.fixture
def rows():
    rows = unit_rows(np.random.default_rng(0), 90, 16)
    rows[[3, 40, 41, 80]] = rows[7]  # equal rows, on all hosts
    return rows


@contextlib.contextmanager
def serving(nearest, token="secret"):
    server = NearestServer("127.0.0.1", nearest, token)
    try:
        yield server.url
    finally:
        server.close()


@pytest.mark.parametrize("at_once", [1024, 4])
def test_hosts_together_find_what_the_whole_index_finds_to_the_last_bit(
    rows, at_once, monkeypatch
):
    """Many queries are sent a few at a time, since a request has a maximum size."""
    monkeypatch.setattr(distributed, "MAX_BATCH", at_once)
    monkeypatch.setattr(distributed, "MAX_BODY_BYTES", at_once * 64 * 2)
    cuts, queries = [0, 30, 50, 90], rows[::6]
    whole = exact(rows)
    parts = [exact(rows[a:b]) for a, b in itertools.pairwise(cuts)]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(serving(part)) for part in parts]
        for here in range(3):
            given = [
                part if n == here else RemoteNearest(n, urls[n], "secret", len(part))
                for n, part in enumerate(parts)
            ]
            spread = DistributedNearest(cuts[:3], given, here, timeout_seconds=20)
            assert len(spread) == 90
            for top_k in (1, 7, 35, 200):
                expected = whole.search(queries, top_k)
                for ours, theirs in zip(spread.search(queries, top_k), expected):
                    np.testing.assert_array_equal(ours, theirs)
            assert spread.search(queries[:0], 3)[0].shape == (0, 3)


def test_hosts_that_search_at_the_same_time_do_not_deadlock(rows):
    cuts = [0, 45]
    parts = [exact(rows[:45]), exact(rows[45:])]
    wrong = []
    with serving(parts[0]) as first, serving(parts[1]) as second:

        def ask(here):
            given = list(parts)
            given[1 - here] = RemoteNearest(
                1 - here, (first, second)[1 - here], "secret", 45
            )
            spread = DistributedNearest(cuts, given, here, timeout_seconds=20)
            expected = exact(rows).search(rows[:9], 5)[0]
            for _ in range(5):
                if not np.array_equal(spread.search(rows[:9], 5)[0], expected):
                    wrong.append(here)

        threads = [threading.Thread(target=ask, args=(n % 2,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@contextlib.contextmanager
def answering(answer):
    """The URL of a host whose replies `answer` makes."""
    server = JsonServer("127.0.0.1", 0, {("POST", PATH): answer}, token="secret")
    with running(server):
        yield f"http://127.0.0.1:{server.server_address[1]}{PATH}"


def packed(values, dtype):
    return base64.b64encode(np.array(values, dtype)).decode()


def reply(positions=(0, 1, 2), scores=(0.9, 0.8, 0.7)):
    return {"positions": packed(positions, "<i8"), "scores": packed(scores, "<f4")}


def ask(url, seconds=5.0, token="secret"):
    part = RemoteNearest(1, url, token, 10)
    return part.search(np.ones((1, 4), np.float32), 3, time.monotonic() + seconds)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        reply(positions=(0, 1)),
        reply(scores=(0.9, 0.8)),
        reply((0, 1, 2, 3), (0.9, 0.8, 0.7, 0.6)),
        reply(positions=(0, 1, 10)),
        reply(positions=(0, -1, 2)),
        reply(positions=(0, 1, 1)),
        reply(scores=(0.9, np.nan, 0.7)),
        reply(scores=(0.7, 0.8, 0.9)),
        {**reply(), "positions": [0, 1, 2]},
        {**reply(), "scores": "?"},
    ],
)
def test_a_malformed_answer_is_an_error(wrong):
    message = "host 1 gave a malformed answer to a search"
    with (
        answering(lambda _: wrong) as url,
        pytest.raises(IndexPartError, match=message),
    ):
        ask(url)


def test_a_well_formed_answer_is_accepted():
    with answering(lambda _: reply()) as url:
        positions, scores = ask(url)
    np.testing.assert_array_equal(positions, [[0, 1, 2]])
    np.testing.assert_array_equal(scores, np.array([[0.9, 0.8, 0.7]], np.float32))


def test_an_oversized_answer_is_cut_off():
    endless, told = {"positions": "A" * 200_000}, r"host 1 .* \d+ bytes"
    with answering(lambda _: endless) as url, pytest.raises(IndexPartError, match=told):
        ask(url)


def test_a_busy_host_is_asked_again():
    calls = []

    def busy(_):
        calls.append(time.monotonic())
        if len(calls) < 3:
            raise RefusedError(503, "too many at once")
        return reply()

    with answering(busy) as url:
        ask(url)
    assert len(calls) == 3


def test_a_host_that_refuses_is_not_asked_again():
    with (
        answering(lambda _: reply()) as url,
        pytest.raises(IndexPartError, match="host 1 did not answer a search: HTTP 401"),
    ):
        ask(url, token="another")


@pytest.mark.fault(85, "replayed token")
def test_a_request_that_was_overheard_is_refused_when_replayed(rows):
    """A stranger has the bearer token and old requests, but not the key."""
    heard = []

    def overhear(body):
        heard.append(body)
        return reply()

    with answering(overhear) as url:
        ask(url, token="secret.key")
    with serving(exact(rows[:, :4]), token="secret.key") as url:
        headers = {"Authorization": "Bearer secret"}

        def post(body):
            return httpx.post(url, json=body, headers=headers, trust_env=False)

        assert post(heard[0]).status_code == 200  # its first arrival
        stamp = [heard[0]["stamp"][0], 2]
        changed = ({}, {"stamp": stamp}, {"top_k": 2}, {"mac": "x"}, {"mac": None})
        for change in (*changed, {"stamp": 3}, {"stamp": None}):
            assert post({**heard[0], **change}).status_code == 401
        unsigned = {name: heard[0][name] for name in ("queries", "top_k")}
        assert post(unsigned).status_code == 401
        part = RemoteNearest(1, url, "secret.key", 90)
        for _ in range(3):
            part.search(np.ones((1, 4), np.float32), 3, time.monotonic() + 5)


@pytest.mark.fault(41, "slow")
def test_a_slow_host_is_waited_for_until_the_deadline_and_no_longer():
    with answering(lambda _: time.sleep(1.5) or reply()) as url:
        started = time.monotonic()
        with pytest.raises(IndexPartError, match="host 1 did not answer a search"):
            ask(url, seconds=0.4)
        assert time.monotonic() - started < 1.2


def test_a_dead_host_fails_whole_searches_and_failures_are_not_cached(rows):
    corpus, encoder = PassageList(numbered(60)), TableEncoder()
    vectors = encoder.encode_passages([p.contents for p in corpus])
    own, other = exact(vectors[:30]), exact(vectors[30:])
    server = NearestServer("127.0.0.1", other, "secret")
    remote = RemoteNearest(1, server.url, "secret", 30)
    spread = DistributedNearest([0, 30], [own, remote], 0, timeout_seconds=0.4)
    search = SearchEngine(spread, encoder, corpus, top_k=2)
    before = search(["t3", "t40", ""])
    assert [p[0].id for p in before[:2]] == ["p3", "p40"]
    server.close()
    after = search(["t40", "t5", "", "t45"])
    assert after == [before[1], None, (), None]  # what was cached, and nothing partial
    again = NearestServer("127.0.0.1", other, "secret")
    remote._url = again.url
    assert [p[0].id for p in search(["t5", "t45"])] == ["p5", "p45"]
    again.close()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"queries": packed(np.ones(16), "<f4"), "top_k": 0},
        {"queries": packed(np.ones(16), "<f4"), "top_k": True},
        {"queries": packed(np.ones(15), "<f4"), "top_k": 3},
        {"queries": packed([*[1.0] * 15, np.inf], "<f4"), "top_k": 3},
        {"queries": "not base64!", "top_k": 3},
        {"queries": [1.0] * 16, "top_k": 3},
    ],
)
def test_a_malformed_request_is_refused_and_the_host_keeps_serving(rows, body):
    with serving(exact(rows)) as url:
        headers = {"Authorization": "Bearer secret"}
        told = httpx.post(url, json=body, headers=headers, trust_env=False)
        assert told.status_code == 400 and "must be" in told.json()["error"]
        remote = RemoteNearest(1, url, "secret", 90)
        actual, _ = remote.search(rows[:1], 1, time.monotonic() + 9)
        np.testing.assert_array_equal(actual, [[0]])


PLACES = "sharded", "on_devices"  # fields of config.retrieval


def talk(argv):
    """Search an index that two hosts share, each in its own time; both run this."""
    from rsearch.config.recipes import parse_flags
    from tests.small_run import config

    flags = {name: ("", "") for name in ("index", "corpus")}
    given = parse_flags(argv, flags={**processes.FLAGS, **flags})
    index, corpus = (given.pop(name) for name in flags)
    processes.connect(**given)
    settings = {"retrieval__index": index, "retrieval__corpus": corpus}
    told = {}
    for place in PLACES:
        c = config(**settings, **{f"retrieval__{place}": True}, retrieval__top_k=4)
        search = open_search(c, None)
        time.sleep(0.3 * processes.host_index())
        queries = [f"city {i}" for i in range(processes.host_index(), 40, 2)]
        halves = search(queries[:7]) + search(queries[7:])
        actual = [[(p.id, p.score) for p in passages] for passages in halves]
        told[place] = {"len": len(search), "found": actual}
        processes.barrier(f"all have searched: {place}")
    print(json.dumps(told))


def test_two_hosts_find_what_one_finds_in_the_whole_index(tmp_path):
    from rsearch.config.recipes import run_command
    from rsearch.index import main

    corpus = tmp_path / "corpus.jsonl"
    lines = [
        json.dumps({"id": f"c{i}", "contents": f"city {i}\nIt has {i % 7} gates."})
        for i in range(40)
    ]
    corpus.write_text("\n".join(lines))
    common = [f"--corpus={corpus}", "--encoder=hashed"]
    for name, parts in (("one", 1), ("two", 2)):
        own = [f"--out={tmp_path / name}", f"--parts={parts}"]
        assert run_command(main, [*common, *own]) == 0

    from tests.small_run import config

    settings = {"retrieval__index": str(tmp_path / "one"), "retrieval__top_k": 4}
    whole = open_search(config(**settings, retrieval__corpus=str(corpus)), None)
    own = [f"--index={tmp_path / 'two'}", f"--corpus={corpus}"]
    told = run_hosts("-m", "tests.retrieval.test_distributed", *own)
    for number, (code, out, error) in enumerate(told):
        assert code == 0, error
        ours = json.loads(out.splitlines()[-1])
        expected = whole([f"city {i}" for i in range(number, 40, 2)])
        expected = [[[p.id, p.score] for p in one] for one in expected]
        assert ours == {place: {"len": 40, "found": expected} for place in PLACES}


if __name__ == "__main__":
    talk(sys.argv[1:])
