"""Nearest vectors: exact, independent of the batch, and always the right number."""

import dataclasses
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsearch.retrieval.nearest import (
    BRUTE_FORCE_MAX,
    KINDS,
    MARGIN,
    QUANTIZED_MAX,
    ExactSearcher,
    Nearest,
    Partition,
    build_searcher,
    choose_partition,
    exact_scores,
    partition_kind,
)
from rsearch.retrieval.vectors import Vectors
from tests.retrieval.fakes import measure_recall, unit_rows


def brute_force(rows):
    return Nearest(Vectors([rows]), build_searcher(rows, None), None)


class SearcherOnly(Nearest):
    """Nearest vectors without the fallback of comparing all vectors."""

    def _search_all(self, query, k):
        raise AssertionError("all vectors were compared")


def approximate(rows, kind, made=SearcherOnly, **settings):
    partition = choose_partition(*rows.shape, kind=kind, **settings)
    return made(Vectors([rows]), build_searcher(rows, partition), partition)


def clusters(rng, num, dim=32, size=20):
    centres = np.repeat(unit_rows(rng, -(-num // size), dim), size, axis=0)[:num]
    rows = centres + 0.08 * rng.normal(size=(num, dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def test_the_nearest_come_first_with_their_products():
    rows = np.array([[1, 0], [0, 1], [0.6, 0.8], [-1, 0]], np.float32)
    positions, scores = brute_force(rows).search(np.array([[1.0, 0.0]], np.float32), 3)
    np.testing.assert_array_equal(positions, [[0, 2, 1]])
    np.testing.assert_array_equal(scores, np.array([[1, 0.6, 0]], np.float32))


@pytest.mark.fault(33, "more than there are")
def test_a_top_k_above_the_number_of_vectors_returns_each_once():
    rows = np.array([[1, 0], [0, 1]], np.float32)
    positions, scores = brute_force(rows).search(rows, 10)
    np.testing.assert_array_equal(positions, [[0, 1], [1, 0]])
    assert np.isfinite(scores).all()


def test_a_single_vector_can_be_searched():
    positions, _ = brute_force(np.ones((1, 8), np.float32)).search(np.ones((2, 8)), 3)
    np.testing.assert_array_equal(positions, [[0], [0]])


def test_no_queries_give_no_rows():
    positions, scores = brute_force(np.eye(4, dtype=np.float32)).search(
        np.empty((0, 4), np.float32), 3
    )
    assert positions.shape == scores.shape == (0, 3)


def test_any_number_of_equal_scores_is_in_the_order_of_positions():
    rng = np.random.default_rng(0)
    rows = unit_rows(rng, 300, 24)
    copies = 5 + 3 * np.arange(2 * MARGIN + 9)  # more than the spare candidates
    rows[copies] = rows[5]
    positions, scores = brute_force(rows).search(rows[5:6], 7)
    np.testing.assert_array_equal(positions[0], copies[:7])
    assert len(set(scores[0].tolist())) == 1


@given(st.integers(0, 2**32 - 1), st.integers(1, 400), st.integers(1, 12))
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("is_installed", [True, False])
def test_results_equal_a_full_sort_in_any_batch(is_installed, seed, num, top_k):
    rng = np.random.default_rng(seed)
    rows = unit_rows(rng, num, 48)
    rows[rng.integers(0, num, num // 2)] = rows[0]
    queries = np.concatenate([rows[:1], unit_rows(rng, 7, 48)])
    with mock.patch.dict(sys.modules, {} if is_installed else {"scann": None}):
        nearest = brute_force(rows)
    positions, scores = nearest.search(queries, top_k)
    for row, query in enumerate(queries):
        alone = nearest.search(query[None], top_k)
        np.testing.assert_array_equal(positions[row], alone[0][0])
        np.testing.assert_array_equal(scores[row], alone[1][0])
        exact = nearest.vectors.all_scores(query)
        order = np.lexsort((np.arange(num), -exact))[: min(top_k, num)]
        np.testing.assert_array_equal(positions[row], order)
        np.testing.assert_array_equal(scores[row], exact[order])


@pytest.mark.parametrize("dims_per_block", [None, 3, 5])
@pytest.mark.parametrize("kind", ["quantized", "partitioned"])
def test_an_approximate_index_finds_nearly_all_neighbours(kind, dims_per_block):
    rows = clusters(np.random.default_rng(1), 4000)
    nearest = approximate(rows, kind, dims_per_block=dims_per_block)
    queries = nearest.vectors.rows(np.arange(0, 4000, 40))
    assert measure_recall(nearest, queries, top_k=10) >= 0.98


@pytest.mark.parametrize("kind", ["quantized", "partitioned"])
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_approximate_results_do_not_depend_on_the_batch(seed, copies, kind):
    rng = np.random.default_rng(seed)
    # Nor may the batch decide which of several equal vectors become candidates.
    nearest = approximate(np.repeat(clusters(rng, 4000), copies, axis=0), kind)
    queries = clusters(rng, 200)
    together = nearest.search(queries, 9)
    for size in (1, 3, 7):
        parts = [queries[i : i + size] for i in range(0, len(queries), size)]
        apart = zip(*[nearest.search(part, 9) for part in parts], strict=True)
        for actual, own in zip(together, apart, strict=True):
            np.testing.assert_array_equal(actual, np.concatenate(own))


def test_results_that_the_searched_partitions_lack_are_made_up_for():
    rows = clusters(np.random.default_rng(3), 900)
    nearest = approximate(rows, "partitioned", made=Nearest, leaves_to_search=1)
    positions, scores = nearest.search(rows[:5], 400)
    assert positions.shape == (5, 400)
    assert all(len(set(row)) == 400 for row in positions.tolist())
    assert np.isfinite(scores).all()
    assert (np.diff(scores, axis=1) <= 0).all()


class Padding:
    """A searcher that finds too few and pads as ScaNN does: id 0, a NaN product."""

    def search_batched_parallel(self, queries, final_num_neighbors, **_):
        ids = np.zeros((len(queries), final_num_neighbors), np.uint32)
        products = np.full(ids.shape, np.nan, np.float32)
        ids[:, 0], products[:, 0] = 3, 0.5
        return ids, products


@pytest.mark.fault(33, "NaN score", "ScaNN's padding")
def test_padding_never_becomes_a_result():
    rows = unit_rows(np.random.default_rng(4), 30, 8)
    partition = Partition(num_leaves=5, leaves_to_search=1, reorder=10)
    nearest = Nearest(Vectors([rows]), Padding(), partition)
    for top_k in (2, 3):
        positions, scores = nearest.search(rows[7:8], top_k)
        expected = brute_force(rows).search(rows[7:8], top_k)
        assert not {0, 3} <= set(positions[0].tolist())
        np.testing.assert_array_equal(positions, expected[0])
        np.testing.assert_array_equal(scores, expected[1])


class LastOfEquals:
    """An exact searcher that returns the last of equal vectors, not the first."""

    def __init__(self, rows):
        self.rows = rows

    def search_batched(self, queries, final_num_neighbors):
        products = (queries @ self.rows.T).round(6)
        backwards = np.argsort(-products[:, ::-1], axis=1, kind="stable")
        ids = len(self.rows) - 1 - backwards[:, :final_num_neighbors]
        return ids.astype(np.uint32), np.take_along_axis(products, ids, axis=1)


def test_equal_vectors_beyond_the_candidates_are_not_missed():
    rng = np.random.default_rng(6)
    rows = unit_rows(rng, 300, 24)
    copies = rng.permutation(300)[: 2 * MARGIN + 9]
    rows[copies] = rows[copies[0]]
    nearest = Nearest(Vectors([rows]), LastOfEquals(rows), None)
    positions, _ = nearest.search(rows[copies[:1]], 7)
    np.testing.assert_array_equal(positions[0], np.sort(copies)[:7])


def test_recall_is_the_share_that_is_found():
    rows = np.eye(4, dtype=np.float32)
    vectors = Vectors([rows])

    class OneOfTwo:
        def __init__(self):
            self.vectors = vectors

        def search(self, queries, top_k):
            return None, np.array([[1.0, -1.0], [1.0, 0.0]], np.float32)

    # Each query's exact products are 1 and 0: three of the four are found.
    assert measure_recall(OneOfTwo(), rows[:2], top_k=2) == 0.75


def test_exact_scores_are_those_of_a_sort_over_all_blocks():
    rng = np.random.default_rng(5)
    rows, queries = unit_rows(rng, 50, 8), unit_rows(rng, 6, 8)
    vectors = Vectors([rows[:20], rows[20:40], rows[40:]])
    expected = -np.sort(-(queries @ rows.T), axis=1)
    for top_k in (1, 7, 50, 99):
        actual = exact_scores(vectors, queries, top_k)
        np.testing.assert_allclose(actual, expected[:, :top_k], atol=1e-6)


@pytest.mark.parametrize("dim", [1, 3, 6, 32])
@pytest.mark.parametrize("kind", ["quantized", "partitioned"])
@pytest.mark.parametrize("num", [1, 2, 3, 15, 16, 17])
def test_the_smallest_indexes_find_what_brute_force_finds(num, kind, dim):
    rows = unit_rows(np.random.default_rng(7), num, dim)
    actual = approximate(rows, kind, reorder=200).search(rows, num)
    for ours, expected in zip(actual, brute_force(rows).search(rows, num), strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_the_default_kind_depends_on_the_number_of_vectors():
    assert choose_partition(BRUTE_FORCE_MAX, 384) is None
    for num in (BRUTE_FORCE_MAX + 1, QUANTIZED_MAX):
        partition = choose_partition(num, 384)
        assert partition == Partition(
            num_leaves=1,
            leaves_to_search=1,
            reorder=200,
            threshold=0.0,
            dims_per_block=4,
        )
        assert partition == choose_partition(num, 384, kind="quantized")
    for dim, size in ((8, 1), (64, 1), (128, 2), (384, 4), (1024, 4)):
        assert choose_partition(QUANTIZED_MAX, dim).dims_per_block == size
    assert choose_partition(QUANTIZED_MAX + 1, 384).num_leaves == 632  # 2 sqrt(100001)
    assert choose_partition(1_000_000, 384).num_leaves == 2000
    assert choose_partition(1_000_000, 384).leaves_to_search == 127  # 0.2 / sqrt(10)
    fifty = choose_partition(50_000, 384, kind="partitioned")
    assert fifty.leaves_to_search == 90  # 0.4 * 224
    assert choose_partition(16, 384, kind="partitioned").num_leaves == 4
    assert choose_partition(15, 384, kind="partitioned").num_leaves == 1
    assert choose_partition(10**6, 384, kind="brute_force") is None
    coarse = choose_partition(50_000, 384, kind="partitioned", dims_per_block=3)
    assert coarse == dataclasses.replace(fifty, dims_per_block=3, threshold=0.0)
    for kind in KINDS:
        assert partition_kind(choose_partition(50_000, 384, kind=kind)) == kind


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "tree"}, "kind='tree', expected"),
        (
            {"leaves_to_search": 3},
            "leaves_to_search=3 has no meaning for kind='brute_force', which 100 "
            "passages get; kinds that take it: partitioned$",
        ),
        ({"reorder": 3}, "reorder=3 has .* that take it: quantized, partitioned$"),
        (
            {"leaves_to_search": 3, "kind": "quantized"},
            "leaves_to_search=3 has no meaning for kind='quantized', which",
        ),
        ({"dims_per_block": 3}, "dims_per_block=3 has .*: quantized, partitioned$"),
        (
            {"kind": "quantized", "dims_per_block": 385},
            "dims_per_block=385, expected 1 to 384, the vectors' width",
        ),
        ({"kind": "partitioned", "dims_per_block": 0}, "dims_per_block=0, expected 1"),
        ({"kind": "quantized", "reorder": 0}, "reorder=0, expected at least 1"),
        ({"kind": "quantized", "reorder_dtype": "int4"}, "expected one of float32"),
        ({"kind": "partitioned", "leaves_to_search": 11}, "expected 1 to 10"),
        ({"kind": "partitioned", "reorder": -1}, "reorder=-1, expected at least 1"),
    ],
)
def test_a_bad_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        choose_partition(100, 384, **settings)


def test_without_scann_numpy_compares_vectors_and_codes_are_refused(capsys):
    rows = unit_rows(np.random.default_rng(0), 40, 24)
    with mock.patch.dict(sys.modules, {"scann": None}):
        assert type(build_searcher(rows, None)) is ExactSearcher
        assert (
            "scann is not installed: NumPy compares 40 vec" in capsys.readouterr().err
        )
        with pytest.raises(ValueError, match="scann, which compares the codes"):
            approximate(rows, "quantized")
    assert type(build_searcher(rows, None)) is not ExactSearcher


def test_searching_imports_neither_tensorflow_nor_torch():
    code = """
import sys
import numpy as np
from rsearch.retrieval.encoder import load_encoder
from rsearch.retrieval.engine import engine_in_memory
from rsearch.types import Passage
engine = engine_in_memory(
    [Passage("0", "Rome\\nA city.")], load_encoder("hashed", family=""), top_k=1
)
assert engine(["Rome"])[0][0].id == "0"
print(sorted({"tensorflow", "torch"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
