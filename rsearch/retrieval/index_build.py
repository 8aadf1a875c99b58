"""Build the index of a corpus, alone or on several hosts; resume where it was stopped.

Connected hosts (`rsearch.hosts.processes`) call `build_index` together: each encodes
its share of the shards and builds its share of the parts; host 0 writes the manifest.
Independent processes, as those of a SLURM array, call `encode_share`, each with its own
number; the process that then finds no shard missing calls `build_index`.

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
MAX_SHARD = 65_536  # passages: the work that a stop may lose
RECALL_TITLES = 200  # drawn from the corpus, to measure recall with

_open_locks = []  # that stay held until this process ends


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
    """Return what an index is made from and how, the same dict on all that build it.

    Args:
        corpus: has len, fingerprint and path.
        encoder: has dim and fingerprint.
        vector_dtype: of the vectors on disk, "float32" or "float16".
        shard_size: passages encoded between two saves; None chooses.
        num_parts: slices of the corpus with a ScaNN index each, which hosts can share.
        vector_file: the passages' vectors; None encodes the passages.
        **partition_settings: of each part; see `choose_partition`.

    Raises:
        ValueError: a bad setting, an empty corpus, or vectors that do not fit it.
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
    # About 64 shards: a stop loses little, and small corpora have no tiny files.
    limit = min(max(1024, num // 64), MAX_SHARD)
    shard_size = shard_size or min(limit, -(-num // num_parts))
    count = count_shards(num, shard_size)
    if count < num_parts:
        raise ValueError(
            f"{num_parts=}, but {num} passages are {count} shards of {shard_size}, and "
            "a part has at least one: fewer parts, or a smaller shard_size"
        )
    # All parts share the settings of the largest one.
    largest = max(map(len, split_evenly(range(count), num_parts))) * shard_size
    # One set of settings: the parts' results are merged by score, which is fair only
    # among parts that were quantised and searched alike.
    partition = choose_partition(min(num, largest), encoder.dim, **partition_settings)
    # Everything that changes a byte of the index, and nothing else: two plans that
    # are equal may share a directory.
    vectors = {"dtype": vector_dtype, "shard_size": shard_size}
    if vector_file is not None:
        vectors["file"] = vector_file.digest
    return {
        "format": FORMAT,
        "corpus": {"fingerprint": corpus.fingerprint, "num_passages": num},
        "encoder": {"fingerprint": encoder.fingerprint, "dim": encoder.dim},
        "vectors": vectors,
        "partition": partition and dataclasses.asdict(partition),
        "num_parts": num_parts,
    }


def encode_share(
    corpus: Any,
    encoder: Any,
    out: str | os.PathLike,
    plan: dict,
    *,
    worker: int,
    num_workers: int,
    vector_file: VectorFile | None = None,
) -> int:
    """Encode a worker's share of the shards: every num_workers-th, from its number on.

    Any number of workers may run, on hosts that share the directory's file system.

    Args:
        corpus, encoder, out: see `build_index`.
        plan: as `plan_index` makes it.
        worker: from 0.
        num_workers: workers that share the work.
        vector_file: as `plan` was made with.

    Returns:
        The number of shards that are still missing, over all workers.

    Raises:
        ValueError: another process encodes one of these shards or builds the index, or
            `out` holds something else.
    """
    if not 0 <= worker < num_workers:
        raise ValueError(f"{worker=}, expected 0 to {num_workers - 1}: {num_workers=}")
    out = pathlib.Path(out)
    # The plan is written before the first shard, so that a worker with other
    # settings is refused at once and not after hours.
    _claim(out, plan)

    @contextlib.contextmanager
    def lock(name):
        # Two workers with one number would write the same files.
        with files.locked(out / LOCKS / name) as is_held:
            if not is_held:
                raise ValueError(
                    f"{out}: shard {name} is being encoded by another process; does "
                    f"worker {worker} of {num_workers} run twice?"
                )
            yield

    # Workers hold the plan together; `build_index` needs it for itself.
    with files.locked(out / PLAN, shared=True) as is_held:
        if not is_held:
            raise ValueError(_busy(out))
        (out / LOCKS).mkdir(exist_ok=True)
        settings = _shard_settings(plan, vector_file)
        numbers = all_shards(plan)
        # Every num_workers-th, not a run of neighbours: a corpus may be sorted by
        # length, and all workers should take about the same time.
        share = numbers[worker::num_workers]
        encode_shards(corpus, encoder, out / VECTORS, share, lock=lock, **settings)
        # Counted over all workers: whoever finds none missing builds the index.
        made_from = settings["made_from"]
        return len(missing_shards(out / VECTORS, numbers, made_from))


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

    Connected hosts share the work, and all of them call this.

    Args:
        corpus: has len, passages(indices), fingerprint and path.
        encoder: has encode_passages, encode_queries, dim and fingerprint.
        out: directory, missing, empty or left by an earlier call with the same plan.
        waits: wait for another process that is building there; the index is finished
            afterwards.
        vector_file: the passages' vectors; None encodes the passages.
        **settings: see `plan_index`.

    Returns:
        The manifest, a dict.

    Raises:
        ValueError: a bad setting, an empty corpus, vectors that do not fit it, `out`
            holds something else, or another process is building there.
    """
    out = pathlib.Path(out)
    plan = plan_index(corpus, encoder, vector_file=vector_file, **settings)
    # Hosts that planned differently would write different shards into one directory.
    processes.check_same_on_all({"index": plan})
    with _locks_of_all_hosts() as stack:
        # Host 0 locks the directory for all hosts: the others write only between the
        # two calls of `on_host0`, at which all of them meet.
        processes.on_host0(lambda: stack.enter_context(_claimed(out, plan, waits)))
        # Host 0 decides: on the others a network file system may lag behind.
        is_finished = processes.map_hosts_json(
            lambda items: [(out / MANIFEST).exists() for _ in items], [0]
        )[0]
        if is_finished:
            note(f"{out} is finished already")
            manifest = read_index_manifest(out)
            processes.on_host0(lambda: check_index_files(out, manifest))
            return manifest
        started = time.monotonic()
        # 1. Vectors. Finished shards are reused, so a stop loses one at most.
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
        # 2. MergedParts, each searched while it is in memory. A host sends back scores
        # alone: recall is of the merged results, which no host has by itself.
        texts, recall = _recall_queries(corpus)
        queries = encoder.encode_queries(texts) if texts else []
        scores = processes.map_hosts_json(
            lambda numbers: [
                _scores(build_part(out, plan, n, digests), queries, recall["top_k"])
                for n in numbers
            ],
            range(plan["num_parts"]),
        )
        # 3. The manifest, written last: with it there is an index.
        manifest = {
            **plan,
            "corpus_path": _relative(corpus.path, out),
            "recall": {**recall, "value": _recall(scores, recall["top_k"])},
            "seconds": round(time.monotonic() - started, 1),
        }
        processes.on_host0(lambda: _finish(out, manifest, digests))
    return read_index_manifest(out)


def build_bm25(
    corpus: Any, out: str | os.PathLike, *, k1: float = K1, b: float = B
) -> dict:
    """Build an index of the words of a corpus, on this host alone.

    Args:
        corpus: has len, fingerprint and path, and gives its passages in order.
        out: directory, missing, empty or left by an earlier call with the same plan.
        k1, b: of BM25, see `postings_of`.

    Returns:
        The manifest, a dict.

    Raises:
        ValueError: a bad setting, a corpus without words, `out` holds something else,
            or another process is building there.
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
        "corpus": {"fingerprint": corpus.fingerprint, "num_passages": len(corpus)},
        "bm25": {"k1": k1, "b": b, "variant": VARIANT, "tokenizer": TOKENIZER},
        # An index of vectors has these in its plan, too, and the two are compared.
        "partition": None,
        "num_parts": 1,
    }
    with _claimed(out, plan, waits=False):
        if (out / MANIFEST).exists():
            note(f"{out} is finished already")
            manifest = read_index_manifest(out)
            check_index_files(out, manifest)
            return manifest
        started = time.monotonic()
        # Reading words takes minutes where encoding takes hours: nothing is resumed.
        write_postings(out / BM25, corpus, k1=k1, b=b)
        manifest = {
            **plan,
            "corpus_path": _relative(corpus.path, out),
            "seconds": round(time.monotonic() - started, 1),
        }
        _finish(out, manifest, [])
    return read_index_manifest(out)


@contextlib.contextmanager
def _locks_of_all_hosts() -> Iterator[contextlib.ExitStack]:
    """Yield an ExitStack that is not unwound where one of several hosts fails."""
    with contextlib.ExitStack() as stack:
        try:
            yield stack
        except BaseException:
            # The others go on writing until they are ended, so the lock must outlast
            # this exception: it goes with the process.
            if processes.num_hosts() > 1:
                _open_locks.append(stack.pop_all())
            raise


@contextlib.contextmanager
def _claimed(out, plan, waits):
    """Hold the directory for this plan: no other process writes to it meanwhile."""
    _claim(out, plan)
    with files.locked(out / PLAN, waits=waits) as is_held:
        if not is_held:
            raise ValueError(_busy(out))
        yield


def _busy(out):
    return f"{out} is being built by another process"


def _claim(out, plan):
    """Make `out` the directory of this plan, or raise why it cannot be."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, not a directory for an index")
    out.mkdir(parents=True, exist_ok=True)
    names = sorted(entry.name for entry in out.iterdir())
    if PLAN not in names:
        # A process that was killed while it created the plan leaves a temporary file.
        rest = [n for n in names if not (n.startswith(PLAN) and n.endswith(".tmp"))]
        if rest:
            shown = ", ".join(rest[:5]) + (", ..." if len(rest) > 5 else "")
            raise ValueError(
                f"{out} holds something else ({shown}) and is left as it is: name an "
                "empty or a new directory"
            )
        # Another process may create it first; its plan is then compared below.
        if files.create(out / PLAN, json.dumps(plan, indent=1).encode()):
            return
    stored = plan_with_defaults(read_json_object(out / PLAN))
    differing = differences(stored, plan)
    if not differing:
        return
    advice = "name another directory, or remove it"
    kind = _kind(stored)
    # Only the kind differs, perhaps because "auto" chose otherwise then.
    if kind != _kind(plan) and {**stored, "partition": plan["partition"]} == plan:
        advice += f", or ask for {kind=}"
    raise ValueError(
        f"{out} holds an index made otherwise and is left as it is; "
        f"{advice}:\n{differing}"
    )


def _kind(plan):
    return partition_kind(plan["partition"] and Partition(**plan["partition"]))


def _shard_settings(plan, vector_file):
    # Vectors depend on these sections alone: other parts need no encoding.
    sections = {name: plan[name] for name in ("corpus", "encoder", "vectors")}
    settings = {name: plan["vectors"][name] for name in ("dtype", "shard_size")}
    made_from = json.dumps(sections, sort_keys=True)
    return {**settings, "made_from": made_from, "vector_file": vector_file}


def _scores(nearest, queries, top_k):
    """Return lists [n, k]: scores found in a part, and those of an exact search."""
    if not len(queries):
        return [], []
    _, scores = nearest.search(queries, top_k)
    return scores.tolist(), exact_scores(nearest.vectors, queries, top_k).tolist()


def _recall_queries(corpus):
    """Return the texts to measure recall with, and what the manifest says of them."""
    count = min(RECALL_TITLES, len(corpus))
    rng = np.random.default_rng(SEED)
    drawn = np.sort(rng.choice(len(corpus), count, replace=False)).tolist()
    passages = corpus.passages(drawn)
    # A title may be missing; any part of the text is a query then.
    texts = [p.title.strip('" ') or p.text.strip()[:100] for p in passages]
    texts = [text for text in texts if text.strip()]
    top_k = min(10, len(corpus))
    return texts, {"queries": "titles", "num_queries": len(texts), "top_k": top_k}


def _recall(scores, top_k):
    """Return the recall of all parts merged, from `_scores` of each, or None."""
    if not len(scores[0][0]):  # no queries
        return None
    merged, exact = (
        -np.sort(-np.concatenate([pair[i] for pair in scores], axis=1))[:, :top_k]
        for i in (0, 1)
    )
    return recall_of(merged, exact)


def _finish(out, manifest, digests):
    """Write the manifest: from now on there is an index."""
    # No worker writes any more: all shards are there, and the directory is locked.
    shutil.rmtree(out / LOCKS, ignore_errors=True)
    # Shards were digested as they were written; the others are read once more.
    known = {f"{VECTORS}/{shard_name(n)}": value for n, value in enumerate(digests)}
    manifest["files"] = file_digests(out, known=known)
    # A digest over the digests: readers compare one value with a run's fingerprint.
    manifest["digest"] = digest_of(manifest)
    files.replace(out / MANIFEST, json.dumps(manifest, indent=1).encode())


def _relative(path, start):
    # Both resolved: '..' behind a symbolic link would lead elsewhere.
    return os.path.relpath(pathlib.Path(path).resolve(), start.resolve())
