"""A run without a coordinator: what the ranks agree on, and how they end, in one process and without Lightning."""

from typing import Any

import pytest
import torch
from torch import distributed

from lightning_blocktrain.errors import RequestRefusedError, RunEndedError, RunFailedError, TransportError
from lightning_blocktrain.partition import partition as cut
from lightning_blocktrain.rounds import INTERFACE, RoundRules, Verdict
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.strategies.block_guard import declared_layout
from lightning_blocktrain.strategies.process_groups import ProcessGroups
from lightning_blocktrain.strategies.simulated_run import SimulatedRun
from lightning_blocktrain.strategies.worker_run import WorkerRun, masters_of
from lightning_blocktrain.transport import Submission, WorkerFacts
from tests.strategies.conftest import assert_same, seeded
from tests.strategies.ranks import Ranks, ranks, runs_of
from tests.strategies.test_worker_run import (
    BLOCKS,
    OUTER,
    REPLICAS,
    SEED,
    SYNC_EVERY,
    LookingAhead,
    OnFrozenPrefix,
    OnFrozenStem,
    ThreeBlocks,
    batches,
    learn,
    settings,
    terms,
)

NUM_RANKS = BLOCKS * REPLICAS
TRIMMED = RoundRules(deadline_s=50.0, merge="trimmed_mean")


def take_step(modules: Any, runs: list[WorkerRun], optimizers: Any, rank: int, batch: Any) -> None:
    run = runs[rank]
    learn(modules[rank], run.workers, run.worker, optimizers[rank], batch)
    run.count_batch(run.worker, batch[1].numel())
    run.worker.num_steps += 1
    run.steps_in_round += 1


def adamw(modules: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(module.parameters(), lr=0.05) for module in modules]


@pytest.mark.parametrize(
    ("make", "interface_every", "rules", "num_ranks", "prefix"),
    [
        (ThreeBlocks, 1, RoundRules(deadline_s=50.0), 6, {}),
        (OnFrozenPrefix, 2, RoundRules(deadline_s=50.0, clip_norm=0.2, average_decay=0.9), 6, {}),
        (OnFrozenStem, 1, RoundRules(deadline_s=50.0), 6, {"prefix_every": 3, "prefix_codec": Codec("int8", block=16)}),
        (OnFrozenPrefix, 1, RoundRules(deadline_s=50.0), 6, {"prefix_every": 2, "prefix_codec": Codec("fp32")}),
        (LookingAhead, 1, RoundRules(deadline_s=50.0, average_decay=0.5), 6, {"prefix_every": 2}),
        (ThreeBlocks, 2, RoundRules(deadline_s=50.0, outlier_factor=1.5, min_replicas=2), 6, {}),
        (OnFrozenPrefix, 1, RoundRules(50.0, outlier_factor=1.5, min_replicas=2, average_decay=0.9), 6, {}),
        (ThreeBlocks, 1, TRIMMED, 9, {}),
    ],
)
def test_collective_run_equals_the_simulator_bit_for_bit(
    make: type[ThreeBlocks], interface_every: int, rules: RoundRules, num_ranks: int, prefix: dict[str, Any]
) -> None:
    num_rounds = 5 if prefix else 4
    data = list(batches(num_ranks * SYNC_EVERY * num_rounds))
    module = seeded(make)
    options = {"replicas": num_ranks // BLOCKS, "interface_every": interface_every, "rules": rules, **prefix}
    options["average_decay"] = rules.average_decay
    parts = cut(module, declared_layout(module), BLOCKS)
    simulated = SimulatedRun(module, parts, settings(**options), SEED)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    torch.manual_seed(4)
    for step in range(SYNC_EVERY * num_rounds):
        for worker in simulated.workers:
            batch = data[step * num_ranks + worker.worker_id]
            learn(module, simulated.workers, worker, optimizer, batch)
            simulated.count_batch(worker, batch[1].numel())
        simulated.finish_step(last=step + 1 == SYNC_EVERY * num_rounds)

    agreed = terms(num_ranks, interface_every=interface_every, rules=rules, max_rounds=num_rounds, **prefix)
    with ranks(num_ranks, read_by=parts.read_by) as opened:
        modules, runs = runs_of(opened, make, agreed, settings(), SEED)
        optimizers = adamw(modules)
        torch.manual_seed(4)
        for step in range(SYNC_EVERY * num_rounds):
            for rank in range(num_ranks):
                take_step(modules, runs, optimizers, rank, data[step * num_ranks + rank])
            if (step + 1) % SYNC_EVERY == 0:
                assert opened.all(lambda rank: runs[rank].finish_round()) == [None] * num_ranks
        assert_same(dict(modules[0].state_dict()), dict(module.state_dict()))
        ended = opened.all(lambda rank: (runs[rank].make_whole(), opened.lines[rank].leave()))
        assert ended == [(None, None)] * num_ranks
        for other in modules[1:]:
            assert_same(dict(other.state_dict()), dict(module.state_dict()))
    tally = runs[0].tally
    assert (tally.accepted_tokens, tally.num_rounds_closed) == (simulated.tally.accepted_tokens, num_rounds)
    expected = {report.entry: report for report in simulated.tally.round_reports}
    for report in tally.round_reports:
        known = expected[report.entry]
        assert (report.accepted, report.counts, report.note) == (known.accepted, known.counts, known.note)
        assert report.merged_delta_norm == pytest.approx(known.merged_delta_norm, rel=1e-12)
        assert report.accepted_steps == known.accepted_steps
    assert {report.entry for report in tally.round_reports} == expected.keys()


@pytest.fixture
def three() -> Any:
    with ranks(3) as opened:
        yield opened, *runs_of(opened, ThreeBlocks, terms(3), settings(), SEED)


def test_collective_run_starts_from_rank_0s_masters_whatever_a_ranks_seed_was() -> None:
    with ranks(4) as opened:
        modules = [seeded(ThreeBlocks) for _ in range(4)]
        torch.manual_seed(99)
        modules[3] = ThreeBlocks()
        first = dict(modules[0].state_dict())
        agreed = terms(4)
        parts = [cut(module, declared_layout(module), BLOCKS) for module in modules]
        welcomes = opened.join(agreed, masters_of(modules[0], parts[0]))
        runs = [
            WorkerRun(m, p, settings(), r, r % BLOCKS, SEED, r == 0)
            for r, (m, p) in enumerate(zip(modules, parts, strict=True))
        ]
        opened.all(lambda rank: runs[rank].begin(opened.lines[rank], welcomes[rank]))
        local = runs[3].worker.local
        assert_same(local, {name: first[name] for name in local})


def test_collective_run_replica_with_nan_is_left_out_and_told(three: Any) -> None:
    opened, modules, runs = three
    optimizers = adamw(modules)
    for rank, batch in enumerate(batches(3)):
        take_step(modules, runs, optimizers, rank, batch)
    before = dict(opened.lines[1].fetch("block1").params)
    runs[1].worker.local["layers.1.linear.bias"].fill_(float("nan"))
    with pytest.warns(UserWarning, match="block1 does not count .nonfinite"):
        opened.all(lambda rank: runs[rank].finish_round())
    assert_same(dict(opened.lines[1].fetch("block1").params), before)
    assert opened.lines[0].status()["entries"]["block1"]["last_round"]["refused"] == (1,)
    assert opened.lines[0].status()["entries"]["block0"]["last_round"]["accepted"] == (0,)
    assert torch.isfinite(runs[1].worker.local["layers.1.linear.bias"]).all()
    shown = modules[0].state_dict()
    assert_same({name: shown[name] for name in before}, before)


def test_collective_run_rank_0_that_stops_inside_a_round_counts_with_what_it_has(three: Any) -> None:
    opened, modules, runs = three
    optimizers, data = adamw(modules), batches(5)
    take_step(modules, runs, optimizers, 0, next(data))
    for rank in (1, 2):
        take_step(modules, runs, optimizers, rank, next(data))
        take_step(modules, runs, optimizers, rank, next(data))

    def act(rank: int) -> None:
        if rank == 0:
            runs[0].finish()
            opened.lines[0].stop("early")
        else:
            runs[rank].finish_round()
            runs[rank].finish_round()  # rank 0 is not there any more
            opened.lines[rank].leave()

    assert opened.all(act) == [None] * 3
    assert [run.ended for run in runs] == [False, True, True]
    entries = opened.lines[0].status()["entries"]
    assert entries["block0"]["last_round"]["accepted_steps"] == 1
    assert [entries[f"block{b}"]["version"] for b in range(3)] == [1, 1, 1]
    assert opened.lines[0].status()["phase"] == "stopped"
    with pytest.raises(RunEndedError):
        opened.lines[1].submit("block1", Submission(base_version=1, num_steps=1, num_tokens=1, tensors={}))


def test_scenario_31_collective_rank_out_of_data_leaves_and_the_others_go_on(three: Any) -> None:
    opened, modules, runs = three
    optimizers = adamw(modules)
    for rank, batch in enumerate(batches(3)):
        take_step(modules, runs, optimizers, rank, batch)

    def act(rank: int) -> None:
        runs[rank].finish_round()
        if rank == 1:
            opened.lines[1].leave()
            return
        for _ in range(2):
            runs[rank].worker.num_steps, runs[rank].worker.num_tokens = 1, 4
            runs[rank].worker.local["embed.weight"].add_(1.0)
            runs[rank].finish_round()
        runs[rank].make_whole()
        opened.lines[rank].stop("") if rank == 0 else opened.lines[rank].leave()

    assert opened.all(act) == [None] * 3
    entries = opened.lines[0].status()["entries"]
    assert [entries[f"block{b}"]["version"] for b in range(3)] == [3, 3, 3]
    assert entries["block1"]["last_round"]["note"] == "nothing merged: 0 accepted, 1 needed"
    assert entries[INTERFACE]["last_round"]["expected"] == (0, 2)
    own = [runs[rank].worker.local["embed.weight"] for rank in (0, 2)]
    assert torch.equal(own[0], own[1])
    assert torch.equal(modules[2].state_dict()["layers.1.linear.bias"], modules[0].state_dict()["layers.1.linear.bias"])


def test_collective_run_another_model_on_a_rank_is_refused_by_name() -> None:
    with ranks(3) as opened:
        module = seeded(ThreeBlocks)
        agreed = terms(3, identity={"model": "one"})
        opened.lines[0].found(agreed, masters_of(module, cut(module, declared_layout(module), BLOCKS)))
        with pytest.raises(RequestRefusedError, match="rank 1 must train rank 0's model in its way; got model: here="):
            opened.lines[1].join(WorkerFacts(1, identity={**agreed.full_identity, "model": "other"}))


def test_collective_run_waits_for_all_ranks_and_names_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(3) as opened:
        module = seeded(ThreeBlocks)
        agreed = terms(3, join_timeout_s=5.0)
        opened.lines[0].found(agreed, masters_of(module, cut(module, declared_layout(module), BLOCKS)))
        for rank in (0, 2):
            opened.lines[rank].join(WorkerFacts(rank, identity=agreed.full_identity))
        assert opened.lines[0].status()["phase"] == "waiting"
        monkeypatch.setattr("lightning_blocktrain.strategies.collective_run.time.monotonic", lambda: float("inf"))
        with pytest.raises(RunFailedError, match=r"all ranks must join within join_timeout_s; got missing ranks=\[1\]"):
            opened.lines[0].status()


def test_collective_run_rank_that_dies_is_an_error_for_the_others_not_a_hang(three: Any) -> None:
    opened, modules, runs = three
    for rank, batch in enumerate(batches(3)):
        take_step(modules, runs, adamw(modules), rank, batch)

    def act(rank: int) -> None:
        if rank == 2:
            opened.lines[2].close()  # the sockets close, as they do when a process ends
        else:
            runs[rank].finish_round()

    results = opened.all(act)
    assert results[2] is None
    for result in results[:2]:
        assert isinstance(result, TransportError)
        assert "must take part" in str(result)


def test_collective_run_wait_ends_when_a_look_up_raises() -> None:
    class Signalled(Exception):
        pass

    signalled: list[bool] = []

    def look_up() -> None:
        if signalled:
            raise Signalled

    with ranks(3, look_up=look_up) as opened:
        _, runs = runs_of(opened, ThreeBlocks, terms(3), settings(), SEED)

        def act(rank: int) -> None:
            if rank == 2:
                signalled.append(True)
            else:
                runs[rank].finish_round()

        results = opened.all(act)
    assert [type(result) for result in results[:2]] == [Signalled, Signalled]


def test_collective_run_beginning_ends_when_a_look_up_raises_though_a_rank_never_comes() -> None:
    class Signalled(Exception):
        pass

    def look_up() -> None:
        raise Signalled

    groups = ProcessGroups(distributed.HashStore(), 0, torch.device("cpu"), 2.0, look_up)
    with pytest.raises(Signalled):
        groups.open("world", [0, 1])
    groups.close()


def test_process_group_without_a_member_is_an_error_when_its_time_is_up() -> None:
    looks: list[int] = []
    groups = ProcessGroups(distributed.HashStore(), 0, torch.device("cpu"), 0.2, lambda: looks.append(1))
    with pytest.raises(TransportError, match=r"all ranks of group 'world' \[0, 1\] must take part"):
        groups.open("world", [0, 1])
    assert looks


def test_collective_line_knows_the_verdict_of_every_rank() -> None:
    rules = RoundRules(deadline_s=50.0, min_replicas=2)
    with ranks(4) as opened:
        agreed = terms(4, num_blocks=2, rules=rules, outer=OUTER)
        masters = {"block0": {"a": torch.zeros(3)}, "block1": {"b": torch.zeros(2)}}
        opened.join(agreed, masters)
        opened.all(lambda rank: opened.lines[rank].fetch(f"block{rank % 2}"))
        values = [1.0, 1.0, 3.0, float("nan")]

        def act(rank: int) -> Verdict:
            name, size = ("a", 3) if rank % 2 == 0 else ("b", 2)
            sent = {name: torch.full((size,), values[rank])}
            update = Submission(base_version=0, num_steps=1, num_tokens=2, tensors=sent)
            return opened.lines[rank].submit(f"block{rank % 2}", update).verdict

        assert opened.all(act) == [Verdict.ACCEPTED, Verdict.ACCEPTED, Verdict.ACCEPTED, Verdict.NONFINITE]
        merged = opened.lines[2].fetch("block0")
        assert merged is not None and merged.version == 1
        assert torch.allclose(merged.params["a"], torch.full((3,), 0.7 * 2.0))
        unmerged = opened.lines[1].fetch("block1")
        assert unmerged is not None and unmerged.version == 1 and not unmerged.params["b"].any()
        status = opened.lines[0].status()["entries"]["block1"]
        assert status["last_round"]["note"] == "nothing merged: 1 accepted, 2 needed"
        assert not opened.lines[0].dismiss(1)


def test_ranks_that_never_begin_close_without_harm() -> None:
    opened = Ranks(2)
    opened.close()
    opened.close()
    with pytest.raises(TransportError, match="closed"):
        opened.lines[0].fetch("block0")
