"""Paired, interleaved timing: A B A B ..., judged by the ratio inside each pair.

A machine that others share drifts; two runs side by side drift together, so their ratio holds where single times do
not.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from scipy.stats import t as student_t


@dataclass(frozen=True)
class PairedResult:
    """Times of two arms and the ratio of the first to the second.

    Args:
        a_s: Median seconds of arm A.
        b_s: Median seconds of arm B.
        ratio: Median of A / B over the pairs.
        low: Lower end of the 95 % t-interval of the mean log ratio, as a ratio; nan below two pairs.
        high: Its upper end.
        num_pairs: Pairs measured.
    """

    a_s: float
    b_s: float
    ratio: float
    low: float
    high: float
    num_pairs: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a plain dict."""
        return asdict(self)


def run_paired(a: Callable[[], float], b: Callable[[], float], num_pairs: int) -> PairedResult:
    """Run ``a`` and ``b`` in turn, the order swapped in every other pair; each returns its own seconds."""
    pairs = []
    for pair_idx in range(num_pairs):
        first, second = (a, b) if pair_idx % 2 == 0 else (b, a)
        times = (first(), second())
        pairs.append(times if pair_idx % 2 == 0 else times[::-1])
    return summarise(pairs)


def summarise(pairs: list[tuple[float, float]]) -> PairedResult:
    """Return medians, the median ratio and the interval of the mean log ratio of ``(a, b)`` seconds."""
    logs = [math.log(a / b) for a, b in pairs]
    low = high = math.nan
    if len(pairs) > 1:
        half = student_t.ppf(0.975, len(pairs) - 1) * statistics.stdev(logs) / math.sqrt(len(pairs))
        low, high = math.exp(statistics.mean(logs) - half), math.exp(statistics.mean(logs) + half)
    return PairedResult(
        a_s=statistics.median(a for a, _ in pairs),
        b_s=statistics.median(b for _, b in pairs),
        ratio=math.exp(statistics.median(logs)),
        low=low,
        high=high,
        num_pairs=len(pairs),
    )
