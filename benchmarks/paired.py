"""Paired, interleaved timing: A B A B ..., judged by the ratio inside each pair.

A machine that others share drifts; two runs side by side drift together, so their ratio holds where single times do
not.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scipy.stats import t as student_t


@dataclass(frozen=True)
class PairedResult:
    """Times of two arms and the ratio of the first to the second.

    Args:
        a_s: Median seconds of arm A.
        b_s: Median seconds of arm B.
        ratio: Geometric mean of A / B over the pairs.
        low: Lower end of its 95 % t-interval, from the log ratios; nan below two pairs.
        high: Its upper end.
        num_pairs: Pairs measured.
    """

    a_s: float
    b_s: float
    ratio: float
    low: float
    high: float
    num_pairs: int


def run_paired(a: Callable[[], float], b: Callable[[], float], num_pairs: int) -> PairedResult:
    """Run ``a`` and ``b`` in turn, the order swapped in every other pair; each returns its own seconds."""
    pairs = []
    for pair_idx in range(num_pairs):
        first, second = (a, b) if pair_idx % 2 == 0 else (b, a)
        times = (first(), second())
        pairs.append(times if pair_idx % 2 == 0 else times[::-1])
    return summarise(pairs)


def half_width(values: Sequence[float]) -> float:
    """Return half the 95 % t-interval of the mean; nan below two values."""
    if len(values) < 2:
        return math.nan
    return float(student_t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def summarise(pairs: list[tuple[float, float]]) -> PairedResult:
    """Return median seconds, and the geometric mean ratio of ``(a, b)`` seconds with its interval."""
    logs = [math.log(a / b) for a, b in pairs]
    mean, half = statistics.mean(logs), half_width(logs)
    return PairedResult(
        a_s=statistics.median(a for a, _ in pairs),
        b_s=statistics.median(b for _, b in pairs),
        ratio=math.exp(mean),
        low=math.exp(mean - half),
        high=math.exp(mean + half),
        num_pairs=len(pairs),
    )
