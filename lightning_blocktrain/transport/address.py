"""What an address says about who can listen in."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is this machine, reachable from itself only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
