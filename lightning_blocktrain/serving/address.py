"""Addresses of hosts that serve blocks: ``host:port``, or ``tls://host:port``."""

import ssl
from dataclasses import dataclass
from typing import Self

from lightning_blocktrain.errors import explain
from lightning_blocktrain.transport.address import given_cafile, is_name

TLS = "tls://"


@dataclass(frozen=True)
class Address:
    """Where a host listens.

    Args:
        host: Name or IP address, an IPv6 one without brackets.
        port: 1 to 65535.
        tls: Whether it is spoken to through TLS.
    """

    host: str
    port: int
    tls: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address that a text names.

        Raises:
            ValueError: If it names none.
        """
        host, _, port = text.removeprefix(TLS).rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        fits = (
            bare
            and is_name(bare)
            and bare.isprintable()
            and not set(bare) & set(" /@[]")
            and port.isascii()
            and port.isdecimal()
        )
        if not fits or not 1 <= int(port) <= 65535 or (":" in bare and not host.startswith("[")):
            rule = "an address must be host:port or tls://host:port"
            raise ValueError(explain(rule, f"address={text!r:.80}", "correct it, for example 10.0.0.7:29500"))
        return cls(bare, int(port), text.startswith(TLS))

    def __str__(self) -> str:
        """Return it as ``parse`` takes it."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"{TLS if self.tls else ''}{shown}:{self.port}"

    def context(self) -> ssl.SSLContext | None:
        """Return what checks the host's certificate; None for an address without TLS."""
        return ssl.create_default_context(cafile=given_cafile()) if self.tls else None


def parse_route(text: str) -> tuple[Address, ...]:
    """Return the addresses of a route, which commas separate; their order does not matter.

    Raises:
        ValueError: If one is none, or named twice.
    """
    route = tuple(Address.parse(part.strip()) for part in text.split(","))
    if len(set(route)) < len(route):
        raise ValueError(explain("the hosts of a route must be different ones", f"route={text}", "name each once"))
    return route
