"""What the server answers to requests that no transport of ours would send, and how it starts and stops."""

import asyncio
import gzip
import http.client
import json
import logging
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.coordinator.guard import MAX_ADDRESSES, FailedTokens
from lightning_blocktrain.coordinator.serve import ServeSettings, serving
from lightning_blocktrain.coordinator.server import CoordinatorServer, ServerLimits
from lightning_blocktrain.coordinator.storage import Storage
from lightning_blocktrain.errors import PortInUseError, RunEndedError, StateError
from lightning_blocktrain.rounds import RoundRules, Verdict
from lightning_blocktrain.transport.base import Sender, Transport, WorkerFacts
from lightning_blocktrain.transport.http import HttpTransport
from lightning_blocktrain.transport.loop import LoopThread
from lightning_blocktrain.transport.messages import pack_submission
from lightning_blocktrain.transport.wire import PREFIX, Outgoing
from tests.transport.lines import RUN, TOKEN, Clock, make_masters, make_terms, moved, same, served, submission

AUTH = {"Authorization": f"Bearer {TOKEN}", "BlockTrain-Run": RUN}


class Client:
    """Sends requests of any form to one server."""

    def __init__(self, server: CoordinatorServer) -> None:
        self.server = server
        self.port = int(server.url.rpartition(":")[2])

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, AUTH if headers is None else headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def refused(self, *request: Any) -> tuple[int, str, str]:
        """Return status, code and message of a request that is refused in the one form there is."""
        status, body = self.ask(*request)
        answer = json.loads(body)
        assert answer.keys() == {"error"} and answer["error"].keys() == {"code", "message"}
        return status, answer["error"]["code"], answer["error"]["message"]


@contextmanager
def client_of(desk: Desk, **options: Any) -> Iterator[Client]:
    with served(desk, Clock(), **options) as server:
        yield Client(server)


def founded_desk(storage: Storage | None = None, num_workers: int = 2, now: float = 0.0, **terms: Any) -> Desk:
    desk = Desk(RUN, TOKEN, storage)
    desk.found(make_terms(1, num_workers=num_workers, **terms), make_masters(1, interface=False), now)
    return desk


@pytest.fixture
def client() -> Iterator[Client]:
    desk = founded_desk()
    for worker_id in range(2):
        desk.service.join(WorkerFacts(worker_id), None, 0.0)
    with client_of(desk) as opened:
        yield opened


def message_of(worker_id: int = 0, seed: int = 0, incarnation: int = 0, base: int = 0) -> bytes:
    update = submission(base, moved(make_masters(1)["block0"], seed))
    return b"".join(bytes(piece) for piece in pack_submission(Sender(worker_id, incarnation), update).pieces())


# Admission


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": TOKEN},
        {"Authorization": "Bearer "},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer \u00e9\u00ff"},
    ],
)
@pytest.mark.parametrize("path", ["/status", "/metrics", "/v1/entries/block0", "/nowhere"])
def test_scenario_38_request_without_the_token_is_401_everywhere(
    client: Client, path: str, headers: dict[str, str]
) -> None:
    status, code, message = client.refused("GET", path, None, {"BlockTrain-Run": RUN, **headers})
    assert (status, code) == (401, "unauthorised")
    assert TOKEN not in message and "wrong" not in message


def test_run_id_is_asked_for_in_every_request_of_a_worker_and_checked_in_all() -> None:
    with client_of(founded_desk()) as client:
        token = {"Authorization": f"Bearer {TOKEN}"}
        other = {**token, "BlockTrain-Run": "run-2"}
        assert client.refused("GET", "/v1/entries/block0", None, token)[:2] == (409, "wrong_run")
        assert client.refused("GET", "/v1/entries/block0", None, other)[:2] == (409, "wrong_run")
        assert client.refused("GET", "/status", None, other)[:2] == (409, "wrong_run")
        assert client.ask("GET", "/status", None, token)[0] == 200


def test_too_many_wrong_tokens_of_an_address_have_to_wait() -> None:
    with client_of(founded_desk(), limits=ServerLimits(failed_tokens=3)) as client:
        wrong = {"Authorization": "Bearer wrong"}
        given = [client.ask("GET", "/status", None, wrong)[0] for _ in range(5)]
        assert given == [401, 401, 401, 429, 429]
        assert client.refused("GET", "/status")[:2] == (429, "busy")
        client.server.clock.now += 61.0  # type: ignore[attr-defined]
        assert client.ask("GET", "/status")[0] == 200


def test_failed_tokens_window_slides_and_its_memory_is_bounded() -> None:
    guard = FailedTokens(at_most=2, window_s=10.0)
    guard.note("a", 0.0)
    guard.note("a", 4.0)
    assert (guard.wait_s("a", 5.0), guard.wait_s("b", 5.0)) == (5.0, 0.0)
    assert guard.wait_s("a", 10.0) == 0.0
    guard.note("a", 10.0)
    assert guard.wait_s("a", 11.0) == 3.0
    for idx in range(MAX_ADDRESSES):
        guard.note(f"other-{idx}", 12.0)
    assert guard.wait_s("a", 12.0) == 0.0


# Requests that make no sense


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nowhere", None, 404),
        ("PUT", "/v1/join", b"{}", 405),
        ("POST", "/v1/join", b"{", 400),
        ("POST", "/v1/join", b"[]", 400),
        ("POST", "/v1/join", b"\xff", 400),
        ("POST", "/v1/join", b"[" * 50_000, 400),
        ("POST", "/v1/join", b"{}", 400),
        ("POST", "/v1/join", b'{"facts": {"nonce": 3}}', 400),
        ("POST", "/v1/join", b'{"facts": {"nonce": "n", "unknown": 1}}', 400),
        ("POST", "/v1/join", b'{"facts": {"nonce": "n", "identity": []}}', 400),
        ("POST", "/v1/join", b'{"facts": {"nonce": "n", "worker_id": [1]}}', 400),
        ("POST", "/v1/join", b'{"facts": {"nonce": "n"}, "incarnation": "1"}', 400),
        ("POST", "/v1/join", b" " * 70_000, 413),
        ("POST", "/v1/beat", b"{}", 409),
        ("POST", "/v1/beat", b'{"worker_id": {}, "incarnation": []}', 409),
        ("GET", "/v1/entries/block7", None, 400),
        ("GET", "/v1/entries/block0?newer_than=x", None, 400),
        ("GET", "/v1/entries/block0?newer_than=nan", None, 400),
        ("GET", "/v1/entries/block0?newer_than=1e300", None, 400),
        ("POST", "/v1/entries/block7", b"x", 400),
        ("POST", "/v1/entries/block0", b"", 400),
        ("POST", "/v1/entries/block0", b"x" * 100, 400),
        ("POST", "/v1/found", b"x" * 100, 400),
    ],
)
def test_scenario_39_request_that_makes_no_sense_gets_one_json_error(
    client: Client, method: str, path: str, body: bytes | None, status: int
) -> None:
    assert client.refused(method, path, body)[0] == status
    assert json.loads(client.ask("GET", "/status")[1])["entries"]["block0"]["version"] == 0


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(pickle.dumps({"w": torch.zeros(2)}), id="pickle"),
        pytest.param(gzip.compress(bytes(10**6)), id="zip bomb"),
        pytest.param(PREFIX.pack(b"BTF1", 8, 2**40), id="1 TB"),
        pytest.param(message_of()[:-1], id="cut"),
        pytest.param(message_of() + b"x", id="too long"),
        pytest.param(message_of().replace(b"layer.w", b"../../w"), id="path"),
    ],
)
def test_scenario_39_hostile_body_is_400_and_changes_nothing(client: Client, body: bytes) -> None:
    assert client.refused("POST", "/v1/entries/block0", body)[:2] == (400, "malformed")
    assert json.loads(client.ask("GET", "/status")[1])["entries"]["block0"]["verdicts"] == {}


def test_scenario_39_compressed_body_is_refused_and_not_unpacked(client: Client) -> None:
    body = gzip.compress(message_of())
    answer = client.refused("POST", "/v1/entries/block0", body, {**AUTH, "Content-Encoding": "gzip"})
    assert answer == (400, "malformed", "A body must not be compressed.")


def test_body_without_a_length_is_refused(client: Client) -> None:
    with socket.create_connection(("127.0.0.1", client.port), timeout=30) as raw:
        lines = [f"{name}: {value}" for name, value in {**AUTH, "Transfer-Encoding": "chunked"}.items()]
        raw.sendall("\r\n".join(["POST /v1/entries/block0 HTTP/1.1", "Host: a", *lines, "", "0", "", ""]).encode())
        assert raw.recv(4096).startswith(b"HTTP/1.1 400")


def test_body_that_is_too_long_is_413_before_it_is_sent(client: Client) -> None:
    with socket.create_connection(("127.0.0.1", client.port), timeout=30) as raw:
        lines = [f"{name}: {value}" for name, value in {**AUTH, "Content-Length": str(2**40)}.items()]
        raw.sendall("\r\n".join(["POST /v1/entries/block0 HTTP/1.1", "Host: a", *lines, "", ""]).encode())
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")


@pytest.fixture(scope="module")
def long_lived() -> Iterator[Client]:
    with client_of(founded_desk()) as opened:
        yield opened


@settings(max_examples=60)
@given(
    st.sampled_from(["/v1/entries/block0", "/v1/found", "/v1/join", "/v1/beat", "/v1/leave"]),
    st.binary(max_size=300) | st.binary(max_size=100).map(lambda tail: message_of()[:60] + tail),
)
def test_scenario_39_any_body_gets_an_answer_in_the_one_form(long_lived: Client, path: str, body: bytes) -> None:
    status, answer = long_lived.ask("POST", path, body)
    assert status == 200 or (400 <= status < 500 and json.loads(answer)["error"]["message"])


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.sampled_from(["worker_id", "incarnation", "base_version", "num_steps", "num_tokens", "meta", "x"]),
        st.none() | st.integers(-(2**70), 2**70) | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    )
)
def test_update_with_any_header_gets_a_verdict_or_the_one_error(long_lived: Client, header: dict[str, Any]) -> None:
    body = b"".join(bytes(piece) for piece in Outgoing(header, make_masters(1)["block0"]).pieces())
    status, answer = long_lived.ask("POST", "/v1/entries/block0", body)
    assert status in (200, 400)
    assert json.loads(answer).keys() in ({"verdict", "version", "reason"}, {"error"})


# Cut and slow transfers


def send_half(port: int, message: bytes) -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", port), timeout=30)
    lines = [f"{name}: {value}" for name, value in {**AUTH, "Content-Length": str(len(message))}.items()]
    raw.sendall("\r\n".join(["POST /v1/entries/block0 HTTP/1.1", "Host: a", *lines, "", ""]).encode())
    raw.sendall(message[: len(message) // 2])
    return raw


def test_scenario_02_worker_killed_in_mid_upload_leaves_nothing_behind(tmp_path: Path) -> None:
    desk = founded_desk(num_workers=2)
    for worker_id in range(2):
        desk.service.join(WorkerFacts(worker_id), None, 0.0)
    with client_of(desk, spool_dir=tmp_path) as client:
        raw = send_half(client.port, message_of(1, seed=9))
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        raw.close()  # with a reset, as the kernel does for a killed process
        status, body = client.ask("POST", "/v1/entries/block0", message_of(0, seed=1))
        assert (status, json.loads(body)["verdict"]) == (200, "accepted")
        client.ask("POST", "/v1/leave", b'{"worker_id": 1, "incarnation": 0}')
        seen = json.loads(client.ask("GET", "/status")[1])["entries"]["block0"]
        assert (seen["version"], seen["last_round"]["accepted"], seen["last_round"]["missing"]) == (1, [0], [1])
    assert same(desk.service.ledger_of("block0").master, moved(make_masters(1)["block0"], 1))
    assert list(tmp_path.iterdir()) == []


def test_upload_without_progress_is_given_up() -> None:
    with (
        client_of(founded_desk(), limits=ServerLimits(stall_timeout_s=0.1)) as client,
        send_half(client.port, message_of()) as raw,
    ):
        assert raw.recv(4096).startswith(b"HTTP/1.1 408")


def test_upload_of_one_worker_does_not_stop_the_others(client: Client) -> None:
    with send_half(client.port, message_of(1)):
        assert json.loads(client.ask("POST", "/v1/entries/block0", message_of(0))[1])["verdict"] == "accepted"


# Watching


def test_status_and_metrics_show_traffic_and_rounds(client: Client) -> None:
    body = message_of()
    client.ask("POST", "/v1/entries/block0", body)
    client.ask("GET", "/v1/entries/block0")
    status = json.loads(client.ask("GET", "/status")[1])
    assert (status["run_id"], status["phase"], status["entries"]["block0"]["waits_for"]) == (RUN, "running", [1])
    assert status["traffic"]["received_bytes"] == len(body)
    metrics = client.ask("GET", "/metrics")[1].decode()
    assert f"blocktrain_received_bytes_total {float(len(body))}\n" in metrics
    assert re.search(r"^blocktrain_sent_bytes_total [1-9]", metrics, re.MULTILINE)
    assert all(re.fullmatch(r"# TYPE \w+ \w+|\w+(\{[^}]*\})? \S+", line) for line in metrics.splitlines())


def test_frozen_prefixes_are_counted_apart(client: Client) -> None:
    plain, encoded = (client.ask("GET", f"/v1/entries/block0{query}")[1] for query in ("", "?codec=bf16"))
    traffic = json.loads(client.ask("GET", "/status")[1])["traffic"]
    assert traffic["prefix_bytes"] == len(encoded)
    assert traffic["sent_bytes"] == len(plain) + len(encoded)
    metrics = client.ask("GET", "/metrics")[1].decode()
    assert f"blocktrain_prefix_bytes_total {float(len(encoded))}\n" in metrics


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("codec=zip", "name must be a known codec; got name='zip'"),
        ("codec=topk&top_frac=0.05", "codec must be a codec for whole values; got codec='topk'"),
        ("codec=int8", "codec and its own options must be given as text"),
        ("codec=int8&block=1", "block must be an int from 16"),
        ("codec=bf16&block=256", "codec and its own options must be given as text"),
        ("block=256", "name must be a known codec; got name=None"),
    ],
)
def test_fetch_in_a_codec_that_makes_no_sense_is_refused_by_name(client: Client, query: str, message: str) -> None:
    status, body = client.ask("GET", f"/v1/entries/block0?{query}")[:2]
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (400, "refused") and message in error["message"]


def test_metrics_of_a_coordinator_without_masters_are_few() -> None:
    with client_of(Desk(RUN, TOKEN)) as client:
        assert 'phase="empty"} 1.0' in client.ask("GET", "/metrics")[1].decode()


# Deadlines on the real clock


def test_deadline_closes_the_round_though_no_request_comes() -> None:
    now = time.monotonic()
    desk = founded_desk(now=now, rules=RoundRules(0.2))
    for worker_id in range(2):
        desk.service.join(WorkerFacts(worker_id), None, now)
    with served(desk) as server, HttpTransport(server.url, RUN, TOKEN) as transport:
        found = transport.fetch("block0", 0, 30.0)
        assert found is not None and found.version >= 1


# Start and stop


def test_scenario_36_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(PortInUseError, match=f"got host=127.0.0.1, port={port}"),
            served(Desk(RUN, TOKEN), port=port),
        ):
            pass


def test_stop_ends_the_waits_of_workers_and_gives_the_port_and_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = founded_desk(Storage(tmp_path))
    asked, answers = threading.Event(), []
    fetch = desk.service.fetch
    monkeypatch.setattr(desk.service, "fetch", lambda *args: (fetch(*args), asked.set())[0])
    with client_of(desk) as client:
        path = "/v1/entries/block0?newer_than=0&wait_s=30"
        waiting = threading.Thread(target=lambda: answers.append(client.ask("GET", path)[0]))
        waiting.start()
        assert asked.wait(30.0)
        with pytest.raises(StateError):
            Storage(tmp_path)
    waiting.join(30.0)
    assert answers == [204]
    Storage(tmp_path).close()
    with socket.create_server(("127.0.0.1", client.port)):
        pass


def test_serving_resumes_what_is_stored_and_founds_what_is_not(tmp_path: Path) -> None:
    settings_ = ServeSettings(RUN, TOKEN, state_dir=tmp_path)
    thread = LoopThread("test-serving")
    founding = (make_terms(1, num_workers=1), make_masters(1, interface=False))

    async def visit(with_founding: bool) -> dict[str, int]:
        async with serving(settings_, founding if with_founding else None) as server:
            with HttpTransport(server.url, RUN, TOKEN) as transport:

                def work() -> dict[str, int]:
                    transport.join(WorkerFacts(0))
                    have = transport.fetch("block0")
                    assert have is not None
                    receipt = transport.submit("block0", submission(have.version, moved(have.params, 1)))
                    assert receipt.verdict is Verdict.ACCEPTED
                    return {name: kept["version"] for name, kept in transport.status()["entries"].items()}

                return await asyncio.to_thread(work)

    async def nothing() -> None:
        pass

    try:
        assert thread.run(lambda: visit(True)) == {"block0": 1}
        assert thread.run(lambda: visit(False)) == {"block0": 2}
    finally:
        thread.close(nothing)


def test_serving_that_is_refused_gives_the_state_folder_back(tmp_path: Path) -> None:
    async def visit() -> None:
        async with serving(ServeSettings("", TOKEN, state_dir=tmp_path)):
            pass

    with pytest.raises(ValueError, match="run_id") as refusal:
        asyncio.run(visit())
    Storage(tmp_path).close()
    assert refusal.tb is not None  # kept until here: its frames would hold on to the folder


def test_serve_settings_hide_the_token_and_want_a_certificate_with_a_key() -> None:
    assert TOKEN not in repr(ServeSettings(RUN, TOKEN))
    with pytest.raises(ValueError, match="keyfile needs a certfile"):
        ServeSettings(RUN, TOKEN, keyfile=Path("key.pem"))


# Whole processes

SERVE = f"""
import sys
from pathlib import Path
from lightning_blocktrain.coordinator.serve import ServeSettings, serve
settings = ServeSettings("{RUN}", "{TOKEN}", port=int(sys.argv[1]), state_dir=Path(sys.argv[2]), linger_s=5.0)
sys.exit(serve(settings, on_listening=lambda url: print(url, flush=True)))
"""


@contextmanager
def coordinator_process(port: int, state_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", SERVE, str(port), str(state_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def work_rounds(transports: list[Transport], num_rounds: range, between: Any = lambda idx: None) -> None:
    """Let the workers of one block do rounds together, in lockstep."""
    for round_idx in num_rounds:
        for worker_id, transport in enumerate(transports):
            have = transport.fetch("block0", round_idx - 1, 60.0)
            assert have is not None and have.version == round_idx
            between(10 * round_idx + worker_id)
            receipt = transport.submit("block0", submission(round_idx, moved(have.params, 10 * round_idx + worker_id)))
            assert receipt.verdict in (Verdict.ACCEPTED, Verdict.DUPLICATE)


def masters_after_four_rounds(state_dir: Path, kill_at: int | None) -> dict[str, torch.Tensor]:
    """Train with two workers; ``kill_at`` is the moment (10 * round + worker) the coordinator is killed before."""
    with ExitStack() as stack:
        process, url = stack.enter_context(coordinator_process(0, state_dir))
        workers: list[Transport] = [
            stack.enter_context(HttpTransport(url, RUN, TOKEN, reconnect_timeout_s=60.0)) for _ in range(2)
        ]
        workers[0].found(make_terms(1, num_workers=2, max_rounds=4), make_masters(1, interface=False))
        for worker_id, transport in enumerate(workers):
            transport.join(WorkerFacts(worker_id))

        def kill(idx: int) -> None:
            if idx == kill_at:
                process.kill()
                process.wait(30.0)
                stack.enter_context(coordinator_process(int(url.rpartition(":")[2]), state_dir))

        work_rounds(workers, range(4), kill)
        last = workers[0].fetch("block0", 3)
        assert last is not None
        with pytest.raises(RunEndedError):
            workers[1].fetch("block0", 4, 5.0)
        return last.params


@pytest.mark.slow
def test_scenario_07_coordinator_killed_with_sigkill_comes_back_and_nothing_differs(tmp_path: Path) -> None:
    undisturbed = masters_after_four_rounds(tmp_path / "whole", None)
    # Killed when worker 0 has been accepted in round 2 and worker 1 has not sent yet.
    assert same(masters_after_four_rounds(tmp_path / "killed", 21), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_scenario_11_coordinator_ends_at_a_signal_with_its_port_free_and_its_state_whole(
    tmp_path: Path, number: int
) -> None:
    with coordinator_process(0, tmp_path) as (process, url), HttpTransport(url, RUN, TOKEN) as transport:
        transport.found(make_terms(1, num_workers=1), make_masters(1, interface=False))
        transport.join(WorkerFacts(0))
        work_rounds([transport], range(2))
        process.send_signal(number)
        assert process.wait(5.0) == 0
    with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
        pass
    desk = Desk(RUN, TOKEN, Storage(tmp_path))
    assert desk.resume(0.0)
    assert desk.service.versions == {"block0": 2}
    desk.close()


@pytest.mark.slow
def test_scenario_10_coordinator_without_its_workers_exits_with_an_error(tmp_path: Path) -> None:
    with coordinator_process(0, tmp_path) as (process, url), HttpTransport(url, RUN, TOKEN) as transport:
        transport.found(make_terms(1, num_workers=2, join_timeout_s=0.2), make_masters(1, interface=False))
        transport.join(WorkerFacts(1))
        transport.leave()
        assert process.wait(30.0) == 1


def peak_rss_bytes(pid: int) -> int:
    matched = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert matched is not None
    return 1024 * int(matched[1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_scenario_37_memory_of_a_coordinator_grows_by_a_constant_with_what_is_under_way(tmp_path: Path) -> None:
    num_bytes, allowed = 256 * 2**20, 48 * 2**20
    with coordinator_process(0, tmp_path) as (process, url), HttpTransport(url, RUN, TOKEN) as transport:
        big = {"w": torch.zeros(num_bytes // 4)}
        transport.found(make_terms(1, num_workers=1), {"block0": big})
        transport.join(WorkerFacts(0))
        for ask in (
            lambda: transport.submit("block0", submission(7, big)).verdict,  # refused for its base
            lambda: transport.fetch("block0"),
        ):
            before = psutil.Process(process.pid).memory_info().rss
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak begins anew
            ask()
            assert peak_rss_bytes(process.pid) - before < allowed
    assert list((tmp_path / "updates").iterdir()) == []


def test_log_of_a_cut_upload_is_no_traceback(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    send_half(client.port, message_of()).close()
    while "was cut" not in caplog.text:
        client.ask("GET", "/status")
    assert "Traceback" not in caplog.text
