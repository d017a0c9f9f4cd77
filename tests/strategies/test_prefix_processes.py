"""Frozen prefixes between processes: the same run as the simulator's, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.test_worker_processes import TIMEOUT_S, run

SCRIPT = Path(__file__).with_name("prefix_script.py")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 60)]


def result_of(folder: Path, *options: str) -> dict[str, Any]:
    folder.mkdir()
    output = run(folder, str(SCRIPT), str(folder), *options)
    [told] = [json.loads(line[7:]) for line in output.splitlines() if line.startswith("RESULT ")]
    return dict(told)


@pytest.mark.parametrize(("prefix_every", "prefix_codec"), [(1, "int8"), (3, "bf16")])
def test_processes_on_frozen_prefixes_equal_the_simulator(tmp_path: Path, prefix_every: int, prefix_codec: str) -> None:
    options = [f"--prefix-every={prefix_every}", f"--prefix-codec={prefix_codec}"]
    simulated = result_of(tmp_path / "simulated", *options)
    assert simulated == result_of(tmp_path / "processes", "--devices=3", *options)
    assert (simulated["step"], simulated["rounds"]) == (10, 5)


def test_a_stale_prefix_changes_values_and_nothing_else(tmp_path: Path) -> None:
    every, fourth = (result_of(tmp_path / str(n), f"--prefix-every={n}") for n in (1, 4))
    assert every["digest"] != fourth["digest"]
    assert (every["step"], every["rounds"]) == (fourth["step"], fourth["rounds"])
