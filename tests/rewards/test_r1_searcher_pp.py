"""R1-Searcher++: format, and the group reward against equations 5 and 6."""

import dataclasses
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.protocols.table import PROTOCOLS
from rsearch.rewards.terms import (
    answer_cover_em,
    group_fewest_searches,
    r1_searcher_pp_format,
)
from rsearch.types import Outcome, Passage
from tests.rewards.play import PARIS, play

PP = PROTOCOLS["r1_searcher_pp"]
DOCS = (Passage("1", "Paris\nassistant \u5df4\u9ece"),)
SEARCH = "<|begin_external_search|> capital <|end_external_search|>"
RIGHT, WRONG = r"So \boxed{Paris}.", r"So \boxed{Lyon}."
LONG = r"\boxed{Paris 2 3 4 5 6 7 8 9 10 11}"


def rollout(num_searches, is_right, outcome=Outcome.ANSWERED):
    turns = [SEARCH] * num_searches + [RIGHT if is_right else WRONG]
    return dataclasses.replace(play(PP, turns, DOCS), outcome=outcome)


@pytest.mark.parametrize(
    ("turns", "is_right"),
    [
        ([RIGHT], True),
        ([SEARCH, SEARCH, WRONG], True),
        (["<|begin_internal_answer|> x <|end_internal_answer|>" + RIGHT], True),
        ([LONG], True),
        (["It is Paris."], False),
        (["<|begin_search_result|>x<|end_search_result|>" + RIGHT], False),
        (["<|begin_external_search|> x" + RIGHT], False),
        (["<|begin_external_search|> x" + SEARCH, RIGHT], False),
        (["<|end_external_search|>"], False),
        (["\u5df4\u9ece " + RIGHT], False),
        ([SEARCH, SEARCH, SEARCH], False),
    ],
)
def test_the_format_needs_a_box_and_a_search_for_every_query(turns, is_right):
    played = play(PP, turns, DOCS, max_searches=2)
    assert r1_searcher_pp_format(PARIS, (played,)) == [0 if is_right else -2]
    values = r1_searcher_pp_format(PARIS, (played,), good=1.0, bad=0.5)
    assert values == [1 if is_right else 0.5]


def test_an_answer_of_more_than_ten_words_is_wrong():
    rollouts = [play(PP, [turn]) for turn in (RIGHT, LONG, WRONG)]
    assert answer_cover_em(PARIS, rollouts, max_words=10) == [1, 0, 0]


def test_each_right_rollout_with_the_fewest_searches_earns_the_bonus():
    # Searches 0 1 1 3: mean 5/4, squares (25 + 1 + 1 + 49) / 16 = 76/16, sigma^2 19/16.
    group = [rollout(0, False), rollout(1, True), rollout(1, True), rollout(3, True)]
    bonus = 2 * 19 / 16
    values = group_fewest_searches(PARIS, group, eta=3.0)
    assert values == pytest.approx([0, bonus, bonus, 0])
    assert group_fewest_searches(PARIS, group) == [0, 2, 2, 0]
    # Sample variance: 76/16 over 3. Of the right ones only, 1 1 3: 8/9, or 4/3.
    sample = group_fewest_searches(PARIS, group, eta=9.0, ddof=1)
    assert sample == pytest.approx([0, 19 / 6, 19 / 6, 0])
    right = group_fewest_searches(PARIS, group, over="correct")
    assert right == pytest.approx([0, 16 / 9, 16 / 9, 0])
    right = group_fewest_searches(PARIS, group, over="correct", ddof=1, eta=9.0)
    assert right == pytest.approx([0, 8 / 3, 8 / 3, 0])


def test_equal_numbers_of_searches_and_groups_without_a_right_answer_earn_nothing():
    assert group_fewest_searches(PARIS, [rollout(2, True)] * 3) == [0, 0, 0]
    wrong = [rollout(0, False), rollout(4, False)]
    assert group_fewest_searches(PARIS, wrong) == [0, 0]
    alone = [rollout(3, True), rollout(0, False)]
    assert group_fewest_searches(PARIS, alone, over="correct", ddof=1) == [0, 0]
    assert group_fewest_searches(PARIS, []) == []


def test_a_failed_rollout_neither_counts_nor_earns():
    failed = rollout(0, True, Outcome.TOOL_ERROR)
    rest = [rollout(1, True), rollout(2, True)]
    assert group_fewest_searches(PARIS, [failed, *rest]) == [
        0,
        *group_fewest_searches(PARIS, rest),
    ]
    assert group_fewest_searches(PARIS, rest) == [0.5, 0]
    assert group_fewest_searches(PARIS, [failed]) == [0]


def test_a_long_answer_is_not_among_the_right_ones():
    wordy = play(PP, [LONG])
    group = [wordy, rollout(2, True)]
    assert group_fewest_searches(PARIS, group) == [0, 2]
    assert group_fewest_searches(PARIS, group, max_words=0) == [2, 0]


@given(
    st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=16),
    st.floats(0, 10),
)
def test_the_group_reward_follows_equations_five_and_six(group, eta):
    rollouts = [rollout(*fields) for fields in group]
    values = group_fewest_searches(PARIS, rollouts, eta=eta)
    sigma = statistics.pstdev([t for t, _ in group])
    right = [t for t, is_right in group if is_right]
    for (t, is_right), value in zip(group, values, strict=True):
        expected = 2 * sigma**2 if is_right and t == min(right) else 0
        assert value == pytest.approx(min(expected, eta), abs=1e-9)
