"""What the rows of a study say: each arm beside its control, seed by seed, and whether the criteria hold.

Pure. "Not met" and "not shown" are told apart: a bound beyond its limit says that too little was run, or that it is
worse; only a lower bound beyond the limit says that it is.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.study.protocol import Criterion, Part, Protocol
from benchmarks.study.statistics import (
    Interval,
    bootstrap_interval,
    pairs_needed,
    pairs_needed_normal,
    ratio_interval,
    t_interval,
    tost,
    upper_bound,
)

Row = Mapping[str, Any]
MOST_PAIRS = 10_000


@dataclass(frozen=True)
class Comparison:
    """An arm beside its control on one corpus, over the seeds that both have.

    Args:
        arm: The arm.
        control: Its control.
        corpus: The corpus.
        values: Per seed, the measure of both.
    """

    arm: str
    control: str
    corpus: str
    values: tuple[tuple[float, float], ...]

    @property
    def differences(self) -> list[float]:
        """``arm - control`` of every pair."""
        return [mine - theirs for mine, theirs in self.values]

    @property
    def gaps(self) -> list[float]:
        """The same in per cent of the control."""
        return [100 * (mine - theirs) / theirs for mine, theirs in self.values]

    @property
    def difference(self) -> Interval:
        """Mean difference with its t-interval."""
        return t_interval(self.differences)

    @property
    def gap(self) -> Interval:
        """Mean gap with its t-interval."""
        return t_interval(self.gaps)

    @property
    def gap_bootstrap(self) -> Interval:
        """Mean gap with its bootstrap interval."""
        return bootstrap_interval(self.gaps)

    @property
    def ratio(self) -> Interval:
        """Geometric mean of ``arm / control`` with its interval."""
        return ratio_interval(self.values)


@dataclass(frozen=True)
class Verdict:
    """What became of a criterion on one corpus.

    Args:
        criterion: The criterion.
        corpus: The corpus.
        found: ``met``, ``not shown``, ``not met`` or ``not run``.
        text: One sentence with the numbers.
    """

    criterion: Criterion
    corpus: str
    found: str
    text: str


def measure_of(row: Row, metric: str) -> float | None:
    """Return a measure of a row; None if it has none or no finite one."""
    value = row["measures"].get(metric)
    return float(value) if value is not None and math.isfinite(value) else None


def by_seed(rows: Sequence[Row], part: Part, arm: str, corpus: str, metric: str = "") -> dict[int, float]:
    """Return an arm's measure by seed, the part's metric if no other is named."""
    keys = {run.key for run in part.runs() if (run.arm, run.corpus) == (arm, corpus)}
    found = {row["seed"]: measure_of(row, metric or part.metric) for row in rows if row["key"] in keys}
    return {seed: value for seed, value in sorted(found.items()) if value is not None}


def compare(rows: Sequence[Row], part: Part, pair: tuple[str, str], corpus: str, metric: str = "") -> Comparison | None:
    """Return an arm beside its control; None without a seed that both have."""
    mine, theirs = (by_seed(rows, part, arm, corpus, metric) for arm in pair)
    values = tuple((mine[seed], theirs[seed]) for seed in mine.keys() & theirs.keys())
    return Comparison(*pair, corpus, values) if values else None


def verdicts(rows: Sequence[Row], protocol: Protocol) -> Iterator[tuple[Part, Verdict]]:
    """Yield what became of every criterion, on every corpus that it is asked of."""
    for part in protocol.parts:
        for criterion in part.criteria:
            for corpus in criterion.corpora or part.corpora:
                yield part, judge(criterion, compare(rows, part, criterion.contrast, corpus), corpus)


def judge(criterion: Criterion, found: Comparison | None, corpus: str) -> Verdict:
    """Return what the pairs say of a criterion."""
    title = f"{criterion.contrast[0]} beside {criterion.contrast[1]}, {corpus}"
    asked = f"{criterion.rule.replace('_', ' ')} {criterion.limit:g} asked"
    if found is None:
        return Verdict(criterion, corpus, "not run", f"{title}: no pair was run ({asked}).")
    number = len(found.values)
    if criterion.rule in ("at_most", "at_least"):
        mean = found.difference.mean
        met = mean <= criterion.limit if criterion.rule == "at_most" else mean >= criterion.limit
        text = f"{title}: {mean:+.4g} in the mean of {_pairs(number)} ({asked})"
        return _verdict(criterion, corpus, "met" if met else "not met", text)
    if criterion.rule == "ratio_at_least":
        ratio = found.ratio
        text = f"{title}: {interval_text(ratio, '.3f')} times, {_pairs(number)} ({asked})"
        return _verdict(criterion, corpus, "met" if ratio.mean >= criterion.limit else "not met", text)
    if number < 2:
        text = f"{title}: {found.gap.mean:+.3f} %, and one pair says nothing of its spread ({asked})"
        return _verdict(criterion, corpus, "not shown", text)
    rule = _non_inferior if criterion.rule == "non_inferior" else _equivalent
    return _verdict(criterion, corpus, *rule(title, found, criterion.limit))


def _verdict(criterion: Criterion, corpus: str, found: str, text: str) -> Verdict:
    return Verdict(criterion, corpus, found, f"{text}: {found}.")


def _non_inferior(title: str, found: Comparison, limit: float) -> tuple[str, str]:
    gaps = found.gaps
    high, low = upper_bound(gaps), -upper_bound([-gap for gap in gaps])
    said = "met" if high <= limit else "not met" if low > limit else "not shown"
    text = (
        f"{title}: mean gap {statistics.mean(gaps):+.3f} %, one-sided 95 % upper bound {high:+.3f} % "
        f"(at most {limit:g} % asked), {_pairs(len(gaps))}; {power_text(gaps, limit)}"
    )
    return said, text


def power_text(gaps: Sequence[float], limit: float) -> str:
    """Return how many pairs would show with 80 % power that a true gap of 0, and one as found, is below the limit."""
    sd, mean = statistics.stdev(gaps), statistics.mean(gaps)
    texts = []
    for name, true in (("0", 0.0), (f"{mean:+.2f} %", mean)):
        if true >= limit:
            texts.append(f"no number if the true gap is {name}")
            continue
        exact, normal = pairs_needed(sd, limit, mean=true, most=MOST_PAIRS), pairs_needed_normal(sd, limit, mean=true)
        shown = f"{exact}" if exact <= MOST_PAIRS else f"more than {MOST_PAIRS:,}"
        texts.append(f"{shown} (normal approximation: {normal:,}) if the true gap is {name}")
    return f"sd {sd:.3f} %; pairs for 80 % power: {', '.join(texts)}"


def _equivalent(title: str, found: Comparison, limit: float) -> tuple[str, str]:
    test = tost(found.differences, limit)
    differs = "shown different" if test.different else "not shown different"
    outside = test.low > limit or test.high < -limit
    said = "met" if test.equivalent else "not met" if outside else "not shown"
    text = (
        f"{title}: {test.mean:+.4f} (95 % {test.low:+.4f} to {test.high:+.4f}), equivalence within {limit:g} asked, "
        f"p={test.p:.3f}, {_pairs(len(found.values))}; {differs}"
    )
    return said, text


def _pairs(number: int) -> str:
    return f"{number} pair{'s' * (number != 1)}"


def interval_text(interval: Interval, form: str) -> str:
    """Return a mean with its interval, where there is one."""
    mean = format(interval.mean, form)
    return mean if math.isnan(interval.low) else f"{mean} ({interval.low:{form}} to {interval.high:{form}})"


def summary(found: Sequence[tuple[Part, Verdict]]) -> str:
    """Return the first line of a report: what failed first."""
    if not found:
        return "No criterion was set: this study describes."
    by_result = {name: [v for _, v in found if v.found == name] for name in ("not met", "not shown", "not run", "met")}
    texts = [f"{len(those)} {name}" for name, those in by_result.items() if those]
    return f"Of {len(found)} criteria: {', '.join(texts)}."
