"""The models that are compared, and how one of them is trained and measured.

Every arm is trained by a ``lightning.Trainer`` from the same recipe, data order and seed, and tested on the same
windows. Owns what is run and measured; what the numbers mean together is ``report``'s.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks.weight_averaging import WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Subset
from typing_extensions import override

from lightning_blocktrain.callbacks import AcceptedThroughput, MemoryMonitor, RoundMonitor
from lightning_blocktrain.callbacks.sweep_eval import SweepEvaluation, SweepReport
from lightning_blocktrain.data import ByteDataModule
from lightning_blocktrain.data.bytes import ByteBatches
from lightning_blocktrain.demo.recipe import Recipe
from lightning_blocktrain.models import ByteTransformer, DiffusionBlocks
from lightning_blocktrain.models.base import Batch
from lightning_blocktrain.models.loading import Model
from lightning_blocktrain.rounds.average import decay_after
from lightning_blocktrain.strategies import BlockTrainStrategy

NUM_DRAWS = 16
"""K of every reported mixture of sweeps."""


@dataclass(frozen=True)
class Arm:
    """One model and the way it is trained.

    Args:
        name: Key in reports and name of its files.
        title: What a table calls it.
        make_module: Builds the untrained module; its weights come from the global random stream.
        make_strategy: Builds the block strategy; None trains end to end.
    """

    name: str
    title: str
    make_module: Callable[[], Model]
    make_strategy: Callable[[], Strategy] | None = None


def diffusion_blocks(recipe: Recipe) -> Arm:
    """Return DiffusionBlocks, each block trained by workers of its own."""
    return Arm(
        "diffusion_blocks",
        "DiffusionBlocks (denoise), blocktrain",
        lambda: denoising_module(recipe, {}),
        lambda: block_strategy(recipe),
    )


def byte_transformer(recipe: Recipe) -> Arm:
    """Return the causal Transformer whose blocks learn from the frozen features of the blocks before them."""
    return Arm(
        "byte_transformer",
        "ByteTransformer (features), blocktrain",
        lambda: causal_module(recipe, recipe.num_layers, num_blocks=recipe.num_blocks, exits="own"),
        lambda: block_strategy(recipe),
    )


def causal_full(recipe: Recipe) -> Arm:
    """Return the control of L layers, trained end to end."""
    title = f"causal L={recipe.num_layers}, end to end"
    return Arm("causal_full", title, lambda: causal_module(recipe, recipe.num_layers))


def causal_block(recipe: Recipe) -> Arm:
    """Return the control of ``L_b`` layers, one block's worth, trained end to end."""
    title = f"causal L={recipe.layers_per_block}, end to end"
    return Arm("causal_block", title, lambda: causal_module(recipe, recipe.layers_per_block))


ARMS: tuple[Callable[[Recipe], Arm], ...] = (byte_transformer, diffusion_blocks, causal_full, causal_block)
"""The runs of the demo: two block-trained models, then their two controls."""


def denoising_module(recipe: Recipe, changes: Mapping[str, Any]) -> DiffusionBlocks:
    """Return untrained DiffusionBlocks of the recipe's shape, with other values for some of its arguments."""
    return DiffusionBlocks(recipe.num_layers, recipe.num_blocks, **{**common_arguments(recipe), **changes})


def causal_module(recipe: Recipe, num_layers: int, **options: Any) -> ByteTransformer:
    """Return an untrained causal Transformer of the recipe's shape and another depth, with more options."""
    return ByteTransformer(num_layers, **common_arguments(recipe), **options)


def common_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments that every model takes from the recipe."""
    names = ("width", "num_heads", "window_bytes", "lr", "weight_decay", "warmup_steps")
    return {name: getattr(recipe, name) for name in names}


def block_strategy(recipe: Recipe) -> BlockTrainStrategy:
    """Return the strategy of the block-trained arms."""
    return BlockTrainStrategy(
        replicas=recipe.replicas,
        sync_every=recipe.sync_every,
        network=recipe.network,
        average_decay=recipe.average_decay,
    )


class RunningAverage(WeightAveraging):
    """Gives a control the same running average of its weights as block-trained models have of their masters.

    Args:
        recipe: Says how often and how far back.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._every = recipe.sync_every

        def mix(average: Tensor, newest: Tensor, num_averaged: Tensor | int) -> Tensor:
            return newest.lerp(average, decay_after(int(num_averaged) + 1, recipe.average_decay))

        super().__init__(avg_fn=mix)

    @override
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether a round would end after this step."""
        return step_idx is not None and (step_idx + 1) % self._every == 0


class OptimizerBytes(L.Callback):
    """Measure the optimizer's state tensors in the second step, when every parameter has its own.

    Under ``blocktrain`` the optimizer holds the acting worker's state whenever it steps, so every worker is seen.
    """

    def __init__(self) -> None:
        self.worker_bytes = 0
        self._by_parameter: dict[torch.Tensor, int] = {}

    @property
    def whole_model_bytes(self) -> int:
        """Bytes of one state per parameter, of all parameters that any worker trained."""
        return sum(self._by_parameter.values())

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Count the state of the worker that is about to step."""
        if trainer.global_step != 1:
            return
        held = {
            parameter: sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, torch.Tensor))
            for parameter, state in optimizer.state.items()
        }
        self._by_parameter |= held
        self.worker_bytes = max(self.worker_bytes, sum(held.values()))


@dataclass(frozen=True)
class ArmResult:
    """What one arm became and cost.

    Args:
        arm: What was trained.
        module: The trained module.
        num_parameters: Of the whole module.
        steps: Lightning steps taken.
        tokens_per_step: Tokens that one block, or the whole control, processes in a step.
        tokens_per_block: Tokens accepted into each block, or seen by the control.
        total_tokens: Tokens processed by all workers together.
        nats_per_byte: On the test windows, after one sweep where there are sweeps.
        sweep: Sweep evaluation on the same windows; None for a causal model.
        throughput: Totals and rates of ``AcceptedThroughput``.
        rounds: Totals of ``RoundMonitor``; empty without rounds.
        memory_measure: ``pss``, or what the system offers instead.
        peak_mib: Largest memory of the process tree during the fit, what earlier arms left behind included.
        worker_optimizer_bytes: Optimizer state of the largest worker, measured.
        model_optimizer_bytes: Optimizer state of all parameters, measured.
        train_wall_s: Seconds of the fit, validation included.
        metrics_path: The CSV that the run has logged.
    """

    arm: Arm
    module: Model
    num_parameters: int
    steps: int
    tokens_per_step: int
    tokens_per_block: int
    total_tokens: int
    nats_per_byte: float
    sweep: SweepReport | None
    throughput: dict[str, float]
    rounds: dict[str, float]
    memory_measure: str
    peak_mib: float
    worker_optimizer_bytes: int
    model_optimizer_bytes: int
    train_wall_s: float
    metrics_path: Path


@contextmanager
def threads(num_threads: int | None) -> Iterator[None]:
    """Let torch compute with so many threads, and with as many as before afterwards; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_arm(
    arm: Arm,
    recipe: Recipe,
    datamodule: ByteDataModule,
    seed: int,
    out: Path,
    callbacks: Sequence[L.Callback] = (),
) -> ArmResult:
    """Train an arm by the recipe and test it.

    Args:
        arm: What to train.
        recipe: How; the datamodule must have its window and batch size.
        datamodule: The corpus.
        seed: Of the weights and of all noise; sets the global random state.
        out: Directory for the run's log, ``runs/<name>/``.
        callbacks: More callbacks for the fit and the test.
    """
    L.seed_everything(seed, workers=True, verbose=False)
    module = arm.make_module()
    memory, throughput, optimizer_bytes = MemoryMonitor(), AcceptedThroughput(), OptimizerBytes()
    rounds = RoundMonitor() if arm.make_strategy else None
    monitors = [memory, throughput, optimizer_bytes, *([rounds] if rounds else []), *callbacks]
    logger = fresh_logger(out / "runs", arm.name)
    trainer = fit_trainer(arm, recipe, monitors, logger)
    with threads(recipe.num_threads):
        began_s = time.perf_counter()
        trainer.fit(module, datamodule=datamodule)
        train_wall_s = time.perf_counter() - began_s
        nats, sweep = evaluate_module(module, datamodule, recipe, seed, logger, callbacks)
    totals, round_totals = throughput.summary(), rounds.summary() if rounds else {}
    num_shares = recipe.num_blocks if rounds else 1
    return ArmResult(
        arm=arm,
        module=module,
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        steps=trainer.global_step,
        tokens_per_step=recipe.batch_size * recipe.window_bytes * (recipe.replicas if rounds else 1),
        tokens_per_block=round(totals["accepted_tokens"] / num_shares),
        total_tokens=int(totals["worker_tokens"]),
        nats_per_byte=nats,
        sweep=sweep,
        throughput=totals,
        rounds=round_totals,
        memory_measure=memory.measure or "none",
        peak_mib=memory.peak_mib,
        worker_optimizer_bytes=optimizer_bytes.worker_bytes,
        model_optimizer_bytes=optimizer_bytes.whole_model_bytes,
        train_wall_s=train_wall_s,
        metrics_path=Path(logger.log_dir) / "metrics.csv",
    )


def fit_trainer(arm: Arm, recipe: Recipe, callbacks: Sequence[L.Callback], logger: CSVLogger) -> L.Trainer:
    """Return the Trainer of an arm: equal tokens per block, validation at equal numbers of tokens."""
    replicas = recipe.replicas if arm.make_strategy else 1
    averages = [] if arm.make_strategy or not recipe.average_decay else [RunningAverage(recipe)]
    return L.Trainer(
        accelerator=recipe.accelerator,
        devices=1,
        strategy=arm.make_strategy() if arm.make_strategy else "auto",
        max_steps=recipe.steps // replicas,
        gradient_clip_val=recipe.clip,
        val_check_interval=max(1, recipe.validate_every // replicas),
        check_val_every_n_epoch=None,
        limit_val_batches=recipe.val_batches,
        num_sanity_val_steps=0,
        log_every_n_steps=max(1, min(10, recipe.validate_every // replicas)),
        logger=logger,
        callbacks=[*callbacks, *averages],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def evaluate_module(
    module: Model,
    datamodule: ByteDataModule,
    recipe: Recipe,
    seed: int,
    logger: CSVLogger | None = None,
    callbacks: Sequence[L.Callback] = (),
) -> tuple[float, SweepReport | None]:
    """Test on the recipe's windows; returns nats per byte (one sweep) and, for DiffusionBlocks, the sweep report."""
    datamodule.setup("test")
    loader = datamodule.test_dataloader()
    batches = spaced_batches(loader.dataset, recipe.test_windows, recipe.batch_size)
    sweeps = SweepEvaluation(num_draws=NUM_DRAWS, max_batches=None, seed=seed)
    is_diffusion = isinstance(module, DiffusionBlocks)
    trainer = L.Trainer(
        accelerator=recipe.accelerator,
        devices=1,
        logger=logger or False,
        callbacks=[*([sweeps] if is_diffusion else []), *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    (values,) = trainer.test(module, DataLoader(batches, batch_size=None), verbose=False)
    # The mean over draws says the same as the test loss of one draw, with less noise.
    nats = sweeps.report.sweep_ce_k1 if sweeps.report else float(values["test/loss"])
    return nats, sweeps.report


def spaced_batches(dataset: ByteBatches, num_windows: int, batch_size: int) -> Subset[Batch]:
    """Return whole batches spread evenly over a split, about ``num_windows`` windows.

    Args:
        dataset: Batches by index; a last one that is not whole is passed over, unless it is the only one.
        num_windows: Windows wanted; the result has at least one batch and at most all.
        batch_size: Windows of a whole batch.
    """
    num_batches = len(dataset)
    if num_batches > 1 and len(dataset[num_batches - 1][0]) < batch_size:
        num_batches -= 1
    wanted = min(num_batches, max(1, num_windows // batch_size))
    return Subset(dataset, [idx * num_batches // wanted for idx in range(wanted)])


@torch.no_grad()
def mean_exit_nats(module: Model, batches: Iterable[Batch]) -> tuple[list[float], int]:
    """Return nats per byte at every exit of a module in eval mode, and the number of bytes, summed in float64."""
    totals, num_bytes = torch.zeros(module.num_blocks, dtype=torch.float64), 0
    for batch_idx, batch in enumerate(batches):
        nats = module.exit_nats(batch, batch_idx)
        totals += nats.double().sum((1, 2)).cpu()
        num_bytes += nats[0].numel()
    return (totals / num_bytes).tolist(), num_bytes


def fresh_logger(save_dir: Path, name: str) -> CSVLogger:
    """Return a CSV logger that writes to ``save_dir/name``; an earlier run's log there is removed."""
    for left_over in ("metrics.csv", "hparams.yaml"):
        (save_dir / name / left_over).unlink(missing_ok=True)
    return CSVLogger(save_dir, name=name, version="")
