"""What pairs of runs show of a method and its control: gaps with intervals, non-inferiority, equivalence, pairs needed.

Pure functions. A gap is ``100 (method - control) / control`` of one pair, in per cent; a difference is ``method -
control``, in the unit of the measure. "Not shown equivalent" and "shown different" are two findings, and a small sample
may give neither.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap, nct, norm
from scipy.stats import t as student_t

from benchmarks.paired import half_width, summarise

ALPHA = 0.05
"""Of each one-sided test."""


def upper_bound(values: Sequence[float]) -> float:
    """Return the one-sided 95 % upper bound of the mean: ``mean + t(.95, n - 1) sd / sqrt(n)``; nan below two."""
    if len(values) < 2:
        return math.nan
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values) + float(student_t.ppf(1 - ALPHA, len(values) - 1)) * error


def power(num_pairs: int, sd: float, margin: float, mean: float = 0.0) -> float:
    """Return the probability that the upper bound of ``num_pairs`` gaps is at most ``margin``.

    Args:
        num_pairs: n, at least 2.
        sd: Standard deviation of a gap, above 0.
        margin: The margin.
        mean: True mean of a gap.

    Returns:
        The exact power of the t-test, from the noncentral t distribution.
    """
    shift = (mean - margin) / (sd / math.sqrt(num_pairs))
    return float(nct.cdf(-student_t.ppf(1 - ALPHA, num_pairs - 1), num_pairs - 1, shift))


def pairs_needed(sd: float, margin: float, wanted: float = 0.8, mean: float = 0.0, most: int = 10_000) -> int:
    """Return the smallest number of pairs of that power, at least 2; ``most + 1`` if none up to ``most`` has it."""
    if sd == 0:
        return 2
    return next((n for n in range(2, most + 1) if power(n, sd, margin, mean) >= wanted), most + 1)


def pairs_needed_normal(sd: float, margin: float, wanted: float = 0.8, mean: float = 0.0) -> int:
    """Return what the normal approximation says of ``pairs_needed``: ``((z_.95 + z_wanted) sd / (margin - mean))^2``.

    Raises:
        ValueError: If the mean is no better than the margin: no number of pairs is enough.
    """
    if not mean < margin:
        raise ValueError(f"mean must be below margin; got mean={mean}, margin={margin}; no number of pairs is enough")
    return max(2, math.ceil(float((norm.ppf(1 - ALPHA) + norm.ppf(wanted)) * sd / (margin - mean)) ** 2))


@dataclass(frozen=True)
class Interval:
    """A mean and its two-sided 95 % interval; the ends are nan for a single value.

    Args:
        mean: The mean.
        low: Lower end.
        high: Upper end.
    """

    mean: float
    low: float
    high: float


def t_interval(values: Sequence[float]) -> Interval:
    """Return the mean and its t-interval."""
    mean, half = statistics.mean(values), half_width(values)
    return Interval(mean, mean - half, mean + half)


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Return the mean and its percentile bootstrap interval, which few values make too narrow."""
    mean = statistics.mean(values)
    if len(set(values)) < 2:
        return Interval(mean, math.nan, math.nan) if len(values) < 2 else Interval(mean, mean, mean)
    found = bootstrap(
        (np.asarray(values),), np.mean, method="percentile", vectorized=True, rng=np.random.default_rng(seed)
    ).confidence_interval
    return Interval(mean, float(found.low), float(found.high))


def ratio_interval(pairs: Sequence[tuple[float, float]]) -> Interval:
    """Return the geometric mean of the ratios first / second, and its interval from their logarithms."""
    found = summarise(list(pairs))
    return Interval(found.ratio, found.low, found.high)


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided t-tests of a mean difference, and its 95 % interval.

    Args:
        mean: Mean difference.
        low: Lower end of the two-sided 95 % interval.
        high: Its upper end.
        p: The larger of the two one-sided p values.
    """

    mean: float
    low: float
    high: float
    p: float

    @property
    def equivalent(self) -> bool:
        """Whether the difference is shown to lie within the bounds."""
        return self.p <= ALPHA

    @property
    def different(self) -> bool:
        """Whether the difference is shown not to be 0."""
        return self.low > 0 or self.high < 0


def tost(differences: Sequence[float], bound: float) -> Equivalence:
    """Test whether a mean difference lies within ``+-bound``; at least two differences."""
    n, mean, sd = len(differences), statistics.mean(differences), statistics.stdev(differences)
    error = sd / math.sqrt(n)
    half = float(student_t.ppf(0.975, n - 1)) * error
    if error == 0:
        return Equivalence(mean, mean, mean, 0.0 if abs(mean) < bound else 1.0)
    below, above = (student_t.cdf((sign * mean - bound) / error, n - 1) for sign in (1, -1))
    return Equivalence(mean, mean - half, mean + half, float(max(below, above)))
