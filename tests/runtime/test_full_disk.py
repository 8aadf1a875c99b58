"""Files on a disk that is really full: the old ones stay, and errors name the file."""

import subprocess

import pytest

from rsearch.config.recipes import run_command
from rsearch.runtime import files
from rsearch.runtime.jsonl import recover_jsonl
from rsearch.runtime.run_directory import RunDirectory

BLOCK = 4096
OLD = b'{"a": 1}\n{"torn'


@pytest.fixture
def disk(tmp_path):
    """A disk of 1 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a disk is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk, blocks_left):
    with open(disk / "filler", "ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(BLOCK))
        except OSError:
            file.truncate(file.tell() - blocks_left * BLOCK)


def replacing(path):
    with files.replacing(path) as file:
        file.write(bytes(20 * BLOCK))


WRITES = {
    "replace": lambda path: files.replace(path, bytes(20 * BLOCK)),
    "create": lambda path: files.create(path, bytes(20 * BLOCK)),
    "replacing": replacing,
    "recover": lambda path: recover_jsonl(path, on_bad=print),
}


@pytest.mark.fault(42, "full")
@pytest.mark.parametrize("name", WRITES)
def test_a_refused_write_keeps_the_file_names_it_and_leaves_nothing(disk, capsys, name):
    path = disk / "file"
    path.write_bytes(OLD)
    fill(disk, 0 if name == "recover" else 3)
    assert run_command(lambda argv: WRITES[name](path), []) == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith(f"error: No space left on device: {path}")
    assert path.read_bytes() == OLD
    left = {p.name for p in disk.iterdir() if p.stat().st_size}
    assert left == {"filler", "file"}


def test_a_directory_on_a_full_disk_can_be_locked(disk):
    fill(disk, 0)
    directory = RunDirectory(disk)
    with pytest.raises(ValueError, match="in use by another process"):
        RunDirectory(disk)
    directory.close()
