"""Reranking: what a score depends on, and which passages are kept."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsearch.retrieval.encoder import HashedNgrams
from rsearch.retrieval.engine import engine_in_memory
from rsearch.retrieval.rerank import CrossEncoderScores, RerankedSearch
from rsearch.types import Passage
from tests.models.tiny_bert import write_tiny_bert

WORDS = ["the", "city", "river", "wanted", "a", "b", "c", "want", "中", "é", "?"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_bert(tmp_path_factory.mktemp("tiny"), cross_encoder=True)


@pytest.fixture(scope="module")
def scores_of(directory):
    return CrossEncoderScores(directory)


class Found:
    """A search that finds the passages in `for_query`, or else those of `texts`."""

    fingerprint = "found"

    def __init__(self, *texts, for_query=None):
        self.passages = tuple(Passage(str(i), text) for i, text in enumerate(texts))
        self.for_query = for_query or {}

    def __call__(self, queries):
        return [self.for_query.get(query, self.passages) for query in queries]


class Longest:
    """Score a passage by its length, and record the calls."""

    fingerprint = "longest"

    def __init__(self):
        self.asked = []

    def __call__(self, query, passages):
        self.asked.append((query, tuple(passages)))
        return np.array([len(text) for text in passages], np.float32)


def ids(results):
    return [None if actual is None else [p.id for p in actual] for actual in results]


def test_scores_are_those_of_transformers(directory, scores_of):
    torch = pytest.importorskip("torch")
    from transformers import BertForSequenceClassification, BertTokenizer

    passages = ["the city\nunwanted river", "a", "", "b c, ab? " * 30, "river"]
    tokenizer = BertTokenizer.from_pretrained(directory)
    model = BertForSequenceClassification.from_pretrained(directory).eval()
    given = tokenizer(
        ["want the city?"] * len(passages),
        passages,
        padding=True,
        truncation=True,
        max_length=32,
        return_tensors="pt",
    )
    with torch.no_grad():
        expected = model(**given).logits[:, 0].numpy()
    actual = scores_of("want the city?", passages)
    assert actual.dtype == np.float32 and np.std(expected) > 0.1
    np.testing.assert_allclose(actual, expected, atol=2e-5)


@given(TEXTS, st.lists(TEXTS, max_size=12))
@settings(max_examples=20, deadline=None)
def test_a_score_does_not_depend_on_the_other_passages(scores_of, query, passages):
    together = scores_of(query, passages)
    alone = [scores_of(query, [passage])[0] for passage in passages]
    np.testing.assert_array_equal(together, np.array(alone, np.float32))


def test_the_best_are_kept_with_their_scores():
    search = RerankedSearch(
        Found("bb", "dddd", "a", "ccc"), Longest(), top_k_retrieval=4, top_k=2
    )
    ((first, second),) = search(["q"])
    assert (first.contents, first.score) == ("dddd", 4.0)
    assert (second.contents, second.score) == ("ccc", 3.0)
    assert str(search).endswith(", reranked")


def test_equal_scores_stay_in_the_order_of_the_search():
    search = RerankedSearch(
        Found("bb", "aa", "ccc", "dd"), Longest(), top_k_retrieval=4, top_k=4
    )
    assert ids(search(["q"])) == [["2", "0", "1", "3"]]


def test_only_the_first_passages_found_are_scored():
    rerank = Longest()
    search = RerankedSearch(
        Found("bb", "a", "ccc", "dddd"), rerank, top_k_retrieval=3, top_k=1
    )
    assert ids(search(["q"])) == [["2"]]
    assert rerank.asked == [("q", ("bb", "a", "ccc"))]


def test_each_query_is_scored_with_only_its_own_passages():
    own = {"x": (Passage("1", "one"),), "y": (Passage("2", "two"), Passage("3", "3"))}
    rerank = Longest()
    search = RerankedSearch(Found(for_query=own), rerank, top_k_retrieval=9, top_k=3)
    assert ids(search(["x", "y"])) == [["1"], ["2", "3"]]
    assert rerank.asked == [("x", ("one",)), ("y", ("two", "3"))]


def test_a_failed_search_passes_through_and_an_empty_one_is_not_scored():
    rerank = Longest()
    own = {"failed": None, "nothing": ()}
    search = RerankedSearch(
        Found("a", for_query=own), rerank, top_k_retrieval=2, top_k=1
    )
    assert ids(search(["failed", "q", "nothing"])) == [None, ["0"], []]
    assert [query for query, _ in rerank.asked] == ["q"]


@pytest.mark.parametrize("cache_size, times", [(8, 1), (0, 3)])
def test_orders_are_cached_for_as_many_queries_as_configured(cache_size, times):
    rerank = Longest()
    search = RerankedSearch(
        Found("a", "bb"), rerank, top_k_retrieval=2, top_k=2, cache_size=cache_size
    )
    assert ids(search(["q", "q"]) + search(["q"])) == [["1", "0"]] * 3
    assert len(rerank.asked) == times


def test_a_score_that_is_not_finite_is_refused():
    def damaged(query, passages):
        return np.full(len(passages), np.nan)

    damaged.fingerprint = "damaged"
    search = RerankedSearch(Found("a"), damaged, top_k_retrieval=1, top_k=1)
    with pytest.raises(ValueError, match="query 'who' a score that is not finite"):
        search(["who"])


@pytest.mark.parametrize("top_k", [0, 4])
def test_top_k_must_be_between_one_and_the_number_scored(top_k):
    with pytest.raises(ValueError, match=f"top_k={top_k}, expected 1 to"):
        RerankedSearch(Found("a"), Longest(), top_k_retrieval=3, top_k=top_k)


def test_the_fingerprint_changes_with_everything_that_changes_an_order(
    directory, tmp_path
):
    other = write_tiny_bert(tmp_path, cross_encoder=True, seed=1)
    rerankers = [
        CrossEncoderScores(directory),
        CrossEncoderScores(directory, max_tokens=16),
        CrossEncoderScores(other),
    ]
    actual = {reranker.fingerprint for reranker in rerankers}
    for number in (2, 3):
        search = RerankedSearch(
            Found("a"), rerankers[0], top_k_retrieval=number, top_k=1
        )
        actual.add(search.fingerprint)
    assert len(actual) == 5
    assert CrossEncoderScores(directory).fingerprint == rerankers[0].fingerprint


def test_a_length_or_vocabulary_beyond_the_models_is_refused(directory, tmp_path):
    with pytest.raises(ValueError, match="max_tokens=33, expected 5 to 32"):
        CrossEncoderScores(directory, max_tokens=33)
    copy = write_tiny_bert(tmp_path, cross_encoder=True)
    with open(copy / "vocab.txt", "a") as file:
        file.write("more\n")
    with pytest.raises(ValueError, match=r"the vocabulary has \d+ pieces, the model"):
        CrossEncoderScores(copy)


def test_passages_of_an_index_are_put_in_the_cross_encoders_order(scores_of):
    texts = ["the river\na city", "the city\nwanted", "a b\nc", "river b\nthe river"]
    engine = engine_in_memory(
        [Passage(str(i), text) for i, text in enumerate(texts)],
        HashedNgrams(64),
        top_k=3,
    )
    query = "the river?"
    (candidates,) = engine([query])
    scores = scores_of(query, [p.contents for p in candidates])
    expected = [candidates[i].id for i in np.argsort(-scores)[:2]]
    search = RerankedSearch(engine, scores_of, top_k_retrieval=3, top_k=2)
    assert ids(search([query])) == [expected]
    np.testing.assert_allclose(
        [p.score for p in search([query])[0]], np.sort(scores)[:0:-1], atol=0
    )
