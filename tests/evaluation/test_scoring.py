"""Means over questions, and intervals around them."""

import dataclasses
import json

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from rsearch.evaluation.scoring import (
    bootstrap_interval,
    score_groups,
    score_rows,
    scores_of_rows,
)
from rsearch.tools.search import search_use
from rsearch.types import (
    Group,
    Outcome,
    Passage,
    Question,
    Rollout,
    Segment,
    Source,
)

ROWS = [
    {"golden_answers": ["Paris"], "prediction": "paris"},
    {"golden_answers": ["Paris"], "prediction": "Paris France city"},
    {"golden_answers": ["Paris", "Lyon"], "prediction": None},
    {"golden_answers": ["Nice"], "prediction": "Rome"},
]


def test_scores_are_means_of_the_rows_scores():
    expected = {"n": 4, "em": 0.25, "cover_em": 0.5, "f1": 0.375}
    assert score_rows(ROWS, "squad") == expected
    np.testing.assert_allclose(scores_of_rows(ROWS, "squad")["f1"], [1, 0.5, 0, 0])


def test_no_rows_have_no_mean():
    with pytest.raises(ValueError, match="no rows"):
        score_rows([], "squad")


def test_interval_is_the_same_for_the_same_seed_only():
    values = np.arange(50) % 7
    assert bootstrap_interval(values) == bootstrap_interval(values, seed=0)
    assert bootstrap_interval(values) != bootstrap_interval(values, seed=1)


def test_interval_agrees_with_scipy():
    values = np.random.default_rng(1).random(200) < 0.4
    actual = bootstrap_interval(values, resamples=4000)
    reference = scipy.stats.bootstrap(
        (values.astype(float),),
        np.mean,
        n_resamples=4000,
        method="percentile",
        rng=np.random.default_rng(2),
    ).confidence_interval
    np.testing.assert_allclose(actual, reference, atol=0.01)


def test_interval_covers_the_true_mean_about_as_often_as_it_says():
    draw = np.random.default_rng(3)
    samples = draw.random((200, 60)) < 0.3
    inside = 0
    for sample in samples:
        low, high = bootstrap_interval(sample, resamples=300)
        inside += low <= 0.3 <= high
    assert 0.88 <= inside / 200 <= 0.99


@pytest.mark.parametrize("values", [[0.25], [1.0] * 9, [0.1] * 3])
def test_equal_values_have_an_interval_of_no_width(values):
    assert bootstrap_interval(values) == (values[0], values[0])


@pytest.mark.parametrize("values", [[], [0.5, float("nan")], [float("inf")]])
def test_interval_refuses_what_has_no_mean(values):
    with pytest.raises(ValueError, match="values"):
        bootstrap_interval(values)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_interval_lies_within_the_values(values):
    low, high = bootstrap_interval(values, resamples=20)
    assert min(values) - 1e-12 <= low <= high <= max(values) + 1e-12


SCORES = ("em", "f1", "cover_em")
OUTCOMES = tuple(o.value for o in Outcome)


def segment(source, text):
    ids = np.arange(len(text), dtype=np.int32)
    return Segment(source, ids, np.zeros(len(ids), np.float32), text)


def group(
    number, answer, golden, *, num_searches=0, outcome=Outcome.ANSWERED, **metadata
):
    """A rollout of 4 prompt tokens, 5 policy tokens and 3 for each search."""
    actual = (Passage("p", "Title\nText"),)
    searches = (search_use((f"query {number}",), (actual,)),) * num_searches
    shown = [segment(Source.SEARCH, "abc")] * num_searches
    segments = (segment(Source.PROMPT, "What"), segment(Source.POLICY, "12345"), *shown)
    question = Question(f"q{number}", f"Question {number}?", golden, metadata)
    rollout = Rollout(segments, answer, searches, outcome)
    return Group(question, (rollout,))


GROUPS = [
    group(0, "Paris", ("paris", "Lutetia")),  # exactly right
    group(1, "in Paris", ("Paris",), num_searches=2),  # F1 2/3, covers
    group(2, "Rome", ("Paris",), num_searches=1),  # wrong
    group(3, None, ("Paris",), num_searches=1, outcome=Outcome.TRUNCATED),
]


def test_a_summary_is_means_counts_and_intervals():
    row = score_groups(GROUPS, normalize="squad")
    assert row["n"] == 4
    assert row["em"] == 1 / 4
    assert row["f1"] == pytest.approx((1 + 2 / 3) / 4)
    assert row["cover_em"] == 2 / 4
    assert row["searches"] == (0 + 2 + 1 + 1) / 4
    assert row["policy_tokens"] == 5
    assert row["tokens"] == 4 + 5 + 3 * 4 / 4
    assert [row[o] for o in OUTCOMES] == [3, 0, 1, 0, 0]
    for name in SCORES:
        low, high = row[f"{name}_95"]
        assert 0 <= low <= row[name] <= high <= 1
    json.dumps(row, allow_nan=False)


def test_searches_are_counted_as_turns_and_as_queries_and_by_who_is_right():
    row = score_groups(GROUPS, normalize="squad")
    assert (row["searches_right"], row["searches_wrong"]) == (0, (2 + 1 + 1) / 3)
    (parallel,) = group(0, "x", ("x",), num_searches=1).rollouts
    lookup = search_use(("a", "b", "c"), ((), (), ()))
    parallel = dataclasses.replace(parallel, tool_uses=(lookup, lookup))
    actual = score_groups([Group(GROUPS[0].question, (parallel,))], normalize="squad")
    assert (actual["searches"], actual["queries"]) == (2, 6)
    none = score_groups(GROUPS[:1], normalize="squad")
    assert (none["searches_right"], none["searches_wrong"]) == (0, None)


def test_a_summary_is_split_by_kind_of_question():
    asked = [
        group(0, "Paris", ("Paris",), kind="bridge", known=True, num_searches=1),
        group(1, "Rome", ("Paris",), kind="bridge", known=False, num_searches=2),
        group(2, "yes", ("yes",), kind="single", known=False),
        group(3, "no", ("no",)),
    ]
    row = score_groups(asked, normalize="squad")
    scores = dict.fromkeys(SCORES, 0.5)
    assert row["by_kind"] == {
        "bridge": {"n": 2, **scores, "searches": 1.5},
        "single": {"n": 1, **dict.fromkeys(SCORES, 1.0), "searches": 0.0},
    }
    assert row["by_known"] == {
        "known": {"n": 1, **dict.fromkeys(SCORES, 1.0), "searches": 1.0},
        "not known": {"n": 2, **scores, "searches": 1.0},
    }
    bare = score_groups(GROUPS, normalize="squad")
    assert bare["by_kind"] == {} == bare["by_known"]


@pytest.mark.fault(77, "mean over nothing")
def test_where_all_have_failed_there_is_no_mean():
    def failed(number, outcome, kind):
        (rollout,) = group(0, None, ("x",)).rollouts
        rollout = dataclasses.replace(rollout, outcome=outcome, answer=None)
        question = Question(str(number), "?", ("x",), {"kind": kind})
        return Group(question, (rollout,))

    all_failed = [
        failed(0, Outcome.JUDGE_ERROR, "bridge"),
        failed(1, Outcome.TOOL_ERROR, "bridge"),
    ]
    row = score_groups(all_failed, normalize="squad")
    assert [row[name] for name in SCORES] == [None] * len(SCORES)
    assert row["em_95"] is None and (row["n"], row["judge_error"]) == (2, 1)
    wrong = failed(2, Outcome.MALFORMED, "single")
    row = score_groups([*all_failed, wrong], normalize="squad")
    assert row["em"] == 0.0
    assert [row["by_kind"][kind]["em"] for kind in ("bridge", "single")] == [None, 0.0]
    json.dumps(row, allow_nan=False)


def test_a_summary_of_equal_scores_has_an_interval_of_no_width():
    row = score_groups([GROUPS[0]] * 3, normalize="squad")
    assert row["em_95"] == [1.0, 1.0]


def test_normalisation_is_the_one_that_is_named():
    asked = [group(0, "no-one", ("no one",))]
    assert score_groups(asked, normalize="squad")["em"] == 0
    assert score_groups(asked, normalize="r1_searcher")["em"] == 1
