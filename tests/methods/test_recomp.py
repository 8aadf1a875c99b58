"""Sentences chosen by a dual encoder that is trained on the model's own labels."""

import dataclasses
import functools
import json
import re

import numpy as np
import pytest

from rsearch.methods.reading import direct, rag
from rsearch.methods.recomp import (
    LabelledSentences,
    contrast,
    fit_map,
    info_nce,
    label_sentences,
    read_labels,
    recomp_extractive,
    training_examples,
)
from rsearch.methods.table import demanded_inputs
from rsearch.types import Passage
from tests.methods.scripted import (
    ScriptedModel,
    Searched,
    answer_one,
    embed_letters,
    shown,
)

# Of questions that end in A the sentence that ends in 3 is best, of others 2.
ORDERS = {"A": "312", "B": "231"}


def write_labels(path, orders=None):
    """Write labels of three questions for each last letter; return the path."""
    rows = [
        {
            "question": f"{word} {letter}",
            "sentences": [f"T\n{word} {end}" for end in order],
            "scores": [-1.0, -2.0, -3.0],
        }
        for word in ("Who", "When", "Where")
        for letter, order in (orders or ORDERS).items()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def asked(program, text="Which A", search=None, **settings):
    """What the model is asked."""
    model = ScriptedModel(lambda r: "Paris")
    answer_one(program, model, text=text, search=search, **settings)
    return model.requests


def find(*contents):
    """A search that finds these passages for every query."""
    passages = tuple(Passage(str(i), text) for i, text in enumerate(contents))
    return lambda queries: [passages] * len(queries)


def test_with_all_sentences_it_is_rag_and_without_any_direct(tmp_path):
    labels = write_labels(tmp_path / "t")
    passages = find("T\nParis is big. It is old.", "U\n", "V\nYes. J. Smith left!")
    for search in (Searched(), passages):
        extracts = asked(recomp_extractive, search=search, labels=labels, sentences=9)
        without = find("T\nParis is big. It is old.", "V\nYes. J. Smith left!")
        same = without if search is passages else search
        assert extracts == asked(rag, search=same)
    nothing = find("T\n", "U")
    assert asked(recomp_extractive, search=nothing, labels=labels) == asked(direct)


@pytest.mark.parametrize(
    ("letter", "sentences", "expected"),
    [("A", 1, "3"), ("B", 1, "2"), ("A", 2, "93"), ("B", 2, "92"), ("B", 9, "9123")],
)
def test_the_best_sentences_are_shown_in_their_order(
    tmp_path, letter, sentences, expected
):
    """No label knows the sentence that ends in 9: its similarity stays."""
    search = find("T\nThis is 9! This is 1!", "U\nThis is 2! This is 3!")

    def program(question, kit):
        without_marks = dataclasses.replace(
            kit,
            embed_passages=lambda texts: embed_letters([t.strip("!") for t in texts]),
        )
        labels = write_labels(tmp_path / "t")
        return recomp_extractive(
            question, without_marks, labels=labels, sentences=sentences
        )

    (request,) = asked(program, f"Which {letter}", search)
    read = shown(request)
    assert re.findall(r"This is (\d)!", read) == list(expected)
    num_passages = len({number in "23" for number in expected})
    assert re.findall(r"Doc \d", read) == ["Doc 1", "Doc 2"][:num_passages]


def test_labels_are_log_probabilities_of_the_golden_answer():
    search = find("T\nParis is big. It is old.", "U\nYes.")
    model = ScriptedModel(
        None, score=lambda r: (r.text.split(), [-len(r.prefix[0]["content"]), -1.0])
    )
    program = functools.partial(label_sentences, golden={"q": "New York"})
    row = json.loads(answer_one(program, model, search=search).answer)
    chats = [request.prefix for request in model.requests]
    assert chats == [
        request.prompt
        for text in ("T\nParis is big.", "T\nIt is old.", "U\nYes.")
        for request in asked(rag, "Who is X?", find(text))
    ]
    assert {request.text for request in model.requests} == {"New York"}
    assert row == {
        "question": "Who is X?",
        "sentences": ["T\nParis is big.", "T\nIt is old.", "U\nYes."],
        "scores": [-len(chat[0]["content"]) - 1.0 for chat in chats],
    }


@pytest.mark.parametrize(
    ("margin", "negatives", "expected"),
    [(0.0, 5, [4, 0, 3]), (0.0, 2, [4, 0]), (1.5, 5, [4, 3]), (3.0, 5, [])],
)
def test_negatives_are_the_most_similar_sentences_of_lower_score(
    margin, negatives, expected
):
    scores = np.array([-2.0, -1.0, -1.0, -3.0, -2.5])
    similarity = np.array([0.5, 0.9, 0.8, 0.1, 0.7])
    best, lower = contrast(scores, similarity, margin=margin, negatives=negatives)
    assert (best, lower.tolist()) == (1, expected)


def test_the_loss_is_that_of_a_softmax_over_the_batch():
    queries, candidates = np.eye(2), np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    weights = np.array([[np.log(3), 0.0], [0.0, 0.0]])
    # Of the first: probabilities 3, 1 and 3 ** 0.6; of the second equal ones.
    total = 4 + 3**0.6
    loss, gradient = info_nce(weights, queries, candidates, np.array([0, 1]))
    assert loss == pytest.approx(np.log(total / 3) + np.log(3))
    first = np.array([3 / total - 1, 1 / total, 3**0.6 / total]) @ candidates
    second = np.array([1 / 3, -2 / 3, 1 / 3]) @ candidates
    np.testing.assert_allclose(gradient, [first, second])


def test_a_sentence_that_is_best_for_two_questions_is_no_negative_of_either():
    labelled = [
        LabelledSentences("A", ("x 1", "x 2"), (-1.0, -2.0)),
        LabelledSentences("B", ("x 3", "x 1"), (-4.0, -3.0)),
        LabelledSentences("C", ("x 4", "x 4"), (-1.0, -1.0)),
        LabelledSentences("D", (), ()),
    ]
    queries = embed_letters("ABCD")
    settings = {"margin": 0.0, "negatives": 5}
    ((q, c, positives),) = training_examples(
        labelled, queries, embed_letters, **settings
    )
    np.testing.assert_array_equal(q, queries[:2])
    np.testing.assert_array_equal(c, embed_letters("123"))
    assert positives.tolist() == [0, 0]
    with pytest.raises(ValueError, match="margin = 0"):
        training_examples(labelled[2:], queries[2:], embed_letters, **settings)


@pytest.mark.parametrize("penalty", [1e-3, 1e-1])
def test_the_map_is_where_the_gradient_vanishes(penalty):
    rng = np.random.default_rng(0)
    queries, candidates = rng.normal(size=(6, 4)), rng.normal(size=(9, 4))
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    candidates /= np.linalg.norm(candidates, axis=1, keepdims=True)
    batches = [
        (queries[:4], candidates[:5], np.array([0, 1, 2, 2])),
        (queries[4:], candidates[5:], np.array([3, 0])),
    ]
    weights = fit_map(batches, temperature=0.5, penalty=penalty)
    gradient = penalty * (weights - 2 * np.eye(4))
    gradient += sum(info_nce(weights, *batch)[1] for batch in batches) / 6
    assert np.abs(gradient).max() < 1e-5


ROW = {"question": "Who A", "sentences": ["T\nx 1"], "scores": [-1.5]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (None, "labels = ''"),
        ("", "no rows"),
        ([], "labels:1.*question, sentences, scores"),
        ({**ROW, "id": "1"}, "labels:1.*question, sentences, scores"),
        ({**ROW, "question": 3}, "labels:1.*question = 3"),
        ({**ROW, "sentences": "x"}, "labels:1.*sentences"),
        ({**ROW, "scores": [-1, -2]}, "labels:1.*scores"),
        ({**ROW, "scores": [True]}, "labels:1.*scores"),
        ({**ROW, "scores": [float("nan")]}, "labels:1.*NaN"),
    ],
)
def test_labels_that_cannot_be_used_are_refused(tmp_path, row, words):
    path = tmp_path / "labels"
    if row is not None:
        path.write_text(row if row == "" else json.dumps(row))
    spelling = "recomp_extractive" + ("" if row is None else f":labels={path}")
    with pytest.raises(ValueError, match=words):
        demanded_inputs([spelling], ())


@pytest.mark.parametrize(
    "setting",
    [
        {"sentences": 0},
        {"margin": -1.0},
        {"negatives": 0},
        {"temperature": 0.0},
        {"penalty": 0.0},
    ],
)
def test_settings_out_of_range_are_refused(tmp_path, setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        asked(recomp_extractive, labels=write_labels(tmp_path / "t"), **setting)


def test_inputs_are_the_labels_and_a_labelled_question_is_refused(tmp_path):
    spelling = f"recomp_extractive:labels={write_labels(tmp_path / 't')}"
    before = demanded_inputs([spelling], ())
    assert list(before) == ["eval.recomp_extractive"]
    assert read_labels(tmp_path / "t")[0].scores == (-1.0, -2.0, -3.0)
    with pytest.raises(ValueError, match="question q is among"):
        asked(recomp_extractive, "When B", labels=str(tmp_path / "t"))
    write_labels(tmp_path / "t", {"A": "123"})
    assert demanded_inputs([spelling], ()) != before
