"""Aliases: copies of a module that share its tensors, so that stages never touch the user's live module.

Lightning calls ``zero_grad``, ``eval`` and callbacks on the live module while batches are in flight. An alias has
Parameter objects (and so gradients), hooks and modes of its own.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_blocktrain.errors import explain


def make_alias(module: L.LightningModule, replaced: Mapping[Tensor, Tensor] | None = None) -> L.LightningModule:
    """Return a deep copy of ``module`` whose parameters are new ``Parameter`` objects on the same storage.

    Args:
        module: The live module; unchanged.
        replaced: Tensors of ``module`` that the alias holds something else for, such as a snapshot.

    Raises:
        MisconfigurationException: If ``module`` holds something that cannot be copied.
    """
    memo: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
    }
    memo.update((id(buffer), buffer) for buffer in module.buffers())
    memo.update((id(tensor), other) for tensor, other in (replaced or {}).items())
    if getattr(module, "_trainer", None) is not None:
        memo[id(module._trainer)] = None  # an alias belongs to no Trainer; __getstate__ drops it too
    try:
        alias: L.LightningModule = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, AttributeError) as exc:  # a lock; a tensor with a graph; a local class
        rule = "stages run on copies of the module, which copy.deepcopy must be able to make"
        fix = "make what cannot be copied where it is used, or give it a __deepcopy__"
        raise MisconfigurationException(explain(rule, f"{type(exc).__name__}: {exc}", fix)) from exc
    return alias


def snapshot_of(readout: nn.Module, learns: bool) -> dict[Tensor, Tensor]:
    """Return private copies of the readout's tensors, by the live ones.

    Args:
        readout: The live readout.
        learns: Whether gradients of the copies are wanted.
    """
    parameters: dict[Tensor, Tensor] = {
        p: nn.Parameter(p.detach().clone(), requires_grad=learns and p.requires_grad) for p in readout.parameters()
    }
    return {**parameters, **{buffer: buffer.detach().clone() for buffer in readout.buffers()}}


def stage_optimizer(optimizer: Optimizer, parameters: Mapping[Tensor, Tensor]) -> tuple[Optimizer, tuple[int, ...]]:
    """Return an optimizer like ``optimizer`` for some of its parameters.

    The state of these parameters moves to the new optimizer.

    Args:
        optimizer: The user's, over the live module's parameters.
        parameters: Live parameter to the alias's, for those that the stage owns.

    Returns:
        The optimizer, and for each of its groups the index of the group it came from.
    """
    clone = copy.copy(optimizer)  # keeps what __init__ computed; __setstate__ renews hooks and the step wrapper
    for name, value in vars(optimizer).items():
        if name != "step" and name not in vars(clone):  # a scheduler's wrapper of step belongs to the original
            setattr(clone, name, value)
    groups, origins = [], []
    for group_idx, group in enumerate(optimizer.param_groups):
        mine = [parameters[p] for p in group["params"] if p in parameters]
        if mine:
            groups.append({**group, "params": mine})
            origins.append(group_idx)
    clone.param_groups = groups
    clone.state = defaultdict(dict)
    for live, alias in parameters.items():
        if live in optimizer.state:
            clone.state[alias] = optimizer.state.pop(live)
    return clone, tuple(origins)
