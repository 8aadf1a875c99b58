"""Recorded answers of a service are repeated, whatever it would answer now."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from rsearch.runtime.journal import AppendLog
from rsearch.runtime.recorded import record_replies, record_search
from rsearch.types import Passage


class Service:
    """A search that finds its version, and fails for 'down'."""

    def __init__(self, version):
        self.version, self.asked = version, []

    def __call__(self, queries):
        self.asked.append(list(queries))
        return [
            None if q == "down" else (Passage(q, f"{q}\n{self.version} \ud800", 0.5),)
            for q in queries
        ]


def recorded(folder, version):
    service = Service(version)
    return record_search(service, AppendLog(folder, "searches")), service


def test_a_later_start_gets_the_same_text(tmp_path):
    search, _ = recorded(tmp_path, "first")
    actual = search(["a", "b", "a"])
    assert actual[0] == actual[2] == (Passage("a", "a\nfirst \ud800", 0.5),)
    search, service = recorded(tmp_path, "second")
    assert search(["b", "c", "a"])[::2] == [actual[1], actual[0]]
    assert search(["c"])[0][0].text == "second \ud800"
    assert service.asked == [["c"]]


def test_one_start_asks_each_query_once(tmp_path):
    search, service = recorded(tmp_path, "first")
    assert search([]) == [] and search(["a", "a"]) == search(["a", "a"])
    assert service.asked == [["a"]]


def test_overlapping_searches_and_a_later_start_get_the_same_answer(tmp_path):
    """The service gives another answer each time, and one query is asked twice."""
    begun, may_answer = threading.Event(), threading.Event()
    calls = []

    def search(queries):
        calls.append(list(queries))
        version = len(calls)
        begun.set()
        assert may_answer.wait(20)
        return [(Passage(q, f"{q}\n{version}", 0.5),) for q in queries]

    kept = record_search(search, AppendLog(tmp_path, "searches"))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(kept, ["a"])
        assert begun.wait(20)
        second = pool.submit(kept, ["a", "b"])
        while ["b"] not in calls:  # its own query, before it waits for the first
            assert not second.done() and ["a", "b"] not in calls
            time.sleep(0.01)
        may_answer.set()
    assert second.result()[0] == first.result()[0]
    later, service = recorded(tmp_path, "another")
    assert later(["a", "b"]) == second.result() and service.asked == []


def test_a_failed_search_is_asked_again(tmp_path):
    search, service = recorded(tmp_path, "first")
    assert search(["down", "a"])[0] is None
    assert search(["a", "down"])[1] is None
    assert service.asked == [["down", "a"], ["down"]]


def test_as_many_searches_overlap_as_the_service_allows(tmp_path):
    """A stage searches through the recorder, which must not reduce the overlap."""
    search, _ = recorded(tmp_path, "first")
    assert search.searches_at_once == 1
    service = Service("first")
    service.searches_at_once = 8
    assert record_search(service, AppendLog(tmp_path, "more")).searches_at_once == 8


def test_an_empty_result_is_recorded(tmp_path):
    calls = []

    def search(queries):
        calls.append(queries)
        return [()] * len(queries)

    kept = record_search(search, AppendLog(tmp_path, "searches"))
    assert kept(["a"]) == kept(["a"]) == [()] and len(calls) == 1


def test_a_model_at_an_endpoint_is_asked_once_for_each_chat(tmp_path):
    def generate(version):
        def reply(chats):
            calls.append([chat[-1]["content"] for chat in chats])
            texts = [chat[-1]["content"] for chat in chats]
            return [None if t == "down" else f"{t} {version} \ud800" for t in texts]

        return record_replies(reply, AppendLog(tmp_path, "judge"))

    def chats(*texts):
        return [[{"role": "user", "content": text}] for text in texts]

    calls = []
    first = generate(1)(chats("a", "down", "", "a"))
    assert first == ["a 1 \ud800", None, " 1 \ud800", "a 1 \ud800"]
    assert generate(2)(chats("", "b", "down")) == [" 1 \ud800", "b 2 \ud800", None]
    assert calls == [["a", "down", ""], ["b", "down"]]
    # The role is part of the key.
    other = [[{"role": "system", "content": "a"}]]
    assert generate(3)(other) == ["a 3 \ud800"]
