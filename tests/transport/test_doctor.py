"""The doctor: what it finds where all is well, and where one thing is wrong."""

import asyncio
import http.server
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import lightning_blocktrain.coordinator.probe
import lightning_blocktrain.coordinator.server
from lightning_blocktrain.cli import main
from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.coordinator.probe import MAX_PROBE_BYTES
from lightning_blocktrain.coordinator.server import CoordinatorServer, ServerLimits
from lightning_blocktrain.transport import doctor
from lightning_blocktrain.transport.doctor import Finding, Target, run_checks
from lightning_blocktrain.transport.versions import PROTOCOL
from tests.coordinator.test_server import AUTH, client_of, founded_desk
from tests.transport.lines import RUN, TOKEN, Clock, served
from tests.transport.test_http import make_certificate

NAMES = [
    "name",
    "connection",
    "tls",
    "coordinator",
    "run",
    "version",
    "clock",
    "round trip",
    "throughput",
    "address",
]


def findings(url: str, **changes: Any) -> dict[str, Finding]:
    """Return what the doctor finds, by name; its verdict must agree."""
    found: list[Finding] = []
    healthy = run_checks(Target(**{"url": url, "token": TOKEN, "run_id": RUN, **changes}), found.append)
    assert healthy == all(finding.level != "fail" for finding in found)
    assert not any(TOKEN in finding.text for finding in found)
    return {finding.name: finding for finding in found}


def levels(found: dict[str, Finding]) -> dict[str, str]:
    return {name: finding.level for name, finding in found.items() if finding.level != "ok"}


@pytest.fixture
def server() -> Iterator[CoordinatorServer]:
    with served(founded_desk(), Clock()) as opened:
        yield opened


def test_everything_is_looked_at_where_all_is_well(server: CoordinatorServer) -> None:
    found = findings(server.url)
    assert list(found) == NAMES and levels(found) == {}
    assert "a round moves 0.0 MiB in fp32" in found["throughput"].text
    assert "sees this machine as 127.0.0.1" in found["address"].text
    assert server.traffic["received_bytes"] == server.traffic["sent_bytes"] == 0  # probes are no part of the run


def test_command_prints_a_line_for_each_and_returns_whether_any_failed(
    server: CoordinatorServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLOCKTRAIN_TOKEN", TOKEN)
    monkeypatch.setenv("BLOCKTRAIN_RUN_ID", RUN)
    assert main(["doctor", server.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[5:18].strip() for line in lines] == NAMES and all(line.startswith("ok ") for line in lines)
    monkeypatch.setenv("BLOCKTRAIN_RUN_ID", "another")
    assert main(["doctor", server.url]) == 1
    assert f"fail run          this is run {RUN}, a worker here would ask for another" in capsys.readouterr().out


def test_command_checks_every_coordinator_of_a_run_as_workers_are_told_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLOCKTRAIN_TOKEN", TOKEN)
    monkeypatch.setenv("BLOCKTRAIN_RUN_ID", RUN)
    with served(founded_desk(), Clock()) as first, served(founded_desk(), Clock()) as second:
        urls = [first.url, second.url]
        monkeypatch.setenv("BLOCKTRAIN_COORDINATOR", ", ".join(urls))
        assert main(["doctor"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line if line in urls else line[5:18].strip() for line in lines] == [urls[0], *NAMES, urls[1], *NAMES]
        second.desk.service.stop("no luck", failed=True)
        for order in (urls, urls[::-1]):
            assert main(["doctor", ",".join(order)]) == 1  # though the other is well
        assert capsys.readouterr().out.count("failed: no luck") == 2
        assert main(["doctor", f"{urls[0]},a:1"]) == 2
        assert "url must be http://host:port" in capsys.readouterr().err


def test_wrong_and_missing_token_fail_and_end_the_checks(server: CoordinatorServer) -> None:
    for token, text in (("wrong", "does not take this token"), ("", "export BLOCKTRAIN_TOKEN")):
        found = findings(server.url, token=token)
        assert list(found)[-1] == "coordinator" and levels(found) == {"coordinator": "fail"}
        assert text in found["coordinator"].text


def test_address_that_guessed_too_often_is_told_to_wait() -> None:
    with served(founded_desk(), Clock(), limits=ServerLimits(failed_tokens=1)) as server:
        findings(server.url, token="wrong")
        assert "try again in 61 s" in findings(server.url)["coordinator"].text


def test_other_run_fails_and_names_both(server: CoordinatorServer) -> None:
    found = findings(server.url, run_id="mine")
    assert levels(found) == {"run": "fail"} and list(found)[-1] == "round trip"
    assert f"this is run {RUN}" in found["run"].text and "mine" in found["run"].text


def test_run_that_was_given_up_fails(server: CoordinatorServer) -> None:
    server.desk.service.stop("no luck", failed=True)
    assert "failed: no luck" in findings(server.url)["coordinator"].text


def test_port_where_nobody_listens_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = findings(f"http://127.0.0.1:{port}")
    assert levels(found) == {"connection": "fail"} and "refuses connections" in found["connection"].text


def test_name_that_is_not_known_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert levels(found := findings("http://no.such.host:1")) == {"name": "fail"}
    assert "no.such.host is no known name" in found["name"].text


def test_address_that_says_nothing_fails_in_bounded_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        found = findings(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=0.3)
    assert "no answer within 0.3 s" in found["coordinator"].text


@contextmanager
def other_web_server(status: int, body: bytes) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{other.server_port}"
        other.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body"), [(200, b"<html>"), (404, b"{}"), (200, b'["run_id"]'), (500, b'{"error": "x"}'), (200, b"{}")]
)
def test_something_else_that_answers_is_no_coordinator(status: int, body: bytes) -> None:
    with other_web_server(status, body) as url:
        found = findings(url)
    assert levels(found) == {"coordinator": "fail"} and "no BlockTrain coordinator" in found["coordinator"].text


@pytest.mark.parametrize(
    ("protocol", "package", "level"), [(1, "0.1.0", "fail"), (None, "0.1.0", "fail"), (PROTOCOL, "99", "warn")]
)
def test_other_versions_are_seen(
    protocol: int | None, package: str, level: str, server: CoordinatorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightning_blocktrain.coordinator.server, "PROTOCOL", protocol)
    monkeypatch.setattr(lightning_blocktrain.coordinator.server, "package_version", lambda: package)
    assert levels(found := findings(server.url)) == {"version": level}
    assert f"protocol {PROTOCOL} here, {protocol} there" in found["version"].text


def test_clock_that_differs_is_a_warning_with_its_side(server: CoordinatorServer) -> None:
    status = {"unix_time_s": 1000.0}
    assert doctor._clock(status, 1000.4).level == "ok"
    for asked_at, side in ((900.0, "100.0 s ahead of"), (1100.0, "100.0 s behind")):
        finding = doctor._clock(status, asked_at)
        assert finding.level == "warn" and side in finding.text


def test_line_too_slow_for_the_deadline_is_a_warning() -> None:
    entries = {"block0": {"num_bytes": 2**20}, "block1": {"num_bytes": 3 * 2**20}, "interface": {"num_bytes": 2**20}}
    status = {"entries": entries, "terms": {"rules": {"deadline_s": 60.0}}}
    slow = doctor._judge_throughput((2**17, 2**20), status)
    assert slow.level == "warn" and "a round moves 8.0 MiB in fp32: 36.0 s of the 60" in slow.text
    assert doctor._judge_throughput((2**20, 2**20), status).level == "ok"


def test_proxy_and_address_translation_are_told_apart(
    server: CoordinatorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_connect", lambda target: asyncio.sleep(0, ("connected", "10.9.8.7")))
    assert "sees 127.0.0.1, not 10.9.8.7 (NAT)" in findings(server.url)["address"].text
    session = doctor._session
    monkeypatch.setattr(doctor, "_session", lambda target: _with_header(session(target)))
    assert levels(findings(server.url)) == {"address": "warn"}


def _with_header(session: Any) -> Any:
    session.headers["Via"] = "1.1 proxy"
    return session


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the certificates are made with openssl")
def test_scenario_40_certificate_is_checked(tmp_path: Path) -> None:
    right, wrong = (make_certificate(tmp_path, name) for name in ("right", "wrong"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(right)
    with served(founded_desk(), Clock(), tls=context) as server:
        found = findings(server.url, cafile=str(right))
        assert list(found) == NAMES and levels(found) == {"tls": "warn"}  # it is made for two days
        assert "valid for 2 more days" in found["tls"].text
        assert "the certificate is not accepted" in findings(server.url, cafile=str(wrong))["tls"].text
        assert levels(findings(server.url.replace("https", "http"))) == {"coordinator": "fail"}
    with served(founded_desk(), Clock()) as plain:
        assert "may speak plain http" in findings(plain.url.replace("http", "https"))["tls"].text


def test_plain_http_beyond_this_machine_is_a_warning() -> None:
    finding = asyncio.run(doctor._check_tls(Target("http://192.0.2.1:1", TOKEN, RUN)))
    assert finding.level == "warn" and "can be read and changed" in finding.text


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_time_limit_must_be_finite(seconds: float) -> None:
    with pytest.raises(ValueError, match="timeout_s must be finite"):
        Target("http://a:1", TOKEN, RUN, timeout_s=seconds)
    assert TOKEN not in repr(Target("http://a:1", TOKEN, RUN))


# The coordinator's side


def test_probe_takes_and_gives_bytes_within_its_limit() -> None:
    with client_of(founded_desk()) as client:
        status, body = client.ask("GET", "/v1/probe?bytes=100000")
        assert (status, len(body), len(set(body)) > 100) == (200, 100_000, True)
        assert client.ask("GET", "/v1/probe") == (200, b"")
        status, body = client.ask("POST", "/v1/probe", bytes(100_000))
        assert status == 200 and b'"received_bytes": 100000' in body and b'"address": "127.0.0.1"' in body
        for text in (str(MAX_PROBE_BYTES + 1), "9" * 400, "-1", "x", "1e3", ""):
            assert client.refused("GET", f"/v1/probe?bytes={text}")[:2] == (400, "refused")
        long = {**AUTH, "Content-Length": str(MAX_PROBE_BYTES + 1)}
        assert client.refused("POST", "/v1/probe", None, long)[:2] == (413, "too_large")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_scenario_38_probe_needs_token_and_run_id(method: str) -> None:
    with client_of(Desk(RUN, TOKEN)) as client:
        assert client.refused(method, "/v1/probe", None, {"BlockTrain-Run": RUN})[0] == 401
        assert client.refused(method, "/v1/probe", None, {"Authorization": f"Bearer {TOKEN}"})[1] == "wrong_run"


def test_probe_without_progress_is_given_up() -> None:
    with (
        client_of(founded_desk(), limits=ServerLimits(stall_timeout_s=0.1)) as client,
        socket.create_connection(("127.0.0.1", client.port), timeout=30) as raw,
    ):
        lines = [f"{name}: {value}" for name, value in {**AUTH, "Content-Length": "1000"}.items()]
        raw.sendall("\r\n".join(["POST /v1/probe HTTP/1.1", "Host: a", *lines, "", "half"]).encode())
        assert raw.recv(4096).startswith(b"HTTP/1.1 408")
