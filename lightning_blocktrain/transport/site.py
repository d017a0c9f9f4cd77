"""Where a server of ours listens, and the TLS that it speaks."""

import ssl
import warnings
from pathlib import Path

from aiohttp import web

from lightning_blocktrain.errors import explain
from lightning_blocktrain.transport.address import is_loopback, listening_error


def tls_context(certfile: Path | None, keyfile: Path | None) -> ssl.SSLContext | None:
    """Return what makes a server speak TLS; None without a certificate.

    Args:
        certfile: PEM certificate chain.
        keyfile: PEM key; None: in ``certfile``.

    Raises:
        ValueError: If certificate and key cannot be read, or do not belong together.
    """
    if certfile is None:
        if keyfile is not None:
            got = f"keyfile={keyfile}, certfile=None"
            raise ValueError(explain("keyfile needs a certfile", got, "give both, or neither for no TLS"))
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certfile, keyfile)
    except OSError as exc:
        rule = "certfile and keyfile must be PEM files that belong together"
        raise ValueError(explain(rule, f"certfile={certfile}, keyfile={keyfile} ({exc})", "correct them")) from exc
    return context


def server_tls(host: str, certfile: Path | None, keyfile: Path | None) -> ssl.SSLContext | None:
    """Return ``tls_context`` for a server that listens on ``host``; warn where strangers could read what travels."""
    context = tls_context(certfile, keyfile)
    if context is None and not is_loopback(host):
        warnings.warn(f"It listens on {host} without TLS: what travels, the token too, is readable.", stacklevel=3)
    return context


async def listen(runner: web.AppRunner, host: str, port: int, tls: ssl.SSLContext | None) -> str:
    """Have a server that is set up listen, and return its URL.

    Raises:
        PortInUseError: If the address is taken.
        ValueError: If it is not this machine's.
    """
    try:
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
    except (OSError, UnicodeError) as exc:
        raise listening_error(exc, host, port) from exc
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{runner.addresses[0][1]}"
