"""The evaluator: samples of several seeds, and questions that cannot be asked."""

import errno
import json

import pytest

from rsearch.config.recipes import is_user_error
from rsearch.evaluation.evaluator import Evaluator
from rsearch.evaluation.results import read_results, show_results
from rsearch.rollout.records import encode_groups
from rsearch.runtime import console, files
from rsearch.runtime.journal import AppendLog
from rsearch.setup.load import load_setup
from rsearch.setup.stages import evaluation_parts
from rsearch.setup.weights import initial_params
from rsearch.types import Group
from tests.evaluation.test_scoring import GROUPS
from tests.methods.scripted import ScriptedModel
from tests.small_run import config, quick_compilation

__all__ = ["quick_compilation"]


class Answered:
    """A model that is never called, since all answers are in the journal."""

    num_rows = 1

    def load(self, params):
        del params

    def on_any_host(self, value):
        assert not value
        return False


def test_a_sampled_evaluation_is_means_over_samples_of_each_seed(tmp_path, capsys):
    """A killed one resumes where it stopped; a seed's samples are always the same."""
    drawn = {"eval__temperature": 2.0, "eval__methods": ("protocol", "direct")}
    drawn |= {"rollout__max_turn_tokens": 4, "seed": 3}
    setups = [
        load_setup(config(**drawn, eval__samples=2, eval__seeds=n), only_dev=True)
        for n in (1, 2)
    ]
    params = initial_params(setups[0])
    one, two = map(evaluation_parts, setups)
    engine, model = one["make_engine"](), one["make_model"]()
    engines = {"make_engine": lambda: engine, "make_model": lambda: model}
    num_reused = []

    def resumed(*args, rollout_cache, **settings):
        groups = engine(*args, rollout_cache=rollout_cache, **settings)
        num_reused.append(rollout_cache.num_reused)
        return groups

    resumed.place_params = engine.place_params
    answered = {"make_engine": lambda: resumed, "make_model": lambda: Answered()}
    journal = AppendLog(tmp_path, "answers")
    for method in drawn["eval__methods"]:
        first, of_one = Evaluator(**one | engines)(params, method)
        evaluator = Evaluator(**two | engines)
        row, groups = evaluator(params, method, digest="d", journal=journal)
        assert (first["n"], first["rollouts"]) == (6, 12) and "em_sd" not in first
        assert (row["n"], row["rollouts"], row["em_sd"]) == (6, 24, 0.0)
        assert row["made_by"]["sampling.seeds"] == [3, 4]
        halves = [Group(g.question, g.rollouts[:2]) for g in groups]
        assert encode_groups(halves) == encode_groups(of_one)
        # One of several hosts answers its share of the questions in the same way.
        share = one | engines | {"questions": setups[0].dev[1::2]}
        _, of_share = Evaluator(**share)(params, method)
        assert encode_groups(of_share) == encode_groups(of_one[1::2])
        texts = [[r.policy_texts for r in g.rollouts] for g in groups]
        assert all(len({*several}) > 2 for several in texts)
        evaluator = Evaluator(**two | answered)
        log = AppendLog(tmp_path, "answers")
        resumed_row, again = evaluator(params, method, digest="d", journal=log)
        assert encode_groups(again) == encode_groups(groups)
        # The time of the start that was killed counts, up to its last rollout.
        assert resumed_row["seconds"] > row["seconds"] / 2
        assert resumed_row["compile_seconds"] >= row["compile_seconds"] - 0.5
    assert num_reused == [12, 12]
    show_results([{"stage": "rl", **r} for r in (first, row)], config())
    assert "em_sd" in capsys.readouterr().out


def test_steps_are_labelled_with_samples_of_each_question(tmp_path):
    setup = load_setup(config(eval__temperature=1.0, seed=3), only_dev=True)
    right = {f"Question: {q.text}\n": q.golden_answers[0] for q in setup.dev}

    def reply(request):
        answers = [a for q, a in right.items() if q in request.prompt]
        return f" No.\nSo the final answer is: {answers[-1]}"

    model = ScriptedModel(reply)
    parts = evaluation_parts(setup) | {"make_model": lambda: model}
    rows = Evaluator(**parts).label(
        initial_params(setup),
        "label_steps",
        digest="d",
        journal=AppendLog(tmp_path, "label_steps"),
    )
    assert [row["question"] for row in rows] == [q.text for q in setup.dev]
    assert all(row["success"] == [1.0] for row in rows)
    draws = {request.draw for request in model.requests}
    assert len(draws) == len(setup.dev) and {seed for seed, *_ in draws} == {3}


def test_an_error_in_a_users_method_names_it_and_keeps_its_place(tmp_path, monkeypatch):
    file, name = tmp_path / "wrong_method.py", "wrong_method:count"
    file.write_text("def count(question, kit):\n    yield []\n    return int('x')\n")
    monkeypatch.syspath_prepend(tmp_path)
    setup = load_setup(config(eval__methods=(name,)), only_dev=True)
    parts = evaluation_parts(setup) | {"make_model": lambda: ScriptedModel(None)}
    with pytest.raises(ValueError, match=f"eval.methods = '{name}': invalid") as caught:
        Evaluator(**parts)(initial_params(setup), name)
    assert str(caught.traceback[-1].path) == str(file)
    assert not is_user_error(caught.value)  # a command prints the traceback


def test_a_search_that_failed_is_repeated_when_the_evaluation_resumes(tmp_path):
    setup = load_setup(config(eval__methods=("rag",)), only_dev=True)
    models = [ScriptedModel(lambda request: "Paris") for _ in range(2)]
    parts, params = evaluation_parts(setup), initial_params(setup)

    def fail_first(queries):
        return [None, *setup.search(queries)[1:]]

    failed_counts = []
    for model, search in zip(models, (fail_first, setup.search), strict=True):
        asked = parts | {"make_model": lambda model=model: model, "search": search}
        journal = AppendLog(tmp_path, "answers")
        row, _ = Evaluator(**asked)(params, "rag", digest="d", journal=journal)
        failed_counts.append(row["tool_error"])
    assert failed_counts == [1, 0]
    assert [len(m.requests) for m in models] == [len(setup.dev) - 1, 1]


@pytest.mark.fault(21, "full", "retried")
def test_results_wait_for_room_on_a_full_disk(tmp_path, monkeypatch, capsys):
    evaluator = Evaluator(**evaluation_parts(load_setup(config(), only_dev=True)))
    replace_file, refusals = files.replace, []

    def refuse_once(path, data):
        if len(refusals) < 2:
            refusals.append(path)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        replace_file(path, data)

    monkeypatch.setattr(files, "replace", refuse_once)
    monkeypatch.setattr(console, "RETRY_WAITS", (0.01, 0.01))
    row = {"stage": "rl", "method": "direct", "dataset": "dev"}
    assert evaluator.record(tmp_path, row, []) == read_results(tmp_path) == [row]
    assert capsys.readouterr().err.count("retrying") == len(refusals) == 2


class Reading:
    """An engine that answers every question that it receives."""

    def place_params(self, params):
        return params

    def __call__(self, params, questions, key, **settings):
        return [Group(q, GROUPS[0].rollouts) for q in questions]


@pytest.mark.fault(11, "left out and listed")
@pytest.mark.parametrize("drop_long", [False, True])
def test_prompts_that_do_not_fit_are_counted_and_refused_if_none_fits(
    tmp_path, drop_long
):
    asked = [{"question": "Who?", "golden_answers": ["x"]}]
    asked += [{"question": "Who " * 12, "golden_answers": ["x"]}]
    path, said = tmp_path / "dev.jsonl", []
    path.write_text("\n".join(map(json.dumps, asked)))
    settings = dict(rollout__max_prompt_tokens=20, eval__max_prompt_tokens=100)
    settings |= dict(eval__drop_long=drop_long)
    long = config(data__dev=str(path), **settings)
    setup = load_setup(long, only_dev=True, log=said.append)
    fate = "left out of dev: " if drop_long else "in dev, counts as wrong: "
    assert sum(line.startswith(fate) for line in said) == 1
    parts = evaluation_parts(setup) | {"make_engine": Reading}
    params, counts = initial_params(setup), ("n", "skipped", "too_long", "truncated")
    row, groups = Evaluator(**parts)(params, "protocol")
    expected = (1, 1, 0, 0) if drop_long else (2, 0, 1, 1)
    assert tuple(row[name] for name in counts) == expected
    (last, *_) = groups[-1].rollouts
    assert last.answer == ("Paris" if drop_long else None)
    evaluator = Evaluator(**parts)
    row, groups = evaluator(params, "direct")  # its prompts have room for both
    assert (row["n"], row["skipped"], row["too_long"]) == (*expected[:2], 0)
    at = {"stage": "s", "step": 0, "digest": ""}
    row = {**at, **row}
    assert evaluator.is_current(row, **at)
    assert not evaluator.is_current(row, **at | {"step": 1})
    # Settings that the method does not use may change.
    uses = {"rollout__max_turn_tokens": True, "retrieval__top_k": False}
    for name, is_used in uses.items():
        changed = config(data__dev=str(path), **settings | {name: 7})
        other = Evaluator(**evaluation_parts(setup) | {"config": changed})
        assert other.is_current(row, **at) != is_used, name
    path.write_text(json.dumps(asked[1]))
    with pytest.raises(ValueError, match=r"longer than config\.rollout\.max_prompt"):
        load_setup(long, only_dev=True)
