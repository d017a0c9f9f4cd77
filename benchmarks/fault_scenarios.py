"""The scenarios of the fault harness: each a script of what goes wrong, and what has to come out.

Faults happen at a worker, a round and a point in it, or at a byte; no script waits for a time to pass. Worker 3 is the
second replica of block 0, and mostly the one that suffers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from benchmarks.fault_checks import (
    BLOCK,
    ROUND,
    VICTIM,
    Check,
    came_back,
    closes_by_the_deadline,
    counts_once,
    is_second_life,
    missing_by_name,
    newcomer_counts,
    resumes,
    resumes_soon,
    stands_still,
)
from benchmarks.fault_plan import Fault, Plan, Point, Shape
from benchmarks.fault_stage import Stage
from benchmarks.relay import Line

Script = Callable[[Stage], None]

QUICK_TO_DROP = Shape(deadline_s=6.0, silent_after_s=1.5)
"""The dead are missed soon."""


@dataclass(frozen=True)
class Expected:
    """What has to come out of a scenario, beside a run that ends and replicas that are the same bit for bit.

    Args:
        equal: Whether the final masters are those of the undisturbed run.
        dead: Workers that do not live at the end.
        updates_lost: Block updates that do not count, of one per worker and round; None: depends on timing.
        rounds_lost: Block rounds that merge nothing.
        verdicts: Besides ``accepted``, how often each must be given at least; no other may.
        tolerated: Verdicts that may be given too.
        max_ratio: Longest undisturbed round, in medians of the baseline; None: any. Judged on a quiet machine only.
        check: Yields what else is wrong.
        time_check: Yields which times are too long. Judged on a quiet machine only.
    """

    equal: bool
    dead: frozenset[int] = frozenset()
    updates_lost: int | None = 0
    rounds_lost: int = 0
    verdicts: Mapping[str, int] = field(default_factory=dict)
    tolerated: frozenset[str] = frozenset()
    max_ratio: float | None = None
    check: Check | None = None
    time_check: Check | None = None


@dataclass(frozen=True)
class Scenario:
    """A scenario.

    Args:
        name: Of the scenario.
        script: Makes it happen.
        expected: What has to come out.
        shape: Of the run.
        is_quick: Whether ``--quick`` runs it.
        baseline: The undisturbed scenario whose rounds say how long one lasts.
        same_as: The scenario that must end with the same masters; it is run first.
    """

    name: str
    script: Script
    expected: Expected
    shape: Shape = field(default_factory=Shape)
    is_quick: bool = True
    baseline: str = "none"
    same_as: str | None = None


def at(point: Point, fault: Fault, round_idx: int = ROUND) -> Plan:
    """Return the plan of one fault."""
    return {(round_idx, point): fault}


# Scripts


def undisturbed(stage: Stage) -> None:
    """Let everything go well."""
    stage.start_workers()
    stage.await_end()


def kill_before_upload(stage: Stage) -> None:
    """Kill a worker that has trained its round and sent nothing of it."""
    stage.start_workers({VICTIM: at("before_submit", "die")})
    stage.await_death(VICTIM)
    stage.await_end()


def kill_in_mid_upload(stage: Stage) -> None:
    """Kill a worker when half of its block has arrived."""
    relay = stage.relay()
    stage.start_workers({VICTIM: at("before_submit", "ask")}, through={VICTIM: relay})
    stage.await_ask(VICTIM)
    tear = relay.arm("up", stage.shape.block_bytes // 2, action="hold")
    stage.go(VICTIM)
    stage.await_tear(tear)
    stage.kill(VICTIM)
    stage.await_end()


def kill_after_ack(stage: Stage) -> None:
    """Kill a worker when its block and its interface have been accepted."""
    stage.start_workers({VICTIM: at("after_submit", "die")})
    stage.await_death(VICTIM)
    stage.await_end()


def kill_all_replicas(stage: Stage) -> None:
    """Kill both replicas of a block."""
    stage.start_workers({w: at("before_submit", "die") for w in (1, 4)})
    stage.await_death(1, 4)
    stage.await_end()


def return_with_same_id(stage: Stage) -> None:
    """Kill a worker and start it again at once under its id, before anybody misses it."""
    stage.start_workers({VICTIM: at("before_submit", "die")})
    stage.await_death(VICTIM)
    stage.start_worker(VICTIM)
    stage.await_end()


def join_in_mid_round(stage: Stage) -> None:
    """Start one worker more in the middle of a round."""
    stage.start_workers({0: at("before_submit", "ask")})
    stage.await_ask(0)
    newcomer = stage.shape.num_workers
    stage.mark_fault(newcomer % stage.shape.num_blocks)
    stage.start_worker(newcomer)
    stage.wait(lambda: bool(stage.story.began[newcomer]), "the newcomer begins")
    stage.go(0)
    stage.await_end()


def slow_worker(stage: Stage) -> None:
    """Let one worker be 100 times slower."""
    stage.mark_fault(BLOCK)
    stage.start_workers(slow={VICTIM: 100.0})
    stage.await_end()


def late_update(stage: Stage) -> None:
    """Send an update when its round has closed without it."""
    stage.start_workers({VICTIM: at("before_submit", "outstay")})
    stage.await_version(0, ROUND)
    stage.mark_fault(BLOCK)
    stage.await_end()


def partition_and_heal(stage: Stage) -> None:
    """Let nothing pass between one worker and the coordinator until the others are two rounds ahead."""
    relay = stage.relay()
    stage.start_workers({VICTIM: at("before_submit", "ask")}, through={VICTIM: relay})
    stage.await_ask(VICTIM)
    relay.blackhole()
    stage.mark_fault(BLOCK)
    stage.go(VICTIM)
    stage.await_version(0, ROUND + 2)
    relay.heal()
    stage.await_end()


def cut_download(stage: Stage) -> None:
    """Reset the connection in the middle of a block's new version."""
    relay = stage.relay()
    stage.start_workers({VICTIM: at("before_submit", "ask")}, through={VICTIM: relay})
    stage.await_ask(VICTIM)
    tear = relay.arm("down", stage.shape.block_bytes * 3 // 4)  # more than an interface and all other answers
    stage.go(VICTIM)
    stage.await_tear(tear)
    stage.await_end()


def duplicate_update(stage: Stage) -> None:
    """Lose the answer to an update, so that it is sent again."""
    relay = stage.relay()
    stage.start_workers({VICTIM: at("before_submit", "ask")}, through={VICTIM: relay})
    stage.await_ask(VICTIM)
    tear = relay.arm("down", 0, other_bytes=stage.shape.block_bytes)
    stage.go(VICTIM)
    stage.await_tear(tear)
    stage.await_end()


def nonfinite_update(stage: Stage) -> None:
    """Send NaN."""
    stage.start_workers({VICTIM: at("before_submit", "nan")})
    stage.await_version(0, ROUND)
    stage.mark_fault(BLOCK)
    stage.await_end()


def outlier_update(stage: Stage) -> None:
    """Send an update that is 1,000 times too long, when there are enough others to compare it with."""
    stage.start_workers({VICTIM: at("before_submit", "stretch", ROUND + 1)})
    stage.await_version(0, ROUND + 1)
    stage.mark_fault(BLOCK)
    stage.await_end()


def restart_coordinator(stage: Stage, cold: bool = False) -> None:
    """Kill the coordinator when all but one have been told that their update is accepted, and start it again."""
    stage.start_workers({0: at("before_submit", "ask")})
    stage.await_ask(0)
    stage.await_judged(ROUND, set(range(1, stage.shape.num_workers)))
    stage.kill_coordinator()
    stage.restart_coordinator(cold)
    stage.go(0)
    stage.await_end()


def restart_coordinator_cold(stage: Stage) -> None:
    """The same, with a new interpreter that has to import everything."""
    restart_coordinator(stage, cold=True)


def wide_area(stage: Stage) -> None:
    """Let all workers be 25 ms away, behind 20 MB/s each way."""
    line = Line(latency_ms=25.0, bytes_per_s=20e6)
    relay = stage.relay(line, line)
    stage.start_workers(through=dict.fromkeys(range(stage.shape.num_workers), relay))
    stage.await_end()


def two_hosts(stage: Stage) -> None:
    """Let every second replica reach the coordinator over a relay only, as another host would."""
    relay = stage.relay()
    there = range(stage.shape.num_blocks, stage.shape.num_workers)
    stage.start_workers(through=dict.fromkeys(there, relay))
    stage.await_end()


DEAD = Expected(
    equal=False,
    dead=frozenset({VICTIM}),
    updates_lost=QUICK_TO_DROP.num_rounds - ROUND,
    check=missing_by_name,
    time_check=closes_by_the_deadline,
)
# An update that was stored when the coordinator died is sent again, and counts once.
RESTARTED = Expected(equal=True, tolerated=frozenset({"duplicate"}), check=resumes, time_check=resumes_soon)
THREE = Shape(replicas=3, step_s=0.25, deadline_s=2.5, silent_after_s=1.5)
ALL = (
    Scenario("none", undisturbed, Expected(equal=True)),
    Scenario("kill_before_upload", kill_before_upload, DEAD, QUICK_TO_DROP),
    Scenario("kill_in_mid_upload", kill_in_mid_upload, DEAD, QUICK_TO_DROP, same_as="kill_before_upload"),
    Scenario(
        "kill_after_ack",
        kill_after_ack,
        Expected(
            equal=False,
            dead=frozenset({VICTIM}),
            updates_lost=QUICK_TO_DROP.num_rounds - ROUND - 1,
            check=counts_once,
            time_check=closes_by_the_deadline,
        ),
        QUICK_TO_DROP,
    ),
    Scenario(
        "none_of_three_replicas",
        undisturbed,
        Expected(equal=True),
        THREE,
        is_quick=False,
        baseline="none_of_three_replicas",
    ),
    Scenario(
        "kill_one_of_three_replicas",
        kill_before_upload,
        replace(DEAD, max_ratio=1.1),
        THREE,
        is_quick=False,
        baseline="none_of_three_replicas",
    ),
    Scenario(
        "kill_all_replicas_of_a_block",
        kill_all_replicas,
        Expected(equal=False, dead=frozenset({1, 4}), updates_lost=8, rounds_lost=4, check=stands_still),
        QUICK_TO_DROP,
        is_quick=False,
    ),
    Scenario("return_with_same_id", return_with_same_id, Expected(equal=False, check=is_second_life)),
    Scenario(
        "join_in_mid_round",
        join_in_mid_round,
        Expected(equal=False, updates_lost=None, tolerated=frozenset({"late"}), check=newcomer_counts),
    ),
    Scenario(
        "slow_worker",
        slow_worker,
        Expected(
            equal=False,
            updates_lost=4,
            tolerated=frozenset({"late", "stale"}),
            time_check=closes_by_the_deadline,
        ),
        Shape(num_rounds=4, step_s=0.01, deadline_s=1.0),
    ),
    Scenario(
        "late_update",
        late_update,
        Expected(equal=False, updates_lost=1, verdicts={"late": 1}, check=came_back),
        Shape(deadline_s=2.0),
    ),
    Scenario(
        "partition_and_heal",
        partition_and_heal,
        Expected(
            equal=False,
            updates_lost=None,
            tolerated=frozenset({"late", "stale"}),
            check=came_back,
        ),
        Shape(num_rounds=10, deadline_s=6.0, silent_after_s=1.5),
    ),
    Scenario("cut_download", cut_download, Expected(equal=True)),
    Scenario("duplicate_update", duplicate_update, Expected(equal=True, verdicts={"duplicate": 1})),
    Scenario(
        "nonfinite_update",
        nonfinite_update,
        Expected(equal=False, updates_lost=1, verdicts={"nonfinite": 1}, check=came_back),
    ),
    Scenario(
        "outlier_update",
        outlier_update,
        Expected(equal=False, updates_lost=1, verdicts={"outlier": 1}, check=came_back),
        Shape(outlier_factor=10.0),
    ),
    Scenario("coordinator_kill_restart", restart_coordinator, RESTARTED),
    Scenario(
        "coordinator_kill_restart_cold",
        restart_coordinator_cold,
        RESTARTED,
        is_quick=False,
    ),
    Scenario("wan", wide_area, Expected(equal=True), Shape(num_rounds=4, width=256)),
    Scenario("two_hosts", two_hosts, Expected(equal=True)),
)
"""In the order in which they are run."""
