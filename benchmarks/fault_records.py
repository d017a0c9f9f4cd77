"""From the story of a run to its record: what was lost, how long it took, and which expectations are not met.

Pure: functions of the story.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.fault_checks import closes_after_restart
from benchmarks.fault_plan import Shape
from benchmarks.fault_scenarios import Expected, Scenario
from benchmarks.fault_stage import Story

Record = dict[str, Any]


def record_of(
    scenario: Scenario,
    story: Story,
    reference: Mapping[str, str],
    baseline: Mapping[str, float] | None,
    judges_times: bool = True,
) -> Record:
    """Return the record of a run that came to its end.

    Args:
        scenario: What was run.
        story: What happened.
        reference: Digests of the undisturbed run's masters by entry.
        baseline: Median seconds of an undisturbed round by entry; None: those of this run's own.
        judges_times: Whether the machine is quiet enough for ``max_ratio`` and ``time_check``.
    """
    shape, expected = scenario.shape, scenario.expected
    blocks = [report for report in story.reports if report["entry"] != "interface"]
    usual_s = {**median_round_s(story), **(baseline or {})}
    ratios = [took_s(r) / usual_s[r["entry"]] for r in story.reports if not is_affected(r, story)]
    affected_s = [took_s(report) for report in story.reports if is_affected(report, story)]
    closed = Counter(report["entry"] for report in blocks)
    record = {
        "name": scenario.name,
        "survived": _survived(shape, expected, story),
        "rounds": min((closed[f"block{b}"] for b in range(shape.num_blocks)), default=0),
        "rounds_lost": shape.num_rounds * shape.num_blocks - sum(report["merged"] for report in blocks),
        "updates_lost": shape.num_rounds * shape.num_workers - sum(_accepted(r, shape) for r in blocks),
        "recovery_s": recovery_s(story),
        "affected_round_s": max(affected_s, default=None),
        "median_round_s": statistics.median(usual_s.values()) if usual_s else None,
        "worst_other_ratio": max(ratios, default=None),
        "weights_equal": story.masters == reference,
        "expected_equal": expected.equal,
        "replicas_bit_identical": replicas_agree(story),
        "verdicts": dict(verdicts_of(story)),
        "detail": detail_of(story),
    }
    too_long = _too_long(scenario, story, record["worst_other_ratio"]) if judges_times else ()
    record["unmet"] = [*_unmet(scenario, story, record), *too_long]
    return record | {"met": not record["unmet"]}


def failed_record(scenario: Scenario, reason: str) -> Record:
    """Return the record of a run that did not come to its end."""
    names = ("rounds", "rounds_lost", "updates_lost", "recovery_s", "affected_round_s", "median_round_s")
    return {
        "name": scenario.name,
        "survived": False,
        **dict.fromkeys(names),
        "worst_other_ratio": None,
        "weights_equal": False,
        "expected_equal": scenario.expected.equal,
        "replicas_bit_identical": False,
        "verdicts": {},
        "detail": {},
        "unmet": [reason],
        "met": False,
    }


def took_s(report: Mapping[str, Any]) -> float:
    """Return how long a round was open."""
    return float(report["closed_at"] - report["opened_at"])


def is_affected(report: Mapping[str, Any], story: Story) -> bool:
    """Tell whether a round lacks an update that it waited for, or was open when the coordinator was killed."""
    was_open = story.killed_at is not None and report["opened_at"] <= story.listening_at[-1] <= report["closed_at"]
    return bool(report["missing"] or report["refused"]) or was_open


def median_round_s(story: Story) -> dict[str, float]:
    """Return the median seconds of an unaffected round by entry; of all rounds of an entry that has no such."""
    kept: defaultdict[str, list[float]] = defaultdict(list)
    for affected in (False, True):
        for report in story.reports:
            if is_affected(report, story) is affected and (not affected or report["entry"] not in kept):
                kept[report["entry"]].append(took_s(report))
    return {entry: statistics.median(seconds) for entry, seconds in kept.items()}


def recovery_s(story: Story) -> float | None:
    """Return the seconds from the fault to the first close of a whole round, after the last one that is not.

    None: there was no fault, or no whole round of the block that it concerns came after it.
    """
    if story.fault_at is None:
        return None
    own = [r for r in story.reports if story.fault_block is None or r["entry"] == f"block{story.fault_block}"]
    after = [report for report in own if report["closed_at"] > story.fault_at]
    torn = [idx for idx, report in enumerate(after) if report["missing"] or report["refused"]]
    whole = after[torn[-1] + 1 if torn else 0 :]
    return whole[0]["closed_at"] - story.fault_at if whole else None


def replicas_agree(story: Story) -> bool:
    """Tell whether replicas were the same bit for bit in every round, and the same as the masters at the end."""
    seen: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    num_blocks = sum(entry != "interface" for entry in story.masters)
    for worker_id, version, digest in story.rounds:
        seen[worker_id % num_blocks, version].add(digest)
    last = [story.masters.get(entry) == digest for _, held in story.done.values() for entry, digest in held.items()]
    return all(len(digests) == 1 for digests in seen.values()) and all(last)


def verdicts_of(story: Story) -> Counter[str]:
    """Return how often each verdict was given, all entries together."""
    counts = Counter(story.last_counts)
    for report in story.reports:
        counts.update(report["counts"])
    return counts


def detail_of(story: Story) -> Record:
    """Return what only some scenarios have to tell."""
    detail: Record = {"masters": story.masters, "dead": sorted(story.died_at), "wire_bytes": story.wire_bytes or None}
    if story.killed_at is not None:
        listening_at, closes = story.listening_at[-1], closes_after_restart(story)
        detail["listening_again_s"] = listening_at - story.killed_at
        detail["resumed_s"] = min(closes) - listening_at if closes else None
    return {name: value for name, value in detail.items() if value is not None}


def _accepted(report: Mapping[str, Any], shape: Shape) -> int:
    return sum(worker_id < shape.num_workers for worker_id in report["accepted"])


def _survived(shape: Shape, expected: Expected, story: Story) -> bool:
    ended = {worker_id for worker_id, (version, _) in story.done.items() if version == shape.num_rounds}
    return set(range(shape.num_workers)) - expected.dead <= ended and story.died_at.keys() == expected.dead


def _unmet(scenario: Scenario, story: Story, record: Record) -> Iterator[str]:
    shape, expected = scenario.shape, scenario.expected
    if not record["survived"]:
        yield f"workers {sorted(story.done)} came to the end, {sorted(story.died_at)} died"
    wanted = {
        "rounds": shape.num_rounds,
        "rounds_lost": expected.rounds_lost,
        "updates_lost": expected.updates_lost,
        "weights_equal": expected.equal,
        "replicas_bit_identical": True,
    }
    yield from (f"{k}={record[k]} and not {v}" for k, v in wanted.items() if v is not None and record[k] != v)
    given = record["verdicts"]
    allowed = {"accepted", *expected.verdicts, *expected.tolerated}
    yield from (f"{count} updates were {verdict}" for verdict, count in given.items() if verdict not in allowed)
    for verdict, count in expected.verdicts.items():
        if given.get(verdict, 0) < count:
            yield f"{given.get(verdict, 0)} updates were {verdict} and not {count}"
    if expected.check is not None:
        yield from expected.check(shape, story)


def _too_long(scenario: Scenario, story: Story, worst_ratio: float | None) -> Iterator[str]:
    limit, time_check = scenario.expected.max_ratio, scenario.expected.time_check
    if limit is not None and worst_ratio is None:
        yield "no round was undisturbed"
    elif limit is not None and worst_ratio is not None and worst_ratio > limit:
        yield f"an undisturbed round lasted {worst_ratio:.2f} times the median"
    if time_check is not None:
        yield from time_check(scenario.shape, story)


def compare(record: Record, others: Sequence[Record], same_as: str | None) -> Record:
    """Return the record with what is unmet if its masters are not those of an earlier scenario's runs."""
    if same_as is None:
        return record
    earlier = [other["detail"]["masters"] for other in others if other["name"] == same_as and other["survived"]]
    if earlier and all(masters == record["detail"].get("masters") for masters in earlier):
        return record
    said = f"the masters are not those of {same_as}" if earlier else f"not compared: no run of {same_as} survived"
    return record | {"met": False, "unmet": [*record["unmet"], said]}
