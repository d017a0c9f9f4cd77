"""What only the HTTP transport promises: retries, time limits, signs of life, TLS."""

import asyncio
import logging
import shutil
import socket
import ssl
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.errors import (
    CoordinatorUnreachableError,
    RequestRefusedError,
    TransportError,
)
from lightning_blocktrain.rounds import Verdict
from lightning_blocktrain.transport.base import Transport, WorkerFacts
from lightning_blocktrain.transport.http import DAMAGED_TRIES, HttpTransport
from lightning_blocktrain.transport.loop import LoopThread
from lightning_blocktrain.transport.messages import pack_fetched
from tests.transport.lines import RUN, TOKEN, Clock, begin, line_of, make_masters, make_terms, moved, served, submission

Handler = Callable[[web.Request], object]


@contextmanager
def fake_coordinator(handler: Handler) -> Iterator[str]:
    """Answer every request by ``handler``."""
    thread = LoopThread("fake-coordinator")

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)  # type: ignore[arg-type]
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = thread.run(start)
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        thread.close(runner.cleanup)


def transport_to(url: str, reconnect_timeout_s: float = 5.0, stall_timeout_s: float = 5.0) -> HttpTransport:
    return HttpTransport(url, RUN, TOKEN, reconnect_timeout_s=reconnect_timeout_s, stall_timeout_s=stall_timeout_s)


def whole_message() -> bytes:
    return b"".join(bytes(piece) for piece in pack_fetched(3, make_masters(1)["block0"]).pieces())


# Downloads


def test_scenario_06_download_that_is_cut_is_tried_again_until_it_is_whole() -> None:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request.path_qs)
        message = whole_message()
        answer = web.StreamResponse(headers={"Content-Length": str(len(message))})
        await answer.prepare(request)
        await answer.write(message if len(asked) == 3 else message[: len(message) // 2])
        if len(asked) < 3 and request.transport is not None:
            request.transport.abort()
        return answer

    with fake_coordinator(handle) as url, transport_to(url) as transport:
        found = transport.fetch("block0")
    assert found is not None and found.version == 3
    assert len(asked) == 3


def test_scenario_06_download_that_never_gets_whole_ends_after_the_time_to_reconnect() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": "1000"})
        await answer.prepare(request)
        await answer.write(whole_message()[:50])
        assert request.transport is not None
        request.transport.abort()
        return answer

    with (
        fake_coordinator(handle) as url,
        transport_to(url, reconnect_timeout_s=0.3) as transport,
        pytest.raises(CoordinatorUnreachableError, match=r"fetch block0 failed \d+ times in"),
    ):
        transport.fetch("block0")


def test_scenario_06_download_that_is_damaged_is_tried_a_few_times_only() -> None:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(request.path)
        message = bytearray(whole_message())
        message[-40] ^= 1
        return web.Response(body=bytes(message))

    with (
        fake_coordinator(handle) as url,
        transport_to(url, reconnect_timeout_s=60.0) as transport,
        pytest.raises(CoordinatorUnreachableError, match="does not match its SHA-256"),
    ):
        transport.fetch("block0")
    assert len(asked) == DAMAGED_TRIES


def test_download_longer_than_the_limit_is_refused_unread() -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=whole_message())

    with (
        fake_coordinator(handle) as url,
        HttpTransport(url, RUN, TOKEN, max_body_bytes=64) as transport,
        pytest.raises(CoordinatorUnreachableError, match="at most 64 are taken"),
    ):
        transport.fetch("block0")


def test_download_without_progress_counts_as_cut() -> None:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        answer = web.StreamResponse(headers={"Content-Length": "1000"})
        await answer.prepare(request)
        await answer.write(whole_message()[:50])
        await asyncio.Event().wait()
        return answer

    with (
        fake_coordinator(handle) as url,
        transport_to(url, 0.2, stall_timeout_s=0.1) as transport,
        pytest.raises(CoordinatorUnreachableError, match="TimeoutError"),
    ):
        transport.fetch("block0", timeout_s=0.0)
    assert len(asked) >= 2


# Answers of others


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, "<html>"),
        (200, "<html>"),
        (302, ""),
        (418, '{"error": 3}'),
        (400, '{"error": {"code": "x", "message": "y"}}'),
    ],
)
def test_answer_of_something_else_is_no_coordinator(status: int, body: str) -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=status, text=body, headers={"Location": "http://127.0.0.1:9/"})

    with (
        fake_coordinator(handle) as url,
        transport_to(url) as transport,
        pytest.raises((RequestRefusedError, TransportError)),
    ):
        transport.status()


def test_answer_that_is_compressed_is_refused() -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})

    with (
        fake_coordinator(handle) as url,
        transport_to(url) as transport,
        pytest.raises(RequestRefusedError, match="compressed"),
    ):
        transport.fetch("block0")


def test_answer_of_a_coordinator_that_is_busy_is_waited_for() -> None:
    states = iter([503, 429, 500, 200])

    async def handle(request: web.Request) -> web.Response:
        status = next(states)
        return web.json_response({"phase": "running"}, status=status)

    with fake_coordinator(handle) as url, transport_to(url) as transport:
        assert transport.status() == {"phase": "running"}


def test_update_whose_answer_was_lost_is_sent_again_and_counts_once() -> None:
    with line_of("memory") as line:
        (memory, _), _ = begin(line, [0, 0])
        lost: list[int] = []

        async def handle(request: web.Request) -> web.StreamResponse:
            """Do what the coordinator does and lose the first answer."""
            await request.read()
            receipt = memory.submit("block0", submission(0, moved(make_masters(1)["block0"], 1)))
            if not lost and request.transport is not None:
                lost.append(1)
                request.transport.abort()
            fields = {"verdict": receipt.verdict, "version": receipt.version, "reason": receipt.reason}
            return web.json_response(fields)

        with fake_coordinator(handle) as url, transport_to(url) as transport:
            transport._welcome = line.join(1)[1]  # what it would have been told
            receipt = transport.submit("block0", submission(0, make_masters(1)["block0"]))
        assert receipt.verdict is Verdict.DUPLICATE
        assert memory.status()["entries"]["block0"]["verdicts"] == {"accepted": 1, "duplicate": 1}


# Connections


def test_unreachable_coordinator_is_named_after_the_time_to_reconnect() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with (
        transport_to(f"http://127.0.0.1:{port}", reconnect_timeout_s=0.2) as transport,
        pytest.raises(CoordinatorUnreachableError, match=f"http://127.0.0.1:{port} must answer") as caught,
    ):
        transport.join(WorkerFacts(0))
    assert TOKEN not in str(caught.value) + repr(transport)


def test_coordinator_that_comes_back_on_its_port_is_found_unaided() -> None:
    desk = Desk(RUN, TOKEN)
    with served(desk) as server:
        url, port = server.url, int(server.url.rpartition(":")[2])
    transport = transport_to(url, reconnect_timeout_s=30.0)
    answers: list[object] = []
    asking = threading.Thread(target=lambda: answers.append(transport.status()["phase"]))
    asking.start()
    with served(Desk(RUN, TOKEN), port=port):
        asking.join(30.0)
    transport.close()
    assert answers == ["empty"]


def test_close_while_a_request_waits_ends_it() -> None:
    with line_of("http") as line:
        ((worker, _),) = begin(line, [0])
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                worker.fetch("block0", 0, 60.0)
            except TransportError as exc:
                errors.append(exc)

        waiting = threading.Thread(target=wait)
        waiting.start()
        worker.close()
        waiting.join(30.0)
    assert len(errors) == 1


def test_signs_of_life_keep_a_worker_and_their_end_lets_the_round_close() -> None:
    desk, terms = Desk(RUN, TOKEN), make_terms(1, num_workers=2, silent_after_s=0.4)
    with served(desk) as server, transport_to(server.url) as lives, transport_to(server.url) as dies:
        lives.found(terms, make_masters(1, interface=False))
        lives.join(WorkerFacts(0))
        dies.join(WorkerFacts(1))
        lives.submit("block0", submission(0, moved(make_masters(1)["block0"], 1)))
        assert lives.fetch("block0", 0, 1.0) is None  # more than two silences: both are heard of
        dies.close()
        found = lives.fetch("block0", 0, 30.0)
        assert found is not None and found.version == 1
        assert lives.status()["workers"]["1"]["is_silent"] is True


# Addresses and secrets


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://a", "http://", "http://a/b", "http://a?b=1", "http://u:p@a:1"])
def test_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url must"):
        HttpTransport(url, RUN, TOKEN)


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "\u00e9"])
def test_token_that_no_header_can_hold_is_refused_without_being_shown(token: str) -> None:
    with pytest.raises(ValueError, match="token must be printable ASCII") as caught:
        HttpTransport("http://127.0.0.1:1", RUN, token)
    assert not token or token not in str(caught.value)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_time_limits_must_be_finite(seconds: float) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        HttpTransport("http://127.0.0.1:1", RUN, TOKEN, reconnect_timeout_s=seconds)
    with pytest.raises(ValueError, match="must be finite"):
        HttpTransport("http://127.0.0.1:1", RUN, TOKEN, stall_timeout_s=seconds)


def test_scenario_40_plain_http_to_another_machine_warns() -> None:
    with pytest.warns(UserWarning, match="is plain HTTP: token and weights travel readable"):
        HttpTransport("http://192.0.2.1:8000", RUN, TOKEN).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for host in ("localhost", "127.0.0.1", "127.9.9.9", "[::1]"):
            HttpTransport(f"http://{host}:1", RUN, TOKEN).close()
        HttpTransport("https://192.0.2.1:8000", RUN, TOKEN).close()


def make_certificate(folder: Path, name: str) -> Path:
    """Return a PEM file with a certificate for 127.0.0.1, signed by itself, and its key."""
    path = folder / f"{name}.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = folder / f"{name}.key"
    subprocess.run([*command, "-keyout", str(key), "-out", str(path)], check=True, capture_output=True, timeout=60)
    path.write_text(path.read_text() + key.read_text())
    return path


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the certificates are made with openssl")
def test_scenario_40_tls_with_a_private_authority_works_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    right, wrong = (make_certificate(tmp_path, name) for name in ("right", "wrong"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(right)
    with served(Desk(RUN, TOKEN), Clock(), tls=context) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with HttpTransport(server.url, RUN, TOKEN, cafile=right) as transport:
            transport.found(make_terms(), make_masters())
            found = transport.fetch("block0")
            assert found is not None and found.version == 0
        for cafile in (wrong, None):
            with (
                HttpTransport(server.url, RUN, TOKEN, cafile=cafile) as stranger,
                pytest.raises(CoordinatorUnreachableError, match="failed 1 times"),
            ):
                stranger.status()


def test_scenario_38_no_log_record_holds_the_token(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with line_of("http") as line:
        (worker, _), _ = begin(line, [0, 0])
        worker.submit("block0", submission(0, moved(make_masters(1)["block0"], 1)))
        stranger: Transport = line.open(token="wrong-guess")
        with pytest.raises(TransportError):
            stranger.status()
    assert "joins for block 0" in caplog.text
    assert TOKEN not in caplog.text and "wrong-guess" not in caplog.text
