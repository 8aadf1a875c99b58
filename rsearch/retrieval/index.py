"""The index of a corpus on disk: verified when opened, movable, in one part or several.

    plan.json      what it is made from and how: written first, claims the directory
    vectors/       shards of the passages' vectors; see rsearch.retrieval.vectors
    scann/         ScaNN's files; see rsearch.retrieval.index_parts
    manifest.json  the plan, digests of all files, measured recall: written last

An index exists when its manifest does; rsearch.retrieval.index_build makes it.
"""

import dataclasses
import json
import os
import pathlib

import xxhash

from rsearch.retrieval.index_parts import (
    SCANN,
    VECTORS,
    open_part,
    scann_files,
    shards_of,
)
from rsearch.retrieval.nearest import Nearest, Partition
from rsearch.retrieval.parts import Parts, part_blocks
from rsearch.retrieval.vectors import shard_name
from rsearch.runtime import files

FORMAT = 1
PLAN, MANIFEST = "plan.json", "manifest.json"


@dataclasses.dataclass(frozen=True)
class Index:
    """An opened index, or one host's parts of it.

    Attributes:
        nearest: searches the vectors that are here.
        first: position of the first of them in the corpus.
        manifest: what the whole index is.
    """

    nearest: Nearest | Parts
    first: int
    manifest: dict


def open_index(path, *, corpus, encoder, verify=True, host=0, num_hosts=1):
    """Opens a finished index for this corpus and encoder.

    Args:
        path: the directory; it may have been moved since it was built.
        corpus: has len and fingerprint.
        encoder: has dim and fingerprint.
        verify: compare every file's digest; reads all of them.
        host, num_hosts: of as many hosts the number of this one, which opens, verifies
            and holds its share of the parts alone: consecutive ones.

    Raises:
        ValueError: no finished index, fewer parts than hosts, files that differ from
            the manifest, or another corpus or encoder than it was built with; each
            difference is named.
    """
    path = pathlib.Path(path)
    manifest = read_manifest(path)
    ours = {
        "corpus": {"fingerprint": corpus.fingerprint, "num_passages": len(corpus)},
        "encoder": {"fingerprint": encoder.fingerprint, "dim": encoder.dim},
    }
    differing = differences({k: manifest[k] for k in ours}, ours)
    if differing:
        hint = ""
        if manifest["encoder"] != ours["encoder"]:
            hint = "\n  (an encoder is its weights, family, max_query_tokens and "
            hint += "max_passage_tokens: those that rsearch.index was given)"
        raise ValueError(f"{path} was not built for this input:\n{differing}{hint}")
    num_parts = manifest["num_parts"]
    if num_hosts > num_parts:
        raise ValueError(
            f"{path} is in {num_parts} parts, which {num_hosts} hosts cannot share: "
            f"build it with --parts={num_hosts}"
        )
    own = part_blocks(range(num_parts), num_hosts)[host]
    if verify:
        check_files(path, manifest, None if num_hosts == 1 else own)
    size = manifest["vectors"]["shard_size"]
    firsts = [shards_of(manifest, part)[0] * size for part in own]
    parts = [open_part(path, manifest, part) for part in own]
    nearest = parts[0]
    if len(parts) > 1:
        nearest = Parts([first - firsts[0] for first in firsts], parts)
    return Index(nearest, firsts[0], manifest)


def corpus_path(path):
    """Where the corpus of an index was, seen from where the index is now.

    Raises:
        ValueError: no finished index, or no file there.
    """
    path = pathlib.Path(path)
    found = pathlib.Path(os.path.normpath(path / read_manifest(path)["corpus_path"]))
    if not found.is_file():
        raise ValueError(f"the corpus of {path} is not at {found}: say where it is")
    return found


def completed(plan):
    """A plan or manifest with what those did not tell yet that are older than it."""
    held = plan.get("partition")
    partition = held and dataclasses.asdict(Partition(**held))
    return {"num_parts": 1, **plan, "partition": partition}


def file_digests(out, *, known):
    """{path in out: digest} of every file of vectors/ and scann/."""
    names = _file_names(out)
    return {n: known.get(n) or files.digest_file(out / n) for n in names}


def _file_names(out):
    paths = [p for d in (VECTORS, SCANN) for p in (out / d).rglob("*") if p.is_file()]
    return sorted(path.relative_to(out).as_posix() for path in paths)


def check_files(path, manifest, parts=None):
    """Compares the files of an index with its manifest.

    Args:
        path: of the index.
        manifest: of the index.
        parts: numbers of those whose files are compared; None is every file there is.

    Raises:
        ValueError: names each that is missing, damaged or not part of it.
    """
    expected, there = manifest["files"], _file_names(path)
    if parts is not None:
        numbers = [number for part in parts for number in shards_of(manifest, part)]
        shards = {f"{VECTORS}/{shard_name(number)}" for number in numbers}
        folders = tuple(f"{scann_files(manifest, part)}/" for part in parts)

        def is_own(name):
            return name in shards or name.startswith(folders)

        expected = {name: expected[name] for name in filter(is_own, expected)}
        there = [*filter(is_own, there)]
    rows = []
    for name, digest in expected.items():
        if name not in there:
            rows.append(f"  {name}: missing")
        elif files.digest_file(path / name) != digest:
            rows.append(f"  {name}: damaged")
    rows += [f"  {name}: not part of it" for name in there if name not in expected]
    if rows:
        raise ValueError(
            f"{path} is not as it was built; build it again:\n" + "\n".join(rows)
        )


def read_manifest(path):
    """The manifest of the index in a directory.

    Raises:
        ValueError: there is no finished index, or it was changed.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory with an index")
    if not (path / MANIFEST).is_file():
        hint = "it is not finished: run rsearch.index again"
        if not (path / PLAN).is_file():
            hint = "it is no index"
        raise ValueError(f"{path} has no {MANIFEST}: {hint}")
    manifest = read_json(path / MANIFEST)
    digest = manifest.pop("digest", None)
    if digest != digest_of(manifest):
        raise ValueError(f"{path / MANIFEST} was changed since it was written")
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path / MANIFEST}: format={manifest.get('format')}, this program reads "
            f"{FORMAT}; build the index again"
        )
    return completed({**manifest, "digest": digest})


def read_json(path):
    """The JSON object in a file.

    Raises:
        ValueError: there is none.
    """
    try:
        value = files.read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return value


def digest_of(manifest):
    """Of a manifest without its own digest."""
    text = json.dumps(manifest, sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def differences(held, wanted, prefix=""):
    """One line for each field that differs between two nested dicts."""
    lines = []
    for name in sorted(held.keys() | wanted.keys()):
        a, b = held.get(name), wanted.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            nested = differences(a, b, f"{prefix}{name}.")
            lines += [nested] if nested else []
        elif a != b:
            lines.append(f"  {prefix}{name}: {a!r} in the index, {b!r} here")
    return "\n".join(lines)
