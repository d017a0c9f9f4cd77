import io
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_blocktrain.errors import CheckpointMismatchError, LedgerError
from lightning_blocktrain.rounds import Ledger, OuterSGD, Params, Roster, RoundReport, RoundRules, Update, Verdict
from lightning_blocktrain.rounds.history import OUTLIER_MIN_HISTORY, OUTLIER_WINDOW

RULES = RoundRules(deadline_s=10.0)


def make_master() -> Params:
    return {"w": torch.tensor([0.1, -2.0, 3e-8]), "n": torch.tensor(4)}


def make_roster(num_workers: int = 3) -> Roster:
    roster = Roster("run", "s3cret")
    for worker_id in range(num_workers):
        roster.join(worker_id, 1)
    return roster


def make_ledger(rules: RoundRules = RULES, roster: Roster | None = None, **options: Any) -> Ledger:
    return Ledger("block0", make_master(), rules, options.pop("outer", OuterSGD()), roster or make_roster(), **options)


def make_params(seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(3, generator=generator), "n": torch.tensor(5)}


def update_of(worker_id: int = 0, base: int = 0, params: Mapping[str, Tensor] | None = None, **changes: Any) -> Update:
    fields: dict[str, Any] = {
        "run_id": "run",
        "token": "s3cret",
        "worker_id": worker_id,
        "incarnation": 1,
        "base_version": base,
        "num_steps": 4,
        "num_tokens": 100,
        "params": make_params(worker_id) if params is None else params,
    }
    return Update(**(fields | changes))


def close(ledger: Ledger, now: float) -> RoundReport:
    report = ledger.close_if_due(now)
    assert report is not None
    return report


def run_round(ledger: Ledger, replicas: dict[int, Params], now: float = 0.0) -> RoundReport:
    ledger.open(replicas, now)
    for worker_id, params in replicas.items():
        ledger.submit(update_of(worker_id, ledger.version, params), now)
    return close(ledger, now)


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# Opening and closing


def test_close_all_early_does_not_wait_for_the_deadline() -> None:
    ledger = make_ledger()
    ledger.open([0, 1], now=100.0)
    ledger.submit(update_of(0), now=101.0)
    assert ledger.close_if_due(101.0) is None
    ledger.submit(update_of(1), now=102.0)
    report = close(ledger, 102.0)
    assert (report.opened_at, report.closed_at) == (100.0, 102.0)
    assert (report.accepted, report.missing, report.participation) == ((0, 1), (), 1.0)


def test_close_at_deadline_merges_the_others_and_names_the_missing() -> None:
    ledger = make_ledger()
    ledger.open([0, 1, 2], now=0.0)
    ledger.submit(update_of(2), now=1.0)
    ledger.submit(update_of(0), now=2.0)
    assert ledger.deadline == 10.0
    assert ledger.close_if_due(9.999) is None
    report = close(ledger, 10.0)
    assert (report.accepted, report.missing) == ((0, 2), (1,))
    expected = (make_params(0)["w"] + make_params(2)["w"]) / 2
    assert torch.equal(ledger.master["w"], expected)
    assert report.participation == pytest.approx(2 / 3)


def test_close_one_worker_master_equals_its_params_bit_for_bit() -> None:
    ledger = make_ledger()
    for round_idx in range(5):
        params = make_params(round_idx)
        report = run_round(ledger, {0: params})
        assert same(ledger.master, params)
        assert (report.accepted_tokens, report.accepted_steps) == (100, 4)


def test_close_any_arrival_order_gives_same_bits() -> None:
    replicas = {worker_id: make_params(worker_id) for worker_id in range(3)}
    forward, backward = make_ledger(), make_ledger()
    run_round(forward, replicas)
    run_round(backward, dict(reversed(replicas.items())))
    assert same(forward.master, backward.master)


def test_close_nothing_accepted_bumps_version_and_keeps_master() -> None:
    ledger = make_ledger()
    ledger.open([0], now=0.0)
    report = close(ledger, 10.0)
    assert (report.version, report.merged, report.accepted_tokens) == (1, False, 0)
    assert "0 accepted, 1 needed" in report.note
    assert same(ledger.master, make_master())
    ledger.open([0], now=10.0)
    assert ledger.submit(update_of(0, base=0), now=11.0).verdict is Verdict.LATE


def test_close_refused_for_its_values_counts_as_answered() -> None:
    ledger = make_ledger()
    ledger.open([0, 1], now=0.0)
    ledger.submit(update_of(0, num_tokens=0), now=1.0)
    ledger.submit(update_of(1), now=1.0)
    report = close(ledger, 1.0)
    assert (report.accepted, report.refused, report.missing) == ((1,), (0,), ())
    assert report.counts == {Verdict.MALFORMED: 1, Verdict.ACCEPTED: 1}


def test_close_stranger_or_old_base_does_not_answer_the_round() -> None:
    ledger = make_ledger()
    run_round(ledger, {0: make_params(0)})
    ledger.open([0], now=1.0)
    ledger.submit(update_of(0, base=1, token="wrong"), now=2.0)
    ledger.submit(update_of(0, base=7), now=2.0)
    assert ledger.pending == (0,)
    assert ledger.close_if_due(2.0) is None


def test_close_worker_that_left_is_not_waited_for() -> None:
    roster = make_roster()
    ledger = make_ledger(roster=roster)
    ledger.open([0, 1], now=0.0)
    ledger.submit(update_of(0), now=1.0)
    roster.leave(1, 1)
    assert close(ledger, 1.0).missing == (1,)


def test_open_nobody_expected_stays_open_until_the_deadline() -> None:
    ledger = make_ledger()
    ledger.open([], now=0.0)
    assert ledger.close_if_due(9.0) is None
    assert close(ledger, 10.0).participation == 0.0


def test_open_twice_is_an_error() -> None:
    ledger = make_ledger()
    ledger.open([0], now=0.0)
    with pytest.raises(LedgerError, match="open needs the previous round closed; got entry=block0"):
        ledger.open([0], now=1.0)


def test_open_unknown_worker_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"expected workers must have joined; got unknown workers=\[9\]"):
        make_ledger().open([0, 9], now=0.0)


def test_open_nonfinite_clock_is_an_error() -> None:
    with pytest.raises(ValueError, match="now must be finite"):
        make_ledger().open([0], now=math.nan)


def test_close_without_open_round_is_none() -> None:
    assert make_ledger().close_if_due(1e9) is None


def test_close_worker_that_joined_in_mid_round_counts_without_being_expected() -> None:
    roster = make_roster(1)
    ledger = make_ledger(roster=roster)
    ledger.open([0], now=0.0)
    roster.join(1, 1)
    assert ledger.submit(update_of(1), now=1.0).verdict is Verdict.ACCEPTED
    assert ledger.close_if_due(1.0) is None
    ledger.submit(update_of(0), now=2.0)
    report = close(ledger, 2.0)
    assert (report.expected, report.accepted, report.participation) == ((0,), (0, 1), 1.0)


def test_submit_between_rounds_counts_in_the_round_to_come() -> None:
    ledger = make_ledger()
    assert ledger.submit(update_of(0), now=0.0).verdict is Verdict.ACCEPTED
    ledger.open([0], now=5.0)
    report = close(ledger, 5.0)
    assert (report.accepted, report.counts) == ((0,), {Verdict.ACCEPTED: 1})


# Verdicts


def test_submit_after_close_is_late_and_told_the_new_version() -> None:
    ledger = make_ledger()
    ledger.open([0, 1], now=0.0)
    ledger.submit(update_of(0), now=1.0)
    close(ledger, 10.0)
    before = ledger.master
    receipt = ledger.submit(update_of(1, base=0), now=10.5)
    assert (receipt.verdict, receipt.version) == (Verdict.LATE, 1)
    ledger.open([0, 1], now=11.0)
    report = close(ledger, 21.0)
    assert report.counts == {Verdict.LATE: 1}
    assert same(ledger.master, before)


def test_submit_after_the_deadline_of_an_open_round_is_late() -> None:
    ledger = make_ledger()
    ledger.open([0, 1], now=0.0)
    assert ledger.submit(update_of(0), now=10.0).verdict is Verdict.ACCEPTED
    assert ledger.submit(update_of(1), now=10.1).verdict is Verdict.LATE
    assert close(ledger, 10.1).accepted == (0,)


def test_submit_older_base_is_stale() -> None:
    ledger = make_ledger()
    for _ in range(2):
        run_round(ledger, {0: make_params(0)})
    assert ledger.submit(update_of(1, base=0), now=0.0).verdict is Verdict.STALE


def test_submit_twice_is_duplicate_and_merged_once() -> None:
    ledger = make_ledger()
    ledger.open([0, 1], now=0.0)
    verdicts = [ledger.submit(update_of(w), now=1.0).verdict for w in (0, 0, 1)]
    assert verdicts == [Verdict.ACCEPTED, Verdict.DUPLICATE, Verdict.ACCEPTED]
    report = close(ledger, 1.0)
    assert report.accepted_tokens == 200
    assert torch.equal(ledger.master["w"], (make_params(0)["w"] + make_params(1)["w"]) / 2)


def test_submit_retry_after_the_close_is_duplicate_not_late() -> None:
    ledger = make_ledger()
    for _ in range(3):
        run_round(ledger, {0: make_params(0)})
    assert ledger.submit(update_of(0, base=2), now=0.0).verdict is Verdict.DUPLICATE
    assert ledger.submit(update_of(0, base=0), now=0.0).verdict is Verdict.DUPLICATE
    assert ledger.submit(update_of(1, base=2), now=0.0).verdict is Verdict.LATE


def test_submit_new_incarnation_is_heard_and_old_one_superseded() -> None:
    roster = make_roster()
    ledger = make_ledger(roster=roster)
    ledger.open([0], now=0.0)
    roster.join(0, 2)
    old = ledger.submit(update_of(0), now=1.0)
    assert old.verdict is Verdict.SUPERSEDED and "replaced by 2" in old.reason
    assert ledger.submit(update_of(0, incarnation=2), now=1.0).verdict is Verdict.ACCEPTED


def test_submit_new_incarnation_on_an_accepted_base_counts_once() -> None:
    roster = make_roster()
    ledger = make_ledger(roster=roster)
    ledger.open([0], now=0.0)
    ledger.submit(update_of(0), now=1.0)
    roster.join(0, 2)
    assert ledger.submit(update_of(0, incarnation=2), now=1.0).verdict is Verdict.DUPLICATE
    assert close(ledger, 1.0).accepted_tokens == 100


def test_submit_worker_that_left_is_superseded() -> None:
    roster = make_roster()
    roster.leave(0, 1)
    receipt = make_ledger(roster=roster).submit(update_of(0), now=0.0)
    assert receipt.verdict is Verdict.SUPERSEDED and "has left" in receipt.reason


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_submit_nonfinite_value_is_refused_and_the_others_averaged(value: float) -> None:
    ledger = make_ledger()
    bad = {"w": torch.tensor([1.0, value, 1.0]), "n": torch.tensor(5)}
    report = run_round(ledger, {0: bad, 1: make_params(1)})
    assert report.counts == {Verdict.NONFINITE: 1, Verdict.ACCEPTED: 1}
    assert same(ledger.master, make_params(1))


def test_submit_fp64_value_that_fp32_cannot_hold_is_nonfinite() -> None:
    params = {"w": torch.tensor([1e39, 0.0, 0.0], dtype=torch.float64), "n": torch.tensor(5)}
    assert make_ledger().submit(update_of(0, params=params), now=0.0).verdict is Verdict.NONFINITE


def test_submit_shape_that_would_broadcast_is_malformed() -> None:
    params = {"w": torch.ones(1), "n": torch.tensor(5)}
    receipt = make_ledger().submit(update_of(0, params=params), now=0.0)
    assert receipt.verdict is Verdict.MALFORMED and "must have shape (3,)" in receipt.reason


def test_submit_base_ahead_of_the_entry_is_malformed() -> None:
    receipt = make_ledger().submit(update_of(0, base=1), now=0.0)
    assert receipt.verdict is Verdict.MALFORMED and "ahead of block0" in receipt.reason


@pytest.mark.parametrize("changes", [{"token": "guess"}, {"run_id": "other"}, {"token": None}])
def test_submit_wrong_run_or_token_is_unauthorised_and_shows_no_secret(changes: dict[str, Any]) -> None:
    ledger = make_ledger()
    receipt = ledger.submit(update_of(0, **changes), now=0.0)
    assert receipt.verdict is Verdict.UNAUTHORISED
    assert "s3cret" not in receipt.reason and "guess" not in receipt.reason
    assert "s3cret" not in repr(ledger.state_dict())


@pytest.mark.parametrize("changes", [{"worker_id": 9}, {"incarnation": 2}])
def test_submit_worker_that_never_joined_is_unauthorised(changes: dict[str, Any]) -> None:
    receipt = make_ledger().submit(update_of(**changes), now=0.0)
    assert receipt.verdict is Verdict.UNAUTHORISED and "has not joined" in receipt.reason


@pytest.mark.parametrize("changes", [{"worker_id": [0]}, {"incarnation": None}, {"base_version": 10**5000}])
def test_submit_header_of_wrong_type_is_malformed_not_an_exception(changes: dict[str, Any]) -> None:
    assert make_ledger().submit(update_of(**{"params": {}, **changes}), now=0.0).verdict is Verdict.MALFORMED


def test_submit_bad_token_is_judged_before_everything_else() -> None:
    assert make_ledger().submit(update_of(7, base=9, token="no", params={}), now=0.0).verdict is Verdict.UNAUTHORISED


def test_submit_accepted_update_is_copied() -> None:
    ledger = make_ledger()
    params = make_params(0)
    ledger.open([0], now=0.0)
    ledger.submit(update_of(0, params=params), now=1.0)
    params["w"].fill_(99.0)
    params["n"].fill_(99)
    close(ledger, 1.0)
    assert same(ledger.master, make_params(0))


def test_submit_good_update_after_a_refused_one_is_accepted() -> None:
    ledger = make_ledger()
    ledger.open([0, 1], now=0.0)
    assert ledger.submit(update_of(0, num_tokens=-1), now=1.0).verdict is Verdict.MALFORMED
    assert ledger.submit(update_of(0), now=2.0).verdict is Verdict.ACCEPTED
    assert close(ledger, 10.0).refused == ()


# Norms


def shifted(ledger: Ledger, distance: float) -> Params:
    return {**ledger.master, "w": ledger.master["w"] + torch.tensor([distance, 0.0, 0.0])}


def test_outlier_thousand_times_the_median_is_refused() -> None:
    ledger = make_ledger(RoundRules(deadline_s=10.0, outlier_factor=10.0))
    for _ in range(OUTLIER_MIN_HISTORY):
        run_round(ledger, {0: shifted(ledger, 1.0)})
    before = ledger.master
    report = run_round(ledger, {0: shifted(ledger, 1000.0)})
    assert report.counts == {Verdict.OUTLIER: 1}
    assert same(ledger.master, before)
    assert run_round(ledger, {0: shifted(ledger, 9.0)}).merged


def test_outlier_without_history_or_after_zero_deltas_refuses_nothing() -> None:
    ledger = make_ledger(RoundRules(deadline_s=10.0, outlier_factor=10.0))
    assert run_round(ledger, {0: shifted(ledger, 1000.0)}).merged
    for _ in range(OUTLIER_WINDOW):
        run_round(ledger, {0: ledger.master})
    assert run_round(ledger, {0: shifted(ledger, 1.0)}).merged


def test_outlier_only_the_last_norms_are_remembered() -> None:
    ledger = make_ledger(RoundRules(deadline_s=10.0, outlier_factor=10.0))
    for _ in range(OUTLIER_WINDOW - 1):
        run_round(ledger, {0: shifted(ledger, 1.0)})
    for _ in range(OUTLIER_WINDOW):
        run_round(ledger, {0: shifted(ledger, 8.0)})
    assert run_round(ledger, {0: shifted(ledger, 70.0)}).merged


def test_clip_long_delta_moves_the_master_by_the_norm() -> None:
    ledger = make_ledger(RoundRules(deadline_s=10.0, clip_norm=0.5))
    report = run_round(ledger, {0: shifted(ledger, 4.0)})
    assert report.mean_delta_norm == pytest.approx(4.0)
    assert report.merged_delta_norm == pytest.approx(0.5)
    assert ledger.master["w"][0].item() == pytest.approx(0.6)


def test_report_norms_are_those_of_the_deltas() -> None:
    ledger = make_ledger()
    report = run_round(ledger, {0: shifted(ledger, 3.0), 1: shifted(ledger, -1.0)})
    assert report.mean_delta_norm == pytest.approx(2.0)
    assert report.merged_delta_norm == pytest.approx(1.0)


# Merge rules in a round


def test_trimmed_mean_with_two_expected_is_refused_at_the_first_open() -> None:
    ledger = make_ledger(RoundRules(deadline_s=10.0, merge="trimmed_mean"))
    with pytest.raises(ValueError, match="needs 3 replicas; got num_replicas=2"):
        ledger.open([0, 1], now=0.0)


def test_trimmed_mean_with_two_accepted_merges_nothing_and_says_so() -> None:
    ledger = make_ledger(RoundRules(deadline_s=10.0, merge="trimmed_mean"))
    ledger.open([0, 1, 2], now=0.0)
    for worker_id in (0, 1):
        ledger.submit(update_of(worker_id), now=1.0)
    report = close(ledger, 10.0)
    assert (report.accepted, report.merged, report.accepted_tokens, report.version) == ((0, 1), False, 0, 1)
    assert report.note == "nothing merged: 2 accepted, 3 needed"
    assert same(ledger.master, make_master())
    ledger.open([0, 1], now=10.0)
    assert close(ledger, 20.0).merged is False


def test_min_replicas_not_reached_merges_nothing() -> None:
    ledger = make_ledger(RoundRules(deadline_s=10.0, min_replicas=2))
    ledger.open([0, 1], now=0.0)
    ledger.submit(update_of(0), now=1.0)
    assert close(ledger, 10.0).merged is False
    assert same(ledger.master, make_master())


def test_outer_momentum_carries_over_rounds_like_torch_sgd() -> None:
    ledger = make_ledger(outer=OuterSGD(lr=0.7, momentum=0.9, nesterov=True))
    oracle = torch.nn.Parameter(make_master()["w"])
    reference = torch.optim.SGD([oracle], lr=0.7, momentum=0.9, nesterov=True, foreach=False)
    for seed in range(4):
        oracle.grad = oracle.detach() - make_params(seed)["w"]
        reference.step()
        run_round(ledger, {0: make_params(seed)})
    assert torch.equal(ledger.master["w"], oracle.detach())


def test_merge_that_overflows_keeps_the_finite_master() -> None:
    ledger = make_ledger()
    huge = {"w": torch.full((3,), 3e38), "n": torch.tensor(5)}
    report = run_round(ledger, {0: huge, 1: huge})
    assert (report.merged, report.note) == (False, "nothing merged: the merged tensors overflow fp32")
    assert same(ledger.master, make_master())


def test_ledger_bf16_update_is_merged_in_fp32() -> None:
    ledger = make_ledger()
    params = {"w": torch.tensor([1.5, -2.25, 3.0], dtype=torch.bfloat16), "n": torch.tensor(5)}
    run_round(ledger, {0: params})
    assert ledger.master["w"].dtype == torch.float32
    assert ledger.master["w"].tolist() == [1.5, -2.25, 3.0]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [(torch.zeros(2, dtype=torch.complex64), "dense floating"), (torch.tensor([math.nan]), "must be finite")],
)
def test_ledger_unusable_master_is_refused(tensor: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ledger("block0", {"w": tensor}, RULES, OuterSGD(), make_roster())


# State


def through_disk(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def test_state_restart_in_mid_round_equals_the_uninterrupted_run() -> None:
    options: dict[str, Any] = {"outer": OuterSGD(lr=0.7, momentum=0.9, nesterov=True)}
    plain, resumed = make_ledger(**options), make_ledger(**options)
    for ledger in (plain, resumed):
        run_round(ledger, {0: make_params(10), 1: make_params(11)})
        ledger.open([0, 1], now=50.0)
        ledger.submit(update_of(0, base=1), now=51.0)
    state = through_disk(resumed.state_dict())
    resumed = make_ledger(**options)
    resumed.load_state_dict(state)
    assert not resumed.is_open
    resumed.open([0, 1], now=0.0)
    assert resumed.submit(update_of(0, base=1), now=1.0).verdict is Verdict.DUPLICATE
    for ledger, now in ((plain, 52.0), (resumed, 2.0)):
        ledger.submit(update_of(1, base=1), now)
        assert close(ledger, now).accepted == (0, 1)
        run_round(ledger, {0: make_params(12)}, now)
    assert same(plain.master, resumed.master)
    assert plain.version == resumed.version == 3


def test_store_receives_the_state_after_every_close() -> None:
    stored: list[tuple[str, dict[str, Any]]] = []
    ledger = make_ledger(store=lambda entry, state: stored.append((entry, state)))
    run_round(ledger, {0: make_params(0)})
    ledger.open([0], now=0.0)
    assert len(stored) == 1
    close(ledger, 10.0)
    assert [(entry, state["version"]) for entry, state in stored] == [("block0", 1), ("block0", 2)]
    restarted = make_ledger()
    restarted.load_state_dict(stored[0][1])
    assert same(restarted.master, make_params(0))


def test_state_kept_from_an_earlier_round_is_not_changed_by_later_ones() -> None:
    ledger = make_ledger(outer=OuterSGD(momentum=0.9))
    run_round(ledger, {0: make_params(0)})
    state = ledger.state_dict()
    kept = through_disk(state)
    run_round(ledger, {0: make_params(1)})
    assert same(state["master"], kept["master"]) and same(state["buffers"], kept["buffers"])


def test_state_of_another_entry_is_refused() -> None:
    other = Ledger("block1", make_master(), RULES, OuterSGD(), make_roster())
    with pytest.raises(CheckpointMismatchError, match="stored entry=block1, this entry=block0"):
        make_ledger().load_state_dict(other.state_dict())


def test_state_of_other_shapes_is_refused_by_name_and_changes_nothing() -> None:
    ledger = make_ledger()
    other = Ledger("block0", {"w": torch.zeros(4), "n": torch.tensor(0)}, RULES, OuterSGD(), make_roster())
    run_state = other.state_dict() | {"version": 5}
    with pytest.raises(CheckpointMismatchError, match=r"w stored=\(4,\) torch.float32 here=\(3,\) torch.float32"):
        ledger.load_state_dict(run_state)
    assert ledger.version == 0 and same(ledger.master, make_master())


def test_accepted_names_the_workers_of_the_open_round_and_starts_empty_after_it() -> None:
    ledger = make_ledger()
    ledger.submit(update_of(2), now=0.0)
    ledger.submit(update_of(1, params={**make_params(1), "w": torch.tensor([math.nan, 0.0, 0.0])}), now=0.0)
    ledger.open([0, 2], now=0.0)
    ledger.submit(update_of(0), now=0.0)
    assert ledger.accepted == (0, 2)
    close(ledger, 0.0)
    assert ledger.accepted == ()


def test_submit_keeps_owned_tensors_and_copies_others() -> None:
    for owned, kept in ((True, True), (False, False)):
        ledger = make_ledger()
        params = make_params(0)
        ledger.open([0], now=0.0)
        ledger.submit(update_of(0, params=params, owned=owned), now=0.0)
        close(ledger, 0.0)
        assert (ledger.master["w"].data_ptr() == params["w"].data_ptr()) is kept
