"""A client's connections to the hosts of one model: who serves what, who is down, and walks that are under way.

Owns the event loop's side of ``client.py``: sockets and futures. Owns no text and no decision about bytes.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_blocktrain.errors import BlockTrainError, explain
from lightning_blocktrain.models.generation import Decision
from lightning_blocktrain.serving.address import Address
from lightning_blocktrain.serving.block_host import Facts
from lightning_blocktrain.serving.errand import Errand, decision_of, errand_message, errand_of
from lightning_blocktrain.serving.hello import open_link
from lightning_blocktrain.serving.link import Link, fields_of
from lightning_blocktrain.transport.wire import Frame

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 2**30


class ServingError(BlockTrainError, RuntimeError):
    """The hosts cannot do what was asked; the message names block and host."""


class HostLostError(ServingError):
    """A host has ended, is not reached or does not answer; another one of its block may go on."""

    def __init__(self, message: str, address: Address | None = None) -> None:
        super().__init__(message)
        self.address = address


class NeighbourLostError(HostLostError):
    """A host does not reach the next one, whose address it names; that may be reached from here."""

    address: Address


@dataclass(frozen=True)
class Patience:
    """How long a client waits.

    Args:
        connect_s: For a host to take a connection and say what it serves.
        walk_s: For any walk; and
        position_s: for every position of it, at every block.
        redial_s: Before a host that was lost is tried again.
        ping_s: For a host that has not answered in time to say that it is there.
    """

    connect_s: float = 5.0
    walk_s: float = 10.0
    position_s: float = 0.05
    redial_s: float = 5.0
    ping_s: float = 2.0

    def of(self, errand: Errand) -> float:
        """Return the seconds that a walk may take; they grow with its length."""
        return self.walk_s + self.position_s * len(errand.walk.inputs) * errand.num_blocks


class _Connection:
    """To one host: its link, what it serves, and the task that hears its answers."""

    def __init__(self, address: Address, link: Link, facts: Facts) -> None:
        self.address = address
        self.link = link
        self.facts = facts
        self.pongs: asyncio.Queue[None] = asyncio.Queue()
        self.hearing: asyncio.Task[None] | None = None


class Fleet:
    """The hosts of one model, as one client sees them; all methods belong to one event loop.

    Args:
        route: Where they are.
        token: Of the hosts.
        patience: How long to wait.
    """

    def __init__(self, route: Sequence[Address], token: str, patience: Patience) -> None:
        self.name = secrets.token_hex(16)
        self.facts: Facts | None = None
        """Of the model: those that all hosts share."""
        self._route = tuple(route)
        self._token = token
        self._patience = patience
        self._connections: dict[Address, _Connection] = {}
        self._lost: dict[Address, tuple[float, str]] = {}
        """When a host was lost, and why."""
        self._awaited: dict[tuple[int, int], tuple[asyncio.Future[Decision | Errand], set[Address]]] = {}
        """By session and number: who waits for a walk, and the hosts on its path."""
        self._dialling = asyncio.Lock()
        self._redialling: asyncio.Task[Facts] | None = None
        self.sent_bytes = self.received_bytes = 0

    async def connect(self) -> Facts:
        """Connect to every host that is not connected, or was lost long enough ago; return what they share.

        A host that comes back with another version is left out, and the others go on.

        Raises:
            ServingError: If the first hosts serve different versions, or none can be reached.
        """
        async with self._dialling:
            now = time.monotonic()
            wanted = [address for address in self._route if self._may_dial(address, now)]
            found = await asyncio.gather(*(self._open(address) for address in wanted))
            opened = {a: c for a, c in zip(wanted, found, strict=True) if isinstance(c, _Connection)}
            if self.facts is None and opened:
                try:
                    self.facts = self._agreed(opened)
                except ServingError:
                    await asyncio.gather(*(connection.link.close() for connection in opened.values()))
                    raise
            for address, outcome in zip(wanted, found, strict=True):
                why = outcome if isinstance(outcome, str) else self._reason_against(outcome)
                if why is not None:
                    self._lost[address] = (time.monotonic(), why.rstrip("."))
                if not isinstance(outcome, str):
                    await self._admit(outcome, why)
        if self.facts is None:
            reasons = "; ".join(f"{address}: {why}" for address, (_, why) in self._lost.items())
            raise HostLostError(f"No host of the route is reached: {reasons}; start them, or correct the route.")
        return self.facts

    def _may_dial(self, address: Address, now: float) -> bool:
        lost = self._lost.get(address)
        return address not in self._connections and (lost is None or now - lost[0] >= self._patience.redial_s)

    async def _open(self, address: Address) -> _Connection | str:
        """Return a connection, or why there is none."""
        timeout_s, stall_timeout_s = self._patience.connect_s, self._patience.walk_s
        try:
            link, facts = await open_link(address, self._token, self.name, timeout_s, stall_timeout_s)
        except (OSError, ValueError) as exc:
            return str(exc) or type(exc).__name__
        try:
            return _Connection(address, link, Facts(**facts | {"blocks": tuple(facts["blocks"])}))
        except (KeyError, TypeError) as exc:
            await link.close()
            return f"its welcome lacks something: {exc}"

    def _agreed(self, opened: Mapping[Address, _Connection]) -> Facts:
        """Return what the first hosts share.

        Raises:
            ServingError: If they do not agree.
        """
        (first, one), *others = opened.items()
        for address, connection in others:
            differing = differences(connection.facts, one.facts)
            if differing:
                got = "; ".join(f"{name}: {mine} at {address}, {theirs} at {first}" for name, mine, theirs in differing)
                fix = "start all hosts with the same --dtype"
                if [name for name, _, _ in differing] != ["dtype"]:
                    fix = "export once and serve that everywhere"
                raise ServingError(explain("all hosts of a route must serve the same version of one model", got, fix))
        return one.facts

    def _reason_against(self, connection: _Connection) -> str | None:
        """Return why a host that was reached is not used; None if it is."""
        assert self.facts is not None
        differing = differences(connection.facts, self.facts)
        return "it serves " + ", ".join(f"{name} {mine}" for name, mine, _ in differing) if differing else None

    async def _admit(self, connection: _Connection, why_not: str | None) -> None:
        if why_not is not None:
            await connection.link.close()
            return
        self._lost.pop(connection.address, None)
        self._connections[connection.address] = connection
        connection.hearing = asyncio.create_task(self._hear(connection))

    async def path(self, num_blocks: int, turn: int) -> list[Address]:
        """Return hosts that, one after the other, hold the blocks before an exit.

        Hosts that were lost are tried again: before an answer if a block is served by nobody else, else beside it.

        Args:
            num_blocks: Blocks before the exit.
            turn: Paths of different turns use different replicas.

        Raises:
            HostLostError: Naming the first block that nobody serves.
            ServingError: If hosts serve different versions.
        """
        at_hand = {block_idx for connection in self._connections.values() for block_idx in connection.facts.blocks}
        if not at_hand.issuperset(range(num_blocks)):
            await self.connect()
        elif self._redialling is None or self._redialling.done():
            self._redialling = asyncio.create_task(self.connect())
        path: list[Address] = []
        block_idx = 0
        while block_idx < num_blocks:
            able = [c for a in self._route if (c := self._connections.get(a)) and block_idx in c.facts.blocks]
            if not able:
                served = [f"{a} serves {list(c.facts.blocks)}" for a, c in self._connections.items()]
                known = "; ".join([*served, *(f"{a}: {why}" for a, (_, why) in self._lost.items())])
                fix = f"start a replica with --blocks {block_idx}, or name it in the route"
                raise HostLostError(f"Block {block_idx} is served by no host that is reached: {known}; {fix}.")
            chosen = able[turn % len(able)]
            path.append(chosen.address)
            while block_idx in chosen.facts.blocks:
                block_idx += 1
        return path

    async def walk(self, errand: Errand, path: Sequence[Address], replayed: Sequence[Errand] = ()) -> Decision:
        """Send a walk along a path, chained from host to host, and return what it decides.

        Args:
            errand: The walk, before block 0.
            path: Of ``path``.
            replayed: Walks to run before it, which decide nothing.

        Raises:
            HostLostError: If a host on the path fails; the error names it.
            ServingError: If a host refuses the walk.
        """
        walks = [replace(one, route=tuple(path[1:])) for one in (*replayed, errand)]
        found = await self._ask(errand, path, path[0], walks)
        assert isinstance(found, Decision)
        return found

    async def walk_step_by_step(
        self, errand: Errand, path: Sequence[Address], replayed: Sequence[Errand] = ()
    ) -> Decision:
        """Do the same, but have every host send its state here, from where it goes to the next one."""
        found: Decision | Errand = errand
        for one in (*replayed, errand):
            found = one
            for address in path:
                assert isinstance(found, Errand)
                if address == path[-1] and not one.walk.num_read:  # nothing comes back
                    await self._send(address, *errand_message(found))
                else:
                    found = await self._ask(one, path, address, [found])
        assert isinstance(found, Decision)
        return found

    async def forget(self, session: int, path: Sequence[Address]) -> None:
        """Tell the hosts of a path that a session is over; one that is lost has forgotten it."""
        for address in path:
            with suppress(HostLostError):
                await self._send(address, {"kind": "forget", "client": self.name, "session": session}, {})

    def reaches(self, address: Address) -> bool:
        """Tell whether a host is connected to this client."""
        return address in self._connections

    async def close(self) -> None:
        """End all connections."""
        if self._redialling is not None:
            self._redialling.cancel()
            await asyncio.gather(self._redialling, return_exceptions=True)
        for address in list(self._connections):
            await self._lose(address, "closed")

    async def _send(self, address: Address, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        connection = self._connections.get(address)
        try:
            if connection is None:
                raise ConnectionResetError(self._lost.get(address, (0, "it is not connected"))[1])
            self.sent_bytes += await connection.link.send(header, tensors)
        except OSError as exc:
            await self._lose(address, str(exc) or type(exc).__name__)
            raise HostLostError(f"The host {address} is lost: {exc}", address) from exc

    async def _ask(
        self, errand: Errand, path: Sequence[Address], first: Address, walks: Sequence[Errand]
    ) -> Decision | Errand:
        """Send walks to a host and return the answer to the last of them, from whichever host of the path."""
        key = errand.session, errand.number
        timeout_s = sum(map(self._patience.of, walks))
        future: asyncio.Future[Decision | Errand] = asyncio.get_running_loop().create_future()
        self._awaited[key] = future, set(path)  # before it is sent: the answer may be quick
        try:
            missing = [address for address in path if address not in self._connections]
            if missing:
                raise self._lost_error(missing[0])
            for walk in walks:
                await self._send(first, *errand_message(walk))
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            silent = await self._silent(path)
            for address in silent:
                await self._lose(address, "it does not answer")
            if silent:
                raise self._lost_error(silent[0]) from None
            hosts, blocks = ", ".join(map(str, path)), f"blocks 0 to {errand.num_blocks - 1}"
            raise ServingError(f"No answer in {timeout_s:.1f} s from {blocks} at {hosts}.") from None
        finally:
            del self._awaited[key]

    async def _silent(self, path: Sequence[Address]) -> list[Address]:
        """Return the hosts that do not answer a ping."""
        asked = [self._connections[address] for address in path if address in self._connections]

        async def answers(connection: _Connection) -> bool:
            try:
                await connection.link.send({"kind": "ping"})
                async with asyncio.timeout(self._patience.ping_s):
                    await connection.pongs.get()
                return True
            except OSError:
                return False

        replies = await asyncio.gather(*map(answers, asked))
        return [connection.address for connection, fine in zip(asked, replies, strict=True) if not fine]

    # What hosts say

    async def _hear(self, connection: _Connection) -> None:
        why = "it ended the connection"
        try:
            while (frame := await connection.link.receive(MAX_ANSWER_BYTES)) is not None:
                self.received_bytes += connection.link.received_bytes
                connection.link.received_bytes = 0
                self._take(frame, connection)
        except (OSError, ValueError) as exc:
            why = str(exc) or type(exc).__name__
        await self._lose(connection.address, why)

    def _take(self, frame: Frame, connection: _Connection) -> None:
        kind = frame.header.get("kind")
        if kind == "refused":  # it ends the connection
            raise ConnectionRefusedError(str(frame.header.get("message"))[:500])
        if kind == "pong":
            connection.pongs.put_nowait(None)
            return
        session, number = fields_of(frame, str(kind), session=int, number=int)
        future, _ = self._awaited.get((session, number), (None, None))
        if kind == "failed":
            self._fail(frame, connection, session)
        elif future is None or future.done():
            log.debug("an answer from %s that nobody waits for", connection.address)
        elif kind == "state":
            future.set_result(errand_of(Frame({**frame.header, "kind": "walk"}, frame.tensors)))
        else:
            future.set_result(decision_of(frame))

    def _fail(self, frame: Frame, connection: _Connection, session: int) -> None:
        """End what a session waits for: with one of its walks, all that follow have failed."""
        code, message, address = fields_of(frame, "failed", code=str, message=str, address=str)
        if code == "unreachable":
            error: ServingError = NeighbourLostError(message, Address.parse(address))
        elif code in ("lost", "busy"):
            error = HostLostError(message, connection.address)
        else:
            error = ServingError(f"The host {connection.address} refuses a walk: {message}")
        for (waiting, _), (future, _) in self._awaited.items():
            if waiting == session and not future.done():
                _give_up(future, error)

    async def _lose(self, address: Address, why: str) -> None:
        connection = self._connections.pop(address, None)
        if connection is None:
            return
        self._lost[address] = (time.monotonic(), why.rstrip("."))
        for future, path in self._awaited.values():
            if address in path and not future.done():
                _give_up(future, self._lost_error(address))
        if connection.hearing is not None and connection.hearing is not asyncio.current_task():
            connection.hearing.cancel()
        await connection.link.close()

    def _lost_error(self, address: Address) -> HostLostError:
        return HostLostError(f"The host {address} is lost: {self._lost[address][1]}", address)


def differences(one: Facts, other: Facts) -> list[tuple[str, object, object]]:
    """Return name and both values of what two hosts of one model must share and do not."""
    names = ("version", "dtype", "num_blocks")
    return [(n, getattr(one, n), getattr(other, n)) for n in names if getattr(one, n) != getattr(other, n)]


def _give_up(future: "asyncio.Future[Any]", error: BaseException) -> None:
    future.set_exception(error)
    future.exception()  # seen, even where whoever waited has raised something else by now
