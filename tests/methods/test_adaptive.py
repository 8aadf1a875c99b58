"""Choosing the strategy that was right on similar training questions."""

import json

import numpy as np
import pytest

from rsearch.methods.adaptive import (
    STRATEGIES,
    adaptive_rag,
    fit_classes,
    is_search_better,
    silver_labels,
    skr,
)
from rsearch.methods.iterating import ircot
from rsearch.methods.reading import direct, rag
from rsearch.methods.table import READ_LABELS, demanded_inputs
from tests.methods.scripted import ScriptedModel, Searched, answer_one


def write_labels(path, *right, strategies=("direct", "rag", "ircot"), **changes):
    """Write transcripts in which these strategies answer question i right.

    Args:
        path: path of the file, which is returned as text.
        right: for each question, its text and the strategies that were right.
        strategies: strategies that have rows.
        changes: fields to set in all rows.
    """
    rows = [
        {
            **{"stage": "s", "method": strategy, "dataset": "world:train"},
            **{"id": str(i), "question": text, "golden_answers": ["yes"]},
            "prediction": "Yes." if strategy in chosen else None,
            **changes,
        }
        for strategy in strategies
        for i, (text, *chosen) in enumerate(right)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def asked(program, text="Who is X?", **settings):
    """Return the requests to the model and the queries of the search."""
    model, search = ScriptedModel(lambda r: "Paris"), Searched()
    answer_one(program, model, text=text, search=search, **settings)
    return model.requests, search.queries


@pytest.mark.parametrize(
    ("lead", "num", "k", "better", "worse", "searches"),
    [
        (-15, 849, 5, 2, 2, True),
        (-15, 849, 5, 1, 2, False),
        (-15, 849, 5, 0, 0, True),
        (50, 100, 5, 2, 1, False),
        (50, 100, 5, 3, 1, True),
        (50, 100, 6, 3, 1, False),
        (-50, 100, 5, 1, 2, True),
        (-50, 100, 5, 1, 3, False),
        (0, 100, 5, 0, 0, False),
        (0, 100, 5, 1, 0, True),
    ],
)
def test_skr_decides_by_its_neighbours(lead, num, k, better, worse, searches):
    assert is_search_better(lead, num, k, better, worse) == searches


def test_skr_with_one_kind_of_label_is_rag_or_direct(tmp_path):
    for chosen, program in ((["rag"], rag), (["direct"], direct), ([], direct)):
        for neighbours in ("different", "all"):
            path = write_labels(tmp_path / f"{chosen}", *[("A?", *chosen)] * 3)
            result = asked(skr, labels=path, neighbours=neighbours)
            assert result == asked(program), (chosen, neighbours)


def test_skr_follows_the_most_similar_questions(tmp_path):
    right = [("A 1", "rag"), ("B 1", "rag"), ("A 2", "direct"), ("B 2", "direct")]
    path = write_labels(tmp_path / "t", *right, ("C 1",), ("C 2", "rag", "direct"))
    settings = {"labels": path, "k": 2}
    assert asked(skr, "Who 1", **settings) == asked(rag, "Who 1")
    assert asked(skr, "Who 2", **settings) == asked(direct, "Who 2")


def test_the_cheapest_right_strategy_is_the_label():
    right = np.array([(1, 1, 1), (0, 1, 1), (0, 0, 1), (0, 0, 0), (1, 0, 0)], bool)
    for unsolved, label in (("drop", -1), ("rag", 1), ("ircot", 2)):
        assert silver_labels(right, unsolved).tolist() == [0, 1, 2, label, 0]


@pytest.mark.parametrize(
    ("chosen", "unsolved", "program"),
    [
        (("direct", "rag", "ircot"), "drop", direct),
        (("rag", "ircot"), "drop", rag),
        (("ircot",), "drop", ircot),
        ((), "rag", rag),
        ((), "ircot", ircot),
    ],
)
def test_adaptive_rag_with_one_class_is_that_strategy(
    tmp_path, chosen, unsolved, program
):
    path = write_labels(tmp_path / "t", ("A?", *chosen), ("B?", *chosen))
    assert asked(adaptive_rag, labels=path, unsolved=unsolved) == asked(program)


def test_adaptive_rag_follows_similar_questions(tmp_path):
    kinds = [("1", "direct"), ("2", "rag"), ("3", "ircot"), ("3",)]
    right = [(f"{x} {end}", *kind) for x in "ABC" for end, *kind in kinds]
    path = write_labels(tmp_path / "t", *right)
    for end, program in (("1", direct), ("2", rag), ("3", ircot)):
        text = f"Who {end}"
        assert asked(adaptive_rag, text, labels=path) == asked(program, text)


def test_classes_are_separated_and_labels_without_a_class_are_refused():
    vectors = np.eye(4, dtype=np.float32)
    weights = fit_classes(vectors, np.array([2, 0, 2, -1]), 1e-3)
    scores = np.pad(vectors, ((0, 0), (0, 1)), constant_values=1) @ weights
    # The last one has no label, so it falls into the most frequent class.
    assert scores.argmax(axis=1).tolist() == [2, 0, 2, 2]
    assert np.isneginf(scores[:, 1]).all()
    with pytest.raises(ValueError, match="adaptive_rag: no strategy is right"):
        fit_classes(vectors, np.full(4, -1), 1e-3)


@pytest.mark.parametrize(
    ("changes", "spelling", "words"),
    [
        (None, "skr", "labels = ''"),
        ({}, "skr:labels={path}:dataset=world:dev", "'world:dev'.* has 'world:train'"),
        ({"id": "0"}, "skr:labels={path}", "several rows of direct on question '0'"),
        ({"strategies": ("rag",)}, "skr:labels={path}", "no row of direct"),
        (
            {"strategies": ("direct", "rag")},
            "adaptive_rag:labels={path}",
            "no row of ircot",
        ),
        ({"prediction": 3}, "skr:labels={path}", "labels:1.*prediction"),
        ({"golden_answers": "x"}, "skr:labels={path}", "labels:1.*golden_answers"),
        ({"id": 3}, "skr:labels={path}", "labels:1.*id"),
    ],
)
def test_labels_that_cannot_be_used_are_refused(tmp_path, changes, spelling, words):
    path = tmp_path / "labels"
    if changes is not None:
        write_labels(path, ("A?", "rag"), ("B?", "rag"), **changes)
    with pytest.raises(ValueError, match=words):
        demanded_inputs([spelling.format(path=path)])


@pytest.mark.parametrize("name", sorted({*STRATEGIES, *READ_LABELS}))
def test_labels_that_are_not_there_are_refused_with_the_methods_name(tmp_path, name):
    words = f"methods: {name}: labels = '{tmp_path}/nowhere': No such file"
    with pytest.raises(ValueError, match=words):
        demanded_inputs([f"{name}:labels={tmp_path}/nowhere"])


def test_a_question_that_is_among_the_labels_is_refused(tmp_path):
    path = write_labels(tmp_path / "t", ("Who is X?", "rag"))
    with pytest.raises(ValueError, match="question q is among"):
        asked(skr, labels=path)


def test_the_inputs_are_the_labels_and_nothing_else_of_the_file(tmp_path):
    spelling = f"skr:labels={tmp_path}/t:dataset=world:train"
    write_labels(tmp_path / "t", ("A?", "rag"))
    before = demanded_inputs(["rag", spelling])
    rows = (tmp_path / "t").read_text()
    write_labels(tmp_path / "t", ("B?", "direct"), dataset="world:dev")
    (tmp_path / "t").write_text(rows + (tmp_path / "t").read_text())
    assert demanded_inputs([spelling]) == before and list(before) == ["eval.skr"]
    write_labels(tmp_path / "t", ("A?", "direct"))
    assert demanded_inputs([spelling]) != before


def test_the_inputs_change_with_each_of_several_files(tmp_path):
    spellings = [f"skr:labels={tmp_path}/{name}" for name in "ab"]
    for name in "ab":
        write_labels(tmp_path / name, ("A?", "rag"))
    before = demanded_inputs(spellings)
    assert before == demanded_inputs(spellings[:1])  # the same labels twice
    for name in "ab":
        write_labels(tmp_path / name, ("A?", "direct"))
        after = demanded_inputs(spellings)
        write_labels(tmp_path / name, ("A?", "rag"))
        assert after != before and list(after) == ["eval.skr"]
