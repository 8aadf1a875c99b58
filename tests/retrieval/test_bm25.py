"""BM25 search: scores worked out by hand, bm25s' results, and damaged files."""

import json
import pickle

import numpy as np
import pytest

from rsearch.retrieval.bm25 import open_bm25, split_words
from rsearch.retrieval.engine import SearchEngine
from rsearch.retrieval.index import corpus_path, open_index
from rsearch.retrieval.index_build import build_bm25, build_index
from rsearch.types import Passage
from tests.retrieval.fakes import FileCorpus, TableEncoder, numbered

SKY = ("sun\nSun, moon", "Moon\n", "star\nstar")


def corpus_of(folder, texts):
    (folder / "c.jsonl").write_text("here")
    passages = [Passage(f"p{i}", text) for i, text in enumerate(texts)]
    return FileCorpus(passages, folder / "c.jsonl")


def engine_over(folder, texts, *, top_k, **settings):
    corpus = corpus_of(folder, texts)
    build_bm25(corpus, folder / "i", **settings)
    words, manifest = open_bm25(folder / "i", corpus=corpus)
    return SearchEngine(
        words, None, corpus, top_k=top_k, fingerprint=manifest["digest"]
    )


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        # 2 of 3 passages: idf = ln(1 + 1.5 / 2.5). Lengths 3, 1, 2, mean 2. With
        # k1 = 1.2, b = 0.75 the norms are 1.65, 0.75: idf / 1.75 and idf / 2.65.
        ("MOON?", [("p1", 0.268573), ("p0", 0.177360)]),
        # 1 of 3: idf = ln(1 + 2.5 / 1.5), times 2 / (2 + 1.65).
        ("sun", [("p0", 0.537441)]),
        ("moon, sun", [("p0", 0.714801), ("p1", 0.268573)]),
        ("moon moon", [("p1", 0.537147), ("p0", 0.354720)]),
        ("a moon of comets", [("p1", 0.268573), ("p0", 0.177360)]),
        ("comets", []),
        ("?!", []),
        (" ", []),
        ("", []),
    ],
)
def test_scores_are_those_of_lucene_worked_out_by_hand(tmp_path, query, expected):
    (passages,) = engine_over(tmp_path, SKY, top_k=9, k1=1.2, b=0.75)([query])
    assert [p.id for p in passages] == [id for id, _ in expected]
    assert [p.score for p in passages] == pytest.approx([s for _, s in expected], 1e-5)


def test_search_finds_what_bm25s_retrieves(tmp_path):
    import bm25s

    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{w}" for w in rng.zipf(1.4, 20) % 99) for _ in range(200)]
    queries = [" ".join(f"w{w}" for w in rng.zipf(1.4, 4) % 99) for _ in range(30)]
    engine = engine_over(tmp_path, texts, top_k=7, k1=0.9, b=0.4)
    model = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
    model.index([split_words(text) for text in texts], show_progress=False)
    _, scores = model.retrieve([*map(split_words, queries)], k=7, show_progress=False)
    together = engine(queries)
    for query, passages, row in zip(queries, together, scores):
        expected = [score for score in row.tolist() if score]
        assert [p.score for p in passages] == pytest.approx(expected, 1e-5)
        of_all = model.get_scores(split_words(query))
        for p in passages:
            assert p.score == pytest.approx(float(of_all[int(p.id[1:])]), 1e-5)
    alone = engine.with_top_k(7)
    assert [alone([query])[0] for query in queries] == together


def test_passages_of_equal_score_are_in_corpus_order(tmp_path):
    texts = ["red a", "blue b", "red c", "red d", "blue e", "red red"]
    engine = engine_over(tmp_path, texts, top_k=3)
    found = [[p.id for p in row] for row in engine(["red", "blue"])]
    assert found == [["p5", "p0", "p2"], ["p1", "p4"]]


def test_an_index_may_be_moved_and_is_built_once(tmp_path):
    engine = engine_over(tmp_path, SKY, top_k=2)
    corpus = corpus_of(tmp_path, SKY)
    manifest = build_bm25(corpus, tmp_path / "i")
    assert manifest["digest"] == engine.fingerprint
    assert manifest["bm25"] == {
        "k1": 1.5,
        "b": 0.75,
        "variant": "lucene",
        "tokenizer": r"lower-case \w+",
    }
    assert corpus_path(tmp_path / "i").samefile(tmp_path / "c.jsonl")
    (tmp_path / "i").rename(tmp_path / "j")
    assert open_bm25(tmp_path / "j", corpus=corpus)[1] == manifest
    with pytest.raises(ValueError, match=r"bm25\.k1: 1\.5 in the index, 0\.9 here"):
        build_bm25(corpus, tmp_path / "j", k1=0.9)


def test_an_unfinished_index_is_built_again(tmp_path):
    engine_over(tmp_path, SKY, top_k=2)
    (tmp_path / "i" / "manifest.json").unlink()
    (tmp_path / "i" / "bm25" / "scores.npy").write_bytes(b"")
    assert engine_over(tmp_path, SKY, top_k=2)(["sun"])[0][0].id == "p0"


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        ((), {}, "no passages"),
        (("?", "..."), {}, "no passage has a word"),
        (SKY, {"k1": -1.0}, "k1=-1.0"),
        (SKY, {"k1": float("nan")}, "k1=nan"),
        (SKY, {"b": 1.5}, "b=1.5"),
    ],
)
def test_passages_and_settings_that_cannot_be_indexed_are_named(
    tmp_path, texts, settings, message
):
    with pytest.raises(ValueError, match=message):
        build_bm25(corpus_of(tmp_path, texts), tmp_path / "i", **settings)


def test_an_index_of_another_kind_or_corpus_is_refused(tmp_path):
    corpus, encoder = corpus_of(tmp_path, SKY), TableEncoder()
    build_bm25(corpus, tmp_path / "words")
    build_index(corpus, encoder, tmp_path / "vectors")
    with pytest.raises(ValueError, match="kind=bm25"):
        open_index(tmp_path / "words", corpus=corpus, encoder=encoder)
    with pytest.raises(ValueError, match="kind=bm25"):
        open_bm25(tmp_path / "vectors", corpus=corpus)
    for out, build in (
        ("vectors", lambda out: build_bm25(corpus, out)),
        ("words", lambda out: build_index(corpus, encoder, out)),
    ):
        with pytest.raises(ValueError, match="built differently"):
            build(tmp_path / out)
    other = FileCorpus(numbered(3), corpus.path)
    with pytest.raises(ValueError, match=r"corpus\.fingerprint"):
        open_bm25(tmp_path / "words", corpus=other)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("words.json", {"sun": 0}),
        ("words.json", []),
        ("words.json", ["sun", "moon", 3]),
        ("words.json", ["sun", "moon", "sun"]),
        ("words.json", ["sun", "moon"]),
        ("words.json", b"["),
        ("starts.npy", np.array([0, 1, 3, 4], np.int32)),
        ("starts.npy", np.array([0, 3, 1, 4], np.int64)),
        ("starts.npy", np.array([0, 1, 3, 9], np.int64)),
        ("starts.npy", np.array([[0, 1, 3, 4]], np.int64)),
        ("passages.npy", np.array([0, 0, 1, 3], np.int32)),
        ("passages.npy", np.array([0, 0, 1, -1], np.int32)),
        ("passages.npy", np.array([0, 0, 1], np.int32)),
        ("scores.npy", np.array([1, 1, np.nan, 1], np.float32)),
        ("scores.npy", np.array([1, 1, np.inf, 1], np.float32)),
        ("scores.npy", np.array([1, 1, 0, 1], np.float32)),
        ("scores.npy", np.array([{}, {}, {}, {}], object)),
        ("scores.npy", pickle.dumps([1.0])),
        ("scores.npy", b"\x93NUMPY"),
        ("scores.npy", b""),
        ("scores.npy", None),
    ],
)
def test_damaged_files_of_an_index_are_named(tmp_path, name, value, verify):
    """If digests are verified they differ; if not, the file's contents are invalid."""
    corpus = corpus_of(tmp_path, SKY)
    build_bm25(corpus, tmp_path / "i")
    path = tmp_path / "i" / "bm25" / name
    path.unlink()
    if isinstance(value, np.ndarray):
        np.save(path, value)
    elif isinstance(value, bytes):
        path.write_bytes(value)
    elif value is not None:
        path.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"damaged|missing|not JSON"):
        open_bm25(tmp_path / "i", corpus=corpus, verify=verify)
