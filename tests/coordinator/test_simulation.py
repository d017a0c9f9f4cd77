import io
import math
from collections import Counter
from typing import Any

import pytest
import torch

from lightning_blocktrain.coordinator.network import PARTICIPATION, NetworkModel, WorkerLink, preset_network
from lightning_blocktrain.coordinator.simulation import RoundOutcome, SimulatedCoordinator
from lightning_blocktrain.coordinator.timeline import WorkerRound
from lightning_blocktrain.errors import CheckpointMismatchError
from lightning_blocktrain.rounds import OuterSGD, Params, RoundRules, Verdict

RULES = RoundRules(deadline_s=10.0)
UPDATE_BYTES = 4 * (3 + 2)


def make_masters(num_blocks: int) -> dict[str, Params]:
    masters = {f"block{b}": {"w": torch.full((3,), float(b))} for b in range(num_blocks)}
    return {**masters, "interface": {"e": torch.zeros(2)}}


def make_coordinator(network: NetworkModel, num_blocks: int = 2, **options: Any) -> SimulatedCoordinator:
    return SimulatedCoordinator(
        make_masters(num_blocks),
        [worker_id % num_blocks for worker_id in range(len(network.links))],
        options.pop("rules", RULES),
        options.pop("make_outer", lambda: OuterSGD(lr=0.7, momentum=0.9, nesterov=True)),
        network,
        seed=options.pop("seed", 0),
        **options,
    )


def preset(name: str, num_workers: int) -> NetworkModel:
    return preset_network(name, num_workers, RULES.deadline_s, sync_every=5, update_bytes=UPDATE_BYTES)


def train_round(coordinator: SimulatedCoordinator, final: bool = False) -> RoundOutcome:
    """Let every worker take five made-up steps from the masters and send them."""
    masters, updates = coordinator.masters, []
    for worker_id, block_idx in enumerate(coordinator.block_of_worker):
        generator = torch.Generator().manual_seed(1000 * coordinator.round_idx + worker_id)
        block = {"w": masters[f"block{block_idx}"]["w"] + torch.randn(3, generator=generator)}
        interface = {"e": masters["interface"]["e"] + torch.randn(2, generator=generator)}
        updates.append(WorkerRound(worker_id, 5, 40, block, interface))
    return coordinator.finish_round(updates, final=final)


def bits(coordinator: SimulatedCoordinator) -> list[list[float]]:
    return [tensor.tolist() for entry in coordinator.masters.values() for tensor in entry.values()]


@pytest.mark.parametrize("name", list(PARTICIPATION))
def test_preset_participation_over_200_rounds_is_the_named_figure(name: str) -> None:
    coordinator = make_coordinator(preset(name, 12), num_blocks=3)
    reports = [report for _ in range(200) for report in train_round(coordinator).reports]
    blocks = [report for report in reports if report.entry != "interface"]
    measured = sum(report.participation for report in blocks) / len(blocks)
    # 2,400 draws: three points are three standard errors at 42 %.
    assert measured == pytest.approx(PARTICIPATION[name], abs=0.03)
    assert len(blocks) == 600


def test_lockstep_closes_at_the_slowest_worker_and_accepts_all() -> None:
    network = NetworkModel(tuple(WorkerLink(step_s=step_s) for step_s in (0.1, 0.2, 0.3, 1.5)))
    coordinator = make_coordinator(network)
    outcome = train_round(coordinator)
    closed = {report.entry: report.closed_at for report in outcome.reports}
    assert closed == {"block0": pytest.approx(1.5), "block1": pytest.approx(7.5), "interface": pytest.approx(7.5)}
    assert {given.verdict for receipts in outcome.receipts.values() for given in receipts} == {Verdict.ACCEPTED}
    assert outcome.virtual_s == pytest.approx(7.5)
    assert len(outcome.receipts) == 8


def test_finish_round_merges_the_mean_of_the_replicas() -> None:
    coordinator = make_coordinator(preset("lockstep", 2), num_blocks=1, make_outer=OuterSGD)
    replicas = [WorkerRound(w, 5, 40, {"w": torch.full((3,), 2.0 + w)}, {"e": torch.zeros(2)}) for w in range(2)]
    coordinator.finish_round(replicas)
    assert coordinator.masters["block0"]["w"].tolist() == [2.5, 2.5, 2.5]
    assert coordinator.versions == {"block0": 1, "interface": 1}


def test_blocks_keep_independent_timelines() -> None:
    fast, slow = WorkerLink(step_s=0.1), WorkerLink(step_s=1.0)
    coordinator = make_coordinator(NetworkModel((fast, slow)))
    alone = make_coordinator(NetworkModel((fast, fast)))
    for _ in range(4):
        together, apart = train_round(coordinator), train_round(alone)
        assert together.reports[0] == apart.reports[0]
    assert coordinator.virtual_s["block0"] == pytest.approx(2.0)
    assert coordinator.virtual_s["block1"] == pytest.approx(20.0)


def test_one_worker_100_times_slower_costs_the_others_at_most_the_deadline() -> None:
    normal, slow = WorkerLink(step_s=0.2), WorkerLink(step_s=20.0)
    coordinator = make_coordinator(NetworkModel((normal, normal, slow)), num_blocks=1, interface_every=10)
    for _ in range(5):
        (report,) = train_round(coordinator).reports
        assert report.closed_at - report.opened_at == pytest.approx(10.0)
        assert (report.accepted, report.missing) == ((0, 1), (2,))
        assert report.participation == pytest.approx(2 / 3)


def test_late_updates_are_delivered_in_virtual_order_and_never_merged() -> None:
    links = (WorkerLink(step_s=0.2), WorkerLink(step_s=3.0), WorkerLink(step_s=5.0))
    coordinator = make_coordinator(NetworkModel(links), num_blocks=1, interface_every=100)
    outcomes = [train_round(coordinator) for _ in range(3)]
    late, stale = [[r.verdict for r in outcomes[i].receipts.get((w, "block0"), ())] for i, w in ((1, 1), (2, 2))]
    assert late == [Verdict.LATE]
    assert stale == [Verdict.STALE]
    assert all(outcome.reports[0].accepted == (0,) for outcome in outcomes)
    assert outcomes[1].reports[0].counts == {Verdict.ACCEPTED: 1, Verdict.LATE: 1}


def test_flush_every_update_that_arrives_gets_exactly_one_receipt() -> None:
    coordinator = make_coordinator(preset("wan", 6), interface_every=3)
    given = Counter[tuple[int, str]]()
    outcomes = [train_round(coordinator) for _ in range(9)]
    before, clocks = bits(coordinator), coordinator.virtual_s
    outcomes.append(coordinator.flush())
    assert all(coordinator.virtual_s[entry] >= clocks[entry] for entry in clocks)
    for outcome in outcomes:
        given.update({key: len(receipts) for key, receipts in outcome.receipts.items()})
    blocks = {w: given[(w, f"block{w % 2}")] for w in range(6)}
    assert blocks == dict.fromkeys(range(6), 9)
    assert [given[(w, "interface")] for w in range(6)] == [3] * 6
    assert sum(coordinator.counts.values()) == given.total()
    assert bits(coordinator) == before
    assert coordinator.flush().receipts == {}


def test_offline_masters_never_change_and_every_round_closes_at_its_deadline() -> None:
    coordinator = make_coordinator(preset("offline", 2))
    before = bits(coordinator)
    for round_idx in range(3):
        outcome = train_round(coordinator)
        assert [report.closed_at for report in outcome.reports] == [10.0 * (round_idx + 1)] * 3
        assert not any(report.merged for report in outcome.reports)
    assert bits(coordinator) == before
    assert coordinator.accepted_tokens == 0 and coordinator.worker_steps == 3 * 2 * 5


def test_interface_closes_only_where_due_or_final() -> None:
    coordinator = make_coordinator(preset("lockstep", 2), interface_every=3)
    closes = []
    for round_idx in range(5):
        final = round_idx == 4
        due = coordinator.interface_due(final)
        outcome = train_round(coordinator, final=final)
        assert due is any(report.entry == "interface" for report in outcome.reports)
        closes.append(due)
    assert closes == [False, False, True, False, True]
    assert coordinator.versions == {"block0": 5, "block1": 5, "interface": 2}
    assert outcome.reports[-1].opened_at == outcome.reports[0].opened_at == pytest.approx(20.0)
    assert outcome.reports[-1].expected == (0, 1)


def test_totals_count_merged_tokens_of_blocks_once() -> None:
    coordinator = make_coordinator(preset("lockstep", 4))
    for _ in range(3):
        train_round(coordinator)
    assert coordinator.accepted_tokens == 3 * 4 * 40
    assert coordinator.worker_steps == 3 * 4 * 5


def test_same_seed_gives_bit_identical_masters_and_another_seed_does_not() -> None:
    first, second, other = (make_coordinator(preset("wan", 4), seed=seed) for seed in (1, 1, 2))
    for coordinator in (first, second, other):
        for _ in range(10):
            train_round(coordinator)
    assert bits(first) == bits(second)
    assert bits(first) != bits(other)


def test_durations_do_not_touch_the_global_random_state() -> None:
    coordinator = make_coordinator(preset("wan", 4))
    before = torch.get_rng_state()
    train_round(coordinator)
    assert torch.equal(torch.get_rng_state(), before)


def test_resume_in_mid_run_equals_the_uninterrupted_run_bit_for_bit() -> None:
    plain = make_coordinator(preset("wan", 6), interface_every=2)
    for _ in range(5):
        train_round(plain)
    buffer = io.BytesIO()
    torch.save(plain.state_dict(), buffer)
    buffer.seek(0)
    resumed = make_coordinator(preset("wan", 6), interface_every=2, seed=99)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    for _ in range(7):
        expected, actual = train_round(plain), train_round(resumed)
        assert actual == expected
    assert plain.flush() == resumed.flush()
    assert bits(plain) == bits(resumed)
    assert plain.counts == resumed.counts and plain.accepted_tokens == resumed.accepted_tokens
    assert plain.counts[Verdict.LATE] > 0


def test_resume_with_other_workers_is_refused_with_the_difference() -> None:
    state = make_coordinator(preset("wan", 6)).state_dict()
    with pytest.raises(CheckpointMismatchError, match=r"here block_of_worker=\[0, 1, 0, 1\]"):
        make_coordinator(preset("wan", 4)).load_state_dict(state)


def test_worker_without_an_update_is_missing_and_worker_without_data_is_refused() -> None:
    coordinator = make_coordinator(preset("lockstep", 3), num_blocks=1, interface_every=9)
    block = {"w": torch.ones(3)}
    report = coordinator.finish_round([WorkerRound(0, 5, 40, block), WorkerRound(1, 0, 0, block)]).reports[0]
    assert (report.accepted, report.refused, report.missing) == ((0,), (1,), (2,))
    assert report.closed_at == 10.0


def test_coordinator_without_interface_runs_blocks_alone() -> None:
    masters = {"block0": {"w": torch.zeros(3)}}
    coordinator = SimulatedCoordinator(masters, [0], RULES, OuterSGD, preset("lockstep", 1), seed=0)
    outcome = coordinator.finish_round([WorkerRound(0, 5, 40, {"w": torch.ones(3)})], final=True)
    assert [report.entry for report in outcome.reports] == ["block0"]


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ([WorkerRound(0, 1, 1, {}, {}), WorkerRound(0, 1, 1, {}, {})], "name each known worker at most once"),
        ([WorkerRound(2, 1, 1, {}, {})], "name each known worker at most once"),
        ([WorkerRound(0, -1, 1, {}, {})], "num_steps must be at least 0"),
        ([WorkerRound(0, 1, 1, {})], "interface_params must be given"),
    ],
)
def test_finish_round_bad_updates_are_refused_before_anything_moves(updates: list[WorkerRound], message: str) -> None:
    coordinator = make_coordinator(preset("lockstep", 2))
    with pytest.raises(ValueError, match=message):
        coordinator.finish_round(updates)
    assert coordinator.versions == {"block0": 0, "block1": 0, "interface": 0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"masters": {"block1": {}}}, "without a gap"),
        ({"masters": {"interface": {}}}, "without a gap"),
        ({"block_of_worker": [0, 0]}, "give every block at least one worker"),
        ({"block_of_worker": [0, 2]}, "name no other block"),
        ({"block_of_worker": [0, 1, 1]}, "network must have one link per worker; got num_links=2, num_workers=3"),
        ({"interface_every": 0}, "interface_every must be at least 1"),
        ({"rules": RoundRules(deadline_s=1.0, merge="trimmed_mean")}, "needs 3 replicas; got num_replicas=1"),
    ],
)
def test_coordinator_arguments_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "masters": make_masters(2),
        "block_of_worker": [0, 1],
        "rules": RULES,
        "make_outer": OuterSGD,
        "network": preset("lockstep", 2),
        "seed": 0,
    }
    with pytest.raises(ValueError, match=message):
        SimulatedCoordinator(**(arguments | changes))


def test_lost_update_is_missing_and_gets_no_receipt() -> None:
    network = NetworkModel((WorkerLink(step_s=0.1), WorkerLink(step_s=0.1, dropout=1.0)))
    outcome = train_round(make_coordinator(network, num_blocks=1))
    assert set(outcome.receipts) == {(0, "block0"), (0, "interface")}
    assert outcome.reports[0].missing == (1,)
    assert math.isfinite(outcome.virtual_s)


# Deadlines that waste little


STALE = RoundRules(deadline_s=10.0, late="stale_weighted")


def test_stale_weighted_late_work_counts_in_the_round_in_which_it_arrives() -> None:
    links = (WorkerLink(step_s=0.2), WorkerLink(step_s=3.0))
    network, options = NetworkModel(links), {"num_blocks": 1, "interface_every": 100, "make_outer": OuterSGD}
    coordinator = make_coordinator(network, rules=STALE, **options)
    start = coordinator.masters["block0"]["w"]
    first, second = train_round(coordinator), train_round(coordinator)
    assert [report.stale for report in (*first.reports, *second.reports)] == [(), (1,)]
    assert coordinator.counts == {Verdict.ACCEPTED: 3}
    deltas = [torch.randn(3, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1, 1000)]
    weight = 2**-0.5
    expected = start + deltas[0] + (deltas[2] + weight * deltas[1]) / (1 + weight)
    assert torch.allclose(coordinator.masters["block0"]["w"], expected, atol=0.01)  # it is rounded to 1/1024


def test_stale_weighted_resume_equals_the_uninterrupted_run_bit_for_bit() -> None:
    whole, half = (make_coordinator(preset("wan", 6), rules=STALE) for _ in range(2))
    for _ in range(3):
        train_round(half)
    stored = io.BytesIO()
    torch.save(half.state_dict(), stored)
    stored.seek(0)
    resumed = make_coordinator(preset("wan", 6), rules=STALE, seed=9)
    resumed.load_state_dict(torch.load(stored, weights_only=True))
    for coordinator, num_rounds in ((whole, 8), (resumed, 5)):
        outcomes = [train_round(coordinator) for _ in range(num_rounds)]
    assert bits(resumed) == bits(whole)
    assert any(report.stale for report in outcomes[-1].reports)


def test_stale_weighted_merges_more_of_the_work_than_dropping_it() -> None:
    merged = {}
    for late in ("drop", "stale_weighted"):
        coordinator = make_coordinator(preset("wan", 6), rules=RoundRules(deadline_s=10.0, late=late))
        for _ in range(30):
            train_round(coordinator)
        merged[late] = coordinator.accepted_tokens / (30 * 6 * 40)
    assert merged["drop"] == pytest.approx(PARTICIPATION["wan"], abs=0.15)
    assert merged["stale_weighted"] > 0.9


def test_steps_in_time_let_a_slow_worker_be_in_time() -> None:
    links = (WorkerLink(step_s=0.2), WorkerLink(step_s=3.0, latency_s=0.5))
    coordinator = make_coordinator(NetworkModel(links), num_blocks=1, interface_every=100)
    steps = [coordinator.steps_in_time(worker_id, 5) for worker_id in range(2)]
    assert steps == [5, 2]  # 10 s are left after 1.5 times the transfer of 1 s
    params = coordinator.masters["block0"]
    updates = [WorkerRound(w, num_steps, 8 * num_steps, params) for w, num_steps in enumerate(steps)]
    (report,) = coordinator.finish_round(updates).reports
    assert report.accepted == (0, 1)
    assert report.accepted_tokens == 56


def test_steps_in_time_may_be_asked_for_or_not_without_changing_the_run() -> None:
    asked, not_asked = (make_coordinator(preset("wan", 6)) for _ in range(2))
    for _ in range(4):
        for worker_id in range(6):
            assert 1 <= asked.steps_in_time(worker_id, 5) <= 5
        train_round(asked)
        train_round(not_asked)
    assert bits(asked) == bits(not_asked)


def test_adaptive_deadline_closes_rounds_sooner_when_a_worker_is_lost() -> None:
    links = (*(WorkerLink(step_s=0.2) for _ in range(3)), WorkerLink(step_s=0.2, dropout=1.0))
    closed = {}
    for quantile in (None, 0.9):
        rules = RoundRules(deadline_s=10.0, deadline_quantile=quantile)
        coordinator = make_coordinator(NetworkModel(links), num_blocks=1, rules=rules, interface_every=100)
        reports = [report for _ in range(10) for report in train_round(coordinator).reports]
        closed[quantile] = reports[-1].closed_at - reports[-1].opened_at
        assert reports[-1].accepted == (0, 1, 2)
    assert closed == {None: pytest.approx(10.0), 0.9: pytest.approx(1.25)}


def test_encoded_updates_take_less_time_on_the_way() -> None:
    link = WorkerLink(step_s=0.0, bandwidth_bytes_per_s=UPDATE_BYTES)
    whole, quarter = (
        make_coordinator(NetworkModel((link,)), num_blocks=1, upload_frac=upload_frac) for upload_frac in (1.0, 0.25)
    )
    assert train_round(whole).reports[0].closed_at == pytest.approx(2.0)
    assert train_round(quarter).reports[0].closed_at == pytest.approx(1.25)
