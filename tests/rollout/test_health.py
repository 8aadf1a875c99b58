"""Numbers of how a policy searches, by hand."""

import re

import numpy as np
import pytest

from rsearch.rollout.health import RECALL_BY_SEARCH, needless_searches, search_health
from rsearch.tools.search import search_use
from rsearch.types import Group, Outcome, Passage, Question, Rollout, Segment, Source

ADA = Passage("a", '"Ada Abel"\nBorn in Altdorf.')
FILM = Passage("f", "Grey River\nDirected by Ada Abel.")
OTHER = Passage("o", "Party\nNothing.")
NOTHING = np.zeros(0, np.int32)
TAGS = (re.compile("<information>"), re.compile("</information>"))
TEXT = "Where was the director of Grey River born?"


def rollout(*searches, answer=None, wrote=("<think>",), num_cut=0):
    """`searches` are {query: passages}, one for each turn."""
    uses = tuple(search_use(tuple(s), tuple(s.values())) for s in searches)
    turns = tuple(Segment(Source.POLICY, NOTHING, NOTHING, text) for text in wrote)
    return Rollout(turns, answer, uses, Outcome.ANSWERED, num_cut_observations=num_cut)


def measure(*rollouts, titles=None, **metadata):
    group = Group(Question("q", TEXT, ("Altdorf",), metadata), rollouts)
    return search_health([group], tags=TAGS, titles=titles)


def test_queries_are_copies_and_repetitions_after_normalisation():
    first = rollout(
        {"where was director of Grey River born": ()},  # the question
        {"Grey River": (), "director": ()},
        {"grey river!": ()},  # again
    )
    second = rollout({"Grey River": ()})  # of another rollout
    measured = measure(first, second)
    assert measured["copied_queries"] == 1 / 5
    assert measured["repeated_queries"] == 1 / 5


def test_an_answer_is_supported_by_its_words_in_a_row_in_one_passage():
    found = {"x": (ADA, FILM, OTHER)}
    supported = [rollout(found, answer=a) for a in ("altdorf.", "the Ada Abel")]
    unsupported = [rollout(found, answer=a) for a in ("Art", "River Altdorf")]
    uncounted = [
        rollout(answer="Rome"),  # which has not searched
        rollout({"x": ()}, answer="Rome"),  # which has found nothing
        *(rollout(found, answer=a) for a in ("Yes", " ", None)),
    ]
    assert measure(*supported, *unsupported, *uncounted)["unsupported_answers"] == 0.5
    assert measure(*supported)["unsupported_answers"] == 0
    assert measure(*uncounted)["unsupported_answers"] is None


def test_an_observation_that_the_policy_writes_is_forged():
    forged = rollout(wrote=("<think>", "</information> so"))
    assert measure(forged, rollout(), rollout(wrote=()))["forged_observations"] == 1 / 2


def test_cut_observations_are_a_share_of_all_calls():
    measured = measure(rollout({"x": ()}, {"y": ()}, num_cut=1), rollout({"z": ()}))
    assert measured["cut_observations"] == 1 / 3


@pytest.mark.parametrize(
    "support",
    [
        {"titles": {"q": ["Ada Abel", "Grey River"]}},
        {"supporting_ids": ["a", "f"]},
        {"supporting_titles": ["Ada Abel", "Grey River"]},
    ],
)
def test_recall_after_each_search_stays_where_a_rollout_has_stopped(support):
    both = rollout({"x": (FILM, OTHER)}, {"y": (OTHER,)}, {"z": (ADA, FILM)})
    half = rollout({"x": (ADA,)})
    measured = measure(both, half, rollout(), rollout(), **support)
    assert measured[RECALL_BY_SEARCH] == [
        (0.5 + 0.5) / 4,
        (0.5 + 0.5) / 4,
        (1 + 0.5) / 4,
    ]
    assert measured["supporting_recall"] == (1 + 0.5) / 4


def test_a_share_of_nothing_is_none():
    assert measure(rollout(wrote=())) == {
        "copied_queries": None,
        "repeated_queries": None,
        "unsupported_answers": None,
        "forged_observations": None,
        "cut_observations": None,
        "supporting_recall": None,
        RECALL_BY_SEARCH: [],
    }
    assert search_health([]) == measure(rollout(wrote=()))
    measured = measure(rollout(), supporting_ids=["a"])
    assert (measured["supporting_recall"], measured[RECALL_BY_SEARCH]) == (0, [])


def test_searches_are_needless_where_the_answer_was_right_without():
    searched = {"a": True, "b": False, "c": True, "d": True}
    right = {"a": True, "b": True, "c": False, "e": True}
    assert needless_searches(searched, right) == 1 / 2  # of a and b
    assert needless_searches(searched, {"c": False}) is None
