import subprocess
import sys

import pytest

from lightning_blocktrain.coordinator.process import CODE


@pytest.mark.slow
def test_coordinator_starts_without_lightning_and_the_models() -> None:
    entry = "coordinator_main()\n"
    assert CODE.endswith(entry)
    code = CODE.removesuffix(entry) + "import lightning_blocktrain.coordinator.serve; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    loaded = set(done.stdout.split())
    assert {"torch", "lightning_blocktrain.coordinator.server"} <= loaded
    assert not loaded & {"lightning", "torchmetrics", "lightning_blocktrain.models", "lightning_blocktrain.strategies"}
