"""The contract without bytes: transports onto a coordinator in the same process.

Owns the lock that serialises its callers and the wait for a newer version. For tests, for a run in one process, and as
the simplest thing that satisfies the contract.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import override

from lightning_blocktrain.errors import NotJoinedError, TransportError
from lightning_blocktrain.rounds import Receipt
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.transport.base import Fetched, Submission, Transport, Welcome, WorkerFacts
from lightning_blocktrain.transport.terms import RunTerms

if TYPE_CHECKING:
    from lightning_blocktrain.coordinator.desk import Desk


class MemoryHub:
    """What the transports of one process share: the coordinator's desk, its clock and its lock.

    Args:
        desk: Of the run; used under the lock only.
        clock: Seconds, monotonic.
    """

    def __init__(self, desk: "Desk", clock: Callable[[], float] = time.monotonic) -> None:
        self.desk = desk
        self.clock = clock
        self._changed = threading.Condition()
        self.news: object = None
        """What the last caller left: phase and versions."""

    @contextmanager
    def at_desk(self) -> Iterator["Desk"]:
        """Hold the lock; who waits for news is woken if there are any."""
        with self._changed:
            self.desk.advance(self.clock())
            try:
                yield self.desk
            finally:
                if self.news != self.desk.news:
                    self.news = self.desk.news
                    self._changed.notify_all()

    def wait_for_news(self, seen: object, timeout_s: float) -> None:
        """Wait until there is other news than ``seen``, the next deadline has come or the time is over."""
        with self._changed:
            due = self.desk.next_event()
            until_due_s = timeout_s if due is None else max(0.0, due - self.clock())
            self._changed.wait_for(lambda: self.news != seen, min(timeout_s, until_due_s))


class MemoryTransport(Transport):
    """A worker's line to a coordinator in its process. It gives no signs of life: only deadlines end the wait for it.

    Args:
        hub: Shared by the workers.
        run_id: The run it wants to take part in.
        token: Its secret.
    """

    def __init__(self, hub: MemoryHub, run_id: str, token: str) -> None:
        self._hub = hub
        self._run_id = run_id
        self._token = token
        self._welcome: Welcome | None = None
        self._closed = False

    @contextmanager
    def _admitted(self) -> Iterator["Desk"]:
        if self._closed:
            raise TransportError("The transport is closed.")
        with self._hub.at_desk() as desk:
            desk.check_token(self._token)
            desk.check_run(self._run_id)
            yield desk

    @override
    def found(self, terms: RunTerms, masters: Mapping[str, Mapping[str, Tensor]]) -> bool:
        with self._admitted() as desk:
            return bool(desk.found(terms, masters, self._hub.clock()))

    @override
    def join(self, facts: WorkerFacts, incarnation: int | None = None) -> Welcome:
        with self._admitted() as desk:
            self._welcome = desk.service.join(facts, incarnation, self._hub.clock())
        return self._welcome

    @override
    def fetch(
        self,
        entry: str,
        newer_than: int = -1,
        timeout_s: float = 20.0,
        codec: Codec | None = None,
        average: bool = False,
    ) -> Fetched | None:
        ends_at = time.monotonic() + timeout_s
        while True:
            with self._admitted() as desk:
                sender = None if self._welcome is None else self._welcome.sender
                found = desk.service.fetch(entry, newer_than, self._hub.clock(), sender, codec, average)
                seen, closes_in_s = desk.news, desk.service.closes_in_s(sender, self._hub.clock())
            if found is not None:
                own = {name: tensor.clone() for name, tensor in found.tensors.items()}
                return Fetched(found.version, own, closes_in_s, found.meta)
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                return None
            self._hub.wait_for_news(seen, left_s)

    @override
    def submit(self, entry: str, submission: Submission) -> Receipt:
        with self._admitted() as desk:
            if self._welcome is None:
                raise NotJoinedError("A worker must join before it submits.")
            return desk.submit(entry, self._welcome.sender, submission, self._hub.clock())

    @override
    def leave(self) -> None:
        with self._admitted() as desk:
            if self._welcome is not None:
                desk.service.leave(self._welcome.sender, self._hub.clock())

    @override
    def dismiss(self, worker_id: int) -> bool:
        with self._admitted() as desk:
            return desk.service.dismiss(worker_id, self._hub.clock())

    @override
    def stop(self, reason: str) -> None:
        with self._admitted() as desk:
            desk.stop(reason)

    @override
    def status(self) -> dict[str, Any]:
        with self._admitted() as desk:
            return desk.status(self._hub.clock())

    @override
    def close(self) -> None:
        self._closed = True
