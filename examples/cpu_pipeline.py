"""A deep model on a CPU: its stages learn at the same time (``rgc``), or it is trained end to end (``auto``).

The one-string swap, with what it costs beside it. Equal steps compare equal tokens. To compare speeds, run each
strategy more than once, in turns, on a machine that does nothing else. The model is also scored cut off after each
stage; only stages that learn from losses of their own are trained for that.
"""

import argparse
from collections.abc import Sequence

import lightning as L

import lightning_blocktrain  # noqa: F401  registers strategy="rgc" and its companions
from lightning_blocktrain.callbacks import AcceptedThroughput, ExitEvaluation, MemoryMonitor
from lightning_blocktrain.data import ByteDataModule
from lightning_blocktrain.models import ByteTransformer

STRATEGIES = ("rgc", "rgc_serial", "broadcast", "broadcast_serial", "live", "bp_groups", "auto")


def main(argv: Sequence[str] | None = None) -> None:
    """Train on the running Python's documentation; print the bits per byte of text held out, speed and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="rgc", help="what to swap")
    parser.add_argument("--num-stages", type=int, default=4, help="stages, or groups of bp_groups; auto has none")
    parser.add_argument("--num-layers", type=int, default=12, help="layers, a multiple of the stages")
    parser.add_argument("--width", type=int, default=128, help="width of the model, a multiple of 4")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--window-bytes", type=int, default=128, help="bytes per window")
    parser.add_argument("--batch-size", type=int, default=16, help="windows per step")
    args = parser.parse_args(argv)
    if args.num_stages < 2:  # to a Trainer, devices=1 leaves the number of stages to the strategy
        parser.error("--num-stages must be at least 2; use --strategy auto to train the model as one")
    L.seed_everything(0, verbose=False)
    module = ByteTransformer(args.num_layers, args.width, window_bytes=args.window_bytes)
    datamodule = ByteDataModule("python-docs", args.window_bytes, args.batch_size)
    speed, memory, exits = AcceptedThroughput(), MemoryMonitor(), ExitEvaluation(num_stages=args.num_stages)
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=1 if args.strategy == "auto" else args.num_stages,
        max_steps=args.steps,
        logger=False,
        callbacks=[speed, memory, exits],
        enable_checkpointing=False,
    )
    trainer.fit(module, datamodule)
    rate, measure = speed.summary()["accepted_tokens_per_s"], str(memory.measure).upper()
    costs = f"{rate:.0f} tokens/s, peak {measure} {memory.peak_mib:.0f} MiB"  # before the test measures anew
    [scores] = trainer.test(module, datamodule, verbose=False)
    print(f"{args.strategy}: {scores['test/bits_per_byte']:.3f} bits per byte after {args.steps} steps; {costs}")
    at_exits = " ".join(f"{score.bits_per_token:.3f}" for score in exits.scores)
    print(f"bits per token when cut off after each stage: {at_exits}")


if __name__ == "__main__":
    main()
