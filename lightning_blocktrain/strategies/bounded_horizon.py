"""``Trainer(strategy="rgc")``: the stages of a deep model learn at the same time, each from its own loss.

Owns the Lightning hooks and nothing else. One Trainer drives (world size 1): it orders batches and steps, and the
stages, which own the gradients and the optimizer state, carry them out on aliases of the live module (``pipeline``).
``training_step`` of the module is not called; its ``stage_embed`` and ``stage_loss`` are.

One Lightning step is one ordered step. The loss of a batch is that of the newest finished one, at most as old as the
pipeline is deep. Every finished batch goes to the loggers once, under its own step: what finishes in one training step
is none, one or several batches, of which ``self.log`` would keep the last or repeat it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_blocktrain.pipeline.account import TimeAccount
from lightning_blocktrain.pipeline.base import FinishedBatch
from lightning_blocktrain.pipeline.credit import Credit
from lightning_blocktrain.pipeline.orders import Clip
from lightning_blocktrain.pipeline.readout import ConsensusWeights
from lightning_blocktrain.pipeline.settings import Backend, Lag, Mode, PipelineSettings, Schedule, StageSplit
from lightning_blocktrain.pipeline.split import StageCut
from lightning_blocktrain.pipeline.stage import Method
from lightning_blocktrain.strategies.batch_log import BatchLog, DoneBatch, num_samples_or_1
from lightning_blocktrain.strategies.contract import refuse_optimizers, refusing_several_optimizers
from lightning_blocktrain.strategies.pipeline_run import PipelineRun
from lightning_blocktrain.strategies.progress import is_last_step
from lightning_blocktrain.strategies.stage_guard import (
    asked_stages,
    known_switch_step,
    num_groups,
    refuse_callbacks,
    refuse_closures,
    refuse_precision,
    refuse_trainer,
    stage_layout,
    stage_sizes,
)

KEY = "bounded_horizon"
"""The checkpoint entry with what no other strategy needs: the stages' random streams."""


class BoundedHorizonStrategy(SingleDeviceStrategy):
    """Bounded-horizon local training with readout gradient consensus, on the CPU of one host.

    Args:
        method: ``rgc``: stages learn through a snapshot of the readout, which follows the mean of all their gradients.
            ``broadcast``: the same, but the readout learns from the final stage alone. ``live``: serial deep
            supervision through the live readout. ``bp``: global backpropagation. ``bp_groups``: the same by groups of
            threads that share the weights and cut each batch; exact up to rounding where the loss is a mean over
            samples of equal length.
        num_stages: S (groups of ``bp_groups``); None: the Trainer's ``devices`` above 1, else the largest divisor of
            the layers up to 4.
        mode: ``async``: stages work on successive batches at the same time. ``serial``: one after the other.
            None: ``async`` for ``rgc`` and ``broadcast``.
        backend: ``threads`` of the Trainer's process, or ``processes`` for modules whose Python code holds the GIL
            (the script needs ``if __name__ == "__main__":``).
        threads_per_stage: OpenMP threads of each stage, at most ``max(1, cores // S)`` (all cores where stages take
            turns); None: that many, and for serial threads the process's own number.
        snapshot_every: Readout steps between two snapshots.
        ring_slots: Orders that may wait in front of a stage.
        micro_batches: Parts that each batch is cut into; memory falls, gradients stay the same up to rounding where
            the loss is a mean over samples of equal length.
        lag: Which snapshot a stage reads: the ``newest`` (in serial modes without lag), or always that of stage s's
            natural lag, S - 1 - s steps: ``pipeline`` emulates it in serial modes, ``pinned`` holds async ones to it,
            so that two runs agree.
        stage_split: ``even``, the number of layers of each stage, or ``auto``: after 25 steps layers move so that
            the stages' measured work balances.
        consensus_weights: ``uniform``, ``depth`` (proportional to s, for the final stage's favour), ``final`` (the
            final stage counts as much as S others), or one number per stage.
        clip: Largest gradient norm of each stage; None: the Trainer's ``gradient_clip_val``, per stage.
        stage_timeout_s: Longest wait for any sign of life of a stage, in seconds.
        credit: What a stage learns from: ``local``, its own loss, or ``next_stage``, the sum of its own and the next
            stage's. The stages between the first and the final one then run a third more backward pass, and each
            keeps the activations of two batches: it learns from a batch, and steps, after the forward pass of the
            batch that follows (in serial modes at once, unless ``lag="pipeline"``). In a pipeline the gradient is a
            step old when it is applied, which does harm at learning rates where a step moves the weights far.
        schedule: ``local`` to the end, or ``local_then_bp``: after a share of ``max_steps`` all layers learn as one
            stage, by global backpropagation, with the optimizer state they have.
        switch_frac: That share, between 0 and 1; None: one half.
        accelerator: As Lightning passes it.
        checkpoint_io: As Lightning passes it.
        precision_plugin: As Lightning passes it.

    Raises:
        ValueError: If an argument is out of range, or two exclude one another.

    Source: *Bounded-Horizon Local Transformer Training on CPUs* (V. Lex, 2026).
    """

    strategy_name = "rgc"

    def __init__(
        self,
        method: Method = "rgc",
        num_stages: int | None = None,
        mode: Mode | None = None,
        backend: Backend = "threads",
        threads_per_stage: int | None = None,
        snapshot_every: int = 1,
        ring_slots: int = 2,
        micro_batches: int = 1,
        lag: Lag = "newest",
        stage_split: StageSplit = "even",
        consensus_weights: ConsensusWeights = "uniform",
        clip: float | None = None,
        stage_timeout_s: float = 300.0,
        credit: Credit = "local",
        schedule: Schedule = "local",
        switch_frac: float | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self.settings = PipelineSettings(
            method=method,
            num_stages=num_stages,
            mode=mode or ("async" if method in ("rgc", "broadcast") else "serial"),
            backend=backend,
            threads_per_stage=threads_per_stage,
            snapshot_every=snapshot_every,
            ring_slots=ring_slots,
            micro_batches=micro_batches,
            lag=lag,
            stage_split=stage_split,
            consensus_weights=consensus_weights,
            clip=clip,
            stage_timeout_s=stage_timeout_s,
            credit=credit,
            schedule=schedule,
            switch_frac=switch_frac,
        )
        self.parallel_devices: list[torch.device] = []
        self.num_nodes = 1
        self._layer_sync: object | None = None
        self._run: PipelineRun | None = None
        self._log = BatchLog()
        self._newest_loss: Tensor | None = None
        self._last_extra: dict[str, Any] | None = None

    # What Lightning asks before it starts.

    @property
    @override
    def root_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one process that trains; the Tuner and the samplers ask."""
        return self.world_size > 1

    @property
    def cut(self) -> StageCut:
        """How the module is cut into stages that learn locally; known from ``setup`` to ``teardown``."""
        if self._run is None:
            raise AttributeError("cut is known from setup to teardown")
        return self._run.cut

    @property
    def accounts(self) -> tuple[TimeAccount, ...]:
        """Where the time of each stage went so far; empty outside a fit and before its first batch."""
        return self._run.accounts if self._run is not None else ()

    @property
    def finished_batches(self) -> Sequence[FinishedBatch]:
        """What the stages reported on the batches (or parts of them) that the newest training step found finished."""
        return self._log.newest

    @property
    def _trainer(self) -> L.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def set_world_ranks(self) -> None:
        """Refuse what stages on one host cannot honour; Lightning calls this as the Trainer is built."""
        refuse_trainer(self.parallel_devices or [self._root_device], self.num_nodes, self._layer_sync is not None)
        asked_stages(self.settings, len(self.parallel_devices))

    @override
    def setup(self, trainer: L.Trainer) -> None:
        """Cut the module into stages; refuse what cannot work. The stages start with the first batch."""
        module = self.lightning_module
        assert module is not None
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        layout = stage_layout(module)
        devices = len(self.parallel_devices)
        groups = num_groups(self.settings, devices) if self.settings.method == "bp_groups" else 0
        sizes = (len(layout.layers),) if groups else stage_sizes(self.settings, len(layout.layers), devices)
        refuse_precision(self.precision_plugin, self.settings)
        switch_step = known_switch_step(self.settings, trainer.max_steps)
        refuse_callbacks(trainer.callbacks, self.settings)  # type: ignore[attr-defined]
        super().setup(trainer)
        refuse_optimizers(self.optimizers, self.strategy_name)
        refuse_closures(self.optimizers[0])
        context = self.precision_plugin.train_step_context
        if self._run is not None:  # Lightning skips the teardown where a callback fails in ``on_exception``
            self._run.close()
        optimizer = self.optimizers[0]
        self._run = PipelineRun(module, layout, optimizer, self.settings, sizes, groups, context, switch_step)
        self._log, self._newest_loss, self._last_extra = BatchLog(), None, None

    @override
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """Build the user's optimizer; refuse several."""
        with refusing_several_optimizers(self.strategy_name):
            super().setup_optimizers(trainer)

    # One step.

    @override
    def training_step(self, batch: Any, *args: Any) -> STEP_OUTPUT:
        """Order ``batch``; return the loss of the newest finished batch, and log all that finished meanwhile."""
        assert self._run is not None
        trainer = self._trainer
        divisor = float(trainer.accumulate_grad_batches)
        shares = self._run.learn(batch, divisor, trainer.global_step)
        self._log.expect(shares, num_samples_or_1(batch), trainer.global_step)
        # What is in flight when an epoch ends could not be logged in a training step any more.
        to_the_end = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or is_last_step(trainer)
        self._take_finished(wait=self._newest_loss is None)
        while self._newest_loss is None or (to_the_end and self._run.num_in_flight):
            self._take_finished(wait=True)
        return self._newest_loss

    def _take_finished(self, wait: bool) -> None:
        assert self._run is not None and self.lightning_module is not None
        module = self.lightning_module
        for done in self._log.take(self._run.finished(wait)):
            loss = done.values["train/loss"]
            self._newest_loss = torch.tensor(loss)
            for name, value in done.values.items():
                module.log(name, value, on_step=True, logger=False, prog_bar=name == "train/loss")
            module.log("train/loss_epoch", loss, on_step=False, on_epoch=True, batch_size=done.batch_size)
            self._write(done)

    def _write(self, done: DoneBatch) -> None:
        """Send a batch to the loggers, as often as ``log_every_n_steps`` says."""
        trainer = self._trainer
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not trainer.loggers or every == 0 or (done.step_idx + 1) % every:
            return
        trainer.logged_metrics.update({name: torch.tensor(value) for name, value in done.values.items()})
        for logger in trainer.loggers:
            logger.log_metrics({**done.values, "epoch": trainer.current_epoch}, done.step_idx)
            logger.save()

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Do nothing: the stages have run their own backward passes, or will."""
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: L.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Order a step at the optimizer's hyper-parameters, after Lightning's own (which finds no gradient)."""
        assert self._run is not None
        trainer = self._trainer
        clip = self._clip(trainer)
        with _without_clipping(trainer):
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._run.step(_hyper_parameters(optimizer), clip)
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or is_last_step(trainer):
            self._run.drain()  # hooks at the end of an epoch may read the weights
        return result

    def _clip(self, trainer: L.Trainer) -> Clip | None:
        value = self.settings.clip or trainer.gradient_clip_val
        if not value:
            return None
        by_value = self.settings.clip is None and trainer.gradient_clip_algorithm == "value"
        return Clip(float(value), "value" if by_value else "norm")

    # The pipeline drains wherever somebody looks at the weights.

    def drain(self) -> None:
        """Wait until all stages stand at the same number of steps; the live module then holds their weights."""
        if self._run is not None:
            self._run.drain()

    @override
    def on_validation_start(self) -> None:
        """Let validation see one model, not stages at different steps.

        Lightning calls the callbacks' hook of this name first: one that reads weights calls ``drain`` itself, or uses
        ``on_validation_epoch_start``.
        """
        self.drain()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights of a consistent cut."""
        self.drain()
        return super().lightning_module_state_dict()

    @override
    def on_train_end(self) -> None:
        """Gather what the stages hold, log batches that finished after the last training step, and end the stages."""
        assert self._run is not None
        self._run.gather()
        for done in self._log.take(self._run.finished(wait=False)):
            self._write(done)
        self._run.close()  # a loop that runs once more (LearningRateFinder) starts from what was restored meanwhile
        self._newest_loss = None

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of all stages as the user's optimizer's own, which any strategy can load."""
        if self._run is None:
            return super().optimizer_state(optimizer)
        self._run.gather()
        state = super().optimizer_state(optimizer)
        self._run.release()
        return state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Add the stages' random streams to a full checkpoint, and write it."""
        extra = self._extra()
        if extra is not None and "optimizer_states" in checkpoint:
            checkpoint[KEY] = extra
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _extra(self) -> dict[str, Any] | None:
        if self._run is None:
            return self._last_extra
        return {"random_states": list(self._run.random_states)}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load a checkpoint of this or any other strategy."""
        super().load_optimizer_state_dict(checkpoint)
        if self._run is not None and KEY in checkpoint:
            self._run.random_states = list(checkpoint[KEY]["random_states"])

    @override
    def teardown(self) -> None:
        """End every stage; safe to call twice, before ``connect`` and after a failure."""
        if self._run is not None:
            self._last_extra = self._extra()
            self._run.close()
        self._run = None
        super().teardown()


def _hyper_parameters(optimizer: Optimizer) -> tuple[dict[str, Any], ...]:
    """Return those of every group; a tensor is copied: a scheduler changes it while the order is on its way."""
    return tuple(
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    )


@contextmanager
def _without_clipping(trainer: L.Trainer) -> Iterator[None]:
    """Keep Lightning from clipping: the driver has no gradients, and clipping none by value is an error."""
    value, trainer.gradient_clip_val = trainer.gradient_clip_val, None
    try:
        yield
    finally:
        trainer.gradient_clip_val = value
