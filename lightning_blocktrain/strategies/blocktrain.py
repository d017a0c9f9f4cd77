"""``Trainer(strategy="blocktrain")``: every block of a model is trained by other workers, on a block-local loss.

Owns the Lightning hooks and nothing else: the workers' tensors are ``workers``', the batches ``worker_batches``', the
rounds the coordinator's, the checkpoint form ``block_checkpoint``'s.

In one process the workers are simulated: one Lightning step is one inner optimizer step of *every* worker, and every
``sync_every`` steps each worker's replica goes to the coordinator's ledger, which merges per block what arrived before
the deadline on a virtual clock. With several ``devices``, or where a run is joined, every process is one worker
(``member``), and what it does in a step is the same with one worker to act for (``worker_run``).
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_blocktrain.coordinator import NetworkModel
from lightning_blocktrain.errors import explain
from lightning_blocktrain.metrics import count_tokens
from lightning_blocktrain.partition import Partition
from lightning_blocktrain.partition import partition as cut
from lightning_blocktrain.protocols import SupportsBlockTraining
from lightning_blocktrain.rounds import OuterSGD, RoundRules
from lightning_blocktrain.rounds.codecs import Codec, CodecName
from lightning_blocktrain.rounds.merge import LateRule
from lightning_blocktrain.rounds.pace import LocalSteps
from lightning_blocktrain.rounds.values import ValueCodec, as_value_codec
from lightning_blocktrain.strategies import block_checkpoint
from lightning_blocktrain.strategies.block_guard import (
    BlockGuard,
    declared_layout,
    refuse_exchange,
    refuse_scaled_accumulation,
    refuse_simulation,
    refuse_topology,
    warn_of_stale_validation,
)
from lightning_blocktrain.strategies.cluster import Exchange
from lightning_blocktrain.strategies.contract import refuse_optimizers, refusing_several_optimizers
from lightning_blocktrain.strategies.feature_cache import CacheSettings, FeatureCache, FeatureDtype, make_cache
from lightning_blocktrain.strategies.finite import refuse_non_finite_loss, with_finite_gradients
from lightning_blocktrain.strategies.headless import MemberLauncher
from lightning_blocktrain.strategies.member import Member, MemberSettings
from lightning_blocktrain.strategies.place import find_place
from lightning_blocktrain.strategies.progress import is_last_step
from lightning_blocktrain.strategies.round_counters import RoundCounters
from lightning_blocktrain.strategies.run_settings import RunSettings, refuse_no_count
from lightning_blocktrain.strategies.simulated_run import SimulatedRun
from lightning_blocktrain.strategies.worker_batches import WorkerBatches, WorkerBatchLoader, batch_of, is_dealt
from lightning_blocktrain.strategies.worker_run import WorkerRun
from lightning_blocktrain.strategies.worker_shard import dealt
from lightning_blocktrain.strategies.workers import InnerState, Worker, restore_process_streams
from lightning_blocktrain.transport.terms import OnMissingBlock


class BlockTrainStrategy(RoundCounters, SingleDeviceStrategy):
    """Block-replica averaging with deadline acceptance.

    With ``devices=1`` ``num_blocks * replicas`` simulated workers train in this process, with ``devices=W`` W worker
    processes on this machine (the script is run again for each), worker w on block ``w mod num_blocks``. Between
    batches (validation, checkpoints, your callbacks) the module holds the merged blocks in the Trainer's own process;
    what is written to them there does not reach the workers. In any other process it holds what its worker trains.

    Args:
        num_blocks: B; None: the module's own number, else the largest divisor of its layers up to 4.
        replicas: Workers per block.
        sync_every: Inner steps per round.
        deadline_s: Seconds (virtual with ``devices=1``) after which a round closes without the updates that are still
            under way.
        network: ``lockstep``, ``mild`` (90 % of the updates in time), ``wan`` (42 %), ``harsh`` (10 %), ``offline``
            (none), or a ``NetworkModel`` with one link per worker.
        outer_optimizer: What turns the merged replicas into the next master; None: their plain mean.
        interface_every: Rounds between two merges of the interface (everything outside the blocks).
        inner_state: What becomes of a worker's optimizer state after a merge: ``keep``, ``reset``, or ``average``
            over the replicas of its block.
        min_replicas: A round that accepted fewer leaves the master as it is.
        merge: ``mean`` or ``trimmed_mean``.
        weighting: Replicas count alike (``uniform``) or by their ``tokens``.
        trim_frac: Share of the replicas that the trimmed mean drops at each end.
        clip_norm: Longest update a replica may send, L2; None: any.
        outlier_factor: Updates longer than this times the median of the last accepted ones are refused; None: never.
        late: An update whose round has closed is lost (``drop``), or counts in the open one with a weight of
            ``(1 + rounds late) ** -0.5`` (``stale_weighted``), up to ``max_staleness`` rounds.
        max_staleness: See ``late``; every block keeps so many earlier masters.
        local_steps: A worker that is short of time takes all ``sync_every`` steps and is late (``fixed``), or sends
            fewer (``until_deadline``).
        deadline_quantile: A round lasts 1.25 times this quantile of the last arrivals, ``deadline_s`` at most; None:
            ``deadline_s``.
        codec: How updates travel: ``fp32``, ``bf16``, ``int8`` or ``topk``, or a ``Codec`` with options; the last
            three with error feedback.
        prefix_every: Rounds between two fetches of the blocks that a block reads beside its own, where a module
            declares ``prefix="frozen"``.
        prefix_codec: How these travel, and how a worker keeps them: ``bf16``, ``fp32`` or ``int8``.
        average_decay: The model of a run, and what blocks read of each other, is a running average of each entry's
            masters over about the last tenth of the rounds, which keeps at most this much of itself per round (0.9: the
            last ten rounds of a long run); 0: the masters themselves; None: 0.9 where blocks read others, else 0.
        prefix_cache: Folder for what blocks read of their batches (the module's ``block_features``), for shards that
            are visited more than once between two fetches; None: it is computed for every batch.
        prefix_cache_gib: Largest size of that folder.
        prefix_cache_dtype: Of the values in it: ``bf16``, or ``fp32``, which gives the same losses bit for bit.
        exchange: With processes that torchrun or SLURM has started, updates travel over HTTP to a coordinator that rank
            0 starts (``http``), or between the ranks without one (``collective``), which has no deadline: every round
            waits for all.
        coordinator: URL of a run to join as one worker (of coordinators that share it all, with commas between), with
            the token in ``BLOCKTRAIN_TOKEN``; None: the environment variable ``BLOCKTRAIN_COORDINATOR``, and without
            it no run is joined.
        join_timeout_s: How long the first round waits for its workers.
        reconnect_timeout_s: How long a worker looks for a coordinator that does not answer.
        on_missing_block: A block that has lost all its workers keeps its parameters (``warn``), or ends the run
            (``fail``).
        accelerator: As Lightning passes it.
        checkpoint_io: As Lightning passes it.
        precision_plugin: As Lightning passes it.

    Raises:
        ValueError: If an argument is out of range.

    Source: BlockTrain (arXiv 2606.24722).
    """

    strategy_name = "blocktrain"
    num_nodes = 1
    node_rank = 0
    cluster_environment: ClusterEnvironment | None = None
    _layer_sync: object | None = None
    _partition: Partition | None = None
    _run: SimulatedRun | WorkerRun | None = None
    _guard: BlockGuard | None = None
    _cache: FeatureCache | None = None
    _acting: Worker | None = None
    _batch_counted = False
    _last_state: dict[str, Any] | None = None

    def __init__(
        self,
        num_blocks: int | None = None,
        replicas: int = 1,
        sync_every: int = 20,
        deadline_s: float = 60.0,
        network: str | NetworkModel = "lockstep",
        outer_optimizer: OuterSGD | None = None,
        interface_every: int = 1,
        inner_state: InnerState = "keep",
        min_replicas: int = 1,
        merge: Literal["mean", "trimmed_mean"] = "mean",
        weighting: Literal["uniform", "tokens"] = "uniform",
        trim_frac: float = 0.1,
        clip_norm: float | None = None,
        outlier_factor: float | None = None,
        late: LateRule = "drop",
        max_staleness: int = 2,
        local_steps: LocalSteps = "fixed",
        deadline_quantile: float | None = None,
        codec: CodecName | Codec = "fp32",
        prefix_every: int = 1,
        prefix_codec: ValueCodec = "bf16",
        average_decay: float | None = None,
        prefix_cache: str | Path | None = None,
        prefix_cache_gib: float = 4.0,
        prefix_cache_dtype: FeatureDtype = "bf16",
        exchange: Exchange = "http",
        coordinator: str | None = None,
        join_timeout_s: float = 300.0,
        reconnect_timeout_s: float = 120.0,
        on_missing_block: OnMissingBlock = "warn",
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        RoundCounters.__init__(self)
        SingleDeviceStrategy.__init__(
            self, accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
        )
        if num_blocks is not None:
            refuse_no_count("num_blocks", num_blocks)
        rules = RoundRules(
            deadline_s=deadline_s,
            min_replicas=min_replicas,
            weighting=weighting,
            merge=merge,
            trim_frac=trim_frac,
            clip_norm=clip_norm,
            outlier_factor=outlier_factor,
            late=late,
            max_staleness=max_staleness,
            deadline_quantile=deadline_quantile,
        )
        codec = Codec(codec) if isinstance(codec, str) else codec
        outer = outer_optimizer or OuterSGD()
        refuse_exchange(exchange, rules, codec, local_steps)
        self.settings = RunSettings(
            replicas,
            sync_every,
            interface_every,
            inner_state,
            rules,
            outer,
            network,
            codec,
            local_steps,
            prefix_every,
            as_value_codec("prefix_codec", prefix_codec),
            average_decay,
        )
        self.cache_settings = CacheSettings(prefix_cache, prefix_cache_gib, prefix_cache_dtype)
        self.limits = MemberSettings(join_timeout_s, reconnect_timeout_s, on_missing_block)
        self.num_blocks = num_blocks
        self._coordinator = coordinator
        self._exchange = exchange
        self.parallel_devices: list[torch.device] = []
        self._process_streams: list[Tensor] = []
        self._loaders: list[WorkerBatchLoader] = []
        self._loader_states: list[dict[str, Any]] = []

    # What Lightning asks before it starts.

    @property
    @override
    def root_device(self) -> torch.device:
        """The device of this process's workers."""
        devices = self.parallel_devices
        return devices[self.local_rank % len(devices)] if devices else self._root_device

    @property
    @override
    def is_global_zero(self) -> bool:
        """Whether this process validates, logs and writes."""
        return self.global_rank == 0

    @property
    def is_distributed(self) -> bool:
        """False: no process waits for another inside Lightning, and the cut of the data is this strategy's own."""
        return self.world_size > 1

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """True: every batch comes to ``optimizer_step``, since every worker accumulates its own gradients."""
        return True

    @property
    def partition(self) -> Partition:
        """How the module is cut; known from ``setup`` on."""
        assert self._partition is not None
        return self._partition

    @property
    def run(self) -> SimulatedRun | WorkerRun:
        """The run of the fit in progress."""
        assert self._run is not None
        return self._run

    @property
    def num_workers(self) -> int:
        """W, the number of workers; known from ``setup`` on."""
        if self._member is not None:
            return self._member.shard.num_workers
        return self.partition.num_blocks * self.settings.replicas

    @property
    def _member(self) -> Member | None:
        """This process's part in a run of several; None where the workers are simulated."""
        return self._launcher.member if isinstance(self._launcher, MemberLauncher) else None

    @property
    def _trainer(self) -> L.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def set_world_ranks(self) -> None:
        """Find out which process this is, and refuse what it cannot honour; Lightning calls this in the Trainer."""
        devices = len(self.parallel_devices)
        place = find_place(self._coordinator, devices, self.cluster_environment, self.num_nodes, self._exchange)
        in_job = place.cluster is not None
        refuse_topology(devices, self.num_nodes, self._layer_sync is not None, place.joins, in_job)
        if not place.is_simulated:
            if not place.passes_over:
                refuse_simulation(self.settings.replicas, self.settings.network, self.settings.inner_state)
            self.global_rank, self.local_rank = place.global_rank, place.local_rank
            self.node_rank = 0 if place.cluster is None else place.cluster.node_rank
            self._launcher = MemberLauncher(place, partial(Member, self.settings, self.limits, place))

    @override
    def barrier(self, name: str | None = None) -> None:
        """Meet the other ranks of a job before ``setup``, when all data are prepared; anywhere else nobody waits."""
        # The other barriers of a fit are inside what rank 0 does alone.
        if name == "pre_setup" and self._trainer.state.fn == TrainerFn.FITTING:
            job = None if self._member is None else self._member.job
            if job is not None:
                job.gather(self._trainer)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        """Cut the module into blocks and build the workers and the coordinator; refuse what cannot work."""
        assert self.lightning_module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            # Before the optimizer: its schedule may ask for the number of steps, and so for the dealt train loader.
            module = self.lightning_module
            self._partition = cut(module, declared_layout(module), self.num_blocks)
            self._loaders, self._loader_states = [], []
            self._process_streams, self._last_state = [], None
            if self._member is not None:
                self._member.enter(trainer, module, self._partition)
        super().setup(trainer)
        if fitting:
            refuse_optimizers(self.optimizers, self.strategy_name)
            refuse_scaled_accumulation(self.precision_plugin, trainer.accumulate_grad_batches)
            if self._member is not None:
                self._run = self._member.make_run(self.lightning_module, self.partition)
            else:
                seed = torch.initial_seed() % 2**63
                self._run = SimulatedRun(self.lightning_module, self.partition, self.settings, seed)
            self._tally = self._run.tally
            self._cache = make_cache(self.cache_settings, self.lightning_module, self.partition)
            self._guard = BlockGuard(self.lightning_module, self.partition, self._run.workers.tensors)
            warn_of_stale_validation(trainer, self.settings.sync_every)

    @override
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """Build the user's optimizer; refuse several."""
        with refusing_several_optimizers(self.strategy_name):
            super().setup_optimizers(trainer)

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Deal the train loader's batches out to the workers; leave the other loaders alone."""
        trainer = self._trainer
        if not trainer.training or self._partition is None:
            return dataloader
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        shard = None if self._member is None else self._member.shard
        loader = dealt(
            dataloader, self.num_workers, lambda: 0 if progress.is_last_batch else progress.current.processed, shard
        )
        self._loaders.append(loader)
        if self._loader_states:
            loader.load_state_dict(self._loader_states.pop(0))
        return loader

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move one batch, or each worker's batch on its own, so that the module's transfer hooks see single ones."""
        if not is_dealt(batch):
            return super().batch_to_device(batch, device, dataloader_idx)
        move = super().batch_to_device
        return WorkerBatches(move(batch_of(batch, w), device, dataloader_idx) for w in range(self.num_workers))

    # One step.

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: L.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Take one inner step for every worker, then close the round if it is due."""
        assert self._guard is not None
        trainer = self._trainer
        accumulates = trainer.fit_loop._should_accumulate()
        self._guard.refuse_changed_flags()
        learners = self.run.learners
        try:
            # Lightning needs a loss also where no worker learns: all have sent what they could before the deadline.
            for worker in learners or self.run.workers.first:
                self._acting, self._batch_counted = worker, not learners
                with self.run.workers.acting(worker, optimizer):
                    gradients = partial(self._guard.gradients, worker.block_idx)
                    is_scaled = getattr(self.precision_plugin, "scaler", None) is not None
                    checked = with_finite_gradients(closure, gradients, is_scaled, self._place(worker))
                    only_looks = accumulates or not learners
                    result = checked() if only_looks else super().optimizer_step(optimizer, checked, model, **kwargs)
        finally:
            self._acting = None
        if not accumulates:
            last = is_last_step(trainer)
            self.run.finish_step(last)
            if self._member is not None:
                self._member.keep_pace(last)
        return result

    @override
    def training_step(self, batches: Any, *args: Any) -> STEP_OUTPUT:
        """Return the acting worker's block-local loss on its own batch."""
        worker, guard, module = self._acting, self._guard, self.lightning_module
        assert guard is not None and module is not None
        if worker is None:
            rule = "blocktrain runs the closure of a step itself, once per worker"
            fix = "call optimizer.step(closure=optimizer_closure) for every batch"
            raise MisconfigurationException(explain(rule, "a closure that optimizer_step() called", fix))
        # Lightning passes it only where the module's training_step takes it.
        batch_idx = self._trainer.fit_loop.epoch_loop.batch_idx
        batch = batch_of(batches, worker.worker_id)
        if not self._batch_counted:  # an optimizer such as LBFGS evaluates its batch many times
            self.run.count_batch(worker, count_tokens(module, batch))
            self._batch_counted = True
        with self.precision_plugin.train_step_context(), guard.watch(worker.block_idx), self._features(worker):
            output = cast(SupportsBlockTraining, module).block_training_step(batch, batch_idx, worker.block_idx)
        loss = output.get("loss") if isinstance(output, Mapping) else output  # Lightning says what a dict must hold
        refuse_non_finite_loss(loss, self._place(worker))
        return output

    def _features(self, worker: Worker) -> AbstractContextManager[None]:
        if self._cache is None:
            return nullcontext()
        assert self.lightning_module is not None
        return self._cache.serving(self.lightning_module, self.run.workers.frozen, worker.block_idx)

    def _place(self, worker: Worker) -> str:
        return f"at step {self._trainer.global_step}, block {worker.block_idx}, worker {worker.worker_id}"

    @override
    def on_train_end(self) -> None:
        """Merge what a run that was stopped inside a round has not merged yet."""
        if self._member is not None:
            self._member.end()
        else:
            self.run.finish()

    @override
    def on_validation_start(self) -> None:
        """Let validation see all blocks as they are when the newest round has closed."""
        self._assemble()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights of the assembled model."""
        self._assemble()
        return super().lightning_module_state_dict()

    def _assemble(self) -> None:
        if self._run is not None:
            self._run.assemble()

    # Checkpoints.

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return a plain optimizer state (one worker's per parameter), which any strategy can load."""
        if self._run is None:
            return super().optimizer_state(optimizer)
        return block_checkpoint.plain_optimizer_state(self._run.workers, optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Add every worker's own state and the coordinator's to a full checkpoint, and write it."""
        state = self._last_state if self._run is None else self._run_state()
        if state is not None and "optimizer_states" in checkpoint:
            # Taken out of Lightning's own place: another strategy's loaders could not take them.
            loaders = checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", [])
            key = block_checkpoint.KEY if self._member is None else block_checkpoint.MEMBER_KEY
            checkpoint[key] = {**state, "loaders": loaders}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _run_state(self) -> Mapping[str, Any]:
        state = self.run.state_dict()
        return state if self._member is None else self._member.complete(state)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the masters; a run of several processes has to know the step where it starts."""
        if self._member is not None and self._trainer.state.fn == TrainerFn.FITTING:
            self._member.resume_from(checkpoint)
        super().load_model_state_dict(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Resume every worker; from another strategy's checkpoint each worker starts with its share of the state."""
        saved = self.run.saved_in(checkpoint)
        if self._member is not None:
            self._member.warn_of_fresh_starts(saved)
        if not self.run.resume(checkpoint, self.optimizers[0]):
            super().load_optimizer_state_dict(checkpoint)
            block_checkpoint.share_plain_state(self.run.workers, self.optimizers[0])
        self._tally = self.run.tally
        self._process_streams = saved.get("process_streams", [])
        # Loaders that a schedule has asked for already, then those that are still to be made.
        loader_states = saved.get("loaders", [])
        for loader, state in zip(self._loaders, loader_states, strict=False):
            loader.load_state_dict(state)
        self._loader_states = list(loader_states[len(self._loaders) :])

    @override
    def on_train_start(self) -> None:
        """Continue the process's random streams where the checkpoint left it; take up a run of several processes."""
        if self._process_streams:
            restore_process_streams(self._process_streams, self.root_device)
            self._process_streams = []
        if self._member is not None:
            self._member.begin()

    @override
    def teardown(self) -> None:
        """Give the module back as it came, with the merged masters; safe to call twice or before ``connect``.

        The state of the run stays, on the CPU, for a ``trainer.save_checkpoint`` after the fit.
        """
        if self._guard is not None:
            self._guard.remove()
        if self._member is not None:
            self._member.close()
        if self._run is not None:
            self._run.workers.frozen.remove()
            self._last_state = move_data_to_device(self._run_state(), torch.device("cpu"))
            self.optimizers[0].state = self._run.workers.first_state()
        self._guard = self._run = self._partition = self._cache = None
        super().teardown()
