"""What a worker submits to a round and what it is told: updates, verdicts, receipts and round reports.

Owns the types and the check of an update's form against the master. Refuses to own any decision that needs the
state of a round (that is ``ledger.py``) and any byte format.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeGuard

import torch
from torch import Tensor

INTERFACE = "interface"
"""Entry of the parameters outside all blocks."""
MAX_COUNT = 2**53
"""Counts at or above this are malformed: they would not survive a conversion to float64."""


class Verdict(StrEnum):
    """The one answer to a submission, in the words that are counted, logged and sent."""

    ACCEPTED = "accepted"
    """Counts once in the round of its base version."""
    LATE = "late"
    """The round of its base version has just closed, or its deadline has passed."""
    STALE = "stale"
    """Its base version is older than the one just closed."""
    SUPERSEDED = "superseded"
    """Sent by an incarnation of the worker that a newer one replaced, or that has left."""
    DUPLICATE = "duplicate"
    """An update of this worker on this base version was accepted before; that one counts."""
    NONFINITE = "nonfinite"
    """A NaN or an infinity in the parameters, or a difference to the master that fp32 cannot hold."""
    OUTLIER = "outlier"
    """Its delta is too long beside those the entry accepted lately."""
    MALFORMED = "malformed"
    """A name, shape, kind of dtype, count or version that does not fit."""
    UNAUTHORISED = "unauthorised"
    """Wrong run id or token, or a worker that never joined."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Update:
    """One worker's parameters after its local steps.

    The fields may come from a network: whatever they hold, a ledger answers with a verdict and never raises.

    Args:
        run_id: The run this update is meant for.
        token: The run's secret; never shown in the representation.
        worker_id: Who sends, a non-negative int; replicas are merged in ascending order of it.
        incarnation: Which life of the worker sends; the newest that joined is the only one heard.
        base_version: The version of the entry that the local steps started from.
        num_steps: Inner optimizer steps taken since, 0 or more.
        num_tokens: Target tokens seen in these steps, 1 or more.
        params: The entry's tensors by name, on any device; floating ones in any floating dtype.
        owned: Whether nobody will write to the tensors later, so that a ledger may keep them without a copy.
    """

    run_id: str
    token: str = field(repr=False)
    worker_id: int
    incarnation: int
    base_version: int
    num_steps: int
    num_tokens: int
    params: Mapping[str, Tensor] = field(repr=False)
    owned: bool = False


@dataclass(frozen=True)
class Receipt:
    """The answer to one submission.

    Args:
        verdict: What became of the update.
        version: The entry's version when the answer was given.
        reason: One sentence for a person.
    """

    verdict: Verdict
    version: int
    reason: str


@dataclass(frozen=True)
class RoundReport:
    """What one closed round of one entry did.

    Args:
        entry: ``block0``, ``block1``, ... or ``interface``.
        round_idx: Index of the round from 0; equals the version its updates were based on.
        version: Version after the close, ``round_idx + 1`` even when nothing was merged.
        expected: Workers the round waited for, ascending.
        accepted: Workers whose update on this round's base was accepted, ascending; may hold one that joined in
            mid-round.
        refused: Expected workers whose only answers were refused for their content, ascending.
        missing: Expected workers that gave no answer to this round, ascending.
        counts: Receipts given since the previous close by verdict; verdicts that did not occur are absent.
        merged: Whether the master took part of the accepted updates.
        note: Why nothing was merged; empty when something was.
        accepted_tokens: Target tokens of the updates that were merged; 0 when nothing was.
        accepted_steps: Inner optimizer steps of the updates that were merged; 0 when nothing was.
        mean_delta_norm: Mean L2 norm of the accepted deltas before clipping; 0.0 when there were none.
        merged_delta_norm: L2 norm of the pseudogradient, before the outer optimizer; 0.0 when nothing was merged.
        opened_at: Seconds on the caller's clock.
        closed_at: Seconds on the caller's clock.
        stale: Workers of whom an update of an older base was merged too, ascending; its steps and tokens count.
    """

    entry: str
    round_idx: int
    version: int
    expected: tuple[int, ...]
    accepted: tuple[int, ...]
    refused: tuple[int, ...]
    missing: tuple[int, ...]
    counts: dict[Verdict, int]
    merged: bool
    note: str
    accepted_tokens: int
    accepted_steps: int
    mean_delta_norm: float
    merged_delta_norm: float
    opened_at: float
    closed_at: float
    stale: tuple[int, ...] = ()

    @property
    def participation(self) -> float:
        """Share of the expected workers that were accepted, in [0, 1]; 0.0 when nobody was expected."""
        if not self.expected:
            return 0.0
        return len(set(self.accepted) & set(self.expected)) / len(self.expected)


def block_entry(block_idx: int) -> str:
    """Return the entry name of a block."""
    return f"block{block_idx}"


def is_count(value: object, at_least: int = 0) -> TypeGuard[int]:
    """Tell whether ``value`` is an int (not a bool) in [``at_least``, ``MAX_COUNT``)."""
    return type(value) is int and at_least <= value < MAX_COUNT


def shown(value: object) -> str:
    """Return a short text for a value of unknown origin; never raises, also for an int too long to print."""
    if isinstance(value, int) and abs(value) >= MAX_COUNT:
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, int | float | str | None):
        return repr(value)[:60]
    return f"a {type(value).__name__}"


def header_fault(update: Update) -> str | None:
    """Return what is wrong with the numbers that say who sends and on which base, or None."""
    for name in ("worker_id", "incarnation", "base_version"):
        value = getattr(update, name)
        if not is_count(value):
            return f"{name} must be a non-negative int; got {shown(value)}."
    return None


def form_fault(update: Update, master: Mapping[str, Tensor]) -> str | None:
    """Return the first way in which an update's counts or tensors do not fit the master, or None.

    Shapes must be equal, not merely broadcastable. Floating tensors may come in any floating dtype; every other
    tensor must have the master's dtype, since a cast could change a counter.

    Args:
        update: The submission.
        master: The entry's tensors by name.
    """
    if not is_count(update.num_tokens, at_least=1):
        return f"num_tokens must be a positive int; got {shown(update.num_tokens)}."
    if not is_count(update.num_steps):
        return f"num_steps must be a non-negative int; got {shown(update.num_steps)}."
    if not isinstance(update.params, Mapping):
        return f"params must map names to tensors; got {type(update.params).__name__}."
    if update.params.keys() != master.keys():
        missing = sorted(master.keys() - update.params.keys())
        extra = sorted(str(name)[:60] for name in update.params.keys() - master.keys())
        return f"the tensor names must be the master's; missing {missing[:3]}, not known {extra[:3]}."
    faults = (_tensor_fault(name, update.params[name], master[name]) for name in master)
    return next((fault for fault in faults if fault is not None), None)


def _tensor_fault(name: str, tensor: object, like: Tensor) -> str | None:
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        return f"{name} must be a dense tensor."
    if tensor.shape != like.shape:
        return f"{name} must have shape {tuple(like.shape)}; got {tuple(tensor.shape)}."
    fits = tensor.is_floating_point() if like.is_floating_point() else tensor.dtype == like.dtype
    if not fits:
        return f"{name} must be {_dtype_name(like)}; got {_dtype_name(tensor)}."
    return None


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
