"""The commands around a run of several machines: what they ask, print and return."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import lightning_blocktrain.coordinator.serve
from lightning_blocktrain import cli_runs
from lightning_blocktrain.cli import main
from lightning_blocktrain.cli_runs import instructions, parse_listen, reachable, watch
from lightning_blocktrain.cli_status import MAX_WORKERS, status_view
from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.coordinator.serve import ServeSettings
from lightning_blocktrain.coordinator.server import CoordinatorServer
from lightning_blocktrain.coordinator.status import snapshot
from lightning_blocktrain.coordinator.storage import Storage
from lightning_blocktrain.errors import CheckpointMismatchError, TransportError
from lightning_blocktrain.rounds import Verdict
from lightning_blocktrain.transport.base import Sender, WorkerFacts
from lightning_blocktrain.transport.http import HttpTransport
from lightning_blocktrain.transport.versions import PROTOCOL
from tests.transport.lines import RUN, TOKEN, Clock, make_masters, make_terms, moved, served, submission

HOSTILE = "evil\x1b[2Jhost [red]markup[/red]"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for name in ("BLOCKTRAIN_COORDINATOR", "BLOCKTRAIN_RUN_ID", "BLOCKTRAIN_CAFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BLOCKTRAIN_TOKEN", TOKEN)


def make_desk(**terms: Any) -> Desk:
    """Return a desk of one block whose first round has closed with one of two workers, the other silent."""
    desk = Desk(RUN, TOKEN)
    desk.found(make_terms(1, num_workers=2, silent_after_s=5.0, **terms), make_masters(1, interface=False), 0.0)
    desk.service.join(WorkerFacts(0, host=HOSTILE), None, 0.0)
    desk.service.join(WorkerFacts(1, host="quiet"), None, 0.0, beats=True)
    update = submission(0, moved(make_masters(1)["block0"], 1))
    desk.service.submit("block0", Sender(0, 0), update, 1.0)
    desk.service.advance(6.0)  # worker 1 has given no sign of life
    desk.service.submit("block0", Sender(0, 0), update, 7.0)  # the same again
    return desk


@contextmanager
def serving(desk: Desk) -> Iterator[CoordinatorServer]:
    clock = Clock()
    clock.now = 10.0
    with served(desk, clock) as server:
        yield server


def one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("blocktrain: error: ")
    return lines[0]


# status


def shown(status: Mapping[str, Any]) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(status_view(status))
    return capture.get()


def test_status_view_shows_what_there_is_to_know_of_a_run() -> None:
    traffic = {"received_bytes": 3 * 2**20, "sent_bytes": 2**21, "prefix_bytes": 2**20, "wrong_tokens": 4}
    text = shown({**snapshot(make_desk().service, 10.0), "traffic": traffic})
    assert f"run {RUN} is running" in text
    assert "1 workers in, 1 silent, 1 of 2 (50%) rounds in time, 3.0 MiB received, 2.0 MiB sent" in text
    assert "2.0 MiB sent (1.0 MiB of prefixes), 4 wrong tokens" in text
    assert re.search(r"block0 +1 +996\.0 s +0 +1 +0 +1 +1 of 2, 6\.0 s", text)
    assert re.search(r"0 +block0 +in .*1 of 1 \(100%\)", text)
    assert re.search(r"1 +block0 +silent +quiet", text)


def test_status_view_of_a_hostile_host_name_is_plain_text() -> None:
    text = shown(snapshot(make_desk().service, 10.0))
    assert "\x1b" not in text
    assert "evil\N{REPLACEMENT CHARACTER}[2Jhost [red]markup[/red]" in text


def test_status_view_of_a_run_without_masters_and_of_very_many_workers() -> None:
    assert f"run {RUN} is without a model" in shown(Desk(RUN, TOKEN).status(0.0))
    status = snapshot(make_desk().service, 10.0)
    many = {str(idx): status["workers"]["0"] for idx in range(MAX_WORKERS + 7)}
    assert "and 7 more" in shown({**status, "workers": many})


def test_status_prints_the_run_once_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(make_desk()) as server:
        assert main(["status", server.url]) == 0
    text = capsys.readouterr().out
    assert text.count(f"run {RUN} is running") == 1 and "block0" in text


def test_status_json_is_what_the_coordinator_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(make_desk()) as server:
        monkeypatch.setenv("BLOCKTRAIN_COORDINATOR", server.url)
        assert main(["status", "--json"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    status = json.loads(line)
    assert (status["run_id"], status["entries"]["block0"]["version"], status["protocol"]) == (RUN, 1, PROTOCOL)


def test_status_of_several_coordinators_is_that_of_their_run(capsys: pytest.CaptureFixture[str]) -> None:
    desks = [Desk(RUN, TOKEN, serves=("block1",)), Desk(RUN, TOKEN, serves=("block0", "interface"))]
    for desk, entries in zip(desks, (["block1"], ["block0", "interface"]), strict=True):
        desk.found(make_terms(2), {entry: make_masters(2)[entry] for entry in entries}, 0.0)
    with serving(desks[0]) as first, serving(desks[1]) as second:
        assert main(["status", f"{first.url},{second.url}", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert list(status["entries"]) == ["block0", "block1", "interface"]
    assert status["coordinators"][first.url] == {"phase": "waiting", "reason": "", "serves": ["block1"]}


def test_status_of_a_failed_run_exits_with_1_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    desk = make_desk()
    desk.service.stop("no luck", failed=True)
    with serving(desk) as server:
        assert main(["status", server.url, "--watch", "1000"]) == 1  # a run that is over is watched no longer
    assert f"run {RUN} is failed: no luck" in capsys.readouterr().out


def test_status_with_a_wrong_token_is_one_line_without_it_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLOCKTRAIN_TOKEN", "wrong-guess")
    with serving(make_desk()) as server:
        assert main(["status", server.url]) == 2
        assert server.traffic["wrong_tokens"] == 1
    line = one_error_line(capsys)
    assert "BLOCKTRAIN_TOKEN must be the run's" in line and "wrong-guess" not in line


def test_status_of_a_silent_address_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # accepts and says nothing
        port = listening.getsockname()[1]
        assert main(["status", f"http://127.0.0.1:{port}", "--timeout-s", "0.2"]) == 2
    assert f"http://127.0.0.1:{port} must answer" in one_error_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status"], "URL must name a coordinator"),
        (["status", "localhost:29410"], "url must be http://host:port"),
        (["status", "http://a:99999"], "url must be http://host:port"),
        (["status", "http://[::1"], "url must be http://host:port"),
        (["status", "https://a:1", "--cafile", "missing.pem"], "the file of the authority must exist"),
        (["status", "https://a:1", "--cafile", __file__], "cafile must be a PEM file"),
        (["doctor", "http://a:1/path"], "url must be http://host:port"),
        (["doctor"], "URL must name a coordinator"),
    ],
)
def test_wrong_target_is_one_line_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in one_error_line(capsys)


def test_status_without_a_token_says_where_it_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BLOCKTRAIN_TOKEN")
    assert main(["status", "http://127.0.0.1:1"]) == 2
    assert "environment variable BLOCKTRAIN_TOKEN" in one_error_line(capsys)


def test_status_in_a_terminal_is_kept_up_to_date_in_place() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=160)
    desk = make_desk()
    with cli_runs._shown(console, as_json=False) as show:
        show(snapshot(desk.service, 10.0))
        desk.service.stop("enough")
        show(snapshot(desk.service, 11.0))
    text = written.getvalue()
    assert "running" in text and "enough" in text
    assert "\x1b[1A" in text.partition("enough")[0]  # the cursor went up: the second is written over the first


@pytest.mark.parametrize(("last", "code"), [("finished", 0), ("stopped", 0), ("failed", 1)])
def test_watch_asks_again_until_the_run_is_over(last: str, code: int) -> None:
    answers = [{"run_id": RUN, "phase": phase} for phase in ("waiting", "running", last, "unasked")]
    seen: list[Mapping[str, Any]] = []
    pauses: list[float] = []
    assert watch(iter(answers).__next__, seen.append, 3.0, pauses.append) == code
    assert [status["phase"] for status in seen] == ["waiting", "running", last]
    assert pauses == [3.0, 3.0]


def test_watch_of_something_else_than_a_coordinator_is_refused() -> None:
    with pytest.raises(TransportError, match="no BlockTrain coordinator"):
        watch(lambda: {"hello": 1}, lambda _: pytest.fail("was shown"), None)


# coordinator


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        (":0", ("127.0.0.1", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("a.b:7", ("a.b", 7)),
    ],
)
def test_parse_listen_takes_names_and_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_listen(text) == address


@pytest.mark.parametrize("text", ["", "29410", "a", "a:", "a:x", "a:65536", "::1:5", "a:-1", "a:\u0661"])
def test_parse_listen_refuses_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="listen must be HOST:PORT"):
        parse_listen(text)


def test_reachable_names_this_machine_where_all_addresses_are_listened_on() -> None:
    assert reachable("http://127.0.0.1:5") == "http://127.0.0.1:5"
    name = socket.gethostname()
    assert reachable("https://0.0.0.0:5") == f"https://{name}:5" and reachable("http://[::]:5") == f"http://{name}:5"


def test_instructions_are_lines_that_a_shell_takes() -> None:
    lines = instructions("http://a:1", "run 'x'", "fresh", Path("run1"), goes_on=False)
    exports = "\n".join(line for line in lines if line.startswith("  export "))
    shell = subprocess.run(["sh", "-c", f"{exports}\nenv"], capture_output=True, text=True, check=True, env={})
    told = dict(line.split("=", 1) for line in shell.stdout.splitlines())
    assert told["BLOCKTRAIN_COORDINATOR"] == "http://a:1"
    assert (told["BLOCKTRAIN_TOKEN"], told["BLOCKTRAIN_RUN_ID"]) == ("fresh", "run 'x'")
    assert "  blocktrain status http://a:1" in lines and "  http://a:1/#token=fresh" in lines
    assert not any("RUN_ID" in line for line in instructions("http://a:1", "blocktrain", "fresh", Path("run1"), False))


def test_instructions_do_not_repeat_a_token_that_was_given_and_warn_of_a_fresh_one() -> None:
    given = "\n".join(instructions("http://a:1", "blocktrain", "", Path("run1"), goes_on=True))
    assert "#token" not in given and "The token is new" not in given and "goes on" in given
    assert "The token is new" in "\n".join(
        instructions("http://a:1", "blocktrain", "fresh", Path("run1"), goes_on=True)
    )


@pytest.fixture
def serve_calls(monkeypatch: pytest.MonkeyPatch) -> list[ServeSettings]:
    calls: list[ServeSettings] = []

    def serve(settings: ServeSettings, on_listening: Any) -> int:
        calls.append(settings)
        on_listening("http://127.0.0.1:5")
        return 1

    monkeypatch.setattr(lightning_blocktrain.coordinator.serve, "serve", serve)
    return calls


def test_coordinator_serves_as_it_was_asked_to(
    serve_calls: list[ServeSettings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--listen", "127.0.0.1:7", "--run-id", "mine", "--num-workers", "6", "--max-rounds", "9"]
    assert main(["coordinator", "--state", str(tmp_path / "s"), *options]) == 1
    [settings] = serve_calls
    assert (settings.host, settings.port, settings.state_dir) == ("127.0.0.1", 7, tmp_path / "s")
    assert (settings.run_id, settings.token) == ("mine", TOKEN)
    assert settings.fixed_terms == {"num_workers": 6, "max_rounds": 9}
    assert TOKEN not in capsys.readouterr().out


def test_coordinator_of_a_part_says_what_it_serves(
    serve_calls: list[ServeSettings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in (["--blocks", "2,0", "--interface"], ["--blocks", "", "--interface"], ["--blocks", "1"]):
        main(["coordinator", "--state", str(tmp_path), *options])
    assert [settings.serves for settings in serve_calls] == [
        ("block0", "block2", "interface"),
        ("interface",),
        ("block1",),
    ]
    assert "This one serves block0, block2, interface: name all coordinators" in capsys.readouterr().out


@pytest.mark.parametrize("blocks", ["0,0", "x", "1,", "-1"])
def test_coordinator_of_blocks_that_are_no_numbers_is_refused(
    blocks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["coordinator", "--state", str(tmp_path), "--blocks", blocks]) == 2
    assert "argument --blocks" in capsys.readouterr().err


def test_coordinator_without_a_token_makes_one_for_this_terminal_only(
    serve_calls: list[ServeSettings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("BLOCKTRAIN_TOKEN")
    for _ in range(2):
        main(["coordinator", "--state", str(tmp_path)])
    tokens = [settings.token for settings in serve_calls]
    assert tokens[0] != tokens[1] and len(tokens[0]) >= 32
    printed = capsys.readouterr()
    assert printed.out.count(f"export BLOCKTRAIN_TOKEN={tokens[0]}\n") == 1
    assert tokens[0] not in printed.err + caplog.text
    assert (serve_calls[0].host, serve_calls[0].port) == parse_listen(cli_runs.DEFAULT_LISTEN)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "29410"], "listen must be HOST:PORT"),
        (["--keyfile", "key.pem"], "keyfile needs a certfile"),
        (["--interface"], "so it needs blocks"),
        (["--blocks", ""], "must be for a block or the interface"),
        (["--certfile", "missing.pem"], "certfile and keyfile must be PEM files"),
        (["--run-id", "two words"], "--run-id must be printable ASCII"),
        (["--run-id", ""], "--run-id must be printable ASCII"),
    ],
)
def test_coordinator_refuses_wrong_options_before_anything_is_opened(
    options: list[str], message: str, serve_calls: list[ServeSettings], tmp_path: Path, capsys: Any
) -> None:
    folder = tmp_path / "state"
    assert main(["coordinator", "--state", str(folder), *options]) == 2
    assert message in one_error_line(capsys)
    assert serve_calls == [] and not folder.exists()


def test_coordinator_refuses_a_token_that_cannot_travel_without_showing_it(
    serve_calls: list[ServeSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("BLOCKTRAIN_TOKEN", "two words")
    assert main(["coordinator", "--state", str(tmp_path)]) == 2
    line = one_error_line(capsys)
    assert "BLOCKTRAIN_TOKEN must be printable ASCII" in line and "two words" not in line


def test_scenario_36_coordinator_command_names_a_port_that_is_in_use(tmp_path: Path, capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["coordinator", "--state", str(tmp_path), "--listen", f"127.0.0.1:{port}"]) == 2
    assert f"the address must be free; got host=127.0.0.1, port={port}" in one_error_line(capsys)


def test_coordinator_with_a_file_for_a_folder_is_one_line(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("x")
    assert main(["coordinator", "--state", str(tmp_path / "file"), "--listen", "127.0.0.1:0"]) == 2
    assert "listen and state must be" in one_error_line(capsys)


# Terms that the coordinator sets


def test_fixed_terms_hold_whatever_the_founder_says(tmp_path: Path) -> None:
    desk = Desk(RUN, TOKEN, Storage(tmp_path), fixed_terms={"num_workers": 1, "max_rounds": 2})
    desk.found(make_terms(1, num_workers=4, max_rounds=50), make_masters(1, interface=False), 0.0)
    assert (desk.service.terms.num_workers, desk.service.terms.max_rounds) == (1, 2)
    desk.service.join(WorkerFacts(0), None, 0.0)
    for base in range(2):
        update = submission(base, moved(make_masters(1)["block0"], base))
        assert desk.service.submit("block0", Sender(0, 0), update, 1.0).verdict is Verdict.ACCEPTED
    assert desk.service.phase == "finished"
    desk.close()
    same = Desk(RUN, TOKEN, Storage(tmp_path), fixed_terms={"max_rounds": 2})
    assert same.resume(0.0) and same.service.versions == {"block0": 2}
    same.close()
    other = Desk(RUN, TOKEN, Storage(tmp_path), fixed_terms={"max_rounds": 3})
    with pytest.raises(CheckpointMismatchError, match="max_rounds: here=3, there=2"):
        other.resume(0.0)
    other.close()


def test_fixed_terms_that_do_not_fit_the_model_are_the_founders_to_hear() -> None:
    desk = Desk(RUN, TOKEN, fixed_terms={"num_workers": 1})
    with pytest.raises(ValueError, match="num_workers must be at least num_blocks"):
        desk.found(make_terms(2), make_masters(2), 0.0)
    assert desk.status(0.0)["phase"] == "empty"


# Whole processes


@contextmanager
def coordinator(state: Path, *options: str, token: str | None = None) -> Iterator[tuple[Any, dict[str, str]]]:
    """Run the command; yield the process and what it told workers to export."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "BLOCKTRAIN_TOKEN": token or ""}
    command = [sys.executable, "-m", "lightning_blocktrain.cli", "coordinator", "--state", str(state), *options]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            told: dict[str, str] = {}
            for line in process.stdout:
                if matched := re.match(r"  export (\w+)=(.*)", line):
                    told[matched[1]] = matched[2]
                if line.startswith("  http"):
                    break
            yield process, told
        finally:
            process.kill()


@pytest.mark.slow
def test_coordinator_command_serves_a_run_to_its_end_and_continues_it_after_a_kill(tmp_path: Path) -> None:
    options = ("--listen", "127.0.0.1:0", "--num-workers", "1", "--max-rounds", "2")

    def work(told: dict[str, str], founds: bool) -> None:
        url, token = told["BLOCKTRAIN_COORDINATOR"], told.get("BLOCKTRAIN_TOKEN", TOKEN)
        with HttpTransport(url, "blocktrain", token) as line:
            assert line.found(make_terms(1, max_rounds=9), make_masters(1, interface=False)) is founds
            line.join(WorkerFacts(0))
            have = line.fetch("block0")
            assert have is not None
            line.submit("block0", submission(have.version, moved(have.params, 1)))
            assert line.status()["entries"]["block0"]["version"] == have.version + 1
            line.leave()

    with coordinator(tmp_path, *options) as (process, told):
        work(told, founds=True)
        process.kill()
        assert process.stderr is not None and told["BLOCKTRAIN_TOKEN"] not in process.stderr.read()
    with coordinator(tmp_path, *options, token=TOKEN) as (process, told):
        assert "BLOCKTRAIN_TOKEN" not in told
        work(told, founds=False)
        assert process.wait(60.0) == 0  # the run is over and its worker has left
        assert "all 2 rounds are closed" in process.stderr.read()


@pytest.mark.slow
def test_scenario_11_coordinator_command_ends_with_0_on_ctrl_c(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--listen", "127.0.0.1:0") as (process, told):
        process.send_signal(signal.SIGINT)
        assert process.wait(5.0) == 0
        assert "Traceback" not in process.stderr.read()
    with socket.create_server(("127.0.0.1", int(told["BLOCKTRAIN_COORDINATOR"].rpartition(":")[2]))):
        pass


def test_help_of_every_command_names_the_variables_it_reads(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("coordinator", "status", "doctor"):
        assert main([name, "--help"]) == 0
        assert "BLOCKTRAIN_TOKEN" in capsys.readouterr().out
