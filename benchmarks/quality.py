"""What block-local training costs in quality: every model and control at equal tokens, and the choices behind it.

``python -m benchmarks.quality --size demo --train FILE --val FILE --test FILE --json FILE``

Each run (one arm, one seed) appends one JSON line to ``--json`` and is skipped when its line is there already for the
same corpus, so a stopped benchmark goes on where it was. Choices are made on val (``ce`` and ``sweep`` of ``val``);
the table that is printed at the end reports test beside it. Without files the embedded ``python-docs`` corpus is used.

Arms: ``diffusion_blocks`` and ``byte_transformer`` under ``blocktrain``, the controls ``causal_full`` (L layers) and
``causal_block`` (L_b layers), and the screening of DiffusionBlocks: a reference recipe and one change from it each.
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
from lightning.pytorch.strategies import Strategy
from rich.console import Console
from rich.table import Table

from benchmarks.paired import half_width
from lightning_blocktrain import BlockTrainStrategy, ByteDataModule, DiffusionBlocks, evaluate_sweep
from lightning_blocktrain.demo.arms import (
    NUM_DRAWS,
    Arm,
    block_strategy,
    byte_transformer,
    causal_block,
    causal_full,
    denoising_module,
    diffusion_blocks,
    fit_trainer,
    fresh_logger,
    mean_exit_nats,
    spaced_batches,
)
from lightning_blocktrain.demo.recipe import BUDGETS, Recipe
from lightning_blocktrain.models.loading import Model

SIZES = {
    "tiny": replace(BUDGETS["tiny"], steps=6, test_windows=8),
    "demo": replace(BUDGETS["small"], steps=300, warmup_steps=30, validate_every=50, test_windows=128),
    "large": replace(BUDGETS["medium"], steps=700, test_windows=128),
}
REFERENCE: dict[str, Any] = {"target_norm": 0.5, "sigma_min": 1.0, "sigma_max": 10.0, "weighted": True, "p_span": 0.5}
"""The recipe that the screening started from."""
VARIANTS: dict[str, dict[str, Any]] = {
    "reference": REFERENCE,
    "sigma .1 to 2": {**REFERENCE, "sigma_min": 0.1, "sigma_max": 2.0},
    "r=.3": {**REFERENCE, "target_norm": 0.3},
    "r=1": {**REFERENCE, "target_norm": 1.0},
    "plain cross entropy": {**REFERENCE, "weighted": False},
    "p_span=0": {**REFERENCE, "p_span": 0.0},
    "p_span=1": {**REFERENCE, "p_span": 1.0},
}
"""The screening of DiffusionBlocks: the reference recipe and one change from it each; the defaults are its outcome."""


def variant(recipe: Recipe, name: str) -> Arm:
    """Return DiffusionBlocks with the changes of ``VARIANTS[name]``."""
    return Arm(
        name,
        f"DiffusionBlocks, {name}",
        lambda: denoising_module(recipe, VARIANTS[name]),
        lambda: block_strategy(recipe),
    )


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
    splits = {
        "val": (data.val_dataloader(), recipe.test_windows // 2),
        "test": (data.test_dataloader(), recipe.test_windows),
    }
    return {
        "arm": arm.name,
        "title": arm.title,
        "seed": seed,
        "steps": trainer.global_step,
        "recipe": asdict(recipe),
        "hyper_parameters": dict(module.hparams),
        **token_counts(trainer.strategy, recipe),
        "corpus_sha256": data.corpus_info.sha256,
        "threads": torch.get_num_threads(),
        **{split: evaluate(module, *windows, recipe.batch_size, seed) for split, windows in splits.items()},
    }


def token_counts(strategy: Strategy, recipe: Recipe) -> dict[str, int]:
    """Return the tokens accepted into each block, or seen by a control, and those that all workers processed."""
    if not isinstance(strategy, BlockTrainStrategy):
        return {"tokens_per_block": recipe.tokens_per_block, "total_tokens": recipe.tokens_per_block}
    per_block = strategy.accepted_tokens // recipe.num_blocks
    return {"tokens_per_block": per_block, "total_tokens": strategy.worker_tokens}


def evaluate(module: Model, loader: Any, num_windows: int, batch_size: int, seed: int) -> dict[str, Any]:
    """Return nats per byte (``ce``, after one sweep where there are sweeps) and all sweep quantities."""
    subset = spaced_batches(loader.dataset, num_windows, batch_size)
    batches = [subset[idx] for idx in range(len(subset))]
    if isinstance(module, DiffusionBlocks):
        report = evaluate_sweep(module, batches, num_draws=NUM_DRAWS, seed=seed)
        return {"ce": report.sweep_ce_k1, "sweep": asdict(report)}
    exits, num_bytes = mean_exit_nats(module.eval(), batches)
    return {"ce": exits[-1], "num_bytes": num_bytes}


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the means over seeds of every arm, with the gap to the causal model of L layers."""
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_arm.setdefault(row["arm"], []).append(row)
    table = Table(title="nats per byte, means over seeds +- half the 95 % t-interval")
    mixture = f"K={NUM_DRAWS}"
    ces = ("val K=1", f"val {mixture}", "test K=1", f"test {mixture}", "gap to causal L")
    for column in ("arm", "seeds", "tokens per block", *ces, f"prior {mixture}", "gain", "local", "span", "leak"):
        table.add_column(column)
    control = {row["seed"]: best_ce(row, "test") for row in by_arm.get("causal_full", [])}
    for group in by_arm.values():
        table.add_row(*cells(group, control))
    Console(width=200).print(table)


def best_ce(row: dict[str, Any], split: str) -> float:
    """Return the cross entropy of the mixture of draws where there are draws."""
    result = row[split]
    return float(result["sweep"]["sweep_ce_k"] if "sweep" in result else result["ce"])


def cells(group: list[dict[str, Any]], control: dict[int, float]) -> list[str]:
    """Return one arm's row of the table."""
    gaps = [(best_ce(row, "test"), control[row["seed"]]) for row in group if row["seed"] in control]
    gap = "-"
    if gaps:
        gap = f"{spread([a - b for a, b in gaps], '+.3f')} ({statistics.mean((a - b) / b for a, b in gaps):+.1%})"
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


def spread(values: list[float], form: str = ".3f") -> str:
    """Return the mean, and half its interval where there is more than one seed."""
    mean = format(statistics.mean(values), form)
    return mean if len(values) < 2 else f"{mean} +- {half_width(values):.3f}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--arms", nargs="+", choices=arms(SIZES["tiny"]), metavar="ARM", help="default: all arms")
    parser.add_argument("--train", nargs="+", help="train files; default: the python-docs corpus")
    parser.add_argument("--val", nargs="+")
    parser.add_argument("--test", nargs="+")
    parser.add_argument("--threads", type=int, help="torch threads")
    parser.add_argument("--json", type=Path, required=True, help="one line per run is appended here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run what is missing, print the table and return all rows of the size and the corpus."""
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
            rows = stored(args.json, recipe, data.corpus_info.sha256)
            if any(row["arm"] == name and row["seed"] == seed for row in rows):
                continue
            row = {"size": args.size, **run(known[name], recipe, data, seed)}
            with args.json.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
    rows = stored(args.json, recipe, data.corpus_info.sha256)
    print_table(rows)
    return rows


def stored(path: Path, recipe: Recipe, sha256: str) -> list[dict[str, Any]]:
    """Return the rows that ``path`` holds of this recipe on the corpus with this hash."""
    lines = path.read_text().splitlines() if path.exists() else []
    wanted = asdict(recipe), sha256
    return [row for row in map(json.loads, lines) if (row["recipe"], row["corpus_sha256"]) == wanted]


if __name__ == "__main__":
    main()
