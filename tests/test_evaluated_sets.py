"""rsearch.evaluate: sets of config.sets and the settings of their rows."""

import json
import pathlib
import shutil

import pytest

from rsearch.config.recipes import run_command
from rsearch.corpus import main as write_corpus
from rsearch.evaluate import main as evaluate
from rsearch.evaluation import evaluator, results
from rsearch.index import main as build_index
from tests.methods.test_adaptive import write_labels
from tests.small_run import finished, one_device, quick_compilation

__all__ = ["one_device", "quick_compilation"]
pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def copy(tmp_path):
    return pathlib.Path(shutil.copytree(finished(), tmp_path / "run"))


def test_rows_of_a_set_that_is_defined_in_another_way_are_kept(copy):
    """A set has no setting if the run's own configuration defines it like this."""

    def define(top_k, dev):
        return {"short": {"data": {"dev": dev}, "retrieval": {"top_k": top_k}}}

    run = json.loads((copy / "config.json").read_text())
    run["config"]["sets"] = define(1, "world:dev")
    (copy / "config.json").write_text(json.dumps(run))
    asked = [f"--workdir={copy}", "--sets=short", "--methods=rag"]
    asked += ["--config.eval.max_questions=1"]
    for definition in ((1, "world:dev"), (2, "world:dev"), (2, "world:bridge")):
        assert (
            run_command(evaluate, [*asked, f"--config.sets={define(*definition)}"]) == 0
        )
    # The set's own number of passages counts.
    assert run_command(evaluate, [*asked, "--config.retrieval.top_k=2"]) == 0
    rows = [r for r in results.read_results(copy) if r["dataset"] == "short[:1]"]
    assert [(r["setting"], r["documents"]) for r in rows] == [
        ("retrieval.top_k=2", 2),
        ("data.dev=world:bridge, retrieval.top_k=2", 2),
        ("", 1),
    ]


def test_a_run_trained_on_the_world_is_evaluated_on_files(copy, tmp_path):
    """Training questions and demonstrations are not looked for in the files' corpus."""
    corpus, questions = tmp_path / "corpus.jsonl", tmp_path / "dev.jsonl"
    recipe = "world:configs/quickstart.py"
    assert run_command(write_corpus, [recipe, f"--out={corpus}"]) == 0
    title = json.loads(corpus.read_text().splitlines()[0])["contents"].splitlines()[0]
    question = {"id": "q", "question": f"Who made {title}?", "golden_answers": ["x"]}
    questions.write_text(json.dumps(question) + "\n")
    flags = [f"--corpus={corpus}", "--encoder=hashed", f"--out={tmp_path / 'index'}"]
    assert run_command(build_index, flags) == 0
    settings = {
        "data": {"dev": str(questions)},
        "retrieval": {"index": str(tmp_path / "index")},
    }
    asked = [f"--workdir={copy}", "--methods=rag", "--sets=files,world:bridge"]
    asked += ["--config.eval.max_questions=1", f"--config.sets={ {'files': settings} }"]
    assert run_command(evaluate, asked) == 0
    first, second = results.read_results(copy)[-2:]
    assert (first["dataset"], first["n"]) == ("files[:1]", 1)
    assert first["made_by"]["retrieval"] != second["made_by"]["retrieval"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--methods=direct,iter_retgen:rounds=0"], "rounds = 0: must be at least 1"),
        (["--methods=direct,rag:top_k=9"], "'rag:top_k=9': a method asks for 9"),
        (["--methods=skr:labels={}", "--sets=world:bridge,other"], "has no encoder"),
    ],
)
def test_a_wrong_setting_is_refused_before_any_method_is_evaluated(
    copy, capsys, flags, message
):
    engine = {"retrieval": {"engine": "tests.rollout.scripted:find"}}
    labels = write_labels(copy / "labels.jsonl", ("Who is X?", "rag"))
    asked = [f"--workdir={copy}", f"--config.sets={ {'other': engine} }"]
    before = results.read_results(copy)
    assert run_command(evaluate, [*asked, *(f.format(labels) for f in flags)]) == 2
    assert message in capsys.readouterr().err
    assert results.read_results(copy) == before


@pytest.mark.parametrize(
    ("settings", "flag", "message"),
    [
        (
            {"model": {"dtype": "bfloat16"}},
            "--methods=direct",
            "config.sets.a.model.dtype = 'bfloat16'",
        ),
        ({"seed": 1}, "--methods=direct", "config.sets.a.seed = 1"),
        (
            {"eval": {"methods": "rag"}},
            "--methods=direct",
            "config.sets.a.eval.methods = ['rag'] and --methods",
        ),
        (
            {"eval": {"methods": "rag"}},
            "--label_sentences=labels",
            "config.sets.a.eval.methods = ['rag'] and --label_sentences",
        ),
    ],
)
def test_what_a_set_may_not_change_is_refused(
    copy, capsys, monkeypatch, settings, flag, message
):
    monkeypatch.setattr("rsearch.evaluate.load_setup", lambda *a, **k: 1 / 0)
    asked = [f"--workdir={copy}", flag, "--sets=a"]
    assert run_command(evaluate, [*asked, f"--config.sets={ {'a': settings} }"]) == 2
    assert message in capsys.readouterr().err


def test_a_row_names_the_seed_that_drew_its_questions(copy):
    asked = [f"--workdir={copy}", "--methods=rag", "--sets=world:bridge"]
    asked += ["--config.eval.max_questions=3", "--config.eval.draw_seed=0"]
    assert run_command(evaluate, asked) == 0
    row = results.read_results(copy)[-1]
    assert (row["dataset"], row["n"]) == ("world:bridge[:3 by seed 0]", 3)
    assert row["setting"] == ""


@pytest.mark.parametrize("flag", ["--methods=direct", "--label_sentences={}/labels"])
def test_an_evaluation_killed_at_its_second_set_keeps_the_answers_of_the_first(
    copy, monkeypatch, flag
):
    num_reused = []

    def run_program(program, questions, *, cache, **settings):
        if dies and num_reused:
            raise RuntimeError("killed")
        groups = original(program, questions, cache=cache, **settings)
        num_reused.append(cache.num_reused)
        return groups

    original = evaluator.run_program
    monkeypatch.setattr(evaluator, "run_program", run_program)
    asked = [f"--workdir={copy}", "--sets=world:bridge,world:train"]
    asked += [flag.format(copy), "--config.eval.max_questions=2"]
    dies = True
    with pytest.raises(RuntimeError, match="killed"):
        evaluate(asked)
    dies = False
    assert evaluate(asked) == 0
    assert num_reused == [0, 2, 0]
    assert not list(copy.glob("*.journal"))
