"""What the coordinator of the fault harness does.

A file of its own, since it imports no more than the product's coordinator process does: the scenario that restarts one
in a new interpreter measures that. What it sends is listed in ``fault_roles``.
"""

import asyncio
import hashlib
import logging
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.fault_plan import CoordinatorTold
from benchmarks.warm_fleet import ChildPipe
from lightning_blocktrain.coordinator.serve import ServeSettings, serving
from lightning_blocktrain.rounds import RoundReport
from lightning_blocktrain.transport.terms import RunTerms

Founding = tuple[RunTerms, Mapping[str, Mapping[str, Tensor]]]
"""Terms and first masters of a run."""
LINGER_S = 30.0
"""How long the workers have to leave when the run is over."""


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest that two sets of tensors share when they are the same bit for bit."""
    content = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        content.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        content.update(tensor.detach().contiguous().numpy().tobytes())
    return content.hexdigest()[:16]


def begin() -> None:
    """Set up the process of a role."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)  # what goes wrong here is wanted, and recorded
    warnings.simplefilter("ignore")


class ToldReports(deque[RoundReport]):
    """The reports of a coordinator, each told before anybody learns of the close.

    Args:
        pipe: To tell of it on.
        kept: What there is already.
    """

    def __init__(self, pipe: ChildPipe, kept: Iterable[RoundReport], maxlen: int | None) -> None:
        super().__init__(maxlen=maxlen)
        self._pipe = pipe
        for report in kept:
            self.append(report)

    @override
    def append(self, report: RoundReport) -> None:
        counts = {str(verdict): count for verdict, count in report.counts.items()}
        self._pipe.send("report", {**vars(report), "counts": counts})
        super().append(report)


def coordinate(told: CoordinatorTold, pipe: ChildPipe, founding: Founding | None = None) -> None:
    """Be the coordinator of a run, or go on as it.

    Args:
        told: Which run, and where.
        pipe: To tell of it on.
        founding: Of a run that is not stored yet; None: it is.
    """
    begin()
    asyncio.run(_coordinate(told, pipe, founding))


async def _coordinate(told: CoordinatorTold, pipe: ChildPipe, founding: Founding | None) -> None:
    settings = ServeSettings(
        told.run_id, told.token, port=told.port, state_dir=told.state_dir, spool_dir=told.spool_dir
    )
    async with serving(settings, founding) as server:
        service = server.desk.service
        service.reports = ToldReports(pipe, service.reports, service.reports.maxlen)
        pipe.send("listening", server.url)
        await server.wait_for_end(0.0)
        counts: Counter[str] = Counter()
        for ledger in service.ledgers.values():
            counts.update(ledger.state_dict()["counts"])
        pipe.send("masters", {entry: digest(ledger.master) for entry, ledger in service.ledgers.items()}, dict(counts))
        await server.wait_for_end(LINGER_S)
