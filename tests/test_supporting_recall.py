"""Recall of supporting passages, compared with values computed by hand."""

import pytest

from rsearch.index import supporting_recall
from rsearch.types import Passage, Question

PASSAGES = [Passage(f"p{i}", f'"Title {i}"\ntext') for i in range(5)]


def ask(*metadata):
    return [Question(f"q{i}", f"q{i}?", ("a",), m) for i, m in enumerate(metadata)]


def first(num):
    return lambda queries: [tuple(PASSAGES[:num]) for _ in queries]


def test_recall_is_the_mean_share_of_each_questions_passages():
    questions = ask(
        {"supporting_ids": ["p0", "p4"]},  # one of two
        {"supporting_ids": ["p2"]},  # one of one
        {"supporting_ids": ["p3", "p4"]},  # none
    )
    assert supporting_recall(first(3), questions, top_k=3) == (0.5, 3)
    assert supporting_recall(first(3), questions, top_k=1)[0] == pytest.approx(1 / 6)


def test_passages_may_be_named_by_title_or_by_flashrags_facts():
    questions = ask(
        {"supporting_titles": ["Title 0", '"Title 9"']},
        {"supporting_facts": {"title": ["Title 1", "Title 1"], "sent_id": [0, 3]}},
    )
    assert supporting_recall(first(2), questions, top_k=2) == (0.75, 2)


def test_the_published_layouts_of_hotpotqa_and_musique_are_read():
    paragraphs = [
        {"title": f"Title {i}", "is_supporting": i in (0, 3)} for i in range(4)
    ]
    questions = ask(
        {"supporting_facts": [["Title 0", 1], ["Title 4", 0], ["Title 0", 2]]},
        {"paragraphs": paragraphs},
    )
    assert supporting_recall(first(2), questions, top_k=2) == (0.5, 2)
    assert supporting_recall(first(4), questions, top_k=4) == (0.75, 2)


def test_names_in_an_unknown_form_are_ignored():
    others = [{"supporting_facts": "x"}, {"paragraphs": [3]}, {"supporting_ids": {}}]
    questions = ask({"supporting_ids": ["p0"]}, *others, {"supporting_facts": [[]]})
    assert supporting_recall(first(1), questions, top_k=1) == (1.0, 1)


def test_questions_that_name_no_passages_do_not_count():
    questions = ask({}, {"supporting_ids": ["p0"]}, {"supporting_ids": []})
    assert supporting_recall(first(1), questions, top_k=1) == (1.0, 1)


def test_a_failed_search_finds_nothing():
    questions = ask({"supporting_ids": ["p0"]})
    assert supporting_recall(lambda queries: [None], questions, top_k=1) == (0.0, 1)


def test_a_set_of_questions_that_name_no_passages_is_refused():
    with pytest.raises(ValueError, match="none of the questions names"):
        supporting_recall(first(1), ask({}), top_k=1)
