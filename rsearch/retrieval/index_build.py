"""Builds the index of a corpus, alone or with others; goes on where it was stopped.

Hosts that have met (`rsearch.hosts.processes`) call `build_index` together: each
encodes its share of the shards and builds its share of the parts; the first writes the
manifest.
Processes that know nothing of each other, as those of a SLURM array, call
`encode_share`, each with a number of its own; who then finds no shard missing calls
`build_index`.

    locks/         files that such processes lock, while they write a shard
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import time

import numpy as np

from rsearch.hosts import processes
from rsearch.retrieval.index import (
    FORMAT,
    MANIFEST,
    PLAN,
    check_files,
    completed,
    differences,
    digest_of,
    file_digests,
    read_json,
    read_manifest,
)
from rsearch.retrieval.index_parts import VECTORS, build_part, count_shards
from rsearch.retrieval.nearest import (
    SEED,
    Partition,
    choose_partition,
    exact_scores,
    kind_of,
    recall_of,
)
from rsearch.retrieval.parts import part_blocks
from rsearch.retrieval.vectors import (
    DTYPES,
    encode_shards,
    missing_shards,
    num_shards,
    shard_name,
)
from rsearch.runtime import files
from rsearch.runtime.console import note

LOCKS = "locks"
MAX_SHARD = 65_536  # passages: what a stop may cost

_kept = []  # locks that go with this process


def plan_index(
    corpus,
    encoder,
    *,
    kind="auto",
    leaves_to_search=None,
    reorder=None,
    dims_per_block=None,
    reorder_dtype="float32",
    vector_dtype="float32",
    shard_size=None,
    num_parts=1,
):
    """What an index is made from and how: the same dict on all that build it.

    Args:
        corpus: has len, fingerprint and path.
        encoder: has dim and fingerprint.
        kind, leaves_to_search, reorder, dims_per_block, reorder_dtype: of each part;
            see `choose_partition`.
        vector_dtype: of the vectors on disk, "float32" or "float16".
        shard_size: passages encoded between two saves; None chooses.
        num_parts: pieces of the corpus with a ScaNN index each, which hosts can share.

    Raises:
        ValueError: a bad setting, or an empty corpus.
    """
    num = len(corpus)
    if not num:
        raise ValueError(f"{corpus.path}: the corpus has no passages")
    if vector_dtype not in DTYPES:
        raise ValueError(f"{vector_dtype=}, expected one of {', '.join(DTYPES)}")
    if not 1 <= num_parts <= num:
        raise ValueError(f"{num_parts=}, expected 1 to {num}, the number of passages")
    most = min(max(1024, num // 64), MAX_SHARD)
    shard_size = shard_size or min(most, -(-num // num_parts))
    count = num_shards(num, shard_size)
    if count < num_parts:
        raise ValueError(
            f"{num_parts=}, but {num} passages are {count} shards of {shard_size}, and "
            "a part has at least one: fewer parts, or a smaller shard_size"
        )
    largest = max(map(len, part_blocks(range(count), num_parts))) * shard_size
    partition = choose_partition(
        min(num, largest),
        encoder.dim,
        kind=kind,
        leaves_to_search=leaves_to_search,
        reorder=reorder,
        dims_per_block=dims_per_block,
        reorder_dtype=reorder_dtype,
    )
    return {
        "format": FORMAT,
        "corpus": {"fingerprint": corpus.fingerprint, "num_passages": num},
        "encoder": {"fingerprint": encoder.fingerprint, "dim": encoder.dim},
        "vectors": {"dtype": vector_dtype, "shard_size": shard_size},
        "partition": partition and dataclasses.asdict(partition),
        "num_parts": num_parts,
    }


def encode_share(corpus, encoder, out, plan, *, worker, num_workers):
    """Encodes a worker's share of the shards: every num_workers-th, from its number on.

    Any number of workers may be at it, on hosts that share the directory's file system.

    Args:
        corpus, encoder, out: see `build_index`.
        plan: as `plan_index` makes it.
        worker: from 0.
        num_workers: that there are.

    Returns:
        How many shards are still missing, of all.

    Raises:
        ValueError: another process encodes one of these shards or builds the index, or
            `out` holds something else.
    """
    if not 0 <= worker < num_workers:
        raise ValueError(f"{worker=}, expected 0 to {num_workers - 1}: {num_workers=}")
    out = pathlib.Path(out)
    _claim(out, plan)

    @contextlib.contextmanager
    def alone(name):
        with files.locked(out / LOCKS / name) as is_held:
            if not is_held:
                raise ValueError(
                    f"{out}: shard {name} is being encoded by another process; does "
                    f"worker {worker} of {num_workers} run twice?"
                )
            yield

    with files.locked(out / PLAN, shared=True) as is_held:
        if not is_held:
            raise ValueError(_busy(out))
        (out / LOCKS).mkdir(exist_ok=True)
        settings = _shard_settings(plan)
        numbers = range(count_shards(plan))
        own = numbers[worker::num_workers]
        encode_shards(corpus, encoder, out / VECTORS, own, alone=alone, **settings)
        made_from = settings["made_from"]
        return len(missing_shards(out / VECTORS, numbers, made_from))


def build_index(
    corpus,
    encoder,
    out,
    *,
    num_recall_queries=200,
    recall_queries=None,
    waits=False,
    **settings,
):
    """Encodes a corpus and builds its index; goes on where an earlier call stopped.

    Hosts that have met share the work, and all have to call it.

    Args:
        corpus: has len, passages(indices), fingerprint and path.
        encoder: has encode_passages, encode_queries, dim and fingerprint.
        out: directory, missing, empty or left by an earlier call with the same plan.
        num_recall_queries: titles, drawn from the corpus, that recall is measured with.
        recall_queries: texts to measure it with instead.
        waits: for another process that is building there; then it is finished already.
        **settings: see `plan_index`.

    Returns:
        The manifest, a dict.

    Raises:
        ValueError: a bad setting, an empty corpus, `out` holds something else, or
            another process is building there.
    """
    out = pathlib.Path(out)
    plan = plan_index(corpus, encoder, **settings)
    processes.check_same_on_all({"index": plan})
    with _held_for_all() as stack:
        # The first host's lock is for all: they write between its first and last word.
        processes.on_host0(lambda: stack.enter_context(_claimed(out, plan, waits)))
        if _on_first(lambda: (out / MANIFEST).exists()):
            note(f"{out} is finished already")
            manifest = read_manifest(out)
            processes.on_host0(lambda: check_files(out, manifest))
            return manifest
        started = time.monotonic()
        shards = processes.map_hosts_json(
            lambda numbers: encode_shards(
                corpus, encoder, out / VECTORS, numbers, **_shard_settings(plan)
            ),
            range(count_shards(plan)),
        )
        texts, told = _recall_queries(corpus, recall_queries, num_recall_queries)
        queries = encoder.encode_queries(texts) if texts else []
        found = processes.map_hosts_json(
            lambda parts: [
                _scores(build_part(out, plan, part, shards), queries, told["top_k"])
                for part in parts
            ],
            range(plan["num_parts"]),
        )
        manifest = {
            **plan,
            "corpus_path": _relative(corpus.path, out),
            "recall": {**told, "value": _recall(found, told["top_k"])},
            "seconds": round(time.monotonic() - started, 1),
        }
        processes.on_host0(lambda: _finish(out, manifest, shards))
    return read_manifest(out)


def _on_first(ask):
    """What the first host finds; the others' file systems may lag behind."""
    return processes.map_hosts_json(lambda items: [ask() for _ in items], [0])[0]


@contextlib.contextmanager
def _held_for_all():
    """An ExitStack that is not unwound where one of several hosts fails."""
    with contextlib.ExitStack() as stack:
        try:
            yield stack
        except BaseException:
            if processes.num_hosts() > 1:  # the others write on until they are ended
                _kept.append(stack.pop_all())
            raise


@contextlib.contextmanager
def _claimed(out, plan, waits):
    """In it, the directory is this plan's and no other process writes to it."""
    _claim(out, plan)
    with files.locked(out / PLAN, waits=waits) as is_held:
        if not is_held:
            raise ValueError(_busy(out))
        yield


def _busy(out):
    return f"{out} is being built by another process"


def _claim(out, plan):
    """Makes `out` this plan's directory, or says why it cannot be."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, not a directory for an index")
    out.mkdir(parents=True, exist_ok=True)
    names = sorted(entry.name for entry in out.iterdir())
    if PLAN not in names:
        rest = [n for n in names if not (n.startswith(PLAN) and n.endswith(".tmp"))]
        if rest:
            shown = ", ".join(rest[:5]) + (", ..." if len(rest) > 5 else "")
            raise ValueError(
                f"{out} holds something else ({shown}) and is left as it is: name an "
                "empty or a new directory"
            )
        if files.create(out / PLAN, json.dumps(plan, indent=1).encode()):
            return
    held = completed(read_json(out / PLAN))
    differing = differences(held, plan)
    if not differing:
        return
    way = "name another directory, or remove it"
    kind, asked = (
        kind_of(one["partition"] and Partition(**one["partition"]))
        for one in (held, plan)
    )
    if kind != asked and {**held, "partition": plan["partition"]} == plan:
        way += f", or ask for {kind=}"
    raise ValueError(
        f"{out} holds an index made otherwise and is left as it is; {way}:\n{differing}"
    )


def _shard_settings(plan):
    # What the vectors depend on; parts may change without encoding again.
    parts = {name: plan[name] for name in ("corpus", "encoder", "vectors")}
    return {**plan["vectors"], "made_from": json.dumps(parts, sort_keys=True)}


def _scores(nearest, queries, top_k):
    """[n, k] scores found in a part, and [n, k] of an exact search of it; lists."""
    if not len(queries):
        return [], []
    _, scores = nearest.search(queries, top_k)
    return scores.tolist(), exact_scores(nearest.vectors, queries, top_k).tolist()


def _recall_queries(corpus, texts, num_titles):
    """Texts to measure recall with, and what the manifest tells of them."""
    kind = "given"
    if texts is None:
        kind = "titles"
        count = min(num_titles, len(corpus))
        rng = np.random.default_rng(SEED)
        drawn = np.sort(rng.choice(len(corpus), count, replace=False)).tolist()
        passages = corpus.passages(drawn)
        # A title may be missing; any part of the text is a query then.
        texts = [p.title.strip('" ') or p.text.strip()[:100] for p in passages]
    texts = [text for text in texts if text.strip()]
    told = {"queries": kind, "num_queries": len(texts), "top_k": min(10, len(corpus))}
    return texts, told


def _recall(found, top_k):
    """Recall of all parts together, from `_scores` of each; None without queries."""
    if not len(found[0][0]):
        return None
    ours, exact = (
        -np.sort(-np.concatenate([pair[i] for pair in found], axis=1))[:, :top_k]
        for i in (0, 1)
    )
    return recall_of(ours, exact)


def _finish(out, manifest, shards):
    """Writes the manifest: from now on there is an index."""
    shutil.rmtree(out / LOCKS, ignore_errors=True)
    known = {f"{VECTORS}/{shard_name(n)}": value for n, value in enumerate(shards)}
    manifest["files"] = file_digests(out, known=known)
    manifest["digest"] = digest_of(manifest)
    files.replace(out / MANIFEST, json.dumps(manifest, indent=1).encode())


def _relative(path, start):
    # Both resolved: '..' behind a symbolic link would lead elsewhere.
    return os.path.relpath(pathlib.Path(path).resolve(), start.resolve())
