"""The contract between a worker and its coordinator: what a worker may ask, whatever carries the question.

Owns the types and the order of the calls. Owns no bytes (``wire.py``) and no rule of the rounds (``rounds/``).

Order of calls: ``found`` where the coordinator has no masters yet, ``join``, then ``fetch`` and ``submit`` in any
order, then ``leave``. ``status`` and ``close`` are always allowed; ``fetch``, ``dismiss`` and ``stop`` also without
having joined (who evaluates or watches holds no block). All calls are synchronous and come from one thread; every wait
is finite.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from lightning_blocktrain.errors import (
    NotFoundedError,
    NotJoinedError,
    RequestRefusedError,
    RunEndedError,
    RunFailedError,
    SupersededError,
    TransportError,
    UnauthorisedError,
    WrongRunError,
)
from lightning_blocktrain.rounds import Params, Receipt
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.transport.terms import RunTerms

ERROR_CODES: dict[str, type[TransportError]] = {
    "unauthorised": UnauthorisedError,
    "wrong_run": WrongRunError,
    "not_founded": NotFoundedError,
    "not_joined": NotJoinedError,
    "superseded": SupersededError,
    "refused": RequestRefusedError,
    "ended": RunEndedError,
    "failed": RunFailedError,
}
"""How the reasons of a refused request are called where they travel."""


@dataclass(frozen=True)
class WorkerFacts:
    """What a worker says of itself.

    Args:
        worker_id: The id it wants; it then trains block ``worker_id mod num_blocks``. None: a free one, on the block
            with the fewest live workers.
        block_idx: The block it wants instead; None leaves the choice as above.
        nonce: Random text, one per life of a worker: a join that is repeated with it gives the same answer.
        identity: Compared, name by name, with the run's (see ``RunTerms.identity``).
        host: Where it runs, for people.
    """

    worker_id: int | None = None
    block_idx: int | None = None
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)
    identity: Mapping[str, Any] = field(default_factory=dict)
    host: str = ""


@dataclass(frozen=True)
class Sender:
    """Which life of which worker a request says it is from."""

    worker_id: int
    incarnation: int


@dataclass(frozen=True)
class Welcome:
    """What a worker is told when it joins.

    Args:
        run_id: Of the run.
        worker_id: Who it is: merges are in the order of these ids.
        incarnation: Which life of that worker it is.
        block_idx: The block it trains.
        num_workers: Its part of the data is number ``worker_id mod num_workers`` of ``num_workers``.
        versions: By entry, at this moment; the next ``fetch`` may give newer ones.
        terms: Of the run.
    """

    run_id: str
    worker_id: int
    incarnation: int
    block_idx: int
    num_workers: int
    versions: Mapping[str, int]
    terms: RunTerms

    @property
    def sender(self) -> Sender:
        """Who this worker is in its requests."""
        return Sender(self.worker_id, self.incarnation)


@dataclass(frozen=True, eq=False)
class Fetched:
    """A version of an entry.

    Args:
        version: Of the tensors.
        params: The caller's own, on the CPU, floating ones in fp32; or what a codec made of them, see
            ``rounds/values.py``.
        closes_in_s: Seconds to the deadline of the round that the worker who asks is in, or is about to begin; None
            where the coordinator does not know that worker's block.
        meta: The codec of the tensors; empty: they are the parameters as they are.
    """

    version: int
    params: Params = field(repr=False)
    closes_in_s: float | None = None
    meta: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class Submission:
    """What a worker sends for one entry at the end of its round.

    Args:
        base_version: The version that its local steps started from.
        num_steps: Inner steps taken since.
        num_tokens: Target tokens seen in them.
        tensors: The parameters by name, or what a codec made of them; read before ``submit`` returns.
        meta: What the codec wants to be known beside its tensors; empty: they are the parameters as they are.
        owned: Whether nobody will write to the tensors later, so that they may be kept without a copy.
    """

    base_version: int
    num_steps: int
    num_tokens: int
    tensors: Mapping[str, Tensor] = field(repr=False)
    meta: Mapping[str, str] = field(default_factory=dict)
    owned: bool = False


class Transport(ABC):
    """A worker's line to its coordinator.

    Opens on first use. ``close`` ends it, any number of times; every call after it raises ``TransportError``.

    Every call but ``close`` raises:
        CoordinatorUnreachableError: If there is no answer in time, in spite of retries.
        UnauthorisedError: If the token is not the coordinator's.
        WrongRunError: If the coordinator serves another run.
        RunFailedError: If the run was given up (not ``leave`` and ``status``).
        RequestRefusedError: If the coordinator can make no sense of the request.
    """

    @abstractmethod
    def found(self, terms: RunTerms, masters: Mapping[str, Mapping[str, Tensor]]) -> bool:
        """Give a coordinator without masters its first ones.

        Args:
            terms: Of the run.
            masters: Tensors by entry and name; all blocks, and the interface if there is one.

        Returns:
            Whether these are now the run's; False when it had masters before, which then stay.
        """

    @abstractmethod
    def join(self, facts: WorkerFacts, incarnation: int | None = None) -> Welcome:
        """Take part in the run, or take the place of an earlier life of the same worker.

        Args:
            facts: Who asks.
            incarnation: Grows with every life of the worker id; None lets the coordinator count.

        Raises:
            NotFoundedError: If the coordinator has no masters yet.
            SupersededError: If a newer incarnation has joined.
            RunEndedError: If the run is over.
        """

    @abstractmethod
    def fetch(
        self,
        entry: str,
        newer_than: int = -1,
        timeout_s: float = 20.0,
        codec: Codec | None = None,
        average: bool = False,
    ) -> Fetched | None:
        """Return an entry's newest version as soon as it is newer than ``newer_than``.

        Args:
            entry: ``block0``, ..., or ``interface``.
            newer_than: -1 returns what there is at once.
            timeout_s: How long to wait for a newer one, 0 or more and finite.
            codec: How it is to travel; ``spared`` is the run's, whatever it says here. None: as it is.
            average: Whether what is wanted is not the master but what others read of it: its running average, if the
                run has one.

        Returns:
            The version, or None when there was no newer one in time: ask again.

        Raises:
            RunEndedError: If there will be no newer one.
            RequestRefusedError: If the codec can carry no values.
        """

    def expect(  # noqa: B027 - doing nothing is a way to satisfy it
        self, entry: str, newer_than: int, average: bool = False
    ) -> None:
        """Begin to fetch an entry's next version while the worker computes; the next ``fetch`` of it takes it up.

        A hint: a transport that has nothing to gain does nothing. A ``fetch`` that does not wait gives what has arrived
        by then. One version per entry is expected at a time.
        """

    @abstractmethod
    def submit(self, entry: str, submission: Submission) -> Receipt:
        """Send an update and return what became of it.

        Sent again where the answer was lost; if the first one had arrived, the verdict is then ``duplicate``, and the
        update counts once.

        Raises:
            NotJoinedError: Before ``join``.
        """

    @abstractmethod
    def leave(self) -> None:
        """Say that this worker sends nothing more, so that no round waits for it; harmless without ``join``."""

    @abstractmethod
    def dismiss(self, worker_id: int) -> bool:
        """Say that another worker has died: no round waits for it, and it may join again as a new life.

        For whoever watches over its process, and so knows before its silence tells.

        Returns:
            Whether it was live, or silent; False changes nothing.

        Raises:
            NotFoundedError: If the coordinator has no masters yet.
        """

    @abstractmethod
    def stop(self, reason: str) -> None:
        """End the run for all its workers, whose next calls raise ``RunEndedError`` with the reason."""

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """Return what the coordinator says of the run: plain values, see ``coordinator/status.py``."""

    @abstractmethod
    def close(self) -> None:
        """Give up the line; does not leave the run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
