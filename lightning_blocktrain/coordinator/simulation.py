"""A coordinator for workers that are simulated in one process: the ledgers under a virtual clock.

Owns the order in which updates arrive. Owns no merge or acceptance rule: those are the ledgers', the same lines that
a networked coordinator runs. Every number it gives in seconds is simulated.

Simplification: the simulator is synchronous in training rounds. Every worker takes part in every round, starts it
from the current masters, and begins it when its block's round opens, even if its last update is still under way.
What is simulated is whether an update arrives in time. An update that misses its deadline is delivered at its
virtual time in a later round, or by ``flush``; since it can then only be late or stale, its tensors are not kept.

Every entry has its own events and its own clock, so no block waits for another. A round of the interface opens
with the last of the block rounds beside it, because it needs workers of every block.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_blocktrain.coordinator.network import NetworkModel, update_bytes_of
from lightning_blocktrain.errors import CheckpointMismatchError, explain
from lightning_blocktrain.rounds import (
    INTERFACE,
    Ledger,
    OuterSGD,
    Params,
    Receipt,
    Roster,
    RoundReport,
    RoundRules,
    Update,
    Verdict,
    block_entry,
)

Receipts = dict[tuple[int, str], list[Receipt]]

_RUN_ID = _TOKEN = "simulation"


@dataclass(frozen=True, eq=False)
class WorkerRound:
    """What one worker did in one training round.

    Args:
        worker_id: Index into ``block_of_worker``.
        num_steps: Inner optimizer steps.
        num_tokens: Target tokens.
        block_params: Its block after these steps; may be live parameters, they are copied where they are kept.
        interface_params: Its interface likewise; read only in rounds that close the interface, where it is required.
    """

    worker_id: int
    num_steps: int
    num_tokens: int
    block_params: Mapping[str, Tensor] = field(repr=False)
    interface_params: Mapping[str, Tensor] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class RoundOutcome:
    """What the coordinator did with one training round.

    Args:
        reports: One per entry that closed, blocks in order and the interface last.
        receipts: What was delivered meanwhile by (worker id, entry), in virtual order; the late ones of earlier
            rounds are among them.
        virtual_s: Simulated seconds since the start of the run, of the entry that is furthest.
    """

    reports: tuple[RoundReport, ...]
    receipts: dict[tuple[int, str], tuple[Receipt, ...]]
    virtual_s: float


class Arrival(NamedTuple):
    """An update under way; the fields sort by time and never tie."""

    arrives_at: float
    worker_id: int
    base_version: int
    num_steps: int
    num_tokens: int


@dataclass(eq=False)
class _Timeline:
    """The events of one entry."""

    ledger: Ledger
    workers: tuple[int, ...]
    now_s: float = 0.0
    arrivals: list[Arrival] = field(default_factory=list)


class SimulatedCoordinator:
    """Merge what simulated workers send, as far as it arrives in time.

    Args:
        masters: Initial tensors by entry: ``block0`` to ``block{B-1}``, and ``interface`` if there is one.
        block_of_worker: Block index of each worker; every block has at least one.
        rules: Of every entry.
        make_outer: Makes each entry's outer optimizer.
        network: One link per worker.
        seed: Of the coordinator's own generator, which draws every duration.
        interface_every: Rounds from one close of the interface to the next, 1 or more.

    Raises:
        ValueError: If the arguments do not fit each other, or a block has fewer workers than the rules can merge.
    """

    def __init__(
        self,
        masters: Mapping[str, Mapping[str, Tensor]],
        block_of_worker: Sequence[int],
        rules: RoundRules,
        make_outer: Callable[[], OuterSGD],
        network: NetworkModel,
        seed: int,
        interface_every: int = 1,
    ) -> None:
        num_blocks = _count_blocks(masters)
        _check_fit(num_blocks, block_of_worker, network, interface_every)
        self.network = network
        self.block_of_worker = tuple(block_of_worker)
        self.interface_every = interface_every
        self._roster = Roster(_RUN_ID, _TOKEN)
        for worker_id in range(len(block_of_worker)):
            self._roster.join(worker_id, 0)
        entries = [block_entry(block_idx) for block_idx in range(num_blocks)]
        if INTERFACE in masters:
            entries.append(INTERFACE)
        self._timelines = {
            entry: _Timeline(Ledger(entry, masters[entry], rules, make_outer(), self._roster), self._members(entry))
            for entry in entries
        }
        for timeline in self._timelines.values():
            rules.check_replicas(len(timeline.workers))
        self._num_bytes = [2 * update_bytes_of(masters, block_idx) for block_idx in block_of_worker]
        self._generator = torch.Generator().manual_seed(seed)
        self._round_idx = 0
        self._worker_steps = 0
        self._accepted_tokens = 0
        self._counts: Counter[Verdict] = Counter()

    def _members(self, entry: str) -> tuple[int, ...]:
        holds = (entry in (INTERFACE, block_entry(block_idx)) for block_idx in self.block_of_worker)
        return tuple(worker_id for worker_id, held in enumerate(holds) if held)

    @property
    def masters(self) -> dict[str, Params]:
        """Master tensors by entry; replaced at a close and never written to, so nobody else may."""
        return {entry: timeline.ledger.master for entry, timeline in self._timelines.items()}

    @property
    def versions(self) -> dict[str, int]:
        """Version by entry."""
        return {entry: timeline.ledger.version for entry, timeline in self._timelines.items()}

    @property
    def round_idx(self) -> int:
        """Training rounds finished."""
        return self._round_idx

    @property
    def virtual_s(self) -> dict[str, float]:
        """Simulated seconds since the start of the run by entry."""
        return {entry: timeline.now_s for entry, timeline in self._timelines.items()}

    @property
    def worker_steps(self) -> int:
        """Inner optimizer steps of all workers, merged or not."""
        return self._worker_steps

    @property
    def accepted_tokens(self) -> int:
        """Target tokens merged into the blocks; what the interface merged beside them is not counted again."""
        return self._accepted_tokens

    @property
    def counts(self) -> dict[Verdict, int]:
        """Receipts given so far by verdict, over all entries."""
        return dict(self._counts)

    def interface_due(self, final: bool = False) -> bool:
        """Tell whether the next ``finish_round`` closes the interface."""
        return INTERFACE in self._timelines and (final or (self._round_idx + 1) % self.interface_every == 0)

    def finish_round(self, updates: Sequence[WorkerRound], final: bool = False) -> RoundOutcome:
        """Open a round of every block, deliver what arrives until it closes, and close it.

        Args:
            updates: At most one per worker; a worker without one is waited for until the deadline.
            final: Close the interface whatever ``interface_every`` says; for the end of training.

        Raises:
            ValueError: If a worker is unknown or named twice, or lacks its interface where that is due.
        """
        due = self.interface_due(final)
        by_worker = _index_updates(updates, len(self.block_of_worker), due)
        steps = [by_worker[w].num_steps if w in by_worker else 0 for w in range(len(self.block_of_worker))]
        durations = [
            link.round_s(num_steps, num_bytes, self._generator)
            for link, num_steps, num_bytes in zip(self.network.links, steps, self._num_bytes, strict=True)
        ]
        receipts: Receipts = {}
        blocks = [entry for entry in self._timelines if entry != INTERFACE]
        last_opening_s = max(self._timelines[entry].now_s for entry in blocks)
        reports = [self._run_round(entry, by_worker, durations, receipts) for entry in blocks]
        if due:
            interface = self._timelines[INTERFACE]
            interface.now_s = max(interface.now_s, last_opening_s)
            reports.append(self._run_round(INTERFACE, by_worker, durations, receipts))
        self._round_idx += 1
        self._worker_steps += sum(steps)
        return self._outcome(reports, receipts)

    def flush(self) -> RoundOutcome:
        """Deliver what is still under way, so that every update that arrives at all is counted.

        Call it once, at the end of the run. The outcome has no reports; the clocks move to the last arrival.
        """
        receipts: Receipts = {}
        for timeline in self._timelines.values():
            while timeline.arrivals:
                arrival = heapq.heappop(timeline.arrivals)
                timeline.now_s = arrival.arrives_at
                self._deliver(timeline, arrival, {}, receipts)
        return self._outcome([], receipts)

    def _outcome(self, reports: list[RoundReport], receipts: Receipts) -> RoundOutcome:
        by_worker = {key: tuple(given) for key, given in receipts.items()}
        return RoundOutcome(tuple(reports), by_worker, max(self.virtual_s.values()))

    def _run_round(
        self, entry: str, updates: Mapping[int, WorkerRound], durations: Sequence[float], receipts: Receipts
    ) -> RoundReport:
        timeline = self._timelines[entry]
        ledger = timeline.ledger
        ledger.open(timeline.workers, timeline.now_s)
        for worker_id in timeline.workers:
            arrives_at = timeline.now_s + durations[worker_id]
            if worker_id in updates and arrives_at < math.inf:
                sent = updates[worker_id]
                arrival = Arrival(arrives_at, worker_id, ledger.version, sent.num_steps, sent.num_tokens)
                heapq.heappush(timeline.arrivals, arrival)
        report = self._close_round(timeline, updates, timeline.now_s + ledger.rules.deadline_s, receipts)
        timeline.now_s = report.closed_at
        if entry != INTERFACE:
            self._accepted_tokens += report.accepted_tokens
        return report

    def _close_round(
        self, timeline: _Timeline, updates: Mapping[int, WorkerRound], deadline: float, receipts: Receipts
    ) -> RoundReport:
        report = None
        while report is None:
            now = deadline
            if timeline.arrivals and timeline.arrivals[0].arrives_at <= deadline:
                arrival = heapq.heappop(timeline.arrivals)
                now = arrival.arrives_at
                self._deliver(timeline, arrival, updates, receipts)
            report = timeline.ledger.close_if_due(now)
        return report

    def _deliver(
        self, timeline: _Timeline, arrival: Arrival, updates: Mapping[int, WorkerRound], receipts: Receipts
    ) -> None:
        ledger, worker_id = timeline.ledger, arrival.worker_id
        params: Mapping[str, Tensor] = {}
        if arrival.base_version == ledger.version:
            sent = updates[worker_id]
            params = (sent.interface_params or {}) if ledger.entry == INTERFACE else sent.block_params
        update = Update(
            run_id=_RUN_ID,
            token=_TOKEN,
            worker_id=worker_id,
            incarnation=0,
            base_version=arrival.base_version,
            num_steps=arrival.num_steps,
            num_tokens=arrival.num_tokens,
            params=params,
        )
        receipt = ledger.submit(update, arrival.arrives_at)
        self._counts[receipt.verdict] += 1
        receipts.setdefault((worker_id, ledger.entry), []).append(receipt)

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, between two rounds: plain values and the ledgers' own tensors."""
        return {
            "block_of_worker": list(self.block_of_worker),
            "round_idx": self._round_idx,
            "worker_steps": self._worker_steps,
            "accepted_tokens": self._accepted_tokens,
            "counts": {verdict.value: count for verdict, count in self._counts.items()},
            "generator": self._generator.get_state(),
            "timelines": {entry: _timeline_state(timeline) for entry, timeline in self._timelines.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a stored state; the network, the rules and ``interface_every`` stay this coordinator's own.

        Args:
            state: What ``state_dict`` returned; its tensors are copied.

        Raises:
            CheckpointMismatchError: If the workers, the entries or their tensors differ.
        """
        own = {"block_of_worker": list(self.block_of_worker), "entries": list(self._timelines)}
        stored = {"block_of_worker": state["block_of_worker"], "entries": list(state["timelines"])}
        for name in own:
            if own[name] != stored[name]:
                got = f"stored {name}={stored[name]}, here {name}={own[name]}"
                raise CheckpointMismatchError(explain(f"{name} must be as stored", got, "resume the same workers"))
        for entry, timeline in self._timelines.items():
            kept = state["timelines"][entry]
            timeline.ledger.load_state_dict(kept["ledger"])
            timeline.now_s = kept["now_s"]
            timeline.arrivals = [Arrival(*values) for values in kept["arrivals"]]
        self._generator.set_state(state["generator"])
        self._round_idx = state["round_idx"]
        self._worker_steps = state["worker_steps"]
        self._accepted_tokens = state["accepted_tokens"]
        self._counts = Counter({Verdict(name): count for name, count in state["counts"].items()})


def _timeline_state(timeline: _Timeline) -> dict[str, Any]:
    arrivals = [list(arrival) for arrival in sorted(timeline.arrivals)]
    return {"ledger": timeline.ledger.state_dict(), "now_s": timeline.now_s, "arrivals": arrivals}


def _count_blocks(masters: Mapping[str, Mapping[str, Tensor]]) -> int:
    num_blocks = len(masters.keys() - {INTERFACE})
    wanted = {block_entry(block_idx) for block_idx in range(num_blocks)}
    if num_blocks == 0 or masters.keys() - {INTERFACE} != wanted:
        rule = "masters must hold block0, block1, ... without a gap, and at most interface beside them"
        raise ValueError(explain(rule, f"entries={sorted(masters)}", "name the entries with block_entry"))
    return num_blocks


def _check_fit(num_blocks: int, block_of_worker: Sequence[int], network: NetworkModel, interface_every: int) -> None:
    if set(block_of_worker) != set(range(num_blocks)):
        rule = "block_of_worker must give every block at least one worker and name no other block"
        got = f"block_of_worker={list(block_of_worker)}, num_blocks={num_blocks}"
        raise ValueError(explain(rule, got, "use worker_idx % num_blocks"))
    if len(network.links) != len(block_of_worker):
        got = f"num_links={len(network.links)}, num_workers={len(block_of_worker)}"
        raise ValueError(explain("network must have one link per worker", got, "build it for these workers"))
    if interface_every < 1:
        got = f"interface_every={interface_every}"
        raise ValueError(explain("interface_every must be at least 1", got, "choose 1 to merge it in every round"))


def _index_updates(updates: Sequence[WorkerRound], num_workers: int, interface_due: bool) -> dict[int, WorkerRound]:
    by_worker = {update.worker_id: update for update in updates}
    ids = [update.worker_id for update in updates]
    if len(by_worker) != len(ids) or not by_worker.keys() <= set(range(num_workers)):
        got = f"worker ids={ids}, num_workers={num_workers}"
        raise ValueError(explain("updates must name each known worker at most once", got, "send one per worker"))
    for update in updates:
        if update.num_steps < 0:
            got = f"worker_id={update.worker_id}, num_steps={update.num_steps}"
            raise ValueError(explain("num_steps must be at least 0", got, "count the inner optimizer steps"))
        if interface_due and update.interface_params is None:
            got = f"worker_id={update.worker_id}, interface_params=None"
            rule = "interface_params must be given in rounds that close the interface"
            raise ValueError(explain(rule, got, "ask interface_due before the round ends"))
    return by_worker
