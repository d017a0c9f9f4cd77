"""Late work that counts, and deadlines that follow the arrivals."""

import math

import pytest
import torch

from lightning_blocktrain.rounds import Ledger, OuterSGD, Params, RoundRules, Verdict
from lightning_blocktrain.rounds.history import ARRIVAL_MIN_HISTORY
from lightning_blocktrain.rounds.merge import DEADLINE_SLACK, stale_weight
from tests.rounds.test_ledger import close, make_ledger, make_master, make_params, run_round, same, update_of

STALE = RoundRules(deadline_s=10.0, late="stale_weighted", max_staleness=2)


def one(ledger: Ledger, value: float) -> Params:
    """Return the master with its first tensor moved by a value everywhere."""
    return {**ledger.master, "w": ledger.master["w"] + value}


def test_stale_weight_falls_with_the_square_root_of_the_age() -> None:
    assert [stale_weight(age) for age in (0, 1, 3)] == [1.0, pytest.approx(0.5**0.5), 0.5]


@pytest.mark.parametrize("staleness", [1, 2])
def test_stale_delta_is_moved_onto_the_master_and_counts_with_its_weight(staleness: int) -> None:
    ledger = make_ledger(STALE)
    late = one(ledger, 8.0)
    for _ in range(staleness):
        run_round(ledger, {0: one(ledger, 1.0)})
    master = ledger.master
    ledger.open([0, 1], now=0.0)
    receipt = ledger.submit(update_of(1, 0, late), 1.0)
    assert (receipt.verdict, receipt.version) == (Verdict.ACCEPTED, staleness)
    assert ledger.pending == (0, 1)  # old work does not answer the open round
    ledger.submit(update_of(0, staleness, one(ledger, 2.0)), 2.0)
    report = close(ledger, 10.0)
    assert (report.accepted, report.stale, report.missing, report.accepted_tokens) == ((0,), (1,), (1,), 200)
    weight = stale_weight(staleness)
    expected = master["w"] + (2.0 + 8.0 * weight) / (1.0 + weight)
    # The weight is rounded to 1/1024, and the difference of the two deltas is 6.
    assert torch.allclose(ledger.master["w"], expected, atol=6 / 1024)
    assert int(ledger.master["n"]) == 4


def test_stale_work_alone_makes_a_whole_step() -> None:
    ledger = make_ledger(STALE)
    late = one(ledger, 4.0)
    run_round(ledger, {0: one(ledger, 0.0)})
    before = ledger.master["w"]
    ledger.open([0, 1], now=0.0)
    ledger.submit(update_of(1, 0, late), 1.0)
    report = close(ledger, 10.0)
    assert (report.accepted, report.stale, report.participation, report.merged) == ((), (1,), 0.0, True)
    assert torch.allclose(ledger.master["w"], before + 4.0)


def test_late_and_fresh_update_of_one_worker_both_count_once() -> None:
    ledger = make_ledger(STALE)
    run_round(ledger, {0: make_params(0)})
    ledger.open([0, 1], now=0.0)
    for base in (0, 1, 0, 1):
        ledger.submit(update_of(1, base, one(ledger, 1.0)), 1.0)
    ledger.submit(update_of(0, 1, one(ledger, 1.0)), 1.0)
    report = close(ledger, 1.0)
    assert (report.accepted, report.stale) == ((0, 1), (1,))
    assert report.counts == {Verdict.ACCEPTED: 3, Verdict.DUPLICATE: 2}
    assert ledger.submit(update_of(1, 0), 1.0).verdict is Verdict.DUPLICATE  # also after the round that merged it


def test_stale_update_older_than_the_rules_look_back_is_refused() -> None:
    ledger = make_ledger(STALE)
    for _ in range(3):
        run_round(ledger, {0: make_params(0)})
    assert ledger.submit(update_of(1, 0), 0.0).verdict is Verdict.STALE
    assert ledger.submit(update_of(1, 1), 0.0).verdict is Verdict.ACCEPTED


@pytest.mark.parametrize(("value", "verdict"), [(math.nan, Verdict.NONFINITE), (1e6, Verdict.OUTLIER)])
def test_stale_update_is_judged_as_any_other(value: float, verdict: Verdict) -> None:
    ledger = make_ledger(RoundRules(deadline_s=10.0, late="stale_weighted", outlier_factor=5.0))
    for _ in range(6):
        run_round(ledger, {0: one(ledger, 1.0)})
    late = one(ledger, value)
    run_round(ledger, {0: one(ledger, 1.0)})
    assert ledger.submit(update_of(1, ledger.version - 1, late), 0.0).verdict is verdict


def test_stale_update_is_clipped_by_its_own_base() -> None:
    ledger = make_ledger(RoundRules(deadline_s=10.0, late="stale_weighted", clip_norm=1.0))
    late = one(ledger, 100.0)
    run_round(ledger, {0: one(ledger, 0.5)})
    before = ledger.master["w"]
    ledger.open([0], now=0.0)
    ledger.submit(update_of(1, 0, late), 0.0)
    close(ledger, 10.0)
    assert torch.linalg.vector_norm(ledger.master["w"] - before) == pytest.approx(1.0, rel=1e-4)


def test_stale_state_survives_a_reload() -> None:
    ledger, copy = make_ledger(STALE), make_ledger(STALE)
    late = one(ledger, 3.0)
    run_round(ledger, {0: one(ledger, 1.0)})
    ledger.open([0], now=0.0)
    ledger.submit(update_of(1, 0, late), 0.0)
    copy.load_state_dict(ledger.state_dict())
    for each in (ledger, copy):
        if not each.is_open:
            each.open([0], now=0.0)
        each.submit(update_of(0, 1, one(each, 1.0)), 0.0)
        close(each, 10.0)
    assert same(ledger.master, copy.master)


def test_drop_keeps_no_earlier_master() -> None:
    ledger = make_ledger()
    run_round(ledger, {0: make_params(0)})
    assert ledger.master_of(0) is None
    assert ledger.state_dict()["bases"] == []


def test_late_and_fresh_update_of_one_worker_are_one_replica_for_the_least_number() -> None:
    ledger = make_ledger(RoundRules(deadline_s=10.0, late="stale_weighted", min_replicas=2))
    run_round(ledger, {0: make_params(0), 1: make_params(1)})
    before = ledger.master
    ledger.open([0, 2], now=0.0)
    for base in (0, 1):
        assert ledger.submit(update_of(2, base, one(ledger, 1.0)), 1.0).verdict is Verdict.ACCEPTED
    report = close(ledger, 10.0)
    assert report.note == "nothing merged: 1 accepted, 2 needed"
    assert same(ledger.master, before)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"late": "stale_weighted", "merge": "trimmed_mean"}, "late must be 'drop' with merge='trimmed_mean'"),
        ({"late": "keep"}, "late must be known"),
        ({"max_staleness": 0}, "max_staleness must be an int from 1 to 16"),
        ({"max_staleness": 17}, "max_staleness must be an int from 1 to 16"),
        ({"deadline_quantile": 0.0}, "deadline_quantile must be above 0 and at most 1"),
        ({"deadline_quantile": math.nan}, "deadline_quantile must be above 0 and at most 1"),
        ({"deadline_quantile": "x"}, "deadline_quantile must be above 0 and at most 1; got deadline_quantile='x'"),
        ({"clip_norm": "x"}, "clip_norm must be finite and above 0; got clip_norm='x'"),
        ({"trim_frac": "x"}, "trim_frac must be between 0 and 0.5"),
    ],
)
def test_rules_out_of_range_are_refused(change: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        RoundRules(deadline_s=10.0, **change)  # type: ignore[arg-type]


# Adaptive deadlines


def timed_round(ledger: Ledger, delays: list[float], now: float = 0.0) -> None:
    ledger.open(range(len(delays)), now)
    for worker_id, delay in enumerate(delays):
        ledger.submit(update_of(worker_id, ledger.version), now + delay)
    close(ledger, now + max(delays))


def test_adaptive_deadline_follows_the_quantile_of_the_arrivals() -> None:
    ledger = make_ledger(RoundRules(deadline_s=10.0, deadline_quantile=0.5))
    for _ in range(ARRIVAL_MIN_HISTORY):
        assert ledger.limit_s in (10.0, DEADLINE_SLACK * 2.0)
        timed_round(ledger, [1.0, 2.0, 6.0])
    ledger.open([0], now=100.0)
    assert ledger.deadline == 100.0 + DEADLINE_SLACK * 2.0


def test_adaptive_deadline_is_never_longer_than_deadline_s() -> None:
    ledger = make_ledger(RoundRules(deadline_s=3.0, deadline_quantile=1.0))
    for _ in range(ARRIVAL_MIN_HISTORY):
        timed_round(ledger, [2.9])
    assert ledger.limit_s == 3.0


def test_adaptive_deadline_hears_of_late_arrivals_and_grows_again() -> None:
    ledger = make_ledger(RoundRules(deadline_s=10.0, deadline_quantile=1.0))
    for _ in range(ARRIVAL_MIN_HISTORY):
        timed_round(ledger, [1.0])
    assert ledger.limit_s == DEADLINE_SLACK
    ledger.open([0], now=50.0)
    assert close(ledger, 50.0 + DEADLINE_SLACK).missing == (0,)
    assert ledger.submit(update_of(0, ledger.version - 1), 54.0).verdict is Verdict.LATE
    assert ledger.limit_s == DEADLINE_SLACK * 4.0


def test_adaptive_deadline_is_the_same_after_a_reload() -> None:
    rules = RoundRules(deadline_s=10.0, deadline_quantile=0.9)
    ledger = make_ledger(rules)
    for delay in range(1, 9):
        timed_round(ledger, [delay / 4, delay / 2])
    copy = Ledger("block0", make_master(), rules, OuterSGD(), ledger.roster)
    copy.load_state_dict(ledger.state_dict())
    assert copy.limit_s == ledger.limit_s < 10.0
