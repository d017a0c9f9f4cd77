"""How a connection between client and host, or host and host, begins: hello with the token, welcome with facts."""

from typing import Any

from lightning_blocktrain.serving.link import Link, fields_of

PROTOCOL = 1
MAX_HELLO_BYTES = 2**14
HELLO_PATIENCE_S = 10.0


async def greet(link: Link, token: str, client: str, patience_s: float = HELLO_PATIENCE_S) -> dict[str, Any]:
    """Say hello on a new connection and return what the host tells about itself.

    Raises:
        ConnectionError: If the host turns this end away; the message says why.
        WireError: If it answers something else.
    """
    await link.send({"kind": "hello", "protocol": PROTOCOL, "token": token, "client": client})
    frame = await link.receive(MAX_HELLO_BYTES, patience_s)
    if frame is None:
        raise ConnectionResetError("The host ended the connection.")
    if frame.header.get("kind") == "refused":
        raise ConnectionRefusedError(str(frame.header.get("message"))[:500])
    (facts,) = fields_of(frame, "welcome", facts=dict)
    found: dict[str, Any] = facts
    return found
