"""What a member does beside where torchrun or SLURM has started all ranks, in one fit.

Owns how the ranks find the coordinator that rank 0 starts, or the line that they use without one, and how they part.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_blocktrain.errors import TransportError
from lightning_blocktrain.strategies.block_guard import refuse_few_workers
from lightning_blocktrain.strategies.cluster import GROUP_TIMEOUT_S, Board, ClusterPlace, refuse_default_group
from lightning_blocktrain.strategies.collective_run import CollectiveLine
from lightning_blocktrain.strategies.launcher import Address
from lightning_blocktrain.transport import Transport

log = logging.getLogger(__name__)

POLL_S = 0.1


class Job:
    """One rank's part in a job, for one fit.

    Args:
        place: Of this process.
        fit_idx: Which fit of the script it is, the same on every rank.
        join_timeout_s: How long to wait for the other ranks before the first round.
    """

    def __init__(self, place: ClusterPlace, fit_idx: int, join_timeout_s: float) -> None:
        self.place = place
        self._board = Board(place, fit_idx, join_timeout_s)

    @property
    def is_collective(self) -> bool:
        """Whether the ranks do without a coordinator."""
        return self.place.exchange == "collective"

    @property
    def shares_folders(self) -> bool:
        """Whether every rank can read rank 0's temporary files."""
        return self.place.num_nodes == 1 and not self.is_collective

    def enter(self, num_blocks: int) -> None:
        """Refuse, on every rank, a script or a job with which the run could not go well.

        Raises:
            MisconfigurationException: See ``refuse_default_group`` and ``refuse_few_workers``.
        """
        refuse_default_group()
        refuse_few_workers(self.place.num_workers, num_blocks)

    def gather(self, trainer: L.Trainer) -> None:
        """Wait, before ``setup``, until every rank is there; what ``prepare_data`` makes is there too."""
        self._board.meet("setup", partial(_give_way, trainer))

    def agreed_checkpoint(self, trainer: L.Trainer, choose: Callable[[], str | None]) -> str | None:
        """Return the checkpoint that all ranks resume from; rank 0 chooses: ``last`` may be another one elsewhere."""
        if self.place.rank == 0:
            self._board.put("checkpoint", {"path": choose()})
        look_up = partial(_give_way, trainer)
        path: str | None = self._board.get("checkpoint", self._board.join_timeout_s, look_up)["path"]
        return path

    def tell(self, address: Address, more: Mapping[str, Any]) -> None:
        """Tell the other ranks where rank 0's coordinator is, and what else they need."""
        where = {"url": address.url, "run_id": address.run_id, "token": address.token}
        self._board.put("coordinator", {"address": where, "more": dict(more)})

    def told(self, look_up: Callable[[], None]) -> tuple[Address, dict[str, Any]]:
        """Return what rank 0 has told.

        Raises:
            TransportError: If it does not tell within ``join_timeout_s``.
        """
        told = self._board.get("coordinator", self._board.join_timeout_s, look_up)
        return Address(**told["address"]), told["more"]

    def line(
        self, trainer: L.Trainer, read_by: Callable[[int], Collection[int]], look_up: Callable[[], None]
    ) -> Transport:
        """Return the line to the other ranks of a run without a coordinator."""
        return CollectiveLine(self._board, trainer.strategy.root_device, read_by, look_up)

    def await_ranks(self, line: Transport, look_up: Callable[[], None]) -> None:
        """Wait, in rank 0 after the run, until no other rank needs its coordinator.

        Who is inside a round learns of the end when it submits.
        """
        if self.is_collective:
            return
        ends_at = time.monotonic() + GROUP_TIMEOUT_S
        try:
            while time.monotonic() < ends_at:
                workers: Mapping[str, Any] = line.status()["workers"]
                if not any(kept["is_live"] for worker_id, kept in workers.items() if worker_id != "0"):
                    return
                look_up()
                time.sleep(POLL_S)
        except TransportError as exc:
            log.info("the coordinator was gone before the other ranks had left: %s", exc)

    def tell_results(self, noted: Sequence[Mapping[str, Any]]) -> None:
        """Tell the other ranks, after a fit, what rank 0's checkpoint callbacks have."""
        self._board.put("results", {"noted": list(noted)})

    def told_results(self, look_up: Callable[[], None]) -> list[dict[str, Any]]:
        """Return what rank 0 has told of its checkpoint callbacks, when its fit has ended too.

        Raises:
            TransportError: If it does not come to its end.
        """
        noted: list[dict[str, Any]] = self._board.get("results", GROUP_TIMEOUT_S, look_up)["noted"]
        return noted


def _give_way(trainer: L.Trainer) -> None:
    if trainer.received_sigterm:
        raise SIGTERMException
