"""A connection whose other end takes nothing ends, whoever waits on it."""

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_blocktrain.serving.address import Address
from lightning_blocktrain.serving.link import Link, dial, reset
from tests.transport.test_http import make_certificate

BIG = {"x": torch.zeros(2**24)}
"""More than the system holds for the two ends."""
WAIT_S = 20.0


@asynccontextmanager
async def link_to_nobody(stall_timeout_s: float, certificate: Path | None = None) -> AsyncIterator[Link]:
    """Yield a connection to a socket that is never read; with a certificate it speaks TLS."""
    async with link_and_end(stall_timeout_s, certificate) as (link, _):
        yield link


@asynccontextmanager
async def link_and_end(stall_timeout_s: float, certificate: Path | None) -> AsyncIterator[tuple[Link, socket.socket]]:
    """Yield a connection, and its other end, which reads nothing by itself."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepting = asyncio.create_task(asyncio.to_thread(accepted, listening, certificate))
        link = await dial(Address(*listening.getsockname()[:2], tls=certificate is not None), stall_timeout_s)
        with await accepting as silent:
            yield link, silent
        await asyncio.wait_for(link.close(), WAIT_S)


def accepted(listening: socket.socket, certificate: Path | None) -> socket.socket:
    """Return the other end of the next connection."""
    silent, _ = listening.accept()
    silent.settimeout(WAIT_S)
    if certificate is None:
        return silent
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context.wrap_socket(silent, server_side=True)


@pytest.fixture(params=["plain", "tls"])
def certificate(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path | None:
    if request.param == "plain":
        return None
    if shutil.which("openssl") is None:
        pytest.skip("the certificate is made with openssl")
    made = make_certificate(tmp_path, "right")
    monkeypatch.setenv("BLOCKTRAIN_CAFILE", str(made))
    return made


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
    end: Callable[[Link], Coroutine[Any, Any, None]], stall_timeout_s: float, certificate: Path | None
) -> None:
    async def run() -> bool:
        async with link_to_nobody(stall_timeout_s, certificate) as link:
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


def test_an_end_that_both_bring_about_is_none_too_many(certificate: Path | None) -> None:
    async def run() -> None:
        async with link_and_end(60.0, certificate) as (link, silent):
            await link.send({"kind": "x"})
            silent.close()
            await link.close()
            await link.close()
            with pytest.raises(ConnectionError):
                await link.send({"kind": "y"})

    asyncio.run(run())


def test_a_reset_is_heard_as_one_and_not_as_an_end(certificate: Path | None) -> None:
    def hear(silent: socket.socket) -> None:
        while socket.socket.recv(silent, 2**16):  # past TLS, to which one end is as good as another
            pass

    async def run() -> None:
        async with link_and_end(60.0, certificate) as (link, silent):
            await link.send({"kind": "x"})
            reset(link._writer.transport)
            reset(link._writer.transport)  # of what is closed: nothing happens
            with pytest.raises(ConnectionResetError):
                await asyncio.to_thread(hear, silent)

    asyncio.run(run())
