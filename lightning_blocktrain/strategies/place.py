"""Which process of a run this is, from what started it: a user, rank 0 of a run, torchrun or SLURM.

Owns the order in which these are asked. Starts and opens nothing.
"""

from dataclasses import dataclass

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_blocktrain.errors import explain
from lightning_blocktrain.strategies.cluster import ClusterPlace, Exchange, find_cluster
from lightning_blocktrain.strategies.launcher import Address, Child, given_address, told_child


@dataclass(frozen=True)
class Place:
    """Which process of a run this is.

    Args:
        num_workers: W where it leads, as rank 0; else None.
        child: What rank 0 told it; None: it was not started by one.
        address: Of the run it takes part in; None where it leads, simulates its workers, or finds it by ``cluster``.
        cluster: Its place in a job whose processes torchrun or SLURM has started; None: it is in none.
        passes_over: Whether this Trainer is not one that rank 0 starts processes for, as it did this one: its workers
            are simulated in rank 0.
    """

    num_workers: int | None
    child: Child | None
    address: Address | None
    cluster: ClusterPlace | None = None
    passes_over: bool = False

    @property
    def is_simulated(self) -> bool:
        """Whether all workers are in this process."""
        return self.num_workers is None and self.address is None and self.cluster is None

    @property
    def joins(self) -> bool:
        """Whether it takes part in a run that it was not started for."""
        return self.child is None and self.address is not None

    @property
    def given_rank(self) -> int | None:
        """The worker that it was started as; None: whoever coordinates the run decides."""
        told = self.child or self.cluster
        return None if told is None else told.rank

    @property
    def global_rank(self) -> int:
        """0 in the one process that validates, logs and writes; a process that joins learns its own number later."""
        return int(self.joins) if self.given_rank is None else self.given_rank

    @property
    def local_rank(self) -> int:
        """0 in the one process of a machine that prepares data."""
        if self.cluster is not None:
            return self.cluster.local_rank
        return 0 if self.child is None else self.child.rank


def find_place(
    coordinator: str | None,
    devices: int,
    environment: ClusterEnvironment | None = None,
    num_nodes: int = 1,
    exchange: Exchange = "http",
) -> Place:
    """Find out which process this is; where a URL is given, every process joins that run by itself.

    Args:
        coordinator: URL of the run to join; None: what the environment says.
        devices: Of the Trainer; above 1 they are worker processes.
        environment: Lightning's view of what has started this process; None: a user.
        num_nodes: Of the Trainer.
        exchange: How updates travel.

    Raises:
        ValueError: If there is a URL and no token.
        MisconfigurationException: If the Trainer does not fit the job, or ``exchange`` does not fit a URL or no job.
    """
    child = told_child()
    if child is not None:
        return Place(None, child, child.address, passes_over=devices <= 1)
    address = given_address(coordinator)
    if address is not None:
        if exchange == "collective":
            rule = "exchange='collective' has no coordinator to join"
            fix = "leave out the coordinator and BLOCKTRAIN_COORDINATOR, or use exchange='http'"
            raise MisconfigurationException(explain(rule, f"coordinator={address.url}", fix))
        return Place(None, None, address)
    cluster = find_cluster(environment, devices, num_nodes, exchange)
    if cluster is not None:
        return Place(None if cluster.rank else cluster.num_workers, None, None, cluster)
    return Place(devices if devices > 1 else None, None, None)
