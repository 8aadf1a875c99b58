"""Files on a disk that is really full: the old ones stay, and errors name the file."""

import contextlib
import subprocess

import numpy as np
import pytest

from rsearch.config.recipes import run_command
from rsearch.models.hf.checkpoint import export
from rsearch.models.spec import DecoderSpec
from rsearch.retrieval.bm25 import write_postings
from rsearch.retrieval.index import save_searcher
from rsearch.retrieval.nearest import import_scann
from rsearch.runtime import files
from rsearch.runtime.jsonl import recover_jsonl
from rsearch.runtime.metrics import MetricsLog
from rsearch.runtime.run_directory import RunDirectory
from rsearch.types import Passage
from tests.models.reference import random_params

BLOCK = 4096
OLD = b'{"a": 1}\n{"torn'


@pytest.fixture
def disk(tmp_path):
    """A disk of 1 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=64", "none", str(folder)]
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


@pytest.mark.fault(21, "full")
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


def test_metrics_that_are_refused_name_their_own_file(disk):
    """Not the path in /proc by which a moved directory is found."""
    path = disk / "run" / "rl" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    directory = RunDirectory(disk / "run")
    fill(disk, 1)
    log = MetricsLog(path.parent, tensorboard=False)
    with pytest.raises(OSError, match="No space left") as error:
        log.write(0, {"text": "a" * 2 * BLOCK})
    assert error.value.filename == str(path)
    log.close()
    path.unlink()
    with contextlib.suppress(OSError):
        for number in range(64):
            (disk / f"{number}").touch()
    with pytest.raises(OSError, match="No space left") as error:
        MetricsLog(path.parent, tensorboard=False)
    assert error.value.filename == str(path)
    directory.close()


class Texts(list):
    path = "corpus.jsonl"


def write_words(out):
    texts = [" ".join(f"w{i * j}" for j in range(60)) for i in range(300)]
    passages = Texts(Passage(str(i), f"T\n{text}") for i, text in enumerate(texts))
    write_postings(out, passages, k1=1.2, b=0.75)


def write_model(out):
    sizes = dict(width=64, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8)
    spec = DecoderSpec(vocab_size=300, mlp_width=64, max_context=16, **sizes)
    export(out, random_params(spec), spec)


def write_searcher(out):
    vectors = np.random.default_rng(0).normal(size=(1000, 32)).astype(np.float32)
    builder = import_scann().builder(vectors, 10, "dot_product")
    searcher = builder.tree(10, 5).score_ah(2).reorder(50).build()
    save_searcher(searcher, out, "made")


@pytest.mark.parametrize("blocks_left", [1, 16])
@pytest.mark.parametrize("write", [write_words, write_model, write_searcher])
def test_a_library_that_cannot_write_is_an_error_in_one_line(
    disk, capfd, write, blocks_left
):
    fill(disk, blocks_left)
    out = disk / "out"
    assert run_command(lambda argv: write(out), []) == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ") and str(out) in lines[-1]
    assert not any("Traceback" in line for line in lines)


def test_a_failed_export_leaves_no_directory(disk):
    fill(disk, 16)
    with pytest.raises(OSError):
        write_model(disk / "out")
    assert [path.name for path in disk.iterdir()] == ["filler"]
