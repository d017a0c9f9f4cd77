"""The coordinator of one run without I/O: ledgers, members, the open rounds and the phase of the run.

Owns the order in which these are asked. Owns no verdict, socket, file or clock: the time is an argument of every call,
and what must outlive the process goes to a ``Keeper``. Not synchronised: one thread calls it, at the latest at
``next_event``.

==========  ========================================  ==========================================================
phase       begins                                    answers
==========  ========================================  ==========================================================
waiting     with the service                          everything; no round is open, updates may come
running     when those required have joined           everything
finished    when ``max_rounds`` are closed            ``fetch`` of what there is, verdicts (late, stale); no join
stopped     by ``stop``                               as finished, but no verdicts: ``RunEndedError``
failed      ``join_timeout_s`` over; a block without  ``status`` and ``leave``; else ``RunFailedError``
            a worker and ``on_missing_block="fail"``
==========  ========================================  ==========================================================
"""

import logging
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any, Protocol

from torch import Tensor

from lightning_blocktrain.coordinator.masters import EncodedMasters, Master
from lightning_blocktrain.coordinator.membership import Membership
from lightning_blocktrain.coordinator.schedule import RoundSchedule
from lightning_blocktrain.errors import (
    RequestRefusedError,
    RunEndedError,
    RunFailedError,
    explain,
)
from lightning_blocktrain.rounds import (
    INTERFACE,
    Ledger,
    Receipt,
    Roster,
    RoundReport,
    Update,
    Verdict,
    block_entry,
)
from lightning_blocktrain.rounds.codecs import Codec, decoded
from lightning_blocktrain.rounds.verdicts import is_count, shown
from lightning_blocktrain.transport.base import Sender, Submission, Welcome, WorkerFacts
from lightning_blocktrain.transport.terms import RunTerms
from lightning_blocktrain.transport.wire import check_masters

log = logging.getLogger(__name__)

KEPT_REPORTS = 200


class Phase(StrEnum):
    """Where a run stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


class Keeper(Protocol):
    """What outlives the process."""

    def store(self, entry: str, state: dict[str, Any]) -> None:
        """Take an entry's state after a close; it need not be valid before the next ``store_run``."""
        ...

    def store_run(self, state: dict[str, Any]) -> None:
        """Keep what is not an entry's (members, phase), and with it all that was taken before."""
        ...


class CoordinatorService:
    """The coordinator of one run.

    Args:
        run_id: Names the run.
        token: Its secret.
        terms: Of the run.
        masters: Initial tensors by entry: what it serves, ``interface`` only if there is one; copied.
        keeper: Keeps the state; None keeps nothing.
        serves: The entries that this coordinator serves; None: all.

    Raises:
        ValueError: If the masters do not fit the terms, or a name cannot travel.
    """

    def __init__(
        self,
        run_id: str,
        token: str,
        terms: RunTerms,
        masters: Mapping[str, Mapping[str, Tensor]],
        keeper: Keeper | None = None,
        serves: Collection[str] | None = None,
    ) -> None:
        check_masters(terms, masters, serves)
        self.run_id = run_id
        self.terms = terms
        self.roster = Roster(run_id, token)
        self.membership = Membership(self.roster, terms, serves)
        store = None if keeper is None else lambda entry, state: self._unstored.append((entry, state))
        self.ledgers = {
            entry: Ledger(entry, masters[entry], terms.rules, terms.outer, self.roster, store)
            for entry in terms.entries(True)
            if entry in masters
        }
        self._masters = EncodedMasters(terms.prefix_codec.spared)
        self.schedule = RoundSchedule(terms, self.ledgers, self.membership)
        self.reports: deque[RoundReport] = deque(maxlen=KEPT_REPORTS)
        self.counts: Counter[tuple[str, Verdict]] = Counter()
        self.accepted_tokens: Counter[str] = Counter()
        self._keeper = keeper
        self._unstored: deque[tuple[str, dict[str, Any]]] = deque()
        self._token = token
        self._phase = Phase.WAITING
        self._reason = ""
        self._waits_until: float | None = None
        self._warned_at: dict[int, int] = {}
        self._unsaved = False

    @property
    def phase(self) -> Phase:
        """Where the run stands."""
        return self._phase

    @property
    def reason(self) -> str:
        """Why the run ended; empty while it goes on."""
        return self._reason

    @property
    def ended(self) -> bool:
        """Whether there will be no new version."""
        return self._phase in (Phase.FINISHED, Phase.STOPPED, Phase.FAILED)

    @property
    def versions(self) -> dict[str, int]:
        """Version by entry."""
        return {entry: ledger.version for entry, ledger in self.ledgers.items()}

    def join(self, facts: WorkerFacts, incarnation: int | None, now: float, beats: bool = False) -> Welcome:
        """See ``Transport.join``.

        Args:
            facts: Who asks.
            incarnation: As the worker counts; None: one more than the newest.
            now: Seconds on the caller's clock.
            beats: Whether the worker will call ``beat`` (or anything else) every ``beat_every_s``.
        """
        self.advance(now)
        self._refuse_ended()
        member = self.membership.admit(facts, incarnation, beats, now)
        self._unsaved = True
        log.info("worker %d joins for block %d from %r", member.worker_id, member.block_idx, member.host)
        self.advance(now)
        return Welcome(
            run_id=self.run_id,
            worker_id=member.worker_id,
            incarnation=self.roster.incarnation_of(member.worker_id) or 0,
            block_idx=member.block_idx,
            num_workers=self.membership.num_workers,
            versions=self.versions,
            terms=self.terms,
        )

    def fetch(
        self,
        entry: str,
        newer_than: int,
        now: float,
        sender: Sender | None = None,
        codec: Codec | None = None,
        average: bool = False,
    ) -> Master | None:
        """Return the newest version if it is newer, else None; see ``Transport.fetch``.

        Raises:
            RunEndedError: If there will be no newer one.
            RequestRefusedError: If there is no such entry, or the codec can carry no values.
        """
        if sender is not None:
            self.membership.heard(sender, now)
        self.advance(now)
        ledger = self.ledger_of(entry)
        if self._phase is Phase.FAILED:
            self._refuse_ended()
        if ledger.version > newer_than:
            wanted = ledger.average if average else ledger.master
            return self._masters.of(entry, ledger.version, wanted, codec, average)
        self._refuse_ended()
        return None

    def closes_in_s(self, sender: Sender | None, now: float) -> float | None:
        """Return the seconds to the deadline of the round that a worker is in, or how long its next one may last.

        None for whoever is no member, and for a block that another coordinator serves.
        """
        block_idx = None if sender is None else self.membership.block_of(sender.worker_id)
        ledger = None if block_idx is None else self.ledgers.get(block_entry(block_idx))
        if ledger is None:
            return None
        return ledger.limit_s if ledger.deadline is None else max(0.0, ledger.deadline - now)

    def submit(self, entry: str, sender: Sender, submission: Submission, now: float) -> Receipt:
        """Judge an update, close the round if it was the last one, and return the receipt.

        Raises:
            RunEndedError: If the run was stopped or given up.
            RequestRefusedError: If there is no such entry.
        """
        self.membership.heard(sender, now)
        self.advance(now)
        ledger = self.ledger_of(entry)
        if self._phase is not Phase.FINISHED:
            self._refuse_ended()
        receipt = self._judge(ledger, sender, submission, now)
        self.counts[entry, receipt.verdict] += 1
        if receipt.verdict is not Verdict.ACCEPTED:
            log.info("%s of worker %s: %s", entry, shown(sender.worker_id), receipt)
        self.advance(now)
        return receipt

    def _judge(self, ledger: Ledger, sender: Sender, submission: Submission, now: float) -> Receipt:
        block_idx = self.membership.block_of(sender.worker_id)
        if ledger.entry != INTERFACE and block_idx is not None and ledger.entry != block_entry(block_idx):
            reason = f"Worker {sender.worker_id} trains block {block_idx}, not {ledger.entry}."
            return Receipt(Verdict.MALFORMED, ledger.version, reason)
        params, fault = self._params_of(ledger, submission)
        update = Update(
            run_id=self.run_id,
            token=self._token,
            worker_id=sender.worker_id,
            incarnation=sender.incarnation,
            base_version=submission.base_version,
            num_steps=submission.num_steps,
            num_tokens=submission.num_tokens,
            params=params,
            owned=submission.owned,
        )
        receipt = ledger.submit(update, now)
        content = (Verdict.ACCEPTED, Verdict.MALFORMED, Verdict.NONFINITE, Verdict.OUTLIER)
        if ledger.entry == INTERFACE and receipt.verdict in content and submission.base_version == ledger.version:
            self.schedule.answered_interface(sender.worker_id)
        return replace(receipt, reason=fault) if fault and receipt.verdict is Verdict.MALFORMED else receipt

    def _params_of(self, ledger: Ledger, submission: Submission) -> tuple[Mapping[str, Tensor], str]:
        base_version = submission.base_version
        base = ledger.master_of(base_version) if is_count(base_version) else None
        if not submission.meta or base is None:
            return submission.tensors, ""  # of an unknown base they are refused whatever they hold
        try:
            return decoded(self.terms.codec, submission.tensors, submission.meta, base), ""
        except ValueError as exc:
            return {}, f"The codec says: {exc}"

    def restore_update(self, entry: str, worker_id: int, submission: Submission, now: float) -> Receipt:
        """Hear again an update that an earlier process had accepted, whatever its worker has done since.

        Call it after ``load_state`` and before anything else. The version must be the update's; the rest is judged.
        """
        incarnation, live = self.roster.incarnation_of(worker_id) or 0, self.roster.is_live(worker_id)
        self.roster.join(worker_id, incarnation)
        receipt = self._judge(self.ledger_of(entry), Sender(worker_id, incarnation), submission, now)
        if not live:
            self.roster.leave(worker_id, incarnation)
        return receipt

    def beat(self, sender: Sender, now: float) -> None:
        """Note a sign of life, also when the run is over: who computes then may still come for what is left of it.

        Raises:
            NotJoinedError: If the worker never joined, or has left.
            SupersededError: If a newer incarnation has joined.
            RunFailedError: If the run was given up.
        """
        self.membership.check(sender)
        self.membership.heard(sender, now)
        self.advance(now)
        if self._phase is Phase.FAILED:
            self._refuse_ended()

    def leave(self, sender: Sender, now: float) -> bool:
        """See ``Transport.leave``; returns whether the worker was live."""
        left = self.membership.leave(sender)
        if left:
            self._unsaved = True
            log.info("worker %d leaves", sender.worker_id)
        self.advance(now)
        return left

    def dismiss(self, worker_id: object, now: float) -> bool:
        """See ``Transport.dismiss``; any ``worker_id`` may be asked."""
        dismissed = self.membership.dismiss(worker_id)
        if dismissed:
            self._unsaved = True
            log.warning("worker %s has died: no round waits for it", worker_id)
        self.advance(now)
        return dismissed

    def stop(self, reason: str, failed: bool = False) -> None:
        """End the run; a run that has ended keeps its phase and reason."""
        if not self.ended:
            self._end(Phase.FAILED if failed else Phase.STOPPED, reason)
        self._save()

    def advance(self, now: float) -> None:
        """Do what the time demands: drop the silent, start, close and open rounds, end the run.

        Where what this changed could not be kept, the run stands still until it can: the next call tries that first.
        """
        self._save()
        for worker_id in self.membership.drop_silent(now):
            log.warning("worker %d is silent: no round waits for it until it is heard of again", worker_id)
        if self._phase is Phase.WAITING:
            self._start_if_complete(now)
        if self._phase is Phase.RUNNING:
            for report in self.schedule.advance(now):
                self._note(report)
            if self.schedule.finished:
                self._end(Phase.FINISHED, f"all {self.terms.max_rounds} rounds are closed")
            else:
                self._watch_missing_blocks()
        self._save()

    def next_event(self) -> float | None:
        """Return when ``advance`` has something to do at the latest, or None if the time alone does not tell."""
        if self.ended or self._unsaved:  # what could not be kept may be at any time
            return None
        start = self._waits_until if self._phase is Phase.WAITING else None
        times = (start, self.schedule.next_due(), self.membership.next_silence())
        return min((time for time in times if time is not None), default=None)

    def _start_if_complete(self, now: float) -> None:
        if self._waits_until is None:
            self._waits_until = now + self.terms.join_timeout_s
        missing = self.membership.missing_for_start()
        if not missing:
            self._phase = Phase.RUNNING
            self._unsaved = True
            log.info("run %s starts with %d workers", self.run_id, len(self.roster.live))
        elif now >= self._waits_until:
            rule = "the workers must join within join_timeout_s"
            got = f"join_timeout_s={self.terms.join_timeout_s:g}, missing {missing}"
            self._end(Phase.FAILED, explain(rule, got, "start them, or ask for fewer"))

    def _note(self, report: RoundReport) -> None:
        self._unsaved = True
        self.reports.append(report)
        self.accepted_tokens[report.entry] += report.accepted_tokens
        if report.entry != INTERFACE:
            self.membership.count(report.expected, report.accepted)
        where = f"{report.entry} round {report.round_idx}"
        if report.missing:
            log.warning("%s closed without workers %s", where, list(report.missing))
        took_s = report.closed_at - report.opened_at
        log.info("%s: accepted %s in %.3g s %s", where, list(report.accepted), took_s, report.note)

    def _watch_missing_blocks(self) -> None:
        front = max((version for entry, version in self.versions.items() if entry != INTERFACE), default=0)
        missing = self.schedule.missing_blocks
        self._warned_at = {b: version for b, version in self._warned_at.items() if b in missing}
        for block_idx in missing:
            if front > self._warned_at.get(block_idx, -1):
                self._warned_at[block_idx] = front
                log.warning("block %d has no live worker in round %d: its parameters stay", block_idx, front)
        if missing and self.terms.on_missing_block == "fail":
            rule = "with on_missing_block='fail' every block must have a live worker"
            self._end(Phase.FAILED, explain(rule, f"blocks without one={list(missing)}", "use more replicas"))

    def _end(self, phase: Phase, reason: str) -> None:
        self._phase, self._reason = phase, reason
        self._unsaved = True
        log.log(logging.ERROR if phase is Phase.FAILED else logging.INFO, "run %s %s: %s", self.run_id, phase, reason)

    def _refuse_ended(self) -> None:
        if self._phase is Phase.FAILED:
            raise RunFailedError(f"The run was given up: {self._reason}.")
        if self.ended:
            raise RunEndedError(f"The run is over: {self._reason}.")

    def ledger_of(self, entry: str) -> Ledger:
        """Return the ledger of an entry, to look at.

        Raises:
            RequestRefusedError: If there is no such entry.
        """
        if entry not in self.ledgers:
            rule, got = "entry must be one of the run's that are served here", f"entry={shown(entry)}"
            raise RequestRefusedError(explain(rule, got, f"ask for one of {list(self.ledgers)}"))
        return self.ledgers[entry]

    def _save(self) -> None:
        if self._keeper is not None and self._unsaved:
            while self._unstored:
                self._keeper.store(*self._unstored[0])
                self._unstored.popleft()  # after: what could not be stored is tried again
            self._keeper.store_run(self.run_state())
        self._unsaved = False

    def run_state(self) -> dict[str, Any]:
        """Return what is not an entry's, as plain values."""
        return {
            "membership": self.membership.state_dict(),
            "phase": str(self._phase),
            "reason": self._reason,
            "accepted_tokens": dict(self.accepted_tokens),
        }

    def load_state(self, run: dict[str, Any], entries: Mapping[str, dict[str, Any]], now: float) -> None:
        """Continue a stored run; its members count as heard just now, and its open rounds begin again.

        A run that was stopped or given up waits again until those required have joined.

        Args:
            run: What ``run_state`` returned.
            entries: The ledgers' states by entry.
            now: Seconds on the caller's clock.

        Raises:
            CheckpointMismatchError: If they are another run's or another model's.
        """
        for entry, ledger in self.ledgers.items():
            ledger.load_state_dict(entries[entry])
        self.membership.load_state_dict(run["membership"], now)
        self.accepted_tokens = Counter(run["accepted_tokens"])
        stored = Phase(run["phase"])
        self._phase = stored if stored in (Phase.RUNNING, Phase.FINISHED) else Phase.WAITING
        self._reason = run["reason"] if self.ended else ""
