"""Log a run to W&B: on this machine only, or to the account that is logged in.

With ``WANDB_API_KEY`` set, or after ``wandb login``, the run goes to W&B. Otherwise, or with ``--offline``, it stays
in a directory that ``wandb sync`` uploads later, and no network is used.
"""

import argparse
import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlparse

import lightning as L
from lightning.pytorch.loggers import WandbLogger

import lightning_blocktrain  # noqa: F401  registers strategy="blocktrain"
from lightning_blocktrain.callbacks import AcceptedThroughput, MemoryMonitor, RoundMonitor, SweepEvaluation
from lightning_blocktrain.data import ByteDataModule
from lightning_blocktrain.models import DiffusionBlocks


def is_logged_in(environ: Mapping[str, str]) -> bool:
    """Return whether W&B would find an API key, without asking it: in the environment or in the netrc file."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return host in netrc.netrc(environ.get("NETRC") or str(Path.home() / ".netrc")).hosts
    except (OSError, netrc.NetrcParseError):
        return False


def main(argv: Sequence[str] | None = None) -> None:
    """Train with every callback of ours and log to W&B, offline if nobody is logged in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--offline", action="store_true", help="stay on this machine even if logged in")
    parser.add_argument("--project", default="blocktrain", help="W&B project (default: blocktrain)")
    parser.add_argument("--save-dir", type=Path, default=Path(), help="where the directory wandb/ goes (default: here)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: 200)")
    parser.add_argument("--width", type=int, default=64, help="width of the model (default: 64)")
    parser.add_argument("--corpus", default="python-docs", help="named corpus or file (default: python-docs)")
    args = parser.parse_args(argv)
    offline = args.offline or not is_logged_in(os.environ)
    if offline:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # crash reports would be sent even when offline
    logger = WandbLogger(project=args.project, save_dir=args.save_dir, offline=offline)
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy="blocktrain",
        devices=1,
        max_steps=args.steps,
        val_check_interval=args.steps,
        check_val_every_n_epoch=None,
        limit_val_batches=20,
        log_every_n_steps=min(10, args.steps),
        logger=logger,
        callbacks=[AcceptedThroughput(), MemoryMonitor(), RoundMonitor(), SweepEvaluation(max_batches=4)],
        enable_checkpointing=False,
    )
    module = DiffusionBlocks(num_layers=6, num_blocks=3, width=args.width, window_bytes=128)
    trainer.fit(module, ByteDataModule(args.corpus, window_bytes=128))
    run = logger.experiment
    keys = sorted(key for key in run.summary.keys() if not key.startswith("_"))  # noqa: SIM118
    run.finish()
    mode, folder = "offline" if offline else "online", Path(run.dir).parent.resolve()
    print(f"{mode} run in {folder}, {len(keys)} keys: {', '.join(keys)}")


if __name__ == "__main__":
    main()
