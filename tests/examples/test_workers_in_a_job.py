"""The example of a job, under torchrun: one process per worker, and one that prints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "workers_in_a_job.py"
TIMEOUT_S = 240.0


@pytest.mark.slow
def test_workers_in_a_job_under_torchrun_prints_once_what_they_reached(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(SCRIPT)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BLOCKTRAIN")}
    ran = subprocess.run(
        [*command, "--devices", "3", "--exchange", "collective", "--steps", "10", "--width", "8"],
        cwd=tmp_path,
        env={**kept, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stderr
    [line] = [line for line in ran.stdout.splitlines() if "bits per byte" in line]
    assert line.startswith("3 workers: ")
    assert line.endswith("bits per byte after 10 steps")
