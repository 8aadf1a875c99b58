"""A file has either its old contents or its new ones."""

import errno
import os
import threading

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rsearch.runtime import files


def test_replaced_file_has_the_new_contents_and_nothing_is_left_over(tmp_path):
    path = tmp_path / "a"
    for data in (b"old", b"", b"new"):
        files.replace(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failed_replacement_keeps_the_old_contents(tmp_path, monkeypatch, step):
    def fail(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "a"
    files.replace(path, b"old")
    monkeypatch.setattr(files.os, step, fail)
    with pytest.raises(OSError, match="No space left"):
        files.replace(path, b"new")
    assert path.read_bytes() == b"old"


@pytest.mark.fault(66, "temporary files through no link")
@pytest.mark.parametrize("leads_to", ["a file", "nothing"])
@pytest.mark.parametrize("write", [files.replace, files.create])
def test_a_link_in_place_of_a_temporary_file_is_not_written_through(
    tmp_path, write, leads_to
):
    path, target = tmp_path / "a", tmp_path / "target"
    if leads_to == "a file":
        target.write_bytes(b"precious")
    (tmp_path / "a.tmp").symlink_to(target)
    write(path, b"new")
    assert path.read_bytes() == b"new" and not path.is_symlink()
    assert target.exists() == (leads_to == "a file")
    assert not target.exists() or target.read_bytes() == b"precious"


def test_a_leftover_temporary_file_is_overwritten(tmp_path):
    path = tmp_path / "a"
    (tmp_path / "a.tmp").write_bytes(b"torn by a crash")
    files.replace(path, b"new")
    assert path.read_bytes() == b"new"


class Stingy:
    """A file that accepts a few bytes of each write, until there is no room left."""

    def __init__(self, file, taken, room):
        self.file, self.taken, self.room = file, taken, room
        self.seek, self.truncate = file.seek, file.truncate

    def write(self, data):
        if self.room <= 0:
            raise OSError(28, "No space left on device")
        count = self.file.write(data[: min(self.taken, self.room)])
        self.room -= count
        return count


@given(data=st.binary(min_size=1), taken=st.integers(1, 9), room=st.integers(0, 30))
def test_append_is_complete_or_leaves_the_file_unchanged(
    tmp_path_factory, data, taken, room
):
    path = tmp_path_factory.mktemp("append") / "a"
    path.write_bytes(b"old")
    with open(path, "ab", buffering=0) as file:
        if room < len(data):
            with pytest.raises(OSError):
                files.append(Stingy(file, taken, room), data)
            assert path.read_bytes() == b"old"
        files.append(Stingy(file, taken, len(data)), data)
    assert path.read_bytes() == b"old" + data


def test_digest_of_a_file_is_that_of_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", 7)
    data = os.urandom(100)
    (tmp_path / "a").write_bytes(data)
    assert files.digest_file(tmp_path / "a") == xxhash.xxh3_128_hexdigest(data)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 5000])
def test_sampled_digest_tells_sizes_and_sampled_bytes_apart(tmp_path, size):
    path = tmp_path / "weights"
    settings = dict(num_blocks=4, block_bytes=100)
    path.write_bytes(bytes(size))
    whole = files.sampled_digest(path, **settings)
    assert files.sampled_digest(path, **settings) == whole
    path.write_bytes(bytes(size + 1))
    assert files.sampled_digest(path, **settings) != whole
    for place in {0, size // 3 + 1, size - 1} & set(range(size)):
        if place in range(100) or place in range(size - 100, size):
            data = bytearray(size)
            data[place] = 1
            path.write_bytes(data)
            assert files.sampled_digest(path, **settings) != whole


def test_only_the_first_of_several_writers_creates_a_file(tmp_path):
    path = tmp_path / "a"
    assert files.create(path, b"first")
    assert not files.create(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("code", ["EPERM", "ENOSYS", "ENOTSUP"])
def test_a_file_is_created_where_there_are_no_hard_links(tmp_path, monkeypatch, code):
    def link(*_):
        raise OSError(getattr(errno, code), "no links")

    monkeypatch.setattr(files.os, "link", link)
    test_only_the_first_of_several_writers_creates_a_file(tmp_path)


def test_a_shared_lock_admits_only_shared_ones_and_an_exclusive_one_none(tmp_path):
    path = tmp_path / "lock"
    with (
        files.locked(path, shared=True) as first,
        files.locked(path, shared=True) as second,
        files.locked(path) as third,
    ):
        assert (first, second, third) == (True, True, False)
    with files.locked(path) as is_held, files.locked(path, shared=True) as other:
        assert (is_held, other) == (True, False)


def test_a_waiting_thread_gets_the_lock_once_it_is_free(tmp_path):
    path, order = tmp_path / "lock", []

    def wait():
        with files.locked(path, waits=True) as is_held:
            order.append(("waited", is_held))

    with files.locked(path):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.1)
        order.append("held")
    thread.join()
    assert order == ["held", ("waited", True)]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "Expecting property name"),
        (b'"\xff"', "can't decode byte 0xff"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "limit"),
    ],
)
def test_invalid_json_is_reported_with_its_file(tmp_path, data, reason):
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.json is not JSON: .*{reason}"):
        files.read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_bytes(b'{"a": 1}')
    assert files.read_json(tmp_path / "a.json") == {"a": 1}
