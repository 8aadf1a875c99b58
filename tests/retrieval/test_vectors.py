"""Shards of vectors: addressed as one array, written once, reused when intact."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.retrieval.per_question import encode_corpora
from rsearch.retrieval.vectors import Vectors, encode_shards, open_vectors, row_products
from tests.retrieval.fakes import FileCorpus, TableEncoder, numbered, unit_rows


def encode(corpus, encoder, directory, **changed):
    settings = {"shard_size": 4, "dtype": "float32", "made_from": "this", **changed}
    digests = encode_shards(corpus, encoder, directory, range(3), **settings)
    return {f"0000{number}.npy": digest for number, digest in enumerate(digests)}


@pytest.fixture
def corpus(tmp_path):
    return FileCorpus(numbered(10), tmp_path / "corpus.jsonl")


def test_rows_are_read_across_blocks():
    rows = np.arange(20, dtype=np.float32).reshape(10, 2)
    vectors = Vectors([rows[:4], rows[4:8], rows[8:]])
    chosen = np.array([9, 0, 4, 4, 7])
    assert len(vectors) == 10
    np.testing.assert_array_equal(vectors.rows(chosen), rows[chosen])
    np.testing.assert_array_equal(vectors.array(), rows)


@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.sampled_from([1, 7, 384]))
def test_a_score_does_not_depend_on_other_rows(seed, num, dim):
    rng = np.random.default_rng(seed)
    rows, query = unit_rows(rng, num, dim), unit_rows(rng, 1, dim)[0]
    together = row_products(rows, query)
    alone = [row_products(row[None], query)[0] for row in rows]
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_allclose(together, rows @ query, atol=1e-6)


def test_scores_of_chosen_vectors_equal_those_of_all():
    rng = np.random.default_rng(0)
    rows, query = unit_rows(rng, 9000, 6), unit_rows(rng, 1, 6)[0]
    vectors = Vectors([rows[:5000], rows[5000:]])
    chosen = rng.integers(0, 9000, 50)
    scores = vectors.all_scores(query)
    np.testing.assert_array_equal(
        vectors.pair_scores(query[None], chosen[None])[0], scores[chosen]
    )


def test_a_second_call_encodes_nothing(corpus, tmp_path):
    encoder = TableEncoder()
    first = encode(corpus, encoder, tmp_path / "v")
    assert list(first) == ["00000.npy", "00001.npy", "00002.npy"]
    assert len(encoder.encoded) == 10
    assert encode(corpus, encoder, tmp_path / "v") == first
    assert len(encoder.encoded) == 10
    expected = encoder.encode_passages([p.contents for p in corpus])
    np.testing.assert_array_equal(open_vectors(tmp_path / "v", first).array(), expected)


class Stopped(Exception):
    pass


class CuttingEncoder(TableEncoder):
    """Passages with a 7 in their title are longer than it encodes."""

    max_passage_tokens, num_cut = 5, 2  # two were counted before

    def encode_passages(self, texts):
        self.num_cut += sum("7" in text.partition("\n")[0] for text in texts)
        return super().encode_passages(texts)


def test_passages_that_are_cut_are_counted_when_they_are_encoded(
    corpus, tmp_path, capsys
):
    encoder = CuttingEncoder()
    message = "1 passages are longer than max_passage_tokens = 5"
    for is_encoded in (True, False):
        encode(corpus, encoder, tmp_path / "v")
        assert (message in capsys.readouterr().err) == is_encoded
    encode_corpora(CuttingEncoder(), [*corpus], {"a": [5, 6, 7]}, top_k=1)
    assert "3 passages are longer" in capsys.readouterr().err


def test_an_interrupted_call_resumes_where_it_stopped(corpus, tmp_path):
    encoder = TableEncoder()
    whole = encode(corpus, encoder, tmp_path / "whole")

    class Stopping(TableEncoder):
        def encode_passages(self, texts):
            if self.encoded:
                raise Stopped
            return super().encode_passages(texts)

    with pytest.raises(Stopped):
        encode(corpus, Stopping(), tmp_path / "v")
    resumed = TableEncoder()
    assert encode(corpus, resumed, tmp_path / "v") == whole
    assert resumed.encoded == [p.contents for p in numbered(10)[4:]]


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "record", "made_from"])
def test_a_damaged_shard_is_encoded_again(corpus, tmp_path, damage):
    encoder = TableEncoder()
    first = encode(corpus, encoder, tmp_path / "v")
    path = tmp_path / "v" / "00001.npy"
    record = path.with_suffix(".json")
    if damage == "flip":
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "delete":
        path.unlink()
    elif damage == "record":
        record.write_text("[")
    else:
        held = json.loads(record.read_text())
        record.write_text(json.dumps({**held, "made_from": "that"}))
    encoder.encoded.clear()
    assert encode(corpus, encoder, tmp_path / "v") == first
    assert encoder.encoded == [p.contents for p in numbered(10)[4:8]]


def test_half_precision_halves_the_files_and_is_read_back(corpus, tmp_path):
    encoder = TableEncoder()
    names = encode(corpus, encoder, tmp_path / "v", dtype="float16")
    vectors = open_vectors(tmp_path / "v", names)
    assert vectors.blocks[0].dtype == np.float16
    expected = encoder.encode_passages([p.contents for p in corpus])
    np.testing.assert_allclose(vectors.array(), expected, atol=5e-4)


def test_a_vector_that_is_not_finite_is_refused_with_its_passage(corpus, tmp_path):
    class Broken(TableEncoder):
        def encode_passages(self, texts):
            vectors = super().encode_passages(texts)
            vectors[2, 1] = np.nan
            return vectors

    with pytest.raises(ValueError, match=r"passage 'p2' a vector .* \(1 of 4\)"):
        encode(corpus, Broken(), tmp_path / "v")
    assert list((tmp_path / "v").iterdir()) == []
