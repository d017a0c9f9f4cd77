"""A worker's module after its run: whole again, for whoever validates or saves it.

Owns the fetch of what was released. A process that ends with its fit does without.
"""

import warnings
from collections.abc import Mapping, Sequence

from lightning_blocktrain.errors import TransportError
from lightning_blocktrain.strategies.workers import SimulatedWorkers
from lightning_blocktrain.transport import Transport

FETCH_TIMEOUT_S = 1.0
"""Every entry has a version at all times: this only bounds a coordinator that says otherwise."""


def make_whole(
    workers: SimulatedWorkers,
    names_of: Mapping[str, Sequence[str]],
    line: Transport | None,
    has_averages: bool = False,
) -> None:
    """Fetch the newest version of the blocks that the module does not hold; call it while no worker acts.

    The blocks may be of different versions. What cannot be had is NaN from then on, and a warning says so: zeros or
    first values would pass for weights. A worker without a base (``SimulatedWorkers.drop_base``) shows its replica
    until then; where its masters cannot be had, that stays.

    Args:
        workers: Of this process.
        names_of: Names of the trained tensors by entry.
        line: To the coordinator; None: there is none any more.
        has_averages: Whether the model is the running averages of the masters, and what this worker trained is to be
            fetched too.
    """
    cause: object = "the line is closed"
    released = _released(workers, names_of)
    others = [entry for entry in names_of if entry not in released]
    for entry in [*released, *(others if has_averages or not workers.holds_base else [])]:
        try:
            fetched = None if line is None else line.fetch(entry, -1, FETCH_TIMEOUT_S, average=True)
        except TransportError as exc:
            cause = exc
            break
        if fetched is not None and entry in released:
            workers.take_back(fetched.params)
        elif fetched is not None:
            workers.show_averages(fetched.params)
    workers.end_training()
    lost = _released(workers, names_of)
    if lost:
        # Not rank_zero_warn: it is silent in every process that joins.
        warnings.warn(
            f"After this fit the module does not hold {', '.join(lost)}: the coordinator could not be asked for them"
            f" ({cause}). Their parameters are NaN; load them from a checkpoint of the run.",
            stacklevel=2,
        )
        workers.fill_released()


def _released(workers: SimulatedWorkers, names_of: Mapping[str, Sequence[str]]) -> list[str]:
    return [entry for entry, names in names_of.items() if not workers.released.isdisjoint(names)]
