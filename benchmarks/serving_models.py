"""The trained models of ``benchmarks.serving``: trained once into a folder, then found there.

``python -m benchmarks.serving_models --models DIR [--train FILE --val FILE] [--quick]`` trains what is missing.

==========  ========================================================================  ==================================
name        model                                                                     for
==========  ========================================================================  ==================================
causal      ByteTransformer in 3 blocks, each with a readout of its own, by blocks    served: one byte per traversal
sweep       DiffusionBlocks that read features and know unknown bytes, by blocks      served: chunks; also a draft
small       ByteTransformer of one layer, end to end                                  a draft at the client
reference   ByteTransformer as deep as causal, end to end, another seed               judges what the others write
==========  ========================================================================  ==================================
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_blocktrain import ByteDataModule, ByteTransformer, DiffusionBlocks
from lightning_blocktrain.models.loading import Model, load_model, save_model


@dataclass(frozen=True)
class Shape:
    """What is trained.

    Args:
        num_layers: L.
        num_blocks: B.
        width: D.
        window_bytes: T.
        batch_size: Windows per step.
        steps: Steps of every model.
        lr: Peak learning rate.
    """

    num_layers: int = 6
    num_blocks: int = 3
    width: int = 128
    window_bytes: int = 256
    batch_size: int = 16
    steps: int = 300
    lr: float = 4e-3


QUICK = Shape(num_layers=3, width=32, window_bytes=64, batch_size=4, steps=10)
FULL = Shape()
BY_BLOCKS = ("causal", "sweep")
NAMES = (*BY_BLOCKS, "small", "reference")


def build(name: str, shape: Shape) -> Model:
    """Return an untrained model."""
    common: dict[str, Any] = {
        "width": shape.width,
        "num_heads": max(1, shape.width // 32),
        "window_bytes": shape.window_bytes,
        "lr": shape.lr,
        "warmup_steps": min(50, shape.steps // 4),
    }
    cut: dict[str, Any] = {"num_layers": shape.num_layers, "num_blocks": shape.num_blocks, **common}
    if name == "sweep":
        return DiffusionBlocks(objective="denoise_features", p_span=0.5, **cut)
    if name == "causal":
        return ByteTransformer(exits="own", **cut)
    return ByteTransformer(num_layers=1 if name == "small" else shape.num_layers, num_blocks=1, **common)


def train(name: str, shape: Shape, corpus: dict[str, str], folder: Path) -> Path:
    """Return the checkpoint of a trained model; train it if it is not there."""
    path = folder / f"{name}.ckpt"
    if path.exists():
        return path
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    L.seed_everything(1 if name == "reference" else 0, verbose=False)
    module = build(name, shape)
    data = ByteDataModule(window_bytes=shape.window_bytes, batch_size=shape.batch_size, **corpus)  # type: ignore[arg-type]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        trainer = L.Trainer(
            strategy="blocktrain" if name in BY_BLOCKS else "auto",
            accelerator="cpu",
            devices=1,
            max_steps=shape.steps,
            max_epochs=-1,
            gradient_clip_val=1.0,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=root,
        )
        trainer.fit(module, data)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(module.eval(), path)
    print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    return path


def models_of(names: Collection[str], folder: Path, shape: Shape, corpus: dict[str, str]) -> dict[str, Model]:
    """Return models, trained."""
    return {name: load_model(train(name, shape, corpus, folder)) for name in NAMES if name in names}


def add_corpus(parser: argparse.ArgumentParser) -> None:
    """Add the options that name models and corpus."""
    parser.add_argument("--models", type=Path, help="folder of trained models; what is missing is trained")
    parser.add_argument("--train", help="text to train on (default: the embedded python-docs)")
    parser.add_argument("--val", help="held-out text: prompts come from it")
    parser.add_argument("--quick", action="store_true", help="tiny models, few rows: shows that it runs")


def corpus_of(args: argparse.Namespace) -> dict[str, str]:
    """Return ``ByteDataModule``'s corpus options."""
    return {"train": args.train, "val": args.val} if args.train else {"corpus": "python-docs"}


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_corpus(parser)
    parser.add_argument("--only", choices=NAMES, nargs="+", default=NAMES)
    args = parser.parse_args(argv)
    for name in args.only:
        train(name, QUICK if args.quick else FULL, corpus_of(args), args.models or Path("serving_models"))


if __name__ == "__main__":
    main()
