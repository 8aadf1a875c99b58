"""rsearch.export writes a run's policy unchanged."""

import json
import shutil

import jax
import numpy as np
import pytest

from rsearch import export, tool
from rsearch.config.recipes import run_command
from rsearch.models.hf import checkpoint as huggingface
from rsearch.models.hf.families import read_spec
from rsearch.models.tokenizer import load_tokenizer
from rsearch.serving.exported import export_files
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


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The directory of a policy exported with its run's configuration."""
    out = tmp_path_factory.mktemp("exported") / "policy"
    run = shutil.copytree(finished(), out.with_name("run"))
    assert run_command(export.main, [f"--workdir={run}", f"--out={out}"]) == 0
    return out


def test_an_export_records_how_it_was_trained(exported):
    setup = load_setup(config())
    body = json.loads((exported / "rsearch.json").read_text())
    assert (body["stage"], body["step"]) == ("rl", 3)
    assert body["inputs"]["retrieval"] == setup.inputs["retrieval"]
    assert body["config"]["protocol"]["name"] == config().protocol.name
    assert {row["method"] for row in body["evaluation"]} == {"protocol"}
    generation = json.loads((exported / "generation_config.json").read_text())
    assert generation["stop_strings"] == list(setup.protocol.stop_strings)
    assert generation["max_length"] == body["max_context"] == setup.num_tokens
    assert generation["eos_token_id"] == setup.tokenizer.eos_ids[0]
    card = (exported / "README.md").read_text()
    assert config().protocol.name in card and "| em |" in card
    huggingface.check_export(exported)


def test_a_model_cards_command_names_any_directory(exported):
    described = json.loads((exported / "rsearch.json").read_text())
    card = export_files(described, {}, "my policy")["README.md"]
    assert "rsearch serve --model='my policy'" in card


def test_a_model_card_names_the_setting_of_its_rows(exported):
    described = json.loads((exported / "rsearch.json").read_text())
    plain, changed = described["evaluation"][0], "rollout.max_searches=2, eval.x=a|b"
    for settings in (("",), ("", changed)):
        described["evaluation"] = [plain | {"setting": text} for text in settings]
        card = export_files(described, {}, "policy")["README.md"]
        assert (changed.replace("|", r"\|") in card) == (changed in settings)
        assert ("| setting |" in card) == (changed in settings)
        table = [line for line in card.splitlines() if plain["dataset"] in line]
        assert len(table) == len(settings)


def test_a_run_in_the_place_of_its_export_is_refused(capsys):
    folder = finished()
    assert run_command(tool.main, [f"--model={folder}", "--question=Who?"]) == 2
    message = capsys.readouterr().err
    assert f"rsearch.export --workdir={folder}" in message


def test_an_export_is_served_with_the_settings_it_was_trained_with(exported, capsys):
    assert run_command(tool.main, [f"--model={exported}", "--print_config"]) == 0
    printed = capsys.readouterr().out
    trained = config()
    for name in ("protocol.name", "rollout.max_turn_tokens", "retrieval.top_k"):
        assert f"config.{name} = {trained[name]!r}\n" in printed


@pytest.mark.parametrize(
    ("words", "field", "accept"),
    [
        (["--config=configs/r_search.py:tiny"], "config.protocol.name", "recipe"),
        (["--protocol=r_search"], "config.protocol.name", "recipe"),
        (["--config.seed=9", "--question=Who?"], "memory:", "retrieval"),
        (
            ["--config.seed=9", "--config.retrieval.top_k=2", "--question=Who?"],
            *("memory:", "retrieval"),
        ),
        (["--accept=all"], "--accept=all", "recipe"),
    ],
)
def test_another_recipe_or_retrieval_is_refused(exported, capsys, words, field, accept):
    assert run_command(tool.main, [f"--model={exported}", *words]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert field in line and accept in line


@pytest.mark.parametrize(
    "words",
    [
        ["--config=configs/r_search.py:tiny", "--accept=recipe"],
        ["--config.rollout.max_searches=1"],
    ],
)
def test_another_recipe_may_be_accepted_and_a_field_may_be_set(exported, capsys, words):
    argv = [f"--model={exported}", *words, "--print_config"]
    assert run_command(tool.main, argv) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not what rsearch.export writes"),
        ("[]", "not what rsearch.export writes"),
        ('{"format": 1, "config": {}}', "not what rsearch.export writes"),
        (
            '{"format": 9, "config": {"stages": []}, "inputs": {"retrieval": "x"}}',
            "format 9, this program reads 1",
        ),
    ],
)
def test_a_damaged_description_is_refused(tmp_path, capsys, text, message):
    (tmp_path / "rsearch.json").write_text(text)
    assert run_command(tool.main, [f"--model={tmp_path}"]) == 2
    assert f"{tmp_path}/rsearch.json: {message}" in capsys.readouterr().err


def test_a_folder_with_the_users_files_is_not_overwritten(run, tmp_path, capsys):
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
def test_a_failed_export_prints_one_line_and_writes_nothing(
    run, tmp_path, capsys, given, message
):
    out = tmp_path / "model"
    command = [*arguments(run), f"--out={out}", *given]
    assert run_command(export.main, command) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told
    assert not out.exists()


def test_an_export_does_not_need_the_retrieval_service(run, tmp_path):
    file = run / "config.json"
    record = json.loads(file.read_text())
    record["config"]["retrieval"]["url"] = "http://127.0.0.1:9"  # no one listens
    record["inputs"]["retrieval"] = "service search_r1"
    file.write_text(json.dumps(record))
    out = tmp_path / "model"
    assert run_command(export.main, [f"--workdir={run}", f"--out={out}"]) == 0
    assert json.loads((out / "rsearch.json").read_text())["step"] == 3


def test_a_model_exported_to_the_working_directory_has_its_name(
    run, tmp_path, monkeypatch
):
    (tmp_path / "policy").mkdir()
    monkeypatch.chdir(tmp_path / "policy")
    assert run_command(export.main, [f"--workdir={run}", "--out=."]) == 0
    card = (tmp_path / "policy" / "README.md").read_text()
    assert "# policy\n" in card and "--model=policy" in card
