"""How a model is cut: layers into contiguous blocks, the noise range into one band per block.

``block_sigma_edges`` is the only place that knows that block 0 owns the highest noise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_blocktrain.edm import log_normal_cdf, log_normal_icdf
from lightning_blocktrain.errors import explain
from lightning_blocktrain.protocols import BlockLayout

_T = TypeVar("_T")


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number`` in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def default_num_blocks(num_layers: int) -> int:
    """Return the number of blocks when nobody chose one: the largest divisor of ``num_layers`` up to 4."""
    return max((d for d in divisors(num_layers) if d <= 4), default=1)


def block_slices(num_layers: int, num_blocks: int) -> list[slice]:
    """Cut ``num_layers`` layers into ``num_blocks`` equal contiguous slices, block 0 first.

    Raises:
        ValueError: If ``num_blocks`` is not a positive divisor of ``num_layers``.
    """
    if num_blocks < 1 or num_layers < 1 or num_layers % num_blocks:
        choices = ", ".join(map(str, divisors(num_layers))) or "none: the model has no layers"
        raise ValueError(
            explain(
                "num_blocks must divide num_layers",
                f"num_blocks={num_blocks}, num_layers={num_layers}",
                f"choose one of {choices}",
            )
        )
    size = num_layers // num_blocks
    return [slice(start, start + size) for start in range(0, num_layers, size)]


def block_sigma_edges(
    num_blocks: int, sigma_min: float, sigma_max: float, p_mean: float = -1.2, p_std: float = 1.2
) -> tuple[float, ...]:
    """Cut ``[sigma_min, sigma_max]`` into bands of equal probability under ``ln sigma ~ N(p_mean, p_std)``.

    Returns:
        ``num_blocks + 1`` edges in descending order: block b owns ``[edges[b + 1], edges[b]]``.

    Raises:
        ValueError: If the range is empty, not positive, infinite, or so far from ``p_mean`` that its bands vanish.

    Source: DiffusionBlocks (arXiv 2506.14202), equi-probability partition, restricted to the chosen range.
    """
    if not 0 < sigma_min < sigma_max < math.inf:
        raise ValueError(
            explain(
                "sigma_min must be positive and less than sigma_max, which must be finite",
                f"sigma_min={sigma_min}, sigma_max={sigma_max}",
                "the usual range is 1 to 10",
            )
        )
    numbers: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}  # a model may be built on the meta device
    bounds = torch.tensor([sigma_max, sigma_min], **numbers)
    above, below = log_normal_cdf(bounds, p_mean, p_std)
    inner = torch.linspace(float(above), float(below), num_blocks + 1, **numbers)[1:-1]
    edges = (sigma_max, *log_normal_icdf(inner, p_mean, p_std).tolist(), sigma_min)
    if not all(high > low for high, low in pairwise(edges)):
        raise ValueError(
            explain(
                "sigma_min and sigma_max must leave every block a band of probability above 0",
                f"sigma_min={sigma_min}, sigma_max={sigma_max}, num_blocks={num_blocks}",
                "the usual range is 1 to 10",
            )
        )
    return edges


def widened_band(edges: Sequence[float], block_idx: int, gamma: float) -> tuple[float, float]:
    """Return block ``block_idx``'s training band ``(low, high)``, widened by the overlap ``gamma``.

    With ``a = (high / low) ** gamma`` the band ``[low, high]`` becomes ``[low / a, high * a]``, clamped to the
    whole range.

    Raises:
        ValueError: If ``gamma`` is negative or NaN.
    """
    if not gamma >= 0:
        raise ValueError(explain("gamma must not be negative", f"gamma={gamma}", "use 0 for no overlap"))
    high, low = edges[block_idx], edges[block_idx + 1]
    widening = (high / low) ** gamma
    return max(low / widening, edges[-1]), min(high * widening, edges[0])


def sweep_sigmas(
    num_blocks: int, sigma_min: float, sigma_max: float, p_mean: float = -1.2, p_std: float = 1.2
) -> tuple[float, ...]:
    """Return the noise level at which each block runs in one sweep, block 0 first.

    ``num_blocks`` points equally spaced in probability from ``sigma_max`` down to ``sigma_min``; a single block
    runs at ``sigma_max``. Point b lies inside block b's band.
    """
    if num_blocks == 1:
        return (sigma_max,)
    return block_sigma_edges(num_blocks - 1, sigma_min, sigma_max, p_mean, p_std)


@dataclass(frozen=True)
class Partition:
    """Which named tensors of a module belong to which block, and which to the interface.

    Args:
        layout: The module's layout with ``num_blocks`` settled.
        blocks: Per block, its layers; the stem stands before those of block 0, a head behind those of its block.
        block_names: Per block, the names of its parameters and persistent buffers in the module.
        interface_names: The names of every other parameter and persistent buffer.
    """

    layout: BlockLayout
    blocks: tuple[tuple[nn.Module, ...], ...]
    block_names: tuple[tuple[str, ...], ...]
    interface_names: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def blocks_before(self, block_idx: int) -> range:
        """Return the blocks that a block's loss may run before its own, without gradient."""
        return range(block_idx if self.layout.prefix == "frozen" else 0)

    def blocks_after(self, block_idx: int) -> range:
        """Return the blocks that a block's loss may run after its own, with gradient through them."""
        return range(block_idx + 1, min(block_idx + 1 + self.layout.lookahead, self.num_blocks))

    def read_by(self, block_idx: int) -> tuple[int, ...]:
        """Return the blocks that a worker of a block reads and does not train."""
        return (*self.blocks_before(block_idx), *self.blocks_after(block_idx))


def as_layout(declared: BlockLayout | Mapping[str, object]) -> BlockLayout:
    """Return ``declared`` as a ``BlockLayout``; a plain mapping lets a module do without our import.

    Raises:
        MisconfigurationException: If a field is missing, unknown or of the wrong type.
    """
    if isinstance(declared, BlockLayout):
        layout = declared
    else:
        try:
            layout = BlockLayout(**declared)  # type: ignore[arg-type]
        except TypeError as exc:
            got = f"the fields {[*declared]}" if isinstance(declared, Mapping) else type(declared).__name__
            raise MisconfigurationException(
                explain(
                    "configure_blocks must return layers and readout, and what else a BlockLayout has",
                    got,
                    'return {"layers": self.layers, "readout": self.readout}',
                )
            ) from exc
    if isinstance(layout.heads, nn.ModuleList):
        layout = replace(layout, heads=tuple(layout.heads))
    _refuse_parts(layout)
    _refuse_reading(layout)
    return layout


def _refuse_parts(layout: BlockLayout) -> None:
    """Refuse layers, a readout or heads that are no modules."""
    if not isinstance(layout.layers, nn.ModuleList) or len(layout.layers) == 0:
        raise MisconfigurationException(
            explain(
                "configure_blocks: layers must be a non-empty torch.nn.ModuleList",
                f"layers={type(layout.layers).__name__}",
                "keep the layers in one ModuleList",
            )
        )
    if not isinstance(layout.readout, nn.Module):
        raise MisconfigurationException(
            explain(
                "configure_blocks: readout must be a torch.nn.Module",
                f"readout={type(layout.readout).__name__}",
                "put the final norm and the unembedding into one module",
            )
        )
    heads = layout.heads
    if isinstance(heads, nn.Module) or not all(head is None or isinstance(head, nn.Module) for head in heads):
        raise MisconfigurationException(
            explain(
                "configure_blocks: heads must be a sequence of torch.nn.Module or None, one per block",
                f"heads={type(heads).__name__}",
                "use (None, self.head)",
            )
        )


def _refuse_reading(layout: BlockLayout) -> None:
    """Refuse what contradicts itself about the blocks that a block reads."""
    if layout.prefix not in ("none", "frozen"):
        raise MisconfigurationException(
            explain(
                "configure_blocks: prefix must be 'none' or 'frozen'",
                f"prefix={layout.prefix!r}",
                "choose one",
            )
        )
    if layout.stem is not None and (layout.prefix != "frozen" or not isinstance(layout.stem, nn.Module)):
        raise MisconfigurationException(
            explain(
                "configure_blocks: stem must be a torch.nn.Module that later blocks read as a frozen prefix",
                f"stem={type(layout.stem).__name__}, prefix={layout.prefix!r}",
                "declare prefix='frozen', or leave stem out: it is then trained by all blocks",
            )
        )
    if type(layout.lookahead) is not int or layout.lookahead < 0:
        rule = "configure_blocks: lookahead must be a number of blocks, 0 or more"
        raise MisconfigurationException(explain(rule, f"lookahead={layout.lookahead!r}", "use 1, or leave it out"))
    if layout.lookahead and layout.prefix != "frozen":
        rule = "configure_blocks: lookahead needs a frozen prefix if it is not 0"
        got = f"lookahead={layout.lookahead}, prefix={layout.prefix!r}"
        raise MisconfigurationException(explain(rule, got, "declare prefix='frozen', or leave lookahead out"))


def partition(module: nn.Module, layout: BlockLayout, num_blocks: int | None = None) -> Partition:
    """Assign every parameter and persistent buffer of ``module`` to exactly one block or the interface.

    Args:
        module: The whole model.
        layout: What its ``configure_blocks`` returned.
        num_blocks: The strategy's wish; must agree with the layout's if both are given.

    Raises:
        MisconfigurationException: If the two numbers differ or do not divide the layers, or if blocks share a
            parameter, or a block shares one with the interface.
    """
    num_layers = len(layout.layers)
    wishes = [number for number in (layout.num_blocks, num_blocks) if number is not None]
    chosen = wishes[0] if wishes else default_num_blocks(num_layers)
    if num_blocks is not None and num_blocks != chosen:
        raise MisconfigurationException(
            explain(
                "num_blocks of the strategy must agree with the module's",
                f"strategy num_blocks={num_blocks}, module num_blocks={chosen}",
                "give the number in one place only",
            )
        )
    try:
        slices = block_slices(num_layers, chosen)
    except ValueError as exc:
        raise MisconfigurationException(str(exc)) from exc
    blocks: tuple[tuple[nn.Module, ...], ...] = tuple(tuple(layout.layers[s]) for s in slices)
    size = num_layers // chosen
    names, interface = assign_names(module, layout.layers, [idx // size for idx in range(num_layers)])
    if len(layout.heads) not in (0, chosen):
        got = f"{len(layout.heads)} heads, num_blocks={chosen}"
        raise MisconfigurationException(
            explain("configure_blocks: heads must have one entry per block", got, "use None for a block without one")
        )
    for block_idx, part in _own_parts(layout):
        own = _part_names(module, layout, part, interface)
        before, after = ((part,), ()) if part is layout.stem else ((), (part,))
        blocks = _with(blocks, block_idx, (*before, *blocks[block_idx], *after))
        names = _with(names, block_idx, (*own, *names[block_idx]) if before else (*names[block_idx], *own))
        interface = tuple(name for name in interface if name not in own)
    settled = replace(layout, num_blocks=chosen)
    return Partition(settled, blocks, names, interface)


def assign_names(
    module: nn.Module, layers: nn.ModuleList, home_of_layer: Sequence[int]
) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Assign the name of every parameter and persistent buffer of ``module`` to one group of layers or the interface.

    Args:
        module: The whole model.
        layers: Its layers.
        home_of_layer: The group of each layer, ascending from 0.

    Returns:
        The names of each group, and all other names; a tensor with several names appears once.

    Raises:
        MisconfigurationException: If groups share a tensor, or a group shares one with the interface, or a layer
            appears twice or lives outside the module.
    """
    home_of = _homes(module, layers, home_of_layer)
    names: list[list[str]] = [[] for _ in range(home_of_layer[-1] + 1)]
    interface: list[str] = []
    for name in _state_names(module, home_of):
        home = home_of[name]
        (interface if home is None else names[home]).append(name)
    return tuple(map(tuple, names)), tuple(interface)


def _homes(module: nn.Module, layers: nn.ModuleList, home_of_layer: Sequence[int]) -> dict[str, int | None]:
    """Return ``tensor name -> home`` (None: interface), for every name, aliases of one tensor included."""
    layer_idx = {id(layer): idx for idx, layer in enumerate(layers)}
    paths = [
        (f"{path}.", layer_idx[id(submodule)])
        for path, submodule in module.named_modules(remove_duplicate=False)
        if id(submodule) in layer_idx
    ]
    if len(layer_idx) < len(layers) or len({idx for _, idx in paths}) < len(layers):
        raise MisconfigurationException(
            explain(
                "configure_blocks: every layer must be a different submodule of the LightningModule",
                f"{len(layers)} layers, {len({idx for _, idx in paths})} of them found in the module",
                "register each layer once",
            )
        )
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: next((home_of_layer[idx] for path, idx in paths if name.startswith(path)), None) for name, _ in named}


def _own_parts(layout: BlockLayout) -> list[tuple[int, nn.Module]]:
    """Return the stem and the heads, each with its block."""
    heads = [(block_idx, head) for block_idx, head in enumerate(layout.heads) if head is not None]
    return [*([] if layout.stem is None else [(0, layout.stem)]), *heads]


def _with(items: tuple[_T, ...], idx: int, item: _T) -> tuple[_T, ...]:
    return (*items[:idx], item, *items[idx + 1 :])


def _part_names(module: nn.Module, layout: BlockLayout, part: nn.Module, interface: Sequence[str]) -> tuple[str, ...]:
    """Return those names of the interface that belong to the stem or to a head.

    Raises:
        MisconfigurationException: If it is no submodule, overlaps with another part, or shares a tensor with what is
            outside.
    """
    mine = {id(submodule) for submodule in part.modules()}
    paths = tuple(f"{path}." for path, submodule in module.named_modules() if submodule is part)
    others = [layout.layers, *(other for _, other in _own_parts(layout) if other is not part)]
    if part is layout.stem:
        others.append(layout.readout)
    overlap = any(id(submodule) in mine for other in others for submodule in other.modules())
    twice = sum(other is part for _, other in _own_parts(layout)) > 1
    tensors = {id(tensor) for tensor in (*part.parameters(), *part.buffers())}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    shared = [name for name, tensor in named if id(tensor) in tensors and not name.startswith(paths)] if paths else []
    if not paths or overlap or twice or shared:
        kind = "stem" if part is layout.stem else "a head"
        rule = f"configure_blocks: {kind} must be a submodule apart from layers and readout, with tensors of its own"
        got = f"{kind}={type(part).__name__}, shared: {', '.join(shared) or 'none'}"
        raise MisconfigurationException(explain(rule, got, "untie it, or leave it out: all blocks then train it"))
    return tuple(name for name in interface if name.startswith(paths))


def _state_names(module: nn.Module, home_of: Mapping[str, int | None]) -> list[str]:
    """Return one name per parameter and persistent buffer; refuse a tensor whose names have two homes."""
    aliases: dict[int, list[str]] = {}
    # A module's own state_dict() may leave parameters out, such as those of a frozen backbone.
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, tensor in {**module.state_dict(keep_vars=True), **parameters}.items():
        # A state dict may hold tensors that are neither, such as the sums of a persistent metric.
        if isinstance(tensor, Tensor) and name in home_of:
            aliases.setdefault(id(tensor), []).append(name)
    for names in aliases.values():
        if len({home_of[name] for name in names}) > 1:
            raise MisconfigurationException(
                explain(
                    "a parameter must belong to one block only",
                    "tied " + " = ".join(names),
                    "untie it: give each block its own copy",
                )
            )
    return [names[0] for names in aliases.values()]


def band_table(edges: Sequence[float]) -> list[tuple[int, float, float]]:
    """Return ``(block_idx, sigma_low, sigma_high)`` per block, for reports."""
    return [(block_idx, low, high) for block_idx, (high, low) in enumerate(pairwise(edges))]
