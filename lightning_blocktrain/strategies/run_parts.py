"""What a checkpoint of several processes holds beyond rank 0's own state: the other workers' and the coordinator's.

Owns when it is gathered, and in which version. Owns no file name (``state_files``) and no form (``block_checkpoint``,
``coordinator.standing``).

A checkpoint shows the run as it was when rank 0's present round began. One that is taken between two rounds resumes as
if nothing had happened; one that is taken inside a round resumes at the beginning of that round, with the step and the
position in the data of the moment when it was taken.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_blocktrain.coordinator.standing import standing
from lightning_blocktrain.rounds import INTERFACE, OuterSGD
from lightning_blocktrain.strategies.state_files import RunFiles
from lightning_blocktrain.strategies.worker_run import WorkerRun
from lightning_blocktrain.transport import Transport

log = logging.getLogger(__name__)


class RunParts:
    """Gathers the parts of a run whose other processes rank 0 has started.

    Args:
        folder: Of the run.
        run: Rank 0's worker.
    """

    def __init__(self, folder: Path, run: WorkerRun) -> None:
        self._files = RunFiles(folder)
        self._run = run
        self._accepted_tokens: dict[str, int] = {}
        self._remembered: dict[str, Any] | None = None

    def settle(self, line: Transport, look_up: Callable[[], object]) -> None:
        """Settle on the state that the next checkpoints show, and let the module show the same version of every block.

        Call it when the module shows every block in that version or a newer one.

        Args:
            line: To the coordinator.
            look_up: Called while waiting; what it raises ends the wait.
        """
        run = self._run
        if self._files.held_version == run.version:
            return
        status = line.status()
        self._accepted_tokens = {entry: kept["accepted_tokens"] for entry, kept in status["entries"].items()}
        wanted = {entry: version if entry == INTERFACE else run.version for entry, version in run.versions.items()}
        held = self._files.hold(run.version, wanted, lambda: _awaited(line.status()), look_up)
        for entry in run.watched:
            if held.get(entry, run.versions[entry]) != run.versions[entry]:
                state = self._files.entry_state(entry)
                run.show(entry, held[entry], state["average"] or state["master"])

    def remember(self) -> None:
        """Read what the files hold, for checkpoints that are written when they are gone."""
        self._remembered = self._read()

    def complete(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return rank 0's state with the parts of all others, or alone where what is held is of another version."""
        parts = self._read() if self._remembered is None else self._remembered
        return {**parts, **state, "workers": {**parts["workers"], **state["workers"]}}

    def _read(self) -> dict[str, Any]:
        version = self._files.held_version
        if version != self._run.version:
            log.warning("checkpoints of version %d hold no state of the other processes", self._run.version)
            return {"workers": {}}
        entries = {entry: self._of_entry(entry) for entry in self._files.held_entries}
        coordinator = standing(version, entries, self._accepted_tokens)
        return {"workers": self._files.worker_states(), **({"coordinator": coordinator} if entries else {})}

    def _of_entry(self, entry: str) -> dict[str, Any]:
        state, merged = self._files.entry_state(entry), self._run.workers.merged
        if state["average"]:
            return state  # the module shows the average, so the master is kept whole
        # In fp32 the module's own tensors are the master.
        wider = {name: tensor for name, tensor in state["master"].items() if tensor.dtype != merged[name].dtype}
        return {**state, "master": wider}


def _awaited(status: Mapping[str, Any]) -> list[int]:
    """Return the workers that were in time in the last round of their block, or are new: they are about to write."""
    live = {int(worker_id): kept["entry"] for worker_id, kept in status["workers"].items() if kept["is_live"]}
    last_round = {entry: kept["last_round"] for entry, kept in status["entries"].items()}
    in_time = {w for w, entry in live.items() if last_round[entry] is None or w in last_round[entry]["accepted"]}
    return sorted(in_time - {0})


def warn_of_fresh_starts(saved: Mapping[str, Any], num_workers: int, num_blocks: int, outer: OuterSGD) -> None:
    """Warn once if a checkpoint of a run in rounds lacks what this run would need to go on as if nothing had happened.

    Args:
        saved: What the checkpoint holds of its run and this one takes over; empty if it is of none.
        num_workers: W, the workers of this run.
        num_blocks: B.
        outer: The outer optimizer.
    """
    if not saved:
        return
    keys = [f"block{w % num_blocks}/replica{w // num_blocks}" for w in range(num_workers)]
    missing = [key for key in keys if key not in saved["workers"]]
    fresh = [f"the optimizer and the random numbers of {', '.join(missing)}"] if missing else []
    if outer.momentum and "coordinator" not in saved:
        fresh.append("the momentum of the outer optimizer")
    if saved.get("has_averages") and "coordinator" not in saved:
        fresh.append("the masters of which its weights are the average")
    if fresh:
        rank_zero_warn(
            f"The checkpoint does not hold {' and '.join(fresh)}, which start afresh. It holds them where a checkpoint"
            " callback wrote it, of the workers that rank 0 had started on its machine."
        )
