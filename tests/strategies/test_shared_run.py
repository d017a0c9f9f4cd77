"""Whole processes that join a run on several coordinators."""

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_blocktrain.coordinator.desk import Desk
from tests.strategies.test_launcher import SCRIPT, TIMEOUT_S, environment
from tests.transport.lines import RUN, TOKEN, served


@pytest.mark.slow
def test_processes_that_name_two_coordinators_found_the_run_on_both_and_train_it_to_its_end(tmp_path: Path) -> None:
    desks = [Desk(RUN, TOKEN, serves=("block0",)), Desk(RUN, TOKEN, serves=("block1", "interface"))]
    with served(desks[0]) as first, served(desks[1]) as second:
        told = {"BLOCKTRAIN_TOKEN": TOKEN, "BLOCKTRAIN_RUN_ID": RUN}
        workers = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(tmp_path), "--devices", "1"],
                env=environment(tmp_path, BLOCKTRAIN_COORDINATOR=urls, **told),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for urls in (f"{first.url},{second.url}", f"{second.url}, {first.url}")
        ]
        outputs = [worker.communicate(timeout=TIMEOUT_S)[0] for worker in workers]
        blocks, rest = (desk.service for desk in desks)
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert [member.block_idx for member in rest.membership.members] == [0, 1]
    assert [member.worker_id for member in blocks.membership.members] == [0]
    assert blocks.versions["block0"] >= 4 and rest.versions["block1"] >= 4
    assert rest.versions["interface"] >= 4
    assert (blocks.roster.live, rest.roster.live) == ((), ())
