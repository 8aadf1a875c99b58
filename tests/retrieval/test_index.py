"""Indexes on disk: resumed, verified, movable, and never written over other files."""

import json

import numpy as np
import pytest

from rsearch.retrieval.engine import SearchEngine
from rsearch.retrieval.index import (
    corpus_path,
    digest_of,
    is_next_to_index,
    open_index,
)
from rsearch.retrieval.index_build import build_index
from rsearch.types import Passage
from tests.retrieval.fakes import FileCorpus, TableEncoder, numbered


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "data" / "corpus.jsonl"
    path.parent.mkdir()
    path.write_text("here")
    return FileCorpus(numbered(60), path)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def found(path, corpus, encoder):
    index = open_index(path, corpus=corpus, encoder=encoder)
    search = SearchEngine(index.nearest, encoder, corpus, top_k=4)
    return search([f"t{i}" for i in range(0, 60, 7)])


@pytest.mark.fault(34, "moved")
@pytest.mark.fault(48, "non-ASCII and spaces")
@pytest.mark.parametrize("kind", ["brute_force", "quantized", "partitioned"])
def test_a_moved_index_finds_the_same(corpus, tmp_path, kind):
    encoder = TableEncoder()
    manifest = build_index(corpus, encoder, tmp_path / "a b" / "i", kind=kind)
    assert manifest["recall"]["value"] >= 0.98
    before = found(tmp_path / "a b" / "i", corpus, encoder)
    assert [passages[0].id for passages in before][:2] == ["p0", "p7"]
    (tmp_path / "a b").rename(tmp_path / "é")
    assert found(tmp_path / "é" / "i", corpus, encoder) == before
    for path in (tmp_path / "é" / "i").rglob("*"):
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes(), path


@pytest.mark.fault(34, "moved")
def test_a_corpus_that_is_moved_with_its_index_is_found(corpus, tmp_path):
    build_index(corpus, TableEncoder(), tmp_path / "data" / "index")
    (tmp_path / "data").rename(tmp_path / "moved")
    expected = tmp_path / "moved" / "corpus.jsonl"
    assert corpus_path(tmp_path / "moved" / "index").samefile(expected)
    expected.unlink()
    with pytest.raises(ValueError, match=r"the corpus of .* is not at"):
        corpus_path(tmp_path / "moved" / "index")


@pytest.mark.fault(86, "home in a path")
def test_an_index_in_the_home_directory_has_its_corpus_next_to_it(
    corpus, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    build_index(corpus, TableEncoder(), tmp_path / "data" / "index")
    assert is_next_to_index("~/data/index", corpus_path("~/data/index"))


@pytest.mark.fault(66, "corpus path that leads elsewhere")
@pytest.mark.parametrize("value", [None, 3, "", "a\0b", ["c.jsonl"], "/dev/null"])
def test_an_invalid_corpus_path_is_refused(corpus, tmp_path, value):
    build_index(corpus, TableEncoder(), tmp_path / "i")
    path = tmp_path / "i" / "manifest.json"
    manifest = {**json.loads(path.read_text()), "corpus_path": value}
    del manifest["digest"]
    path.write_text(json.dumps({**manifest, "digest": digest_of(manifest)}))
    with pytest.raises(ValueError, match="corpus"):
        corpus_path(tmp_path / "i")


@pytest.mark.parametrize("name", ["scann_assets.pbtxt", "ah_codebook.pb"])
def test_a_scann_file_deleted_after_the_check_is_reported(corpus, tmp_path, name):
    build_index(corpus, TableEncoder(), tmp_path / "i", kind="quantized")
    (tmp_path / "i" / "scann" / name).unlink()
    with pytest.raises(ValueError, match=rf"{tmp_path}/i/scann: .*{name}"):
        open_index(tmp_path / "i", corpus=corpus, encoder=TableEncoder(), verify=False)


def test_a_finished_index_is_left_unchanged(corpus, tmp_path):
    encoder = TableEncoder()
    first = build_index(corpus, encoder, tmp_path / "i")
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "i").rglob("*")}
    encoder.encoded.clear()
    assert build_index(corpus, encoder, tmp_path / "i") == first
    assert encoder.encoded == []
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "i").rglob("*")} == times


@pytest.mark.parametrize("stop_at", ["vectors", "scann", "manifest"])
def test_a_stopped_build_resumes_to_the_same_index(
    corpus, tmp_path, monkeypatch, stop_at
):
    settings = {"kind": "partitioned", "shard_size": 16}
    whole = build_index(corpus, TableEncoder(), tmp_path / "whole", **settings)

    class Stopped(Exception):
        pass

    def stop(*_, **__):
        raise Stopped

    where = {
        "vectors": "rsearch.retrieval.index.open_vectors",
        "scann": "rsearch.retrieval.index.files.sync_tree",
        "manifest": "rsearch.retrieval.index_build._recall",
    }
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(where[stop_at], stop)
        build_index(corpus, TableEncoder(), tmp_path / "i", **settings)
    with pytest.raises(ValueError, match=r"no manifest\.json: it is not finished"):
        open_index(tmp_path / "i", corpus=corpus, encoder=TableEncoder())
    encoder = TableEncoder()
    resumed = build_index(corpus, encoder, tmp_path / "i", **settings)
    assert encoder.encoded == []
    assert {n for n in resumed["files"] if n.startswith("scann")} == {
        n for n in whole["files"] if n.startswith("scann")
    }
    assert resumed["recall"] == whole["recall"]
    assert found(tmp_path / "i", corpus, encoder) == found(
        tmp_path / "whole", corpus, encoder
    )


def test_a_directory_with_other_files_is_never_written_to(corpus, tmp_path):
    out = tmp_path / "theirs"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds something else \(thesis\.txt\)"):
        build_index(corpus, TableEncoder(), out)
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]
    with pytest.raises(ValueError, match="is a file"):
        build_index(corpus, TableEncoder(), out / "thesis.txt")


@pytest.mark.fault(34, "width", "corpus")
def test_an_index_of_other_inputs_is_never_overwritten(corpus, tmp_path):
    build_index(corpus, TableEncoder(), tmp_path / "i")
    with pytest.raises(ValueError) as caught:
        build_index(
            FileCorpus(numbered(61), corpus.path),
            TableEncoder(dim=8),
            tmp_path / "i",
            vector_dtype="float16",
        )
    text = str(caught.value)
    assert "  corpus.num_passages: 60 in the index, 61 here" in text
    assert "  encoder.dim: 16 in the index, 8 here" in text
    assert "  vectors.dtype: 'float32' in the index, 'float16' here" in text
    assert found(tmp_path / "i", corpus, TableEncoder())


@pytest.mark.fault(34, "encoder", "corpus")
@pytest.mark.parametrize("differing", ["corpus", "encoder"])
def test_an_index_opens_only_for_its_own_inputs(corpus, tmp_path, differing):
    build_index(corpus, TableEncoder(), tmp_path / "i")
    given = {"corpus": corpus, "encoder": TableEncoder()}
    if differing == "corpus":
        changed = [*numbered(59), *numbered(1)]
        given["corpus"] = FileCorpus(changed, corpus.path)
    else:
        given["encoder"] = TableEncoder(name="other")
    with pytest.raises(ValueError, match=f"  {differing}.fingerprint: ") as caught:
        open_index(tmp_path / "i", **given)
    differences = [li for li in str(caught.value).splitlines()[1:] if " here" in li]
    assert len(differences) == 1


@pytest.mark.fault(34, "damaged")
def test_every_damaged_file_is_named(corpus, tmp_path):
    build_index(corpus, TableEncoder(), tmp_path / "i", kind="partitioned")
    flip(tmp_path / "i" / "vectors" / "00000.npy")
    (tmp_path / "i" / "scann" / "ah_codebook.pb").unlink()
    # ScaNN would unpickle a file of this name.
    (tmp_path / "i" / "scann" / "scann_docids.pkl").write_bytes(b"cos\nsystem\n")
    with pytest.raises(ValueError) as caught:
        open_index(tmp_path / "i", corpus=corpus, encoder=TableEncoder())
    assert str(caught.value).splitlines()[1:] == [
        "  scann/ah_codebook.pb: missing",
        "  vectors/00000.npy: damaged",
        "  scann/scann_docids.pkl: not part of it",
    ]
    # The same call refuses the damaged index; what the message advises mends it.
    with pytest.raises(ValueError, match="vectors/00000") as caught:
        build_index(corpus, TableEncoder(), tmp_path / "i", kind="partitioned")
    assert f"delete {tmp_path / 'i' / 'manifest.json'} and" in str(caught.value)
    (tmp_path / "i" / "manifest.json").unlink()
    build_index(corpus, TableEncoder(), tmp_path / "i", kind="partitioned")
    open_index(tmp_path / "i", corpus=corpus, encoder=TableEncoder())
    assert not (tmp_path / "i" / "scann" / "scann_docids.pkl").exists()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: {**m, "corpus_path": "/etc/passwd"}, "was changed since"),
        (lambda m: {k: v for k, v in m.items() if k != "digest"}, "was changed since"),
        (lambda m: [m], "holds no JSON object"),
    ],
)
def test_a_changed_manifest_is_refused(corpus, tmp_path, edit, message):
    build_index(corpus, TableEncoder(), tmp_path / "i")
    path = tmp_path / "i" / "manifest.json"
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=message):
        open_index(tmp_path / "i", corpus=corpus, encoder=TableEncoder())


def test_a_path_without_an_index_is_refused(corpus, tmp_path):
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "none", "is not a directory"),
        (tmp_path / "empty", "it is not an index"),
    ):
        with pytest.raises(ValueError, match=message):
            open_index(path, corpus=corpus, encoder=TableEncoder())


def test_half_precision_vectors_find_the_same_passages(corpus, tmp_path):
    encoder = TableEncoder()
    build_index(corpus, encoder, tmp_path / "i", vector_dtype="float16")
    build_index(corpus, encoder, tmp_path / "j")
    half, full = (
        found(tmp_path / "i", corpus, encoder),
        found(tmp_path / "j", corpus, encoder),
    )
    assert [p[0].id for p in half] == [p[0].id for p in full]
    scores = [[p.score for p in passages] for passages in half]
    assert np.isfinite(scores).all()


def test_recall_is_measured_with_titles(corpus, tmp_path):
    manifest = build_index(corpus, TableEncoder(), tmp_path / "i")
    assert manifest["recall"] == {
        **{"queries": "titles", "num_queries": 60, "top_k": 10, "value": 1.0}
    }
    # A passage of only quotes has neither a title nor a text to search for.
    blank = FileCorpus([*numbered(5), Passage("x", '""')], tmp_path / "blank.jsonl")
    manifest = build_index(blank, TableEncoder(), tmp_path / "j")
    assert manifest["recall"]["num_queries"] == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vector_dtype": "int8"}, "vector_dtype='int8', expected one of float32"),
        ({"kind": "flat"}, "kind='flat'"),
        ({"reorder": 5}, "reorder=5 has no meaning for kind='brute_force', which 60"),
    ],
)
def test_an_invalid_setting_leaves_no_directory(corpus, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        build_index(corpus, TableEncoder(), tmp_path / "i", **settings)
    assert not (tmp_path / "i").exists()


@pytest.mark.fault(33, "empty corpus")
def test_an_empty_corpus_is_refused(tmp_path):
    empty = FileCorpus([], tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match=r"empty\.jsonl: the corpus has no passages"):
        build_index(empty, TableEncoder(), tmp_path / "i")
