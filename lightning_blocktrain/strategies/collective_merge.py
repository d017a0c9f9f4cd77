"""The merge of a round where nobody holds all its replicas: judged by headers, gathered piece by piece.

Owns what replaces a ledger among ranks that meet in every round. The verdicts, the means and the outer optimizer are
those of ``rounds``, in the order of the ranks, so that the result is a ledger's: bit for bit with uniform weights, to
the rounding of a fused multiply-add with others. Every member of a group computes it from the same bytes. Owns no
process group: gathering is a function that is passed in.

Held at once beside the entry and its next version: one piece of every replica.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby

import torch
from torch import Tensor

from lightning_blocktrain.rounds import Params, RoundRules, Verdict
from lightning_blocktrain.rounds.merge import average, trimmed_mean

Gather = Callable[[Tensor], list[Tensor]]
"""Returns the same tensor of every member, in order of rank."""

GATHERED_VALUES = 2**22
"""Values of all replicas together that are held at once, at least one of each."""


@dataclass(frozen=True)
class Header:
    """What a rank says of its part of a round before any tensor is sent.

    Args:
        is_present: Whether it has trained and counts; else it only takes part in the exchange.
        stops: Whether it ends the run instead.
        num_steps: Inner steps.
        num_tokens: Target tokens.
        norm: L2 norm of its delta; nan where a value is not finite.
    """

    is_present: bool
    stops: bool = False
    num_steps: int = 0
    num_tokens: int = 0
    norm: float = 0.0

    def pack(self, device: torch.device) -> Tensor:
        """Return it as numbers, (5,) in float64."""
        return torch.tensor(astuple(self), dtype=torch.float64, device=device)

    @classmethod
    def unpack(cls, numbers: Tensor) -> "Header":
        """Return what ``pack`` was given."""
        is_present, stops, num_steps, num_tokens, norm = numbers.tolist()
        return cls(bool(is_present), bool(stops), int(num_steps), int(num_tokens), norm)


def judge(header: Header, limit: float) -> Verdict:
    """Return the verdict on a present rank's update, as a ledger gives it.

    Args:
        header: Of the rank.
        limit: Longest norm.
    """
    if header.num_tokens < 1 or header.num_steps < 0:
        return Verdict.MALFORMED
    if not math.isfinite(header.norm):
        return Verdict.NONFINITE
    return Verdict.OUTLIER if header.norm > limit else Verdict.ACCEPTED


@dataclass(frozen=True)
class Slice:
    """Values ``start`` to ``stop`` of a flattened tensor."""

    name: str
    start: int
    stop: int

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return these values, a view where the tensor is contiguous."""
        return tensors[self.name].reshape(-1)[self.start : self.stop]


def pieces_of(tensors: Mapping[str, Tensor], max_values: int) -> Iterator[list[Slice]]:
    """Yield the values of all tensors, in order, as pieces of one dtype and at most ``max_values`` each."""
    for _, names in groupby(tensors, key=lambda name: tensors[name].dtype):
        piece: list[Slice] = []
        room = max_values
        for name in names:
            start, num_values = 0, tensors[name].numel()
            while start < num_values:
                stop = min(num_values, start + room)
                piece.append(Slice(name, start, stop))
                room, start = room - (stop - start), stop
                if room == 0:
                    yield piece
                    piece, room = [], max_values
        if piece:
            yield piece


def packed(piece: Sequence[Slice], tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a copy of a piece, flat; what is not floating as bytes, which every process group carries."""
    flat = torch.cat([part.of(tensors) for part in piece])
    return flat if flat.is_floating_point() else flat.view(torch.uint8)


def unpacked(piece: Sequence[Slice], flat: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the parts of a packed piece."""
    return list(torch.split(flat.view(dtype), [part.stop - part.start for part in piece]))


def merge_gathered(
    params: Params, master: Params, accepted: Mapping[int, int], rules: RoundRules, gather: Gather, num_members: int
) -> Params:
    """Merge the accepted replicas of a group; every member calls it.

    Args:
        params: This member's replica, clipped, on the master's device; what one sends that is not accepted is not read.
        master: What all started from.
        accepted: Tokens by position in the group, of the members that are accepted; at least as many as the rules need.
        rules: Say how.
        gather: In the group.
        num_members: Of the group.

    Returns:
        The merged tensors; where no replica moved one, the master's own.
    """
    moved = _moved(params, master, accepted, rules, gather)
    sent = {name: master[name] for name, positions in moved.items() if positions and master[name].numel()}
    merged = {name: torch.empty_like(tensor).contiguous() for name, tensor in sent.items()}
    for piece in pieces_of(sent, max(1, GATHERED_VALUES // num_members)):
        dtype = merged[piece[0].name].dtype
        replicas = [unpacked(piece, flat, dtype) for flat in gather(packed(piece, params))]
        for part_idx, part in enumerate(piece):
            positions = moved[part.name]
            values = [replicas[position][part_idx] for position in positions]
            part.of(merged).copy_(_merged(values, [accepted[position] for position in positions], rules))
    return {name: merged.get(name, tensor) for name, tensor in master.items()}


def _device_of(params: Params) -> torch.device:
    return next(iter(params.values())).device


def _moved(
    params: Params, master: Params, accepted: Mapping[int, int], rules: RoundRules, gather: Gather
) -> dict[str, list[int]]:
    """Return by name whose replicas have a say: of a mean, who moved the tensor as a whole and has a weight."""
    own = [not torch.equal(params[name], tensor) for name, tensor in master.items()]
    told = [flags.tolist() for flags in gather(torch.tensor(own, dtype=torch.uint8, device=_device_of(master)))]
    if rules.merge == "trimmed_mean":
        return {name: list(accepted) for name in master}
    weighty = [position for position, tokens in accepted.items() if rules.weighting == "uniform" or tokens > 0]
    return {name: [p for p in weighty if told[p][idx]] for idx, name in enumerate(master)}


def _merged(values: list[Tensor], num_tokens: list[int], rules: RoundRules) -> Tensor:
    if rules.merge == "trimmed_mean":
        return trimmed_mean([{"": part} for part in values], rules.trim_frac)[""]
    return average(values, num_tokens if rules.weighting == "tokens" else [1] * len(values))
