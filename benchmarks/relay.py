"""A TCP relay that behaves like a long, thin, cut or dead line, for faults and for the emulation of wide area networks.

``python -m benchmarks.relay --target HOST:PORT [--port N] [--latency-ms MS] [--rate BYTES_PER_S]``

Owns the bytes between those who connect to it and one target; knows nothing of what they mean. Needs the standard
library only. ``up`` is the direction from whoever connects to the target, ``down`` the other one.

Delay and rate: a piece of at most ``PIECE_BYTES`` leaves a direction's line when those before it have left, and arrives
``latency_ms`` later. All connections share the two lines, piece by piece; nobody waits for another one's delay.

=============  ===============================================================================================
fault          what the two ends see
=============  ===============================================================================================
``cut``        all connections end: reset, or closed as if one end had
``arm``        the first connection that comes to a given byte ends there, or stops there until an end gives up
``blackhole``  nothing passes, neither bytes nor ends of connections; new ones are accepted
``heal``       what waited passes
=============  ===============================================================================================

Covered: half-closed connections, back pressure, faults by byte. Not covered: loss, reordering and jitter of packets,
which TCP would hide, and its slow start.
"""

import argparse
import asyncio
import logging
import math
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar

log = logging.getLogger(__name__)

Direction = Literal["up", "down"]
End = Literal["reset", "close"]
Action = Literal["reset", "close", "hold"]
Piece = tuple[float, bytes]

T = TypeVar("T")

PIECE_BYTES = 2**14
MAX_WAITING = 256
"""Pieces of one connection and direction that may be under way at once."""
CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Line:
    """What one direction is like.

    Args:
        latency_ms: One way, 0 or more.
        bytes_per_s: Of all connections together, above 0; infinity: as fast as the machine.

    Raises:
        ValueError: If a value is out of range.
    """

    latency_ms: float = 0.0
    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.latency_ms < math.inf or not self.bytes_per_s > 0:
            got = f"latency_ms={self.latency_ms}, bytes_per_s={self.bytes_per_s}"
            raise ValueError(f"latency_ms must be finite and at least 0, bytes_per_s above 0; got {got}; give others")


@dataclass(eq=False)
class Tear:
    """A fault that waits for a byte.

    Args:
        direction: Of the byte.
        num_bytes: Bytes of a connection that still pass in that direction, counted from the arming.
        other_bytes: Bytes that must have passed in the opposite one before.
        action: What then happens to the connection.
        happened: Set when it has; at most once.
    """

    direction: Direction
    num_bytes: int
    other_bytes: int
    action: Action
    happened: threading.Event = field(default_factory=threading.Event)
    passed: Counter[tuple[int, str]] = field(default_factory=Counter, repr=False)

    def room(self, connection: int, direction: Direction, num_bytes: int) -> int:
        """Return how many of the next ``num_bytes`` bytes of a connection pass."""
        key, other = (connection, direction), (connection, "down" if direction == "up" else "up")
        passes = num_bytes
        if direction == self.direction and self.passed[other] >= self.other_bytes:
            passes = min(num_bytes, max(0, self.num_bytes - self.passed[key]))
        self.passed[key] += passes
        return passes


class _TornError(Exception):
    """A connection ends here, in this way."""

    def __init__(self, end: End) -> None:
        super().__init__(end)
        self.end = end


@dataclass(eq=False)
class _Connection:
    """The sockets of one connection through the relay, and how they will end."""

    writers: list[asyncio.StreamWriter]
    end: End = "reset"


class Way:
    """One direction of a relay, as a schedule.

    Args:
        line: What it is like; may be replaced.
    """

    def __init__(self, line: Line) -> None:
        self.line = line
        self._free_at = 0.0

    def book(self, num_bytes: int, now: float) -> tuple[float, float]:
        """Return when the next piece has left, so that another may follow, and when it arrives; seconds."""
        self._free_at = max(self._free_at, now) + num_bytes / self.line.bytes_per_s
        return self._free_at, self._free_at + self.line.latency_ms / 1000


class Relay:
    """A relay in a thread of its own; a context manager. Any thread may call it.

    Args:
        target: Host and port of whom it relays to, who need not listen yet.
        up: The direction to the target.
        down: The direction from it.
        host: Address to listen on.
        port: 0 lets the system choose.
    """

    def __init__(
        self,
        target: tuple[str, int],
        up: Line | None = None,
        down: Line | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.target = target
        self.traffic: Counter[str] = Counter()
        """Bytes that have passed, ``up`` and ``down``, and ``connections`` accepted."""
        self._address = (host, port)
        self._ways: dict[Direction, Way] = {"up": Way(up or Line()), "down": Way(down or Line())}
        self._tear: Tear | None = None
        self._tasks: dict[asyncio.Task[None], _Connection] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._server: asyncio.Server | None = None
        self._passing = asyncio.Event()
        self._passing.set()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on, once it is open."""
        return self._address

    @property
    def url(self) -> str:
        """The address as a URL of plain HTTP."""
        return f"http://{self._address[0]}:{self._address[1]}"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Listen.

        Raises:
            OSError: If the address is taken.
        """
        self._thread.start()
        try:
            self._call(self._listen)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all connections and the thread; any number of times."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            self._call(self._end)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CALL_TIMEOUT_S)
        self._loop.close()

    def shape(self, up: Line, down: Line) -> None:
        """Make the directions like this from now on."""
        self._do(lambda: self._set_lines(up, down))

    def cut(self, end: End = "reset") -> None:
        """End all connections; new ones are taken."""
        self._do(lambda: self._cut(end))

    def arm(self, direction: Direction, num_bytes: int, other_bytes: int = 0, action: Action = "reset") -> Tear:
        """Let a fault happen at a byte, to the first connection that comes to it; replaces one that waits still.

        Args:
            direction: Of the byte.
            num_bytes: Bytes of the connection that still pass in that direction, from now on.
            other_bytes: Bytes that must have passed in the opposite one before, from now on.
            action: ``reset`` or ``close`` the connection, or ``hold`` it: nothing more passes on it, and when an end
                gives it up the other one is reset.
        """
        tear = Tear(direction, num_bytes, other_bytes, action)
        self._do(lambda: setattr(self, "_tear", tear))
        return tear

    def blackhole(self) -> None:
        """Let nothing pass."""
        self._do(self._passing.clear)

    def heal(self) -> None:
        """Let everything pass again, first what has waited."""
        self._do(self._passing.set)

    # In the thread

    def _call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(CALL_TIMEOUT_S)

    def _do(self, act: Callable[[], object]) -> None:
        async def acted() -> None:
            act()

        self._call(acted)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, *self._address)
        self._address = self._server.sockets[0].getsockname()[:2]

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _set_lines(self, up: Line, down: Line) -> None:
        self._ways["up"].line, self._ways["down"].line = up, down

    def _cut(self, end: End) -> None:
        for task, connection in self._tasks.items():
            connection.end = end
            task.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.traffic["connections"] += 1
        connection = _Connection([writer])
        task = self._loop.create_task(self._serve(connection, reader))
        self._tasks[task] = connection
        task.add_done_callback(self._ended)  # also of one that is cancelled before it has begun

    def _ended(self, task: asyncio.Task[None]) -> None:
        connection = self._tasks.pop(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a connection failed", exc_info=task.exception())
        _finish(connection)

    async def _serve(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        try:
            await self._passing.wait()
            far_reader, far_writer = await asyncio.open_connection(*self.target)
            connection.writers.append(far_writer)
            await self._carry(connection, reader, far_reader)
        except OSError as exc:  # the caller sees a reset, as it would without a relay
            log.debug("nobody listens at %s: %s", self.target, exc)

    async def _carry(
        self, connection: _Connection, reader: asyncio.StreamReader, far_reader: asyncio.StreamReader
    ) -> None:
        writer, far_writer = connection.writers
        ways: tuple[tuple[Direction, Any, Any], ...] = (("up", reader, far_writer), ("down", far_reader, writer))
        try:
            async with asyncio.TaskGroup() as group:
                for direction, source, sink in ways:
                    waiting: asyncio.Queue[Piece | None] = asyncio.Queue(MAX_WAITING)
                    group.create_task(self._take_in(direction, source, waiting))
                    group.create_task(self._give_out(direction, id(connection), sink, waiting))
            connection.end = "close"
        except* OSError as lost:  # one end was reset: so is the other
            log.debug("a connection was lost: %s", lost.exceptions)
        except* _TornError as torn:
            connection.end = next(exc.end for exc in torn.exceptions if isinstance(exc, _TornError))

    async def _take_in(
        self, direction: Direction, reader: asyncio.StreamReader, waiting: "asyncio.Queue[Piece | None]"
    ) -> None:
        try:
            while content := await reader.read(PIECE_BYTES):
                leaves_at, arrives_at = self._ways[direction].book(len(content), time.monotonic())
                await waiting.put((arrives_at, content))
                await _sleep_until(leaves_at)
        except OSError:
            await self._passing.wait()
            raise
        await waiting.put(None)

    async def _give_out(
        self,
        direction: Direction,
        connection: int,
        writer: asyncio.StreamWriter,
        waiting: "asyncio.Queue[Piece | None]",
    ) -> None:
        while (piece := await waiting.get()) is not None:
            arrives_at, content = piece
            await _sleep_until(arrives_at)
            await self._passing.wait()
            tear = self._tear
            room = len(content) if tear is None else tear.room(connection, direction, len(content))
            writer.write(content[:room])
            await writer.drain()
            self.traffic[direction] += room
            if tear is not None and room < len(content):
                await self._happen(tear, waiting)
        await self._passing.wait()
        writer.write_eof()

    async def _happen(self, tear: Tear, waiting: "asyncio.Queue[Piece | None]") -> None:
        self._tear = None
        tear.happened.set()
        if tear.action == "hold":
            while await waiting.get() is not None:  # until this end gives up
                pass
        raise _TornError("close" if tear.action == "close" else "reset")


async def _sleep_until(at: float) -> None:
    pause_s = at - time.monotonic()
    if pause_s > 0:
        await asyncio.sleep(pause_s)


def _finish(connection: _Connection) -> None:
    for writer in connection.writers:
        if connection.end == "close":
            writer.close()
            continue
        opened = writer.get_extra_info("socket")
        with suppress(OSError):  # closed already
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or of a URL.

    Raises:
        ValueError: If it is neither.
    """
    host, colon, port = text.rpartition("://")[2].rstrip("/").rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise ValueError(f"an address must be HOST:PORT; got {text!r}; add what is missing")
    return host.strip("[]"), int(port)


def main(argv: Sequence[str] | None = None) -> None:
    """Relay until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=address_of, required=True, help="HOST:PORT to relay to")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: any free one")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="one way, both ways alike")
    parser.add_argument("--rate", type=float, default=math.inf, help="bytes per second, each way")
    args = parser.parse_args(argv)
    line = Line(args.latency_ms, args.rate)
    with Relay(args.target, line, line, port=args.port) as relay, suppress(KeyboardInterrupt):
        print(f"{relay.url} relays to {args.target[0]}:{args.target[1]}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
