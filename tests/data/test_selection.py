"""Selection of questions: levels, mixes and draws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.data.selection import (
    difficulty,
    first_drawn,
    select_mix,
    share,
    shuffled_indices,
)
from rsearch.types import Question


def asked(count, dataset=None):
    metadata = {} if dataset is None else {"data_source": dataset}
    return [Question(f"{dataset}{i}", "?", ("x",), metadata) for i in range(count)]


@pytest.mark.parametrize(
    ("needed", "level"),
    [
        (1, "easy"),
        (9, "easy"),
        (10, "medium"),
        (20, "medium"),
        (21, "hard"),
        (None, "hard"),
    ],
)
def test_levels_are_those_of_the_paper(needed, level):
    assert difficulty(needed, easy_below=10, hard_above=20) == level


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 5))
def test_draws_are_nested_and_reproducible(small, more, seed):
    items = asked(60)
    few = set(first_drawn(items, small or 1, seed=seed))
    assert few <= set(first_drawn(items, (small or 1) + more, seed=seed))
    assert shuffled_indices(items, seed=seed) == shuffled_indices(items, seed=seed)
    assert sorted(shuffled_indices(items, seed=seed)) == list(range(60))


def test_a_share_keeps_the_order_and_depends_on_the_seed():
    items = asked(100)
    taken = share(items, 0.25, seed=0)
    assert len(taken) == 25 and taken == sorted(taken)
    assert taken != share(items, 0.25, seed=1)
    assert share(items, 0.0, seed=0) == [] and len(share(items, 1.0, seed=0)) == 100


def test_a_draw_does_not_move_when_questions_are_added():
    few, many = asked(10), asked(20)
    order = [i for i in shuffled_indices(many, seed=3) if i < 10]
    assert order == shuffled_indices(few, seed=3)


def test_a_mix_takes_its_counts_of_each_dataset_and_level():
    questions = asked(30, "hotpotqa") + asked(30, "2wikimultihopqa")
    levels = ["easy", "medium", "hard"] * 20
    mix = ("hotpotqa medium 2", "hotpotqa hard 3", "2wikimultihopqa medium 0.5")
    taken, short = select_mix(questions, levels, mix, seed=0)
    pairs = [(questions[i].metadata["data_source"], levels[i]) for i in taken]
    assert pairs.count(("hotpotqa", "medium")) == 2
    assert pairs.count(("hotpotqa", "hard")) == 3
    assert pairs.count(("2wikimultihopqa", "medium")) == 5
    assert len(pairs) == 10 and not short and taken == sorted(taken)


def test_a_range_takes_what_a_smaller_draw_left():
    questions, levels = asked(20), ["medium"] * 20
    (first, _), (rest, _), (both, _), (end, _) = (
        select_mix(questions, levels, (f"medium {amount}",), seed=0)
        for amount in ("8", "8:15", "15", "15:")
    )
    assert not set(first) & set(rest) and sorted(first + rest) == both
    assert len(rest) == 7 and len(end) == 5 and not set(end) & set(both)


def test_too_few_questions_are_all_taken_and_reported():
    taken, short = select_mix(asked(3), ["hard"] * 3, ("hard 5", "easy 1"), seed=0)
    assert taken == [0, 1, 2]
    assert short == [
        "'hard 5': takes 3 of 3 questions",
        "'easy 1': takes 0 of 0 questions",
    ]


def test_a_mix_of_all_levels_leaves_out_questions_without_a_level():
    mix = ("easy 0:", "medium 0:", "hard 0:")
    assert select_mix(asked(3), ["hard", None, "easy"], mix, seed=0) == ([0, 2], [])


def test_a_cap_draws_evenly_from_a_share_and_the_rest():
    """The share takes the first items of one draw; the cap uses another draw."""
    right = [Question(f"right {i}", "?", ("a",)) for i in range(400)]
    wrong = [Question(f"wrong {i}", "?", ("a",)) for i in range(100)]
    selected = [right[i] for i in share(right, 0.25, seed=0)] + wrong
    taken = [selected[i].id.split()[0] for i in first_drawn(selected, 100, seed=0)]
    assert 35 <= taken.count("right") <= 65


@pytest.mark.parametrize("entry", ["hard 5:", "hard 4:2"])
def test_a_range_that_takes_nothing_is_reported(entry):
    questions, levels = asked(5), ["hard"] * 5
    assert select_mix(questions, levels, ("hard 4:",), seed=0)[1] == []
    taken, short = select_mix(questions, levels, (entry,), seed=0)
    assert (taken, short) == ([], [f"{entry!r}: takes 0 of 5 questions"])
