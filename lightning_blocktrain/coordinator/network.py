"""Models of the network between simulated workers and a coordinator: how long a round takes, what gets lost.

Owns the links and the presets with a named share of updates in time. Owns no clock and no generator: both belong to
the caller. Every number in seconds is simulated.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from lightning_blocktrain.errors import explain
from lightning_blocktrain.rounds import INTERFACE, block_entry

PARTICIPATION = {"lockstep": 1.0, "mild": 0.90, "wan": 0.42, "harsh": 0.10, "offline": 0.0}
"""Share of the updates that arrive in time under each preset."""
JITTER = {"lockstep": 0.0, "mild": 0.25, "wan": 0.5, "harsh": 0.5, "offline": 0.0}
"""Standard deviation of the logarithm of a worker's round time under each preset."""
COMPUTE_FRAC, LATENCY_FRAC, TRANSFER_FRAC = 0.8, 0.1, 0.1
"""How a preset splits the median round time."""


@dataclass(frozen=True)
class WorkerLink:
    """Speed of one worker and of its connection.

    Args:
        step_s: Seconds per inner optimizer step, 0 or more.
        latency_s: Seconds one way, 0 or more.
        bandwidth_bytes_per_s: Above 0; infinity transfers in no time.
        dropout: Probability that an update never arrives, in [0, 1].
        jitter: Standard deviation of the logarithm of the round time, 0 or more.

    Raises:
        ValueError: If a value is out of range.
    """

    step_s: float
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf
    dropout: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for name in ("step_s", "latency_s", "jitter"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ValueError(
                    explain(f"{name} must be finite and at least 0", f"{name}={value}", "choose 0 or more")
                )
        if not self.bandwidth_bytes_per_s > 0.0:
            got = f"bandwidth_bytes_per_s={self.bandwidth_bytes_per_s}"
            raise ValueError(explain("bandwidth_bytes_per_s must be above 0", got, "choose 1e6, or inf"))
        if not 0.0 <= self.dropout <= 1.0:
            got = f"dropout={self.dropout}"
            raise ValueError(explain("dropout must be in [0, 1]", got, "give a probability"))

    def pace(self, generator: torch.Generator) -> float:
        """Draw how many times longer than usual a round takes, ``exp(jitter * N(0, 1))``; infinity: it gets lost.

        Args:
            generator: Two numbers are drawn from it, whatever the link.
        """
        chance = torch.rand((), dtype=torch.float64, generator=generator).item()
        normal = torch.randn((), dtype=torch.float64, generator=generator).item()
        return math.inf if chance < self.dropout else math.exp(self.jitter * normal)

    def round_s(self, num_steps: int, num_bytes: int, pace: float = 1.0) -> float:
        """Return how long after the opening of a round an update arrives.

        Args:
            num_steps: Inner optimizer steps.
            num_bytes: Bytes down plus bytes up.
            pace: Of this worker in this round.

        Returns:
            Seconds: (steps + two latencies + transfer) * pace; infinity if it never arrives.
        """
        if pace == math.inf:
            return math.inf
        return (num_steps * self.step_s + 2 * self.latency_s + num_bytes / self.bandwidth_bytes_per_s) * pace


@dataclass(frozen=True)
class NetworkModel:
    """One link per worker, in order of worker id.

    Raises:
        ValueError: If there is no link.
    """

    links: tuple[WorkerLink, ...]

    def __post_init__(self) -> None:
        if not self.links:
            raise ValueError(explain("links must name every worker", "no link", "give one WorkerLink per worker"))


def preset_network(name: str, num_workers: int, deadline_s: float, sync_every: int, update_bytes: int) -> NetworkModel:
    """Build the network in which a named share of the updates arrives by the deadline.

    The round time is lognormal, so ``P(round_s <= deadline_s) = p`` fixes its median at
    ``deadline_s * exp(-jitter * z_p)``. Without jitter the median is half the deadline: always in time, unless
    everything drops out.

    Args:
        name: A key of ``PARTICIPATION``.
        num_workers: Links to make, 1 or more; all are alike.
        deadline_s: The deadline of the run's ``RoundRules``, above 0.
        sync_every: Inner optimizer steps per round, 1 or more.
        update_bytes: Bytes one way per round, see ``update_bytes_of``; above 0.

    Raises:
        ValueError: If the name is not known or a number is out of range.
    """
    if name not in PARTICIPATION:
        raise ValueError(explain("network must be a known preset", f"network={name!r}", _choices()))
    counts = {"num_workers": num_workers, "sync_every": sync_every, "update_bytes": update_bytes}
    for count, value in counts.items():
        if value < 1:
            raise ValueError(explain(f"{count} must be at least 1", f"{count}={value}", "choose 1 or more"))
    if not 0.0 < deadline_s < math.inf:
        got = f"deadline_s={deadline_s}"
        raise ValueError(explain("deadline_s must be finite and above 0", got, "use the deadline of the rules"))
    participation, jitter = PARTICIPATION[name], JITTER[name]
    median_s = deadline_s / 2
    if jitter > 0.0:
        median_s = deadline_s * math.exp(-jitter * NormalDist().inv_cdf(participation))
    link = WorkerLink(
        step_s=COMPUTE_FRAC * median_s / sync_every,
        latency_s=LATENCY_FRAC * median_s / 2,
        bandwidth_bytes_per_s=2 * update_bytes / (TRANSFER_FRAC * median_s),
        dropout=1.0 if participation == 0.0 else 0.0,
        jitter=jitter,
    )
    return NetworkModel((link,) * num_workers)


def _choices() -> str:
    return f"choose {', '.join(PARTICIPATION)}"


def update_bytes_of(masters: Mapping[str, Mapping[str, Tensor]], block_idx: int) -> int:
    """Return the bytes a holder of the block is charged one way per round: its block and the interface, as merged.

    The interface is charged in every round, also where ``interface_every`` leaves it out, so that a preset's share
    of updates in time holds in all rounds.
    """
    entries = [masters[block_entry(block_idx)], masters.get(INTERFACE, {})]
    return sum(_merged_bytes(tensor) for entry in entries for tensor in entry.values())


def _merged_bytes(tensor: Tensor) -> int:
    return tensor.numel() * (4 if tensor.is_floating_point() else tensor.element_size())
