"""What block-local training costs in quality: every model and control at equal tokens, and the choices behind it.

``python -m benchmarks.quality --size demo --train FILE --val FILE --test FILE --json FILE``

Each run (one arm, one seed) appends one JSON line to ``--json`` and is skipped when its line is there already, so a
stopped benchmark goes on where it was. Choices are made on val (``ce`` and ``sweep`` of ``val``); the table that is
printed at the end reports test beside it. Without files the embedded ``python-docs`` corpus is used.

Arms: ``diffusion_blocks`` and ``byte_transformer`` under ``blocktrain``, the controls ``causal_full`` (L layers) and
``causal_block`` (L_b layers), and DiffusionBlocks variants, each one change from the defaults.
"""

import argparse
import json
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from lightning_blocktrain import ByteDataModule, DiffusionBlocks, evaluate_sweep
from lightning_blocktrain.demo.arms import (
    NUM_DRAWS,
    Arm,
    block_strategy,
    byte_transformer,
    causal_block,
    causal_full,
    diffusion_blocks,
    fit_trainer,
    fresh_logger,
    spaced_batches,
)
from lightning_blocktrain.demo.recipe import BUDGETS, Recipe

SIZES = {
    "tiny": replace(BUDGETS["tiny"], steps=6, test_windows=8),
    "demo": replace(BUDGETS["small"], test_windows=256),
    "large": replace(BUDGETS["medium"], test_windows=256),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "sigma .1 to 2": {"sigma_min": 0.1, "sigma_max": 2.0},
    "r=.3": {"target_norm": 0.3},
    "r=1": {"target_norm": 1.0},
    "weighting flipped": {"weighted": False},
    "p_span=0": {"p_span": 0.0},
    "p_span=1": {"p_span": 1.0},
}
"""DiffusionBlocks with one change from the defaults."""


def variant(recipe: Recipe, name: str) -> Arm:
    """Return DiffusionBlocks with the changes of ``VARIANTS[name]``."""
    shape = {"num_layers": recipe.num_layers, "num_blocks": recipe.num_blocks, "width": recipe.width}
    rest = {"num_heads": recipe.num_heads, "window_bytes": recipe.window_bytes, "warmup_steps": recipe.warmup_steps}

    def module() -> DiffusionBlocks:
        return DiffusionBlocks(**{**shape, **rest, "lr": recipe.lr, **VARIANTS[name]})

    return Arm(name, f"DiffusionBlocks, {name}", module, lambda: block_strategy(recipe))


def arms(recipe: Recipe) -> dict[str, Arm]:
    """Return every arm by name."""
    main = [make(recipe) for make in (causal_full, causal_block, diffusion_blocks, byte_transformer)]
    return {arm.name: arm for arm in (*main, *(variant(recipe, name) for name in VARIANTS))}


def run(arm: Arm, recipe: Recipe, data: ByteDataModule, seed: int) -> dict[str, Any]:
    """Train one arm with one seed and evaluate it on val and test."""
    L.seed_everything(seed, workers=True, verbose=False)
    module = arm.make_module()
    with tempfile.TemporaryDirectory() as log:
        trainer = fit_trainer(arm, replace(recipe, val_batches=0), [], fresh_logger(Path(log), "log"))
        trainer.fit(module, datamodule=data)
    data.setup("fit")
    data.setup("test")
    splits = {"val": data.val_dataloader(), "test": data.test_dataloader()}
    return {
        "arm": arm.name,
        "title": arm.title,
        "seed": seed,
        "steps": trainer.global_step,
        "tokens_per_block": recipe.tokens_per_block,
        "total_tokens": getattr(trainer.strategy, "worker_tokens", recipe.tokens_per_block),
        "corpus_sha256": data.corpus_info.sha256,
        "threads": torch.get_num_threads(),
        **{split: evaluate(module, loader, recipe, seed) for split, loader in splits.items()},
    }


def evaluate(module: L.LightningModule, loader: DataLoader[Any], recipe: Recipe, seed: int) -> dict[str, Any]:
    """Return nats per byte (``ce``, after one sweep where there are sweeps) and all sweep quantities."""
    subset = spaced_batches(loader.dataset, recipe.test_windows, recipe.batch_size)
    batches = [subset[idx] for idx in range(len(subset))]
    if isinstance(module, DiffusionBlocks):
        report = evaluate_sweep(module, batches, num_draws=NUM_DRAWS, seed=seed)
        return {"ce": report.sweep_ce_k1, "sweep": asdict(report)}
    module.eval()
    with torch.no_grad():
        nats = torch.cat([module.evaluation_nats(batch, 0).flatten() for batch in batches])
    return {"ce": float(nats.double().mean()), "num_bytes": nats.numel()}


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the means over seeds of every arm, with the gap to the causal model of L layers."""
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_arm.setdefault(row["arm"], []).append(row)
    table = Table(title="nats per byte, means over seeds (standard deviation)")
    columns = ("arm", "seeds", "tokens per block", "val K=1", "val K=16", "test K=1", "test K=16", "gap to causal L")
    for column in (*columns, "prior K=16", "gain", "local", "span", "leak"):
        table.add_column(column)
    control = {row["seed"]: best_ce(row, "test") for row in by_arm.get("causal_full", [])}
    for group in by_arm.values():
        table.add_row(*cells(group, control))
    Console(width=200).print(table)


def best_ce(row: dict[str, Any], split: str) -> float:
    """Return the cross entropy of K=16 draws where there are draws."""
    result = row[split]
    return result["sweep"]["sweep_ce_k"] if "sweep" in result else result["ce"]


def cells(group: list[dict[str, Any]], control: dict[int, float]) -> list[str]:
    """Return one arm's row of the table."""
    gaps = [(best_ce(row, "test"), control[row["seed"]]) for row in group if row["seed"] in control]
    gap = "-"
    if gaps:
        absolute = statistics.mean(a - b for a, b in gaps)
        gap = f"{absolute:+.3f} ({statistics.mean((a - b) / b for a, b in gaps):+.1%})"
    head = [group[0]["title"], str(len(group)), f"{group[0]['tokens_per_block']:,}"]
    ces = [
        spread([pick(row) for row in group])
        for pick in (
            lambda row: row["val"]["ce"],
            lambda row: best_ce(row, "val"),
            lambda row: row["test"]["ce"],
            lambda row: best_ce(row, "test"),
        )
    ]
    sweeps = [row["test"]["sweep"] for row in group if "sweep" in row["test"]]
    if not sweeps:
        return [*head, *ces, gap, *["-"] * 5]
    means = {key: statistics.mean(s[key] for s in sweeps) for key in sweeps[0] if key != "local_ce"}
    local = " ".join(f"{statistics.mean(values):.2f}" for values in zip(*(s["local_ce"] for s in sweeps), strict=True))
    tail = [f"{means['prior_ce_k']:.3f}", f"{means['composition_gain']:+.3f}", local]
    return [*head, *ces, gap, *tail, f"{means['span_ce']:.3f}", f"{means['leak_accuracy']:.3f}"]


def spread(values: list[float]) -> str:
    """Return the mean, and the standard deviation where there is one."""
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) < 2 else f"{mean} ({statistics.stdev(values):.3f})"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--arms", nargs="+", help="names of arms; default: all")
    parser.add_argument("--train", nargs="+", help="train files; default: the python-docs corpus")
    parser.add_argument("--val", nargs="+")
    parser.add_argument("--test", nargs="+")
    parser.add_argument("--threads", type=int, help="torch threads")
    parser.add_argument("--json", type=Path, required=True, help="one line per run is appended here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run what is missing, print the table and return all rows of the size."""
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", module="lightning")
    recipe = SIZES[args.size]
    known = arms(recipe)
    data = ByteDataModule(
        window_bytes=recipe.window_bytes,
        batch_size=recipe.batch_size,
        train=args.train,
        val=args.val,
        test=args.test,
    )
    data.prepare_data()
    for seed in args.seeds:
        for name in args.arms or list(known):
            if any(row["arm"] == name and row["seed"] == seed for row in stored(args.json, args.size)):
                continue
            row = {"size": args.size, **run(known[name], recipe, data, seed)}
            with args.json.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
    rows = stored(args.json, args.size)
    print_table(rows)
    return rows


def stored(path: Path, size: str) -> list[dict[str, Any]]:
    """Return the rows of a size that ``path`` holds."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if row["size"] == size]


if __name__ == "__main__":
    main()
