import math

import pytest

from benchmarks.paired import run_paired, summarise


def test_ratio_of_constant_pairs_is_exact_and_its_interval_is_a_point():
    result = summarise([(2.0, 1.0), (4.0, 2.0), (6.0, 3.0)])
    assert (result.ratio, result.low, result.high) == pytest.approx((2.0, 2.0, 2.0))
    assert (result.a_s, result.b_s, result.num_pairs) == (4.0, 2.0, 3)


def test_interval_follows_the_t_distribution_of_log_ratios():
    """Log ratios 0 and 2: mean 1, sd sqrt(2), t(.975, 1) = 12.706."""
    result = summarise([(1.0, 1.0), (math.exp(2), 1.0)])
    assert math.log(result.high) == pytest.approx(1 + 12.7062, rel=1e-4)
    assert math.log(result.low) == pytest.approx(1 - 12.7062, rel=1e-4)


def test_one_pair_has_no_interval():
    assert math.isnan(summarise([(1.0, 2.0)]).low)


def test_pairs_are_interleaved_and_the_order_alternates():
    calls: list[str] = []

    def arm(name: str, seconds: float):
        def run() -> float:
            calls.append(name)
            return seconds

        return run

    result = run_paired(arm("a", 3.0), arm("b", 2.0), 3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert result.ratio == pytest.approx(1.5)
