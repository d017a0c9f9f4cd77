"""The example of a worker that joins a run by URL: alone with simulated workers, and two processes that join one."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.transport.http import HttpTransport
from tests.transport.lines import TOKEN, served

SCRIPT = Path(__file__).parents[2] / "examples" / "join_a_run.py"
RUN_ID = "blocktrain"
SMALL = ["--steps", "50", "--sync-every", "2", "--width", "16"]


def bits_in(printed: str) -> str:
    [bits] = re.findall(r"the merged model: ([0-9.]+) bits per byte", printed)
    return str(bits)


def test_without_a_url_the_example_simulates_its_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BLOCKTRAIN_COORDINATOR", raising=False)
    spec = importlib.util.spec_from_file_location("join_a_run", SCRIPT)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(["--steps", "4", "--sync-every", "2", "--width", "16"])
    assert 6 < float(bits_in(capsys.readouterr().out)) < 8.5  # four steps: about the 8 bits of a uniform guess


@pytest.mark.slow  # two workers, each of which imports everything
def test_two_processes_join_a_run_and_end_with_the_same_merged_model(tmp_path: Path) -> None:
    desk = Desk(RUN_ID, TOKEN, fixed_terms={"num_workers": 2, "max_rounds": 2})
    with served(desk) as server:
        told = {"BLOCKTRAIN_COORDINATOR": server.url, "BLOCKTRAIN_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(SCRIPT), *SMALL]
        began = time.monotonic()
        workers = [
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env={**os.environ, **told},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        try:
            printed = [worker.communicate(timeout=240 - (time.monotonic() - began)) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        with HttpTransport(server.url, RUN_ID, TOKEN) as line:
            status = line.status()
    assert [worker.returncode for worker in workers] == [0, 0], printed
    assert (status["phase"], status["reason"]) == ("finished", "all 2 rounds are closed")
    assert {entry: kept["version"] for entry, kept in status["entries"].items()} == dict.fromkeys(
        ("block0", "block1", "interface"), 2
    )
    assert {kept["block_idx"] for kept in status["workers"].values()} == {0, 1}
    bits = {bits_in(out) for out, _ in printed}
    assert len(bits) == 1 and 6 < float(bits.pop()) < 8.5
