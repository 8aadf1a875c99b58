"""Journals: an added record is found complete, by any host, or not at all."""

import errno
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.hosts import processes
from rsearch.runtime import console, files
from rsearch.runtime.journal import HEADER, AppendLog

KEYS = st.lists(st.text(st.characters(codec=None)) | st.integers(), max_size=3)


@given(st.lists(st.tuples(KEYS, st.binary(max_size=20)), max_size=6))
def test_an_added_record_is_found_now_and_after_reopening(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("journal")
    journal = AppendLog(folder, "words")
    for key, body in records:
        journal.add(key, body)
    latest = {repr(key): (key, body) for key, body in records}
    for opened in (journal, AppendLog(folder, "words")):
        assert len(opened) == len(latest)
        assert all(opened.get(key) == body for key, body in latest.values())
        assert opened.get(["nobody", "added", "this"]) is None


def test_a_journal_torn_anywhere_keeps_the_records_before_the_tear(tmp_path):
    journal, ends = AppendLog(tmp_path, "words"), [0]
    (path,) = [tmp_path / "words-0.journal"]
    for i in range(3):
        journal.add([i], b"body" * i)
        ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        opened = AppendLog(tmp_path, "words")
        num_whole = sum(end <= size for end in ends[1:])
        assert len(opened) == num_whole
        assert path.stat().st_size == ends[num_whole]
        opened.add([9], b"new")  # where the torn record began
        assert AppendLog(tmp_path, "words").get([9]) == b"new"


def test_a_damaged_record_is_not_found(tmp_path):
    journal = AppendLog(tmp_path, "words")
    journal.add([0], b"first")
    first = (tmp_path / "words-0.journal").stat().st_size
    journal.add([1], b"second")
    whole = (tmp_path / "words-0.journal").read_bytes()
    for place in range(first, len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        (tmp_path / "words-0.journal").write_bytes(damaged)
        opened = AppendLog(tmp_path, "words")
        assert (opened.get([0]), opened.get([1])) == (b"first", None)
        with open(tmp_path / "words-0.journal.damaged", "rb") as aside:
            aside.seek(first - len(whole), os.SEEK_END)
            assert aside.read() == damaged[first:]
    (tmp_path / "words-0.journal").write_bytes(HEADER.pack(2**63, 2**63, b"x" * 16))
    assert len(AppendLog(tmp_path, "words")) == 0


@pytest.mark.fault(84, "damaged journal record", "later good records")
def test_records_after_damage_are_found_and_so_are_those_added_later(tmp_path):
    journal, path = AppendLog(tmp_path, "words"), tmp_path / "words-0.journal"
    starts, rng = [], random.Random(0)
    bodies = [b"body" * i + bytes(40) for i in range(5)]
    for i, body in enumerate(bodies):
        starts.append(path.stat().st_size if i else 0)
        journal.add([i], body)
    whole = path.read_bytes()
    for number in range(60):
        damaged = bytearray(whole)
        hit = rng.randrange(1, 4)
        begin = rng.randrange(starts[hit], starts[hit + 1])
        if number % 3 == 0:  # bytes are missing
            del damaged[begin : starts[hit + 1] - rng.randrange(2)]
        elif number % 3 == 1:
            damaged[begin] ^= 1 << rng.randrange(8)
        else:
            damaged[begin:begin] = whole[:20]
        path.write_bytes(damaged)
        opened = AppendLog(tmp_path, "words")
        opened.add([9], b"new")
        aside = path.with_name("words-0.journal.damaged").read_bytes()
        for journal in (opened, AppendLog(tmp_path, "words")):
            intact = {i for i in range(5) if journal.get([i]) == bodies[i]}
            assert set(range(5)) - {hit} <= intact
            assert len(journal) == len(intact) + 1 and journal.get([9]) == b"new"
        # What has been set aside once is no longer in the file.
        assert path.with_name("words-0.journal.damaged").read_bytes() == aside


def test_records_of_other_hosts_are_found_and_a_hosts_own_take_precedence(
    tmp_path, monkeypatch
):
    for host in (1, 0, 2):
        monkeypatch.setattr(processes, "host_index", lambda host=host: host)
        journal = AppendLog(tmp_path, "words")
        journal.add(["all"], b"of %d" % host)
        journal.add([host], b"own")
    for host in range(3):
        monkeypatch.setattr(processes, "host_index", lambda host=host: host)
        opened = AppendLog(tmp_path, "words")
        assert opened.get(["all"]) == b"of %d" % host
        assert [opened.get([other]) for other in range(3)] == [b"own"] * 3


def test_a_record_that_has_shifted_is_not_mistaken_for_another(tmp_path):
    journal = AppendLog(tmp_path, "words")
    for number in range(3):
        journal.add([number], b"body %d" % number)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[1:])
    assert [journal.get([number]) for number in range(3)] == [None] * 3


def test_clearing_also_removes_the_records_of_hosts_that_no_longer_exist(tmp_path):
    (tmp_path / "words-1.journal").write_bytes(b"")
    (tmp_path / "others-0.journal").write_bytes(b"")
    journal = AppendLog(tmp_path, "words")
    journal.add([0], b"first")
    journal.clear()
    assert journal.get([0]) is None and len(journal) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["others-0.journal"]
    journal.add([1], b"second")
    assert AppendLog(tmp_path, "words").get([1]) == b"second"
    journal.clear()
    journal.clear()


def test_a_failing_disk_is_reported_once(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(console, "note", told.append)
    journal = AppendLog(tmp_path, "words")
    journal.add([0], b"first")

    def refuse(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files, "append", refuse)
        journal.add([1], b"second")
        journal.add([2], b"third")
    assert len(told) == 1 and "words-0.journal" in told[0] and "No space" in told[0]
    assert journal.get([0]) == b"first" and journal.get([1]) is None
    journal.add([3], b"fourth")
    assert AppendLog(tmp_path, "words").get([3]) == b"fourth"


@pytest.mark.parametrize("name", ["words-1.journal", "words-x.journal"])
def test_a_directory_in_the_place_of_a_file_is_refused_by_name(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(OSError, match=name):
        AppendLog(tmp_path, "words")
