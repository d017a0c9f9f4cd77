"""What ``blocktrain`` refuses: unsupported Trainers and modules, and losses that reach beyond their block."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_blocktrain.errors import explain
from lightning_blocktrain.partition import Partition, as_layout
from lightning_blocktrain.protocols import BlockLayout, SupportsBlocks
from lightning_blocktrain.rounds import RoundRules
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.strategies.cluster import check_exchange
from lightning_blocktrain.strategies.contract import CONFIGURE_BLOCKS, refuse_module
from lightning_blocktrain.strategies.frozen_blocks import parts_of

HOOKS = {
    "configure_blocks": CONFIGURE_BLOCKS,
    "block_training_step": (
        "block_training_step(self, batch, batch_idx, block_idx)",
        "returns a loss that reaches block block_idx and the parameters outside the blocks only",
    ),
}


def declared_layout(module: L.LightningModule) -> BlockLayout:
    """Return the layout ``module`` declares.

    Raises:
        MisconfigurationException: If it lacks a hook, optimises by hand or is compiled as a whole.
    """
    refuse_module(module, HOOKS, "blocktrain")
    assert isinstance(module, SupportsBlocks)
    return as_layout(module.configure_blocks())


def refuse_topology(
    devices: int, num_nodes: int, sync_batchnorm: bool, joins: bool = False, in_job: bool = False
) -> None:
    """Refuse what the Trainer was built with, if no mode can honour it.

    Args:
        devices: Of the Trainer; above 1 they are worker processes.
        num_nodes: Of the Trainer.
        sync_batchnorm: Of the Trainer.
        joins: Whether this process joins a run as one worker.
        in_job: Whether torchrun or SLURM has started the processes.

    Raises:
        MisconfigurationException: For several nodes without a job, synchronised batch norm, or one worker on several
            devices.
    """
    if num_nodes > 1 and not in_job:
        rule = "num_nodes must be 1 where nobody else starts the processes: blocktrain starts those of one machine"
        fix = "start the script with torchrun or srun, or set BLOCKTRAIN_COORDINATOR on the other machines"
        raise MisconfigurationException(explain(rule, f"num_nodes={num_nodes}", fix))
    if joins and devices > 1:
        rule = "a process that joins a run is one worker: devices must be 1"
        raise MisconfigurationException(explain(rule, f"devices={devices}", "use devices=1, or no coordinator"))
    if sync_batchnorm:
        rule = "blocktrain has no synchronised batch norm: workers do not meet inside a step"
        raise MisconfigurationException(explain(rule, "sync_batchnorm=True", "use sync_batchnorm=False"))


def refuse_few_workers(num_workers: int, num_blocks: int) -> None:
    """Refuse to leave a block without a worker.

    Raises:
        MisconfigurationException: If there are fewer workers than blocks.
    """
    if num_workers < num_blocks:
        rule = "every block needs a worker: devices must be at least num_blocks"
        got = f"devices={num_workers}, num_blocks={num_blocks}"
        raise MisconfigurationException(explain(rule, got, "use more devices or fewer blocks"))


def refuse_exchange(exchange: object, rules: RoundRules, codec: object, local_steps: object) -> None:
    """Refuse an unknown way of exchange, and what only a coordinator can do where there is none.

    Raises:
        ValueError: Naming the first.
    """
    check_exchange(exchange)
    if exchange != "collective":
        return
    name = codec.name if isinstance(codec, Codec) else codec
    usual = (
        ("codec", name, "fp32"),
        ("late", rules.late, "drop"),
        ("local_steps", local_steps, "fixed"),
        ("deadline_quantile", rules.deadline_quantile, None),
    )
    for option, value, only in usual:
        if value != only:
            rule = f"{option} must be {only!r} with exchange='collective': its ranks wait for each other, in fp32"
            raise ValueError(explain(rule, f"{option}={value!r}", f"leave {option} out, or use exchange='http'"))


def refuse_simulation(replicas: int, network: object, inner_state: str) -> None:
    """Refuse settings that only simulated workers have, where the workers are processes.

    Raises:
        MisconfigurationException: Naming the first.
    """
    for name, value, usual in (("replicas", replicas, 1), ("network", network, "lockstep")):
        if value != usual:
            rule = f"{name} is for simulated workers: with several processes it follows from them"
            raise MisconfigurationException(explain(rule, f"{name}={value!r}", f"leave {name} out, or use devices=1"))
    if inner_state == "average":
        rule = "inner_state must be 'keep' or 'reset' where the workers are processes: optimizer states do not travel"
        raise MisconfigurationException(explain(rule, "inner_state='average'", "choose one"))


def refuse_scaled_accumulation(precision: Precision, accumulate_grad_batches: int) -> None:
    """Refuse a gradient scaler together with accumulation.

    Workers share the scaler, which may change its scale after any worker's step; gradients that another worker has
    accumulated until then are at the old scale.

    Raises:
        MisconfigurationException: For ``precision="16-mixed"`` with ``accumulate_grad_batches`` above 1.
    """
    if getattr(precision, "scaler", None) is not None and accumulate_grad_batches > 1:
        rule = "blocktrain cannot accumulate gradients under a gradient scaler, which all workers share"
        got = f"accumulate_grad_batches={accumulate_grad_batches} with precision {precision.precision}"
        raise MisconfigurationException(explain(rule, got, "use precision='bf16-mixed'"))


def warn_of_other_terms(differing: Sequence[str]) -> None:
    """Tell whoever joins a run which of its own settings do not count: the run's are its first worker's."""
    if differing:
        # Not rank_zero_warn: it is silent in every process that joins.
        warnings.warn(f"This run has terms of its own, which hold here too: {'; '.join(differing)}.", stacklevel=2)


def warn_of_stale_validation(trainer: L.Trainer, sync_every: int) -> None:
    """Warn if validation is to come inside rounds."""
    interval, round_batches = trainer.val_check_interval, sync_every * trainer.accumulate_grad_batches
    if isinstance(interval, int) and interval % round_batches and trainer.enable_validation:
        rank_zero_warn(
            f"val_check_interval={interval} is not a multiple of the {round_batches} batches of a round: "
            "validation will see the blocks of the last closed round, not the newest steps."
        )


class BlockGuard:
    """Watches each block-local loss: it may not run, or send gradient into, another block.

    Args:
        module: The live module.
        partition: Its partition.
        tensors: The tensors that workers train, by name.
    """

    def __init__(self, module: nn.Module, partition: Partition, tensors: Mapping[str, Tensor]) -> None:
        self._partition = partition
        self._flags = [(name, parameter, parameter.requires_grad) for name, parameter in module.named_parameters()]
        self._block_idx: int | None = None
        self._checked: set[int] = set()
        interface = [tensors[n] for n in partition.interface_names if n in tensors]
        self._block_tensors = [{n: tensors[n] for n in names if n in tensors} for names in partition.block_names]
        self._trained = [[*block.values(), *interface] for block in self._block_tensors]
        names = {part: name for name, part in module.named_modules()}
        parts = [
            (part, block_idx)
            for block_idx, layers in enumerate(partition.blocks)
            for layer in layers
            for part in parts_of(layer)
            if partition.num_blocks > 1
        ]
        # Before it runs: a worker's process does not hold the tensors of other blocks.
        runs = [part.register_forward_pre_hook(self._refuse_run(owner, names[part])) for part, owner in parts]
        self._handles = [*runs, *(part.register_forward_hook(self._watch_gradient(owner)) for part, owner in parts)]

    def refuse_changed_flags(self) -> None:
        """Refuse a step after parameters were frozen or unfrozen; call it while no worker acts.

        Raises:
            MisconfigurationException: Naming them.
        """
        changed = [name for name, parameter, flag in self._flags if parameter.requires_grad != flag]
        if changed:
            rule = "blocktrain trains the same parameters from the start of a fit to its end"
            fix = "freeze in setup() or configure_model(), and start another fit to unfreeze"
            got = "requires_grad changed of " + ", ".join(changed)
            raise MisconfigurationException(explain(rule, got, fix))

    @contextmanager
    def watch(self, block_idx: int) -> Iterator[None]:
        """Hold the code inside to the rules of block ``block_idx``'s loss."""
        self._block_idx = block_idx
        try:
            yield
        finally:
            self._block_idx = None

    def gradients(self, block_idx: int) -> list[Tensor]:
        """Return the gradients of block ``block_idx``'s loss; of a sparse one, the values it holds.

        Raises:
            MisconfigurationException: If, after the block's first loss, a parameter of it has no gradient.
        """
        if block_idx not in self._checked:
            self._checked.add(block_idx)
            missing = [n for n, t in self._block_tensors[block_idx].items() if t.requires_grad and t.grad is None]
            if missing:
                rule = f"block_training_step must train every parameter of block {block_idx}"
                fix = "run the block's layers in its loss, or set requires_grad=False before the fit"
                raise MisconfigurationException(explain(rule, "no gradient in " + ", ".join(missing), fix))
        gradients = [tensor.grad for tensor in self._trained[block_idx] if tensor.grad is not None]
        return [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]

    def remove(self) -> None:
        """Take the hooks off the layers."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _refuse_run(self, owner_idx: int, name: str) -> Any:
        def hook(layer: nn.Module, args: Any) -> None:
            block_idx, layout = self._block_idx, self._partition.layout
            if block_idx is None or block_idx == owner_idx or owner_idx in self._partition.read_by(block_idx):
                return
            terms = f"prefix='{layout.prefix}'" + (f" and lookahead={layout.lookahead}" if layout.lookahead else "")
            rule = f"with {terms} the loss of block {block_idx} may not run the layers of block {owner_idx}"
            fix = "run the block's own layers only"
            if owner_idx < block_idx:
                fix += ", or declare prefix='frozen' to read the blocks before it"
            elif layout.prefix == "frozen":
                fix += f", or declare lookahead={owner_idx - block_idx} to read the blocks after it"
            raise MisconfigurationException(explain(rule, f"a call of {name} ({type(layer).__name__})", fix))

        return hook

    def _watch_gradient(self, owner_idx: int) -> Any:
        def hook(layer: nn.Module, args: Any, output: Any) -> None:
            block_idx = self._block_idx
            if block_idx is None or owner_idx == block_idx or owner_idx in self._partition.blocks_after(block_idx):
                return
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, Tensor) and torch.is_grad_enabled() and hidden.requires_grad:
                hidden.register_hook(  # type: ignore[no-untyped-call]
                    lambda grad: _refuse_gradient(block_idx, f"layers of block {owner_idx}")
                )

        return hook


def _refuse_gradient(block_idx: int, owner: str) -> None:
    rule = f"the loss of block {block_idx} may not send gradient into the {owner}"
    raise MisconfigurationException(explain(rule, "a backward pass that reached it", "run it under torch.no_grad()"))
