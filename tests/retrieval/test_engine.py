"""The search engine: correct, deterministic, cached, safe to share."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsearch.retrieval.encoder import HashedNgrams
from rsearch.retrieval.engine import PassageList, engine_in_memory
from rsearch.types import Passage
from tests.retrieval.fakes import TableEncoder, numbered


def engine(num=20, *, top_k=3, cache_size=100, encoder=None):
    encoder = encoder or TableEncoder()
    made = engine_in_memory(numbered(num), encoder, top_k=top_k, cache_size=cache_size)
    return made, encoder


def ids(results):
    return [[passage.id for passage in passages] for passages in results]


def test_the_passage_with_the_querys_vector_comes_first_with_its_score():
    search, _ = engine()
    actual = search(["t7", "t0"])
    assert [passages[0].id for passages in actual] == ["p7", "p0"]
    assert [len(passages) for passages in actual] == [3, 3]
    assert actual[0][0].score == pytest.approx(1.0)
    assert actual[0][0].contents == "t7\ntext 7"
    scores = [passage.score for passage in actual[0]]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.fault(33, "more than there are")
def test_a_corpus_smaller_than_top_k_returns_all_its_passages():
    search, _ = engine(2, top_k=5)
    assert sorted(*ids(search(["t1"]))) == ["p0", "p1"]


@pytest.mark.fault(33, "blank query")
@pytest.mark.parametrize("query", ["", " ", "\n\t", "\u3000"])
def test_a_blank_query_finds_nothing_and_costs_nothing(query):
    search, encoder = engine()
    assert search([query]) == [()]
    assert encoder.batches == []


def test_an_empty_list_of_queries_finds_nothing():
    search, encoder = engine()
    assert search([]) == []
    assert encoder.batches == []


def test_a_repeated_query_is_encoded_once():
    search, encoder = engine()
    actual = search(["t1", "t2", "t1"])
    assert encoder.batches == [["t1", "t2"]]
    assert actual[0] == actual[2]
    assert search(["t2", "t3"])[0] == actual[1]
    assert encoder.batches == [["t1", "t2"], ["t3"]]


def test_the_cache_evicts_the_least_recently_used_query():
    search, encoder = engine(cache_size=2)
    search(["a", "b"])
    search(["a"])
    search(["c"])  # evicts b
    search(["a", "b"])
    assert encoder.batches == [["a", "b"], ["c"], ["b"]]


def test_a_batch_larger_than_the_cache_is_answered_in_full():
    search, encoder = engine(cache_size=1)
    assert [p[0].id for p in search(["t1", "t2", "t3"])] == ["p1", "p2", "p3"]
    search(["t3"])
    assert len(encoder.batches) == 1


def test_without_a_cache_every_call_searches():
    search, encoder = engine(cache_size=0)
    assert search(["t1"]) == search(["t1"])
    assert len(encoder.batches) == 2


@given(st.lists(st.sampled_from([f"t{i}" for i in range(12)] + [""]), max_size=20))
@settings(max_examples=30, deadline=None)
def test_what_a_query_finds_depends_only_on_the_query(queries):
    search, _ = engine(cache_size=3)
    alone, _ = engine(cache_size=0)
    assert search(queries) == [alone([query])[0] for query in queries]


def test_equal_passages_are_in_corpus_order():
    passages = [Passage(str(i), "Rome\nA city.") for i in range(60)]
    search = engine_in_memory(passages, HashedNgrams(64), top_k=5)
    assert ids(search(["Rome"])) == [["0", "1", "2", "3", "4"]]


def test_threads_may_share_an_engine():
    search, _ = engine(200, cache_size=50)
    expected = {f"t{i}": f"p{i}" for i in range(60)}
    wrong = []

    def work(offset):
        for start in range(60):
            part = [f"t{(offset + start + j) % 60}" for j in range(4)]
            actual = search(part)
            wrong.extend(q for q, p in zip(part, actual) if p[0].id != expected[q])

    threads = [threading.Thread(target=work, args=(7 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("query", [None, 3, b"bytes", ["list"]])
def test_a_query_that_is_not_text_is_refused(query):
    search, _ = engine()
    with pytest.raises(ValueError, match="expected text"):
        search(["t1", query])


@pytest.mark.fault(33, "unknown words")
def test_hostile_queries_are_treated_as_plain_text():
    search, _ = engine(encoder=HashedNgrams(64))
    queries = ["\x00", "\ud800", "a" * 1_000_000, "</search>", "\x1b[31m", "🇩🇪"]
    assert [len(passages) for passages in search(queries)] == [3] * 6


def test_a_query_vector_that_is_not_finite_is_refused_with_its_query():
    class Broken(TableEncoder):
        def encode_queries(self, texts):
            return np.full((len(texts), self.dim), np.nan, np.float32)

    search, _ = engine(encoder=Broken())
    with pytest.raises(ValueError, match="query 't1' a vector that is not finite"):
        search(["t1"])


@pytest.mark.fault(33, "none asked for")
@pytest.mark.parametrize("settings", [{"top_k": 0}, {"top_k": -1}, {"cache_size": -1}])
def test_a_bad_setting_is_named(settings):
    with pytest.raises(ValueError, match="expected"):
        engine(**settings)


@pytest.mark.fault(33, "empty corpus")
def test_an_empty_corpus_is_refused():
    with pytest.raises(ValueError, match="no passages"):
        engine(0)


def test_the_fingerprint_tells_corpora_apart():
    a = PassageList([Passage("1", "ab"), Passage("2", "c")])
    b = PassageList([Passage("1", "a"), Passage("2", "bc")])
    assert a.fingerprint != b.fingerprint
    assert a.fingerprint == PassageList(list(a)).fingerprint
