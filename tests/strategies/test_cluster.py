"""Which rank of a job a process is, from faked environments of torchrun and SLURM, and how ranks leave texts."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import distributed

from lightning_blocktrain import BlockTrainStrategy
from lightning_blocktrain.errors import TransportError
from lightning_blocktrain.strategies import cluster, launcher
from lightning_blocktrain.strategies.block_guard import refuse_few_workers
from lightning_blocktrain.strategies.cluster import Board, ClusterPlace, find_cluster, refuse_default_group
from lightning_blocktrain.strategies.headless import MemberLauncher
from lightning_blocktrain.strategies.job import Job
from lightning_blocktrain.strategies.launcher import Address
from lightning_blocktrain.strategies.place import find_place
from tests.strategies.ranks import nothing, place_of

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job",
    "WORLD_SIZE": "6",
    "RANK": "4",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29501",
}
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "6",
    "SLURM_NTASKS_PER_NODE": "3",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "node[0-1]",
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *SLURM, "BLOCKTRAIN_COORDINATOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launcher, "_told", [])
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # a Trainer in a job sets it for the process


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Any:
    def fake(**changes: str) -> TorchElasticEnvironment:
        for name, value in {**TORCHRUN, **changes}.items():
            monkeypatch.setenv(name, value)
        return TorchElasticEnvironment()

    return fake


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> SLURMEnvironment:
    monkeypatch.setenv("MASTER_PORT", "1")  # monkeypatch then removes what the environment sets
    monkeypatch.setenv("MASTER_ADDR", "")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    return SLURMEnvironment()


def test_find_cluster_of_torchrun_takes_its_ranks_from_the_environment(torchrun: Any) -> None:
    place = find_cluster(torchrun(), devices=3, num_nodes=2, exchange="http")
    assert place == ClusterPlace(4, 6, 1, 1, 2, "node0", 29501, "http")
    assert place.coordinator_host == "node0"


def test_find_cluster_of_slurm_takes_its_ranks_from_the_environment(slurm: SLURMEnvironment) -> None:
    place = find_cluster(slurm, devices=3, num_nodes=2, exchange="collective")
    assert place == ClusterPlace(4, 6, 1, 1, 2, "node0", 15000 + 4567, "collective")


def test_coordinator_of_a_job_on_one_node_is_reached_from_there_only() -> None:
    assert ClusterPlace(0, 2, 0, 0, 1, "node0", 1, "http").coordinator_host == "127.0.0.1"


@pytest.mark.parametrize(("devices", "num_nodes"), [(6, 2), (5, 1)])
def test_find_cluster_refuses_a_trainer_that_was_told_other_numbers(
    torchrun: Any, devices: int, num_nodes: int
) -> None:
    with pytest.raises(MisconfigurationException, match=f"got devices={devices}, num_nodes={num_nodes}, processes=6"):
        find_cluster(torchrun(), devices, num_nodes, "http")


def test_find_cluster_of_one_process_leaves_it_to_start_others_or_to_simulate(torchrun: Any) -> None:
    environment = torchrun(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0", GROUP_RANK="0")
    assert find_cluster(environment, devices=4, num_nodes=1, exchange="http") is None
    place = find_cluster(environment, devices=1, num_nodes=1, exchange="collective")
    assert place is not None and place.num_workers == 1


def test_find_cluster_without_a_job_is_none_even_if_a_local_rank_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert find_cluster(LightningEnvironment(), 2, 1, "http") is None
    assert find_cluster(None, 1, 1, "http") is None
    with pytest.raises(MisconfigurationException, match="by torchrun or SLURM"):
        find_cluster(LightningEnvironment(), 2, 1, "collective")


def test_find_place_in_a_job_rank_0_leads_and_the_others_have_their_ranks(torchrun: Any) -> None:
    other = find_place(None, 3, torchrun(), 2)
    assert (other.num_workers, other.global_rank, other.local_rank, other.given_rank) == (None, 4, 1, 4)
    assert not other.is_simulated and not other.joins
    first = find_place(None, 3, torchrun(RANK="0", LOCAL_RANK="0", GROUP_RANK="0"), 2)
    assert (first.num_workers, first.global_rank, first.is_simulated) == (6, 0, False)


def test_find_place_with_a_url_every_process_of_a_job_joins_by_itself(
    torchrun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKTRAIN_TOKEN", "secret")
    place = find_place("http://h:1", 1, torchrun())
    assert place.joins and place.cluster is None
    with pytest.raises(MisconfigurationException, match="exchange='collective' has no coordinator to join"):
        find_place("http://h:1", 1, torchrun(), exchange="collective")


def test_trainer_in_a_job_of_torchrun_knows_its_ranks(torchrun: Any, make_trainer: Any) -> None:
    torchrun()
    trainer = make_trainer(devices=3, num_nodes=2)
    assert (trainer.global_rank, trainer.local_rank, trainer.node_rank) == (4, 1, 1)
    assert not trainer.is_global_zero
    assert isinstance(trainer.strategy.launcher, MemberLauncher)


def test_trainer_with_nodes_and_nobody_who_starts_processes_is_told_of_torchrun(make_trainer: Any) -> None:
    with pytest.raises(
        MisconfigurationException, match=r"num_nodes must be 1 .* start the script with torchrun or srun"
    ):
        make_trainer(num_nodes=2)


def test_trainer_with_collective_exchange_and_no_job_is_told_of_both(make_trainer: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"by torchrun or SLURM \(srun\)"):
        make_trainer(BlockTrainStrategy(exchange="collective"), devices=2)


def test_trainer_in_a_job_refuses_what_only_simulated_workers_have(torchrun: Any, make_trainer: Any) -> None:
    torchrun()
    with pytest.raises(MisconfigurationException, match="replicas is for simulated workers"):
        make_trainer(BlockTrainStrategy(replicas=2), devices=3, num_nodes=2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"exchange": "mpi"}, "exchange must be 'http' or 'collective'; got exchange='mpi'"),
        ({"codec": "int8"}, "codec must be 'fp32' with exchange='collective'"),
        ({"late": "stale_weighted"}, "late must be 'drop' with exchange='collective'"),
        ({"local_steps": "until_deadline"}, "local_steps must be 'fixed' with exchange='collective'"),
        ({"deadline_quantile": 0.9}, "deadline_quantile must be None with exchange='collective'"),
    ],
)
def test_strategy_with_collective_exchange_refuses_what_needs_a_coordinator(options: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BlockTrainStrategy(**{"exchange": "collective", **options})


def test_fewer_ranks_than_blocks_are_refused() -> None:
    refuse_few_workers(3, 3)
    with pytest.raises(MisconfigurationException, match="got devices=2, num_blocks=3"):
        refuse_few_workers(2, 3)


def test_default_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_default_group()
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    with pytest.raises(MisconfigurationException, match="leave out init_process_group"):
        refuse_default_group()


def boards(num_ranks: int, fit_idx: int = 0, store: Any = None) -> list[Board]:
    store = store or distributed.HashStore()
    return [Board(place_of(rank, num_ranks), fit_idx, 5.0, store) for rank in range(num_ranks)]


def test_board_gives_every_rank_what_one_has_left_in_this_fit_only() -> None:
    store = distributed.HashStore()
    first, second = boards(2, store=store)
    first.put("address", {"url": "http://h:1", "parts": [1, None]})
    assert second.get("address", 1.0, nothing) == {"url": "http://h:1", "parts": [1, None]}
    [other_fit] = boards(1, fit_idx=1, store=store)
    assert not other_fit.has("address")


def test_board_meets_when_all_ranks_have_come() -> None:
    held = boards(3)
    came: list[int] = []

    def come(rank: int) -> None:
        held[rank].meet("setup", nothing)
        came.append(rank)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    assert came == []
    come(0)
    for thread in threads:
        thread.join(10)
    assert sorted(came) == [0, 1, 2]


def test_board_wait_is_finite_names_what_is_missing_and_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    [board] = boards(1)
    monkeypatch.setattr(cluster, "POLL_S", 0.0)
    looks: list[int] = []
    with pytest.raises(TransportError, match=r"every rank must reach 'terms' within 0\.01 s; got nothing on rank 0"):
        board.get("terms", 0.01, lambda: looks.append(1))
    assert looks


def test_board_whose_store_is_gone_says_where_it_was() -> None:
    def gone(*_: object, timeout: object) -> None:
        raise RuntimeError("connection reset")

    board = Board(place_of(1, 2), 0, 5.0, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "rendezvous", gone)
        with pytest.raises(TransportError, match=r"store at 127.0.0.1:1 must answer.*rank=1.*connection reset"):
            board.has("terms")


def test_job_resumes_on_every_rank_from_what_rank_0_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    store = distributed.HashStore()
    monkeypatch.setattr(cluster, "_open_store", lambda *_: store)
    first, other = (Job(place_of(rank, 2), 0, 5.0) for rank in range(2))
    trainer: Any = SimpleNamespace(received_sigterm=True)
    with pytest.raises(SIGTERMException):
        other.agreed_checkpoint(trainer, lambda: None)
    trainer.received_sigterm = False
    assert first.agreed_checkpoint(trainer, lambda: "run/last.ckpt") == "run/last.ckpt"
    assert other.agreed_checkpoint(trainer, lambda: pytest.fail("rank 0 alone looks")) == "run/last.ckpt"
    first.tell(Address("http://h:1", "run", "secret"), {"states": None})
    assert other.told(nothing) == (Address("http://h:1", "run", "secret"), {"states": None})
    first.tell_results([{"best_model_path": "run/best.ckpt"}])
    assert other.told_results(nothing) == [{"best_model_path": "run/best.ckpt"}]
    assert other.is_collective and not other.shares_folders
