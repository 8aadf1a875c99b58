"""Vectors from a file make the same index as encoding, or are refused."""

import json
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rsearch.retrieval.index import open_index
from rsearch.retrieval.index_build import build_index
from rsearch.retrieval.vector_files import VectorFile
from tests.retrieval.fakes import FileCorpus, TableEncoder, numbered

NUM, DIM = 40, 16
ENCODER = TableEncoder(DIM)
PASSAGES = numbered(NUM)
ROWS = ENCODER.encode_passages([p.contents for p in PASSAGES])
SETTINGS = {"shard_size": 16, "num_parts": 2}


@pytest.fixture
def corpus(tmp_path):
    return FileCorpus(PASSAGES, tmp_path / "corpus.jsonl")


def faiss_bytes(rows, *, kind=b"IxFI", metric=0):
    """A flat index as faiss writes it."""
    num, dim = rows.shape
    head = kind + struct.pack("<iqqq?i", dim, num, 1 << 20, 1 << 20, True, metric)
    return head + struct.pack("<Q", num * dim) + rows.astype("<f4").tobytes()


def write_parquet(path, rows, ids=None, kind=None, **settings):
    ids = [p.id for p in PASSAGES] if ids is None else ids
    kind = kind or pa.list_(pa.float32())
    vectors = pa.array([list(row) for row in rows], kind)
    table = pa.table({"text": ["a"] * len(ids), "id": ids, "vector": vectors})
    pq.write_table(table, path, **settings)


def write(path, kind, rows):
    """Write vectors in one of the layouts; return the path of the file."""
    if kind == "npy":
        np.save(path, rows)
        path = path.with_name(path.name + ".npy")
    elif kind == "parquet":
        write_parquet(path, rows, row_group_size=15)
    elif kind == "parquet of fixed lists":
        write_parquet(path, rows, kind=pa.list_(pa.float32(), DIM))
    elif kind == "faiss distances":
        path.write_bytes(faiss_bytes(rows, kind=b"IxF2", metric=1))
    else:
        path.write_bytes(faiss_bytes(rows))
    return path


KINDS = ("npy", "faiss products", "faiss distances", "parquet")


@pytest.mark.parametrize("kind", [*KINDS, "parquet of fixed lists"])
def test_given_vectors_make_the_index_that_encoding_makes(corpus, tmp_path, kind):
    whole = build_index(corpus, TableEncoder(DIM), tmp_path / "whole", **SETTINGS)
    encoder = TableEncoder(DIM)
    path = write(tmp_path / "given", kind, ROWS)
    manifest = build_index(
        corpus, encoder, tmp_path / "i", vector_file=VectorFile(path), **SETTINGS
    )
    assert encoder.encoded == []
    assert manifest["vectors"]["file"] == VectorFile(path).digest
    assert "file" not in whole["vectors"]
    arrays = [n for n in whole["files"] if n.endswith(".npy")]
    assert [manifest["files"][n] for n in arrays] == [whole["files"][n] for n in arrays]
    found = [
        open_index(tmp_path / name, corpus=corpus, encoder=ENCODER).nearest.search(
            ENCODER.encode_queries(["t3", "something else"]), 7
        )
        for name in ("i", "whole")
    ]
    for actual, expected in zip(*found):
        np.testing.assert_array_equal(actual, expected)
    # Distances between vectors of length 1 order them as their products do.
    distances = ((ROWS - ENCODER.encode_queries(["something else"])) ** 2).sum(1)
    np.testing.assert_array_equal(found[0][0][1], np.argsort(distances)[:7])


def test_half_precision_is_read_and_stored_on_request(corpus, tmp_path):
    path = write(tmp_path / "given", "npy", ROWS.astype(np.float16))
    settings = {"vector_file": VectorFile(path), "vector_dtype": "float16"}
    build_index(corpus, ENCODER, tmp_path / "i", **settings)
    stored = np.load(tmp_path / "i" / "vectors" / "00000.npy")
    np.testing.assert_array_equal(stored, ROWS.astype(np.float16))


def changed(row, value):
    rows = ROWS.copy()
    rows[row] = value
    return rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (changed((21, 3), np.nan), ["row 21", "number 3 is nan"]),
        (changed((21, 0), -np.inf), ["row 21", "number 0 is -inf"]),
        (changed(33, 2 * ROWS[33]), ["row 33", "length 2"]),
        (changed(0, 0), ["row 0", "length 0"]),
        (ROWS[:-1], ["39 vectors", "40 passages"]),
        (ROWS[:, :8], ["8 numbers", "16"]),
    ],
)
def test_vectors_that_cannot_be_the_encoders_are_refused(
    corpus, tmp_path, kind, rows, named
):
    path = tmp_path / "given"
    if kind == "parquet":
        write_parquet(path, rows, [p.id for p in PASSAGES[: len(rows)]])
    else:
        path = write(path, kind, rows)
    with pytest.raises(ValueError) as caught:
        build_index(
            corpus, ENCODER, tmp_path / "i", vector_file=VectorFile(path), **SETTINGS
        )
    for text in (str(path), *named):
        assert text in str(caught.value)
    assert not (tmp_path / "i" / "manifest.json").exists()


FLAT = faiss_bytes(ROWS)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "b''"),
        (b"IxFI", "b'IxFI'"),
        (FLAT[:-1], f"{len(FLAT) - 1} bytes"),
        (FLAT + b"x", f"{len(FLAT) + 1} bytes"),
        (b"IwFl" + FLAT[4:], "b'IwFl'"),
        (b"IxFl" + FLAT[4:], "b'IxFl'"),
        (faiss_bytes(ROWS, metric=1), "metric 1"),
        (FLAT[:4] + struct.pack("<i", -16) + FLAT[8:], "-16"),
        (FLAT[:8] + struct.pack("<q", 1 << 60) + FLAT[16:], str(1 << 60)),
        (FLAT[:37] + struct.pack("<Q", 1 << 62) + FLAT[45:], str(1 << 62)),
        (b"\x93NUMPY", ""),
        (b"PAR1PAR1", ""),
        (b"PK\x03\x04" + bytes(60), "PK"),
    ],
)
def test_a_damaged_file_or_one_of_another_kind_is_refused(tmp_path, content, named):
    path = tmp_path / "given"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        VectorFile(path)
    assert str(path) in str(caught.value) and named in str(caught.value)


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (ROWS.astype(np.float64), "float64"),
        (ROWS.astype(">f4"), ">f4"),
        (ROWS[0], "(16,)"),
        (np.array([{}]), ""),
    ],
)
def test_an_array_of_another_type_or_shape_is_refused(tmp_path, array, named):
    path = tmp_path / "given.npy"
    np.save(path, array, allow_pickle=True)
    with pytest.raises(ValueError) as caught:
        VectorFile(path)
    assert str(path) in str(caught.value) and named in str(caught.value)


def test_parquet_of_other_passages_or_columns_is_refused(corpus, tmp_path):
    path = tmp_path / "given"
    ids = [p.id for p in PASSAGES]

    def error():
        with pytest.raises(ValueError) as caught:
            VectorFile(path).rows(corpus, 0, NUM)
        assert str(path) in str(caught.value)
        return str(caught.value)

    swapped = [*ids[:30], ids[31], ids[30], *ids[32:]]
    write_parquet(path, ROWS, swapped)
    assert "row 30" in (text := error()) and "'p31'" in text and "'p30'" in text
    pq.write_table(pa.table({"id": ids, "vectors": ROWS.tolist()}), path)
    assert "['id', 'vectors']" in error()
    write_parquet(path, np.arange(NUM)[:, None], kind=pa.list_(pa.int64()))
    assert "int64" in error()
    rows = [*ROWS[:5], ROWS[5][:8], [*ROWS[6], *ROWS[5][8:]], *ROWS[7:]]
    write_parquet(path, rows)  # the total is still right
    assert "row 5: 8 numbers" in error()
    write_parquet(path, [*ROWS[:5], ROWS[5][:8], *ROWS[6:]])
    assert "row group 0" in error()


def test_whole_numbers_are_accepted_as_ids(tmp_path):
    passages = [type(p)(str(i), p.contents) for i, p in enumerate(PASSAGES)]
    corpus = FileCorpus(passages, tmp_path / "corpus.jsonl")
    write_parquet(tmp_path / "given", ROWS, list(range(NUM)))
    given = VectorFile(tmp_path / "given")
    np.testing.assert_array_equal(given.rows(corpus, 7, 12), ROWS[7:12])


def test_an_index_of_other_given_vectors_is_left_unchanged(corpus, tmp_path):
    for name, rows in (("first", ROWS), ("other", ROWS[::-1])):
        np.save(tmp_path / f"{name}.npy", rows)
    given = VectorFile(tmp_path / "first.npy")
    build_index(corpus, ENCODER, tmp_path / "i", vector_file=given)
    manifest = (tmp_path / "i" / "manifest.json").read_text()
    for other in (None, VectorFile(tmp_path / "other.npy")):
        with pytest.raises(ValueError, match=r"vectors\.file"):
            build_index(corpus, ENCODER, tmp_path / "i", vector_file=other)
    assert (tmp_path / "i" / "manifest.json").read_text() == manifest
    assert json.loads(manifest)["vectors"]["file"] == given.digest
