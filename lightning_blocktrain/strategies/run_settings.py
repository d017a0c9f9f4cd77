"""How a run trains and merges: the strategy's arguments, checked once for all modes."""

from dataclasses import dataclass, field, replace

from lightning_blocktrain.coordinator import NetworkModel, preset_network
from lightning_blocktrain.errors import explain
from lightning_blocktrain.partition import Partition
from lightning_blocktrain.rounds import OuterSGD, RoundRules
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.rounds.pace import LocalSteps, check_local_steps
from lightning_blocktrain.rounds.values import check_value_codec
from lightning_blocktrain.strategies.workers import InnerState

AVERAGE_DECAY = 0.9
"""The default where blocks read others."""


@dataclass(frozen=True)
class RunSettings:
    """How a run trains and merges; the strategy's arguments, checked.

    Raises:
        ValueError: If a value is out of range.
    """

    replicas: int
    sync_every: int
    interface_every: int
    inner_state: InnerState
    rules: RoundRules
    outer_optimizer: OuterSGD
    network: str | NetworkModel
    codec: Codec = field(default_factory=lambda: Codec("fp32"))
    local_steps: LocalSteps = "fixed"
    prefix_every: int = 1
    prefix_codec: Codec = field(default_factory=lambda: Codec("bf16"))
    average_decay: float | None = None

    def __post_init__(self) -> None:
        check_local_steps(self.local_steps)
        if not isinstance(self.codec, Codec):
            got = f"codec={self.codec!r}"
            raise ValueError(explain("codec must be a Codec or its name", got, "choose fp32, bf16, int8 or topk"))
        check_value_codec("prefix_codec", self.prefix_codec)
        for name in ("replicas", "sync_every", "interface_every", "prefix_every"):
            refuse_no_count(name, getattr(self, name))
        if not isinstance(self.outer_optimizer, OuterSGD):
            got = f"outer_optimizer={self.outer_optimizer!r}"
            raise ValueError(explain("outer_optimizer must be an OuterSGD", got, "use OuterSGD(lr, momentum)"))
        if self.inner_state not in ("keep", "reset", "average"):
            rule = "inner_state must be 'keep', 'reset' or 'average'"
            raise ValueError(explain(rule, f"inner_state={self.inner_state!r}", "choose one"))
        if self.average_decay is not None:
            replace(self.rules, average_decay=self.average_decay)  # refuses what is out of range
        if isinstance(self.network, str):
            self.network_for(num_workers=1, update_bytes=1)  # an unknown name is an error here, not hours later

    def rules_for(self, partition: Partition) -> RoundRules:
        """Return the rules of a run; blocks that nobody else reads need no average."""
        reads_others = any(partition.read_by(block_idx) for block_idx in range(partition.num_blocks))
        usual = AVERAGE_DECAY if reads_others else 0.0
        return replace(self.rules, average_decay=usual if self.average_decay is None else self.average_decay)

    def network_for(self, num_workers: int, update_bytes: int) -> NetworkModel:
        """Return the network model; a preset is calibrated to the deadline and the largest worker's bytes."""
        if isinstance(self.network, NetworkModel):
            return self.network
        return preset_network(self.network, num_workers, self.rules.deadline_s, self.sync_every, update_bytes)


def refuse_no_count(name: str, value: object) -> None:
    """Refuse anything but a whole number of at least 1.

    Raises:
        ValueError: Naming the argument.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(explain(f"{name} must be at least 1, a whole number", f"{name}={value!r}", "use 1 or more"))
