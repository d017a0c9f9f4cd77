"""Work on the pieces of a message in a second thread, while the event loop sends or receives the next ones.

Owns no thread: the loop's default executor is used. Hashing, and writing to files, release Python's lock, so either
side of a transfer can use two cores.

Memory: a sender holds the piece in the socket and the one that is made; a receiver holds two batches of
``BATCH_BYTES``, each too long by one read of the socket at most.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

BATCH_BYTES = 2**20
"""What is handed to the other thread at once."""
SMALL_BYTES = 2**16
"""Below this it is quicker to do the work at once than to hand it over."""


async def ahead(items: Iterator[T]) -> AsyncIterator[T]:
    """Yield ``items``, each made in another thread while the one before it is in use.

    Args:
        items: Used by one thread at a time; left alone if this generator is not run to its end.
    """
    loop = asyncio.get_running_loop()
    end = object()
    made = loop.run_in_executor(None, next, items, end)
    while (item := await made) is not end:
        made = loop.run_in_executor(None, next, items, end)
        yield item  # type: ignore[misc]


async def take_all(pieces: AsyncIterator[bytes], take: Callable[[Sequence[bytes]], None]) -> None:
    """Hand what arrives to ``take``, in order, in another thread while the next pieces arrive.

    Args:
        pieces: What arrives.
        take: Called by one thread at a time with some pieces, and by none when this returns or raises. What it raises
            ends the transfer, a batch later at most.
    """
    loop = asyncio.get_running_loop()
    taking: asyncio.Future[None] | None = None
    batch: list[bytes] = []
    num_bytes = 0
    try:
        async for piece in pieces:
            batch.append(piece)
            num_bytes += len(piece)
            if num_bytes >= BATCH_BYTES:
                await _finish(taking)
                taking = loop.run_in_executor(None, take, batch)
                batch, num_bytes = [], 0
        await _finish(taking)
        if num_bytes >= SMALL_BYTES:
            taking = loop.run_in_executor(None, take, batch)
        elif batch:
            take(batch)
    finally:
        await _finish(taking)


async def _finish(taking: "asyncio.Future[None] | None") -> None:
    if taking is not None:
        await asyncio.wait([taking])  # unlike awaiting it, does not give it up when the transfer is cancelled
        taking.result()
