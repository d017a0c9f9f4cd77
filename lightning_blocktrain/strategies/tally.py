"""What a run in rounds counts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_blocktrain.rounds import RoundReport
from lightning_blocktrain.strategies.frozen_blocks import FrozenBlocks, FrozenWork


@dataclass
class Tally:
    """What a run has done so far; outlives the run.

    Args:
        num_rounds_closed: Training rounds finished.
        worker_steps: Inner optimizer steps, summed over workers.
        worker_tokens: Target tokens processed, summed over workers.
        accepted_tokens: Target tokens behind the accepted block updates.
        sent_bytes: Of the updates that the workers of this process have sent, as encoded.
        prefix_bytes: Of the frozen blocks that they have fetched, as encoded.
        prefix_tokens: Layer-tokens: their target tokens, once for every call of a frozen layer.
        prefix_s: Seconds in frozen layers.
        prefix_cache_hits: Batches whose features were found on disk, so that no frozen layer ran.
        round_reports: The reports of the newest finished round, one per entry that closed.
    """

    num_rounds_closed: int = 0
    worker_steps: int = 0
    worker_tokens: int = 0
    accepted_tokens: int = 0
    sent_bytes: int = 0
    prefix_bytes: int = 0
    prefix_tokens: int = 0
    prefix_s: float = 0.0
    prefix_cache_hits: int = 0
    round_reports: Sequence[RoundReport] = field(default=())

    def count_prefix(self, frozen: FrozenBlocks) -> None:
        """Take over what frozen layers have done since the last time."""
        work, frozen.work = frozen.work, FrozenWork()
        self.prefix_tokens += work.layer_tokens
        self.prefix_s += work.seconds
        self.prefix_cache_hits += work.num_hits

    def state_dict(self) -> dict[str, int | float]:
        """Return the counters; reports are not resumed."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int | float)}
