"""A run's requirements of its machine are checked before anything is loaded."""

import os

import pytest

from rsearch.setup.load import load_setup
from rsearch.setup.preflight import check_machine
from rsearch.world import pretrained
from tests.small_run import config

AWAY = "https://search.example"


@pytest.mark.fault(78, "proxy", "hub id")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("retrieval.url", f"{AWAY}/retrieve"),
        ("retrieval.encoder", "owner/encoder"),
        ("model.source", "owner/model"),
        ("data.train", "owner/questions:hotpotqa@train"),
        ("models.writer.source", f"{AWAY}/v1"),
        ("models.reader.source", "owner/reader"),
    ],
)
def test_a_bad_proxy_is_named_before_anything_is_loaded(monkeypatch, field, value):
    monkeypatch.setenv("ALL_PROXY", "socks4://proxy:1")
    names = {"tokenizer.source": "", "model.source": "/m", "models.writer.name": "m"}
    c = config(**{**names, field: value})
    with pytest.raises(ValueError, match="ALL_PROXY='socks4://proxy:1'") as caught:
        load_setup(c)
    assert value in str(caught.value)
    check_machine(config())


@pytest.mark.fault(86, "no home")
def test_the_cache_is_checked_if_a_model_of_the_world_is_named(monkeypatch):
    monkeypatch.setenv("RSEARCH_CACHE", "~nobody-of-this-name/cache")
    check_machine(config())
    with pytest.raises(ValueError, match="RSEARCH_CACHE='~nobody-of-this-name/cache'"):
        check_machine(config(model__source="world:base"))


@pytest.mark.fault(86, "unwritable cache")
def test_a_cache_that_cannot_be_written_is_named_before_training(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RSEARCH_CACHE", str(tmp_path / "file"))
    c = config(model__source="world:judge")
    with pytest.raises(ValueError, match=r"RSEARCH_CACHE=.*Not a directory"):
        pretrained.find_source(c, "world:judge")


@pytest.mark.fault(86, "full disk")
def test_a_disk_without_room_is_named(monkeypatch, tmp_path):
    full = os.statvfs_result((4096, 4096, 9, 0, 0, 9, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(ValueError, match=f"{tmp_path}/run.* 0 bytes"):
        check_machine(config(), home=tmp_path / "run")
