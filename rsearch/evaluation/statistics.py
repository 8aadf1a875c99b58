"""Compute intervals of scores, and compare two systems on the same questions.

Each score belongs to one question and lies in [0, 1]. Questions are treated as
independent draws; only `seed_interval` covers the spread over training seeds.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

ROUNDING = 1e-9  # numbers that are closer are equal: means and differences are rounded


def wilson_interval(num_right: int, num_questions: int) -> tuple[float, float]:
    """Return the 95 % interval of a proportion (Wilson 1927), as scipy computes it.

    Unlike a bootstrap, it has a width even if all answers are right or all are wrong.

    Args:
        num_right: number of right answers, from 0 to `num_questions`.
        num_questions: number of questions, at least 1.

    Returns:
        (low, high), fractions from 0 to 1.

    Raises:
        ValueError: there are no questions, or `num_right` is out of range.
    """
    from scipy import special  # imported here, since no start should wait for it

    if num_questions < 1:
        raise ValueError(f"{num_questions=}: an interval needs at least 1")
    if not 0 <= num_right <= num_questions:
        raise ValueError(f"{num_right=}: expected 0 to {num_questions}")
    # Written out in scipy's order of operations: scipy.stats takes a second to import.
    n, z = num_questions, float(special.ndtri(0.975))
    p = num_right / n
    center = (2 * n * p + z**2) / (2 * (n + z**2))
    half_width = z / (2 * (n + z**2)) * math.sqrt(4 * n * p * (1 - p) + z**2)
    low = 0.0 if num_right == 0 else center - half_width
    high = 1.0 if num_right == n else center + half_width
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

    The same values and seed give the same interval. If all values equal some c,
    resamples show no other value, and their interval would have no width. A bound
    replaces it: the chance that n draws all equal one value of probability p or less is
    at most p^(n-1), summed over all such values. So c has a probability of at least
    p = (1 - level)^(1/(n-1)), and the mean lies between p c + (1-p) lowest and
    p c + (1-p) highest. If c is 0, that ends at about 3/n; a single value gives the
    whole range.

    Args:
        values: [n] numbers, one for each question.
        lowest, highest: smallest and largest possible value.
        seed: seed of the draws.
        resamples: number of resamples of n values, drawn with replacement.
        level: share of their means that lies inside the interval.

    Returns:
        (low, high), around the mean and in the unit of the values.

    Raises:
        ValueError: there are no values, or one is not between `lowest` and `highest`.
    """
    values = np.asarray(values, np.float64)
    assert values.ndim == 1 and 0 < level < 1 and resamples > 0
    if not len(values):
        raise ValueError("no values: an interval needs at least one")
    is_outside = ~((lowest <= values) & (values <= highest))  # so is NaN
    if is_outside.any():
        bad_value = values[is_outside][0]
        raise ValueError(f"values: {bad_value}: expected {lowest} to {highest}")
    if np.ptp(values) < ROUNDING:
        p = (1 - level) ** (1 / (len(values) - 1)) if len(values) > 1 else 0.0
        c = float(values[0])
        return c - (1 - p) * (c - lowest), c + (1 - p) * (highest - c)
    draw = np.random.default_rng(seed)
    # One resample at a time, so that memory grows with n only.
    means = [
        values[draw.integers(0, len(values), len(values))].mean()
        for _ in range(resamples)
    ]
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def seed_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean over seeds, by Student's t.

    The seeds' numbers are treated as independent draws from one normal distribution.
    They reflect all that varies between seeds, including the draw of the questions; if
    all seeds have the same questions, their choice is no part of it.

    Args:
        values: [n] numbers, one for each seed; n is at least 2.

    Returns:
        (low, high), not clipped to the range of possible values. None if the values are
        equal: their deviation of 0 would give an interval without a width, as if the
        mean were known exactly.

    Raises:
        ValueError: there are fewer than two values.
    """
    from scipy import special  # imported here, since no start should wait for it

    if len(values) < 2:
        raise ValueError(f"{len(values)} values: an interval needs at least 2")
    values = np.asarray(values, np.float64)
    if np.ptp(values) < ROUNDING:
        return None
    quantile = float(special.stdtrit(len(values) - 1, 0.975))
    half_width = quantile * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - half_width), float(values.mean() + half_width)


def macro_mean(
    means: Sequence[float], intervals: Sequence[tuple[float, float]]
) -> tuple[float, tuple[float, float]]:
    """Return the mean over datasets, each with the same weight, and its interval.

    The interval is Zou and Donner's (2008; MOVER) for a sum of independent estimates:
    low = m - sqrt(sum((m_i - low_i)^2)) / S, and high likewise. It accounts for
    asymmetric intervals and does not assume that the estimates are normal.

    Args:
        means: [S] mean of each dataset, over its questions.
        intervals: [S] (low, high) of these means, from the datasets' questions.

    Returns:
        (mean, (low, high)), within the bounds of the scores.

    Raises:
        ValueError: there are no datasets, or not one interval for each.
    """
    if not len(means) or len(means) != len(intervals):
        raise ValueError(f"{len(means)} means and {len(intervals)} intervals")
    lows, highs = zip(*intervals, strict=True)
    mean = math.fsum(means) / len(means)
    below = math.dist(means, lows) / len(means)
    above = math.dist(means, highs) / len(means)
    return mean, (mean - below, mean + above)


def macro_scores(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, Any]:
    """Return {name: mean, name_95: its interval} over datasets; see `macro_mean`.

    Args:
        rows: row of each dataset, with the same keys.
        names: scores to average.
    """
    scores = {}
    for name in names:
        mean, interval = macro_mean(
            [row[name] for row in rows], [row[f"{name}_95"] for row in rows]
        )
        scores |= {name: mean, f"{name}_95": list(interval)}
    return scores


def paired_difference(
    first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray
) -> tuple[float, tuple[float, float]]:
    """Return the mean of `first` - `second` and its interval by the paired bootstrap.

    Questions are resampled together with both of their scores (Efron and Tibshirani
    1993, chapter 8). See `bootstrap_interval`, also for differences that are all equal.

    Args:
        first, second: [n] scores in [0, 1] of two systems, on the same questions in the
            same order.

    Returns:
        (difference, (low, high)), from -1 to 1.

    Raises:
        ValueError: the numbers of scores differ, there are none, or a difference is not
            in [-1, 1].
    """
    first, second = _check_paired(first, second)
    differences = first - second
    interval = bootstrap_interval(differences, lowest=-1.0, highest=1.0)
    return float(differences.mean()), interval


def mcnemar_p(
    first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray
) -> float:
    """Return the two-sided p-value of McNemar's exact test (1947) for two systems.

    If the systems are equal, each is as likely as the other to win a question that only
    one of them answers right: scipy's binomial test with probability 1/2.

    Args:
        first, second: [n] scores of 0 or 1, on the same questions in the same order.

    Returns:
        p in (0, 1]; 1 if both systems answer the same questions right.

    Raises:
        ValueError: the numbers of scores differ, or one is neither 0 nor 1.
    """
    from scipy import stats  # imported here: it takes a second, which no start should

    first, second = _check_paired(first, second)
    for scores in (first, second):
        if not np.isin(scores, (0, 1)).all():
            bad_score = scores[~np.isin(scores, (0, 1))][0]
            raise ValueError(f"scores: {bad_score}: expected 0 or 1")
    num_first = int(((first == 1) & (second == 0)).sum())
    num_second = int(((first == 0) & (second == 1)).sum())
    if num_first + num_second == 0:
        return 1.0
    return float(stats.binomtest(num_first, num_first + num_second, 0.5).pvalue)


def _check_paired(first, second):
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if first.shape != second.shape:
        raise ValueError(f"{len(first)} and {len(second)} scores cannot be paired")
    return first, second
