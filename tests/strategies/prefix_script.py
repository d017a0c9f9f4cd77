"""A user's script whose blocks read frozen prefixes, for the tests of several processes."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_blocktrain import BlockTrainStrategy
from tests.strategies.fleet_script import digest

SYNC_EVERY, NUM_STEPS, NUM_BLOCKS = 2, 10, 3
MEET_TIMEOUT_S = 120.0


class Model(L.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(5), nn.Linear(width, width), nn.Tanh()) for _ in range(NUM_BLOCKS)
        )
        self.readout = nn.Linear(width, 16)

    def configure_blocks(self) -> dict[str, Any]:
        layers = {"layers": self.layers, "readout": self.readout, "num_blocks": NUM_BLOCKS}
        return {**layers, "prefix": "frozen", "stem": self.embed}

    def block_training_step(self, batch: list[Tensor], batch_idx: int, block_idx: int) -> Tensor:
        with torch.set_grad_enabled(block_idx == 0):
            hidden = self.embed(batch[0])
        with torch.no_grad():
            for layer in self.layers[:block_idx]:
                hidden = hidden + layer(hidden)
        hidden = hidden + self.layers[block_idx](hidden)
        return F.cross_entropy(self.readout(hidden).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Meet(L.Callback):
    """Lets no worker train a round before all have begun it, so that all fetch the same versions."""

    def __init__(self, folder: Path, num_workers: int) -> None:
        self.folder = folder
        self.num_workers = num_workers

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        step = trainer.global_step
        if step % SYNC_EVERY:
            return
        (self.folder / f"met-{step}-{trainer.global_rank}").touch()
        ends_at = time.monotonic() + MEET_TIMEOUT_S
        while len(list(self.folder.glob(f"met-{step}-*"))) < self.num_workers:
            if time.monotonic() > ends_at:
                raise TimeoutError(f"not all workers came to step {step}")
            time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--prefix-every", type=int, default=1)
    parser.add_argument("--prefix-codec", default="bf16")
    parser.add_argument("--exchange", default="http")
    args = parser.parse_args()
    L.seed_everything(3, verbose=False)
    module, text = Model(), torch.randint(16, (2 * NUM_BLOCKS * NUM_STEPS, 6))
    strategy = BlockTrainStrategy(
        sync_every=SYNC_EVERY,
        prefix_every=args.prefix_every,
        prefix_codec=args.prefix_codec,
        exchange=args.exchange,
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=args.devices,
        max_epochs=1,
        logger=False,
        callbacks=[Meet(args.folder, NUM_BLOCKS)] if args.devices > 1 else [],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=args.folder,
    )
    data = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=2, shuffle=True)
    trainer.fit(module, data)
    if trainer.is_global_zero:
        result = {"digest": digest(module), "step": trainer.global_step, "rounds": strategy.num_rounds_closed}
        print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
