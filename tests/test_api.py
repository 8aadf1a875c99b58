"""The public API: loading a policy, running rollouts, scoring them."""

import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

import rsearch
from rsearch import export, train
from rsearch.evaluation.results import read_transcripts
from rsearch.models.hf import checkpoint as huggingface
from rsearch.protocols.table import PROTOCOLS
from rsearch.serving.exported import FILE as EXPORT_FILE
from rsearch.setup.load import load_setup
from rsearch.setup.weights import initial_params
from rsearch.tools.search import search_call
from rsearch.types import Source
from tests.rewards.play import play
from tests.small_run import ROOT, config, finished, quick_compilation

__all__ = ["quick_compilation"]
FIND = [rsearch.Passage("p1", "Title\nThe text that was found.")]
# A protocol that parses every turn as a search.
EAGER = dataclasses.replace(
    PROTOCOLS["search_r1"], name="eager", parse=lambda turn: search_call("x")
)


def find(queries):
    """Stand in for a user's search function: the same passage for every query."""
    return [FIND for _ in queries]


def test_the_package_imports_nothing_before_it_is_used():
    check = (
        "import sys, rsearch; names = dir(rsearch);"
        "loaded = {'jax', 'numpy', 'ml_collections'} & {*sys.modules};"
        "assert not loaded, loaded; assert {*rsearch.__all__} <= {*names}"
    )
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True, timeout=60)


def test_every_name_can_be_imported_and_commands_stay_modules():
    assert all(getattr(rsearch, name) is not None for name in rsearch.__all__)
    assert rsearch.train is train and rsearch.run_training is train.main
    with pytest.raises(AttributeError, match="no_such_name"):
        rsearch.no_such_name  # noqa: B018


def test_a_loaded_run_answers_with_its_last_weights(monkeypatch):
    monkeypatch.setenv("HOME", str(finished().parent))
    name = finished().name
    policy = rsearch.load_policy(f"~/{name}", search=find, max_concurrent=4)
    assert policy.name == name
    questions = load_setup(config(), only_dev=True).dev
    scores, rollouts = rsearch.run_evaluation(policy.rollout, questions)
    assert scores["n"] == len(rollouts) == len(questions) and 0 <= scores["em"] <= 1
    rows = [
        row
        for row in read_transcripts(finished())
        if (row["stage"], row["method"]) == ("rl", "protocol")
    ]
    # This policy answers without a search, so other search results change nothing.
    for row, rollout in zip(rows, rollouts, strict=True):
        expected = "".join(segment["text"] for segment in row["segments"])
        assert "".join(segment.text for segment in rollout.segments) == expected
    assert policy(questions[0].text)["answer"] == rollouts[0].answer
    assert policy.rollout([]) == []
    with pytest.raises(ValueError, match="no questions"):
        rsearch.run_evaluation(policy.rollout, [])
    for wrong in (None, questions[0], {"question": "Who?"}, b"Who?"):
        with pytest.raises(ValueError, match="a question must be text"):
            policy.rollout(wrong)


def test_evaluation_names_arguments_of_another_type():
    question = rsearch.Question("1", "Who?", ("x",))
    rollout = play(PROTOCOLS["search_r1"], ["<answer> x </answer>"])
    results = {"ok": [rollout], "dict": [{"answer": "x"}], "short": []}
    _, rollouts = rsearch.run_evaluation(lambda _: results["ok"], iter([question]))
    assert rollouts == [rollout]
    for name, message in (("dict", "roll_out.*'x'"), ("short", "0 rollouts for 1")):
        with pytest.raises(ValueError, match=message):
            rsearch.run_evaluation(lambda _, name=name: results[name], [question])
    with pytest.raises(ValueError, match=r"questions: .*'Who'"):
        rsearch.run_evaluation(lambda _: results["ok"], ["Who"])
    for golden in ((), ("x"), (1,), None):  # ("x") without a comma is a text
        question = rsearch.Question("q7", "Who?", golden)
        with pytest.raises(ValueError, match="'q7': golden_answers = "):
            rsearch.run_evaluation(lambda _: results["ok"], [question])


def test_a_run_without_a_checkpoint_and_a_config_of_another_type_are_refused(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished(), folder)
    for stage in ("sft", "rl"):
        shutil.rmtree(folder / stage / "checkpoints")
    with pytest.raises(ValueError, match=rf"{folder}: no stage has a checkpoint"):
        rsearch.load_policy(folder, search=find)
    with pytest.raises(ValueError, match=r"rsearch\.export"):
        rsearch.load_policy(folder, config=config())
    for wrong in (3, {"config": 3}):
        with pytest.raises(ValueError, match="config = 3"):
            rsearch.load_policy(tmp_path, config=wrong)


def test_a_run_is_loaded_with_the_writer_that_one_of_its_stages_trained(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished(), folder)
    saved = json.loads((folder / "config.json").read_text())
    writer = {"source": "stage:sft", "max_prompt_tokens": 96, "max_reply_tokens": 8}
    saved["config"]["models"]["writer"] |= writer
    saved["config"]["protocol"]["name"] = "tests.test_api:EAGER"
    (folder / "config.json").write_text(json.dumps(saved))
    policy = rsearch.load_policy(folder, search=find, max_concurrent=4)
    rollout = policy.rollout("Who?")
    assert rollout.searches and "p1" in rollout.passages[0].id
    assert FIND[0].contents not in rollout.passages[0].contents


def test_an_export_must_search_what_it_was_trained_with(tmp_path):
    folder = tmp_path / "model"
    export.main([f"--workdir={finished()}", f"--out={folder}"])
    assert rsearch.load_policy(folder).name == "model"
    described = json.loads((folder / EXPORT_FILE).read_text())
    described["inputs"]["retrieval"] = "index other"
    (folder / EXPORT_FILE).write_text(json.dumps(described))
    with pytest.raises(ValueError, match=rf"{folder}.*'index other'"):
        rsearch.load_policy(folder)
    assert rsearch.load_policy(folder, search=find).name == "model"


def test_a_run_must_search_what_it_was_trained_with(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished(), folder)
    saved = json.loads((folder / "config.json").read_text())
    own = {"rl.retrieval": saved["inputs"]["retrieval"]}  # what its last stage searched
    saved["inputs"]["retrieval"] = "index other"
    (folder / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=rf"{folder}: retrieval .*index other.*search"):
        rsearch.load_policy(folder)
    rsearch.load_policy(folder, search=find)
    saved["inputs"] |= own
    (folder / "config.json").write_text(json.dumps(saved))
    rsearch.load_policy(folder)


def test_a_model_searches_with_the_users_function(tmp_path, monkeypatch):
    recipe = config(protocol__name="tests.test_api:EAGER")
    setup = load_setup(config(), only_dev=True)
    folder = tmp_path / "model"
    huggingface.export(folder, initial_params(setup), setup.model.spec, setup.tokenizer)
    with pytest.raises(ValueError, match=f"{folder}.*config="):
        rsearch.load_policy(folder)
    with pytest.raises(ValueError, match="search = 3"):
        rsearch.load_policy(folder, config=recipe, search=3)
    model = rsearch.load_policy(folder, config=recipe, search=find, max_concurrent=4)
    rollout = model.rollout(setup.dev[0].text)
    assert len(rollout.searches) == recipe.rollout.max_searches
    assert rollout.passages == (FIND[0],) * len(rollout.searches)
    written = [s for s in rollout.segments if s.source == Source.POLICY]
    assert written and all(np.all(s.logp <= 0) for s in written)
    monkeypatch.setattr(sys.modules[__name__], "FIND", ["text"])
    with pytest.raises(ValueError, match="search returned 'text'"):
        model.rollout(setup.dev[0].text)
