"""The tables in which an evaluation prints its rows."""

import re
import sys

import pytest

from rsearch.evaluation import results
from rsearch.rollout.health import HEALTH
from tests.evaluation.test_scoring import SCORES
from tests.small_run import config

KINDS = "percent EM / searches, by kind"


def test_notable_shares_of_searches_are_printed_as_a_table(capsys):
    row = {name: 0 for name in results.COLUMNS} | dict.fromkeys(HEALTH, 0.0)
    row |= {"stage": "rl", "method": "protocol", "dataset": "d", "em_95": [0, 1]}
    title = "searches, percent"
    results.show_results([row, {**row, "supporting_recall": 1.0}], config())
    assert title not in capsys.readouterr().out
    results.show_results([row, {**row, "repeated_queries": 0.37}], config())
    _, _, message = capsys.readouterr().out.partition(title)
    assert message.count("protocol") == 1 and "37" in message


def test_the_title_of_results_gives_the_units_of_scores_and_outcomes(capsys):
    row = {name: 3 for name in results.COLUMNS} | {"em_95": [0, 1], "em": 0.5}
    row |= {"stage": "rl", "method": "protocol", "dataset": "d"}
    results.show_results([row], config())
    title = capsys.readouterr().out.splitlines()[0]
    assert "scores in percent" in title and "outcomes in rollouts" in title
    assert config().eval.normalize in title


def test_kinds_are_a_second_table_if_there_are_several(capsys):
    part = {"n": 9, **dict.fromkeys(SCORES, 0.5), "searches": 1.25}
    old = {name: 0 for name in results.COLUMNS} | {"em_95": [0, 1], "judge_error": 0}
    old |= {"stage": "sft", "method": "rag", "dataset": "d"}
    results.show_results([{**old, "by_kind": {"single": part}}], config())
    assert KINDS not in capsys.readouterr().out
    split = {"single": part, "bridge": {**part, "em": 1.0}}
    results.show_results([old, {**old, "by_kind": split}], config())
    message = capsys.readouterr().out
    assert KINDS in message and "judge_error" not in message
    assert "100 / 1.25" in message and "50 / 1.25" in message
    results.show_results([{**old, "judge_error": 3}], config())
    assert "judge_error" in capsys.readouterr().out


@pytest.mark.parametrize("failed", [0, 17])
def test_failed_calls_of_a_judge_are_never_hidden(capsys, monkeypatch, failed):
    row = {name: 3 for name in results.COLUMNS} | {"em_95": [0, 1], "em": 0.5}
    row |= {"stage": "rl", "method": "protocol", "dataset": "d"}
    row |= {"judge": 1.0, "judge_agreement": 1.0, "judge_unparsed": 0}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    results.show_results([row | {"judge_failed": failed}], config())
    out, _, hidden = capsys.readouterr().out.partition("hidden: ")
    assert "judge_unparsed" in hidden
    assert ("judge_failed" in hidden, "17" in out) == (not failed, bool(failed))


def shown_tables(capsys, *rows, **settings):
    """Return {title: cells of the headings and lines} of the tables printed."""
    results.show_results(rows, config(), **settings)
    tables, lines = {}, []
    for line in capsys.readouterr().out.splitlines():
        if line[0] in "┃│":
            lines.append([cell.strip() for cell in re.split("[┃│]", line)[1:-1]])
        elif line[0] not in "┏┡└":
            lines = tables.setdefault(line, [])
    return tables


@pytest.mark.parametrize(
    ("datasets", "expected"),
    [
        (("d", "d"), [None, None]),
        (("d", "e[:2]"), ["d", "e[:2]"]),
        (("a/dev.jsonl", "a/b.jsonl"), ["dev.jsonl", "b.jsonl"]),
        (("a/dev.jsonl", "b/dev.jsonl"), ["a/dev.jsonl", "b/dev.jsonl"]),
    ],
)
def test_every_table_names_the_dataset_if_there_are_several(capsys, datasets, expected):
    part = {"n": 9, **dict.fromkeys(SCORES, 0.5), "searches": 1.25}
    row = {name: 3 for name in results.COLUMNS} | dict.fromkeys(HEALTH, 0.0)
    row |= {"stage": "rl", "method": "protocol", "em_95": [0, 1], "em": 0.5}
    row |= {"repeated_queries": 0.37, "by_kind": {"single": part, "bridge": part}}
    row |= {"notes": {"p": {"n": 4, "mean": 0.3, "quartiles": [0, 0.2, 0.3, 0.4, 1]}}}
    tables = shown_tables(capsys, *(row | {"dataset": name} for name in datasets))
    headings, *lines = tables["notes of methods on their steps"]
    assert headings[-8:-6] == ["note", "n"]
    numbers = ["p", "4", "0.3", "0", "0.2", "0.3", "0.4", "1"]
    assert [line[-8:] for line in lines] == [numbers] * 2
    for title in (KINDS, "searches, percent"):
        headings, *lines = tables[title]
        cells = [
            dict(zip(headings, line, strict=True)).get("dataset") for line in lines
        ]
        assert cells == expected


def test_costs_of_one_method_are_told_apart_by_stage_and_dataset(capsys):
    row = {name: 3 for name in results.COLUMNS} | {"em_95": [0, 1], "em": 0.5}
    row |= {"method": "ircot", "dataset": "/data/nq.jsonl", "model_calls": 1}
    rows = [{**row, "stage": "start"}, {**row, "stage": "rl", "model_calls": 2}]
    costs = "costs: means over questions"
    headings, *lines = shown_tables(capsys, *rows)[costs]
    assert headings[:3] == ["stage", "method", "model_calls"]
    assert [line[:3] for line in lines] == [
        ["start", "ircot", "1"],
        ["rl", "ircot", "2"],
    ]
    other = {**rows[0], "dataset": "/data/hotpotqa.jsonl"}
    headings, *lines = shown_tables(capsys, *rows, other)[costs]
    assert [line[2] for line in lines] == ["nq.jsonl", "nq.jsonl", "hotpotqa.jsonl"]


def test_means_over_datasets_count_each_once(capsys):
    row = {name: 3 for name in results.COLUMNS} | {"stage": "rl", "method": "rag"}
    row |= {name: [0, 1] for name in results.INTERVALS} | dict.fromkeys(SCORES, 0.5)
    first = row | {"dataset": "nq", "em": 0.5, "em_95": [0.2, 0.56]}
    second = row | {"dataset": "popqa", "em": 0.9, "em_95": [0.5, 0.98], "n": 900}
    others = [{**first, "method": "cot"}, {**second, "stage": "sft"}]
    title = "means over datasets, percent"
    rows, settings = [first, second, *others], {"has_means": True}
    headings, line = shown_tables(capsys, *rows, **settings)[title]
    assert headings[:5] == ["stage", "method", "datasets", "em", "em_95"]
    # 0.7 - sqrt(0.3^2 + 0.4^2) / 2 and 0.7 + sqrt(0.06^2 + 0.08^2) / 2
    assert line[:5] == ["rl", "rag", "2", "70.0", "45.0 - 75.0"]
    assert title not in shown_tables(capsys, first, *others, **settings)
    # The definition of a set in config.sets is part of its rows' setting.
    sets = [{**r, "setting": f"data.dev={r['dataset']}"} for r in (first, second)]
    headings_of_sets, line_of_sets = shown_tables(capsys, *sets, **settings)[title]
    assert (headings_of_sets, line_of_sets) == (headings, line)
    old = {**second, "f1_95": None}
    assert title not in shown_tables(capsys, first, old, **settings)
    # All rows of a run may be of training questions, or of a set and its parts.
    assert title not in shown_tables(capsys, *rows)


def test_known_questions_are_labelled_as_known_without_a_search(capsys):
    part = {"n": 9, **dict.fromkeys(SCORES, 0.5), "searches": 1.25}
    row = {name: 3 for name in results.COLUMNS} | {"em_95": [0, 1], "em": 0.5}
    row |= {"stage": "rl", "method": "protocol", "dataset": "d"}
    row |= {"by_known": {"known": part, "not known": part | {"em": 1.0}}}
    headings, line = shown_tables(capsys, row)[KINDS]
    cells = dict(zip(headings, line, strict=True))
    assert cells["known without search"] == "50 / 1.25"
    assert cells["needs search"] == "100 / 1.25"


@pytest.mark.fault(77, "mean over nothing")
def test_scores_over_no_rollouts_are_a_dash(capsys):
    nothing = dict.fromkeys(SCORES)
    row = {name: 7 for name in results.COLUMNS} | nothing
    row |= {"stage": "sft", "method": "rag", "dataset": "d", "em_95": None}
    part = {"n": 9, **nothing, "searches": 1.25}
    row |= {"judge_error": 9, "by_kind": {"single": part, "bridge": part}}
    results.show_results([row], config())
    message = capsys.readouterr().out
    assert "- / 1.25" in message and " - " in message


def test_rows_of_other_settings_and_normalisers_are_told_apart(capsys):
    names = {name: 3 for name in results.COLUMNS} | {"em_95": [0, 1], "searches": 1.0}
    row = names | {"stage": "rl", "method": "ircot", "dataset": "d", "setting": ""}
    row |= {"normalize": "flashrag", "model_calls": 2.0}
    results.show_results([row, row | {"stage": "start"}], config())
    out = capsys.readouterr().out
    assert "normalised as flashrag" in out.splitlines()[0] and "setting" not in out
    other = row | {"setting": "retrieval.top_k=5", "normalize": "r1_searcher"}
    results.show_results([row, other], config())
    out = capsys.readouterr().out
    assert "normalised" not in out
    main_table, costs = out.split("costs: ")
    for table in (main_table, costs):
        assert "retrieval.top_k=5" in table and "r1_searcher" in table
        assert "flashrag" in table


def test_a_long_evaluations_seconds_are_not_in_powers_of_ten(capsys):
    row = {name: 3 for name in results.COLUMNS} | {"em_95": [0, 1]}
    row |= {"stage": "rl", "method": "rag", "dataset": "d", "seconds": 123456.7}
    results.show_results([row], config())
    assert "123457" in capsys.readouterr().out


def test_a_methods_labels_are_left_out_of_its_name_if_all_stay_distinct(capsys):
    row = {name: 3 for name in results.COLUMNS} | {"em_95": [0, 1], "em": 0.5}
    row |= {"stage": "rl", "dataset": "d"}
    files = [f"labels=runs/{name}.jsonl:dataset=world:train[:9]" for name in "xy"]
    asked = [f"skr:{files[0]}:k=4", "rag:top_k=1", f"adaptive_rag:{files[1]}"]
    tables = shown_tables(capsys, *({**row, "method": name} for name in asked))
    (main, *_) = tables.values()
    methods = [cells[1] for cells in main[1:]]
    assert methods == ["skr:k=4", "rag:top_k=1", "adaptive_rag"]
    asked = [f"skr:{x}" for x in files]
    tables = shown_tables(capsys, *({**row, "method": name} for name in asked))
    (main, *_) = tables.values()
    assert [cells[1] for cells in main[1:]] == asked
