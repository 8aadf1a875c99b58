"""Means over questions, and intervals around them."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from rsearch.scoring import bootstrap_interval, score_rows, scores_of_rows

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
    found = bootstrap_interval(values, resamples=4000)
    reference = scipy.stats.bootstrap(
        (values.astype(float),),
        np.mean,
        n_resamples=4000,
        method="percentile",
        rng=np.random.default_rng(2),
    ).confidence_interval
    np.testing.assert_allclose(found, reference, atol=0.01)


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
