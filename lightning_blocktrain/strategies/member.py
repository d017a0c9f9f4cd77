"""One process of a run of several: it leads the run (rank 0), was started by who leads it, or joins it by URL.

Owns the order of what such a process does around its rounds: who starts whom, founds, joins, waits and leaves. The
rounds are ``worker_run``'s, the processes ``launcher``'s.

==================  ==========================================  =============================  =====================
moment              rank 0                                      started by rank 0              joins by URL
==================  ==========================================  =============================  =====================
``enter`` (setup)   knows its place                             joins as its rank              founds if need be, joins
``make_run``        coordinator, found, starts the workers
``begin``           joins, waits until all have                 fetches                        fetches
``end``             stops the run, waits for the workers        leaves                         leaves
``close``           ends all processes that are left            closes its line                closes its line
==================  ==========================================  =============================  =====================
"""

import base64
import hashlib
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_blocktrain.errors import TransportError, explain
from lightning_blocktrain.partition import Partition
from lightning_blocktrain.strategies.launcher import Fleet, Place, threads_for
from lightning_blocktrain.strategies.progress import skip_steps
from lightning_blocktrain.strategies.simulated_run import RunSettings
from lightning_blocktrain.strategies.worker_run import WorkerRun, masters_of
from lightning_blocktrain.strategies.worker_shard import Shard
from lightning_blocktrain.transport import RunTerms, Transport, Welcome, WorkerFacts
from lightning_blocktrain.transport.terms import OnMissingBlock

log = logging.getLogger(__name__)

POLL_S = 0.1


@dataclass(frozen=True)
class MemberSettings:
    """How processes find together and how long they wait for one another; the strategy's arguments, checked.

    Raises:
        ValueError: If a value is out of range.
    """

    join_timeout_s: float = 300.0
    reconnect_timeout_s: float = 120.0
    on_missing_block: OnMissingBlock = "warn"

    def __post_init__(self) -> None:
        for name in ("join_timeout_s", "reconnect_timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(explain(f"{name} must be finite and above 0", f"{name}={value!r}", "give seconds"))
        if self.on_missing_block not in ("warn", "fail"):
            got = f"on_missing_block={self.on_missing_block!r}"
            raise ValueError(explain("on_missing_block must be 'warn' or 'fail'", got, "choose one"))


class Member:
    """One process's part in one fit.

    Args:
        settings: How the run trains and merges.
        limits: How long to wait.
        place: Of this process.
        fit_idx: Which fit of the script this is.
    """

    def __init__(self, settings: RunSettings, limits: MemberSettings, place: Place, fit_idx: int) -> None:
        self.settings = settings
        self.limits = limits
        self.start_step = 0
        self._num_workers = place.num_workers
        self._rank = None if place.child is None else place.child.rank
        self._address = place.address
        self._fit_idx = fit_idx
        self._fleet = Fleet()
        self._line: Transport | None = None
        self._welcome: Welcome | None = None
        self._shard: Shard | None = None
        self._max_rounds: int | None = None
        self._trainer: L.Trainer | None = None
        self._run: WorkerRun | None = None
        self._num_blocks = 1
        self._num_threads_before: int | None = None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which starts and ends the run."""
        return self._num_workers is not None

    @property
    def shard(self) -> Shard:
        """This worker's part of the data; known from ``enter`` on."""
        assert self._shard is not None
        return self._shard

    def enter(self, trainer: L.Trainer, module: nn.Module, partition: Partition) -> None:
        """Find out who this worker is; before the optimizer, whose schedule may ask for the dealt loader.

        Raises:
            MisconfigurationException: If there are fewer workers than blocks.
            TransportError: If the run cannot be joined.
        """
        self._trainer, self._num_blocks = trainer, partition.num_blocks
        if self._num_workers is not None:
            if self._num_workers < partition.num_blocks:
                rule = "every block needs a worker: devices must be at least num_blocks"
                got = f"devices={self._num_workers}, num_blocks={partition.num_blocks}"
                raise MisconfigurationException(explain(rule, got, "use more devices or fewer blocks"))
            self._share_cores(self._num_workers)
            seed = torch.initial_seed() % 2**63
            self._shard = Shard(0, self._num_workers, seed, torch.get_rng_state())
            self._max_rounds = self._rounds_of(trainer.estimated_stepping_batches)
            return
        line = self._open()
        masters = masters_of(module, partition)
        if self._rank is None:
            line.found(self._terms(masters, torch.initial_seed() % 2**63, torch.get_rng_state()), masters)
        self._welcome = line.join(self._facts(self._rank, masters))
        told = self._welcome.terms.worker_settings
        self._shard = Shard(
            self._welcome.worker_id, self._welcome.num_workers, told["seed"], _as_state(told["order_state"])
        )

    def make_run(self, module: nn.Module, partition: Partition) -> WorkerRun:
        """Build the worker; rank 0 also starts the other processes, which then join.

        Raises:
            CoordinatorUnreachableError: If the coordinator does not start.
        """
        shard, welcome = self.shard, self._welcome
        settings, block_idx = self.settings, 0
        if welcome is not None:
            settings, block_idx = replace(settings, sync_every=welcome.terms.sync_every), welcome.block_idx
        run = WorkerRun(module, partition, settings, shard.worker_id, block_idx, shard.seed, self.leads)
        self._run = run
        if self._num_workers is not None:
            self._address = self._fleet.start_coordinator()
            self._open().found(self._terms(run.masters, shard.seed, shard.order_state), run.masters)
            self._fleet.start_workers(self._num_workers, self._fit_idx)
        return run

    def begin(self) -> None:
        """Take up the run where it stands; rank 0 first waits until all its workers have joined.

        Raises:
            WorkerDiedError: If a worker that rank 0 started has ended before it joined.
            RunFailedError: If not all have joined within ``join_timeout_s``.
        """
        assert self._line is not None and self._run is not None
        if self.leads:
            self._welcome = self._line.join(self._facts(0, self._run.masters))
            while self._line.status()["phase"] == "waiting":
                self._fleet.refuse_dead(self._num_blocks)
                self.look_up()
                time.sleep(POLL_S)
        assert self._welcome is not None
        self.start_step = self._welcome.terms.worker_settings["start_step"]
        self._run.begin(self._line, self._welcome, self.look_up)
        self._follow_schedule(steps_taken=0)

    def keep_pace(self, last: bool) -> None:
        """After every step: follow the run where it has gone on without this worker, and stop where it has ended."""
        assert self._trainer is not None and self._run is not None
        self.look_up()
        if self._run.ended:
            self._trainer.should_stop = True
            self._trainer.fit_loop.min_epochs, self._trainer.fit_loop.epoch_loop.min_steps = 0, None
        elif not last and self._run.steps_in_round == 0:
            self._follow_schedule(steps_taken=1)  # Lightning counts the present step when it is over

    def _follow_schedule(self, steps_taken: int) -> None:
        assert self._trainer is not None and self._run is not None
        behind = self.start_step + self._run.first_step - self._trainer.global_step - steps_taken
        if behind > 0:
            log.info("worker %d goes on %d steps further", self.shard.worker_id, behind)
            skip_steps(self._trainer, behind)

    def look_up(self) -> None:
        """Warn of workers that have died since; give way to a signal.

        Raises:
            SIGTERMException: After SIGTERM.
            CoordinatorUnreachableError: If the coordinator of this fleet is gone for good.
        """
        assert self._trainer is not None
        if self._trainer.received_sigterm:
            raise SIGTERMException
        for rank, code in self._fleet.newly_dead().items():
            where = f"Worker {rank} (block {rank % self._num_blocks})"
            rank_zero_warn(f"{where} ended with exit code {code}; the run goes on without it.")

    def end(self) -> None:
        """Merge what is left of an unfinished round, and leave; rank 0 ends the run."""
        if self._line is None or self._run is None:
            return
        self._run.finish()
        try:
            if self.leads:
                self._line.stop("rank 0 has finished")
            else:
                self._line.leave()
        except TransportError as exc:
            log.info("the coordinator was not told of the end: %s", exc)
        self._run.detach()
        if self.leads:
            self._fleet.await_workers()
            self.look_up()

    def close(self) -> None:
        """End what this process has started and give up its line; any number of times."""
        if self._run is not None:
            self._run.detach()
        if self._line is not None:
            self._line.close()
            self._line = None
        self._fleet.end()
        if self._num_threads_before is not None:
            torch.set_num_threads(self._num_threads_before)

    def _share_cores(self, num_workers: int) -> None:
        if "OMP_NUM_THREADS" not in os.environ:
            self._num_threads_before = torch.get_num_threads()
            torch.set_num_threads(threads_for(num_workers))

    def signal_workers(self, number: int) -> None:
        """Pass a signal on to the workers that this process has started."""
        self._fleet.signal_workers(number)

    # What the coordinator is told

    def _open(self) -> Transport:
        from lightning_blocktrain.transport.http import HttpTransport  # here: importing the package must stay light

        assert self._address is not None
        where = self._address
        self._line = HttpTransport(
            where.url, where.run_id, where.token, reconnect_timeout_s=self.limits.reconnect_timeout_s
        )
        return self._line

    def _terms(self, masters: Mapping[str, Mapping[str, Tensor]], seed: int, order_state: Tensor) -> RunTerms:
        return RunTerms(
            num_blocks=self._num_blocks,
            sync_every=self.settings.sync_every,
            rules=self.settings.rules,
            outer=self.settings.outer_optimizer,
            interface_every=self.settings.interface_every,
            num_workers=self._num_workers,
            max_rounds=self._max_rounds,
            join_timeout_s=self.limits.join_timeout_s,
            on_missing_block=self.limits.on_missing_block,
            identity={"model": _shape_digest(masters)},
            worker_settings={"seed": seed, "order_state": _as_text(order_state), "start_step": self.start_step},
        )

    def _facts(self, worker_id: int | None, masters: Mapping[str, Mapping[str, Tensor]]) -> WorkerFacts:
        identity = {
            "model": _shape_digest(masters),
            "num_blocks": self._num_blocks,
            "sync_every": self.settings.sync_every,
            "interface_every": self.settings.interface_every,
        }
        return WorkerFacts(worker_id, identity=identity, host=socket.gethostname()[:100])

    def _rounds_of(self, num_steps: float) -> int | None:
        if not 0 < num_steps < math.inf:
            return None
        return max(1, math.ceil((num_steps - self.start_step) / self.settings.sync_every))


def _shape_digest(masters: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Return a digest of the names, shapes and dtypes of a run's tensors."""
    lines = [
        f"{entry} {name} {tuple(tensor.shape)} {tensor.dtype}"
        for entry, tensors in masters.items()
        for name, tensor in tensors.items()
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _as_text(state: Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _as_state(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
