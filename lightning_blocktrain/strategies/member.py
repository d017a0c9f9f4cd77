"""One process of a run of several: it leads the run (rank 0), was started by who leads it, or joins it by URL.

Owns the order of what such a process does around its rounds: who starts whom, founds, joins, waits and leaves. The
rounds are ``worker_run``'s, the processes ``launcher``'s.

==================  ==========================================  =============================  =====================
moment              rank 0                                      started by rank 0              joins by URL
==================  ==========================================  =============================  =====================
``enter`` (setup)   knows its place                             joins as its rank              founds if need be, joins
``make_run``        coordinator, found, starts the workers
``begin``           joins, waits until all have                 fetches                        fetches
``end``             stops the run, waits for the workers        leaves                         fetches all, leaves
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
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_blocktrain.coordinator.standing import store_standing
from lightning_blocktrain.errors import TransportError, explain
from lightning_blocktrain.partition import Partition
from lightning_blocktrain.strategies import block_checkpoint
from lightning_blocktrain.strategies.block_guard import refuse_few_workers, warn_of_other_terms
from lightning_blocktrain.strategies.job import Job
from lightning_blocktrain.strategies.launcher import Fleet, threads_for
from lightning_blocktrain.strategies.passed_fits import noted_fits
from lightning_blocktrain.strategies.place import Place
from lightning_blocktrain.strategies.progress import skip_steps
from lightning_blocktrain.strategies.run_parts import RunParts, warn_of_fresh_starts
from lightning_blocktrain.strategies.run_settings import RunSettings
from lightning_blocktrain.strategies.state_files import WorkerFiles, kept_versions, worker_folder
from lightning_blocktrain.strategies.worker_run import WorkerRun, masters_of
from lightning_blocktrain.strategies.worker_shard import Shard
from lightning_blocktrain.strategies.workers import buffer_names
from lightning_blocktrain.transport import RunTerms, Transport, Welcome, WorkerFacts
from lightning_blocktrain.transport.terms import OnMissingBlock, differing_terms

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
        self._rank = place.given_rank
        self.job = None if place.cluster is None else Job(place.cluster, fit_idx, limits.join_timeout_s)
        """What the job adds whose launcher has started all ranks; None: there is none."""
        self._ends_with_fit = place.child is not None
        self._more = {} if place.child is None else place.child.more
        self._address = place.address
        self._fit_idx = fit_idx
        self._fleet = Fleet()
        self._line: Transport | None = None
        self._welcome: Welcome | None = None
        self._shard: Shard | None = None
        self._max_rounds: int | None = None
        self._trainer: L.Trainer | None = None
        self._run: WorkerRun | None = None
        self._parts: RunParts | None = None
        self._stands: Mapping[str, Any] | None = None
        self._num_blocks = 1
        self._partition: Partition | None = None
        self._spared: tuple[str, ...] = ()
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
        self._spared = buffer_names(module, partition)
        self._partition = partition
        if self.job is not None:
            self.job.enter(partition.num_blocks)
        if self._num_workers is not None:
            refuse_few_workers(self._num_workers, partition.num_blocks)
            self._share_cores(self._num_workers)
            seed = torch.initial_seed() % 2**63
            self._shard = Shard(0, self._num_workers, seed, torch.get_rng_state())
            self._max_rounds = self._rounds_of(trainer.estimated_stepping_batches)
            return
        if self.job is not None and not self.job.is_collective:
            self._address, self._more = self.job.told(self.look_up)
        line = self._open()
        masters = masters_of(module, partition)
        own = self._terms(masters, torch.initial_seed() % 2**63, torch.get_rng_state())
        if self._rank is None:
            line.found(own, masters)
        self._welcome = line.join(self._facts(self._rank, masters))
        if self._rank is None:
            warn_of_other_terms(differing_terms(own, self._welcome.terms))
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
        run = WorkerRun(
            module,
            partition,
            settings,
            shard.worker_id,
            block_idx,
            shard.seed,
            assembles=self.leads,
            for_good=self._ends_with_fit,
            drops_base=True,
        )
        self._run = run
        if self._num_workers is not None:
            self._start_fleet(run, self._num_workers)
        return run

    def _start_fleet(self, run: WorkerRun, num_workers: int) -> None:
        assert self._trainer is not None
        # Without a callback that writes checkpoints nobody asks for the states that they would hold.
        writes = bool(self._trainer.checkpoint_callbacks) and (self.job is None or self.job.shares_folders)
        kept = kept_versions(self.settings.interface_every) if writes else 1
        masters, shard = run.masters, self.shard
        terms = self._terms(masters, shard.seed, shard.order_state)
        if self.job is not None and self.job.is_collective:
            self._open().found(terms, masters)
            return
        stands, self._stands = self._stands, None
        prepare = partial(store_standing, terms=terms, masters=masters, stands=stands) if stands else None
        place = None if self.job is None else self.job.place
        self._address = self._fleet.start_coordinator(kept, prepare, place)
        self._open().found(terms, masters)
        path, states = self._trainer.ckpt_path, str(worker_folder(self._fleet.folder)) if writes else None
        more = {"ckpt_path": path and str(path), "states": states, "kept_versions": kept, "passed": noted_fits()}
        if self.job is None:
            self._fleet.start_workers(num_workers, self._fit_idx, more)
        else:
            self.job.tell(self._address, more)
        if writes:
            self._parts = RunParts(self._fleet.folder, run)

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
                self._heed_signal()  # first: a signal to this process ends its workers too
                self._fleet.refuse_dead(self._num_blocks)
                self.look_up()
                time.sleep(POLL_S)
        assert self._welcome is not None
        self.start_step = self._welcome.terms.worker_settings["start_step"]
        resumes = self.leads or self._rank is not None
        self._run.begin(self._line, self._welcome, self.look_up, self._write_state, self._settle_parts, resumes)
        self._follow_schedule(steps_taken=0)

    def _write_state(self) -> None:
        if self._more.get("states") is not None:
            assert self._run is not None
            files = WorkerFiles(Path(self._more["states"]), self.shard.worker_id, self._more["kept_versions"])
            files.write(self._run.version, self._run.own_states())

    def _settle_parts(self) -> None:
        if self._parts is not None and self._line is not None:
            self._parts.settle(self._line, self.look_up)

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
        self._heed_signal()
        for rank in self._warn_of_dead():
            if self._line is not None:
                self._line.dismiss(rank)  # or its rounds would wait until its silence tells

    def _heed_signal(self) -> None:
        assert self._trainer is not None
        if self._trainer.received_sigterm:
            raise SIGTERMException

    def _warn_of_dead(self) -> list[int]:
        dead = self._fleet.newly_dead()
        for rank, code in dead.items():
            where = f"Worker {rank} (block {rank % self._num_blocks})"
            rank_zero_warn(f"{where} ended with exit code {code}; the run goes on without it.")
        return list(dead)

    def end(self) -> None:
        """Merge what is left of an unfinished round, and leave; rank 0 ends the run."""
        if self._line is None or self._run is None:
            return
        self._run.finish()
        if self._parts is not None:
            self._run.assemble()
            self._parts.remember()
        if not self._ends_with_fit:
            self._run.make_whole()
        try:
            if self.leads:
                self._line.stop("rank 0 has finished")
            else:
                self._line.leave()
        except TransportError as exc:
            log.info("the coordinator was not told of the end: %s", exc)
        self._run.detach()
        if self.leads:
            if self.job is not None:
                self.job.await_ranks(self._line, self.look_up)
            self._fleet.await_workers()
            self._warn_of_dead()

    def close(self) -> None:
        """End what this process has started and give up its line; any number of times."""
        if self._run is not None:
            self._run.detach()
            if not self._ends_with_fit:
                self._run.make_whole()  # of a fit that failed: it must not look sound
        if self._line is not None:
            self._line.close()
            self._line = None
        self._fleet.end()
        if self._num_threads_before is not None:
            torch.set_num_threads(self._num_threads_before)

    def _share_cores(self, num_workers: int) -> None:
        if "OMP_NUM_THREADS" not in os.environ and self.job is None:  # a job's cores are its launcher's to share
            self._num_threads_before = torch.get_num_threads()
            torch.set_num_threads(threads_for(num_workers))

    def signal_workers(self, number: int) -> None:
        """Pass a signal on to the workers that this process has started."""
        self._fleet.signal_workers(number)

    # Checkpoints

    def resume_from(self, checkpoint: Mapping[str, Any]) -> None:
        """Note where the run of a checkpoint stood; before ``enter``, and rank 0's word holds for all."""
        self.start_step = checkpoint.get("global_step", 0)
        takes_over = self.leads and (self.job is None or not self.job.is_collective)
        self._stands = block_checkpoint.standing_of(block_checkpoint.saved_run(checkpoint)) if takes_over else None
        if self._stands is not None:
            # The versions go on; what a checkpoint inside a round is ahead of them stays ahead.
            self.start_step -= self._stands["version"] * self.settings.sync_every

    def warn_of_fresh_starts(self, saved: Mapping[str, Any]) -> None:
        """Warn, in rank 0, of what a checkpoint lacks to resume the whole run; see ``run_parts``."""
        if self._num_workers is not None:
            if self.job is not None and self.job.is_collective:
                saved = {name: value for name, value in saved.items() if name != "coordinator"}
            warn_of_fresh_starts(saved, self._num_workers, self._num_blocks, self.settings.outer_optimizer)

    def complete(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return this worker's state, in rank 0 with that of the other processes where a checkpoint needs it."""
        return state if self._parts is None else self._parts.complete(state)

    # What the coordinator is told

    def _open(self) -> Transport:
        if self.job is not None and self.job.is_collective:
            assert self._trainer is not None
            self._line = self.job.line(self._trainer, self._require_partition().read_by, self.look_up)
            return self._line
        from lightning_blocktrain.transport.http import HttpTransport  # here: importing the package must stay light
        from lightning_blocktrain.transport.shared import line_to

        assert self._address is not None
        where, wait_s = self._address, self.limits.reconnect_timeout_s

        def open_one(url: str) -> Transport:
            return HttpTransport(url, where.run_id, where.token, cafile=where.cafile, reconnect_timeout_s=wait_s)

        self._line = line_to(where.url, open_one)
        return self._line

    def _terms(self, masters: Mapping[str, Mapping[str, Tensor]], seed: int, order_state: Tensor) -> RunTerms:
        return RunTerms(
            num_blocks=self._num_blocks,
            sync_every=self.settings.sync_every,
            rules=self.settings.rules_for(self._require_partition()),
            outer=replace(self.settings.outer_optimizer, spared=self._spared),
            interface_every=self.settings.interface_every,
            num_workers=self._num_workers,
            max_rounds=self._max_rounds,
            join_timeout_s=self.limits.join_timeout_s,
            on_missing_block=self.limits.on_missing_block,
            codec=replace(self.settings.codec, spared=self._spared),
            prefix_every=self.settings.prefix_every,
            prefix_codec=replace(self.settings.prefix_codec, spared=self._spared),
            local_steps=self.settings.local_steps,
            identity={"model": _shape_digest(masters)},
            worker_settings={"seed": seed, "order_state": _as_text(order_state), "start_step": self.start_step},
        )

    def _require_partition(self) -> Partition:
        assert self._partition is not None
        return self._partition

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
