"""The parts of an index on disk: a ScaNN index over some consecutive shards.

    scann/            ScaNN's files of the only part; its record is scann.json
    scann/00000/      ... or those of the first of several; scann/00000.json likewise

A part exists once its record does. Brute force needs neither.
"""

import json
import shutil

from rsearch.retrieval.nearest import Nearest, Partition, build_searcher
from rsearch.retrieval.parts import part_blocks
from rsearch.retrieval.scann_library import import_scann
from rsearch.retrieval.vectors import num_shards, open_vectors, shard_name
from rsearch.runtime import files
from rsearch.runtime.console import note

VECTORS, SCANN = "vectors", "scann"


def count_shards(plan):
    """Shards of the whole corpus."""
    return num_shards(plan["corpus"]["num_passages"], plan["vectors"]["shard_size"])


def shards_of(plan, part):
    """The numbers of a part's shards, a range."""
    return part_blocks(range(count_shards(plan)), plan["num_parts"])[part]


def scann_files(plan, part):
    """Where a part's ScaNN files are, below the index."""
    return SCANN if plan["num_parts"] == 1 else f"{SCANN}/{part:05d}"


def build_part(out, plan, part, digests):
    """Builds a part, or opens the one that an earlier call has built.

    Args:
        out: directory of the index.
        plan: see `rsearch.retrieval.index_build.plan_index`.
        part: its number.
        digests: of the vectors' shards, of the whole index.

    Returns:
        A Nearest over the part's vectors.
    """
    vectors, partition = _vectors_and_partition(out, plan, part)
    said = f"part {part + 1} of {plan['num_parts']}"
    if partition is None:
        return Nearest(vectors, build_searcher(vectors.array(), None), None)
    path = out / scann_files(plan, part)
    made_from = [plan["partition"], [digests[n] for n in shards_of(plan, part)]]
    if _is_built(path, made_from):
        note(f"the ScaNN index was there already, {said}")
        return open_part(out, plan, part)
    note(f"building the ScaNN index, {said}")
    searcher = build_searcher(vectors.array(), partition)
    save_searcher(searcher, path, made_from)
    return Nearest(vectors, searcher, partition)


def open_part(out, plan, part):
    """The Nearest of a part that is there; its vectors are mapped, not read."""
    vectors, partition = _vectors_and_partition(out, plan, part)
    if partition is None:
        searcher = build_searcher(vectors.array(), None)
    else:
        searcher = open_searcher(out / scann_files(plan, part))
    return Nearest(vectors, searcher, partition)


def open_searcher(path):
    """The ScaNN searcher that `save_searcher` has written."""
    return import_scann().load_searcher(str(path), False)


def _vectors_and_partition(out, plan, part):
    names = [shard_name(number) for number in shards_of(plan, part)]
    vectors = open_vectors(out / VECTORS, names)
    return vectors, plan["partition"] and Partition(**plan["partition"])


def _is_built(path, made_from):
    """Whether a part is there, whole and made from the same."""
    try:
        held = json.loads(_record_of(path).read_bytes())
        is_same = held["made_from"] == made_from
        return is_same and held["files"] == _digests_of(path)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False  # it was stopped, or is as good as never begun


def save_searcher(searcher, path, made_from):
    """Writes a ScaNN searcher into a directory, and the record that it is whole.

    Args:
        searcher: of `build_searcher`.
        path: of the directory, replaced if it is there.
        made_from: JSON value: equal for a searcher built of the same in the same way.
    """
    part = path.with_name(path.name + ".part")
    _record_of(path).unlink(missing_ok=True)
    for old in (part, path):  # of a build that was stopped
        shutil.rmtree(old, ignore_errors=True)
    part.mkdir(parents=True)
    # By default ScaNN writes absolute paths, and the directory could not be moved.
    searcher.serialize(str(part), relative_path=True)
    files.sync_tree(part)
    part.rename(path)
    files.sync_directory(path.parent)
    record = {"made_from": made_from, "files": _digests_of(path)}
    files.replace(_record_of(path), json.dumps(record).encode())


def _record_of(path):
    return path.with_name(path.name + ".json")


def _digests_of(path):
    return {p.name: files.digest_file(p) for p in sorted(path.iterdir())}
