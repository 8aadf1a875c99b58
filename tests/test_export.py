"""rsearch.export: a run's policy leaves it as it is."""

import shutil

import jax
import numpy as np
import pytest

from rsearch import export
from rsearch.config.recipes import run_command
from rsearch.models.hf import checkpoint as huggingface
from rsearch.models.hf.families import read_spec
from rsearch.models.tokenizer import load_tokenizer
from rsearch.setup.weights import initial_params, trained_params
from tests.small_run import arguments, config, finished, load_setup, quick_compilation

__all__ = ["quick_compilation"]


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(finished(), tmp_path / "run")


def test_the_exported_policy_is_the_trained_one(run, tmp_path):
    out = tmp_path / "model"
    assert run_command(export.main, [*arguments(run), f"--out={out}"]) == 0
    setup = load_setup(config())
    _, _, params = trained_params(setup, run)
    assert read_spec(out) == setup.model.spec
    loaded = huggingface.load_params(out, setup.model.spec)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    start = initial_params(setup)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), loaded, start)
    assert not all(jax.tree.leaves(same))
    assert load_tokenizer(out).fingerprint == setup.tokenizer.fingerprint


def test_nothing_of_the_users_is_overwritten(run, tmp_path, capsys):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years")
    command = [*arguments(run), f"--out={tmp_path / 'thesis'}"]
    assert run_command(export.main, command) == 2
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["thesis.tex"]
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--dtype=float64"], "--dtype=float64: must be one of"),
        (["--workdir=/nowhere/at/all"], "not a workdir"),
        (["--config.seed=9"], "config.seed"),
    ],
)
def test_what_cannot_be_exported_ends_with_one_line(
    run, tmp_path, capsys, given, message
):
    out = tmp_path / "model"
    command = [*arguments(run), f"--out={out}", *given]
    assert run_command(export.main, command) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told
    assert not out.exists()
