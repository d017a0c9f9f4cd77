"""Several processes of one script: what they do to each other, and what is left of them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.strategies import launcher, passed_fits
from lightning_blocktrain.strategies.launcher import Fleet, again, threads_for
from lightning_blocktrain.strategies.place import find_place
from lightning_blocktrain.transport import WorkerFacts
from lightning_blocktrain.transport.http import HttpTransport
from tests.transport.lines import RUN, TOKEN, make_masters, make_terms, served

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("fleet_script.py")
TIMEOUT_S = 240.0
END_WITHIN_S = 20.0
"""From the death of rank 0 to the end of all others; the product takes 2 s, a crowded machine more."""


class Ran:
    """A script that has ended, and all that it had started."""

    def __init__(self, folder: Path, code: int, output: str) -> None:
        self.folder, self.code, self.output = folder, code, output
        self.results = [json.loads(line[7:]) for line in output.splitlines() if line.startswith("RESULT ")]

    def seen(self, rank: int) -> dict[str, Any]:
        return json.loads((self.folder / f"seen{rank}").read_text())


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BLOCKTRAIN")}
    return {**kept, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), **more}


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., Ran]:
    def run(*options: str) -> Ran:
        command = [sys.executable, str(SCRIPT), str(tmp_path), *options]
        path = tmp_path / "output"  # a pipe that nobody reads would fill up
        with path.open("w") as output:
            done = subprocess.Popen(
                command, cwd=tmp_path, env=environment(tmp_path), stdout=output, stderr=subprocess.STDOUT
            )
        try:
            code = done.wait(TIMEOUT_S)
            psutil.wait_procs(processes_of(tmp_path), timeout=END_WITHIN_S)
        finally:
            left = processes_of(tmp_path)
            for process in left:
                process.kill()
        assert left == []
        assert list(tmp_path.glob("blocktrain-*")) == []  # the coordinator's state
        return Ran(tmp_path, code, path.read_text())

    return run


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes whose temporary files go to this test's folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_several_devices_equal_the_simulator_bit_for_bit_and_only_rank_0_writes(run_script: Any) -> None:
    [simulated] = run_script("--devices", "1", "--replicas", "2").results
    ran = run_script("--devices", "4")
    assert ran.code == 0, ran.output
    [result] = ran.results
    for name in ("digest", "checkpoint", "val", "step", "rounds", "accepted_tokens"):
        assert result[name] == simulated[name], name
    assert result["threads"] == []
    pids = {(ran.folder / f"pid{rank}").read_text() for rank in range(4)}
    assert len(pids) == 4
    first = ran.seen(0)
    assert first["hooks"] == ["checkpoint", "validation"]
    for rank in range(1, 4):
        other = ran.seen(rank)
        assert (other["hooks"], other["loggers"]) == ([], ["SilentLogger"])
        assert other["callbacks"] == ["Report", "Fault"]
        assert (other["step"], other["lr"], other["flags"]) == (first["step"], first["lr"], True)
    assert len(list((ran.folder / "lightning_logs").iterdir())) == 2  # one of each run


@pytest.mark.slow
def test_second_fit_of_a_script_has_processes_of_its_own(run_script: Any) -> None:
    ran = run_script("--devices", "2", "--fits", "2")
    assert ran.code == 0, ran.output
    assert [result["step"] for result in ran.results] == [16, 16]
    assert ran.results[0]["digest"] != ran.results[1]["digest"]


@pytest.mark.slow
def test_scenario_1_worker_that_is_killed_is_named_and_the_run_goes_on(run_script: Any) -> None:
    ran = run_script("--devices", "4", "--fault", "worker", "--deadline-s", "8")
    assert ran.code == 0, ran.output
    assert "Worker 2 (block 0) ended with exit code -9; the run goes on without it" in ran.output
    assert "worker 2 has died: no round waits for it" in ran.output  # and not: is silent
    assert "block0 round 2 closed without workers [2]" in ran.output
    [result] = ran.results
    assert (result["step"], result["rounds"]) == (8, 4)
    assert result["accepted_tokens"] == 320 - 40  # two rounds of two batches of two windows of five targets


@pytest.mark.slow
def test_scenario_7_coordinator_that_is_killed_comes_back_and_nothing_is_lost(run_script: Any) -> None:
    [undisturbed] = run_script("--devices", "1", "--codec", "int8").results
    ran = run_script("--devices", "2", "--codec", "int8", "--fault", "coordinator")
    assert ran.code == 0, ran.output
    assert "The coordinator ended with exit code -9; restart 1 of 3" in ran.output
    assert ran.results[0]["digest"] == undisturbed["digest"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("sigint", 1, "KeyboardInterrupt"),
        ("sigterm", 128 + signal.SIGTERM, ""),
        ("sigkill", -signal.SIGKILL, ""),
        ("raise", 1, "the user's own fault"),
    ],
)
def test_scenario_11_end_of_rank_0_ends_all(run_script: Any, fault: str, code: int, said: str) -> None:
    ran = run_script("--devices", "2", "--fault", fault)
    assert ran.code == code, ran.output
    assert said in ran.output
    assert ran.results == []


@pytest.mark.slow
def test_scenario_12_worker_that_never_joins_fails_the_fit_with_its_traceback(run_script: Any) -> None:
    ran = run_script("--devices", "2", "--fault", "import")
    assert ran.code == 1
    assert "ImportError: no such thing in a worker" in ran.output
    assert "every worker must live until the first round; got rank 1 (block 1): exit code 1" in ran.output


@pytest.mark.slow
def test_processes_that_join_by_url_found_the_run_and_train_it_to_its_end(tmp_path: Path) -> None:
    desk = Desk(RUN, TOKEN)
    with served(desk) as server:
        told = {"BLOCKTRAIN_COORDINATOR": server.url, "BLOCKTRAIN_TOKEN": TOKEN, "BLOCKTRAIN_RUN_ID": RUN}
        workers = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(tmp_path), "--devices", "1"],
                env=environment(tmp_path, **told),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for _ in range(2)
        ]
        outputs = [worker.communicate(timeout=TIMEOUT_S)[0] for worker in workers]
        service = desk.service
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert [member.block_idx for member in service.membership.members] == [0, 1]
    assert service.versions["block0"] == service.versions["block1"] >= 4
    assert service.roster.live == ()
    assert not (tmp_path / "lightning_logs").exists()  # both are headless


@pytest.mark.slow
def test_coordinator_of_a_fleet_outlasts_its_run_until_the_fleet_ends() -> None:
    fleet = Fleet()
    try:
        address = fleet.start_coordinator()
        [process] = [p for p in psutil.Process().children() if "coordinator_main" in " ".join(p.cmdline())]
        with HttpTransport(address.url, address.run_id, address.token, reconnect_timeout_s=5.0) as line:
            line.found(make_terms(1, num_workers=1), make_masters(1, interface=False))
            line.join(WorkerFacts(0))
            line.stop("rank 0 validates")
            line.leave()  # as good as silent: nobody is awaited any more
            with pytest.raises(psutil.TimeoutExpired):
                process.wait(2.0)  # who would end by itself looks ten times a second whether it may
            assert line.status()["phase"] == "stopped"
        assert fleet.newly_dead() == {}
    finally:
        fleet.end()
    assert not process.is_running()


def test_again_is_the_command_this_process_was_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-X", "dev", "train.py", "--lr", "1"])
    monkeypatch.setattr(sys, "argv", ["changed"])
    assert again() == [sys.executable, "-X", "dev", "train.py", "--lr", "1"]


@pytest.mark.parametrize("command", [["python3"], ["python3", "-"]])
def test_again_without_a_file_is_refused(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setattr(sys, "orig_argv", command)
    with pytest.raises(RuntimeError, match="several workers need a script that can be run again"):
        again()


def test_threads_for_shares_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_for(1) == cores
    assert threads_for(10 * cores) == 1


def test_find_place_of_a_started_worker_takes_what_it_was_told_out_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {"RANK": "3", "FIT_IDX": "1", "COORDINATOR": "http://h:1", "RUN_ID": "r", "TOKEN": "secret"}
    for name, value in told.items():
        monkeypatch.setenv(f"BLOCKTRAIN_{name}", value)
    monkeypatch.setenv("BLOCKTRAIN_PARENT", str(os.getppid()))
    monkeypatch.setattr(launcher, "_told", [])
    watched: list[int] = []
    monkeypatch.setattr(launcher, "end_with_parent", watched.append)
    place = find_place(None, devices=6)
    assert (place.num_workers, place.global_rank, place.local_rank, place.joins) == (None, 3, 3, False)
    assert watched == [os.getppid()]
    assert not [name for name in os.environ if name.startswith("BLOCKTRAIN_")]
    assert "secret" not in repr(place)
    assert not place.passes_over
    # The simulated fit of a script that has fits of several processes too: rank 0 does it alone.
    simulated = find_place(None, devices=1)
    assert (simulated.passes_over, simulated.is_simulated, simulated.global_rank) == (True, False, 3)


def test_given_address_takes_the_file_of_a_private_authority_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BLOCKTRAIN_TOKEN", "secret")
    monkeypatch.delenv("BLOCKTRAIN_CAFILE", raising=False)
    assert launcher.given_address("https://h:1") == launcher.Address("https://h:1", "blocktrain", "secret", None)
    monkeypatch.setenv("BLOCKTRAIN_CAFILE", str(tmp_path / "ca.pem"))
    with pytest.raises(ValueError, match=r"file of the authority must exist; got BLOCKTRAIN_CAFILE=.*ca\.pem"):
        launcher.given_address("https://h:1")
    (tmp_path / "ca.pem").touch()
    address = launcher.given_address("https://h:1")
    assert address is not None and address.cafile == str(tmp_path / "ca.pem")


def test_fit_that_is_passed_over_leaves_what_rank_0_noted_of_its_checkpoints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(passed_fits, "_finished", [])
    trainers = [L.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path) for _ in range(2)]
    done = trainers[0].checkpoint_callback
    assert isinstance(done, ModelCheckpoint)
    done.best_model_path, done.best_model_score = "best.ckpt", torch.tensor(0.25)
    passed_fits.note_fit(trainers[0])
    noted = json.loads(json.dumps(passed_fits.noted_fits()))  # it travels as JSON
    passed_fits.pass_over(trainers[1], noted[0])
    passed = trainers[1].checkpoint_callback
    assert isinstance(passed, ModelCheckpoint)
    assert (passed.best_model_path, passed.last_model_path) == ("best.ckpt", "")
    assert passed.best_model_score == 0.25
    assert trainers[1].state.finished


@pytest.mark.parametrize(
    ("devices", "url", "expected"),
    [(1, None, (None, True, False, 0)), (6, None, (6, False, False, 0)), (1, "http://h:1", (None, False, True, 1))],
)
def test_find_place_of_a_process_that_nobody_started(
    monkeypatch: pytest.MonkeyPatch, devices: int, url: str | None, expected: tuple[Any, ...]
) -> None:
    monkeypatch.setenv("BLOCKTRAIN_TOKEN", "secret")
    monkeypatch.delenv("BLOCKTRAIN_COORDINATOR", raising=False)
    monkeypatch.setattr(launcher, "_told", [])
    place = find_place(url, devices)
    assert (place.num_workers, place.is_simulated, place.joins, place.global_rank) == expected


def test_fleet_without_processes_ends_any_number_of_times() -> None:
    fleet = Fleet()
    fleet.end()
    fleet.end()
    assert fleet.newly_dead() == {}
