"""Does depth compose? Every objective of block-local training beside its controls, at equal tokens and at equal FLOPs.

``python -m benchmarks.composition --train FILE --val FILE --test FILE --json FILE [--arms ARM ...] [--seeds 0 1 2]``

Each run (one arm, one seed) appends one JSON line to ``--json`` and is skipped when its line is there already for the
same recipe and corpus, so a stopped benchmark goes on where it was. Choices are made on val; the tables show test
beside it. Without files the embedded ``python-docs`` corpus is used; ``--quick`` is a tiny shape of every arm.

At equal tokens every block sees as many tokens, summed over its replicas, as a control sees in all. An arm with
``@flops`` in its name takes fewer steps: as many as make its training FLOPs, frozen blocks counted, those of the
causal model of L layers. A size counts if that model beats the causal model of ``L_b`` layers by ``COUNTS`` nats.
"""

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from rich.console import Console

from benchmarks.composition_flops import training_flops
from benchmarks.composition_table import tables
from lightning_blocktrain import BlockTrainStrategy, ByteDataModule, ByteTransformer, DiffusionBlocks, evaluate_sweep
from lightning_blocktrain.demo.arms import (
    NUM_DRAWS,
    common_arguments,
    fit_trainer,
    fresh_logger,
    mean_exit_nats,
    spaced_batches,
)
from lightning_blocktrain.demo.arms import Arm as DemoArm
from lightning_blocktrain.demo.recipe import BUDGETS, Recipe
from lightning_blocktrain.models.loading import Model

SIZES = {
    "tiny": replace(
        BUDGETS["tiny"], steps=4, num_layers=4, num_blocks=2, width=16, batch_size=4, sync_every=2, warmup_steps=1
    ),
    "deep": Recipe(
        steps=1000,
        num_layers=4,
        num_blocks=4,
        width=64,
        num_heads=4,
        window_bytes=256,
        batch_size=16,
        lr=8e-3,
        warmup_steps=50,
        clip=10.0,
        test_windows=256,
        num_threads=1,
    ),
}
FLOPS = "@flops"
FEATURES: dict[str, Any] = {"objective": "features", "exits": "shared", "lookahead": 0}
AHEAD: dict[str, Any] = {"objective": "features", "exits": "own", "lookahead": 1}
"""The model of the arms that vary the protocol."""
SWEEP_EVERY = 4
"""Of so many batches one is swept with many draws, which costs as much as evaluating it fifty times."""


@dataclass(frozen=True)
class Arm:
    """One way to train a model of the recipe's shape.

    Args:
        title: What a table calls it.
        model: Options of the model beside its shape; ``objective`` decides the class.
        strategy: Options of ``BlockTrainStrategy``; None trains end to end.
        is_shallow: Whether the model has ``L_b`` layers only.
    """

    title: str
    model: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] | None = None
    is_shallow: bool = False

    @property
    def reads_z(self) -> bool:
        """Whether its blocks denoise."""
        return self.model.get("objective") in ("denoise", "denoise_features", "mse")


def blocks(title: str, objective: str, strategy: dict[str, Any] | None = None, **model: Any) -> Arm:
    """Return an arm that is trained block by block."""
    return Arm(title, {"objective": objective, **model}, strategy or {})


ARMS: dict[str, Arm] = {
    "causal_full": Arm("causal L, end to end"),
    "causal_block": Arm("causal L_b, end to end", is_shallow=True),
    "features": blocks("features", **FEATURES),
    "features norm": blocks("features, a norm per exit", **FEATURES | {"exits": "norm"}),
    "features own": blocks("features, a readout per exit", **FEATURES | {"exits": "own"}),
    "residual": blocks("residual logits", **FEATURES | {"objective": "residual"}),
    "residual own": blocks(
        "residual logits, a readout per exit", **FEATURES | {"objective": "residual", "exits": "own"}
    ),
    "denoise": blocks("denoise (the paper's)", "denoise"),
    "denoise sigma .1 to 2": blocks("denoise, the leak", "denoise", sigma_min=0.1, sigma_max=2.0),
    "denoise p_span=0": blocks("denoise, no unknown bytes", "denoise", p_span=0.0),
    "denoise p_drop_z=.5": blocks("denoise, z dropped half the time", "denoise", p_span=0.0, p_drop_z=0.5),
    "denoise_features": blocks("features and z", "denoise_features", p_span=0.0),
    "denoise_features p_drop_z=.5": blocks(
        "features and z, dropped half", "denoise_features", p_span=0.0, p_drop_z=0.5
    ),
    "denoise_features sigma .3": blocks(
        "features and z, sigma .3 to 10", "denoise_features", p_span=0.0, sigma_min=0.3
    ),
    "mse": blocks("regression of the embedding", "mse", p_span=0.0),
    "ahead": blocks("lookahead", **AHEAD),
    "ahead shared": blocks("lookahead, the readout shared", **AHEAD | {"exits": "shared"}),
    "ahead residual": blocks("lookahead, residual logits", **AHEAD | {"objective": "residual"}),
    "ahead 2": blocks("lookahead over two blocks", **AHEAD | {"lookahead": 2}),
    "ahead rounds of 2": blocks("lookahead, rounds of 2 steps", strategy={"sync_every": 2}, **AHEAD),
    "ahead no average": blocks("lookahead, masters read as they are", strategy={"average_decay": 0.0}, **AHEAD),
    "ahead p_span=.5": blocks("lookahead, half with unknown bytes", **AHEAD, p_span=0.5),
    "ahead every 4": blocks("lookahead, frozen blocks every 4 rounds", strategy={"prefix_every": 4}, **AHEAD),
    "ahead every 16": blocks("lookahead, frozen blocks every 16 rounds", strategy={"prefix_every": 16}, **AHEAD),
    "ahead int8": blocks("lookahead, frozen blocks in int8", strategy={"prefix_codec": "int8"}, **AHEAD),
    "ahead 2 replicas": blocks("lookahead, 2 replicas", strategy={"replicas": 2}, **AHEAD),
    "ahead mild": blocks("lookahead, 2 replicas, mild", strategy={"replicas": 2, "network": "mild"}, **AHEAD),
    "ahead wan": blocks("lookahead, 2 replicas, wan", strategy={"replicas": 2, "network": "wan"}, **AHEAD),
    "ahead wan late": blocks(
        "lookahead, 2 replicas, wan, late work counts",
        strategy={"replicas": 2, "network": "wan", "late": "stale_weighted"},
        **AHEAD,
    ),
}
"""Every arm by name; ``NAME@flops`` is the arm at equal FLOPs."""


def recipe_of(name: str, recipe: Recipe) -> Recipe:
    """Return the recipe of an arm: with the replicas it wants, and fewer steps at equal FLOPs."""
    arm = ARMS[name.removesuffix(FLOPS)]
    replicas = (arm.strategy or {}).get("replicas", recipe.replicas)
    if name.endswith(FLOPS):
        share = training_flops(recipe, "causal_full") / flops_of(name, recipe)
        rounds = max(1, round(recipe.steps * share / recipe.sync_every / replicas))
        recipe = replace(recipe, steps=rounds * recipe.sync_every * replicas)
    return replace(recipe, replicas=replicas)


def flops_of(name: str, recipe: Recipe) -> int:
    """Return the FLOPs of an arm's training with a recipe."""
    name = name.removesuffix(FLOPS)
    model = ARMS[name].model
    shares_readout = model.get("exits") == "shared"
    return training_flops(recipe, model.get("objective", name), model.get("lookahead", 0), shares_readout)


def make_module(arm: Arm, recipe: Recipe) -> Model:
    """Return the untrained model of an arm."""
    num_layers = recipe.layers_per_block if arm.is_shallow else recipe.num_layers
    num_blocks = 1 if arm.is_shallow else recipe.num_blocks
    kind: type[Model] = DiffusionBlocks if arm.reads_z else ByteTransformer
    return kind(num_layers=num_layers, num_blocks=num_blocks, **common_arguments(recipe), **arm.model)


def make_strategy(arm: Arm, recipe: Recipe) -> Strategy:
    """Return the block strategy of an arm."""
    usual: dict[str, Any] = {
        "replicas": recipe.replicas,
        "network": recipe.network,
        "average_decay": recipe.average_decay,
        "sync_every": recipe.sync_every,
    }
    return BlockTrainStrategy(**usual | (arm.strategy or {}))


def run(name: str, recipe: Recipe, data: ByteDataModule, seed: int) -> dict[str, Any]:
    """Train one arm of ``ARMS`` with one seed and return its row."""
    arm = ARMS[name.removesuffix(FLOPS)]
    own = recipe_of(name, recipe)
    found = train(arm, own, data, seed)
    flops = {"training_flops": flops_of(name, own)}
    return {"arm": name, "title": arm.title, "seed": seed, "recipe": asdict(recipe), **flops, **found}


def train(
    arm: Arm,
    recipe: Recipe,
    data: ByteDataModule,
    seed: int,
    callbacks: Sequence[L.Callback] = (),
    val_batches: int = 0,
) -> dict[str, Any]:
    """Train one arm with one seed and evaluate every exit on val and test.

    Args:
        arm: The arm.
        recipe: Of this arm: with its replicas and steps.
        data: The corpus.
        seed: Of weights and data order.
        callbacks: Of the Trainer.
        val_batches: Batches of val every ``validate_every`` steps of the recipe, for callbacks that want to know.
    """
    L.seed_everything(seed, workers=True, verbose=False)
    module = make_module(arm, recipe)
    make = None if arm.strategy is None else lambda: make_strategy(arm, recipe)
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as log:
        demo_arm = DemoArm(arm.title, arm.title, lambda: module, make)
        watched = replace(recipe, val_batches=val_batches)
        trainer = fit_trainer(demo_arm, watched, callbacks, fresh_logger(Path(log), "log"))
        trainer.fit(module, datamodule=data)
    train_s = time.perf_counter() - began_s
    for stage in ("fit", "test"):
        data.setup(stage)
    splits = {"val": data.val_dataloader().dataset, "test": data.test_dataloader().dataset}
    return {
        "steps": trainer.global_step,
        "hyper_parameters": dict(module.hparams),
        **token_counts(trainer.strategy, recipe),
        "corpus_sha256": data.corpus_info.sha256,
        "threads": torch.get_num_threads(),
        "train_s": round(train_s, 1),
        **{split: evaluate(module, dataset, recipe, seed) for split, dataset in splits.items()},
    }


def token_counts(strategy: Strategy, recipe: Recipe) -> dict[str, Any]:
    """Return the tokens accepted into each block, or seen by a control, and those that all workers processed."""
    if not isinstance(strategy, BlockTrainStrategy):
        return {"tokens_per_block": recipe.tokens_per_block, "total_tokens": recipe.tokens_per_block}
    per_block = strategy.accepted_tokens // recipe.num_blocks
    return {"tokens_per_block": per_block, "total_tokens": strategy.worker_tokens}


def evaluate(module: Model, dataset: Any, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Return nats per byte at every exit (one sweep, where there are sweeps), and the sweep quantities of a part."""
    subset = spaced_batches(dataset, recipe.test_windows, recipe.batch_size)
    batches = [subset[idx] for idx in range(len(subset))]
    exits, num_bytes = mean_exit_nats(module.eval(), batches)
    result: dict[str, Any] = {"exits": exits, "num_bytes": num_bytes}
    if isinstance(module, DiffusionBlocks):
        result["sweep"] = asdict(evaluate_sweep(module, batches[::SWEEP_EVERY], num_draws=NUM_DRAWS, seed=seed))
    return result


def stored(path: Path | None, recipe: Recipe, sha256: str) -> list[dict[str, Any]]:
    """Return the rows that ``path`` holds of this recipe on the corpus with this hash."""
    if path is None or not path.exists():
        return []
    wanted = asdict(recipe), sha256
    rows = map(json.loads, path.read_text().splitlines())
    return [row for row in rows if (row["recipe"], row["corpus_sha256"]) == wanted]


def known_arm(name: str) -> str:
    """Return the name of an arm, for ``argparse``.

    Raises:
        argparse.ArgumentTypeError: If there is none.
    """
    if name.removesuffix(FLOPS) not in ARMS:
        raise argparse.ArgumentTypeError(f"unknown arm {name!r}: choose from {', '.join(map(repr, ARMS))}")
    return name


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="deep")
    parser.add_argument("--quick", action="store_true", help="the tiny size, one seed, every arm")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", type=known_arm, default=list(ARMS), metavar="ARM", help="default: all")
    parser.add_argument("--train", nargs="+", help="train files; default: the python-docs corpus")
    parser.add_argument("--val", nargs="+")
    parser.add_argument("--test", nargs="+")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--json", type=Path, help="one line per run is appended here")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run what is missing, print the tables and return all rows of the size and the corpus."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", module="lightning")
    recipe = SIZES["tiny" if args.quick else args.size]
    files = {"train": args.train, "val": args.val, "test": args.test}
    data = ByteDataModule(window_bytes=recipe.window_bytes, batch_size=recipe.batch_size, **files)
    data.prepare_data()
    data.setup("fit")
    sha256 = data.corpus_info.sha256
    rows = stored(args.json, recipe, sha256)
    done = {(row["arm"], row["seed"]) for row in rows}
    for seed in args.seeds:
        for name in args.arms:
            if (name, seed) in done:
                continue
            line = json.dumps(run(name, recipe, data, seed))
            rows.append(json.loads(line))
            if args.json is not None:
                with args.json.open("a") as lines:
                    lines.write(line + "\n")
    console = Console(width=200)
    for table in tables(rows, recipe, markdown=args.markdown):
        console.print(table, soft_wrap=True)
    return rows


if __name__ == "__main__":
    main()
