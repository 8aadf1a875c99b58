"""Nearest vectors: what is searched, ScaNN as this package opens it, and faiss.

Each builds its index, or takes the one that is in the folder with the time its building
took; opens it; and tunes what it does at search, and the size of its codes, to the
fastest that has the recall that is asked for.
"""

import dataclasses
import json
import multiprocessing
import pathlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from rsearch.bench.child import Unmeasured, peak_bytes
from rsearch.bench.comparison import alone
from rsearch.data.corpus import Corpus
from rsearch.data.questions import load_questions
from rsearch.models.hf.directory import find_model
from rsearch.retrieval.encoder import fingerprint_of, load_encoder
from rsearch.retrieval.engine import PassageList
from rsearch.retrieval.index import (
    corpus_path,
    open_index,
    open_searcher,
    read_index_manifest,
    save_searcher,
)
from rsearch.retrieval.nearest import (
    QUANTIZED_MAX,
    REORDER_BYTES,
    Nearest,
    build_searcher,
    choose_partition,
    exact_scores,
    partition_kind,
    recall_of,
)
from rsearch.retrieval.vectors import Vectors
from rsearch.runtime import files
from rsearch.runtime.console import note
from rsearch.types import Passage
from rsearch.world.world import make_world

TOP_K = 10  # neighbours that recall counts
MADE_FROM = "made_from.json"  # in a folder of vectors, whose settings it tells
MADE_AT_ONCE = 50_000  # rows of noise
WORLD = {
    **dict(people=400, films=300, companies=60, cities=60, train_questions=1400),
    **dict(dev_questions=200, kinds=("single", "bridge"), known_share=0.0),
    **dict(missing_share=0.0, distractors=0),
}


@dataclasses.dataclass(frozen=True)
class Searched:
    """Vectors on disk, with queries and what an exact search finds.

    Attributes:
        folder: holds vectors.npy [N, D], queries.npy [n, D] and exact.npy [n, TOP_K],
            the scores of the exactly nearest.
        num, dim: N and D.
    """

    folder: pathlib.Path
    num: int
    dim: int


def real_passages(
    work, *, corpus, encoder, family, index, questions, num_queries
) -> Searched:
    """Real passages and queries, encoded in a process of their own.

    Args:
        work: directory; what it holds already is taken as it is.
        corpus: file of passages; "" is the embedded world's.
        encoder, family: see `load_encoder`.
        index: of rsearch.index, over the corpus, whose vectors are taken; "" encodes.
            Like the encoder it is known by what it holds, wherever it is.
        questions: a file of queries, the first ones; titles of passages follow.
        num_queries: that are wanted; less where there are fewer passages.

    Raises:
        ValueError: what the directory holds is of other settings.

    Returns:
        The Searched; `texts.json` beside the vectors holds the queries' texts and, as
        lists of id and contents, the passages.
    """
    folder = work / "real"
    files_of = {"corpus": corpus, "questions": questions}
    made_from = {"encoder": encoder, "family": family, "index": index}
    if encoder != "hashed":
        made_from["encoder"] = fingerprint_of(find_model(encoder), [])
    if index:
        made_from["index"] = read_index_manifest(pathlib.Path(index))["digest"]
    made_from |= {
        n: f and files.digest_file(pathlib.Path(f)) for n, f in files_of.items()
    }
    made_from["queries"] = num_queries
    if not _is_made(folder, made_from):
        given = (corpus, encoder, family, index, questions, num_queries)
        alone(_encode, work, folder, *given)
        _tell_made_from(folder, made_from)
    return _read_searched(folder)


def _is_made(folder, wanted) -> bool:
    """Whether the folder holds vectors made from these things, all of them.

    Raises:
        ValueError: it holds others, or such that nobody tells what they were made from.
    """
    path = folder / MADE_FROM
    if not path.exists():
        if (folder / "exact.npy").exists():
            raise ValueError(
                f"{folder}: has no {MADE_FROM} to tell what its vectors were made "
                "from; name another --work, or remove it"
            )
        return False
    found = files.read_json(path)
    wrong = [name for name in wanted if found.get(name) != wanted[name]]
    if wrong:
        raise ValueError(
            f"{folder}: made with another --{', --'.join(wrong)}; name another "
            "--work, or remove it"
        )
    return True


def _tell_made_from(folder, made_from):
    """Written last: where this is, the folder is whole."""
    files.replace(folder / MADE_FROM, json.dumps(made_from).encode())


def _encode(work, folder, corpus, encoder, family, index, questions, num_queries):
    """Writes what `real_passages` returns."""
    folder.mkdir(parents=True, exist_ok=True)
    encoded = load_encoder(encoder, family=family or None)
    passages, vectors, asked = _passages(work, corpus, encoded, index, questions)
    rng = np.random.default_rng(0)
    drawn = rng.choice(len(passages), min(num_queries, len(passages)), False)
    titles = (passages[i].title.strip('" ') for i in drawn)
    texts = list(dict.fromkeys(t for t in [*asked, *titles] if t.strip()))
    texts = texts[:num_queries]
    told = {"texts": texts, "passages": [[p.id, p.contents] for p in passages]}
    (folder / "texts.json").write_text(json.dumps(told))
    _write_searched(folder, vectors, encoded.encode_queries(texts))


def _passages(work, corpus, encoder, index, questions):
    """(passages, their vectors, texts of the questions)."""
    asked = [q.text for q in load_questions(questions)[0]] if questions else []
    if not corpus and not index:
        world = make_world(seed=0, **WORLD)
        passages = world.passages
        asked = asked or [q.text for q in world.train]
    else:
        with Corpus(corpus or corpus_path(index), cache=work) as opened:
            passages = list(opened)
            if index:
                own = open_index(index, corpus=opened, encoder=encoder)
                return passages, own.nearest.vectors.array(), asked
    note(f"encoding {len(passages)} passages")
    texts = [passage.contents for passage in passages]
    return passages, encoder.encode_passages(texts), asked


def many_vectors(work, real: Searched, *, num, noise) -> Searched:
    """As many vectors as wanted: real ones, each with noise of its own, at length 1.

    Args:
        work: directory; what it holds already is taken as it is.
        real: whose vectors and queries these are.
        num: vectors to make.
        noise: length of what is added to a vector of length 1.

    Raises:
        ValueError: what the directory holds is of other settings of the real ones.
    """
    folder = work / f"made-{num}-{noise}"
    made_from = files.read_json(real.folder / MADE_FROM)
    if not _is_made(folder, made_from):
        note(f"making {num} vectors")
        folder.mkdir(parents=True, exist_ok=True)
        base = np.load(real.folder / "vectors.npy")
        made = np.empty((num, real.dim), np.float32)
        rng = np.random.default_rng(0)
        for start in range(0, num, MADE_AT_ONCE):
            part = np.arange(start, min(start + MADE_AT_ONCE, num)) % len(base)
            drawn = rng.standard_normal((len(part), real.dim), np.float32)
            rows = base[part] + noise / np.sqrt(real.dim) * drawn
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            made[start : start + len(part)] = rows
        _write_searched(folder, made, np.load(real.folder / "queries.npy"))
        _tell_made_from(folder, made_from)
    return _read_searched(folder)


def _write_searched(folder, vectors, queries):
    vectors = np.asarray(vectors, np.float32)
    np.save(folder / "vectors.npy", vectors)
    np.save(folder / "queries.npy", queries)
    exact = exact_scores(Vectors([vectors]), queries, TOP_K)
    np.save(folder / "exact.npy", exact)


def _read_searched(folder):
    shape = np.load(folder / "vectors.npy", mmap_mode="r").shape
    return Searched(folder, *shape)


def read_texts(folder):
    """(the queries' texts, the passages) of `real_passages`."""
    told = json.loads((pathlib.Path(folder) / "texts.json").read_text())
    passages = [Passage(name, contents) for name, contents in told["passages"]]
    return told["texts"], PassageList(passages)


SHARES = (0.3, 0.35, 0.4, 0.5, 0.65, 0.8, 1.0, 1.2, 1.5, 2.5)  # of the chosen leaves
REORDER = (45, 52, 60, 75, 90, 98, 105, 120, 150, 180, 200)
PROBES = (8, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512)
REFINED = (4, 8, 12, 16)  # times as many candidates as neighbours
EXPANSIONS = (16, 24, 32, 40, 48, 64, 96, 128, 192, 224, 256, 320, 384, 512, 768, 1024)
CODED = {  # dimensions of a code, and the type of the vectors that ScaNN holds beside
    "quantized": ((4, "float32"), (6, "int8"), (8, "int8")),
    "partitioned": ((2, "float32"), (3, "int8")),
}
CODED_IVF = (2, 4)  # dimensions of a code of faiss's
GRAPH = 32  # neighbours of a node of HNSW
BUILT_WITH = 100  # candidates while it is built
SECONDS = 2.0  # of searching in a repetition, at least: less is noise


@dataclasses.dataclass(frozen=True)
class Opened:
    """An index that can be searched in several ways.

    Attributes:
        search: (first, second) -> function of [n, D] queries, giving [n, k] scores.
        first, second: rising values of the two settings; a larger one finds more.
        built, loaded: seconds.
        coded: dimensions of a code; 0 where vectors have none.
        reordered_in: type of the vectors that candidates are compared by.
    """

    search: Callable
    first: Sequence[int]
    second: Sequence[int] = (0,)
    built: float = 0.0
    loaded: float = 0.0
    coded: int = 0
    reordered_in: str = "float32"


def make_scann(*, folder, batch, recall):
    """ScaNN with this package's settings, as rollouts search more vectors than few."""
    folder = pathlib.Path(folder)
    vectors = Vectors([np.load(folder / "vectors.npy", mmap_mode="r")])

    def opened(sizes):
        coded, dtype = sizes
        partition = approximate_partition(
            len(vectors), vectors.dim, dims_per_block=coded, reorder_dtype=dtype
        )
        # One of other settings, kept from before, is another index.
        made = (partition.num_leaves, coded, partition.threshold, dtype)
        path = folder / f"scann-{'-'.join(map(str, made))}"

        def search(leaves, reorder):
            own = dataclasses.replace(
                partition, leaves_to_search=leaves, reorder=reorder
            )
            nearest = Nearest(vectors, searcher, own)
            return lambda queries: nearest.search(queries, TOP_K)[1]

        seconds = _built(path, _build_scann, partition)
        started = time.perf_counter()
        searcher = open_searcher(path)
        loaded = time.perf_counter() - started
        most = partition.num_leaves
        leaves = [round(share * partition.leaves_to_search) for share in SHARES]
        leaves = sorted({min(most, max(1, n)) for n in leaves})
        return Opened(search, leaves, REORDER, seconds, loaded, coded, dtype)

    kind = partition_kind(approximate_partition(len(vectors), vectors.dim))
    return _tuned(folder, map(opened, CODED[kind]), batch, recall)


def _build_scann(path, partition):
    vectors = np.load(path.with_name("vectors.npy"))
    searcher = build_searcher(vectors, partition)
    save_searcher(searcher, path, [dataclasses.asdict(partition)])


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
    search = lambda *_: lambda queries: index.search(queries, TOP_K)[0]  # noqa: E731
    return _tuned(folder, [Opened(search, (0,), loaded=loaded)], batch, recall)


def make_hnsw(*, folder, batch, recall):
    """faiss's graph, HNSW32."""
    import faiss

    folder = pathlib.Path(folder)
    path = folder / "hnsw.faiss"
    seconds = _built(path, _build_hnsw)
    index, loaded = _read_faiss(path)

    def search(expansion, _):
        settings = faiss.SearchParametersHNSW(efSearch=expansion)
        return lambda queries: index.search(queries, TOP_K, params=settings)[0]

    opened = Opened(search, EXPANSIONS, built=seconds, loaded=loaded)
    return _tuned(folder, [opened], batch, recall)


def _build_hnsw(path):
    import faiss

    vectors = np.load(path.with_name("vectors.npy"))
    index = faiss.IndexHNSWFlat(vectors.shape[1], GRAPH, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = BUILT_WITH
    index.add(vectors)
    faiss.write_index(index, str(path))


def make_ivf(*, folder, batch, recall):
    """faiss's IVF with 4-bit product codes (fast scan), refined by the full vectors."""
    import faiss

    folder = pathlib.Path(folder)

    def opened(coded):
        path = folder / f"ivf-{coded}.faiss"

        def search(probes, refined):
            settings = faiss.IndexRefineSearchParameters(
                k_factor=refined,
                base_index_params=faiss.SearchParametersIVF(nprobe=probes),
            )
            return lambda queries: index.search(queries, TOP_K, params=settings)[0]

        seconds = _built(path, _build_ivf, coded)
        index, loaded = _read_faiss(path)
        num_lists = faiss.downcast_index(index.base_index).nlist
        probes = sorted({min(num_lists, n) for n in PROBES})
        return Opened(search, probes, REFINED, seconds, loaded, coded)

    return _tuned(folder, map(opened, CODED_IVF), batch, recall)


def _build_ivf(path, coded):
    import faiss

    vectors = np.load(path.with_name("vectors.npy"))
    num, dim = vectors.shape
    num_lists = max(1, round(num**0.5))
    kind = f"IVF{num_lists},PQ{dim // coded}x4fs,RFlat"
    index = faiss.index_factory(dim, kind, faiss.METRIC_INNER_PRODUCT)
    rng = np.random.default_rng(0)
    index.train(vectors[rng.choice(num, min(num, 100 * num_lists), False)])
    index.add(vectors)
    faiss.write_index(index, str(path))


def _read_faiss(path):
    """(the index of a file, seconds that took)."""
    import faiss

    started = time.perf_counter()
    return faiss.read_index(str(path)), time.perf_counter() - started


def _built(path, build, *settings):
    """Seconds that building took, now or when it was built.

    An index is built in a process of its own: what a builder keeps of its memory would
    count as the searcher's.
    """
    told = _told(path)
    if not told.exists():
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=_build, args=(build, path, *settings))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{path} could not be built: code {process.exitcode}")
    return json.loads(told.read_text())


def _build(build, path, *settings):
    started = time.perf_counter()
    build(path, *settings)
    _told(path).write_text(json.dumps(time.perf_counter() - started))


def _told(path):
    return path.with_name(path.name + ".seconds.json")


def _tuned(folder, indexes, batch, recall):
    """The fastest of all settings with this recall: a function that measures it.

    Args:
        folder: with queries.npy and exact.npy.
        indexes: Opened ones, of which one is kept.
        batch: queries a call.
        recall: at least this share of the nearest is to be found.

    Raises:
        Unmeasured: no setting finds it.
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
    for index in indexes:
        first = index.first
        for b in index.second:
            for a in first:
                find = index.search(a, b)
                _, found = run(find)
                if found < recall:
                    continue
                seconds, _ = run(find, SECONDS)
                if best is None or seconds < best[0]:
                    best = (seconds, index, a, b)
                # A larger one is slower, with this value of the second or a larger one.
                first = [smaller for smaller in first if smaller < a]
                break
    if best is None:
        raise Unmeasured(f"no setting has a recall of {recall:g}")
    _, index, first, second = best
    find = index.search(first, second)

    def once():
        seconds, found = run(find, SECONDS)
        return {
            "seconds": seconds,
            "peak_bytes": peak_bytes(),  # of the host, which searches
            "queries": len(queries),
            "recall": found,
            "build seconds": index.built,
            "load seconds": index.loaded,
            "searched": first,
            "reordered": second,
            "dimensions of a code": index.coded,
            "bytes of a compared feature": REORDER_BYTES[index.reordered_in],
        }

    return once
