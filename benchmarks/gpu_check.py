"""One look at a GPU: the paper's shape beside its controls at equal tokens.

``python -m benchmarks.gpu_check [--corpus FILE] [--json FILE]`` trains d=512, B=3 blocks of 4 layers, windows of 256
bytes, and prints tokens per second, memory and nats per byte. Without a GPU it refuses, unless ``--accelerator cpu``.

Only torch, lightning and this package are needed before it trains. The text is a file (its last 5 % are test, the 5 %
before them valid), or the embedded corpus. Workers are simulated, one after the other: tokens per second are those of
one GPU that does the work of all. ``worker`` is the memory of a worker's weights, gradients and optimizer state,
without activations; ``peak`` is what the device held at most in the whole run.
"""

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_blocktrain import BlockTrainStrategy, ByteDataModule, ByteTransformer, DiffusionBlocks
from lightning_blocktrain.demo.arms import (
    Arm,
    OptimizerBytes,
    common_arguments,
    fit_trainer,
    fresh_logger,
    mean_exit_nats,
    spaced_batches,
)
from lightning_blocktrain.demo.recipe import Recipe

MIB = 2**20
ARMS: dict[str, tuple[Any, dict[str, Any], dict[str, Any] | None]] = {
    "causal L": (ByteTransformer, {}, None),
    "causal L_b": (ByteTransformer, {}, None),
    "lookahead": (ByteTransformer, {"objective": "features", "exits": "own", "lookahead": 1}, {}),
    "lookahead, rounds of 2": (
        ByteTransformer,
        {"objective": "features", "exits": "own", "lookahead": 1},
        {"sync_every": 2},
    ),
    "denoise": (DiffusionBlocks, {"objective": "denoise"}, {}),
}
"""Per arm: the model, its options, and those of the strategy; None: end to end."""


PAPER = Recipe(
    steps=500,
    num_layers=12,
    num_blocks=3,
    width=512,
    num_heads=8,
    window_bytes=256,
    batch_size=32,
    lr=1e-3,
    warmup_steps=50,
    val_batches=0,
    test_windows=512,
    accelerator="gpu",
)
TINY = replace(
    PAPER, steps=6, num_layers=4, num_blocks=2, width=16, num_heads=2, window_bytes=16, batch_size=4, test_windows=8
)
TIMED_FROM = {PAPER.width: 20, TINY.width: 2}
"""Steps before the timed ones, by width."""


class Clock(L.Callback):
    """Times the steps after the first ones, the device's work included.

    Args:
        timed_from: Steps that are not timed.
    """

    def __init__(self, timed_from: int) -> None:
        self._from = timed_from
        self._began_s = 0.0
        self.seconds = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Start after the last step that is not timed."""
        if trainer.global_step == self._from:
            self._began_s = _now()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop."""
        self.seconds = _now() - self._began_s


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def run(name: str, recipe: Recipe, data: ByteDataModule) -> dict[str, Any]:
    """Train one arm and return what was measured."""
    kind, options, strategy = ARMS[name]
    is_cut, timed_from = strategy is not None, TIMED_FROM[recipe.width]
    L.seed_everything(1, verbose=False)
    module: Any = kind(
        num_layers=recipe.layers_per_block if name == "causal L_b" else recipe.num_layers,
        num_blocks=recipe.num_blocks if is_cut else 1,
        **common_arguments(recipe),
        **options,
    )
    make = (lambda: BlockTrainStrategy(average_decay=recipe.average_decay, **(strategy or {}))) if is_cut else None
    clock, optimizer, on_gpu = Clock(timed_from), OptimizerBytes(), recipe.accelerator == "gpu"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as root:
        # Controls get the running average of their weights that blocks have of their masters.
        arm = Arm(name, name, lambda: module, make)
        fit_trainer(arm, recipe, [clock, optimizer], fresh_logger(Path(root), "log")).fit(module, datamodule=data)
    peak = torch.cuda.max_memory_allocated() / MIB if on_gpu else None
    rate = (recipe.steps - timed_from) * recipe.batch_size * recipe.window_bytes / clock.seconds
    return {
        "arm": name,
        "tokens": recipe.tokens_per_block,
        "tokens_per_s": rate,
        "worker_tokens_per_s": rate * (recipe.num_blocks if is_cut else 1),
        "worker_mib": worker_mib(module, is_cut, optimizer.worker_bytes),
        "peak_mib": peak,
        "exits": exit_nats(module, recipe, data),
    }


def worker_mib(module: Any, is_cut: bool, optimizer_bytes: int) -> float:
    """Return the MiB that the largest worker trains with: weights, gradients, and its optimizer's state as measured."""
    sizes = [sum(t.numel() for t in worker) for worker in trained_of(module)] if is_cut else []
    size = max(sizes, default=sum(parameter.numel() for parameter in module.parameters()))
    return (8 * size + optimizer_bytes) / MIB


def trained_of(module: Any) -> list[list[torch.Tensor]]:
    """Return the parameters of every block together with the interface."""
    from lightning_blocktrain.partition import as_layout, partition

    cut = partition(module, as_layout(module.configure_blocks()))
    own = dict(module.named_parameters())
    interface = [own[name] for name in cut.interface_names if name in own]
    return [interface + [own[name] for name in names if name in own] for names in cut.block_names]


def exit_nats(module: Any, recipe: Recipe, data: ByteDataModule) -> list[float]:
    """Return nats per byte of test at every exit, computed where it was trained."""
    data.setup("test")
    device = torch.device("cuda" if recipe.accelerator == "gpu" else "cpu")
    subset = spaced_batches(data.test_dataloader().dataset, recipe.test_windows, recipe.batch_size)
    batches = (subset[idx] for idx in range(len(subset)))
    with torch.no_grad():
        exits, _ = mean_exit_nats(
            module.to(device).eval(), [(inputs.to(device), targets.to(device)) for inputs, targets in batches]
        )
    module.cpu()
    return exits


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table in Markdown, each beside the first."""
    titles = ["arm", "tokens", "nats per byte", "minus causal L", "exits", "tokens/s", "of all workers"]
    titles += ["worker, MiB", "peak, MiB"]
    lines = [f"| {' | '.join(titles)} |", f"| --- |{' ---: |' * (len(titles) - 1)}"]
    for row in rows:
        ce, peak = row["exits"][-1], row["peak_mib"]
        cells = [row["arm"], f"{row['tokens']:,}", f"{ce:.3f}", f"{ce - rows[0]['exits'][-1]:+.3f}"]
        cells += [" ".join(f"{value:.3f}" for value in row["exits"]), f"{row['tokens_per_s']:,.0f}"]
        cells += [f"{row['worker_tokens_per_s']:,.0f}", f"{row['worker_mib']:,.0f}", f"{peak:,.0f}" if peak else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def corpus_options(path: Path | None, folder: Path) -> dict[str, str]:
    """Return ``ByteDataModule``'s corpus: the parts of a file, or the embedded text."""
    if path is None:
        return {"corpus": "python-docs"}
    from benchmarks.pipeline_corpora import split_text, write_corpus

    return write_corpus("text", split_text(path.read_bytes()), folder).options


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Train the arms, print the table and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--corpus", type=Path, help="a text (default: the embedded corpus)")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    add("--steps", type=int, default=PAPER.steps, help="of every control, and of every block")
    add("--seconds", type=float, default=330.0, help="no arm is begun that is not likely to end before")
    add("--accelerator", choices=["gpu", "cpu"], default="gpu")
    add("--tiny", action="store_true", help="a tiny model: shows that it runs")
    add("--json", type=Path, help="file for the rows")
    args = parser.parse_args(argv)
    if args.accelerator == "gpu" and not torch.cuda.is_available():
        parser.error("--accelerator gpu needs a CUDA device; torch finds none; use --accelerator cpu --tiny to try it")
    recipe = replace(TINY if args.tiny else replace(PAPER, steps=args.steps), accelerator=args.accelerator)
    if recipe.steps <= TIMED_FROM[recipe.width]:
        rule = f"--steps must be above {TIMED_FROM[recipe.width]}, which are not timed"
        parser.error(f"{rule}; got {recipe.steps}; use 500")
    warnings.filterwarnings("ignore")
    torch.set_float32_matmul_precision("high")
    rows: list[dict[str, Any]] = []
    began_s, longest_s = time.perf_counter(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        options = corpus_options(args.corpus, Path(folder))
        data = ByteDataModule(window_bytes=recipe.window_bytes, batch_size=recipe.batch_size, seed=1, **options)  # type: ignore[arg-type]
        for name in args.arms:
            begin_s = time.perf_counter()
            if rows and begin_s - began_s + longest_s > args.seconds:
                print(f"{name}: left out, {args.seconds:g} s would not do")
                continue
            rows.append(run(name, recipe, data))
            longest_s = max(longest_s, time.perf_counter() - begin_s)
            print(
                f"{name}: {rows[-1]['exits'][-1]:.3f} nats per byte, {time.perf_counter() - begin_s:.0f} s", flush=True
            )
    named = torch.cuda.get_device_name() if args.accelerator == "gpu" else "the CPU"
    print(f"\non {named}, torch {torch.__version__}, one seed, workers simulated one after the other\n\n{table(rows)}")
    if args.json:
        args.json.write_text(json.dumps({"device": named, "recipe": asdict(recipe), "rows": rows}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
