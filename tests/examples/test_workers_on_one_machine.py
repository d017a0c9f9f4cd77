"""The example of worker processes: simulated where it must be fast, with real processes where it may be slow."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "workers_on_one_machine.py"
ENTRIES = ("block0", "block1", "block2", "interface")


def rounds_in(printed: str) -> list[tuple[str, str, str]]:
    """Return round, block and accepted workers of every row of the table."""
    return re.findall(r"(\d) +. (block\d|interface) +. ([0-9, ]+?) +. - ", printed)


def bits_in(printed: str) -> float:
    [bits] = re.findall(r"([0-9.]+) bits per byte", printed)
    return float(bits)


def test_one_device_simulates_the_workers_and_prints_the_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("workers_on_one_machine", SCRIPT)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(["--devices", "1", "--steps", "4", "--sync-every", "2", "--width", "16"])
    printed = capsys.readouterr().out
    assert [row[:2] for row in rounds_in(printed)] == [(idx, entry) for idx in "01" for entry in ENTRIES]
    assert 6 < bits_in(printed) < 8.5  # four steps: about the 8 bits of a uniform guess


@pytest.mark.slow  # three workers and a coordinator, each of which imports everything
def test_three_processes_take_part_in_every_round(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--devices", "3", "--steps", "4", "--sync-every", "2", "--width", "16"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    accepted = {"block0": "0", "block1": "1", "block2": "2", "interface": "0, 1, 2"}
    rows = rounds_in(done.stdout)
    assert rows and all(workers == accepted[entry] for _, entry, workers in rows)
    # Rank 0 looks when its own round has closed; a block that is ahead by then shows its newest round.
    assert [idx for idx, entry, _ in rows if entry == "block0"] == ["0", "1"]
    assert {entry for idx, entry, _ in rows if idx == "1"} == set(ENTRIES)
    assert 6 < bits_in(done.stdout) < 8.5
    assert list(tmp_path.glob("blocktrain-*")) == []  # the coordinator's state
