"""Intervals of scores, and differences between two systems on the same questions.

Scores are of one question each and lie in [0, 1]. Questions are taken as independent
draws; the spread over seeds of training is a part of `seed_interval` alone.
"""

import math
from collections.abc import Sequence

import numpy as np


def wilson_interval(
    num_right: int, num_questions: int, *, level: float = 0.95
) -> tuple[float, float]:
    """Return the score interval of a proportion (Wilson 1927), as scipy computes it.

    It has a width where all are right or all are wrong, where a bootstrap has none.

    Args:
        num_right: from 0 to `num_questions`.
        num_questions: at least 1.
        level: the share of such intervals that hold the true proportion.

    Returns:
        (low, high), fractions from 0 to 1.

    Raises:
        ValueError: no questions, or a count that is not between 0 and theirs.
    """
    from scipy import special  # here, since no start should wait for it

    if num_questions < 1:
        raise ValueError(f"{num_questions=}: an interval needs at least 1")
    if not 0 <= num_right <= num_questions:
        raise ValueError(f"{num_right=}: expected 0 to {num_questions}")
    # By hand, in scipy's order of operations: importing scipy.stats takes a second.
    n, z = num_questions, float(special.ndtri(0.5 + 0.5 * level))
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
    level: float = 0.95,
) -> tuple[float, float]:
    """Return the interval of a mean by Efron's percentile bootstrap.

    The same values and seed give the same interval. Resamples of values that are all
    equal say nothing about the others that there may be, and would give an interval of
    no width. n values equal to one of probability p or less come with a probability of
    p^(n-1) at most, summed over all such values. So p = (1 - level)^(1/(n-1)) is a
    bound on the probability of the value seen, c, and the mean lies between
    p c + (1-p) lowest and p c + (1-p) highest: about 3/n where c is 0, and all that is
    possible for a single value.

    Args:
        values: [n] numbers, one a question.
        lowest, highest: what a value can be.
        seed: of the draws.
        resamples: how many samples of n are drawn, with replacement.
        level: the share of their means that lies inside.

    Returns:
        (low, high), around the mean and in the unit of the values.

    Raises:
        ValueError: no values, or one that is not between `lowest` and `highest`.
    """
    values = np.asarray(values, np.float64)
    assert values.ndim == 1 and 0 < level < 1 and resamples > 0
    if not len(values):
        raise ValueError("no values: an interval needs at least one")
    is_outside = ~((lowest <= values) & (values <= highest))  # NaN is, too
    if is_outside.any():
        wrong = values[is_outside][0]
        raise ValueError(f"values: {wrong}: expected {lowest} to {highest}")
    if (values == values[0]).all():
        p = (1 - level) ** (1 / (len(values) - 1)) if len(values) > 1 else 0.0
        c = float(values[0])
        return c - (1 - p) * (c - lowest), c + (1 - p) * (highest - c)
    draw = np.random.default_rng(seed)
    # One resample at a time: memory stays at n, however many questions there are.
    means = [
        values[draw.integers(0, len(values), len(values))].mean()
        for _ in range(resamples)
    ]
    tail = (1 - level) / 2
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

    Raises:
        ValueError: fewer than two.
    """
    from scipy import special  # here, since no start should wait for it

    if len(values) < 2:
        raise ValueError(f"{len(values)} values: an interval needs at least 2")
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
        means: [S] of each set, over its questions.
        intervals: [S] (low, high) of these, from the sets' questions.

    Returns:
        (mean, (low, high)), within the bounds of the scores.

    Raises:
        ValueError: no sets, or not an interval for each.
    """
    if not len(means) or len(means) != len(intervals):
        raise ValueError(f"{len(means)} means and {len(intervals)} intervals")
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

    Raises:
        ValueError: not as many of both, none, or one that is no score.
    """
    first, second = _paired(first, second)
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

    Raises:
        ValueError: not as many of both, or a score that is neither 0 nor 1.
    """
    from scipy import stats  # here, since it takes a second that no start should

    first, second = _paired(first, second)
    for scores in (first, second):
        if not np.isin(scores, (0, 1)).all():
            wrong = scores[~np.isin(scores, (0, 1))][0]
            raise ValueError(f"scores: {wrong}: expected 0 or 1")
    num_first = int(((first == 1) & (second == 0)).sum())
    num_second = int(((first == 0) & (second == 1)).sum())
    if num_first + num_second == 0:
        return 1.0
    return float(stats.binomtest(num_first, num_first + num_second, 0.5).pvalue)


def _paired(first, second):
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if first.shape != second.shape:
        raise ValueError(f"{len(first)} and {len(second)} scores are no pairs")
    return first, second
