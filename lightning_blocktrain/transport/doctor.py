"""What stands between this machine and a coordinator: one finding after the other, from the name to the throughput.

Owns the checks and their words. Owns no terminal. It changes nothing of the run, and sends the token only where a
worker would. A coordinator never opens a connection to a worker, so that what succeeds from here is all that a worker
on this machine needs.
"""

import asyncio
import io
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from lightning_blocktrain.errors import explain
from lightning_blocktrain.rounds import INTERFACE
from lightning_blocktrain.transport.address import CAFILE, RUN_ID, TOKEN, checked_url, is_loopback
from lightning_blocktrain.transport.http import read_object
from lightning_blocktrain.transport.versions import PROTOCOL, RUN_HEADER, package_version

Level = Literal["ok", "warn", "fail"]

NUM_TRIPS = 5
FIRST_PROBE_BYTES, LONG_PROBE_BYTES = 2**18, 2**23
LONG_PROBE_S = 5.0
"""A long probe follows only where it would take less than this."""
CLOCK_WARN_S = 5.0
CERTIFICATE_WARN_DAYS = 14.0


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Args:
        name: Of the check.
        level: ``fail``: a worker on this machine cannot take part.
        text: One sentence for a person; holds no secret.
    """

    name: str
    level: Level
    text: str


@dataclass(frozen=True)
class Target:
    """What is checked.

    Args:
        url: ``http://host:port`` or ``https://host:port``.
        token: Of the run; empty: there is none.
        run_id: That a worker here would give.
        cafile: PEM file of the authority that signed the certificate; None: the system's.
        timeout_s: Longest time of one check, finite and above 0.

    Raises:
        ValueError: If the URL is none, or the time out of range.
    """

    url: str
    token: str = field(repr=False)
    run_id: str
    cafile: str | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        checked_url(self.url)
        if not 0 < self.timeout_s < float("inf"):
            got = f"timeout_s={self.timeout_s}"
            raise ValueError(explain("timeout_s must be finite and above 0", got, "give seconds"))

    @property
    def is_https(self) -> bool:
        """Whether it speaks TLS."""
        return urlsplit(self.url).scheme == "https"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or (443 if self.is_https else 80)


class _FailedError(Exception):
    """Nothing further can be checked; its text is the finding's."""


def run_checks(target: Target, say: Callable[[Finding], None]) -> bool:
    """Run all checks; each takes ``timeout_s`` at most.

    Args:
        target: What to check.
        say: Called with every finding as soon as it is there.

    Returns:
        Whether nothing failed.
    """
    return asyncio.run(_run_checks(target, say))


async def _run_checks(target: Target, say: Callable[[Finding], None]) -> bool:
    found: list[Finding] = []
    async for finding in _findings(target):
        found.append(finding)
        say(finding)
    return all(finding.level != "fail" for finding in found)


async def _findings(target: Target) -> AsyncIterator[Finding]:
    name = "name"
    try:
        yield Finding(name, "ok", await _resolve(target))
        name = "connection"
        connected, own_address = await _connect(target)
        yield Finding(name, "ok", connected)
        name = "tls"
        yield await _check_tls(target)
        name = "coordinator"
        async with _session(target) as session:
            status, trip_s, asked_at = await _ask_status(target, session)
            for finding in (_coordinator(status), _run(target, status), _version(status), _clock(status, asked_at)):
                yield finding
            name = "round trip"
            yield await _round_trips(session, trip_s)
            if status["run_id"] != target.run_id:
                return  # the other checks need the run id of the run
            name = "throughput"
            speeds = await _throughput(target, session)
            yield _judge_throughput(speeds, status)
            name = "address"
            yield await _seen_from(target, session, own_address)
    except _FailedError as exc:
        yield Finding(name, "fail", str(exc))
    except (aiohttp.ClientError, OSError) as exc:  # a timeout is an OSError
        yield Finding(name, "fail", _cause(exc, target.timeout_s))


def _cause(exc: BaseException, timeout_s: float) -> str:
    if isinstance(exc, TimeoutError):
        return f"no answer within {timeout_s:g} s: a firewall may drop the packets, or the address is another's"
    return f"{type(exc).__name__}: {exc}"[:300]


def _session(target: Target) -> aiohttp.ClientSession:
    tls: ssl.SSLContext | bool = ssl.create_default_context(cafile=target.cafile) if target.is_https else True
    return aiohttp.ClientSession(
        checked_url(target.url),
        connector=aiohttp.TCPConnector(ssl=tls),
        headers={"Authorization": f"Bearer {target.token}"},
        timeout=aiohttp.ClientTimeout(total=target.timeout_s),
    )


# From the name to TLS


async def _resolve(target: Target) -> str:
    host, port = target.address
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(target.timeout_s):
            known = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as exc:
        raise _FailedError(f"{host} is no known name here ({exc.strerror}): check the URL and the DNS") from exc
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in known))
    return f"{host} is {', '.join(addresses[:4])}"


async def _connect(target: Target) -> tuple[str, str]:
    host, port = target.address
    began = time.perf_counter()
    try:
        async with asyncio.timeout(target.timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError as exc:
        raise _FailedError(
            f"{host}:{port} refuses connections: the coordinator is not running, listens on another port, or only on"
            " its own machine (--listen 0.0.0.0:PORT makes it reachable)"
        ) from exc
    took_ms = 1000 * (time.perf_counter() - began)
    own, other = writer.get_extra_info("sockname")[0], writer.get_extra_info("peername")[0]
    writer.close()
    return f"{other} port {port} accepts a connection after {took_ms:.1f} ms", str(own)


async def _check_tls(target: Target) -> Finding:
    host, port = target.address
    if not target.is_https:
        if is_loopback(host):
            return Finding("tls", "ok", "plain HTTP, on this machine only")
        return Finding("tls", "warn", "plain HTTP: token and weights can be read and changed on the way; use https")
    context = ssl.create_default_context(cafile=target.cafile)
    try:
        async with asyncio.timeout(target.timeout_s):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except ssl.SSLCertVerificationError as exc:
        fix = f"for an authority of your own, name its PEM file (--cafile or {CAFILE})"
        raise _FailedError(f"the certificate is not accepted ({exc.verify_message}): {fix}") from exc
    except ssl.SSLError as exc:
        raise _FailedError(f"no TLS here ({exc.reason}): the coordinator may speak plain http") from exc
    certificate, version = writer.get_extra_info("peercert"), writer.get_extra_info("ssl_object").version()
    writer.transport.abort()
    days = (ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()) / 86400
    level: Level = "ok" if days > CERTIFICATE_WARN_DAYS else "warn"
    return Finding("tls", level, f"{version}, a certificate for {host} that is valid for {days:.0f} more days")


# What the coordinator says


async def _ask_status(target: Target, session: aiohttp.ClientSession) -> tuple[dict[str, Any], float, float]:
    if not target.token:
        raise _FailedError(f"no token: export {TOKEN} as the coordinator printed it")
    began, asked_at = time.perf_counter(), time.time()
    async with session.get("/status", allow_redirects=False) as answer:
        values = await read_object(answer) or {}
    trip_s = time.perf_counter() - began
    code = values["error"].get("code") if isinstance(values.get("error"), dict) else None
    if code == "unauthorised":
        raise _FailedError("a coordinator answers, but does not take this token: use the one that it printed")
    if answer.status == 429:
        wait_s = answer.headers.get("Retry-After", "60")
        raise _FailedError(f"too many wrong tokens came from this address: try again in {wait_s} s")
    if code is not None:
        raise _FailedError(f"the coordinator refuses: {values['error'].get('message')} (HTTP {answer.status})")
    if answer.status != 200 or not {"run_id", "phase"} <= values.keys():
        raise _FailedError(f"what answers here is no BlockTrain coordinator (HTTP {answer.status})")
    return values, trip_s, asked_at + trip_s / 2


def _coordinator(status: Mapping[str, Any]) -> Finding:
    workers = status.get("workers", {}).values()
    num_live = sum(bool(kept["is_live"]) for kept in workers)
    level: Level = "fail" if status["phase"] == "failed" else "ok"
    reason = f": {status['reason']}" if status.get("reason") else ""
    phase = "without a model yet" if status["phase"] == "empty" else status["phase"]
    text = f"it takes the token; the run is {phase}{reason}, {num_live} workers in"
    return Finding("coordinator", level, text)


def _run(target: Target, status: Mapping[str, Any]) -> Finding:
    if status["run_id"] == target.run_id:
        return Finding("run", "ok", f"{target.run_id}")
    text = f"this is run {status['run_id']}, a worker here would ask for {target.run_id}"
    return Finding("run", "fail", f"{text}: export {RUN_ID}={status['run_id']}")


def _version(status: Mapping[str, Any]) -> Finding:
    other, package = status.get("protocol"), status.get("package")
    text = f"protocol {PROTOCOL} here, {other} there; package {package_version()} here, {package} there"
    if other != PROTOCOL:
        return Finding("version", "fail", f"{text}: install the same version")
    return Finding("version", "ok" if package == package_version() else "warn", text)


def _clock(status: Mapping[str, Any], asked_at: float) -> Finding:
    told = status.get("unix_time_s")
    if not isinstance(told, int | float):
        return Finding("clock", "warn", "the coordinator does not tell its time")
    ahead_s = told - asked_at
    side = "ahead of" if ahead_s > 0 else "behind"
    text = f"{datetime.fromtimestamp(told, UTC):%H:%M:%S} UTC there, {abs(ahead_s):.1f} s {side} this machine"
    if abs(ahead_s) <= CLOCK_WARN_S:
        return Finding("clock", "ok", text)
    return Finding("clock", "warn", f"{text}: rounds do not mind, logs and certificates do")


# The line


async def _round_trips(session: aiohttp.ClientSession, first_s: float) -> Finding:
    trips_s = []
    for _ in range(NUM_TRIPS):
        began = time.perf_counter()
        async with session.get("/status", allow_redirects=False) as answer:
            await answer.read()
        trips_s.append(time.perf_counter() - began)
    text = f"{1000 * median(trips_s):.1f} ms, median of {NUM_TRIPS} requests; {1000 * first_s:.1f} ms for the first"
    return Finding("round trip", "ok" if median(trips_s) < 1.0 else "warn", text)


async def _throughput(target: Target, session: aiohttp.ClientSession) -> tuple[float, float]:
    """Return upload and download in bytes per second."""
    speeds = []
    for probe in (_upload, _download):
        speed = FIRST_PROBE_BYTES / await probe(target, session, FIRST_PROBE_BYTES)
        if LONG_PROBE_BYTES / speed < min(LONG_PROBE_S, target.timeout_s):
            speed = LONG_PROBE_BYTES / await probe(target, session, LONG_PROBE_BYTES)
        speeds.append(speed)
    return speeds[0], speeds[1]


async def _upload(target: Target, session: aiohttp.ClientSession, num_bytes: int) -> float:
    began = time.perf_counter()
    await _post_probe(target, session, b"\x5a" * num_bytes)
    return time.perf_counter() - began


async def _download(target: Target, session: aiohttp.ClientSession, num_bytes: int) -> float:
    began = time.perf_counter()
    headers, query = {RUN_HEADER: target.run_id}, {"bytes": str(num_bytes)}
    async with session.get("/v1/probe", params=query, headers=headers, allow_redirects=False) as answer:
        body = await answer.read()
    if answer.status != 200 or len(body) != num_bytes:
        raise _FailedError(f"a download of {num_bytes} bytes gave {len(body)} (HTTP {answer.status})")
    return time.perf_counter() - began


async def _post_probe(target: Target, session: aiohttp.ClientSession, body: bytes) -> dict[str, Any]:
    headers = {RUN_HEADER: target.run_id, "Content-Type": "application/octet-stream"}
    async with session.post("/v1/probe", data=io.BytesIO(body), headers=headers, allow_redirects=False) as answer:
        values = await read_object(answer) or {}
    if answer.status != 200 or values.get("received_bytes") != len(body):
        raise _FailedError(f"an upload of {len(body)} bytes was not taken (HTTP {answer.status})")
    return values


def _judge_throughput(speeds: tuple[float, float], status: Mapping[str, Any]) -> Finding:
    up, down = speeds
    text = f"{up / 2**20:.1f} MiB/s up, {down / 2**20:.1f} MiB/s down"
    round_bytes = _bytes_of_a_round(status)
    if round_bytes == 0:
        return Finding("throughput", "ok", text)
    takes_s, deadline_s = round_bytes / up + round_bytes / down, status["terms"]["rules"]["deadline_s"]
    text += (
        f"; a round moves {2 * round_bytes / 2**20:.1f} MiB in fp32: {takes_s:.1f} s of the {deadline_s:g} it may last"
    )
    return Finding("throughput", "ok" if takes_s < deadline_s / 2 else "warn", text)


def _bytes_of_a_round(status: Mapping[str, Any]) -> int:
    """Return how much a worker sends in a round without a codec: the longest block, and the interface."""
    lengths = {name: int(kept.get("num_bytes", 0)) for name, kept in status.get("entries", {}).items()}
    interface = lengths.pop(INTERFACE, 0)
    return max(lengths.values(), default=0) + interface


async def _seen_from(target: Target, session: aiohttp.ClientSession, own_address: str) -> Finding:
    values = await _post_probe(target, session, b"")
    seen, outbound = values.get("address"), "workers only open connections to it and are never called back"
    if values.get("via_proxy"):
        text = f"requests come through a proxy ({seen}): it must pass bodies as they are, of any length; {outbound}"
        return Finding("address", "warn", text)
    if seen == own_address:
        return Finding("address", "ok", f"the coordinator sees this machine as {seen}; {outbound}")
    return Finding("address", "ok", f"the coordinator sees {seen}, not {own_address} (NAT), which is fine: {outbound}")
