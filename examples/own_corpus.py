"""Your own text: files, globs, directories, archives, parquet or jsonl, cut by fractions or with splits of their own.

  own_corpus.py book.txt                                  the last 5 % is test, the 5 % before it val
  own_corpus.py 'books/*.txt' --val-fraction 0.1          quotes let the corpus expand the glob, sorted
  own_corpus.py train.parquet --val held_out.parquet --text-column body

Without files it makes a small corpus in a temporary directory, which it removes afterwards.
"""

import argparse
import asyncio
import inspect
import textwrap
import typing
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import lightning as L

import lightning_blocktrain  # noqa: F401  registers strategy="blocktrain"
from lightning_blocktrain.data import ByteDataModule
from lightning_blocktrain.errors import CorpusError
from lightning_blocktrain.models import ByteTransformer


def make_corpus(folder: Path) -> tuple[str, str]:
    """Write text files and a parquet file into ``folder``.

    Returns:
        A glob of the text files, for train, and the path of the parquet file, for val.
    """
    for module in (argparse, inspect, typing):
        (folder / f"{module.__name__}.txt").write_text(inspect.getsource(module), encoding="utf-8")
    rows = [inspect.getsource(module) for module in (textwrap, asyncio.tasks)]
    held_out = folder / "held_out.parquet"
    datasets.Dataset.from_dict({"text": rows}).to_parquet(held_out)
    return str(folder / "*.txt"), str(held_out)


def train(datamodule: ByteDataModule, steps: int, width: int) -> None:
    """Train on a corpus and print what was loaded and the bits per byte of each split that is held out."""
    info = datamodule.corpus_info
    print(f"{info.name}: {info.split_bytes}, sha256 {info.sha256}")
    L.seed_everything(0, verbose=False)
    module = ByteTransformer(num_layers=4, width=width, window_bytes=datamodule.window_bytes)
    trainer = L.Trainer(
        strategy="blocktrain",
        devices=1,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, datamodule)
    for split, evaluate in {"val": trainer.validate, "test": trainer.test}.items():
        if info.split_bytes[split]:
            [scores] = evaluate(module, datamodule, verbose=False)
            print(f"{split}: {scores[f'{split}/bits_per_byte']:.3f} bits per byte")


def parse(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Return the parser, for its errors, and the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="text to train on: files, globs or directories")
    parser.add_argument("--val", nargs="+", help="validation files, instead of a fraction")
    parser.add_argument("--test", nargs="+", help="test files, instead of a fraction")
    parser.add_argument("--val-fraction", type=float, help="fraction of the training bytes cut off as val")
    parser.add_argument("--test-fraction", type=float, help="fraction of the training bytes cut off as test")
    parser.add_argument("--text-column", default="text", help="column of parquet and jsonl files (default: text)")
    parser.add_argument("--cache-dir", help="where the prepared bytes are kept (default: the user's cache)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: 200)")
    parser.add_argument("--width", type=int, default=64, help="width of the model (default: 64)")
    parser.add_argument("--window-bytes", type=int, default=128, help="bytes per window (default: 128)")
    return parser, parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Load the corpus that the arguments name, or make one, and train on it."""
    parser, args = parse(argv)
    with ExitStack() as stack:
        if not args.files:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            glob, held_out = make_corpus(folder)
            args.files = [glob]
            args.cache_dir = args.cache_dir or str(folder / "cache")
            if args.val is None and args.val_fraction is None:
                args.val = [held_out]
        try:
            datamodule = ByteDataModule(
                args.files,
                args.window_bytes,
                val=args.val,
                test=args.test,
                val_fraction=args.val_fraction,
                test_fraction=args.test_fraction,
                text_column=args.text_column,
                cache_dir=args.cache_dir,
            )
            train(datamodule, args.steps, args.width)
        except CorpusError as exc:
            parser.error(str(exc))


if __name__ == "__main__":
    main()
