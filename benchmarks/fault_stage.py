"""One run of the fault harness: its processes, its relays, and the story of what they said.

Owns starting and disturbing them and noting what they send. Owns no opinion about the story (``fault_records.py``).
Every wait is for a message of a process, and is finite.
"""

import importlib.util
import secrets
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.fault_plan import CoordinatorTold, Plan, Shape, WorkerTold
from benchmarks.relay import Line, Relay, Tear, address_of
from benchmarks.warm_fleet import ChildPipe, Message, WarmFleet, WarmProcess

LIMIT_S = 60.0
"""Longest wait for anything that a run has to do."""
COORDINATOR = "coordinator"


class StageError(RuntimeError):
    """A run did not do in time what it had to do, or one of its processes failed."""


@dataclass
class Story:
    """What happened in a run.

    Args:
        reports: Closed rounds as the coordinator reported them, with ``opened_at`` and ``closed_at``.
        receipts: (worker id, entry, base version, verdict), as the workers were told.
        rounds: (worker id, version, digest of its replica) at the beginning of every round but the first.
        began: Versions that a worker's lives began with, by worker id.
        done: Version and digests by entry that a worker ended with, by worker id.
        died_at: When a worker was killed, by worker id; not those that came back.
        listening_at: When a coordinator began to listen, one for each of its lives.
        killed_at: When the coordinator was killed.
        masters: Digests of the final masters by entry; empty until the run has ended.
        last_counts: Verdicts given after the last close, by verdict.
        fault_at: When the fault happened; None: there was none.
        fault_block: The block that it concerns; None: all.
        wire_bytes: Bytes that went through relays, both ways.
    """

    reports: list[dict[str, Any]] = field(default_factory=list)
    receipts: list[tuple[int, str, int, str]] = field(default_factory=list)
    rounds: list[tuple[int, int, str]] = field(default_factory=list)
    began: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    done: dict[int, tuple[int, dict[str, str]]] = field(default_factory=dict)
    died_at: dict[int, float] = field(default_factory=dict)
    listening_at: list[float] = field(default_factory=list)
    killed_at: float | None = None
    masters: dict[str, str] = field(default_factory=dict)
    last_counts: Counter[str] = field(default_factory=Counter)
    fault_at: float | None = None
    fault_block: int | None = None
    wire_bytes: int = 0


class Stage:
    """Processes of one run; a context manager that opens with the coordinator and leaves nothing behind.

    Args:
        shape: Of the run.
        folder: Empty; for the coordinator's state.
    """

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.shape = shape
        self.story = Story()
        self.spool_dir = folder / "spool"
        self.spool_dir.mkdir()
        secret = secrets.token_urlsafe(16)
        self._told = CoordinatorTold(shape, "faults", secret, 0, folder / "state", self.spool_dir)
        self._stack = ExitStack()
        self._fleet = self._stack.enter_context(WarmFleet())
        self._workers: dict[int, WarmProcess] = {}
        self._asking: set[int] = set()
        self._slow: Mapping[int, float] = {}
        self._relays: list[Relay] = []
        self._coordinator: WarmProcess | None = None
        self._address = ("", 0)

    def __enter__(self) -> Self:
        try:
            self._start_coordinator(cold=False)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.story.wire_bytes = sum(relay.traffic["up"] + relay.traffic["down"] for relay in self._relays)
        self._stack.close()

    # Who takes part

    def relay(self, up: Line | None = None, down: Line | None = None) -> Relay:
        """Return a relay to the coordinator, open until the run is over."""
        relay = self._stack.enter_context(Relay(self._address, up, down))
        self._relays.append(relay)
        return relay

    def start_workers(
        self,
        plans: Mapping[int, Plan] | None = None,
        through: Mapping[int, Relay] | None = None,
        slow: Mapping[int, float] | None = None,
    ) -> None:
        """Start all workers of the shape.

        Args:
            plans: What they do wrong, by worker id.
            through: The relays that they use; the others reach the coordinator directly.
            slow: How many times slower their steps are.
        """
        self._slow = slow or {}
        for worker_id in range(self.shape.num_workers):
            self.start_worker(worker_id, (plans or {}).get(worker_id), (through or {}).get(worker_id))

    def start_worker(self, worker_id: int, plan: Plan | None = None, through: Relay | None = None) -> None:
        """Start a worker, or its next life."""
        told = WorkerTold(
            shape=self.shape,
            run_id=self._told.run_id,
            token=self._told.token,
            url=f"http://{self._address[0]}:{self._address[1]}" if through is None else through.url,
            worker_id=worker_id,
            plan=plan or {},
            step_s=self.shape.step_s * self._slow.get(worker_id, 1.0),
            stall_timeout_s=10.0,
        )
        self.story.died_at.pop(worker_id, None)
        self._workers[worker_id] = self._fleet.start(f"worker {worker_id}", _work, told)

    def _start_coordinator(self, cold: bool) -> None:
        num_before = len(self.story.listening_at)
        self._coordinator = self._fleet.start(COORDINATOR, _coordinate_cold if cold else _coordinate, self._told, cold)
        self.wait(lambda: len(self.story.listening_at) > num_before, "the coordinator listens")

    # Faults

    def mark_fault(self, block_idx: int | None) -> None:
        """Note that the fault happens now."""
        self.story.fault_at, self.story.fault_block = time.monotonic(), block_idx

    def await_ask(self, worker_id: int) -> None:
        """Wait until a worker has come to where it asks."""
        self.wait(lambda: worker_id in self._asking, f"worker {worker_id} asks")

    def go(self, worker_id: int) -> None:
        """Let a worker that asks go on."""
        self._asking.remove(worker_id)
        self._workers[worker_id].answer()

    def await_tear(self, tear: Tear) -> None:
        """Wait until an armed fault has happened, and note it."""
        if not tear.happened.wait(LIMIT_S):
            raise StageError(f"no connection came to byte {tear.num_bytes} {tear.direction} within {LIMIT_S:g} s")
        self.mark_fault(self.story.fault_block)

    def kill(self, worker_id: int) -> None:
        """Kill a worker, and wait for its end."""
        self._workers[worker_id].kill()
        self.await_death(worker_id)

    def await_death(self, *worker_ids: int) -> None:
        """Wait until workers are dead, and note the fault."""
        self.wait(lambda: self.story.died_at.keys() >= set(worker_ids), f"workers {list(worker_ids)} die")
        self.mark_fault(worker_ids[0] % self.shape.num_blocks)

    def kill_coordinator(self) -> None:
        """Kill the coordinator, and wait for its end."""
        assert self._coordinator is not None
        self.mark_fault(None)
        self.story.killed_at = time.monotonic()
        self._coordinator.kill()
        self.wait(lambda: self._coordinator is None, "the coordinator ends")

    def restart_coordinator(self, cold: bool) -> None:
        """Start the coordinator again on its port and state.

        Args:
            cold: In a new interpreter, which first imports what the product's coordinator process does.
        """
        self._told = replace(self._told, port=self._address[1])
        self._start_coordinator(cold)

    # Waiting

    def await_version(self, worker_id: int, version: int) -> None:
        """Wait until a worker has seen a version of its block."""

        def seen() -> bool:
            return any(who == worker_id and at >= version for who, at, _ in self.story.rounds)

        self.wait(seen, f"worker {worker_id} comes to version {version}")

    def await_judged(self, base_version: int, worker_ids: set[int]) -> None:
        """Wait until workers have been told what became of their block's update on a version."""

        def judged() -> bool:
            told = {who for who, entry, base, _ in self.story.receipts if base == base_version and entry != "interface"}
            return told >= worker_ids

        self.wait(judged, f"updates of {sorted(worker_ids)} on version {base_version} are judged")

    def await_end(self) -> None:
        """Wait until the run is over and every worker that lives has left it."""
        self.wait(lambda: bool(self.story.masters), "the run ends")
        living = self._workers.keys() - self.story.died_at.keys()
        self.wait(lambda: self.story.done.keys() >= living, "the workers leave")

    def wait(self, happened: Callable[[], bool], what: str) -> None:
        """Listen to the processes until something has happened.

        Raises:
            StageError: If it has not within ``LIMIT_S``, or a process has failed meanwhile.
        """
        ends_at = time.monotonic() + LIMIT_S
        while not happened():
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                raise StageError(f"this did not happen within {LIMIT_S:g} s: {what}")
            for message in self._fleet.receive(left_s):
                self._note(message)

    def _note(self, message: Message) -> None:
        if message.kind == "failed":
            raise StageError(f"{message.name} failed:\n{message.values[0]}")
        if message.name == COORDINATOR:
            self._note_coordinator(message)
        else:
            self._note_worker(int(message.name.split()[1]), message)

    def _note_coordinator(self, message: Message) -> None:
        story = self.story
        if message.kind == "listening":
            self._address = address_of(message.values[0])
            story.listening_at.append(message.at)
        elif message.kind == "report":
            story.reports.append(message.values[0])
        elif message.kind == "masters":
            story.masters, story.last_counts = message.values[0], Counter(message.values[1])
        elif message.kind == "ended":
            self._coordinator = None
            if message.values[0] and story.killed_at is None:
                raise StageError(f"the coordinator ended with exit code {message.values[0]}")

    def _note_worker(self, worker_id: int, message: Message) -> None:
        story = self.story
        if message.kind == "asks":
            self._asking.add(worker_id)
        elif message.kind == "began":
            story.began[worker_id].append(message.values[0])
        elif message.kind == "receipt":
            story.receipts.append((worker_id, *message.values))
        elif message.kind == "round":
            story.rounds.append((worker_id, *message.values))
        elif message.kind == "done":
            story.done[worker_id] = (message.values[0], message.values[1])
        elif message.kind == "ended" and message.values[0]:
            story.died_at[worker_id] = message.at


def simulated(shape: Shape) -> dict[str, str]:
    """Return the digests by entry of the undisturbed run's masters, trained in lockstep in one warm process.

    Raises:
        StageError: If that failed.
    """
    with WarmFleet() as fleet:
        fleet.start("simulator", _simulate, shape)
        ends_at = time.monotonic() + LIMIT_S
        while (left_s := ends_at - time.monotonic()) > 0:
            for message in fleet.receive(left_s):
                if message.kind == "masters":
                    masters: dict[str, str] = message.values[0]
                    return masters
                if message.kind in ("failed", "ended"):
                    raise StageError(f"the simulator {message.kind}: {message.values[0]}")
    raise StageError(f"the simulator did not end within {LIMIT_S:g} s")


# Roles by reference: what they need is imported where they are played, not here


def _work(told: WorkerTold, pipe: ChildPipe) -> None:
    from benchmarks.fault_roles import work

    work(told, pipe)


def _coordinate(told: CoordinatorTold, pipe: ChildPipe) -> None:
    from benchmarks.fault_roles import found

    found(told, pipe)


def _coordinate_cold(told: CoordinatorTold, pipe: ChildPipe) -> None:
    cold_coordinator()(told, pipe)


def cold_coordinator() -> Callable[[CoordinatorTold, ChildPipe], None]:
    """Import the role of a coordinator whose run is stored, in a process that has not imported the package.

    As ``lightning_blocktrain.coordinator.process`` does, without the package's own ``__init__``.
    """
    spec = importlib.util.find_spec("lightning_blocktrain")
    assert spec is not None and spec.name not in sys.modules
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    from benchmarks.fault_coordinator import coordinate

    return coordinate


def _simulate(shape: Shape, pipe: ChildPipe) -> None:
    from benchmarks.fault_roles import simulate

    simulate(shape, pipe)
