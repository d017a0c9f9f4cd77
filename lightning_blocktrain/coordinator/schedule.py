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
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_blocktrain.coordinator.membership import Membership
from lightning_blocktrain.rounds import INTERFACE, Ledger, RoundReport, block_entry
from lightning_blocktrain.transport.terms import RunTerms


class RoundSchedule:
    """Opens and closes the rounds of a run.

    Args:
        terms: Of the run.
        ledgers: By entry: one per block, and the interface's if there is one.
        membership: Of the run.
    """

    def __init__(self, terms: RunTerms, ledgers: Mapping[str, Ledger], membership: Membership) -> None:
        self._terms = terms
        self._ledgers = ledgers
        self._blocks = [ledgers[block_entry(block_idx)] for block_idx in range(terms.num_blocks)]
        self._interface = ledgers.get(INTERFACE)
        self._membership = membership
        self._expected: dict[int, tuple[int, ...]] = {}
        self._answered: set[int] = set()

    @property
    def finished(self) -> bool:
        """Whether every entry has closed its last round."""
        last = self._terms.max_rounds
        if last is None or any(ledger.version < last for ledger in self._blocks):
            return False
        return self._interface is None or self._interface.version >= self._terms.interface_round(last)

    @property
    def missing_blocks(self) -> tuple[int, ...]:
        """Blocks without a live worker."""
        return tuple(b for b in range(self._terms.num_blocks) if not self._membership.live_of(b))

    def next_deadline(self) -> float | None:
        """Return when the next open round closes at the latest, or None when none is open."""
        deadlines = [ledger.deadline for ledger in self._ledgers.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def answered_interface(self, worker_id: int) -> None:
        """Note that a worker's update for the interface's present version has been judged."""
        self._answered.add(worker_id)

    def advance(self, now: float) -> list[RoundReport]:
        """Close what is due and open what can be, until nothing is left to do; return the reports in order."""
        reports: list[RoundReport] = []
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
        return reports

    def _is_idle(self, ledger: Ledger) -> bool:
        # Nobody is left who could answer, and nothing has come that could be merged.
        if ledger.accepted:
            return False
        if ledger is self._interface:
            return not self._membership.roster.live
        return not self._membership.live_of(self._blocks.index(ledger))

    def _pass_over_missing(self, now: float) -> list[RoundReport]:
        missing = self.missing_blocks
        front = [self._blocks[b].version for b in range(self._terms.num_blocks) if b not in missing]
        behind = [b for b in missing if front and self._blocks[b].version < min(front)]
        return [self._pass_over(block_idx, now) for block_idx in behind]

    def _pass_over(self, block_idx: int, now: float) -> RoundReport:
        ledger = self._blocks[block_idx]
        if not ledger.is_open:
            ledger.open((), now)
        self._expected[block_idx] = ()
        report = ledger.close_if_due(math.inf)
        assert report is not None
        return replace(report, closed_at=now)

    def _open(self, now: float) -> bool:
        blocks = [b for b in range(self._terms.num_blocks) if self._can_open(b)]
        for block_idx in blocks:
            live = self._membership.live_of(block_idx)
            self._expected[block_idx] = live
            _open_for(self._blocks[block_idx], live, now)
        expected = self._interface_members()
        if expected is not None and self._interface is not None:
            _open_for(self._interface, expected, now)
        return bool(blocks) or expected is not None

    def _can_open(self, block_idx: int) -> bool:
        ledger = self._blocks[block_idx]
        if ledger.is_open or not self._membership.live_of(block_idx):
            return False
        if self._terms.max_rounds is not None and ledger.version >= self._terms.max_rounds:
            return False
        return self._interface is None or self._interface.version >= self._terms.interface_round(ledger.version)

    def _interface_members(self) -> Sequence[int] | None:
        # Whom a round of the interface would wait for, or None if none is to open.
        ledger, last = self._interface, self._terms.max_rounds
        if ledger is None or ledger.is_open:
            return None
        if last is not None and ledger.version >= self._terms.interface_round(last):
            return None
        live = self._membership.roster.live
        if live and self._answered.issuperset(live):
            return live
        due = self._terms.interface_due_version(ledger.version)
        arrived = [b for b, block in enumerate(self._blocks) if block.version + block.is_open > due]
        missing = self.missing_blocks
        if not arrived or any(b not in arrived and b not in missing for b in range(self._terms.num_blocks)):
            return None
        return [w for b in arrived for w in self._expected.get(b, self._membership.live_of(b))]


def _open_for(ledger: Ledger, expected: Sequence[int], now: float) -> None:
    # A ledger refuses a first round of too few: with nobody expected it stays open for whoever joins in time.
    enough = ledger.version > 0 or len(expected) >= ledger.rules.needed_replicas
    ledger.open(expected if enough else (), now)
