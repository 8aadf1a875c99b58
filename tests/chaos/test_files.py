"""`python -m tests.chaos.files` in a short form, and in full as a slow test."""

import json

import pytest

from tests.chaos import files


def test_changed_files_load_or_are_refused_in_words(capsys):
    assert files.main(["--files=120"]) == 0
    assert "120 changed samples" in capsys.readouterr().out


@pytest.mark.slow
def test_ten_thousand_changed_files_load_or_are_refused(capsys):
    assert files.main(["--files=10000"]) == 0


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("load", "outcome"),
    [
        (lambda place: _raise(KeyError("a")), "failed"),
        (lambda place: json.loads("{"), "failed"),  # not raised by our own code
        (lambda place: (place / "missing").read_bytes(), "refused"),
        (lambda place: None, "loaded"),
    ],
)
def test_a_loaders_outcome_is_classified_as_loaded_refused_or_failed(
    tmp_path, load, outcome
):
    assert files.read(load, tmp_path)["outcome"] == outcome


def test_memory_is_measured(tmp_path):
    actual = files.read(lambda place: len(bytearray(300 << 20)) and None, tmp_path)
    assert 290 << 20 < actual["bytes"] < 310 << 20


def test_a_reader_that_dies_counts_as_a_failure(tmp_path, monkeypatch):
    reader = files.Reader(tmp_path)
    monkeypatch.setattr(files, "LONGEST_SECONDS", 30.0)
    command = ["-c", "print('\"ready\"', flush=True); input(); import os; os.abort()"]
    monkeypatch.setattr(files.Reader, "words", command)
    assert "the reader died, code -6" in reader("corpus", 0, 0)["told"]
