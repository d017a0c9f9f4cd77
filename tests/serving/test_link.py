"""A connection whose other end takes nothing ends, whoever waits on it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import torch

from lightning_blocktrain.serving.address import Address
from lightning_blocktrain.serving.link import Link, dial

BIG = {"x": torch.zeros(2**24)}
"""More than the system holds for the two ends."""
WAIT_S = 20.0


@asynccontextmanager
async def link_to_nobody(stall_timeout_s: float) -> AsyncIterator[Link]:
    """Yield a connection to a socket that is never read."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        link = await dial(Address(*listening.getsockname()[:2]), stall_timeout_s)
        silent, _ = listening.accept()
        with silent:
            yield link
        await link.close()


async def ends(receiving: "asyncio.Task[Any]") -> bool:
    """Return when whoever listens on a connection hears that it has ended."""
    with suppress(ConnectionError):
        assert await asyncio.wait_for(receiving, WAIT_S) is None
    return True


async def stalls(link: Link) -> None:
    with pytest.raises(TimeoutError):
        await link.send({"kind": "x"}, BIG)


async def is_cancelled(link: Link) -> None:
    sending = asyncio.create_task(link.send({"kind": "x"}, BIG))
    while link._writer.transport.get_write_buffer_size() == 0:  # until it has begun
        await asyncio.sleep(0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending


async def is_closed(link: Link) -> None:
    sending = asyncio.create_task(link.send({"kind": "x"}, BIG))
    while link._writer.transport.get_write_buffer_size() == 0:
        await asyncio.sleep(0)
    await link.close()
    with pytest.raises(ConnectionError):
        await sending


@pytest.mark.parametrize(("end", "stall_timeout_s"), [(stalls, 0.1), (is_cancelled, 60.0), (is_closed, 60.0)])
def test_a_line_on_which_nothing_is_taken_ends_for_all(
    end: Callable[[Link], Coroutine[Any, Any, None]], stall_timeout_s: float
) -> None:
    async def run() -> bool:
        async with link_to_nobody(stall_timeout_s) as link:
            receiving = asyncio.create_task(link.receive(2**10))
            await end(link)
            with pytest.raises(ConnectionError):  # nobody goes on behind half a message
                await link.send({"kind": "y"})
            return await ends(receiving)

    assert asyncio.run(run())


def test_closing_is_cancelled_like_anything_else() -> None:
    async def run() -> None:
        async with link_to_nobody(60.0) as link:
            link._writer.write(bytes(2**26))
            closing = asyncio.create_task(link.close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            await asyncio.wait_for(link.close(), WAIT_S)  # and others may still close it

    asyncio.run(run())
