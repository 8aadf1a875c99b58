"""Intervals and paired tests, compared with arithmetic by hand and with scipy."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from rsearch.evaluation.statistics import (
    bootstrap_interval,
    macro_mean,
    mcnemar_p,
    paired_difference,
    wilson_interval,
)
from tests.small_run import ROOT


@pytest.mark.parametrize(("num_right", "n"), [(0, 8), (1, 4), (5, 200), (8, 8)])
def test_wilsons_interval_is_the_formula(num_right, n):
    """(p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)."""
    z, p = 1.959964, num_right / n
    middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    expected = (middle - half, middle + half)
    assert wilson_interval(num_right, n) == pytest.approx(expected, abs=1e-6)


def test_wilsons_interval_is_scipys_to_the_bit():
    for n in (1, 2, 7, 200, 7405):
        for num_right in {0, 1, n // 3, n - 1, n}:
            test = scipy.stats.binomtest(num_right, n)
            expected = test.proportion_ci(0.95, method="wilson")
            assert wilson_interval(num_right, n) == (expected.low, expected.high)


@pytest.mark.parametrize(("n", "points"), [(125, 8.8), (500, 4.4), (100, 9.8)])
def test_half_of_an_interval_at_50_percent_is_about_the_normal_ones(n, points):
    low, high = wilson_interval(n // 2, n)
    assert 100 * (high - low) / 2 == pytest.approx(points, abs=0.2)


def test_an_interval_has_a_width_even_if_none_of_eight_are_right():
    assert wilson_interval(0, 8) == (0.0, pytest.approx(3.8415 / (8 + 3.8415), 1e-4))


@pytest.mark.parametrize(("num_right", "n"), [(0, 0), (-1, 8), (9, 8)])
def test_wilson_refuses_impossible_counts(num_right, n):
    with pytest.raises(ValueError, match="num_"):
        wilson_interval(num_right, n)


def test_bootstrap_is_the_same_for_the_same_seed_only():
    values = np.arange(50) % 7 / 7
    assert bootstrap_interval(values) == bootstrap_interval(values, seed=0)
    assert bootstrap_interval(values) != bootstrap_interval(values, seed=1)


def test_bootstrap_agrees_with_scipy():
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


def test_bootstrap_covers_the_true_mean_about_as_often_as_its_level():
    draw = np.random.default_rng(3)
    samples = draw.random((200, 60)) < 0.3
    inside = 0
    for sample in samples:
        low, high = bootstrap_interval(sample, resamples=300)
        inside += low <= 0.3 <= high
    assert 0.88 <= inside / 200 <= 0.99


@pytest.mark.parametrize(
    ("values", "bounds", "expected"),
    [
        ([0.25], {}, (0, 1)),  # one value rules out nothing
        ([0.0] * 3, {}, (0, 1 - math.sqrt(0.05))),
        ([1.0] * 3, {}, (math.sqrt(0.05), 1)),
        ([0.5] * 3, {"level": 0.75}, (0.25, 0.75)),  # p = 1/2
        ([0.0] * 3, {"level": 0.75, "lowest": -1}, (-0.5, 0.5)),
        ([0.3, 0.1 + 0.2], {}, (0.015, 0.965)),  # they differ by rounding alone
    ],
)
def test_the_interval_of_equal_values_leaves_out_what_their_number_rules_out(
    values, bounds, expected
):
    assert bootstrap_interval(values, **bounds) == pytest.approx(expected)


def test_the_interval_of_equal_values_holds_the_mean_as_often_as_its_level():
    """Adds up the chances of 4 equal values whose interval misses the mean."""
    for p in np.linspace(0.01, 0.99, 99):  # chance of 1, otherwise 0
        misses = 0.0
        for value, chance in ((1.0, p**4), (0.0, (1 - p) ** 4)):
            low, high = bootstrap_interval([value] * 4)
            misses += chance * (not low <= p <= high)
        assert misses <= 0.05


@pytest.mark.parametrize("values", [[], [0.5, float("nan")], [float("inf")], [1.5]])
def test_bootstrap_refuses_values_that_are_not_scores(values):
    with pytest.raises(ValueError, match="values"):
        bootstrap_interval(values)


def test_the_interval_of_eight_equal_questions_is_the_documented_one():
    text = (ROOT / "docs" / "commands.md").read_text()
    difference, (low, high) = paired_difference([1, 0] * 4, [1, 0] * 4)
    assert difference == 0 and f"{100 * low:+.1f} to {100 * high:+.1f}" in text


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_interval_lies_within_the_bounds_and_around_equal_values(values):
    low, high = bootstrap_interval(values, resamples=20)
    assert 0 <= low <= high <= 1
    if len(set(values)) == 1:
        assert low <= values[0] <= high


def test_a_macro_mean_counts_each_dataset_once():
    """By hand: half-widths of 0.3 and 0.4 below, 0.06 and 0.08 above, halved."""
    mean, (low, high) = macro_mean([0.5, 0.9], [(0.2, 0.56), (0.5, 0.98)])
    assert (mean, low, high) == pytest.approx((0.7, 0.7 - 0.25, 0.7 + 0.05))
    single = macro_mean([0.5], [(0.2, 0.6)])
    assert single == (0.5, (pytest.approx(0.2), pytest.approx(0.6)))
    for means, intervals in (([], []), ([0.5, 0.5], [(0, 1)])):
        with pytest.raises(ValueError, match="intervals"):
            macro_mean(means, intervals)


def test_the_interval_of_a_macro_mean_of_large_datasets_is_the_normal_one():
    """It is sqrt(sum(p(1-p)/n)) / S if Wilson's intervals are nearly symmetric."""
    rights, n = (3000, 7000), 10_000
    intervals = [wilson_interval(k, n) for k in rights]
    _, (low, high) = macro_mean([k / n for k in rights], intervals)
    half = 1.96 * math.sqrt(2 * 0.21 / n) / 2
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-4)


def test_paired_differences_leave_out_what_both_systems_share():
    first = np.array([1, 1, 1, 0] * 50)
    second = np.array([1, 0, 1, 0] * 50)
    difference, (low, high) = paired_difference(first, second)
    assert difference == 0.25
    reference = scipy.stats.bootstrap(
        (first, second),
        lambda a, b, axis: (a - b).mean(axis),
        paired=True,
        vectorized=True,
        n_resamples=2000,
        method="percentile",
        rng=np.random.default_rng(2),
    ).confidence_interval
    np.testing.assert_allclose((low, high), reference, atol=0.01)
    mirrored, (minus_high, minus_low) = paired_difference(second, first)
    assert (mirrored, minus_low, minus_high) == pytest.approx((-0.25, -low, -high))
    difference, (low, high) = paired_difference(first, first)
    assert difference == 0 and -0.02 < low < 0 < high < 0.02
    with pytest.raises(ValueError, match="2 and 1 scores"):
        paired_difference([1, 0], [1])


@pytest.mark.parametrize(
    ("only_first", "only_second", "expected"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (5, 0, 2 / 2**5),
        (1, 5, 2 * (1 + 6) / 2**6),  # the tails of 6 tosses of a coin
        (3, 3, 1.0),
    ],
)
def test_mcnemars_p_is_the_binomial_test_of_the_questions_that_differ(
    only_first, only_second, expected
):
    first = [1] * only_first + [0] * only_second + [1, 0, 0]
    second = [0] * only_first + [1] * only_second + [1, 0, 0]
    assert mcnemar_p(first, second) == pytest.approx(expected)


def test_mcnemar_refuses_scores_between_0_and_1():
    with pytest.raises(ValueError, match=r"0\.5: expected 0 or 1"):
        mcnemar_p([1, 0.5], [1, 1])
