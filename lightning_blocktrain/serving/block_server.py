"""A host of blocks on TCP: takes walks, runs those that may run together, and passes them on.

Owns connections, their order and who is told what. Owns no computation (``block_host.py``) and no byte format.

A connection begins with ``hello`` and is answered with ``welcome``. One that names a client is where that client gets
decisions, states and failures, from whichever host a walk of its comes to; when it ends, its sessions are forgotten.

==========  =======================  ===========================================================================
from        message                  meaning
==========  =======================  ===========================================================================
anyone      hello, walk, forget      who is there; a walk for a block that is served here; a session that is over
client      ping                     is answered with pong
host        welcome, pong            what is served here; still there
host        decided, state           what a walk decided; what it carried, where the client drives it itself
host        failed                   a walk that cannot go on, and why
==========  =======================  ===========================================================================

Covered, not covered: as for a coordinator. Whoever has the token may run walks and have this host connect to others.
"""

import asyncio
import logging
import ssl
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from lightning_blocktrain.coordinator.guard import FailedTokens
from lightning_blocktrain.errors import RequestRefusedError, WireError
from lightning_blocktrain.models.generation import Decision
from lightning_blocktrain.rounds.roster import same_text
from lightning_blocktrain.serving.address import Address
from lightning_blocktrain.serving.block_host import BlockHost, Facts, HostBusyError, Outcome, SessionLostError, alike
from lightning_blocktrain.serving.errand import Errand, decision_message, errand_message, errand_of
from lightning_blocktrain.serving.hello import HELLO_TIMEOUT_S, MAX_HELLO_BYTES, PROTOCOL, open_link
from lightning_blocktrain.serving.link import Link, fields_of
from lightning_blocktrain.transport.address import TOKEN, listening_error
from lightning_blocktrain.transport.wire import Frame

log = logging.getLogger(__name__)

CODES = {SessionLostError: "lost", HostBusyError: "busy"}
"""Why a walk cannot go on here though it may elsewhere."""
FRAME_BYTES = 2**16
"""Most bytes of a walk's message beside its state."""
MAX_OVER = 256
"""Sessions of a client that ended last and are known as over: a walk that comes after its session's end comes soon."""


@dataclass(frozen=True)
class HostLimits:
    """What a host takes.

    Args:
        connections: Most at once.
        waiting: Most walks that wait for their turn.
        batch: Most walks that run at once, where several wait. 1: the bits of a text never depend on others.
        stall_timeout_s: A transfer without progress for so long is given up.
        connect_timeout_s: Longest wait for the next host to take a connection.
        failed_tokens: Wrong tokens per address and minute that are answered.
    """

    connections: int = 512
    waiting: int = 1024
    batch: int = 16
    stall_timeout_s: float = 60.0
    connect_timeout_s: float = 5.0
    failed_tokens: int = 10


class BlockServer:
    """Serves one host of blocks; ``start`` and ``stop`` belong to one event loop.

    Args:
        host: Used by this server's own thread from ``start`` to ``stop``.
        token: What everyone who connects must know, and the next hosts are told.
        listen: Host and port; port 0 lets the system choose.
        tls: Makes it speak TLS.
        limits: What it takes.
    """

    def __init__(
        self,
        host: BlockHost,
        token: str,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        tls: ssl.SSLContext | None = None,
        limits: HostLimits | None = None,
    ) -> None:
        self.limits = limits or HostLimits()
        self.address: Address | None = None
        self._host = host
        self._token = token
        self._listen = listen
        self._tls = tls
        self._max_bytes = FRAME_BYTES + host.max_state_bytes
        self._thread = ThreadPoolExecutor(1, "blocktrain-blocks")
        self._server: asyncio.Server | None = None
        self._clients: dict[str, Link] = {}
        self._over: dict[str, deque[int]] = {}
        """Per client, the sessions that ended last."""
        self._next: dict[Address, _Forwarder] = {}
        self._waiting: deque[Errand] = deque()
        self._arrived = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connected: set[asyncio.Task[Any]] = set()
        self._links: set[Link] = set()
        self._guard = FailedTokens(self.limits.failed_tokens)
        self.num_walks = 0

    @property
    def facts(self) -> Facts:
        """What is served."""
        return self._host.facts

    async def start(self) -> None:
        """Listen.

        Raises:
            PortInUseError: If the address is taken.
        """
        name, port = self._listen
        try:
            self._server = await asyncio.start_server(self._serve, name, port, ssl=self._tls, limit=2**18)
        except (OSError, UnicodeError) as exc:
            raise listening_error(exc, name, port) from exc
        self.address = Address(name, self._server.sockets[0].getsockname()[1], self._tls is not None)
        self._spawn(self._work())

    async def stop(self) -> None:
        """Stop listening, end all connections and the thread."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in list(self._links):
            await link.close()  # its task then ends by itself, and forgets what belongs to it
        await asyncio.gather(*self._connected, return_exceptions=True)
        for forwarder in self._next.values():
            await forwarder.close()
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None
        await asyncio.to_thread(self._thread.shutdown)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the host failed", exc_info=error)

    # Connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connected.add(task)
        link = Link(reader, writer, self.limits.stall_timeout_s)
        client = None
        try:
            self._links.add(link)
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                client = await self._greet(link)
            if client is None:
                return
            if client:
                await self._admit(client, link)
            await link.send({"kind": "welcome", "protocol": PROTOCOL, "facts": asdict(self._host.facts)})
            while (frame := await link.receive(self._max_bytes)) is not None:
                await self._take(frame, link)
        except WireError as exc:
            with suppress(OSError):
                await self._turn_away(link, "malformed", str(exc))
        except OSError as exc:
            log.debug("the connection from %s ended: %r", link.peer, exc)
        finally:
            if client and self._clients.get(client) is link:
                del self._clients[client]
                await self._forget(client)
            self._links.discard(link)
            await link.close()
            self._connected.discard(task)

    async def _greet(self, link: Link) -> str | None:
        """Return the client of a new connection, empty where it is a host; None: it was turned away."""
        frame = await link.receive(MAX_HELLO_BYTES)
        if frame is None:
            return None
        protocol, token, client = fields_of(frame, "hello", protocol=int, token=str, client=str)
        reason = self._reason_against(link.peer, protocol, token)
        if reason is not None:
            await self._turn_away(link, *reason)
            return None
        return str(client)

    def _reason_against(self, peer: str, protocol: int, token: str) -> tuple[str, str] | None:
        """Return the code and the message with which whoever connects is turned away; None: it is welcome."""
        now = time.monotonic()
        if len(self._links) > self.limits.connections:
            return "busy", f"All {self.limits.connections} connections are taken."
        if self._guard.wait_s(peer, now) > 0:
            return "busy", "Too many wrong tokens from this address."
        if not same_text(token, self._token):
            self._guard.note(peer, now)
            return "unauthorised", f"The host does not take this token: {TOKEN} must be the same everywhere."
        if protocol != PROTOCOL:
            return "refused", f"The host speaks protocol {PROTOCOL}, not {protocol}."
        return None

    async def _turn_away(self, link: Link, code: str, message: str) -> None:
        await link.send({"kind": "refused", "code": code, "message": message})

    async def _admit(self, client: str, link: Link) -> None:
        """Have a client get its answers on this connection.

        A name is a long random number: who comes with one that is connected is the same client, and the network has cut
        its first connection unseen.
        """
        cut = self._clients.get(client)
        self._clients[client] = link  # before it is welcome: its first walk may come from another host
        if cut is not None:
            await cut.close()
            await self._forget(client)

    async def _forget(self, client: str) -> None:
        """Forget a client's walks that wait, and its sessions."""
        self._waiting = deque(errand for errand in self._waiting if errand.client != client)
        self._over.pop(client, None)
        await self._in_thread(self._host.forget, client)

    async def _end_session(self, client: str, session: int) -> None:
        """Forget a session; walks of it that wait, or are still to come from another host, do not bring it back."""
        if client in self._clients:
            self._over.setdefault(client, deque(maxlen=MAX_OVER)).append(session)
        await self._in_thread(self._host.forget, client, session)

    def _is_wanted(self, errand: Errand) -> bool:
        """Tell whether a walk's client is here and its session not over: what it left would stay for ever."""
        return errand.client in self._clients and errand.session not in self._over.get(errand.client, ())

    async def _take(self, frame: Frame, link: Link) -> None:
        kind = frame.header.get("kind")
        if kind == "ping":
            await link.send({"kind": "pong"})
        elif kind == "forget":
            client, session = fields_of(frame, "forget", client=str, session=int)
            await self._end_session(client, session)
        else:
            errand = errand_of(frame)
            if len(self._waiting) >= self.limits.waiting:
                await self._fail(errand, "busy", f"{self.limits.waiting} walks are waiting.")
                return
            self._waiting.append(errand)
            self._arrived.set()

    # Walks

    async def _in_thread(self, run: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, run, *arguments)

    async def _work(self) -> None:
        """Run what waits, in the order in which it came."""
        while True:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            errands = [errand for errand in self._next_batch() if self._is_wanted(errand)]
            try:
                outcomes = await self._in_thread(self._host.run_together, errands)
            except Exception:
                log.exception("walks failed")
                failure = RequestRefusedError("The host failed to compute it; its log says why.")
                outcomes = [failure] * len(errands)
            for errand, outcome in zip(errands, outcomes, strict=True):
                if isinstance(outcome, RequestRefusedError):
                    self._spawn(self._fail(errand, CODES.get(type(outcome), "refused"), str(outcome)))
                else:
                    self.num_walks += 1
                    self._deliver(errand, outcome)

    def _next_batch(self) -> list[Errand]:
        """Take the walks to run next: that which came first, and those that may run with it.

        The walks of a session stay in order.
        """
        batch: list[Errand] = [self._waiting.popleft()]
        passed_over: list[Errand] = []
        keys = {batch[0].key}
        while self._waiting and len(batch) < self.limits.batch:
            errand = self._waiting.popleft()
            fits = errand.key not in keys and alike(batch[0], errand)
            (batch if fits else passed_over).append(errand)
            keys.add(errand.key)
        self._waiting.extendleft(reversed(passed_over))
        return batch

    def _deliver(self, errand: Errand, outcome: Outcome) -> None:
        if isinstance(outcome, Decision):
            if errand.walk.num_read:
                self._spawn(self._tell(errand.client, *decision_message(errand, outcome)))
        elif errand.route:
            self._forward(errand.route[0], outcome)
        else:
            header, tensors = errand_message(outcome)
            self._spawn(self._tell(errand.client, {**header, "kind": "state"}, tensors))

    async def _tell(self, client: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        link = self._clients.get(client)
        if link is None:
            return
        try:
            await link.send(header, tensors)
        except OSError as exc:
            log.debug("the client at %s is gone: %r", link.peer, exc)
            await link.close()

    async def _fail(self, errand: Errand, code: str, message: str, address: Address | None = None) -> None:
        header = {"kind": "failed", "session": errand.session, "number": errand.number, "code": code}
        named = {"message": message, "address": "" if address is None else str(address)}
        await self._tell(errand.client, {**header, **named})

    # The next host

    def _forward(self, address: Address, errand: Errand) -> None:
        forwarder = self._next.get(address)
        if forwarder is None:
            forwarder = self._next[address] = _Forwarder(address, self._token, self.limits)
            self._spawn(self._keep_forwarding(forwarder))
        forwarder.queue.put_nowait(errand)

    async def _keep_forwarding(self, forwarder: "_Forwarder") -> None:
        while True:
            errand = await forwarder.queue.get()
            try:
                await forwarder.send(errand)
            except (OSError, ValueError) as exc:
                reason = str(exc) or type(exc).__name__
                # What waits behind it would wait as long for the same answer.
                for failed in (errand, *forwarder.waiting()):
                    message = f"The host {forwarder.address} of block {failed.next_block} is not reached: {reason}."
                    await self._fail(failed, "unreachable", message, forwarder.address)


class _Forwarder:
    """Sends walks to one other host, in order, on a connection that it opens when there is something to send."""

    def __init__(self, address: Address, token: str, limits: HostLimits) -> None:
        self.address = address
        self.queue: asyncio.Queue[Errand] = asyncio.Queue()
        self._token = token
        self._limits = limits
        self._link: Link | None = None
        self._watch: asyncio.Task[None] | None = None

    def waiting(self) -> list[Errand]:
        """Take all walks that wait to be sent."""
        return [self.queue.get_nowait() for _ in range(self.queue.qsize())]

    async def send(self, errand: Errand) -> None:
        """Send one walk.

        Raises:
            OSError: If the host is not reached.
            ValueError: If it says something strange, or its name or this machine's certificates are none.
        """
        header, tensors = errand_message(errand)
        if self._link is None:
            timeout_s, stall_timeout_s = self._limits.connect_timeout_s, self._limits.stall_timeout_s
            self._link, _ = await open_link(self.address, self._token, "", timeout_s, stall_timeout_s)
            self._watch = asyncio.create_task(self._wait_for_end(self._link))
        link = self._link
        try:
            await link.send(header, tensors)
        except OSError:
            await self._drop(link)
            raise

    async def _wait_for_end(self, link: Link) -> None:
        """Notice when the other host ends the connection; it sends nothing on it."""
        with suppress(OSError, WireError):
            await link.receive(MAX_HELLO_BYTES)
        await self._drop(link)

    async def close(self) -> None:
        """End the connection."""
        if self._link is not None:
            await self._drop(self._link)
        if self._watch is not None:
            await asyncio.gather(self._watch, return_exceptions=True)

    async def _drop(self, link: Link) -> None:
        if self._link is link:
            self._link = None
        await link.close()
