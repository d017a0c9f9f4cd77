"""One TCP connection that carries messages: whole frames in both directions, in order, one after the other.

Owns the socket's patience: a message that begins must go on, and a peer that takes nothing is given up. Owns no meaning
of a message. What is received is held against ``max_bytes`` before memory is taken for it.
"""

import asyncio
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from lightning_blocktrain.errors import WireError
from lightning_blocktrain.serving.address import Address
from lightning_blocktrain.transport.wire import PREFIX, Frame, Outgoing, Receiver, claimed_bytes, read_frame

READ_BYTES = 2**18
FLUSH_S = 1.0
IDLE_S = 60
"""After so long without a word the system asks whether the other end is still there."""


class _Store:
    """A growing buffer that a ``Receiver`` writes to."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def write(self, piece: bytes | memoryview, /) -> None:
        """Append a piece."""
        self.buffer += piece


class Link:
    """A connection on which both ends send frames.

    Args:
        reader: Of the connection.
        writer: Of the connection.
        stall_timeout_s: A transfer without progress for so long raises ``TimeoutError``.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stall_timeout_s: float) -> None:
        self._reader = reader
        self._writer = writer
        self._stall_s = stall_timeout_s
        self._sending = asyncio.Lock()
        self.received_bytes = 0
        sock: socket.socket | None = writer.get_extra_info("socket")
        if sock is not None:
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if hasattr(socket, "TCP_KEEPIDLE"):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)

    @property
    def peer(self) -> str:
        """The other end's IP address."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if name else ""

    async def send(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> int:
        """Send one message and return its bytes.

        Raises:
            ConnectionError: If the other end is gone.
            TimeoutError: If it takes nothing.
            WireError: If the message cannot travel.
        """
        outgoing = Outgoing(header, tensors or {})
        async with self._sending:
            try:
                for piece in outgoing.pieces():
                    if self._writer.is_closing():
                        raise ConnectionResetError("The connection is closed.")
                    self._writer.write(piece)
                    async with asyncio.timeout(self._stall_s):
                        await self._writer.drain()
            except BaseException:
                # Nobody can go on behind half a message, and a peer that takes nothing would keep the connection.
                reset(self._writer.transport)
                raise
        return outgoing.num_bytes

    async def receive(self, max_bytes: int) -> Frame | None:
        """Return the next message; None if the other end has closed the connection between two.

        Args:
            max_bytes: Longest message that is taken.

        Raises:
            WireError: If it is no message, too long or damaged.
            ConnectionError: If the connection ends within one.
            TimeoutError: If it begins and does not go on.
        """
        first = await self._reader.read(PREFIX.size)
        if not first:
            return None
        store = _Store()
        receiver = Receiver(store, max_bytes)
        prefix = first + await self._exactly(PREFIX.size - len(first))
        total = claimed_bytes(prefix, max_bytes)
        receiver.take(prefix)
        while receiver.num_bytes < total:
            async with asyncio.timeout(self._stall_s):
                piece = await self._reader.read(min(READ_BYTES, total - receiver.num_bytes))
            if not piece:
                raise ConnectionResetError("The connection ended within a message.")
            receiver.take(piece)
        receiver.finish()
        self.received_bytes += total
        return read_frame(store.buffer)

    async def _exactly(self, number: int) -> bytes:
        try:
            async with asyncio.timeout(self._stall_s):
                return await self._reader.readexactly(number)
        except asyncio.IncompleteReadError as exc:
            raise ConnectionResetError("The connection ended within a message.") from exc

    async def close(self) -> None:
        """End the connection; what the other end has not taken within ``FLUSH_S`` is dropped."""
        if not self._writer.is_closing():  # closed twice, TLS forgets its socket
            self._writer.close()
        closed = asyncio.ensure_future(self._writer.wait_closed())  # all who close wait for it: nobody cancels it
        try:
            await asyncio.wait({closed}, timeout=FLUSH_S)
        finally:
            if not closed.done():
                reset(self._writer.transport)
        await asyncio.wait({closed}, timeout=FLUSH_S)
        if closed.done() and not closed.cancelled():
            closed.exception()  # seen: how a connection ends is nobody's concern any more


def reset(transport: asyncio.WriteTransport) -> None:
    """End the connection to a peer that takes nothing.

    ``abort`` alone drops what this process holds; the system would go on offering what it holds, for minutes.
    """
    with suppress(OSError, AttributeError):  # of a socket, or of TLS, that is closed already
        at_once = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    transport.abort()


async def dial(address: Address, stall_timeout_s: float) -> Link:
    """Return a connection to a host.

    Raises:
        OSError: If it cannot be reached, or its certificate is not trusted.
        ValueError: If its name or this machine's certificates are none.
    """
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=address.context(), limit=READ_BYTES)
    return Link(reader, writer, stall_timeout_s)


def fields_of(frame: Frame, kind: str, **types: type | tuple[type, ...]) -> list[Any]:
    """Return fields of a message's header.

    Args:
        frame: The message.
        kind: What it must be.
        types: Name and type of each field.

    Raises:
        WireError: If it is something else, or a field is missing or of another type.
    """
    if frame.header.get("kind") != kind:
        raise WireError(f"The message must be {kind!r}; it is {frame.header.get('kind')!r:.40}.")
    found = [frame.header.get(name) for name in types]
    for (name, wanted), value in zip(types.items(), found, strict=True):
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise WireError(f"The field {name} of a {kind} message is {value!r:.40}.")
    return found
