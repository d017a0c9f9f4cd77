"""The events of one entry in a simulated run: which updates are under way, and what becomes of them as time passes.

Owns an entry's virtual clock and the order of arrivals. Owns no rule: verdicts and merges are the ledger's.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from lightning_blocktrain.rounds import INTERFACE, Ledger, Params, Receipt, RoundReport, Update
from lightning_blocktrain.rounds.merge import as_params

RUN_ID = TOKEN = "simulation"

Delivered = list[tuple[int, Receipt]]
"""Worker and receipt of each update that was delivered, in virtual order."""


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

    def params_of(self, entry: str) -> Mapping[str, Tensor]:
        """Return what it sends for its block or for the interface."""
        return (self.interface_params or {}) if entry == INTERFACE else self.block_params


class Arrival(NamedTuple):
    """An update under way; the fields before the last sort by time and never tie.

    Its tensors are kept only if they could still count after the round they are for, and until then they are the
    worker's.
    """

    arrives_at: float
    worker_id: int
    base_version: int
    num_steps: int
    num_tokens: int
    params: Params | None = None


@dataclass(eq=False)
class Timeline:
    """The events of one entry.

    Args:
        ledger: Of the entry.
        workers: Whom its rounds expect.
    """

    ledger: Ledger
    workers: tuple[int, ...]
    now_s: float = 0.0
    arrivals: list[Arrival] = field(default_factory=list)

    def run_round(
        self, updates: Mapping[int, WorkerRound], durations: Sequence[float]
    ) -> tuple[RoundReport, Delivered]:
        """Open a round, deliver what arrives until it closes, and close it.

        Args:
            updates: By worker; one without an update is waited for until the deadline.
            durations: Seconds from the opening to the arrival, by worker; infinity never arrives.
        """
        ledger = self.ledger
        ledger.open(self.workers, self.now_s)
        for worker_id in self.workers:
            arrives_at = self.now_s + durations[worker_id]
            if worker_id in updates and arrives_at < math.inf:
                sent = updates[worker_id]
                arrival = Arrival(arrives_at, worker_id, ledger.version, sent.num_steps, sent.num_tokens)
                heapq.heappush(self.arrivals, arrival)
        report, delivered = self._close(updates)
        self.now_s = report.closed_at
        if ledger.rules.late == "stale_weighted":
            self.arrivals = [self._with_params(arrival, updates) for arrival in self.arrivals]
        return report, delivered

    def _close(self, updates: Mapping[int, WorkerRound]) -> tuple[RoundReport, Delivered]:
        deadline, delivered, report = self.ledger.deadline, Delivered(), None
        assert deadline is not None
        while report is None:
            now = deadline
            if self.arrivals and self.arrivals[0].arrives_at <= deadline:
                arrival = heapq.heappop(self.arrivals)
                now = arrival.arrives_at
                delivered.append(self._deliver(arrival, updates))
            report = self.ledger.close_if_due(now)
        return report, delivered

    def flush(self) -> Delivered:
        """Deliver all that is still under way; the clock moves to the last arrival."""
        delivered = Delivered()
        while self.arrivals:
            arrival = heapq.heappop(self.arrivals)
            self.now_s = arrival.arrives_at
            delivered.append(self._deliver(arrival, {}))
        return delivered

    def _deliver(self, arrival: Arrival, updates: Mapping[int, WorkerRound]) -> tuple[int, Receipt]:
        params: Mapping[str, Tensor] = arrival.params or {}
        if arrival.base_version == self.ledger.version and arrival.worker_id in updates:
            params = updates[arrival.worker_id].params_of(self.ledger.entry)
        update = Update(
            run_id=RUN_ID,
            token=TOKEN,
            worker_id=arrival.worker_id,
            incarnation=0,
            base_version=arrival.base_version,
            num_steps=arrival.num_steps,
            num_tokens=arrival.num_tokens,
            params=params,
        )
        return arrival.worker_id, self.ledger.submit(update, arrival.arrives_at)

    def _with_params(self, arrival: Arrival, updates: Mapping[int, WorkerRound]) -> Arrival:
        if arrival.params is not None or arrival.base_version != self.ledger.version - 1:
            return arrival
        return arrival._replace(params=as_params(updates[arrival.worker_id].params_of(self.ledger.entry)))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain values and tensors that nobody may write to."""
        return {
            "ledger": self.ledger.state_dict(),
            "now_s": self.now_s,
            "arrivals": [list(arrival) for arrival in sorted(self.arrivals)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored state.

        Raises:
            CheckpointMismatchError: If it is another entry's, or its tensors differ.
        """
        self.ledger.load_state_dict(state["ledger"])
        self.now_s = state["now_s"]
        self.arrivals = [Arrival(*values) for values in state["arrivals"]]
