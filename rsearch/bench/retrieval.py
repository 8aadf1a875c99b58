"""Retrieval measured: nearest vectors beside faiss, rollouts beside a server.

Nearest vectors: each searcher is tuned to the fastest setting of the same recall, and
searches batches of the same queries. Rollouts: one turn of rows that all search, asked
of this package's engine at once, and of a public system's server row by row.
"""

import contextlib
import pathlib
import statistics
import tempfile

from rsearch.bench.children import Subject, compare
from rsearch.bench.neighbours import approximate_partition
from rsearch.bench.passages import TOP_K, Searched, many_vectors, real_passages
from rsearch.bench.rows import OURS, Bench, Row, bounded, row_of
from rsearch.retrieval.nearest import NUM_CODES, REORDER_BYTES, batch_size

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
    module = "rsearch.bench.searching"
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
