"""Open an index on disk, verify it, and search it in one part or several.

    plan.json      what it is built from and how; written first, claims the directory
    vectors/       shards of the passages' vectors; see rsearch.retrieval.vectors
    scann/         ScaNN's files if there is one part; its record is scann.json
    scann/00000/   ScaNN's files of the first of several parts; see scann/00000.json
    manifest.json  the plan, digests of all files, measured recall; written last

An index is complete once its manifest exists. A part of it is a ScaNN index over some
consecutive shards, and is complete once its record exists. Brute force needs no files
in scann/. A BM25 index has bm25/ instead of vectors/ and scann/; see
rsearch.retrieval.bm25. An index directory can be moved. `rsearch.retrieval.index_build`
builds indexes.
"""

import dataclasses
import errno
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from rsearch.retrieval.nearest import (
    MergedParts,
    Nearest,
    Partition,
    build_searcher,
    import_scann,
    split_evenly,
)
from rsearch.retrieval.vectors import Vectors, count_shards, open_vectors, shard_name
from rsearch.runtime import files
from rsearch.runtime.console import note

FORMAT = 1
VECTORS, SCANN, BM25 = "vectors", "scann", "bm25"
PLAN, MANIFEST = "plan.json", "manifest.json"


@dataclasses.dataclass(frozen=True)
class Index:
    """An opened index, or one host's parts of it.

    Attributes:
        nearest: search over the vectors of these parts.
        first: position in the corpus of the first of these vectors.
        manifest: manifest of the complete index.
    """

    nearest: Nearest | MergedParts
    first: int
    manifest: dict


def open_index(
    path: str | os.PathLike,
    *,
    corpus: Any,
    encoder: Any,
    verify: bool = True,
    host: int = 0,
    num_hosts: int = 1,
    make_nearest: Callable[[Vectors], Nearest] | None = None,
) -> Index:
    """Open a finished index for this corpus and encoder.

    Args:
        path: directory of the index; it may have been moved since it was built.
        corpus: has `len` and `fingerprint`.
        encoder: has `dim` and `fingerprint`.
        verify: whether to compare every file's digest, which reads all files.
        host: number of this host, from 0. It opens, verifies and holds only its own
            share of the parts, which are consecutive.
        make_nearest: makes the search over these parts' vectors, instead of ScaNN.

    Raises:
        ValueError: there is no finished index, it has fewer parts than there are hosts,
            files differ from the manifest, or it was built with another corpus or
            encoder; the message lists each difference.
    """
    path = files.expand(path)
    manifest = read_index_manifest(path)
    if manifest.get("kind") == BM25:
        raise ValueError(f"{path} is of kind={BM25}: it has no vectors to search")
    check_made_from(path, manifest, describe_inputs(corpus, encoder))
    num_parts = manifest["num_parts"]
    if num_hosts > num_parts:
        raise ValueError(
            f"{path} is in {num_parts} parts, which {num_hosts} hosts cannot share: "
            f"build it with --parts={num_hosts}"
        )
    numbers = split_evenly(range(num_parts), num_hosts)[host]
    if verify:
        check_index_files(path, manifest, None if num_hosts == 1 else numbers)
    size = manifest["vectors"]["shard_size"]
    firsts = [part_shards(manifest, number)[0] * size for number in numbers]
    if make_nearest is not None:
        shards = itertools.chain(*(part_shards(manifest, n) for n in numbers))
        vectors = open_vectors(path / VECTORS, map(shard_name, shards))
        return Index(make_nearest(vectors), firsts[0], manifest)
    parts = [open_part(path, manifest, number) for number in numbers]
    nearest = parts[0]
    if len(parts) > 1:
        nearest = MergedParts([first - firsts[0] for first in firsts], parts)
    return Index(nearest, firsts[0], manifest)


def is_bm25(path: str | os.PathLike) -> bool:
    """Return whether a path holds a finished BM25 index.

    Raises:
        ValueError: its manifest was changed after it was written.
    """
    path = files.expand(path)
    if not (path / MANIFEST).is_file():
        return False
    return read_index_manifest(path).get("kind") == BM25


def describe_inputs(corpus: Any, encoder: Any = None) -> dict:
    """Return the sections of a plan that identify an index's corpus and encoder."""
    passages = {"fingerprint": corpus.fingerprint, "num_passages": len(corpus)}
    if encoder is None:
        return {"corpus": passages}
    vectors = {"fingerprint": encoder.fingerprint, "dim": encoder.dim}
    return {"corpus": passages, "encoder": vectors}


def check_made_from(path: pathlib.Path, manifest: dict, expected: dict) -> None:
    """Raise a ValueError if an index was built from other inputs than expected."""
    report = differences({name: manifest[name] for name in expected}, expected)
    if report:
        hint = ""
        if manifest.get("encoder") != expected.get("encoder"):
            hint = "\n  (an encoder is its weights, family, max_query_tokens and "
            hint += "max_passage_tokens; use those given to rsearch.index)"
        raise ValueError(f"{path} was not built for this input:\n{report}{hint}")


def corpus_path(path: str | os.PathLike) -> pathlib.Path:
    """Return the path of an index's corpus; print it if it is not next to the index.

    Raises:
        ValueError: see `resolve_corpus_path`.
    """
    corpus = resolve_corpus_path(path)
    if not is_next_to_index(path, corpus):
        note(
            f"the corpus of {path} is not next to it but at {corpus.resolve()}, "
            "according to its manifest"
        )
    return corpus


def resolve_corpus_path(path: str | os.PathLike) -> pathlib.Path:
    """Return the path of an index's corpus, resolved from where the index is now.

    Raises:
        ValueError: there is no finished index, or no file at that path.
    """
    path = files.expand(path)
    stored_path = read_index_manifest(path).get("corpus_path")
    if not isinstance(stored_path, str) or not stored_path or "\0" in stored_path:
        raise ValueError(
            f"{path / MANIFEST}: corpus_path={stored_path!r} is not a path"
        )
    corpus = pathlib.Path(os.path.normpath(path / stored_path))
    if not corpus.is_file():
        raise ValueError(
            f"the corpus of {path} is not at {corpus}: name its path in "
            "config.retrieval.corpus"
        )
    return corpus


def is_next_to_index(path: str | os.PathLike, corpus: str | os.PathLike) -> bool:
    """Return whether a corpus is inside the directory that contains its index.

    A manifest may come from anyone, and can point to any file on this machine.
    Symbolic links are followed.
    """
    folder = files.expand(path).resolve().parent
    return pathlib.Path(corpus).resolve().is_relative_to(folder)


def plan_with_defaults(path: pathlib.Path, plan: dict) -> dict:
    """Return a plan or manifest with defaults for fields missing from older ones.

    Args:
        path: file that holds it, for messages.
        plan: its content.

    Raises:
        ValueError: its partition is not one of this program.
    """
    partition = plan.get("partition")
    if partition is not None:
        defaults = dataclasses.asdict(Partition())
        if not isinstance(partition, dict) or any(
            name not in defaults or type(value) is not type(defaults[name])
            for name, value in partition.items()
        ):
            raise ValueError(
                f"{path}: partition={partition!r}, but this program expects values "
                f"like {defaults}"
            )
        partition = {**defaults, **partition}
    return {"num_parts": 1, **plan, "partition": partition}


def file_digests(out: pathlib.Path, *, known: dict[str, str]) -> dict[str, str]:
    """Return {path in out: digest} for all files in vectors/, scann/ and bm25/."""
    names = _file_names(out)
    return {n: known.get(n) or files.digest_file(out / n) for n in names}


def _file_names(out):
    folders = (out / name for name in (VECTORS, SCANN, BM25))
    paths = [p for folder in folders for p in folder.rglob("*") if p.is_file()]
    return sorted(path.relative_to(out).as_posix() for path in paths)


def check_index_files(
    path: pathlib.Path, manifest: dict, parts: Sequence[int] | None = None
) -> None:
    """Compare the files of an index with its manifest.

    Args:
        parts: numbers of the parts whose files are compared; None compares all files.

    Raises:
        ValueError: lists the files that are missing, damaged or not part of the index.
    """
    expected = manifest["files"]
    present = _file_names(path)
    if parts is not None:
        numbers = [shard for number in parts for shard in part_shards(manifest, number)]
        shards = {f"{VECTORS}/{shard_name(number)}" for number in numbers}
        folders = tuple(f"{scann_folder(manifest, number)}/" for number in parts)

        def is_in_parts(name):
            return name in shards or name.startswith(folders)

        expected = {name: expected[name] for name in filter(is_in_parts, expected)}
        present = [*filter(is_in_parts, present)]
    lines = []
    for name, digest in expected.items():
        if name not in present:
            lines.append(f"  {name}: missing")
        elif files.digest_file(path / name) != digest:
            lines.append(f"  {name}: damaged")
    lines += [f"  {name}: not part of it" for name in present if name not in expected]
    if lines:
        raise ValueError(
            f"{path} differs from what was built; {_rebuild_advice(path)}:\n"
            + "\n".join(lines)
        )


def read_index_manifest(path: pathlib.Path) -> dict:
    """Return the manifest of the index in a directory.

    Raises:
        ValueError: there is no finished index, or its manifest was changed.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory with an index")
    if not (path / MANIFEST).is_file():
        hint = "it is not finished: run rsearch.index again"
        if not (path / PLAN).is_file():
            hint = "it is not an index"
        raise ValueError(f"{path} has no {MANIFEST}: {hint}")
    manifest = read_json_object(path / MANIFEST)
    digest = manifest.pop("digest", None)
    if digest != digest_of(manifest):
        raise ValueError(
            f"{path / MANIFEST} was changed since it was written; "
            f"{_rebuild_advice(path)}"
        )
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path / MANIFEST}: format={manifest.get('format')}, but this program "
            f"reads {FORMAT}; build the index again"
        )
    return plan_with_defaults(path / MANIFEST, {**manifest, "digest": digest})


def _rebuild_advice(path):
    # With a manifest the index counts as finished, and the command only checks it.
    return (
        f"delete {path / MANIFEST} and run rsearch.index as before: intact vectors and "
        "parts are reused"
    )


def read_json_object(path: pathlib.Path) -> dict:
    """Return the JSON object in a file.

    Raises:
        ValueError: the file holds no JSON object.
    """
    value = files.read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return value


def digest_of(manifest: dict) -> str:
    """Return the digest of a manifest that contains no digest itself."""
    text = json.dumps(manifest, sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def differences(stored: dict, expected: dict, prefix: str = "") -> str:
    """Return a line for each field that differs between two nested dicts."""
    lines = []
    for name in sorted(stored.keys() | expected.keys()):
        a, b = stored.get(name), expected.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            nested = differences(a, b, f"{prefix}{name}.")
            lines += [nested] if nested else []
        elif a != b:
            lines.append(f"  {prefix}{name}: {a!r} in the index, {b!r} here")
    return "\n".join(lines)


def all_shards(plan: dict) -> range:
    """Return the numbers of all shards of the corpus."""
    num = plan["corpus"]["num_passages"]
    return range(count_shards(num, plan["vectors"]["shard_size"]))


def part_shards(plan: dict, number: int) -> range:
    """Return the numbers of the shards in a part."""
    return split_evenly(all_shards(plan), plan["num_parts"])[number]


def scann_folder(plan: dict, number: int) -> str:
    """Return the folder of a part's ScaNN files, relative to the index."""
    return SCANN if plan["num_parts"] == 1 else f"{SCANN}/{number:05d}"


def build_part(
    out: pathlib.Path, plan: dict, number: int, digests: Sequence[str]
) -> Nearest:
    """Build a part of an index, or open it if an earlier call has built it.

    Args:
        out: directory of the index.
        plan: see `rsearch.retrieval.index_build.plan_index`.
        number: number of the part, from 0.
        digests: digests of all vector shards in the index.
    """
    vectors, partition = _vectors_and_partition(out, plan, number)
    label = f"part {number + 1} of {plan['num_parts']}"
    if partition is None:
        return Nearest(vectors, build_searcher(vectors.array(), None), None)
    path = out / scann_folder(plan, number)
    made_from = [plan["partition"], [digests[n] for n in part_shards(plan, number)]]
    if _is_built(path, made_from):
        note(f"the ScaNN index of {label} exists already")
        return open_part(out, plan, number)
    note(f"building the ScaNN index of {label}")
    searcher = build_searcher(vectors.array(), partition)
    save_searcher(searcher, path, made_from)
    return Nearest(vectors, searcher, partition)


def open_part(out: pathlib.Path, plan: dict, number: int) -> Nearest:
    """Open a part that has been built; only brute force reads its mapped vectors."""
    vectors, partition = _vectors_and_partition(out, plan, number)
    if partition is None:
        searcher = build_searcher(vectors.array(), None)
    else:
        searcher = open_searcher(out / scann_folder(plan, number))
    return Nearest(vectors, searcher, partition)


def open_searcher(path: pathlib.Path) -> object:
    """Open a ScaNN searcher that `save_searcher` has written.

    Raises:
        ValueError: a file is missing or damaged; it may have been deleted just now.
    """
    scann = import_scann()
    try:
        return scann.load_searcher(str(path), False)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path}: ScaNN cannot open it: {error}") from None


def _vectors_and_partition(out, plan, number):
    names = [shard_name(shard) for shard in part_shards(plan, number)]
    vectors = open_vectors(out / VECTORS, names)
    return vectors, plan["partition"] and Partition(**plan["partition"])


def _is_built(path, made_from):
    """Return whether a part exists, is intact and was made from the same inputs."""
    try:
        record = json.loads(_record_of(path).read_bytes())
        is_same = record["made_from"] == made_from
        return is_same and record["files"] == _digests_of(path)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False  # its build was interrupted, or its files were damaged


def save_searcher(searcher: Any, path: pathlib.Path, made_from: Any) -> None:
    """Write a ScaNN searcher into a directory, then a record that it is complete.

    Args:
        searcher: a searcher from `build_searcher`.
        path: the directory; replaced if it exists.
        made_from: JSON value that is equal for searchers built from the same inputs in
            the same way.
    """
    temporary = path.with_name(path.name + ".part")
    _record_of(path).unlink(missing_ok=True)
    for folder in (temporary, path):  # left by an interrupted build
        shutil.rmtree(folder, ignore_errors=True)
    temporary.mkdir(parents=True)
    # By default ScaNN stores absolute paths, which would break if the directory moved.
    try:
        searcher.serialize(str(temporary), relative_path=True)
    except RuntimeError as error:  # its kind for a disk that refuses a write
        raise OSError(errno.EIO, " ".join(str(error).split()), str(path)) from error
    files.sync_tree(temporary)
    temporary.rename(path)
    files.sync_directory(path.parent)
    record = {"made_from": made_from, "files": _digests_of(path)}
    files.replace(_record_of(path), json.dumps(record).encode())


def _record_of(path):
    return path.with_name(path.name + ".json")


def _digests_of(path):
    return {p.name: files.digest_file(p) for p in sorted(path.iterdir())}
