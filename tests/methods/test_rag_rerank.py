"""Passages that the model itself finds relevant."""

import pytest

from rsearch.llm.requests import Score
from rsearch.methods.rag_rerank import rag_rerank
from rsearch.methods.reading import rag
from tests.methods.scripted import ScriptedModel, Searched, answer_one, shown


def judging(*odds):
    """Return a model that finds the i-th passage relevant with these log-odds."""

    def score(request):
        i = int(request.prefix[0]["content"].split("Title: Who is X? ")[1][0]) - 1
        no = -1.0 - i
        return ("a", "b"), ((odds[i], no) if request.text == "Yes" else (no / 2,) * 2)

    return ScriptedModel(lambda r: "Paris", score=score)


def test_the_passages_that_the_model_finds_relevant_are_shown_first():
    model = judging(-3, 1, 0)
    rollout = answer_one(rag_rerank, model, top_k=2)
    *scores, asked = model.requests
    assert [s.text for s in scores] == ["Yes", "No"] * 3
    assert all(isinstance(s, Score) for s in scores)
    assert all(s.prefix[0]["content"].count("Title:") == 1 for s in scores)
    text = shown(asked)
    assert "Doc 1(Title: Who is X? 2) text 2\nDoc 2(Title: Who is X? 3) t" in text
    assert "Who is X? 1)" not in text and rollout.num_scored == 12


def test_with_equal_scores_or_no_passages_it_is_rag():
    for num in (3, 0):
        asked = []
        for program, model in (
            (rag_rerank, judging(0, 0, 0)),
            (rag, ScriptedModel(lambda r: "Paris")),
        ):
            rollout = answer_one(program, model, search=Searched(num))
            asked.append((model.requests[-1], rollout.answer))
        assert asked[0] == asked[1]


def test_a_top_k_that_is_no_number_of_ranked_passages_is_refused():
    for settings in ({"top_k": 4}, {"top_k": 3, "candidates": 2}, {"top_k": -1}):
        with pytest.raises(ValueError, match=f"top_k = {settings['top_k']}"):
            answer_one(rag_rerank, judging(0, 0, 0), **settings)
    with pytest.raises(ValueError, match="candidates = -1: must be 0 or above"):
        answer_one(rag_rerank, judging(0, 0, 0), candidates=-1)
