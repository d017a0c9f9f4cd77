"""Which rounds are open: the blocks' each on their own, the interface's beside the last block round before it is due.

Owns the opening and closing of the ledgers of one run. Owns no verdict (the ledgers') and no membership. Pure: the
clock is an argument. Not synchronised.

Rules:

* A block's round opens as soon as the one before has closed, for the workers that are live then. Where the interface
  was due in it, the next one opens when the interface has closed too: its workers begin with both.
* The interface's round opens with the last of the block rounds beside it, and expects whom those expect. It also opens
  when every live worker has sent its part, however early.
* A block without a live worker keeps its tensors, and no round of it closes or opens on its own account; its version
  follows that of the slowest block that has one, so that who comes back stands where the run stands. A run without any
  worker stands still.

Where several coordinators share a run none sees all rounds, and the interface's merge every ``n = interface_every``
rounds is timed by what each does see. No wait is longer than ``n - 1`` deadlines, the longest that a block's rounds
before the due one take; so a worker that keeps the deadline with one coordinator keeps it with several:

* The interface's round opens when every block has come to the round beside it: a block elsewhere has as soon as a
  worker of it has sent its part. It opens at the latest ``n - 1`` deadlines after the last close, for all live workers.
* A block's round that begins with an interface merged elsewhere opens with its first update, since its workers may
  still wait for that merge; at the latest ``n - 1`` deadlines after the last close.
* A block without a live worker follows the blocks of its own coordinator only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_blocktrain.coordinator.membership import Membership
from lightning_blocktrain.rounds import INTERFACE, Ledger, RoundReport, block_entry
from lightning_blocktrain.transport.terms import RunTerms


class RoundSchedule:
    """Opens and closes the rounds of a run, or of the part of it that one coordinator serves.

    Args:
        terms: Of the run.
        ledgers: By entry: one per block that is served, and the interface's if there is one here.
        membership: Of the run.
    """

    def __init__(self, terms: RunTerms, ledgers: Mapping[str, Ledger], membership: Membership) -> None:
        self._terms = terms
        self._ledgers = ledgers
        self._blocks = {b: ledgers[block_entry(b)] for b in terms.blocks_in(ledgers)}
        self._interface = ledgers.get(INTERFACE)
        self._membership = membership
        self._expected: dict[int, tuple[int, ...]] = {}
        self._answered: set[int] = set()
        self._closed_at: dict[str, float] = {}

    @property
    def finished(self) -> bool:
        """Whether every entry has closed its last round."""
        last = self._terms.max_rounds
        if last is None or any(ledger.version < last for ledger in self._blocks.values()):
            return False
        return self._interface is None or self._interface.version >= self._terms.interface_round(last)

    @property
    def missing_blocks(self) -> tuple[int, ...]:
        """Blocks without a live worker, of those whose workers are known here."""
        return tuple(b for b in self._membership.blocks if not self._membership.live_of(b))

    def next_due(self) -> float | None:
        """Return when the next round closes or opens at the latest, or None if only a request can bring that."""
        times = [ledger.deadline for ledger in self._ledgers.values() if not self._is_idle(ledger)]
        times += [self._block_opening(block_idx) for block_idx in self._blocks]
        times.append(self._interface_opening())
        return min((time for time in times if time is not None), default=None)

    def answered_interface(self, worker_id: int) -> None:
        """Note that a worker's update for the interface's present version has been judged."""
        self._answered.add(worker_id)

    def advance(self, now: float) -> list[RoundReport]:
        """Close what is due and open what can be, until nothing is left to do; return the reports in order."""
        reports: list[RoundReport] = []
        for entry in self._ledgers:
            self._closed_at.setdefault(entry, now)
        while True:
            closed = self._close(now) + self._pass_over_missing(now)
            opened = self._open(now)
            reports += closed
            if not closed and not opened:
                return reports

    def _close(self, now: float) -> list[RoundReport]:
        closed = [ledger.close_if_due(now) for ledger in self._ledgers.values() if not self._is_idle(ledger)]
        reports = [report for report in closed if report is not None]
        if any(report.entry == INTERFACE for report in reports):
            self._answered.clear()
        self._closed_at |= {report.entry: now for report in reports}
        return reports

    def _is_idle(self, ledger: Ledger) -> bool:
        # Nobody is left who could answer, and nothing has come that could be merged.
        if ledger.accepted:
            return False
        if ledger is self._interface:
            return not self._membership.roster.live
        return not any(self._membership.live_of(b) for b, block in self._blocks.items() if block is ledger)

    def _pass_over_missing(self, now: float) -> list[RoundReport]:
        missing = self.missing_blocks
        front = [block.version for b, block in self._blocks.items() if b not in missing]
        behind = [b for b, block in self._blocks.items() if b in missing and front and block.version < min(front)]
        return [self._pass_over(block_idx, now) for block_idx in behind]

    def _pass_over(self, block_idx: int, now: float) -> RoundReport:
        ledger = self._blocks[block_idx]
        if not ledger.is_open:
            ledger.open((), now)
        self._expected[block_idx] = ()
        self._closed_at[ledger.entry] = now
        report = ledger.close_if_due(math.inf)
        assert report is not None
        return replace(report, closed_at=now)

    def _open(self, now: float) -> bool:
        blocks = [b for b in self._blocks if self._can_open(b, now)]
        for block_idx in blocks:
            live = self._membership.live_of(block_idx)
            self._expected[block_idx] = live
            _open_for(self._blocks[block_idx], live, now)
        expected = self._interface_members(now)
        if expected is not None and self._interface is not None:
            _open_for(self._interface, expected, now)
        return bool(blocks) or expected is not None

    def _can_open(self, block_idx: int, now: float) -> bool:
        opens_at = self._block_opening(block_idx)
        return opens_at is not None and (opens_at <= now or bool(self._blocks[block_idx].accepted))

    def _block_opening(self, block_idx: int) -> float | None:
        # When a block's next round opens at the latest, or None if something else has to happen first.
        ledger, terms = self._blocks[block_idx], self._terms
        if ledger.is_open or not self._membership.live_of(block_idx):
            return None
        if terms.max_rounds is not None and ledger.version >= terms.max_rounds:
            return None
        if self._interface is not None and self._interface.version < terms.interface_round(ledger.version):
            return None
        begins_with_merge = ledger.version > 0 and terms.interface_due(ledger.version - 1)
        waits = begins_with_merge and not self._membership.assigns
        return self._after_close(ledger, terms.interface_every - 1 if waits else 0)

    def _after_close(self, ledger: Ledger, num_rounds: int) -> float | None:
        closed_at = self._closed_at.get(ledger.entry)  # unknown before the run begins
        return None if closed_at is None else closed_at + num_rounds * self._terms.rules.deadline_s

    def _interface_opening(self) -> float | None:
        # When its next round opens at the latest, or None if something else has to happen first.
        ledger, sees_all = self._interface, len(self._blocks) == self._terms.num_blocks
        if ledger is None or sees_all or self._is_through(ledger) or not self._membership.roster.live:
            return None
        return self._after_close(ledger, self._terms.rounds_before_due(ledger.version))

    def _is_through(self, interface: Ledger) -> bool:
        # Whether no round of it is to open: one is open, or there is none left.
        last = self._terms.max_rounds
        return interface.is_open or (last is not None and interface.version >= self._terms.interface_round(last))

    def _interface_members(self, now: float) -> Sequence[int] | None:
        # Whom a round of the interface would wait for, or None if none is to open.
        if self._interface is None or self._is_through(self._interface):
            return None
        live = self._membership.roster.live
        if live and self._answered.issuperset(live):
            return live
        opens_at, arrived = self._interface_opening(), self._arrived(self._interface)
        if opens_at is not None and opens_at <= now:
            arrived = list(range(self._terms.num_blocks))
        missing = self.missing_blocks
        if not arrived or any(b not in arrived and b not in missing for b in range(self._terms.num_blocks)):
            return None
        return [w for b in arrived for w in self._expected.get(b, self._membership.live_of(b))]

    def _arrived(self, interface: Ledger) -> list[int]:
        # The blocks that have come to the round beside the interface's next one.
        due = self._terms.interface_due_version(interface.version)
        here = {b for b, block in self._blocks.items() if block.version + block.is_open > due}
        answered = {self._membership.block_of(worker_id) for worker_id in self._answered}
        elsewhere = [b for b in range(self._terms.num_blocks) if b not in self._blocks and b in answered]
        return sorted([*here, *elsewhere])


def _open_for(ledger: Ledger, expected: Sequence[int], now: float) -> None:
    # A ledger refuses a first round of too few: with nobody expected it stays open for whoever joins in time.
    enough = ledger.version > 0 or len(expected) >= ledger.rules.needed_replicas
    ledger.open(expected if enough else (), now)
