"""Search on devices finds what exact search on the host finds, bit for bit."""

import json

import jax
import numpy as np
import pytest

from rsearch.config.recipes import run_command
from rsearch.index import main
from rsearch.plan.costs import passages_memory
from rsearch.retrieval import device_search
from rsearch.retrieval.device_search import DeviceSearcher, nearest_on_devices
from rsearch.retrieval.engine import exact_index
from rsearch.retrieval.vectors import Vectors
from rsearch.setup.search import open_search
from tests.retrieval.fakes import unit_rows
from tests.retrieval.test_nearest import clusters
from tests.small_run import config


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Shrink chunks, so that a few vectors fill several of them on each device."""
    monkeypatch.setattr(device_search, "CHUNK", 128)


def in_blocks(rows, size):
    return Vectors([rows[i : i + size] for i in range(0, len(rows), size)])


def assert_equal_search(rows, queries, top_k, devices, block=None):
    nearest = nearest_on_devices(in_blocks(rows, block or len(rows)), devices)
    actual, expected = (n.search(queries, top_k) for n in (nearest, exact_index(rows)))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert actual[0].shape == (len(queries), min(top_k, len(rows)))


@pytest.mark.parametrize("num_devices", (1, 3, 8))
@pytest.mark.parametrize("num", (1, 7, 64, 130, 1000, 2500))
def test_search_on_devices_finds_what_exact_search_finds(num, num_devices):
    rng = np.random.default_rng(num)
    devices = jax.devices()[:num_devices]
    assert len(devices) == num_devices
    assert_equal_search(
        clusters(rng, num), unit_rows(rng, 70, 32), 5, devices, block=100
    )


def test_queries_and_vectors_of_any_norm_are_searched_exactly():
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(900, 24)) * rng.uniform(0.01, 9, (900, 1))).astype("f4")
    queries = (rng.normal(size=(9, 24)) * 10.0 ** rng.integers(-4, 4, (9, 1))).astype(
        "f4"
    )
    assert_equal_search(rows, queries, 300, jax.devices()[:2])


def test_any_number_of_equal_vectors_is_in_the_order_of_positions():
    rows = np.repeat(np.eye(3, 16, dtype=np.float32), 200, axis=0)
    assert_equal_search(rows, rows[::200], 4, jax.devices()[:2])


def test_vectors_that_are_equal_after_rounding_are_told_apart():
    """300 neighbours, more than the candidates, differ below bfloat16's precision."""
    rows = np.zeros((300, 8), np.float32)
    rows[:, 0] = 1 - np.arange(300)[::-1] * 1e-6
    nearest = nearest_on_devices(Vectors([rows]), jax.devices()[:1])
    positions, _ = nearest.search(np.eye(1, 8, dtype=np.float32), 3)
    np.testing.assert_array_equal(positions, [[299, 298, 297]])


def test_candidates_suffice_if_vectors_differ(monkeypatch):
    rng = np.random.default_rng(1)
    rows = unit_rows(rng, 3000, 64)
    nearest = nearest_on_devices(Vectors([rows]), jax.devices()[:4])
    monkeypatch.setattr(nearest, "_search_all", None)
    nearest.search(unit_rows(rng, 50, 64), 3)


def test_products_differ_from_the_exact_ones_by_less_than_the_bound():
    rng = np.random.default_rng(2)
    rows = unit_rows(rng, 500, 768)
    queries = unit_rows(rng, 20, 768)
    searcher = DeviceSearcher(Vectors([rows]), jax.devices()[:1])
    positions, products = searcher.search_batched(queries, 500)
    exact = np.take_along_axis(queries @ rows.T, positions, 1)
    worst = np.abs(products - exact).max()
    assert 0 < worst < searcher.rounding / 2 < 0.004


def test_a_run_on_devices_searches_exactly_whatever_the_kind_of_index(tmp_path):
    """Fingerprints differ if results may: an index of codes finds other passages."""
    corpus = tmp_path / "corpus.jsonl"
    lines = [
        json.dumps({"id": f"c{i}", "contents": f"city {i}\nIt has {i % 7} gates."})
        for i in range(300)
    ]
    corpus.write_text("\n".join(lines))

    def search(name, **settings):
        path = str(tmp_path / name)
        c = config(retrieval__index=path, retrieval__corpus=str(corpus), **settings)
        return open_search(c, None), c

    for kind, parts in (("brute_force", 3), ("quantized", 1)):
        flags = [f"--corpus={corpus}", "--encoder=hashed", f"--out={tmp_path / kind}"]
        flags += [f"--kind={kind}", f"--parts={parts}", "--shard_size=100"]
        assert run_command(main, flags) == 0
    queries = [f"gates of city {i}" for i in range(40)]
    expected, _ = search("brute_force")
    same, c = search("brute_force", retrieval__on_devices=True)
    other, _ = search("quantized", retrieval__on_devices=True)
    assert same(queries) == other(queries) == expected(queries)
    assert same.fingerprint == expected.fingerprint
    assert other.fingerprint == f"{search('quantized')[0].fingerprint} exact"
    size = 300 * c.retrieval.hashed_dim * 2
    assert passages_memory(c, 4) == {"passages' vectors": size / 4}
    assert passages_memory(config(), 4) == {}


def test_a_plan_counts_no_vectors_of_an_index_of_words(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"id": "1", "contents": "a city"}\n')
    flags = [f"--corpus={tmp_path / 'c.jsonl'}", f"--out={tmp_path / 'i'}"]
    assert run_command(main, [*flags, "--kind=bm25"]) == 0
    index = dict(retrieval__index=str(tmp_path / "i"), retrieval__corpus="")
    assert passages_memory(config(**index, retrieval__on_devices=True), 4) == {}
