"""Simulated workers: what each of them owns, and how one live module acts for all of them in turn.

A worker owns its replica of one block, its copy of the interface, their optimizer state, gradients and a random
stream. To act for a worker, the module's tensors are rebound to the worker's storage; nothing is copied. Between
batches the module's tensors are the merged masters, or their running averages where the run has them.

Where the workers of the other blocks live in other processes, the tensors of those blocks are released (``released``).
Frozen blocks around its own are lent to the worker that acts, from copies (``frozen_blocks``).

Bytes of a worker per trained value in fp32: 4 replica, 4 gradient, its optimizer's state, and 4 for the base, the
master that the replica started from and that the module shows between batches. A worker whose updates travel as they
are can do without the base (``drop_base``); a lossy codec sends the difference to it. Averages take 4 more where the
module shows all blocks.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_blocktrain.partition import Partition
from lightning_blocktrain.rounds.codecs import Codec, Encoded
from lightning_blocktrain.rounds.feedback import ErrorFeedback
from lightning_blocktrain.strategies.frozen_blocks import FrozenBlocks
from lightning_blocktrain.strategies.released import nothing_like, release

InnerState = Literal["keep", "reset", "average"]
OptimizerState = defaultdict[Tensor, dict[str, Any]]


@dataclass
class Worker:
    """One simulated worker.

    Args:
        worker_id: 0 .. W - 1; also the place of its batch in a dealt group.
        block_idx: The block it trains.
        local: Its block replica and interface copy by tensor name.
        random_state: State of its random stream; None: worker 0 draws from the process's own stream, so that one
            worker is the same run as plain training.
        gradients: Gradients kept between accumulation steps.
        optimizer_state: The inner optimizer's state, by the module's parameters.
        num_steps: Inner steps since the round began.
        num_tokens: Target tokens since the round began.
        feedback: By entry, what a lossy codec has lost of its updates.
    """

    worker_id: int
    block_idx: int
    local: dict[str, Tensor]
    random_state: Tensor | None
    gradients: dict[str, Tensor] = field(default_factory=dict)
    optimizer_state: OptimizerState = field(default_factory=lambda: defaultdict(dict))
    num_steps: int = 0
    num_tokens: int = 0
    feedback: dict[str, ErrorFeedback] = field(default_factory=dict)

    def encode(self, codec: Codec, entry: str, base: Mapping[str, Tensor]) -> Encoded:
        """Encode its update of an entry, with what the codec still owes; ``confirm`` tells that it was accepted.

        Args:
            codec: The run's.
            entry: Names the feedback.
            base: What it started from, by the names of the entry's tensors, in any floating dtype.
        """
        params, start = fp32({name: self.local[name] for name in base}, copy=False), fp32(base, copy=False)
        if entry not in self.feedback or self.feedback[entry].codec != codec:  # resumed from a run with another one
            self.feedback[entry] = ErrorFeedback(codec)
        return self.feedback[entry].encode(params, start)

    @property
    def optimizer_mem_bytes(self) -> int:
        """Bytes of the tensors in its optimizer state."""
        values = [value for state in self.optimizer_state.values() for value in state.values()]
        return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


class SimulatedWorkers:
    """All workers of a run in front of one live module.

    Args:
        module: The live module; holds the masters, or their averages, whenever no worker acts.
        partition: Its partition.
        replicas: Workers per block, worker w on block ``w mod num_blocks``.
        seed: Seed of the random streams of the workers after the first.
        block_of: Where the others live in other processes, the block of each worker of this one by id; None: all of
            them live here.
        kept_blocks: Blocks whose masters are held; the others are released. None: all are held.
        for_good: Whether released tensors are never taken back, so that parameters that nobody trains, and of which
            no coordinator has a copy, are released as well.
    """

    def __init__(
        self,
        module: nn.Module,
        partition: Partition,
        replicas: int,
        seed: int,
        block_of: Mapping[int, int] | None = None,
        kept_blocks: Collection[int] | None = None,
        for_good: bool = False,
    ) -> None:
        self.partition = partition
        self.tensors = trained_tensors(module, partition)
        if block_of is None:
            block_of = {w: w % partition.num_blocks for w in range(partition.num_blocks * replicas)}
        read = {block for own in block_of.values() for block in partition.read_by(own)}
        self.frozen = FrozenBlocks(partition, self.tensors, read)
        """The blocks that some worker reads and does not train; none where the layout has no frozen prefix."""
        released = release(module, partition, kept_blocks, read, for_good)
        self.released = released.intersection(self.tensors)
        """Names of the trained tensors that this process does not hold."""
        self.merged: dict[str, Tensor] = {}
        for name in [name for name in self.tensors if name not in self.released]:
            self._hold(name, self.tensors[name].detach())
        self._trainable = {name for name, tensor in self.tensors.items() if tensor.requires_grad}
        self._buffer_places = [place for place in _buffer_places(module) if place[0] in self.tensors]
        self.interface_names = [n for n in partition.interface_names if n in self.tensors]
        self.block_names = [[n for n in block if n in self.tensors] for block in partition.block_names]
        self._averages: dict[str, Tensor] = {}
        self._shares_base = False
        self._workers = [self._new_worker(w, block_idx, seed) for w, block_idx in block_of.items()]
        self.show_merged()

    @property
    def device(self) -> torch.device:
        """Where the workers' tensors are."""
        return next(iter(self.merged.values())).device

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def first(self) -> list[Worker]:
        """The first worker of this process, alone."""
        return self._workers[:1]

    def _hold(self, name: str, values: Tensor) -> None:
        """Make a copy of ``values`` the master that the module shows; one after the other, so that memory holds one."""
        self.merged[name] = values.to(self.tensors[name], copy=True)
        self.tensors[name].data = self.merged[name]

    def take_back(self, masters: Mapping[str, Tensor]) -> None:
        """Hold released tensors again, with these values (fp32) in the module's own dtype; while no worker acts."""
        for name in self.released.intersection(masters):
            self._hold(name, masters[name])
        self.released = self.released.difference(masters)

    def fill_released(self) -> None:
        """Give what is still released memory of its own, full of NaN: load into it, but never take it for weights."""
        lost = {name: self.tensors[name].detach() for name in self.released}
        self.take_back({name: nothing_like(t) if t.is_floating_point() else t for name, t in lost.items()})

    def _new_worker(self, worker_id: int, block_idx: int, seed: int) -> Worker:
        local = {n: self.merged[n].clone() for n in (*self.block_names[block_idx], *self.interface_names)}
        stream = torch.Generator().manual_seed((seed + 0x9E3779B97F4A7C15 * worker_id) % 2**63)
        return Worker(worker_id, block_idx, local, stream.get_state() if worker_id else None)

    def drop_base(self) -> None:
        """Let the one worker's replica be its own base: from now on the module shows the replica between batches.

        Call it while no worker acts, and replica and master are the same.
        """
        [worker] = self._workers
        self._shares_base = True
        self.merged.update(worker.local)
        self.show_merged()

    def end_training(self) -> None:
        """Let what the module shows stay: no replica is trained any more."""
        self._shares_base = False

    @property
    def holds_base(self) -> bool:
        """Whether the masters that the replicas started from are still known."""
        return not self._shares_base

    @contextmanager
    def acting(self, worker: Worker, optimizer: Optimizer) -> Iterator[None]:
        """Rebind the module and the optimizer to ``worker``'s storage, gradients, state and random stream."""
        try:
            for name, tensor in self.tensors.items():
                mine = name in worker.local
                tensor.requires_grad_(mine and name in self._trainable)
                if mine:
                    tensor.data = worker.local[name]
                    tensor.grad = worker.gradients.get(name)
            optimizer.state = worker.optimizer_state
            with self.frozen.lent(worker.block_idx), _random_stream(worker):
                yield
            self._keep(worker)
        finally:
            optimizer.state = defaultdict(dict)
            self.show_merged()

    def _keep(self, worker: Worker) -> None:
        """Read the worker's tensors back: an optimizer may have rebound them, the user's code assigned buffers anew."""
        assigned = {name: owner._buffers[key] for name, owner, key in self._buffer_places}
        now = {**self.tensors, **{name: buffer for name, buffer in assigned.items() if buffer is not None}}
        worker.local = {name: now[name].data for name in worker.local}
        gradients = {name: self.tensors[name].grad for name in worker.local}
        worker.gradients = {name: grad for name, grad in gradients.items() if grad is not None}
        if self._shares_base:
            self.merged.update(worker.local)

    def show_merged(self) -> None:
        """Rebind the module to the merged blocks, without gradients and with its own ``requires_grad`` flags."""
        for name, owner, key in self._buffer_places:
            owner._buffers[key] = self.tensors[name]
        for name, tensor in self.tensors.items():
            if name in self.merged:
                tensor.data = self._averages.get(name, self.merged[name])
            tensor.grad = None
            tensor.requires_grad_(name in self._trainable)

    def show(self, masters: Mapping[str, Tensor]) -> bool:
        """Tell whether the module's parameters are these values (fp32), up to its own dtype."""
        names = self._trainable & masters.keys()
        return all(torch.equal(self.tensors[n].data, masters[n].to(self.tensors[n].dtype)) for n in names)

    def load_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Copy merged masters (fp32) into the module's storage and dtype."""
        for name, master in masters.items():
            self.merged[name].copy_(master)

    def show_averages(self, averages: Mapping[str, Tensor]) -> None:
        """Let the module show these values (fp32) instead of the masters between batches; while no worker acts."""
        for name, average in averages.items():
            self._averages[name] = average.to(self.tensors[name], copy=True)
            self.tensors[name].data = self._averages[name]

    def fetch(self, worker: Worker, interface_too: bool) -> None:
        """Start ``worker`` from the masters of its block, and of the interface if that was merged."""
        if self._shares_base:
            return
        names = self.block_names[worker.block_idx]
        for name in (*names, *self.interface_names) if interface_too else names:
            worker.local[name].copy_(self.merged[name])

    def renew_optimizer_states(self, rule: InnerState, interface_too: bool) -> None:
        """Keep, reset or average the optimizer state of what was just merged.

        Averaged over the replicas of a block, and over all workers for the interface.
        """
        if rule == "keep":
            return
        groups = [(names, self._replicas_of(b)) for b, names in enumerate(self.block_names)]
        if interface_too:
            groups.append((self.interface_names, self._workers))
        for names, members in groups:
            for tensor in (self.tensors[name] for name in names):
                states = [w.optimizer_state[tensor] for w in members if tensor in w.optimizer_state]
                if rule == "average":
                    _average_in_place(states)
                else:
                    for worker in members:
                        worker.optimizer_state.pop(tensor, None)

    def _replicas_of(self, block_idx: int) -> list[Worker]:
        return [worker for worker in self._workers if worker.block_idx == block_idx]

    def named_state(self, worker: Worker) -> dict[str, dict[str, Any]]:
        """Return ``worker``'s optimizer state by parameter name."""
        names = {tensor: name for name, tensor in self.tensors.items()}
        return {names[tensor]: state for tensor, state in worker.optimizer_state.items() if tensor in names}

    def first_state(self) -> OptimizerState:
        """Return one optimizer state per parameter: that of the first worker that trains it."""
        merged: OptimizerState = defaultdict(dict)
        for worker in reversed(self._workers):
            merged.update(worker.optimizer_state)
        return merged


def _average_in_place(states: Sequence[dict[str, Any]]) -> None:
    """Set every floating tensor of the replicas' states to their mean; step counts stay."""
    for key in states[0] if states else ():
        values = [state[key] for state in states if isinstance(state.get(key), Tensor)]
        if key != "step" and len(values) == len(states) and values[0].is_floating_point():
            mean = torch.stack(values).mean(0)
            for value in values:
                value.copy_(mean)


def fp32(tensors: Mapping[str, Tensor], copy: bool = True) -> dict[str, Tensor]:
    """Return ``tensors`` as the ledger wants them, floating ones in float32.

    Args:
        tensors: By name.
        copy: Whether the result must share no memory with them.
    """
    return {
        name: tensor.detach().to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=copy)
        for name, tensor in tensors.items()
    }


def trained_tensors(module: nn.Module, partition: Partition) -> dict[str, Tensor]:
    """Return what workers train and merge: trainable parameters and persistent buffers, by name."""
    every = {*partition.interface_names, *(name for block in partition.block_names for name in block)}
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    buffers = dict(module.named_buffers())
    return {name: tensor for name, tensor in {**parameters, **buffers}.items() if name in every}


def buffer_names(module: nn.Module, partition: Partition) -> tuple[str, ...]:
    """Return the names of the trained tensors that no gradient makes: they are averaged and nothing else."""
    tensors = trained_tensors(module, partition)
    return tuple(name for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter))


def _buffer_places(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return each buffer's name, the submodule that holds it and its key there."""
    owners = module.named_modules()
    return [(f"{path}.{key}".lstrip("."), owner, key) for path, owner in owners for key in owner._buffers]


def process_streams(device: torch.device) -> list[Tensor]:
    """Return the state of the process's random streams: the CPU's, and the device's if it has its own."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def restore_process_streams(streams: Sequence[Tensor], device: torch.device) -> None:
    """Continue the process's random streams from what ``process_streams`` returned, here or on another device."""
    torch.set_rng_state(streams[0])
    if device.type == "cuda" and len(streams) > 1:
        torch.cuda.set_rng_state(streams[1], device)


@contextmanager
def _random_stream(worker: Worker) -> Iterator[None]:
    """Let ``worker`` draw from its own stream; worker 0 draws from the process's."""
    if worker.random_state is None:
        yield
        return
    devices = sorted({tensor.get_device() for tensor in worker.local.values() if tensor.is_cuda})
    with torch.random.fork_rng(devices):
        torch.set_rng_state(worker.random_state)
        for device in devices:
            # Derived from the CPU stream, so that one tensor is the whole state.
            torch.cuda.default_generators[device].manual_seed(int(torch.randint(2**62, ())))
        yield
        worker.random_state = torch.get_rng_state()
