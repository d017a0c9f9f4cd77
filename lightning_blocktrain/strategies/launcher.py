"""The processes of a run on one machine: the coordinator, and this script once more for every further worker.

Owns starting, watching and ending them. Owns no round and no tensor. Addresses and secrets travel in environment
variables, never on a command line.

==============  =========================================  ==================================================
process         ends                                       when it dies
==============  =========================================  ==================================================
rank 0          with the script                            the others see its id change and end themselves
coordinator     when rank 0 ends its fit                   started again on its port and state, at most 3 times
other workers   with their fit                             before the first round: the fit fails; later: a warning
==============  =========================================  ==================================================

Every process but rank 0 has a session of its own: Ctrl-C reaches rank 0, which ends the others in order.
"""

import itertools
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_blocktrain.coordinator.process import CODE, PARENT, POLL_S, SERVE, TERM_WAIT_S, end_with_parent
from lightning_blocktrain.errors import CoordinatorUnreachableError, WorkerDiedError, explain
from lightning_blocktrain.strategies.cluster import ClusterPlace
from lightning_blocktrain.strategies.state_files import state_folder, worker_folder
from lightning_blocktrain.transport.address import DEFAULT_RUN_ID, RUN_ID, TOKEN, URL, given_cafile

log = logging.getLogger(__name__)

RANK, FIT_IDX, MORE = "BLOCKTRAIN_RANK", "BLOCKTRAIN_FIT_IDX", "BLOCKTRAIN_MORE"

MAX_RESTARTS = 3
START_TIMEOUT_S = 60.0
END_WAIT_S = 10.0
"""How long workers have to leave a run that has ended well."""


@dataclass(frozen=True)
class Address:
    """Where a run is coordinated.

    Args:
        url: Of its coordinator; of several that share a run all, with commas between them.
        run_id: Names the run.
        token: Its secret.
        cafile: PEM file of the authority that signed the coordinator's certificate; None: the system's.
    """

    url: str
    run_id: str
    token: str = field(repr=False)
    cafile: str | None = None


@dataclass(frozen=True)
class Child:
    """What a process that rank 0 has started was told.

    Args:
        rank: Of the worker, 1 or more.
        fit_idx: Which fit of the script it is for: those before are passed over.
        address: Of the coordinator.
        more: What else the fit needs, as ``Fleet.start_workers`` was given it.
    """

    rank: int
    fit_idx: int
    address: Address
    more: Mapping[str, Any] = field(default_factory=dict)


_told: list[Child | None] = []
_fits = itertools.count()


def count_fit() -> int:
    """Return how many fits of several processes this one has begun before; the same in every process of a script."""
    return next(_fits)


def told_child() -> Child | None:
    """Return what rank 0 told this process, or None if rank 0 has not started it.

    The first call takes it out of the environment, so that processes started from here are not taken for workers, and
    begins to watch rank 0.
    """
    if not _told:
        rank = os.environ.pop(RANK, None)
        if rank is None:
            _told.append(None)
        else:
            address = Address(os.environ.pop(URL), os.environ.pop(RUN_ID), os.environ.pop(TOKEN))
            more = json.loads(os.environ.pop(MORE, "{}"))
            _told.append(Child(int(rank), int(os.environ.pop(FIT_IDX)), address, more))
            end_with_parent(int(os.environ.pop(PARENT)))
    return _told[0]


def given_address(coordinator: str | None) -> Address | None:
    """Return the address of the run to join, from the argument or the environment; None: there is none.

    Raises:
        ValueError: If there is a URL and no token, or the file of a private authority is missing.
    """
    url = coordinator or os.environ.get(URL)
    if not url:
        return None
    token = os.environ.get(TOKEN)
    if not token:
        rule = f"whoever joins a run needs its token in the environment variable {TOKEN}"
        raise ValueError(explain(rule, f"coordinator={url}", "export the token that the coordinator printed"))
    return Address(url, os.environ.get(RUN_ID, DEFAULT_RUN_ID), token, given_cafile())


class Fleet:
    """The processes that rank 0 has started; ``end`` may come any number of times, from any thread."""

    def __init__(self) -> None:
        self.address: Address | None = None
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self._buried: set[int] = set()
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._lost = ""
        self._ending = threading.Event()
        self._watch: threading.Thread | None = None

    @property
    def folder(self) -> Path:
        """Where the coordinator keeps its state, and the workers leave theirs; it ends with the fleet."""
        assert self._folder is not None
        return self._folder

    def start_coordinator(
        self,
        kept_versions: int = 1,
        prepare: Callable[[Path, str, str], None] | None = None,
        place: ClusterPlace | None = None,
    ) -> Address:
        """Start the coordinator on a free port, and watch over it.

        Args:
            kept_versions: Versions of each entry that it keeps in its state folder.
            prepare: Writes into that folder, given also run id and token, the state with which it begins; None: it
                waits to be founded.
            place: In a job: it listens where the job's other nodes reach it; None: on the loopback address.

        Raises:
            CoordinatorUnreachableError: If it does not listen in time.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="blocktrain-"))
        worker_folder(self._folder).mkdir()
        self._run_id, self._token = secrets.token_hex(8), secrets.token_urlsafe(32)
        self._settings: dict[str, Any] = {"kept_versions": kept_versions}
        if place is not None:
            self._settings["host"] = place.coordinator_host
        if prepare is not None:
            prepare(state_folder(self._folder), self._run_id, self._token)
        self._coordinator = self._spawn_coordinator(port=0)
        url = self._await_url(self._coordinator)
        self._watch = threading.Thread(target=self._keep_coordinator, name="blocktrain-watch", daemon=True)
        self._watch.start()
        self.address = Address(url, self._run_id, self._token)
        return self.address

    def _spawn_coordinator(self, port: int) -> "subprocess.Popen[bytes]":
        folders = {"folder": str(self.folder), "state": str(state_folder(self.folder))}
        told = {"run_id": self._run_id, "port": port, **folders, "settings": self._settings}
        environment = {SERVE: json.dumps(told), TOKEN: self._token, "OMP_NUM_THREADS": "1"}
        return _spawn([sys.executable, "-c", CODE], environment)

    def _await_url(self, process: "subprocess.Popen[bytes]") -> str:
        assert self._folder is not None
        path = self._folder / "url"
        ends_at = time.monotonic() + START_TIMEOUT_S
        while not path.exists():
            if process.poll() is not None or time.monotonic() > ends_at:
                rule = f"the coordinator must listen within {START_TIMEOUT_S:g} s"
                got = f"exit code={process.poll()}"
                raise CoordinatorUnreachableError(explain(rule, got, "see what it wrote to standard error"))
            time.sleep(POLL_S / 4)
        return path.read_text()

    def _keep_coordinator(self) -> None:
        num_restarts = 0
        while not self._ending.wait(POLL_S):
            assert self._coordinator is not None and self.address is not None
            code = self._coordinator.poll()  # it never ends by itself, not even when the run is over
            if code is None:
                continue
            if num_restarts == MAX_RESTARTS:
                self._lost = f"exit code={code} after {MAX_RESTARTS} restarts"
                return
            num_restarts += 1
            rank_zero_warn(f"The coordinator ended with exit code {code}; restart {num_restarts} of {MAX_RESTARTS}.")
            self._coordinator = self._spawn_coordinator(int(self.address.url.rpartition(":")[2]))

    def start_workers(self, num_workers: int, fit_idx: int, more: Mapping[str, Any] | None = None) -> None:
        """Run this process's command once more for every rank but 0.

        Args:
            num_workers: W.
            fit_idx: Which fit of the script they are for.
            more: What else they are told, as JSON.

        Raises:
            RuntimeError: If the command cannot be run again.
        """
        assert self.address is not None
        command = again()
        shared = {
            URL: self.address.url,
            RUN_ID: self.address.run_id,
            TOKEN: self.address.token,
            FIT_IDX: str(fit_idx),
            MORE: json.dumps(dict(more or {})),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_for(num_workers))),
        }
        for rank in range(1, num_workers):
            self.workers[rank] = _spawn(command, {**shared, RANK: str(rank), "LOCAL_RANK": str(rank)})

    def newly_dead(self) -> dict[int, int]:
        """Return the exit code of each worker that has failed since the last call, by rank.

        Raises:
            CoordinatorUnreachableError: If the coordinator could not be kept alive.
        """
        if self._lost:
            rule = "the coordinator must stay alive"
            raise CoordinatorUnreachableError(explain(rule, self._lost, "see what it wrote to standard error"))
        codes = {rank: process.poll() for rank, process in self.workers.items() if rank not in self._buried}
        dead = {rank: code for rank, code in codes.items() if code}
        self._buried.update(dead)
        return dead

    def refuse_dead(self, num_blocks: int) -> None:
        """Refuse to begin without a worker.

        Raises:
            WorkerDiedError: Naming those whose process has ended already.
        """
        ended = {rank: process.poll() for rank, process in self.workers.items() if process.poll() is not None}
        if ended:
            got = "; ".join(
                f"rank {rank} (block {rank % num_blocks}): exit code {code}" for rank, code in ended.items()
            )
            fix = "see its traceback above; if there is none, the script must reach trainer.fit in every process"
            raise WorkerDiedError(explain("every worker must live until the first round", got, fix))

    def await_workers(self) -> None:
        """Wait for the workers of a run that has ended to leave, for ``END_WAIT_S`` at most."""
        ends_at = time.monotonic() + END_WAIT_S
        for process in self.workers.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, ends_at - time.monotonic()))

    def end(self) -> None:
        """End whatever still runs and remove what is left of it."""
        self._ending.set()
        if self._watch is not None and self._watch is not threading.current_thread():
            self._watch.join(START_TIMEOUT_S)
        _end_all([*self.workers.values(), *([self._coordinator] if self._coordinator else [])])
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def signal_workers(self, number: int) -> None:
        """Send a signal to every worker that still runs."""
        for process in self.workers.values():
            process.send_signal(number)


def _spawn(command: list[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    told = {**os.environ, **environment, PARENT: str(os.getpid())}
    return subprocess.Popen(command, env=told, stdin=subprocess.DEVNULL, start_new_session=True)


def _end_all(processes: "list[subprocess.Popen[bytes]]") -> None:
    for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
        ends_at = time.monotonic() + TERM_WAIT_S
        for process in processes:
            end(process)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, ends_at - time.monotonic()))


def again() -> list[str]:
    """Return the command that this process was started with.

    Raises:
        RuntimeError: If it read its program from standard input or a terminal.
    """
    command = list(sys.orig_argv)
    if getattr(sys, "ps1", None) is not None or len(command) < 2 or "-" in command[1:2]:
        rule = "several workers need a script that can be run again"
        raise RuntimeError(explain(rule, f"command={command}", "save it as a file, or use devices=1"))
    return [sys.executable, *command[1:]]


def threads_for(num_processes: int) -> int:
    """Return the threads that each of so many processes may use."""
    return max(1, len(os.sched_getaffinity(0)) // num_processes)
