"""Files through which the processes of one machine hand rank 0, which alone writes checkpoints, what it needs for one.

Owns their names, and which of them stay. Owns no tensor and no process. Everything lies in the folder of the run, which
ends with the fit::

    state/ENTRY-VERSION.safetensors   the coordinator's: master, average and outer optimizer
    workers/WORKER-VERSION.pt         a worker's own state, written when its round of this version begins
    held/                             hard links to what rank 0 has chosen for its next checkpoint

A checkpoint shows the run at one version, that of rank 0's block, while the others may have gone on: of every file the
versions stay that rank 0 may still need. Replicas that were late, dead or more than ``MAX_AHEAD`` rounds away are saved
as they were when they last wrote.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

MAX_AHEAD = 3
"""Rounds by which others may be ahead of rank 0 while a checkpoint still shows them exactly."""
WAIT_S = 30.0
"""How long rank 0 waits for a worker that was in time to write its state."""
POLL_S = 0.05


def kept_versions(interface_every: int) -> int:
    """Return how many versions of every file stay: nobody passes a merge of the interface before rank 0 sends to it."""
    return 1 + min(interface_every, MAX_AHEAD)


def state_folder(folder: Path) -> Path:
    """Return where the coordinator of a run keeps its state."""
    return folder / "state"


def worker_folder(folder: Path) -> Path:
    """Return where the workers of a run keep theirs."""
    return folder / "workers"


class WorkerFiles:
    """Where one worker writes its states.

    Args:
        folder: Of the workers of its run.
        worker_id: Of the worker.
        kept: Versions that stay.
    """

    def __init__(self, folder: Path, worker_id: int, kept: int) -> None:
        self._folder = folder
        self._worker_id = worker_id
        self._kept = kept

    def write(self, version: int, state: Mapping[str, Any]) -> None:
        """Write a state; a full disk ends no run, but the checkpoints lack this worker from then on.

        Args:
            version: Of the worker's block when the round begins that the state is to be resumed in.
            state: Tensors, dicts, lists, str, int, float and None only.
        """
        path = self._folder / f"{self._worker_id}-{version}.pt"
        temporary = path.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(dict(state), file)
            temporary.replace(path)
        except (OSError, RuntimeError) as exc:  # torch has an error of its own for a write that fails
            log.warning("worker %d cannot hand over its state for checkpoints: %s", self._worker_id, exc)
            temporary.unlink(missing_ok=True)
        for old, worker_id, old_version in _listed(self._folder, ".pt"):
            if worker_id == str(self._worker_id) and old_version <= version - self._kept:
                old.unlink(missing_ok=True)


class RunFiles:
    """What rank 0 finds in the folder of its run.

    Args:
        folder: Of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held = folder / "held"
        self.held_version: int | None = None
        """Version of the blocks in what is held; None: nothing is."""

    def hold(
        self,
        version: int,
        versions: Mapping[str, int],
        awaited: Callable[[], Collection[int]],
        look_up: Callable[[], object],
    ) -> dict[str, int]:
        """Choose what the checkpoints of this version will consist of; it then stays, whatever the others do.

        Args:
            version: Of the blocks.
            versions: By entry, as wanted.
            awaited: Returns the workers whose state of this version is on its way; asked again while waiting.
            look_up: Called while waiting; what it raises ends the wait.

        Returns:
            By entry, the versions that are held: the wanted ones, or the newest if those are gone.
        """
        shutil.rmtree(self._held, ignore_errors=True)
        self._held.mkdir()
        self._await(version, awaited, look_up)
        for worker_id in {found[1] for found in _listed(worker_folder(self._folder), ".pt")}:
            self._link(worker_folder(self._folder), worker_id, version, ".pt")
        state = state_folder(self._folder)
        held = {entry: self._link(state, entry, wanted, ".safetensors") for entry, wanted in versions.items()}
        self.held_version = version
        return {entry: found for entry, found in held.items() if found is not None}

    def _await(self, version: int, awaited: Callable[[], Collection[int]], look_up: Callable[[], object]) -> None:
        folder, ends_at = worker_folder(self._folder), time.monotonic() + WAIT_S
        while any(_newest(folder, str(worker_id), ".pt") < version for worker_id in awaited()):
            if time.monotonic() > ends_at:
                log.warning("not all workers have handed over their state of version %d for checkpoints", version)
                return
            look_up()
            time.sleep(POLL_S)

    def _link(self, folder: Path, name: str, version: int, suffix: str) -> int | None:
        for chosen in (version, _newest(folder, name, suffix)):
            with suppress(FileNotFoundError):
                os.link(folder / f"{name}-{chosen}{suffix}", self._held / f"{name}{suffix}")
                return chosen
        return None

    def worker_states(self) -> dict[str, Any]:
        """Return the states of all held workers, by block and replica."""
        states: dict[str, Any] = {}
        for path in sorted(self._held.glob("*.pt")):
            states |= torch.load(path, map_location="cpu", weights_only=True)
        return states

    @property
    def held_entries(self) -> list[str]:
        """The entries of which a version is held."""
        return sorted(path.stem for path in self._held.glob("*.safetensors"))

    def entry_state(self, entry: str) -> dict[str, Any]:
        """Return the ledger's state of a held entry."""
        from lightning_blocktrain.coordinator.storage import read_entry_file  # here: it needs a system with file locks

        return read_entry_file(self._held / f"{entry}.safetensors")


def _listed(folder: Path, suffix: str) -> Iterator[tuple[Path, str, int]]:
    """Yield the files of a folder with what they are of and their version."""
    for path in folder.glob(f"*-*{suffix}"):
        name, _, version = path.stem.rpartition("-")
        yield path, name, int(version)


def _newest(folder: Path, name: str, suffix: str) -> int:
    return max((version for _, found, version in _listed(folder, suffix) if found == name), default=-1)
