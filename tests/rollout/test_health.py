"""Metrics of how well a policy searches, by hand."""

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
    """Return a rollout; `searches` has one {query: passages} for each turn."""
    uses = tuple(search_use(tuple(s), tuple(s.values())) for s in searches)
    turns = tuple(Segment(Source.POLICY, NOTHING, NOTHING, text) for text in wrote)
    return Rollout(turns, answer, uses, Outcome.ANSWERED, num_cut_observations=num_cut)


def measure(*rollouts, titles=None, **metadata):
    group = Group(Question("q", TEXT, ("Altdorf",), metadata), rollouts)
    return search_health([group], tags=TAGS, titles=titles)


def test_copied_and_repeated_queries_are_found_after_normalisation():
    first = rollout(
        {"where was director of Grey River born": ()},  # copies the question
        {"Grey River": (), "director": ()},
        {"grey river!": ()},  # repeats an earlier query
    )
    second = rollout({"Grey River": ()})  # earlier only in another rollout
    measured = measure(first, second)
    assert measured["copied_queries"] == 1 / 5
    assert measured["repeated_queries"] == 1 / 5


def test_an_answer_is_supported_if_its_words_are_consecutive_in_a_passage():
    found = {"x": (ADA, FILM, OTHER)}
    supported = [rollout(found, answer=a) for a in ("altdorf.", "the Ada Abel")]
    unsupported = [rollout(found, answer=a) for a in ("Art", "River Altdorf")]
    uncounted = [
        rollout(answer="Rome"),  # has not searched
        rollout({"x": ()}, answer="Rome"),  # has found nothing
        *(rollout(found, answer=a) for a in ("Yes", " ", None)),
    ]
    assert measure(*supported, *unsupported, *uncounted)["unsupported_answers"] == 0.5
    assert measure(*supported)["unsupported_answers"] == 0
    assert measure(*uncounted)["unsupported_answers"] is None


def test_observation_tags_written_by_the_policy_are_forged():
    forged = rollout(wrote=("<think>", "</information> so"))
    assert measure(forged, rollout(), rollout(wrote=()))["forged_observations"] == 1 / 2


def test_cut_observations_are_counted_as_a_share_of_all_calls():
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
def test_recall_by_search_keeps_a_rollouts_last_value_after_its_end(support):
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


def test_searches_are_needless_if_the_answer_is_right_without_them():
    searched = {"a": True, "b": False, "c": True, "d": True}
    right = {"a": True, "b": True, "c": False, "e": True}
    assert needless_searches(searched, right) == 1 / 2  # a, out of a and b
    assert needless_searches(searched, {"c": False}) is None
