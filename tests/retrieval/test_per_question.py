"""A corpus for each question: its queries find only passages of that corpus."""

import numpy as np
import pytest

from rsearch.protocols.writing import with_written_observations
from rsearch.retrieval.bm25 import index_words, open_bm25
from rsearch.retrieval.engine import engine_in_memory
from rsearch.retrieval.index_build import build_bm25
from rsearch.retrieval.per_question import QuestionCorpora, encode_corpora
from rsearch.retrieval.rerank import RerankedSearch
from rsearch.types import Passage
from tests.retrieval.fakes import FileCorpus, TableEncoder, numbered

CORPORA = {"a": [0, 2, 3, 5], "b": [1, 2], "c": [4]}
WORDS = ("red fox", "red red hen", "blue fox", "fox fox fox", "", "a red blue fox")


def of_words(passages, corpora):
    """The same corpora, searched by BM25; three passages per query."""

    def make_index(rows):
        return index_words([passages[row] for row in rows])

    return QuestionCorpora(make_index, None, passages, corpora, top_k=3, made_by="b")


def ids(results):
    return [[passage.id for passage in row] for row in results]


@pytest.mark.parametrize("top_k", [1, 3, 9])
def test_a_query_finds_what_an_index_of_the_questions_passages_finds(top_k):
    passages, encoder = numbered(6), TableEncoder()
    search = encode_corpora(encoder, passages, CORPORA, top_k=top_k)
    assert len(encoder.encoded) == 6
    pairs = [(q, name) for q in ("who", "when", "who", " ") for name in CORPORA]
    results = search([q for q, _ in pairs], [name for _, name in pairs])
    assert encoder.batches == [["who", "when"]]
    for (query, name), hits in zip(pairs, results, strict=True):
        alone = [passages[i] for i in CORPORA[name]]
        assert [hits] == engine_in_memory(alone, encoder, top_k=top_k)([query])


def test_words_are_counted_only_in_the_questions_corpus(tmp_path):
    passages = [Passage(f"p{i}", f"t\n{text}") for i, text in enumerate(WORDS)]
    search = of_words(passages, {**CORPORA, "d": [4]})
    for name, rows in CORPORA.items():
        corpus = FileCorpus([passages[i] for i in rows], tmp_path / "c")
        build_bm25(corpus, tmp_path / name)
        words, _ = open_bm25(tmp_path / name, corpus=corpus)
        for query in ("red fox", "hen", "fox fox", "nothing"):
            (hits,) = search([query], [name])
            ((positions,), (scores,)) = words.search([query], 3)
            assert [p.id for p in hits] == [corpus.passage(i).id for i in positions]
            np.testing.assert_array_equal([p.score for p in hits], scores)
    assert ids(search(["red", "red"], ["a", "b"])) == [["p0", "p5"], ["p1"]]


def test_a_corpus_without_words_finds_nothing():
    search = of_words([Passage("1", "?\n!")], {"a": [0]})
    assert search(["red"], ["a"]) == [()]


def test_reranker_and_writer_see_only_the_questions_corpus():
    search = encode_corpora(TableEncoder(), numbered(6), CORPORA, top_k=4)

    def last_first(query, contents):
        return np.array([float(text[-1]) for text in contents])

    last_first.fingerprint = "last first"
    ordered = RerankedSearch(search, last_first, top_k_retrieval=4, top_k=2)
    pairs = ["who", "who", "who"], ["a", "b", "a"]
    assert ids(ordered(*pairs)) == [["p5", "p3"], ["p2", "p1"], ["p5", "p3"]]
    chats = []

    def write(batch):
        chats.extend(batch)
        return [f"written {i}" for i in range(len(batch))]

    results = with_written_observations(ordered, write)(*pairs)
    assert [p.text for (p,) in results] == ["written 0", "written 1", "written 0"]
    assert len(chats) == 2 and "text 1" in chats[1][0]["content"]
    assert "text 1" not in chats[0][0]["content"]


def test_fingerprints_tell_corpora_and_engines_apart():
    passages = numbered(6)
    made = [
        encode_corpora(TableEncoder(), passages, CORPORA, top_k=1),
        encode_corpora(TableEncoder(name="other"), passages, CORPORA, top_k=1),
        of_words(passages, CORPORA),
        of_words(passages, {**CORPORA, "c": [3]}),
        of_words(numbered(7)[1:], CORPORA),
    ]
    assert len({search.fingerprint for search in made}) == len(made)
    again = encode_corpora(TableEncoder(), passages, CORPORA, top_k=5)
    assert again.fingerprint == made[0].fingerprint
