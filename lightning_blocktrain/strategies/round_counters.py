"""What a strategy that trains in rounds shows of them, to callbacks and to the user."""

from collections.abc import Sequence

from lightning_blocktrain.rounds import RoundReport
from lightning_blocktrain.strategies.tally import Tally


class RoundCounters:
    """The counters of the newest fit; they stay after it.

    Where every process is one worker, steps and tokens are those of this one: nobody counts the work of others that
    did not come to be accepted.
    """

    def __init__(self) -> None:
        self._tally = Tally()

    @property
    def round_reports(self) -> Sequence[RoundReport]:
        """The reports of the newest finished round, one per entry that closed."""
        return self._tally.round_reports

    @property
    def num_rounds_closed(self) -> int:
        """Training rounds finished so far."""
        return self._tally.num_rounds_closed

    @property
    def worker_steps(self) -> int:
        """Inner optimizer steps, summed over the workers of this process."""
        return self._tally.worker_steps

    @property
    def worker_tokens(self) -> int:
        """Target tokens processed, summed over the workers of this process, accepted or not."""
        return self._tally.worker_tokens

    @property
    def accepted_tokens(self) -> int:
        """Target tokens behind the accepted block updates, summed over all workers."""
        return self._tally.accepted_tokens

    @property
    def sent_bytes(self) -> int:
        """Bytes of the updates that the workers of this process have sent, as encoded; masters come back beside."""
        return self._tally.sent_bytes

    @property
    def prefix_bytes(self) -> int:
        """Bytes of the frozen blocks that the workers of this process have fetched, as encoded."""
        return self._tally.prefix_bytes

    @property
    def prefix_tokens(self) -> int:
        """Layer-tokens: target tokens of the workers of this process, once for every call of a frozen layer."""
        return self._tally.prefix_tokens

    @property
    def prefix_s(self) -> float:
        """Seconds in frozen layers going forward, the prefix's decoding included; on a GPU, until queued."""
        return self._tally.prefix_s

    @property
    def prefix_cache_hits(self) -> int:
        """Batches whose features were found on disk, so that no frozen layer ran."""
        return self._tally.prefix_cache_hits
