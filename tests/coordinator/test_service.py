import logging
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_blocktrain.coordinator import membership
from lightning_blocktrain.coordinator.service import CoordinatorService, Phase
from lightning_blocktrain.coordinator.status import prometheus_text, snapshot
from lightning_blocktrain.errors import NotJoinedError, RequestRefusedError, RunFailedError, SupersededError
from lightning_blocktrain.rounds import Receipt, RoundReport, RoundRules, Verdict
from lightning_blocktrain.transport.base import Sender, WorkerFacts
from tests.transport.lines import RUN, TOKEN, make_masters, make_terms, moved, same, submission

DEADLINE_S = 100.0
RULES = RoundRules(DEADLINE_S)


class Run:
    """A service with a clock and workers that send made-up updates."""

    def __init__(self, block_of_worker: list[int], beats: bool = False, interface: bool = False, **terms: Any) -> None:
        num_blocks = max(block_of_worker) + 1
        masters = make_masters(num_blocks, interface)
        fixed = {"rules": RULES, "num_workers": len(block_of_worker)}
        self.service = CoordinatorService(RUN, TOKEN, make_terms(num_blocks, **{**fixed, **terms}), masters)
        self.now = 0.0
        self.senders: dict[int, Sender] = {}
        for worker_id, block_idx in enumerate(block_of_worker):
            self.join(worker_id, block_idx, beats)

    def join(self, worker_id: int | None, block_idx: int | None = None, beats: bool = False) -> int:
        welcome = self.service.join(WorkerFacts(worker_id, block_idx), None, self.now, beats)
        self.senders[welcome.worker_id] = welcome.sender
        return welcome.worker_id

    def send(self, worker_id: int, entry: str | None = None, base: int | None = None, seed: int = 0) -> Receipt:
        entry = entry or f"block{self.service.membership.block_of(worker_id)}"
        ledger = self.service.ledger_of(entry)
        update = submission(ledger.version if base is None else base, moved(ledger.master, 10 * seed + worker_id))
        return self.service.submit(entry, self.senders[worker_id], update, self.now)

    def beat(self, *worker_ids: int) -> None:
        for worker_id in worker_ids:
            self.service.beat(self.senders[worker_id], self.now)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.service.advance(self.now)

    def reports(self, entry: str) -> list[RoundReport]:
        return [report for report in self.service.reports if report.entry == entry]

    @property
    def versions(self) -> dict[str, int]:
        return self.service.versions


# Start


def test_start_waits_for_all_workers_and_takes_updates_meanwhile() -> None:
    run = Run([0, 0], num_workers=3)
    run.send(0)
    run.send(1)
    run.advance(DEADLINE_S + 1)
    assert (run.service.phase, run.versions) == (Phase.WAITING, {"block0": 0})
    run.join(2, 0)
    assert run.service.phase is Phase.RUNNING
    run.send(2)
    assert run.reports("block0")[0].accepted == (0, 1, 2)


def test_start_without_a_number_of_workers_waits_for_one_merge_of_every_block() -> None:
    run = Run([0, 1, 0], num_workers=None, rules=RoundRules(DEADLINE_S, min_replicas=2))
    assert run.service.membership.missing_for_start() == "workers: 1 of block 1"
    run.join(None)
    assert run.service.phase is Phase.RUNNING
    assert run.service.membership.live_of(1) == (1, 3)


def test_scenario_10_start_fails_at_the_timeout_and_says_who_is_missing() -> None:
    run = Run([0, 1, 1], num_workers=5, join_timeout_s=20.0)
    assert run.service.next_event() == 20.0
    run.advance(20.0)
    assert run.service.phase is Phase.FAILED
    assert "join_timeout_s=20, missing workers [3, 4]" in run.service.reason
    with pytest.raises(RunFailedError, match=r"missing workers \[3, 4\]"):
        run.send(0)
    assert run.service.next_event() is None


# Who is waited for


def test_scenario_01_worker_killed_before_its_upload_costs_one_round_its_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run([0, 0, 1])
    survivor = moved(run.service.ledger_of("block0").master, 0)
    run.send(0)
    run.send(2)
    with caplog.at_level(logging.WARNING):
        run.advance(DEADLINE_S)
    assert "block0 round 0 closed without workers [1]" in caplog.text
    (report,) = run.reports("block0")
    assert (report.accepted, report.missing, report.closed_at) == ((0,), (1,), DEADLINE_S)
    assert same(run.service.ledger_of("block0").master, survivor)
    assert run.reports("block1")[0].closed_at == 0.0  # no other block waited


def test_silent_worker_is_not_waited_for_and_its_next_sign_brings_it_back(caplog: pytest.LogCaptureFixture) -> None:
    run = Run([0, 0], beats=True, silent_after_s=10.0)
    run.advance(8.0)
    run.beat(0)
    run.send(0)
    assert run.service.next_event() == 10.0
    with caplog.at_level(logging.WARNING):
        run.advance(2.0)
    assert "worker 1 is silent" in caplog.text
    assert (run.versions["block0"], run.reports("block0")[0].missing) == (1, (1,))
    run.send(0)
    assert run.versions["block0"] == 2  # the next round does not wait for it at all
    receipt = run.send(1, base=0)  # a sign of life, if a late one
    assert receipt.verdict is Verdict.STALE
    assert run.service.roster.live == (0, 1)
    run.send(0)
    run.send(0)
    run.send(1)
    assert run.reports("block0")[-1].accepted == (0, 1)


def test_worker_that_beats_may_compute_for_long() -> None:
    run = Run([0, 0], beats=True, silent_after_s=10.0)
    run.send(0)
    for _ in range(19):
        run.advance(5.0)
        run.beat(0, 1)
    assert run.versions["block0"] == 0
    run.send(1)
    assert run.reports("block0")[0].accepted == (0, 1)


def test_scenario_16_slow_worker_costs_the_others_at_most_the_deadline_and_its_share_shows() -> None:
    run = Run([0, 0], beats=False)
    for _ in range(5):
        run.send(0)
        run.advance(DEADLINE_S)
    assert [report.closed_at - report.opened_at for report in run.reports("block0")] == [DEADLINE_S] * 5
    workers = snapshot(run.service, run.now)["workers"]
    assert [(kept["rounds_expected"], kept["rounds_accepted"]) for kept in workers.values()] == [(5, 5), (5, 0)]


def test_scenario_03_worker_that_dies_after_its_answer_counts_once() -> None:
    run = Run([0, 0], beats=True, silent_after_s=10.0)
    sent = moved(run.service.ledger_of("block0").master, 0)
    assert run.send(0).verdict is Verdict.ACCEPTED
    run.advance(9.0)
    run.beat(1)
    run.advance(2.0)
    assert run.service.roster.live == (1,)
    other = moved(run.service.ledger_of("block0").master, 1)
    run.send(1)
    mean = (sent["layer.w"] + other["layer.w"]) / 2
    assert torch.equal(run.service.ledger_of("block0").master["layer.w"], mean)
    assert run.reports("block0")[0].accepted == (0, 1)


def test_beat_keeps_a_worker_that_still_computes_when_the_run_is_over() -> None:
    run = Run([0, 0], beats=True, silent_after_s=10.0)
    run.service.stop("enough")
    for _ in range(5):
        run.now += 8.0
        run.beat(0)
    assert run.service.roster.live == (0,)  # it will come for what is left; the other one has died
    run.service.leave(run.senders[0], run.now)
    assert run.service.roster.live == ()


def test_beat_of_a_run_that_was_given_up_is_refused() -> None:
    run = Run([0, 1])
    run.service.stop("no", failed=True)
    with pytest.raises(RunFailedError, match="given up: no"):
        run.beat(0)


def test_beat_of_who_is_no_member_is_refused() -> None:
    run = Run([0, 0])
    for sender, error in (
        (Sender(7, 0), NotJoinedError),
        (Sender(0, 1), NotJoinedError),
        (Sender("x", []), NotJoinedError),
    ):  # type: ignore[arg-type]
        with pytest.raises(error):
            run.service.beat(sender, run.now)
    old = run.senders[0]
    run.join(0, 0)
    with pytest.raises(SupersededError):
        run.service.beat(old, run.now)
    run.service.leave(run.senders[1], run.now)
    with pytest.raises(NotJoinedError, match="Worker 1 has left"):
        run.beat(1)


# Blocks without a worker


def test_scenario_09_block_without_a_worker_keeps_its_parameters_and_is_warned_of_each_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run([0, 1])
    run.send(0)
    run.send(1)
    kept = run.service.ledger_of("block1").master
    run.service.leave(run.senders[1], run.now)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            run.send(0)
    assert caplog.text.count("block 1 has no live worker") == 4  # at once, and after each of three rounds
    assert same(run.service.ledger_of("block1").master, kept)
    assert run.versions == {"block0": 4, "block1": 4}
    assert [report.note for report in run.reports("block1")[1:]] == ["nothing merged: 0 accepted, 1 needed"] * 3
    assert run.service.phase is Phase.RUNNING
    assert run.join(None) == 1  # the id and the block that nobody has
    assert run.send(1).verdict is Verdict.ACCEPTED
    assert run.versions["block1"] == 5


def test_scenario_09_on_missing_block_fail_ends_the_run() -> None:
    run = Run([0, 1], on_missing_block="fail")
    run.service.leave(run.senders[1], run.now)
    assert run.service.phase is Phase.FAILED
    assert "blocks without one=[1]" in run.service.reason


def test_run_without_any_worker_stands_still() -> None:
    run = Run([0, 1], beats=True, silent_after_s=10.0)
    run.send(0)
    run.advance(11.0)
    versions = run.versions
    run.advance(100 * DEADLINE_S)
    assert (run.versions, run.service.roster.live) == (versions, ())
    run.beat(0)
    assert run.service.roster.live == (0,)


# The interface


def test_interface_opens_with_the_last_block_round_beside_it() -> None:
    run = Run([0, 1], interface=True, interface_every=2)
    interface = run.service.ledger_of("interface")
    run.send(0)
    run.advance(5.0)
    assert not interface.is_open
    run.send(1)
    assert (interface.is_open, interface.deadline) == (True, 5.0 + DEADLINE_S)
    run.send(0)
    run.send(0, "interface")
    # Block 0 has done its two rounds: its next one begins with the merged interface.
    assert not run.service.ledger_of("block0").is_open
    run.advance(7.0)
    run.send(1)
    run.send(1, "interface")
    assert run.versions == {"block0": 2, "block1": 2, "interface": 1}
    assert run.reports("interface")[0].accepted == (0, 1)
    assert run.service.ledger_of("block0").deadline == 12.0 + DEADLINE_S


def test_interface_waits_for_no_worker_that_joined_in_mid_round() -> None:
    run = Run([0, 1], interface=True)
    late = run.join(None)
    for worker_id in (0, 1):
        run.send(worker_id)
        run.send(worker_id, "interface")
    assert run.versions["interface"] == 1
    for worker_id in (0, 1):
        run.send(worker_id)
        run.send(worker_id, "interface")
    assert (run.versions["interface"], late) == (1, 2)
    run.send(late)
    run.send(late, "interface")
    assert run.versions == {"block0": 2, "block1": 2, "interface": 2}


def test_interface_closes_at_its_deadline_without_the_dead() -> None:
    run = Run([0, 1], interface=True)
    run.send(0)
    run.send(0, "interface")
    run.advance(DEADLINE_S)
    assert run.versions == {"block0": 1, "block1": 1, "interface": 1}
    assert run.reports("interface")[0].missing == (1,)


def test_interface_sent_early_by_everybody_is_merged_at_once() -> None:
    run = Run([0, 1], interface=True, interface_every=10)
    assert run.send(0, "interface").verdict is Verdict.ACCEPTED
    assert run.versions["interface"] == 0
    run.send(1, "interface")
    assert run.versions["interface"] == 1


def test_interface_of_a_run_without_one_is_refused() -> None:
    run = Run([0])
    with pytest.raises(RequestRefusedError, match=r"one of the run's that are served here; got entry='interface'"):
        run.service.fetch("interface", -1, 0.0)


# Rounds with too few, and the end


def test_first_round_with_too_few_stays_open_for_whoever_joins() -> None:
    run = Run([0, 0], rules=RoundRules(DEADLINE_S, min_replicas=2), num_workers=None)
    run.service.leave(run.senders[1], run.now)
    run.advance(DEADLINE_S)
    assert (run.versions["block0"], run.reports("block0")[0].merged) == (1, False)
    run.join(1, 0)
    run.advance(DEADLINE_S)
    for worker_id in (0, 1):
        run.send(worker_id)
    assert run.reports("block0")[-1].merged


def test_max_rounds_ends_the_run_when_every_entry_is_through() -> None:
    run = Run([0, 1], interface=True, interface_every=2, max_rounds=3)
    for version in range(3):
        for worker_id in (0, 1):
            run.send(worker_id)
            if run.service.terms.interface_due(version):
                run.send(worker_id, "interface")
    assert run.versions == {"block0": 3, "block1": 3, "interface": 2}
    assert run.service.phase is Phase.FINISHED
    assert run.send(0, base=2).verdict is Verdict.DUPLICATE
    found = run.service.fetch("interface", 1, run.now)
    assert found is not None and found.version == 2


def test_max_rounds_run_ends_though_its_workers_leave_without_a_last_look() -> None:
    run = Run([0, 1], interface=True, max_rounds=1)
    for worker_id in (0, 1):
        run.send(worker_id)
        run.send(worker_id, "interface")
        run.service.leave(run.senders[worker_id], run.now)
    assert run.service.phase is Phase.FINISHED


# Membership


def test_join_without_ids_fills_blocks_evenly_and_reuses_ids_that_were_given_back() -> None:
    run = Run([0, 1, 2], num_workers=None)
    assert [run.join(None) for _ in range(4)] == [3, 4, 5, 6]
    assert [len(run.service.membership.live_of(b)) for b in range(3)] == [3, 2, 2]
    run.service.leave(run.senders[4], run.now)
    assert run.join(None) == 4
    assert (run.service.membership.block_of(4), run.senders[4].incarnation) == (1, 1)


def test_join_of_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_WORKERS", 5)
    run = Run([0])
    for _ in range(4):
        run.join(None)
    with pytest.raises(RequestRefusedError, match="at most 5 workers"):
        run.join(None)


def test_join_with_an_incarnation_that_does_not_grow_is_superseded() -> None:
    run = Run([0, 0])
    assert run.service.join(WorkerFacts(0), 5, run.now).incarnation == 5
    for incarnation in (4, 5):
        with pytest.raises(SupersededError):
            run.service.join(WorkerFacts(0), incarnation, run.now)


# Any order of events


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 3), st.integers(-2, 1)),
        st.tuples(st.just("interface"), st.integers(0, 3), st.integers(-2, 1)),
        st.tuples(st.just("join"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("leave"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("beat"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("pass"), st.sampled_from([1, 30, 101]), st.just(0)),
    ),
    max_size=50,
)


@given(EVENTS, st.integers(1, 3), st.sampled_from([None, 4]))
def test_any_order_of_events_counts_every_accepted_update_exactly_once(
    events: list[tuple[str, int, int]], interface_every: int, max_rounds: int | None
) -> None:
    run = Run([0, 1, 0, 1], True, True, interface_every=interface_every, max_rounds=max_rounds, silent_after_s=40.0)
    accepted: Counter[tuple[str, int, int]] = Counter()
    given_receipts = 0
    for kind, value, shift in events:
        before = run.versions
        if kind in ("send", "interface"):
            entry = "interface" if kind == "interface" else f"block{run.service.membership.block_of(value)}"
            base = run.versions[entry] + shift
            receipt = run.send(value, entry, base)
            given_receipts += 1
            accepted[entry, base, value] += receipt.verdict is Verdict.ACCEPTED
        elif kind == "join" and not run.service.ended:
            run.join(value, run.service.membership.block_of(value), beats=True)
        elif kind == "leave":
            run.service.leave(run.senders[value], run.now)
        elif kind == "beat" and run.service.roster.is_live(value) and not run.service.ended:
            run.beat(value)
        elif kind == "pass":
            run.advance(value)
        assert all(run.versions[entry] >= version for entry, version in before.items())
    assert sum(run.service.counts.values()) == given_receipts
    assert set(accepted.values()) <= {0, 1}
    merged = Counter((r.entry, r.round_idx, worker_id) for r in run.service.reports for worker_id in r.accepted)
    open_ones = {key for key in accepted if key[1] == run.versions[key[0]]}
    assert merged == Counter({key: n for key, n in accepted.items() if n and key not in open_ones})
    for entry in run.versions:
        assert [r.round_idx for r in run.reports(entry)] == list(range(run.versions[entry]))


# What is shown


def test_snapshot_and_metrics_show_the_run_without_its_token() -> None:
    run = Run([0, 1])
    run.send(0)
    run.send(0, base=0)
    status = snapshot(run.service, 30.0)
    assert status["entries"]["block1"]["waits_for"] == [1]
    assert status["entries"]["block1"]["closes_in_s"] == 70.0
    assert status["entries"]["block0"]["verdicts"] == {"accepted": 1, "duplicate": 1}
    assert status["entries"]["block0"]["accepted_tokens"] == 40
    text = prometheus_text(status, {"received_bytes": 12})
    assert "# TYPE blocktrain_received_bytes_total counter\nblocktrain_received_bytes_total 12.0\n" in text
    assert 'blocktrain_updates_total{entry="block0",verdict="duplicate"} 1.0\n' in text
    assert 'blocktrain_version{entry="block0"} 1.0\n' in text
    assert 'blocktrain_worker_rounds_accepted_total{worker="0",entry="block0"} 1.0\n' in text
    assert TOKEN not in text + str(status)
