"""What ``rgc`` and its companions refuse: unsupported Trainers, modules, optimizers and callbacks."""

from collections.abc import Sequence
from inspect import Parameter, signature
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from torch import nn
from torch.optim import Optimizer

from lightning_blocktrain.errors import explain
from lightning_blocktrain.partition import as_layout, default_num_blocks, divisors
from lightning_blocktrain.pipeline.exits import exits_of
from lightning_blocktrain.pipeline.settings import PipelineSettings, num_cores
from lightning_blocktrain.pipeline.split import even_sizes
from lightning_blocktrain.protocols import BlockLayout
from lightning_blocktrain.strategies.contract import CONFIGURE_BLOCKS, missing_hooks, refuse_module

HOOKS = {
    "configure_blocks": CONFIGURE_BLOCKS,
    "stage_embed": ("stage_embed(self, batch)", "returns the hidden state before the first layer"),
    "stage_loss": ("stage_loss(self, logits, batch)", "returns the loss of what the readout gave"),
}
IGNORED_OVERRIDES = {
    "configure_gradient_clipping": "each stage clips its own gradients",
    "backward": "each stage runs its own backward pass",
}


def refuse_trainer(devices: Sequence[torch.device], num_nodes: int, sync_batchnorm: bool) -> None:
    """Refuse what the Trainer was built with, if stages on one CPU host cannot honour it.

    Raises:
        MisconfigurationException: For another accelerator, several nodes, or synchronised batch norm.
    """
    if any(device.type != "cpu" for device in devices):
        rule = "the stages of a pipeline run on the CPU of one host"
        got = f"accelerator={devices[0].type!r}"
        raise MisconfigurationException(explain(rule, got, "use accelerator='cpu'"))
    if num_nodes > 1:
        rule = "the stages of a pipeline run on one host: num_nodes must be 1"
        raise MisconfigurationException(explain(rule, f"num_nodes={num_nodes}", "use strategy='blocktrain'"))
    if sync_batchnorm:
        rule = "stages have no batch norm in common: sync_batchnorm must be off"
        raise MisconfigurationException(explain(rule, "sync_batchnorm=True", "use sync_batchnorm=False"))


def stage_layout(module: L.LightningModule) -> BlockLayout:
    """Return the layout of a module that stages can train.

    Raises:
        MisconfigurationException: If it lacks a hook, optimises by hand, is compiled as a whole, overrides a hook
            that stages do not call, or has private exits that do not fit its layers.
    """
    if missing_hooks(module, HOOKS) == ["stage_embed", "stage_loss"] and _has_separate_blocks(module):
        rule = "stages learn from one another's features, and the blocks of this module have inputs of their own"
        raise MisconfigurationException(explain(rule, type(module).__name__, "use strategy='blocktrain'"))
    refuse_module(module, HOOKS, "rgc")
    for hook, why in IGNORED_OVERRIDES.items():
        if getattr(type(module), hook) is not getattr(L.LightningModule, hook):
            raise MisconfigurationException(explain(f"{hook} must not be overridden: {why}", hook, "remove it"))
    layout = as_layout(module.configure_blocks())  # type: ignore[operator]
    exits_of(module, len(layout.layers))
    for idx, layer in enumerate(layout.layers):
        _refuse_signature(module, idx, layer)
    return layout


def _has_separate_blocks(module: Any) -> bool:
    return as_layout(module.configure_blocks()).prefix == "none" and hasattr(module, "block_training_step")


def _refuse_signature(module: L.LightningModule, idx: int, layer: nn.Module) -> None:
    if hasattr(module, "stage_kwargs"):  # gives the layers more than the hidden state; what, the first batch shows
        return
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    required = [
        p.name for p in signature(layer.forward).parameters.values() if p.kind in kinds and p.default is Parameter.empty
    ]
    if len(required) > 1:
        rule = f"layer {idx} ({type(layer).__name__}) must take one tensor"
        fix = "return its other arguments from stage_kwargs(self, batch, hidden)"
        raise MisconfigurationException(explain(rule, f"forward({', '.join(required)})", fix))


def asked_stages(settings: PipelineSettings, devices: int) -> int | None:
    """Return the number of stages that the strategy's options ask for, if they do.

    Args:
        settings: The options.
        devices: The Trainer's ``devices``; above 1 it counts stages.

    Raises:
        MisconfigurationException: If both give a number, and these differ.
    """
    split = settings.stage_split
    asked = len(split) if not isinstance(split, str) else settings.num_stages
    if devices > 1 and asked not in (None, devices):
        rule = "num_stages of the strategy and devices of the Trainer must agree"
        got = f"num_stages={asked}, devices={devices}"
        raise MisconfigurationException(explain(rule, got, "give one of them, and devices=1 if it is num_stages"))
    return asked


def stage_sizes(settings: PipelineSettings, num_layers: int, devices: int) -> tuple[int, ...]:
    """Return the layers of each stage.

    Args:
        settings: The options.
        num_layers: Layers of the module.
        devices: The Trainer's ``devices``.

    Raises:
        MisconfigurationException: If the numbers disagree or do not fit the layers.
    """
    split, asked = settings.stage_split, asked_stages(settings, devices)
    if settings.method == "bp":
        return (num_layers,)
    num_stages = asked or (devices if devices > 1 else default_num_blocks(num_layers))
    if num_stages > num_layers:
        rule = "num_stages must not exceed the number of layers"
        got = f"num_stages={num_stages}, num_layers={num_layers}"
        raise MisconfigurationException(explain(rule, got, f"use at most {num_layers}"))
    if not isinstance(split, str):
        if sum(split) != num_layers:
            got = f"stage_split={list(split)}, num_layers={num_layers}"
            raise MisconfigurationException(explain("stage_split must add up to num_layers", got, "change one number"))
        return tuple(split)
    if split == "even" and num_layers % num_stages:
        got = f"num_stages={num_stages}, num_layers={num_layers}"
        fix = f"choose one of {', '.join(map(str, divisors(num_layers)))}, or stage_split='auto' or a list"
        raise MisconfigurationException(explain("num_stages must divide num_layers for stage_split='even'", got, fix))
    return even_sizes(num_layers, num_stages)


def known_switch_step(settings: PipelineSettings, max_steps: int) -> int | None:
    """Return the optimizer steps after which all layers learn as one; None: they never do.

    Raises:
        MisconfigurationException: If the number of steps is not known.
    """
    if settings.schedule != "local" and max_steps < 0:
        rule = "schedule='local_then_bp' switches after a share of max_steps"
        raise MisconfigurationException(explain(rule, f"max_steps={max_steps}", "give the Trainer max_steps"))
    return settings.switch_step(max_steps)


def num_groups(settings: PipelineSettings, devices: int) -> int:
    """Return the groups of ``bp_groups``: ``num_stages``, else ``devices`` above 1, else the cores up to 4."""
    return settings.num_stages or (devices if devices > 1 else min(4, num_cores()))


def refuse_closures(optimizer: Optimizer) -> None:
    """Refuse an optimizer that steps with a closure only.

    Raises:
        MisconfigurationException: Naming it.
    """
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        rule = "a stage's optimizer must step without a closure"
        raise MisconfigurationException(explain(rule, type(optimizer).__name__, "use for example AdamW"))


def refuse_precision(precision: Precision, settings: PipelineSettings) -> None:
    """Refuse a gradient scaler, and in threads a precision that changes the default type of the whole process.

    Raises:
        MisconfigurationException: Naming the precision.
    """
    if getattr(precision, "scaler", None) is not None:
        rule = "stages have no gradient scaler in common"
        raise MisconfigurationException(explain(rule, f"precision={precision.precision}", "use 'bf16-mixed'"))
    threads = settings.backend == "threads" and (settings.overlaps or settings.method == "bp_groups")
    if threads and isinstance(precision, HalfPrecision | DoublePrecision):
        rule = "this precision changes the default type of a process, which stages in threads share"
        fix = "use 'bf16-mixed', backend='processes' or mode='serial'"
        raise MisconfigurationException(explain(rule, f"precision={precision.precision}", fix))


def refuse_callbacks(callbacks: Sequence[object], settings: PipelineSettings) -> None:
    """Refuse callbacks that read the weights after every batch while batches are in flight.

    Raises:
        MisconfigurationException: Naming the callback.
    """
    readers = [type(callback).__name__ for callback in callbacks if isinstance(callback, WeightAveraging)]
    if readers and settings.overlaps:
        rule = "a callback may not read the weights of every batch while stages change them"
        raise MisconfigurationException(explain(rule, ", ".join(readers), "use mode='serial'"))
