"""Several workers build the same index as one, and never two at the same time."""

import contextlib
import fcntl
import json
import re

import numpy as np
import pytest

from rsearch.hosts import processes
from rsearch.retrieval import index_build
from rsearch.retrieval.engine import SearchEngine
from rsearch.retrieval.index import digest_of, open_index
from rsearch.retrieval.index_build import build_index, encode_worker_shards, plan_index
from rsearch.retrieval.nearest import split_evenly
from rsearch.runtime import files
from tests.retrieval.fakes import FileCorpus, TableEncoder, numbered

SETTINGS = {"shard_size": 8, "kind": "partitioned"}


@pytest.fixture
def corpus(tmp_path):
    return FileCorpus(numbered(60), tmp_path / "corpus.jsonl")


def share(corpus, encoder, out, worker, num_workers=3):
    plan = plan_index(corpus, encoder, **SETTINGS)
    return encode_worker_shards(
        corpus, encoder, out, plan, worker=worker, num_workers=num_workers
    )


def contents(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def found(path, corpus, **share):
    index = open_index(path, corpus=corpus, encoder=TableEncoder(), **share)
    search = SearchEngine(index.nearest, TableEncoder(), corpus, top_k=7)
    return search([f"t{i}" for i in range(0, 60, 7)])


def test_workers_in_any_order_write_what_one_worker_writes(corpus, tmp_path):
    whole = build_index(corpus, TableEncoder(), tmp_path / "whole", **SETTINGS)
    encoders = [TableEncoder() for _ in range(3)]
    left = [share(corpus, encoders[w], tmp_path / "i", w) for w in (2, 0, 1)]
    assert left == [6, 3, 0]  # shards left, of eight
    assert [len(e.encoded) for e in encoders] == [24, 20, 16]
    last = TableEncoder()
    manifest = build_index(corpus, last, tmp_path / "i", waits=True, **SETTINGS)
    assert last.encoded == []
    assert not (tmp_path / "i" / "locks").exists()
    assert contents(tmp_path / "i" / "vectors") == contents(
        tmp_path / "whole" / "vectors"
    )
    differing = {"seconds", "digest"}
    scann = {n for n in whole["files"] if n.startswith("scann")}
    assert scann == {n for n in manifest["files"] if n.startswith("scann")}
    for made in (whole, manifest):
        made["files"] = {n: d for n, d in made["files"].items() if n not in scann}
    assert {k: v for k, v in manifest.items() if k not in differing} == {
        k: v for k, v in whole.items() if k not in differing
    }


@contextlib.contextmanager
def hold(path, kind):
    with open(path, "a+b") as file:
        fcntl.flock(file, kind)
        yield


def test_no_shard_has_two_writers(corpus, tmp_path):
    share(corpus, TableEncoder(), tmp_path / "i", 0)
    with hold(tmp_path / "i" / "locks" / "00004", fcntl.LOCK_EX):
        with pytest.raises(ValueError, match="shard 00004 is being encoded by another"):
            share(corpus, TableEncoder(), tmp_path / "i", 1)
        assert share(corpus, TableEncoder(), tmp_path / "i", 2) == 2


def test_building_and_encoding_shares_exclude_each_other(corpus, tmp_path):
    share(corpus, TableEncoder(), tmp_path / "i", 0)
    plan = tmp_path / "i" / "plan.json"
    with (
        hold(plan, fcntl.LOCK_SH),
        pytest.raises(ValueError, match="is being built by another process"),
    ):
        build_index(corpus, TableEncoder(), tmp_path / "i", **SETTINGS)
    with (
        hold(plan, fcntl.LOCK_EX),
        pytest.raises(ValueError, match="is being built by another process"),
    ):
        share(corpus, TableEncoder(), tmp_path / "i", 1)


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_the_first_of_several_hosts_keeps_its_lock_after_a_failure(
    corpus, tmp_path, monkeypatch, num_hosts
):
    """The other hosts keep writing for some seconds, until they are ended."""

    def fails(*_, **__):
        monkeypatch.setattr(processes, "num_hosts", lambda: num_hosts)
        raise OSError("no space left")

    monkeypatch.setattr(index_build, "encode_shards", fails)
    with pytest.raises(OSError, match="no space left"):
        build_index(corpus, TableEncoder(), tmp_path / "i", **SETTINGS)
    with files.locked(tmp_path / "i" / "plan.json") as is_free:
        assert is_free == (num_hosts == 1)


def test_a_plan_that_was_not_completely_written_claims_no_directory(tmp_path):
    (tmp_path / ".partial.x").write_text('{"torn')  # by a process that was killed
    with index_build.hold_directory(tmp_path, {"kind": "bm25"}, waits=False):
        assert json.loads((tmp_path / "plan.json").read_text()) == {"kind": "bm25"}


def test_workers_of_another_plan_are_refused(corpus, tmp_path):
    share(corpus, TableEncoder(), tmp_path / "i", 0)
    with pytest.raises(ValueError, match=r"encoder\.dim: 16 in the index, 8 here"):
        share(corpus, TableEncoder(8), tmp_path / "i", 1)


def test_a_damaged_shard_of_a_worker_is_replaced_by_the_final_build(corpus, tmp_path):
    for worker in range(3):
        share(corpus, TableEncoder(), tmp_path / "i", worker)
    path = tmp_path / "i" / "vectors" / "00002.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4] + b"oops")
    build_index(corpus, TableEncoder(), tmp_path / "i", **SETTINGS)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("num_parts", [2, 3, 7])
def test_exact_parts_find_what_the_whole_index_finds_to_the_last_bit(
    tmp_path, num_parts
):
    passages = numbered(60)
    # Equal vectors in several parts are returned in corpus order.
    same = [type(p)(p.id, f"t7\n{p.id}") for p in passages[::9]]
    corpus = FileCorpus([*passages, *same], tmp_path / "corpus.jsonl")
    build_index(corpus, TableEncoder(), tmp_path / "whole", shard_size=5)
    built = build_index(
        corpus, TableEncoder(), tmp_path / "i", shard_size=5, num_parts=num_parts
    )
    assert built["num_parts"] == num_parts and built["recall"]["value"] == 1.0
    assert found(tmp_path / "i", corpus) == found(tmp_path / "whole", corpus)


def test_intact_scann_parts_are_not_built_again(corpus, tmp_path, monkeypatch):
    settings = {**SETTINGS, "num_parts": 3, "reorder_dtype": "bfloat16"}

    class Stopped(Exception):
        pass

    def stop(*_):
        raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr("rsearch.retrieval.index_build._finish", stop)
        build_index(corpus, TableEncoder(), tmp_path / "i", **settings)
    records = sorted((tmp_path / "i" / "scann").glob("*.json"))
    assert [p.name for p in records] == ["00000.json", "00001.json", "00002.json"]
    # One of them gets damaged, and one was never finished.
    (tmp_path / "i" / "scann" / "00001" / "ah_codebook.pb").write_bytes(b"x")
    records[2].unlink()
    builds = []

    def counted(vectors, partition):
        builds.append(partition.reorder_dtype)
        return build(vectors, partition)

    from rsearch.retrieval.index import build_searcher as build

    monkeypatch.setattr("rsearch.retrieval.index.build_searcher", counted)
    manifest = build_index(corpus, TableEncoder(), tmp_path / "i", **settings)
    assert builds == ["bfloat16", "bfloat16"]
    assert manifest["recall"]["value"] >= 0.95
    assert [p[0].id for p in found(tmp_path / "i", corpus)][:2] == ["p0", "p7"]


@pytest.mark.parametrize(
    ("num", "settings"),
    [
        (31, {}),  # 16 vectors, which get leaves, and 15, too few to learn codes from
        (60, {"shard_size": 57}),  # 3 vectors, fewer than the 8 leaves of the others
    ],
)
def test_a_last_part_too_small_for_leaves_is_searched_without_them(
    tmp_path, num, settings
):
    corpus = FileCorpus(numbered(num), tmp_path / "corpus.jsonl")
    settings = {"kind": "partitioned", "num_parts": 2, **settings}
    manifest = build_index(corpus, TableEncoder(), tmp_path / "i", **settings)
    assert manifest["partition"]["num_leaves"] > 1
    assert manifest["recall"]["value"] >= 0.95
    last = f"t{num - 1}"
    index = open_index(tmp_path / "i", corpus=corpus, encoder=TableEncoder())
    search = SearchEngine(index.nearest, TableEncoder(), corpus, top_k=1)
    assert search([last])[0][0].id == f"p{num - 1}"


def test_an_index_of_another_kind_is_refused_with_ways_to_continue(corpus, tmp_path):
    build_index(corpus, TableEncoder(), tmp_path / "i", **SETTINGS)
    message = r"or remove it, or ask for kind='partitioned':\n.*partition"
    with pytest.raises(ValueError, match=message):
        build_index(
            corpus, TableEncoder(), tmp_path / "i", **{**SETTINGS, "kind": "quantized"}
        )
    with pytest.raises(ValueError, match=r"name another directory, or remove it:\n"):
        build_index(
            corpus, TableEncoder(), tmp_path / "i", **{**SETTINGS, "shard_size": 9}
        )


def test_hosts_open_and_verify_only_their_own_parts(corpus, tmp_path):
    settings = {**SETTINGS, "num_parts": 3}
    build_index(corpus, TableEncoder(), tmp_path / "i", **settings)
    opened = [
        open_index(
            tmp_path / "i", corpus=corpus, encoder=TableEncoder(), host=h, num_hosts=2
        )
        for h in range(2)
    ]
    assert [(index.first, len(index.nearest)) for index in opened] == [
        (0, 16),
        (16, 44),
    ]
    path = tmp_path / "i" / "vectors" / "00000.npy"
    path.write_bytes(path.read_bytes()[:-1])
    own = {"corpus": corpus, "encoder": TableEncoder(), "num_hosts": 2}
    open_index(tmp_path / "i", host=1, **own)
    with pytest.raises(ValueError, match=r"vectors/00000\.npy: damaged"):
        open_index(tmp_path / "i", host=0, **own)
    with pytest.raises(ValueError, match="in 3 parts, which 4 hosts cannot share"):
        open_index(tmp_path / "i", host=0, **{**own, "num_hosts": 4})


def test_an_index_from_before_there_were_parts_opens(corpus, tmp_path):
    build_index(corpus, TableEncoder(), tmp_path / "i", **SETTINGS)
    before = found(tmp_path / "i", corpus)
    for name in ("plan.json", "manifest.json"):
        path = tmp_path / "i" / name
        held = json.loads(path.read_text())
        del held["num_parts"], held["partition"]["reorder_dtype"]
        if held.pop("digest", None):
            held["digest"] = digest_of(held)
        path.write_text(json.dumps(held))
    assert found(tmp_path / "i", corpus) == before
    encoder = TableEncoder()
    build_index(corpus, encoder, tmp_path / "i", **SETTINGS)
    assert encoder.encoded == []


@pytest.mark.parametrize(
    "partition", [{"num_leaves": "7"}, {"future": 1}, {"reorder": None}, [], 5]
)
@pytest.mark.parametrize("name", ["plan.json", "manifest.json"])
def test_a_partition_of_another_form_is_refused(corpus, tmp_path, name, partition):
    build_index(corpus, TableEncoder(), tmp_path / "i", **SETTINGS)
    path = tmp_path / "i" / name
    stored = {**json.loads(path.read_text()), "partition": partition}
    if stored.pop("digest", None):
        stored["digest"] = digest_of(stored)
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=re.escape(f"{path}: partition={partition}")):
        build_index(corpus, TableEncoder(), tmp_path / "i", **SETTINGS)


def test_slices_are_consecutive_complete_and_nearly_equal():
    for num, count in ((10, 3), (7, 7), (65, 8)):
        blocks = split_evenly(range(num), count)
        np.testing.assert_array_equal(np.concatenate(blocks), range(num))
        sizes = list(map(len, blocks))
        assert max(sizes) - min(sizes) <= 1 and len(sizes) == count


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_parts": 61}, "num_parts=61, expected 1 to 60"),
        ({"num_parts": 4, "shard_size": 30}, "60 passages make 2 shards of 30"),
        ({"reorder_dtype": "int4"}, "reorder_dtype='int4', expected one of float32, b"),
    ],
)
def test_impossible_settings_of_parts_are_refused(corpus, settings, message):
    with pytest.raises(ValueError, match=message):
        plan_index(corpus, TableEncoder(), **settings)
