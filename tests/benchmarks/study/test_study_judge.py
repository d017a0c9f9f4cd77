"""Verdicts and intervals: the published figures, and what is not shown kept apart from what is not met."""

import math
from typing import Any

import pytest

from benchmarks.study.judge import Comparison, by_seed, compare, judge, power_text, summary, verdicts
from benchmarks.study.protocol import Criterion, parse
from benchmarks.study.statistics import (
    bootstrap_interval,
    pairs_needed,
    pairs_needed_normal,
    ratio_interval,
    t_interval,
)
from tests.benchmarks.study.test_study_protocol import text_of

PAPER_MEAN, PAPER_SD = 0.841, 1.315


def paper_gaps() -> list[float]:
    """Return five gaps with the published mean and standard deviation."""
    return [PAPER_MEAN + PAPER_SD * value / math.sqrt(2.5) for value in (-2.0, -1.0, 0.0, 1.0, 2.0)]


def comparison(*values: tuple[float, float]) -> Comparison:
    return Comparison("rgc", "bp", "enwik8", values)


def criterion(rule: str, limit: float) -> Criterion:
    return Criterion(("rgc", "bp"), rule, limit)


def test_the_published_power_is_reproduced() -> None:
    assert pairs_needed_normal(PAPER_SD, 1.0, mean=PAPER_MEAN) == 423
    assert pairs_needed(PAPER_SD, 1.0, mean=PAPER_MEAN) == 425
    text = power_text(paper_gaps(), 1.0)
    assert "sd 1.315 %" in text and "425 (normal approximation: 423) if the true gap is +0.84 %" in text


def test_the_published_verdict_is_reproduced() -> None:
    found = judge(criterion("non_inferior", 1.0), comparison(*((1 + gap / 100, 1.0) for gap in paper_gaps())), "enwik8")
    assert found.found == "not shown"
    assert "mean gap +0.841 %, one-sided 95 % upper bound +2.095 % (at most 1 % asked), 5 pairs" in found.text


def test_no_number_of_pairs_shows_what_is_not_so() -> None:
    with pytest.raises(ValueError, match=r"mean must be below margin; got mean=1\.5, margin=1"):
        pairs_needed_normal(0.1, 1.0, mean=1.5)
    assert "no number if the true gap is +1.50 %" in power_text([1.4, 1.6], 1.0)


@pytest.mark.parametrize(
    ("rule", "limit", "values", "found"),
    [
        ("non_inferior", 1.0, [(1.001, 1.0), (1.002, 1.0), (1.0015, 1.0)], "met"),
        ("non_inferior", 1.0, [(1.03, 1.0), (0.98, 1.0), (1.02, 1.0)], "not shown"),
        ("non_inferior", 1.0, [(1.03, 1.0), (1.031, 1.0), (1.032, 1.0)], "not met"),
        ("non_inferior", 1.0, [(0.9, 1.0)], "not shown"),
        ("equivalent", 0.005, [(1.001, 1.0), (0.999, 1.0), (1.0005, 1.0)], "met"),
        ("equivalent", 0.005, [(1.02, 1.0), (0.98, 1.0), (1.01, 1.0)], "not shown"),
        ("equivalent", 0.005, [(1.02, 1.0), (1.021, 1.0), (1.019, 1.0)], "not met"),
        ("equivalent", 0.005, [(0.98, 1.0), (0.981, 1.0), (0.979, 1.0)], "not met"),
        ("at_most", 0.02, [(1.0, 1.0), (1.03, 1.0)], "met"),
        ("at_most", 0.02, [(1.05, 1.0)], "not met"),
        ("at_least", 0.08, [(1.09, 1.0)], "met"),
        ("at_least", 0.08, [(1.07, 1.0)], "not met"),
        ("ratio_at_least", 1.2, [(2.0, 1.0), (1.0, 1.0)], "met"),
        ("ratio_at_least", 1.5, [(2.0, 1.0), (1.0, 1.0)], "not met"),
    ],
)
def test_not_shown_is_not_the_same_as_not_met(
    rule: str, limit: float, values: list[tuple[float, float]], found: str
) -> None:
    verdict = judge(criterion(rule, limit), comparison(*values), "enwik8")
    assert verdict.found == found
    assert verdict.text.endswith(f": {found}.")


def test_what_was_not_run_is_said() -> None:
    verdict = judge(criterion("at_most", 0.02), None, "enwik8")
    assert (verdict.found, "no pair was run (at most 0.02 asked)" in verdict.text) == ("not run", True)


def test_intervals() -> None:
    one = t_interval([3.0])
    assert one.mean == 3.0 and math.isnan(one.low)
    found = t_interval([1.0, 2.0, 3.0])
    assert (found.low, found.high) == pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)))
    ratio = ratio_interval([(2.0, 1.0), (8.0, 1.0)])
    assert ratio.mean == pytest.approx(4.0) and ratio.low * ratio.high == pytest.approx(16.0)
    drawn = bootstrap_interval([1.0, 2.0, 3.0, 4.0])
    assert drawn == bootstrap_interval([1.0, 2.0, 3.0, 4.0]) and 1 <= drawn.low < 2.5 < drawn.high <= 4
    assert bootstrap_interval([2.0, 2.0]).high == 2.0 and math.isnan(bootstrap_interval([2.0]).low)


def rows_of(bits: dict[tuple[str, str, int], Any], metric: str = "bits") -> list[dict[str, Any]]:
    runs = {(run.arm, run.corpus, run.seed): run for run in parse("p", "smoke", text_of()).runs()}
    return [
        {"key": runs[key].key, "corpus": key[1], "seed": key[2], "measures": {metric: value}, "curve": []}
        for key, value in bits.items()
    ]


def test_pairs_share_seed_and_corpus_and_a_measure_that_is_none_makes_no_pair() -> None:
    [part] = parse("p", "smoke", text_of()).parts
    rows = rows_of({("bp", "a", 1): 2.0, ("bp", "b", 1): 3.0, ("bp", "a", 2): 4.0, ("rgc", "a", 1): 2.5})
    assert by_seed(rows, part, "bp", "a") == {1: 2.0, 2: 4.0}
    found = compare(rows, part, ("rgc", "bp"), "a")
    assert found is not None and found.values == ((2.5, 2.0),) and found.gaps == [25.0]
    assert compare(rows, part, ("rgc", "bp"), "b") is None
    nothing = rows_of({("bp", "a", 1): 2.0, ("rgc", "a", 1): math.nan})
    assert compare(nothing, part, ("rgc", "bp"), "a") is None


def test_the_first_line_tells_what_failed_first() -> None:
    protocol = parse("p", "smoke", text_of())
    bits = {("bp", "a", seed): 2.0 for seed in (1, 2)} | {("rgc", "a", 1): 2.2, ("rgc", "a", 2): 2.21}
    found = list(verdicts(rows_of(bits), protocol))
    assert summary(found) == "Of 2 criteria: 1 not met, 1 not run."
    assert summary([]) == "No criterion was set: this study describes."
