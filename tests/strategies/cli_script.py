"""A user's script with Lightning's command line."""

import json

from lightning.pytorch.cli import LightningCLI

import lightning_blocktrain  # noqa: F401
from tests.strategies.acceptance_model import AcceptanceData, AcceptanceModel

if __name__ == "__main__":
    cli = LightningCLI(AcceptanceModel, AcceptanceData)
    strategy = cli.trainer.strategy
    told = {
        "step": cli.trainer.global_step,
        "rounds": strategy.num_rounds_closed,  # type: ignore[attr-defined]
        "sync_every": strategy.settings.sync_every,  # type: ignore[attr-defined]
    }
    print("RESULT " + json.dumps(told), flush=True)
