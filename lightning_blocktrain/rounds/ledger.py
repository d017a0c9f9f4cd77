"""The round state machine of one entry: open, judge submissions, close, merge.

Owns an entry's master tensors, its version and the round in progress. It is pure: the clock is an argument and
storage is a callable, so the simulator and a networked coordinator run the same lines. Not synchronised: one thread
calls it.

An update belongs to the *version* it is based on, not to an opening, so what arrives between a close and the next
``open`` with the current version as base counts in the round to come. Exactly one update per worker and version is
ever accepted.

Order of the checks; the first that fails decides the verdict:

1. run id and token (``unauthorised``), then the form of worker id, incarnation and base (``malformed``);
2. membership: never joined (``unauthorised``), an old incarnation or one that has left (``superseded``);
3. an accepted update of this worker on this base, by whichever incarnation (``duplicate``);
4. base version: ahead of the entry (``malformed``), just closed or deadline passed (``late``), older (``stale``);
   with ``late="stale_weighted"`` a closed base passes as long as its master is kept;
5. counts, names, shapes, dtypes (``malformed``);
6. values (``nonfinite``);
7. norm of the delta (``outlier``).

A worker has answered the round once an update of it on the present version got past check 4, whatever became of it.

Covered: retries, restarts from a stored state, workers that join or leave in mid-round, rounds without enough
replicas. Not covered: duplicates of updates accepted many rounds ago (they are ``stale``; see ``history.py``).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_blocktrain.errors import CheckpointMismatchError, LedgerError, explain
from lightning_blocktrain.rounds.average import move_average
from lightning_blocktrain.rounds.history import History
from lightning_blocktrain.rounds.merge import (
    OuterSGD,
    Params,
    RoundRules,
    all_finite,
    as_params,
    clip_params,
    delta_norm,
    merge_replicas,
    rebase,
    stale_weight,
)
from lightning_blocktrain.rounds.roster import Roster
from lightning_blocktrain.rounds.verdicts import Receipt, RoundReport, Update, Verdict, form_fault, header_fault

Store = Callable[[str, dict[str, Any]], None]
"""Called with the entry's name and its state after every close; it may keep the tensors but not change them."""
Judgement = tuple[Verdict, str]


@dataclass(frozen=True, eq=False)
class Replica:
    """An accepted update, out of the worker's reach; of a closed base its delta has been moved onto the master."""

    worker_id: int
    base_version: int
    num_steps: int
    num_tokens: int
    norm: float
    params: Params


class Ledger:
    """The rounds of one block, or of the interface.

    Args:
        entry: ``block0``, ``block1``, ... or ``interface``.
        master: Initial tensors by name; copied, floating ones to fp32, others in their own dtype.
        rules: Deadline, merge rule and limits.
        outer: Turns the merged replicas into the next master.
        roster: The run's members, shared with the other ledgers.
        store: Receives the state after every close, before the report is returned; None keeps nothing.

    Raises:
        ValueError: If the master holds a complex, sparse or non-finite tensor.
    """

    def __init__(
        self,
        entry: str,
        master: Mapping[str, Tensor],
        rules: RoundRules,
        outer: OuterSGD,
        roster: Roster,
        store: Store | None = None,
    ) -> None:
        _check_master(entry, master)
        self.entry = entry
        self.rules = rules
        self.outer = outer
        self.roster = roster
        self._store = store
        self._master = as_params(master)
        self._average: Params = as_params(master) if rules.average_decay else {}
        self._buffers: Params = {}
        self._version = 0
        self._history = History(rules)
        self._accepted: dict[tuple[int, int], Replica] = {}
        self._answered: set[int] = set()
        self._counts: Counter[Verdict] = Counter()
        self._expected: tuple[int, ...] = ()
        self._opened_at: float | None = None
        self._limit_s = rules.deadline_s

    @property
    def master(self) -> Params:
        """The entry's tensors by name; a close replaces them and never writes to them, so nobody else may."""
        return dict(self._master)

    @property
    def average(self) -> Params:
        """The running average of the masters, or the master where the rules want none; like it, nobody writes to it."""
        return dict(self._average or self._master)

    @property
    def version(self) -> int:
        """Number of rounds closed so far."""
        return self._version

    @property
    def is_open(self) -> bool:
        """Whether a round is in progress."""
        return self._opened_at is not None

    @property
    def deadline(self) -> float | None:
        """When the open round closes at the latest, seconds on the caller's clock; None between rounds."""
        return None if self._opened_at is None else self._opened_at + self._limit_s

    @property
    def pending(self) -> tuple[int, ...]:
        """Expected workers the open round still waits for: not answered, and not left."""
        return tuple(w for w in self._expected if w not in self._answered and self.roster.is_live(w))

    @property
    def limit_s(self) -> float:
        """Seconds that a round which opens now lasts at most."""
        return self._history.limit_s

    @property
    def accepted(self) -> tuple[int, ...]:
        """Workers of whom an update counts in the round of the current version, as far as it has come, ascending."""
        return tuple(sorted({worker_id for worker_id, _ in self._accepted}))

    def master_of(self, version: int) -> Params | None:
        """Return the tensors of the current version, or of an older one if stale work on it counts; else None."""
        return self.master if version == self._version else self._history.master_of(version)

    def open(self, expected: Iterable[int], now: float) -> None:
        """Begin the round of the current version.

        A worker that joins later is not waited for until the next ``open``, but its update is accepted in this
        round when its base is current: refusing sound work would help nobody. With nobody expected the round stays
        open until its deadline.

        Args:
            expected: Ids of the workers the round waits for; each has joined at some time.
            now: Seconds on the caller's clock, finite.

        Raises:
            LedgerError: If a round is open already.
            ValueError: If ``now`` is not finite, an expected worker never joined, or this is the first round and
                the rules could never merge that few replicas. A run that loses replicas later goes on instead: its
                rounds merge nothing and their reports say so.
        """
        workers = tuple(sorted(set(expected)))
        if self._opened_at is not None:
            got = f"entry={self.entry}, version={self._version}"
            raise LedgerError(explain("open needs the previous round closed", got, "call close_if_due first"))
        if not math.isfinite(now):
            raise ValueError(explain("now must be finite", f"now={now}", "pass seconds on a monotonic clock"))
        strangers = [worker_id for worker_id in workers if self.roster.incarnation_of(worker_id) is None]
        if strangers:
            got = f"unknown workers={strangers}"
            raise ValueError(explain("expected workers must have joined", got, "call roster.join first"))
        if workers and self._version == 0:
            self.rules.check_replicas(len(workers))
        self._expected = workers
        self._opened_at, self._limit_s = now, self._history.limit_s
        self._history.note_opening(self._version, now)

    def submit(self, update: Update, now: float) -> Receipt:
        """Judge one update; never raises for what it holds.

        Call ``close_if_due`` with the same ``now`` first, so that a receipt for a late update names the new
        version. An accepted update is copied, unless it is ``owned``: the caller may reuse its tensors at once.

        Args:
            update: The submission.
            now: When it arrived, seconds on the caller's clock.
        """
        judgement = self._judge_sender(update) or self._judge_base(update, now)
        if judgement is None or judgement[0] in (Verdict.LATE, Verdict.STALE):
            self._history.note_arrival(update.base_version, now)
        if judgement is None:
            if update.base_version == self._version:
                self._answered.add(update.worker_id)
            judgement = self._judge_content(update)
        verdict, reason = judgement
        self._counts[verdict] += 1
        return Receipt(verdict, self._version, reason)

    def _judge_sender(self, update: Update) -> Judgement | None:
        if not self.roster.authorises(update.run_id, update.token):
            return Verdict.UNAUTHORISED, "The run id or the token is not this run's."
        fault = header_fault(update)
        if fault is not None:
            return Verdict.MALFORMED, f"In the header, {fault}"
        worker_id, incarnation = update.worker_id, update.incarnation
        known = self.roster.incarnation_of(worker_id)
        if known is None or incarnation > known:
            return Verdict.UNAUTHORISED, f"Worker {worker_id} has not joined as incarnation {incarnation}."
        if incarnation < known:
            return Verdict.SUPERSEDED, f"Incarnation {incarnation} of worker {worker_id} was replaced by {known}."
        if not self.roster.is_live(worker_id):
            return Verdict.SUPERSEDED, f"Incarnation {incarnation} of worker {worker_id} has left; join again."
        return None

    def _judge_base(self, update: Update, now: float) -> Judgement | None:
        worker_id, base = update.worker_id, update.base_version
        if worker_id in self._accepted_on(base):
            return Verdict.DUPLICATE, f"An update of worker {worker_id} on version {base} was accepted before."
        if base > self._version:
            return Verdict.MALFORMED, f"The base version {base} is ahead of {self.entry}, which is at {self._version}."
        if base < self._version and self.master_of(base) is not None:
            return None
        if base == self._version - 1:
            return Verdict.LATE, f"The round of version {base} has closed; go on from version {self._version}."
        if base < self._version:
            return Verdict.STALE, f"The base version {base} is too old; go on from version {self._version}."
        if self.deadline is not None and now > self.deadline:
            return Verdict.LATE, f"The deadline of version {base} has passed; wait for version {base + 1}."
        return None

    def _accepted_on(self, base: int) -> Iterable[int]:
        return self._history.accepted_on(base) | {w for w, version in self._accepted if version == base}

    def _judge_content(self, update: Update) -> Judgement:
        fault = form_fault(update, self._master)
        if fault is not None:
            return Verdict.MALFORMED, f"In the update, {fault}"
        base = self.master_of(update.base_version)
        assert base is not None
        params = as_params(update.params, like=self._master, copy=not update.owned)
        norm = delta_norm(params, base)
        if not math.isfinite(norm):
            return Verdict.NONFINITE, "The update holds a NaN or an infinity; reload the master and its state."
        limit = self._history.outlier_limit
        if norm > limit:
            return Verdict.OUTLIER, f"The delta's norm {norm:.4g} is above {limit:.4g}, the limit at present."
        params = clip_params(params, base, norm, self.rules.clip_norm)
        staleness = self._version - update.base_version
        if staleness:
            params = rebase(params, base, self._master)
        key = update.worker_id, update.base_version
        self._accepted[key] = Replica(*key, update.num_steps, update.num_tokens, norm, params)
        weight = f", weighing {stale_weight(staleness):.3g}" if staleness else ""
        return Verdict.ACCEPTED, f"Counts in the round of version {self._version}{weight}."

    def close_if_due(self, now: float) -> RoundReport | None:
        """Close the open round when every expected worker has answered or left, or its deadline has come.

        The version grows by one even when nothing was merged, or a late update would pass as fresh. When fewer
        updates were accepted than the rule needs, nothing is merged: averaging what a trimmed mean cannot judge
        would drop its protection just when it is weakest.

        Args:
            now: Seconds on the caller's clock.

        Returns:
            The report, or None when no round is open or the open one is not due.
        """
        opened_at, deadline = self._opened_at, self.deadline
        if opened_at is None or deadline is None:
            return None
        all_answered = bool(self._expected) and not self.pending
        if now < deadline and not all_answered:
            return None
        replicas = [self._accepted[key] for key in sorted(self._accepted)]
        base = self._master
        merged_norm, note = self._merge(replicas)
        if self._average:
            self._average = move_average(self._average, self._master, self._version + 1, self.rules.average_decay)
        report = self._report(replicas, merged_norm, note, opened_at, now)
        norms = [replica.norm for replica in replicas]
        self._history.note_close(self._version, base, self._accepted, norms)
        self._advance()
        if self._store is not None:
            self._store(self.entry, self.state_dict())
        return report

    def _merge(self, replicas: list[Replica]) -> tuple[float, str]:
        needed, num_workers = self.rules.needed_replicas, len({replica.worker_id for replica in replicas})
        if num_workers < needed:
            return 0.0, f"nothing merged: {num_workers} accepted, {needed} needed"
        num_tokens = [replica.num_tokens for replica in replicas]
        staleness = [self._version - replica.base_version for replica in replicas]
        params = [replica.params for replica in replicas]
        merged = merge_replicas(params, num_tokens, self._master, self.rules, staleness)
        master, buffers = self.outer.step(self._master, merged, self._buffers)
        # Finite replicas can still overflow in their sum or in the momentum.
        if not (all_finite(master) and all_finite(buffers)):
            return 0.0, "nothing merged: the merged tensors overflow fp32"
        norm = delta_norm(merged, self._master)
        self._master, self._buffers = master, buffers
        return norm, ""

    def _report(
        self, replicas: list[Replica], merged_norm: float, note: str, opened_at: float, closed_at: float
    ) -> RoundReport:
        merged = not note
        norms = [replica.norm for replica in replicas]
        accepted = tuple(replica.worker_id for replica in replicas if replica.base_version == self._version)
        stale = {replica.worker_id for replica in replicas if replica.base_version < self._version}
        return RoundReport(
            entry=self.entry,
            round_idx=self._version,
            version=self._version + 1,
            expected=self._expected,
            accepted=accepted,
            refused=tuple(w for w in self._expected if w in self._answered and w not in accepted),
            missing=tuple(w for w in self._expected if w not in self._answered),
            counts=dict(self._counts),
            merged=merged,
            note=note,
            accepted_tokens=sum(replica.num_tokens for replica in replicas) if merged else 0,
            accepted_steps=sum(replica.num_steps for replica in replicas) if merged else 0,
            mean_delta_norm=math.fsum(norms) / len(norms) if norms else 0.0,
            merged_delta_norm=merged_norm,
            opened_at=opened_at,
            closed_at=closed_at,
            stale=tuple(sorted(stale)),
        )

    def _advance(self) -> None:
        self._version += 1
        self._accepted = {}
        self._answered = set()
        self._counts = Counter()
        self._expected = ()
        self._opened_at = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything a restart needs: plain values and the ledger's own tensors, not to be written to.

        An open round is stored as what was accepted on the current version, without its clock: after loading, the
        caller opens it again.
        """
        return {
            "entry": self.entry,
            "version": self._version,
            "master": dict(self._master),
            "buffers": dict(self._buffers),
            "average": dict(self._average),
            **self._history.state_dict(),
            "accepted": [dict(vars(replica)) for _, replica in sorted(self._accepted.items())],
            "answered": sorted(self._answered),
            "counts": {verdict.value: count for verdict, count in self._counts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a stored state; no round is open afterwards.

        Args:
            state: What ``state_dict`` returned; its tensors are copied.

        Raises:
            CheckpointMismatchError: If it is another entry's, or its tensors differ; the ledger is left as it was.
        """
        _check_state(state, self.entry, self._master)
        self._master = as_params(state["master"], like=self._master)
        self._buffers = as_params(state["buffers"])
        if self.rules.average_decay:
            self._average = as_params(state.get("average") or self._master, like=self._master)
        self._version = state["version"]
        self._history.load_state_dict(state, self._master)
        replicas = [_load_replica(kept, self._master) for kept in state["accepted"]]
        self._accepted = {(replica.worker_id, replica.base_version): replica for replica in replicas}
        self._answered = set(state["answered"])
        self._counts = Counter({Verdict(name): count for name, count in state["counts"].items()})
        self._expected = ()
        self._opened_at = None


def _load_replica(kept: dict[str, Any], master: Params) -> Replica:
    return Replica(**{**kept, "params": as_params(kept["params"], like=master)})


def _check_master(entry: str, master: Mapping[str, Tensor]) -> None:
    for name, tensor in master.items():
        if tensor.is_complex() or tensor.is_sparse or tensor.is_meta:
            rule = "master must hold dense floating, integer or boolean tensors"
            raise ValueError(explain(rule, f"entry={entry}, name={name}", "leave that tensor out"))
    if not all_finite(master):
        rule = "master must be finite"
        raise ValueError(explain(rule, f"a NaN or infinity in entry={entry}", "check the initial weights"))


def _check_state(state: dict[str, Any], entry: str, master: Params) -> None:
    if state["entry"] != entry:
        got = f"stored entry={state['entry']}, this entry={entry}"
        raise CheckpointMismatchError(explain("entry must be the stored one", got, "load the state of this entry"))
    stored = _shapes(state["master"])
    own = _shapes(master)
    differing = sorted(name for name in stored.keys() | own.keys() if stored.get(name) != own.get(name))
    if differing:
        listed = ", ".join(f"{name} stored={stored.get(name)} here={own.get(name)}" for name in differing[:3])
        rule = f"tensors of {entry} must have the stored names, shapes and dtypes"
        got = f"{len(differing)} differing: {listed}"
        raise CheckpointMismatchError(explain(rule, got, "resume with the same model"))


def _shapes(params: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in params.items()}
