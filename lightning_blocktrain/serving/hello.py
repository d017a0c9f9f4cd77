"""How a connection between client and host, or host and host, begins: hello with the token, welcome with facts."""

import asyncio
from typing import Any

from lightning_blocktrain.serving.address import Address
from lightning_blocktrain.serving.link import Link, dial, fields_of

PROTOCOL = 1
MAX_HELLO_BYTES = 2**14
HELLO_TIMEOUT_S = 10.0
"""For a whole hello: a stranger who sends a byte now and then holds no place."""


async def open_link(
    address: Address, token: str, client: str, timeout_s: float, stall_timeout_s: float
) -> tuple[Link, dict[str, Any]]:
    """Connect to a host and say hello; return the connection and what the host tells about itself.

    Args:
        address: Of the host.
        token: Of the hosts.
        client: Names who gets answers on this connection; empty: nobody, a host passes walks on.
        timeout_s: For all of it.
        stall_timeout_s: Of the connection.

    Raises:
        OSError: If the host is not reached in time, or turns this end away; the message says why.
        ValueError: If it answers something else, or its name or this machine's certificates are none.
    """
    async with asyncio.timeout(timeout_s):
        link = await dial(address, stall_timeout_s)
        try:
            return link, await _greet(link, token, client)
        except BaseException:
            await link.close()
            raise


async def _greet(link: Link, token: str, client: str) -> dict[str, Any]:
    await link.send({"kind": "hello", "protocol": PROTOCOL, "token": token, "client": client})
    frame = await link.receive(MAX_HELLO_BYTES)
    if frame is None:
        raise ConnectionResetError("The host ended the connection; one that speaks TLS is tls://HOST:PORT.")
    if frame.header.get("kind") == "refused":
        raise ConnectionRefusedError(str(frame.header.get("message"))[:500])
    (facts,) = fields_of(frame, "welcome", facts=dict)
    found: dict[str, Any] = facts
    return found
