"""The index of a corpus on disk: built resumably, verified when opened, movable.

    plan.json      what it is made from and how: written first, claims the directory
    vectors/       shards of the passages' vectors; see rsearch.retrieval.vectors
    scann/         ScaNN's files, of a partitioned index; brute force needs none
    manifest.json  the plan, digests of all files, measured recall: written last

An index exists when its manifest does.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import shutil
import time

import numpy as np
import xxhash

from rsearch import files
from rsearch.console import note
from rsearch.retrieval.nearest import (
    SEED,
    Nearest,
    Partition,
    build_searcher,
    choose_partition,
    import_scann,
    measure_recall,
)
from rsearch.retrieval.vectors import DTYPES, encode_corpus, open_vectors

FORMAT = 1
PLAN, MANIFEST, VECTORS, SCANN = "plan.json", "manifest.json", "vectors", "scann"


@dataclasses.dataclass(frozen=True)
class Index:
    """An opened index: `nearest` searches, `manifest` tells what it is."""

    nearest: Nearest
    manifest: dict


def build_index(
    corpus,
    encoder,
    out,
    *,
    kind="auto",
    leaves_to_search=None,
    reorder=None,
    vector_dtype="float32",
    shard_size=None,
    num_recall_queries=200,
    recall_queries=None,
):
    """Encodes a corpus and builds its index; goes on where an earlier call stopped.

    Args:
        corpus: has len, passages(indices), fingerprint and path.
        encoder: has encode_passages, encode_queries, dim and fingerprint.
        out: directory, missing, empty or left by an earlier call with the same plan.
        kind, leaves_to_search, reorder: see `choose_partition`.
        vector_dtype: of the vectors on disk, "float32" or "float16".
        shard_size: passages encoded between two saves; None chooses.
        num_recall_queries: titles, drawn from the corpus, that recall is measured with.
        recall_queries: texts to measure it with instead.

    Returns:
        The manifest, a dict.

    Raises:
        ValueError: a bad setting, an empty corpus, or `out` holds something else.
    """
    out = pathlib.Path(out)
    if not len(corpus):
        raise ValueError(f"{corpus.path}: the corpus has no passages")
    if vector_dtype not in DTYPES:
        raise ValueError(f"{vector_dtype=}, expected one of {', '.join(DTYPES)}")
    shard_size = shard_size or min(max(1024, len(corpus) // 64), 65_536)
    partition = choose_partition(
        len(corpus), kind=kind, leaves_to_search=leaves_to_search, reorder=reorder
    )
    plan = {
        "format": FORMAT,
        "corpus": {"fingerprint": corpus.fingerprint, "num_passages": len(corpus)},
        "encoder": {"fingerprint": encoder.fingerprint, "dim": encoder.dim},
        "vectors": {"dtype": vector_dtype, "shard_size": shard_size},
        "partition": partition and dataclasses.asdict(partition),
    }
    _claim(out, plan)
    with _locked(out):
        if (out / MANIFEST).exists():
            note(f"{out} is finished already")
            manifest = _read_manifest(out)
            _check_files(out, manifest["files"])
            return manifest
        started = time.monotonic()
        shards = encode_corpus(
            corpus,
            encoder,
            out / VECTORS,
            shard_size=shard_size,
            dtype=vector_dtype,
            made_from=_vectors_of(plan),
        )
        vectors = open_vectors(out / VECTORS, shards)
        note("building the ScaNN index")
        searcher = build_searcher(vectors.array(), partition)
        if partition is not None:
            _save_searcher(searcher, out / SCANN)
        nearest = Nearest(vectors, searcher, partition)
        recall = _recall(corpus, encoder, nearest, recall_queries, num_recall_queries)
        manifest = {
            **plan,
            "corpus_path": _relative(corpus.path, out),
            "recall": recall,
            "seconds": round(time.monotonic() - started, 1),
            "files": _digests(
                out, known={f"{VECTORS}/{k}": v for k, v in shards.items()}
            ),
        }
        manifest["digest"] = _digest_of(manifest)
        files.replace(out / MANIFEST, json.dumps(manifest, indent=1).encode())
    return manifest


def open_index(path, *, corpus, encoder, verify=True):
    """Opens a finished index for this corpus and encoder.

    Args:
        path: the directory; it may have been moved since it was built.
        corpus: has len and fingerprint.
        encoder: has dim and fingerprint.
        verify: compare every file's digest; reads all of them.

    Raises:
        ValueError: no finished index, files that differ from the manifest, or another
            corpus or encoder than it was built with; each difference is named.
    """
    path = pathlib.Path(path)
    manifest = _read_manifest(path)
    ours = {
        "corpus": {"fingerprint": corpus.fingerprint, "num_passages": len(corpus)},
        "encoder": {"fingerprint": encoder.fingerprint, "dim": encoder.dim},
    }
    differing = _differences({k: manifest[k] for k in ours}, ours)
    if differing:
        hint = ""
        if manifest["encoder"] != ours["encoder"]:
            hint = "\n  (an encoder is its weights, family, max_query_tokens and "
            hint += "max_passage_tokens: those that rsearch.index was given)"
        raise ValueError(f"{path} was not built for this input:\n{differing}{hint}")
    if verify:
        _check_files(path, manifest["files"])
    names = [pathlib.PurePosixPath(name) for name in manifest["files"]]
    shards = [p.name for p in names if p.parts[0] == VECTORS and p.suffix == ".npy"]
    vectors = open_vectors(path / VECTORS, sorted(shards))
    if manifest["partition"] is None:
        partition, searcher = None, build_searcher(vectors.array(), None)
    else:
        partition = Partition(**manifest["partition"])
        searcher = import_scann().load_searcher(str(path / SCANN), False)
    return Index(Nearest(vectors, searcher, partition), manifest)


def corpus_path(path):
    """Where the corpus of an index was, seen from where the index is now.

    Raises:
        ValueError: no finished index, or no file there.
    """
    path = pathlib.Path(path)
    found = pathlib.Path(os.path.normpath(path / _read_manifest(path)["corpus_path"]))
    if not found.is_file():
        raise ValueError(f"the corpus of {path} is not at {found}: say where it is")
    return found


def _claim(out, plan):
    """Makes `out` this plan's directory, or says why it cannot be."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, not a directory for an index")
    out.mkdir(parents=True, exist_ok=True)
    names = sorted(entry.name for entry in out.iterdir())
    if PLAN not in names:
        if set(names) - {PLAN + ".tmp"}:
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise ValueError(
                f"{out} holds something else ({shown}) and is left as it is: name an "
                "empty or a new directory"
            )
        files.replace(out / PLAN, json.dumps(plan, indent=1).encode())
        return
    held = _read_json(out / PLAN)
    differing = _differences(held, plan)
    if differing:
        raise ValueError(
            f"{out} holds an index made otherwise and is left as it is; name another "
            f"directory, or remove it:\n{differing}"
        )


@contextlib.contextmanager
def _locked(out):
    """Keeps a second process from building in the same directory."""
    with open(out / PLAN) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{out} is being built by another process") from None
        yield


def _vectors_of(plan):
    """What the vectors depend on; the partition may change without encoding again."""
    parts = {name: plan[name] for name in ("corpus", "encoder", "vectors")}
    return json.dumps(parts, sort_keys=True)


def _save_searcher(searcher, path):
    part = path.with_name(path.name + ".part")
    for old in (part, path):  # of a build that was stopped
        shutil.rmtree(old, ignore_errors=True)
    part.mkdir()
    # By default ScaNN writes absolute paths, and the directory could not be moved.
    searcher.serialize(str(part), relative_path=True)
    files.sync_tree(part)
    part.rename(path)
    files.sync_directory(path.parent)


def _recall(corpus, encoder, nearest, texts, num_titles):
    """Recall against exact search; a dict for the manifest."""
    top_k = min(10, len(corpus))
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
    if not texts:
        return {"queries": kind, "num_queries": 0, "top_k": top_k, "value": None}
    note(f"measuring recall with {len(texts)} queries")
    value = measure_recall(nearest, encoder.encode_queries(texts), top_k=top_k)
    return {"queries": kind, "num_queries": len(texts), "top_k": top_k, "value": value}


def _relative(path, start):
    # Both resolved: '..' behind a symbolic link would lead elsewhere.
    return os.path.relpath(pathlib.Path(path).resolve(), start.resolve())


def _digests(out, *, known):
    """{path in out: digest} of every file of vectors/ and scann/."""
    paths = [p for d in (VECTORS, SCANN) for p in (out / d).rglob("*") if p.is_file()]
    names = sorted(path.relative_to(out).as_posix() for path in paths)
    return {n: known.get(n) or files.digest_file(out / n) for n in names}


def _check_files(path, expected):
    found = _digests(path, known={})
    rows = [
        f"  {name}: " + ("missing" if name not in found else "damaged")
        for name in expected
        if found.get(name) != expected[name]
    ]
    rows += [f"  {name}: not part of it" for name in sorted(found.keys() - expected)]
    if rows:
        raise ValueError(
            f"{path} is not as it was built; build it again:\n" + "\n".join(rows)
        )


def _read_manifest(path):
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory with an index")
    if not (path / MANIFEST).is_file():
        hint = "it is not finished: run rsearch.index again"
        if not (path / PLAN).is_file():
            hint = "it is no index"
        raise ValueError(f"{path} has no {MANIFEST}: {hint}")
    manifest = _read_json(path / MANIFEST)
    digest = manifest.pop("digest", None)
    if digest != _digest_of(manifest):
        raise ValueError(f"{path / MANIFEST} was changed since it was written")
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path / MANIFEST}: format={manifest.get('format')}, this program reads "
            f"{FORMAT}; build the index again"
        )
    return {**manifest, "digest": digest}


def _read_json(path):
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return value


def _digest_of(manifest):
    text = json.dumps(manifest, sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def _differences(held, wanted, prefix=""):
    """One line for each field that differs between two nested dicts."""
    lines = []
    for name in sorted(held.keys() | wanted.keys()):
        a, b = held.get(name), wanted.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            nested = _differences(a, b, f"{prefix}{name}.")
            lines += [nested] if nested else []
        elif a != b:
            lines.append(f"  {prefix}{name}: {a!r} in the index, {b!r} here")
    return "\n".join(lines)
