"""Tables on the embedded world: how each row is made, and which results are missing."""

import csv
import dataclasses
import functools
import json
import pathlib
import time

import pytest

from rsearch import tables
from rsearch.config.recipes import apply_overrides, load, run_command, to_json
from rsearch.evaluation.statistics import wilson_interval
from rsearch.evaluation.tables import PaperColumn, find_row, read_tables
from rsearch.plan.tiny_tables import cell_of, job_of, run_of, tiny_runs, tiny_table
from rsearch.runtime.run_directory import RunDirectory
from tests.test_compare import make, row

TABLES = read_tables()
RL = "search_r1_tiny"


@functools.cache
def tiny_of(name):
    return tiny_table(name, TABLES[name])


def test_every_runnable_row_has_a_recipe_or_a_method():
    runs = tiny_runs([*map(tiny_of, TABLES)])
    assert len({run.name for run in runs}) == len(runs)
    for rows in runs.values():
        assert all(r.tiny.model.startswith("world:") for r in rows)
    for name in TABLES:
        for tiny in tiny_of(name).rows:
            assert tiny.is_runnable == bool(tiny.recipe or tiny.method), tiny
            if tiny.recipe:
                config = apply_overrides(load(tiny.recipe), tiny.settings)
                assert tiny.stage in config.stages, tiny


@pytest.mark.parametrize(
    ("table", "key", "recipe"),
    [
        ("rag_r1:3", "search_r1", "configs/search_r1.py:tiny"),
        ("rag_r1:3", "mq", "configs/rag_r1.py:tiny"),
        ("rag_r1:3", "sq", "configs/rag_r1.py:tiny,sq"),
        ("r_search:2", "search_r1_3b", "configs/search_r1.py:tiny,grpo"),
        ("r_search:4", "ppo_3b", "configs/r_search.py:tiny,ppo"),
        ("r1_searcher:6", "difficult", "configs/r1_searcher.py:tiny,select"),
        ("r_search:3", "no_evidence_3b", "configs/r_search.py:tiny,no_evidence"),
    ],
)
def test_a_recipe_names_no_variant_that_changes_nothing(table, key, recipe):
    tiny = find_row(tiny_of(table), key)
    assert (tiny.recipe, tiny.tiny.model) == (recipe, "world:base")


@pytest.mark.parametrize(
    ("table", "key", "model"),
    [
        ("rag_r1:3", "rag", "world:base"),
        ("rearag:1", "rag_9b", "world:base"),
        ("rearag:1", "rag_qwq", "world:expert"),  # it makes the chains
        ("rearag:1", "rag_32b", "world:expert"),  # it writes the observations
        ("r_search:fig2", "evidence_llama", "world:judge"),
        ("r1_searcher:2", "rag_gpt", ""),
        ("r1_searcher:2", "marco_o1", ""),
        ("r1_searcher:2", "rearter_llama", ""),
        ("rearag:1", "searchain", ""),
        ("r1_searcher:fig6", "online", ""),
        ("r1_searcher:7", "hotpotqa", ""),
    ],
)
def test_a_method_runs_on_the_tiny_model_that_replaces_its_own(table, key, model):
    tiny = find_row(tiny_of(table), key)
    assert tiny.tiny.model == model if model else tiny.reason


def test_rows_of_several_tables_share_their_runs():
    names = [r.name for r in tiny_runs([tiny_of("rag_r1:3"), tiny_of("rag_r1:5")])]
    assert names.count("rag_r1_tiny") == 1 and len(names) == 5
    (run,) = tiny_runs([tiny_of("r_search:fig2")], ["seed=1"])
    assert (run.name, run.settings) == ("r_search_tiny-seed=1", ("seed=1",))


def words(job):
    """Return [(module, {argument: value}, number of words)] of the commands."""
    return [
        (c[2], dict(w.partition("=")[::2] for w in c[3:]), len(c)) for c in job.commands
    ]


def test_only_missing_results_are_computed(tmp_path):
    runs = tiny_runs([tiny_of("rag_r1:3"), tiny_of("rag_r1:5")])
    (run,) = (r for r in runs if r.name == RL)
    rows, folder = runs[run], tmp_path / RL
    (train, asks) = words(job_of(run, rows, folder, 0))
    assert train[0] == "rsearch.train" and train[1]["--workdir"] == str(folder)
    assert train[1]["--config"] == "configs/search_r1.py:tiny"
    assert asks[0] == "rsearch.evaluate" and asks[1]["--methods"] == "protocol"
    assert asks[1]["--config.rollout.max_concurrent"] == "1"
    make(folder, row(dataset="world:dev"))
    (asks_alone,) = words(job_of(run, rows, folder, 0))
    assert asks_alone == asks
    assert len(job_of(run, rows, folder, 20).commands) == 2  # for fewer questions
    alone = row(dataset="world:dev", setting="rollout.max_concurrent=1")
    make(tmp_path / "over", row(dataset="world:dev"), alone)
    assert job_of(run, rows, tmp_path / "over", 0).commands == ()


def test_a_setting_names_what_differs_from_the_run(tmp_path):
    tiny = find_row(tiny_of("rag_r1:5"), "search_r1")
    run, folder = run_of(tiny), tmp_path / "run"
    texts = ("rollout.max_searches=3", "retrieval.top_k=2", "rollout.max_concurrent=64")
    rows = [dataclasses.replace(tiny, asking=texts)]
    setting = "retrieval.top_k=2, rollout.max_searches=3"
    protocol = row(dataset="world:dev")
    make(folder, protocol, {**protocol, "setting": setting})
    assert job_of(run, rows, folder, 0).commands == ()
    make(tmp_path / "other", protocol)
    assert len(job_of(run, rows, tmp_path / "other", 0).commands) == 1


def test_labels_of_learned_methods_are_made_first(tmp_path):
    table = tiny_of("r1_searcher:2")
    rows = [find_row(table, f"{n}_llama") for n in ("direct", "skr", "recomp")]
    run, folder = run_of(rows[0]), tmp_path / "world_base"
    made = words(job_of(run, rows, folder, 0))
    assert [about.get("--methods", "").split(":")[0] for _, about, _ in made] == [
        *("direct", "direct,rag,ircot", "skr", "", "recomp_extractive")
    ]
    assert [about.get("--sets") for _, about, _ in made][1::2] == ["world:train"] * 2
    assert {about["--model"] for _, about, _ in made} == {"world:base"}
    done = [
        row("world:base", method, "world:train[:200]")
        for method in ("direct", "rag", "ircot")
    ]
    skr = row("world:base", f"skr:labels={folder}/transcripts.jsonl", "world:dev")
    make(folder, *done, skr, row("world:base", "direct", "world:dev"))
    pathlib.Path(f"{folder}-sentences.jsonl").write_text("{}\n")
    (left,) = words(job_of(run, rows, folder, 0))
    assert left[1]["--methods"].startswith("recomp_extractive:labels=")


@pytest.fixture
def said(capsys):
    """Return a function that runs the command: (exit code, stdout, stderr)."""

    def run(*argv):
        code = run_command(tables.main, [*map(str, argv)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_finished_runs_are_shown_next_to_the_papers_numbers(
    said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    kinds = {"bridge": {"n": 40, "em": 0.25, "f1": 0.5, "searches": 2.0}}
    of_world = {"dataset": "world:dev", "by_kind": kinds, "seconds": 100.0}
    for name, em in (("r_search_tiny", 0.5), ("r_search_tiny_ppo", 0.75)):
        make(tmp_path / "t" / name, row(em=em, **of_world), name=name)
    argv = ["r_search:7", "--size=tiny", "--workdir=t"]
    code, _, err = said(*argv, "--out=out.csv")
    assert code == 0 and "2 are over" in err
    with open("out.csv") as file:
        lines = [*csv.DictReader(file)]
    ours = {(x["row"], x["column"]): x for x in lines if x["ours"]}
    assert {key for key, _ in ours} == {"ppo_3b", "grpo_3b", "ppo_7b", "grpo_7b"}
    cell = ours["grpo_7b", "all EM"]
    assert (cell["ours"], cell["low"], cell["n"]) == ("50.0", "43.21", "200")
    assert "grpo_3b" in cell["note"] and not ours["grpo_3b", "all EM"]["note"]
    cell = ours["ppo_3b", "bridge EM"]
    assert (cell["ours"], cell["n"]) == ("25.0", "40") and float(cell["low"]) > 14
    assert ours["ppo_3b", "bridge F1"]["low"] == ""
    assert ours["ppo_3b", "all seconds"]["ours"] == "0.5"
    assert not any(column.startswith("HotpotQA") for _, column in ours)
    code, out, _ = said(*argv, "--dry_run")
    assert code == 0 and out.count("is over") == 2


def test_a_run_in_another_directory_is_not_trained_again(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipes = {"a": "configs/r_search.py:tiny,grpo", "b": "configs/r_search.py:tiny"}
    for name, recipe in recipes.items():
        config = json.loads(to_json(load(recipe)))
        config |= {"seed": int(name == "b"), "name": name}
        make(tmp_path / name, row(dataset="world:dev"), **config)
    argv = ["r_search:4", "--size=tiny", "--runs=a,b", "--dry_run"]
    code, out, _ = said(*argv)
    lines = {x.split()[1]: x for x in out.splitlines() if "r_search_tiny" in x}
    assert code == 0 and "is over" in lines["r_search_tiny"]
    assert "is over" not in lines["r_search_tiny_ppo"]
    assert "is over" not in said(*argv, "--max_questions=9")[1]
    assert "is over" not in said(*argv, "--config.rl.steps=3")[1]


def test_a_run_that_another_process_holds_is_waited_for(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("r_search_tiny", "r_search_tiny_ppo"):
        make(tmp_path / "t" / name, row(dataset="world:dev"))
    other = RunDirectory(tmp_path / "t" / name)
    monkeypatch.setattr(time, "sleep", lambda _: other.close())
    code, _, err = said("r_search:4", "--size=tiny", "--workdir=t", "--out=x.csv")
    assert code == 0 and "2 are over" in err and name in err.split("2 parts")[0]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--size=small"], "--size=small"),
        (["--workdir=x"], "--workdir=x"),
        (["--at_once=2"], "--at_once=2"),
        (["--config.seed=1"], "--config.seed=1"),
        (["--size=tiny", "--at_once=0"], "--at_once=0"),
        (["--size=tiny", "--runs=x"], "x: not there"),
        (["--size=tiny", "--topology=v5p-8"], "--topology=v5p-8"),
        (["--size=tiny", "--dry_run", "--out=x.md"], "--out=x.md"),
        (["--size=tiny", "--config.seed"], "--config.seed"),
        (["--size=tiny", "--config.eval.draw_seed=1"], "--config.eval.draw_seed=1"),
        (["--size=tiny", "--config.data.dev=world:single"], "--max_questions=N"),
        (["--size=tiny", "--config.rl.lrr=1"], "rl.lrr"),
        (["--size=tiny", "--config.rl.lr=-1"], "rl.lr"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(said, argv, named):
    code, out, err = said("rag_r1:3", *argv)
    assert (code, out) == (2, "") and named in err and err.count("\n") == 1


def test_runs_of_several_tables_are_refused(said):
    code, _, err = said("rag_r1:3,rag_r1:4", "--runs=x")
    assert code == 2 and "--runs=x" in err


def test_a_kinds_mean_over_samples_has_no_interval_of_a_proportion():
    kind = {"n": 5, "em": 0.35}
    column = PaperColumn("single EM", "em", "world:single")
    row = {"n": 5, "by_kind": {"single": kind | {"em": 0.4}}}
    assert cell_of(row, column) == (0.4, wilson_interval(2, 5), 5)
    sampled = {"n": 5, "rollouts": 20, "by_kind": {"single": kind}}
    assert cell_of(sampled, column) == (0.35, None, 5)
