"""The searchers that `rsearch.bench.retrieval` compares, and their vectors.

The searchers are ScaNN, opened as in the rest of this package, and three faiss indexes.
Each builds its index, or reads the one that an earlier run left in the folder. It is
then tuned: among all search settings and code sizes, the fastest that reaches the given
recall is measured.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from rsearch.bench.child import Repetition, Unmeasured, peak_bytes
from rsearch.bench.comparison import run_in_process
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
    Partition,
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

TOP_K = 10  # nearest neighbours over which recall is computed
SETTINGS_FILE = "made_from.json"  # the settings that a folder's vectors were made with
NOISE_ROWS_AT_ONCE = 50_000
WORLD = {
    **dict(people=400, films=300, companies=60, cities=60, train_questions=1400),
    **dict(dev_questions=200, kinds=("single", "bridge"), known_share=0.0),
    **dict(missing_share=0.0, distractors=0),
}


@dataclasses.dataclass(frozen=True)
class VectorSet:
    """Vectors on disk, with queries and the result of an exact search.

    Attributes:
        folder: directory of vectors.npy [N, D], queries.npy [n, D] and exact.npy
            [n, TOP_K], the scores of the nearest vectors.
        num, dim: N and D.
    """

    folder: pathlib.Path
    num: int
    dim: int


def real_passages(
    work: pathlib.Path,
    *,
    corpus: str,
    encoder: str,
    family: str,
    index: str,
    questions: str,
    num_queries: int,
) -> VectorSet:
    """Return vectors of real passages and queries, encoded in another process.

    Args:
        work: directory that keeps the vectors; those of an earlier run are reused.
        corpus: file of passages; "" takes the corpus of the index, or else of the
            embedded world.
        encoder, family: see `load_encoder`.
        index: directory of an index over the corpus, whose vectors are used; "" encodes
            the passages. A moved or copied index or encoder counts as the same one.
        questions: file of questions to use as the first queries; passage titles follow.
        num_queries: number of queries; fewer if there are not enough passages.

    Raises:
        ValueError: the directory holds vectors made with other settings.

    Returns:
        The VectorSet. `texts.json` next to the vectors holds the texts of the queries,
        and the passages as lists of id and contents.
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
    if not _is_complete(folder, made_from):
        arguments = (corpus, encoder, family, index, questions, num_queries)
        run_in_process(_encode, work, folder, *arguments)
        _record_settings(folder, made_from)
    return _read_vector_set(folder)


def _is_complete(folder, settings) -> bool:
    """Return whether the folder holds all vectors made with these settings.

    Raises:
        ValueError: it holds vectors made with other or unknown settings.
    """
    path = folder / SETTINGS_FILE
    if not path.exists():
        if (folder / "exact.npy").exists():
            raise ValueError(
                f"{folder}: has no {SETTINGS_FILE} to tell what its vectors were made "
                "from; name another --work, or remove it"
            )
        return False
    recorded_settings = files.read_json(path)
    mismatches = [
        name for name in settings if recorded_settings.get(name) != settings[name]
    ]
    if mismatches:
        raise ValueError(
            f"{folder}: made with another --{', --'.join(mismatches)}; name another "
            "--work, or remove it"
        )
    return True


def _record_settings(folder, made_from):
    """Write the settings file; it comes last and marks the folder as complete."""
    files.replace(folder / SETTINGS_FILE, json.dumps(made_from).encode())


def _encode(work, folder, corpus, encoder, family, index, questions, num_queries):
    """Write the files of the VectorSet that `real_passages` returns."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder = load_encoder(encoder, family=family or None)
    question_texts = [q.text for q in load_questions(questions)[0]] if questions else []
    vectors = None
    if corpus or index:
        with Corpus(corpus or corpus_path(index), cache=work) as reader:
            passages = list(reader)
            if index:
                built_index = open_index(
                    index,
                    corpus=reader,
                    encoder=encoder,
                    # Only the vectors, which may be in several parts.
                    make_nearest=lambda vectors: Nearest(vectors, None, None),
                )
                vectors = built_index.nearest.vectors.array()
    else:
        world = make_world(seed=0, **WORLD)
        passages = world.passages
        question_texts = question_texts or [q.text for q in world.train]
    if vectors is None:
        note(f"encoding {len(passages)} passages")
        vectors = encoder.encode_passages([p.contents for p in passages])
    rng = np.random.default_rng(0)
    title_indices = rng.choice(len(passages), min(num_queries, len(passages)), False)
    titles = (passages[i].title.strip('" ') for i in title_indices)
    texts = list(dict.fromkeys(t for t in [*question_texts, *titles] if t.strip()))
    texts = texts[:num_queries]
    content = {"texts": texts, "passages": [[p.id, p.contents] for p in passages]}
    (folder / "texts.json").write_text(json.dumps(content))
    _write_vector_set(folder, vectors, encoder.encode_queries(texts))


def many_vectors(
    work: pathlib.Path, real: VectorSet, *, num: int, noise: float
) -> VectorSet:
    """Return `num` unit vectors: repeated real ones, each with its own noise added.

    Args:
        work: directory that keeps the vectors; those of an earlier run are reused.
        real: vectors to add noise to, and the queries.
        noise: length of the noise, which is added to vectors of length 1.

    Raises:
        ValueError: the directory holds vectors made from other real ones.
    """
    folder = work / f"made-{num}-{noise}"
    made_from = files.read_json(real.folder / SETTINGS_FILE)
    if not _is_complete(folder, made_from):
        note(f"making {num} vectors")
        folder.mkdir(parents=True, exist_ok=True)
        base = np.load(real.folder / "vectors.npy")
        vectors = np.empty((num, real.dim), np.float32)
        rng = np.random.default_rng(0)
        for start in range(0, num, NOISE_ROWS_AT_ONCE):
            indices = np.arange(start, min(start + NOISE_ROWS_AT_ONCE, num)) % len(base)
            noise_rows = rng.standard_normal((len(indices), real.dim), np.float32)
            rows = base[indices] + noise / np.sqrt(real.dim) * noise_rows
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            vectors[start : start + len(indices)] = rows
        _write_vector_set(folder, vectors, np.load(real.folder / "queries.npy"))
        _record_settings(folder, made_from)
    return _read_vector_set(folder)


def _write_vector_set(folder, vectors, queries):
    vectors = np.asarray(vectors, np.float32)
    np.save(folder / "vectors.npy", vectors)
    np.save(folder / "queries.npy", queries)
    exact = exact_scores(Vectors([vectors]), queries, TOP_K)
    np.save(folder / "exact.npy", exact)


def _read_vector_set(folder):
    shape = np.load(folder / "vectors.npy", mmap_mode="r").shape
    return VectorSet(folder, *shape)


def read_texts(folder: pathlib.Path | str) -> tuple[list[str], PassageList]:
    """Return (query texts, passages) that `real_passages` has written."""
    content = json.loads((pathlib.Path(folder) / "texts.json").read_text())
    passages = [Passage(name, contents) for name, contents in content["passages"]]
    return content["texts"], PassageList(passages)


# Shares of the number of leaves that `choose_partition` would search.
LEAF_SHARES = (0.3, 0.35, 0.4, 0.5, 0.65, 0.8, 1.0, 1.2, 1.5, 2.5)
REORDER = (45, 52, 60, 75, 90, 98, 105, 120, 150, 180, 200)
PROBES = (8, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512)
REFINED = (4, 8, 12, 16)  # candidates per neighbour
EXPANSIONS = (16, 24, 32, 40, 48, 64, 96, 128, 192, 224, 256, 320, 384, 512, 768, 1024)
# Dimensions per code, and the dtype of the full vectors that ScaNN holds as well.
SCANN_CODES = {
    "quantized": ((4, "float32"), (6, "int8"), (8, "int8")),
    "partitioned": ((2, "float32"), (3, "int8")),
}
IVF_CODES = (2, 4)  # dimensions per code of faiss
GRAPH_DEGREE = 32  # neighbours of a node of HNSW
EF_CONSTRUCTION = 100  # candidates while HNSW is built
MIN_SECONDS = 2.0  # shorter repetitions would measure noise


@dataclasses.dataclass(frozen=True)
class OpenIndex:
    """An index that can be searched with several settings.

    Attributes:
        search: maps (first, second) to a function of [n, D] queries that returns [n, k]
            scores.
        first, second: ascending values of the two settings; larger ones find more.
        built, loaded: seconds that building and reading the index took.
        dims_per_code: dimensions per code; 0 if vectors have no codes.
        reordered_in: dtype of the vectors that candidates are reordered by.
    """

    search: Callable
    first: Sequence[int]
    second: Sequence[int] = (0,)
    built: float = 0.0
    loaded: float = 0.0
    dims_per_code: int = 0
    reordered_in: str = "float32"


def make_scann(*, folder: str, batch: int, recall: float) -> Repetition:
    """Prepare ScaNN with this package's settings for an approximate search."""
    folder = pathlib.Path(folder)
    vectors = Vectors([np.load(folder / "vectors.npy", mmap_mode="r")])

    def open_scann(sizes):
        dims_per_code, dtype = sizes
        partition = approximate_partition(
            len(vectors), vectors.dim, dims_per_block=dims_per_code, reorder_dtype=dtype
        )
        # The name distinguishes it from an earlier run's index with other settings.
        values = partition.num_leaves, dims_per_code, partition.threshold, dtype
        path = folder / f"scann-{'-'.join(map(str, values))}"

        def search(leaves, reorder):
            new_partition = dataclasses.replace(
                partition, leaves_to_search=leaves, reorder=reorder
            )
            nearest = Nearest(vectors, searcher, new_partition)
            return lambda queries: nearest.search(queries, TOP_K)[1]

        seconds = build_once(path, _build_scann, partition)
        start_time = time.perf_counter()
        searcher = open_searcher(path)
        load_seconds = time.perf_counter() - start_time
        num_leaves = partition.num_leaves
        leaves = [round(share * partition.leaves_to_search) for share in LEAF_SHARES]
        leaves = sorted({min(num_leaves, max(1, n)) for n in leaves})
        return OpenIndex(
            search, leaves, REORDER, seconds, load_seconds, dims_per_code, dtype
        )

    kind = partition_kind(approximate_partition(len(vectors), vectors.dim))
    return tune(folder, map(open_scann, SCANN_CODES[kind]), batch, recall)


def _build_scann(path, partition):
    vectors = np.load(path.with_name("vectors.npy"))
    searcher = build_searcher(vectors, partition)
    save_searcher(searcher, path, [dataclasses.asdict(partition)])


def approximate_partition(num: int, dim: int, **settings: object) -> Partition:
    """Return the settings for [num, dim] vectors, with exact search ruled out."""
    kind = "quantized" if num <= QUANTIZED_MAX else "partitioned"
    return choose_partition(num, dim, kind=kind, **settings)


def make_flat(*, folder: str, batch: int, recall: float) -> Repetition:
    """Prepare faiss's exact search."""
    import faiss

    folder = pathlib.Path(folder)
    start_time = time.perf_counter()
    vectors = np.load(folder / "vectors.npy")
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    del vectors
    load_seconds = time.perf_counter() - start_time
    search = lambda *_: lambda queries: index.search(queries, TOP_K)[0]  # noqa: E731
    return tune(folder, [OpenIndex(search, (0,), loaded=load_seconds)], batch, recall)


def make_hnsw(*, folder: str, batch: int, recall: float) -> Repetition:
    """Prepare faiss's graph index, HNSW32."""
    import faiss

    folder = pathlib.Path(folder)
    path = folder / "hnsw.faiss"
    seconds = build_once(path, _build_hnsw)
    index, load_seconds = _read_faiss(path)

    def search(expansion, _):
        settings = faiss.SearchParametersHNSW(efSearch=expansion)
        return lambda queries: index.search(queries, TOP_K, params=settings)[0]

    hnsw_index = OpenIndex(search, EXPANSIONS, built=seconds, loaded=load_seconds)
    return tune(folder, [hnsw_index], batch, recall)


def _build_hnsw(path):
    import faiss

    vectors = np.load(path.with_name("vectors.npy"))
    index = faiss.IndexHNSWFlat(
        vectors.shape[1], GRAPH_DEGREE, faiss.METRIC_INNER_PRODUCT
    )
    index.hnsw.efConstruction = EF_CONSTRUCTION
    index.add(vectors)
    faiss.write_index(index, str(path))


def make_ivf(*, folder: str, batch: int, recall: float) -> Repetition:
    """Prepare faiss's IVF: 4-bit codes (fast scan), refined with full vectors."""
    import faiss

    folder = pathlib.Path(folder)

    def open_ivf(dims_per_code):
        path = folder / f"ivf-{dims_per_code}.faiss"

        def search(probes, refine_factor):
            settings = faiss.IndexRefineSearchParameters(
                k_factor=refine_factor,
                base_index_params=faiss.SearchParametersIVF(nprobe=probes),
            )
            return lambda queries: index.search(queries, TOP_K, params=settings)[0]

        seconds = build_once(path, _build_ivf, dims_per_code)
        index, load_seconds = _read_faiss(path)
        num_lists = faiss.downcast_index(index.base_index).nlist
        probes = sorted({min(num_lists, n) for n in PROBES})
        return OpenIndex(search, probes, REFINED, seconds, load_seconds, dims_per_code)

    return tune(folder, map(open_ivf, IVF_CODES), batch, recall)


def _build_ivf(path, dims_per_code):
    import faiss

    vectors = np.load(path.with_name("vectors.npy"))
    num, dim = vectors.shape
    num_lists = max(1, round(num**0.5))
    kind = f"IVF{num_lists},PQ{dim // dims_per_code}x4fs,RFlat"
    index = faiss.index_factory(dim, kind, faiss.METRIC_INNER_PRODUCT)
    rng = np.random.default_rng(0)
    index.train(vectors[rng.choice(num, min(num, 100 * num_lists), False)])
    index.add(vectors)
    faiss.write_index(index, str(path))


def _read_faiss(path):
    """Return (the index read from a file, seconds that took)."""
    import faiss

    start_time = time.perf_counter()
    return faiss.read_index(str(path)), time.perf_counter() - start_time


def build_once(path: pathlib.Path, build: Callable, *settings: object) -> float:
    """Build the index unless that was done before; return the seconds it took.

    Another process builds it, as memory that the builder does not release would count
    as the searcher's.
    """
    record = path.with_name(path.name + ".seconds.json")
    if not record.exists():
        seconds = run_in_process(_build, build, path, *settings)
        record.write_text(json.dumps(seconds))
    return json.loads(record.read_text())


def _build(build, path, *settings):
    start_time = time.perf_counter()
    build(path, *settings)
    return time.perf_counter() - start_time


def tune(
    folder: pathlib.Path, indexes: Iterable[OpenIndex], batch: int, recall: float
) -> Repetition:
    """Find the fastest setting with this recall, and return a function measuring it.

    Args:
        folder: directory with queries.npy and exact.npy.
        indexes: an OpenIndex for each code size.
        batch: queries per call.
        recall: least share of the nearest vectors that must be found.

    Raises:
        Unmeasured: no setting reaches the recall.
    """
    queries, exact = np.load(folder / "queries.npy"), np.load(folder / "exact.npy")
    batches = [queries[i : i + batch] for i in range(0, len(queries), batch)]

    def run(find, min_seconds=0.0):
        """Return (mean seconds for all queries, recall), over `min_seconds`."""
        rounds, start_time = 0, time.perf_counter()
        while not rounds or time.perf_counter() < start_time + min_seconds:
            scores = [find(rows) for rows in batches]
            rounds += 1
        seconds = (time.perf_counter() - start_time) / rounds
        return seconds, recall_of(np.concatenate(scores), exact)

    best = None
    for index in indexes:
        first = index.first
        for b in index.second:
            for a in first:
                find = index.search(a, b)
                _, found_share = run(find)
                if found_share < recall:
                    continue
                seconds, _ = run(find, MIN_SECONDS)
                if best is None or seconds < best[0]:
                    best = (seconds, index, a, b)
                # Larger first values are slower, also with larger second values.
                first = [smaller for smaller in first if smaller < a]
                break
    if best is None:
        raise Unmeasured(f"no setting has a recall of {recall:g}")
    _, index, first, second = best
    find = index.search(first, second)

    def repeat():
        seconds, found_share = run(find, MIN_SECONDS)
        return {
            "seconds": seconds,
            "peak_bytes": peak_bytes(),  # host memory, as the search runs there
            "queries": len(queries),
            "recall": found_share,
            "build seconds": index.built,
            "load seconds": index.loaded,
            "searched": first,
            "reordered": second,
            "dimensions of a code": index.dims_per_code,
            "bytes of a compared feature": REORDER_BYTES[index.reordered_in],
        }

    return repeat
