"""Where a run may be stored: under nearly any name that the file system accepts."""

import os

import jax.numpy as jnp
import pytest

from rsearch.config import recipes as configs
from rsearch.data.corpus import Corpus
from rsearch.data.questions import load_questions
from rsearch.runtime import checkpoint
from rsearch.runtime.metrics import MetricsLog, read_metrics
from rsearch.runtime.workdir import Workdir, check_workdir
from tests.data.test_questions import GOOD, jsonl
from tests.small_run import arguments, run_python

BASE = configs.load("configs/base.py")
NAMES = {
    "spaces": " a  run ",
    "letters": "Läufe-実験-\U0001f50e",
    "signs": "it's (1) $HOME; ]%20#&",
    "line feed": "a\nb",
    "long": "x" * 255,
}


@pytest.mark.fault(48, "non-ASCII and spaces", "long")
@pytest.mark.parametrize("name", NAMES)
def test_a_run_may_have_any_name(tmp_path, name):
    folder = tmp_path / NAMES[name]
    for again in (False, True):
        with Workdir(folder, BASE) as work:
            assert work.is_resumed == again
            stage = work.stage("rl")
            with MetricsLog(stage, first_step=int(again)) as log:
                log.write(int(again), {"loss": 1.0})
            saved = {"w": jnp.ones(3) + again}
            checkpoint.save(stage / "c", int(again), saved, {}, keep=2)
    assert len(read_metrics(stage / "metrics.jsonl")) == 2
    step, tree, _ = checkpoint.newest_good(stage / "c", saved)
    assert step == 1 and tree["w"].tolist() == [2, 2, 2]
    assert [p.name for p in tmp_path.iterdir()] == [NAMES[name]]
    questions, _ = load_questions(jsonl(folder, [GOOD]))
    passage = {"id": "a", "contents": "a\nb"}
    corpus = Corpus(jsonl(folder, [passage], "corpus.jsonl"))
    assert (len(questions), len(corpus)) == (1, 1)


@pytest.mark.fault(48, "long")
def test_a_name_that_is_too_long_is_reported_in_one_line(tmp_path, capsys):
    folder = tmp_path / ("x" * 256)
    assert configs.run_command(lambda _: Workdir(folder, BASE), []) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: File name too long: {folder}"


@pytest.mark.fault(48, "symlink")
def test_a_run_behind_a_link_is_the_same_run(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with Workdir(tmp_path / "run", BASE) as work:
        checkpoint.save(work.stage("rl"), 1, {"w": jnp.ones(3)}, {}, keep=1)
        with pytest.raises(ValueError, match="in use by process"):
            Workdir(tmp_path / "disk", BASE)
    (tmp_path / "run").unlink()
    with Workdir(tmp_path / "disk", BASE) as work:
        assert work.is_resumed
    assert checkpoint.latest(tmp_path / "disk" / "rl") == 1


@pytest.mark.fault(48, "bucket")
@pytest.mark.parametrize("url", ["gs://bucket/run", "s3://bucket/run"])
def test_a_bucket_is_refused_with_a_remedy(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    for opened in (Workdir, check_workdir):
        with pytest.raises(ValueError, match="is a URL; mount the bucket"):
            opened(url, BASE)
    assert not any(tmp_path.iterdir())


@pytest.mark.fault(48, "signs of patterns")
@pytest.mark.parametrize("name", ["a[x]b", "a*", "a?", "a\\b"])
def test_a_name_that_is_a_pattern_is_refused_before_anything_is_saved(tmp_path, name):
    """Orbax saves below "a[x]b" without an error, but cannot find the files again."""
    for opened in (Workdir, check_workdir):
        with pytest.raises(ValueError, match="checkpoints below it could not be read"):
            opened(tmp_path / name, BASE)
    with pytest.raises(ValueError, match="could not be read back"):
        checkpoint.save(tmp_path / name, 1, {"w": jnp.ones(3)}, {}, keep=1)
    assert not any(tmp_path.iterdir())


@pytest.mark.fault(86, "path of no encoding")
def test_a_name_that_is_not_utf_8_is_refused(tmp_path):
    """Tensorstore, which writes checkpoints, accepts only UTF-8."""
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/run\xff")
    with pytest.raises(ValueError, match="encoding"):
        check_workdir(folder, BASE)


@pytest.mark.fault(86, "home in a path")
def test_paths_of_data_may_start_with_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    jsonl(tmp_path, [GOOD], "questions.jsonl")
    jsonl(tmp_path, [{"id": "a", "contents": "a\nb"}], "corpus.jsonl")
    questions, _ = load_questions("~/questions.jsonl")
    corpus = Corpus("~/corpus.jsonl", cache="~/cache")
    assert (len(questions), len(corpus)) == (1, 1)
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.fault(86, "python without asserts", "umask")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["-O", "-OO", "umask"])
def test_a_run_succeeds_without_asserts_and_with_a_private_umask(tmp_path, how):
    umask = os.umask(0o077 if how == "umask" else 0o022)
    try:
        words = arguments(tmp_path / "run", sft__steps=2, rl__steps=1)
        flag = [how] if how != "umask" else []
        done = run_python(*flag, "-m", "rsearch.train", *words)
    finally:
        os.umask(umask)
    assert done.returncode == 0, done.stderr
