"""What the local losses of a pipeline cost in quality: every method at equal tokens, weights and data order.

``python -m benchmarks.pipeline_quality --train FILE --val FILE [--steps N] [--seeds 0 1] [--json FILE]``

One JSON line a run; what the file holds already is not run again. Bits per token are those of the composed model on
the first ``--val-batches`` batches of the held-out text. The runs are not timed: an asynchronous run's result depends
on its lags, which a busy machine changes.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cpu_pipeline import METHODS, Runner, Shape

USUAL = ("bp", "live", "broadcast_serial", "broadcast", "rgc_serial", "rgc", "rgc_depth")


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what makes two rows the same run."""
    return row["method"], row["seed"], row["num_steps"], row["num_layers"], row["width"], row["num_stages"]


def rows_in(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def shape_of(args: argparse.Namespace, seed: int) -> Shape:
    """Return what the options ask to train."""
    return Shape(
        num_layers=args.num_layers,
        width=args.width,
        num_stages=args.num_stages,
        window_bytes=args.window_bytes,
        batch_size=args.batch_size,
        warmup_steps=args.steps - 1,
        timed_steps=1,
        memory_steps=0,
        val_batches=args.val_batches,
        corpus={"train": args.train, "val": args.val} if args.train else {"corpus": args.corpus},
        seed=seed,
    )


def train(runner: Runner, shape: Shape, method: str, threads: int) -> dict[str, Any]:
    """Train one method and return its row."""
    [record] = runner.run([shape.arm(method, threads)])
    return {
        "method": method,
        "seed": shape.seed,
        "num_steps": record["num_steps"],
        "num_layers": shape.num_layers,
        "width": shape.width,
        "num_stages": shape.num_stages,
        "tokens": record["num_steps"] * shape.batch_size * shape.window_bytes,
        "corpus": {name: Path(text).name for name, text in shape.corpus.items()},
        "bits_per_token": record["bits_per_token"],
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print the mean of each method and its gap to ``bp``, paired by seed."""
    bp = {row["seed"]: row["bits_per_token"] for row in rows if row["method"] == "bp"}
    table = Table(title=f"{rows[0]['tokens']:,} tokens a run, L={rows[0]['num_layers']}, d={rows[0]['width']}")
    for column in ("method", "seeds", "bits per token", "gap to bp", "gap, %"):
        table.add_column(column)
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        gaps = [row["bits_per_token"] - bp[row["seed"]] for row in mine if row["seed"] in bp]
        relative = [100 * gap / bp[row["seed"]] for gap, row in zip(gaps, mine, strict=False)]
        bits = statistics.mean(row["bits_per_token"] for row in mine)
        shown = (f"{statistics.mean(gaps):+.4f}", f"{statistics.mean(relative):+.2f}") if gaps else ("-", "-")
        table.add_row(method, str(len(mine)), f"{bits:.4f}", *shown)
    Console(width=100).print(table)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Train what the file does not hold yet, print the table and return its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--methods", nargs="+", choices=METHODS, default=USUAL)
    add("--seeds", nargs="+", type=int, default=[0])
    add("--steps", type=int, default=300)
    add("--num-layers", type=int, default=12)
    add("--width", type=int, default=128)
    add("--num-stages", type=int, default=4)
    add("--window-bytes", type=int, default=128)
    add("--batch-size", type=int, default=16)
    add("--val-batches", type=int, default=64)
    add("--threads", type=int, default=1, help="OpenMP threads of serial arms")
    add("--corpus", default="python-docs", help="a corpus of ByteDataModule")
    add("--train", default=None, help="training text instead of the corpus")
    add("--val", default=None, help="held-out text, with --train")
    add("--json", type=Path, default=Path("pipeline_quality.jsonl"), help="file of rows, continued if it exists")
    args = parser.parse_args(argv)
    if bool(args.train) != bool(args.val) or args.steps < 2:
        parser.error(
            f"--train and --val go together, --steps is at least 2; got {args.train}, {args.val}, {args.steps}"
        )
    done = {key_of(row): row for row in rows_in(args.json)}
    with Runner() as runner:
        for seed in args.seeds:
            shape = shape_of(args, seed)
            for method in dict.fromkeys(["bp", *args.methods]):
                key = (method, seed, args.steps, args.num_layers, args.width, args.num_stages)
                if key not in done:
                    done[key] = train(runner, shape, method, args.threads)
                    with args.json.open("a") as file:
                        file.write(json.dumps(done[key]) + "\n")
    rows = [row for key, row in done.items() if key[2:] == (args.steps, args.num_layers, args.width, args.num_stages)]
    print_table(rows)
    return rows


if __name__ == "__main__":
    main()
