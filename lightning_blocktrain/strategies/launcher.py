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
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_blocktrain.errors import CoordinatorUnreachableError, WorkerDiedError, explain

log = logging.getLogger(__name__)

URL, TOKEN, RUN_ID = "BLOCKTRAIN_COORDINATOR", "BLOCKTRAIN_TOKEN", "BLOCKTRAIN_RUN_ID"
RANK, PARENT, FIT_IDX = "BLOCKTRAIN_RANK", "BLOCKTRAIN_PARENT", "BLOCKTRAIN_FIT_IDX"
SERVE = "BLOCKTRAIN_SERVE"
DEFAULT_RUN_ID = "blocktrain"

MAX_RESTARTS = 3
START_TIMEOUT_S = 60.0
POLL_S = 0.2
END_WAIT_S = 10.0
"""How long workers have to leave a run that has ended well."""
TERM_WAIT_S = 1.5
"""From a request to end to the signal that cannot be refused."""

COORDINATOR_CODE = "from lightning_blocktrain.strategies.launcher import coordinator_main; coordinator_main()"


@dataclass(frozen=True)
class Address:
    """Where a run is coordinated."""

    url: str
    run_id: str
    token: str = field(repr=False)


@dataclass(frozen=True)
class Child:
    """What a process that rank 0 has started was told.

    Args:
        rank: Of the worker, 1 or more.
        fit_idx: Which fit of the script it is for: those before are passed over.
        address: Of the coordinator.
    """

    rank: int
    fit_idx: int
    address: Address


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
            _told.append(Child(int(rank), int(os.environ.pop(FIT_IDX)), address))
            end_with_parent(int(os.environ.pop(PARENT)))
    return _told[0]


def given_address(coordinator: str | None) -> Address | None:
    """Return the address of the run to join, from the argument or the environment; None: there is none.

    Raises:
        ValueError: If there is a URL and no token.
    """
    url = coordinator or os.environ.get(URL)
    if not url:
        return None
    token = os.environ.get(TOKEN)
    if not token:
        rule = f"whoever joins a run needs its token in the environment variable {TOKEN}"
        raise ValueError(explain(rule, f"coordinator={url}", "export the token that the coordinator printed"))
    return Address(url, os.environ.get(RUN_ID, DEFAULT_RUN_ID), token)


@dataclass(frozen=True)
class Place:
    """Which process of a run this is.

    Args:
        num_workers: W where it leads, as rank 0; else None.
        child: What rank 0 told it; None: it was not started by one.
        address: Of the run it takes part in; None where it leads, or simulates its workers.
    """

    num_workers: int | None
    child: Child | None
    address: Address | None

    @property
    def is_simulated(self) -> bool:
        """Whether all workers are in this process."""
        return self.num_workers is None and self.address is None

    @property
    def joins(self) -> bool:
        """Whether it takes part in a run that it was not started for."""
        return self.child is None and self.address is not None

    @property
    def global_rank(self) -> int:
        """0 in the one process that validates, logs and writes; a process that joins learns its own number later."""
        return self.child.rank if self.child is not None else int(self.joins)

    @property
    def local_rank(self) -> int:
        """0 in the one process of a machine that prepares data."""
        return 0 if self.child is None else self.child.rank


def find_place(coordinator: str | None, devices: int) -> Place:
    """Find out which process this is.

    Args:
        coordinator: URL of the run to join; None: what the environment says.
        devices: Of the Trainer; above 1 they are worker processes.

    Raises:
        ValueError: If there is a URL and no token.
    """
    child = told_child()
    if child is not None:
        return Place(None, child, child.address)
    address = given_address(coordinator)
    return Place(devices if devices > 1 and address is None else None, None, address)


def end_with_parent(parent_pid: int, last: Callable[[], object] | None = None) -> None:
    """End this process, from a thread, when the process ``parent_pid`` is no longer its parent.

    Args:
        parent_pid: Whom to watch.
        last: Called when this process has had its time to end by itself.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(TERM_WAIT_S)
        if last is not None:
            last()
        os._exit(1)

    threading.Thread(target=watch, name="blocktrain-parent", daemon=True).start()


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

    def start_coordinator(self) -> Address:
        """Start the coordinator on a free port of the loopback address, and watch over it.

        Raises:
            CoordinatorUnreachableError: If it does not listen in time.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="blocktrain-"))
        self._run_id, self._token = secrets.token_hex(8), secrets.token_urlsafe(32)
        self._coordinator = self._spawn_coordinator(port=0)
        url = self._await_url(self._coordinator)
        self._watch = threading.Thread(target=self._keep_coordinator, name="blocktrain-watch", daemon=True)
        self._watch.start()
        self.address = Address(url, self._run_id, self._token)
        return self.address

    def _spawn_coordinator(self, port: int) -> "subprocess.Popen[bytes]":
        told = {"run_id": self._run_id, "port": port, "folder": str(self._folder)}
        environment = {SERVE: json.dumps(told), TOKEN: self._token, "OMP_NUM_THREADS": "1"}
        return _spawn([sys.executable, "-c", COORDINATOR_CODE], environment)

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
            code = self._coordinator.poll()
            if code is None:
                continue
            if num_restarts == MAX_RESTARTS:
                self._lost = f"exit code={code} after {MAX_RESTARTS} restarts"
                return
            num_restarts += 1
            rank_zero_warn(f"The coordinator ended with exit code {code}; restart {num_restarts} of {MAX_RESTARTS}.")
            self._coordinator = self._spawn_coordinator(int(self.address.url.rpartition(":")[2]))

    def start_workers(self, num_workers: int, fit_idx: int) -> None:
        """Run this process's command once more for every rank but 0.

        Raises:
            RuntimeError: If the command cannot be run again.
        """
        assert self.address is not None
        command = again()
        shared = {
            URL: self.address.url,
            RUN_ID: self.address.run_id,
            TOKEN: self.address.token,
            PARENT: str(os.getpid()),
            FIT_IDX: str(fit_idx),
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


def coordinator_main() -> None:
    """Be the coordinator that rank 0 has started; ends with the run, on a signal, or with rank 0."""
    from lightning_blocktrain.coordinator.serve import ServeSettings, serve

    told: dict[str, Any] = json.loads(os.environ.pop(SERVE))
    folder, parent_pid = Path(told["folder"]), int(os.environ.pop(PARENT))
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    end_with_parent(parent_pid, last=remove)
    settings = ServeSettings(
        run_id=told["run_id"], token=os.environ.pop(TOKEN), port=told["port"], state_dir=folder / "state"
    )
    logging.basicConfig(level=logging.WARNING, format="coordinator: %(message)s")
    code = serve(settings, on_listening=_note_url(folder))
    if os.getppid() != parent_pid:  # else rank 0 removes it, or starts this coordinator again
        remove()
    sys.exit(code)


def _note_url(folder: Path) -> Callable[[str], None]:
    def note(url: str) -> None:
        temporary = folder / "url.tmp"
        temporary.write_text(url)
        temporary.replace(folder / "url")

    return note
