"""Build the index of a corpus on one or several hosts; resume an interrupted build.

Connected hosts (`rsearch.hosts.processes`) call `build_index` together: each encodes
its share of the shards and builds its share of the parts; host 0 writes the manifest.
Independent processes, such as those of a SLURM array, call `encode_worker_shards`, each
with its own number. The process that then finds no shard missing calls `build_index`.

    locks/         files that independent processes lock while they write a shard
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from rsearch.hosts import processes
from rsearch.retrieval.bm25 import K1, TOKENIZER, VARIANT, B, write_postings
from rsearch.retrieval.index import (
    BM25,
    FORMAT,
    MANIFEST,
    PLAN,
    VECTORS,
    all_shards,
    build_part,
    check_index_files,
    describe_inputs,
    differences,
    digest_of,
    file_digests,
    plan_with_defaults,
    read_index_manifest,
    read_json_object,
)
from rsearch.retrieval.nearest import (
    SEED,
    Partition,
    choose_partition,
    exact_scores,
    partition_kind,
    recall_of,
    split_evenly,
)
from rsearch.retrieval.vector_files import VectorFile
from rsearch.retrieval.vectors import (
    DTYPES,
    count_shards,
    encode_shards,
    missing_shards,
    shard_name,
)
from rsearch.runtime import files
from rsearch.runtime.console import note

LOCKS = "locks"
MAX_SHARD = 65_536  # passages: the most work that an interruption can lose
RECALL_TITLES = 200  # drawn from the corpus to measure recall

_open_locks = []  # locks held until this process ends


def plan_index(
    corpus: Any,
    encoder: Any,
    *,
    vector_dtype: str = "float32",
    shard_size: int | None = None,
    num_parts: int = 1,
    vector_file: VectorFile | None = None,
    **partition_settings,
) -> dict:
    """Return what an index is built from and how, as the same dict on all builders.

    Args:
        corpus: has `len`, `fingerprint` and `path`.
        encoder: has `dim` and `fingerprint`.
        vector_dtype: dtype of the vectors on disk, "float32" or "float16".
        shard_size: passages encoded between two saves; None chooses a size.
        num_parts: slices of the corpus, each with its own ScaNN index; hosts can share
            them.
        vector_file: the passages' vectors; None encodes the passages.
        **partition_settings: settings of each part; see `choose_partition`.

    Raises:
        ValueError: a setting is wrong, the corpus is empty, or the vectors do not fit.
    """
    num = len(corpus)
    if not num:
        raise ValueError(f"{corpus.path}: the corpus has no passages")
    if vector_dtype not in DTYPES:
        raise ValueError(f"{vector_dtype=}, expected one of {', '.join(DTYPES)}")
    if not 1 <= num_parts <= num:
        raise ValueError(f"{num_parts=}, expected 1 to {num}, the number of passages")
    if vector_file is not None:
        vector_file.check_fits(corpus, encoder)
    # About 64 shards: interruptions lose little, and small corpora get no tiny files.
    limit = min(max(1024, num // 64), MAX_SHARD)
    shard_size = shard_size or min(limit, -(-num // num_parts))
    num_shards = count_shards(num, shard_size)
    if num_shards < num_parts:
        raise ValueError(
            f"{num_parts=}, but {num} passages make {num_shards} shards of "
            f"{shard_size}; a part needs at least one: choose fewer parts or a "
            "smaller shard_size"
        )
    # All parts share the settings of the largest one.
    largest = max(map(len, split_evenly(range(num_shards), num_parts))) * shard_size
    # All parts need the same settings: their results are merged by score, which is fair
    # only if they are quantised and searched alike.
    partition = choose_partition(min(num, largest), encoder.dim, **partition_settings)
    # The plan holds everything that changes a byte of the index and nothing else, so
    # two builds with equal plans may share a directory.
    vectors = {"dtype": vector_dtype, "shard_size": shard_size}
    if vector_file is not None:
        vectors["file"] = vector_file.digest
    return {
        "format": FORMAT,
        **describe_inputs(corpus, encoder),
        "vectors": vectors,
        "partition": partition and dataclasses.asdict(partition),
        "num_parts": num_parts,
    }


def encode_worker_shards(
    corpus: Any,
    encoder: Any,
    out: str | os.PathLike,
    plan: dict,
    *,
    worker: int,
    num_workers: int,
    vector_file: VectorFile | None = None,
) -> int:
    """Encode a worker's share of the shards: every num_workers-th, from its own number.

    There may be any number of workers, on hosts that share the directory's file system.

    Args:
        corpus, encoder, out: see `build_index`.
        worker: number of this worker, from 0.
        vector_file: the one that `plan` was made with.

    Returns:
        The number of shards still missing, over all workers.

    Raises:
        ValueError: another process is encoding one of these shards or building the
            index, or `out` holds something else.
    """
    out = pathlib.Path(out)
    # The plan is written before the first shard, so that a worker with other settings
    # is refused immediately and not after hours.
    _claim(out, plan)

    @contextlib.contextmanager
    def lock(name):
        # Two workers with the same number would write the same files.
        with files.locked(out / LOCKS / name) as is_held:
            if not is_held:
                raise ValueError(
                    f"{out}: shard {name} is being encoded by another process; is "
                    f"worker {worker} of {num_workers} running twice?"
                )
            yield

    # Workers share the lock on the plan; `build_index` needs it exclusively.
    with files.locked(out / PLAN, shared=True) as is_held:
        if not is_held:
            raise ValueError(_busy_message(out))
        (out / LOCKS).mkdir(exist_ok=True)
        settings = _shard_settings(plan, vector_file)
        numbers = all_shards(plan)
        # Strided rather than contiguous shares: a corpus may be sorted by length, and
        # all workers should take about the same time.
        share = numbers[worker::num_workers]
        encode_shards(corpus, encoder, out / VECTORS, share, lock=lock, **settings)
        # Counted over all workers: the one that finds none missing builds the index.
        return len(missing_shards(out / VECTORS, numbers, settings["made_from"]))


def build_index(
    corpus: Any,
    encoder: Any,
    out: str | os.PathLike,
    *,
    waits: bool = False,
    vector_file: VectorFile | None = None,
    **settings,
) -> dict:
    """Encode a corpus and build its index; resume where an earlier call stopped.

    Connected hosts share the work; all of them call this.

    Args:
        corpus: has `len`, `passages(indices)`, `fingerprint` and `path`.
        encoder: has `encode_passages`, `encode_queries`, `dim` and `fingerprint`.
        out: directory that is missing, empty or left by a call with the same plan.
        waits: whether to wait for another process that is building there, instead of
            raising an error; either way the index is finished on return.
        vector_file: the passages' vectors; None encodes the passages.
        **settings: see `plan_index`.

    Returns:
        The manifest, a dict.

    Raises:
        ValueError: a setting is wrong, the corpus is empty, the vectors do not fit it,
            `out` holds something else, or another process is building there.
    """
    out = pathlib.Path(out)
    plan = plan_index(corpus, encoder, vector_file=vector_file, **settings)
    # Hosts that planned differently would write different shards into one directory.
    processes.check_same_on_all({"index": plan})
    with _locks_of_all_hosts() as stack:
        # Host 0 locks the directory for all hosts: the others write only between the
        # two calls of `on_host0`, where all hosts synchronize.
        processes.on_host0(
            lambda: stack.enter_context(hold_directory(out, plan, waits))
        )
        # Host 0 decides, because other hosts' view of a network file system may lag.
        is_finished = processes.map_hosts_json(
            lambda items: [(out / MANIFEST).exists() for _ in items], [0]
        )[0]
        if is_finished:
            note(f"{out} is finished already")
            manifest = read_index_manifest(out)
            processes.on_host0(lambda: check_index_files(out, manifest))
            return manifest
        start_time = time.monotonic()
        # 1. Vectors. Finished shards are reused; an interruption loses at most one.
        digests = processes.map_hosts_json(
            lambda numbers: encode_shards(
                corpus,
                encoder,
                out / VECTORS,
                numbers,
                **_shard_settings(plan, vector_file),
            ),
            all_shards(plan),
        )
        # 2. Parts, each searched while it is in memory. Hosts return only scores, since
        # recall is that of the merged results, which no host has by itself.
        texts, recall = _recall_queries(corpus)
        queries = encoder.encode_queries(texts) if texts else []
        scores = processes.map_hosts_json(
            lambda numbers: [
                _scores(build_part(out, plan, n, digests), queries, recall["top_k"])
                for n in numbers
            ],
            range(plan["num_parts"]),
        )
        # 3. The manifest comes last: the index is complete once it exists.
        manifest = {
            **plan,
            "corpus_path": _relative_path(corpus.path, out),
            "recall": {**recall, "value": _recall(scores, recall["top_k"])},
            "seconds": round(time.monotonic() - start_time, 1),
        }
        processes.on_host0(lambda: _finish(out, manifest, digests))
    return read_index_manifest(out)


def build_bm25(
    corpus: Any, out: str | os.PathLike, *, k1: float = K1, b: float = B
) -> dict:
    """Build a BM25 index of a corpus on this host alone.

    Args:
        corpus: has `len`, `fingerprint` and `path`, and yields its passages in order.
        out: directory that is missing, empty or left by a call with the same plan.

    Returns:
        The manifest, a dict.

    Raises:
        ValueError: a setting is wrong, the corpus has no words, `out` holds something
            else, or another process is building there.
    """
    out = pathlib.Path(out)
    if not 0 <= k1 < math.inf:
        raise ValueError(f"{k1=}, expected a number of at least 0")
    if not 0 <= b <= 1:
        raise ValueError(f"{b=}, expected 0 to 1")
    if not len(corpus):
        raise ValueError(f"{corpus.path}: the corpus has no passages")
    plan = {
        "format": FORMAT,
        "kind": BM25,
        **describe_inputs(corpus),
        "bm25": {"k1": k1, "b": b, "variant": VARIANT, "tokenizer": TOKENIZER},
        # Plans of vector indexes have these fields too, and the two are compared.
        "partition": None,
        "num_parts": 1,
    }
    with hold_directory(out, plan, waits=False):
        if (out / MANIFEST).exists():
            note(f"{out} is finished already")
            manifest = read_index_manifest(out)
            check_index_files(out, manifest)
            return manifest
        start_time = time.monotonic()
        # Nothing is resumed: reading words takes minutes, where encoding takes hours.
        write_postings(out / BM25, corpus, k1=k1, b=b)
        manifest = {
            **plan,
            "corpus_path": _relative_path(corpus.path, out),
            "seconds": round(time.monotonic() - start_time, 1),
        }
        _finish(out, manifest, [])
    return read_index_manifest(out)


@contextlib.contextmanager
def _locks_of_all_hosts() -> Iterator[contextlib.ExitStack]:
    """Yield an ExitStack that stays open if one of several hosts fails."""
    with contextlib.ExitStack() as stack:
        try:
            yield stack
        except BaseException:
            # The other hosts keep writing until they are terminated, so the lock must
            # outlast this exception; it is released when the process ends.
            if processes.num_hosts() > 1:
                _open_locks.append(stack.pop_all())
            raise


@contextlib.contextmanager
def hold_directory(out, plan, waits):
    """Hold the directory for this plan, so that no other process writes to it."""
    _claim(out, plan)
    with files.locked(out / PLAN, waits=waits) as is_held:
        if not is_held:
            raise ValueError(_busy_message(out))
        yield


def _busy_message(out):
    return f"{out} is being built by another process"


def _claim(out, plan):
    """Claim `out` as the directory of this plan; raise an error if it cannot be."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, not a directory for an index")
    out.mkdir(parents=True, exist_ok=True)
    names = sorted(entry.name for entry in out.iterdir())
    if PLAN not in names:
        # A process killed while creating the plan leaves a temporary file.
        extra = [n for n in names if not n.startswith(files.PARTIAL)]
        if extra:
            name_list = ", ".join(extra[:5]) + (", ..." if len(extra) > 5 else "")
            raise ValueError(
                f"{out} holds something else ({name_list}) and is left unchanged: name "
                "an empty or new directory"
            )
        # Another process may create the plan first; it is then compared below.
        if files.create(out / PLAN, json.dumps(plan, indent=1).encode()):
            return
    stored_plan = plan_with_defaults(out / PLAN, read_json_object(out / PLAN))
    report = differences(stored_plan, plan)
    if not report:
        return
    advice = "name another directory, or remove it"
    kind = _kind(stored_plan)
    # Only the kind differs, perhaps because "auto" chose another kind at that time.
    if kind != _kind(plan) and {**stored_plan, "partition": plan["partition"]} == plan:
        advice += f", or ask for {kind=}"
    raise ValueError(
        f"{out} holds an index built differently and is left unchanged; "
        f"{advice}:\n{report}"
    )


def _kind(plan):
    return partition_kind(plan["partition"] and Partition(**plan["partition"]))


def _shard_settings(plan, vector_file):
    # Vectors depend only on these sections; other changes need no new encoding.
    sections = {name: plan[name] for name in ("corpus", "encoder", "vectors")}
    settings = {name: plan["vectors"][name] for name in ("dtype", "shard_size")}
    made_from = json.dumps(sections, sort_keys=True)
    return {**settings, "made_from": made_from, "vector_file": vector_file}


def _scores(nearest, queries, top_k):
    """Return two [n, k] lists: scores found in a part, and those of an exact search."""
    if not len(queries):
        return [], []
    _, scores = nearest.search(queries, top_k)
    return scores.tolist(), exact_scores(nearest.vectors, queries, top_k).tolist()


def _recall_queries(corpus):
    """Return texts to measure recall with, and the manifest's description of them."""
    count = min(RECALL_TITLES, len(corpus))
    rng = np.random.default_rng(SEED)
    positions = np.sort(rng.choice(len(corpus), count, replace=False)).tolist()
    passages = corpus.passages(positions)
    # A title may be missing; the beginning of the text is the query then.
    texts = [p.title.strip('" ') or p.text.strip()[:100] for p in passages]
    texts = [text for text in texts if text.strip()]
    top_k = min(10, len(corpus))
    return texts, {"queries": "titles", "num_queries": len(texts), "top_k": top_k}


def _recall(scores, top_k):
    """Return the recall of all parts merged, given each part's `_scores`, or None."""
    if not len(scores[0][0]):  # no queries
        return None
    merged, exact = (
        -np.sort(-np.concatenate([pair[i] for pair in scores], axis=1))[:, :top_k]
        for i in (0, 1)
    )
    return recall_of(merged, exact)


def _finish(out, manifest, digests):
    """Write the manifest, which completes the index."""
    # No worker writes any more: all shards exist, and the directory is locked.
    shutil.rmtree(out / LOCKS, ignore_errors=True)
    # Shards were digested when they were written; the other files are read once more.
    shard_digests = {
        f"{VECTORS}/{shard_name(n)}": value for n, value in enumerate(digests)
    }
    manifest["files"] = file_digests(out, known=shard_digests)
    # A digest of the digests: readers compare one value with a run's fingerprint.
    manifest["digest"] = digest_of(manifest)
    files.replace(out / MANIFEST, json.dumps(manifest, indent=1).encode())


def _relative_path(path, start):
    # Both are resolved: '..' behind a symbolic link would lead elsewhere.
    return os.path.relpath(pathlib.Path(path).resolve(), start.resolve())
