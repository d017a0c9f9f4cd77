"""Scripts whose processes torchrun has started, or SLURM: the latter emulated by the variables that srun sets."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.strategies.test_launcher import END_WITHIN_S, SCRIPT, TIMEOUT_S, Ran, environment, processes_of

pytestmark = pytest.mark.slow
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


class Job:
    """Starts the processes of a script in a folder of their own, and ends those that are left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def torchrun(self, num_processes: int, *options: str) -> Ran:
        command = [*TORCHRUN, str(num_processes), str(SCRIPT), str(self.folder), "--devices", str(num_processes)]
        return self.wait([self.start([*command, *options])])

    def alone(self, *options: str) -> Ran:
        return self.wait([self.start([str(SCRIPT), str(self.folder), *options])])

    def start(self, command: Sequence[str], **more: str) -> "subprocess.Popen[bytes]":
        with (self.folder / "output").open("a") as output:  # a pipe that nobody reads would fill up
            return subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env={**environment(self.folder), **more},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait(self, started: "Sequence[subprocess.Popen[bytes]]") -> Ran:
        try:
            codes = [process.wait(TIMEOUT_S) for process in started]
            psutil.wait_procs(processes_of(self.folder), timeout=END_WITHIN_S)
        finally:
            left = processes_of(self.folder)
            for process in left:
                process.kill()
        assert left == []
        assert list(self.folder.glob("blocktrain-*")) == []
        return Ran(self.folder, max(codes, key=abs), (self.folder / "output").read_text())


@pytest.fixture
def job(tmp_path: Path) -> Callable[[str], Job]:
    def make(name: str) -> Job:
        folder = tmp_path / name
        folder.mkdir()
        return Job(folder)

    return make


def after(ran: Ran, rank: int) -> dict[str, Any]:
    return json.loads((ran.folder / f"after{rank}").read_text())


def check_equal(ran: Ran, simulated: Ran, num_ranks: int) -> None:
    assert ran.code == 0, ran.output
    for result, expected in zip(ran.results, simulated.results, strict=True):
        for name in ("digest", "checkpoint", "val", "step", "rounds", "accepted_tokens"):
            assert result[name] == expected[name], name
        assert result["threads"] == []
    assert len({(ran.folder / f"pid{rank}").read_text() for rank in range(num_ranks)}) == num_ranks
    assert ran.seen(0)["hooks"] == ["checkpoint", "validation"]
    for rank in range(1, num_ranks):
        other = ran.seen(rank)
        assert (other["hooks"], other["callbacks"]) == ([], ["Report", "Fault"])
        assert (other["step"], other["lr"]) == (ran.seen(0)["step"], ran.seen(0)["lr"])
        assert after(ran, rank)["best"] == after(ran, 0)["best"] != ""
        # The script goes on with the whole model on every rank.
        assert after(ran, rank)["digest"] == ran.results[-1]["digest"]
    assert len(list((ran.folder / "lightning_logs").iterdir())) == len(ran.results)


def test_torchrun_equals_the_simulator_bit_for_bit_with_either_exchange_and_in_a_second_fit(job: Any) -> None:
    fits = ("--fits", "2")
    simulated = job("simulated").alone("--devices", "1", "--replicas", "2", *fits)
    assert len({result["digest"] for result in simulated.results}) == 2
    for exchange in ("http", "collective"):
        check_equal(job(exchange).torchrun(4, "--exchange", exchange, *fits), simulated, 4)


@pytest.mark.parametrize("exchange", ["http", "collective"])
def test_scenario_32_resumed_job_has_every_rank_where_rank_0_is(job: Any, exchange: str) -> None:
    first = job("first").torchrun(2, "--exchange", exchange)
    assert first.code == 0, first.output
    [path] = (first.folder / "ckpt0").glob("*.ckpt")
    resumed = job("resumed").torchrun(2, "--exchange", exchange, "--epochs", "2", "--resume", str(path))
    [result] = resumed.results
    assert result["step"] == 2 * first.results[0]["step"]
    assert (resumed.seen(1)["step"], resumed.seen(1)["lr"]) == (result["step"], resumed.seen(0)["lr"])
    afresh = "The checkpoint does not hold the optimizer and the random numbers of block1/replica0"
    assert (afresh in resumed.output) is (exchange == "collective")
    if exchange == "http":  # on one node rank 0 gathers what all ranks have left in its folder
        [whole] = job("whole").torchrun(2, "--epochs", "2").results
        assert result["digest"] == whole["digest"]


def test_slurm_emulated_by_its_variables_equals_the_simulator_on_two_nodes(job: Any) -> None:
    simulated = job("simulated").alone("--devices", "1")
    for exchange in ("http", "collective"):
        nodes = job(exchange)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {
            "SLURM_JOB_ID": "4242",
            "SLURM_JOB_NAME": "train",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_NNODES": "2",
            "SLURM_JOB_NODELIST": "localhost",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [str(SCRIPT), str(nodes.folder), "--devices", "1", "--nodes", "2", "--exchange", exchange]
        started = [
            nodes.start(command, **shared, SLURM_PROCID=str(rank), SLURM_LOCALID="0", SLURM_NODEID=str(rank))
            for rank in range(2)
        ]
        check_equal(nodes.wait(started), simulated, 2)


@pytest.mark.parametrize(("exchange", "fault"), [("http", "worker"), ("collective", "raise")])
def test_rank_that_dies_ends_the_job_of_torchrun(job: Any, exchange: str, fault: str) -> None:
    ran = job(exchange).torchrun(3, "--exchange", exchange, "--fault", fault)
    assert ran.code == 1, ran.output
    assert ran.results == []
    if fault == "worker":
        assert f"Signal {int(signal.SIGKILL)}" in ran.output or "exitcode  : -9" in ran.output
    else:
        assert "the user's own fault" in ran.output
