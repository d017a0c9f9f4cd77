"""Where an HTTP server of ours listens."""

import ssl

from aiohttp import web

from lightning_blocktrain.transport.address import listening_error


async def listen(runner: web.AppRunner, host: str, port: int, tls: ssl.SSLContext | None) -> str:
    """Have a server that is set up listen, and return its URL.

    Raises:
        PortInUseError: If the address is taken.
        ValueError: If it is not this machine's.
    """
    try:
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
    except OSError as exc:
        raise listening_error(exc, host, port) from exc
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{runner.addresses[0][1]}"
