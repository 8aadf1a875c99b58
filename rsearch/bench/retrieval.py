"""Benchmark retrieval: nearest vectors against faiss, rollouts against a server.

Nearest vectors: each searcher is tuned to the fastest setting that reaches the same
recall, and searches for the same queries in batches. Rollouts: all rows of a turn
search. This package's engine gets their queries in one call. Public systems run a
server next to the training process, and each row sends it a request; the server then
encodes one query and compares it with all vectors. Memory is the host memory of all
processes, wherever queries are encoded.
"""

import concurrent.futures
import contextlib
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import httpx
import numpy as np

from rsearch.bench.child import Repetition, Unmeasured, peak_bytes, reset_peak
from rsearch.bench.comparison import (
    OURS,
    Bench,
    Measurement,
    Subject,
    compare,
    make_case_rows,
    make_row,
    median_of,
    with_bound,
)
from rsearch.bench.neighbours import (
    TOP_K,
    VectorSet,
    approximate_partition,
    many_vectors,
    read_texts,
    real_passages,
)
from rsearch.bench.workload import multiply_in_full
from rsearch.retrieval.encoder import load_encoder
from rsearch.retrieval.engine import SearchEngine
from rsearch.retrieval.nearest import (
    NUM_CODES,
    REORDER_BYTES,
    Nearest,
    batch_size,
    build_searcher,
    choose_partition,
)
from rsearch.retrieval.vectors import Vectors

FLAGS = {
    "corpus": ("", "JSONL of passages (default: the index's, or the embedded world)"),
    "encoder": ("hashed", 'directory or hub id of a BERT model, or "hashed"'),
    "family": ("minilm", "prefixes and pooling: e5, bge, minilm or declared"),
    "index": ("", "directory made by rsearch.index, to take vectors from"),
    "questions": ("", "file of questions to search for, before passages' titles"),
    "cases": ("real,made,rollouts", "cases to measure"),
    "queries": (1024, "queries to search nearest vectors for"),
    "batch": (256, "queries per call"),
    "recall": (0.95, f"recall of the nearest {TOP_K} that each searcher is tuned to"),
    "vectors": (1_000_000, "vectors of case made: real ones with noise added"),
    "noise": (0.5, "length of that noise, added to vectors of length 1"),
    "rollouts": (64, "rollouts that search in one turn"),
    "work": ("", "directory that keeps vectors and indexes for later runs"),
}
SEARCHERS = {  # functions of rsearch.bench.neighbours
    OURS: "make_scann",
    "faiss Flat": "make_flat",
    "faiss HNSW32": "make_hnsw",
    "faiss IVF-PQ fast scan": "make_ivf",
}
SAME_SHARES = (0.0, 0.5)  # share of a group's rollouts that send the same query
AT_ONCE, IN_TURN = "server, all rows at once", "server, row after row"
LARGE = (29_000_000, 1024)  # vectors and their dimension: the largest corpus in use
HOSTS = 8  # hosts that could share it


def measure(
    start: Callable[[], Bench],
    *,
    corpus: str,
    encoder: str,
    family: str,
    index: str,
    questions: str,
    cases: str,
    queries: int,
    batch: int,
    recall: float,
    vectors: int,
    noise: float,
    rollouts: int,
    work: str,
) -> list[Measurement]:
    """Measure the chosen cases, and return the rows of the table; see FLAGS.

    Args:
        start: probes the machine.

    Raises:
        ValueError: an unknown case, or a number out of range.
    """
    case_names = [name.strip() for name in cases.split(",")]
    if not set(case_names) <= {"real", "made", "rollouts"}:
        raise ValueError(f"--cases={cases}: must be of real, made, rollouts")
    if not 0 < recall <= 1:
        raise ValueError(f"--recall={recall}, expected above 0 and at most 1")
    if not 0 <= noise < math.inf:
        raise ValueError(f"--noise={noise}, expected a number of at least 0")
    with contextlib.ExitStack() as stack:
        if not work:
            work = stack.enter_context(tempfile.TemporaryDirectory())
        work = pathlib.Path(work)
        real = real_passages(
            work,
            corpus=corpus,
            encoder=encoder,
            family=family,
            index=index,
            questions=questions,
            num_queries=queries,
        )
        rows, bench = [], start()
        if "real" in case_names:
            rows += measure_searchers(bench, "real passages", real, batch, recall)
        if "made" in case_names:
            noisy_set = many_vectors(work, real, num=vectors, noise=noise)
            rows += measure_searchers(bench, "made vectors", noisy_set, batch, recall)
        if "rollouts" in case_names:
            for share in SAME_SHARES:
                settings = {
                    "folder": str(real.folder),
                    "encoder": encoder,
                    "family": family,
                    "num_rollouts": rollouts,
                    "same_share": share,
                }
                rows += measure_turns(bench, settings)
    return [*rows, *large_rows()]


def measure_searchers(
    bench: Bench, name: str, vectors: VectorSet, batch: int, recall: float
) -> list[Measurement]:
    """Measure the queries a second of each searcher."""
    case = f"{name}, {vectors.num:,} x {vectors.dim}"
    settings = {"folder": str(vectors.folder), "batch": batch, "recall": recall}
    subjects = {
        subject: Subject("rsearch.bench.neighbours", settings, make)
        for subject, make in SEARCHERS.items()
    }
    results = compare(subjects, bench.repeats)
    names = ("recall", "build seconds", "load seconds", "searched", "reordered")
    names = (*names, "dimensions of a code", "bytes of a compared feature")

    def bound(row, runs):
        work = least_work(row.subject, vectors, batch, runs[0])
        if work is None:
            return row
        flops, num_bytes = (amount * runs[0]["queries"] for amount in work)
        seconds = median_of(runs, "seconds")
        return with_bound(row, bench.machine, seconds, (flops, num_bytes))

    return make_case_rows(
        case,
        "queries/s",
        results,
        lambda run: run["queries"] / run["seconds"],
        counts=lambda _, runs: {name: runs[0][name] for name in names},
        bound=bound,
    )


def least_work(
    subject: str, vectors: VectorSet, batch: int, result: dict
) -> tuple[float, float] | None:
    """Return the least (FLOPs, bytes) of a query; None if there is no formula for it.

    A query of ScaNN reads all centroids (a byte per feature), the codes of its leaves
    (four bits for several features) and the full vectors of its candidates. It is
    multiplied by all of these, but by a table of codes in place of the codes. Queries
    of one batch share the reads of the centroids and, as if each chose its leaves at
    random, of the codes. A flat search reads all vectors once per batch, and multiplies
    each query by all of them.
    """
    num, dim = vectors.num, vectors.dim
    if subject == "faiss Flat":
        return 2 * num * dim, 4 * num * dim / batch
    if subject != OURS:
        return None
    partition = approximate_partition(
        num, dim, dims_per_block=result["dimensions of a code"]
    )
    at_once = batch_size(partition, batch)
    codes = dim // partition.dims_per_block / 2
    share = result["searched"] / partition.num_leaves
    read_share = 1 - (1 - share) ** at_once  # of all codes, by these queries
    full = result["bytes of a compared feature"] * dim
    centroids = partition.num_leaves if partition.num_leaves > 1 else 0
    num_bytes = (centroids * dim + read_share * num * codes) / at_once
    num_bytes += result["reordered"] * full
    return 2 * (centroids + NUM_CODES + result["reordered"]) * dim, num_bytes


def measure_turns(bench: Bench, settings: dict) -> list[Measurement]:
    """Measure the queries a second of rollouts that search at the same time."""
    case = f"{settings['num_rollouts']} rollouts search"
    if settings["same_share"]:
        case += f", {settings['same_share']:.0%} of a group alike"
    module = "rsearch.bench.retrieval"
    subjects = {
        OURS: Subject(module, settings, "make_engine"),
        AT_ONCE: Subject(module, {**settings, "at_once": True}, "make_served"),
        IN_TURN: Subject(module, {**settings, "at_once": False}, "make_served"),
    }
    no_model = "an encoder that hashes words is not a model that the server can load"
    missing = {}
    if settings["encoder"] == "hashed":
        missing = {name: no_model for name in subjects if name != OURS}
    subjects = {name: s for name, s in subjects.items() if name not in missing}
    results = compare(subjects, bench.repeats) | missing

    def counts(subject, runs):
        if subject == OURS:
            return {}
        # Whether both found the same first passage, row by row.
        pairs = [
            a == b
            for run, other in zip(runs, results[OURS])
            for a, b in zip(run["first"], other["first"], strict=True)
        ]
        return {"equal first passages": sum(pairs) / len(pairs)}

    num = settings["num_rollouts"]
    return make_case_rows(
        case, "queries/s", results, lambda run: num / run["seconds"], counts=counts
    )


def large_rows() -> list[Measurement]:
    """Return the computed memory for the largest corpus in use, in all and per host."""
    num, dim = LARGE
    rows = []
    for dtype, size in REORDER_BYTES.items():
        total = index_bytes(num, dim, dtype)
        row = make_row(
            f"computed, {num:,} x {dim}",
            f"{OURS}, --reorder_dtype={dtype}",
            "GB in memory",
            [total / 1e9],
            counts={
                f"GB of each of {HOSTS} hosts": total / HOSTS / 1e9,
                "GB of full vectors": num * dim * size / 1e9,
            },
        )
        rows.append(row)
    return rows


def index_bytes(num: int, dim: int, reorder_dtype: str) -> float:
    """Return the bytes of a large index: centroids, codes, vectors for reordering."""
    partition = approximate_partition(num, dim, reorder_dtype=reorder_dtype)
    codes = dim / partition.dims_per_block / 2
    full = dim * REORDER_BYTES[reorder_dtype]
    return num * (codes + full) + partition.num_leaves * dim * 4


PASSAGES = 3  # passages that a query returns
GROUP = 8  # rollouts of one question


def queries_of(
    texts: Sequence[str], repetition: int, num_rollouts: int, same_share: float
) -> list[str]:
    """Return the [num_rollouts] queries of a turn; no two turns share one.

    Args:
        same_share: share of a group's rollouts that send its first rollout's query.
    """
    first = repetition * num_rollouts
    queries = []
    for row in range(num_rollouts):
        is_same = row % GROUP < same_share * GROUP
        index = first + (row - row % GROUP if is_same else row)
        # When the texts run out, a word in front makes a new query of similar length.
        text, round_ = texts[index % len(texts)], index // len(texts)
        queries.append(f"{'again ' * round_}{text}")
    return queries


def make_engine(
    *,
    folder: str,
    encoder: str,
    family: str,
    num_rollouts: int,
    same_share: float,
) -> Repetition:
    """Prepare this package's engine, called once a turn for all rows that search."""
    if encoder != "hashed":
        multiply_in_full()
    texts, corpus = read_texts(folder)
    vectors = np.load(pathlib.Path(folder) / "vectors.npy")
    partition = choose_partition(*vectors.shape)
    nearest = Nearest(Vectors([vectors]), build_searcher(vectors, partition), partition)
    encoding = load_encoder(encoder, family=family or None)
    engine = SearchEngine(nearest, encoding, corpus, top_k=PASSAGES)
    return _repeat_turns(engine, texts, num_rollouts, same_share)


def make_served(
    *,
    folder: str,
    encoder: str,
    family: str,
    num_rollouts: int,
    same_share: float,
    at_once: bool,
) -> Repetition:
    """Prepare a server that gets a request per row: from threads or one by one."""
    texts, _ = read_texts(folder)
    settings = json.dumps({"folder": str(folder), "encoder": encoder, "family": family})
    server = subprocess.Popen(
        [sys.executable, "-m", "rsearch.bench.peers", settings],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    line = server.stdout.readline()
    if not line:
        raise RuntimeError("the server failed before it could answer")
    greeting = json.loads(line)
    if "missing" in greeting:
        raise Unmeasured(greeting["missing"])
    client = httpx.Client(timeout=120.0, trust_env=False)

    def send_query(query):
        body = {"queries": [query], "topk": PASSAGES, "return_scores": True}
        reply = client.post(greeting["url"], json=body)
        reply.raise_for_status()
        (hits,) = reply.json()["result"]
        return [hit["document"]["id"] for hit in hits]

    pool = concurrent.futures.ThreadPoolExecutor(num_rollouts if at_once else 1)
    # The server holds the vectors and the model, so its memory counts. It reads a pipe
    # from this process, and exits with it.
    return _repeat_turns(
        lambda queries: list(pool.map(send_query, queries)),
        texts,
        num_rollouts,
        same_share,
        processes=("self", server.pid),
    )


def _repeat_turns(search, texts, num_rollouts, same_share, processes=("self",)):
    """Return a function that searches for one turn, each time with new queries.

    Args:
        texts, num_rollouts, same_share: see `queries_of`.
        processes: processes whose memory counts.
    """
    turn = -1

    def repeat():
        nonlocal turn
        turn += 1
        queries = queries_of(texts, turn, num_rollouts, same_share)
        for process in processes:
            reset_peak(process)
        start_time = time.perf_counter()
        replies = search(queries)
        seconds = time.perf_counter() - start_time
        assert len(replies) == num_rollouts
        first = [getattr(reply[0], "id", reply[0]) for reply in replies]
        peak = sum(map(peak_bytes, processes))
        return {"seconds": seconds, "first": first, "peak_bytes": peak}

    return repeat
