"""How accepted replicas become one: means, clipping, the robust rule and the outer optimizer.

Owns the arithmetic, as functions of tensors. Every sum runs in fp32 in the order its arguments are given, so the
same replicas in the same order give the same bits. Refuses to own which replicas take part.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_blocktrain.errors import explain

Params = dict[str, Tensor]
"""An entry's tensors by name: floating ones in fp32, others (counters) in their own dtype."""
Weighting = Literal["uniform", "tokens"]
MergeRule = Literal["mean", "trimmed_mean"]
LateRule = Literal["drop", "stale_weighted"]

NORM_PIECE = 2**16
"""Values whose difference is held at once when a norm is taken."""
MIN_TRIMMED_REPLICAS = 3
"""With two replicas, trimming one at each end leaves nothing."""
WEIGHT_UNIT = 1024
"""Weights of stale updates are rounded to whole parts of so many: sums of whole weights are exact."""
MAX_STALENESS = 16
"""Most masters of closed rounds that an entry keeps."""
DEADLINE_SLACK = 1.25
"""How much longer than the quantile of the last arrivals a round with an adaptive deadline lasts."""


@dataclass(frozen=True)
class RoundRules:
    """What every round of a run obeys.

    Args:
        deadline_s: Seconds from the opening of a round to its close at the latest, finite, above 0.
        min_replicas: A round with fewer accepted updates merges nothing, 1 or more.
        weighting: ``uniform`` gives every replica the same weight, ``tokens`` the number of its tokens.
        merge: ``mean``, or ``trimmed_mean`` taken per coordinate.
        trim_frac: Share of the replicas that ``trimmed_mean`` drops at each end, in (0, 0.5); at least one is
            dropped.
        clip_norm: Longest L2 norm of a delta, longer ones are scaled down to it; None does not clip.
        outlier_factor: A delta longer than this many times the median of the last accepted norms is refused, above
            1; None refuses none.
        late: What becomes of an update whose round has closed: ``drop`` refuses it, ``stale_weighted`` moves its delta
            onto the present master and counts it in the round that is open, with the weight ``stale_weight``.
        max_staleness: Most rounds that ``stale_weighted`` looks back, 1 or more; so many masters are kept.
        deadline_quantile: In (0, 1]: a round lasts ``DEADLINE_SLACK`` times this quantile of the last arrivals, at most
            ``deadline_s``; None: always ``deadline_s``.
        average_decay: In [0, 1): most that the running average of an entry's masters keeps of itself per round (see
            ``average``). It is what others read of the entry; 0: they read the master.

    Raises:
        ValueError: If a value is out of range, or ``trimmed_mean`` meets ``weighting="tokens"`` or
            ``late="stale_weighted"``.
    """

    deadline_s: float
    min_replicas: int = 1
    weighting: Weighting = "uniform"
    merge: MergeRule = "mean"
    trim_frac: float = 0.1
    clip_norm: float | None = None
    outlier_factor: float | None = None
    late: LateRule = "drop"
    max_staleness: int = 2
    deadline_quantile: float | None = None
    average_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_above("deadline_s", self.deadline_s, 0.0, "give the seconds a round may last")
        if type(self.min_replicas) is not int or self.min_replicas < 1:
            got = f"min_replicas={self.min_replicas}"
            raise ValueError(explain("min_replicas must be an int of at least 1", got, "choose 1 or more"))
        _check_choice("weighting", self.weighting, get_args(Weighting))
        _check_choice("merge", self.merge, get_args(MergeRule))
        if not (_is_number(self.trim_frac) and 0.0 < self.trim_frac < 0.5):
            got = f"trim_frac={self.trim_frac}"
            raise ValueError(explain("trim_frac must be between 0 and 0.5, both excluded", got, "choose 0.1"))
        if self.clip_norm is not None:
            _check_above("clip_norm", self.clip_norm, 0.0, "choose a norm, or None not to clip")
        if self.outlier_factor is not None:
            _check_above("outlier_factor", self.outlier_factor, 1.0, "choose 10, or None to refuse none")
        _check_choice("late", self.late, get_args(LateRule))
        if type(self.max_staleness) is not int or not 1 <= self.max_staleness <= MAX_STALENESS:
            got = f"max_staleness={self.max_staleness}"
            raise ValueError(explain(f"max_staleness must be an int from 1 to {MAX_STALENESS}", got, "choose 2"))
        quantile = self.deadline_quantile
        if quantile is not None and not (_is_number(quantile) and 0.0 < quantile <= 1.0):
            got = f"deadline_quantile={quantile!r}"
            raise ValueError(explain("deadline_quantile must be above 0 and at most 1", got, "choose 0.9, or None"))
        if not (_is_number(self.average_decay) and 0.0 <= self.average_decay < 1.0):
            got = f"average_decay={self.average_decay!r}"
            raise ValueError(explain("average_decay must be in [0, 1)", got, "choose 0.9, or 0 for no average"))
        if self.merge == "trimmed_mean" and self.weighting == "tokens":
            rule = "weighting must be 'uniform' with merge='trimmed_mean', since a claimed count would buy influence"
            raise ValueError(explain(rule, "weighting='tokens'", "choose weighting='uniform' or merge='mean'"))
        if self.merge == "trimmed_mean" and self.late == "stale_weighted":
            rule = (
                "late must be 'drop' with merge='trimmed_mean', since one worker would count several times in a round"
            )
            raise ValueError(explain(rule, "late='stale_weighted'", "choose late='drop' or merge='mean'"))

    @property
    def needed_replicas(self) -> int:
        """Fewest accepted updates that a round merges."""
        return max(self.min_replicas, MIN_TRIMMED_REPLICAS if self.merge == "trimmed_mean" else 1)

    def check_replicas(self, num_replicas: int) -> None:
        """Refuse a number of replicas with which no round could ever merge anything.

        Raises:
            ValueError: If ``num_replicas`` is below ``needed_replicas``.
        """
        if num_replicas < self.needed_replicas:
            rule = f"merge={self.merge!r} with min_replicas={self.min_replicas} needs {self.needed_replicas} replicas"
            fix = f"use {self.needed_replicas} or more replicas per block, or merge='mean' with min_replicas=1"
            raise ValueError(explain(rule, f"num_replicas={num_replicas}", fix))


@dataclass(frozen=True)
class OuterSGD:
    """Apply SGD to the pseudogradient, ``master - merged``; stateless, the buffers are passed in and out.

    With ``lr=1`` and no momentum the new master is the merged tensors themselves, bit for bit. Tensors that are not
    floating bypass it, and those that no gradient made: momentum would carry a running variance below zero.

    Args:
        lr: Outer learning rate, finite, above 0.
        momentum: In [0, 1).
        nesterov: Look ahead along the momentum; needs ``momentum`` above 0.
        spared: Names of tensors that are merged and nothing else, as a module's buffers are; the strategies set it.

    Raises:
        ValueError: If a value is out of range.

    Source:
        ``torch.optim.SGD`` without dampening or weight decay, operation for operation.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    spared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "spared", tuple(self.spared))  # from JSON it is a list
        _check_above("lr", self.lr, 0.0, "choose 1.0 for plain averaging")
        if not 0.0 <= self.momentum < 1.0:
            got = f"momentum={self.momentum}"
            raise ValueError(explain("momentum must be in [0, 1)", got, "choose 0.9, or 0.0 for none"))
        if self.nesterov and self.momentum == 0.0:
            got = f"nesterov={self.nesterov}, momentum={self.momentum}"
            raise ValueError(explain("nesterov needs momentum above 0", got, "set momentum=0.9"))

    def step(self, master: Params, merged: Params, buffers: Params) -> tuple[Params, Params]:
        """Take one outer step.

        Args:
            master: The entry before the round.
            merged: The merged replicas, same names and shapes.
            buffers: Momentum by name in fp32; empty before the first step.

        Returns:
            The new master and the new buffers; the arguments are left as they were.
        """
        if self.lr == 1.0 and self.momentum == 0.0:
            return merged, buffers
        params, new_buffers = dict(merged), dict(buffers)
        for name in floating_names(merged):
            if name in self.spared:
                continue
            gradient = master[name] - merged[name]
            if self.momentum > 0.0:
                previous = buffers.get(name)
                buffer = gradient if previous is None else previous.mul(self.momentum).add_(gradient)
                new_buffers[name] = buffer
                gradient = gradient.add(buffer, alpha=self.momentum) if self.nesterov else buffer
            params[name] = master[name].add(gradient, alpha=-self.lr)
        return params, new_buffers


def floating_names(params: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the floating tensors, in order."""
    return [name for name, tensor in params.items() if tensor.is_floating_point()]


def as_params(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor] | None = None, copy: bool = True) -> Params:
    """Bring tensors into the form that is merged: detached, floating ones in fp32.

    Args:
        tensors: Tensors by name.
        like: Names, order and devices of the result; None keeps those of ``tensors``.
        copy: Whether the result must share no memory with ``tensors``.
    """
    like = tensors if like is None else like
    return {name: _merged_form(tensors[name], like[name].device, copy) for name in like}


def _merged_form(tensor: Tensor, device: torch.device, copy: bool) -> Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(device=device, dtype=dtype, copy=copy)


def all_finite(params: Mapping[str, Tensor]) -> bool:
    """Tell whether no floating tensor holds a NaN or an infinity."""
    return all(_is_finite(params[name]) for name in floating_names(params))


def _is_finite(tensor: Tensor) -> bool:
    # A sum of finite values may overflow, but none is finite with a NaN or an infinity in it; it takes a twentieth of
    # the time of looking at every value.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def delta_norm(params: Mapping[str, Tensor], master: Mapping[str, Tensor]) -> float:
    """Return the L2 norm of ``params - master`` over the floating tensors.

    The difference is taken in fp32 and squared in fp64, so the norm is finite exactly when every difference is.
    """
    norms = [math.sqrt(_squared_distance(params[name], master[name])) for name in floating_names(master)]
    return math.hypot(*norms) if all(map(math.isfinite, norms)) else math.nan


def _squared_distance(left: Tensor, right: Tensor) -> float:
    # In pieces that stay in the cache, with no difference of the whole tensor.
    pieces = zip(*(torch.split(tensor.reshape(-1), NORM_PIECE) for tensor in (left, right)), strict=True)
    differences = ((piece - start).double() for piece, start in pieces)
    return math.fsum(torch.dot(difference, difference).item() for difference in differences)


def clip_params(params: Params, master: Params, norm: float, clip_norm: float | None) -> Params:
    """Shorten a delta to ``clip_norm``.

    Args:
        params: A replica.
        master: What it started from.
        norm: ``delta_norm(params, master)``.
        clip_norm: Longest norm; None does not clip.

    Returns:
        ``params`` itself when it is within the norm, else ``master + (clip_norm / norm) * (params - master)``.
    """
    if clip_norm is None or norm <= clip_norm:
        return params
    return rebase(params, master, master, clip_norm / norm)


def stale_weight(staleness: int) -> float:
    """Return the weight of an update of a base ``staleness`` rounds old, ``(1 + staleness) ** -0.5``; fresh: 1.

    Source:
        Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation", section 3. There the sum of the
        scaled deltas is divided by their number; here by the sum of the weights, so that steps do not get shorter.
    """
    return float((1 + staleness) ** -0.5)


def rebase(params: Params, base: Params, master: Params, scale: float = 1.0) -> Params:
    """Return ``master + scale * (params - base)``; tensors that are not floating stay as they are."""
    moved = {name: master[name] + (params[name] - base[name]) * scale for name in floating_names(params)}
    return {**params, **moved}


def weighted_mean(replicas: Sequence[Params], weights: Sequence[int], master: Params) -> Params:
    """Average floating tensors by weight and take the elementwise maximum of the others.

    A tensor that a replica left as it was, bit for bit, has no say in that tensor's mean: the replica's loss did not
    reach it. Block 0 alone trains the embedding of a causal model, say; counting the other workers' zeros would divide
    its steps by the number of blocks.

    The weights are divided by their greatest common divisor first: equal counts then weigh exactly as uniform
    ones, and the mean of one replica is that replica bit for bit. The sum is in fp32, in the order given.

    Args:
        replicas: Tensors by name, one dictionary per replica.
        weights: One non-negative int per replica.
        master: What they started from; kept where no replica with a weight moved it.
    """
    return {
        name: _weighted_tensor([replica[name] for replica in replicas], weights, start)
        for name, start in master.items()
    }


def _weighted_tensor(tensors: Sequence[Tensor], weights: Sequence[int], start: Tensor) -> Tensor:
    weighed = zip(tensors, weights, strict=True)
    moved = [(tensor, weight) for tensor, weight in weighed if weight > 0 and not torch.equal(tensor, start)]
    if not moved:
        return start
    return average([tensor for tensor, _ in moved], [weight for _, weight in moved])


def average(tensors: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """Average one tensor, or the same piece of it, of the replicas that have a say in it; see ``weighted_mean``.

    Args:
        tensors: One or more, of one shape and dtype; left as they are. The result may be one of them.
        weights: One int above 0 each.
    """
    divisor = math.gcd(*weights)
    return _combine(tensors, [weight // divisor for weight in weights])


def _combine(tensors: Sequence[Tensor], shares: Sequence[int]) -> Tensor:
    if not tensors[0].is_floating_point():
        return reduce(torch.maximum, tensors)
    if len(tensors) == 1:
        return tensors[0]
    total = tensors[0] * shares[0]
    for tensor, share in zip(tensors[1:], shares[1:], strict=True):
        total.add_(tensor, alpha=share)
    return total.div_(sum(shares))


def trimmed_mean(replicas: Sequence[Params], trim_frac: float) -> Params:
    """Average each coordinate without its smallest and largest values.

    Args:
        replicas: Three or more, tensors by name.
        trim_frac: Share dropped at each end, rounded down to whole replicas but at least one.

    Returns:
        The means; tensors that are not floating take the elementwise maximum.

    Raises:
        ValueError: If there are fewer than three replicas.
    """
    num_replicas = len(replicas)
    if num_replicas < MIN_TRIMMED_REPLICAS:
        got = f"num_replicas={num_replicas}"
        raise ValueError(explain("trimmed_mean needs at least 3 replicas", got, "use merge='mean'"))
    num_trimmed = min(max(1, int(trim_frac * num_replicas)), (num_replicas - 1) // 2)
    return {name: _trim([replica[name] for replica in replicas], num_trimmed) for name in replicas[0]}


def _trim(tensors: Sequence[Tensor], num_trimmed: int) -> Tensor:
    if not tensors[0].is_floating_point():
        return reduce(torch.maximum, tensors)
    ordered = torch.stack(list(tensors)).sort(dim=0).values  # (replicas, ...)
    kept = ordered[num_trimmed : len(tensors) - num_trimmed].unbind()
    return _combine(kept, [1] * len(kept))


def merge_replicas(
    replicas: Sequence[Params],
    num_tokens: Sequence[int],
    master: Params,
    rules: RoundRules,
    staleness: Sequence[int] | None = None,
) -> Params:
    """Merge replicas by the rules.

    Args:
        replicas: In ascending order of worker id, already clipped.
        num_tokens: Tokens of each.
        master: What they started from, or were moved onto.
        rules: Says how.
        staleness: Age of each one's base in rounds; None: all are fresh.

    Returns:
        The merged tensors; they may be those of a replica or of the master, so nobody writes to them.
    """
    if rules.merge == "trimmed_mean":
        return trimmed_mean(replicas, rules.trim_frac)
    weights = list(num_tokens) if rules.weighting == "tokens" else [1] * len(replicas)
    if staleness is not None:
        ages = zip(weights, staleness, strict=True)
        weights = [weight * round(WEIGHT_UNIT * stale_weight(age)) for weight, age in ages]
    return weighted_mean(replicas, weights, master)


def _check_above(name: str, value: float, bound: float, fix: str) -> None:
    if not (_is_number(value) and math.isfinite(value) and value > bound):
        raise ValueError(explain(f"{name} must be finite and above {bound:g}", f"{name}={value!r}", fix))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(explain(f"{name} must be known", f"{name}={value!r}", f"choose {' or '.join(choices)}"))
