"""RECOMP: sentences chosen by a dual encoder trained on the model's own labels."""

import dataclasses
import functools
import json
import re

import numpy as np
import pytest

from rsearch.methods.reading import direct, rag
from rsearch.methods.recomp import (
    BATCH,
    Batches,
    LabelledSentences,
    best_and_negatives,
    fit_map,
    info_nce,
    label_sentences,
    read_sentence_labels,
    recomp_extractive,
    training_batches,
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

# For questions that end in A, the sentence that ends in 3 is best; for B it is 2.
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
    """Return the requests to the model."""
    model = ScriptedModel(lambda r: "Paris")
    answer_one(program, model, text=text, search=search, **settings)
    return model.requests


def find(*contents):
    """Return a search that finds these passages for every query."""
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
    """The sentence that ends in 9 is in no label, so its similarity stays the same."""
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
    program = functools.partial(label_sentences, golden={"q": ("New York", "NY")})
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
    best, lower = best_and_negatives(
        scores, similarity, margin=margin, negatives=negatives
    )
    assert (best, lower.tolist()) == (1, expected)


def test_the_loss_is_that_of_a_softmax_over_the_batch():
    candidates = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [9.0, 9.0]])
    weights = np.array([[np.log(3), 0.0], [0.0, 0.0]])
    exists = np.array([True, True, True, False])
    losses = info_nce(weights, np.eye(2), candidates, np.array([0, 1]), exists)
    # The first question's weights are 3, 1 and 3 ** 0.6; the second's are equal.
    expected = [np.log((4 + 3**0.6) / 3), np.log(3)]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_a_sentence_that_is_best_for_two_questions_is_no_negative_of_either():
    labelled = [
        LabelledSentences("A", ("x 1", "x 2"), (-1.0, -2.0)),
        LabelledSentences("B", ("x 3", "x 1"), (-4.0, -3.0)),
        LabelledSentences("C", ("x 4", "x 4"), (-1.0, -1.0)),
        LabelledSentences("D", (), ()),
    ]
    queries = embed_letters("ABCD")
    settings = {"margin": 0.0, "negatives": 5}
    batches = training_batches(labelled, queries, embed_letters, **settings)
    np.testing.assert_array_equal(batches.queries, queries[None, :2])
    np.testing.assert_array_equal(batches.candidates, embed_letters("123")[None])
    assert batches.positives.tolist() == [[0, 0]]
    assert batches.is_question.all() and batches.is_candidate.all()
    with pytest.raises(ValueError, match="margin = 0"):
        training_batches(labelled[2:], queries[2:], embed_letters, **settings)


def test_questions_that_exceed_a_batch_go_into_another_one():
    num = BATCH + 2
    labelled = [
        LabelledSentences(f"Q {i}", (f"{i} 1", f"{i} 2"), (0.0, -1.0))
        for i in range(num)
    ]
    vectors = np.eye(3 * num, dtype=np.float32)
    texts = [text for x in labelled for text in x.sentences]

    def embed(sentences):
        return vectors[[num + texts.index(text) for text in sentences]]

    batches = training_batches(labelled, vectors[:num], embed, margin=0.0, negatives=1)
    assert batches.is_question.sum(axis=1).tolist() == [BATCH, 2]
    assert batches.is_candidate.sum(axis=1).tolist() == [2 * BATCH, 4]
    np.testing.assert_array_equal(batches.queries[1, :2], vectors[num - 2 : num])
    assert not batches.queries[1, 2:].any() and not batches.candidates[1, 4:].any()
    best = batches.candidates[1][batches.positives[1, :2]]
    np.testing.assert_array_equal(best, embed(texts[-4::2]))


@pytest.mark.parametrize("penalty", [1e-3, 1e-1])
def test_the_gradient_at_the_fitted_map_is_zero(penalty):
    rng = np.random.default_rng(0)
    queries, candidates = rng.normal(size=(2, 4, 3)), rng.normal(size=(2, 5, 3))
    queries /= np.linalg.norm(queries, axis=-1, keepdims=True)
    candidates /= np.linalg.norm(candidates, axis=-1, keepdims=True)
    positives = np.array([[0, 1, 2, 2], [2, 0, 0, 0]], np.int32)
    is_question = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
    is_candidate = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)
    batches = Batches(queries, candidates, positives, is_question, is_candidate)
    weights = np.asarray(fit_map(batches, 0.5, penalty), np.float64)
    gradient = penalty * (weights - 2 * np.eye(3))
    for q, c, best, is_q, is_c in zip(*batches, strict=True):
        probs = np.exp(q @ weights @ c.T) * is_c
        error = probs / probs.sum(axis=1, keepdims=True) - np.eye(5)[best]
        gradient += q.T @ (error * is_q[:, None]) @ c / 6
    assert np.abs(gradient).max() < 1e-4 * penalty**0.5


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
        demanded_inputs([spelling])


@pytest.mark.parametrize(
    "setting",
    [
        {"sentences": 0},
        {"margin": -1.0},
        {"negatives": 0},
        {"temperature": 0.0},
        {"temperature": 1e-38},
        {"penalty": 0.0},
    ],
)
def test_settings_out_of_range_are_refused(tmp_path, setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        asked(recomp_extractive, labels=write_labels(tmp_path / "t"), **setting)


def test_inputs_are_the_labels_and_a_labelled_question_is_refused(tmp_path):
    spelling = f"recomp_extractive:labels={write_labels(tmp_path / 't')}"
    before = demanded_inputs([spelling])
    assert list(before) == ["eval.recomp_extractive"]
    assert read_sentence_labels(tmp_path / "t")[0].scores == (-1.0, -2.0, -3.0)
    with pytest.raises(ValueError, match="question q is among"):
        asked(recomp_extractive, "When B", labels=str(tmp_path / "t"))
    write_labels(tmp_path / "t", {"A": "123"})
    assert demanded_inputs([spelling]) != before
