"""Where a deep model is cut: layers into contiguous stages, every named tensor to the stage that owns it.

Owns the arithmetic of a cut and of its balance. The final stage owns the readout, the stage that holds a layer owns the
private exit after it; whatever else lies outside the layers (an embedding, positions) belongs to stage 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_blocktrain.errors import explain
from lightning_blocktrain.partition import assign_names
from lightning_blocktrain.pipeline.exits import exits_of
from lightning_blocktrain.protocols import BlockLayout

MIN_GAIN = 0.03
"""Smallest relative cut of the busiest stage's time for which layers move: less is noise."""


@dataclass(frozen=True)
class StageCut:
    """A module cut into stages.

    Args:
        sizes: Layers per stage.
        names: Per stage, the names of the parameters and persistent buffers that it owns.
        readout_names: Names of the readout's tensors, a part of the final stage's.
    """

    sizes: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    readout_names: tuple[str, ...]

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.sizes)

    @property
    def slices(self) -> list[slice]:
        """Per stage, the slice of its layers."""
        return [slice(start, end) for start, end in pairwise(accumulate(self.sizes, initial=0))]


def even_sizes(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return ``num_stages`` layer counts that differ by at most one, the larger ones first."""
    size, rest = divmod(num_layers, num_stages)
    return tuple(size + (stage_idx < rest) for stage_idx in range(num_stages))


def balanced_sizes(sizes: Sequence[int], busy_s: Sequence[float]) -> tuple[int, ...]:
    """Return the layer counts whose busiest stage is predicted to take least time.

    A stage's time is spread evenly over its layers, and contiguous cuts of these times are compared.

    Args:
        sizes: Layers per stage when the times were measured.
        busy_s: Seconds of work per stage and step.

    Returns:
        The better counts, or ``sizes`` where none cuts the busiest stage's time by ``MIN_GAIN``.
    """
    costs = [busy / size for size, busy in zip(sizes, busy_s, strict=True) for _ in range(size)]
    best_s, best = _least_maximum(costs, len(sizes))
    return best if best_s < (1 - MIN_GAIN) * max(busy_s) else tuple(sizes)


def _least_maximum(costs: Sequence[float], num_parts: int) -> tuple[float, tuple[int, ...]]:
    """Cut ``costs`` into contiguous non-empty parts with the least largest sum; return that sum and the lengths."""
    totals = list(accumulate(costs, initial=0.0))
    best: dict[int, tuple[float, tuple[int, ...]]] = {end: (totals[end], (end,)) for end in range(1, len(totals))}
    for num in range(2, num_parts + 1):
        best = {
            end: min(
                (max(best[start][0], totals[end] - totals[start]), (*best[start][1], end - start))
                for start in range(num - 1, end)
            )
            for end in range(num, len(totals))
        }
    return best[len(costs)]


def cut_stages(module: nn.Module, layout: BlockLayout, sizes: Sequence[int]) -> StageCut:
    """Assign every parameter and persistent buffer of ``module`` to exactly one stage.

    Raises:
        MisconfigurationException: If stages share a tensor, or the readout shares one with what precedes it.
    """
    home_of_layer = [stage_idx for stage_idx, size in enumerate(sizes) for _ in range(size)]
    names, interface = assign_names(module, layout.layers, home_of_layer)
    readout_ids = {id(tensor) for tensor in (*layout.readout.parameters(), *layout.readout.buffers())}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    readout = tuple(name for name in interface if id(tensors[name]) in readout_ids)
    if len(sizes) > 1:
        _refuse_tied_readout(module, layout.readout, readout_ids)
    owned = [list(stage_names) for stage_names in names]
    homes = _homes_of_exits(exits_of(module, len(layout.layers)), sizes)
    for name in interface:
        if name not in readout:
            owned[homes.get(id(tensors[name]), 0)].append(name)
    owned[-1] += readout
    return StageCut(tuple(sizes), tuple(map(tuple, owned)), readout)


def _homes_of_exits(exits: nn.ModuleList | None, sizes: Sequence[int]) -> dict[int, int]:
    """Return the stage of every tensor of the private exits, by its id.

    An exit belongs to the upstream stage that ends with it. Others are not run, and may be the same as one that is:
    they belong to the stage of their layer where they belong to no other.
    """
    homes: dict[int, int] = {}
    ends = [end - 1 for end in accumulate(sizes)][:-1]
    for stage_idx, private in enumerate(exits[end] for end in ends) if exits else ():
        for name, tensor in (*private.named_parameters(), *private.named_buffers()):
            if homes.setdefault(id(tensor), stage_idx) != stage_idx:
                rule = "stages may not share weights: an exit belongs to the stage that ends with it"
                fix = "give each exit its own: a ByteTransformer has as many exits as num_blocks"
                raise MisconfigurationException(explain(rule, f"{name} in several exits", fix))
    home_of_layer = [stage_idx for stage_idx, size in enumerate(sizes) for _ in range(size)]
    for unused, home in zip(exits or (), home_of_layer, strict=False):
        for tensor in (*unused.parameters(), *unused.buffers()):
            homes.setdefault(id(tensor), home)
    return homes


def _refuse_tied_readout(module: nn.Module, readout: nn.Module, readout_ids: set[int]) -> None:
    # By module, not by name: one module may be registered under several paths.
    inside = {id(part) for part in readout.modules()}
    if id(readout) not in {id(part) for part in module.modules()}:
        rule = "configure_blocks: readout must be a submodule of the LightningModule"
        raise MisconfigurationException(explain(rule, type(readout).__name__, "register it in __init__"))
    names: dict[int, tuple[list[str], list[str]]] = {key: ([], []) for key in readout_ids}  # outside, inside
    for path, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) in readout_ids:
                names[id(parameter)][id(part) in inside].append(f"{path}.{name}" if path else name)
    for outside, of_readout in names.values():
        if outside:
            rule = "stages may not share weights: the final stage alone owns the readout"
            fix = "untie embedding and readout, or train with one stage"
            raise MisconfigurationException(explain(rule, "tied " + " = ".join([*outside, *of_readout]), fix))
