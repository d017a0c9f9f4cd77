"""A coordinator for workers that are simulated in one process: the ledgers under a virtual clock.

Owns the order in which updates arrive. Owns no merge or acceptance rule: those are the ledgers', the same lines that
a networked coordinator runs. Every number it gives in seconds is simulated.

Simplification: the simulator is synchronous in training rounds. Every worker takes part in every round, starts it
from the current masters, and begins it when its block's round opens, even if its last update is still under way.
What is simulated is whether an update arrives in time. An update that misses its deadline is delivered at its
virtual time in a later round, or by ``flush``. Its tensors are kept only where ``late="stale_weighted"`` may count
them then.

Every entry has its own events and its own clock, so no block waits for another. A round of the interface opens
with the last of the block rounds beside it, because it needs workers of every block.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_blocktrain.coordinator.network import NetworkModel, update_bytes_of
from lightning_blocktrain.coordinator.timeline import RUN_ID, TOKEN, Delivered, Timeline, WorkerRound
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
    Verdict,
    block_entry,
)
from lightning_blocktrain.rounds.pace import affordable_steps

Receipts = dict[tuple[int, str], list[Receipt]]


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
        upload_frac: Bytes of an encoded update by bytes of the parameters; what is fetched is not encoded.

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
        upload_frac: float = 1.0,
    ) -> None:
        num_blocks = _count_blocks(masters)
        _check_fit(num_blocks, block_of_worker, network, interface_every)
        self.network = network
        self.block_of_worker = tuple(block_of_worker)
        self.interface_every = interface_every
        self._roster = Roster(RUN_ID, TOKEN)
        for worker_id in range(len(block_of_worker)):
            self._roster.join(worker_id, 0)
        entries = [block_entry(block_idx) for block_idx in range(num_blocks)]
        if INTERFACE in masters:
            entries.append(INTERFACE)
        self._timelines = {
            entry: Timeline(Ledger(entry, masters[entry], rules, make_outer(), self._roster), self._members(entry))
            for entry in entries
        }
        for timeline in self._timelines.values():
            rules.check_replicas(len(timeline.workers))
        num_bytes = [update_bytes_of(masters, block_idx) for block_idx in block_of_worker]
        self._num_bytes = [down + round(upload_frac * down) for down in num_bytes]
        self._generator = torch.Generator().manual_seed(seed)
        self._paces: list[float] = []
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
    def averages(self) -> dict[str, Params]:
        """What is read of the entries; see ``Ledger.average``."""
        return {entry: timeline.ledger.average for entry, timeline in self._timelines.items()}

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
        facts = zip(self.network.links, steps, self._num_bytes, self._draw_paces(), strict=True)
        durations = [link.round_s(num_steps, num_bytes, pace) for link, num_steps, num_bytes, pace in facts]
        self._paces = []
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
        for entry, timeline in self._timelines.items():
            self._count(entry, timeline.flush(), receipts)
        return self._outcome([], receipts)

    def _outcome(self, reports: list[RoundReport], receipts: Receipts) -> RoundOutcome:
        by_worker = {key: tuple(given) for key, given in receipts.items()}
        return RoundOutcome(tuple(reports), by_worker, max(self.virtual_s.values()))

    def _draw_paces(self) -> list[float]:
        # One number per worker and round, whether somebody asks for it at the beginning of the round or not.
        self._paces = self._paces or [link.pace(self._generator) for link in self.network.links]
        return self._paces

    def steps_in_time(self, worker_id: int, sync_every: int) -> int:
        """Return after how many steps of its round a worker sends what it has, so as not to be late.

        It knows its own pace as it goes, and expects its transfers to take what they take at a pace of 1.
        """
        link, pace = self.network.links[worker_id], self._draw_paces()[worker_id]
        limit_s = self._timelines[block_entry(self.block_of_worker[worker_id])].ledger.limit_s
        transfer_s = link.round_s(0, self._num_bytes[worker_id], 1.0)
        return affordable_steps(link.step_s * pace, transfer_s, limit_s, sync_every)

    def _run_round(
        self, entry: str, updates: Mapping[int, WorkerRound], durations: Sequence[float], receipts: Receipts
    ) -> RoundReport:
        report, delivered = self._timelines[entry].run_round(updates, durations)
        self._count(entry, delivered, receipts)
        if entry != INTERFACE:
            self._accepted_tokens += report.accepted_tokens
        return report

    def _count(self, entry: str, delivered: Delivered, receipts: Receipts) -> None:
        for worker_id, receipt in delivered:
            self._counts[receipt.verdict] += 1
            receipts.setdefault((worker_id, entry), []).append(receipt)

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, between two rounds: plain values and the ledgers' own tensors."""
        return {
            "block_of_worker": list(self.block_of_worker),
            "round_idx": self._round_idx,
            "worker_steps": self._worker_steps,
            "accepted_tokens": self._accepted_tokens,
            "counts": {verdict.value: count for verdict, count in self._counts.items()},
            "generator": self._generator.get_state(),
            "paces": list(self._paces),
            "timelines": {entry: timeline.state_dict() for entry, timeline in self._timelines.items()},
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
            timeline.load_state_dict(state["timelines"][entry])
        self._generator.set_state(state["generator"])
        self._paces = list(state["paces"])
        self._round_idx = state["round_idx"]
        self._worker_steps = state["worker_steps"]
        self._accepted_tokens = state["accepted_tokens"]
        self._counts = Counter({Verdict(name): count for name, count in state["counts"].items()})


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
