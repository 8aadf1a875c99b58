"""Terms weighed and summed, and configurations of them refused."""

import dataclasses

import numpy as np
import pytest
from ml_collections import ConfigDict

from rsearch.protocols import PROTOCOLS
from rsearch.rewards.group import check_terms, needs_judge, reward_group
from rsearch.types import Group, Outcome, Passage
from tests.rewards.play import PARIS, play

R_SEARCH = PROTOCOLS["r_search"]
DOCS = (Passage("1", '"Paris"\nParis is the capital.'),)
SEARCHES = "<search> capital </search>"
EVIDENCE = "<original_evidence> Paris </original_evidence>"
RIGHT, WRONG = "<answer> Paris </answer>", "<answer> Lyon </answer>"
TERMS = {"answer_f1": {"weight": 2.0}, "evidence_f1": {}, "r_search_format": {}}


def group(*conversations):
    return Group(PARIS, tuple(play(R_SEARCH, turns, DOCS) for turns in conversations))


def test_total_is_the_weighted_sum_of_the_parts():
    played = group([SEARCHES, EVIDENCE + RIGHT], [WRONG], ["hm"])
    totals, parts, after = reward_group(played, TERMS, judge=lambda c: ["Paris"])
    assert totals.dtype == np.float32 and list(parts) == list(TERMS)
    np.testing.assert_allclose(parts["answer_f1"], [1, 0, 0])
    np.testing.assert_allclose(parts["evidence_f1"], [1, 0, 0])
    np.testing.assert_allclose(parts["r_search_format"], [0.4, 0.4, 0])
    np.testing.assert_allclose(totals, [3.4, 0.4, 0])
    assert after == played


def test_a_judge_that_cannot_be_asked_takes_the_rollout_out_of_learning():
    played = group([SEARCHES, EVIDENCE + RIGHT], [SEARCHES, EVIDENCE + RIGHT], [RIGHT])
    totals, parts, after = reward_group(played, TERMS, judge=lambda c: ["Paris", None])
    outcomes = [r.outcome for r in after.rollouts]
    assert outcomes == [Outcome.ANSWERED, Outcome.JUDGE_ERROR, Outcome.ANSWERED]
    np.testing.assert_allclose(totals, [3.4, 0, 2.4])
    np.testing.assert_array_equal(np.isnan(parts["evidence_f1"]), [0, 1, 0])
    assert played.rollouts[1].outcome == Outcome.ANSWERED
    assert after.rollouts[1].segments is played.rollouts[1].segments


def test_a_failed_search_earns_nothing_and_stays_a_failed_search():
    played = group([SEARCHES, EVIDENCE + RIGHT])
    failed = dataclasses.replace(played.rollouts[0], outcome=Outcome.TOOL_ERROR)
    played = dataclasses.replace(played, rollouts=(failed,))
    totals, _, after = reward_group(played, TERMS, judge=lambda c: [None] * len(c))
    assert totals == [0] and after.rollouts[0].outcome == Outcome.TOOL_ERROR


def test_a_term_of_weight_zero_is_watched_and_excludes_nothing():
    played = group([SEARCHES, EVIDENCE + RIGHT])
    terms = ConfigDict({"answer_em": {}, "evidence_f1": {"weight": 0.0}})
    check_terms(terms)
    totals, parts, after = reward_group(played, terms, judge=lambda chats: [None])
    assert totals == [1] and np.isnan(parts["evidence_f1"]) and after == played


def test_the_judge_is_asked_once_for_a_group():
    calls = []

    def judge(chats):
        calls.append(len(chats))
        return ["Paris"] * len(chats)

    reward_group(group(*[[SEARCHES, EVIDENCE + RIGHT]] * 5), TERMS, judge=judge)
    assert calls == [5]


def test_a_term_that_asks_a_judge_needs_one():
    assert needs_judge(TERMS) and not needs_judge({"answer_em": {}})
    with pytest.raises(ValueError, match=r"evidence_f1 asks a judge.*judge\.source"):
        reward_group(group([RIGHT]), TERMS)
    with pytest.raises(ValueError, match="evidence_f1 asks a judge"):
        check_terms(TERMS, has_judge=False)
    check_terms(TERMS, has_judge=True)


@pytest.mark.parametrize(
    "terms",
    [
        {"answer_em": {}},
        {"answer_em": {"weight": 1, "normalize": "r1_searcher"}},
        {"answer_f1": {"decimals": 2}, "answer_cover_em": {"max_words": 10}},
        {"r_search_format": {"evidence": 0, "indicator": "tags"}},
        {"format_ok": {"bad": -2.0}},
        TERMS,
    ],
)
def test_terms_that_can_be_run_are_accepted_and_run(terms):
    check_terms(terms)
    reward_group(group([RIGHT]), terms, judge=lambda chats: ["x"] * len(chats))


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({}, "config.reward is empty"),
        ({"answr_em": {}}, r"config.reward.answr_em; did you mean answer_em\?"),
        ({"xyz": {}}, "config.reward.xyz; there is answer_cover_em, answer_em"),
        ({"answer_em": 1.0}, "config.reward.answer_em = 1.0: must be a dict"),
        ({"answer_em": {"normalise": "squad"}}, r"normalise; did you mean normalize\?"),
        (
            {"answer_em": {"judge": "x"}},
            "unknown setting config.reward.answer_em.judge",
        ),
        ({"answer_em": {"normalize": "squat"}}, "'squat': must be one of 'squad'"),
        ({"answer_em": {"weight": float("nan")}}, "weight = nan: must be a finite"),
        ({"answer_em": {"weight": True}}, "weight = True: must be a finite"),
        ({"answer_em": {"weight": "1"}}, "weight = '1': must be a finite"),
        ({"answer_f1": {"decimals": -1}}, "decimals = -1: must be None or"),
        (
            {"answer_cover_em": {"max_words": 2.5}},
            "max_words = 2.5: must be an integer",
        ),
        (
            {"r_search_format": {"indicator": "tag"}},
            "must be one of 'executed', 'tags'",
        ),
        ({"r_search_format": {"empty_gets_format": 1}}, "must be true or false"),
    ],
)
def test_terms_that_could_not_be_run_are_refused(terms, message):
    with pytest.raises(ValueError, match=message):
        check_terms(terms)
