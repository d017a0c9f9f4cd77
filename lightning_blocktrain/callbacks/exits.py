"""Evaluation of a deep model at the end of each stage: what it is worth when it is cut off there.

Owns the sums and the names. A model is cut with the hooks that the stages of a pipeline learn through
(``SupportsStages``), under any strategy: the layers up to the exit, and the one shared readout or the private exit
that the module has there (``stage_exits``).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol, cast, runtime_checkable

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_blocktrain.callbacks.rounds import ReportsRounds
from lightning_blocktrain.errors import explain
from lightning_blocktrain.metrics import bits_per_token, count_tokens
from lightning_blocktrain.partition import as_layout, default_num_blocks
from lightning_blocktrain.pipeline.exits import exit_after, exits_of, read_out
from lightning_blocktrain.pipeline.split import StageCut, even_sizes
from lightning_blocktrain.pipeline.stage import run_layers, split_loss
from lightning_blocktrain.protocols import SupportsStages


@runtime_checkable
class CutsStages(Protocol):
    """A strategy that cuts the module into stages."""

    @property
    def cut(self) -> StageCut:
        """The cut; known during a fit."""
        ...


@dataclass(frozen=True)
class ExitScore:
    """What the model pays for held-out tokens when it is cut off after a stage.

    Args:
        num_layers: Layers before the exit.
        nats_per_token: Mean loss per target token, in nats.
        num_tokens: Target tokens scored.
    """

    num_layers: int
    nats_per_token: float
    num_tokens: int

    @property
    def bits_per_token(self) -> float:
        """``nats_per_token`` in bits."""
        return bits_per_token(self.nats_per_token, 1)


class ExitSums:
    """Nats at each exit, summed over batches in float64.

    Args:
        sizes: Layers per stage.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.nats = [0.0] * len(sizes)
        self.num_tokens = 0
        self.num_batches = 0

    def add(self, module: nn.Module, batch: Any) -> None:
        """Score a batch, on the module's device; one without a target token counts as a batch only."""
        self.num_batches += 1
        num_tokens = count_tokens(module, batch)
        if num_tokens:  # a mean over nothing is not a number
            losses = exit_losses(module, batch, self.sizes)
            self.nats = [nats + num_tokens * loss for nats, loss in zip(self.nats, losses, strict=True)]
            self.num_tokens += num_tokens

    def scores(self) -> list[ExitScore]:
        """Return the scores, the first exit first; there must have been a token."""
        pairs = zip(accumulate(self.sizes), self.nats, strict=True)
        return [ExitScore(depth, nats / self.num_tokens, self.num_tokens) for depth, nats in pairs]


@torch.no_grad()
def exit_losses(module: nn.Module, batch: Any, sizes: Sequence[int]) -> list[float]:
    """Return the mean loss of one batch at the end of each stage; modes and the random stream stay.

    Args:
        module: The module (``SupportsStages``); evaluated in eval mode.
        batch: On its device.
        sizes: Layers per stage.
    """
    layout = as_layout(cast(SupportsStages, module).configure_blocks())
    exits = exits_of(module, len(layout.layers))
    layers, losses = iter(layout.layers), []
    with _undisturbed(module):
        hidden = cast(SupportsStages, module).stage_embed(batch)
        for size, depth in zip(sizes, accumulate(sizes), strict=True):
            hidden = run_layers(module, [next(layers) for _ in range(size)], hidden, batch)
            logits = read_out(hidden, layout.readout, exit_after(exits, depth))
            loss, _ = split_loss(cast(SupportsStages, module).stage_loss(logits, batch))
            losses.append(float(loss))
    return losses


def evaluate_exits(module: nn.Module, batches: Iterable[Any], sizes: Sequence[int]) -> list[ExitScore]:
    """Score the model cut off after each stage; its modes, its weights and the random stream stay.

    Batches weigh as ``metrics.count_tokens`` counts them. So the score is exact if the module's ``stage_loss`` is a
    mean over the tokens that are counted.

    Args:
        module: A module with the ``stage_*`` hooks, on any device; evaluated in eval mode.
        batches: Batches as ``stage_embed`` takes them; at least one target token in all.
        sizes: Layers per stage, which add up to all layers.

    Returns:
        One score per stage; the last is that of the whole model.

    Raises:
        ValueError: If the sizes do not fit the layers, or there is no token.
        MisconfigurationException: If the module lacks a hook.
    """
    refuse_no_stages(module)
    num_layers = len(as_layout(cast(SupportsStages, module).configure_blocks()).layers)
    sums = ExitSums(exit_sizes(num_layers, sizes, None))
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    for batch in batches:
        sums.add(module, move_data_to_device(batch, device))
    if not sums.num_tokens:
        raise ValueError(explain("batches must hold at least one target token", "none", "pass a longer split"))
    return sums.scores()


def exit_sizes(num_layers: int, sizes: Sequence[int] | None, num_stages: int | None) -> tuple[int, ...]:
    """Return the layers per stage: ``sizes``, else ``num_stages`` nearly equal ones, else as many as fit (up to 4).

    Raises:
        ValueError: If they do not fit the layers, or disagree.
    """
    if sizes is None:
        number = default_num_blocks(num_layers) if num_stages is None else num_stages
        if not 1 <= number <= num_layers:
            rule = "num_stages must be at least 1 and at most the number of layers"
            got = f"num_stages={number}, num_layers={num_layers}"
            raise ValueError(explain(rule, got, f"use 1 to {num_layers}"))
        return even_sizes(num_layers, number)
    if not all(type(size) is int and size >= 1 for size in sizes) or sum(sizes) != num_layers:
        rule = "sizes must be the number of layers of each stage and add up to num_layers"
        got = f"sizes={list(sizes)}, num_layers={num_layers}"
        raise ValueError(explain(rule, got, "change one number, or give num_stages alone"))
    if num_stages not in (None, len(sizes)):
        got = f"sizes={list(sizes)}, num_stages={num_stages}"
        raise ValueError(explain("sizes must have one number per stage", got, "leave num_stages out"))
    return tuple(sizes)


def refuse_no_stages(module: nn.Module) -> None:
    """Refuse a module that cannot be cut off after a stage.

    Raises:
        MisconfigurationException: Naming what it lacks.
    """
    hooks = ("configure_blocks", "stage_embed", "stage_loss")
    missing = [hook for hook in hooks if not callable(getattr(module, hook, None))]
    if missing:
        rule = "exits need a module with configure_blocks, stage_embed and stage_loss"
        got = f"{type(module).__name__} without {', '.join(missing)}"
        raise MisconfigurationException(explain(rule, got, "define what is missing"))


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Evaluate inside: every submodule in eval mode, and afterwards in its own again, as the random streams."""
    modes = {part: part.training for part in module.modules()}
    cuda = {p.device for p in module.parameters() if p.device.type == "cuda"}
    module.eval()
    try:
        with torch.random.fork_rng(devices=list(cuda)):
            yield
    finally:
        for part, training in modes.items():
            part.training = training


class ExitEvaluation(L.Callback):
    """Log what the model is worth when it is cut off after each stage, in validation and in testing.

    ``val/loss/exit{s}`` (nats per token) and ``val/bits_per_token/exit{s}`` come from the layers of stages 0 to s and
    the readout there (or the module's private exit), in the Trainer's precision; the last exit is the whole model. All
    data loaders count together; the sanity check is passed over.

    The stages are those of a strategy that cuts the module into several (outside a fit: those of the newest fit),
    else what the arguments say.

    Args:
        sizes: Layers per stage; None: as ``num_stages`` says.
        num_stages: Stages of nearly equal size; None: the largest divisor of the layers up to 4.
        limit_batches: Score the first batches of each pass only, at least 1 (in every process); None: all.

    Raises:
        ValueError: If ``limit_batches`` or ``num_stages`` is below 1, or ``sizes`` does not agree with itself.
    """

    def __init__(
        self, sizes: Sequence[int] | None = None, num_stages: int | None = None, limit_batches: int | None = None
    ) -> None:
        for name, value in {"num_stages": num_stages, "limit_batches": limit_batches}.items():
            if value is not None and value < 1:
                raise ValueError(explain(f"{name} must be at least 1", f"{name}={value}", "use 1 or more"))
        if sizes is not None:
            exit_sizes(sum(sizes), sizes, num_stages)
        self.sizes, self.num_stages, self.limit_batches = sizes, num_stages, limit_batches
        self.scores: list[ExitScore] = []
        self._sums = ExitSums(())
        self._newest_cut: tuple[int, ...] = ()

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a module without the ``stage_*`` hooks."""
        refuse_no_stages(pl_module)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the sums anew."""
        self._sums = ExitSums(self._sizes(trainer, pl_module))

    @override
    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the sums anew."""
        self._sums = ExitSums(self._sizes(trainer, pl_module))

    @override
    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Score the batch."""
        if not trainer.sanity_checking and not self._enough:
            with trainer.precision_plugin.val_step_context():
                self._sums.add(pl_module, batch)

    @override
    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Score the batch."""
        if not self._enough:
            with trainer.precision_plugin.test_step_context():
                self._sums.add(pl_module, batch)

    @override
    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log under ``val/``."""
        if not trainer.sanity_checking:
            self._log(trainer, pl_module, "val")

    @override
    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log under ``test/``."""
        self._log(trainer, pl_module, "test")

    @property
    def _enough(self) -> bool:
        return self.limit_batches is not None and self._sums.num_batches >= self.limit_batches

    def _sizes(self, trainer: L.Trainer, pl_module: L.LightningModule) -> tuple[int, ...]:
        num_layers = len(as_layout(cast(SupportsStages, pl_module).configure_blocks()).layers)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            cut = trainer.strategy.cut.sizes if isinstance(trainer.strategy, CutsStages) else ()
            self._newest_cut = cut if len(cut) > 1 else ()
        if sum(self._newest_cut) != num_layers:
            try:
                return exit_sizes(num_layers, self.sizes, self.num_stages)
            except ValueError as exc:
                raise MisconfigurationException(f"ExitEvaluation: {exc}") from exc
        asked = self.sizes or (even_sizes(num_layers, self.num_stages) if self.num_stages else self._newest_cut)
        if tuple(asked) != self._newest_cut:
            rank_zero_warn(f"ExitEvaluation uses the strategy's stages {list(self._newest_cut)}, not {list(asked)}.")
        return self._newest_cut

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Literal["val", "test"]) -> None:
        sums = self._sums
        # Every rank has its own shard; workers that train in rounds are evaluated in one place.
        several = trainer.world_size > 1 and not isinstance(trainer.strategy, ReportsRounds)
        if several:
            local = torch.tensor([*sums.nats, sums.num_tokens], dtype=torch.float64, device=pl_module.device)
            *sums.nats, num_tokens = cast(torch.Tensor, trainer.strategy.reduce(local, reduce_op="sum")).tolist()
            sums.num_tokens = int(num_tokens)
        if not sums.num_tokens:
            return
        self.scores = sums.scores()
        for stage_idx, score in enumerate(self.scores):
            values = {"loss": score.nats_per_token, "bits_per_token": score.bits_per_token}
            for name, value in values.items():
                exact = torch.tensor(value, dtype=torch.float64)
                key = f"{stage}/{name}/exit{stage_idx}"
                # The ranks agree already: their mean changes nothing, and Lightning asks for it.
                pl_module.log(key, exact, on_step=False, on_epoch=True, sync_dist=several)
