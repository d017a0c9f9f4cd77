import json
import multiprocessing
import multiprocessing.forkserver
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fault_checks, fault_records, faults
from benchmarks.fault_plan import Shape
from benchmarks.fault_scenarios import ALL, DEAD, QUICK_TO_DROP, Expected, Scenario
from benchmarks.fault_stage import StageError, Story

SHAPE = Shape(num_blocks=1, replicas=2, num_rounds=3)
MASTERS = {"block0": "final", "interface": "shared"}


@pytest.fixture(scope="module", autouse=True)
def fork_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start one fork server for the slow tests of this module, and leave none behind."""
    slow = any(item.module is request.module and item.get_closest_marker("slow") for item in request.session.items)
    if slow:
        faults.warm_up(faults.WARM)
    yield
    if slow:
        multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def harness() -> faults.Harness:
    return faults.Harness()


def as_expected(harness: faults.Harness, name: str) -> dict[str, Any]:
    record = harness.run(faults.BY_NAME[name])
    assert record["unmet"] == [] and record["met"]
    return record


# The scenarios, on real processes


@pytest.mark.slow
def test_simulator_processes_and_two_hosts_give_the_same_weights(harness: faults.Harness) -> None:
    direct, relayed = as_expected(harness, "none"), as_expected(harness, "two_hosts")
    assert direct["weights_equal"] and relayed["weights_equal"]  # with those of the simulator, bit for bit
    assert direct["detail"]["masters"] == relayed["detail"]["masters"]
    assert relayed["detail"]["wire_bytes"] > 0 and "wire_bytes" not in direct["detail"]
    assert direct["rounds"] == 6 and direct["verdicts"] == {"accepted": 2 * 6 * 6}


@pytest.mark.slow
def test_scenario_01_worker_killed_before_it_uploads(harness: faults.Harness) -> None:
    record = as_expected(harness, "kill_before_upload")
    assert record["updates_lost"] == 4 and record["rounds_lost"] == 0
    assert record["replicas_bit_identical"] and not record["weights_equal"]
    assert record["affected_round_s"] >= QUICK_TO_DROP.silent_after_s  # nobody is given up before
    assert record["recovery_s"] is not None  # a round of the block was whole again


@pytest.mark.slow
def test_scenario_02_worker_killed_in_mid_upload_equals_the_run_without_it(harness: faults.Harness) -> None:
    before = as_expected(harness, "kill_before_upload")
    assert as_expected(harness, "kill_in_mid_upload")["detail"]["masters"] == before["detail"]["masters"]


@pytest.mark.slow
def test_scenario_03_worker_killed_after_the_answer_counts_once(harness: faults.Harness) -> None:
    assert as_expected(harness, "kill_after_ack")["updates_lost"] == 3


@pytest.mark.slow
def test_scenario_04_worker_that_returns_with_its_id_goes_on(harness: faults.Harness) -> None:
    assert as_expected(harness, "return_with_same_id")["updates_lost"] == 0


@pytest.mark.slow
def test_scenario_05_worker_that_joins_in_mid_round_counts_in_a_later_one(harness: faults.Harness) -> None:
    as_expected(harness, "join_in_mid_round")


@pytest.mark.slow
def test_scenario_06_download_that_is_cut_at_half_is_fetched_again(harness: faults.Harness) -> None:
    assert as_expected(harness, "cut_download")["weights_equal"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coordinator_kill_restart", "coordinator_kill_restart_cold"])
def test_scenario_07_coordinator_killed_and_restarted_gives_the_undisturbed_weights(
    harness: faults.Harness, name: str
) -> None:
    record = as_expected(harness, name)
    assert record["weights_equal"] and record["updates_lost"] == 0
    assert record["detail"]["listening_again_s"] > 0 and record["detail"]["resumed_s"] > 0


@pytest.mark.slow
def test_cold_coordinator_starts_without_lightning_as_the_product_does() -> None:
    code = "import sys; from benchmarks.fault_stage import cold_coordinator; cold_coordinator(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    loaded = set(done.stdout.split())
    assert {"torch", "lightning_blocktrain.coordinator.server"} <= loaded
    assert not loaded & {"lightning", "torchmetrics", "lightning_blocktrain.models", "lightning_blocktrain.strategies"}


@pytest.mark.slow
def test_scenario_09_block_without_workers_keeps_its_parameters(harness: faults.Harness) -> None:
    assert as_expected(harness, "kill_all_replicas_of_a_block")["rounds_lost"] == 4


@pytest.mark.slow
def test_scenario_13_update_after_the_close_is_late(harness: faults.Harness) -> None:
    assert as_expected(harness, "late_update")["verdicts"]["late"] >= 1


@pytest.mark.slow
def test_scenario_15_update_whose_answer_was_lost_counts_once(harness: faults.Harness) -> None:
    record = as_expected(harness, "duplicate_update")
    assert record["verdicts"] == {"accepted": 2 * 6 * 6, "duplicate": 1} and record["weights_equal"]


@pytest.mark.slow
def test_scenario_16_worker_that_is_far_too_slow_holds_nobody_beyond_the_deadline(harness: faults.Harness) -> None:
    record = as_expected(harness, "slow_worker")
    assert record["updates_lost"] == 4 and record["rounds_lost"] == 0
    assert record["verdicts"].keys() <= {"accepted", "late", "stale"} and len(record["verdicts"]) > 1


@pytest.mark.slow
def test_scenario_18_update_of_nan_is_refused(harness: faults.Harness) -> None:
    assert as_expected(harness, "nonfinite_update")["verdicts"]["nonfinite"] == 1


@pytest.mark.slow
def test_scenario_19_update_a_thousand_times_too_long_is_refused(harness: faults.Harness) -> None:
    assert as_expected(harness, "outlier_update")["verdicts"]["outlier"] == 1


@pytest.mark.slow
def test_partition_that_heals_costs_updates_and_no_round(harness: faults.Harness) -> None:
    record = as_expected(harness, "partition_and_heal")
    assert record["updates_lost"] > 0 and record["rounds_lost"] == 0


@pytest.mark.slow
def test_main_writes_one_record_a_run_and_returns_the_exit_code(tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    assert faults.main(["--only", "none", "--repeats", "2", "--json", str(file)]) == 0
    records = json.loads(file.read_text())
    assert [(record["name"], record["repeat_idx"], record["met"]) for record in records] == [
        ("none", 0, True),
        ("none", 1, True),
    ]


# Records, from stories that were made up


def report(round_idx: int, accepted: tuple[int, ...] = (0, 1), **changes: Any) -> dict[str, Any]:
    opened_at = 10.0 + round_idx
    usual = {
        "entry": "block0",
        "round_idx": round_idx,
        "expected": (0, 1),
        "accepted": accepted,
        "refused": (),
        "missing": tuple({0, 1} - set(accepted)),
        "merged": bool(accepted),
        "counts": {"accepted": len(accepted)},
        "opened_at": opened_at,
        "closed_at": opened_at + 0.5,
    }
    return usual | changes


def story_of(*reports: dict[str, Any], **changes: Any) -> Story:
    rounds = [(who, version, f"v{version}") for who in (0, 1) for version in (1, 2, 3)]
    done = dict.fromkeys((0, 1), (3, MASTERS))
    return Story(**{"reports": list(reports), "rounds": rounds, "done": done, "masters": MASTERS, **changes})


def scenario(**expected: Any) -> Scenario:
    return Scenario("made_up", lambda stage: None, Expected(**{"equal": True, **expected}), SHAPE)


def record_of(made_up: Scenario, story: Story, judges_times: bool = True) -> dict[str, Any]:
    return fault_records.record_of(made_up, story, MASTERS, {"block0": 0.4}, judges_times)


WHOLE = [report(0), report(1), report(2)]


def test_record_of_an_undisturbed_run_meets_its_expectations() -> None:
    record = record_of(scenario(), story_of(*WHOLE))
    assert record["met"] and record["unmet"] == []
    assert (record["rounds"], record["rounds_lost"], record["updates_lost"]) == (3, 0, 0)
    assert record["worst_other_ratio"] == pytest.approx(0.5 / 0.4)
    assert record["affected_round_s"] is None and record["recovery_s"] is None


def test_record_of_a_killed_worker_counts_what_was_lost_and_how_long_it_took() -> None:
    torn = report(1, accepted=(0,), closed_at=14.0)
    story = story_of(
        report(0),
        torn,
        report(2, accepted=(0,), missing=(), opened_at=14.0, closed_at=14.3),
        died_at={1: 11.25},
        done={0: (3, MASTERS)},
        fault_at=11.25,
        fault_block=0,
    )
    record = record_of(scenario(dead=frozenset({1}), updates_lost=2), story)
    assert record["met"]
    assert (record["rounds_lost"], record["updates_lost"]) == (0, 2)
    assert record["affected_round_s"] == pytest.approx(3.0)
    assert record["recovery_s"] == pytest.approx(14.3 - 11.25)
    assert record["worst_other_ratio"] == pytest.approx(0.5 / 0.4)


@pytest.mark.parametrize(
    ("expected", "changes", "said"),
    [
        ({"equal": False}, {}, "weights_equal=True and not False"),
        ({}, {"rounds": [(0, 1, "a"), (1, 1, "b")]}, "replicas_bit_identical=False"),
        ({}, {"done": {0: (3, MASTERS), 1: (3, {**MASTERS, "block0": "other"})}}, "replicas_bit_identical=False"),
        ({}, {"last_counts": {"late": 1}}, "1 updates were late"),
        ({"verdicts": {"late": 2}}, {"last_counts": {"late": 1}}, "1 updates were late and not 2"),
        ({}, {"done": {0: (3, MASTERS)}, "died_at": {1: 11.0}}, r"workers \[0\] came to the end, \[1\] died"),
        ({"check": lambda shape, story: iter(["a check"])}, {}, "a check"),
    ],
)
def test_record_names_every_expectation_that_is_not_met(
    expected: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    record = record_of(scenario(**expected), story_of(*WHOLE, **changes))
    assert not record["met"]
    assert re.search(said, "; ".join(record["unmet"]))


def test_record_judges_times_only_where_it_is_told_to() -> None:
    slow = [report(0), report(1, closed_at=11.0 + 2 * SHAPE.deadline_s), report(2)]
    story = story_of(*slow)
    made_up = scenario(max_ratio=1.5, time_check=fault_checks.closes_by_the_deadline)
    assert record_of(made_up, story)["unmet"] == [
        "an undisturbed round lasted 150.00 times the median",
        "block0 round 1 lasted 60.00 s with a deadline of 30 s",
    ]
    record = record_of(made_up, story, judges_times=False)
    assert record["met"] and record["worst_other_ratio"] == pytest.approx(150.0)


@pytest.mark.parametrize("scenario_", ALL, ids=lambda scenario_: scenario_.name)
def test_scenario_on_a_machine_that_is_far_too_busy_has_the_same_unmet_expectations(scenario_: Scenario) -> None:
    def unmet(slower: float) -> list[str]:
        reports = [report(i, opened_at=100.0 * i, closed_at=100.0 * i + slower) for i in range(3)]
        story = story_of(*reports, killed_at=1.0, listening_at=[0.0, 1.0 + slower])
        return fault_records.record_of(scenario_, story, MASTERS, None, judges_times=False)["unmet"]

    assert unmet(0.5) == unmet(90.0)


@pytest.mark.parametrize("scenario_", ALL, ids=lambda scenario_: scenario_.name)
def test_record_of_a_story_without_reports_is_made_and_not_met(scenario_: Scenario) -> None:
    story = Story(killed_at=1.0, listening_at=[0.0, 2.0])
    record = fault_records.record_of(scenario_, story, MASTERS, None)
    assert not record["met"] and record["median_round_s"] is None and record["unmet"]


def test_missing_by_name_without_the_report_says_so() -> None:
    story = story_of(report(0), died_at={1: 11.0})
    [said] = fault_checks.missing_by_name(SHAPE, story)
    assert said == "reports of round 2 of block 0 miss [] and not [(1,)]"


def test_resumes_without_a_close_after_the_restart_says_so() -> None:
    story = story_of(*WHOLE, killed_at=12.0, listening_at=[0.0, 13.0])
    assert list(fault_checks.resumes(SHAPE, story)) == ["no round closes after the restart"]
    assert "resumed_s" not in fault_records.detail_of(story)


def test_record_with_no_undisturbed_round_does_not_meet_a_ratio() -> None:
    story = story_of(*(report(i, missing=(2,)) for i in range(3)))
    assert record_of(scenario(max_ratio=1.1), story)["unmet"] == ["no round was undisturbed"]


def test_record_of_an_entry_that_the_baseline_lacks_compares_it_with_itself() -> None:
    interface = [report(i, entry="interface") for i in range(3)]
    assert record_of(scenario(), story_of(*WHOLE, *interface))["worst_other_ratio"] == pytest.approx(0.5 / 0.4)


def test_record_of_rounds_that_merged_nothing_counts_them_as_lost() -> None:
    story = story_of(report(0), report(1, accepted=()), report(2))
    record = record_of(scenario(updates_lost=2), story)
    assert record["unmet"] == ["rounds_lost=1 and not 0"]


def test_compare_refuses_other_masters_than_those_of_the_named_scenario() -> None:
    record = record_of(scenario(), story_of(*WHOLE))
    other = {"name": "first", "survived": True, "detail": {"masters": {**MASTERS, "block0": "other"}}}
    assert fault_records.compare(record, [other], None)["met"]
    assert fault_records.compare(record, [other], "first")["unmet"] == ["the masters are not those of first"]
    same = other | {"detail": {"masters": MASTERS}}
    assert fault_records.compare(record, [same], "first")["met"]


def test_compare_with_a_scenario_that_no_run_survived_is_not_met() -> None:
    record = record_of(scenario(), story_of(*WHOLE))
    failed = fault_records.failed_record(scenario(), "it failed") | {"name": "first"}
    for others in ([], [failed]):
        compared = fault_records.compare(record, others, "first")
        assert not compared["met"] and compared["unmet"] == ["not compared: no run of first survived"]


# What is chosen, and what comes out


def test_quick_scenarios_are_at_least_eight_and_leave_some_out() -> None:
    quick = [scenario.name for scenario in faults.chosen(True, None)]
    assert len(quick) == len(set(quick)) >= 8
    assert set(quick) < {scenario.name for scenario in faults.chosen(False, None)}
    wanted = {"none", "kill_before_upload", "kill_in_mid_upload", "kill_after_ack", "coordinator_kill_restart", "wan"}
    assert wanted < set(quick)


def test_scenarios_expect_other_weights_where_a_worker_is_lost() -> None:
    assert all(not scenario.expected.equal for scenario in ALL if scenario.expected.dead)
    assert all(scenario.baseline in faults.BY_NAME for scenario in ALL)
    assert DEAD.updates_lost == 4


@pytest.mark.parametrize("wrong", [["--only", "none,no_such"], ["--repeats", "0"], ["--only", ","]])
def test_wrong_options_are_refused_before_anything_runs(wrong: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "warm_up", lambda modules: pytest.fail("it began"))
    with pytest.raises(SystemExit):
        faults.main(wrong)


def test_run_that_fails_is_a_record_and_an_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: object) -> None:
        raise StageError("the coordinator listens not")

    monkeypatch.setattr(faults, "warm_up", lambda modules: None)
    monkeypatch.setattr(faults, "simulated", fails)
    file = tmp_path / "records.json"
    assert faults.main(["--only", "none", "--json", str(file)]) == 1
    [record] = json.loads(file.read_text())
    assert not record["survived"] and record["unmet"] == ["the coordinator listens not"]


def test_run_whose_script_breaks_is_a_record_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = faults.Harness()
    monkeypatch.setattr(harness, "_record", lambda *_: {}["no such round"])
    record = harness.run(faults.BY_NAME["none"])
    assert not record["met"] and "KeyError: 'no such round'" in record["unmet"][0]
    assert harness.records == [record] and record["wall_s"] >= 0


def test_run_first_runs_the_scenario_that_it_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise StageError("not here")

    monkeypatch.setattr(faults, "simulated", fails)
    harness = faults.Harness()
    harness.run(faults.BY_NAME["kill_in_mid_upload"])
    harness.run(faults.BY_NAME["kill_in_mid_upload"], 1)
    names = ["none", "kill_before_upload", "kill_in_mid_upload", "kill_in_mid_upload"]
    assert [record["name"] for record in harness.records] == names
