"""A tiny module of plain layers, and what the tests of every backend need to drive it.

Apart from ``conftest.py``, so that stages in other processes can import it under one name.
"""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_blocktrain.pipeline.base import FinishedBatch, Pipeline
from lightning_blocktrain.pipeline.groups import GroupsPipeline
from lightning_blocktrain.pipeline.orders import Clip
from lightning_blocktrain.pipeline.processes import ProcessPipeline, share
from lightning_blocktrain.pipeline.readout import consensus_weights
from lightning_blocktrain.pipeline.split import cut_stages
from lightning_blocktrain.pipeline.stage import Stage, build_groups, build_stages
from lightning_blocktrain.pipeline.threads import ThreadPipeline, TurnsPipeline
from lightning_blocktrain.pipeline.worker import Pace
from lightning_blocktrain.protocols import BlockLayout

CLASSES, WIDTH = 5, 6
DEADLINE_S = 5.0
"""Within which a failure reaches the driver."""

Batch = dict[str, Tensor]


class Layer(nn.Module):
    """A residual layer with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(torch.tanh(self.linear(self.norm(hidden))))


class Tiny(L.LightningModule):
    """An embedding, layers, and a readout with a norm; its hooks return what the contract asks for."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.readout = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))

    def configure_blocks(self) -> dict[str, Any]:
        return {"layers": self.layers, "readout": self.readout}

    def stage_embed(self, batch: Batch) -> Tensor:
        return self.embed(batch["x"])

    def stage_loss(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
        return {"loss": loss, "top": logits.detach().max()}

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the whole model."""
        hidden = self.stage_embed(batch)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.stage_loss(self.readout(hidden), batch)["loss"]


class Gate:
    """An event that layers wait for; copies of a layer share it.

    Args:
        event: Of ``threading``, or of a multiprocessing context.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def __deepcopy__(self, memo: dict[int, object]) -> "Gate":
        return self

    def open(self) -> None:
        self._event.set()

    def wait(self) -> None:
        # An end to a test whose driver has failed; none that passes waits so long.
        assert self._event.wait(60)


class Gated(Layer):
    """Says on ``entered`` that a batch has come, and waits for ``gate`` before it goes on."""

    def __init__(self, gate: Gate, entered: Gate) -> None:
        super().__init__()
        self.gate, self.entered = gate, entered

    def forward(self, hidden: Tensor) -> Tensor:
        self.entered.open()
        self.gate.wait()
        return super().forward(hidden)


class Sabotage(Layer):
    """Does ``what`` in its forward pass number ``on_pass``, counted from 0 in each copy."""

    def __init__(self, what: Callable[[Tensor], Tensor], on_pass: int = 1) -> None:
        super().__init__()
        self.what, self.on_pass, self.num_passes = what, on_pass, 0

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        self.num_passes += 1
        return self.what(hidden) if self.num_passes == self.on_pass + 1 else hidden


def raises(hidden: Tensor) -> Tensor:
    raise LookupError("this layer is broken")


def raises_with_arguments(hidden: Tensor) -> Tensor:
    raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "this text is broken")


def exits(hidden: Tensor) -> Tensor:
    raise SystemExit(3)


def becomes_nan(hidden: Tensor) -> Tensor:
    return hidden * float("nan")


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, float("inf"))


def has_infinite_gradient(hidden: Tensor) -> Tensor:
    return _InfiniteGradient.apply(hidden)


def tiny(num_layers: int = 4, dropout: float = 0.0, layers: Sequence[nn.Module] | None = None, seed: int = 0) -> Tiny:
    """Return a module whose weights depend on ``seed`` alone."""
    module = Tiny([Layer(dropout) for _ in range(num_layers)] if layers is None else layers)
    torch.manual_seed(seed)
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.LayerNorm | nn.Embedding):
            part.reset_parameters()
    return module


def batches(num: int, size: int = 4, seed: int = 1) -> list[Batch]:
    """Return ``num`` batches of ``size`` sequences of 3 tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CLASSES, (num, 2, size, 3), generator=generator)
    return [{"x": inputs.clone(), "y": targets.clone()} for inputs, targets in tokens]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.5)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.01)


def hyper(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """Return the hyper-parameters of every group, as a step order carries them."""
    return tuple({name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups)


def stages_of(
    module: Tiny,
    sizes: Sequence[int] = (2, 2),
    method: Any = "rgc",
    optimizer: torch.optim.Optimizer | None = None,
    weights: Any = "uniform",
    credit: Any = "local",
) -> list[Stage]:
    """Return the stages of ``module``."""
    cut = cut_stages(module, BlockLayout(**module.configure_blocks()), sizes)
    shares = consensus_weights(weights, len(sizes))
    return build_stages(module, cut, method, optimizer or sgd(module), shares, contextlib.nullcontext, credit)


def slow(*values: object) -> Any:
    """Mark parameters as slow: a process more to start."""
    return pytest.param(*values, marks=pytest.mark.slow)


THREADS = ["turns", "threads serial", "threads"]
BACKENDS = [*THREADS, slow("processes serial"), "processes"]
"""Who carries the orders, and whether batches overlap."""


def open_backend(
    backend: str,
    module: Tiny,
    *,
    sizes: Sequence[int] = (2, 2),
    method: Any = "rgc",
    optimizer: torch.optim.Optimizer | None = None,
    lag: Any = "newest",
    snapshot_every: int = 1,
    slots: int = 2,
    first_step: int = 0,
    timeout_s: float = 60.0,
    random: bool = False,
    credit: Any = "local",
) -> Pipeline:
    """Start ``backend`` on ``module``; ``random`` gives every stage a random stream of its own."""
    optimizer = optimizer or sgd(module)
    if backend == "groups":
        groups = build_groups(module, BlockLayout(**module.configure_blocks()), 2, optimizer, contextlib.nullcontext)
        return GroupsPipeline(groups, first_step, timeout_s, 1)
    if backend.startswith("processes"):
        share(module)
    stages = stages_of(module, sizes, method, optimizer, credit=credit)
    if random:
        for stage in stages:
            stage.set_random_state(torch.Generator().manual_seed(10 + stage.stage_idx).get_state())
    pace = Pace("turns" in backend or "serial" in backend, lag, snapshot_every)
    if backend == "turns":
        return TurnsPipeline(stages, pace, first_step, timeout_s, None)
    if backend.startswith("threads"):
        return ThreadPipeline(stages, pace, first_step, timeout_s, slots, 1)
    return ProcessPipeline(stages, pace, first_step, timeout_s, slots, 1, 4096, 4096)


def train(
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer,
    data: Sequence[Batch],
    clip: Clip | None = None,
    batches_per_step: int = 1,
) -> list[FinishedBatch]:
    """Order all batches and their steps, drain, and return what was finished, in its order."""
    finished: list[FinishedBatch] = []
    for batch_idx, batch in enumerate(data):
        pipeline.learn(batch, batches_per_step)
        if (batch_idx + 1) % batches_per_step == 0:
            pipeline.step(hyper(optimizer), clip)
        finished += pipeline.finished(wait=False)
    pipeline.drain()
    return finished + pipeline.finished(wait=False)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the module's tensors."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Return the names of the tensors that are not the same bit for bit."""
    assert ours.keys() == theirs.keys()
    return [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


def stage_threads() -> list[str]:
    """Return the names of the threads of stages."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("stage-")]


def name_semaphores() -> None:
    """Have this process name its semaphores after itself: other programs on the machine have some too."""
    multiprocessing.current_process()._config["semprefix"] = f"/mp{os.getpid()}"


def shared_memory(pid: int | None = None) -> set[str]:
    """Return the names of what a process (None: this one) keeps in shared memory."""
    pid = pid or os.getpid()
    return {path.name for path in Path("/dev/shm").iterdir() if f"mp{pid}-" in path.name or f"_{pid}_" in path.name}
