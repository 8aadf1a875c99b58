"""Digests of weights cover every byte, are cached, and extend earlier runs' digests."""

import concurrent.futures
import os

import pytest
import xxhash

from rsearch.runtime import digests, files


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RSEARCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "digests"


@pytest.fixture
def weights(tmp_path):
    """A file far larger than the blocks that are sampled from it."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(16 << 20))
    return path


def change(path, position, *, keeps_time=False):
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(b"x")
    times = status.st_atime_ns, status.st_mtime_ns + (0 if keeps_time else 1)
    os.utime(path, ns=times)


@pytest.mark.fault(72, "every byte")
def test_every_byte_of_a_file_counts(cache, weights):
    before = digests.weights_digest(weights)
    sampled, whole = before.split(" ")
    assert sampled == files.sampled_digest(weights)
    assert whole == "xxh3:" + xxhash.xxh3_128_hexdigest(weights.read_bytes())
    change(weights, 100_000)  # between two samples
    assert files.sampled_digest(weights) == sampled
    assert digests.weights_digest(weights) != before


@pytest.mark.fault(72, "no second read")
def test_a_file_is_read_once_and_again_after_it_changes(cache, weights, tmp_path):
    reads = []

    def compute(path):
        reads.append(path)
        return files.digest_file(path)

    first = digests.cached(weights, "test", compute)
    assert [digests.cached(weights, "test", compute) for _ in range(3)] == [first] * 3
    (tmp_path / "link").symlink_to(weights)
    assert digests.cached(tmp_path / "link", "test", compute) == first
    assert len(reads) == 1
    assert digests.cached(weights, "other", compute) == first  # another kind
    change(weights, 100_000)
    assert digests.cached(weights, "test", compute) != first
    # Another file in its place, of the same size and time.
    status = weights.stat()
    (tmp_path / "new").write_bytes(bytes(16 << 20))
    os.replace(tmp_path / "new", weights)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digests.cached(weights, "test", compute) == first
    assert len(reads) == 4


@pytest.mark.fault(72, "damaged cache")
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-9],
        lambda data: data.replace(b'"digest": "', b'"digest": "0'),
        lambda data: b"[" * 100_000,
        lambda data: b'{"digest": 1, "check": 2}',
        lambda data: b"\xff",
    ],
)
def test_a_damaged_cache_entry_is_computed_again(cache, weights, damage):
    expected = digests.weights_digest(weights)
    (entry,) = cache.iterdir()
    right = entry.read_bytes()
    entry.write_bytes(damage(right))
    assert digests.weights_digest(weights) == expected
    assert entry.read_bytes() == right
    assert list(cache.iterdir()) == [entry]


def test_concurrent_writers_agree(cache, weights):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        actual = set(pool.map(digests.weights_digest, [weights] * 16))
    assert actual == {digests.weights_digest(weights)}


def test_the_digest_of_a_file_that_changes_meanwhile_is_not_cached(cache, weights):
    def compute(path):
        change(path, 5)
        return "between"

    assert digests.cached(weights, "test", compute) == "between"
    assert digests.cached(weights, "test", files.digest_file) != "between"


def test_without_a_usable_cache_files_are_always_read(weights, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    expected = None
    for folder in (tmp_path / "good", tmp_path / "file", "~nobody-of-this-name/x"):
        monkeypatch.setenv("RSEARCH_CACHE", str(folder))
        actual = digests.weights_digest(weights)
        expected = expected or actual
        assert actual == expected


def test_the_earlier_form_has_only_sampled_digests():
    full = f"a.safetensors 12 xxh3:{'0' * 32}, b.safetensors 34 xxh3:{'f' * 32}"
    assert digests.earlier_form(full) == "a.safetensors 12, b.safetensors 34"
    for other in ("12", f"xxh3:{'0' * 32}", "index abc"):
        assert digests.earlier_form(other) == other


def test_progress_ends_with_the_size(cache, weights):
    told = []
    digests.weights_digest(weights, progress=lambda *args: told.append(args))
    assert told[-1] == (weights, 16 << 20, 16 << 20)
