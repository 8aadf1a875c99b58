"""Files are on disk before they are renamed into place, and their new names after."""

import gzip
import os
import pathlib

import pytest

from rsearch.data.corpus import Corpus
from rsearch.models.hf.checkpoint import export
from rsearch.models.spec import DecoderSpec
from rsearch.runtime import files
from tests.models.reference import random_params

RECORDS = b'{"id": "a", "contents": "T"}\n'


def write_corpus(folder):
    (folder / "corpus").write_bytes(gzip.compress(RECORDS))
    Corpus(folder / "corpus").close()


def write_model(folder):
    spec = DecoderSpec(
        vocab_size=8,
        width=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        mlp_width=8,
        max_context=16,
    )
    params = random_params(spec)
    export(folder / "model", params, spec, max_shard_bytes=300)


WRITERS = {
    "replace": (lambda folder: files.replace(folder / "a", b"new"), 1),
    "create": (lambda folder: files.create(folder / "a", b"new"), 1),
    "corpus": (write_corpus, 2),
    "export": (write_model, 1),
}


@pytest.mark.fault(84, "fsynced before their rename")
@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_durable_before_its_renaming_and_its_new_name_after(
    tmp_path, monkeypatch, name
):
    synced, renamed, unsynced = set(), [], []
    fsync = os.fsync

    def synced_now(descriptor):
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def watched(rename):
        def checked(source, target, **options):
            source = pathlib.Path(source)
            paths = [source, *source.rglob("*")] if source.is_dir() else [source]
            unsynced.extend(p for p in paths if p.stat().st_ino not in synced)
            folder = pathlib.Path(target).parent
            synced.discard(folder.stat().st_ino)
            renamed.append(folder)
            rename(source, target, **options)

        return checked

    monkeypatch.setattr(os, "fsync", synced_now)
    for function in ("replace", "rename", "link"):
        monkeypatch.setattr(os, function, watched(getattr(os, function)))
    write, num_renamed = WRITERS[name]
    write(tmp_path)
    assert len(renamed) == num_renamed
    assert not unsynced
    assert all(folder.stat().st_ino in synced for folder in renamed)
