"""Searchers of nearest vectors as subjects: ScaNN as this package opens it, and faiss.

Each builds its index, or takes the one that is in the folder with the time its building
took; opens it; and tunes what it does at search to the fastest that has the recall that
is asked for.
"""

import dataclasses
import json
import pathlib
import time

import numpy as np

from rsearch.benching.passages import TOP_K
from rsearch.retrieval.index_parts import open_searcher, save_searcher
from rsearch.retrieval.nearest import (
    QUANTIZED_MAX,
    Nearest,
    build_searcher,
    choose_partition,
    recall_of,
)
from rsearch.retrieval.vectors import Vectors

SHARES = (0.3, 0.35, 0.4, 0.5, 0.65, 0.8, 1.0, 1.2, 1.5, 2.5)  # of the chosen leaves
REORDER = (45, 52, 60, 75, 100, 150, 200)
PROBES = (8, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512)
REFINED = (4, 8, 12, 16)  # times as many candidates as neighbours
EXPANSIONS = (16, 24, 32, 40, 48, 64, 96, 128, 192, 224, 256, 320, 384, 512, 768, 1024)
GRAPH = 32  # neighbours of a node of HNSW
BUILT_WITH = 100  # candidates while it is built
SECONDS = 2.0  # of searching in a repetition, at least: less is noise


def make_scann(*, folder, batch, recall):
    """ScaNN with this package's settings, as rollouts search more vectors than few."""
    folder = pathlib.Path(folder)
    vectors = Vectors([np.load(folder / "vectors.npy", mmap_mode="r")])
    partition = approximate_partition(len(vectors), vectors.dim)
    # One of other settings, kept from before, is another index.
    made = (partition.num_leaves, partition.dims_per_block, partition.threshold)
    path = folder / f"scann-{'-'.join(map(str, made))}"

    def build():
        searcher = build_searcher(vectors.array(), partition)
        save_searcher(searcher, path, [dataclasses.asdict(partition)])

    seconds = _built(path, build)
    started = time.perf_counter()
    searcher = open_searcher(path)
    loaded = time.perf_counter() - started
    most = partition.num_leaves

    def search(leaves, reorder):
        own = dataclasses.replace(partition, leaves_to_search=leaves, reorder=reorder)
        nearest = Nearest(vectors, searcher, own)
        return lambda queries: nearest.search(queries, TOP_K)[1]

    leaves = [round(share * partition.leaves_to_search) for share in SHARES]
    leaves = sorted({min(most, max(1, n)) for n in leaves})
    return _tuned(folder, search, leaves, REORDER, batch, recall, seconds, loaded)


def approximate_partition(num, dim, **settings):
    """This package's settings for [num, dim] vectors, were they too many to compare."""
    kind = "quantized" if num <= QUANTIZED_MAX else "partitioned"
    return choose_partition(num, dim, kind=kind, **settings)


def make_flat(*, folder, batch, recall):
    """faiss's exact search."""
    import faiss

    folder = pathlib.Path(folder)
    started = time.perf_counter()
    vectors = np.load(folder / "vectors.npy")
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    del vectors
    loaded = time.perf_counter() - started
    return _tuned(
        folder, lambda *_: lambda q: index.search(q, TOP_K)[0], (0,), (0,), batch,
        recall, 0.0, loaded,
    )  # fmt: skip


def make_hnsw(*, folder, batch, recall):
    """faiss's graph, HNSW32."""
    import faiss

    folder = pathlib.Path(folder)
    path = folder / "hnsw.faiss"

    def build():
        vectors = np.load(folder / "vectors.npy")
        index = faiss.IndexHNSWFlat(vectors.shape[1], GRAPH, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = BUILT_WITH
        index.add(vectors)
        faiss.write_index(index, str(path))

    seconds = _built(path, build)
    index, loaded = _opened(path)

    def search(expansion, _):
        settings = faiss.SearchParametersHNSW(efSearch=expansion)
        return lambda queries: index.search(queries, TOP_K, params=settings)[0]

    return _tuned(folder, search, EXPANSIONS, (0,), batch, recall, seconds, loaded)


def make_ivf(*, folder, batch, recall):
    """faiss's IVF with 4-bit product codes (fast scan), refined by the full vectors."""
    import faiss

    folder = pathlib.Path(folder)
    path = folder / "ivf.faiss"

    def build():
        vectors = np.load(folder / "vectors.npy")
        num, dim = vectors.shape
        num_lists = max(1, round(num**0.5))
        kind = f"IVF{num_lists},PQ{dim // 2}x4fs,RFlat"
        index = faiss.index_factory(dim, kind, faiss.METRIC_INNER_PRODUCT)
        rng = np.random.default_rng(0)
        index.train(vectors[rng.choice(num, min(num, 100 * num_lists), False)])
        index.add(vectors)
        faiss.write_index(index, str(path))

    seconds = _built(path, build)
    index, loaded = _opened(path)
    num_lists = faiss.downcast_index(index.base_index).nlist

    def search(probes, refined):
        settings = faiss.IndexRefineSearchParameters(
            k_factor=refined,
            base_index_params=faiss.SearchParametersIVF(nprobe=probes),
        )
        return lambda queries: index.search(queries, TOP_K, params=settings)[0]

    probes = sorted({min(num_lists, n) for n in PROBES})
    return _tuned(folder, search, probes, REFINED, batch, recall, seconds, loaded)


def _opened(path):
    """(the index of a file, seconds that took)."""
    import faiss

    started = time.perf_counter()
    return faiss.read_index(str(path)), time.perf_counter() - started


def _built(path, build):
    """Seconds that building took, now or when it was built."""
    told = path.with_name(path.name + ".seconds.json")
    if not told.exists():
        started = time.perf_counter()
        build()
        told.write_text(json.dumps(time.perf_counter() - started))
    return json.loads(told.read_text())


def _tuned(folder, search, first, second, batch, recall, built, loaded):
    """The fastest of all settings with this recall: a function that measures it.

    Args:
        folder: with queries.npy and exact.npy.
        search: (first, second) -> function of [n, D] queries, giving [n, k] scores.
        first, second: rising values of the two settings; a larger one finds more.
        batch: queries a call.
        recall: at least this share of the nearest is to be found.
        built, loaded: seconds, told beside.
    """
    queries, exact = np.load(folder / "queries.npy"), np.load(folder / "exact.npy")
    parts = [queries[i : i + batch] for i in range(0, len(queries), batch)]

    def run(find, least=0.0):
        """(seconds for all queries, the mean over `least` seconds; their recall)."""
        rounds, started = 0, time.perf_counter()
        while not rounds or time.perf_counter() < started + least:
            scores = [find(part) for part in parts]
            rounds += 1
        seconds = (time.perf_counter() - started) / rounds
        return seconds, recall_of(np.concatenate(scores), exact)

    best = None
    for b in second:
        for a in first:
            find = search(a, b)
            _, found = run(find)
            if found >= recall:
                seconds, _ = run(find, SECONDS)
                best = min(best or (seconds, a, b), (seconds, a, b))
                # A larger one is slower, with this value of the second or a larger one.
                first = [smaller for smaller in first if smaller < a]
                break
    if best is None:
        raise RuntimeError(f"no setting has a recall of {recall}")
    find = search(*best[1:])

    def once():
        seconds, found = run(find, SECONDS)
        return {
            "seconds": seconds,
            "queries": len(queries),
            "recall": found,
            "build seconds": built,
            "load seconds": loaded,
            "searched": best[1],
            "reordered": best[2],
        }

    return once
