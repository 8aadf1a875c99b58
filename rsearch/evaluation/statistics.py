"""Intervals of scores, and differences between two systems on the same questions.

Scores are of one question each and lie in [0, 1]. Questions are taken as independent
draws; the spread over seeds of training is a part of `seed_interval` alone.
"""

import math
from collections.abc import Sequence

import numpy as np

LEVEL = 0.95  # the share of intervals that hold the true value


def wilson_interval(num_right: int, num_questions: int) -> tuple[float, float]:
    """Return the score interval of a proportion (Wilson 1927), as scipy computes it.

    It has a width where all are right or all are wrong, where a bootstrap has none.

    Args:
        num_right: from 0 to `num_questions`.
        num_questions: at least 1.

    Returns:
        (low, high), fractions from 0 to 1.
    """
    from scipy import special  # here, since no start should wait for it

    assert 0 <= num_right <= num_questions > 0, (num_right, num_questions)
    # By hand, in scipy's order of operations: importing scipy.stats takes a second.
    n, z = num_questions, float(special.ndtri(0.5 + 0.5 * LEVEL))
    p = num_right / n
    center = (2 * n * p + z**2) / (2 * (n + z**2))
    half = z / (2 * (n + z**2)) * math.sqrt(4 * n * p * (1 - p) + z**2)
    low = 0.0 if num_right == 0 else center - half
    high = 1.0 if num_right == n else center + half
    return low, high


def bootstrap_interval(
    values: Sequence[float] | np.ndarray,
    *,
    lowest: float = 0.0,
    highest: float = 1.0,
    seed: int = 0,
    resamples: int = 2000,
) -> tuple[float, float]:
    """Return the interval of a mean by Efron's percentile bootstrap.

    The same values and seed give the same interval. Resamples of values that are all
    equal say nothing about the others that there may be, and would give an interval of
    no width. n values equal to one of probability p or less come with a probability of
    p^(n-1) at most, summed over all such values. So p = (1 - LEVEL)^(1/(n-1)) is a
    bound on the probability of the value seen, c, and the mean lies between
    p c + (1-p) lowest and p c + (1-p) highest: about 3/n where c is 0, and all that is
    possible for a single value.

    Args:
        values: [n] numbers, one a question, at least one.
        lowest, highest: what a value can be.
        seed: of the draws.
        resamples: how many samples of n are drawn, with replacement.

    Returns:
        (low, high), around the mean and in the unit of the values.
    """
    values = np.asarray(values, np.float64)
    is_inside = (lowest <= values) & (values <= highest)  # NaN is not
    assert values.ndim == 1 and len(values) and is_inside.all(), values
    if (values == values[0]).all():
        p = (1 - LEVEL) ** (1 / (len(values) - 1)) if len(values) > 1 else 0.0
        c = float(values[0])
        return c - (1 - p) * (c - lowest), c + (1 - p) * (highest - c)
    draw = np.random.default_rng(seed)
    # One resample at a time: memory stays at n, however many questions there are.
    means = [
        values[draw.integers(0, len(values), len(values))].mean()
        for _ in range(resamples)
    ]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def seed_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean over seeds, by Student's t.

    The seeds' numbers are taken as independent draws from one normal distribution; they
    hold all that varies between seeds, the draw of the questions included.

    Args:
        values: [n] numbers, one a seed, n at least 2.

    Returns:
        (low, high), which no bound of the numbers limits.
    """
    from scipy import special  # here, since no start should wait for it

    assert len(values) > 1, values
    values = np.asarray(values, np.float64)
    quantile = float(special.stdtrit(len(values) - 1, 0.975))
    half = quantile * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def macro_mean(
    means: Sequence[float], intervals: Sequence[tuple[float, float]]
) -> tuple[float, tuple[float, float]]:
    """Return the mean over data sets, each counted once, and its interval.

    The interval is that of Zou and Donner (2008; MOVER) for a sum of independent
    estimates: low = m - sqrt(sum((m_i - low_i)^2)) / S, high likewise. It follows
    intervals that are not symmetric, and needs no normal distribution of each.

    Args:
        means: [S] of each set, over its questions; at least one.
        intervals: [S] (low, high) of these, from the sets' questions.

    Returns:
        (mean, (low, high)), within the bounds of the scores.
    """
    assert len(means) == len(intervals) > 0, (means, intervals)
    lows, highs = zip(*intervals, strict=True)
    mean = math.fsum(means) / len(means)
    below = math.dist(means, lows) / len(means)
    above = math.dist(means, highs) / len(means)
    return mean, (mean - below, mean + above)


def paired_difference(
    first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray
) -> tuple[float, tuple[float, float]]:
    """Return the mean of `first` - `second` and its interval by the paired bootstrap.

    Questions are resampled, with both scores of each (Efron and Tibshirani 1993,
    chapter 8); see `bootstrap_interval`, also for differences that are all equal.

    Args:
        first, second: [n] scores in [0, 1] of two systems, in one order of questions.

    Returns:
        (difference, (low, high)), from -1 to 1.
    """
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    assert first.shape == second.shape, (first.shape, second.shape)
    differences = first - second
    interval = bootstrap_interval(differences, lowest=-1.0, highest=1.0)
    return float(differences.mean()), interval


def mcnemar_p(
    first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray
) -> float:
    """Return the two-sided p of McNemar's exact test (1947) of two systems.

    Of the questions that exactly one system has right, each has half if they are equal:
    a binomial test with probability 1/2, by scipy.

    Args:
        first, second: [n] of 0 and 1, in one order of questions.

    Returns:
        p in (0, 1]; 1 where both have the same questions right.
    """
    from scipy import stats  # here, since it takes a second that no start should

    both = np.stack([first, second])
    assert np.isin(both, (0, 1)).all(), both
    num_first = int((both[0] > both[1]).sum())
    num_second = int((both[0] < both[1]).sum())
    if num_first + num_second == 0:
        return 1.0
    return float(stats.binomtest(num_first, num_first + num_second, 0.5).pvalue)
