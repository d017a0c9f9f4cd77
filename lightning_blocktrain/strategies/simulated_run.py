"""A run of simulated workers in front of the coordinator: rounds, counters, and the state of all of it.

Owns what happens between the steps; knows nothing of Lightning.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_blocktrain.coordinator import SimulatedCoordinator, WorkerRound, update_bytes_of
from lightning_blocktrain.partition import Partition
from lightning_blocktrain.rounds import INTERFACE, RoundReport, block_entry
from lightning_blocktrain.rounds.codecs import Codec, wire_bytes
from lightning_blocktrain.strategies import block_checkpoint
from lightning_blocktrain.strategies.run_settings import RunSettings
from lightning_blocktrain.strategies.tally import Tally
from lightning_blocktrain.strategies.workers import SimulatedWorkers, Worker, buffer_names, fp32, process_streams


class SimulatedRun:
    """Workers, coordinator and counters of one fit.

    Args:
        module: The live module; shows the merged masters whenever no worker acts.
        partition: Its partition.
        settings: How to train and merge.
        seed: Of the workers' random streams and of the network.
    """

    def __init__(self, module: nn.Module, partition: Partition, settings: RunSettings, seed: int) -> None:
        self.settings = settings
        self.partition = partition
        self.tally = Tally()
        self.steps_in_round = 0
        self.workers = SimulatedWorkers(module, partition, settings.replicas, seed)
        rules = settings.rules_for(partition)
        masters = {block_entry(b): self._merged(names) for b, names in enumerate(self.workers.block_names)}
        if self.workers.interface_names:
            masters[INTERFACE] = self._merged(self.workers.interface_names)
        spared = buffer_names(module, partition)
        outer, self._codec = replace(settings.outer_optimizer, spared=spared), replace(settings.codec, spared=spared)
        update_bytes = max(update_bytes_of(masters, b) for b in range(partition.num_blocks))
        self.coordinator = SimulatedCoordinator(
            masters,
            block_of_worker=[worker.block_idx for worker in self.workers],
            rules=rules,
            make_outer=lambda: outer,
            network=settings.network_for(len(self.workers), update_bytes),
            seed=seed,
            interface_every=settings.interface_every,
            upload_frac=_upload_frac(self._codec, masters),
        )
        self._prefix_codec = replace(settings.prefix_codec, spared=spared)
        self._has_averages = rules.average_decay > 0
        self._renew_prefix()

    @property
    def learners(self) -> list[Worker]:
        """Workers that take the next step; with ``local_steps="until_deadline"`` others may have sent theirs by now."""
        if self.settings.local_steps == "fixed":
            return list(self.workers)
        sync_every, in_time = self.settings.sync_every, self.coordinator.steps_in_time
        return [worker for worker in self.workers if worker.num_steps < in_time(worker.worker_id, sync_every)]

    def count_batch(self, worker: Worker, num_tokens: int) -> None:
        """Count a batch that ``worker`` has trained on."""
        worker.num_tokens += num_tokens
        self.tally.worker_tokens += num_tokens
        self.workers.frozen.batch_tokens = num_tokens

    def finish_step(self, last: bool) -> None:
        """Count one inner step of every worker; close the round if it is full or the run ends here."""
        learners = self.learners
        for worker in learners:
            worker.num_steps += 1
        for worker in self.workers:
            worker.gradients = {}  # spent; what one worker needs at a time is not held for all of them
        self.tally.worker_steps += len(learners)
        self.tally.count_prefix(self.workers.frozen)
        self.steps_in_round += 1
        if last or self.steps_in_round == self.settings.sync_every:
            self.finish_round(final=last)

    def finish_round(self, final: bool = False) -> None:
        """Send every worker's replica to the coordinator, show the outcome and let the workers fetch the masters."""
        shares_interface = self.coordinator.interface_due(final)
        updates = [self._update_of(worker, shares_interface) for worker in self.workers]
        outcome = self.coordinator.finish_round(updates, final=final)
        self._confirm(outcome.reports)
        self._show([report.entry for report in outcome.reports])
        for worker in self.workers:
            self.workers.fetch(worker, interface_too=shares_interface)
            worker.num_steps = worker.num_tokens = 0
        self.workers.renew_optimizer_states(self.settings.inner_state, interface_too=shares_interface)
        self.steps_in_round = 0
        self.tally.num_rounds_closed += 1
        self.tally.round_reports = outcome.reports
        self.tally.accepted_tokens = self.coordinator.accepted_tokens
        self._renew_prefix()

    def _renew_prefix(self) -> None:
        """Let every worker fetch the blocks around its own, in the rounds in which the real protocol does."""
        frozen, version = self.workers.frozen, self.coordinator.round_idx
        if version % self.settings.prefix_every:
            return
        for block_idx in range(self.partition.num_blocks):
            num_readers = sum(block_idx in self.partition.read_by(worker.block_idx) for worker in self.workers)
            if num_readers:
                average = self.coordinator.averages[block_entry(block_idx)]
                frozen.take_values(block_idx, version, self._prefix_codec, average)
                self.tally.prefix_bytes += num_readers * frozen.bytes_of(block_idx)

    def _show(self, entries: Iterable[str]) -> None:
        masters, averages = self.coordinator.masters, self.coordinator.averages
        for entry in entries:
            self.workers.load_masters(masters[entry])
            if self._has_averages:
                self.workers.show_averages(averages[entry])

    def finish(self) -> None:
        """Merge what a run that was stopped inside a round has not merged; deliver what is still under way.

        Weights that somebody else has put into the module stay: a callback's average over the run, for example.
        """
        if self.steps_in_round and all(self.workers.show(entry) for entry in self.coordinator.averages.values()):
            self.finish_round(final=True)
        self.coordinator.flush()

    def assemble(self) -> None:
        """Do nothing: the module shows all blocks whenever no worker acts."""

    def _update_of(self, worker: Worker, shares_interface: bool) -> WorkerRound:
        block = self._sent(worker, block_entry(worker.block_idx), self.workers.block_names[worker.block_idx])
        interface = self._sent(worker, INTERFACE, self.workers.interface_names) if shares_interface else None
        return WorkerRound(
            worker_id=worker.worker_id,
            num_steps=worker.num_steps,
            num_tokens=worker.num_tokens,
            block_params=block,
            interface_params=interface,
        )

    def _sent(self, worker: Worker, entry: str, names: Sequence[str]) -> dict[str, Tensor]:
        """Return what the coordinator makes of a worker's update."""
        codec = self._codec
        if codec.name == "fp32":
            params = _pick(worker.local, names)
            self.tally.sent_bytes += sum(tensor.numel() * tensor.element_size() for tensor in params.values())
            return params
        encoded = worker.encode(codec, entry, {name: self.workers.merged[name] for name in names})
        self.tally.sent_bytes += wire_bytes(encoded)
        return codec.decode(encoded, self.coordinator.masters[entry])

    def _confirm(self, reports: Iterable[RoundReport]) -> None:
        # An update that is still under way, and counts later as stale work, leaves the debt as it was.
        for report in reports:
            for worker in self.workers:
                if worker.worker_id in report.accepted and report.entry in worker.feedback:
                    worker.feedback[report.entry].confirm()

    def _merged(self, names: Iterable[str]) -> dict[str, Tensor]:
        return _pick(self.workers.merged, names)

    def shape(self) -> dict[str, Any]:
        """Return what a checkpoint must agree in to be resumed."""
        return {
            "num_blocks": self.partition.num_blocks,
            "num_layers": len(self.partition.layout.layers),
            "replicas": self.settings.replicas,
            "sync_every": self.settings.sync_every,
            "interface_every": self.settings.interface_every,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs; tensors, dicts, lists, str, int, float and None only."""
        version = self.coordinator.round_idx
        # What is as new as the masters follows from them.
        is_stale = self.workers.frozen.versions and version % self.settings.prefix_every
        return {
            **({"prefix": {"round": version, "blocks": self.workers.frozen.state_dict()}} if is_stale else {}),
            "shape": self.shape(),
            "has_averages": self._has_averages,
            "steps_in_round": self.steps_in_round,
            "tally": self.tally.state_dict(),
            "coordinator": self.coordinator.state_dict(),
            "workers": block_checkpoint.worker_states(self.workers),
            "process_streams": process_streams(self.workers.device),
        }

    def saved_in(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a checkpoint holds of a run of simulated workers; empty if it is of none."""
        saved: Mapping[str, Any] = checkpoint.get(block_checkpoint.KEY, {})
        return saved

    def resume(self, checkpoint: Mapping[str, Any], optimizer: Optimizer) -> bool:
        """Continue the run that a checkpoint holds; return whether it holds one."""
        saved = self.saved_in(checkpoint)
        if saved:
            self.load_state_dict(saved, optimizer, checkpoint["optimizer_states"][0]["param_groups"])
        return bool(saved)

    def load_state_dict(
        self, state: Mapping[str, Any], optimizer: Optimizer, param_groups: list[dict[str, Any]]
    ) -> None:
        """Continue the run that ``state`` was taken of.

        Raises:
            CheckpointMismatchError: If it had another shape or trained other tensors.
        """
        block_checkpoint.refuse_other_shape(state["shape"], self.shape())
        self.coordinator.load_state_dict(state["coordinator"])  # first, since it refuses other tensors by name
        self._show(self.coordinator.masters)  # the checkpoint's weights may be averages
        block_checkpoint.load_worker_states(self.workers, optimizer, param_groups, state["workers"])
        self.steps_in_round = state["steps_in_round"]
        if "prefix" in state:
            self.workers.frozen.load_state_dict(state["prefix"]["blocks"])
        else:
            self._renew_prefix()
        self.tally = Tally(**state["tally"])


def _upload_frac(codec: Codec, masters: Mapping[str, Mapping[str, Tensor]]) -> float:
    exact, most = (sum(kind.max_bytes(tensors) for tensors in masters.values()) for kind in (Codec("fp32"), codec))
    return most / exact if exact else 1.0


def _pick(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return fp32 copies of the named tensors."""
    return fp32({name: tensors[name] for name in names})
