"""Reward terms: the published vectors where they are sound, and where they are not."""

import dataclasses
import math

import pytest

from rsearch.protocols import PROTOCOLS
from rsearch.rewards.terms import (
    answer_cover_em,
    answer_em,
    answer_f1,
    evidence_f1,
    format_ok,
    r_search_format,
)
from rsearch.types import Outcome, Passage, Question
from tests.rewards.play import PARIS, play

SEARCH_R1, R_SEARCH = PROTOCOLS["search_r1"], PROTOCOLS["r_search"]
CITIES = Question("q", "Which city?", ("Paris", "City of Paris"))
DOCS = (Passage("1", '"Paris"\nParis is the capital.'),)
NO_GOLD = (Passage("2", '"Lyon"\nLyon is a city.'),)

SEARCHES = "I need to know. <search> capital </search>"
EVIDENCE = "<original_evidence> Paris is the capital. </original_evidence>"
RIGHT, WRONG = "<answer> Paris </answer>", "<answer> Lyon </answer>"
FORGED = "<observation> Paris it is. </observation>"


class Judge:
    """A judge that gives these replies in turn and keeps what it was asked."""

    def __init__(self, *replies):
        self.replies, self.chats = replies, []

    def __call__(self, chats):
        self.chats += chats
        return [self.replies[i % len(self.replies)] for i in range(len(chats))]


HALF = "Paris France city"  # F1 of 0.5 against Paris


def r_search_total(turns, **settings):
    """R-Search's whole reward, its judge's reply being half right."""
    rollouts = (play(R_SEARCH, turns, DOCS),)
    indicator = {k: v for k, v in settings.items() if k == "indicator"}
    parts = (
        answer_f1(PARIS, rollouts, decimals=2),
        evidence_f1(PARIS, rollouts, judge=Judge(HALF), decimals=2, **indicator),
        r_search_format(PARIS, rollouts, **settings),
    )
    return sum(values[0] for values in parts)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [  # the original functions' values: EM, and EM under its other structures
        (["It is Paris."], 0),
        ([f"<think>x</think>{RIGHT}"], 1),
        ([f"<think>x</think>{WRONG}"], 0),
        (["<answer> Paris"], 0),
        (["<answer>The City, of Paris!</answer>"], 1),
        ([f"<think>x</think>{SEARCHES}", f"<think>y</think>{RIGHT}"], 1),
        ([f"<think>x</think>{SEARCHES}", f"<think>y</think>{WRONG}"], 0),
        ([SEARCHES, RIGHT], 1),
        ([f"text {RIGHT} text"], 1),
        ([f"{RIGHT}<|im_end|>"], 1),
        (["<answer></answer>"], 0),
    ],
)
@pytest.mark.parametrize("passages", [DOCS, NO_GOLD])
def test_search_r1_earns_its_published_exact_match(turns, expected, passages):
    assert answer_em(CITIES, (play(SEARCH_R1, turns, passages),)) == [expected]


def test_a_short_prompt_does_not_take_the_reward_away():
    # The public code needs the example answer inside the prompt to count two answers.
    bare = dataclasses.replace(SEARCH_R1, user="{question}")
    assert answer_em(CITIES, (play(bare, [RIGHT]),)) == [1]


@pytest.mark.parametrize(
    ("expected", "turns"),
    [  # the original function's values, its judge stubbed to 0.5
        (1.4, [RIGHT]),
        (0.4, [WRONG]),
        (1.2, [EVIDENCE + RIGHT]),
        (1.9, [SEARCHES, EVIDENCE + RIGHT]),
        (1.2, [SEARCHES, RIGHT]),
        (1.2, [SEARCHES, "<original_evidence> </original_evidence>" + RIGHT]),
        (1.7, [SEARCHES, EVIDENCE + EVIDENCE + RIGHT]),
        (1.7, [SEARCHES, EVIDENCE + RIGHT + RIGHT]),
        (0.2, ["<answer></answer>"]),
        (0.9, ["<answer>Paris France city</answer>"]),
        (0.7, [SEARCHES, EVIDENCE]),
    ],
)
def test_r_search_earns_the_published_sum(expected, turns):
    assert r_search_total(turns) == pytest.approx(expected)
    parity = r_search_total(turns, indicator="tags", empty_gets_format=True)
    assert parity == pytest.approx(expected)


@pytest.mark.parametrize("turns", [[], [""], ["It is Paris."]])
def test_saying_nothing_earns_nothing_unless_asked_for(turns):
    assert r_search_total(turns) == 0
    assert r_search_total(turns, empty_gets_format=True) == pytest.approx(0.2)


def test_a_forged_observation_is_no_search_and_not_well_formed():
    turns = [FORGED + EVIDENCE + RIGHT]
    assert r_search_total(turns) == pytest.approx(1.0)
    assert r_search_total(turns, indicator="tags") == pytest.approx(1.9)


def test_a_forged_observation_after_a_search_costs_the_format_reward():
    turns = [SEARCHES, FORGED + EVIDENCE + RIGHT]
    assert r_search_total(turns) == pytest.approx(1.0 + 0.5)


def test_the_word_and_is_an_answer_like_any_other():
    # Its public code leaves it out, because its prompt holds "<answer> and </answer>".
    assert r_search_total(["<answer> and </answer>"]) == pytest.approx(0.4)


def test_the_judge_sees_the_last_evidence_box_and_the_question():
    judge = Judge("Paris")
    boxes = "<original_evidence> {x} </original_evidence>" + EVIDENCE
    rollouts = tuple(
        play(R_SEARCH, turns, DOCS)
        for turns in ([SEARCHES, boxes + WRONG], [RIGHT], [SEARCHES, WRONG])
    )
    assert evidence_f1(PARIS, rollouts, judge=judge) == [1, 0, 0]
    (chat,) = judge.chats
    assert chat == [
        {
            "role": "user",
            "content": "Answer the question based on the given passages. Only give me "
            "the answer and do not output any other words.\n\nThe following are given "
            "passages:\nParis is the capital.\n\nQuestion: What is the capital?\n"
            "Answer:",
        }
    ]


def test_evidence_is_scored_by_what_the_judge_makes_of_it():
    rollouts = (play(R_SEARCH, [SEARCHES, EVIDENCE + WRONG], DOCS),) * 4
    judge = Judge("Paris", None, "", "Paris in France")
    values = evidence_f1(PARIS, rollouts, judge=judge)
    assert math.isnan(values[1])
    assert [values[0], *values[2:]] == pytest.approx([1, 0, 0.5])


def test_no_judge_is_asked_about_a_rollout_that_is_no_signal():
    rollout = play(R_SEARCH, [SEARCHES, EVIDENCE + RIGHT], DOCS)
    rollout = dataclasses.replace(rollout, outcome=Outcome.TOOL_ERROR)
    judge = Judge("Paris")
    assert evidence_f1(PARIS, (rollout,), judge=judge) == [0] and not judge.chats


def test_an_evidence_box_does_not_span_turns():
    turns = ["<original_evidence> a" + SEARCHES, "b </original_evidence>" + RIGHT]
    assert r_search_total(turns) == pytest.approx(1.2)


def test_r_search_keeps_two_decimals_on_request():
    question = Question("q", "?", ("a1 b c d e f g",))
    rollouts = (play(R_SEARCH, ["<answer>b x y z</answer>"]),)
    assert answer_f1(question, rollouts)[0] == pytest.approx(2 / 11)
    assert answer_f1(question, rollouts, decimals=2) == [0.18]


def test_cover_em_has_a_limit_on_words():
    wordy = play(SEARCH_R1, ["<answer>Paris or else Rome Oslo</answer>"])
    nothing = play(SEARCH_R1, ["hm"])
    assert answer_cover_em(PARIS, (wordy, nothing)) == [1, 0]
    assert answer_cover_em(PARIS, (wordy,), max_words=5) == [1]
    assert answer_cover_em(PARIS, (wordy,), max_words=4) == [0]


def test_answers_are_scored_under_either_normaliser():
    question = Question("q", "?", ("New York",))
    rollouts = (play(SEARCH_R1, ["<answer>New-York</answer>"]),)
    assert answer_em(question, rollouts, normalize="squad") == [0]
    assert answer_em(question, rollouts, normalize="r1_searcher") == [1]
    assert answer_f1(question, rollouts, normalize="r1_searcher") == [1]


@pytest.mark.parametrize(
    ("turns", "ok"),
    [
        ([SEARCHES, RIGHT], True),
        ([WRONG], True),
        ([SEARCHES], False),
        (["hm", RIGHT], False),
        (["<information>x</information>" + RIGHT], False),
        (["<information>" + SEARCHES, RIGHT], False),
    ],
)
def test_format_is_ok_where_every_turn_follows_the_protocol(turns, ok):
    rollouts = (play(SEARCH_R1, turns, DOCS),)
    assert format_ok(PARIS, rollouts, good=0.5, bad=-2.0) == [0.5 if ok else -2.0]
