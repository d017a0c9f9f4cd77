"""The demo: block training beside its controls at equal tokens, from one recipe, on one machine, in minutes.

Trains DiffusionBlocks and ByteTransformer with ``strategy="blocktrain"`` (simulated workers) and the causal
Transformers of L and of ``L_b`` layers end to end, tests all on the same windows, and writes:

| file | content |
|---|---|
| ``report.json`` | below |
| ``metrics.csv`` | every logged value, see ``curves`` |
| ``curves.png`` | val bits per byte against tokens; only with matplotlib |
| ``<model>.ckpt`` | the trained weights, for ``blocktrain evaluate`` and ``generate`` |
| ``runs/<model>/`` | each run's own log |

Models: ``diffusion_blocks``, ``byte_transformer``, ``causal_full`` (L layers), ``causal_block`` (``L_b`` layers).
A block of a block-trained model sees as many tokens, summed over its replicas, as a control sees in all.

``report.json``, schema version 1; nats are per byte, and what does not exist is null:

| key | content |
|---|---|
| ``bits_per_byte`` | by model, on the test windows; DiffusionBlocks after one sweep, and ``diffusion_blocks_k16`` |
| ``gaps`` | method -> control -> ``bits_per_byte`` (above 0: the method is worse) and ``relative_frac`` |
| ``local_ce`` | nats by block at its own noise; contains the target, compares with nothing |
| ``sweep_ce_k1``, ``sweep_ce_k16`` | nats after one sweep (mean of 16); under the mean probability of 16 |
| ``sweep_ce_k`` | ``sweep_ce_k16``, by the name that does not depend on the number of draws |
| ``prior_ce_k1``, ``prior_ce`` | the same of block 0 alone (``prior_ce``: 16 draws) |
| ``composition_gain`` | ``prior_ce - sweep_ce_k16``, the same starting noise |
| ``ablations`` | ``z_noise_ce``, ``z_zero_ce``, ``context_scrambled_ce``, 16 draws; ``no_z_ce`` without ``z`` |
| ``span_ce``, ``leak_accuracy`` | as in ``SweepReport`` |
| ``tokens_per_s`` | by model: accepted tokens of all workers per second of training; they take turns |
| ``peak_pss_mib`` | by model: peak of this process while it trained; null where the system has no PSS |
| ``peak_memory`` | by model: ``measure`` and ``mib`` |
| ``optimizer_bytes`` | by model, measured: ``per_worker`` (the largest) and ``whole_model`` |
| ``participation`` | by block-trained model: accepted updates / expected ones |
| ``models`` | by model: title, parameters, steps, ``tokens_per_block``, ``total_tokens``, times, round totals |
| ``network`` | ``name``, and that it is ``simulated`` |
| ``test`` | ``num_windows`` and ``num_bytes`` of the final evaluation |
| ``corpus`` | ``name``, ``sha256``, ``split_bytes`` |
| ``recipe``, ``budget``, ``seeds``, ``threads``, ``versions``, ``wall_s`` | how it was made |
| ``samples`` | generated text by model |
| ``summary`` | sentences computed from the numbers |
| ``schema_version`` | 1; raised when a key changes its meaning |
"""

import json
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from typing_extensions import override

from lightning_blocktrain.data import ByteDataModule
from lightning_blocktrain.demo.arms import ARMS, ArmResult, run_arm, threads
from lightning_blocktrain.demo.curves import curves_png, points_by_model, read_rows, rows_csv, write_whole
from lightning_blocktrain.demo.recipe import Recipe, recipe_of
from lightning_blocktrain.demo.report import Setting, build_report, print_report
from lightning_blocktrain.errors import explain
from lightning_blocktrain.models.loading import save_model

__all__ = ["ARMS", "ArmResult", "Recipe", "build_report", "recipe_of", "run_arm", "run_demo"]

PROMPT = b"Return the "
NUM_SAMPLE_BYTES = 120


def run_demo(
    budget: str = "small",
    corpus: str = "python-docs",
    out: Path = Path("demo_out"),
    seed: int = 0,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run all arms, write the files named above and print the report.

    Args:
        budget: Name of a budget, or a number that scales the steps of ``small``.
        corpus: A named corpus or local files, as ``ByteDataModule`` takes them.
        out: Directory to write to; made if it is not there, earlier results in it are replaced.
        seed: Of all runs, at least 0.
        console: Where to print; None: standard output.

    Returns:
        The report.

    Raises:
        ValueError: If an argument is out of range or ``out`` cannot be written; before anything is trained.
        CorpusError: If the corpus cannot be read or is too short.
    """
    console = console or Console()
    recipe = recipe_of(budget)
    prepare_out(out)
    datamodule = ByteDataModule(corpus, recipe.window_bytes, recipe.batch_size, seed=seed)
    for stage in ("fit", "test"):
        datamodule.setup(stage)
    began_s = time.perf_counter()
    results = run_arms(recipe, datamodule, seed, out, console)
    with threads(recipe.num_threads):
        texts = {r.arm.name: PROMPT + r.module.generate(PROMPT, NUM_SAMPLE_BYTES, seed=seed) for r in results[:2]}
    samples = {name: printable(text) for name, text in texts.items()}
    setting = Setting(recipe, datamodule.corpus_info, seed, budget, time.perf_counter() - began_s)
    report = build_report(results, setting, samples)
    for result in results:  # together with the report, so that an interrupted run leaves an earlier one whole
        save_model(result.module, out / f"{result.arm.name}.ckpt")
    picture = write_files(report, results, out)
    print_report(report, console)
    if not picture:
        console.print("No curves.png: matplotlib is not installed (pip install 'lightning-blocktrain[plot]').")
    written = "report.json, metrics.csv, curves.png" if picture else "report.json, metrics.csv"
    console.print(f"Written to {out}: {written} and the models.", markup=False)
    return report


def prepare_out(out: Path) -> None:
    """Make the directory and try it.

    Raises:
        ValueError: If it is a file or cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as exc:
        rule = "out must be a directory that can be written"
        raise ValueError(explain(rule, f"out={str(out)!r} ({exc.strerror})", "choose another directory")) from exc


def run_arms(recipe: Recipe, datamodule: ByteDataModule, seed: int, out: Path, console: Console) -> list[ArmResult]:
    """Run the arms one after another under a progress bar.

    Raises:
        KeyboardInterrupt: If a fit is interrupted.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = []
    with quiet_lightning(), Progress(*columns, console=console) as progress:
        arms = [make_arm(recipe) for make_arm in ARMS]
        tasks = [progress.add_task(arm.title, start=False, total=recipe.steps) for arm in arms]
        for arm, task in zip(arms, tasks, strict=True):
            progress.start_task(task)
            try:
                result = run_arm(arm, recipe, datamodule, seed, out, [FitProgress(progress, task, arm.title)])
            except SystemExit as exc:  # how Lightning ends an interrupted fit
                raise KeyboardInterrupt from exc
            progress.stop_task(task)
            results.append(result)
    return results


class FitProgress(L.Callback):
    """Show a run's steps in a rich progress bar.

    Args:
        progress: The bar's owner.
        task: Its task.
        title: What it is called.
    """

    def __init__(self, progress: Progress, task: TaskID, title: str) -> None:
        self.progress = progress
        self.task = task
        self.title = title

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance to the step."""
        self.progress.update(self.task, completed=trainer.global_step, total=trainer.max_steps)

    @override
    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say that the rest of the time is evaluation."""
        self.progress.update(self.task, description=f"{self.title} (evaluating)")

    @override
    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take it back."""
        self.progress.update(self.task, description=self.title)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Hold back what Lightning says about every Trainer; warnings other than about loaders stay."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not have many workers.*")
            warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*")
            yield
    finally:
        logger.setLevel(level)


def write_files(report: dict[str, Any], results: list[ArmResult], out: Path) -> bool:
    """Write the report, the table of all logged values and, with matplotlib, the picture; tell whether it was."""
    rows = [row for r in results for row in read_rows(r.metrics_path, r.arm.name, r.tokens_per_step, r.steps)]
    write_whole(out / "metrics.csv", rows_csv(rows))
    write_whole(out / "report.json", (json.dumps(report, indent=2, allow_nan=False) + "\n").encode())
    picture = curves_png(points_by_model(rows), {r.arm.name: r.arm.title for r in results})
    if picture is None:
        # A picture of earlier runs would be taken for these.
        (out / "curves.png").unlink(missing_ok=True)
        return False
    write_whole(out / "curves.png", picture)
    return True


def printable(text: bytes) -> str:
    """Return bytes as text that is safe to show in a terminal: no control characters but line breaks and tabs."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in decoded)
