"""Coordinators that serve a part of a run: what each waits for, when its rounds open, and what it keeps."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.coordinator.serve import ServeSettings
from lightning_blocktrain.coordinator.service import CoordinatorService, Phase
from lightning_blocktrain.coordinator.storage import Storage
from lightning_blocktrain.errors import CheckpointMismatchError, RequestRefusedError
from lightning_blocktrain.rounds import INTERFACE, OuterSGD, Receipt, RoundRules, Verdict
from lightning_blocktrain.transport.base import Sender, WorkerFacts
from tests.transport.lines import RUN, TOKEN, make_masters, make_terms, moved, same, submission

DEADLINE_S = 100.0
OWNER, OTHER = ("block0", "interface"), ("block1",)


class Parts:
    """Two coordinators of a run of two blocks, with a clock and workers that send made-up updates.

    The first merges the interface. A worker joins as a transport would: there, and then at its block's coordinator.
    """

    def __init__(self, blocks: list[int], owner: tuple[str, ...] = OWNER, other: tuple[str, ...] = OTHER, **terms: Any):
        fixed = {"rules": RoundRules(DEADLINE_S), "num_workers": len(blocks)}
        self.terms = make_terms(2, **{**fixed, **terms})
        masters = make_masters(2)
        self.owner, self.other = (
            CoordinatorService(RUN, TOKEN, self.terms, {e: masters[e] for e in serves}, serves=serves)
            for serves in (owner, other)
        )
        self.now = 0.0
        self.senders: dict[int, Sender] = {}
        self.block_of: dict[int, int] = {}
        for worker_id, block_idx in enumerate(blocks):
            self.join(worker_id, block_idx)

    @property
    def services(self) -> tuple[CoordinatorService, CoordinatorService]:
        return self.owner, self.other

    def of(self, entry: str) -> CoordinatorService:
        return next(service for service in self.services if entry in service.ledgers)

    def join(self, worker_id: int, block_idx: int) -> None:
        facts = WorkerFacts(worker_id, block_idx)
        welcome = self.owner.join(facts, None, self.now)
        self.senders[worker_id], self.block_of[worker_id] = welcome.sender, block_idx
        if self.of(f"block{block_idx}") is self.other:
            self.other.join(facts, welcome.incarnation, self.now)

    def leave(self, worker_id: int) -> None:
        for service in self.services:
            service.leave(self.senders[worker_id], self.now)

    def send(self, worker_id: int, entry: str | None = None, base: int | None = None) -> Receipt:
        entry = entry or f"block{self.block_of[worker_id]}"
        ledger = self.of(entry).ledger_of(entry)
        update = submission(ledger.version if base is None else base, moved(ledger.master, worker_id))
        return self.of(entry).submit(entry, self.senders[worker_id], update, self.now)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for service in self.services:
            service.advance(self.now)

    def ledger(self, entry: str) -> Any:
        return self.of(entry).ledger_of(entry)

    @property
    def versions(self) -> dict[str, int]:
        return {**self.owner.versions, **self.other.versions}


# Who is waited for


def test_start_of_each_part_waits_for_the_workers_that_it_knows() -> None:
    parts = Parts([0, 1], num_workers=5)
    assert parts.owner.membership.missing_for_start() == "workers [2, 3, 4]"
    assert parts.other.membership.missing_for_start() == "workers: 1 of block 1"  # ids 1 and 3 of 0 to 4
    parts.join(3, 1)
    assert (parts.owner.phase, parts.other.phase) == (Phase.WAITING, Phase.RUNNING)
    for worker_id in (2, 4):
        parts.join(worker_id, 0)
    assert parts.owner.phase is Phase.RUNNING


def test_start_without_a_number_of_workers_waits_for_every_block_where_ids_are_given_out() -> None:
    parts = Parts([0], num_workers=None)
    assert parts.owner.membership.missing_for_start() == "workers: 1 of block 1"
    assert parts.other.membership.missing_for_start() == "workers: 1 of block 1"
    parts.join(1, 1)
    assert (parts.owner.phase, parts.other.phase) == (Phase.RUNNING, Phase.RUNNING)


@pytest.mark.parametrize("facts", [WorkerFacts(), WorkerFacts(0), WorkerFacts(0, 0), WorkerFacts(None, 1)])
def test_join_of_a_part_that_gives_out_no_ids_needs_those_of_the_one_that_does(facts: WorkerFacts) -> None:
    parts = Parts([0, 1])
    with pytest.raises(RequestRefusedError, match=r"first, then here for block \[1\]; got worker_id=.*name all coord"):
        parts.other.join(facts, None, 0.0)
    assert parts.other.roster.live == (1,)


def test_entry_that_another_coordinator_serves_is_refused_with_those_served_here() -> None:
    parts = Parts([0, 1])
    with pytest.raises(RequestRefusedError, match=r"served here; got entry='interface'; ask for one of \['block1'\]"):
        parts.other.fetch("interface", -1, 0.0)


def test_block_without_a_worker_is_warned_of_where_the_interface_is_and_follows_its_own_coordinator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = Parts([0, 1])
    with caplog.at_level(logging.WARNING):
        parts.leave(1)
    assert caplog.text.count("block 1 has no live worker") == 2  # where its rounds are, and where its interface goes
    parts.send(0)
    parts.send(0, "interface")
    assert parts.versions == {"block0": 1, "interface": 1, "block1": 0}


def test_missing_block_ends_the_run_in_both_parts_if_it_is_to() -> None:
    parts = Parts([0, 1], on_missing_block="fail")
    parts.leave(1)
    assert (parts.owner.phase, parts.other.phase) == (Phase.FAILED, Phase.FAILED)


# When rounds open


def test_interface_that_is_due_every_round_opens_with_its_last_close_and_waits_for_all_blocks() -> None:
    parts = Parts([0, 1])
    interface = parts.ledger("interface")
    assert (interface.is_open, interface.deadline, interface.pending) == (True, DEADLINE_S, (0, 1))
    parts.send(0)
    parts.send(0, "interface")
    parts.advance(40.0)
    parts.send(1)
    assert parts.versions == {"block0": 1, "interface": 0, "block1": 1}
    assert parts.ledger("block1").is_open and not parts.ledger("block0").is_open  # this one waits for the merge
    parts.send(1, "interface")
    assert (parts.versions["interface"], parts.ledger("interface").deadline) == (1, 40.0 + DEADLINE_S)
    assert parts.ledger("block0").is_open


def test_interface_opens_when_a_worker_of_every_block_elsewhere_has_come_to_it() -> None:
    parts = Parts([0, 1, 1], interface_every=3)
    for _ in range(2):
        parts.send(0)
    assert parts.owner.versions["block0"] == 2 and not parts.ledger("interface").is_open
    parts.advance(70.0)
    parts.send(1, "interface")
    interface = parts.ledger("interface")
    assert (interface.deadline, interface.pending) == (70.0 + DEADLINE_S, (0, 2))


def test_interface_opens_in_time_though_no_worker_of_a_block_elsewhere_has_come_to_it() -> None:
    parts = Parts([0, 1], interface_every=3)
    for _ in range(3):
        parts.send(0)
    parts.send(0, "interface")
    assert parts.owner.next_event() == 2 * DEADLINE_S
    parts.advance(2 * DEADLINE_S)
    assert parts.ledger("interface").pending == (1,)
    parts.advance(DEADLINE_S)
    assert (parts.owner.versions["interface"], parts.owner.reports[-1].missing) == (1, (1,))


def test_round_that_begins_with_a_merge_elsewhere_opens_with_its_first_update() -> None:
    parts = Parts([0, 1, 1], interface_every=3)
    for version in range(3):
        assert parts.ledger("block1").is_open
        for worker_id in (1, 2):
            parts.send(worker_id, base=version)
    assert not parts.ledger("block1").is_open
    assert parts.other.next_event() == 2 * DEADLINE_S
    parts.advance(150.0)
    parts.send(2)
    block = parts.ledger("block1")
    assert (block.deadline, block.pending) == (150.0 + DEADLINE_S, (1,))


def test_round_that_begins_with_a_merge_elsewhere_opens_in_time_without_an_update() -> None:
    parts = Parts([0, 1], interface_every=2)
    for version in range(2):
        parts.send(1, base=version)
    parts.advance(DEADLINE_S)
    assert parts.ledger("block1").deadline == 2 * DEADLINE_S
    parts.advance(DEADLINE_S)
    assert parts.versions["block1"] == 3


@pytest.mark.parametrize("interface_every", [1, 2, 3])
@pytest.mark.parametrize("slow", [0, 1])
def test_workers_that_keep_the_deadline_are_never_late_however_different_their_paces(
    interface_every: int, slow: int
) -> None:
    # Everybody computes, sends, and waits for what it sent to be merged, as a worker does.
    parts = Parts([0, 1], interface_every=interface_every)
    pace_s = {slow: 95.0, 1 - slow: 10.0}
    base = dict.fromkeys((0, 1), 0)
    done_at = dict(pace_s)
    verdicts: Counter[Verdict] = Counter()
    while parts.now < 4000.0:
        times = [*done_at.values(), *(service.next_event() for service in parts.services)]
        parts.advance(min(time for time in times if time is not None) - parts.now)
        for worker_id in [w for w, time in done_at.items() if time <= parts.now]:
            verdicts[parts.send(worker_id, base=base[worker_id]).verdict] += 1
            if parts.terms.interface_due(base[worker_id]):
                merged = parts.terms.interface_round(base[worker_id])
                verdicts[parts.send(worker_id, "interface", merged).verdict] += 1
            base[worker_id] += 1
            del done_at[worker_id]
        for worker_id in {0, 1} - done_at.keys():
            has_block = parts.versions[f"block{worker_id}"] >= base[worker_id]
            if has_block and parts.versions["interface"] >= parts.terms.interface_round(base[worker_id]):
                done_at[worker_id] = parts.now + pace_s[worker_id]
    assert verdicts.keys() == {Verdict.ACCEPTED}
    assert parts.versions["interface"] >= 4000 // (interface_every * 95) - 1


def test_parts_finish_each_when_all_that_they_serve_is_through() -> None:
    parts = Parts([0, 1], interface_every=2, max_rounds=3)
    for version in range(3):
        for worker_id in (1, 0):
            parts.send(worker_id)
            if parts.terms.interface_due(version):
                parts.send(worker_id, "interface")
    assert parts.versions == {"block0": 3, "interface": 2, "block1": 3}
    assert (parts.owner.phase, parts.other.phase) == (Phase.FINISHED, Phase.FINISHED)


def test_coordinator_of_the_interface_alone_merges_and_finishes_it() -> None:
    parts = Parts([0, 1], (INTERFACE,), ("block0", "block1"), max_rounds=2)
    for _ in range(2):
        for worker_id in (0, 1):
            parts.send(worker_id)
            parts.send(worker_id, "interface")
    assert parts.versions == {"interface": 2, "block0": 2, "block1": 2}
    assert (parts.owner.phase, parts.other.phase) == (Phase.FINISHED, Phase.FINISHED)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["block", "interface"]), st.integers(0, 3), st.integers(-1, 1)),
        st.tuples(st.sampled_from(["join", "leave"]), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("pass"), st.sampled_from([1, 30, 101]), st.just(0)),
    ),
    max_size=50,
)


@given(EVENTS, st.integers(1, 3), st.sampled_from([None, 3]))
def test_any_order_of_events_counts_every_accepted_update_once_and_leaves_nothing_due(
    events: list[tuple[str, int, int]], interface_every: int, max_rounds: int | None
) -> None:
    parts = Parts([0, 1, 0, 1], interface_every=interface_every, max_rounds=max_rounds)
    accepted: Counter[tuple[str, int, int]] = Counter()
    for kind, value, shift in events:
        if kind == "pass":
            parts.advance(value)
        elif kind == "leave":
            parts.leave(value)
        elif kind == "join" and not (parts.owner.ended or parts.other.ended):
            parts.join(value, value % 2)
        elif kind in ("block", "interface"):
            entry = "interface" if kind == "interface" else f"block{value % 2}"
            base = parts.versions[entry] + shift
            accepted[entry, base, value] += parts.send(value, entry, base).verdict is Verdict.ACCEPTED
        for service in parts.services:
            due = service.next_event()
            assert due is None or due > parts.now
    reports = [report for service in parts.services for report in service.reports]
    merged = Counter((r.entry, r.round_idx, worker_id) for r in reports for worker_id in r.accepted)
    waiting = {key for key in accepted if key[1] == parts.versions[key[0]]}
    assert merged == Counter({key: n for key, n in accepted.items() if n and key not in waiting})
    assert set(merged.values()) <= {1}


# Masters and state


@pytest.mark.parametrize(
    ("serves", "entries", "message"),
    [
        (OTHER, ("block0", "block1"), r"what this coordinator serves, \['block1'\]; got entries=\['block0', 'block1'"),
        (OTHER, (), "what this coordinator serves"),
        (OWNER, ("interface",), "what this coordinator serves"),
        (("block2",), ("block2",), r"entries of the run, block0 to block1 and interface; got serves=\['block2'\]"),
        ((INTERFACE,), (), "what this coordinator serves"),
    ],
)
def test_found_with_masters_of_another_part_is_refused(serves: Any, entries: Any, message: str) -> None:
    desk, masters = Desk(RUN, TOKEN, serves=serves), {**make_masters(3)}
    with pytest.raises(ValueError, match=message):
        desk.found(make_terms(2), {entry: masters[entry] for entry in entries}, 0.0)
    assert desk.status(0.0)["phase"] == "empty"


def test_found_without_an_interface_is_taken_by_the_coordinator_that_would_merge_it() -> None:
    desk = Desk(RUN, TOKEN, serves=OWNER)
    assert desk.status(0.0)["serves"] == ["block0", "interface"]
    assert desk.found(make_terms(2), {"block0": make_masters()["block0"]}, 0.0)
    assert desk.service.join(WorkerFacts(), None, 0.0).versions == {"block0": 0}
    assert desk.status(0.0)["serves"] == ["block0", "interface"]


def test_state_of_a_part_holds_its_entries_only_and_goes_on(tmp_path: Path) -> None:
    desk = Desk(RUN, TOKEN, Storage(tmp_path), serves=OTHER)
    terms = make_terms(2, num_workers=2, outer=OuterSGD(0.7, 0.9, nesterov=True))
    desk.found(terms, {"block1": make_masters()["block1"]}, 0.0)
    desk.service.join(WorkerFacts(1, 1), None, 0.0)
    for version in range(2):
        update = submission(version, moved(desk.service.ledger_of("block1").master, version))
        desk.submit("block1", Sender(1, 0), update, 0.0)
    before = desk.service.ledger_of("block1").state_dict()
    desk.close()
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["block1-2.safetensors"]
    again = Desk(RUN, TOKEN, Storage(tmp_path), serves=OTHER)
    assert again.resume(0.0)
    after = again.service.ledger_of("block1").state_dict()
    assert (after["version"], again.service.phase) == (2, Phase.RUNNING)
    assert same(after["master"], before["master"]) and torch.equal(
        after["buffers"]["layer.w"], before["buffers"]["layer.w"]
    )
    again.close()


@pytest.mark.parametrize("serves", [None, OWNER, ("block0", "block1"), ("block1", "interface", "block0")])
def test_state_of_another_part_is_refused_with_both_named(tmp_path: Path, serves: Any) -> None:
    desk = Desk(RUN, TOKEN, Storage(tmp_path), serves=OTHER)
    desk.found(make_terms(2), {"block1": make_masters()["block1"]}, 0.0)
    desk.close()
    again = Desk(RUN, TOKEN, Storage(tmp_path), serves=serves)
    with pytest.raises(CheckpointMismatchError, match=r"stored=\['block1'\], served here=\['block0'"):
        again.resume(0.0)
    assert again.status(0.0)["phase"] == "empty"
    again.close()


@pytest.mark.parametrize(
    ("serves", "waits", "waits_for_nobody"),
    [(None, [True, False, False], False), (OWNER, [True, True, False], False), (OTHER, [True, True, False], True)],
)
def test_part_of_an_ended_run_stays_for_those_that_it_does_not_know(
    serves: Any, waits: list[bool], waits_for_nobody: bool
) -> None:
    desk, masters = Desk(RUN, TOKEN, serves=serves), make_masters()
    terms = make_terms(2, rules=RoundRules(DEADLINE_S), num_workers=2)
    desk.found(terms, {entry: kept for entry, kept in masters.items() if serves is None or entry in serves}, 0.0)
    welcome = desk.service.join(WorkerFacts(1, 1), None, 0.0)
    desk.stop("enough")
    assert [desk.awaits_workers(ended_for_s, 30.0) for ended_for_s in (29.0, 31.0, 31.0 + DEADLINE_S)] == waits
    desk.service.leave(welcome.sender, 0.0)
    assert desk.awaits_workers(29.0, 30.0) is waits_for_nobody


def test_serve_settings_say_which_entries_a_coordinator_is_for() -> None:
    assert ServeSettings(RUN, TOKEN).serves is None
    assert ServeSettings(RUN, TOKEN, blocks=(2, 0), interface=True).serves == ("block0", "block2", "interface")
    assert ServeSettings(RUN, TOKEN, blocks=(), interface=True).serves == ("interface",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": (0, 0)}, r"different numbers from 0 on; got blocks=\(0, 0\)"),
        ({"blocks": (-1,)}, "different numbers from 0 on"),
        ({"blocks": ()}, "for a block or the interface"),
        ({"interface": True}, "so it needs blocks; got interface=True, blocks=None"),
    ],
)
def test_serve_settings_of_no_part_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServeSettings(RUN, TOKEN, **options)
