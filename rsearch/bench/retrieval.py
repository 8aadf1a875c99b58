"""Retrieval measured: nearest vectors beside faiss, rollouts beside a server.

Nearest vectors: each searcher is tuned to the fastest setting of the same recall, and
searches batches of the same queries. Rollouts: one turn of rows that all search, asked
of this package's engine at once, and of a public system's server row by row. The public
systems run a server beside the training; each row that searches sends it a request of
its own, for which it encodes one query and looks through all vectors. Memory is that
of the host, of all processes, wherever queries are encoded.
"""

import concurrent.futures
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import httpx
import numpy as np

from rsearch.bench.child import forget_peak, peak_bytes
from rsearch.bench.comparison import OURS, Bench, Row, Subject, bounded, compare, row_of
from rsearch.bench.neighbours import (
    TOP_K,
    Searched,
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
    "family": ("minilm", "prefixes and pooling of the model: e5, bge or minilm"),
    "index": ("", "of rsearch.index, whose vectors are taken; else they are encoded"),
    "questions": ("", "file of questions to search for, before passages' titles"),
    "cases": ("real,made,rollouts", "which to measure"),
    "queries": (1024, "to search nearest vectors for"),
    "batch": (256, "queries at once"),
    "recall": (0.95, f"of the nearest {TOP_K} that each searcher is tuned to"),
    "vectors": (1_000_000, "of case made: real ones with noise added"),
    "noise": (0.5, "its length, added to vectors of length 1"),
    "rollouts": (64, "that search in one turn"),
    "work": ("", "directory that keeps vectors and indexes for the next time"),
}
SEARCHERS = {  # made by rsearch.bench.neighbours
    OURS: "make_scann",
    "faiss Flat": "make_flat",
    "faiss HNSW32": "make_hnsw",
    "faiss IVF-PQ fast scan": "make_ivf",
}
SAME_SHARES = (0.0, 0.5)  # of a group's rollouts that ask for the same
AT_ONCE, IN_TURN = "server, all rows at once", "server, row after row"
LARGE = (29_000_000, 1024)  # vectors and their width: the largest corpus in use
HOSTS = 8  # that could share it


def measure(
    bench: Bench,
    *,
    corpus,
    encoder,
    family,
    index,
    questions,
    cases,
    queries,
    batch,
    recall,
    vectors,
    noise,
    rollouts,
    work,
) -> list[Row]:
    """The rows of the cases that are asked for; see FLAGS.

    Raises:
        ValueError: an unknown case, or a number out of range.
    """
    asked = [name.strip() for name in cases.split(",")]
    if not set(asked) <= {"real", "made", "rollouts"}:
        raise ValueError(f"--cases={cases}: must be of real, made, rollouts")
    if not 0 < recall <= 1:
        raise ValueError(f"--recall={recall}, expected above 0 and at most 1")
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
        rows = []
        if "real" in asked:
            rows += _nearest(bench, "real passages", real, batch, recall)
        if "made" in asked:
            made = many_vectors(work, real, num=vectors, noise=noise)
            rows += _nearest(bench, "made vectors", made, batch, recall)
        if "rollouts" in asked:
            for share in SAME_SHARES:
                settings = {
                    "folder": str(real.folder),
                    "encoder": encoder,
                    "family": family,
                    "num_rollouts": rollouts,
                    "same_share": share,
                }
                rows += _turns(bench, settings)
    return [*rows, *large_rows()]


def _nearest(bench: Bench, name, searched: Searched, batch, recall) -> list[Row]:
    """Queries a second of each searcher."""
    case = f"{name}, {searched.num:,} x {searched.dim}"
    settings = {"folder": str(searched.folder), "batch": batch, "recall": recall}
    subjects = {
        subject: Subject("rsearch.bench.neighbours", settings, make)
        for subject, make in SEARCHERS.items()
    }
    found = compare(subjects, bench.repeats)
    rows = []
    for subject, told in found.items():
        if isinstance(told, str):
            rows.append(row_of(case, subject, "queries/s", told))
            continue
        names = ("recall", "build seconds", "load seconds", "searched", "reordered")
        names = (*names, "dimensions of a code", "bytes of a compared feature")
        row = row_of(
            case,
            subject,
            "queries/s",
            [one["queries"] / one["seconds"] for one in told],
            ours=[one["queries"] / one["seconds"] for one in found[OURS]],
            peak_bytes=statistics.median(one["peak_bytes"] for one in told),
            counts={name: told[0][name] for name in names},
        )
        work = _work(subject, searched, batch, told[0])
        if work is not None:
            seconds = statistics.median(one["seconds"] for one in told)
            flops, moved = (part * told[0]["queries"] for part in work)
            row = bounded(row, bench.machine, seconds, (flops, moved))
        rows.append(row)
    return rows


def _work(subject, searched: Searched, batch, told):
    """(FLOPs, bytes) of a query, at least; None where a graph decides.

    ScaNN's queries read all centroids, a byte a feature, the codes of their leaves,
    four bits for some features, and the full vectors of their candidates; they are
    multiplied by these, by the centroids, and by what each code stands for. Those that
    are searched at once share the centroids and, as if each had drawn its leaves, the
    codes. A flat search multiplies all vectors, which it reads once a batch.
    """
    num, dim = searched.num, searched.dim
    if subject == "faiss Flat":
        return 2 * num * dim, 4 * num * dim / batch
    if subject != OURS:
        return None
    partition = approximate_partition(
        num, dim, dims_per_block=told["dimensions of a code"]
    )
    at_once = batch_size(partition, batch)
    codes = dim // partition.dims_per_block / 2
    share = told["searched"] / partition.num_leaves
    read = 1 - (1 - share) ** at_once  # of all codes, by these queries together
    full = told["bytes of a compared feature"] * dim
    centroids = partition.num_leaves if partition.num_leaves > 1 else 0
    moved = (centroids * dim + read * num * codes) / at_once + told["reordered"] * full
    return 2 * (centroids + NUM_CODES + told["reordered"]) * dim, moved


def _turns(bench: Bench, settings) -> list[Row]:
    """Queries a second of rollouts that search at one time."""
    case = f"{settings['num_rollouts']} rollouts search"
    if settings["same_share"]:
        case += f", {settings['same_share']:.0%} of a group alike"
    module = "rsearch.bench.retrieval"
    subjects = {
        OURS: Subject(module, settings, "make_engine"),
        AT_ONCE: Subject(module, {**settings, "at_once": True}, "make_served"),
        IN_TURN: Subject(module, {**settings, "at_once": False}, "make_served"),
    }
    no_model = "an encoder that hashes words is no model that the server could load"
    missing = {}
    if settings["encoder"] == "hashed":
        missing = {name: no_model for name in subjects if name != OURS}
    subjects = {name: s for name, s in subjects.items() if name not in missing}
    found = compare(subjects, bench.repeats) | missing
    rows = []
    for subject, told in found.items():
        if isinstance(told, str):
            rows.append(row_of(case, subject, "queries/s", told))
            continue
        counts = {}
        if subject != OURS:
            # In the order of the call: the same passage came first, row by row.
            pairs = [
                a == b
                for one, other in zip(told, found[OURS])
                for a, b in zip(one["first"], other["first"], strict=True)
            ]
            counts["equal first passages"] = sum(pairs) / len(pairs)
        num = settings["num_rollouts"]
        rows.append(
            row_of(
                case,
                subject,
                "queries/s",
                [num / one["seconds"] for one in told],
                ours=[num / one["seconds"] for one in found[OURS]],
                peak_bytes=statistics.median(one["peak_bytes"] for one in told),
                counts=counts,
            )
        )
    return rows


def large_rows() -> list[Row]:
    """Memory that the largest corpus in use takes, reckoned: of all, and of a host."""
    num, dim = LARGE
    rows = []
    for dtype, size in REORDER_BYTES.items():
        whole = index_bytes(num, dim, dtype)
        row = row_of(
            f"reckoned, {num:,} x {dim}",
            f"{OURS}, --reorder_dtype={dtype}",
            "GB in memory",
            [whole / 1e9],
            counts={
                f"GB of each of {HOSTS} hosts": whole / HOSTS / 1e9,
                "GB of full vectors": num * dim * size / 1e9,
            },
        )
        rows.append(row)
    return rows


def index_bytes(num: int, dim: int, reorder_dtype: str) -> float:
    """Memory of a large index: centroids, codes, and vectors to reorder by."""
    partition = approximate_partition(num, dim, reorder_dtype=reorder_dtype)
    codes = dim / partition.dims_per_block / 2
    full = dim * REORDER_BYTES[reorder_dtype]
    return num * (codes + full) + partition.num_leaves * dim * 4


PASSAGES = 3  # that a query finds
GROUP = 8  # rollouts of one question


def queries_of(texts, repetition, num_rollouts, same_share):
    """[num_rollouts] the queries of one turn; no two turns share one.

    Args:
        texts: to draw from.
        repetition: number of the turn.
        num_rollouts: that search in it.
        same_share: of a group's rollouts ask as its first one does.
    """
    first = repetition * num_rollouts
    asked = []
    for row in range(num_rollouts):
        is_same = row % GROUP < same_share * GROUP
        place = first + (row - row % GROUP if is_same else row)
        # Titles run out; words in front make other queries of about their length.
        text, round_ = texts[place % len(texts)], place // len(texts)
        asked.append(f"{'again ' * round_}{text}")
    return asked


def make_engine(*, folder, encoder, family, num_rollouts, same_share, **_):
    """This package's engine: asked once a turn, by all rows that search."""
    if encoder != "hashed":
        multiply_in_full()
    texts, corpus = read_texts(folder)
    vectors = np.load(pathlib.Path(folder) / "vectors.npy")
    partition = choose_partition(*vectors.shape)
    nearest = Nearest(Vectors([vectors]), build_searcher(vectors, partition), partition)
    encoding = load_encoder(encoder, family=family or None)
    engine = SearchEngine(nearest, encoding, corpus, top_k=PASSAGES)
    return _repeat_turns(engine, texts, num_rollouts, same_share)


def make_served(*, folder, encoder, family, num_rollouts, same_share, at_once):
    """The public way: a request a row, `at_once` from threads or one after another."""
    texts, _ = read_texts(folder)
    settings = json.dumps({"folder": str(folder), "encoder": encoder, "family": family})
    server = subprocess.Popen(
        [sys.executable, "-m", "rsearch.bench.peers", settings],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    told = json.loads(server.stdout.readline() or '{"missing": "the server"}')
    if "missing" in told:
        raise ModuleNotFoundError(told["missing"], name=told["missing"])
    client = httpx.Client(timeout=120.0, trust_env=False)

    def ask(query):
        body = {"queries": [query], "topk": PASSAGES, "return_scores": True}
        reply = client.post(told["url"], json=body)
        reply.raise_for_status()
        (found,) = reply.json()["result"]
        return [hit["document"]["id"] for hit in found]

    pool = concurrent.futures.ThreadPoolExecutor(num_rollouts if at_once else 1)
    # The server, which has the vectors and the model, ends with this process, whose
    # pipe it reads.
    return _repeat_turns(
        lambda queries: list(pool.map(ask, queries)),
        texts,
        num_rollouts,
        same_share,
        processes=("self", server.pid),
    )


def _repeat_turns(search, texts, num_rollouts, same_share, processes=("self",)):
    """Searches of one turn after another, each with new queries.

    Args:
        search: function of the queries of a turn.
        texts, num_rollouts, same_share: see `queries_of`.
        processes: whose memory counts.
    """
    turn = -1

    def once():
        nonlocal turn
        turn += 1
        queries = queries_of(texts, turn, num_rollouts, same_share)
        for process in processes:
            forget_peak(process)
        started = time.perf_counter()
        found = search(queries)
        seconds = time.perf_counter() - started
        assert len(found) == num_rollouts
        first = [getattr(one[0], "id", one[0]) for one in found]
        peak = sum(map(peak_bytes, processes))
        return {"seconds": seconds, "first": first, "peak_bytes": peak}

    return once
