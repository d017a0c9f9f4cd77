"""What is an address of a coordinator, who can listen in there, whom a member trusts, and what the environment says."""

import errno
import ipaddress
import os
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from lightning_blocktrain.errors import PortInUseError, explain

URL, RUN_ID, TOKEN = "BLOCKTRAIN_COORDINATOR", "BLOCKTRAIN_RUN_ID", "BLOCKTRAIN_TOKEN"
"""Environment variables that say where a run is coordinated, its name and its secret."""
CAFILE = "BLOCKTRAIN_CAFILE"
"""Environment variable that names the PEM file of a private authority."""
DEFAULT_RUN_ID = "blocktrain"


def given_cafile(cafile: str | None = None) -> str | None:
    """Return the PEM file of the authority that signs a coordinator's certificate, or None for the system's own.

    Args:
        cafile: As somebody named it; None: what ``BLOCKTRAIN_CAFILE`` says.

    Raises:
        ValueError: If there is no such file.
    """
    given = cafile or os.environ.get(CAFILE)
    if given and not Path(given).is_file():
        raise ValueError(explain("the file of the authority must exist", f"{CAFILE}={given}", "correct the path"))
    return given or None


def check_sendable(name: str, text: str, fix: str) -> None:
    """Refuse what no header can hold.

    Args:
        name: Of the value.
        text: Appears in no message: it may be a token.
        fix: What to do then.

    Raises:
        ValueError: If it is empty, or not printable ASCII without spaces.
    """
    if not text or not (text.isascii() and text.isprintable()) or " " in text:
        got = f"{name} of {len(text)} characters"
        raise ValueError(explain(f"{name} must be printable ASCII without spaces", got, fix))


def split_urls(urls: str) -> list[str]:
    """Return the coordinators of a run, which are named with commas between them.

    Raises:
        ValueError: If one is named twice.
    """
    names = [url.strip() for url in urls.split(",")]
    if len(set(names)) < len(names):
        raise ValueError(explain("the coordinators of a run must be different ones", f"urls={urls}", "name each once"))
    return names


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is this machine, reachable from itself only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_name(host: str) -> bool:
    """Tell whether a host can have this name."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def listening_error(exc: OSError | UnicodeError, host: str, port: int) -> Exception:
    """Return what to raise where nobody can listen at an address.

    Args:
        exc: What the system said, or what said that no host can have this name.
        host: Name or address.
        port: Its port.
    """
    got = f"host={host}, port={port}"
    if isinstance(exc, OSError) and exc.errno == errno.EADDRINUSE:
        fix = "stop who listens there, or choose another port (0: any free one)"
        return PortInUseError(explain("the address must be free", got, fix))
    fix = "listen on 127.0.0.1, 0.0.0.0 or an address of this machine, and a port that you may use"
    return ValueError(explain("the address to listen on must be this machine's", f"{got} ({exc})", fix))


def checked_url(url: str) -> str:
    """Return a coordinator's URL without what follows its port; a fragment is dropped, for it may hold a token.

    Raises:
        ValueError: If it is none: another scheme, no host, a path, a query or a user name.
    """
    parts = _parts(url)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise _no_url(url)
    if parts.username is not None:
        raise ValueError(explain("url must hold no user name", "one with a user name", "give the token as token"))
    if parts.path not in ("", "/") or parts.query:
        raise _no_url(url)
    return f"{parts.scheme}://{parts.netloc}"


def _parts(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        return parts if parts.port != 0 else None
    except ValueError:  # a port out of range, half an IPv6 address
        return None


def _no_url(url: str) -> ValueError:
    got = f"url={url.partition('#')[0]!r:.100}"
    return ValueError(explain("url must be http://host:port or https://host:port", got, "correct it"))
