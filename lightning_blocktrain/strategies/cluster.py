"""A run whose processes a cluster starts (torchrun, SLURM): which rank this is, and how the ranks find each other.

Owns the ranks, as Lightning's cluster environments tell them, and the store at the job's main address. Starts no
process, and initialises no default process group: with one, the metrics of rank 0's validation would wait for ranks
that do not validate.

The store holds small texts, among them the token of the run: it is as private as the network of the job. What becomes
of a job that has lost a rank is its launcher's to decide: torchrun ends it, ``srun`` with ``--kill-on-bad-exit`` only.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lightning_blocktrain.errors import TransportError, explain

Exchange = Literal["http", "collective"]

LOOPBACK = "127.0.0.1"
POLL_S = 0.05
GROUP_TIMEOUT_S = 1800.0
"""How long a rank waits for the others inside a fit, while rank 0 validates for example; torch's own default."""

_stores: dict[tuple[str, int], Store] = {}


@dataclass(frozen=True)
class ClusterPlace:
    """Which process of a job this is.

    Args:
        rank: 0 to ``num_workers - 1``, over all nodes.
        num_workers: W, the processes of the job.
        local_rank: On its node.
        node_rank: Of its node.
        num_nodes: Of the job.
        main_address: Host of rank 0, as the other nodes reach it.
        main_port: Of the store there.
        exchange: How updates travel.
    """

    rank: int
    num_workers: int
    local_rank: int
    node_rank: int
    num_nodes: int
    main_address: str
    main_port: int
    exchange: Exchange

    @property
    def coordinator_host(self) -> str:
        """Where a coordinator of this job listens: for its own node only, if there is no other."""
        return LOOPBACK if self.num_nodes == 1 else self.main_address


def check_exchange(value: object) -> None:
    """Refuse what is no ``Exchange``.

    Raises:
        ValueError: Naming it.
    """
    if value not in get_args(Exchange):
        raise ValueError(explain("exchange must be 'http' or 'collective'", f"exchange={value!r}", "choose one"))


def find_cluster(
    environment: ClusterEnvironment | None, devices: int, num_nodes: int, exchange: Exchange
) -> ClusterPlace | None:
    """Find out which process of a job this is.

    Args:
        environment: As Lightning detected it, or as the user gave it to the Trainer.
        devices: Of the Trainer: processes per node.
        num_nodes: Of the Trainer.
        exchange: How updates travel.

    Returns:
        None where nobody but this process starts others: without a job, or in a job of one process over HTTP.

    Raises:
        MisconfigurationException: If the job has other processes than the Trainer was told, or ``exchange`` needs a
            job and there is none.
    """
    if environment is None or not _starts_all(environment):
        if exchange == "collective":
            rule = "exchange='collective' needs all processes to start together, by torchrun or SLURM (srun)"
            fix = "start the script with torchrun or srun, or use exchange='http'"
            raise MisconfigurationException(explain(rule, "a process that was started alone", fix))
        return None
    num_workers = environment.world_size()
    if num_workers == 1 and num_nodes == 1 and exchange == "http":
        return None
    if num_workers != devices * num_nodes:
        rule = "devices * num_nodes must be the number of processes that torchrun or SLURM has started"
        got = f"devices={devices}, num_nodes={num_nodes}, processes={num_workers}"
        raise MisconfigurationException(explain(rule, got, "give the Trainer the numbers that the launcher was given"))
    return ClusterPlace(
        rank=environment.global_rank(),
        num_workers=num_workers,
        local_rank=environment.local_rank(),
        node_rank=environment.node_rank(),
        num_nodes=num_nodes,
        main_address=environment.main_address,
        main_port=environment.main_port,
        exchange=exchange,
    )


def _starts_all(environment: ClusterEnvironment) -> bool:
    # Lightning's own calls every process with LOCAL_RANK an external one, and does not know how many there are.
    return environment.creates_processes_externally and not isinstance(environment, LightningEnvironment)


def refuse_default_group() -> None:
    """Refuse a default process group.

    Raises:
        MisconfigurationException: If the script has initialised one: metrics would wait in it for ranks that do not
            validate.
    """
    if distributed.is_available() and distributed.is_initialized():
        rule = "blocktrain must run without a default process group: only rank 0 validates"
        got = "torch.distributed.is_initialized()=True"
        raise MisconfigurationException(explain(rule, got, "leave out init_process_group() in the script"))


class Board:
    """Small texts that the ranks of a job leave for each other in one fit.

    Opens on first use. Every wait is finite and in short slices, so that a signal ends it.

    Args:
        place: Of this process.
        fit_idx: Which fit of the script it is for, the same on every rank.
        join_timeout_s: How long to wait for the store itself.
        store: For tests; None: the one at the job's main address.
    """

    def __init__(self, place: ClusterPlace, fit_idx: int, join_timeout_s: float, store: Store | None = None) -> None:
        self.place = place
        self._fit_idx = fit_idx
        self.join_timeout_s = join_timeout_s
        self._given = store

    @property
    def store(self) -> Store:
        """The part of the job's store that belongs to this fit.

        Raises:
            TransportError: If it cannot be reached.
        """
        whole = _open_store(self.place, self.join_timeout_s) if self._given is None else self._given
        return PrefixStore(f"blocktrain/fit{self._fit_idx}", whole)

    def put(self, name: str, values: Mapping[str, Any]) -> None:
        """Leave plain values under a name."""
        with _naming_place(self.place, name):
            self.store.set(name, json.dumps(values))

    def has(self, name: str) -> bool:
        """Tell whether somebody has left something under a name."""
        with _naming_place(self.place, name):
            return bool(self.store.check([name]))

    def get(self, name: str, timeout_s: float, look_up: Callable[[], None]) -> dict[str, Any]:
        """Return what was left under a name, as soon as it is there.

        Args:
            name: Of the values.
            timeout_s: How long to wait for it.
            look_up: Called in between; what it raises ends the wait.

        Raises:
            TransportError: If it does not come in time, or the store is gone.
        """
        ends_at = time.monotonic() + timeout_s
        while not self.has(name):
            if time.monotonic() > ends_at:
                rule = f"every rank must reach {name!r} within {timeout_s:g} s"
                fix = "look at what the other ranks wrote; the script must reach trainer.fit on every rank"
                raise TransportError(explain(rule, f"nothing on rank {self.place.rank}", fix))
            look_up()
            time.sleep(POLL_S)
        with _naming_place(self.place, name):
            values: dict[str, Any] = json.loads(self.store.get(name))
        return values

    def meet(self, name: str, look_up: Callable[[], None]) -> None:
        """Wait until every rank has called this with the same name, which serves once.

        Raises:
            TransportError: If one does not come.
        """
        with _naming_place(self.place, name):
            num_here = self.store.add(f"{name}/count", 1)
        if num_here == self.place.num_workers:
            self.put(f"{name}/all", {})
        self.get(f"{name}/all", GROUP_TIMEOUT_S, look_up)


@contextmanager
def _naming_place(place: ClusterPlace, name: str) -> Iterator[None]:
    """Re-raise what goes wrong in the store with the rank and what it was doing."""
    try:
        yield
    except TransportError:
        raise
    except RuntimeError as exc:
        raise _unreachable(place, name, exc) from exc


def _unreachable(place: ClusterPlace, name: str, exc: Exception) -> TransportError:
    where = f"{place.main_address}:{place.main_port}"
    rule = f"the job's store at {where} must answer (it ends with rank 0 or its launcher)"
    return TransportError(
        explain(rule, f"rank={place.rank}, at {name!r}: {str(exc)[:200]}", "see the first rank to fail")
    )


def _open_store(place: ClusterPlace, timeout_s: float) -> Store:
    # One per process and job: rank 0 holds the server where the launcher has none, and a port has room for one.
    key = place.main_address, place.main_port
    if key not in _stores:
        os.environ.setdefault("MASTER_ADDR", place.main_address)
        os.environ.setdefault("MASTER_PORT", str(place.main_port))
        with _naming_place(place, "start"):
            found = rendezvous("env://", place.rank, place.num_workers, timeout=timedelta(seconds=timeout_s))
            _stores[key], _, _ = next(found)
    return _stores[key]


def group_device(device: torch.device) -> torch.device:
    """Return where tensors are for an exchange between ranks: NCCL takes a GPU's own, gloo those of the CPU."""
    return device if device.type == "cuda" else torch.device("cpu")
