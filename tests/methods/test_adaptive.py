"""Strategies chosen by what was right on similar training questions."""

import json

import pytest

from rsearch.methods.adaptive import is_search_better, skr
from rsearch.methods.reading import direct, rag
from rsearch.methods.table import demanded_inputs
from rsearch.types import Question
from tests.methods.scripted import ScriptedModel, Searched, answer_one


def write_labels(path, *right, strategies=("direct", "rag", "ircot"), **changes):
    """Write transcripts where question i has been answered right by these strategies.

    Args:
        path: of the file.
        right: of each question, its text and the strategies that were right.
        strategies: that have rows.
        changes: of fields of all rows.
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
    """What the model and the search are asked."""
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
def test_skr_searches_by_its_neighbours(lead, num, k, better, worse, searches):
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


@pytest.mark.parametrize(
    ("changes", "spelling", "words"),
    [
        (None, "skr", "labels = ''"),
        ({}, "skr:labels={path}:dataset=world:dev", "'world:dev'.* got none"),
        ({"id": "0"}, "skr:labels={path}", "several rows of direct on question '0'"),
        ({"strategies": ("rag",)}, "skr:labels={path}", "no row of direct"),
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
        demanded_inputs([spelling.format(path=path)], ())


def test_a_question_whose_label_is_known_is_refused(tmp_path):
    path = write_labels(tmp_path / "t", ("Who is X?", "rag"))
    with pytest.raises(ValueError, match="question q is among"):
        asked(skr, labels=path)


def test_inputs_are_the_labels_and_nothing_else_of_the_file(tmp_path):
    spelling = f"skr:labels={tmp_path}/t:dataset=world:train"
    write_labels(tmp_path / "t", ("A?", "rag"))
    before = demanded_inputs(["rag", spelling], [Question("q", "Who?", ("x",))])
    rows = (tmp_path / "t").read_text()
    write_labels(tmp_path / "t", ("B?", "direct"), dataset="world:dev")
    (tmp_path / "t").write_text(rows + (tmp_path / "t").read_text())
    assert demanded_inputs([spelling], ()) == before and list(before) == ["eval.skr"]
    write_labels(tmp_path / "t", ("A?", "direct"))
    assert demanded_inputs([spelling], ()) != before
