"""A run that is taken up again where a checkpoint left it: a coordinator's state folder, written before it starts.

Owns the form in which the coordinator's part of a checkpoint is kept. Owns no process. The coordinator then resumes as
after a crash, so its versions, and with them the rounds that merge the interface, go on counting.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_blocktrain.coordinator.service import CoordinatorService
from lightning_blocktrain.rounds import INTERFACE
from lightning_blocktrain.transport.terms import RunTerms

KEPT_FIELDS = ("buffers", "average", "norms", "arrivals")
"""What of a ledger's state outlives the run in which it was taken: no worker of that run sends anything any more."""


def standing(
    version: int, entries: Mapping[str, Mapping[str, Any]], accepted_tokens: Mapping[str, int]
) -> dict[str, Any]:
    """Return where a run stands; tensors, dicts, lists, str, int and float only.

    Args:
        version: Rounds that every block has closed.
        entries: A ledger's state by entry, or what is left of it; of its master only what the module itself cannot
            hold exactly.
        accepted_tokens: By entry.
    """
    kept = {
        entry: {name: state[name] for name in (*KEPT_FIELDS, "master") if name in state}
        for entry, state in entries.items()
    }
    return {"version": version, "entries": kept, "accepted_tokens": dict(accepted_tokens)}


def store_standing(
    folder: Path,
    run_id: str,
    token: str,
    terms: RunTerms,
    masters: Mapping[str, Mapping[str, Tensor]],
    stands: Mapping[str, Any],
) -> None:
    """Write the state of a run that stands where ``standing`` says, and that nobody has joined yet.

    Args:
        folder: For the coordinator; empty, or not there.
        run_id: Of the run.
        token: Its secret; not written.
        terms: Of the run.
        masters: By entry.
        stands: What ``standing`` returned.

    Raises:
        CheckpointMismatchError: If its tensors are not those of the masters.
        StateError: If the folder holds a run.
    """
    from lightning_blocktrain.coordinator.storage import Storage  # here: it needs a system with file locks

    service = CoordinatorService(run_id, token, terms, masters)
    for entry, ledger in service.ledgers.items():
        version = stands["version"]
        kept = stands["entries"].get(entry, {})
        own = ledger.state_dict()
        ledger.load_state_dict(
            {
                **own,
                **{name: kept[name] for name in KEPT_FIELDS if name in kept},
                "master": {**own["master"], **kept.get("master", {})},
                # By the terms of this run: the last round of the one before may have merged the interface early.
                "version": terms.interface_round(version) if entry == INTERFACE else version,
            }
        )
    service.accepted_tokens.update(stands["accepted_tokens"])
    storage = Storage(folder)
    try:
        states = {entry: ledger.state_dict() for entry, ledger in service.ledgers.items()}
        storage.create(run_id, terms, service.run_state(), states)
    finally:
        storage.close()
