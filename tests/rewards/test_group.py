"""Reward terms weighted and summed, and invalid configurations of them refused."""

import collections
import dataclasses
import re

import numpy as np
import pytest
from ml_collections import ConfigDict

from rsearch.protocols.table import PROTOCOLS
from rsearch.rewards import terms as terms_module
from rsearch.rewards.group import check_terms, needs_judge, reward_groups
from rsearch.types import Group, Outcome, Passage, Question
from tests.rewards.play import PARIS, Judge, play, reward_group

R_SEARCH, SEARCH_R1 = PROTOCOLS["r_search"], PROTOCOLS["search_r1"]
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


@pytest.mark.fault(38, "excluded")
def test_a_failed_judge_call_takes_the_rollout_out_of_learning():
    played = group([SEARCHES, EVIDENCE + RIGHT], [SEARCHES, EVIDENCE + RIGHT], [RIGHT])
    totals, parts, after = reward_group(played, TERMS, judge=lambda c: ["Paris", None])
    outcomes = [r.outcome for r in after.rollouts]
    assert outcomes == [Outcome.ANSWERED, Outcome.JUDGE_ERROR, Outcome.ANSWERED]
    np.testing.assert_allclose(totals, [3.4, 0, 2.4])
    np.testing.assert_array_equal(np.isnan(parts["evidence_f1"]), [0, 1, 0])
    assert played.rollouts[1].outcome == Outcome.ANSWERED
    assert after.rollouts[1].segments is played.rollouts[1].segments


@pytest.mark.fault(38, "wrong count")
@pytest.mark.parametrize("replies", [[], ["Paris"], ["Paris"] * 3])
def test_a_wrong_number_of_judge_replies_is_an_error(replies):
    """Each chat has a reply of its own, so another count is a program error."""
    played = group([SEARCHES, EVIDENCE + RIGHT], [SEARCHES, EVIDENCE + RIGHT])
    with pytest.raises(AssertionError, match=f"{len(replies)}, 2"):
        reward_group(played, TERMS, judge=lambda chats: replies)


def test_a_failed_search_earns_nothing_and_stays_a_failed_search():
    played = group([SEARCHES, EVIDENCE + RIGHT])
    failed = dataclasses.replace(played.rollouts[0], outcome=Outcome.TOOL_ERROR)
    played = dataclasses.replace(played, rollouts=(failed,))
    totals, _, after = reward_group(played, TERMS, judge=lambda c: [None] * len(c))
    assert totals == [0] and after.rollouts[0].outcome == Outcome.TOOL_ERROR


def test_a_term_of_weight_zero_is_only_measured_and_excludes_nothing():
    played = group([SEARCHES, EVIDENCE + RIGHT])
    terms = ConfigDict({"answer_em": {}, "evidence_f1": {"weight": 0.0}})
    check_terms(terms)
    totals, parts, after = reward_group(played, terms, judge=lambda chats: [None])
    assert totals == [1] and np.isnan(parts["evidence_f1"]) and after == played


@pytest.mark.parametrize("first", ["evidence_f1", "group_fewest_searches"])
def test_a_rollout_whose_judge_failed_does_not_count_in_a_term_about_the_group(first):
    box = EVIDENCE + RIGHT
    played = group([SEARCHES, box], [SEARCHES] * 2 + [box], [SEARCHES] * 3 + [box])
    names = [first, *({"evidence_f1", "group_fewest_searches"} - {first})]
    terms = {name: {} for name in names}
    replies = [None, "Lyon", "Lyon"]
    totals, parts, _ = reward_group(played, terms, judge=lambda chats: replies)
    # Without the failed one, 2 searches are the fewest, and sigma^2 of 2 and 3 is 1/4.
    np.testing.assert_allclose(totals, [0, 0.5, 0])
    assert list(parts) == names
    # A judge that is only recorded decides nothing: sigma^2 of 1, 2 and 3 is 2/3.
    terms["evidence_f1"] = {"weight": 0.0}
    totals, *_ = reward_group(played, terms, judge=lambda chats: replies)
    np.testing.assert_allclose(totals, [4 / 3, 0, 0])


def some_groups():
    evidence = "<original_evidence> {} </original_evidence>".format
    made = []
    for i in range(3):
        asks = [[SEARCHES, evidence(f"{i} {j}") + RIGHT] for j in range(i)]
        question = Question(f"q{i}", f"Who is {i}?", ("Paris",))
        conversations = [*asks, *[[WRONG]] * (3 - i)]
        rollouts = [play(R_SEARCH, turns, DOCS, question) for turns in conversations]
        made.append(Group(question, tuple(rollouts)))
    return made


def test_the_judge_is_called_once_for_all_groups():
    judge = Judge("Paris", None, "Lyon")
    groups = some_groups()
    totals, parts, after = reward_groups(groups, TERMS, judge=judge)
    (call,) = judge.calls
    evidence = [chat[0]["content"].partition("passages:\n")[2] for chat in call]
    assert [text.split("\n")[0] for text in evidence] == ["1 0", "2 0", "2 1"]
    assert "Question: Who is 2?" in evidence[1]
    assert totals.shape == parts["evidence_f1"].shape == (3, 3)
    assert totals.dtype == np.float32
    expected = [[0, 0, 0], [1, 0, 0], [np.nan, 0, 0]]
    np.testing.assert_array_equal(parts["evidence_f1"], expected)
    failed = [[r.outcome == Outcome.JUDGE_ERROR for r in g.rollouts] for g in after]
    np.testing.assert_array_equal(failed, np.isnan(expected))
    assert totals[2][0] == 0


def test_groups_earn_together_what_each_earns_alone():
    def judge(chats):
        return [chat[0]["content"][-40:-20] for chat in chats]

    groups = some_groups()
    batched = reward_groups(groups, TERMS, judge=judge)
    for i, group in enumerate(groups):
        totals, parts, after = reward_group(group, TERMS, judge=judge)
        np.testing.assert_array_equal(batched[0][i], totals)
        assert batched[2][i] == after
        for name, values in parts.items():
            np.testing.assert_array_equal(batched[1][name][i], values)


def test_without_groups_or_evidence_the_judge_is_not_called():
    judge = Judge("x")
    totals, _, after = reward_groups([], TERMS, judge=judge)
    assert totals.size == 0 and after == () and not judge.calls
    reward_group(group([WRONG]), TERMS, judge=judge)
    assert not judge.calls


def test_a_term_whose_chats_depend_on_replies_is_refused(monkeypatch):
    def ask(question, rollouts, *, judge, again=False):
        replies = judge(tuple([{"role": "user", "content": "?"}] for _ in rollouts))
        if again and None not in replies:
            judge([[{"role": "user", "content": reply}] for reply in replies])
        return [float(reply == "yes") for reply in replies]

    monkeypatch.setitem(terms_module.TERMS, "ask", ask)
    judge = Judge("yes", "no")
    totals, *_ = reward_group(group([RIGHT], [RIGHT]), {"ask": {}}, judge=judge)
    assert totals.tolist() == [1, 0] and len(judge.calls) == 1
    with pytest.raises(ValueError, match=r"config\.reward\.ask.*once"):
        reward_group(
            group([RIGHT], [RIGHT]), {"ask": {"again": True}}, judge=Judge("yes", "no")
        )


def test_a_term_that_calls_a_judge_needs_one():
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
        {"overlong": {"max_tokens": 10, "buffer_tokens": 10}},
        {"r1_searcher_format": {"checks": "acd", "scope": "response"}},
        {"r1_searcher_format": {"checks": "llama_stage1"}},
        {"answer_cover_em": {"order": "substring", "wrong": -1}},
        TERMS,
    ],
)
def test_terms_that_can_be_run_are_accepted_and_run(terms):
    check_terms(terms)
    reward_group(
        group([RIGHT]),
        terms,
        protocol=SEARCH_R1,
        judge=lambda chats: ["x"] * len(chats),
    )


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
        ({"answer_em": {"weight": 1e300}}, r"weight = 1e\+300: must be a finite"),
        ({"answer_em": {"weight": 10**400}}, "weight = 10+: must be a finite"),
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
        ({"answer_em": {"scope": "all"}}, "one of 'policy', 'transcript', 'response'"),
        ({"r_search_format": {"scope": "response"}}, "one of 'policy', 'transcript'"),
        ({"r1_searcher_format": {"checks": "ax"}}, "checks = 'ax': must be some of"),
        ({"r1_searcher_format": {"checks": ""}}, "letters a to g, or one of paper"),
        ({"r1_searcher_format": {"checks": 3}}, "r1_searcher_format.checks = 3"),
        ({"group_fewest_searches": {"ddof": -1}}, "ddof = -1: must be an integer"),
        ({"group_fewest_searches": {"over": "some"}}, "one of 'all', 'correct'"),
        ({"overlong": {"max_tokens": 10}}, "overlong.buffer_tokens is missing"),
        (
            {"overlong": {"max_tokens": 10, "buffer_tokens": 11}},
            "buffer_tokens = 11: must be from 1 to max_tokens = 10",
        ),
        (
            {"overlong": {"max_tokens": 10, "buffer_tokens": 0}},
            "buffer_tokens = 0: must be from 1",
        ),
    ],
)
def test_terms_that_could_not_be_run_are_refused(terms, message):
    with pytest.raises(ValueError, match=message):
        check_terms(terms)


def mentions(question, rollouts, *, pattern, times=(1, 2), bonus: float | None = None):
    """A user's term, whose settings have any plain type, annotated or not."""
    return [float(pattern in (r.answer or "")) * sum(times) for r in rollouts]


def anything(question, rollouts, flag=True, **settings):
    """A user's term that accepts any settings."""
    return np.full(len(rollouts), len(settings) + flag)


@pytest.fixture
def own_terms(monkeypatch):
    monkeypatch.setitem(terms_module.TERMS, "mentions", mentions)
    monkeypatch.setitem(terms_module.TERMS, "anything", anything)


@pytest.mark.parametrize(
    ("terms", "value"),
    [
        ({"mentions": {"pattern": "Par"}}, 3),
        ({"mentions": {"pattern": "Par", "times": (2, 0.5), "bonus": None}}, 2.5),
        ({"mentions": {"pattern": "Par", "times": [4], "bonus": -1.5}}, 4),
        ({"mentions": {"pattern": "Lyon", "weight": 2}}, 0),
        ({"anything": {}}, 1),
        ({"anything": {"flag": False, "x": None, "y": ("a", 1), "z": True}}, 3),
        ({"again": {"term": "mentions", "pattern": "P", "times": ()}}, 0),
    ],
)
def test_settings_of_a_term_may_be_of_any_plain_type(own_terms, terms, value):
    check_terms(terms)
    totals, parts, _ = reward_group(group([RIGHT]), terms)
    (name,) = terms
    assert parts[name].tolist() == [value]
    assert totals.tolist() == [value * terms[name].get("weight", 1)]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"pattern": "x", "bonus": "y"}, "mentions.bonus = 'y'"),
        ({"pattern": float("nan")}, "mentions.pattern = nan"),
        ({"pattern": {"a": 1}}, "mentions.pattern = {'a': 1}"),
        ({"times": 1}, "mentions.pattern is missing"),
        ({"patern": "x"}, "mentions.patern; did you mean pattern"),
        ({"pattern": "x", "term": "no_such:thing"}, "mentions.term = 'no_such:thing'"),
        ({"pattern": "x", "term": 3}, "mentions.term = 3"),
    ],
)
def test_wrong_settings_of_a_users_term_are_named(own_terms, settings, field):
    with pytest.raises(ValueError, match=re.escape(field)):
        check_terms({"mentions": settings})


@pytest.mark.parametrize("name", ["seconds", "idle_seconds"])
def test_a_term_whose_metric_would_be_a_time_is_refused(own_terms, name):
    """The time of all terms is reward_seconds, which would replace its mean."""
    with pytest.raises(ValueError, match=rf"config\.reward\.{name}.*reward_{name}"):
        check_terms({name: {"term": "anything"}})


@pytest.mark.parametrize("name", ["weight", "term"])
def test_an_argument_with_the_name_of_a_general_setting_is_refused(monkeypatch, name):
    functions = {
        "weight": lambda question, rollouts, *, weight=2: [weight for _ in rollouts],
        "term": lambda question, rollouts, *, term="x": [len(term) for _ in rollouts],
    }
    monkeypatch.setitem(terms_module.TERMS, "mine", functions[name])
    with pytest.raises(ValueError, match=f"config.reward.mine.*'{name}'"):
        check_terms({"mine": {}})


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([1.0], "1 values for 2 rollouts"),
        ([1.0, float("nan")], "nan"),
        ([1.0, float("inf")], "inf"),
        ([1.0, 1e39], "1e+39"),  # infinite in float32
        ([1.0, 10**400], "inf"),
        ({0: 1.0, 1: 2.0}, "a dict"),
        ({1.0, 2.0}, "a set"),
        (["1", "2"], "'1'"),
        ([None, 1.0], "None"),
        (1.0, "1.0"),
        (None, "None"),
        ("12", "'12'"),
        (np.ones(()), "array(1.)"),
        (np.ones((2, 1)), "array([1.])"),
        (collections.deque([1, 2]), None),
    ],
)
def test_a_wrong_return_value_of_a_term_is_an_error_with_its_name(
    monkeypatch, values, reason
):
    def mine(question, rollouts):
        return values

    monkeypatch.setitem(terms_module.TERMS, "mine", mine)
    if reason is None:  # any sequence of numbers will do
        reward_group(group([RIGHT], [WRONG]), {"mine": {}})
        return
    with pytest.raises(ValueError, match="mine") as caught:
        reward_group(group([RIGHT], [WRONG]), {"mine": {}})
    message = str(caught.value)
    assert f"{__name__}:" in message and reason in message and "\n" not in message
